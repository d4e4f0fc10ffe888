"""Goal: PosixDisk and SimDisk keep the same contract, so that results of the simulation are valid for files.

Method: every test runs over both. Examples pin each method and its edge cases; then seeded random runs make the same
calls on both and compare results and errnos.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.sim_disk import SimDisk
from topics.engine.core.ports import Disk
from workers.shard.posix import PosixDisk


@pytest.fixture(params=["posix", "sim"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return PosixDisk(str(tmp_path / "data")) if request.param == "posix" else SimDisk(seed=1)


def put(disk: Disk, path: str, data: bytes) -> None:
    handle = disk.open(path, create=True)
    disk.truncate(handle, 0)
    disk.write(handle, 0, data)
    disk.close(handle)


def get(disk: Disk, path: str) -> bytes:
    handle = disk.open(path)
    try:
        return disk.read(handle, 0, disk.size(handle))
    finally:
        disk.close(handle)


def error_of(call: Callable[[], object]) -> int | None:
    with pytest.raises(OSError) as caught:
        call()
    return caught.value.errno


# ---- open and close


def test_open_absent_without_create_is_not_found(disk: Disk) -> None:
    with pytest.raises(FileNotFoundError):
        disk.open("a")
    assert not disk.exists("a")


def test_open_create_in_missing_directory_is_not_found(disk: Disk) -> None:
    with pytest.raises(FileNotFoundError):
        disk.open("d/a", create=True)


def test_open_create_makes_an_empty_file_and_keeps_an_existing_one(disk: Disk) -> None:
    handle = disk.open("a", create=True)
    assert disk.size(handle) == 0
    disk.write(handle, 0, b"abc")
    disk.close(handle)
    assert disk.size(disk.open("a", create=True)) == 3
    assert get(disk, "a") == b"abc"


def test_open_a_directory_or_through_a_file_fails(disk: Disk) -> None:
    disk.make_dir("d")
    put(disk, "a", b"")
    assert error_of(lambda: disk.open("d")) == errno.EISDIR
    assert error_of(lambda: disk.open("a/b", create=True)) == errno.ENOTDIR


def test_two_handles_see_one_file(disk: Disk) -> None:
    one, two = disk.open("a", create=True), disk.open("a")
    assert one != two
    disk.write(one, 0, b"abc")
    assert disk.read(two, 0, 3) == b"abc"
    disk.close(one)
    assert disk.read(two, 0, 3) == b"abc"


@pytest.mark.parametrize(
    "use",
    [
        lambda d, h: d.close(h),
        lambda d, h: d.size(h),
        lambda d, h: d.read(h, 0, 1),
        lambda d, h: d.write(h, 0, b"x"),
        lambda d, h: d.truncate(h, 0),
        lambda d, h: d.allocate(h, 1),
        lambda d, h: d.sync(h),
    ],
    ids=["close", "size", "read", "write", "truncate", "allocate", "sync"],
)
def test_a_closed_handle_is_bad(disk: Disk, use: Callable[[Disk, int], object]) -> None:
    handle = disk.open("a", create=True)
    disk.close(handle)
    assert error_of(lambda: use(disk, handle)) == errno.EBADF


# ---- contents


def test_read_is_short_only_at_the_end(disk: Disk) -> None:
    handle = disk.open("a", create=True)
    disk.write(handle, 0, b"abcdef")
    assert disk.read(handle, 0, 6) == b"abcdef"
    assert disk.read(handle, 2, 3) == b"cde"
    assert disk.read(handle, 4, 10) == b"ef"
    assert disk.read(handle, 6, 10) == b""
    assert disk.read(handle, 100, 10) == b""
    assert disk.read(handle, 0, 0) == b""
    assert type(disk.read(handle, 0, 6)) is bytes


def test_write_overwrites_extends_and_fills_gaps_with_zeros(disk: Disk) -> None:
    handle = disk.open("a", create=True)
    disk.write(handle, 0, b"abcdef")
    disk.write(handle, 2, b"XY")
    disk.write(handle, 5, b"Zgh")
    disk.write(handle, 10, b"end")
    assert disk.read(handle, 0, 99) == b"abXYeZgh\0\0end"
    assert disk.size(handle) == 13


def test_write_of_nothing_does_not_extend(disk: Disk) -> None:
    handle = disk.open("a", create=True)
    disk.write(handle, 10, b"")
    assert disk.size(handle) == 0


def test_write_keeps_its_own_copy(disk: Disk) -> None:
    handle = disk.open("a", create=True)
    data = bytearray(b"abc")
    disk.write(handle, 0, data)  # type: ignore[arg-type]  # a caller may still pass a buffer it reuses
    data[:] = b"xyz"
    disk.sync(handle)
    assert disk.read(handle, 0, 3) == b"abc"


def test_large_write_and_read_are_whole(disk: Disk) -> None:
    handle = disk.open("a", create=True)
    data = random.Random(0).randbytes(3_000_001)
    disk.write(handle, 7, data)
    assert disk.read(handle, 7, len(data) + 1) == data


def test_truncate_goes_both_ways(disk: Disk) -> None:
    handle = disk.open("a", create=True)
    disk.write(handle, 0, b"abcdef")
    disk.truncate(handle, 3)
    assert disk.read(handle, 0, 99) == b"abc"
    disk.truncate(handle, 6)
    assert disk.read(handle, 0, 99) == b"abc\0\0\0"
    disk.truncate(handle, 0)
    assert disk.size(handle) == 0


def test_allocate_zero_fills_and_keeps_contents(disk: Disk) -> None:
    handle = disk.open("a", create=True)
    disk.write(handle, 0, b"abc")
    length = (1 << 20) * 2 + 5
    disk.allocate(handle, length)
    assert disk.size(handle) == length
    assert disk.read(handle, 0, length) == b"abc" + bytes(length - 3)
    for shorter in (2, 0, -1):
        disk.allocate(handle, shorter)
        assert disk.size(handle) == length


def test_negative_offsets_and_lengths_are_invalid(disk: Disk) -> None:
    handle = disk.open("a", create=True)
    disk.write(handle, 0, b"abc")
    assert error_of(lambda: disk.read(handle, -1, 1)) == errno.EINVAL
    assert error_of(lambda: disk.read(handle, 0, -1)) == errno.EINVAL
    assert error_of(lambda: disk.write(handle, -1, b"x")) == errno.EINVAL
    assert error_of(lambda: disk.truncate(handle, -1)) == errno.EINVAL
    assert get(disk, "a") == b"abc"


def test_sync_calls_change_nothing_that_reads_see(disk: Disk) -> None:
    disk.make_dir("d")
    handle = disk.open("d/a", create=True)
    disk.write(handle, 0, b"abc")
    disk.sync(handle)
    disk.sync(handle)
    disk.sync_dir("d")
    disk.sync_dir("")
    disk.sync_all()
    assert disk.read(handle, 0, 99) == b"abc"
    assert disk.list("") == ["d"] and disk.list("d") == ["a"]


# ---- names


def test_exists_for_files_directories_and_neither(disk: Disk) -> None:
    disk.make_dir("d/e")
    put(disk, "d/a", b"")
    assert disk.exists("d") and disk.exists("d/e") and disk.exists("d/a") and disk.exists("")
    assert not disk.exists("a") and not disk.exists("x/y") and not disk.exists("d/a/b")


def test_list_is_sorted_shallow_and_empty_when_missing(disk: Disk) -> None:
    disk.make_dir("d")
    for name in ("b", "a", "10", "9", "B"):
        put(disk, f"d/{name}", b"")
    disk.make_dir("d/c/deep")
    assert disk.list("d") == ["10", "9", "B", "a", "b", "c"]
    assert disk.list("") == ["d"]
    assert disk.list("missing") == [] and disk.list("missing/too") == []
    assert error_of(lambda: disk.list("d/a")) == errno.ENOTDIR


def test_make_dir_makes_parents_and_may_repeat(disk: Disk) -> None:
    disk.make_dir("a/b/c")
    put(disk, "a/b/c/f", b"x")
    disk.make_dir("a/b/c")
    disk.make_dir("a")
    assert get(disk, "a/b/c/f") == b"x"


def test_make_dir_over_a_file_fails(disk: Disk) -> None:
    put(disk, "f", b"")
    assert error_of(lambda: disk.make_dir("f")) == errno.EEXIST
    assert error_of(lambda: disk.make_dir("f/d")) == errno.ENOTDIR


def test_rename_moves_and_replaces_files(disk: Disk) -> None:
    put(disk, "a", b"new")
    put(disk, "b", b"old")
    old = disk.open("b")
    disk.rename("a", "b")
    assert not disk.exists("a")
    assert get(disk, "b") == b"new"
    assert disk.read(old, 0, 9) == b"old"
    disk.rename("b", "b")
    assert get(disk, "b") == b"new"


def test_rename_between_directories(disk: Disk) -> None:
    disk.make_dir("d")
    disk.make_dir("e")
    put(disk, "d/a", b"x")
    handle = disk.open("d/a")
    disk.rename("d/a", "e/b")
    assert disk.list("d") == [] and disk.list("e") == ["b"]
    disk.write(handle, 1, b"y")
    assert get(disk, "e/b") == b"xy"


def test_rename_moves_directories_with_their_contents(disk: Disk) -> None:
    disk.make_dir("d/sub")
    put(disk, "d/sub/a", b"x")
    handle = disk.open("d/sub/a")
    disk.make_dir("empty")
    disk.rename("d", "empty")
    assert not disk.exists("d")
    assert get(disk, "empty/sub/a") == b"x"
    disk.rename("empty/sub", "up")
    assert get(disk, "up/a") == b"x" and disk.list("empty") == []
    disk.write(handle, 0, b"y")
    assert get(disk, "up/a") == b"y"


def test_rename_that_cannot_be(disk: Disk) -> None:
    disk.make_dir("d/e")
    disk.make_dir("g")
    put(disk, "f", b"x")
    assert error_of(lambda: disk.rename("missing", "x")) == errno.ENOENT
    assert error_of(lambda: disk.rename("f", "missing/x")) == errno.ENOENT
    assert error_of(lambda: disk.rename("g", "d")) == errno.ENOTEMPTY
    assert error_of(lambda: disk.rename("f", "d")) == errno.EISDIR
    assert error_of(lambda: disk.rename("d", "f")) == errno.ENOTDIR
    assert error_of(lambda: disk.rename("d", "d/e/x")) == errno.EINVAL
    assert error_of(lambda: disk.rename("d/e", "d")) == errno.ENOTEMPTY
    assert disk.list("") == ["d", "f", "g"]


def test_remove_takes_the_name_and_leaves_open_handles(disk: Disk) -> None:
    put(disk, "a", b"abc")
    handle = disk.open("a")
    disk.remove("a")
    assert not disk.exists("a") and disk.list("") == []
    assert disk.read(handle, 0, 3) == b"abc"
    put(disk, "a", b"new")
    assert disk.read(handle, 0, 3) == b"abc"


def test_remove_absent_is_fine_and_a_directory_is_not(disk: Disk) -> None:
    disk.make_dir("d")
    disk.remove("a")
    disk.remove("missing/a")
    assert error_of(lambda: disk.remove("d")) == errno.EISDIR


def test_remove_dir_only_when_empty_and_absent_is_fine(disk: Disk) -> None:
    disk.make_dir("d/e")
    put(disk, "f", b"")
    assert error_of(lambda: disk.remove_dir("d")) == errno.ENOTEMPTY
    assert error_of(lambda: disk.remove_dir("f")) == errno.ENOTDIR
    disk.remove_dir("d/e")
    disk.remove_dir("d")
    disk.remove_dir("d")
    disk.remove_dir("missing/d")
    assert disk.list("") == ["f"]


def test_sync_dir_needs_a_directory(disk: Disk) -> None:
    put(disk, "f", b"")
    assert error_of(lambda: disk.sync_dir("missing")) == errno.ENOENT
    assert error_of(lambda: disk.sync_dir("f")) == errno.ENOTDIR


# ---- the machine


def test_boot_id_is_steady(disk: Disk) -> None:
    assert isinstance(disk.boot_id(), str)
    assert disk.boot_id() == disk.boot_id()


def test_random_u64_is_in_range_and_does_not_repeat(disk: Disk) -> None:
    values = [disk.random_u64() for _ in range(200)]
    assert all(0 <= value < 1 << 64 for value in values)
    assert len(set(values)) == len(values)
    assert max(values) >= 1 << 56


def test_posix_contents_outlive_the_object(tmp_path: Path) -> None:
    root = str(tmp_path / "not" / "yet" / "there")
    put(PosixDisk(root), "a", b"x")
    assert get(PosixDisk(root), "a") == b"x"


def test_posix_loops_over_short_writes_and_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, pread = os.pwrite, os.pread
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: pread(fd, min(length, 2), offset))
    disk = PosixDisk(str(tmp_path))
    handle = disk.open("a", create=True)
    disk.write(handle, 1, b"abcdefgh")
    disk.allocate(handle, 20)
    assert disk.read(handle, 0, 99) == b"\0abcdefgh" + bytes(11)
    assert disk.read(handle, 1, 5) == b"abcde"


# ---- both at once

# Repeated names are drawn more often.
CALLS = [
    "open",
    "open",
    "close",
    "size",
    "read",
    "write",
    "write",
    "truncate",
    "allocate",
    "sync",
    "exists",
    "list",
    "make_dir",
    "rename",
    "rename",
    "remove",
    "remove_dir",
    "sync_dir",
]
PATHS = ["a", "b", "d", "e", "d/a", "d/b", "e/a", "d/e", "d/e/a", "a/b", ""]
NAMED_PATHS = PATHS[:-1]  # the root itself is neither moved nor removed


@pytest.mark.parametrize("seed", range(8))
def test_random_walks_agree(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    disks: list[Disk] = [PosixDisk(str(tmp_path)), SimDisk(seed)]
    handles: list[list[int]] = []  # one entry per open file: its handle on each disk

    def both(name: str, *args: object, on: list[int] | None = None, **options: object) -> list[object]:
        """Call `name` on each disk, with that disk's handle of `on` first; results, or errnos."""
        outcomes: list[object] = []
        for i, disk in enumerate(disks):
            try:
                outcomes.append(getattr(disk, name)(*([] if on is None else [on[i]]), *args, **options))
            except OSError as error:
                outcomes.append(("error", error.errno))
        return outcomes

    for step in range(400):
        name = rng.choice(CALLS)
        path, other = rng.choice(PATHS), rng.choice(NAMED_PATHS)
        offset, length = rng.randint(0, 3000), rng.randint(0, 3000)
        data = rng.randbytes(rng.randint(0, 1500))
        args: dict[str, tuple[object, ...]] = {
            "read": (offset, length),
            "write": (offset, data),
            "truncate": (length,),
            "allocate": (length,),
        }
        if name == "open":
            outcomes = both(name, path, create=rng.random() < 0.7 and path != "")
            opened = [outcome for outcome in outcomes if isinstance(outcome, int)]
            if len(opened) == len(disks):
                handles.append(opened)
                continue
        elif name in ("close", "size", "read", "write", "truncate", "allocate", "sync"):
            if not handles:
                continue
            at = rng.randrange(len(handles))
            outcomes = both(name, *args.get(name, ()), on=handles[at])
            if name == "close":
                del handles[at]
        elif name == "rename":
            outcomes = both(name, path or "d", other)
        elif name in ("remove", "remove_dir"):
            outcomes = both(name, other)
        else:
            outcomes = both(name, path)
        assert outcomes[0] == outcomes[1], f"step {step}: {name} {path!r} {other!r}"

    sim = disks[1]
    assert isinstance(sim, SimDisk)
    on_files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert sim.paths() == on_files
    for path in on_files:
        assert get(disks[0], path) == get(sim, path)
    for pair in handles:
        both("close", on=pair)
