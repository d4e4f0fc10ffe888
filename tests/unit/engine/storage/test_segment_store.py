"""Goal: every SegmentStore keeps the same contract, so that code that works with a directory works with an object
store.

Method: each test runs with a directory, with the simulated disk, and with a test double that can neither rename nor
write in place. Unfinished files, which only a file system has, are tested on the disk, with a crash and a failure at
each call.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.faults import fault
from tests.support.sim_disk import SimDisk, SimulatedCrash
from tests.support.stores import ObjectStore
from topics.engine.core.ports import SegmentStore
from topics.engine.storage.segment_store import DiskSegmentStore
from workers.shard.local_store import LocalSegmentStore, claim

KEY = "topics/0000000000000400/seg-0000000000000001-0.data"
OTHER = "topics/0000000000000400/seg-0000000000000005-0.data"
FAR = "topics/0000000000000800/seg-0000000000000001-0.data"


@pytest.fixture(params=["local", "sim", "object"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> SegmentStore:
    if request.param == "local":
        return LocalSegmentStore(str(tmp_path / "cold"))
    return DiskSegmentStore(SimDisk(1)) if request.param == "sim" else ObjectStore()


def test_stored_objects_are_read_back(store: SegmentStore) -> None:
    store.put(KEY, [b"abc", b"", b"defg"])
    assert store.exists(KEY)
    assert store.length(KEY) == 7
    assert store.read_range(KEY, 0, 100) == b"abcdefg"
    assert store.read_range(KEY, 2, 3) == b"cde"
    assert store.read_range(KEY, 7, 3) == b""


def test_an_empty_file_is_one(store: SegmentStore) -> None:
    store.put(KEY, [])
    assert store.exists(KEY)
    assert store.length(KEY) == 0


def test_put_replaces(store: SegmentStore) -> None:
    store.put(KEY, [b"a long one that was there before"])
    store.put(KEY, [b"short"])
    assert store.read_range(KEY, 0, 100) == b"short"


def test_absent_is_not_found(store: SegmentStore) -> None:
    assert not store.exists(KEY)
    for ask in (lambda: store.length(KEY), lambda: store.read_range(KEY, 0, 1)):
        with pytest.raises(FileNotFoundError):
            ask()
    store.delete(KEY)


def test_deleted_is_gone_and_can_come_back(store: SegmentStore) -> None:
    store.put(KEY, [b"x"])
    store.put(OTHER, [b"y"])
    store.delete(KEY)
    assert not store.exists(KEY)
    assert store.list("topics/") == [OTHER]
    store.delete(OTHER)
    assert store.list("topics/") == []
    store.put(KEY, [b"z"])
    assert store.read_range(KEY, 0, 9) == b"z"


def test_list_goes_by_prefix_and_is_sorted(store: SegmentStore) -> None:
    for key in (FAR, OTHER, KEY):
        store.put(key, [b"x"])
    assert store.list("topics/") == [KEY, OTHER, FAR]
    assert store.list("topics/0000000000000400/") == [KEY, OTHER]
    assert store.list("topics/0000000000000400/seg-0000000000000005") == [OTHER]
    assert store.list("topics/0000000000000c00/") == []


def test_a_put_that_fails_half_way_leaves_what_was_there(store: SegmentStore) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise OSError(errno.EIO, "the source is gone")

    store.put(KEY, [b"before"])
    with pytest.raises(OSError, match="the source is gone"):
        store.put(KEY, pieces())
    with pytest.raises(OSError, match="the source is gone"):
        store.put(OTHER, pieces())
    assert store.read_range(KEY, 0, 100) == b"before"
    assert store.list("topics/") == [KEY]


def test_a_put_in_steps_is_seen_when_it_has_come_to_its_end(store: SegmentStore) -> None:
    taken: list[bytes] = []

    def pieces() -> Iterator[bytes]:
        for piece in (b"ab", b"cd", b"ef"):
            taken.append(piece)
            yield piece

    store.put(KEY, [b"before"])
    steps = store.put_steps(KEY, pieces())
    assert taken == [], "nothing must be done before the first step"
    seen: list[int] = []
    for _ in steps:
        seen.append(len(taken))
        assert store.read_range(KEY, 0, 100) == b"before"
    assert seen == sorted(set(seen)), "each step must take a piece or two"
    assert len(seen) >= 2
    assert store.read_range(KEY, 0, 100) == b"abcdef"
    assert store.list("") == [KEY]


def test_a_put_that_is_given_up_between_two_steps_has_done_nothing(store: SegmentStore) -> None:
    store.put(KEY, [b"before"])
    for key in (KEY, OTHER):
        steps = store.put_steps(key, [b"ab", b"cd", b"ef"])
        next(steps)
        steps.close()
    assert store.list("") == [KEY]
    assert store.read_range(KEY, 0, 100) == b"before"
    store.put(OTHER, [b"later"])
    assert store.read_range(OTHER, 0, 100) == b"later"


# ---- the wrong directory


@fault(
    "disk",
    "the cold directory is an empty mount point, or that of another server",
    "nothing is written there, and nothing is taken for lost; reads are 503 until it is the right one",
)
def test_a_directory_that_is_not_the_one_is_left_alone(tmp_path: Path) -> None:
    data, cold, other = (str(tmp_path / name) for name in ("data", "cold", "other"))
    (tmp_path / "data").mkdir()
    identity = claim(data, cold)
    assert claim(data, cold) == identity
    store = LocalSegmentStore(cold, identity=identity)
    store.put(KEY, [b"x"])
    (tmp_path / "cold").rename(tmp_path / "away")
    (tmp_path / "cold").mkdir()
    for call in (
        lambda: store.put(KEY, [b"y"]),
        lambda: store.read_range(KEY, 0, 1),
        lambda: store.exists(KEY),
        lambda: store.length(KEY),
        lambda: store.list("topics/"),
        lambda: store.delete(KEY),
    ):
        with pytest.raises(OSError, match="is the disk mounted"):
            call()
    assert list((tmp_path / "cold").iterdir()) == []
    assert claim(data, cold) == identity
    (tmp_path / "cold").rmdir()
    (tmp_path / "away").rename(tmp_path / "cold")
    assert store.read_range(KEY, 0, 9) == b"x"
    (tmp_path / "data2").mkdir()
    claim(str(tmp_path / "data2"), other)
    with pytest.raises(OSError, match="belongs to another data directory"):
        LocalSegmentStore(other, identity=identity).put(KEY, [b"y"])


# ---- unfinished files


def holders(disk: SimDisk, needle: bytes) -> list[str]:
    return [path for path in disk.paths() if needle in bytes(disk._find(path).live)]  # type: ignore[union-attr, arg-type]


def change(store: SegmentStore) -> None:
    store.put(KEY, [b"new", b" content"])
    store.delete(OTHER)


def prepared() -> SimDisk:
    disk = SimDisk(7)
    store = DiskSegmentStore(disk)
    store.put(KEY, [b"old content"])
    store.put(OTHER, [b"to be deleted"])
    return disk


def calls_of(work: Callable[[SegmentStore], None]) -> int:
    disk = prepared()
    before = disk.calls
    work(DiskSegmentStore(disk))
    return disk.calls - before


@fault(
    "disk",
    "the power fails or the process is killed at any call of a put or a delete in the cold directory",
    "each file is whole, old or new; what was done lasts, and the next put or delete removes what is unfinished",
)
@pytest.mark.parametrize("how", ["power", "kill"])
def test_a_crash_at_every_call(how: str) -> None:
    for number in range(1, calls_of(change) + 1):
        disk = prepared()
        disk.crash_at(number, midway=True)
        with pytest.raises(SimulatedCrash):
            change(DiskSegmentStore(disk))
        disk.crash() if how == "power" else disk.kill()
        store = DiskSegmentStore(disk)
        assert store.read_range(KEY, 0, 100) in (b"old content", b"new content"), number
        if store.exists(OTHER):
            assert store.read_range(OTHER, 0, 100) == b"to be deleted"
        store.delete("topics/none/none")
        assert [path for path in disk.paths() if path.startswith("staging/")] == [], number
        change(store)
        assert store.read_range(KEY, 0, 100) == b"new content"


def test_completed_operations_survive_a_power_cut() -> None:
    for seed in range(30):
        disk = SimDisk(seed)
        store = DiskSegmentStore(disk)
        store.put(KEY, [b"old"])
        store.put(OTHER, [b"secret"])
        store.put(KEY, [b"new"])
        store.delete(OTHER)
        disk.crash()
        store = DiskSegmentStore(disk)
        assert store.list("") == [KEY]
        assert store.read_range(KEY, 0, 9) == b"new"
        assert holders(disk, b"secret") == []


def test_a_failure_at_every_call_is_told_and_changes_nothing_else() -> None:
    for number in range(1, calls_of(change) + 1):
        disk = prepared()
        disk.fail_at(number, errno.EIO)
        store = DiskSegmentStore(disk)
        with pytest.raises(OSError, match=r"."):
            change(store)
        assert store.read_range(KEY, 0, 100) in (b"old content", b"new content"), number
        change(store)
        assert store.list("topics/") == [KEY]
        assert store.read_range(KEY, 0, 100) == b"new content"
