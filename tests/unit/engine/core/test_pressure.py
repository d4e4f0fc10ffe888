"""Goal: each level of pressure begins and ends at its documented threshold, none flips back and forth, and pressure
ends with its cause.

Method: samples and times chosen by the test.
"""

from __future__ import annotations

import pytest

from topics.engine.core.pressure import SAMPLE_MS, SMOOTHING, Measures, Pressure, overload


class Sampled:
    """A Pressure and its clock."""

    def __init__(self) -> None:
        self.pressure = Pressure()
        self.now_ms = 1_000_000

    @property
    def measures(self) -> Measures:
        return self.pressure.measures

    def sample(
        self,
        times: int = 1,
        *,
        delay_ms: float = 0.0,
        backlog: int = 0,
        wait_ms: float = 0.0,
        sync_ms: float = 0.0,
        reported: float = 0.0,
        log_share: float = 0.0,
    ) -> float:
        for _ in range(times):
            self.now_ms += SAMPLE_MS
            if delay_ms:
                self.pressure.delayed(int(delay_ms * 1000))
            self.pressure.sample(
                self.now_ms,
                backlog=backlog,
                wait_ms=wait_ms,
                sync_ms=sync_ms,
                reported=reported,
                log_share=log_share,
            )
        return self.pressure.value

    def hold(self, value: float, times: int = 1) -> Measures:
        """Keep a pressure value up, as reported by others: it is not smoothed."""
        self.sample(times, reported=value)
        assert self.pressure.value == pytest.approx(value)
        return self.measures


@pytest.fixture
def sampled() -> Sampled:
    return Sampled()


@pytest.mark.parametrize(
    ("figure", "bound", "expected"),
    [(0, 5, 0), (5, 5, 0), (10, 5, 0.5), (25, 5, 0.8), (100, 5, 0.95), (1e9, 5, 1.0)],
)
def test_pressure_of_a_figure(figure: float, bound: float, expected: float) -> None:
    assert overload(figure, bound) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "cause",
    [{"delay_ms": 25.0}, {"backlog": 1280}, {"wait_ms": 25.0}, {"sync_ms": 250.0}],
    ids=["delay", "backlog", "wait", "sync"],
)
def test_each_cause_alone_makes_pressure_and_its_end_ends_it(
    sampled: Sampled, cause: dict[str, float]
) -> None:
    first = sampled.sample(**cause)  # type: ignore[arg-type]
    assert first == pytest.approx(0.8 * SMOOTHING), "one bad sample has no effect"
    assert sampled.sample(20, **cause) == pytest.approx(0.8, abs=0.01)  # type: ignore[arg-type]
    assert sampled.sample(20) == 0
    assert sampled.measures == Measures()


def test_a_log_that_grows_is_pressure_from_a_half_of_its_bound_on(sampled: Sampled) -> None:
    assert sampled.sample(50, log_share=0.5) == 0.0
    assert sampled.sample(50, log_share=0.75) == pytest.approx(0.5, abs=0.01)
    assert sampled.measures.window_ms > 0
    assert not sampled.measures.refuses
    assert sampled.sample(50, log_share=7.0) == pytest.approx(1.0, abs=0.01)
    assert sampled.measures.refuses


def test_below_the_bounds_there_is_none(sampled: Sampled) -> None:
    assert sampled.sample(50, delay_ms=5, backlog=256, wait_ms=5, sync_ms=50) == 0


def test_time_in_which_nothing_was_sampled_counts_as_quiet(sampled: Sampled) -> None:
    sampled.sample(20, delay_ms=100)
    sampled.now_ms += 3_000
    assert sampled.sample() < 0.01
    assert sampled.measures == Measures()


def test_the_mean_of_delays_counts(sampled: Sampled) -> None:
    sampled.pressure.delayed(30_000)
    for _ in range(9):
        sampled.pressure.delayed(0)
    assert sampled.sample() == 0


def test_the_ladder_up(sampled: Sampled) -> None:
    assert sampled.hold(0.2, 10) == Measures()
    assert sampled.hold(0.25, 10) == Measures(coalesce_ms=1)
    assert sampled.hold(0.4, 10) == Measures(coalesce_ms=5)
    assert sampled.hold(0.45, 10) == Measures(coalesce_ms=6, window_ms=5)
    assert sampled.hold(0.8, 10) == Measures(coalesce_ms=15, window_ms=8)
    assert sampled.hold(0.85, 4).defers is False
    assert sampled.hold(0.85) == Measures(coalesce_ms=16, window_ms=9, defers=True)
    assert sampled.hold(1.0) == Measures(coalesce_ms=20, window_ms=10, defers=True, refuses=True)


def test_the_ladder_down_has_its_own_steps(sampled: Sampled) -> None:
    sampled.hold(1.0, 10)
    assert sampled.hold(0.81).refuses
    assert not sampled.hold(0.79).refuses
    assert sampled.hold(0.61).defers
    assert not sampled.hold(0.59).defers
    assert sampled.hold(0.31).window_ms == 3
    assert sampled.hold(0.29).window_ms == 0
    assert sampled.hold(0.21).coalesce_ms == 0, "a level may be active without measures"
    assert sampled.hold(0.09) == Measures()


def test_nothing_flutters_around_a_step(sampled: Sampled) -> None:
    changes = 0
    was = sampled.hold(1.0, 10).defers
    for i in range(100):
        now = sampled.hold(0.75 if i % 2 else 0.85).defers
        changes += now != was
        was = now
    assert changes == 0


def test_it_is_sampled_every_100_ms_while_there_is_some(sampled: Sampled) -> None:
    pressure = sampled.pressure
    assert pressure.wake_at_ms is None
    sampled.sample()
    assert pressure.wake_at_ms is None
    sampled.sample(reported=0.5)
    assert pressure.wake_at_ms == sampled.now_ms + 100


def test_a_clock_that_stands_or_delays_below_zero_do_no_harm(sampled: Sampled) -> None:
    sampled.pressure.delayed(-5_000)
    sampled.pressure.sample(sampled.now_ms, backlog=0, wait_ms=0, sync_ms=0, reported=0)
    sampled.pressure.sample(sampled.now_ms, backlog=0, wait_ms=0, sync_ms=0, reported=0)
    assert sampled.pressure.value == 0
