"""Goal: a shard measures its pressure, takes its measures, refuses only writes that found it full, and reports all of
it.

Method: a shard behind the wire on a simulated clock, with messages that were delayed.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.pending import CREDIT_BYTES, Pending, PendingRequests
from router.pressure import RESEND_US, FrontPressure
from tests.support.faults import fault
from tests.support.shard_answers import ShardAnswer
from tests.support.shard_rig import error_of
from tests.support.watch_rig import FeedRig
from topics.engine.core.pressure import FULL_WAIT_MS, SAMPLE_MS
from topics.link import wire

FRONT = b"front"


@pytest.fixture
def rig() -> FeedRig:
    made = FeedRig()
    made.clock.advance(60_000)
    made.put()
    return made


def write(rig: FeedRig, late_ms: int = 0, **members: Any) -> ShardAnswer:
    key = rig.receive(
        wire.WRITE,
        "t",
        {"records": [{"data": 1}], **members},
        received_us=rig.now_us() - late_ms * 1000,
    )
    rig.rest()
    return rig.replies[key]


def press(rig: FeedRig, late_ms: int = 5_000, samples: int = 20) -> None:
    """Requests that waited this long, until the shard reports pressure."""
    for _ in range(samples):
        rig.clock.advance(SAMPLE_MS)
        rig.receive(wire.GET_TOPIC, "t", received_us=rig.now_us() - late_ms * 1000)
        rig.rest()


def performance(reply: ShardAnswer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(reply.body))["performance"]
    return found


def test_a_quiet_shard_has_none_and_says_nothing(rig: FeedRig) -> None:
    reply = write(rig)
    assert rig.core.pressure.value == 0
    assert set(performance(reply)) == {"server_total_ms", "wal_append_ms", "fsync_ms"}
    assert rig.core.pressure.wake_at_us is None


def test_requests_that_wait_are_pressure(rig: FeedRig) -> None:
    press(rig, late_ms=20)
    assert rig.core.pressure.value == pytest.approx(0.75, abs=0.02)
    assert performance(write(rig, late_ms=20))["pressure"] == pytest.approx(0.75, abs=0.02)


def test_it_ends_by_itself(rig: FeedRig) -> None:
    press(rig)
    for _ in range(30):
        rig.clock.advance(SAMPLE_MS)
        rig.rest()
    assert rig.core.pressure.value == 0
    assert rig.core.pressure.wake_at_us is None


@fault(
    "request",
    "a shard gets more writes than it can take",
    "429 with Retry-After for those that waited too long",
)
def test_a_write_that_found_the_shard_full_is_refused_and_changes_nothing(rig: FeedRig) -> None:
    press(rig)
    reply = write(rig, late_ms=FULL_WAIT_MS + 1)
    assert reply.status == 429
    assert b"Retry-After: 1" in reply.head
    error = error_of(reply)
    assert error["code"] == "throttled"
    assert error["detail"] == {"limit": "pressure", "retry_after_ms": 1000}
    assert rig.core.engine.shard.state.published["t"].view.head == 0
    assert rig.core.pressure.refused == 1


def test_short_waits_opted_out_topics_and_reads_are_served(rig: FeedRig) -> None:
    press(rig)
    assert write(rig, late_ms=FULL_WAIT_MS - 1).status == 200
    assert write(rig, late_ms=FULL_WAIT_MS + 500, disable_backpressure=True).status == 200
    assert write(rig, late_ms=FULL_WAIT_MS + 500, disable_backpressure=False).status == 429
    key = rig.receive(wire.DIFF, "t", {}, received_us=rig.now_us() - 5_000_000)
    rig.rest()
    assert rig.replies[key].status == 200
    key = rig.receive(wire.DELETE, "t", {"before_seq": 2}, received_us=rig.now_us() - 5_000_000)
    rig.rest()
    assert rig.replies[key].status == 200


def test_without_pressure_a_late_write_is_taken(rig: FeedRig) -> None:
    assert write(rig, late_ms=20_000).status == 200


def test_pressure_of_a_front_counts_until_changed_or_the_front_is_gone(rig: FeedRig) -> None:
    def tell(permille: int) -> None:
        head = wire.request_head(permille, 0, 0, wire.PRESSURE, 0, b"", b"", 0)
        rig.core.receive(FRONT, wire.message_head(rig.incarnation) + head)
        rig.clock.advance(SAMPLE_MS)
        rig.rest()

    tell(500)
    assert rig.core.pressure.value == 0.5
    assert rig.core.engine.shard.delivery.measures.coalesce_ms > 0
    tell(0)
    assert rig.core.pressure.value == 0
    tell(700)
    rig.core.forget_peer(FRONT)
    rig.clock.advance(SAMPLE_MS)
    rig.turn()
    assert rig.core.pressure.value == 0
    tell(700)
    for _ in range(30):
        rig.clock.advance(SAMPLE_MS)
        rig.rest()
    assert rig.core.pressure.value == 0, "it has not reported it for long"


def test_a_sync_that_takes_long_is_pressure(rig: FeedRig) -> None:
    rig.put("safe", durability="fsync")
    rig.is_syncing = False
    rig.receive(wire.WRITE, "safe", {"records": [{"data": 1}]})
    for _ in range(10):
        rig.rest()
        rig.clock.advance(SAMPLE_MS)
    rig.turn()
    assert rig.core.pressure.value > 0.7
    rig.is_syncing = True
    rig.rest()
    for _ in range(30):
        rig.clock.advance(SAMPLE_MS)
        rig.rest()
    assert rig.core.pressure.value == 0


# -- fronts --------------------------------------------------------------------------------------------------


class Front:
    def __init__(self) -> None:
        self.core = PendingRequests(2)
        self.core.set_peers({0: 7, 1: 8})
        self.now_us = 1_000_000
        self.share = 0.0
        self.timers: list[Any] = []
        self.pressure = FrontPressure(
            self.core,
            now_us=lambda: self.now_us,
            later=lambda us, call: self.timers.append((us, call)),
            buffered_share=lambda: self.share,
        )

    def told(self) -> list[int]:
        """What the shards have been told, each in its turn."""
        found = []
        for _, (message,) in self.core.take_messages():
            for request in wire.read_requests(bytes(message)):
                assert request.op == wire.PRESSURE
                found.append(request.id)
        return found


def test_a_front_that_is_late_tells_every_shard() -> None:
    front = Front()
    front.pressure.sample(0.0)
    assert front.told() == []
    for _ in range(20):
        front.pressure.sample(25.0)
    assert front.pressure.value == pytest.approx(0.8, abs=0.01)
    told = front.told()
    half = len(told) // 2
    assert told[:half] == told[half:], "both shards were told the same"
    assert told[-1] > 700
    front.pressure.sample(25.0)
    assert front.told() == [], "nothing has changed"
    front.now_us += RESEND_US
    front.pressure.sample(25.0)
    assert len(front.told()) == 2, "repeated while it lasts"
    for _ in range(40):
        front.pressure.sample(0.0)
    assert front.told()[-1] == 0


def test_full_buffers_and_full_ways_are_pressure_too() -> None:
    front = Front()
    front.share = 0.5
    for _ in range(30):
        front.pressure.sample(0.0)
    assert front.pressure.value == pytest.approx(0.5, abs=0.01)
    front.share = 0.0
    front.core.links[1].cost = CREDIT_BYTES // 4
    front.core.links[1].pending[1] = Pending(wire.WRITE, 0, 0, lambda reply: None)
    for _ in range(30):
        front.pressure.sample(0.0)
    assert front.pressure.value == pytest.approx(0.25, abs=0.01)


def test_it_is_sampled_every_100_ms_by_how_late_the_timer_is() -> None:
    front = Front()
    front.pressure.start()
    (us, tick) = front.timers.pop()
    assert us == SAMPLE_MS * 1000
    front.now_us += us + 100_000
    tick()
    assert front.pressure.value > 0.3
    assert len(front.timers) == 1
