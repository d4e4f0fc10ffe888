"""Compaction by tag: the newest N records of each tag stay, and the space of the others is freed.

Goal: `cap_per_tag` removes exactly the superseded records, without tombstones, whatever else happens to the topic, at
a cost that does not grow with it; a cap that is set later is applied in bounded turns and over restarts; files shrink
in both tiers. Method: an engine on a simulated disk; Python calls and examined seqs are counted in place of time;
crashes between turns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support import flow_rig
from tests.support.engine_harness import FSYNC, SMALL, Harness, append, numbered
from tests.support.lease_harness import LeaseHarness, queue
from tests.support.stores import ObjectStore
from topics.api import limits
from topics.api.config import ConsumerConfig, EngineConfig, TopicConfig
from topics.engine.commands import consumers as k
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagMatch
from topics.engine.topic.log import TopicLog

LARGE = EngineConfig(
    snapshot_interval_ms=1 << 40, snapshot_wal_bytes=1 << 50, segment_max_events=1000, wal_file_bytes=1 << 21
)
RECLAIMING = msgspec.structs.replace(SMALL, rewrite_dead_share=0.5)
EVERY_TAG = TagMatch("Glob", b"*")


def capped(keep: int, **options: Any) -> TopicConfig:
    return TopicConfig(durability="fsync", cap_per_tag=keep, **options)


def write(h: Harness, tags: str, topic: str = "t") -> None:
    """One write per letter."""
    for tag in tags:
        h.append(topic, b'"%s"' % tag.encode(), tag=tag.encode())


def counts(h: Harness, topic: str = "t") -> dict[bytes, int]:
    return dict(h.do(c.CountByTag(topic, EVERY_TAG)).counts)


def with_backlog(records: int, tags: int, keep: int) -> Harness:
    h = Harness(LARGE)
    h.put("t", TopicConfig(cap_per_tag=keep))
    fill(h, records, tags)
    return h


def fill(h: Harness, records: int, tags: int) -> None:
    for first in range(0, records, 1000):
        names: list[bytes | None] = [b"%d" % (i % tags) for i in range(first, first + 1000)]
        h.append("t", *[b"x"] * 1000, tags=names)


# ---- the cost


def work(h: Harness, times: int, tags: int) -> tuple[int, int]:
    """Calls of Python functions, and examined seqs, in this many superseding writes."""
    asked = calls = 0
    right = TopicLog.are_live

    def are_live(self: TopicLog, seqs: Any) -> Any:
        nonlocal asked
        asked += len(seqs)
        return right(self, seqs)

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    commands = [append("t", b"y", tag=b"%d" % (7 * i % tags)) for i in range(times)]
    TopicLog.are_live = are_live  # type: ignore[method-assign]
    sys.setprofile(count)
    try:
        for command in commands:
            h.engine.turn([(0, command)])
    finally:
        sys.setprofile(None)
        TopicLog.are_live = right  # type: ignore[method-assign]
    return calls, asked


@pytest.mark.parametrize("per_tag", [1, 50])
def test_a_write_costs_the_same_whatever_is_there(per_tag: int) -> None:
    small = work(with_backlog(500, 500 // per_tag, per_tag), 200, 500 // per_tag)
    large = work(with_backlog(5000, 5000 // per_tag, per_tag), 200, 5000 // per_tag)
    assert large[0] < 1.3 * small[0] + 1000, (small, large)
    assert large[1] < 2 * small[1] + 1000, (small, large)


def test_liveness_is_looked_up_in_the_chunks_that_matter() -> None:
    """Ten seqs of a topic with sixty chunks: the same result as one by one."""
    h = with_backlog(60_000, 10, 100_000)
    h.do(c.Delete("t", seqs=[5, 30_001, 30_002, 59_999]))
    log = h.engine.shard.state.published["t"]
    seqs = np.array([1, 5, 6, 1000, 1001, 30_001, 30_002, 30_003, 59_999, 60_000, 60_001, 90_000], np.uint64)
    assert log.are_live(seqs).tolist() == [log.is_live(int(seq)) for seq in seqs]


# ---- what stays


def test_the_newest_stay_and_nothing_is_announced() -> None:
    h = Harness(RECLAIMING)
    h.put("t", capped(2))
    write(h, "abacabadabab")
    rows, gaps = h.read("t")
    assert [seq for seq, _ in rows] == [4, 8, 9, 10, 11, 12]
    assert gaps == []
    for seq in range(13):
        assert h.diff("t", seq).tombstone is None
    h.checkpoint()
    h.kill_and_open()
    assert h.seqs("t") == [4, 8, 9, 10, 11, 12]
    assert counts(h) == {b"a": 2, b"b": 2, b"c": 1, b"d": 1}


def test_the_space_comes_back() -> None:
    """A thousand writes to five tags: the disk has only the remaining records."""
    h = Harness(msgspec.structs.replace(RECLAIMING, wal_file_bytes=1 << 15))
    h.put("t", capped(1))
    for i in range(50):
        write(h, "abcde" * 4)
        if i % 5 == 0:
            h.checkpoint()
    h.append("t", b"the last one")
    for _ in range(3):
        h.checkpoint()
    log = h.engine.shard.state.published["t"]
    assert (log.count, len(log.chunks)) == (6, len(log.chunks)) and len(log.chunks) <= 4
    assert len({name.rpartition(".")[0] for name in h.segment_files("t")}) <= 4
    usage = h.engine.checkpointer.usage.totals["hot"]
    assert usage.dead <= usage.live


def test_deletes_by_match_and_keep_go_with_it() -> None:
    h = Harness(RECLAIMING)
    h.put("t", capped(3))
    write(h, "aabbaabb")
    assert h.do(c.Delete("t", match=TagMatch("Eq", b"a"), keep=1)).deleted == 2
    assert h.do(c.Delete("t", match=TagMatch("Eq", b"b"))).deleted == 3
    write(h, "aaab")
    assert counts(h) == {b"a": 3, b"b": 1}
    assert h.seqs("t") == [9, 10, 11, 12]


def test_a_named_consumer_gets_what_is_left() -> None:
    h = Harness(RECLAIMING)
    h.put("t", capped(1))
    h.do(k.PutConsumer("t", "n", ConsumerConfig()))
    write(h, "ab")
    claimed = h.do(k.Claim("t", "n", node=b"w", max=10))
    assert list(claimed.page.seqs) == [1, 2]
    write(h, "a")  # supersedes one that is leased
    settled = h.do(k.Settle("t", "ack", b"w", [1, 2], consumer="n"))
    assert (settled.count, settled.skipped) == (1, [1])
    assert list(h.do(k.Claim("t", "n", node=b"w", max=10)).page.seqs) == [3]
    h.checkpoint()
    h.kill_and_open()
    assert h.seqs("t") == [2, 3]


def test_a_superseded_job_is_not_handed_out_again() -> None:
    h = LeaseHarness(queue(cap_per_tag=1), jobs=0)
    h.do(append("q", b"1", b"2", tags=[b"a", b"b"]))
    assert h.got(1) == [1]
    h.do(append("q", b"3", tags=[b"a"]))
    assert h.counts()[:2] == (2, 0), "its lease went with it"
    assert h.got(5) == [2, 3]


def test_dead_letters_are_capped_by_tag() -> None:
    h = LeaseHarness(queue(max_deliveries=1, dead_letter="dead"), jobs=0)
    h.put("dead", capped(1))
    h.do(append("q", *numbered(1, 3), tags=[b"a", b"a", b"b"]))
    assert h.got(3) == [1, 2, 3]
    h.nack(1, 2, 3)
    h.got(3)
    h.rest()
    assert h.ship() == 3
    assert counts(h, "dead") == {b"a": 1, b"b": 1}
    assert h.gaps("dead") == []


def test_copies_are_capped_by_tag_in_the_dest() -> None:
    made = flow_rig.cluster()
    source, dest = flow_rig.name_on(0, "s"), flow_rig.name_on(1, "d")
    flow_rig.put(made, source)
    flow_rig.put(made, dest, cap_per_tag=1)
    flow_rig.forward(made, source, dest)
    for i in range(6):
        flow_rig.write(made, source, [f"record {i}"], tag="ab"[i % 2])
    flow_rig.settle(made)
    assert flow_rig.texts(made, source) == [f"record {i}" for i in range(6)]
    assert flow_rig.texts(made, dest) == ["record 4", "record 5"]


# ---- tiers


def test_superseded_cold_records_are_marked_on_the_hot_side_and_dead_segments_leave() -> None:
    store = ObjectStore()
    h = Harness(msgspec.structs.replace(RECLAIMING, hot_retain_segments=1), cold=store)
    h.put("t", capped(2))
    h.append("t", *numbered(1, 12), tags=[b"%d" % i for i in range(12)])  # nothing is superseded yet
    h.append("t", b"13", tag=b"z")
    h.checkpoint()
    h.checkpoint()
    tiers = [
        chunk.meta.tier for chunk in h.engine.shard.state.published["t"].chunks if chunk.meta is not None
    ]
    assert tiers[:2] == ["cold", "cold"]
    before = dict(store.objects)
    first = [b"%d" % i for i in range(4)]
    h.append("t", *numbered(14, 8), tags=[*first, *first])  # the first segment dies, record by record
    h.append("t", *numbered(22, 2), tags=[b"4", b"4"])  # and a quarter of the second
    assert counts(h)[b"4"] == 2
    h.checkpoint()
    assert {key for key in before if "-0.data" in key} & set(store.objects)
    for _ in range(3):
        h.append("t", b"more")
        h.checkpoint()
    left = {key.rpartition("/")[2][:20] for key in store.objects}
    assert "seg-0000000000000001" not in left, "it has no live record"
    assert "seg-0000000000000005" in left
    second = next(name for name in store.objects if "seg-0000000000000005" in name and name.endswith(".data"))
    assert store.objects[second] == before[second], "cold files are not changed"
    assert any(
        name.startswith("seg-0000000000000005") and name.endswith(".del") for name in h.segment_files("t")
    )
    h.kill_and_open()
    assert [seq for seq in h.seqs("t") if seq < 14] == [6, 7, 8, 9, 10, 11, 12, 13]


# ---- a cap that is set later


class TickingClock:
    """Each reading takes a millisecond, so that slices end by time, as in production."""

    def __init__(self) -> None:
        self._ms = 0

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + self._ms

    def monotonic_ms(self) -> int:
        self._ms += 1
        return self._ms

    def advance(self, ms: int) -> None:
        self._ms += ms


def history(records: int, tags: int) -> Harness:
    h = Harness(LARGE)
    h.clock = TickingClock()  # type: ignore[assignment]
    h.kill_and_open()
    h.put("t", FSYNC)
    fill(h, records, tags)
    h.checkpoint()
    return h


def turns_until(h: Harness, is_done: Callable[[], bool]) -> list[int]:
    """How many records each turn removed."""
    log = h.engine.shard.state.staged["t"]
    taken: list[int] = []
    while not is_done():
        before = log.count
        if h.jobs:
            h.run_job()
        else:
            h.ask()
        taken.append(before - log.count)
        assert len(taken) < 10_000
    return taken


@pytest.mark.parametrize("tags", [3, 500])
def test_a_new_cap_takes_a_bounded_number_a_turn(tags: int) -> None:
    h = history(4000, tags)
    h.ask(c.PutTopic("t", capped(2)))
    log = h.engine.shard.state.staged["t"]
    assert log.count >= 4000 - 2 * limits.TRIM_RECORDS
    taken = turns_until(h, lambda: log.trim_from is None)
    assert max(taken) <= 2 * limits.TRIM_RECORDS
    assert log.count == 2 * tags
    assert h.gaps("t") == []
    assert set(counts(h).values()) == {2}


def test_writes_meanwhile_have_room_and_the_newest_win() -> None:
    h = history(6000, 3)
    h.ask(c.PutTopic("t", capped(1)))
    for i in range(20):
        h.ask(append("t", b"%d" % i, tag=b"%d" % (i % 3)))
    h.rest()
    assert h.seqs("t") == [6018, 6019, 6020]


@pytest.mark.parametrize("how", ["kill", "close"])
@pytest.mark.parametrize("checkpoints", [0, 1])
def test_a_restart_goes_on_with_it(how: str, checkpoints: int) -> None:
    h = history(4000, 500)
    h.do(c.PutTopic("t", capped(2)))
    log = h.engine.shard.state.staged["t"]
    assert log.trim_from is not None
    for _ in range(checkpoints):
        h.engine.checkpoint()
        while h.engine.counters["checkpoints"] < 2:
            h.run_job() if h.jobs else h.ask()
    if how == "close":
        h.engine.stop_cold()
        while h.jobs:
            h.run_job()
        assert log.trim_from is not None
        h._take(h.engine.close())
    h.kill_and_open()
    assert h.engine.shard.appends.trimming
    h.rest()
    assert set(counts(h).values()) == {2}
    assert h.state("t").count == 1000
    h.restart()
    assert not h.engine.shard.appends.trimming
    assert h.state("t").count == 1000


def test_a_cap_that_is_lifted_again_spares_the_rest() -> None:
    h = history(3000, 3)
    h.do(c.PutTopic("t", capped(1)))
    h.do(c.PutTopic("t", FSYNC))
    left = h.engine.shard.state.staged["t"].count
    assert 3 < left < 3000
    h.rest()
    assert h.state("t").count == left


def test_a_topic_dropped_meanwhile() -> None:
    h = history(3000, 3)
    h.do(c.PutTopic("t", capped(1)))
    h.do(c.DropTopic("t"))
    h.rest()
    assert not h.engine.shard.appends.trimming
