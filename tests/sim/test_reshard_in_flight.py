"""A change of the number of shards while jobs and producers are active: a plan, a pin, a transaction in each of its
states.

Goal: the topic's new owner finds all of them, as after a plain restart. Method: several shards on one simulated disk,
with one object store; each state is taken through several numbers of shards, after a clean stop, a kill and a power
cut, and the job or the producer then continues as after any restart.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support import length
from tests.support.engine_harness import FSYNC, holders, numbered
from tests.support.merge_rig import (
    CONFIG,
    GRACE_MS,
    NEEDLE,
    SECRET,
    TAGS,
    check_tidy,
    commit,
    keys,
    merged,
    plan,
    seen,
    work,
)
from tests.support.reshard_rig import Fleet, OpenShard
from tests.support.sim_disk import SimulatedCrash
from tests.support.stores import ObjectStore
from topics.api import limits
from topics.api.errors import LeaseLost, PlanNotFound, SnapshotNotFound
from topics.engine.commands import merges as mrg
from topics.engine.commands import topics as c
from topics.engine.commands import transactions as t
from topics.engine.commands.merges import MergeParameters
from topics.engine.commands.topics import Records

SMALL_TARGET = 700  # bytes: two segments a group
HOW = pytest.mark.parametrize("how", ["stop", "kill", "power"])
REACH = pytest.mark.parametrize("in_reach", [True, False], ids=["in reach", "out of reach"])
NUMBERS = (5, 1, 3)


def fleet_of(store: ObjectStore | None = None, shards: int = 2) -> Fleet:
    """Topic `t` has four cold segments, and every shard has some other topic."""
    config = msgspec.structs.replace(CONFIG, verify=False)
    fleet = Fleet(shards, config=config, cold=store if store is not None else ObjectStore())
    for i in range(6):
        fleet.put(f"other{i}", FSYNC)
        fleet.append(f"other{i}", b"1")
    fleet.put("t", FSYNC)
    for seq in range(1, 23):
        payload = SECRET if seq == 3 else numbered(seq, 1)[0]
        fleet.append("t", payload, tag=TAGS[seq % 3], nodes=[b"n%d" % (seq % 2)])
    for _ in range(3):
        fleet.checkpoint()
    return fleet


def end(fleet: Fleet, how: str) -> None:
    fleet.close() if how == "stop" else fleet.die(how)


def change(fleet: Fleet, how: str, shards: int) -> OpenShard:
    """The shard of `t` afterwards."""
    end(fleet, how)
    fleet.reshard(shards)
    fleet.open()
    settle(fleet)
    return fleet.owner("t")


def settle(fleet: Fleet) -> None:
    fleet.clock.advance(limits.COLD_PAUSE_MS_MAX + 1)
    for open_shard in fleet.open_shards:
        open_shard.rest()


# ---- plans


@HOW
def test_a_plan_under_way_is_asked_for_again(how: str) -> None:
    fleet = fleet_of()
    h = fleet.owner("t")
    body = plan(h, parameters=MergeParameters(target_bytes=SMALL_TARGET))
    assert len(body["groups"]) > 1
    work(h, body | {"groups": body["groups"][:1]})
    before = seen(h)
    for shards in NUMBERS:
        h = change(fleet, how, shards)
        h.refused(mrg.RenewPlan("t", body["plan_id"], body["lease"]), LeaseLost)
        h.refused(mrg.CommitPlan("t", body["plan_id"], body["lease"]), LeaseLost)
        again = plan(h, parameters=MergeParameters(target_bytes=SMALL_TARGET))
        assert again | {"lease": 0} == body | {"lease": 0}
        assert seen(h) == before
        body = again
    sidecar = f"{body['staging']}/group-0.json"
    assert h.cold is not None and h.cold.exists(sidecar), "finished work must not be repeated"
    work(h, body)
    done = commit(h, body)
    assert [group["group"] for group in done.body["groups"]] == [group["group"] for group in body["groups"]]
    for shards in NUMBERS:
        h = change(fleet, how, shards)
        assert commit(h, body).body == done.body
        assert seen(h) == before
    check_tidy(h)


@REACH
def test_an_abandoned_plan_whose_staging_is_still_there(in_reach: bool) -> None:
    """The store became unavailable before staging could be emptied: the new owner does not know of that, and gives
    the plan to the next job.
    """
    store = ObjectStore()
    fleet = fleet_of(store)
    h = fleet.owner("t")
    body = plan(h)
    work(h, body)
    store.is_down = not in_reach
    h.send(mrg.AbandonPlan("t", body["plan_id"], body["lease"]))
    end(fleet, "kill")
    store.is_down = False
    fleet.reshard(5)
    fleet.open()
    settle(fleet)
    h = fleet.owner("t")
    before = seen(h)
    if in_reach:
        assert not [key for key in keys(h) if key.startswith("staging/")]
        h.refused(mrg.CommitPlan("t", body["plan_id"], body["lease"]), PlanNotFound)
    again = plan(h)
    work(h, again)
    assert commit(h, again).body["state"] == "committed"
    assert seen(h) == before
    check_tidy(h)


def test_a_plan_of_a_topic_that_was_dropped() -> None:
    """The store was unavailable when the topic was dropped; only a listing of the store shows what is there."""
    store = ObjectStore()
    fleet = fleet_of(store)
    body = plan(fleet.owner("t"))
    work(fleet.owner("t"), body)
    store.is_down = True
    fleet.do(c.DropTopic("t"))
    settle(fleet)
    store.is_down = False
    fleet.kill()
    assert [key for key in store.objects if key.startswith("staging/plans/")]
    fleet.reshard(5)
    fleet.open()
    settle(fleet)
    assert not [key for key in store.objects if key.startswith("staging/plans/")]
    assert not [key for key in store.objects if body["topic_id"] in key]


@pytest.mark.parametrize("how", ["kill", "power"])
def test_a_commit_that_is_cut_off(how: str) -> None:
    """At any call to the store; the next start has another number of shards."""
    store = ObjectStore()
    fleet = fleet_of(store)
    body = plan(fleet.owner("t"))
    work(fleet.owner("t"), body)
    calls = len(store.calls)
    commit(fleet.owner("t"), body)
    count = len(store.calls) - calls
    assert count > 15
    for number in length.calls(count, each=16, shifted=how == "power"):
        store = ObjectStore()
        fleet = fleet_of(store)
        h = fleet.owner("t")
        body = plan(h)
        work(h, body)
        before = seen(h)
        store.crash_at(number)
        with pytest.raises(SimulatedCrash):
            commit(h, body)
        h = change(fleet, how, NUMBERS[number % 3])
        assert seen(h) == before, number
        again = plan(h)
        if again["plan_id"] is None:  # it was in the log
            assert commit(h, body).body["state"] == "committed"
        else:
            assert again["plan_id"] == body["plan_id"], number
            work(h, again)
            assert commit(h, again).body["state"] == "committed"
        assert seen(h) == before, number
        check_tidy(h, number)


# ---- pins


@HOW
def test_pinned_files_stay_under_another_owner(how: str) -> None:
    fleet = fleet_of()
    h = fleet.owner("t")
    pinned = h.do(mrg.PinSnapshot("t", limits.SNAPSHOT_TTL_MS_MAX)).body
    listed = {key for key in keys(h) if "/seg-" in key or key == pinned["path"]}
    merged(h)
    before = seen(h)
    for shards in NUMBERS:
        h = change(fleet, how, shards)
        for _ in range(3):
            h.checkpoint()
            h.pass_time(2 * GRACE_MS)
        assert listed <= set(keys(h)), "the grace period is over"
        status = h.do(mrg.GetMerges("t")).body
        assert (status["snapshots"], status["retired_segments"]) == (1, 4)
        assert seen(h) == before
    renewed = h.do(mrg.RenewSnapshot("t", pinned["snapshot_id"], limits.SNAPSHOT_TTL_MS_MAX)).body
    assert renewed["expires_at_ms"] > pinned["expires_at_ms"]
    assert h.do(mrg.ReleaseSnapshot("t", pinned["snapshot_id"])).body["released"]
    check_tidy(h)


def test_a_pin_that_ends_meanwhile_lets_go() -> None:
    fleet = fleet_of()
    h = fleet.owner("t")
    pinned = h.do(mrg.PinSnapshot("t", 600_000)).body
    merged(h)
    fleet.close()
    fleet.clock.advance(700_000)
    fleet.reshard(3)
    fleet.open()
    settle(fleet)
    h = fleet.owner("t")
    h.refused(mrg.RenewSnapshot("t", pinned["snapshot_id"]), SnapshotNotFound)
    check_tidy(h)


@pytest.mark.parametrize("state", ["planned", "worked on", "merged", "pinned"])
def test_an_erase_by_the_new_owner_reaches_all_of_it(state: str) -> None:
    store = ObjectStore()
    fleet = fleet_of(store)
    h = fleet.owner("t")
    if state == "pinned":
        h.do(mrg.PinSnapshot("t", limits.SNAPSHOT_TTL_MS_MAX))
    body = plan(h)
    if state != "planned":
        work(h, body)
    if state in ("merged", "pinned"):
        commit(h, body)
    rows = seen(h)[0]
    h = change(fleet, "kill", 3)
    h.do(c.Delete("t", seqs=[3], erase=True))
    assert holders(fleet.disk, NEEDLE) == []
    assert [key for key, data in store.objects.items() if NEEDLE in data] == []
    assert seen(h)[0] == [row for row in rows if row[0] != 3]


# ---- transactions

PARTS = [("b", 2, 4), ("a", 2, 4)]
EXPECTED = [b'"%s%d-%d"' % (part, chunk, i) for part in (b"b", b"a") for chunk in (0, 1) for i in (0, 1)]


def producers(shards: int = 2) -> Fleet:
    fleet = fleet_of(shards=shards)
    for name in ("x0", "x1", "x2", "x3"):
        fleet.put(name, FSYNC)
    return fleet


def stage_all(h: OpenShard, topic: str) -> int:
    txn: int = h.do(t.BeginTransaction(topic, "p", 1, ttl_ms=limits.TXN_TTL_MS_MAX)).txn
    for part in ("a", "b"):
        for chunk in (0, 1):
            staged = [b'"%s%d-%d"' % (part.encode(), chunk, i) for i in (0, 1)]
            h.do(t.StageChunk(topic, txn, part, chunk, Records(staged)))
    return txn


def payloads(h: OpenShard, topic: str) -> list[bytes]:
    return [payload for _, payload in h.rows(topic)]


def staged_files(fleet: Fleet) -> list[str]:
    return [path for path in fleet.disk.paths() if "/txn-" in path]


@HOW
def test_transactions_that_are_open_go_on(how: str) -> None:
    fleet = producers()
    txns = {topic: stage_all(fleet.owner(topic), topic) for topic in ("x0", "x1", "x2", "x3")}
    for shards in NUMBERS:
        change(fleet, how, shards)
        assert len(staged_files(fleet)) == 4
        assert (
            sum(open_shard.engine.shard.transactions.open_transactions for open_shard in fleet.open_shards)
            == 4
        )
    for topic, txn in txns.items():
        h = fleet.owner(topic)
        assert h.do(t.BeginTransaction(topic, "p", 1)).state == "open"
        assert h.do(t.StageChunk(topic, txn, "a", 1, Records([b'"another"']))).repeated
        h.do(t.StageChunk(topic, txn, "c", 0, Records([b'"c"'])))
        assert h.do(t.CommitTransaction(topic, txn, [*PARTS, ("c", 1, 1)], 1000)).count == 9
        assert payloads(h, topic) == [*EXPECTED, b'"c"']
    for shards in NUMBERS:
        change(fleet, how, shards)
        assert staged_files(fleet) == []
        for topic, txn in txns.items():
            h = fleet.owner(topic)
            again = h.do(t.CommitTransaction(topic, txn, PARTS, 1000))
            assert (again.state, again.first_seq, again.last_seq, again.count) == ("committed", 1, 9, 9)
            assert h.do(t.BeginTransaction(topic, "p", 1)).state == "committed"


@pytest.mark.parametrize("done", [0, 2, 4, 6])
@pytest.mark.parametrize("how", ["kill", "power"])
def test_a_decided_one_is_finished_by_the_new_owner(
    how: str, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TXN_WHOLE_RECORDS", 0)
    monkeypatch.setattr(limits, "TXN_SLICE_RECORDS", 1)
    fleet = producers()
    h = fleet.owner("x1")
    txn = stage_all(h, "x1")
    h.ask(t.CommitTransaction("x1", txn, PARTS, 10_000))
    log: Any = h.engine.shard.state.staged["x1"]
    while log.transactions.open[txn].decision is None or log.next_seq <= done:
        h.run_job() if h.jobs else h.ask()
    is_synced = h.engine.wal.synced_lsn == h.engine.wal.last_lsn
    h = change(fleet, how, 5)
    sure = done > 0 or how == "kill" or is_synced
    if sure:  # no request is needed: the decision was synced before the first record
        assert payloads(fleet.owner("x1"), "x1") == EXPECTED
    h = fleet.owner("x1")
    assert h.do(t.CommitTransaction("x1", txn, PARTS, 10_000)).count == 8
    assert payloads(h, "x1") == EXPECTED
    h.rest()
    assert staged_files(fleet) == []
    change(fleet, how, 1)
    assert fleet.owner("x1").do(t.BeginTransaction("x1", "p", 1)).state == "committed"
    assert payloads(fleet.owner("x1"), "x1") == EXPECTED


def test_a_decided_one_whose_shard_is_stopped_before_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean stop does not wait for it, and neither does the change: the next start continues."""
    monkeypatch.setattr(limits, "TXN_WHOLE_RECORDS", 0)
    monkeypatch.setattr(limits, "TXN_SLICE_RECORDS", 1)
    fleet = producers()
    h = fleet.owner("x1")
    txn = stage_all(h, "x1")
    (token,) = h.ask(t.CommitTransaction("x1", txn, PARTS, 10_000))
    while h.engine.shard.state.staged["x1"].next_seq < 3:
        h.run_job() if h.jobs else h.ask()
    fleet.close()
    assert h.replies[token].state == "committing"
    fleet.reshard(3)
    assert len(staged_files(fleet)) == 1
    fleet.open()
    settle(fleet)
    assert payloads(fleet.owner("x1"), "x1") == EXPECTED
    assert staged_files(fleet) == []


def test_one_that_expires_is_gone_and_can_be_begun_again() -> None:
    fleet = producers()
    txn = stage_all(fleet.owner("x1"), "x1")
    h = change(fleet, "kill", 5)
    fleet.clock.advance(limits.TXN_TTL_MS_MAX + 1)
    settle(fleet)
    h = fleet.owner("x1")
    assert staged_files(fleet) == []
    assert h.do(t.BeginTransaction("x1", "p", 1)).state == "open"
    assert h.engine.shard.state.staged["x1"].transactions.open[txn].number == 2  # type: ignore[union-attr]
