"""Goal: whatever process dies under streams of jobs, no job is lost, and leases of dead clients are delivered again.

Method: real processes are killed. Workers behave like a browser: they retry until their stream opens.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from http.client import HTTPException

import pytest

from tests.integration.test_work_stream import ack, claim, jobs_of, work
from tests.support.contract import Json, fresh, ok
from tests.support.faults import fault
from tests.support.server import Server, readable, running, until
from tests.support.sse_client import EventStream, NotOpened, Protocol
from topics.engine.core.placement import shard_of

SHARDS = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("work"), shards=SHARDS) as made:
        yield made


def queue_on(server: Server, shard: int, **config: object) -> str:
    name = next(name for name in (fresh("q") for _ in range(1000)) if shard_of(name, SHARDS) == shard)
    ok(server.put(f"/v0/topics/{name}", {"type": "queue", **config}), 201)
    return name


def killed(server: Server, name: str) -> None:
    before = server.pid(name)
    os.kill(before, signal.SIGKILL)
    until(lambda: server.children().get(name) not in (None, before))
    server.wait_ready()


@fault("front", "a front with streams of jobs is killed", "jobs of its clients are delivered again at once")
@pytest.mark.parametrize("shard", [0, 1])
def test_the_front_dies(server: Server, shard: int) -> None:
    queue = queue_on(server, shard)
    ok(server.write(queue, "a", "b"))
    stream = work(server, queue, "node=n&max=2&lease_ms=86400000")
    jobs_of(stream, 2)
    killed(server, "front 0")
    assert stream.rest() == []
    found: dict[int, int] = {}

    def are_back() -> bool:
        found.update({job["$seq"]: job["deliveries"] for job in claim(server, queue)})
        return len(found) == 2

    until(are_back)
    assert found == {1: 2, 2: 2}


@fault(
    "worker",
    "the worker of a queue is killed under streams of jobs",
    "an error frame not_ready, then the stream ends; streams of other shards continue",
)
def test_the_worker_dies(server: Server) -> None:
    hit, other = queue_on(server, 1), queue_on(server, 0)
    for name in (hit, other):
        ok(server.write(name, 1))
    stream, goes_on = work(server, hit), work(server, other)
    jobs_of(stream, 1)
    (kept,) = jobs_of(goes_on, 1)
    os.kill(server.pid("shard 1"), signal.SIGKILL)
    (last,) = stream.rest()
    assert last.data["code"] == "not_ready"
    again = work(server, hit)  # the request waits for the shard
    assert jobs_of(again, 1)[0]["$seq"] == 1
    ack(server, other, kept)
    ok(server.write(other, 2))
    assert jobs_of(goes_on, 1)[0]["data"] == 2
    again.close()
    goes_on.close()


def test_durable_leases_are_kept_over_a_restart(server: Server) -> None:
    """The stream ends with the worker; the durable lease expires at its own deadline."""
    queue = queue_on(server, 1, leases_durable=True)
    ok(server.write(queue, 1))
    stream = work(server, queue, "node=n&lease_ms=3000")
    (job,) = jobs_of(stream, 1)
    killed(server, "shard 1")
    again = work(server, queue)
    assert jobs_of(again, 1)[0]["deliveries"] == 2
    assert ack(server, queue, job)["skipped"] == [1]
    again.close()
    stream.close()


class Worker(threading.Thread):
    """Gets jobs over streams and acks them; sometimes it disconnects while it holds jobs."""

    def __init__(self, server: Server, queue: str, number: int) -> None:
        super().__init__(daemon=True)
        self.server, self.queue, self.node = server, queue, f"worker-{number}"
        self.rng = random.Random(number)
        self.seen: set[int] = set()
        self.acked: list[int] = []
        self.stopped = False
        self.failed: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopped:
                try:
                    self._session()
                except (OSError, HTTPException, NotOpened):
                    pass  # opens the stream again
        except BaseException as error:
            self.failed = error

    def _session(self) -> None:
        protocol: Protocol = self.rng.choice(("http1", "h2c"))
        stream = work(self.server, self.queue, f"node={self.node}&max=4&lease_ms=60000", protocol)
        try:
            for _ in range(self.rng.randint(1, 30)):
                job = self._next(stream)
                if job is None:
                    return
                self.seen.add(job["data"])
                body = {"node": self.node, "seqs": [job["$seq"]], "lease_ids": [job["lease_id"]]}
                answer = self.server.post(f"/v0/topics/{self.queue}/ack", body)
                if answer.status == 200 and answer.json["acked"]:
                    self.acked.append(job["data"])
        finally:
            stream.close()

    def _next(self, stream: EventStream) -> Json | None:
        while not self.stopped:
            if stream.waiting or stream.ended or readable(stream.socket, 0.1):
                frame = stream.read()
                if frame is None or frame.event == "error":
                    return None
                if frame.event == "job":
                    job: Json = frame.data
                    return job
        return None


def test_every_job_is_done_whatever_dies(server: Server) -> None:
    total = 400
    queue = queue_on(server, 1)
    workers = [Worker(server, queue, number) for number in range(8)]
    for worker in workers:
        worker.start()
    for start in range(0, total, 50):
        ok(server.write(queue, *range(start, start + 50)))
        if start == 100:
            killed(server, "front 0")
        elif start == 200:
            killed(server, "shard 1")
    until(lambda: counts(server, queue) == {"ready": 0, "in_flight": 0, "dead_lettered": 0}, 120, 0.1)
    for worker in workers:
        worker.stopped = True
    for worker in workers:
        worker.join(120)
        assert not worker.is_alive()
        assert worker.failed is None, worker.failed
    assert set().union(*(worker.seen for worker in workers)) == set(range(total))
    # No job is acked twice; the answers to a few acks may have been lost with a process.
    acked = [job for worker in workers for job in worker.acked]
    assert len(acked) == len(set(acked))
    assert len(acked) >= total - 2 * len(workers)


def counts(server: Server, queue: str) -> Json:
    found: Json = ok(server.get(f"/v0/topics/{queue}"))["queue"]
    return found
