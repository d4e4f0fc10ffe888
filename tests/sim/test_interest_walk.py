"""Goal: with retention `interest` a record is kept exactly as long as a consumer needs it; with `work_queue` until
its first ack.

Method: seeded random runs with several consumers that come and go, with and without filters, over restarts and
crashes. A simple model knows which consumers still need each record.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tests.support import length
from tests.support.engine_harness import append, numbered
from tests.support.lease_harness import LeaseHarness, consumer, log
from tests.support.small_slices import slices_of
from topics.api.errors import ConsumerOverlap
from topics.engine.commands import consumers as k
from topics.engine.commands import topics as c

pytestmark = pytest.mark.sim

SEEDS, STEPS = length.seeds(short=2, long=40), 120
NAMES = ("a", "b", "c")
TAGS = (b"x", b"y")
FILTERS = ((), (), (("Eq", "x"),), (("Eq", "y"),))


@dataclass
class Need:
    """What one consumer has to get: records never delivered, and leased ones."""

    filter: tuple[tuple[str, str], ...]
    open: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)

    def wants(self, tag: bytes) -> bool:
        return not self.filter or any(tag == value.encode() for _, value in self.filter)

    def overlaps(self, other: Need) -> bool:
        return any(self.wants(tag) and other.wants(tag) for tag in TAGS)


class Walk:
    def __init__(self, retention: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.retention = retention
        self.h = LeaseHarness(log(retention=retention))
        self.live: dict[int, bytes] = {}
        self.needs: dict[str, Need] = {}
        self.head = 0

    def step(self) -> None:
        self.rng.choice([
            self.produce, self.produce, self.fetch, self.fetch, self.fetch, self.ack, self.ack, self.ack, self.term,
            self.make, self.drop, self.delete, self.end, self.expire, self.reset,
        ])()  # fmt: skip
        self.check()

    def produce(self) -> None:
        tags = self.rng.choices(TAGS, k=self.rng.randint(1, 4))
        self.h.do(append("q", *numbered(self.head + 1, len(tags)), tags=tags))
        for tag in tags:
            self.head += 1
            self.live[self.head] = tag
            for need in self.needs.values():
                if need.wants(tag):
                    need.open.add(self.head)

    def fetch(self) -> None:
        if self.needs:
            name = self.rng.choice(list(self.needs))
            need = self.needs[name]
            got = set(self.h.got(self.rng.randint(1, 5), consumer=name))
            assert got <= need.open, (name, got, need)
            need.held |= got

    def ack(self) -> None:
        self.settle("ack")

    def term(self) -> None:
        self.settle("term")

    def settle(self, kind: k.SettleKind) -> None:
        name = self.rng.choice(NAMES)
        need = self.needs.get(name)
        if need is None or not need.held:
            return
        seqs = self.rng.sample(sorted(need.held), self.rng.randint(1, len(need.held)))
        settled = self.h.settle(kind, *seqs, consumer=name)
        for seq in seqs:
            if seq in settled.skipped:
                need.held.discard(seq)  # its lease was over
            else:
                self.is_done(need, seq)

    def is_done(self, need: Need, seq: int) -> None:
        need.open.discard(seq)
        need.held.discard(seq)
        if self.retention == "work_queue":
            self.remove(seq)

    def remove(self, seq: int) -> None:
        self.live.pop(seq, None)
        for need in self.needs.values():
            need.open.discard(seq)
            need.held.discard(seq)

    def make(self) -> None:
        name = self.rng.choice(NAMES)
        if name in self.needs:
            return
        need = Need(self.rng.choice(FILTERS))
        command = k.PutConsumer("q", name, consumer(filter=need.filter))
        if self.retention == "work_queue" and any(need.overlaps(other) for other in self.needs.values()):
            self.h.refused(command, ConsumerOverlap)
            return
        self.needs[name] = need
        self.h.do(command)
        need.open = {seq for seq, tag in self.live.items() if need.wants(tag)}

    def drop(self) -> None:
        if self.rng.random() < 0.3:
            name = self.rng.choice(NAMES)
            dropped = self.h.do(k.DropConsumer("q", name))
            assert dropped.deleted == (self.needs.pop(name, None) is not None)

    def reset(self) -> None:
        name, to_seq = self.rng.choice(NAMES), self.rng.randint(1, self.head + 1)
        if (need := self.needs.get(name)) is not None:
            self.h.do(k.ResetConsumer("q", name, "seq", to_seq))
            need.held.clear()
            need.open = {seq for seq, tag in self.live.items() if seq >= to_seq and need.wants(tag)}

    def delete(self) -> None:
        if self.head:
            seq = self.rng.randint(1, self.head)
            self.h.do(c.Delete("q", seqs=[seq]))
            self.remove(seq)

    def end(self) -> None:
        self.h.sync()
        how = self.rng.choice(["restart", "kill_and_open", "power_cut"])
        getattr(self.h, how)()
        if how == "power_cut":
            self.h.open()

    def expire(self) -> None:
        self.h.pass_time(1001)

    def check(self) -> None:
        seqs = set(self.h.seqs("q"))
        needed = {seq for need in self.needs.values() for seq in need.open}
        assert needed <= seqs, f"{needed - seqs} are gone, but a consumer needs them"
        assert seqs <= set(self.live), f"{seqs - set(self.live)} are back"
        if self.retention == "work_queue":
            assert seqs == set(self.live)
        elif self.needs and not any(need.filter for need in self.needs.values()):
            assert seqs == needed, f"{seqs - needed} are there, but no consumer needs them"
        self.live = {seq: tag for seq, tag in self.live.items() if seq in seqs}

    def finish(self) -> None:
        """When every consumer has everything, no record that a consumer was interested in is left."""
        if self.retention == "work_queue":
            for name in self.needs:
                self.h.do(k.DropConsumer("q", name))
            self.needs = {}
        if "all" not in self.needs:
            self.needs["all"] = Need(())
            self.h.do(k.PutConsumer("q", "all", consumer()))
            self.needs["all"].open = set(self.live)
        self.h.pass_time(10_000)
        for name, need in self.needs.items():
            while got := self.h.got(100, consumer=name):
                assert set(got) <= need.open
                for seq in got:
                    self.is_done(need, seq)
                self.h.ack(*got, consumer=name)
            assert not need.open, f"{name} never got {need.open}"
        assert self.h.seqs("q") == []
        assert self.h.gaps("q") == []


@pytest.mark.parametrize("retention", ["interest", "work_queue"])
def test_records_live_as_long_as_they_are_needed(retention: str) -> None:
    for seed in SEEDS:
        with slices_of(seed):
            walk = Walk(retention, seed)
            for _ in range(STEPS):
                walk.step()
            walk.finish()
