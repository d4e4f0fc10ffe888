"""An engine with one topic `q`, and short helpers to claim, settle and inspect its consumers.

The test delivers dead letters: `ship` does what servers do between two shards, with one engine at both ends.
"""

from __future__ import annotations

from typing import Any

from tests.support.engine_harness import SMALL, Harness, numbered, rows_of
from topics.api.config import ConsumerConfig, EngineConfig, TopicConfig
from topics.api.errors import TopicsError
from topics.engine.commands import consumers as k
from topics.engine.commands import topics as c

LEASE_MS = 1000
NODE = b"w"
LETTERS_AT_ONCE, LETTER_BYTES = 64, 1 << 20


def queue(**fields: Any) -> TopicConfig:
    """A queue of class fsync with short leases."""
    return TopicConfig(type="queue", **{"durability": "fsync", "lease_ms": LEASE_MS, **fields})


def log(**fields: Any) -> TopicConfig:
    return TopicConfig(**{"durability": "fsync", **fields})


def consumer(**fields: Any) -> ConsumerConfig:
    return ConsumerConfig(**{"ack_wait_ms": LEASE_MS, **fields})


class LeaseHarness(Harness):
    def __init__(
        self, config: TopicConfig | None = None, jobs: int = 0, engine: EngineConfig = SMALL
    ) -> None:
        super().__init__(engine)
        self.put("q", queue() if config is None else config)
        if jobs:
            self.produce(jobs)

    # ---- the queue

    def produce(self, count: int, **options: Any) -> c.Appended:
        """Append this many records, whose data is their number."""
        first = self.state("q").head_seq + 1
        made = self.append("q", *numbered(first, count), **options)
        assert isinstance(made, c.Appended)
        return made

    def claim_of(self, max: int = 1, *, node: bytes = NODE, **options: Any) -> k.Claim:
        return k.Claim("q", node=node, max=max, **options)

    def claim(self, max: int = 1, *, node: bytes = NODE, **options: Any) -> k.Claimed:
        """Claim what is available now; the answer is checked to be well formed."""
        found = self.do(self.claim_of(max, node=node, **options))
        check_claimed(found)
        return found

    def got(self, max: int = 1, **options: Any) -> list[int]:
        """The seqs of a claim."""
        return self.claim(max, **options).page.seqs

    def parked(self, max: int = 1, *, node: bytes = NODE, **options: Any) -> int:
        """A claim that waits; returns its token."""
        (token,) = self.ask(self.claim_of(max, node=node, **options))
        self.run_jobs()
        assert token not in self.replies, self.replies[token]
        return token

    def answer(self, token: int) -> k.Claimed | None:
        """The answer to a waiting claim, if it has one by now."""
        self.run_jobs()
        found = self.replies.get(token)
        if found is not None:
            assert not isinstance(found, TopicsError), repr(found)
            check_claimed(found)
        return found

    def run_jobs(self) -> None:
        while self.jobs:
            self.run_job()

    def settle(self, kind: k.SettleKind, *seqs: int, node: bytes = NODE, **options: Any) -> k.Settled:
        found = self.do(k.Settle("q", kind, node, list(seqs), **options))
        assert isinstance(found, k.Settled)
        assert (found.topic, found.kind) == ("q", kind)
        return found

    def ack(self, *seqs: int, **options: Any) -> k.Settled:
        return self.settle("ack", *seqs, **options)

    def nack(self, *seqs: int, **options: Any) -> k.Settled:
        return self.settle("nack", *seqs, **options)

    def extend(self, *seqs: int, lease_ms: int = LEASE_MS, **options: Any) -> k.Settled:
        return self.settle("extend", *seqs, lease_ms=lease_ms, **options)

    def counts(self) -> tuple[int, int, int]:
        """Ready, in flight, dead lettered."""
        counts = self.state("q").queue
        assert counts is not None
        return counts.ready, counts.in_flight, counts.dead_lettered

    def now(self) -> int:
        """Engine time."""
        self.rest()
        return self.engine.clock.now_ms

    def pass_until(self, at_ms: int) -> None:
        """Pass time until this moment of engine time. After a restart engine time may be ahead of the wall clock, and
        then runs slower.
        """
        while (left_ms := at_ms - self.now()) > 0:
            self.pass_time(left_ms)

    # ---- named consumers

    def make(self, name: str = "c", **fields: Any) -> k.ConsumerState:
        return self.consumer_state(self.do(k.PutConsumer("q", name, consumer(**fields))))

    def look(self, name: str = "c") -> k.ConsumerState:
        return self.consumer_state(self.do(k.GetConsumer("q", name)))

    @staticmethod
    def consumer_state(found: object) -> k.ConsumerState:
        assert isinstance(found, k.ConsumerState)
        return found

    # ---- dead letters

    def letters(self) -> list[k.DeadLetter]:
        """The next dead letters of `q` that may be sent."""
        shard = self.engine.shard
        source = next((log for log in shard.dead_letters.due.values() if log.name == "q"), None)
        return (
            []
            if source is None
            else shard.dead_letters.dead_letters_to_send(source, LETTERS_AT_ONCE, LETTER_BYTES)
        )

    def deliver(self, letters: list[k.DeadLetter]) -> None:
        """Append them to their target."""
        first = letters[0]
        taken = self.do(k.TakeDeadLetters(first.target, first.source_id, letters))
        assert (taken.topic, taken.source_id) == (first.target, first.source_id)
        assert (
            taken.last_number >= letters[-1].number
        )  # it may have had later ones whose records are gone by now

    def end_move(self, letters: list[k.DeadLetter], *, done: bool = True) -> None:
        last = letters[-1]
        self.do(k.SettleDeadLetters("q", last.source_id, last.number, done))

    def ship(self) -> int:
        """Send dead letters until none are left; returns how many."""
        shipped = 0
        self.rest()
        while letters := self.letters():
            self.deliver(letters)
            self.end_move(letters)
            shipped += len(letters)
            self.rest()
        return shipped


def check_claimed(claimed: object) -> None:
    """Columns of equal length, in ascending order."""
    assert isinstance(claimed, k.Claimed), repr(claimed)
    seqs = claimed.page.seqs
    assert seqs == sorted(set(seqs))
    assert len(claimed.lease_ids) == len(claimed.deadlines) == len(claimed.deliveries) == len(seqs)
    assert [seq for seq, _ in rows_of(claimed.page)] == seqs
