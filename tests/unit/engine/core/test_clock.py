"""Goal: engine time never goes back and never jumps, follows the wall clock at a bounded rate, and continues over
restarts.

Method: the simulated clock, whose wall clock jumps and whose monotonic clock does not; bounds are checked for every
reading of random histories. Restarts are new `EngineClock`s on the same simulated clock (same boot) or on another
(reboot).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.faults import fault
from tests.support.sim_clock import SimClock
from topics.api.limits import SLEW_MS_PER_S
from topics.engine.core.clock import EngineClock

WALL = 1_700_000_000_000
DAY_MS = 86_400_000

# What happens between two readings: time passes, and the wall clock is set.
histories = st.lists(
    st.tuples(
        st.integers(0, 3) | st.integers(0, 100_000),
        st.just(0) | st.integers(-1000, 1000) | st.integers(-DAY_MS, DAY_MS),
    ),
    max_size=40,
)


def test_it_starts_at_the_wall_clock_and_keeps_with_it() -> None:
    sim = SimClock(WALL)
    clock = EngineClock(sim)
    assert clock.now_ms == clock.read() == WALL
    for ms in (1, 10, 0, 60_000, DAY_MS):
        sim.advance(ms)
        assert clock.read() == sim.wall_ms()
        assert clock.mono_ms == sim.monotonic_ms()


def test_time_stands_between_readings() -> None:
    sim = SimClock(WALL)
    clock = EngineClock(sim)
    sim.advance(500)
    assert clock.now_ms == WALL
    clock.read()
    assert clock.now_ms == WALL + 500


@settings(deadline=None)
@given(histories)
def test_it_never_runs_back_and_its_rate_is_bounded(history: list[tuple[int, int]]) -> None:
    sim = SimClock(WALL)
    clock = EngineClock(sim)
    total_ms = 0
    for passed_ms, jump_ms in history:
        sim.jump_wall(jump_ms)
        sim.advance(passed_ms)
        total_ms += passed_ms
        before = clock.now_ms
        now = clock.read()
        off_ms = passed_ms * SLEW_MS_PER_S // 1000 + 1
        assert now >= before
        assert passed_ms - off_ms <= now - before <= passed_ms + off_ms
        # No reading, and no number of readings, gains more than the slew allows.
        assert abs(now - WALL - total_ms) * 1000 <= total_ms * SLEW_MS_PER_S
        assert clock.read() == now


@settings(deadline=None)
@given(histories)
def test_it_never_moves_away_from_the_wall_clock(history: list[tuple[int, int]]) -> None:
    sim = SimClock(WALL)
    clock = EngineClock(sim)
    for passed_ms, jump_ms in history:
        sim.jump_wall(jump_ms)
        off_ms = sim.wall_ms() + 0 - (clock.now_ms + sim.monotonic_ms() - clock.mono_ms)
        sim.advance(passed_ms)
        left_ms = sim.wall_ms() - clock.read()
        assert abs(left_ms) <= abs(off_ms)
        assert left_ms * off_ms >= 0  # and does not overshoot


@fault(
    "clock", "the wall clock jumps in either direction", "engine time makes up for it at one part in twenty"
)
@pytest.mark.parametrize("jump_ms", [10_000, -10_000])
def test_a_jump_is_made_up_for_at_one_part_in_twenty(jump_ms: int) -> None:
    sim = SimClock(WALL)
    clock = EngineClock(sim)
    sim.jump_wall(jump_ms)
    assert clock.read() == WALL
    for second in range(1, 200):
        sim.advance(1000)
        clock.read()
        slewed_ms = SLEW_MS_PER_S * second * (1 if jump_ms > 0 else -1)
        assert clock.now_ms == WALL + 1000 * second + slewed_ms
    sim.advance(1000)
    assert clock.read() == sim.wall_ms()
    sim.advance(1000)
    assert clock.read() == sim.wall_ms()


@pytest.mark.parametrize("jump_ms", [DAY_MS, -DAY_MS])
@pytest.mark.parametrize("step_ms", [1, 3, 19, 20, 21, 1000])
def test_many_small_readings_slew_as_much_as_one_large(jump_ms: int, step_ms: int) -> None:
    sim = SimClock(WALL)
    clock = EngineClock(sim)
    sim.jump_wall(jump_ms)
    total_ms = 0
    while total_ms < 60_000:
        sim.advance(step_ms)
        total_ms += step_ms
        clock.read()
    slewed_ms = total_ms * SLEW_MS_PER_S // 1000
    assert clock.now_ms == WALL + total_ms + (slewed_ms if jump_ms > 0 else -slewed_ms)


@fault(
    "clock",
    "the wall clock is set back by hours",
    "engine time goes on, slower for a while; it never stands still for long",
)
def test_a_wall_clock_set_back_never_stops_time_for_long() -> None:
    sim = SimClock(WALL)
    clock = EngineClock(sim)
    sim.jump_wall(-DAY_MS)
    stood = 0
    for _ in range(1000):
        sim.advance(1)
        before = clock.now_ms
        stood += clock.read() == before
    assert stood == SLEW_MS_PER_S


# -- restarts ----------------------------------------------------------------------------------------------


def test_after_a_reboot_time_begins_at_the_ceiling_when_the_wall_clock_is_behind() -> None:
    clock = EngineClock(SimClock(WALL))
    clock.resume(WALL + 5000, WALL + 100, None)
    assert clock.now_ms == clock.read() == WALL + 5000


def test_after_a_reboot_time_begins_at_the_wall_clock_when_that_is_ahead() -> None:
    clock = EngineClock(SimClock(WALL))
    clock.resume(WALL - 5000, WALL - 9000, None)
    assert clock.now_ms == WALL


def test_on_the_same_boot_the_ceiling_is_not_used_up() -> None:
    """Many quick restarts must not each push time five seconds ahead."""
    sim = SimClock(WALL)
    sim.advance(1000)
    for _ in range(100):
        clock = EngineClock(sim)
        clock.resume(clock.now_ms + 5000, clock.now_ms, clock.mono_ms)
        sim.advance(10)
        assert abs(clock.read() - sim.wall_ms()) <= 2


def test_on_the_same_boot_time_is_where_the_old_line_can_have_come_at_most() -> None:
    sim = SimClock(WALL)
    sim.advance(100_000)
    sim.jump_wall(-DAY_MS)
    clock = EngineClock(sim)
    clock.resume(WALL + 10 * DAY_MS, WALL + 40_000, 40_000)
    assert clock.now_ms == WALL + 40_000 + 60_000 + 3_000 + 1


def test_on_the_same_boot_the_ceiling_still_bounds() -> None:
    sim = SimClock(WALL)
    sim.advance(100_000)
    sim.jump_wall(-DAY_MS)
    clock = EngineClock(sim)
    clock.resume(WALL + 45_000, WALL + 40_000, 40_000)
    assert clock.now_ms == WALL + 45_000


@fault("clock", "the noted monotonic time lies in the future of this boot", "it counts as no time passed")
def test_a_note_from_the_monotonic_future_counts_as_no_time_passed() -> None:
    sim = SimClock(WALL)
    sim.jump_wall(-DAY_MS)
    clock = EngineClock(sim)
    clock.resume(WALL + 5000, WALL, 99)
    assert clock.now_ms == WALL + 1


@fault("clock", "clock jumps and restarts in any order", "no restart runs back")
@settings(deadline=None)
@given(histories, st.integers(0, 5000), st.integers(-DAY_MS, DAY_MS), st.data())
def test_no_restart_runs_back(
    history: list[tuple[int, int]], ahead_ms: int, jump_ms: int, data: st.DataObject
) -> None:
    sim = SimClock(WALL)
    clock = EngineClock(sim)
    noted = (clock.now_ms, clock.mono_ms)
    for passed_ms, wall_jump_ms in history:
        sim.jump_wall(wall_jump_ms)
        sim.advance(passed_ms)
        clock.read()
        if data.draw(st.booleans()):
            noted = (clock.now_ms, clock.mono_ms)
    used = clock.now_ms
    ceiling = used + ahead_ms  # logged ahead of use, so never below it
    sim.advance(ahead_ms)
    sim.jump_wall(jump_ms)
    same_boot = EngineClock(sim)
    same_boot.resume(ceiling, *noted)
    assert same_boot.now_ms >= used
    assert same_boot.now_ms <= max(ceiling, sim.wall_ms())
    rebooted = EngineClock(SimClock(sim.wall_ms()))
    rebooted.resume(ceiling, noted[0], None)
    assert rebooted.now_ms == max(ceiling, sim.wall_ms())
