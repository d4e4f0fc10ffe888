"""Goal: a router exists completely or not at all: in the catalog, at its source and at its dest, whichever process
dies when.

Method: real shards on simulated disks; the test carries the messages. An operation is interrupted at every step by a
death, and after the restart the parts are compared with the catalog.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import length
from tests.support.faults import fault
from tests.support.rules_rig import (
    args_of,
    asked,
    begin_put,
    body_of,
    drop,
    get,
    name_on,
    names,
    put,
    reply_to,
    rules,
    settle,
    topics,
)
from tests.support.shard_answers import ShardAnswer
from tests.support.shard_rig import WORKER, Cluster, error_of
from topics.api.limits import KIB
from topics.engine.commands import forwards as fwd
from topics.engine.core.placement import shard_of
from topics.link import wire
from workers.forward.messages import (
    ForwardsGone,
    ForwardsMissed,
    ForwardTotals,
    WantTotals,
    encode,
    encode_step,
    read_missed,
    read_totals,
)
from workers.forward.rules import reads as rule_reads
from workers.forward.rules import service as rule_service

NEAR, FAR = name_on(0, "near"), name_on(1, "far")  # of the catalog
NEAR_TOO, FAR_TOO = name_on(0, "other"), name_on(1, "other")
WAYS = [(NEAR, FAR), (FAR, NEAR), (NEAR, NEAR_TOO), (FAR, FAR_TOO)]
EACH_WAY = pytest.mark.parametrize(("source", "dest"), WAYS)


def cluster(shards: int = 2, **options: Any) -> Cluster:
    made = Cluster(shards, wal_file_bytes=64 * KIB, **options)
    settle(made)
    return made


def die(made: Cluster, who: str) -> None:
    if who == "power":
        made.cut_power()
        made.start(0)
        made.start(1)
        return
    shard = {"catalog": 0, "worker": 1}[who]
    made.kill(shard)
    made.start(shard)


# ---- made, changed, deleted


@EACH_WAY
def test_a_rule_has_its_parts_and_its_topics(source: str, dest: str) -> None:
    made = cluster()
    body = body_of(put(made, "r", source, dest), 201)
    assert body["created"] is True
    assert rules(made) == ["r"]
    assert topics(made) == sorted([source, dest])
    assert body_of(drop(made, "r"))["deleted"] is True
    assert rules(made) == []
    assert topics(made) == sorted([source, dest]), "copies stay"
    assert body_of(drop(made, "r"))["deleted"] is False


def test_a_pattern_has_an_outflow_at_every_shard() -> None:
    made = cluster(3)
    body_of(put(made, "r", "a.>", "all"), 201)
    assert rules(made) == ["r"]
    assert topics(made) == ["all"]
    drop(made, "r")
    assert rules(made) == []


def test_the_same_again_logs_nothing_and_a_change_reaches_the_source() -> None:
    made = cluster()
    put(made, "r", FAR, NEAR, filter="a")
    (before,) = made.rig(0).core.engine.shard.forwards.catalog.values()
    written = made.rig(0).core.engine.counters["frames"]
    assert body_of(put(made, "r", FAR, NEAR, filter="a"))["created"] is False
    assert made.rig(0).core.engine.counters["frames"] == written
    assert body_of(put(made, "r", FAR, NEAR, filter="b"))["filter"] == ["tag", "Eq", "b"]
    (after,) = made.rig(0).core.engine.shard.forwards.catalog.values()
    assert after.uid == before.uid
    assert rules(made) == ["r"], "the outflow must have the changed rule, too"


def test_a_uid_is_never_given_again() -> None:
    made = cluster()
    uids: list[int] = []
    for _ in range(3):
        put(made, "r", NEAR, FAR)
        uids += made.rig(0).core.engine.shard.forwards.catalog
        drop(made, "r")
        die(made, "power")
        settle(made)
    assert len(set(uids)) == 3


def test_a_refused_rule_leaves_nothing() -> None:
    for room in (0, 1):
        for source, dest in WAYS:
            made = cluster(max_topics=1)
            if not room:
                made.ask(0, wire.PUT_TOPIC, name_on(0, "full"))
            there = topics(made)
            reply = put(made, "r", source, dest)
            assert (reply.status, error_of(reply)["detail"]["limit"]) == (429, "max_topics")
            assert rules(made) == []
            assert topics(made) == there
            assert get(made, "r").status == 404


def test_a_refused_pattern_leaves_nothing() -> None:
    made = cluster(max_topics=1)
    made.ask(0, wire.PUT_TOPIC, name_on(0, "full"))
    assert put(made, "r", "a.>", FAR).status == 429
    assert rules(made) == []
    assert len(topics(made)) == 1


def test_a_pattern_that_one_shard_cannot_take_is_undone_but_may_have_copied() -> None:
    made = cluster(3)
    made.disks[2].fail_at(1, errno.EIO, of="sync")
    reply = put(made, "r", "a.>", name_on(1, "all", 3))
    assert (reply.status, error_of(reply)["detail"]) == (503, {"outcome": "unknown"})
    assert made.rig(2).core.engine.shard.state.read_only is not None
    assert (get(made, "r").status, topics(made)) == (404, [])


def test_a_topic_that_was_there_before_a_refused_rule_stays() -> None:
    made = cluster(max_topics=1)
    made.ask(1, wire.PUT_TOPIC, FAR)
    assert put(made, "r", NEAR, FAR).status == 429
    assert topics(made) == [FAR]
    assert rules(made) == []


def test_the_cap_of_rules_is_for_new_ones() -> None:
    made = cluster(max_forwards=2)
    put(made, "a", NEAR, FAR)
    put(made, "b", NEAR, FAR_TOO)
    reply = put(made, "c", NEAR, NEAR_TOO)
    assert (reply.status, error_of(reply)["detail"]) == (429, {"limit": "max_routers", "max": 2})
    assert body_of(put(made, "b", NEAR, FAR_TOO, preserve_tag=False))["preserve_tag"] is False
    drop(made, "a")
    body_of(put(made, "c", NEAR, NEAR_TOO), 201)


# ---- deaths

Scene = tuple[Callable[[Cluster], None], Callable[[Cluster], None], list[list[str]]]


def _nothing(made: Cluster) -> None:
    pass


def _with_rule(source: str, dest: str, **fields: Any) -> Callable[[Cluster], None]:
    return lambda made: [put(made, "r", source, dest, **fields), None][1]


def _drop_later(made: Cluster) -> None:
    made.rig(0).receive(wire.DROP_FORWARD, "", args=args_of("r"))


def _gone_later(made: Cluster) -> None:
    """As the worker of a dropped dest reports it."""
    (uid,) = made.rig(0).core.engine.shard.forwards.catalog
    made.ask(1, wire.DROP_TOPIC, FAR)
    body = encode(ForwardsGone([(uid, "r")]))
    made.rig(0).receive(wire.FORWARDS_GONE, "", body, peer=WORKER + b"1-1")


SCENES: dict[str, Scene] = {
    "make near to far": (_nothing, lambda made: [begin_put(made, "r", NEAR, FAR), None][1], [[], ["r"]]),
    "make far to near": (_nothing, lambda made: [begin_put(made, "r", FAR, NEAR), None][1], [[], ["r"]]),
    "make a pattern": (_nothing, lambda made: [begin_put(made, "r", "a.*", FAR), None][1], [[], ["r"]]),
    "change": (
        _with_rule(FAR, NEAR, filter="a"),
        lambda made: [begin_put(made, "r", FAR, NEAR, filter="b"), None][1],
        [["r"]],
    ),
    "change a pattern": (
        _with_rule("a.>", NEAR),
        lambda made: [begin_put(made, "r", "a.>", NEAR, filter="b"), None][1],
        [["r"]],
    ),
    "end near to far": (_with_rule(NEAR, FAR), _drop_later, [[], ["r"]]),
    "end far to near": (_with_rule(FAR, NEAR), _drop_later, [[], ["r"]]),
    "end a pattern": (_with_rule("a.>", FAR), _drop_later, [[], ["r"]]),
    "gone with its dest": (_with_rule(NEAR, FAR), _gone_later, [[]]),
}


@pytest.mark.parametrize("who", ["catalog", "worker", "power"])
@pytest.mark.parametrize("scene", SCENES)
@fault(
    "worker",
    "the catalog's worker or another dies between any two steps of making, changing or ending a router",
    "the router is there in full or not at all",
)
def test_a_death_at_any_step_leaves_all_of_a_rule_or_nothing(scene: str, who: str) -> None:
    before, later, outcomes = SCENES[scene]
    some = length.pick(short=11, long=1)
    for steps in range(length.turn(some), 200, some):
        made = cluster()
        before(made)
        later(made)
        went_on = all(made.step() for _ in range(steps))
        die(made, who)
        settle(made)
        assert rules(made) in outcomes, steps
        body_of(put(made, "next", NEAR_TOO, FAR_TOO), 201)  # nothing is in the way of what follows
        if not went_on:
            return
    raise AssertionError("the shards always have more work to do")


def test_acknowledged_rules_survive_a_crash() -> None:
    made = cluster()
    body_of(put(made, "r", NEAR, FAR, filter="a"), 201)
    put(made, "gone", NEAR, FAR_TOO)
    drop(made, "gone")
    body_of(put(made, "r", NEAR, FAR, filter="b"))
    die(made, "power")
    settle(made)
    assert rules(made) == ["r"]
    assert body_of(get(made, "r"))["filter"] == ["tag", "Eq", "b"]


@fault("worker", "a worker that a router needs is down", "503, and nothing is changed")
def test_while_a_worker_is_down() -> None:
    made = cluster()
    put(made, "r", NEAR, FAR)
    put(made, "back", FAR, NEAR_TOO)
    made.kill(1)
    for reply in (
        put(made, "new", NEAR, FAR_TOO),
        put(made, "p", "a.>", NEAR),
        get(made, "r"),
        drop(made, "r"),
    ):
        assert (reply.status, error_of(reply)["code"]) == (503, "not_ready")
        assert "outcome" not in error_of(reply).get("detail", {})
    assert asked_list(made).status == 503, "a list without all totals would be wrong"
    assert body_of(get(made, "back"))["router"] == "back"
    # Its source is down, and it is deleted anyway: the outflow is closed when the worker is back.
    assert body_of(drop(made, "back"))["deleted"] is True
    made.start(1)
    settle(made)
    assert rules(made) == ["r"]


def asked_list(made: Cluster) -> ShardAnswer:
    return asked(made, wire.LIST_FORWARDS, args_of(page_size=10))


@fault(
    "worker",
    "a worker dies in the middle of making a router",
    "503 after a while; the router is made when it is back",
)
def test_a_worker_that_dies_in_the_middle_and_stays_away() -> None:
    made = cluster()
    key = begin_put(made, "r", NEAR, FAR)
    second = begin_put(made, "s", NEAR, NEAR_TOO)
    while not made.rig(0).core.engine.shard.forwards.catalog:
        assert made.step()
    made.kill(1)
    made.rest()
    rig = made.rig(0)
    assert reply_to(rig, key) is None
    for _ in range(rule_service.TIMEOUT_US // 1_000_000 + 1):
        made.clock.advance(1000)
        made.rest()
    first = error_of(reply_to(rig, key))
    assert (first["code"], first["detail"]) == ("not_ready", {"outcome": "unknown"})
    assert "detail" not in error_of(reply_to(rig, second)), "it must not have been begun"
    made.start(1)
    settle(made)
    assert rules(made) == ["r"]


@fault(
    "worker",
    "the source's worker cannot log a change of a router",
    "503 with an unknown outcome; the change is made when it can be",
)
def test_a_change_that_a_worker_cannot_take_goes_on() -> None:
    """Such a change was refused with the worker's error, as if nothing had changed, but was executed a second later."""
    made = cluster()
    put(made, "r", FAR, NEAR, filter="a")
    made.disks[1].fail_at(1, errno.EIO, of="sync")
    reply = put(made, "r", FAR, NEAR, filter="b")
    assert (reply.status, error_of(reply)["detail"]) == (503, {"outcome": "unknown"})
    made.kill(1)
    made.start(1)
    settle(made)
    assert rules(made) == ["r"]
    assert body_of(get(made, "r"))["filter"] == ["tag", "Eq", "b"]


@fault(
    "disk",
    "the catalog's disk fails while a router is made or ended",
    "503 with an unknown outcome; it is made or ended after the restart",
)
@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("ends", [False, True], ids=["make", "end"])
def test_a_disk_that_fails_in_the_middle(number: int, ends: bool) -> None:
    """A step failed, and so did its rollback. The client got the error of the rollback only, as if nothing had been
    changed.
    """
    made = cluster()
    if ends:
        put(made, "r", FAR, NEAR)
    made.disks[0].fail_at(number, errno.EIO, of="sync")
    reply = drop(made, "r") if ends else put(made, "r", FAR, NEAR)
    if reply.status >= 400:
        assert error_of(reply)["detail"]["outcome"] == "unknown"
    made.kill(0)
    made.start(0)
    settle(made)
    assert rules(made) in ([], ["r"])


@fault(
    "worker",
    "the worker of a destination in memory dies, and there was no request to that topic since",
    "its routers, and what they have counted, are there as before",
)
@pytest.mark.parametrize("dest", [NEAR, FAR], ids=["near", "far"])
def test_a_dest_in_memory_keeps_its_routers(dest: str) -> None:
    """Records of such a topic are replayed when a request comes. Its inflows were replayed then, too, and so looked
    like those of a dropped topic: the routers were deleted.
    """
    made = cluster()
    source = name_on(1, "source")
    made.ask(shard_of(dest, 2), wire.PUT_TOPIC, dest, {"durability": "memory"})
    made.ask(shard_of(dest, 2), wire.WRITE, dest, {"records": [{"data": 1}]})
    body_of(put(made, "r", source, dest), 201)
    made.ask(1, wire.WRITE, source, {"records": [{"data": 2}, {"data": 3}]})
    settle(made)
    for shard in (0, 1):
        made.kill(shard)
        made.start(shard)
    made.rest()
    (row,) = body_of(asked_list(made))["routers"]
    assert row["forwarded_total"] == 2
    settle(made)
    assert rules(made) == ["r"]


# ---- the periodic check


def step(made: Cluster, shard: int, command: Any) -> None:
    made.rig(shard).receive(wire.FORWARD_STEP, "", encode_step(command))
    made.rest()


def test_a_topic_that_was_dropped_unheard_takes_its_rules_along() -> None:
    for source, dest in ((NEAR, FAR), (FAR, NEAR)):
        made = cluster()
        put(made, "r", source, dest)
        put(made, "p", "a.>", NEAR_TOO)
        (uid,) = [
            rule.uid for rule in made.rig(0).core.engine.shard.forwards.catalog.values() if rule.name == "r"
        ]
        # As if the message had been lost: the parts are removed without notice.
        step(made, 1, fwd.CloseInflow(FAR, uid) if dest == FAR else fwd.CloseOutflow(uid))
        die(made, "worker")
        settle(made)
        assert rules(made) == ["p"]


def test_an_outflow_of_a_pattern_that_is_missing_is_opened_again() -> None:
    made = cluster()
    put(made, "p", "a.>", NEAR)
    (uid,) = made.rig(0).core.engine.shard.forwards.catalog
    step(made, 1, fwd.CloseOutflow(uid))
    die(made, "catalog")
    settle(made)
    assert rules(made) == ["p"]


def test_flows_without_a_rule_are_closed() -> None:
    made = cluster()
    put(made, "r", NEAR, FAR)
    step(made, 1, fwd.OpenInflow(FAR, 77, "stray"))
    step(made, 1, fwd.OpenOutflow(fwd.Forward(78, "stray", FAR, NEAR)))
    step(made, 1, fwd.OpenOutflow(fwd.Forward(79, "stray", "b.>", NEAR)))
    die(made, "worker")
    settle(made)
    assert rules(made) == ["r"]


def test_a_worker_says_what_it_misses() -> None:
    made = cluster()
    put(made, "r", NEAR, FAR)
    (rule,) = made.rig(0).core.engine.shard.forwards.catalog.values()
    rig = made.rig(1)
    key = rig.receive(wire.FORWARDS_CHECK, "", encode(([(FAR, 98), ("none", rule.uid)], [(99, 5)])))
    rig.rest()
    reply = reply_to(rig, key)
    assert reply is not None
    assert read_missed(reply.body) == ForwardsMissed([98, rule.uid], [99])
    key = rig.receive(wire.FORWARDS_CHECK, "", encode(([], [])))
    rig.rest()
    reply = reply_to(rig, key)
    assert reply is not None
    assert read_missed(reply.body) == ForwardsMissed(stray_inflows=[(FAR, rule.uid)])


def test_a_worker_that_cannot_read_its_log_misses_nothing() -> None:
    """It is repaired and restarted, and its rules must be there then."""
    made = cluster()
    put(made, "r", NEAR, FAR)
    rig = made.rig(1)
    shard = rig.core.engine.shard
    shard.state.published[FAR].inflows, shard.state.read_only = None, "an entry of the log is damaged"
    key = rig.receive(wire.FORWARDS_CHECK, "", encode(([(FAR, 1)], [(99, 5)])))
    rig.rest()
    reply = reply_to(rig, key)
    assert reply is not None
    assert read_missed(reply.body) == ForwardsMissed()


def test_a_rule_that_is_put_again_is_looked_at_first() -> None:
    """The dest was dropped while the catalog was down. A client that puts the rule again gets all of it, even before
    the catalog has compared.
    """
    made = cluster()
    put(made, "r", NEAR, FAR)
    (uid,) = made.rig(0).core.engine.shard.forwards.catalog
    step(made, 1, fwd.CloseInflow(FAR, uid))
    desk = made.rig(0).core.rules
    assert desk is not None
    desk._operations.check_soon([1])
    assert put(made, "r", NEAR, FAR).status == 201
    settle(made)
    assert rules(made) == ["r"]


def test_rules_that_are_gone_are_answered_when_they_are() -> None:
    made = cluster()
    put(made, "r", NEAR, FAR)
    put(made, "s", NEAR, FAR)
    uids = list(made.rig(0).core.engine.shard.forwards.catalog)
    rig = made.rig(0)
    key = rig.receive(wire.FORWARDS_GONE, "", encode(ForwardsGone([(uid, "") for uid in (*uids, 999)])))
    made.rest()
    reply = reply_to(rig, key)
    assert reply is not None and reply.status == 200
    assert rules(made) == []


# ---- bounds


def test_the_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_service, "QUEUE_MAX", 3)
    made = cluster()
    keys = [begin_put(made, f"r{i}", NEAR, name_on(1, f"d{i}-")) for i in range(6)]
    refused = [
        error_of(reply_to(made.rig(0), key))
        for key in keys[3:]
        if made.rig(0)._take(made.rig(0).core.tend()) is None
    ]
    assert [error["detail"] for error in refused] == [{"limit": "router_changes", "max": 3}] * 3
    made.rest()
    assert rules(made) == ["r0", "r1", "r2"]


def test_looks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_reads, "READS_MAX", 2)
    made = cluster()
    put(made, "r", NEAR, FAR)
    rig = made.rig(0)
    keys = [rig.receive(wire.GET_FORWARD, "", args=args_of("r")) for _ in range(3)]
    made.rest()
    replies = [reply_to(rig, key) for key in keys]
    assert [reply.status for reply in replies if reply is not None] == [200, 200, 429]
    assert body_of(get(made, "r"))["forwarded_total"] == 0


def test_a_page_asks_each_shard_once() -> None:
    made = cluster()
    for i in range(6):
        put(made, f"r{i}", NEAR, name_on(i % 2, f"d{i}-"))
    rig = made.rig(0)
    rig.receive(wire.LIST_FORWARDS, "", args=args_of(page_size=100))
    rig._take(rig.core.tend())
    (message,) = [parts for shard, parts in rig.asks if shard == 1]
    (request,) = wire.read_requests(bytes(message[0]))
    assert (request.op, request.topic) == (wire.FORWARD_TOTALS, b"")
    made.rest()
    assert names(made) == [f"r{i}" for i in range(6)]


def test_totals_of_what_is_not_there() -> None:
    made = cluster()
    rig = made.rig(1)
    key = rig.receive(wire.FORWARD_TOTALS, "", encode(WantTotals([(FAR, 5), ("none", 6)])))
    made.rest()
    reply = reply_to(rig, key)
    assert reply is not None
    assert read_totals(reply.body) == ForwardTotals({})


@pytest.mark.parametrize(
    "op", [wire.FORWARD_STEP, wire.FORWARDS_CHECK, wire.FORWARD_TOTALS, wire.FORWARDS_GONE]
)
@pytest.mark.parametrize("body", [b"", b"\xc1", encode(7), encode([99, {}]), encode("text")])
def test_messages_that_are_none(op: int, body: bytes) -> None:
    made = cluster()
    reply = made.ask(0, op, "", body)
    assert reply is not None and reply.status == 400


def test_only_the_catalog_takes_them() -> None:
    made = cluster()
    for op in (wire.PUT_FORWARD, wire.GET_FORWARD, wire.LIST_FORWARDS, wire.DROP_FORWARD, wire.FORWARDS_GONE):
        reply = made.ask(1, op, "", {"source": "a", "dest": "b"}, args=args_of("r"))
        assert reply is not None and reply.status == 400


@fault(
    "disk",
    "the catalog's disk fails while a router is made",
    "an error; the router is there or not after a restart",
)
def test_a_catalog_that_cannot_write() -> None:
    made = cluster()
    put(made, "r", NEAR, FAR)
    made.disks[0].fail_at(1, 5, of="sync")
    reply = put(made, "s", FAR, NEAR_TOO)
    assert (reply.status, error_of(reply)["code"]) == (500, "internal")
    assert body_of(get(made, "r"))["router"] == "r", "checks must continue"
    assert drop(made, "r").status == 500
    die(made, "power")
    settle(made)
    assert rules(made) in (["r"], ["r", "s"])
