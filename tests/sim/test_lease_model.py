"""Goal: whatever happens to a queue, no two clients hold one job, none is lost, and all counts are right.

Method: a Hypothesis state machine drives an engine and a simple model of leases side by side: producers, workers with
valid and stale lease ids, clock jumps, deletes, evictions, dead letters, restarts, kills and power cuts, also with a
request in flight. After every step the whole state is compared. Failures shrink to short examples.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support import length
from tests.support.engine_harness import SMALL, append, numbered
from tests.support.lease_harness import LeaseHarness, queue
from tests.support.lease_model import LeaseModel, Seen
from tests.support.rule_walk import Choices, walk
from tests.support.small_slices import slices_of
from topics.api import limits
from topics.api.config import TopicConfig
from topics.engine.commands import consumers as k
from topics.engine.commands import topics as c

pytestmark = pytest.mark.sim

NODES = (b"a", b"b")
LEASES_MS = (100, 1000, 5000)
TTL_MS = 8000
WALKS, WALKS_PER_TEST, STEPS = length.seeds(short=4, long=80), 4, 150

CHOICES: Choices = {
    "durability": ["fsync", "disk"],
    "leases_durable": [False, True],
    "max_deliveries": [0, 1, 2],
    "dead_letter": [None, "dead"],
    "cap_records": [0, 0, 6],
    "ttl_ms": [0, 0, TTL_MS],
    "count": [1, 2, 3, 4],
    "node": NODES,
    "max": [1, 2, 3, 5],
    "lease_ms": LEASES_MS,
    "connection": [0, 1, 2],
    "gone": [1, 2],
    "kind": ["retry", "retry", "release", "dead"],
    "delay_ms": [0, 0, 50, 2000],
    "ms": [1, 50, 99, 101, 999, 1001, 2000, 5001, TTL_MS + 1],
    "after_ms": [0, 1],
    "jump_ms": [-3_600_000, -500, 500, 3_600_000],
    "fate": ["taken and known", "taken", "refused"],
    "how": ["restart", "kill", "power cut", "checkpoint and kill"],
    "crash": ["kill", "power cut"],
    "what": ["ack", "nack", "produce"],
    "pick": range(1 << 16),  # fractions with which a rule picks from what exists
}
MOVES = {
    "produce": 8, "claim": 20, "ack": 8, "nack": 10, "extend": 6, "disconnect": 3, "time_passes": 4,
    "an_edge_is_reached": 8, "wall_jumps": 1, "delete": 2, "ship": 5, "configure": 1, "checkpoint": 2, "end": 3,
    "end_with_a_request_under_way": 2,
}  # fmt: skip


def any_of(*names: str) -> dict[str, st.SearchStrategy[Any]]:
    return {name: st.sampled_from(CHOICES[name]) for name in names}


class QueueMachine(RuleBasedStateMachine):
    @initialize(
        **any_of("durability", "leases_durable", "max_deliveries", "dead_letter", "cap_records", "ttl_ms")
    )
    def start(
        self,
        durability: str,
        leases_durable: bool,
        max_deliveries: int,
        dead_letter: str | None,
        cap_records: int,
        ttl_ms: int,
    ) -> None:
        config = queue(
            durability=durability,
            leases_durable=leases_durable,
            max_deliveries=max_deliveries,
            dead_letter=dead_letter,
            cap_records=cap_records,
            ttl_ms=ttl_ms,
        )
        self.h = LeaseHarness(config)
        self.h.put("dead", TopicConfig(durability="fsync"))
        self.model = LeaseModel(config)
        self.known: list[tuple[int, bytes, int]] = []  # every lease that was given to a worker
        self.taken: set[int] = set()  # numbers of dead letters that have arrived
        self.safe = durability == "fsync"

    def now(self) -> int:
        """The engine's time as the next command will see it; the model's time is set to it."""
        self.h.ask()
        now = self.h.engine.clock.now_ms
        self.model.pass_to(now)
        return now

    # ---- producers and workers

    @rule(**any_of("count"))
    def produce(self, count: int) -> None:
        now = self.now()
        self.h.produce(count)
        self.model.produce(count, now)

    @rule(**any_of("node", "max", "lease_ms", "connection"))
    def claim(self, node: bytes, max: int, lease_ms: int, connection: int) -> None:
        now = self.now()
        claimed = self.h.claim(max, node=node, lease_ms=lease_ms, connection=connection)
        self.take(self.model, claimed, now, node, max, lease_ms, connection)

    def take(
        self,
        model: LeaseModel,
        claimed: k.Claimed,
        now: int,
        node: bytes,
        max: int,
        lease_ms: int,
        connection: int,
    ) -> None:
        """The claim got what it should; update the model."""
        chosen, dying = model.next_in_line(max)
        assert claimed.page.seqs == sorted(job.seq for job in chosen)
        assert claimed.deadlines == [now + lease_ms] * len(chosen)
        for job in dying:
            job.place = "moving"
        for i, job in enumerate(sorted(chosen, key=lambda job: job.seq)):
            lease_id = claimed.lease_ids[i]
            model.lease(job, node=node, lease_id=lease_id, deadline=now + lease_ms, connection=connection)
            assert claimed.deliveries[i] == job.deliveries
            self.known.append((job.seq, node, lease_id))
        assert claimed.ready == model.counts()[0]

    def choose(self, pick: int, node: bytes) -> tuple[list[int], list[int]]:
        """Seqs of a settle and their lease ids: current ones of the node, old ones, and unknown ones."""
        strays = [(seq, 0) for seq in (0, 1, self.model.head, self.model.head + 1)]
        told = [(seq, lease_id) for seq, whose, lease_id in self.known[-20:] if whose == node]
        mine = [
            (job.seq, job.lease_id) for job in self.model.jobs.values() if self.model.holds(job.seq, node, 0)
        ]
        rng = random.Random(pick)
        picked = rng.choices(mine or told or strays, k=rng.randrange(4))
        picked += rng.choices(told + strays, k=rng.choice([0, 0, 1, 2]))
        return [seq for seq, _ in picked], [lease_id for _, lease_id in picked] if rng.random() < 0.5 else []

    def held(self, seqs: list[int], fences: list[int], node: bytes) -> tuple[list[int], list[int]]:
        """Which of them the node holds, and which must be skipped."""
        good: list[int] = []
        skipped: list[int] = []
        for i, seq in enumerate(seqs):
            good_one = seq not in good and self.model.holds(seq, node, fences[i] if fences else 0)
            (good if good_one else skipped).append(seq)
        return good, skipped

    def settle(self, kind: k.SettleKind, pick: int, node: bytes, **options: Any) -> tuple[int, list[int]]:
        """The command is the first to see its time: no earlier one has processed what expired by then."""
        self.now()
        seqs, fences = self.choose(pick, node)
        self.h.clock.advance(self.until_an_edge(pick) if pick % 4 == 0 else 0)
        settled = self.h.settle(kind, *seqs, node=node, lease_ids=fences, **options)
        now = self.h.engine.clock.now_ms
        self.model.pass_to(now)
        good, skipped = self.held(seqs, fences, node)
        assert (settled.count, settled.skipped) == (len(good), skipped)
        self.settled = settled
        return now, good

    def until_an_edge(self, pick: int) -> int:
        """The time until the last moment of a lease, or the one after it."""
        now = self.h.engine.clock.now_ms
        rng = random.Random(pick)
        edges = [job.deadline for job in self.model.jobs.values() if job.place == "leased"]
        return rng.choice(edges) - now + rng.randrange(2) if edges else 0

    def compare_counts(self) -> None:
        assert (self.settled.ready, self.settled.in_flight) == self.model.counts()[:2]

    @rule(**any_of("pick", "node"))
    def ack(self, pick: int, node: bytes) -> None:
        _, good = self.settle("ack", pick, node)
        for seq in good:
            self.model.end(seq, "done")
        self.compare_counts()

    @rule(**any_of("pick", "node", "kind", "delay_ms"))
    def nack(self, pick: int, node: bytes, kind: k.NackKind, delay_ms: int) -> None:
        if kind == "dead" and not self.model.config.dead_letter:
            kind = "retry"
        now, good = self.settle("nack", pick, node, nack=kind, delay_ms=delay_ms)
        for seq in good:
            self.model.nack(seq, now, kind=kind, delay_ms=delay_ms)
        self.compare_counts()

    @rule(**any_of("pick", "node", "lease_ms"))
    def extend(self, pick: int, node: bytes, lease_ms: int) -> None:
        now, good = self.settle("extend", pick, node, lease_ms=lease_ms)
        for seq in good:
            self.model.extend(seq, now, lease_ms)
        assert self.settled.deadlines == dict.fromkeys(good, now + lease_ms)

    @rule(**any_of("gone"))
    def disconnect(self, gone: int) -> None:
        self.now()
        assert self.h.do(k.Release("q", "", gone)) == k.Released("q", self.model.release(gone))

    # ---- other events

    @rule(**any_of("ms"))
    def time_passes(self, ms: int) -> None:
        self.h.pass_time(ms)
        self.now()

    @rule(**any_of("pick", "after_ms"))
    def an_edge_is_reached(self, pick: int, after_ms: int) -> None:
        """Pass time to the last moment of a lease or a delay, or the first one after it."""
        edges = [job.deadline for job in self.model.jobs.values() if job.place == "leased"]
        edges += [job.due for job in self.model.jobs.values() if job.place == "delayed"]
        if edges:
            self.h.pass_until(random.Random(pick).choice(edges) + after_ms)
            self.now()

    @rule(**any_of("jump_ms"))
    def wall_jumps(self, jump_ms: int) -> None:
        self.h.clock.jump_wall(jump_ms)
        self.now()

    @rule(**any_of("pick"))
    def delete(self, pick: int) -> None:
        self.now()
        rng = random.Random(pick)
        seqs = {rng.randint(1, self.model.head + 1) for _ in range(rng.randrange(3))}
        alive = [seq for seq in seqs if seq in self.model.jobs]
        deleted = self.h.do(c.Delete("q", seqs=sorted(seqs)))
        assert deleted.deleted == len(alive)
        self.model.remove(alive)

    @rule(**any_of("max_deliveries", "dead_letter"))
    def configure(self, max_deliveries: int, dead_letter: str | None) -> None:
        self.now()
        config = msgspec.structs.replace(
            self.model.config, max_deliveries=max_deliveries, dead_letter=dead_letter
        )
        self.h.put("q", config)
        self.model.config = config

    # ---- dead letters

    @rule(**any_of("fate"))
    def ship(self, fate: str) -> None:
        """Dead letters go to their target. The answer may be lost; then they are sent again."""
        self.h.sync()
        self.now()
        letters = self.h.letters()
        if not letters:
            return
        numbers = {letter.number for letter in letters}
        refused = fate == "refused" and not numbers & self.taken  # the target does not refuse what it has
        if not refused:
            self.h.deliver(letters)
            self.taken |= numbers
            if fate == "taken":
                return
        self.h.end_move(letters, done=not refused)
        for letter in letters:
            self.moved(letter, done=not refused)

    def moved(self, letter: k.DeadLetter, done: bool) -> None:
        job = self.model.jobs[letter.seq]
        assert job.place == "moving", job
        if done:
            self.model.end(letter.seq, "dead")
        else:
            job.place, job.due = "delayed", self.h.engine.clock.now_ms + limits.DEAD_LETTER_RETRY_MS
            job.doomed = True

    # ---- stops and crashes

    @rule()
    def checkpoint(self) -> None:
        self.h.checkpoint()
        self.now()

    @rule(**any_of("how"))
    def end(self, how: str) -> None:
        self.h.rest()
        self.come_back(how)
        self.model.restart()
        self.now()

    def come_back(self, how: str, *, synced: bool = True) -> None:
        if how == "restart":
            self.h.restart()
            return
        if how == "checkpoint and kill":
            self.h.checkpoint()
        if how == "power cut" and self.safe:
            if synced:
                self.h.sync()  # a lease is written at once and synced soon
            self.h.power_cut()
        else:
            self.h.kill()
        self.h.open()

    @rule(**any_of("crash", "what", "node"))
    def end_with_a_request_under_way(self, crash: str, what: str, node: bytes) -> None:
        """The request was executed as a whole, or not at all."""
        self.h.sync()
        now = self.now()
        held = [job.seq for job in self.model.jobs.values() if self.model.holds(job.seq, node, 0)]
        after = copy.deepcopy(self.model)
        if what == "produce":
            self.h.ask(append("q", *numbered(self.model.head + 1, 2)))
            after.produce(2, now)
        else:
            self.h.ask(k.Settle("q", what, node, held))
            for seq in held:
                after.end(seq, "done") if what == "ack" else after.nack(seq, now, kind="retry", delay_ms=0)
        self.come_back(crash, synced=False)
        self.model = self.which_of(self.model, after)

    def which_of(self, *models: LeaseModel) -> LeaseModel:
        seen = self.seen()
        for model in models:
            model.restart()
            model.pass_to(self.h.engine.clock.now_ms)
            if model.seen() == seen:
                return model
        raise AssertionError((seen, [model.seen() for model in models]))

    def seen(self) -> Seen:
        state = self.h.state("q")
        assert state.queue is not None
        seqs = self.h.seqs("q")
        assert state.count == len(seqs)
        counts = state.queue
        return state.head_seq, seqs, (counts.ready, counts.in_flight, counts.dead_lettered)

    # ---- invariants

    @invariant()
    def engine_and_model_agree(self) -> None:
        if hasattr(self, "h"):
            self.now()
            assert self.seen() == self.model.seen()

    def teardown(self) -> None:
        """Everything can be finished: nothing is stuck, and each job has ended exactly once."""
        if not hasattr(self, "h"):
            return
        for _ in range(50):
            self.h.pass_time(10_000)  # longer than any lease or delay
            self.h.ship()
            got = self.h.got(100)
            if got:
                self.h.ack(*got)
            elif not self.h.seqs("q"):
                break
        assert self.h.seqs("q") == []
        assert self.h.counts()[:2] == (0, 0)
        dead = [payload for _, payload in self.h.rows("dead")]
        assert len(set(dead)) == len(dead), "a job went to the dead letters twice"
        assert len(dead) >= self.h.counts()[2]  # a job may have ended otherwise after it was sent


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(
    max_examples=length.pick(short=8, long=150),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
assert SMALL.verify, "the engine's own check failed"


@pytest.mark.parametrize("first", WALKS[::WALKS_PER_TEST])
def test_long_walks(first: int) -> None:
    for seed in range(first, first + WALKS_PER_TEST):
        with slices_of(seed):
            walk(QueueMachine(), seed, STEPS, CHOICES, MOVES)
