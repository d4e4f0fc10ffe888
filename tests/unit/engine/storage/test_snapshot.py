from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.faults import fault
from tests.support.sim_disk import SimDisk, SimulatedCrash
from topics.api.errors import Corrupt, TopicsError, UnsupportedFormat
from topics.engine.storage.files import read_file, with_digest, xxh
from topics.engine.storage.snapshot import (
    MAGIC,
    PIECE_BYTES,
    SnapshotWriter,
    list_snapshots,
    read_snapshot,
    remove_snapshot,
    remove_unfinished,
    snapshot_path,
)

DIR = "shards/0/meta"


def write(disk: SimDisk, number: int, rows: list[object]) -> None:
    writer = SnapshotWriter(disk, DIR, number)
    for row in rows:
        writer.add(row)
    writer.finish()
    writer.publish()


values = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=50) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=10,
)


@given(st.lists(values, min_size=1, max_size=20), st.integers(0, 2**64 - 1), st.integers(0, 99))
def test_round_trip_over_a_power_cut(rows: list[object], number: int, seed: int) -> None:
    disk = SimDisk(seed)
    write(disk, number, rows)
    disk.crash()
    assert list_snapshots(disk, DIR) == [number]
    shard, topics = read_snapshot(disk, DIR, number)
    assert [msgspec.msgpack.decode(row) for row in [shard, *topics]] == rows


def test_it_is_written_in_large_pieces() -> None:
    disk = SimDisk(1)
    disk.trace = []
    write(disk, 1, [{"n": i, "x": b"y" * 900} for i in range(2000)])
    sizes = [int(line.split()[3]) for line in disk.trace if line.startswith("write ")]
    assert len(sizes) == 2000 * 909 // PIECE_BYTES + 2
    assert all(size >= PIECE_BYTES for size in sizes[:-2])
    assert len(read_snapshot(disk, DIR, 1)[1]) == 1999


@fault("snapshot", "any single bit of a snapshot flips, or its end is lost", "it is not used")
def test_every_flipped_bit_and_every_lost_end_is_detected() -> None:
    disk = SimDisk(1)
    write(disk, 1, [{"shard": 0}, ["topic", 1, b"x"], ["topic", 2, b"y"]])
    path = snapshot_path(DIR, 1)
    content = read_file(disk, path)
    for offset in range(len(content)):
        for bit in range(8):
            disk.flip_bit(path, offset, bit)
            with pytest.raises(TopicsError, match="snap-0000000000000001"):
                read_snapshot(disk, DIR, 1)
            disk.flip_bit(path, offset, bit)
    handle = disk.open(path)
    for length in reversed(range(len(content))):
        disk.truncate(handle, length)
        with pytest.raises(Corrupt):
            read_snapshot(disk, DIR, 1)


def test_another_version_is_refused_by_name() -> None:
    disk = SimDisk(1)
    write(disk, 5, [1, 2])
    handle = disk.open(snapshot_path(DIR, 5))
    disk.write(handle, 8, b"\x07")
    content = disk.read(handle, 0, disk.size(handle))
    disk.write(handle, len(content) - 8, xxh(content[:-8]))
    with pytest.raises(UnsupportedFormat, match="snap-0000000000000005 has format version 7"):
        read_snapshot(disk, DIR, 5)


@fault("snapshot", "rows of a snapshot do not add up though the digest fits", "it is not used")
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x01\0\0\0\x00",  # a closing row alone
        b"\x01\0\0\0\x05\x01\0\0\0\x02",  # one row, and a closing row that says two
        b"\x01\0\0\0\x05\x02\0\0\0\x01",
        b"\x01\0\0\0\x05\x01\0",
    ],
)
def test_rows_that_do_not_add_up_are_refused_though_the_digest_fits(payload: bytes) -> None:
    disk = SimDisk(1)
    disk.make_dir(DIR)
    disk.write(disk.open(snapshot_path(DIR, 1), create=True), 0, with_digest(MAGIC, payload))
    with pytest.raises(Corrupt):
        read_snapshot(disk, DIR, 1)


def test_list_remove_and_unfinished() -> None:
    disk = SimDisk(1)
    assert list_snapshots(disk, DIR) == []
    for number in (300, 2, 17):
        write(disk, number, [number])
    unfinished = SnapshotWriter(disk, DIR, 400)
    unfinished.add("x" * PIECE_BYTES)
    abandoned = SnapshotWriter(disk, DIR, 401)
    abandoned.abandon()
    assert list_snapshots(disk, DIR) == [2, 17, 300]
    remove_snapshot(disk, DIR, 17)
    remove_snapshot(disk, DIR, 17)
    remove_unfinished(disk, DIR)
    assert disk.list(DIR) == ["snap-0000000000000002", "snap-000000000000012c"]


def test_order_of_use_is_enforced() -> None:
    disk = SimDisk(1)
    writer = SnapshotWriter(disk, DIR, 1)
    writer.add(1)
    with pytest.raises(RuntimeError):
        writer.publish()
    writer.finish()
    writer.add(2)
    with pytest.raises(RuntimeError):
        writer.finish()


@fault(
    "snapshot",
    "the power fails at any disk call while a snapshot is written",
    "the old one or the whole new one is there",
)
@pytest.mark.parametrize("seed", range(5))
def test_a_crash_anywhere_leaves_the_old_or_the_whole_new_one(seed: int) -> None:
    rows: list[object] = ["shard", *([b"t" * 1000] * 600)]
    for call in range(1, 100):
        disk = SimDisk(seed * 1000 + call)
        write(disk, 1, ["old"])
        disk.crash_at(call, midway=True)
        try:
            write(disk, 2, rows)
            finished = True
        except SimulatedCrash:
            finished = False
        disk.crash()
        numbers = list_snapshots(disk, DIR)
        assert numbers in ([1], [1, 2])
        assert read_snapshot(disk, DIR, 1)[1] == []
        if finished or 2 in numbers:
            assert len(read_snapshot(disk, DIR, 2)[1]) == 600
        # The next one does not contain a longer leftover of the crashed attempt.
        write(disk, 2, ["short"])
        assert read_snapshot(disk, DIR, 2)[1] == []
        if finished:
            return
    raise AssertionError("never finished")
