"""Goal: restarts slow down and recover as documented, and only real silence counts as a hang.

Method: the decisions are pure, so time is just a number here.
"""

from __future__ import annotations

import pytest

from tests.support.faults import fault
from workers.process.liveness import START_S, Backoff, Heartbeat, ping_interval_s


@fault("supervisor", "a child dies again and again", "it is started ever later, up to a bound")
def test_delays_double_to_a_bound() -> None:
    backoff = Backoff()
    delays = [backoff.delay_after(worked_s=1.0) for _ in range(9)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_a_calm_life_starts_over() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.delay_after(worked_s=29.9)
    assert backoff.delay_after(worked_s=30.0) == 0.1
    assert backoff.failures == 1
    assert backoff.delay_after(worked_s=0.0) == 0.2
    assert backoff.failures == 2


def test_one_ping_is_open_at_a_time() -> None:
    heartbeat = Heartbeat(timeout_s=30)
    assert [heartbeat.tick() for _ in range(3)] == [True, False, False]
    heartbeat.answered()
    assert heartbeat.tick()


@fault(
    "supervisor", "a child answers no ping for the timeout", "it counts as hung, and is killed and replaced"
)
@pytest.mark.parametrize("timeout_s", [0.1, 1, 2.5, 30])
def test_silence_for_the_timeout_is_a_hang(timeout_s: float) -> None:
    heartbeat = Heartbeat(timeout_s)
    heartbeat.answered()
    assert heartbeat.tick()
    ticks = 0
    while not heartbeat.hung:
        heartbeat.tick()
        ticks += 1
    assert timeout_s <= ticks * ping_interval_s(timeout_s) < timeout_s + 1


def test_a_start_is_given_more_time() -> None:
    heartbeat = Heartbeat(timeout_s=1)
    for _ in range(int(START_S / ping_interval_s(1))):
        assert not heartbeat.hung
        heartbeat.tick()
    heartbeat.tick()
    assert heartbeat.hung


def test_a_process_that_answers_in_time_is_never_taken_for_hung() -> None:
    heartbeat = Heartbeat(timeout_s=30)
    for _ in range(10):
        heartbeat.tick()
        for _ in range(29):
            heartbeat.tick()
        assert not heartbeat.hung
        heartbeat.answered()
