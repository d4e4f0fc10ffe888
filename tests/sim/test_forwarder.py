"""Goal: everything that a source has published reaches the dests of its rules, once, in order, whichever process
dies.

Method: real shards on simulated disks; the test carries the messages, so it can stop between any two of them.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.support import length
from tests.support.faults import fault
from tests.support.flow_rig import (
    cluster,
    copies_on_wires,
    forward,
    home,
    name_on,
    numbered,
    page,
    put,
    settle,
    step,
    stored,
    texts,
    write,
)
from tests.support.shard_rig import Cluster
from topics.engine.commands import forwards as fwd
from topics.engine.shard import delivery
from topics.engine.topic.log import TopicLog
from topics.link import wire
from workers.forward import forwarder
from workers.forward.forwarder import PAUSE_MS_MAX, PAUSE_MS_MIN
from workers.peers import links as peers
from workers.shard.core import URGENT_COPIES

SOURCE = name_on(1, "source")
NEAR, FAR = name_on(1, "near"), name_on(0, "far")
EACH_DEST = pytest.mark.parametrize("dest", [FAR, NEAR], ids=["far", "near"])


# ---- the normal case


@EACH_DEST
def test_writes_after_a_rule_is_created_are_copied_in_order(dest: str) -> None:
    made = cluster()
    write(made, SOURCE, ["before"])
    forward(made, SOURCE, dest)
    write(made, SOURCE, numbered(1, 3))
    write(made, SOURCE, numbered(4, 5))
    made.rest()
    assert stored(made, dest) == 5, "copying must not need a reader"
    assert texts(made, dest) == numbered(1, 5)


@EACH_DEST
def test_an_ack_does_not_wait_for_copies(dest: str) -> None:
    made = cluster()
    forward(made, SOURCE, dest)
    made.rest()
    sender = made.rig(1).core.forwarding.forwarder
    before = sender.batches_sent
    write(made, SOURCE, numbered(1, 1))
    assert stored(made, dest) == 0
    assert sender.batches_sent == before, "no batch may be prepared"
    assert made.rig(1).core.has_copies
    made.rest()
    assert stored(made, dest) == 1
    assert not made.rig(1).core.has_copies


@EACH_DEST
def test_many_copies_are_urgent_and_few_are_not(dest: str) -> None:
    made = cluster()
    forward(made, SOURCE, dest)
    made.rest()
    core = made.rig(1).core
    write(made, SOURCE, numbered(1, URGENT_COPIES - 1))
    assert not core.are_copies_urgent
    write(made, SOURCE, numbered(1, 1))
    assert core.are_copies_urgent
    made.rest()
    assert not core.are_copies_urgent
    write(made, name_on(1, "other"), numbered(1, URGENT_COPIES))
    assert not core.are_copies_urgent, "no rule copies that"


def test_copies_that_are_under_way_make_room_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of copies takes many turns: a turn that answers sends no copies, the next one does."""
    monkeypatch.setattr(delivery, "TURN_ROOM", 4 * forwarder.BATCH_COST)
    made = cluster()
    for i in range(20):
        forward(made, SOURCE, name_on(0, f"dest-{i}-"), name=f"rule-{i}")
    other = name_on(1, "other")
    write(made, other, numbered(1, 1))
    made.rest()
    rig = made.rig(1)
    sender = rig.core.forwarding.forwarder
    write(made, SOURCE, numbered(1, 1))
    for _ in range(2):
        rig.turn()
        before = sender.batches_sent
        write(made, other, numbered(1, 1))
        assert sender.batches_sent == before
        rig.turn()
        assert sender.batches_sent > before
    made.rest()
    assert all(stored(made, name_on(0, f"dest-{i}-")) == 1 for i in range(20))


@EACH_DEST
def test_one_batch_of_a_flow_is_on_its_way_and_it_is_bounded(
    dest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarder, "BATCH_RECORDS", 3)
    made = cluster()
    forward(made, SOURCE, dest)
    write(made, SOURCE, numbered(1, 10))
    while made.step():
        copies = copies_on_wires(made)
        assert len(copies) <= 1
        assert all(bytes(message.parts[0]).count(b"record ") <= 3 for message in copies)
    assert texts(made, dest) == numbered(1, 10)


def test_one_read_of_a_source_serves_all_rules_that_want_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = cluster()
    for number in range(5):
        forward(made, SOURCE, name_on(number % 2, f"dest-{number}-"), name=f"rule-{number}")
    made.rest()
    shard = made.rig(1).core.engine.shard
    reads: list[int] = []
    copies_after = shard.forwards.copies_after

    def counted(*args: object) -> object:
        reads.append(1)
        return copies_after(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(shard.forwards, "copies_after", counted)
    write(made, SOURCE, numbered(1, 10))
    made.rest()
    assert len(reads) == 1
    for number in range(5):
        assert texts(made, name_on(number % 2, f"dest-{number}-")) == numbered(1, 10)


def test_rules_go_by_their_filters() -> None:
    made = cluster()
    forward(made, SOURCE, FAR, name="one", filter=(("Eq", "a"),))
    forward(made, SOURCE, NEAR, name="other", filter=(("Glob", "b*"), ("Eq", "c")))
    for tag in ("a", "b1", "c", "d"):
        write(made, SOURCE, [f"of {tag}"], tag)
    made.rest()
    assert texts(made, FAR) == ["of a"]
    assert texts(made, NEAR) == ["of b1", "of c"]
    assert not made.rig(1).core.forwarding.forwarder.flows_owing()


def test_topics_that_a_pattern_finds_later_join() -> None:
    made = cluster()
    first, second, third = (name_on(shard, f"orders.{shard}{i}x") for i, shard in enumerate((0, 1, 1)))
    write(made, first, ["before"])
    forward(made, "orders.>", FAR)
    for topic in (first, second, third):
        write(made, topic, [f"{topic} {i}" for i in range(3)])
    made.rest()
    found = texts(made, FAR)
    for topic in (first, second, third):
        assert [text for text in found if text.startswith(topic)] == [f"{topic} {i}" for i in range(3)]
    assert len(found) == 9


def test_many_flows_to_one_shard_wait_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarder, "BATCHES_MAX", 2)
    made = cluster()
    dests = [name_on(0, f"dest-{i}-") for i in range(12)]
    for i, dest in enumerate(dests):
        forward(made, SOURCE, dest, name=f"rule-{i}")
    write(made, SOURCE, numbered(1, 2))
    write(made, SOURCE, numbered(3, 4))
    while made.step():
        way = made.rig(1).core.forwarding.forwarder._windows[0]
        assert way.batches <= 2
    for dest in dests:
        assert stored(made, dest) == 4
    assert made.rig(1).core.forwarding.wake_at_us is None


@EACH_DEST
def test_bytes_in_flight_to_a_shard_are_bounded(dest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarder, "BATCH_BYTES", 2_000)
    monkeypatch.setattr(forwarder, "BYTES_MAX", 4_000)
    made = cluster()
    dests = [name_on(home(made, dest), f"dest-{i}-") for i in range(5)]
    for i, other in enumerate(dests):
        forward(made, SOURCE, other, name=f"rule-{i}")
    for _ in range(10):
        write(made, SOURCE, ["record " + "x" * 800])
    way = made.rig(1).core.forwarding.forwarder._windows[home(made, dest)]
    while made.step():
        assert way.bytes <= 4_000
    assert [stored(made, other) for other in dests] == [10] * 5


def test_a_slice_of_many_flows_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand rules of one topic do not delay the answers of a turn."""
    monkeypatch.setattr(delivery, "TURN_ROOM", 4 * forwarder.BATCH_COST)
    monkeypatch.setattr(delivery, "ANSWER_ROOM", 4 * forwarder.BATCH_COST)
    made = cluster()
    for i in range(20):
        forward(made, SOURCE, name_on(0, f"dest-{i}-"), name=f"rule-{i}")
    made.rest()
    write(made, SOURCE, numbered(1, 1))
    rig = made.rig(1)
    sent = [rig.core.forwarding.forwarder.batches_sent]
    while rig.step():
        sent.append(rig.core.forwarding.forwarder.batches_sent)
    assert max(later - earlier for earlier, later in pairwise(sent)) <= 5
    made.rest()
    assert all(stored(made, name_on(0, f"dest-{i}-")) == 1 for i in range(20))


def test_copies_that_a_read_waits_for_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of one of many dests of a source does not wait for copies to all the others."""
    monkeypatch.setattr(delivery, "TURN_ROOM", 1)
    monkeypatch.setattr(delivery, "ANSWER_ROOM", 1)
    made = cluster()
    dests = [name_on(0, f"dest-{i}-") for i in range(5)]
    rules = [forward(made, SOURCE, dest, name=dest) for dest in dests]
    made.rest()
    write(made, SOURCE, numbered(1, 1))
    sender = made.rig(1).core.forwarding.forwarder
    made.rig(1).turn()
    assert [flow.state for flow in sender._pending[rules[-1].uid]] == [forwarder.READY]
    heard: list[list[int]] = []
    sender.catch_up([rules[-1].uid], heard.append)
    made.rig(1).turn()
    assert [flow.state for flow in sender._pending[rules[-1].uid]] == [forwarder.SENT]
    assert [flow.state for flow in sender._pending[rules[-2].uid]] == [forwarder.READY]
    made.rest()
    assert heard == [[]]
    assert [stored(made, dest) for dest in dests] == [1] * 5


def test_a_catch_up_looks_at_what_is_new_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = cluster()
    forward(made, "many.>", FAR, name="many")
    forward(made, SOURCE, NEAR)
    for i in range(30):
        write(made, name_on(1, f"many.{i}-"), numbered(1, 1))
    for_all = made.rig(1).core.forwarding.forwarder
    looks = 0
    refresh = for_all._refresh

    def counted(log: TopicLog) -> forwarder.CopiedTopic:
        nonlocal looks
        looks += 1
        return refresh(log)

    monkeypatch.setattr(for_all, "_refresh", counted)
    for _ in range(10):
        for_all.catch_up([], lambda behind: None)
    assert looks <= 30


def test_a_pattern_asks_nothing_about_topics_without_news() -> None:
    """Neither when it is made nor when a shard starts: a pattern may match a hundred thousand topics."""
    made = cluster()
    topics = [name_on(1, f"many.{i}-") for i in range(20)]
    for topic in topics:
        write(made, topic, numbered(1, 2))
    forward(made, "many.>", FAR)
    settle(made)
    assert made.rig(1).core.forwarding.forwarder.batches_sent == 0
    write(made, topics[3], ["record 3"])
    assert texts(made, FAR) == ["record 3"]
    made.kill(1)
    made.start(1)
    settle(made)
    assert made.rig(1).core.forwarding.forwarder.batches_sent <= 2, (
        "only one may be sent before the peers are known"
    )
    write(made, topics[4], ["record 3"])
    assert texts(made, FAR) == ["record 3"] * 2


@EACH_DEST
def test_topics_that_come_and_go_under_a_pattern_leave_nothing(dest: str) -> None:
    made = cluster()
    count = length.pick(short=160, long=300)  # more than twice SWEEP_MIN
    rule = forward(made, "many.>", dest)
    for i in range(count):
        topic = name_on(1, f"many.{i}-")
        write(made, topic, ["record"])
        made.rest()
        made.ask(1, wire.DROP_TOPIC, topic)
    settle(made)
    assert len(texts(made, dest)) == count

    def marks() -> int:
        log = made.rig(home(made, dest)).core.engine.shard.state.published[dest]
        assert log.inflows is not None
        assert log.inflows[rule.uid].total == count
        return len(log.inflows[rule.uid].marks)

    assert marks() <= 2 * forwarder.SWEEP_MIN
    for_all = made.rig(1).core.forwarding.forwarder
    assert len(for_all._topics) <= 2 * forwarder.SWEEP_MIN
    assert len(for_all._by_rule[rule.uid]) == len(for_all._topics)
    made.kill(home(made, dest))
    made.start(home(made, dest))
    settle(made)
    assert marks() <= 2 * forwarder.SWEEP_MIN
    assert len(texts(made, dest)) == count


@EACH_DEST
def test_a_rule_that_has_ended_copies_nothing_more(dest: str) -> None:
    made = cluster()
    rule = forward(made, SOURCE, dest)
    write(made, SOURCE, numbered(1, 3))
    made.rest()
    write(made, SOURCE, ["too late"])
    step(made, home(made, dest), fwd.CloseInflow(dest, rule.uid))
    assert "too late" not in texts(made, dest) or stored(made, dest) == 4, (
        "the periodic check must not be needed"
    )
    kept = stored(made, dest)
    write(made, SOURCE, ["record after the end"])
    settle(made)
    assert stored(made, dest) == kept
    step(made, 1, fwd.CloseOutflow(rule.uid, SOURCE))
    settle(made)
    assert stored(made, dest) == kept
    for_all = made.rig(1).core.forwarding.forwarder
    assert not for_all._topics and not for_all._by_rule
    assert not any(rig.core.forwarding.catch_ups._sources for rig in made.rigs if rig is not None)


def test_a_changed_rule_goes_on_where_it_was() -> None:
    made = cluster()
    forward(made, SOURCE, FAR, filter=(("Eq", "a"),))
    write(made, SOURCE, ["one"], "a")
    write(made, SOURCE, ["two"], "b")
    made.rest()
    forward(made, SOURCE, FAR, filter=(("Eq", "b"),))
    write(made, SOURCE, ["three"], "a")
    write(made, SOURCE, ["four"], "b")
    made.rest()
    assert texts(made, FAR) == ["one", "four"]


def test_copies_go_in_circles_for_a_while() -> None:
    made = cluster()
    forward(made, SOURCE, FAR, name="there", allow_cycle=True)
    forward(made, FAR, SOURCE, name="back", allow_cycle=True)
    write(made, SOURCE, ["round"])
    settle(made)
    assert stored(made, SOURCE) + stored(made, FAR) == 1 + fwd.HOPS_MAX


@pytest.mark.parametrize("both", [True, False])
def test_losses_in_a_cycle_are_announced_once(both: bool) -> None:
    """Each hole caused one more at the other end, endlessly, and the shards did nothing else."""
    made = cluster()
    put(made, SOURCE, cap_records=3)
    forward(made, SOURCE, FAR, name="there", allow_cycle=both)
    forward(made, FAR, SOURCE, name="back", allow_cycle=True)
    made.rest()
    made.kill(0)
    for i in range(1, 11):
        write(made, SOURCE, [f"record {i}"])
    made.start(0)
    steps = sum(made.step() for _ in range(3000))
    assert steps < 3000, "the shards always have more work to do"
    assert texts(made, FAR)[-3:] == numbered(8, 10)


def test_shards_that_feed_each_other_do_not_wait_for_each_other() -> None:
    made = cluster()
    pairs = [(name_on(0, "a"), name_on(1, "b")), (name_on(1, "c"), name_on(0, "d"))]
    for i, (source, dest) in enumerate(pairs):
        forward(made, source, dest, name=f"rule-{i}")
    for i in range(20):
        for source, _ in pairs:
            write(made, source, [f"record {i}"])
    keys = [
        (made.rig(home(made, dest)), made.rig(home(made, dest)).receive(wire.DIFF, dest, {}))
        for _, dest in pairs
    ]
    made.rest()
    for rig, key in keys:
        assert bytes(rig.replies[key].body).count(b"record ") == 20


def test_chains_over_shards() -> None:
    made = cluster()
    chain = [name_on(i % 2, f"link-{i}-") for i in range(5)]
    for i, (source, dest) in enumerate(pairwise(chain)):
        forward(made, source, dest, name=f"rule-{i}")
    write(made, chain[0], numbered(1, 50))
    made.rest()
    for topic in chain:
        assert texts(made, topic) == numbered(1, 50)


# ---- full, down, refused


@EACH_DEST
@fault(
    "link",
    "the dest of a forward is full and rejects",
    "it stops before the record, and goes on when there is room",
)
def test_a_full_dest_stops_before_the_record_and_goes_on(dest: str) -> None:
    made = cluster()
    put(made, dest, cap_records=3, discard="reject")
    forward(made, SOURCE, dest)
    write(made, SOURCE, numbered(1, 5))
    settle(made)
    assert texts(made, dest) == numbered(1, 3)
    for seq in (1, 2):
        assert made.ask(home(made, dest), wire.DELETE, dest, {"seqs": [seq]}) is not None
    settle(made)
    assert texts(made, dest) == numbered(3, 5)


def test_a_full_dest_is_tried_ever_more_seldom() -> None:
    made = cluster()
    put(made, FAR, cap_records=1, discard="reject")
    forward(made, SOURCE, FAR)
    write(made, SOURCE, numbered(1, 2))
    made.rest()
    rig = made.rig(1)
    pauses = []
    for _ in range(7):
        at_us = rig.core.forwarding.wake_at_us
        assert at_us is not None
        pauses.append(at_us // 1000 - made.clock.monotonic_ms())
        made.clock.advance(pauses[-1] + 1)
        made.rest()
    assert pauses == [50, 100, 200, 400, 800, 1000, 1000]


@fault("worker", "the worker of a dest is down", "its copies wait at the source, and come when it is back")
def test_a_dest_that_comes_back_is_served_at_once() -> None:
    made = cluster()
    forward(made, SOURCE, FAR)
    write(made, SOURCE, numbered(1, 2))
    made.kill(0)
    settle(made)
    write(made, SOURCE, numbered(3, 4))
    settle(made)
    made.start(0)
    made.rest()
    assert stored(made, FAR) == 4, "no pause is left to wait for"
    assert texts(made, FAR) == numbered(1, 4)


@fault(
    "link", "a worker does not answer another's copies", "they are given up, and it is asked how far it is"
)
@pytest.mark.parametrize("lost", ["copies", "answer"])
def test_copies_without_an_answer_are_sent_again(lost: str) -> None:
    made = cluster()
    forward(made, SOURCE, FAR)
    made.rest()
    write(made, SOURCE, numbered(1, 3))
    while not copies_on_wires(made):
        assert made.step()
    if lost == "copies":
        made.wires.clear()
    else:
        while stored(made, FAR) < 3:
            assert made.step()
        made.wires.clear()
    made.rest()
    made.clock.advance(peers.GIVE_UP_US // 1000)
    settle(made)
    assert texts(made, FAR) == numbered(1, 3)


@fault("disk", "the source of a forward cannot be read", "it is tried again later")
def test_a_source_that_cannot_be_read_is_tried_again() -> None:
    made = cluster()
    forward(made, SOURCE, FAR)
    made.kill(0)
    for i in range(5):
        write(made, SOURCE, [f"record {i} " + "x" * 5000])
    made.kill(1)
    made.start(1)
    made.start(0)
    made.disks[1].fail_at(1, errno.EIO, of="read")
    settle(made)
    assert len(texts(made, FAR)) == 5


def test_copies_are_checked_like_any_request() -> None:
    made = cluster()
    rig = made.rig(0)
    for body in (b"no copies", b"\x90"):
        reply = rig.ask(wire.COPIES, FAR, body)
        assert reply is not None and reply.status == 400
    for op in (wire.FORWARD_STEP, wire.CATCH_UP, wire.FORWARDS_CHECK, wire.FORWARD_TOTALS):
        reply = rig.ask(op, "", b"\xc1")
        assert reply is not None and reply.status == 400, op


# ---- deaths


def die(made: Cluster, who: str) -> None:
    if who in ("power", "both"):
        if who == "power":
            made.cut_power()
        else:
            made.kill(0)
            made.kill(1)
        made.start(0)
        made.start(1)
        return
    shard = {"source": 1, "dest": 0}[who]
    made.kill(shard)
    made.start(shard)


@EACH_DEST
@pytest.mark.parametrize("who", ["source", "dest", "both", "power"])
@fault(
    "worker",
    "the worker of a source or of a dest dies between any two steps of a forward",
    "each copy is there once, in order",
)
def test_a_death_at_any_step_loses_and_doubles_nothing(
    who: str, dest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarder, "BATCH_RECORDS", 4)

    def begun() -> Cluster:
        made = cluster()
        put(made, SOURCE, durability="fsync")
        put(made, dest, durability="fsync")
        forward(made, SOURCE, dest)
        write(made, SOURCE, numbered(1, 10))
        return made

    at_each_step(begun, lambda made: die(made, who), lambda made: texts(made, dest) == numbered(1, 10))


def at_each_step(
    begin: Callable[[], Cluster], happens: Callable[[Cluster], None], holds: Callable[[Cluster], bool]
) -> None:
    some = length.pick(short=7, long=1)
    for steps in range(length.turn(some), 1000, some):
        made = begin()
        went_on = all(made.step() for _ in range(steps))
        happens(made)
        settle(made)
        assert holds(made), steps
        if not went_on:
            return
    raise AssertionError("it never comes to rest")


@pytest.mark.parametrize("who", ["source", "dest", "both"])
def test_a_source_in_memory_that_starts_anew(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records written after a crash have the seqs of lost ones, and are copied anyway."""
    monkeypatch.setattr(forwarder, "BATCH_RECORDS", 4)

    def begun() -> Cluster:
        made = cluster()
        put(made, SOURCE, durability="memory")
        put(made, FAR, durability="fsync")
        forward(made, SOURCE, FAR)
        write(made, SOURCE, numbered(1, 10))
        return made

    def happens(made: Cluster) -> None:
        die(made, who)
        write(made, SOURCE, numbered(11, 12))

    def holds(made: Cluster) -> bool:
        found = texts(made, FAR)
        first = len(found) - 2
        return found == numbered(1, first) + numbered(11, 12)

    at_each_step(begun, happens, holds)


@pytest.mark.sim
@pytest.mark.parametrize("seed", length.seeds(short=4, long=30))
def test_any_number_of_deaths_loses_and_doubles_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(forwarder, "BATCH_RECORDS", rng.choice((1, 2, 5)))
    made = cluster()
    dests = [name_on(i % 2, f"dest-{i}-") for i in range(3)]
    for topic in (SOURCE, *dests):
        put(made, topic, durability="fsync")
    for i, dest in enumerate(dests):
        forward(made, SOURCE, dest, name=f"rule-{i}")
    written = 0
    for _ in range(rng.randrange(2, 8)):
        count = rng.randrange(1, 6)
        write(made, SOURCE, numbered(written + 1, written + count))
        written += count
        for _ in range(rng.randrange(20)):
            made.step()
        if rng.random() < 0.5:
            made.clock.advance(rng.choice((PAUSE_MS_MIN, PAUSE_MS_MAX)))
        if rng.random() < 0.7:
            die(made, rng.choice(("source", "dest", "both", "power")))
    settle(made)
    for dest in dests:
        assert texts(made, dest) == numbered(1, written)


def test_losses_of_the_source_are_announced_at_the_dest() -> None:
    made = cluster()
    put(made, SOURCE, cap_records=3)
    forward(made, SOURCE, FAR)
    made.rest()
    made.kill(0)
    for i in range(1, 11):
        write(made, SOURCE, [f"record {i}"])
    made.start(0)
    settle(made)
    gap = page(made, FAR)["tombstone"]
    assert gap["reason"] == "source_trim"
    assert texts(made, FAR)[-3:] == numbered(8, 10)
    assert page(made, FAR)["head_seq"] == 10, "a hole for each record that was lost"


def test_caps_of_the_server_hold_copies_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarder, "BATCH_RECORDS", 1)
    made = cluster(max_total_bytes=300)
    forward(made, SOURCE, FAR)
    write(made, SOURCE, [f"record {i} " + "x" * 30 for i in range(4)])
    settle(made)
    assert stored(made, FAR) == 3
    assert made.used()[1] <= 300
    assert made.ask(1, wire.DELETE, SOURCE, {"seqs": [1]}) is not None
    settle(made)
    assert stored(made, FAR) == 4
