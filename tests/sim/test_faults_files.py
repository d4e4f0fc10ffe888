"""Goal: a file that is missing, short, empty, zeroed, not a file, or foreign costs at most its contents, and never
without a tombstone.

Method: a stopped shard with one file of every kind (tests/support/damage.py). One file is damaged or added; the shard
is started twice, everything is read back, and the result is compared with the row.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.damage import (
    ANNOUNCED,
    CUT,
    GAP,
    LAST,
    READ_ONLY,
    SERVED,
    UNREADABLE,
    Shelf,
)
from tests.support.engine_harness import META_DIR, WAL_DIR, file_bytes, lose, overwrite
from tests.support.faults import fault
from topics.engine.storage.wal import FILE_HEADER, file_header

# Name, place in the catalogue, which file.
KINDS: dict[str, tuple[str, Callable[[Shelf], str]]] = {
    "the active log file": ("log file", Shelf.log_file),
    "the spare log file": ("log file", lambda shelf: shelf.spare()),
    "the newest snapshot": ("snapshot", Shelf.snapshot),
    "the older snapshot": ("snapshot", lambda shelf: shelf.snapshot(1)),
    "the .data of a sealed segment": ("segment", lambda shelf: shelf.segment(5, "data")),
    "the .idx of a sealed segment": ("index", lambda shelf: shelf.segment(5, "idx")),
    "the .dict of a sealed segment": ("index", lambda shelf: shelf.segment(5, "dict")),
    "the .sum of a sealed segment": ("segment", lambda shelf: shelf.segment(5, "sum")),
    "the .del of a sealed segment": ("segment", lambda shelf: shelf.segment(1, "del")),
    "the .data of an open segment": ("segment", lambda shelf: shelf.segment(9, "data")),
    "the .idx of an open segment": ("index", lambda shelf: shelf.segment(9, "idx")),
    "the .dict of an open segment": ("index", lambda shelf: shelf.segment(9, "dict")),
}
HARMLESS = {
    "the spare log file": "it is replaced; everything is served",
    "the newest snapshot": "the older snapshot and the log give the same state; everything is served",
    "the older snapshot": "everything is served",
}
LOG_GONE = "the start is refused: entries of the log are missing; nothing is changed"
LOST = "the segment's records are announced as lost (corrupt); all others are served"
SHORT_LOG = "the shard starts read-only and names the place; what lies before it is served"
REBUILT = "the index is made again from the records; everything is served"


def gone(kind: str) -> tuple[str, str]:
    """The outcome when a whole file is lost."""
    if kind in HARMLESS:
        return SERVED, HARMLESS[kind]
    if any(part in kind for part in (".idx", ".dict", ".sum")):
        return SERVED, REBUILT
    return (GAP, LOG_GONE) if kind == "the active log file" else (ANNOUNCED, LOST)


def cases(what: str, expect: Callable[[str], tuple[str, str]], without: tuple[str, ...] = ()) -> list[object]:
    return [
        pytest.param(
            kind,
            expect(kind)[0],
            id=kind.removeprefix("the ").replace(" ", "-"),
            marks=fault(where, what.format(kind), expect(kind)[1]),
        )
        for kind, (where, _) in KINDS.items()
        if kind not in without
    ]


def path_of(shelf: Shelf, kind: str) -> str:
    return KINDS[kind][1](shelf)


@pytest.mark.parametrize(("kind", "expected"), cases("{} is missing", gone))
def test_missing_file(kind: str, expected: str) -> None:
    shelf = Shelf()
    lose(shelf.disk, path_of(shelf, kind))
    assert shelf.outcome() == expected


@pytest.mark.parametrize(("kind", "expected"), cases("{} is empty", gone))
def test_empty_file(kind: str, expected: str) -> None:
    shelf = Shelf()
    shelf.cut(path_of(shelf, kind), 0)
    assert shelf.outcome() == expected


def cut_short(kind: str) -> tuple[str, str]:
    if kind == "the active log file":
        return READ_ONLY, SHORT_LOG
    return gone(kind)


@pytest.mark.parametrize(("kind", "expected"), cases("{} is cut short", cut_short))
@pytest.mark.parametrize("share", [3, 5, 8])
def test_short_file(kind: str, expected: str, share: int) -> None:
    shelf = Shelf()
    path = path_of(shelf, kind)
    length = len(file_bytes(shelf.disk, path)) * share // 9
    if kind == "the active log file":
        length = shelf.envelope_of(14)[1] + 7 * share  # in an entry's header and in its body
    elif ".del" in kind:
        length = 2 * share - 1  # in its header
    shelf.cut(path, length)
    assert shelf.outcome() == expected


@fault("log file", "a log file ends exactly between two entries", SHORT_LOG)
@pytest.mark.parametrize("seq", [12, LAST])
def test_log_file_that_ends_exactly_between_two_entries(seq: int) -> None:
    shelf = Shelf()
    path, start, _ = shelf.envelope_of(seq)
    shelf.cut(path, start)
    assert shelf.outcome() == READ_ONLY
    assert shelf.seen[0] == [row for row in shelf.written.items() if row[0] < seq]
    assert shelf.h is not None
    assert path in str(shelf.h.engine.shard.state.read_only)


@fault(
    "log file",
    "a log file of a version that did not write down its length is cut short",
    "what is cut off is not there, and the recovery report says where; what lies before is served",
)
def test_short_log_file_that_does_not_know_its_length() -> None:
    shelf = Shelf()
    path, start, _ = shelf.envelope_of(14)
    _, _, shard, number, salt, _ = FILE_HEADER.unpack_from(file_bytes(shelf.disk, path))
    shelf.change(path, 0, file_header(shard=shard, number=number, salt=salt))
    shelf.cut(path, start + 21)
    assert shelf.outcome() == CUT


@fault("log file", "a log file is cut off behind its header, with older log files still there", SHORT_LOG)
@pytest.mark.parametrize("length", [20, 64, 100])
def test_log_file_that_lost_every_entry(length: int) -> None:
    """Only the contents of the newest file are gone, and no number is missing between the entries that are left."""
    shelf = Shelf()
    h = shelf.open()  # begins a file of its own
    h.append("t", b"17")
    h.kill()
    path = shelf.log_file()
    shelf.cut(path, length)
    h = shelf.open()
    assert path in str(h.engine.shard.state.read_only)
    assert 17 not in dict(h.rows("t"))


@fault(
    "log file",
    "a log file is full of noise, and no entry of the log is missed",
    "it is put into lost+found; everything is served",
)
def test_log_file_of_noise() -> None:
    shelf = Shelf()
    noise = bytes(range(1, 251)) * 5
    overwrite(shelf.disk, f"{WAL_DIR}/wal-{98:016d}.log", noise)
    assert shelf.outcome() == SERVED
    assert file_bytes(shelf.disk, f"lost+found/shard-00-wal-{98:016d}.log") == noise


@fault("log file", "the active log file is full of noise", LOG_GONE)
def test_active_log_file_of_noise() -> None:
    shelf = Shelf()
    path = shelf.log_file()
    noise = bytes(range(1, 251)) * 5
    overwrite(shelf.disk, path, noise)
    assert shelf.outcome() == GAP
    assert file_bytes(shelf.disk, path) == noise


@pytest.mark.parametrize(("kind", "expected"), cases("{} is full of zeros", gone))
def test_zeroed_file(kind: str, expected: str) -> None:
    shelf = Shelf()
    path = path_of(shelf, kind)
    shelf.change(path, 0, bytes(len(file_bytes(shelf.disk, path))))
    assert shelf.outcome() == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    cases(
        "a directory stands in place of {}",
        lambda kind: (UNREADABLE, "the start is refused with the disk's error; nothing is changed"),
    ),
)
def test_directory_in_place_of_a_file(kind: str, expected: str) -> None:
    shelf = Shelf()
    shelf.replace_by_directory(path_of(shelf, kind))
    before = [path for path in shelf.disk.paths() if path != shelf.spare()]
    assert shelf.outcome() == expected
    assert set(before) <= set(shelf.disk.paths())


# ---- unexpected files

FOREIGN = b"somebody else's words"
LEFT_ALONE = "it is left alone; everything is served"
REMOVED = "it is removed; everything is served"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=fault("data directory", f"a foreign file {where}", LEFT_ALONE))
        for where, path in {
            "at the top of the data directory": "notes.txt",
            "beside the log files": f"{WAL_DIR}/notes.txt",
            "beside the log files, named almost like one": f"{WAL_DIR}/wal-1.log.bak",
            "beside the snapshots": f"{META_DIR}/notes.txt",
            "beside the snapshots, named almost like one": f"{META_DIR}/snap-1",
            "among the topics": "topics/notes.txt",
        }.items()
    ],
)
def test_foreign_file(path: str) -> None:
    shelf = Shelf()
    overwrite(shelf.disk, path, FOREIGN)
    assert shelf.outcome() == SERVED
    assert file_bytes(shelf.disk, path) == FOREIGN


@fault(
    "data directory",
    "a foreign file among a topic's segments",
    "it is put into lost+found; everything is served",
)
def test_foreign_file_among_segments() -> None:
    shelf = Shelf()
    overwrite(shelf.disk, f"{shelf.topic_dir}/notes.txt", FOREIGN)
    assert shelf.outcome() == SERVED
    (kept,) = (path for path in shelf.disk.paths() if path.startswith("lost+found/"))
    assert file_bytes(shelf.disk, kept) == FOREIGN


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=fault(where, what, REMOVED))
        for where, what, path in [
            ("snapshot", "a half-written snapshot is left behind", f"{META_DIR}/snap-{9:016x}.tmp"),
            (
                "data directory",
                "a half-written erase intent is left behind",
                f"{META_DIR}/intent-{9:016x}.tmp",
            ),
            ("log file", "a log file whose header was never finished", f"{WAL_DIR}/wal-{99:016d}.log"),
        ]
    ],
)
def test_leftover(path: str) -> None:
    shelf = Shelf()
    overwrite(shelf.disk, path, bytes(4096) if "wal-" in path else FOREIGN)
    assert shelf.outcome() == SERVED
    assert path not in shelf.disk.paths()


@fault("segment", "a half-written .del is left behind", REMOVED)
def test_leftover_among_segments() -> None:
    shelf = Shelf()
    path = shelf.segment(5, "del") + ".tmp"
    overwrite(shelf.disk, path, FOREIGN)
    assert shelf.outcome() == SERVED
    assert path not in shelf.disk.paths()


@pytest.mark.parametrize(
    ("first_seq", "generation"),
    [
        pytest.param(5, 7, marks=fault("segment", "a segment is there twice, in two generations", REMOVED)),
        pytest.param(
            40, 0, marks=fault("segment", "a segment of seqs that were never written is left behind", REMOVED)
        ),
    ],
    ids=["duplicate", "beyond the head"],
)
def test_segment_that_no_snapshot_names(first_seq: int, generation: int) -> None:
    shelf = Shelf()
    for suffix in ("data", "idx", "dict", "sum"):
        path = f"{shelf.topic_dir}/seg-{first_seq:016x}-{generation}.{suffix}"
        overwrite(shelf.disk, path, file_bytes(shelf.disk, shelf.segment(5, suffix)))
    assert shelf.outcome() == SERVED
    assert not [path for path in shelf.disk.paths() if f"seg-{first_seq:016x}-{generation}" in path]


@fault("segment", "the segments of two topics are swapped", LOST)
def test_segments_of_another_topic() -> None:
    """Intact and sealed, with the same seqs: only the link stored in the snapshot can tell."""
    shelf = Shelf()
    for suffix in ("data", "idx", "sum"):
        other = file_bytes(shelf.disk, shelf.segment(1, suffix, topic="u"))
        overwrite(shelf.disk, shelf.segment(1, suffix), other)
    assert shelf.outcome() == ANNOUNCED
    assert shelf.seen[1] == [(1, 4, "corrupt")]


@fault("segment", "the .sum of another segment stands in place of a segment's own", REBUILT)
def test_sum_of_another_segment() -> None:
    shelf = Shelf()
    overwrite(shelf.disk, shelf.segment(5, "sum"), file_bytes(shelf.disk, shelf.segment(1, "sum")))
    assert shelf.outcome() == SERVED
