"""Goal: workers are killed (-9) while jobs are written, claimed and acked: an acked job is never delivered again, every other one is.

Method: clients of queues and of consumers on two shards record the server's answers, while its workers are killed in turn.
At the end the remaining jobs are finished, and the records are compared.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.crash.load import topics_on
from tests.crash.processes import kill
from tests.support.contract import Json, ok
from tests.support.faults import fault
from tests.support.length import pick
from tests.support.server import Server, until

pytestmark = pytest.mark.crash

LEASE_MS = 700
KILLS = pick(short=2, long=6)
ACKS_BETWEEN = 100
PAUSE_S = 0.005


@dataclass(frozen=True)
class WorkQueue:
    """A queue, or a log with a consumer; `claim` and `ack` are their paths."""

    topic: str
    durability: str
    leases_durable: bool
    consumer: bool

    @property
    def claim(self) -> str:
        return "/consumers/c/fetch" if self.consumer else "/claim"

    @property
    def ack(self) -> str:
        return "/consumers/c/ack" if self.consumer else "/ack"

    def make(self, server: Server) -> None:
        config: Json = {"durability": self.durability}
        if not self.consumer:
            config |= {"type": "queue", "lease_ms": LEASE_MS, "leases_durable": self.leases_durable}
        ok(server.put(f"/v0/topics/{self.topic}", config), 201)
        if self.consumer:
            ok(server.put(f"/v0/topics/{self.topic}/consumers/c", {"ack_wait_ms": LEASE_MS}), 201)

    def post(self, server: Server, sub: str, **body: Any) -> Json:
        return ok(server.post(f"/v0/topics/{self.topic}{sub}", {"node": "last", **body}))

    def ready_and_leased(self, server: Server) -> tuple[int, int]:
        """The numbers of ready and of leased jobs."""
        if self.consumer:
            state = ok(server.get(f"/v0/topics/{self.topic}/consumers/c"))
            return state["lag_records"] + state["ack_pending"] - state["in_flight"], state["in_flight"]
        queue = ok(server.get(f"/v0/topics/{self.topic}"))["queue"]
        return queue["ready"], queue["in_flight"]


QUEUES = [
    WorkQueue(topics_on(shard, 2, 3, "q")[i], durability, leases_durable, consumer)
    for shard in (0, 1)
    for i, (durability, leases_durable, consumer) in enumerate(
        [("fsync", False, False), ("disk", True, False), ("fsync", True, True)]
    )
]


@dataclass
class Record:
    """The answers that one queue's clients got. Jobs are numbers; each is sent with a key until it is acknowledged."""

    produced: set[int] = field(default_factory=set)
    acked: set[int] = field(default_factory=set)  # the ack was answered
    unknown: set[int] = field(default_factory=set)  # an ack without an answer
    after_ack: list[int] = field(
        default_factory=list
    )  # delivered after the answer to the ack: must stay empty
    surprises: list[Any] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Client(threading.Thread):
    """One client, which connects again whenever a server process dies."""

    def __init__(self, server: Server, queue: WorkQueue, record: Record, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.server, self.queue, self.record = server, queue, record
        self.stopping = threading.Event()
        self._connection: http.client.HTTPConnection | None = None

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.step()
        except Exception as error:
            self.record.surprises.append(repr(error))

    def step(self) -> None:
        raise NotImplementedError

    def post(self, sub: str, body: Json) -> Json | None:
        """The answer, or None if the shard was unavailable or the outcome is unknown."""
        status, answer = self.send(sub, body)
        if status in (200, 201):
            return answer
        if (status, answer["error"]["code"]) != (503, "not_ready"):
            self.record.surprises.append((sub, status, answer))
        self.stopping.wait(PAUSE_S)
        return None

    def send(self, sub: str, body: Json) -> tuple[int, Json]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self.server.host, self.server.port, timeout=60)
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", f"/v0/topics/{self.queue.topic}{sub}", json.dumps(body), headers)
        response = self._connection.getresponse()
        return response.status, json.loads(response.read())


class Producer(Client):
    number = 0

    def step(self) -> None:
        numbers = list(range(self.number, self.number + 3))
        body = {"records": [{"data": number} for number in numbers], "idempotency_key": str(numbers[0])}
        if self.post("", body) is not None:
            self.record.produced.update(numbers)
            self.number += 3
            self.stopping.wait(PAUSE_S)


class Worker(Client):
    def step(self) -> None:
        answer = self.post(self.queue.claim, {"node": self.name, "max": 4, "wait_ms": 100})
        if not answer or not answer["claimed"]:
            return
        jobs = {job["$seq"]: job for job in answer["claimed"]}
        with self.record.lock:
            self.record.after_ack += [
                job["data"] for job in jobs.values() if job["data"] in self.record.acked
            ]
        seqs = list(jobs)
        acked = self.post(
            self.queue.ack,
            {"node": self.name, "seqs": seqs, "lease_ids": [jobs[seq]["lease_id"] for seq in seqs]},
        )
        with self.record.lock:
            if acked is None:
                self.record.unknown.update(job["data"] for job in jobs.values())
            else:
                done = [jobs[seq]["data"] for seq in seqs if seq not in acked["skipped"]]
                self.record.acked.update(done)


@contextmanager
def at_work(server: Server) -> Iterator[dict[WorkQueue, Record]]:
    records = {queue: Record() for queue in QUEUES}
    clients: list[Client] = []
    for queue, record in records.items():
        queue.make(server)
        clients.append(Producer(server, queue, record, f"{queue.topic}-producer"))
        clients += [Worker(server, queue, record, f"{queue.topic}-{i}") for i in range(2)]
    for client in clients:
        client.start()
    try:
        yield records
    finally:
        for client in clients:
            client.stopping.set()
        for client in clients:
            client.join(90)
            assert not client.is_alive(), f"{client.name} still waits for an answer"


def acks(records: dict[WorkQueue, Record]) -> int:
    return sum(len(record.acked) for record in records.values())


def finish(server: Server, queue: WorkQueue) -> list[int]:
    """Finish the remaining jobs; returns their data."""
    done: list[int] = []

    def rest() -> bool:
        jobs = queue.post(server, queue.claim, max=1000)["claimed"]
        if jobs:
            seqs = [job["$seq"] for job in jobs]
            assert queue.post(server, queue.ack, seqs=seqs)["acked"] == len(seqs)
            done.extend(job["data"] for job in jobs)
        return not jobs and queue.ready_and_leased(server) == (0, 0)

    until(rest)
    return done


def check(queue: WorkQueue, record: Record, left: list[int]) -> None:
    assert not record.surprises, record.surprises[:3]
    assert not record.after_ack, f"{queue}: delivered after its ack: {record.after_ack[:5]}"
    assert len(left) == len(set(left)), "a job is there twice"
    assert not record.acked & set(left), f"{queue}: an acked job is there again"
    lost = record.produced - record.acked - record.unknown - set(left)
    assert not lost, f"{queue}: neither acked nor there: {sorted(lost)[:10]}"


@fault(
    "worker",
    "killed (-9) while jobs are written, claimed and acked",
    "an acked job is never delivered again; the others are, once their lease has expired or is forgotten",
)
def test_workers_die_under_producers_and_consumers(start_server: Callable[..., Server]) -> None:
    server = start_server()
    with at_work(server) as records:
        for death in range(KILLS):
            target = acks(records) + ACKS_BETWEEN
            until(lambda target=target: acks(records) >= target)
            kill(server.pid(f"shard {death % 2}"))
            server.wait_ready()
        target = acks(records) + ACKS_BETWEEN
        until(lambda: acks(records) >= target)
    for queue, record in records.items():
        check(queue, record, finish(server, queue))
        if not queue.consumer:
            assert ok(server.get(f"/v0/topics/{queue.topic}"))["count"] == 0


@fault(
    "supervisor",
    "killed (-9) while jobs are leased",
    "acked jobs stay acked over the restart; durable leases are kept, others are forgotten",
)
def test_leases_over_the_death_of_everything(start_server: Callable[..., Server]) -> None:
    server = start_server()
    with at_work(server) as records:
        until(lambda: acks(records) >= 2 * ACKS_BETWEEN)
    held = {queue: hold(server, queue) for queue in QUEUES}
    server.kill()
    server.start()
    for queue, record in records.items():
        kept = 1 if queue.leases_durable else 0
        assert queue.ready_and_leased(server) == (1 - kept, kept), queue
        seq, left = held[queue]
        assert queue.post(server, queue.ack, node="holder", seqs=[seq])["acked"] == kept
        assert finish(server, queue) == [-1] * (1 - kept)
        check(queue, record, left)


def hold(server: Server, queue: WorkQueue) -> tuple[int, list[int]]:
    """Finish all jobs, then lease one more for an hour: its seq, and the data of the finished ones."""
    left = finish(server, queue)
    seq: int = ok(server.write(queue.topic, -1))["first_seq"]
    claimed = queue.post(server, queue.claim, node="holder", lease_ms=3_600_000)["claimed"]
    assert [job["$seq"] for job in claimed] == [seq]
    return seq, left
