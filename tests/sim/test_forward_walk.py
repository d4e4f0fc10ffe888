"""Goal: whatever crashes between any two steps, the dest ends with every record of the source, once, in order.

Method: seeded random runs of two engines, with records whose data is their number, batches that are cut anywhere,
repeated and sent out of order, kills and power cuts of either side or both, checkpoints, deletes. After every crash
and at the end the two topics alone are compared.
"""

from __future__ import annotations

import random

import pytest

from tests.support import length
from tests.support.engine_harness import Harness, numbered
from tests.support.forward_harness import Pair, rule
from topics.api.config import TopicConfig
from topics.engine.commands import forwards as f
from topics.engine.commands import topics as c

SEEDS = length.seeds(short=10, long=200)
STEPS = 60


class Walk:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pair = Pair(one=self.random.random() < 0.2, seed=seed)
        # A dest of class fsync loses nothing; a source of any class may.
        self.source_class = self.random.choice(("fsync", "disk", "memory", "ephemeral"))
        self.pair.source.put("src", TopicConfig(durability=self.source_class))  # type: ignore[arg-type]
        self.pair.dest.put("dst", TopicConfig(durability="fsync"))
        self.pair.source.append("src", *numbered(9000, self.random.randrange(1, 4)))
        self.pair.source.sync()
        self.forward = self.pair.open(rule(filter=self.random.choice(((), (("Eq", "a"),)))))
        self.number = 0
        self.sent: list[f.Copies] = []
        self.deleted: set[bytes] = set()
        self.seen: list[bytes] = []

    def step(self) -> None:
        moves = {
            self.write: 8, self.copy: 8, self.repeat: 3, self.delete: 1, self.checkpoint: 2, self.kill: 2,
            self.cut: 2, self.sync: 2,
        }  # fmt: skip
        self.random.choices(list(moves), list(moves.values()))[0]()

    def write(self) -> None:
        payloads = numbered(self.number, self.random.randrange(1, 6))
        self.number += len(payloads)
        self.pair.source.append("src", *payloads, tag=self.random.choice((b"a", b"b")))

    def copy(self) -> None:
        mark = self.pair.mark(self.forward)
        copies = self.pair.next(self.forward, mark, count=self.random.randrange(1, 5))
        if copies is not None:
            self.sent = [*self.sent[-3:], copies]
            self.pair.take(copies)

    def repeat(self) -> None:
        """A batch that was in flight all the time. The link of a dead source is closed, so only batches of its last
        incarnation.
        """
        if self.sent:
            self.pair.take(self.random.choice(self.sent))

    def delete(self) -> None:
        rows = self.pair.source.rows("src")
        if rows:
            seq, payload = self.random.choice(rows)
            self.deleted.add(payload)
            self.pair.source.do(c.Delete("src", seqs=[seq]))

    def one(self) -> Harness:
        return self.random.choice((self.pair.source, self.pair.dest))

    def checkpoint(self) -> None:
        self.one().checkpoint()

    def sync(self) -> None:
        self.one().sync()

    def kill(self) -> None:
        harness = self.one()
        harness.kill_and_open()
        self._after(harness)

    def cut(self) -> None:
        harness = self.one()
        harness.power_cut()
        harness.open()
        self._after(harness)

    def _after(self, harness: Harness) -> None:
        if harness is self.pair.source:
            self.sent = []
        self.check()

    def check(self) -> None:
        """What the dest has shown stays, and nothing is there twice."""
        found = self.pair.payloads()
        assert found[: len(self.seen)] == self.seen, "a copy has disappeared"
        assert len(set(found)) == len(found), "a copy is there twice"
        self.seen = found

    def finish(self) -> None:
        self.pair.carry(self.forward)
        self.check()
        wanted = [
            payload
            for payload, tag in self._source()
            # A power cut may undo a delete that the rule has already passed.
            if payload not in self.deleted
            and payload not in numbered(9000, 3)
            and (not self.forward.filter or tag == b"a")
        ]
        found = [payload for payload in self.seen if payload in set(wanted)]
        assert found == wanted, "the dest lacks records of the source, or has them in another order"
        if self.source_class == "fsync" and not self.deleted:
            assert self.seen == wanted, "the dest has unknown records"

    def _source(self) -> list[tuple[bytes, bytes | None]]:
        found: list[tuple[bytes, bytes | None]] = []
        tags: dict[int, bytes | None] = {}
        cursor = 0
        while True:
            page = self.pair.source.diff("src", cursor, limit=1000)
            for i, seq in enumerate(page.seqs):
                tags[seq] = page.tags[i] if page.tags is not None else None
            if page.next_from_seq >= page.head_seq:
                break
            cursor = page.next_from_seq
        for seq, payload in self.pair.source.rows("src"):
            found.append((payload, tags.get(seq)))
        return found


def walk(seed: int, steps: int = STEPS) -> None:
    one = Walk(seed)
    for _ in range(steps):
        one.step()
    one.finish()


@pytest.mark.parametrize("first", SEEDS[::10])
def test_copies_survive_everything(first: int) -> None:
    for seed in range(first, first + 10):
        try:
            walk(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
