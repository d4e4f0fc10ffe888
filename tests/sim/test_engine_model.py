"""Goal: whatever is asked and however it ends, the engine shows what the model shows.

Method: seeded random runs (tests/sim/walk.py) over all operations, clean restarts, process crashes, power cuts, at
any disk call, inside recovery and inside checkpoints, with 4-record segments and 4 KiB log files; the driver checks
every reply and every recovery. A Hypothesis state machine does the same on a small scale, because it shrinks
failures. Rare events are counted over a fixed set of seeds: a run without them would prove nothing.

Repeat one seed: python -m tests.sim.walk SEED --verbose
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.sim.walk import Walk
from tests.support import length
from tests.support import model_commands as d
from tests.support.driver import Driver
from tests.support.faults import fault
from tests.support.model import Conf, NewRec
from tests.support.sim_disk import SimulatedCrash

pytestmark = pytest.mark.sim

SEEDS_PER_TEST = 2
RICH = (1003, 1008)  # seeds with many events
RARE = [
    "seals", "rotations", "torn", "swaps", "checkpoints", "erases", "crash in recovery", "crash at a call",
    "power cuts", "kills", "tail lost", "dedupe hit", "key forgotten", "disk full", "read only",
    "outcome unknown", "gap cap", "gap ttl", "gap mixed",
    "gap recreated", "gap crash", "poll parked", "poll timeout", "wrong_last_seq", "topic_full", "record_too_large",
    "topic_not_empty", "topic_not_found",
]  # fmt: skip


@fault(
    "disk",
    "crashes, disk errors, full disks and clock jumps in any order over long runs",
    "what a model of the semantics says, at every step",
)
@pytest.mark.parametrize("first", length.seeds(short=2, long=200)[::SEEDS_PER_TEST])
def test_random_walks(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        Walk(seed).run()


def test_topics_that_change_their_class() -> None:
    """Records in RAM and in the log under one name: which of them survive a restart decides what happens to their
    keys.
    """
    events: Counter[str] = Counter()
    for seed in length.seeds(short=2, long=40):
        events += Walk(seed, turning=True).run()
    assert events["key forgotten"] and events["dedupe hit"]


@fault(
    "disk",
    "segments move to a cold tier that fails, is down or is cut off by crashes, over long runs",
    "what a model of the semantics says, at every step; no erased payload is in either tier",
)
@pytest.mark.parametrize("first", length.seeds(short=2, long=80)[::SEEDS_PER_TEST])
def test_walks_with_a_cold_tier(first: int) -> None:
    events: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_PER_TEST):
        events += Walk(seed, tiers=True).run()
    assert events["relocations"] and events["cold fetches"] and events["cold_failures"], dict(events)


def test_every_rare_event_happens() -> None:
    """Over fixed seeds, until all occurred: today two seeds are enough, and the bound is well above that."""
    events: Counter[str] = Counter()
    for seed in (*RICH, *range(1000, 1040)):
        events += Walk(seed).run()
        if all(events[name] for name in RARE):
            return
    assert not [name for name in RARE if not events[name]], dict(events)


class EngineMachine(RuleBasedStateMachine):
    """Three topics, few operations, so that failures shrink to short examples."""

    topics = st.sampled_from(["fsync", "disk", "memory"])

    @initialize(seed=st.integers(0, 1 << 20))
    def start(self, seed: int) -> None:
        self.driver = Driver(seed)
        self.serial = 0
        self.driver.open()
        for name in ("fsync", "disk", "memory"):
            self._send(d.put(name, Conf(durability=name, cap_records=5)))

    def _send(self, *requests: d.Sent) -> None:
        self._guard(lambda: self.driver.send(*requests))

    def _guard(self, action: object) -> None:
        try:
            action()  # type: ignore[operator]
        except SimulatedCrash:
            self.driver.crash("power")

    @rule(
        topic=topics,
        count=st.integers(1, 6),
        key=st.sampled_from([None, b"k"]),
        tag=st.sampled_from([None, b"t"]),
    )
    def append(self, topic: str, count: int, key: bytes | None, tag: bytes | None) -> None:
        self.serial += 1
        self._send(d.append(topic, [NewRec(b"%d.%d" % (self.serial, i), tag) for i in range(count)], key=key))

    @rule(topic=topics, before=st.integers(0, 12), erase=st.booleans())
    def delete(self, topic: str, before: int, erase: bool) -> None:
        self._send(d.delete(topic, before_seq=before, erase=erase))

    @rule(topic=topics, from_seq=st.integers(0, 14), limit=st.integers(0, 3))
    def read(self, topic: str, from_seq: int, limit: int) -> None:
        self._send(d.diff(topic, from_seq, limit=limit))

    @rule(topic=topics)
    def drop_and_make(self, topic: str) -> None:
        self._send(d.drop(topic), d.put(topic, Conf(durability=topic, cap_records=5)))

    @rule()
    def job(self) -> None:
        if self.driver.jobs:
            self._guard(lambda: self.driver.run_job(0))

    @rule(ms=st.integers(1, 1500))
    def wait(self, ms: int) -> None:
        self._guard(lambda: self.driver.advance(ms))

    @rule()
    def checkpoint(self) -> None:
        assert self.driver.engine is not None
        self.driver.engine.checkpoint()
        self._send()

    @rule(calls=st.integers(1, 30))
    def plan_crash(self, calls: int) -> None:
        self.driver.disk_calm()
        self.driver.disk.crash_at(calls)

    @rule(how=st.sampled_from(["kill", "power"]), inside=st.integers(0, 20))
    def crash(self, how: str, inside: int) -> None:
        self.driver.crash(how, crash_in_recovery=inside)

    @rule()
    def restart(self) -> None:
        self._guard(self.driver.restart)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.disk_calm()
            self.driver.drain()
            self.driver.compare()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=length.pick(short=10, long=200),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
