"""Goal: whatever happens to a named consumer, it delivers each record to one client at a time until it is settled,
loses none, and all its counts are right.

Method: a Hypothesis state machine drives an engine and a simple model side by side: writes with tags, fetches, acks
of each kind, nacks, terms, deletes, pauses, resets, new configs, clock jumps, restarts, kills and power cuts. After
every step all counts are compared.
"""

from __future__ import annotations

import random
from bisect import insort
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support import length
from tests.support.engine_harness import append, numbered
from tests.support.lease_harness import LeaseHarness, consumer, log
from tests.support.rule_walk import Choices, walk
from tests.support.small_slices import slices_of
from topics.api.config import ConsumerConfig, TopicConfig
from topics.engine.commands import consumers as k
from topics.engine.commands import topics as c

pytestmark = pytest.mark.sim

NODES = (b"a", b"b")
TAGS = (b"x", b"y", None)
LEASES_MS = (100, 1000, 5000)
WALKS, WALKS_PER_TEST, STEPS = length.seeds(short=4, long=80), 4, 150

CHOICES: Choices = {
    "ack": ["explicit", "explicit", "all"],
    "filter": [(), (("Eq", "x"),), (("Eq", "x"), ("Eq", "y"))],
    "max_deliver": [0, 1, 2],
    "dead_letter": [None, "dead"],
    "max_ack_pending": [2, 3, 1000],
    "retention": ["limits", "interest", "work_queue"],
    "count": [1, 2, 3, 4],
    "node": NODES,
    "max": [1, 2, 3, 5],
    "lease_ms": LEASES_MS,
    "kind": ["retry", "release"],
    "delay_ms": [0, 2000],
    "ms": [1, 99, 101, 999, 1001, 2000, 5001],
    "after_ms": [0, 1],
    "paused": [False, False, True],
    "dry_run": [False, True],
    "known": [True, True, False],
    "how": ["restart", "kill", "power cut", "checkpoint and kill"],
    "pick": range(1 << 16),  # fractions with which a rule picks from what exists
}
MOVES = {
    "produce": 8, "fetch": 20, "acks": 8, "nack": 8, "extend": 5, "term": 2, "time_passes": 4, "an_edge_is_reached": 8,
    "delete": 2, "pause": 2, "reset": 2, "configure": 2, "ship": 5, "end": 4,
}  # fmt: skip


def any_of(*names: str) -> dict[str, st.SearchStrategy[Any]]:
    return {name: st.sampled_from(CHOICES[name]) for name in names}


@dataclass
class Held:
    """A leased record."""

    deliveries: int = 0
    place: str = "ready"  # ready, leased, delayed, moving
    node: bytes = b""
    lease_id: int = 0
    until: int = 0


@dataclass
class ConsumerModel:
    topic: TopicConfig
    config: ConsumerConfig
    live: dict[int, bytes | None] = field(default_factory=dict)
    fresh: list[int] = field(default_factory=list)  # never delivered, in order
    held: dict[int, Held] = field(default_factory=dict)
    head: int = 0
    paused: bool = False
    counters: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("delivered", "redelivered", "acked", "given_up", "dead_lettered"), 0
        )
    )

    def wants(self, tag: bytes | None) -> bool:
        return not self.config.filter or any(tag == value.encode() for _, value in self.config.filter)

    def produce(self, tags: list[bytes | None]) -> None:
        for tag in tags:
            self.head += 1
            self.live[self.head] = tag
            if self.wants(tag):
                self.fresh.append(self.head)

    def pass_to(self, now: int) -> None:
        for held in self.held.values():
            if (held.place == "leased" and now > held.until) or (
                held.place == "delayed" and now >= held.until
            ):
                held.place = "ready"

    def is_over(self, held: Held) -> bool:
        return bool(self.config.max_deliver) and held.deliveries >= self.config.max_deliver

    def next_in_line(self, max: int) -> tuple[list[int], list[int]]:
        """What a fetch gets, and what has had its last delivery."""
        if self.paused:
            return [], []
        chosen: list[int] = []
        dying: list[int] = []
        for seq in sorted(seq for seq, held in self.held.items() if held.place == "ready"):
            if self.is_over(self.held[seq]):
                dying.append(seq)
            elif len(chosen) == max:
                break
            else:
                chosen.append(seq)
        in_hand = len(self.held) - (0 if self.config.dead_letter else len(dying))
        room = min(max - len(chosen), self.config.max_ack_pending - in_hand)
        return chosen + self.fresh[: room if room > 0 else 0], dying

    def settle(self, seq: int, counter: str) -> None:
        """Settled, in one way or another; the topic's type decides what happens to the record."""
        del self.held[seq]
        self.counters[counter] += 1
        if self.topic.retention != "limits":
            del self.live[seq]

    def die(self, seq: int) -> None:
        if self.config.dead_letter:
            self.held[seq].place = "moving"
        else:
            self.settle(seq, "given_up")

    def remove(self, seq: int) -> None:
        self.live.pop(seq, None)
        self.held.pop(seq, None)
        if seq in self.fresh:
            self.fresh.remove(seq)

    def reset(self, to_seq: int) -> None:
        self.held = {seq: held for seq, held in self.held.items() if held.place == "moving"}
        self.fresh = [
            seq
            for seq, tag in self.live.items()
            if seq >= to_seq and self.wants(tag) and seq not in self.held
        ]
        if self.topic.retention == "interest":
            # It does not need the records it has skipped, and there is no other consumer.
            self.live = {seq: tag for seq, tag in self.live.items() if seq >= to_seq or seq in self.held}

    def figures(self) -> dict[str, object]:
        return {
            "ack_pending": len(self.held),
            "in_flight": sum(held.place == "leased" for held in self.held.values()),
            "lag_records": len(self.fresh),
            "paused": self.paused,
            "stalled": bool(self.fresh) and len(self.held) >= self.config.max_ack_pending,
            **self.counters,
        }


class ConsumerMachine(RuleBasedStateMachine):
    @initialize(**any_of("ack", "filter", "max_deliver", "dead_letter", "max_ack_pending", "retention"))
    def start(
        self,
        ack: str,
        filter: tuple[tuple[str, str], ...],
        max_deliver: int,
        dead_letter: str | None,
        max_ack_pending: int,
        retention: str,
    ) -> None:
        if retention == "interest":
            filter = ()  # records that a filter omits would be removed as well
        fields: dict[str, Any] = {
            "ack": ack, "filter": filter, "max_deliver": max_deliver, "dead_letter": dead_letter,
            "max_ack_pending": max_ack_pending,
        }  # fmt: skip
        topic, config = log(retention=retention), consumer(**fields)
        self.h = LeaseHarness(topic)
        self.h.put("dead", TopicConfig(durability="fsync"))
        self.h.make(**fields)
        self.model = ConsumerModel(topic, config)
        self.known: list[tuple[int, bytes, int]] = []
        self.lease_ids: set[int] = set()

    def now(self) -> int:
        self.h.ask()
        now = self.h.engine.clock.now_ms
        self.model.pass_to(now)
        return now

    # ---- clients

    @rule(**any_of("count", "pick"))
    def produce(self, count: int, pick: int) -> None:
        tags = random.Random(pick).choices(TAGS, k=count)
        self.h.do(append("q", *numbered(self.model.head + 1, len(tags)), tags=tags))
        self.model.produce(tags)

    @rule(**any_of("node", "max", "lease_ms"))
    def fetch(self, node: bytes, max: int, lease_ms: int) -> None:
        now = self.now()
        claimed = self.h.claim(max, node=node, lease_ms=lease_ms, consumer="c")
        chosen, dying = self.model.next_in_line(max)
        assert claimed.page.seqs == chosen
        assert claimed.tombstone is None
        for seq in dying:
            self.model.die(seq)
        for i, seq in enumerate(chosen):
            self.hand_out(seq, claimed.lease_ids[i], node, now + lease_ms)
            assert claimed.deliveries[i] == self.model.held[seq].deliveries
        assert claimed.deadlines == [now + lease_ms] * len(chosen)

    def hand_out(self, seq: int, lease_id: int, node: bytes, until: int) -> None:
        assert lease_id not in self.lease_ids
        self.lease_ids.add(lease_id)
        model = self.model
        if seq in model.fresh:
            model.fresh.remove(seq)
        held = model.held.setdefault(seq, Held())
        assert held.place == "ready", (seq, held)
        held.place, held.node, held.lease_id, held.until = "leased", node, lease_id, until
        held.deliveries += 1
        model.counters["delivered"] += 1
        model.counters["redelivered"] += held.deliveries > 1
        self.known.append((seq, node, lease_id))

    def settle(self, kind: k.SettleKind, pick: int, node: bytes, **options: Any) -> tuple[int, list[int]]:
        now = self.now()
        strays = [(seq, 0) for seq in (0, 1, self.model.head + 1)]
        told = [(seq, lease_id) for seq, whose, lease_id in self.known[-12:] if whose == node]
        mine = [
            (seq, h.lease_id) for seq, h in self.model.held.items() if (h.place, h.node) == ("leased", node)
        ]
        rng = random.Random(pick)
        picked = rng.choices(mine or told or strays, k=rng.randrange(4))
        picked += rng.choices(told + strays, k=rng.choice([0, 0, 1, 2]))
        fences = [lease_id for _, lease_id in picked] if rng.random() < 0.5 else []
        good: list[int] = []
        skipped: list[int] = []
        for i, (seq, _) in enumerate(picked):
            held = self.model.held.get(seq)
            fits = held is not None and held.place == "leased" and held.node == node and seq not in good
            fits = fits and held is not None and (not fences or fences[i] in (0, held.lease_id))
            (good if fits else skipped).append(seq)
        seqs = [seq for seq, _ in picked]
        settled = self.h.settle(kind, *seqs, node=node, lease_ids=fences, consumer="c", **options)
        assert settled.skipped == skipped
        if kind == "ack" and self.model.config.ack == "all" and good:
            good = sorted(
                seq for seq, held in self.model.held.items() if seq <= max(good) and held.place != "moving"
            )
        assert settled.count == len(good)
        return now, good

    @rule(**any_of("pick", "node"))
    def acks(self, pick: int, node: bytes) -> None:
        for seq in self.settle("ack", pick, node)[1]:
            self.model.settle(seq, "acked")

    @rule(**any_of("pick", "node", "kind", "delay_ms"))
    def nack(self, pick: int, node: bytes, kind: k.NackKind, delay_ms: int) -> None:
        now, good = self.settle("nack", pick, node, nack=kind, delay_ms=delay_ms)
        for seq in good:
            held = self.model.held[seq]
            held.deliveries -= kind == "release"
            held.place, held.until = ("delayed", now + delay_ms) if delay_ms else ("ready", 0)

    @rule(**any_of("pick", "node", "lease_ms"))
    def extend(self, pick: int, node: bytes, lease_ms: int) -> None:
        now, good = self.settle("extend", pick, node, lease_ms=lease_ms)
        for seq in good:
            self.model.held[seq].until = now + lease_ms

    @rule(**any_of("pick", "node"))
    def term(self, pick: int, node: bytes) -> None:
        for seq in self.settle("term", pick, node)[1]:
            self.model.die(seq)

    # ---- other events

    @rule(**any_of("ms"))
    def time_passes(self, ms: int) -> None:
        self.h.pass_time(ms)
        self.now()

    @rule(**any_of("pick", "after_ms"))
    def an_edge_is_reached(self, pick: int, after_ms: int) -> None:
        edges = {held.until for held in self.model.held.values() if held.place in ("leased", "delayed")}
        if edges:
            self.h.pass_until(random.Random(pick).choice(sorted(edges)) + after_ms)
            self.now()

    @rule(**any_of("pick"))
    def delete(self, pick: int) -> None:
        self.now()
        rng = random.Random(pick)
        seqs = {rng.randint(1, self.model.head + 1) for _ in range(rng.randrange(3))}
        self.h.do(c.Delete("q", seqs=sorted(seqs)))
        for seq in seqs:
            self.model.remove(seq)

    @rule(**any_of("paused"))
    def pause(self, paused: bool) -> None:
        self.now()
        self.h.do(k.PauseConsumer("q", "c", paused))
        self.model.paused = paused

    @rule(**any_of("pick", "dry_run"))
    def reset(self, pick: int, dry_run: bool) -> None:
        self.now()
        to_seq = random.Random(pick).randint(1, self.model.head + 1)
        reset = self.h.do(k.ResetConsumer("q", "c", "seq", to_seq, dry_run))
        assert (reset.to_seq, reset.dry_run) == (to_seq, dry_run)
        if not dry_run:
            self.model.reset(to_seq)

    @rule(**any_of("max_ack_pending", "max_deliver"))
    def configure(self, max_ack_pending: int, max_deliver: int) -> None:
        self.now()
        old = self.model.config
        state = self.h.make(
            ack=old.ack, filter=old.filter, dead_letter=old.dead_letter, max_ack_pending=max_ack_pending,
            max_deliver=max_deliver,
        )  # fmt: skip
        self.model.config = state.config

    @rule(**any_of("known"))
    def ship(self, known: bool) -> None:
        self.h.sync()
        self.now()
        letters = self.h.letters()
        if letters:
            self.h.deliver(letters)
        if letters and known:
            cursor = self.h.look().cursor
            self.h.end_move(letters)
            for letter in letters:
                assert self.model.held[letter.seq].place == "moving"
                self.model.settle(letter.seq, "dead_lettered")
                if letter.seq >= cursor and letter.seq in self.model.live:
                    insort(self.model.fresh, letter.seq)  # a reset has requested all of them again

    @rule(**any_of("how"))
    def end(self, how: str) -> None:
        if how == "restart":
            self.h.restart()
        else:
            if how == "checkpoint and kill":
                self.h.checkpoint()
            self.h.sync()
            self.h.power_cut() if how == "power cut" else self.h.kill()
            self.h.open()
        self.now()

    # ---- invariants

    @invariant()
    def engine_and_model_agree(self) -> None:
        if not hasattr(self, "h"):
            return
        self.now()
        state, model = self.h.look(), self.model
        figures = model.figures()
        assert {name: getattr(state, name) for name in figures} == figures
        assert self.h.seqs("q") == list(model.live)
        open_seqs = [*model.held, *model.fresh]
        assert state.ack_floor < min(open_seqs, default=model.head + 1), (
            "a record below the floor is not settled"
        )
        if model.held and min(model.held) < min([state.cursor, *model.fresh]):
            assert state.ack_floor == min(model.held) - 1

    def teardown(self) -> None:
        """Every record can be settled."""
        if not hasattr(self, "h"):
            return
        self.h.do(k.PauseConsumer("q", "c", False))
        for _ in range(200):
            self.h.pass_time(10_000)
            self.h.ship()
            got = self.h.got(100, consumer="c")
            if got:
                self.h.ack(*got, consumer="c")
            elif not self.h.look().ack_pending:
                break
        state = self.h.look()
        assert (state.lag_records, state.ack_pending, state.in_flight) == (0, 0, 0)
        dead = [payload for _, payload in self.h.rows("dead")]
        assert len(dead) >= state.dead_lettered


TestConsumerMachine = ConsumerMachine.TestCase
TestConsumerMachine.settings = settings(
    max_examples=length.pick(short=8, long=150),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


@pytest.mark.parametrize("first", WALKS[::WALKS_PER_TEST])
def test_long_walks(first: int) -> None:
    for seed in range(first, first + WALKS_PER_TEST):
        with slices_of(seed):
            walk(ConsumerMachine(), seed, STEPS, CHOICES, MOVES)
