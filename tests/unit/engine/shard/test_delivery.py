"""Goal: a shard delivers by priority: frames, jobs and copies, in slices, and each topic up to its state when its
turn came. Under pressure deliveries are batched, forwards come later, and the lowest band gets no pushes, while
polls are answered.

Method: shards behind the wire on a simulated disk and clock; a turn's budget is so small that not everything fits.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.support.job_rig import JobRig
from tests.support.watch_rig import FeedRig
from topics.engine.core.pressure import Measures
from topics.engine.core.scheduler import QUANTUM, WEIGHTS
from topics.engine.shard import delivery
from topics.engine.shard.delivery import PICK_COST
from topics.engine.shard.reads import WAKE_COST
from topics.link import wire
from topics.link.job_streams import JobStreamOptions, encode

HIGH, LOW, LOWEST = 1000, 0, -500


@pytest.fixture
def rig() -> FeedRig:
    return FeedRig()


def put(rig: FeedRig, topic: str, priority: int, **config: Any) -> None:
    rig.ask(wire.PUT_TOPIC, topic, {"priority": priority, **config})


def write(rig: FeedRig, topic: str, count: int = 1, size: int = 10) -> None:
    rig.receive(wire.WRITE, topic, {"records": [{"data": "x" * size}] * count})


def narrow(monkeypatch: pytest.MonkeyPatch, picks: int = 1) -> None:
    """A budget of this many topics per turn."""
    monkeypatch.setattr(delivery, "TURN_ROOM", (picks - 1) * (PICK_COST + WAKE_COST + 1000) + 1)
    monkeypatch.setattr(delivery, "ANSWER_ROOM", (picks - 1) * (PICK_COST + WAKE_COST + 1000) + 1)


def fed_topics(rig: FeedRig, keys: dict[tuple[bytes, int], str]) -> list[str]:
    """The topics of the pages with records since the last call."""
    told, rig.told = rig.told, []
    return [
        keys[peer, reply.id]
        for peer, reply in told
        if (peer, reply.id) in keys and reply.kind == wire.FEED and reply.body
    ]


def followed(rig: FeedRig, *topics: str) -> dict[tuple[bytes, int], str]:
    keys = {rig.follow(topic): topic for topic in topics}
    rig.rest()
    rig.told = []
    return keys


def test_the_top_band_goes_first(rig: FeedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"low{i}" for i in range(5)]
    for name in names:
        put(rig, name, LOW)
    put(rig, "high", HIGH)
    keys = followed(rig, *names, "high")
    narrow(monkeypatch)
    for name in names:
        write(rig, name)
    write(rig, "high")
    order: list[str] = []
    for _ in range(6):
        rig.turn()
        order += fed_topics(rig, keys)
    assert sorted(order) == sorted([*names, "high"])
    assert order.index("high") <= 1, "the round may be at another band when it begins"
    assert [name for name in order if name != "high"] == names


def test_deliveries_beyond_a_turn_s_budget_come_in_the_next_turn(
    rig: FeedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"t{i}" for i in range(10)]
    for name in names:
        put(rig, name, LOW)
    keys = followed(rig, *names)
    narrow(monkeypatch, picks=3)
    for name in names:
        write(rig, name)
    rig.turn()
    assert len(fed_topics(rig, keys)) == 3
    assert rig.core.engine.shard.delivery.backlog == 7
    assert rig.wake_at_ms is not None
    assert rig.wake_at_ms <= rig.clock.monotonic_ms()
    rig.rest()
    assert len(fed_topics(rig, keys)) == 7


def test_bands_share_by_weight_while_both_have_work(rig: FeedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One topic of the top band that always has records, and many of a low one: eight to one."""
    lows = [f"low{i}" for i in range(60)]
    for name in lows:
        put(rig, name, LOW)
    put(rig, "high", HIGH)
    keys = followed(rig, "high", *lows)
    numbers = {topic: key for key, topic in keys.items()}
    monkeypatch.setattr(delivery, "PICK_COST", QUANTUM)
    monkeypatch.setattr(delivery, "TURN_ROOM", 1)
    monkeypatch.setattr(delivery, "ANSWER_ROOM", 1)
    for name in lows:
        write(rig, name)
    served: Counter[str] = Counter()
    for _ in range(90):
        write(rig, "high")
        rig.turn()
        for topic in fed_topics(rig, keys):
            served["high" if topic == "high" else "low"] += 1
            rig.tell(wire.FEED_ACK, numbers[topic])
    assert served["high"] == pytest.approx(8 * served["low"], abs=8)
    used = [band.used for band in rig.core.engine.shard.delivery.scheduler.bands]
    assert used[4] == pytest.approx(WEIGHTS[4] * used[1], rel=0.2)


def test_a_topic_with_thousands_of_polls_does_not_hold_up_a_better_one(
    rig: FeedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(rig, "crowd", LOW)
    put(rig, "high", HIGH)
    keys = followed(rig, "high")
    polls = [rig.receive(wire.DIFF, "crowd", {"wait_ms": 30_000}) for _ in range(200)]
    rig.rest()
    monkeypatch.setattr(delivery, "TURN_ROOM", 64 * 1024)
    monkeypatch.setattr(delivery, "ANSWER_ROOM", 64 * 1024)
    monkeypatch.setattr(delivery, "SLICE_ROOM", 32 * 1024)
    write(rig, "crowd")
    rig.turn()
    answered = sum(key in rig.replies for key in polls)
    assert 0 < answered < 40
    write(rig, "high")
    turns = 0
    while not fed_topics(rig, keys):
        rig.turn()
        turns += 1
    assert turns <= 2
    assert sum(key in rig.replies for key in polls) < 100
    rig.rest()
    assert all(key in rig.replies for key in polls), "and each of them is answered"
    bodies = [json.loads(bytes(rig.replies[key].body)) for key in polls]
    assert all(len(body["records"]) == 1 for body in bodies)


def test_a_front_that_takes_nothing_gets_the_best_first_when_it_does(
    rig: FeedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(10):
        put(rig, f"low{i}", LOW)
    put(rig, "high", HIGH)
    keys = followed(rig, *(f"low{i}" for i in range(10)), "high")
    rig.takes = False
    rig.core._window.sent(b"front", 1 << 30)
    for i in range(10):
        write(rig, f"low{i}")
    write(rig, "high")
    rig.rest()
    assert fed_topics(rig, keys) == []
    narrow(monkeypatch)
    rig.core.receive(b"front", wire.message_head(rig.incarnation) + wire.window_update(1 << 30))
    order: list[str] = []
    for _ in range(11):
        rig.turn()
        order += fed_topics(rig, keys)
    assert order.index("high") <= 1
    assert len(order) == 11


# -- under pressure ------------------------------------------------------------------------------------------


def press(rig: FeedRig, **measures: Any) -> Measures:
    """Set the measures as the pressure would."""
    found = rig.core.engine.shard.delivery.measures
    for name, value in measures.items():
        setattr(found, name, value)
    return found


def test_deliveries_gather_while_there_is_pressure(rig: FeedRig) -> None:
    put(rig, "t", LOW)
    put(rig, "high", HIGH)
    keys = followed(rig, "t", "high")
    press(rig, coalesce_ms=10)
    for _ in range(5):
        write(rig, "t")
        write(rig, "high")
        rig.turn()
        rig.clock.advance(1)
    told = fed_topics(rig, keys)
    assert told == ["high"] * len(told), "the top band does not wait"
    assert told
    assert rig.wake_at_ms is not None
    rig.clock.advance(10)
    rig.rest()
    assert fed_topics(rig, keys).count("t") == 1
    (key,) = [key for key, topic in keys.items() if topic == "t"]
    assert rig.pages(key)[-1].seqs == [1, 2, 3, 4, 5]


def test_the_lowest_band_is_polled_but_not_pushed_to(rig: FeedRig) -> None:
    put(rig, "lowest", LOWEST)
    put(rig, "low", LOW)
    keys = followed(rig, "lowest", "low")
    measures = press(rig, defers=True)
    poll = rig.receive(wire.DIFF, "lowest", {"wait_ms": 10_000})
    rig.rest()
    write(rig, "lowest")
    write(rig, "low")
    rig.rest()
    assert fed_topics(rig, keys) == ["low"]
    assert len(json.loads(bytes(rig.replies[poll].body))["records"]) == 1
    reply = rig.ask(wire.DIFF, "lowest", {})
    assert reply is not None
    assert len(json.loads(bytes(reply.body))["records"]) == 1
    assert list(log.name for log in rig.core.engine.shard.delivery.paused.values()) == ["lowest"]
    measures.defers = False
    rig.clock.advance(1)
    rig.turn()
    rig.rest()
    assert fed_topics(rig, keys) == ["lowest"]
    assert not rig.core.engine.shard.delivery.paused


def test_a_topic_that_is_dropped_is_told_of_under_any_pressure(rig: FeedRig) -> None:
    put(rig, "lowest", LOWEST)
    (key,) = followed(rig, "lowest")
    press(rig, defers=True)
    rig.ask(wire.DROP_TOPIC, "lowest")
    assert rig.heard[key][-1].status == 404


def test_copies_that_wait_one_band_lower_do_not_keep_pushes_back(rig: FeedRig) -> None:
    """A topic just above the lowest band, whose copies are listed when it is written."""
    put(rig, "low", LOW)
    keys = followed(rig, "low")
    press(rig, defers=True)
    shard = rig.core.engine.shard
    shard.delivery._enqueue(shard.state.published["low"], delivery.COPIES)
    write(rig, "low")
    rig.rest()
    assert fed_topics(rig, keys) == ["low"]
    assert not shard.delivery.paused


def test_jobs_of_the_lowest_band_can_be_claimed_but_are_not_pushed() -> None:
    rig = JobRig()
    rig.ask(wire.PUT_TOPIC, "jobs", {"type": "queue", "priority": LOWEST})
    key = rig.receive(wire.OPEN_JOBS, "jobs", encode(JobStreamOptions("", "n", 10)))
    rig.rest()
    press(rig, defers=True)
    rig.receive(wire.WRITE, "jobs", {"records": [{"data": i} for i in range(3)]})
    rig.rest()
    assert not [reply for reply in rig.heard.get(key, []) if reply.kind == wire.JOBS]
    reply = rig.ask(wire.CLAIM, "jobs", {"node": "m", "max": 1})
    assert reply is not None
    assert len(json.loads(bytes(reply.body))["claimed"]) == 1
    press(rig, defers=False)
    rig.turn()
    rig.rest()
    assert [reply for reply in rig.heard[key] if reply.kind == wire.JOBS]


def test_a_sync_waits_for_more_writes_while_there_is_pressure(rig: FeedRig) -> None:
    put(rig, "t", LOW, durability="fsync")
    press(rig, window_ms=8)
    key = rig.receive(wire.WRITE, "t", {"records": [{"data": 1}]})
    rig.turn()
    assert not [job for job in rig.jobs if job.kind == "sync"]
    rig.clock.advance(5)
    rig.turn()
    assert not [job for job in rig.jobs if job.kind == "sync"]
    assert rig.wake_at_ms is not None
    assert rig.wake_at_ms - rig.clock.monotonic_ms() == 3
    rig.clock.advance(3)
    rig.turn()
    rig.rest()
    performance = json.loads(bytes(rig.replies[key].body))["performance"]
    assert performance["throttle_wait_ms"] == 8
