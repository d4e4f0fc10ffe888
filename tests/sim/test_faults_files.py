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
    ShardFiles,
)
from tests.support.engine_harness import META_DIR, WAL_DIR, file_bytes, lose, overwrite
from tests.support.faults import fault
from topics.engine.storage.wal import FILE_HEADER, file_header

# Name, place in the catalogue, which file.
KINDS: dict[str, tuple[str, Callable[[ShardFiles], str]]] = {
    "the active log file": ("log file", ShardFiles.log_file),
    "the spare log file": ("log file", lambda shard_files: shard_files.spare()),
    "the newest snapshot": ("snapshot", ShardFiles.snapshot),
    "the older snapshot": ("snapshot", lambda shard_files: shard_files.snapshot(1)),
    "the .data of a sealed segment": ("segment", lambda shard_files: shard_files.segment(5, "data")),
    "the .idx of a sealed segment": ("index", lambda shard_files: shard_files.segment(5, "idx")),
    "the .dict of a sealed segment": ("index", lambda shard_files: shard_files.segment(5, "dict")),
    "the .sum of a sealed segment": ("segment", lambda shard_files: shard_files.segment(5, "sum")),
    "the .del of a sealed segment": ("segment", lambda shard_files: shard_files.segment(1, "del")),
    "the .data of an open segment": ("segment", lambda shard_files: shard_files.segment(9, "data")),
    "the .idx of an open segment": ("index", lambda shard_files: shard_files.segment(9, "idx")),
    "the .dict of an open segment": ("index", lambda shard_files: shard_files.segment(9, "dict")),
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


def path_of(shard_files: ShardFiles, kind: str) -> str:
    return KINDS[kind][1](shard_files)


@pytest.mark.parametrize(("kind", "expected"), cases("{} is missing", gone))
def test_missing_file(kind: str, expected: str) -> None:
    shard_files = ShardFiles()
    lose(shard_files.disk, path_of(shard_files, kind))
    assert shard_files.outcome() == expected


@pytest.mark.parametrize(("kind", "expected"), cases("{} is empty", gone))
def test_empty_file(kind: str, expected: str) -> None:
    shard_files = ShardFiles()
    shard_files.cut(path_of(shard_files, kind), 0)
    assert shard_files.outcome() == expected


def cut_short(kind: str) -> tuple[str, str]:
    if kind == "the active log file":
        return READ_ONLY, SHORT_LOG
    return gone(kind)


@pytest.mark.parametrize(("kind", "expected"), cases("{} is cut short", cut_short))
@pytest.mark.parametrize("share", [3, 5, 8])
def test_short_file(kind: str, expected: str, share: int) -> None:
    shard_files = ShardFiles()
    path = path_of(shard_files, kind)
    length = len(file_bytes(shard_files.disk, path)) * share // 9
    if kind == "the active log file":
        length = shard_files.envelope_of(14)[1] + 7 * share  # in an entry's header and in its body
    elif ".del" in kind:
        length = 2 * share - 1  # in its header
    shard_files.cut(path, length)
    assert shard_files.outcome() == expected


@fault("log file", "a log file ends exactly between two entries", SHORT_LOG)
@pytest.mark.parametrize("seq", [12, LAST])
def test_log_file_that_ends_exactly_between_two_entries(seq: int) -> None:
    shard_files = ShardFiles()
    path, start, _ = shard_files.envelope_of(seq)
    shard_files.cut(path, start)
    assert shard_files.outcome() == READ_ONLY
    assert shard_files.seen[0] == [row for row in shard_files.written.items() if row[0] < seq]
    assert shard_files.h is not None
    assert path in str(shard_files.h.engine.shard.state.read_only)


@fault(
    "log file",
    "a log file of a version that did not write down its length is cut short",
    "what is cut off is not there, and the recovery report says where; what lies before is served",
)
def test_short_log_file_that_does_not_know_its_length() -> None:
    shard_files = ShardFiles()
    path, start, _ = shard_files.envelope_of(14)
    _, _, shard, number, salt, _ = FILE_HEADER.unpack_from(file_bytes(shard_files.disk, path))
    shard_files.change(path, 0, file_header(shard=shard, number=number, salt=salt))
    shard_files.cut(path, start + 21)
    assert shard_files.outcome() == CUT


@fault("log file", "a log file is cut off behind its header, with older log files still there", SHORT_LOG)
@pytest.mark.parametrize("length", [20, 64, 100])
def test_log_file_that_lost_every_entry(length: int) -> None:
    """Only the contents of the newest file are gone, and no number is missing between the entries that are left."""
    shard_files = ShardFiles()
    h = shard_files.open()  # begins a file of its own
    h.append("t", b"17")
    h.kill()
    path = shard_files.log_file()
    shard_files.cut(path, length)
    h = shard_files.open()
    assert path in str(h.engine.shard.state.read_only)
    assert 17 not in dict(h.rows("t"))


@fault(
    "log file",
    "a log file is full of noise, and no entry of the log is missed",
    "it is put into lost+found; everything is served",
)
def test_log_file_of_noise() -> None:
    shard_files = ShardFiles()
    noise = bytes(range(1, 251)) * 5
    overwrite(shard_files.disk, f"{WAL_DIR}/wal-{98:016d}.log", noise)
    assert shard_files.outcome() == SERVED
    assert file_bytes(shard_files.disk, f"lost+found/shard-00-wal-{98:016d}.log") == noise


@fault("log file", "the active log file is full of noise", LOG_GONE)
def test_active_log_file_of_noise() -> None:
    shard_files = ShardFiles()
    path = shard_files.log_file()
    noise = bytes(range(1, 251)) * 5
    overwrite(shard_files.disk, path, noise)
    assert shard_files.outcome() == GAP
    assert file_bytes(shard_files.disk, path) == noise


@pytest.mark.parametrize(("kind", "expected"), cases("{} is full of zeros", gone))
def test_zeroed_file(kind: str, expected: str) -> None:
    shard_files = ShardFiles()
    path = path_of(shard_files, kind)
    shard_files.change(path, 0, bytes(len(file_bytes(shard_files.disk, path))))
    assert shard_files.outcome() == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    cases(
        "a directory stands in place of {}",
        lambda kind: (UNREADABLE, "the start is refused with the disk's error; nothing is changed"),
    ),
)
def test_directory_in_place_of_a_file(kind: str, expected: str) -> None:
    shard_files = ShardFiles()
    shard_files.replace_by_directory(path_of(shard_files, kind))
    before = [path for path in shard_files.disk.paths() if path != shard_files.spare()]
    assert shard_files.outcome() == expected
    assert set(before) <= set(shard_files.disk.paths())


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
    shard_files = ShardFiles()
    overwrite(shard_files.disk, path, FOREIGN)
    assert shard_files.outcome() == SERVED
    assert file_bytes(shard_files.disk, path) == FOREIGN


@fault(
    "data directory",
    "a foreign file among a topic's segments",
    "it is put into lost+found; everything is served",
)
def test_foreign_file_among_segments() -> None:
    shard_files = ShardFiles()
    overwrite(shard_files.disk, f"{shard_files.topic_dir}/notes.txt", FOREIGN)
    assert shard_files.outcome() == SERVED
    (kept,) = (path for path in shard_files.disk.paths() if path.startswith("lost+found/"))
    assert file_bytes(shard_files.disk, kept) == FOREIGN


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
    shard_files = ShardFiles()
    overwrite(shard_files.disk, path, bytes(4096) if "wal-" in path else FOREIGN)
    assert shard_files.outcome() == SERVED
    assert path not in shard_files.disk.paths()


@fault("segment", "a half-written .del is left behind", REMOVED)
def test_leftover_among_segments() -> None:
    shard_files = ShardFiles()
    path = shard_files.segment(5, "del") + ".tmp"
    overwrite(shard_files.disk, path, FOREIGN)
    assert shard_files.outcome() == SERVED
    assert path not in shard_files.disk.paths()


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
    shard_files = ShardFiles()
    for suffix in ("data", "idx", "dict", "sum"):
        path = f"{shard_files.topic_dir}/seg-{first_seq:016x}-{generation}.{suffix}"
        overwrite(shard_files.disk, path, file_bytes(shard_files.disk, shard_files.segment(5, suffix)))
    assert shard_files.outcome() == SERVED
    assert not [path for path in shard_files.disk.paths() if f"seg-{first_seq:016x}-{generation}" in path]


@fault("segment", "the segments of two topics are swapped", LOST)
def test_segments_of_another_topic() -> None:
    """Intact and sealed, with the same seqs: only the link stored in the snapshot can tell."""
    shard_files = ShardFiles()
    for suffix in ("data", "idx", "sum"):
        other = file_bytes(shard_files.disk, shard_files.segment(1, suffix, topic="u"))
        overwrite(shard_files.disk, shard_files.segment(1, suffix), other)
    assert shard_files.outcome() == ANNOUNCED
    assert shard_files.seen[1] == [(1, 4, "corrupt")]


@fault("segment", "the .sum of another segment stands in place of a segment's own", REBUILT)
def test_sum_of_another_segment() -> None:
    shard_files = ShardFiles()
    overwrite(
        shard_files.disk,
        shard_files.segment(5, "sum"),
        file_bytes(shard_files.disk, shard_files.segment(1, "sum")),
    )
    assert shard_files.outcome() == SERVED
