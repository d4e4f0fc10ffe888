"""Goal: in any order of events, no stream holds more than it may, no job is lost, and nothing is left behind.

Method: random runs with two fronts and two shards: jobs are written, streams open, close and stop reading, jobs are
acked, nacked or left, workers die, messages are late. At the end everything is delivered, and every job has to be
done.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support import length
from tests.support.watch_rig import Answers, Client, Front, Town
from topics.link import wire
from topics.protocols.http.job_stream import JobEventStream

QUEUES = {
    "q1": {},
    "q2": {"leases_durable": True},
    "q3": {"claim_jitter_ms": 5},
    "q4": {"durability": "fsync"},
}
CONSUMER = "c"
STEPS = 120
CALLER = b"caller"


@dataclass(eq=False)
class Worker:
    topic: str
    consumer: str
    node: str
    max: int
    answers: Answers
    client: Client | None = None
    settled: int = 0  # how many of its jobs it has settled

    def jobs(self) -> list[dict[str, Any]]:
        frames = self.client.frames if self.client is not None else []
        return [frame.data for frame in frames if frame.event in ("job", "record")]


class Walk:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.town = Town(shards=2, fronts=2)
        self.is_up = [True, True]
        self.written = dict.fromkeys([*QUEUES, "t"], 0)
        self.done: dict[str, set[int]] = {name: set() for name in self.written}
        self.workers: list[Worker] = []
        for name, config in QUEUES.items():
            self.town.shard_for(name).put(name, type="queue", **config)
        self.town.shard_for("t").put("t")
        self.call("t", wire.PUT_CONSUMER, {}, CONSUMER)

    def run(self) -> None:
        moves = {
            self.write: 20,
            self.open: 8,
            self.begin: 10,
            self.fill: 4,
            self.drain: 6,
            self.leave: 5,
            self.settle: 20,
            self.kill_or_start: 2,
            self.town.carry_up: 23,
            self.town.carry_down: 20,
            self.wait: 6,
        }
        for move in self.rng.choices(list(moves), list(moves.values()), k=STEPS):
            move()
            self.check()

    def shard_of(self, topic: str) -> int:
        return self.town.front.streams.fanout.shard_of(topic)

    def call(self, topic: str, op: int, body: Any, consumer: str = "") -> dict[str, Any]:
        args = wire.encode_args(wire.Args(consumer=consumer)) if consumer else b""
        reply = self.town.shard_for(topic).ask(op, topic, body, args=args, peer=CALLER)
        assert reply is not None and reply.status in (200, 201), reply
        answer: dict[str, Any] = json.loads(bytes(reply.body))
        return answer

    # -- steps ---------------------------------------------------------------------------------------------

    def write(self) -> None:
        name = self.rng.choice(list(self.written))
        if self.is_up[self.shard_of(name)]:
            count = self.rng.randint(1, 5)
            self.town.write(count, name)
            self.written[name] += count

    def open(self, name: str = "", most: int = 0) -> None:
        front: Front = self.rng.choice(self.town.fronts)
        name = name or self.rng.choice(list(self.written))
        consumer = "" if name in QUEUES else CONSUMER
        most = most or self.rng.choice((1, 2, 10))
        node = f"n{len(self.workers)}"
        lease_ms = self.rng.choice((200, 5000))
        query = f"node={node}&max={most}&lease_ms={lease_ms}"
        answers = front.work(name, query, consumer=consumer)
        self.workers.append(Worker(name, consumer, node, most, answers))

    def begin(self) -> None:
        """The heads of some streams are written; a client may have disconnected by then."""
        for worker in self.answered():
            if self.rng.random() < 0.1:
                worker.client = Client(self.town.soon)
                worker.client.stream = worker.answers[0].stream
                worker.client.leave()
            elif self.rng.random() < 0.7:
                worker.client = worker.answers.begin()

    def answered(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.client is None and worker.answers]

    def living(self) -> list[Worker]:
        return [
            worker for worker in self.workers if worker.client is not None and not worker.client.is_closed
        ]

    def some_client(self) -> Client | None:
        living = self.living()
        return self.rng.choice(living).client if living else None

    def fill(self) -> None:
        if client := self.some_client():
            client.is_full = True

    def drain(self) -> None:
        if client := self.some_client():
            client.drain()

    def leave(self) -> None:
        waiting = [worker for worker in self.workers if worker.client is None and not worker.answers]
        if waiting and self.rng.random() < 0.3:
            self.rng.choice(waiting).answers.request.release()
        elif client := self.some_client():
            client.leave()

    def settle(self) -> None:
        candidates = [worker for worker in self.living() if len(worker.jobs()) > worker.settled]
        if candidates:
            worker = self.rng.choice(candidates)
            if self.is_up[self.shard_of(worker.topic)]:
                self.settle_next(worker, self.rng.choice((wire.ACK, wire.ACK, wire.ACK, wire.NACK)))

    def settle_next(self, worker: Worker, op: int) -> None:
        job = worker.jobs()[worker.settled]
        worker.settled += 1
        body = {"node": worker.node, "seqs": [job["$seq"]], "lease_ids": [job["lease_id"]]}
        answer = self.call(worker.topic, op, body, worker.consumer)
        if answer.get("acked"):
            assert job["$seq"] not in self.done[worker.topic], "done twice"
            self.done[worker.topic].add(job["$seq"])

    def kill_or_start(self) -> None:
        shard = self.rng.randrange(2)
        if self.is_up[shard]:
            self.town.kill(shard)
        else:
            self.town.start(shard)
        self.is_up[shard] = not self.is_up[shard]

    def wait(self) -> None:
        self.town.advance(self.rng.choice((1000, 60_000, 300_000)))

    # -- checks --------------------------------------------------------------------------------------------

    def check(self) -> None:
        for rig in filter(None, self.town.rigs):
            desk, shard = rig.core.jobs, rig.core.engine.shard
            for stream in desk._streams.values():
                log = shard.state.published[stream.topic]
                held = shard.leases.leases_of(log, stream.options.consumer, stream.connection)
                assert held <= stream.options.max
                assert len(stream.unacked) <= 2

    def finish(self) -> None:
        while not all(self.is_up):
            self.kill_or_start()
        for worker in self.workers:
            if worker.client is not None and not worker.client.is_closed:
                worker.client.drain()
        self.town.advance(1_000_000)
        for name in self.written:
            self.open(name, 1000)
        for _ in range(60):
            self.town.advance(300_000)
            for worker in self.answered():
                worker.client = worker.answers.begin()
            self.town.rest()
            for worker in self.living():
                while len(worker.jobs()) > worker.settled:
                    self.settle_next(worker, wire.ACK)
            if all(len(self.done[name]) == self.written[name] for name in self.written):
                break
        for name, count in self.written.items():
            assert self.done[name] == set(range(1, count + 1)), name

    def end(self) -> None:
        for worker in self.workers:
            if worker.client is not None:
                worker.client.leave()
            elif worker.answers:
                stream = worker.answers[0].stream
                assert isinstance(stream, JobEventStream)
                stream.closed()
            else:
                worker.answers.request.release()
        self.town.advance(1_000_000)
        for front in self.town.fronts:
            assert (front.streams.count, front.streams._jobs, front.streams.stalled) == (0, {}, {})
        for rig in filter(None, self.town.rigs):
            desk = rig.core.jobs
            assert (len(desk), desk._by_connection, desk._by_topic) == (0, {}, {})
            assert (desk._per_front, desk._unacked_bytes, desk._to_refill) == ({}, {}, {})
            for log in rig.core.engine.shard.state.published.values():
                for consumer in log.consumers.all() if log.consumers is not None else []:
                    assert (consumer.waiters, consumer.connections, consumer.streams) == ({}, {}, 0)


@pytest.mark.parametrize("seed", length.seeds(short=3, long=60))
def test_walks(seed: int) -> None:
    walk = Walk(seed)
    walk.run()
    walk.finish()
    walk.end()
