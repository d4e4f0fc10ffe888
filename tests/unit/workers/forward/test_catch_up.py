"""Goal: a read of a topic that gets copies shows what its sources had published when the read came, in bounded time.

Method: real shards on simulated disks; the test carries the messages; a late one is never carried.
"""

from __future__ import annotations

import json
import random
from itertools import chain
from typing import Any

import msgspec
import pytest

from tests.support.faults import fault
from tests.support.flow_rig import (
    cluster,
    forward,
    home,
    name_on,
    numbered,
    page,
    put,
    settle,
    step,
    stored,
    write,
)
from tests.support.shard_answers import ShardAnswer
from tests.support.shard_rig import FRONT, Cluster, Rig
from topics.engine.commands import forwards as fwd
from topics.link import wire
from topics.link.job_streams import JobStreamOptions
from topics.link.watch import Find
from workers.forward import catch_up
from workers.forward import messages as forward_messages
from workers.forward.catch_up import WAIT_US
from workers.forward.messages import CatchUp, WantTotals

SOURCE = name_on(1, "source")
NEAR, FAR = name_on(1, "near"), name_on(0, "far")
EACH_DEST = pytest.mark.parametrize("dest", [FAR, NEAR], ids=["far", "near"])


def body_of(reply: ShardAnswer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(reply.body))
    return found


def is_late(reply: ShardAnswer) -> bool:
    return "catch_up_timed_out" in body_of(reply)["performance"]


def read(made: Cluster, topic: str, op: int = wire.DIFF, body: Any = None, args: bytes = b"") -> ShardAnswer:
    """A read and everything that follows from it: no time passes, so pauses do not end."""
    rig = made.rig(home(made, topic))
    key = rig.receive(op, topic, {} if body is None else body, args=args)
    for _ in range(1000):
        if key in rig.replies:
            return rig.replies[key]
        if not made.step():
            assert key in rig.replies, "it is not answered, and nothing is due"
    raise AssertionError("it never comes to rest")


def texts_of(reply: ShardAnswer) -> list[str]:
    return [record["data"] for record in body_of(reply)["records"]]


# ---- reads


@EACH_DEST
def test_a_read_right_after_the_ack_shows_the_copy(dest: str) -> None:
    made = cluster()
    forward(made, SOURCE, dest)
    for i in range(1, 6):
        write(made, SOURCE, [f"record {i}"])
        reply = read(made, dest)
        assert texts_of(reply) == numbered(1, i)
        assert not is_late(reply)


@EACH_DEST
@pytest.mark.parametrize(
    ("op", "body", "args"),
    [
        (wire.DIFF, {}, wire.Args()),
        (wire.GET_TOPIC, b"", wire.Args()),
        (wire.CLAIM, {"max": 10, "node": "n"}, wire.Args()),
        (wire.LAST_BY_TAG, b"", wire.Args(tag="a")),
        (wire.COUNT_BY_TAG, b"", wire.Args(page_size=10)),
        (wire.LIST_DELETED, b"", wire.Args()),
    ],
    ids=["diff", "state", "claim", "last", "tags", "deleted"],
)
def test_every_kind_of_read_catches_up(dest: str, op: int, body: Any, args: wire.Args) -> None:
    made = cluster()
    put(made, dest, type="queue")
    forward(made, SOURCE, dest)
    made.rest()
    write(made, SOURCE, ["record 1"], "a")
    reply = read(made, dest, op, body, wire.encode_args(args))
    assert reply.status == 200
    if op in (wire.GET_TOPIC, wire.LIST_DELETED):
        assert body_of(reply)["head_seq"] == 1
    elif op == wire.COUNT_BY_TAG:
        assert body_of(reply)["tags"] == [{"tag": "a", "count": 1}]
    else:
        assert b"record 1" in bytes(reply.body)


@EACH_DEST
def test_where_a_watch_begins_is_a_read(dest: str) -> None:
    """A watch that starts at the end of the dest must not get records that were written before the request."""
    made = cluster()
    put(made, dest)
    forward(made, SOURCE, dest)
    made.rest()
    write(made, SOURCE, ["record 1"])
    rows = msgspec.msgpack.decode(read(made, dest, wire.FIND, msgspec.msgpack.encode(Find([dest]))).body)
    assert [row[:4] for row in rows] == [[dest, 1, 1, []]]
    write(made, SOURCE, ["record 2"])
    rows = msgspec.msgpack.decode(read(made, dest, wire.FIND, msgspec.msgpack.encode(Find([], [dest]))).body)
    assert [row[:4] for row in rows] == [[dest, 2, 1, [0]]]


@EACH_DEST
def test_a_stream_of_jobs_catches_up_and_may_be_given_up_meanwhile(dest: str) -> None:
    made = cluster()
    put(made, dest, type="queue")
    forward(made, SOURCE, dest)
    made.rest()
    write(made, SOURCE, ["record 1"])
    rig = made.rig(home(made, dest))
    work = forward_messages.encode(JobStreamOptions(node="n", consumer="", max=10, lease_ms=60_000))
    first = rig.receive(wire.OPEN_JOBS, dest, work)
    assert first not in rig.replies
    gone = rig.receive(wire.OPEN_JOBS, dest, work)
    head = wire.request_head(gone[1], rig.now_us(), 30_000, wire.CLOSE_JOBS, 0, b"", b"", 0)
    rig.core.receive(FRONT, wire.message_head(rig.incarnation) + head)
    for _ in range(200):
        if first in rig.replies or not made.step():
            break
    assert stored(made, dest) == 1
    assert gone not in rig.replies
    assert len(rig.core.jobs) == 1


def test_topics_without_copies_wait_for_nobody() -> None:
    made = cluster()
    forward(made, SOURCE, FAR)
    write(made, FAR, ["own"])
    rig = made.rig(1)
    key = rig.receive(wire.DIFF, SOURCE)
    rig.turn()
    assert key in rig.replies


def test_in_one_shard_nobody_waits_when_nothing_is_owed() -> None:
    made = cluster()
    forward(made, SOURCE, NEAR)
    write(made, SOURCE, numbered(1, 3))
    made.rest()
    rig = made.rig(1)
    key = rig.receive(wire.DIFF, NEAR)
    rig.turn()
    assert key in rig.replies


def test_read_your_writes_through_filters_and_patterns() -> None:
    made = cluster()
    forward(made, "orders.>", FAR, filter=(("Glob", "a*"),))
    for i in range(6):
        write(made, name_on(i % 2, f"orders.{i}-"), [f"record {i}"], "a" if i < 4 else "b")
        assert len(texts_of(read(made, FAR))) == min(i + 1, 4)


def test_totals_are_read_like_the_topic() -> None:
    made = cluster()
    rule = forward(made, SOURCE, FAR)
    for i in range(1, 4):
        write(made, SOURCE, [f"record {i}"])
        reply = read(made, FAR, wire.FORWARD_TOTALS, forward_messages.encode(WantTotals([(FAR, rule.uid)])))
        totals = forward_messages.read_totals(reply.body)
        assert (totals.totals, totals.catch_up_timed_out) == ({rule.uid: i}, False)
    rig = made.rig(0)
    write(made, SOURCE, ["record 4"])
    wish = WantTotals([(FAR, rule.uid), (FAR, 99), ("absent", 1)])
    key = rig.receive(wire.FORWARD_TOTALS, "", forward_messages.encode(wish))
    rig.turn()
    assert forward_messages.read_totals(rig.replies[key].body).totals == {rule.uid: 3}, "as it is"


def test_totals_are_what_no_crash_takes_back() -> None:
    made = cluster()
    put(made, FAR, durability="fsync")
    rule = forward(made, SOURCE, FAR)
    made.rest()
    write(made, SOURCE, ["record 1"])
    rig = made.rig(0)
    while not rig.core.engine.shard.state.published[FAR].pending:
        assert made.step()
    key = rig.receive(wire.FORWARD_TOTALS, "", forward_messages.encode(WantTotals([(FAR, rule.uid)])))
    rig.turn()
    assert key not in rig.replies
    made.rest()
    assert forward_messages.read_totals(rig.replies[key].body).totals == {rule.uid: 1}


# ---- rounds


def asks_on_wires(made: Cluster) -> int:
    made._collect()
    ops = [
        request.op
        for message in made.wires
        if message.answer_to is None
        for request in wire.read_requests(bytes(message.parts[0]), *message.parts[1:])
    ]
    return ops.count(wire.CATCH_UP)


def test_one_round_runs_and_one_gathers() -> None:
    made = cluster()
    forward(made, SOURCE, FAR)
    made.rest()
    write(made, SOURCE, ["record 1"])
    rig = made.rig(0)
    keys = [rig.receive(wire.DIFF, FAR) for _ in range(10)]
    assert asks_on_wires(made) == 1
    rounds = rig.core.forwarding.catch_ups.rounds
    made.rest()
    assert all(texts_of(rig.replies[key]) == ["record 1"] for key in keys)
    assert rig.core.forwarding.catch_ups.rounds == rounds + 1, "nine of them shared the second"


def test_a_round_that_began_before_the_write_is_not_enough() -> None:
    made = cluster()
    forward(made, SOURCE, FAR)
    made.rest()
    rig = made.rig(0)
    early = rig.receive(wire.DIFF, FAR)
    made.carry()  # the source has seen that nothing is left to copy
    write(made, SOURCE, ["record 1"])
    late = rig.receive(wire.DIFF, FAR)
    made.rest()
    assert early in rig.replies
    assert texts_of(rig.replies[late]) == ["record 1"]


def test_a_round_that_begins_as_another_ends_finds_the_dest_where_it_is() -> None:
    """At one worker both happen in the same moment: the flow that has just finished must not be waited for."""
    made = cluster()
    forward(made, SOURCE, NEAR)
    made.rest()
    write(made, SOURCE, ["record 0"])
    rig = made.rig(1)
    keys = [rig.receive(wire.DIFF, NEAR) for _ in range(2)]
    made.rest()
    assert all(key in rig.replies for key in keys)
    assert [texts_of(rig.replies[key]) for key in keys] == [["record 0"]] * 2


def test_a_thousand_records_that_are_written_meanwhile_do_not_hold_up_a_read() -> None:
    """A round is over when the dest has what existed at its beginning."""
    made = cluster()
    forward(made, SOURCE, FAR)
    made.rest()
    write(made, SOURCE, ["record 0"])
    rig = made.rig(0)
    key = rig.receive(wire.DIFF, FAR)
    for i in range(1, 30):
        if key in rig.replies:
            break
        write(made, SOURCE, [f"record {i}"])
        made.step()  # the turn for its copies
        made.step()
    assert key in rig.replies
    assert "record 0" in texts_of(rig.replies[key])


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(6))
def test_reads_in_any_order_see_what_was_acked_before_them(seed: int) -> None:
    rng = random.Random(seed)
    made = cluster()
    sources = [name_on(i % 2, f"in.{i}-") for i in range(3)]
    dests = [name_on(i % 2, f"dest-{i}-") for i in range(2)]
    forward(made, sources[0], dests[0], name="one")
    forward(made, "in.>", dests[1], name="all")
    acked: dict[str, list[str]] = {topic: [] for topic in sources}
    open_reads: list[tuple[Rig, tuple[bytes, int], list[str]]] = []
    for number in range(60):
        chance = rng.random()
        if chance < 0.3:
            topic = rng.choice(sources)
            write(made, topic, [f"record {number}"])
            acked[topic].append(f"record {number}")
        elif chance < 0.5:
            which = rng.randrange(2)
            expected = list(chain.from_iterable(acked.values())) if which else list(acked[sources[0]])
            rig = made.rig(home(made, dests[which]))
            open_reads.append((rig, rig.receive(wire.DIFF, dests[which], {"limit": 1000}), expected))
        else:
            for _ in range(rng.randrange(6)):
                made.step()
    made.rest()
    for rig, key, expected in open_reads:
        assert set(expected) <= set(texts_of(rig.replies[key]))
        assert not is_late(rig.replies[key])


# ---- when waiting is impossible


@EACH_DEST
def test_a_full_dest_is_as_far_as_it_can_be(dest: str) -> None:
    made = cluster()
    put(made, dest, cap_records=2, discard="reject")
    forward(made, SOURCE, dest)
    write(made, SOURCE, numbered(1, 4))
    for _ in range(3):
        reply = read(made, dest)
        assert texts_of(reply) == numbered(1, 2)
        assert not is_late(reply)
    assert made.ask(home(made, dest), wire.DELETE, dest, {"seqs": [1]}) is not None
    assert texts_of(read(made, dest)) == numbered(2, 3), "a read does not wait for a pause"


@fault(
    "link", "a worker does not answer a wish to catch up", "the read is served after a second, and says so"
)
def test_a_read_waits_for_a_second_at_the_most() -> None:
    made = cluster()
    forward(made, SOURCE, FAR)
    made.rest()
    write(made, SOURCE, ["record 1"])
    rig = made.rig(0)
    keys = [rig.receive(wire.DIFF, FAR), rig.receive(wire.GET_TOPIC, FAR)]
    frames = rig.receive(wire.DIFF, FAR, encoding=wire.FRAMES)
    rig.rest()
    assert not {*keys, frames} & rig.replies.keys()
    assert rig.wake_at_ms is not None and rig.wake_at_ms <= made.clock.monotonic_ms() + WAIT_US // 1000 + 1
    made.clock.advance(WAIT_US // 1000 + 1)
    rig.rest()
    for key in keys:
        assert rig.replies[key].status == 200 and is_late(rig.replies[key])
    assert rig.replies[frames].status == 200
    assert b"Topics-Catch-Up-Timed-Out: true\r\n" in rig.replies[frames].head
    assert rig.core.forwarding.catch_ups.late == 3
    made.rest()
    assert texts_of(read(made, FAR)) == ["record 1"], "the next one does not wait for it"


@fault("worker", "the worker of a source is down", "reads of the dest are served at once, and say so")
def test_a_source_that_is_down_is_not_waited_for() -> None:
    made = cluster()
    forward(made, SOURCE, FAR)
    write(made, SOURCE, ["record 1"])
    made.rest()
    made.kill(1)
    reply = read(made, FAR)
    assert texts_of(reply) == ["record 1"]
    assert is_late(reply)
    made.start(1)
    settle(made)
    assert not is_late(read(made, FAR))


def test_a_source_that_dies_while_it_is_waited_for() -> None:
    made = cluster()
    forward(made, SOURCE, FAR)
    made.rest()
    write(made, SOURCE, ["record 1"])
    rig = made.rig(0)
    key = rig.receive(wire.DIFF, FAR)
    made._collect()
    made.kill(1)
    rig.rest()
    assert is_late(rig.replies[key])


def test_at_the_source_nobody_is_remembered_for_ever() -> None:
    made = cluster()
    rule = forward(made, SOURCE, FAR)
    made.rest()
    made.lose(0)  # and no worker knows of it
    write(made, SOURCE, ["record 1"])
    rig = made.rig(1)
    key = rig.receive(wire.CATCH_UP, "", forward_messages.encode(CatchUp([rule.uid])))
    rig.rest()
    assert key not in rig.replies
    made.clock.advance(1_001)
    rig.rest()
    assert rig.replies[key].status == 200
    assert not rig.core.forwarding.forwarder._catch_ups


def test_more_reads_than_may_wait_are_served_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "HELD_MAX", 2)
    made = cluster()
    forward(made, SOURCE, FAR)
    made.rest()
    write(made, SOURCE, ["record 1"])
    rig = made.rig(0)
    keys = [rig.receive(wire.DIFF, FAR) for _ in range(3)]
    rig.rest()
    assert [key in rig.replies for key in keys] == [False, False, True]
    assert is_late(rig.replies[keys[2]])
    made.rest()
    assert texts_of(rig.replies[keys[0]]) == ["record 1"]


def test_many_dests_that_are_read_at_once_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number in flight to one shard is bounded; a read that does not fit asks when another was answered."""
    monkeypatch.setattr(catch_up, "QUERIES_MAX", 2)
    made = cluster()
    dests = [name_on(0, f"far-{i}-") for i in range(6)]
    for dest in dests:
        forward(made, SOURCE, dest, name=dest)
    settle(made)
    write(made, SOURCE, ["record 1"])
    rig = made.rig(0)
    keys = [rig.receive(wire.DIFF, dest, {}) for dest in dests]
    while made.step():
        pass
    assert [texts_of(rig.replies[key]) for key in keys] == [["record 1"]] * len(dests)
    assert not any(is_late(rig.replies[key]) for key in keys)


def test_reads_waiting_to_ask_a_shard_that_dies_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "QUERIES_MAX", 1)
    made = cluster()
    dests = [name_on(0, f"far-{i}-") for i in range(3)]
    for dest in dests:
        forward(made, SOURCE, dest, name=dest)
    settle(made)
    rig = made.rig(0)
    keys = [rig.receive(wire.DIFF, dest, {}) for dest in dests]
    made.kill(1)
    while made.step():
        pass
    assert all(is_late(rig.replies[key]) for key in keys)


def test_reads_of_a_front_that_is_gone_are_forgotten() -> None:
    made = cluster()
    forward(made, SOURCE, FAR)
    made.rest()
    write(made, SOURCE, ["record 1"])
    rig = made.rig(0)
    gone = rig.receive(wire.DIFF, FAR, peer=b"front that dies")
    stays = rig.receive(wire.DIFF, FAR)
    rig.core.forget_peer(b"front that dies")
    made.rest()
    assert gone not in rig.replies and stays in rig.replies


def test_a_claim_that_is_given_up_while_it_catches_up_hands_out_nothing() -> None:
    made = cluster()
    put(made, FAR, type="queue")
    forward(made, SOURCE, FAR)
    made.rest()
    write(made, SOURCE, ["record 1"])
    rig = made.rig(0)
    peer, number = rig.receive(wire.CLAIM, FAR, {"node": "n"})
    head = wire.request_head(number, rig.now_us(), 30_000, wire.CANCEL_CLAIM, 0, FAR.encode(), b"", 0)
    rig.core.receive(peer, wire.message_head(rig.incarnation) + head)
    made.rest()
    assert rig.replies[peer, number].status == 503
    state = body_of(read(made, FAR, wire.GET_TOPIC))
    assert state["queue"] == {"ready": 1, "in_flight": 0, "dead_lettered": 0}


def test_a_rule_that_ends_meanwhile_is_not_waited_for() -> None:
    made = cluster()
    rule = forward(made, SOURCE, FAR)
    made.rest()
    write(made, SOURCE, ["record 1"])
    rig = made.rig(0)
    close = forward_messages.encode_step(fwd.CloseInflow(FAR, rule.uid))
    key = rig.receive(wire.DIFF, FAR)
    rig.receive(wire.FORWARD_STEP, "", close)
    made.rest()
    assert rig.replies[key].status == 200
    step(made, 1, fwd.CloseOutflow(rule.uid, SOURCE))
    key = rig.receive(wire.DIFF, FAR)
    rig.turn()
    assert key in rig.replies, "no rule is left"


def test_a_dest_that_is_dropped_meanwhile() -> None:
    made = cluster()
    forward(made, SOURCE, FAR)
    made.rest()
    write(made, SOURCE, ["record 1"])
    rig = made.rig(0)
    rig.receive(wire.DROP_TOPIC, FAR)
    key = rig.receive(wire.DIFF, FAR)
    made.rest()
    assert rig.replies[key].status == 404


@fault(
    "worker",
    "the worker of a dest is up again, and that of the source has not heard of it",
    "reads of the dest are answered, and say that they have not waited",
)
def test_a_source_that_cannot_reach_the_dest_yet() -> None:
    """It answered that it was done, as if the dest were full."""
    made = cluster()
    forward(made, SOURCE, FAR)
    made.rest()
    made.kill(0)
    write(made, SOURCE, numbered(1, 2))
    made.start(0, heard=False)
    found = page(made, FAR)
    assert found["records"] == []
    assert found["performance"]["catch_up_timed_out"] is True
