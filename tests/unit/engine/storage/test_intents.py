from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.faults import fault
from tests.support.sim_disk import SimDisk, SimulatedCrash
from topics.api.errors import Corrupt, TopicsError, UnsupportedFormat
from topics.engine.storage.files import TEMP_SUFFIX, read_file, write_whole, xxh
from topics.engine.storage.intents import (
    Patch,
    apply_patches,
    finish_intent,
    intent_path,
    pending_intents,
    write_intent,
)

DIR = "shards/0/meta"
OLD = bytes(range(256)) * 8


def disk_with_files(seed: int) -> SimDisk:
    disk = SimDisk(seed)
    disk.make_dir("data")
    for path in ("data/a", "data/b"):
        write_whole(disk, path, OLD)
    disk.sync_all()
    return disk


patch_lists = st.lists(
    st.tuples(st.sampled_from(["data/a", "data/b"]), st.integers(0, 1500), st.binary(max_size=500)),
    max_size=6,
)


def patched(patches: list[Patch]) -> dict[str, bytes]:
    files = {"data/a": bytearray(OLD), "data/b": bytearray(OLD)}
    for path, offset, data in patches:
        files[path][offset : offset + len(data)] = data
    return {path: bytes(content) for path, content in files.items()}


def contents(disk: SimDisk) -> dict[str, bytes]:
    return {path: read_file(disk, path) for path in ("data/a", "data/b")}


@given(patch_lists, st.integers(0, 2**64 - 1), st.integers(0, 99))
def test_round_trip(patches: list[Patch], number: int, seed: int) -> None:
    disk = disk_with_files(seed)
    assert pending_intents(disk, DIR) == []
    write_intent(disk, DIR, number, patches)
    disk.crash()
    assert pending_intents(disk, DIR) == [(number, patches)]
    for _ in range(3):
        apply_patches(disk, patches)
        disk.crash()
        assert contents(disk) == patched(patches)
    finish_intent(disk, DIR, number)
    disk.crash()
    assert pending_intents(disk, DIR) == []


@fault(
    "disk",
    "the power fails at any disk call of an overwrite in place",
    "all old bytes, or all new ones after the next start",
)
@given(patch_lists, st.integers(1, 60), st.integers(0, 10**6), st.booleans())
def test_a_crash_anywhere_leaves_all_old_or_leads_to_all_new(
    patches: list[Patch], call: int, seed: int, midway: bool
) -> None:
    disk = disk_with_files(seed)
    disk.crash_at(call, midway=midway)
    finished = False
    try:
        write_intent(disk, DIR, 9, patches)
        apply_patches(disk, patches)
        finish_intent(disk, DIR, 9)
        finished = True
    except SimulatedCrash:
        pass
    disk.crash()
    pending = pending_intents(disk, DIR)
    for _, found in pending:
        apply_patches(disk, found)
        finish_intent(disk, DIR, 9)
    disk.crash()
    allowed = [patched(patches)] if finished or pending else [patched(patches), patched([])]
    assert contents(disk) in allowed
    assert pending_intents(disk, DIR) == []
    assert disk.list(DIR) == []


def test_several_come_in_the_order_of_their_numbers() -> None:
    disk = SimDisk(1)
    for number in (16, 3, 255):
        write_intent(disk, DIR, number, [("x", number, b"y")])
    assert [number for number, _ in pending_intents(disk, DIR)] == [3, 16, 255]


@fault("data directory", "a half-written erase intent is left behind", "it is removed; everything is served")
def test_a_half_written_one_is_ignored_and_removed() -> None:
    disk = SimDisk(1)
    write_intent(disk, DIR, 1, [("data/a", 0, b"new")])
    whole = read_file(disk, intent_path(DIR, 1))
    write_whole(disk, intent_path(DIR, 2) + TEMP_SUFFIX, whole[:30])
    write_whole(disk, f"{DIR}/snap-0000000000000001.tmp", b"not ours")
    assert [number for number, _ in pending_intents(disk, DIR)] == [1]
    assert disk.list(DIR) == ["intent-0000000000000001", "snap-0000000000000001.tmp"]


def test_a_synced_one_that_is_corrupted_is_not_ignored() -> None:
    disk = SimDisk(1)
    write_intent(disk, DIR, 1, [("data/a", 0, b"new")])
    path = intent_path(DIR, 1)
    for offset in range(len(read_file(disk, path))):
        disk.flip_bit(path, offset, 3)
        with pytest.raises(TopicsError, match="intent-0000000000000001"):
            pending_intents(disk, DIR)
        disk.flip_bit(path, offset, 3)
    disk.truncate(disk.open(path), 30)
    with pytest.raises(Corrupt):
        pending_intents(disk, DIR)


def test_another_version_is_refused_by_name() -> None:
    disk = SimDisk(1)
    write_intent(disk, DIR, 1, [])
    handle = disk.open(intent_path(DIR, 1))
    disk.write(handle, 8, b"\x02")
    content = disk.read(handle, 0, disk.size(handle))
    disk.write(handle, len(content) - 8, xxh(content[:-8]))
    with pytest.raises(UnsupportedFormat, match="intent-0000000000000001 has format version 2"):
        pending_intents(disk, DIR)


@fault(
    "data directory",
    "the file that a pending erase intent names is gone",
    "the intent is done: there is nothing left to overwrite",
)
def test_bytes_that_are_gone_need_no_patch() -> None:
    disk = disk_with_files(1)
    disk.remove("data/b")
    disk.truncate(disk.open("data/a"), 10)
    apply_patches(disk, [("data/a", 8, b"new!"), ("data/a", 500, b"far"), ("data/b", 0, b"gone")])
    assert read_file(disk, "data/a") == OLD[:8] + b"ne"
    assert not disk.exists("data/b")
