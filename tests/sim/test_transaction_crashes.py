"""Transactions and crashes: at each disk call of one batch, and at random while several producers work.

Goal: a producer that begins again and repeats what was not answered finds each batch once, in order and complete; a
batch without a commit request is not there; an answered commit stays. Method: an engine on a SimDisk that loses,
reorders and tears unsynced data. The random run compares the topic after each step with the batches that must be
there by then.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from tests.support import length
from tests.support.engine_harness import DISK, FSYNC, Harness
from tests.support.faults import fault
from tests.support.sim_disk import SimulatedCrash
from topics.api import limits
from topics.api.config import TopicConfig
from topics.api.errors import TopicsError, TransactionIncomplete, TransactionNotFound
from topics.engine.commands import topics as c
from topics.engine.commands import transactions as t
from topics.engine.commands.topics import Records

PARTS = [("b", 2, 4), ("a", 1, 2)]
CHUNKS = [("a", 0), ("b", 0), ("b", 1)]
LOOKS = ("read", "size", "exists", "list", "free_bytes", "boot_id", "random_u64", "close")


def payloads_of(batch: int, part: str, chunk: int) -> list[bytes]:
    return [b'"%d-%s-%d-%d"' % (batch, part.encode(), chunk, i) for i in range(2)]


EXPECTED = [
    *payloads_of(1, "b", 0),
    *payloads_of(1, "b", 1),
    *payloads_of(1, "a", 0),
]


def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every transaction with more than one chunk counts as large, and is appended chunk by chunk."""
    monkeypatch.setattr(limits, "TXN_WHOLE_RECORDS", 0)
    monkeypatch.setattr(limits, "TXN_SLICE_RECORDS", 1)


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default size."""


def patient(h: Harness, command: c.Command) -> Any:
    """The answer to a command; time passes when nothing else happens."""
    (token,) = h.ask(command)
    for _ in range(1000):
        if token in h.replies:
            return h.replies[token]
        if h.jobs:
            h.run_job()
        else:
            h.clock.advance(100)
            h.ask()
    raise AssertionError(f"never answered: {command}")


def send_batch(h: Harness) -> bool:
    """One attempt; False: it has to begin again."""
    begun = h.do(t.BeginTransaction("t", "p", 1))
    if begun.state == "committed":
        return True
    for part, chunk in CHUNKS:
        records = Records(payloads_of(1, part, chunk))
        reply = patient(h, t.StageChunk("t", begun.txn, part, chunk, records))
        if isinstance(reply, TopicsError):
            if reply.code not in ("txn_committed", "txn_not_found"):
                raise reply
            break
    reply = patient(h, t.CommitTransaction("t", begun.txn, PARTS, 100_000))
    if isinstance(reply, TransactionIncomplete | TransactionNotFound):
        return False
    if isinstance(reply, TopicsError):
        raise reply
    assert reply.state == "committed"
    return True


def prepared(config: TopicConfig) -> Harness:
    h = Harness()
    h.put("t", config)
    h.do(c.Append("t", Records([b'"first"'])))
    h.sync()
    return h


def scenario(h: Harness) -> None:
    assert send_batch(h)
    h.rest()


@cache
def calls(config: TopicConfig, pieces: bool) -> list[str]:
    h = prepared(config)
    h.disk.trace = []
    scenario(h)
    return list(h.disk.trace)


def check(h: Harness, what: str) -> None:
    rows, _ = h.read("t")
    assert [payload for _, payload in rows] == [b'"first"', *EXPECTED], what
    assert not [path for path in h.disk.paths() if "/txn-" in path], what
    assert h.engine.shard.transactions.staged_bytes == 0


@fault(
    "disk",
    "the power fails or the process is killed at any disk call of begin, stage or commit",
    "the batch is there once and whole after it is sent again; what was decided is there without that",
)
@pytest.mark.parametrize("how", ["power", "kill"])
@pytest.mark.parametrize("config", [FSYNC, DISK], ids=["fsync", "disk"])
@pytest.mark.parametrize("size", [whole, in_pieces])
def test_crash_at_every_call(
    config: TopicConfig, how: str, size: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    size(monkeypatch)
    trace = calls(config, size is in_pieces)
    numbers = [number for number, call in enumerate(trace, 1) if not call.startswith(LOOKS)]
    assert len(numbers) > 8
    for nth in length.calls(len(numbers), each=6, shifted=how == "power"):
        number = numbers[nth - 1]
        h = prepared(config)
        h.disk.crash_at(number, midway=bool(number % 2))
        with pytest.raises(SimulatedCrash):
            scenario(h)
        if how == "power":
            h.power_cut()
        else:
            h.kill()
        h.open()
        while not send_batch(h):
            pass
        h.rest()
        check(h, f"{how} at call {number}: {trace[number - 1]}")
        h.restart()
        check(h, f"{how} at call {number}: {trace[number - 1]}, and a restart")


@fault(
    "disk",
    "any disk call of begin, stage or commit fails with EIO or ENOSPC",
    "refused, the transaction gone, or the shard read-only; the batch is there once and whole after it is sent again",
)
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("size", [whole, in_pieces])
def test_failure_of_every_call(
    error: int, size: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    size(monkeypatch)
    trace = calls(FSYNC, size is in_pieces)
    for number in length.calls(len(trace), each=6):
        h = prepared(FSYNC)
        h.disk.fail_at(number, error)
        with suppress(TopicsError, AssertionError):  # refused, which is allowed
            send_batch(h)
        h.pass_time(2000)
        if h.engine.shard.state.read_only is not None:
            h.power_cut()
            h.open()
        while not send_batch(h):
            pass
        h.pass_time(2000)
        h.restart()
        check(h, f"call {number} fails: {trace[number - 1]}")


# ---- random runs


@dataclass
class Producer:
    name: str
    batch: int = 1
    txn: int | None = None
    acked: dict[tuple[str, int], None] = field(default_factory=dict)
    asked: bool = False  # a commit of the current batch was requested
    done: list[bytes] = field(default_factory=list)  # of all batches before

    def payloads(self, part: str, chunk: int) -> list[bytes]:
        return [
            b'"%s-%d-%s-%d-%d"' % (self.name.encode(), self.batch, part.encode(), chunk, i) for i in range(2)
        ]

    @property
    def coming(self) -> list[bytes]:
        return [
            one for part, count, _ in PARTS for chunk in range(count) for one in self.payloads(part, chunk)
        ]

    def next_batch(self) -> None:
        self.done += self.coming
        self.batch += 1
        self.txn, self.asked, self.acked = None, False, {}


class Walk:
    def __init__(self, seed: int, config: TopicConfig) -> None:
        self.rng = random.Random(seed)
        self.h = Harness(seed=seed)
        self.config = config
        self.h.put("t", config)
        self.producers = [Producer("p"), Producer("q")]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        for producer in self.producers:
            while not self.try_whole(producer):
                pass
        self.h.rest()
        self.check()
        self.h.restart()
        self.check()
        for producer in self.producers:
            found = [one for one in self.rows() if one.startswith(b'"%s-' % producer.name.encode())]
            assert found == producer.done
        assert not [path for path in self.h.disk.paths() if "/txn-" in path]

    def rows(self) -> list[bytes]:
        return [payload for _, payload in self.h.rows("t")]

    def check(self) -> None:
        """All earlier batches of each producer are there, and nothing of the current one unless its commit was
        requested.
        """
        rows = self.rows()
        for producer in self.producers:
            found = [one for one in rows if one.startswith(b'"%s-' % producer.name.encode())]
            assert found[: len(producer.done)] == producer.done, producer
            more = found[len(producer.done) :]
            assert more == (producer.coming[: len(more)] if producer.asked else []), producer

    def step(self) -> None:
        producer = self.rng.choice(self.producers)
        kind = self.rng.randrange(100)
        if kind < 50:
            self.work(producer)
        elif kind < 62:
            self.fire(producer)
        elif kind < 66:
            self.abort(producer)
        elif kind < 72:
            self.h.do(c.Append("t", Records([b'"other"'])))
        elif kind < 78:
            self.h.checkpoint()
        elif kind < 82:
            self.h.pass_time(self.rng.choice((1, 200, 3000)))
        elif kind < 88:
            self.h.restart()
        elif kind < 94:
            self.h.kill_and_open()
        else:
            self.h.power_cut()
            self.h.open()
            if self.config is not FSYNC:
                for one in self.producers:
                    one.acked = {}
        self.check()

    def work(self, producer: Producer) -> None:
        """The next regular step of a producer, or a repeated one."""
        h = self.h
        missing = [key for key in CHUNKS if key not in producer.acked]
        if producer.txn is None or self.rng.random() < 0.1:
            begun = h.do(t.BeginTransaction("t", producer.name, producer.batch))
            producer.txn = begun.txn
            if begun.state == "committed":
                assert producer.asked
                producer.next_batch()
        elif missing or self.rng.random() < 0.2:
            self.heard(producer, *self.chunk(producer, self.rng.choice(missing or CHUNKS)))
        else:
            producer.asked = True
            reply = h.send(self.commit(producer))
            if isinstance(reply, TransactionNotFound):
                producer.txn, producer.acked = None, {}
            else:
                assert isinstance(reply, t.TransactionState), f"the whole batch was acked: {reply!r}"
                assert reply.state == "committed"
                producer.next_batch()

    def chunk(self, producer: Producer, key: tuple[str, int]) -> tuple[tuple[str, int], object]:
        assert producer.txn is not None
        records = Records(producer.payloads(*key))
        return key, self.h.send(t.StageChunk("t", producer.txn, *key, records))

    def heard(self, producer: Producer, key: tuple[str, int], reply: object) -> None:
        if isinstance(reply, t.ChunkStaged):
            producer.acked[key] = None
        else:
            assert isinstance(reply, TopicsError), reply
            assert reply.code in ("txn_not_found", "txn_committed"), reply
            producer.txn, producer.acked = None, {}

    def commit(self, producer: Producer) -> t.CommitTransaction:
        assert producer.txn is not None
        return t.CommitTransaction("t", producer.txn, PARTS, 100_000)

    def fire(self, producer: Producer) -> None:
        """Send without waiting for the answer; some of the consequences happen, then perhaps a crash."""
        if producer.txn is None:
            return
        if len(producer.acked) == len(CHUNKS) or self.rng.random() < 0.2:
            producer.asked = True
            self.h.ask(self.commit(producer))
        else:
            key = self.rng.choice(CHUNKS)
            self.h.ask(t.StageChunk("t", producer.txn, *key, Records(producer.payloads(*key))))
        for _ in range(self.rng.randrange(8)):
            if self.h.jobs:
                self.h.run_job()
            else:
                self.h.ask()
        if self.rng.random() < 0.5:
            self.h.kill_and_open()

    def abort(self, producer: Producer) -> None:
        if producer.txn is None:
            return
        reply = self.h.send(t.AbortTransaction("t", producer.txn))
        if isinstance(reply, TopicsError):
            assert reply.code in ("txn_not_found", "txn_committed"), reply
        producer.txn, producer.acked = None, {}

    def try_whole(self, producer: Producer) -> bool:
        batch = producer.batch
        self.work(producer)
        return producer.batch > batch


@pytest.mark.parametrize("config", [FSYNC, DISK], ids=["fsync", "disk"])
@pytest.mark.parametrize("size", [whole, in_pieces])
def test_walks(
    config: TopicConfig, size: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    size(monkeypatch)
    for seed in length.seeds(short=3, long=12):
        try:
            Walk(seed, config).run(40)
        except Exception as problem:
            raise AssertionError(f"seed {seed}: {problem!r}") from problem
