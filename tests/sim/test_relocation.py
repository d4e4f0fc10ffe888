"""Relocation to the cold tier: what moves when, what a crash or a failure at any step leaves, and how space is freed.

Goal: a segment is in at least one tier at every moment, no reader ever sees a difference, and a store that fails or
returns wrong data loses nothing. Method: an engine on a SimDisk with a store that has neither rename nor in-place
writes, or with a second SimDisk behind it; every call of a relocation crashes or fails once.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator

import msgspec
import pytest

from tests.support import length
from tests.support.engine_harness import (
    FSYNC,
    SMALL,
    Harness,
    append,
    lose,
    numbered,
    overwrite,
)
from tests.support.faults import fault
from tests.support.sim_disk import SimDisk, SimulatedCrash
from tests.support.stores import ObjectStore
from tests.support.tiered_engine import (
    TIERED,
    check_kept,
    cold_files,
    data_files,
    filled,
    moved,
    records,
    relocated,
    tiers,
)
from topics.api import limits
from topics.api.errors import Throttled
from topics.engine.commands import topics as c
from topics.engine.storage.segment_store import DiskSegmentStore
from topics.engine.upkeep.loading import is_known_leftover

# ---- relocation


def test_old_segments_move_and_are_read_from_there() -> None:
    h = filled()
    h.checkpoint()
    assert tiers(h) == ["cold", "cold", "hot", "hot"]
    assert len(data_files(h)) == 4, "a snapshot still lists them as hot"
    assert "seg-0000000000000001-0.data" in cold_files(h)
    h.checkpoint()
    h.checkpoint()
    assert data_files(h) == ["seg-0000000000000009-0.data", "seg-000000000000000d-0.data"]
    assert cold_files(h) == [
        f"seg-000000000000000{first}-0.{suffix}"
        for first in (1, 5)
        for suffix in ("data", "dict", "idx", "sum")
    ]
    assert h.rows("t") == records(*range(1, 15))


def test_the_hot_copy_goes_without_any_more_writes() -> None:
    """No request comes any more; the checkpoints that release the hot copy run by time."""
    h = Harness(msgspec.structs.replace(TIERED, snapshot_interval_ms=1000), cold=ObjectStore())
    h.put("t", FSYNC)
    for seq in range(1, 15):
        h.append("t", numbered(seq, 1)[0])
    while h._wake_at is not None:
        h.pass_time(5_000)
    assert data_files(h) == ["seg-0000000000000009-0.data", "seg-000000000000000d-0.data"]
    assert h.engine.counters["checkpoints"] == 3


def test_while_both_have_it_the_hot_one_is_read() -> None:
    h = filled()
    h.checkpoint()
    reads = h.cold.count("read_range")  # type: ignore[union-attr]
    assert h.rows("t") == records(*range(1, 15))
    assert h.cold.count("read_range") == reads  # type: ignore[union-attr]


def test_a_page_tells_how_many_cold_segments_it_read() -> None:
    h = relocated()
    assert h.diff("t", 0).cold_segments == 2
    assert h.diff("t", 4).cold_segments == 1
    assert h.diff("t", 8).cold_segments == 0
    page = h.do(c.Diff("t", 0, frames=True))
    assert (page.count, page.cold_segments) == (14, 2)


@pytest.mark.parametrize(
    ("retain", "size", "cold"),
    [(0, 0, 3), (1, 0, 2), (2, 0, 1), (4, 0, 0), (4, 1, 3), (4, 400, 2), (1, 9999, 2)],
)
def test_hot_tier_is_bounded_by_segments_and_bytes(retain: int, size: int, cold: int) -> None:
    config = msgspec.structs.replace(TIERED, hot_retain_segments=retain, hot_retain_bytes=size)
    h = Harness(config, cold=ObjectStore())
    h.put("t", FSYNC)
    for seq in range(1, 15):
        h.append("t", numbered(seq, 1)[0])
    h.checkpoint()
    assert tiers(h) == ["cold"] * cold + ["hot"] * (4 - cold)


def test_a_restart_finds_everything_and_reads_no_segment() -> None:
    h = relocated()
    calls = len(h.cold.calls)  # type: ignore[union-attr]
    h.restart()
    assert len(h.cold.calls) == calls, "the start must not wait for the cold tier"  # type: ignore[union-attr]
    h.line.calls.clear()
    assert h.state("t").count == 14
    assert h.line.reads(".data") == []
    assert h.rows("t") == records(*range(1, 15))
    h.kill_and_open()
    assert h.rows("t") == records(*range(1, 15))


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_hot_copy_that_a_stop_left_goes_though_nobody_uses_the_topic(how: str) -> None:
    h = filled()
    h.checkpoint()
    assert tiers(h) == ["cold", "cold", "hot", "hot"]
    assert len(data_files(h)) == 4
    h.checkpoint()
    h.restart() if how == "stop" else h.kill_and_open()
    for _ in range(3):
        h.pass_time(h.config.snapshot_interval_ms + 10_000)
    assert h.engine.shard.state.published["t"].stored is not None, "the file must not be touched"
    assert data_files(h) == ["seg-0000000000000009-0.data", "seg-000000000000000d-0.data"]
    assert h.rows("t") == records(*range(1, 15))


def test_a_cold_tier_that_is_set_up_later_gets_what_is_there() -> None:
    h = Harness(TIERED)
    h.put("t", FSYNC)
    for seq in range(1, 15):
        h.append("t", numbered(seq, 1)[0])
    h.close()
    h.cold = ObjectStore()
    h.open()
    h.rest()
    assert tiers(h) == ["cold", "cold", "hot", "hot"]


def test_deletes_of_cold_records_stay_on_the_hot_side() -> None:
    h = relocated()
    objects = dict(h.cold.objects)  # type: ignore[union-attr]
    h.do(c.Delete("t", seqs=[2, 7]))
    h.checkpoint()
    assert "seg-0000000000000001-0.del" in h.segment_files("t")
    assert h.cold.objects == objects  # type: ignore[union-attr]
    for _ in range(2):
        assert h.seqs("t") == [1, 3, 4, 5, 6, *range(8, 15)]
        h.kill_and_open()


def test_a_partly_dead_cold_segment_is_left_alone_and_a_dead_one_goes() -> None:
    h = relocated()
    h.config = msgspec.structs.replace(TIERED, rewrite_dead_share=0.3)
    h.restart()
    h.do(c.Delete("t", seqs=[1, 2, 3, 5, 6, 7, 8]))
    for _ in range(4):
        h.append("t", b'"more"')
        h.checkpoint()
    assert [name for name in cold_files(h) if name.endswith(".data")] == [
        "seg-0000000000000001-0.data",
        "seg-0000000000000009-0.data",
    ]
    assert h.seqs("t")[:3] == [4, 9, 10]
    h.kill_and_open()
    assert h.seqs("t")[:3] == [4, 9, 10]


def test_a_copy_of_a_move_that_was_not_finished_goes_with_its_hot_segment() -> None:
    """The segment was copied, but no snapshot says so when the process dies; then its records are deleted before it is moved
    again.
    """
    store = ObjectStore()
    h = filled(store)
    h.checkpoint()
    assert tiers(h)[:2] == ["cold", "cold"]
    h.kill()
    store.is_down = True
    h.open()
    assert tiers(h)[:2] == ["hot", "hot"]
    h.do(c.Delete("t", before_seq=9))
    store.is_down = False
    for _ in range(4):
        h.pass_time(limits.COLD_PAUSE_MS_MAX)
        h.append("t", b'"more"')
        h.checkpoint()
    assert [name for name in cold_files(h) if name < "seg-0000000000000009"] == []
    assert h.seqs("t")[:2] == [9, 10]


@pytest.mark.parametrize("how", ["kill", "close"])
def test_a_dead_segment_in_the_middle_leaves_the_store_after_a_stop(how: str) -> None:
    """No snapshot names it any more, and there was no time to remove it from the store."""
    store = ObjectStore()
    h = moved(store)
    h.config = msgspec.structs.replace(TIERED, rewrite_dead_share=0.5)
    h.restart()
    h.rest()
    h.do(c.Delete("t", seqs=[5, 6, 7, 8]))
    store.is_down = True
    for _ in range(4):
        h.append("t", b"more")
        h.checkpoint()
    assert any("seg-0000000000000005" in key for key in store.objects)
    if how == "close":
        h.close()
    else:
        h.kill()
    store.is_down = False
    h.open()
    h.rest()
    h.pass_time(limits.COLD_PAUSE_MS_MAX)
    assert not [key for key in store.objects if "seg-0000000000000005" in key]
    assert [key for key in store.objects if "seg-0000000000000001" in key]
    assert h.seqs("t")[:6] == [1, 2, 3, 4, 9, 10]


def test_leftover_files_are_explained() -> None:
    h = moved(ObjectStore())
    log = h.engine.shard.state.published["t"]
    metas = [chunk.meta for chunk in log.chunks if chunk.meta is not None and chunk.first_seq != 5]
    assert is_known_leftover(log, 1, metas), "another generation"
    assert not is_known_leftover(log, 2, metas), "no segment of this topic begins there"
    assert is_known_leftover(log, 5, metas), "the gap of a dead segment"
    assert is_known_leftover(log, 900, metas), "left by an unfinished checkpoint"
    log.view.losses = [(5, 8, "corrupt")]
    assert not is_known_leftover(log, 5, metas), "lost data may be recoverable"


def test_a_dropped_topic_leaves_nothing() -> None:
    h = relocated()
    h.do(c.DropTopic("t"))
    h.rest()
    assert h.cold.objects == {}  # type: ignore[union-attr]


def test_a_topic_dropped_right_before_a_crash_leaves_nothing() -> None:
    h = relocated()
    (token,) = h.ask(c.DropTopic("t"))
    while token not in h.replies:
        h.run_job("sync")
    h.kill_and_open()
    h.rest()
    assert h.cold.objects == {}  # type: ignore[union-attr]


def test_objects_that_nothing_explains_are_left() -> None:
    store = ObjectStore()
    strangers = ["topics/ffffffffffffff00/seg-0000000000000001-0.data", "topics/notes.txt", "other/x"]
    for key in strangers:
        store.put(key, [b"x"])
    relocated(store)
    assert set(strangers) <= set(store.objects)


# ---- crashes and failures


def test_no_snapshot_is_read_while_it_serves() -> None:
    """The segments named by the kept snapshots are known since the start, whatever is left over."""
    store = ObjectStore()
    h = moved(store)
    h.do(c.Delete("t", seqs=[1, 2]))
    h.kill()
    overwrite(h.disk, "topics/0000000000000400/seg-0000000000000001-7.data", b"left")
    store.objects["topics/0000000000000400/seg-0000000000000001-7.data"] = b"left"
    h.open()
    h.line.calls.clear()
    h.rest()
    h.rows("t")
    h.pass_time(5000)
    assert not [path for name, path in h.line.calls if name == "read" and "/snap-" in path]
    assert "topics/0000000000000400/seg-0000000000000001-7.data" not in {*h.disk.paths(), *store.objects}


def life(h: Harness) -> None:
    """A relocation from beginning to end, while the topic is written."""
    h.checkpoint()
    h.append("t", numbered(15, 1)[0])
    h.checkpoint()
    h.do(c.Delete("t", seqs=[3]))
    h.checkpoint()
    h.checkpoint()


def store_calls() -> int:
    h = filled()
    before = len(h.cold.calls)  # type: ignore[union-attr]
    life(h)
    return len(h.cold.calls) - before  # type: ignore[union-attr]


@fault(
    "disk",
    "the power fails or the process is killed at any call to the cold tier while segments move there",
    "every record is served by the next start, from one tier or the other, and the move is done again",
)
@pytest.mark.parametrize("how", ["power", "kill"])
def test_a_crash_at_every_call_to_the_store(how: str) -> None:
    count = store_calls()
    assert count > 20
    for number in length.calls(count, each=6, shifted=how == "power"):
        store = ObjectStore()
        h = filled(store)
        store.crash_at(number)
        with pytest.raises(SimulatedCrash):
            life(h)
        h.power_cut() if how == "power" else h.kill()
        h.open()
        check_kept(h, number)


@fault(
    "disk",
    "any call to the cold tier fails while segments move there",
    "nothing is refused and nothing is lost: the segment stays where it is until a later try",
)
def test_a_failure_of_every_call_to_the_store() -> None:
    for number in length.calls(store_calls(), each=6):
        store = ObjectStore()
        h = filled(store)
        store.fail_at(number, errno.EIO)
        life(h)
        assert h.engine.shard.state.read_only is None
        assert h.engine.counters["cold_failures"] == 1
        check_kept(h, number)


@pytest.mark.parametrize("share", range(4))
@pytest.mark.parametrize("how", ["power", "kill"])
def test_a_crash_at_every_call_to_the_hot_disk(how: str, share: int) -> None:
    h = filled()
    before = h.disk.calls
    life(h)
    for number in length.calls(h.disk.calls - before, each=24, shifted=how == "power")[share::4]:
        h = filled()
        h.disk.crash_at(number, midway=True)
        with pytest.raises(SimulatedCrash):
            life(h)
        h.power_cut() if how == "power" else h.kill()
        h.open()
        check_kept(h, number)


@pytest.mark.parametrize("how", ["power", "kill"])
def test_a_crash_at_every_call_to_a_cold_directory(how: str) -> None:
    """Both tiers lose power at once."""

    def begin() -> tuple[Harness, SimDisk]:
        far = SimDisk(5)
        h = Harness(TIERED, cold=DiskSegmentStore(far))
        h.put("t", FSYNC)
        for seq in range(1, 15):
            h.append("t", numbered(seq, 1)[0])
        return h, far

    h, far = begin()
    before = far.calls
    life(h)
    for number in length.calls(far.calls - before, each=44, shifted=how == "power"):
        h, far = begin()
        far.crash_at(number, midway=True)
        with pytest.raises(SimulatedCrash):
            life(h)
        far.crash() if how == "power" else far.kill()
        h.power_cut() if how == "power" else h.kill()
        h.cold = DiskSegmentStore(far)
        h.open()
        check_kept(h, number)


def test_an_older_snapshot_finds_what_it_calls_hot() -> None:
    h = filled()
    h.checkpoint()
    h.append("t", numbered(15, 1)[0])
    h.checkpoint()
    assert tiers(h)[:2] == ["cold", "cold"]
    h.kill()
    lose(h.disk, h.snapshots()[-1])
    h.open()
    assert h.rows("t") == records(*range(1, 16))
    check_kept(h, "older")


def test_a_damaged_segment_stays_hot() -> None:
    h = filled()
    h.config = msgspec.structs.replace(TIERED, hot_retain_segments=9)
    h.restart()
    h.disk.flip_bit(f"{h.topic_dir('t')}/seg-0000000000000001-0.data", 60)
    h.config = TIERED
    h.restart()
    h.rest()
    assert tiers(h) == ["hot", "cold", "hot", "hot"]
    assert not any(name.startswith("seg-0000000000000001") for name in cold_files(h))
    assert h.gaps("t") == [(1, 1, "corrupt")]


def test_a_damaged_index_is_not_copied() -> None:
    """A job that reads the cold tier would find a segment that does not match its digests."""
    h = filled()
    h.config = msgspec.structs.replace(TIERED, hot_retain_segments=9)
    h.restart()
    h.config = TIERED
    h.kill()
    h.open()
    h.disk.flip_bit(f"{h.topic_dir('t')}/seg-0000000000000001-0.idx", 40)
    h.rest()
    assert tiers(h) == ["hot", "cold", "hot", "hot"]
    assert not any(name.startswith("seg-0000000000000001") for name in cold_files(h))
    assert h.rows("t") == records(*range(1, 15))
    h.restart()
    assert h.rows("t") == records(*range(1, 15))


def test_a_store_that_loses_what_it_was_given_gets_no_pointer() -> None:
    store = ObjectStore()
    put_steps = store.put_steps

    def forgetful(key: str, pieces: Iterable[bytes]) -> Iterator[None]:
        yield from put_steps(key, pieces)
        if key.endswith(".data"):
            store.objects[key] = store.objects[key][:-1]

    store.put_steps = forgetful  # type: ignore[method-assign, assignment]
    h = filled(store)
    h.checkpoint()
    assert tiers(h) == ["hot"] * 4
    assert "in the cold tier differs from what was written" in h.engine.relocator.problem


# ---- space


def test_appends_end_before_the_disk_is_full() -> None:
    h = Harness(msgspec.structs.replace(SMALL, min_free_bytes=1000))
    h.put("t", FSYNC)
    h.append("t", b'"1"', b'"2"')
    h.disk.spare_bytes = 999
    h.clock.advance(1001)
    refused = h.refused(append("t", b'"3"'), Throttled)
    assert refused.detail["limit"] == "disk_full"
    h.do(c.Delete("t", seqs=[1]))
    h.checkpoint()
    assert h.rows("t") == [(2, b'"2"')]
    h.disk.spare_bytes = 1000
    h.refused(append("t", b'"3"'), Throttled)
    h.clock.advance(1001)
    h.append("t", b'"3"')


@fault(
    "disk",
    "free space falls below the configured minimum, and only log files that an older snapshot needs could be removed",
    "checkpoints remove them without any further change, and writes resume by themselves",
)
def test_low_space_ends_by_itself() -> None:
    h = Harness(msgspec.structs.replace(SMALL, min_free_bytes=1000))
    h.put("t", FSYNC)
    for _ in range(20):
        h.append("t", b'"%s"' % (b"x" * 400))
    h.checkpoint()
    files = len(h.engine.wal.files)
    assert files > 2, "the log must be long"
    h.disk.spare_bytes = 999
    for _ in range(4):
        h.clock.advance(5001)
        h.refused(append("t", b'"more"'), Throttled)
        h.rest()
    assert len(h.engine.wal.files) < files
    h.disk.spare_bytes = 1000
    h.clock.advance(1001)
    h.append("t", b'"more"')


def test_usage_tells_what_lies_where() -> None:
    h = relocated()
    usage = h.engine.checkpointer.usage.totals
    assert usage["cold"].live > 0
    assert (usage["cold"].dead, usage["hot"].dead) == (0, 0)
    h.do(c.Delete("t", seqs=[1, 2]))
    h.checkpoint()
    h.checkpoint()
    assert usage["cold"].dead == usage["cold"].reclaimable > 0
    h.restart()
    usage = h.engine.checkpointer.usage.totals
    assert usage["cold"].live > 0
    h.do(c.DropTopic("t"))
    h.rest()
    assert (usage["cold"].live, usage["hot"].live) == (0, 0)
