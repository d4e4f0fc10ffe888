"""Goal: whichever field of whichever file is damaged, no record is served changed, and none is lost without a
tombstone.

Method: a stopped shard with one file of every kind (tests/support/damage.py). One field at a time is overwritten, the
shard is started twice, everything is read back, and the result is compared with the row. The offsets are literals
here and not taken from the engine, so that a moved field is noticed.
"""

from __future__ import annotations

import pytest

from tests.support.damage import (
    ANNOUNCED,
    CUT,
    READ_ONLY,
    REFUSED,
    SERVED,
    UNSUPPORTED,
    ShardFiles,
)
from tests.support.engine_harness import META_DIR, file_bytes, numbered, overwrite
from tests.support.faults import fault
from tests.support.length import pick, turn
from topics.api.errors import Corrupt, UnsupportedFormat
from topics.engine.storage.intents import write_intent

Field = tuple[str, int, int]  # name, offset, length

LOG_HEADER: list[Field] = [
    ("magic", 0, 8),
    ("version", 8, 4),
    ("shard", 12, 4),
    ("number", 16, 8),
    ("salt", 24, 8),
    ("reserved bytes", 32, 24),
    ("digest", 56, 8),
]
ENVELOPE: list[Field] = [
    ("magic", 0, 4),
    ("length", 4, 4),
    ("salt", 8, 8),
    ("number", 16, 8),
    ("number of the entry before", 24, 8),
    ("number of the last synced entry", 32, 8),
    ("digest", 40, 8),
]
FRAME: list[Field] = [
    ("length", 0, 4),
    ("type", 4, 1),
    ("flags", 5, 1),
    ("topic", 6, 8),
    ("seq", 14, 8),
    ("time", 22, 8),
    ("node length", 30, 2),
    ("tag length", 32, 2),
    ("payload length", 34, 4),
    ("payload", 38, 10),
    ("digest", -8, 8),
]
HEADER: list[Field] = [("magic", 0, 8), ("version", 8, 4), ("reserved bytes", 12, 4)]
ROW: list[Field] = [
    ("offset", 0, 4),
    ("length", 4, 4),
    ("time", 8, 8),
    ("flags", 16, 1),
    ("padding", 17, 3),
    ("tag", 20, 4),
    ("node", 24, 4),
    ("size", 28, 4),
]

SEEN = {
    SERVED: "everything is served",
    ANNOUNCED: "the record is announced as lost (corrupt); the others are served",
    READ_ONLY: "the shard starts read-only and names the place; what lies before it is served",
    CUT: "it cannot be told from a torn write: it is cut, and the recovery report says where",
    REFUSED: "the start is refused and names the file; nothing is changed",
    UNSUPPORTED: "refused by name as a file of another version; nothing is changed",
}


def rot(shard_files: ShardFiles, path: str, offset: int, length: int) -> None:
    """Invert every bit of these bytes."""
    old = file_bytes(shard_files.disk, path)[offset : offset + length]
    assert len(old) == length, f"{path} has no byte {offset + length}"
    shard_files.change(path, offset, bytes(byte ^ 0xFF for byte in old))


def cases(where: str, what: str, fields: list[Field], expected: str, seen: str = "") -> list[object]:
    return [
        pytest.param(
            offset,
            length,
            expected,
            id=name.replace(" ", "-"),
            marks=fault(
                where,
                what.format(name),
                seen or SEEN[expected],
            ),
        )
        for name, offset, length in fields
    ]


# ---- the log


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    cases("log file", "corruption in the {} in the header of a used log file", LOG_HEADER, REFUSED),
)
def test_header_of_a_log_file(offset: int, length: int, expected: str) -> None:
    shard_files = ShardFiles()
    path = shard_files.log_file()
    rot(shard_files, path, offset, length)
    before = file_bytes(shard_files.disk, path)
    assert shard_files.outcome() == expected
    assert file_bytes(shard_files.disk, path) == before


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    cases("log file", "corruption in the {} of an entry, with synced entries after it", ENVELOPE, READ_ONLY),
)
def test_entry_in_the_middle_of_the_log(offset: int, length: int, expected: str) -> None:
    shard_files = ShardFiles()
    path, start, _ = shard_files.envelope_of(13)
    rot(shard_files, path, start + offset, length)
    assert shard_files.outcome() == expected
    assert shard_files.seen == ([row for row in shard_files.written.items() if row[0] < 13], [])
    assert shard_files.h is not None
    assert path in str(shard_files.h.engine.shard.state.read_only)


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    cases("log file", "corruption in the {} of the very last entry of the log", ENVELOPE, CUT),
)
def test_last_entry_of_the_log(offset: int, length: int, expected: str) -> None:
    """No later entry shows that it was synced. A power cut in the middle of the write leaves the same bytes."""
    shard_files = ShardFiles()
    path, start, _ = shard_files.envelope_of(16)
    rot(shard_files, path, start + offset, length)
    assert shard_files.outcome() == expected
    assert shard_files.seen == ([row for row in shard_files.written.items() if row[0] < 16], [])


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    cases("log file", "corruption in the {} of a record in the log", FRAME, READ_ONLY),
)
def test_record_in_the_log(offset: int, length: int, expected: str) -> None:
    shard_files = ShardFiles()
    path, _, envelope = shard_files.envelope_of(13)
    rot(shard_files, path, offset + (envelope.start if offset >= 0 else envelope.end), length)
    assert shard_files.outcome() == expected


@fault("log file", "any byte of an entry that two snapshots contain is corrupted", SEEN[SERVED])
@pytest.mark.parametrize("step", range(5))
def test_entries_that_snapshots_contain(step: int) -> None:
    shard_files = ShardFiles()
    path = shard_files.log_file()
    _, end, _ = shard_files.envelope_of(11)
    some = pick(short=226, long=5)
    for offset in range(64 + step * 8 + pick(short=turn(some), long=0), end, some):
        shard_files = ShardFiles()
        rot(shard_files, path, offset, 1)
        assert shard_files.outcome() == SERVED, offset


# ---- snapshots


def snapshot_fields() -> list[Field]:
    """Header, then length and row for the shard, the topics and the end, then the digest."""
    shard_files = ShardFiles()
    data = file_bytes(shard_files.disk, shard_files.snapshot())
    names = ["the shard's row", "the first topic's row", "the second topic's row", "the closing row"]
    fields = [(f"the header's {name}", at, size) for name, at, size in HEADER]
    at = 16
    for name in names:
        size = int.from_bytes(data[at : at + 4], "little")
        fields += [(f"the length of {name}", at, 4), (name, at + 4, size)]
        at += 4 + size
    assert at == len(data) - 8, "the snapshot has other rows"
    return [*fields, ("the digest", at, 8)]


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    cases(
        "snapshot",
        "corruption in {} of the newest snapshot",
        snapshot_fields(),
        SERVED,
        "the older snapshot and the log give the same state; everything is served",
    ),
)
def test_newest_snapshot(offset: int, length: int, expected: str) -> None:
    shard_files = ShardFiles()
    path = shard_files.snapshot()
    rot(shard_files, path, offset, length)
    assert shard_files.outcome() == expected
    assert shard_files.h is not None
    assert len(shard_files.h.engine.report.skipped_snapshots) == 1, "the damaged snapshot was not skipped"


@fault("snapshot", "any byte of the older snapshot is corrupted", SEEN[SERVED])
def test_older_snapshot() -> None:
    size = len(file_bytes(ShardFiles().disk, ShardFiles().snapshot(1)))
    for offset in [*range(8), *range(12, size, 17)]:
        shard_files = ShardFiles()
        rot(shard_files, shard_files.snapshot(1), offset, 1)
        assert shard_files.outcome() == SERVED, offset


@fault(
    "snapshot",
    "both snapshots are corrupted while the log still reaches back to the beginning",
    "the log is replayed from its beginning; everything is served",
)
def test_both_snapshots() -> None:
    shard_files = ShardFiles()
    for age in (0, 1):
        rot(shard_files, shard_files.snapshot(age), 60, 4)
    assert shard_files.outcome() == SERVED


# ---- segments


def frame_at(shard_files: ShardFiles, path: str, seq: int) -> tuple[int, int]:
    """Where the record's frame begins and ends in a .data file."""
    data = file_bytes(shard_files.disk, path)
    at = 16
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if numbered(seq, 1)[0] in data[at:end]:
            return at, end
        at = end
    raise AssertionError(f"record {seq} is not in {path}")


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    cases("segment", "corruption in the {} of a record in a sealed segment", FRAME, ANNOUNCED),
)
def test_record_in_a_sealed_segment(offset: int, length: int, expected: str) -> None:
    shard_files = ShardFiles()
    path = shard_files.segment(5, "data")
    start, end = frame_at(shard_files, path, 6)
    rot(shard_files, path, (start if offset >= 0 else end) + offset, length)
    assert shard_files.outcome() == expected
    assert shard_files.seen[1] == [(6, 6, "corrupt")]


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    cases("segment", "corruption in the {} of a record in an open segment", FRAME, ANNOUNCED),
)
def test_record_in_an_open_segment(offset: int, length: int, expected: str) -> None:
    shard_files = ShardFiles()
    path = shard_files.segment(9, "data")
    start, end = frame_at(shard_files, path, 9)
    rot(shard_files, path, (start if offset >= 0 else end) + offset, length)
    assert shard_files.outcome() == expected
    assert shard_files.seen[1] == [(9, 9, "corrupt")]


@fault("segment", "the header of a .data file is corrupted", SEEN[SERVED])
@pytest.mark.parametrize("first_seq", [1, 9], ids=["sealed", "open"])
@pytest.mark.parametrize(("name", "offset", "length"), HEADER)
def test_header_of_records(first_seq: int, name: str, offset: int, length: int) -> None:
    """The records do not need it: the snapshot describes them, and each has a digest."""
    shard_files = ShardFiles()
    rot(shard_files, shard_files.segment(first_seq, "data"), offset, length)
    assert shard_files.outcome() == SERVED


REBUILT = "the index is made again from the records; everything is served"
SUM_FIELDS = [
    "first_seq",
    "generation",
    "rows",
    "live",
    "data_bytes",
    "dict_bytes",
    "tag_names",
    "node_names",
    "ts_min",
    "ts_max",
    "idx_digest",
    "dict_digest",
    "blocks",
    "chain",
    "origin",
]


@pytest.mark.parametrize(
    "field",
    [
        pytest.param(
            field,
            marks=fault(
                "segment",
                f"corruption in {field} in the .sum of a sealed segment",
                REBUILT,
            ),
        )
        for field in SUM_FIELDS
    ],
)
def test_sum_of_a_sealed_segment(field: str) -> None:
    shard_files = ShardFiles()
    path = shard_files.segment(5, "sum")
    at = file_bytes(shard_files.disk, path).index(field.encode()) + len(field)
    rot(shard_files, path, at, 1)
    assert shard_files.outcome() == SERVED


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    cases(
        "segment",
        "corruption in the {} of a .sum file",
        [*HEADER, ("digest", -8, 8)],
        SERVED,
        REBUILT,
    ),
)
def test_header_and_digest_of_a_sum(offset: int, length: int, expected: str) -> None:
    shard_files = ShardFiles()
    path = shard_files.segment(5, "sum")
    rot(shard_files, path, offset % len(file_bytes(shard_files.disk, path)), length)
    assert shard_files.outcome() == expected


# ---- indexes


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [
        *cases("index", "corruption in the {} in the header of an index", HEADER[:2], SERVED, REBUILT),
        *cases(
            "index",
            "corruption in the {} of a row in a sealed index",
            [(name, 16 + 32 + at, size) for name, at, size in ROW],
            SERVED,
            REBUILT,
        ),
    ],
)
def test_index_of_a_sealed_segment(offset: int, length: int, expected: str) -> None:
    shard_files = ShardFiles()
    rot(shard_files, shard_files.segment(5, "idx"), offset, length)
    assert shard_files.outcome() == expected
    assert shard_files.h is not None
    assert shard_files.h.engine.report.rebuilt


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [
        *cases("index", "corruption in the {} in the header of an open index", HEADER[:2], SERVED, REBUILT),
        *cases(
            "index",
            "corruption in the {} of a row in an open index",
            [(name, 16 + at, size) for name, at, size in ROW],
            SERVED,
            REBUILT,
        ),
    ],
)
def test_index_of_an_open_segment(offset: int, length: int, expected: str) -> None:
    shard_files = ShardFiles()
    rot(shard_files, shard_files.segment(9, "idx"), offset, length)
    assert shard_files.outcome() == expected
    assert shard_files.h is not None
    assert shard_files.h.engine.report.rebuilt
    assert_right_names(shard_files)


def assert_right_names(shard_files: ShardFiles) -> None:
    """Tags and nodes of the open segment, now, after it has grown and is sealed, and after that."""
    h = shard_files.open()
    for _ in range(2):
        page = h.diff("t", 8, limit=2)
        assert (page.tags, page.nodes) == ([b"odd", b"even"], [b"n1", None])
        h.append("t", b"17", b"18", tags=[b"even", b"new"])
        h.checkpoint()
        h.kill()
        h = shard_files.open()
        assert h.engine.report.rebuilt == [], "the index was not rebuilt"
    assert h.diff("t", 16, limit=4).tags == [b"even", b"new"] * 2


@fault("index", "the tag of a row in an open index becomes another one's", REBUILT)
def test_tag_in_an_open_index() -> None:
    shard_files = ShardFiles()
    shard_files.change(shard_files.segment(9, "idx"), 16 + 20, b"\x02")  # the other record's
    assert shard_files.outcome() == SERVED
    assert_right_names(shard_files)


@fault("index", "a name in an open dictionary becomes another", REBUILT)
def test_name_in_an_open_dictionary() -> None:
    shard_files = ShardFiles()
    path = shard_files.segment(9, "dict")
    shard_files.change(path, file_bytes(shard_files.disk, path).index(b"odd"), b"o0d")
    assert shard_files.outcome() == SERVED
    assert_right_names(shard_files)


@pytest.mark.parametrize("suffix", ["idx", "dict"])
@fault("index", "an open index is corrupted while the shard runs, and the segment is then sealed", REBUILT)
def test_corruption_before_a_seal_is_not_sealed_in(suffix: str) -> None:
    shard_files = ShardFiles()
    h = shard_files.open()
    assert h.diff("t", 8, limit=2).tags == [b"odd", b"even"]
    shard_files.change(shard_files.segment(9, suffix), 16 + 20, b"\x02\x01")
    h.append("t", b"17", b"18")
    h.checkpoint()
    assert any(path.endswith("9-0.sum") for path in shard_files.disk.paths())
    h.kill()
    h = shard_files.open()
    assert h.diff("t", 8, limit=2).tags == [b"odd", b"even"]
    assert h.engine.report.rebuilt


def dict_fields() -> list[Field]:
    """Each block of the dictionary: kind, padding, count, bytes, and its entries."""
    shard_files = ShardFiles()
    data = file_bytes(shard_files.disk, shard_files.segment(5, "dict"))
    fields: list[Field] = []
    at = 16
    while at < len(data):
        name = {1: "tags", 2: "nodes", 3: "expiries"}[data[at]]
        size = int.from_bytes(data[at + 8 : at + 12], "little")
        for field, offset, length in (("kind", 0, 1), ("padding", 1, 3), ("count", 4, 4), ("size", 8, 4)):
            fields.append((f"the {field} of the block of {name}", at + offset, length))
        fields.append((f"the entries of the block of {name}", at + 12, size))
        at += 12 + size
    return fields


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [
        *cases("index", "corruption in the {} in the header of a dictionary", HEADER[:2], SERVED, REBUILT),
        *cases("index", "corruption in {} in a sealed dictionary", dict_fields(), SERVED, REBUILT),
    ],
)
def test_dictionary_of_a_sealed_segment(offset: int, length: int, expected: str) -> None:
    shard_files = ShardFiles()
    rot(shard_files, shard_files.segment(5, "dict"), offset, length)
    assert shard_files.outcome() == expected
    assert shard_files.h is not None
    page = shard_files.h.diff("t", 4, limit=4)
    assert (page.tags, page.nodes) == ([b"odd", b"even"] * 2, [b"n1", None] * 2)


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    cases(
        "segment",
        "corruption in the {} in the header of a .del file",
        HEADER[:2],
        SERVED,
        "everything is served: the snapshot has a digest of the marks, which are whole",
    ),
)
def test_header_of_deleted_rows(offset: int, length: int, expected: str) -> None:
    shard_files = ShardFiles()
    rot(shard_files, shard_files.segment(1, "del"), offset, length)
    assert shard_files.outcome() == expected


MARKS: list[Field] = [
    ("count of ranges", 16, 4),
    ("first row", 20, 4),
    ("row after the last", 24, 4),
    ("digest", 28, 8),
]
ALL_LOST = "the segment's records are announced as lost (corrupt); all others are served"


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    cases("segment", "corruption in the {} in a block of a .del file", MARKS, ANNOUNCED, ALL_LOST),
)
def test_marks_of_deleted_rows(offset: int, length: int, expected: str) -> None:
    """It is unknown which records are deleted: none may come back, and none may be lost without a tombstone."""
    shard_files = ShardFiles()
    rot(shard_files, shard_files.segment(1, "del"), offset, length)
    assert shard_files.outcome() == expected
    assert shard_files.seen[1] == [(1, 4, "corrupt")]


@pytest.mark.parametrize("mark", [0, 3, 255])
@pytest.mark.parametrize("offset", range(16, 36))
@fault("segment", "any byte of a block of a .del file becomes another", ALL_LOST)
def test_any_byte_of_the_marks(offset: int, mark: int) -> None:
    shard_files = ShardFiles()
    path = shard_files.segment(1, "del")
    changed = file_bytes(shard_files.disk, path)[offset] != mark
    shard_files.change(path, offset, bytes([mark]))
    assert shard_files.outcome() == (ANNOUNCED if changed else SERVED)


# ---- intents

INTENT = f"{META_DIR}/intent-0000000000000001"


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    cases(
        "data directory",
        "corruption in the {} of a pending erase intent",
        [*HEADER, ("list of patches", 16, 6), ("digest", -8, 8)],
        REFUSED,
    ),
)
def test_pending_intent(offset: int, length: int, expected: str) -> None:
    shard_files = ShardFiles()
    write_intent(shard_files.disk, META_DIR, 1, [(shard_files.segment(1, "data"), 0, b"TPCSDAT\0")])
    assert shard_files.outcome() == SERVED, "an intact intent is applied and removed"
    shard_files = ShardFiles()
    write_intent(shard_files.disk, META_DIR, 1, [(shard_files.segment(1, "data"), 0, b"TPCSDAT\0")])
    data = bytearray(file_bytes(shard_files.disk, INTENT))
    at = offset % len(data)
    data[at : at + length] = bytes(byte ^ 0xFF for byte in data[at : at + length])
    overwrite(shard_files.disk, INTENT, bytes(data))
    with pytest.raises((Corrupt, UnsupportedFormat)) as caught:
        shard_files.open()
    assert INTENT in str(caught.value)
    assert file_bytes(shard_files.disk, INTENT) == bytes(data)


@pytest.mark.parametrize("offset", [4, 60, 150])
@fault(
    "log file",
    "the first entry of a file that recovery began is corrupted, with entries after it",
    SEEN[READ_ONLY],
)
def test_first_entry_of_a_file_that_recovery_began(offset: int) -> None:
    """It is a copy of the end of the previous file, which is still there under the same number."""
    shard_files = ShardFiles()
    h = shard_files.open()
    path = shard_files.log_file()
    h.append("t", b"17")
    h.append("t", b"18")
    h.kill()
    first = shard_files.envelopes(path)[0]
    rot(shard_files, path, first.start - 48 + offset, 1)
    h = shard_files.open()
    assert h.engine.shard.state.read_only is not None
    assert f"{path} at byte 64" in h.engine.shard.state.read_only
    rows, gaps = h.read("t")
    assert dict(rows).items() <= shard_files.written.items()
    assert gaps == []


@fault(
    "segment",
    "a record of an open segment is corrupted while the shard runs, and the segment is then sealed",
    SEEN[ANNOUNCED],
)
def test_record_that_is_corrupted_before_the_seal() -> None:
    shard_files = ShardFiles()
    h = shard_files.open()
    path = shard_files.segment(9, "data")
    assert len(h.rows("t")) == len(shard_files.written)
    shard_files.change(path, file_bytes(shard_files.disk, path).index(numbered(9, 1)[0]) + 3, b"!")
    h.append("t", b"17", b"18")
    h.checkpoint()
    assert any(name.endswith("9-0.sum") for name in shard_files.disk.paths())
    for _ in range(2):
        rows, gaps = h.read("t")
        left = {seq: payload for seq, payload in shard_files.written.items() if seq != 9}
        assert dict(rows) == {**left, 17: b"17", 18: b"18"}
        assert gaps == [(9, 9, "corrupt")]
        h.kill()
        h = shard_files.open()
