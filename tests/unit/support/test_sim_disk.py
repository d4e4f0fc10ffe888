"""Goal: the simulated disk loses, tears and fails exactly as documented, and repeats the same run for the same seed.

Method: each promise that something survives is checked over many seeds; each promise that something may be lost is
checked by finding a seed for either outcome.
"""

from __future__ import annotations

import errno
import os
import random

import pytest

from tests.support.sim_clock import SimClock
from tests.support.sim_disk import SECTOR_BYTES, SimDisk, SimulatedCrash

SEEDS = range(300)


def put(disk: SimDisk, path: str, data: bytes) -> int:
    handle = disk.open(path, create=True)
    disk.write(handle, 0, data)
    return handle


def put_durably(disk: SimDisk, path: str, data: bytes) -> int:
    handle = put(disk, path, data)
    disk.sync(handle)
    disk.sync_dir(os.path.dirname(path))
    return handle


def get(disk: SimDisk, path: str) -> bytes:
    handle = disk.open(path)
    data = disk.read(handle, 0, disk.size(handle))
    disk.close(handle)
    return data


# ---- power cut: contents


def test_synced_contents_survive_whatever_else_is_pending() -> None:
    for seed in SEEDS:
        disk = SimDisk(seed)
        handle = put_durably(disk, "a", b"s" * 1000)
        disk.write(handle, 1000, b"u" * 3000)
        disk.write(handle, 5000, b"v" * 100)
        disk.crash()
        assert get(disk, "a")[:1000] == b"s" * 1000


def test_unsynced_writes_may_stay_vanish_tear_or_garble() -> None:
    data = b"".join(bytes([i]) * SECTOR_BYTES for i in range(1, 9))
    outcomes = dict.fromkeys(["whole", "gone", "prefix", "hole", "zeros", "garbled"], 0)
    for seed in SEEDS:
        disk = SimDisk(seed)
        handle = put_durably(disk, "a", b"")
        disk.write(handle, 0, data)
        disk.crash()
        after = get(disk, "a")
        assert len(after) <= len(data)
        sectors = [after[i : i + SECTOR_BYTES] for i in range(0, len(after), SECTOR_BYTES)]
        wrong = [
            s for i, s in enumerate(sectors) if s not in (bytes([i + 1]) * SECTOR_BYTES, bytes(SECTOR_BYTES))
        ]
        assert len(after) % SECTOR_BYTES == 0, "tears must be between sectors"
        assert len(wrong) <= 1
        if wrong:
            outcomes["garbled"] += 1
        elif after == data:
            outcomes["whole"] += 1
        elif not after:
            outcomes["gone"] += 1
        elif data.startswith(after):
            outcomes["prefix"] += 1
        elif not after.strip(b"\0"):
            outcomes["zeros"] += 1
        else:
            outcomes["hole"] += 1
    assert min(outcomes.values()) > 0, outcomes


def test_unsynced_writes_may_survive_out_of_order() -> None:
    seen = dict.fromkeys([(a, b) for a in (False, True) for b in (False, True)], 0)
    for seed in SEEDS:
        disk = SimDisk(seed)
        handle = put_durably(disk, "a", bytes(2048))
        disk.write(handle, 0, b"1" * 512)
        disk.write(handle, 1024, b"2" * 512)
        disk.crash()
        after = get(disk, "a")
        seen[after[:512] == b"1" * 512, after[1024:1536] == b"2" * 512] += 1
        assert after[512:1024] == bytes(512) and after[1536:] == bytes(512)
    assert min(seen.values()) > 0, seen


def test_gap_before_a_kept_write_reads_as_zeros() -> None:
    found = False
    for seed in SEEDS:
        disk = SimDisk(seed)
        handle = put_durably(disk, "a", b"")
        disk.write(handle, 0, b"1" * 512)
        disk.write(handle, 512, b"2" * 512)
        disk.crash()
        found |= get(disk, "a") == bytes(512) + b"2" * 512
    assert found


def test_unsynced_truncation_may_be_undone() -> None:
    lengths = dict.fromkeys([3, 6], 0)
    for seed in SEEDS:
        disk = SimDisk(seed)
        handle = put_durably(disk, "a", b"abcdef")
        disk.truncate(handle, 3)
        disk.crash()
        after = get(disk, "a")
        assert after in (b"abc", b"abcdef")
        lengths[len(after)] += 1
    assert min(lengths.values()) > 0


def test_synced_truncation_and_rewrite_survive() -> None:
    for seed in SEEDS:
        disk = SimDisk(seed)
        handle = put_durably(disk, "a", b"abcdef")
        disk.truncate(handle, 2)
        disk.write(handle, 4, b"xy")
        disk.sync(handle)
        disk.crash()
        assert get(disk, "a") == b"ab\0\0xy"


def test_allocation_is_unsynced_until_synced() -> None:
    lengths: dict[int, int] = {}
    for seed in SEEDS:
        disk = SimDisk(seed)
        handle = put_durably(disk, "a", b"")
        disk.allocate(handle, 4096)
        disk.crash()
        lengths[len(get(disk, "a"))] = 1
    assert 0 in lengths and 4096 in lengths
    disk = SimDisk(0)
    handle = put_durably(disk, "a", b"")
    disk.allocate(handle, 4096)
    disk.sync(handle)
    disk.crash()
    assert get(disk, "a") == bytes(4096)


def test_a_second_crash_changes_nothing() -> None:
    for seed in SEEDS:
        disk = SimDisk(seed)
        handle = put_durably(disk, "a", b"x" * 2000)
        disk.write(handle, 1000, b"y" * 5000)
        disk.truncate(handle, 4000)
        put(disk, "b", b"z" * 600)
        disk.crash()
        before = {path: get(disk, path) for path in disk.paths()}
        disk.crash()
        assert {path: get(disk, path) for path in disk.paths()} == before


def test_reads_after_a_crash_show_what_the_next_crash_would_leave() -> None:
    # A crash copies back only the ranges it must, so live and durable could differ afterwards: a second crash with
    # nothing pending would show it.
    for seed in range(200):
        rng = random.Random(seed)
        disk = SimDisk(seed)
        for _ in range(5):
            handle = disk.open("a", create=True)
            disk.sync_dir("")
            for _ in range(rng.randint(0, 12)):
                match rng.randrange(5):
                    case 0:
                        disk.truncate(handle, rng.randint(0, 5000))
                    case 1:
                        disk.sync(handle)
                    case 2 if rng.random() < 0.2:
                        disk.fail_at(1, errno.EIO)
                        with pytest.raises(OSError):
                            disk.sync(handle)
                    case _:
                        disk.write(handle, rng.randint(0, 4000), rng.randbytes(rng.randint(0, 2000)))
            synced = None
            if rng.random() < 0.3:
                # Rewriting and syncing everything repairs lost writes.
                synced = disk.read(handle, 0, 10_000)
                disk.truncate(handle, 0)
                disk.write(handle, 0, synced)
                disk.sync(handle)
            disk.crash()
            after = get(disk, "a")
            assert synced is None or after == synced
            disk.crash()
            assert get(disk, "a") == after


# ---- power cut: names


def test_a_synced_file_may_vanish_with_its_unsynced_entry() -> None:
    seen = dict.fromkeys([False, True], 0)
    for seed in SEEDS:
        disk = SimDisk(seed)
        disk.sync(put(disk, "a", b"abc"))
        disk.crash()
        seen[disk.exists("a")] += 1
        assert not disk.exists("a") or get(disk, "a") == b"abc"
    assert min(seen.values()) > 0


def test_syncing_a_directory_does_not_sync_its_own_entry() -> None:
    seen = dict.fromkeys([False, True], 0)
    for seed in SEEDS:
        disk = SimDisk(seed)
        disk.make_dir("d")
        put_durably(disk, "d/a", b"abc")
        disk.crash()
        seen[disk.exists("d")] += 1
        assert disk.exists("d/a") == disk.exists("d")
    assert min(seen.values()) > 0


def test_unsynced_rename_is_lost_or_kept_but_never_half_done() -> None:
    seen = dict.fromkeys(["old", "new"], 0)
    for seed in SEEDS:
        disk = SimDisk(seed)
        put_durably(disk, "name", b"old")
        put_durably(disk, "temp", b"new")
        disk.rename("temp", "name")
        disk.crash()
        now = get(disk, "name").decode()
        seen[now] += 1
        assert disk.exists("temp") == (now == "old")
    assert min(seen.values()) > 0


@pytest.mark.parametrize("what", ["file", "dir"])
def test_a_move_between_directories_is_in_one_place_and_either_sync_settles_it(what: str) -> None:
    seen = dict.fromkeys(["from/x", "to/x"], 0)
    for seed in SEEDS:
        for synced in ("", "from", "to"):
            disk = SimDisk(seed)
            disk.make_dir("from")
            disk.make_dir("to")
            if what == "dir":
                disk.make_dir("from/x")
            else:
                put(disk, "from/x", b"x")
            disk.sync_all()
            disk.rename("from/x", "to/x")
            if synced:
                disk.sync_dir(synced)
            disk.crash()
            places = [path for path in ("from/x", "to/x") if disk.exists(path)]
            assert len(places) == 1
            if synced:
                assert places == ["to/x"]
            else:
                seen[places[0]] += 1
    assert min(seen.values()) > 0


def test_a_removed_file_may_return_with_its_durable_contents() -> None:
    seen = dict.fromkeys([False, True], 0)
    for seed in SEEDS:
        disk = SimDisk(seed)
        put_durably(disk, "a", b"abc")
        disk.remove("a")
        assert disk.paths() == []
        disk.crash()
        seen[disk.exists("a")] += 1
        assert not disk.exists("a") or get(disk, "a") == b"abc"
    assert min(seen.values()) > 0


def test_synced_renames_and_removals_stay() -> None:
    for seed in SEEDS:
        disk = SimDisk(seed)
        for name in ("a", "b", "c"):
            put_durably(disk, name, name.encode())
        disk.rename("a", "b")
        disk.remove("c")
        disk.sync_dir("")
        disk.crash()
        assert disk.paths() == ["b"] and get(disk, "b") == b"a"


def test_directory_changes_survive_as_a_prefix() -> None:
    counts: dict[int, int] = {}
    for seed in SEEDS:
        disk = SimDisk(seed)
        for i in range(6):
            disk.sync(put(disk, f"f{i}", b"x"))
        disk.crash()
        names = disk.list("")
        assert names == [f"f{i}" for i in range(len(names))]
        counts[len(names)] = 1
    assert sorted(counts) == list(range(7))


def test_sync_all_makes_everything_durable() -> None:
    for seed in SEEDS:
        disk = SimDisk(seed)
        disk.make_dir("d/e")
        put(disk, "d/e/a", b"x" * 3000)
        put(disk, "b", b"y")
        disk.rename("b", "d/b")
        disk.sync_all()
        disk.crash()
        assert disk.paths() == ["d/b", "d/e/a"]
        assert get(disk, "d/e/a") == b"x" * 3000 and get(disk, "d/b") == b"y"


# ---- restarts


def test_crash_changes_the_boot_id_and_kill_does_not() -> None:
    disk = SimDisk(0)
    first = disk.boot_id()
    disk.kill()
    assert disk.boot_id() == first
    disk.crash()
    assert disk.boot_id() != first


@pytest.mark.parametrize("how", ["crash", "kill"])
def test_handles_end_with_the_process_and_are_not_reused(how: str) -> None:
    disk = SimDisk(0)
    handle = put_durably(disk, "a", b"abc")
    getattr(disk, how)()
    again = disk.open("a")
    assert again != handle
    with pytest.raises(OSError) as caught:
        disk.read(handle, 0, 1)
    assert caught.value.errno == errno.EBADF


def test_kill_keeps_everything_readable_and_still_unsynced() -> None:
    lost = False
    for seed in SEEDS:
        disk = SimDisk(seed)
        handle = put_durably(disk, "a", b"abc")
        disk.write(handle, 3, b"def")
        put(disk, "b", b"x")
        disk.kill()
        assert get(disk, "a") == b"abcdef" and get(disk, "b") == b"x"
        disk.crash()
        assert get(disk, "a")[:3] == b"abc"
        lost |= get(disk, "a") == b"abc"
    assert lost


def test_sync_after_kill_covers_writes_from_before_it() -> None:
    for seed in SEEDS:
        disk = SimDisk(seed)
        put(disk, "a", b"abc")
        disk.kill()
        disk.sync(disk.open("a"))
        disk.sync_dir("")
        disk.crash()
        assert get(disk, "a") == b"abc"


# ---- planned failures


def test_fail_at_hits_that_call_once() -> None:
    disk = SimDisk(0)
    disk.fail_at(3, errno.EIO)
    handle = disk.open("a", create=True)
    disk.size(handle)
    with pytest.raises(OSError) as caught:
        disk.size(handle)
    assert caught.value.errno == errno.EIO
    assert disk.size(handle) == 0


def test_fail_at_can_count_one_kind_of_call() -> None:
    disk = SimDisk(0)
    disk.fail_at(2, errno.EIO, of="sync")
    handle = put(disk, "a", b"x")
    disk.sync(handle)
    disk.write(handle, 0, b"y")
    with pytest.raises(OSError):
        disk.sync(handle)
    disk.sync(handle)
    with pytest.raises(ValueError):
        disk.fail_at(1, errno.EIO, of="fsync")
    with pytest.raises(ValueError):
        disk.fail_at(0, errno.EIO)


def test_failed_calls_do_nothing_but_writes_may_leave_a_prefix() -> None:
    lengths: dict[int, int] = {}
    for seed in SEEDS:
        disk = SimDisk(seed)
        handle = disk.open("a", create=True)
        disk.fail_at(1, errno.EIO)
        with pytest.raises(OSError):
            disk.write(handle, 0, b"abcd")
        lengths[disk.size(handle)] = 1
        assert b"abcd".startswith(disk.read(handle, 0, 9))
        disk.fail_at(1, errno.EIO)
        with pytest.raises(OSError):
            disk.rename("a", "b")
        assert disk.paths() == ["a"]
    assert sorted(lengths) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("call", ["sync", "sync_all"])
def test_after_a_failed_sync_a_good_one_does_not_save_the_lost_writes(call: str) -> None:
    kept = lost = 0
    for seed in SEEDS:
        disk = SimDisk(seed)
        handle = put_durably(disk, "a", b"s" * 512)
        disk.write(handle, 512, b"1" * 512)
        disk.fail_at(1, errno.EIO)
        with pytest.raises(OSError):
            disk.sync(handle) if call == "sync" else disk.sync_all()
        assert disk.read(handle, 0, 9999) == b"s" * 512 + b"1" * 512, "the page cache still shows them"
        disk.write(handle, 1024, b"2" * 512)
        disk.sync(handle) if call == "sync" else disk.sync_all()
        disk.kill()
        assert get(disk, "a") == b"s" * 512 + b"1" * 512 + b"2" * 512
        disk.crash()
        after = get(disk, "a")
        assert len(after) == 1536
        assert after[:512] == b"s" * 512 and after[1024:] == b"2" * 512
        kept += after[512:1024] == b"1" * 512
        lost += after[512:1024] == bytes(512)
    assert kept and lost


def test_writing_again_after_a_failed_sync_saves() -> None:
    for seed in SEEDS:
        disk = SimDisk(seed)
        handle = put_durably(disk, "a", b"")
        disk.write(handle, 0, b"1" * 2000)
        disk.fail_at(1, errno.EIO)
        with pytest.raises(OSError):
            disk.sync(handle)
        disk.write(handle, 0, b"1" * 2000)
        disk.sync(handle)
        disk.crash()
        assert get(disk, "a") == b"1" * 2000


def test_crash_at_stops_before_the_call_and_stays_down() -> None:
    disk = SimDisk(0)
    handle = put_durably(disk, "a", b"abc")
    calls = disk.calls
    disk.crash_at(2)
    disk.write(handle, 0, b"x")
    with pytest.raises(SimulatedCrash):
        disk.write(handle, 1, b"y")
    assert disk.calls == calls + 2
    for _ in range(2):
        with pytest.raises(SimulatedCrash):
            disk.close(handle)
    disk.kill()
    assert get(disk, "a") == b"xbc"


def test_crash_at_midway_leaves_a_prefix_of_the_write() -> None:
    lengths: dict[int, int] = {}
    for seed in SEEDS:
        disk = SimDisk(seed)
        handle = disk.open("a", create=True)
        disk.crash_at(1, of="write", midway=True)
        with pytest.raises(SimulatedCrash):
            disk.write(handle, 0, b"abcd")
        disk.kill()
        after = get(disk, "a")
        assert b"abcd".startswith(after)
        lengths[len(after)] = 1
    assert sorted(lengths) == [0, 1, 2, 3, 4]


def test_plans_end_with_the_restart() -> None:
    for how in ("crash", "kill"):
        disk = SimDisk(0)
        disk.fail_at(1, errno.EIO)
        disk.crash_at(2)
        getattr(disk, how)()
        disk.exists("a")
        disk.exists("a")


def test_every_port_call_counts() -> None:
    disk = SimDisk(0)
    disk.make_dir("d")
    handle = disk.open("d/a", create=True)
    disk.write(handle, 0, b"x")
    disk.read(handle, 0, 1)
    disk.size(handle)
    disk.truncate(handle, 0)
    disk.allocate(handle, 10)
    disk.sync(handle)
    disk.close(handle)
    disk.exists("d")
    disk.list("d")
    disk.rename("d/a", "d/b")
    disk.remove("d/b")
    disk.sync_dir("d")
    disk.remove_dir("d")
    disk.sync_all()
    disk.boot_id()
    disk.random_u64()
    assert disk.calls == 18
    disk.paths()
    assert disk.calls == 18


# ---- a full disk


def test_capacity_stops_growth_and_not_overwriting() -> None:
    disk = SimDisk(0)
    disk.capacity_bytes = 10
    handle = put(disk, "a", b"x" * 8)
    with pytest.raises(OSError) as caught:
        disk.write(handle, 6, b"yyyyyy")
    assert caught.value.errno == errno.ENOSPC
    assert disk.read(handle, 0, 99) == b"x" * 6 + b"y" * 4, "what fits is written"
    disk.write(handle, 0, b"z" * 10)
    other = disk.open("b", create=True)
    with pytest.raises(OSError) as caught:
        disk.allocate(other, 1)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError) as caught:
        disk.write(other, 0, b"1")
    assert caught.value.errno == errno.ENOSPC
    disk.remove("a")
    with pytest.raises(OSError):
        disk.write(other, 0, b"1")  # the open handle still uses the space
    disk.close(handle)
    disk.allocate(other, 10)
    disk.capacity_bytes = None
    disk.allocate(other, 100)


def test_full_allows_writes_into_allocated_space_only() -> None:
    disk = SimDisk(0)
    handle = disk.open("a", create=True)
    disk.allocate(handle, 100)
    disk.full = True
    disk.write(handle, 50, b"x" * 50)
    with pytest.raises(OSError) as caught:
        disk.write(handle, 100, b"x")
    assert caught.value.errno == errno.ENOSPC
    disk.full = False
    disk.write(handle, 100, b"x")


# ---- bit rot


def test_flip_bit_shows_at_once_and_survives_sync_and_crash() -> None:
    for synced in (False, True):
        disk = SimDisk(0)
        handle = put(disk, "a", b"\0\0\0")
        if synced:
            disk.sync(handle)
        disk.flip_bit("a", 1, bit=3)
        assert disk.read(handle, 0, 3) == b"\0\x08\0"
        disk.sync(handle)
        disk.sync_dir("")
        disk.truncate(handle, 4)  # pending, so that the crash rebuilds live from durable
        disk.crash()
        assert get(disk, "a")[:3] == b"\0\x08\0"
    with pytest.raises(ValueError):
        disk.flip_bit("a", 4)
    with pytest.raises(FileNotFoundError):
        disk.flip_bit("b", 0)


# ---- replay


def busy_trace(seed: int) -> list[str]:
    """A run of random calls, faults and crashes; returns the trace of calls and the final contents."""
    rng = random.Random(seed)
    disk = SimDisk(seed)
    disk.trace = []
    for _ in range(20):
        for name in ("d", "e"):
            disk.make_dir(name)
        paths = [f"{name}/{i}" for name in ("d", "e") for i in range(4)]
        disk.crash_at(rng.randint(1, 80), midway=rng.random() < 0.5)
        disk.fail_at(rng.randint(1, 60), errno.EIO, of=rng.choice(["sync", "write", None]))
        try:
            while True:
                try:
                    handle = disk.open(rng.choice(paths), create=True)
                    disk.write(handle, rng.randint(0, 2000), rng.randbytes(rng.randint(1, 2000)))
                    if rng.random() < 0.5:
                        disk.sync(handle)
                    if rng.random() < 0.3:
                        disk.rename(rng.choice(paths), rng.choice(paths))
                    if rng.random() < 0.3:
                        disk.remove(rng.choice(paths))
                    if rng.random() < 0.3:
                        disk.sync_dir(rng.choice(["", "d", "e"]))
                    disk.random_u64()
                except OSError as error:
                    disk.trace.append(f"errno {error.errno}")
        except SimulatedCrash:
            disk.crash() if rng.random() < 0.7 else disk.kill()
        for path in disk.paths():
            disk.trace.append(f"{path} {get(disk, path).hex()}")
    return disk.trace


def test_same_seed_same_outcome_and_another_seed_another() -> None:
    assert busy_trace(7) == busy_trace(7)
    assert busy_trace(7) != busy_trace(8)


def test_salts_do_not_disturb_the_crash() -> None:
    outcomes = []
    for draws in (0, 5):
        disk = SimDisk(11)
        handle = put_durably(disk, "a", b"")
        for _ in range(draws):
            disk.random_u64()
        for i in range(20):
            disk.write(handle, i * 700, bytes([i]) * 700)
        disk.crash()
        outcomes.append(get(disk, "a"))
    assert outcomes[0] == outcomes[1]


def test_trace_names_every_call() -> None:
    disk = SimDisk(0)
    disk.trace = []
    handle = disk.open("a", create=True)
    disk.write(handle, 0, b"x")
    disk.sync(handle)
    disk.crash()
    assert disk.trace[0] == "open a True"
    assert disk.trace[1].startswith(f"write {handle} 0 1 ")
    assert disk.trace[2:] == [f"sync {handle}", "crash"]


# ---- the simulated clock


def test_clock_moves_only_when_told() -> None:
    clock = SimClock(wall_ms=1000)
    assert (clock.wall_ms(), clock.monotonic_ms()) == (1000, 0)
    clock.advance(5)
    assert (clock.wall_ms(), clock.monotonic_ms()) == (1005, 5)
    clock.jump_wall(-500)
    assert (clock.wall_ms(), clock.monotonic_ms()) == (505, 5)
    with pytest.raises(ValueError):
        clock.advance(-1)
