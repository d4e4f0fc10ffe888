"""Deliveries from the cold tier: copies, dead letters, and pages for watchers.

Goal: a delivery waits without busy turns, comes as soon as the blocks are there, however small the cache is, and a
client that has left does not stay in the waiting list. Method: shards on simulated disks with an object store; only
jobs and messages run.
"""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.support.engine_harness import SMALL, Harness, numbered
from tests.support.flow_rig import forward, name_on, put, stored, texts, write
from tests.support.flow_rig import numbered as lines
from tests.support.shard_rig import Cluster, Rig, shard_config
from tests.support.sim_disk import SimDisk
from tests.support.stores import ObjectStore
from tests.support.watch_rig import PLAIN, FeedRig
from topics.api.config import TopicConfig
from topics.api.limits import KIB
from topics.engine.commands import consumers as con
from topics.engine.reading import cold_blocks
from topics.link import wire
from topics.link.watch import Follow, encode
from workers.forward.outbox import PAUSE_MS_MAX, PAUSE_MS_MIN

SOURCE = name_on(1, "source")
NEAR, FAR = name_on(1, "near"), name_on(0, "far")
QUEUE, DEAD = name_on(1, "queue"), name_on(0, "dead")
CACHES = pytest.mark.parametrize("cache", [0, 1 << 20], ids=["no cache", "cache"])
TIERED: dict[str, int] = {
    "max_topics": 0, "max_total_bytes": 0, "wal_file_bytes": 64 * KIB, "hot_retain_segments": 0,
}  # fmt: skip


def checkpoint(rig: Rig, times: int = 3) -> None:
    for _ in range(times):
        rig.core.engine.checkpoint()
        rig.turn()
        rig.rest()


def reads(store: ObjectStore) -> int:
    return store.count("read_range")


# ---- copies


@CACHES
def test_copies_of_cold_records_come_without_a_pause(cache: int) -> None:
    store = ObjectStore()
    made = Cluster(2, cold=store, cold_cache_bytes=cache, **TIERED)
    put(made, SOURCE, durability="fsync")
    put(made, FAR)
    forward(made, SOURCE, FAR)
    made.kill(0)  # copies are not taken
    write(made, SOURCE, lines(1, 14))
    checkpoint(made.rig(1))
    assert any(".data" in key for key in store.objects)
    made.start(0)
    before = reads(store)
    made.rest()
    assert stored(made, FAR) == 14, "no time has passed"
    assert reads(store) - before < 12, "each block is read about once"
    assert texts(made, FAR) == lines(1, 14)


def test_copies_wait_for_a_store_that_is_down() -> None:
    store = ObjectStore()
    made = Cluster(2, cold=store, cold_cache_bytes=0, **TIERED)
    put(made, SOURCE, durability="fsync")
    put(made, FAR)
    forward(made, SOURCE, FAR)
    made.kill(0)
    write(made, SOURCE, lines(1, 14))
    checkpoint(made.rig(1))
    store.is_down = True
    made.start(0)
    before = len(store.calls)
    made.rest()
    assert stored(made, FAR) == 0
    assert len(store.calls) - before < 6, "it must not be requested again and again"
    store.is_down = False
    made.clock.advance(60_000)
    made.rest()
    assert texts(made, FAR) == lines(1, 14)


# ---- dead letters


def disks_with_letters(store: ObjectStore, cache: int) -> list[SimDisk]:
    """Two shards. Jobs of a queue on shard 1 are being moved to a topic of shard 0, and are in the cold tier."""
    config = msgspec.structs.replace(SMALL, cold_cache_bytes=cache, **TIERED)
    disks = [SimDisk(1), SimDisk(2)]
    h = Harness(shard_config(config, 1), disk=disks[1], cold=store)
    h.put(QUEUE, TopicConfig(type="queue", durability="fsync", dead_letter=DEAD, lease_ms=60_000))
    h.append(QUEUE, *numbered(1, 14))
    claimed = h.do(con.Claim(QUEUE, node=b"w", max=6))
    h.do(con.Settle(QUEUE, "nack", b"w", [int(seq) for seq in claimed.page.seqs], nack="dead"))
    for _ in range(3):
        h.checkpoint()
    h.close()
    return disks


@CACHES
def test_letters_come_from_the_cold_tier(cache: int) -> None:
    store = ObjectStore()
    disks = disks_with_letters(store, cache)
    before = reads(store)
    made = Cluster(2, disks, cold=store, cold_cache_bytes=cache, **TIERED)
    made.clock.advance(PAUSE_MS_MIN + 1)
    made.rest()
    assert stored(made, DEAD) == 6
    assert reads(store) - before < 12, "each block is read about once"


def test_letters_that_find_too_many_who_wait_are_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore()
    disks = disks_with_letters(store, 0)
    monkeypatch.setattr(cold_blocks, "COLD_READERS_MAX", 0)
    made = Cluster(2, disks, cold=store, cold_cache_bytes=0, **TIERED)
    for _ in range(3):
        made.clock.advance(PAUSE_MS_MAX + 1)
        made.rest()
    assert stored(made, DEAD) == 0
    monkeypatch.undo()
    made.clock.advance(PAUSE_MS_MAX + 1)
    made.rest()
    assert stored(made, DEAD) == 6


# ---- watchers


def rig_with_cold_records(store: ObjectStore) -> FeedRig:
    rig = FeedRig(msgspec.structs.replace(SMALL, cold_cache_bytes=0, **TIERED), cold=store)
    assert rig.ask(wire.PUT_TOPIC, "t", {"durability": "fsync"})
    rig.ask(wire.WRITE, "t", {"records": [{"data": n} for n in range(1, 15)]})
    checkpoint(rig)
    return rig


def test_a_watcher_who_leaves_while_cold_records_come_keeps_no_place() -> None:
    rig = rig_with_cold_records(ObjectStore())
    waiting = rig.core.engine.cold
    key = rig.receive(wire.FOLLOW, "t", encode(Follow(PLAIN, "g", 0, 0)))
    rig.turn()
    rig.turn()
    assert waiting.waiting == 1
    rig.tell(wire.UNFOLLOW, key)
    rig.turn()
    assert waiting.waiting == 0
    rig.rest()


def test_a_watcher_of_cold_records_is_fed_without_turning_in_circles() -> None:
    store = ObjectStore()
    rig = rig_with_cold_records(store)
    key = rig.receive(wire.FOLLOW, "t", encode(Follow(PLAIN, "g", 0, 0)))
    rig.turn()
    for _ in range(3):
        rig.turn()
    shard = rig.core.engine.shard
    assert not shard.delivery.has_new_work and not shard.delivery.backlog, "it waits, and nothing is due"
    assert rig.wake_at_ms is None or rig.wake_at_ms > rig.clock.monotonic_ms()
    rig.rest()
    assert len(rig.heard[key]) > 1, "the answer, and pages"
    assert rig.core.engine.cold.waiting == 0


def test_reads_and_claims_of_a_front_that_is_gone_keep_no_place() -> None:
    rig = rig_with_cold_records(ObjectStore())
    rig.ask(wire.PUT_TOPIC, "q", {"type": "queue", "durability": "fsync"})
    rig.ask(wire.WRITE, "q", {"records": [{"data": n} for n in range(1, 15)]})
    checkpoint(rig)
    rig.receive(wire.DIFF, "t", {}, peer=b"dies")
    rig.receive(wire.CLAIM, "q", {"node": "w", "max": 3}, peer=b"dies")
    rig.turn()
    assert rig.core.engine.cold.waiting == 2
    rig.clock.advance(10 * 60_000)  # the store hangs
    rig.turn()
    rig.core.forget_peer(b"dies")
    assert rig.core.engine.cold.waiting == 0
    rig.rest()
    reply = rig.ask(wire.CLAIM, "q", {"node": "v", "max": 3})
    assert reply is not None
    assert [job["$seq"] for job in json.loads(bytes(reply.body))["claimed"]] == [1, 2, 3]
