"""The cold tier: what moves there and when, what a crash or a failure at any step leaves, and what readers see of it.

Goal: a segment is in at least one place at every moment, no reader ever sees a difference, and a store that is slow,
down or damaged costs nothing but the reads that need it. Method: an engine on a SimDisk with a store that has neither
rename nor in-place writes, or with a second SimDisk behind it; every call of a relocation crashes or fails once.
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
    holders,
    lose,
    numbered,
    overwrite,
    rows_of,
)
from tests.support.faults import fault
from tests.support.sim_disk import SimDisk, SimulatedCrash
from tests.support.stores import ObjectStore
from topics.engine import commands as c
from topics.engine import consumer_commands as con
from topics.engine import limits
from topics.engine import merge_commands as mrg
from topics.engine.config import TopicConfig
from topics.engine.errors import ColdStoreFailed, ErasePutOff, Throttled
from topics.engine.loading import is_explained
from topics.engine.manifest import is_of_manifests
from topics.engine.segment_store import DiskSegmentStore
from topics.engine.subjects import TagMatch

TIERED = msgspec.structs.replace(SMALL, hot_retain_segments=1, cold_cache_bytes=1 << 20)
SECRET = b'"the secret that nobody may find again: 4711-0815"'
NEEDLE = b"nobody may find again"


def records(*seqs: int) -> list[tuple[int, bytes]]:
    return [(seq, numbered(seq, 1)[0]) for seq in seqs]


def filled(store: ObjectStore | None = None, *, count: int = 14, secret: int = 0) -> Harness:
    """Segments of 4 records, the first ones on their way to the cold tier."""
    h = Harness(TIERED, cold=store if store is not None else ObjectStore())
    h.put("t", FSYNC)
    for seq in range(1, count + 1):
        payload = SECRET if seq == secret else numbered(seq, 1)[0]
        h.append("t", payload, tag=b"a" if seq % 2 else b"b")
    return h


def relocated(store: ObjectStore | None = None, **options: int) -> Harness:
    """Two segments in the cold tier alone, one sealed and one open on the hot tier."""
    h = filled(store, **options)
    for _ in range(3):
        h.checkpoint()
    assert data_files(h) == ["seg-0000000000000009-0.data", "seg-000000000000000d-0.data"]
    return h


def moved(store: ObjectStore) -> Harness:
    """Four segments in the cold tier alone."""
    h = filled(store, count=22)
    for _ in range(3):
        h.checkpoint()
    assert tiers(h)[:4] == ["cold"] * 4
    return h


def data_files(h: Harness) -> list[str]:
    return [name for name in h.segment_files("t") if name.endswith(".data")]


def cold_files(h: Harness) -> list[str]:
    assert isinstance(h.cold, ObjectStore)
    names = [key.rpartition("/")[2] for key in sorted(h.cold.objects)]
    return [name for name in names if not is_of_manifests(name)]


def tiers(h: Harness, topic: str = "t") -> list[str]:
    log = h.engine.shard.published[topic]
    metas = log.stored if log.stored is not None else [chunk.meta for chunk in log.chunks]
    return [meta.tier for meta in metas if meta is not None]


# ---- moving


def test_old_segments_move_and_are_read_from_there() -> None:
    h = filled()
    h.checkpoint()
    assert tiers(h) == ["cold", "cold", "hot", "hot"]
    assert len(data_files(h)) == 4, "a snapshot still calls them hot"
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
    """Nothing is touched any more; the checkpoints that let go of it come by time."""
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
def test_what_stays_hot_goes_by_segments_and_by_bytes(retain: int, size: int, cold: int) -> None:
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
    assert len(h.cold.calls) == calls, "a start must not wait for the cold tier"  # type: ignore[union-attr]
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
    assert h.engine.shard.published["t"].stored is not None, "nobody has touched it"
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


@pytest.mark.parametrize("how", ["kill", "close"])
def test_a_dead_segment_in_the_middle_leaves_the_store_after_a_stop(how: str) -> None:
    """No snapshot names it any more, and the store had no time to let it go."""
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


def test_what_explains_a_leftover() -> None:
    h = moved(ObjectStore())
    log = h.engine.shard.published["t"]
    metas = [chunk.meta for chunk in log.chunks if chunk.meta is not None and chunk.first_seq != 5]
    assert is_explained(log, 1, metas), "another generation"
    assert not is_explained(log, 2, metas), "no segment of this topic can begin there"
    assert is_explained(log, 5, metas), "a hole that a dead segment left"
    assert is_explained(log, 900, metas), "a checkpoint that was not finished"
    log.view.losses = [(5, 8, "corrupt")]
    assert not is_explained(log, 5, metas), "what is lost may be wanted yet"


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
    """Which segments the kept snapshots name is known since the start, whatever is left over."""
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
    """A relocation from its beginning to its end, on a topic that goes on."""
    h.checkpoint()
    h.append("t", numbered(15, 1)[0])
    h.checkpoint()
    h.do(c.Delete("t", seqs=[3]))
    h.checkpoint()
    h.checkpoint()


def check(h: Harness, note: object) -> None:
    """All that was acknowledged is there, and the next relocation comes to its end."""
    seqs = h.seqs("t")
    assert set(range(1, 15)) - {3} <= set(seqs), note
    assert h.gaps("t") == [], note
    h.rest()
    for _ in range(3):
        h.pass_time(limits.COLD_PAUSE_MS_MAX)
        h.append("t", b'"after"')
        h.checkpoint()
    assert h.rows("t")[: len(seqs)] == [(seq, numbered(seq, 1)[0]) for seq in seqs if seq in range(1, 16)], (
        note
    )
    assert "seg-0000000000000001-0.data" not in data_files(h), note
    h.kill_and_open()
    assert h.seqs("t")[: len(seqs)] == seqs, note


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
    for number in range(1, count + 1):
        store = ObjectStore()
        h = filled(store)
        store.crash_at(number)
        with pytest.raises(SimulatedCrash):
            life(h)
        h.power_cut() if how == "power" else h.kill()
        h.open()
        check(h, number)


@fault(
    "disk",
    "any call to the cold tier fails while segments move there",
    "nothing is refused and nothing is lost: the segment stays where it is until a later try",
)
def test_a_failure_of_every_call_to_the_store() -> None:
    for number in range(1, store_calls() + 1):
        store = ObjectStore()
        h = filled(store)
        store.fail_at(number, errno.EIO)
        life(h)
        assert h.engine.shard.read_only is None
        assert h.engine.counters["cold_failures"] == 1
        check(h, number)


@pytest.mark.parametrize("share", range(4))
@pytest.mark.parametrize("how", ["power", "kill"])
def test_a_crash_at_every_call_to_the_hot_disk(how: str, share: int) -> None:
    h = filled()
    before = h.disk.calls
    life(h)
    for number in range(1 + share, h.disk.calls - before + 1, length.pick(short=24, long=4)):
        h = filled()
        h.disk.crash_at(number, midway=True)
        with pytest.raises(SimulatedCrash):
            life(h)
        h.power_cut() if how == "power" else h.kill()
        h.open()
        check(h, number)


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
    for number in range(1, far.calls - before + 1, length.pick(short=11, long=1)):
        h, far = begin()
        far.crash_at(number, midway=True)
        with pytest.raises(SimulatedCrash):
            life(h)
        far.crash() if how == "power" else far.kill()
        h.power_cut() if how == "power" else h.kill()
        h.cold = DiskSegmentStore(far)
        h.open()
        check(h, number)


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
    check(h, "older")


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
    """A job that reads the cold tier would find a segment that does not agree with its digests."""
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
    assert "not in the cold tier as it was put there" in h.engine.relocator.problem


# ---- reading from a store that is slow, down or damaged


def test_a_slow_read_holds_up_nobody_else() -> None:
    h = relocated()
    (slow,) = h.ask(c.Diff("t", 0))
    slow_jobs = [job for job in h.jobs if job.kind == "cold_read"]
    h.jobs = [job for job in h.jobs if job.kind != "cold_read"]  # the store takes its time
    assert len(slow_jobs) == 2
    (poll,) = h.ask(c.Diff("t", 14, wait_ms=30_000))
    h.append("t", numbered(15, 1)[0])
    assert rows_of(h.replies[poll]) == records(15)
    assert rows_of(h.diff("t", 8)) == records(*range(9, 16))
    h.checkpoint()
    assert slow not in h.replies
    h.jobs += slow_jobs
    h.rest()
    assert rows_of(h.replies[slow]) == records(*range(1, 15 + 1))


def test_a_slow_move_holds_up_no_checkpoint_and_no_erase_of_others() -> None:
    h = filled(secret=13)
    h.engine.checkpoint()
    h.ask()
    while not any(job.kind == "cold_move" for job in h.jobs):
        h.run_job() if h.jobs else h.ask()
    (job,) = [job for job in h.jobs if job.kind == "cold_move"]
    h.jobs.remove(job)
    before = h.engine.counters["checkpoints"]
    h.append("t", b'"x"')
    h.checkpoint()
    h.append("u", SECRET, config=FSYNC)
    h.checkpoint()
    assert h.engine.counters["checkpoints"] == before + 2
    assert h.engine.relocator.has_work or tiers(h)[0] == "hot"
    h.jobs.append(job)
    h.rest()
    assert tiers(h)[:2] == ["cold", "cold"]


@pytest.mark.parametrize("asked", ["erase", "snapshot"])
def test_who_waits_is_served_between_two_moves(asked: str) -> None:
    """A topic with a long backlog, as after a start with a cold tier that is new, and something else to do in another one."""
    h = moved(ObjectStore())
    h.put("long", FSYNC)
    h.append("long", *numbered(1, 400))
    h.engine.checkpoint()
    while h.engine.counters["relocations"] < 6:
        h.run_job() if h.jobs else h.ask()
    before = h.engine.counters["relocations"]
    h.do(c.Delete("t", seqs=[3], erase=True) if asked == "erase" else mrg.PinSnapshot("t"))
    assert h.engine.counters["relocations"] - before <= 10, "of a hundred"
    h.rest()
    assert set(tiers(h, "long")[:-2]) == {"cold"}, "and the rest goes on"
    cold = h.engine.checkpointer.usage.totals["cold"]
    assert cold.live > 390 * len(numbered(1, 1)[0])


def test_readers_of_one_block_share_a_fetch() -> None:
    h = relocated()
    reads = h.cold.count("read_range")  # type: ignore[union-attr]
    tokens = h.ask(*[c.Diff("t", 0, limit=4) for _ in range(20)])
    assert [job.kind for job in h.jobs].count("cold_read") == 1
    h.rest()
    assert all(rows_of(h.replies[token]) == records(1, 2, 3, 4) for token in tokens)
    assert h.cold.count("read_range") == reads + 1  # type: ignore[union-attr]


def test_only_so_many_wait() -> None:
    h = relocated()
    tokens = h.ask(*[c.Diff("t", 0) for _ in range(limits.COLD_READERS_MAX + 1)])
    refused = h.replies[tokens[-1]]
    assert isinstance(refused, Throttled)
    assert refused.detail["limit"] == "cold_reads"
    h.rest()
    assert all(rows_of(h.replies[token]) == records(*range(1, 15)) for token in tokens[:-1])


@fault(
    "disk",
    "the cold tier is out of reach, or a segment is missing there",
    "reads that need it are 503 with the reason and change nothing; writes and other reads go on; it heals by itself",
)
@pytest.mark.parametrize("how", ["down", "missing", "short"])
def test_a_store_that_fails(how: str) -> None:
    store = ObjectStore()
    h = relocated(store)
    objects = dict(store.objects)
    key = next(key for key in objects if key.endswith("1-0.data"))
    if how == "down":
        store.is_down = True
    elif how == "missing":
        del store.objects[key]
    else:
        store.objects[key] = store.objects[key][:-3]
    error = h.refused(c.Diff("t", 0), ColdStoreFailed)
    assert error.code == "not_ready"
    assert error.detail["path"] == key
    h.append("t", numbered(15, 1)[0])
    assert rows_of(h.diff("t", 8)) == records(*range(9, 16))
    assert h.state("t").count == 15
    store.is_down, store.objects = False, objects
    assert h.rows("t") == records(*range(1, 16))


def test_without_the_cold_directory_its_records_are_refused_and_not_lost() -> None:
    store = ObjectStore()
    h = relocated(store)
    h.cold = None
    h.restart()
    h.refused(c.Diff("t", 0), ColdStoreFailed)
    assert rows_of(h.diff("t", 8)) == records(*range(9, 15))
    h.cold = store
    h.restart()
    assert h.rows("t") == records(*range(1, 15))


def test_a_rotten_record_of_the_cold_tier_is_an_announced_loss() -> None:
    store = ObjectStore()
    h = relocated(store)
    key = next(key for key in store.objects if key.endswith("1-0.data"))
    store.rot(key, store.objects[key].index(b"record 2"))
    assert h.read("t") == (records(1, *range(3, 15)), [(2, 2, "corrupt")])
    h.kill_and_open()
    assert h.gaps("t") == [(2, 2, "corrupt")]


def test_a_damaged_index_on_the_hot_side_is_made_again_from_cold_records() -> None:
    h = relocated()
    h.kill()
    h.disk.flip_bit(f"topics/{1024:016x}/seg-0000000000000001-0.idx", 40)
    h.open()
    assert h.rows("t") == records(*range(1, 15))


@fault(
    "index",
    "one is damaged, and the records that it could be made from are not in the cold tier",
    "the shard starts, and these records are an announced loss",
)
@pytest.mark.parametrize("suffix", ["idx", "sum"])
def test_a_damaged_index_of_records_that_are_gone(suffix: str) -> None:
    """As a crash leaves it that stops an erase: the snapshot names a segment whose records are not there any more."""
    store = ObjectStore()
    h = relocated(store)
    h.kill()
    h.disk.flip_bit(f"topics/{1024:016x}/seg-0000000000000001-0.{suffix}", 40)
    del store.objects[next(key for key in store.objects if key.endswith("1-0.data"))]
    h.open()
    found, gaps = h.read("t")
    (gap,) = gaps
    assert gap[0] == 1 and gap[2] == "corrupt"
    assert found == records(*range(gap[1] + 1, 15))


def test_a_long_poll_and_answers_by_tag_reach_cold_records() -> None:
    h = relocated()
    h.do(c.Delete("t", seqs=[10, 12, 14]))
    page = h.do(c.LastByTag("t", TagMatch("Eq", b"b")))
    assert rows_of(page) == records(8)
    page = h.do(c.NextByTag("t", TagMatch("Eq", b"a"), 2))
    assert rows_of(page) == records(3)
    (token,) = h.ask(c.Diff("t", 2, limit=1, wait_ms=1000))
    h.rest()
    assert rows_of(h.replies[token]) == records(3)


def test_claims_wait_for_cold_jobs() -> None:
    h = Harness(TIERED, cold=ObjectStore())
    h.put("t", TopicConfig(type="queue", durability="fsync"))
    for seq in range(1, 15):
        h.append("t", numbered(seq, 1)[0])
    for _ in range(3):
        h.checkpoint()
    (token,) = h.ask(con.Claim("t", "", b"w", 3))
    assert token not in h.replies
    h.rest()
    assert rows_of(h.replies[token].page) == records(1, 2, 3)
    (token,) = h.ask(con.Claim("t", "", b"w", 2, wait_ms=1000))
    h.rest()
    assert rows_of(h.replies[token].page) == records(4, 5)


def test_a_withdrawn_claim_takes_nothing_when_its_blocks_come() -> None:
    h = Harness(TIERED, cold=ObjectStore())
    h.put("t", TopicConfig(type="queue", durability="fsync"))
    for seq in range(1, 15):
        h.append("t", numbered(seq, 1)[0])
    for _ in range(3):
        h.checkpoint()
    (token,) = h.ask(con.Claim("t", "", b"w", 3))
    assert h.engine.shard.withdraw_claim("t", "", lambda found: found == token)
    h.rest()
    assert token not in h.replies
    assert rows_of(h.do(con.Claim("t", "", b"w", 3)).page) == records(1, 2, 3)


def test_a_stop_does_not_wait_for_the_store() -> None:
    h = relocated()
    (token,) = h.ask(c.Diff("t", 0))
    h.jobs = [job for job in h.jobs if job.kind != "cold_read"]  # it never answers
    h._take(h.engine.close())
    assert isinstance(h.replies[token], ColdStoreFailed)


# ---- erasing


def anywhere(h: Harness) -> list[str]:
    assert isinstance(h.cold, ObjectStore)
    return holders(h.disk, NEEDLE) + [key for key, data in h.cold.objects.items() if NEEDLE in data]


def test_an_erased_record_is_in_neither_tier() -> None:
    h = relocated(secret=3)
    assert anywhere(h)
    deleted = h.do(c.Delete("t", seqs=[3], erase=True))
    assert deleted.deleted == 1
    assert anywhere(h) == []
    assert {name for name in cold_files(h) if name.endswith(".data")} == {
        "seg-0000000000000001-1.data",
        "seg-0000000000000005-0.data",
    }
    assert "seg-0000000000000001-1.data" not in data_files(h)
    for _ in range(2):
        assert h.rows("t") == records(1, 2, *range(4, 15))
        h.kill_and_open()
        h.checkpoint()


def test_an_erase_while_the_segment_is_on_its_way() -> None:
    h = filled(secret=3)
    h.engine.checkpoint()
    h.ask()
    while not any(job.kind == "cold_move" for job in h.jobs):
        h.run_job() if h.jobs else h.ask()
    moves = [job for job in h.jobs if job.kind == "cold_move"]
    for job in moves:
        h.jobs.remove(job)
    (token,) = h.ask(c.Delete("t", seqs=[3], erase=True))
    h.rest()
    assert token not in h.replies, "a copy may be on its way to the store"
    h.jobs += moves
    h.rest()
    assert h.replies[token].deleted == 1
    assert anywhere(h) == []
    check(h, "erase")
    assert anywhere(h) == []


def erasing(h: Harness) -> None:
    h.checkpoint()
    h.checkpoint()
    h.send(c.Delete("t", seqs=[3], erase=True))
    h.append("t", numbered(15, 1)[0])
    h.checkpoint()


@fault(
    "disk",
    "a crash at any call to the cold tier while a record there is erased",
    "after the restart its bytes are in no file of either tier, and every other record is there",
)
@pytest.mark.parametrize("how", ["power", "kill"])
def test_an_erase_that_crashes_at_any_call_to_the_store_is_finished(how: str) -> None:
    h = filled(secret=3)
    before = len(h.cold.calls)  # type: ignore[union-attr]
    erasing(h)
    count = len(h.cold.calls) - before  # type: ignore[union-attr]
    for number in range(1, count + 1):
        store = ObjectStore()
        h = filled(store, secret=3)
        store.crash_at(number)
        with pytest.raises(SimulatedCrash):
            erasing(h)
        h.power_cut() if how == "power" else h.kill()
        h.open()
        h.send(c.Delete("t", seqs=[3], erase=True))
        h.rest()
        assert anywhere(h) == [], number
        assert h.rows("t")[:13] == records(1, 2, *range(4, 15)), number


@fault(
    "disk",
    "the cold tier is out of reach while a record there is erased",
    "429 with limit cold_tier: it is deleted, and its bytes go as soon as the tier is back, also after a restart",
)
@pytest.mark.parametrize("restart", [False, True])
def test_an_erase_without_the_store_is_put_off(restart: bool) -> None:
    store = ObjectStore()
    h = relocated(store, secret=3)
    store.is_down = True
    put_off = h.refused(c.Delete("t", seqs=[3], erase=True), ErasePutOff)
    assert put_off.detail["limit"] == "cold_tier"
    assert anywhere(h)
    assert h.engine.shard.read_only is None
    if restart:
        h.kill_and_open()
    store.is_down = False
    h.rest()
    h.pass_time(limits.COLD_PAUSE_MS_MAX)
    assert anywhere(h) == []
    assert h.rows("t") == records(1, 2, *range(4, 15))


@fault(
    "disk",
    "a start without the cold directory while a copy of a move that was not finished lies there",
    "an erase is 429 with limit cold_tier, and done by a start with it",
)
def test_an_erase_without_the_cold_directory_waits_for_copies_that_may_be_there() -> None:
    """The move was stopped between copy and flip: everything that is known here says that the segment is hot."""
    store = ObjectStore()
    h = filled(store, secret=3)
    overwrite(h.disk, "cold-id", b"the same in both\n")
    h.engine.checkpoint()
    while not any(NEEDLE in data for data in store.objects.values()):
        h.run_job() if h.jobs else h.ask()
    h.kill()
    h.cold = None
    h.open()
    assert tiers(h)[0] == "hot"
    put_off = h.refused(c.Delete("t", seqs=[3], erase=True), ErasePutOff)
    assert put_off.detail["limit"] == "cold_tier"
    h.restart()
    h.rest()
    assert h.engine.shard.published["t"].erasing, "it is not done"
    h.close()
    h.cold = store
    h.open()
    h.rest()
    h.pass_time(limits.COLD_PAUSE_MS_MAX)
    assert anywhere(h) == []
    assert h.rows("t") == records(1, 2, *range(4, 15))


def test_an_erase_in_a_directory_that_never_had_a_cold_tier_is_done_at_once() -> None:
    h = filled(secret=3)
    h.close()
    h.cold = None
    h.open()
    h.checkpoint()
    h.do(c.Delete("t", seqs=[3], erase=True))
    assert holders(h.disk, NEEDLE) == []


def test_an_erase_is_answered_at_once_while_the_store_is_given_time() -> None:
    store = ObjectStore()
    h = relocated(store, secret=3)
    store.is_down = True
    for seq in (3, 2):
        h.refused(c.Delete("t", seqs=[seq], erase=True), ErasePutOff)  # no time passes
    h.rest()
    assert len(h.engine.relocator._erases) == 2
    store.is_down = False
    h.do(c.Delete("t", seqs=[4], erase=True))
    h.pass_time(limits.COLD_PAUSE_MS_MAX)
    assert anywhere(h) == []


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
