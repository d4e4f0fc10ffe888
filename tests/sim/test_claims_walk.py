"""Goal: no claim waits while there is something to deliver.

Method: seeded random runs over everything that can make a record ready (writes, nacks, expiries, delays, disconnects,
acks that make room, resumes, resets), with waiting claims of every kind. After each step, and the time by which a
timer may be late, either nothing is ready or no claim waits. Every claim is answered once, and no two hold one
record.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support import length
from tests.support.lease_harness import LeaseHarness, check_claimed, consumer, log, queue
from tests.support.small_slices import slices_of
from topics.api.errors import TopicsError
from topics.engine.commands import consumers as k
from topics.engine.commands import topics as c

pytestmark = pytest.mark.sim

SEEDS, STEPS = length.seeds(short=2, long=30), 200
JITTER_MS = 50
LATE_MS = 2  # how late a timer may be
NODES = (b"a", b"b", b"c")
CONNECTIONS = 4


@dataclass
class Walk:
    h: LeaseHarness
    name: str  # of the consumer
    rng: random.Random
    window_ms: int = 0
    parked: dict[int, k.Claim] = field(default_factory=dict)
    held: dict[int, tuple[bytes, int, int]] = field(default_factory=dict)  # seq → node, deadline, connection
    answers: int = 0

    def step(self) -> None:
        move = self.rng.choice([
            self.claim, self.claim, self.claim, self.produce, self.produce, self.settle, self.settle, self.settle,
            self.pass_time, self.pass_time, self.disconnect, self.delete, self.steer,
        ])  # fmt: skip
        move()
        self.collect()
        self.h.pass_time(self.window_ms + LATE_MS)
        self.collect()
        self.nobody_waits_in_vain()

    def claim(self) -> None:
        rng = self.rng
        how: dict[str, Any] = rng.choice([{}, {"wait_ms": rng.choice([10, 3000])}, {"standing": True}])
        command = k.Claim(
            "q", self.name, rng.choice(NODES), rng.randint(1, 4), rng.choice([0, 100, 3000]),
            connection=rng.randint(1, CONNECTIONS) if "standing" in how else 0, **how,
        )  # fmt: skip
        (token,) = self.h.ask(command)
        self.parked[token] = command
        self.collect()

    def collect(self) -> None:
        """Take the answers that have arrived, in order."""
        self.h.run_jobs()
        for token in [token for token in self.h.order if token in self.parked]:
            command, answer = self.parked.pop(token), self.h.replies[token]
            assert not isinstance(answer, TopicsError), answer
            check_claimed(answer)
            assert len(answer.page.seqs) <= command.max
            assert answer.page.seqs or not command.standing, "a waiting claim must not get an empty answer"
            self.answers += bool(answer.page.seqs)
            for seq, deadline in zip(answer.page.seqs, answer.deadlines, strict=True):
                began = deadline - (command.lease_ms or 1000)
                assert seq not in self.held or began > self.held[seq][1], f"{seq} has two holders"
                self.held[seq] = command.node, deadline, command.connection

    def produce(self) -> None:
        self.h.produce(self.rng.randint(1, 3))

    def settle(self) -> None:
        if not self.held:
            return
        seq = self.rng.choice(list(self.held))
        node, _, connection = self.held.pop(seq)
        kind: k.SettleKind = self.rng.choice(["ack", "ack", "nack", "nack", "extend"])
        options: dict[str, Any] = {}
        if kind == "extend":
            options["lease_ms"] = self.rng.choice([100, 2000])
        elif kind == "nack":
            options = {
                "delay_ms": self.rng.choice([0, 0, 700]),
                "nack": self.rng.choice(["retry", "release"]),
            }
        settled = self.h.settle(kind, seq, node=node, consumer=self.name, **options)
        if kind == "extend" and settled.count:
            self.held[seq] = node, settled.deadlines[seq], connection

    def pass_time(self) -> None:
        self.h.pass_time(self.rng.choice([1, 60, 500, 1001, 3001]))

    def disconnect(self) -> None:
        gone = self.rng.randint(1, CONNECTIONS)
        self.held = {seq: whose for seq, whose in self.held.items() if whose[2] != gone}
        self.parked = {token: command for token, command in self.parked.items() if command.connection != gone}
        self.h.do(k.Release("q", self.name, gone))

    def delete(self) -> None:
        head = self.h.state("q").head_seq
        self.h.do(c.Delete("q", seqs=[self.rng.randint(1, head)] if head else []))

    def steer(self) -> None:
        """Changes that only named consumers have."""
        if not self.name:
            return
        move = self.rng.choice(["pause", "resume", "resume", "reset", "configure"])
        if move == "reset":
            self.h.do(k.ResetConsumer("q", "c", "seq", self.rng.randint(1, self.h.state("q").head_seq + 1)))
            self.held.clear()  # forgotten, with their leases
        elif move == "configure":
            self.h.do(k.PutConsumer("q", "c", consumer(max_ack_pending=self.rng.choice([2, 50]))))
        else:
            self.h.do(k.PauseConsumer("q", "c", move == "pause"))

    def nobody_waits_in_vain(self) -> None:
        """What became ready a moment ago may need one more."""
        for _ in range(3):
            if not self.waits_in_vain():
                return
            self.h.pass_time(self.window_ms + LATE_MS)
            self.collect()
        raise AssertionError((self.h.state("q"), self.name and self.h.look(), self.parked))

    def waits_in_vain(self) -> bool:
        assert all(command.standing or command.wait_ms for command in self.parked.values())
        if not self.parked:
            return False
        if not self.name:
            return self.h.counts()[0] > 0
        state = self.h.look()
        again = state.ack_pending - state.in_flight - self.delayed()
        return not state.paused and (again > 0 or (state.lag_records > 0 and not state.stalled))

    def delayed(self) -> int:
        log = self.h.engine.shard.state.published["q"]
        assert log.consumers is not None
        entries = log.consumers.named["c"].entries.values()
        now = self.h.engine.clock.now_ms
        return sum(entry.until_ms > now for entry in entries) - self.h.look().in_flight


def walk(h: LeaseHarness, name: str, seed: int, window_ms: int = 0) -> Walk:
    this = Walk(h, name, random.Random(seed), window_ms)
    with slices_of(seed):
        for _ in range(STEPS):
            this.step()
    assert this.answers > STEPS / 20, "the run hardly ever claimed anything"
    return this


@pytest.mark.parametrize("durability", ["fsync", "disk"])
def test_claims_of_a_queue(durability: str) -> None:
    for seed in SEEDS:
        walk(LeaseHarness(queue(durability=durability)), "", seed)


def test_claims_that_are_gathered() -> None:
    for seed in SEEDS:
        walk(LeaseHarness(queue(claim_jitter_ms=JITTER_MS)), "", seed, JITTER_MS)


@pytest.mark.parametrize("max_ack_pending", [2, 1000])
def test_fetches_of_a_consumer(max_ack_pending: int) -> None:
    for seed in SEEDS:
        h = LeaseHarness(log())
        h.make(max_ack_pending=max_ack_pending)
        walk(h, "c", seed)
