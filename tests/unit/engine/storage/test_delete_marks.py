"""Goal: exactly the rows that were marked as deleted are read back as deleted, or the file is reported as damaged.

Method: marks are added in blocks on the simulated disk, with power cuts between and during writes, and read back;
every byte of the file is changed once. Version 1 is written by hand: one byte per row.
"""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from tests.support.faults import fault
from tests.support.sim_disk import SimDisk
from topics.api.errors import Corrupt, UnsupportedFormat
from topics.engine.storage.delete_marks import mark_deleted, read_deleted, salvage_deleted
from topics.engine.storage.files import HEADER_BYTES, read_file, sync_file
from topics.engine.storage.segments import SegmentMeta, segment_path, truncate_to_meta

DIR = "shards/0/t/7"
VERSION_1 = b"TPCSDEL\0" + struct.pack("<II", 1, 0)


def segment(rows: int) -> SegmentMeta:
    """Only its marks are used here; `data` and `idx` of no rows need no files."""
    return SegmentMeta(1, rows=rows)


def marked(disk: SimDisk, meta: SegmentMeta) -> list[int]:
    found = read_deleted(disk, DIR, meta)
    assert found is not None and len(found) == meta.rows
    return [int(row) for row in np.flatnonzero(found)]


def put(disk: SimDisk, meta: SegmentMeta, content: bytes) -> str:
    path = segment_path(DIR, meta, "del")
    disk.make_dir(DIR)
    handle = disk.open(path, create=True)
    disk.truncate(handle, 0)
    disk.write(handle, 0, content)
    disk.sync(handle)
    disk.close(handle)
    return path


def new_disk(seed: int = 1) -> SimDisk:
    disk = SimDisk(seed)
    disk.make_dir(DIR)
    return disk


def test_blocks_lie_as_the_document_says() -> None:
    disk, meta = new_disk(), segment(100)
    path = mark_deleted(disk, DIR, meta, [3, 4, 5, 9])
    mark_deleted(disk, DIR, meta, [4, 99])
    first = struct.pack("<IIIII", 2, 3, 6, 9, 10)
    second = struct.pack("<III", 1, 99, 100)
    one = xxh3_64_digest(bytes(8) + first)
    two = xxh3_64_digest(one + second)
    assert read_file(disk, path) == b"TPCSDEL\0" + struct.pack("<II", 2, 0) + first + one + second + two
    assert (meta.has_del, meta.del_bytes, meta.del_digest) == (True, 16 + 20 + 8 + 12 + 8, two)
    assert marked(disk, meta) == [3, 4, 5, 9, 99]


@given(st.lists(st.lists(st.integers(0, 199), max_size=40), min_size=1, max_size=4), st.booleans())
def test_deleted_rows_read_back(deletes: list[list[int]], stale: bool) -> None:
    disk, meta = new_disk(), segment(200)
    assert read_deleted(disk, DIR, meta) is None
    if stale:
        put(disk, meta, b"\x01" * 999)
    for rows in deletes:
        sync_file(disk, mark_deleted(disk, DIR, meta, rows))
    for directory in ("", "shards", "shards/0", "shards/0/t", DIR):
        disk.sync_dir(directory)
    disk.crash()
    assert marked(disk, meta) == sorted({row for rows in deletes for row in rows})
    assert disk._handles == {}


def test_marks_grow_with_an_open_segment() -> None:
    disk, meta = new_disk(), segment(3)
    mark_deleted(disk, DIR, meta, [2])
    meta.rows = 8
    assert marked(disk, meta) == [2]
    mark_deleted(disk, DIR, meta, [6])
    assert marked(disk, meta) == [2, 6]


def test_rows_that_are_not_there_cannot_be_marked() -> None:
    with pytest.raises(ValueError, match="rows 0 to 1"):
        mark_deleted(new_disk(), DIR, segment(1), [0, 1])


def test_marks_that_are_there_already_add_nothing() -> None:
    disk, meta = new_disk(), segment(10)
    path = mark_deleted(disk, DIR, meta, [1, 2])
    before = read_file(disk, path), msgspec.structs.replace(meta)
    mark_deleted(disk, DIR, meta, [2, 1])
    assert (read_file(disk, path), meta) == before


@fault(
    "segment",
    "the power fails while deletes are being marked",
    "neither older deletes nor live records are harmed",
)
@given(st.sets(st.integers(0, 999)), st.sets(st.integers(0, 1999)), st.integers(0, 10**6))
def test_unsynced_marks_cost_neither_synced_ones_nor_live_rows(
    synced: set[int], unsynced: set[int], seed: int
) -> None:
    disk, meta = new_disk(seed), segment(1000)
    path = mark_deleted(disk, DIR, meta, sorted(synced))
    sync_file(disk, path)
    for directory in ("", "shards", "shards/0", "shards/0/t"):
        disk.sync_dir(directory)
    named = msgspec.structs.replace(meta)
    meta.rows = 2000
    mark_deleted(disk, DIR, meta, sorted(unsynced))
    disk.crash()
    assert marked(disk, named) == sorted(synced), "bytes after the given length do not count"
    mark_deleted(disk, DIR, named, [7])
    assert marked(disk, named) == sorted(synced | {7}), "leftover bytes there are overwritten"


@fault(
    "segment",
    "any byte of a .del file is corrupted",
    "the segment's records are announced as lost (corrupt); all others are served",
)
def test_any_other_byte_is_called_corruption() -> None:
    disk, meta = new_disk(), segment(100)
    path = mark_deleted(disk, DIR, meta, [1, 2, 50])
    mark_deleted(disk, DIR, meta, [60])
    content = read_file(disk, path)
    for at in range(HEADER_BYTES, len(content)):
        for bit in range(8):
            put(disk, meta, content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
            with pytest.raises(Corrupt):
                read_deleted(disk, DIR, meta)
    for length in range(len(content)):
        put(disk, meta, content[:length])
        with pytest.raises(Corrupt):
            read_deleted(disk, DIR, meta)


def test_a_corrupt_block_does_not_take_the_others_along() -> None:
    disk, meta = new_disk(), segment(100)
    path = mark_deleted(disk, DIR, meta, [1])
    mark_deleted(disk, DIR, meta, [2])
    mark_deleted(disk, DIR, meta, [3])
    content = bytearray(read_file(disk, path))
    content[HEADER_BYTES + 20 + 4] ^= 4  # in the range of the second block
    assert np.flatnonzero(salvage_deleted(bytes(content), meta)).tolist() == [1, 3]


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_file_that_is_lost_while_the_shard_runs_is_written_again(damage: str) -> None:
    disk, meta = new_disk(), segment(100)
    path = mark_deleted(disk, DIR, meta, [1, 2])
    before = read_deleted(disk, DIR, meta)
    if damage == "gone":
        disk.remove(path)
    else:
        put(disk, meta, b"TPCS")
    mark_deleted(disk, DIR, meta, [5], before)
    assert marked(disk, meta) == [1, 2, 5]


# ---- version 1


def test_version_1_is_read_and_turned_into_version_2() -> None:
    disk, meta = new_disk(), segment(5)
    meta.has_del = True
    path = put(disk, meta, VERSION_1 + b"\x01\x00\x02\x01")
    assert marked(disk, meta) == [0, 3], "a row past the end is live"
    mark_deleted(disk, DIR, meta, [4])
    assert marked(disk, meta) == [0, 3, 4]
    assert read_file(disk, path)[8] == 2


def test_a_crash_after_that_is_read_by_the_older_snapshot() -> None:
    disk, meta = new_disk(), segment(5)
    meta.has_del = True
    put(disk, meta, VERSION_1 + b"\x01\x00\x00\x00\x00")
    old = msgspec.structs.replace(meta, rows=0)
    mark_deleted(disk, DIR, meta, [4])
    assert truncate_to_meta(disk, DIR, old) is None
    old.rows = 5
    assert marked(disk, old) == [0, 4], "the delete of row 4 is in the log as well"


def test_marks_of_version_1_past_the_rows_are_cut_off() -> None:
    disk = new_disk()
    meta = SegmentMeta(1, has_del=True)
    path = put(disk, meta, VERSION_1 + b"\x01\x01\x01")
    truncate_to_meta(disk, DIR, meta)
    assert read_file(disk, path) == VERSION_1


@pytest.mark.parametrize(
    "rotten", [b"TPCSDEL\0" + struct.pack("<II", 1, 0), b"TPCSDEL\0" + struct.pack("<II", 4098, 0), bytes(16)]
)
def test_a_corrupt_header_does_no_harm_to_blocks_that_a_snapshot_vouches_for(rotten: bytes) -> None:
    disk, meta = new_disk(), segment(5)
    path = mark_deleted(disk, DIR, meta, [1])
    put(disk, meta, rotten + read_file(disk, path)[16:])
    mask = read_deleted(disk, DIR, meta)
    assert mask is not None
    assert np.flatnonzero(mask).tolist() == [1]


def test_a_later_version_is_refused_by_name() -> None:
    disk, meta = new_disk(), segment(5)
    path = mark_deleted(disk, DIR, meta, [1])
    put(disk, meta, b"TPCSDEL\0" + struct.pack("<II", 3, 0) + read_file(disk, path)[16:])
    meta.del_bytes = 0  # no snapshot lists these marks
    with pytest.raises(UnsupportedFormat, match=f"{path} has format version 3"):
        read_deleted(disk, DIR, meta)
