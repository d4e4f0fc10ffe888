"""Goal: a file that is missing, short, empty, zeroed, not a file, or not ours costs at most what it held, and never in silence.

Method: a stopped shard with one of every kind of file (tests/support/damage.py). One file is harmed, or one is added;
the shard is started twice, everything is read back, and what became of it is compared with the row.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.damage import ANNOUNCED, CUT, GAP, SERVED, UNREADABLE, Shelf
from tests.support.engine_harness import META_DIR, WAL_DIR, file_bytes, lose, overwrite
from tests.support.faults import fault

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
REBUILT = "the index is made again from the records; everything is served"


def gone(kind: str) -> tuple[str, str]:
    """What the loss of a whole file means."""
    if kind in HARMLESS:
        return SERVED, HARMLESS[kind]
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


def emptied(kind: str) -> tuple[str, str]:
    return (SERVED, REBUILT) if ".sum" in kind else gone(kind)


@pytest.mark.parametrize(("kind", "expected"), cases("{} is empty", emptied))
def test_empty_file(kind: str, expected: str) -> None:
    shelf = Shelf()
    shelf.cut(path_of(shelf, kind), 0)
    assert shelf.outcome() == expected


def cut_short(kind: str) -> tuple[str, str]:
    if kind == "the active log file":
        return (
            CUT,
            "what is cut off is not there, and the recovery report says where; what lies before is served",
        )
    return emptied(kind)


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


def zeroed(kind: str) -> tuple[str, str]:
    return (SERVED, REBUILT) if any(part in kind for part in (".idx", ".dict", ".sum")) else gone(kind)


@pytest.mark.parametrize(("kind", "expected"), cases("{} is full of zeros", zeroed))
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


# ---- files that nobody expects

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
    overwrite(shelf.disk, path, FOREIGN)
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
    """Whole and sealed, with the same seqs: only the link that the snapshot knows can tell."""
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
