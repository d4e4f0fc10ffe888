"""Clients of a simulated server that write in transactions, as stream processors with checkpoints do: each batch is
begun, staged in chunks and committed, and repeated until it is known to be committed.

Several may work for one producer, each assuming that the others are dead. They die and are replaced, omit chunks,
stage chunks that no commit names, abort, and wait too long. Each attempt of a batch writes its own data, so a reader
can tell the attempts apart.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.sim.actors import RETRY_AFTER_US, Actor, NextRequest, is_stopping, json_request
from tests.sim.queue_workers import LETTERS, QUEUES
from tests.sim.world import MS
from tests.support.history import Op
from topics.protocols.http.exchange import Request

if TYPE_CHECKING:
    from tests.sim.clients import ClientPool

KINDS = ("begin", "stage", "commit", "abort")
TAGS = ("a.1", "b")

Chunk = tuple[str, int]  # part and number


@dataclass(slots=True)
class Producer:
    """A producer. Its clients share the number of the next batch, and nothing else."""

    name: str
    topic: str
    batch: int = 1


@dataclass(slots=True)
class Try:
    """One attempt at a batch: its contents and its progress."""

    batch: int
    txn: str = ""
    chunks: dict[Chunk, list[dict[str, Any]]] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)  # as a commit names them
    todo: list[Chunk] = field(default_factory=list)
    refusals: int = 0  # on end


class Sink(Actor):
    def __init__(self, pool: ClientPool, name: str, producer: Producer) -> None:
        super().__init__(pool, name, begins_within_us=8 * MS)
        self.producer = producer
        self.tries = 0
        self.work: Try | None = None

    # -- the next request ------------------------------------------------------------------------------------

    def _next(self) -> NextRequest:
        rng, work, topic = self.rng, self.work, self.producer.topic
        if work is None or (work.batch < self.producer.batch and rng.random() < 0.8):
            work = self.work = self._new_try()
        if not work.txn:
            return "begin", topic, self._begin(work)
        mood = rng.random()
        if mood < 0.02:
            return "abort", topic, {"txn": work.txn}
        if work.todo and mood > 0.05:
            return "stage", topic, self._stage(work, work.todo[0])
        if work.chunks and mood < 0.09:
            return "stage", topic, self._stage(work, rng.choice(list(work.chunks)))  # once more
        wait_ms = rng.choice((0, 3, 200, 10_000))
        return "commit", topic, {"txn": work.txn, "parts": work.parts, "wait_ms": wait_ms}

    def _new_try(self) -> Try:
        """All attempts at a batch have the same number of parts and records, and different records."""
        self.tries += 1
        producer = self.producer
        shape = random.Random(f"{producer.name} {producer.batch}")
        work = Try(producer.batch)
        for number in range(shape.choice((0, 1, 1, 2, 2, 3))):
            part, records = f"{number}-{self.name}-{self.tries}", 0
            chunks = shape.choice((1, 1, 2, 3))
            for chunk in range(chunks):
                made = self._records(part, chunk, shape.choice((1, 1, 2, 4)))
                work.chunks[part, chunk] = made
                records += len(made)
            work.parts.append({"part": part, "chunks": chunks, "records": records})
        shape.shuffle(work.parts)
        if self.rng.random() < 0.1:
            lost = f"lost-{self.name}-{self.tries}"
            work.chunks[lost, 0] = self._records(lost, 0, 1)  # of a task that failed
        work.todo = list(work.chunks)
        self.rng.shuffle(work.todo)
        return work

    def _records(self, part: str, chunk: int, count: int) -> list[dict[str, Any]]:
        rng = self.rng
        found: list[dict[str, Any]] = []
        for i in range(count):
            data: dict[str, Any] = {
                "w": f"{self.producer.name}-{self.producer.batch}-{part}",
                "c": chunk,
                "i": i,
            }
            if rng.random() < 0.2:
                data["pad"] = "x" * rng.choice((40, 200))
            record: dict[str, Any] = {"data": data}
            if rng.random() < 0.3:
                record["tag"] = rng.choice(TAGS)
            found.append(record)
        return found

    def _begin(self, work: Try) -> dict[str, Any]:
        rng, producer = self.rng, self.producer
        request: dict[str, Any] = {"producer": producer.name, "batch": work.batch}
        request["ttl_ms"] = rng.choice((1000, 5000, 3_600_000))
        if producer.topic in QUEUES or rng.random() < 0.8:
            request["create"] = False
        return request

    @staticmethod
    def _stage(work: Try, chunk: Chunk) -> dict[str, Any]:
        return {"txn": work.txn, "part": chunk[0], "chunk": chunk[1], "records": work.chunks[chunk]}

    # -- answers ---------------------------------------------------------------------------------------------

    def on_answer(self, op: Op) -> None:
        work = self.work
        if work is not None:
            if op.status is None:
                self._unheard(work)
            elif op.ok:
                self._heard(work, op)
            else:
                self._refused(work, op)
        self.world.after(self._pause_us(op), self.go)

    def _heard(self, work: Try, op: Op) -> None:
        work.refusals = 0
        if op.kind == "stage":
            chunk = (op.request["part"], op.request["chunk"])
            work.todo = [other for other in work.todo if other != chunk]
        elif op.kind == "abort":
            work.txn, work.todo = "", list(work.chunks)
            if self.rng.random() < 0.3:
                self._go_on(work)  # without this batch
        elif op.answer["state"] == "committed":
            self.pool.server.counts["batches"] += op.kind == "commit"
            self._go_on(work)
            if self.rng.random() < 0.15:
                self._again = op.kind, op.topic, op.request  # as if there had been no answer
        elif op.kind == "begin":
            work.txn = op.answer["txn"]
            if op.answer["state"] == "committing":
                work.todo = []

    def _go_on(self, work: Try) -> None:
        self.producer.batch = max(self.producer.batch, work.batch + self.rng.choice((1, 1, 1, 3)))
        self.work = None

    def _unheard(self, work: Try) -> None:
        mood = self.rng.random()
        if mood < 0.3:
            self.work = None  # it died, and a new one begins with the same batch
        elif mood < 0.6:
            work.txn = ""  # ask for the state

    def _refused(self, work: Try, op: Op) -> None:
        code, detail = op.answer["error"]["code"], op.detail
        work.refusals += 1
        if code in ("txn_not_found", "topic_not_found"):
            work.txn, work.todo = "", list(work.chunks)
            if code == "topic_not_found" and op.kind == "begin" and work.refusals > 2:
                self.work = None
        elif code == "txn_incomplete":
            named = {part["part"] for part in detail["parts"]}
            work.todo = [chunk for chunk in work.chunks if chunk[0] in named]
        elif code == "txn_committed":
            work.todo = []
        elif work.refusals > 6:
            self.work = None

    def _pause_us(self, op: Op) -> int:
        rng, think = self.rng, self.pool.workload.think_us
        if rng.random() < 0.03:
            return rng.choice((200, 1200, 6000)) * MS  # some transactions expire meanwhile
        if op.ok:
            return rng.choice((0, think // 4, think))
        if is_stopping(op):
            return RETRY_AFTER_US
        return rng.choice((2, 10, 40, 300)) * MS


def producers_of(rng: random.Random, topics: list[str]) -> list[Producer]:
    """Some producers for topics of a run, except those in router cycles and the dead letter topic."""
    fit = [topic for topic in topics if topic != LETTERS and not topic.startswith("ring.")]
    return [Producer(f"p{i}", rng.choice(fit)) for i in range(rng.choice((1, 2, 3)))] if fit else []


def ask_about_all(sinks: list[Sink], ask: Any) -> None:
    """When all is quiet: ask for the state of each producer's last two batches."""
    for producer in {sink.producer.name: sink.producer for sink in sinks}.values():
        for batch in range(max(1, producer.batch - 1), producer.batch + 1):
            wish = {"producer": producer.name, "batch": batch, "ttl_ms": 1000, "create": False}
            ask("begin", producer.topic, wish)


def make_call(kind: str, topic: str, request: dict[str, Any]) -> Request:
    path = f"/v0/topics/{topic}/transactions"
    if kind != "begin":
        path += f"/{request['txn']}/{kind}"
    return json_request(b"POST", path, {key: value for key, value in request.items() if key != "txn"})
