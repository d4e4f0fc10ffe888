"""A change of the number of shards with a cold tier.

Goal: cold records stay where they are and are read as before, whether the tier is available meanwhile or not; pending
removals and erases there are executed afterwards, and nothing else is removed. Method: several shards on one
simulated disk, with one object store; every number after every other.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.support.engine_harness import FSYNC, holders, numbered
from tests.support.reshard_rig import CONFIG, Fleet, same
from tests.support.sim_disk import SimulatedCrash
from tests.support.stores import ObjectStore
from topics.api import limits
from topics.api.errors import EraseDeferred
from topics.engine.commands import topics as c

TIERED = msgspec.structs.replace(CONFIG, hot_retain_segments=1, cold_cache_bytes=1 << 20)
NAMES = [f"t{i}" for i in range(8)]
SECRET = b'"the secret that nobody may find again: 4711-0815"'
REACH = pytest.mark.parametrize("in_reach", [True, False], ids=["in reach", "out of reach"])


def tiered_fleet(store: ObjectStore, shards: int = 2, *, moved: bool = True) -> Fleet:
    """Topics of four segments, half of them cold; the third record of the first topic is the secret."""
    fleet = Fleet(shards, config=TIERED, cold=store)
    for name in NAMES:
        fleet.put(name, FSYNC)
        for seq in range(1, 15):
            fleet.append(name, SECRET if (name, seq) == ("t0", 3) else numbered(seq, 1)[0])
    for _ in range(3 if moved else 0):
        fleet.checkpoint()
    return fleet


def keys_of(store: ObjectStore, topic_id: int) -> list[str]:
    return [key for key in store.objects if f"/{topic_id:016x}/" in key]


def holding(fleet: Fleet, store: ObjectStore) -> list[str]:
    """Where the secret can be found."""
    return [key for key, data in store.objects.items() if SECRET in data] + holders(fleet.disk, SECRET)


def settle(fleet: Fleet) -> None:
    fleet.clock.advance(limits.COLD_PAUSE_MS_MAX + 1)
    for open_shard in fleet.open_shards:
        open_shard.rest()


@REACH
def test_cold_records_stay_where_they_are(in_reach: bool) -> None:
    store = ObjectStore()
    fleet = tiered_fleet(store)
    before, objects = fleet.picture(), dict(store.objects)
    assert any(key.endswith(".data") for key in objects)
    for shards in (5, 1, 3):
        fleet.kill()
        store.is_down = not in_reach
        calls = len(store.calls)
        fleet.reshard(shards)
        assert len(store.calls) == calls, "the change itself must not access the store"
        store.is_down = False
        fleet.open()
        settle(fleet)
        assert store.objects == objects
        same(before, fleet.picture())


@REACH
def test_cold_files_of_a_dropped_topic_are_removed(in_reach: bool) -> None:
    """The store was unavailable when the topic was dropped, so only a listing of the store shows what is left of it."""
    store = ObjectStore()
    fleet = tiered_fleet(store)
    gone = fleet.logs()["t1"].id
    store.is_down = True
    fleet.do(c.DropTopic("t1"))
    settle(fleet)
    fleet.close()
    assert keys_of(store, gone)
    store.is_down = not in_reach
    fleet.reshard(5)
    store.is_down = False
    fleet.open()
    settle(fleet)
    assert keys_of(store, gone) == []
    assert all(keys_of(store, log.id) for log in fleet.logs().values())
    for _ in range(3):
        fleet.checkpoint()
    fleet.kill()
    fleet.open()
    settle(fleet)
    assert len(fleet.logs()) == len(NAMES) - 1
    assert all(keys_of(store, log.id) for log in fleet.logs().values()), (
        "a start from a later snapshot must do so, too"
    )


@REACH
def test_an_erase_that_was_put_off_is_finished_afterwards(in_reach: bool) -> None:
    store = ObjectStore()
    fleet = tiered_fleet(store)
    store.is_down = True
    fleet.owner("t0").refused(c.Delete("t0", seqs=[3], erase=True), EraseDeferred)
    fleet.kill()
    assert holding(fleet, store)
    store.is_down = not in_reach
    fleet.reshard(3)
    store.is_down = False
    fleet.open()
    settle(fleet)
    assert holding(fleet, store) == []
    assert len(fleet.owner("t0").rows("t0")) == 13


def test_an_erase_does_not_forget_a_copy_that_was_on_its_way() -> None:
    """Killed after the copy and before the flip: no snapshot says that the store has a copy."""
    store = ObjectStore()
    fleet = tiered_fleet(store, moved=False)
    open_shard = fleet.owner("t0")

    def look(name: str, key: str) -> None:
        if any(SECRET in data for data in store.objects.values()) and name == "read_range":
            raise SimulatedCrash

    store.on_call = look
    with pytest.raises(SimulatedCrash):
        open_shard.checkpoint()
    store.on_call = lambda name, key: None
    assert holding(fleet, store)
    fleet.kill()
    store.is_down = True
    fleet.open()
    fleet.owner("t0").send(c.Delete("t0", seqs=[3], erase=True))
    fleet.kill()
    fleet.reshard(3)
    store.is_down = False
    fleet.open()
    settle(fleet)
    assert holding(fleet, store) == []
