"""Compaction: segments of mostly deleted records are rewritten without them, at a limited pace, and no reader
notices.

Goal: no reader, whatever it asks and whenever the process dies, sees a difference between a shard with compaction and
one without; checkpoints, erases and drops do not wait for it; it is as slow as configured. Method: two engines on
simulated disks get the same commands, one of them with compaction, and every answer is compared; both die at random,
the one with copies in progress. A mutation shows that the comparison can fail.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from tests.support import length
from tests.support.engine_harness import FSYNC, SMALL, Harness, append, holders, numbered, rows_of
from tests.support.stores import ObjectStore
from topics.api import limits
from topics.api.config import ConsumerConfig, EngineConfig, TopicConfig
from topics.engine.commands import consumers as k
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagMatch
from topics.engine.storage import frames
from topics.engine.storage.index import Chunk
from topics.engine.storage.segments import HOT, SegmentMeta
from topics.engine.topic.log import TopicLog
from topics.engine.upkeep import compaction

RECLAIMING = msgspec.structs.replace(SMALL, rewrite_dead_share=0.4)
TAGS = [b"a", b"a.b", b"c"]
EVERY_TAG = TagMatch("Glob", b"*")


def sparse(config: EngineConfig = RECLAIMING, *, segments: int = 2, pad: int = 0) -> Harness:
    """A topic whose first segments have lost two of their four records each; no copy has been begun."""
    h = Harness(config)
    h.put("t")
    h.append("t", *numbered(1, 4 * segments + 1, pad))
    h.checkpoint()
    h.do(c.Delete("t", seqs=[seq for i in range(segments) for seq in (4 * i + 1, 4 * i + 2)]))
    return h


def generations(h: Harness) -> list[int]:
    metas = [chunk.meta for chunk in h.engine.shard.state.published["t"].chunks]
    return [meta.generation for meta in metas if meta is not None]


# ---- no visible difference


def seen(h: Harness, topic: str) -> list[Any]:
    """Everything that readers can ask about a topic."""
    state = h.state(topic)
    found: list[Any] = [(state.head_seq, state.earliest_seq, state.count, state.bytes, state.queue)]
    for seq in range(state.head_seq + 2):
        page = h.diff(topic, seq, limit=1000, max_bytes=8 << 20, touch=False)
        stone = page.tombstone
        told = (stone.gap_from, stone.gap_to, stone.reason) if stone is not None else None
        found.append((rows_of(page), told, page.next_from_seq))
    for tag in TAGS:
        match = TagMatch("Eq", tag)
        page = h.diff(topic, 0, match=match, limit=1000, max_bytes=8 << 20, touch=False)
        found.append(rows_of(page))
        found += [rows_of(h.do(c.NextByTag(topic, match, seq))) for seq in range(0, state.head_seq + 2, 3)]
    found.append(rows_of(h.do(c.LastByTag(topic, EVERY_TAG, each=True))))
    found.append(h.do(c.CountByTag(topic, EVERY_TAG)).counts)
    return found


def told(reply: Any) -> Any:
    """An answer without its random and time-dependent parts."""
    if isinstance(reply, k.Claimed):
        return rows_of(reply.page), reply.deliveries, reply.ready
    if isinstance(reply, k.Settled):
        return reply.count, reply.skipped, reply.ready, reply.in_flight
    return reply


class Twins:
    """One engine with slow compaction, and one without."""

    TOPICS = ("log", "queue", "capped", "per-tag")

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rate = self.rng.choice((0, 3000))
        share = self.rng.choice((0.2, 0.4))
        quick = msgspec.structs.replace(SMALL, verify=False)
        config = msgspec.structs.replace(quick, rewrite_dead_share=share, reclaim_bytes_per_s=rate)
        self.one = Harness(config, seed=seed)
        self.other = Harness(quick, seed=seed)
        self.both = (self.one, self.other)
        self.swaps = 0
        configs = (
            FSYNC,
            TopicConfig(type="queue", durability="fsync", leases_durable=True),
            TopicConfig(durability="fsync", cap_records=9),
            TopicConfig(durability="fsync", cap_per_tag=2),
        )
        for topic, conf in zip(self.TOPICS, configs, strict=True):
            self.do(c.PutTopic(topic, conf))
        self.do(k.PutConsumer("log", "named", ConsumerConfig(filter=(("Eq", "a"),))))

    def do(self, command: c.Command) -> Any:
        one, other = (h.do(command) for h in self.both)
        assert told(one) == told(other), command
        for _ in range(self.rng.randrange(4)):  # some of the copies progress, most stay unfinished
            if self.one.jobs:
                self.one.run_job()
        return one

    def step(self) -> None:
        rng = self.rng
        topic = rng.choice(self.TOPICS)
        head = self.one.state(topic).head_seq
        what = rng.random()
        if what < 0.35:
            count = rng.randrange(1, 6)
            tags = [rng.choice([None, *TAGS]) for _ in range(count)]
            ttls = [rng.choice((0, 0, 0, 600_000)) for _ in range(count)]
            nodes = [rng.choice((None, b"n", b"m")) for _ in range(count)]
            payloads = numbered(head + 1, count, rng.randrange(60))
            self.do(append(topic, *payloads, tags=tags, ttls_ms=ttls, nodes=nodes))
        elif what < 0.6:
            picked = [seq for seq in range(1, head + 1) if rng.random() < 0.2]
            self.do(c.Delete(topic, seqs=picked, erase=rng.random() < 0.1))
        elif what < 0.65:
            self.do(c.Delete(topic, match=TagMatch("Eq", rng.choice(TAGS)), keep=rng.randrange(3)))
        elif what < 0.75:
            at, consumer = rng.choice((("queue", ""), ("log", "named")))
            claimed = self.do(k.Claim(at, consumer, node=b"w", max=rng.randrange(1, 4)))
            kind = rng.choice(("ack", "ack", "nack"))
            seqs = list(claimed.page.seqs)
            if seqs:
                self.do(k.Settle(at, kind, b"w", seqs, consumer=consumer))
        elif what < 0.8:
            for h in self.both:
                h.clock.advance(1_200_000)
                h.rest()
        elif what < 0.95:
            for h in self.both:
                h.clock.advance(rng.choice((1, 20, 300)))
                h.engine.checkpoint()
                h.ask()
        else:
            self.crash(rng.choice(("kill", "power_cut", "close")))

    def crash(self, how: str) -> None:
        self.swaps += self.one.engine.counters["swaps"]
        for h in self.both:
            if how == "close":
                h.rest()
            getattr(h, how)()
            h.open()

    def compare(self) -> None:
        for topic in self.TOPICS:
            assert seen(self.one, topic) == seen(self.other, topic), topic

    def walk(self, steps: int) -> int:
        """How many segments were rewritten."""
        for number in range(steps):
            self.step()
            if number % 30 == 29:
                self.compare()
        self.crash("kill")
        self.compare()
        for h in self.both:
            h.checkpoint()
            h.pass_time(10_000)
        self.compare()
        return self.swaps + self.one.engine.counters["swaps"]


@pytest.mark.parametrize("seed", length.seeds(short=2, long=8))
def test_no_reader_can_tell_whether_space_is_given_back(seed: int) -> None:
    assert Twins(seed).walk(90) > 3, "no segment was rewritten, so nothing was tested"


def test_the_comparison_finds_a_copy_that_lacks_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: now and then the first live record of a segment is treated as deleted."""
    right = compaction._dead_rows

    def wrong(log: TopicLog, chunk: Chunk) -> Any:
        dead = right(log, chunk)
        if not dead.all():
            dead[int((~dead).argmax())] = True
        return dead

    monkeypatch.setattr(compaction, "_dead_rows", wrong)
    with pytest.raises(AssertionError):
        for seed in range(8):
            Twins(seed).walk(90)


# ---- its pace


def test_it_takes_its_time() -> None:
    """Twelve segments of about 2 KiB at 4 KiB a second, each read twice and written once."""
    config = msgspec.structs.replace(RECLAIMING, reclaim_bytes_per_s=4096, wal_file_bytes=1 << 16)
    h = sparse(config, segments=12, pad=400)
    h.engine.checkpoint()
    h.rest()
    done = [sum(generations(h))]
    for _ in range(60):
        h.pass_time(500)
        done.append(sum(generations(h)))
    assert done[0] <= 2, "the burst is too long"
    assert done[-1] == 12
    assert all(after - before <= 1 for before, after in pairwise(done[1:])), done
    assert done.index(12) >= 20, "faster than 4 KiB a second"


def test_without_a_bound_it_is_done_at_once() -> None:
    h = sparse(msgspec.structs.replace(RECLAIMING, reclaim_bytes_per_s=0), segments=12, pad=400)
    h.checkpoint()
    assert generations(h)[:12] == [1] * 12


def test_a_disk_that_runs_full_is_not_kept_waiting() -> None:
    config = msgspec.structs.replace(RECLAIMING, reclaim_bytes_per_s=1, wal_file_bytes=1 << 16)
    h = sparse(config, segments=6, pad=400)
    h.engine.checkpoint()
    h.rest()
    assert sum(generations(h)) < 6
    h.engine.shard.state.low_space = True
    h.rest()
    assert sum(generations(h)) == 6


def test_it_is_gone_on_with_after_a_restart() -> None:
    """The snapshot says what is deleted, so no request to the topic is needed."""
    config = msgspec.structs.replace(RECLAIMING, reclaim_bytes_per_s=1, wal_file_bytes=1 << 16)
    h = sparse(config, segments=4, pad=400)
    h.checkpoint()
    assert sum(generations(h)) < 4
    h.config = RECLAIMING
    h.restart()
    h.pass_time(2000)
    assert generations(h)[:4] == [1] * 4


# ---- together with other work


def until_copying(h: Harness) -> None:
    h.engine.checkpoint()
    for _ in range(1000):
        if any(job.kind == compaction.REWRITE_KIND for job in h.jobs):
            return
        h.run_job() if h.jobs else h.ask()
    raise AssertionError("no segment is rewritten")


def run_others(h: Harness) -> None:
    """Do everything except the copy."""
    for _ in range(1000):
        other = next((job for job in h.jobs if job.kind != compaction.REWRITE_KIND), None)
        if other is not None:
            h.run_job(other.kind)
            continue
        h.ask()
        if all(job.kind == compaction.REWRITE_KIND for job in h.jobs) and not h.engine._has_background_work():
            return
    raise AssertionError("the other work never ends")


def test_checkpoints_do_not_wait_for_a_copy() -> None:
    h = sparse()
    until_copying(h)
    before = h.engine.counters["checkpoints"]
    for _ in range(3):
        h.append("t", b"more")
        h.engine.checkpoint()
        run_others(h)
    assert h.engine.counters["checkpoints"] == before + 3
    assert sum(generations(h)) == 0
    h.rest()
    assert generations(h)[:2] == [1, 1]


def test_deletes_while_it_is_copied_are_kept_over_a_crash() -> None:
    """One delete before a checkpoint that marks it in the old generation, one after it; then no log is left that has
    them.
    """
    h = sparse(segments=1)
    until_copying(h)
    h.do(c.Delete("t", seqs=[3]))
    h.engine.checkpoint()
    run_others(h)
    h.append("t", b"x")
    h.do(c.Delete("t", seqs=[4]))
    h.rest()
    h.kill_and_open()
    assert h.seqs("t") == [5, 6]
    h.checkpoint()
    h.kill_and_open()
    assert h.seqs("t") == [5, 6]


def test_marks_of_the_old_generation_go_along() -> None:
    h = sparse(segments=1)
    until_copying(h)
    h.do(c.Delete("t", seqs=[3]))
    h.engine.checkpoint()
    run_others(h)
    h.rest()
    for _ in range(3):
        h.append("t", b"x")
        h.checkpoint()
    h.kill_and_open()
    assert h.seqs("t")[:2] == [4, 5]


def test_an_erase_does_not_wait_and_the_copy_is_given_up() -> None:
    h = Harness(RECLAIMING)
    h.put("t")
    h.append("t", b"a first one", b"a second one", b"a secret", b"4", b"5")
    h.checkpoint()
    h.do(c.Delete("t", seqs=[1, 2]))
    until_copying(h)
    h.run_job(compaction.REWRITE_KIND)
    h.do(c.Delete("t", seqs=[3], erase=True))
    assert holders(h.disk, b"a secret") == []
    h.pass_time(5000)
    h.checkpoint()
    h.pass_time(5000)
    assert generations(h)[0] == 1, "it must be retried afterwards"
    assert h.seqs("t") == [4, 5]
    assert holders(h.disk, b"a secret") == []


def test_a_topic_dropped_while_it_is_copied() -> None:
    h = sparse()
    until_copying(h)
    h.run_job(compaction.REWRITE_KIND)
    h.do(c.DropTopic("t"))
    run_others(h)
    h.rest()
    assert h.engine.shard.state.read_only is None
    assert not [path for path in h.disk.paths() if path.startswith("topics/")]


def test_a_stop_does_not_wait_for_the_whole_of_it() -> None:
    h = sparse(msgspec.structs.replace(RECLAIMING, reclaim_bytes_per_s=1), segments=4)
    until_copying(h)
    h.engine.stop_cold()
    h.run_job(compaction.REWRITE_KIND)
    for _ in range(20):
        h.run_job() if h.jobs else h.ask()
    h.restart()
    assert h.seqs("t") == [3, 4, 7, 8, 11, 12, 15, 16, 17]


def test_a_damaged_segment_is_left_for_readers_to_find() -> None:
    h = sparse(segments=1)
    path = next(f"{h.topic_dir('t')}/{name}" for name in h.segment_files("t") if name.endswith(".data"))
    handle = h.disk.open(path)
    h.disk.write(handle, h.disk.size(handle) - 20, b"rot")
    h.disk.close(handle)
    h.checkpoint()
    h.pass_time(100_000)
    assert generations(h)[0] == 0
    assert h.engine.shard.state.read_only is None
    assert len([name for name in h.segment_files("t") if name.startswith("seg-0000000000000001")]) <= 4


def dies_at(h: Harness, call: int) -> bool:
    """Compact until that call to the disk, if there are so many."""
    left = call

    def count() -> None:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt  # no handler catches it

    h.engine.checkpoint()
    h.line.each_call = count
    try:
        h.rest()
        h.engine.checkpoint()
        h.rest()
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("how", ["kill", "power_cut"])
def test_a_crash_at_every_disk_call_of_it(how: str) -> None:
    some = length.pick(short=6, long=1)
    call, died = 1 - some + length.turn(some), True
    while died:
        call += some
        h = sparse(segments=1)
        died = dies_at(h, call)
        getattr(h, how)()
        h.open()
        assert h.seqs("t") == [3, 4, 5], call
        for _ in range(3):
            h.checkpoint()
        assert h.seqs("t") == [3, 4, 5], call
        named = {name.rpartition(".")[0] for name in h.segment_files("t")}
        assert len(named) == 2, (call, named)
    assert call > 50


def test_dead_records_are_counted_only_in_changed_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic of many segments and one append: the checkpoint reads only the rows of the open segment."""
    h = Harness(RECLAIMING)
    h.put("t")
    h.append("t", *numbered(1, 400))
    h.checkpoint()
    looked: list[int] = []
    right = Chunk.live

    def live(self: Chunk, first: int, stop: int, dead: int = frames.DELETED) -> Any:
        looked.append(self.first_seq)
        return right(self, first, stop, dead)

    monkeypatch.setattr(Chunk, "live", live)
    h.config = msgspec.structs.replace(h.config, verify=False)
    h.engine.config = h.config
    h.append("t", b"one more")
    h.do(c.Delete("t", seqs=[203]))
    h.checkpoint()
    assert set(looked) == {201, 401}


def test_a_segment_without_a_living_record_goes_under_load_too() -> None:
    """Writes wait for their sync all the time: a dead segment must be removed anyway."""
    h = Harness(RECLAIMING)
    h.put("t")
    h.append("t", *numbered(1, 12))
    h.checkpoint()
    h.do(c.Delete("t", seqs=[5, 6, 7, 8]))
    h.engine.checkpoint()
    for i in range(200):
        h.ask(append("t", b"%d" % i))
        if h.jobs:
            h.run_job()
    firsts = [chunk.first_seq for chunk in h.engine.shard.state.published["t"].chunks]
    assert 5 not in firsts


# ---- reports


def test_usage_is_that_of_the_files() -> None:
    h = sparse(msgspec.structs.replace(RECLAIMING, rewrite_dead_share=0.6), segments=3)
    h.checkpoint()
    usage = h.engine.checkpointer.usage.totals[HOT]
    log = h.engine.shard.state.published["t"]
    metas = [chunk.meta for chunk in log.chunks if chunk.meta is not None]
    assert usage.live + usage.dead == sum(meta.data_bytes for meta in metas)
    lengths = [int(chunk.rows["length"][:2].sum()) for chunk in log.chunks[:3]]
    assert usage.dead == usage.reclaimable == sum(lengths)
    h.restart()
    after = h.engine.checkpointer.usage.totals[HOT]
    assert (after.live, after.dead, after.reclaimable) == (usage.live, usage.dead, usage.reclaimable)


def test_usage_follows_caps_rewriting_and_the_cold_tier() -> None:
    store = ObjectStore()
    config = msgspec.structs.replace(RECLAIMING, hot_retain_segments=1)
    h = Harness(config, cold=store)
    h.put("t", TopicConfig(durability="fsync", cap_records=9))
    for i in range(1, 31):
        h.append("t", *numbered(i, 1))
        if i % 5 == 0:
            h.checkpoint()
    h.checkpoint()
    totals = h.engine.checkpointer.usage.totals
    for tier, usage in totals.items():
        chunks = [chunk for chunk in h.engine.shard.state.published["t"].chunks if chunk.meta is not None]
        log = h.engine.shard.state.published["t"]
        here = [(chunk, chunk.meta) for chunk in chunks if chunk.meta is not None and chunk.meta.tier == tier]
        assert usage.live + usage.dead == sum(meta.data_bytes for _, meta in here), tier
        dead = sum(int(chunk.rows["length"][compaction._dead_rows(log, chunk)].sum()) for chunk, _ in here)
        assert usage.dead == dead, tier


def test_refused_segments_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DAMAGED_SEGMENTS_MAX", 2)
    h = sparse(segments=1)
    log = h.engine.shard.state.published["t"]
    for first in range(5):
        h.engine.compactor._mark_damaged(log, SegmentMeta(first))
    assert len(h.engine.compactor._damaged) == 2
