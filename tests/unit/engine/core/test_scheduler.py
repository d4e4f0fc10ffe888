"""Goal: bands, weights and ages work exactly as documented; no topic starves; shares are right under any load.

Method: the scheduler alone, with times and costs chosen by the test; Hypothesis generates loads.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from topics.engine.core.scheduler import (
    AGE_EVERY_MS,
    QUANTUM,
    STALE_MAX,
    TOP,
    WAIT_MAX_MS,
    WEIGHTS,
    ScheduledEntry,
    Scheduler,
    band_of,
)

P_OF_BAND = (-500, 100, 300, 600, 900)  # a priority in the middle of each band


class Topic:
    def __init__(self, name: str, priority: float) -> None:
        self.name, self.priority = name, priority


def scheduler() -> Scheduler[Topic]:
    return Scheduler(lambda topic: topic.priority)


def add(
    made: Scheduler[Topic], name: str, priority: float, now_ms: int = 0, **kwargs: bool
) -> ScheduledEntry[Topic]:
    return made.add(Topic(name, priority), now_ms, **kwargs)


def serve(made: Scheduler[Topic], now_ms: int = 0, cost: int = QUANTUM) -> str | None:
    """Take the next topic and finish it."""
    entry = made.pick(now_ms)
    if entry is None:
        return None
    made.done(entry, cost)
    return entry.item.name


@pytest.mark.parametrize(
    ("priority", "band"),
    [(-1000, 0), (-1, 0), (-0.1, 0), (0, 1), (249.9, 1), (250, 2), (499, 2), (500, 3), (749, 3), (750, 4), (2000, 4)],
)  # fmt: skip
def test_bands_are_as_tabled(priority: float, band: int) -> None:
    assert band_of(priority) == band
    assert add(scheduler(), "t", priority).band == band


def test_the_weights_are_as_tabled() -> None:
    assert WEIGHTS == (1, 1, 2, 4, 8)


def test_nobody_is_picked_where_nobody_waits() -> None:
    made = scheduler()
    assert made.pick(0) is None
    assert serve(made) is None
    add(made, "t", 0)
    assert serve(made) == "t"
    assert serve(made) is None


def test_first_come_first_served_inside_a_band() -> None:
    made = scheduler()
    for i in range(50):
        add(made, f"t{i}", 100 + i % 3, now_ms=i // 10)
    assert [serve(made, 5) for _ in range(50)] == [f"t{i}" for i in range(50)]


def test_one_high_topic_and_5000_low_ones_share_eight_to_one() -> None:
    made = scheduler()
    for i in range(5000):
        add(made, f"low{i}", 0)
    add(made, "high", 1000)
    served: Counter[str] = Counter()
    for _ in range(900):
        name = serve(made)
        assert name is not None
        served["high" if name == "high" else "low"] += 1
        if name == "high":
            add(made, "high", 1000)
    assert served == {"high": 800, "low": 100}


def test_a_band_in_which_nobody_waits_saves_nothing_up() -> None:
    made = scheduler()
    for i in range(100):
        add(made, f"low{i}", 0)
    for _ in range(100):
        serve(made)
    for name in ("high", "low"):
        for i in range(20):
            add(made, f"{name}{i}", 1000 if name == "high" else 0)
    names = [serve(made) for _ in range(18)]
    assert 14 <= sum(str(name).startswith("high") for name in names) <= 17


def test_overuse_is_subtracted_from_the_next_turns() -> None:
    made = scheduler()
    add(made, "huge", 1000)
    for i in range(100):
        add(made, f"low{i}", 0)
    assert serve(made, cost=24 * QUANTUM) == "huge"  # three rounds' worth
    for i in range(8):
        add(made, f"high{i}", 1000)
    assert [serve(made) for _ in range(4)] == ["low0", "low1", "low2", "high0"]


def test_a_topic_is_served_to_its_end_in_slices_and_others_come_between() -> None:
    made = scheduler()
    add(made, "first", 100)
    add(made, "second", 100)
    add(made, "other band", 600)
    order: list[str] = []
    slices = 4
    while (entry := made.pick(0)) is not None:
        order.append(entry.item.name)
        if entry.item.name == "first" and slices:
            slices -= 1
            made.slice_done(entry, QUANTUM, 0)
        else:
            made.done(entry, QUANTUM)
    mine = [name for name in order if name != "other band"]
    assert mine == ["first"] * 5 + ["second"]
    assert "other band" in order[:3]


# -- age -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("priority", "waited_ms", "band"),
    [(0, 2499, 1), (0, 2500, 2), (0, 5000, 3), (0, 7500, 4), (-100, 999, 0), (-100, 1000, 1), (500, 2500, 4),
     (-1000, 9999, 0), (-1000, 10_000, 4)],
)  # fmt: skip
def test_waiting_lifts_a_topic_across_bands(priority: int, waited_ms: int, band: int) -> None:
    made = scheduler()
    entry = add(made, "waits", priority)
    now_ms = 0
    while now_ms < waited_ms:  # there is always another topic, and it is always first
        now_ms = min(now_ms + 10, waited_ms)
        made._promote_at_ms = 0
        made._promote(now_ms)
    assert entry.band == band


def test_a_risen_topic_comes_before_those_who_came_later() -> None:
    made = scheduler()
    old = add(made, "old", 400)
    for i in range(10):
        add(made, f"young{i}", 600, now_ms=1000)
    made._promote(900)
    made._promote(1000)
    assert old.band == 3
    assert serve(made, 1000) == "old"


def test_being_served_ends_the_wait() -> None:
    made = scheduler()
    entry = add(made, "t", 0)
    assert made.pick(9_000) is entry
    made.slice_done(entry, 1, 9_000)
    assert entry.since_ms == 9_000
    made.done(entry, 1)
    assert add(made, "t", 0, now_ms=9_000).band == 1


def test_a_lowered_topic_is_one_band_below_and_reaches_the_top_all_the_same() -> None:
    made = scheduler()
    entries = [add(made, f"t{p}", p, lowered=True) for p in P_OF_BAND]
    assert [entry.band for entry in entries] == [0, 0, 1, 2, 3]
    for now_ms in range(0, WAIT_MAX_MS + 1, AGE_EVERY_MS):
        made._promote(now_ms)
    assert [entry.band for entry in entries] == [TOP] * 5


def test_a_priority_that_falls_while_it_waits() -> None:
    made = scheduler()
    entry = add(made, "t", 499)
    entry.item.priority = 0
    made._promote(10)
    made._promote(2_490)
    assert entry.band == 2, "a topic must not lose priority while it waits"
    made._promote(4_999)
    assert entry.band == 2
    made._promote(5_050)
    assert entry.band == 3


def test_removed_topics_leave_nothing_behind() -> None:
    made = scheduler()
    for i in range(5_000):
        made.discard(add(made, f"t{i}", 100))
        made._new_entries.clear()
    assert made.size == 0
    assert sum(len(band.waiting) for band in made.bands) <= STALE_MAX + 1
    entry = add(made, "t", 0)
    made.discard(entry)
    made.discard(entry)
    assert made.size == 0
    assert made.pick(0) is None


# -- under any load ------------------------------------------------------------------------------------------


@given(
    costs=st.lists(st.integers(QUANTUM // 4, 4 * QUANTUM), min_size=5, max_size=5),
    bands=st.sets(st.integers(0, TOP), min_size=2),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=6, deadline=None)
def test_shares_are_right_within_five_percent_whatever_the_costs(
    costs: list[int], bands: set[int], seed: int
) -> None:
    made = scheduler()
    chance = random.Random(seed)
    for band in bands:
        for i in range(3):
            add(made, f"{band}-{i}", P_OF_BAND[band])
    rounds = 200 * QUANTUM
    while sum(band.used for band in made.bands) < rounds * sum(WEIGHTS[band] for band in bands):
        entry = made.pick(0)
        assert entry is not None
        cost = chance.randint(QUANTUM // 8, costs[entry.band])
        made.done(entry, cost)
        made.add(entry.item, 0)
    total = sum(band.used for band in made.bands)
    weights = sum(WEIGHTS[band] for band in bands)
    for band in bands:
        share = made.bands[band].used / total
        assert share == pytest.approx(WEIGHTS[band] / weights, rel=0.05)


@given(
    loads=st.lists(
        st.tuples(st.integers(-1000, 1000), st.integers(0, 3000), st.integers(16, 8 * QUANTUM)), max_size=30
    ),
    victim=st.integers(-1000, 1000),
)
@example(loads=[(0, 0, 8173), (-1, 0, 19)], victim=0)
def test_nobody_waits_beyond_ten_seconds_for_the_top_band_under_any_load(
    loads: list[tuple[int, int, int]], victim: int
) -> None:
    """Topics that are listed again as soon as they are served, of any priority and cost, and one that came last."""
    made = scheduler()
    ids = itertools.count()
    costs: dict[Topic, int] = {}
    for priority, _, cost in loads:
        topic = Topic(f"load{next(ids)}", priority)
        costs[topic] = cost
        made.add(topic, 0)
    entry = made.add(Topic("victim", victim), 0)
    for now_ms in range(0, WAIT_MAX_MS + 2 * AGE_EVERY_MS, AGE_EVERY_MS):
        picked = made.pick(now_ms)
        assert picked is not None
        if picked is entry:
            return
        made.done(picked, costs[picked.item])
        made.add(picked.item, now_ms)
    assert entry.band == TOP
    # Shares are of work, not of turns: a cheap topic has many turns meanwhile.
    older = sum(band.size for band in made.bands)
    rounds = (older + 1) * 8 // WEIGHTS[TOP] + 2
    most = rounds * sum(WEIGHTS) * QUANTUM + (older + len(WEIGHTS)) * 8 * QUANTUM
    while most > 0:
        picked = made.pick(WAIT_MAX_MS + 100)
        assert picked is not None
        if picked is entry:
            return
        most -= costs[picked.item]
        made.done(picked, costs[picked.item])
        made.add(picked.item, WAIT_MAX_MS + 100)
    raise AssertionError("it is in the top band, the oldest there, and still waits")


@given(st.integers(0, 2**32))
def test_everybody_is_served_once_for_each_time_it_was_listed(seed: int) -> None:
    made = scheduler()
    chance = random.Random(seed)
    listed: Counter[str] = Counter()
    served: Counter[str] = Counter()
    now_ms = 0
    for i in range(300):
        now_ms += chance.choice((0, 1, 7, 300))
        if chance.random() < 0.6:
            name = f"t{i}"
            entry = add(made, name, chance.randint(-1000, 1000), now_ms, lowered=chance.random() < 0.2)
            listed[name] += 1
            if chance.random() < 0.1:
                made.discard(entry)
                del listed[name]
        else:
            name_served = serve(made, now_ms, chance.randint(1, 3 * QUANTUM))
            if name_served is not None:
                served[name_served] += 1
        assert made.size == sum(band.size for band in made.bands)
    while (name_served := serve(made, now_ms)) is not None:
        served[name_served] += 1
    assert served == listed
