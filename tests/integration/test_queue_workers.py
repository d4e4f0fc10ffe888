"""Goal: many workers share one queue, some stop while they hold jobs, and every job is finished exactly once.

Method: fifty threads claim and ack over HTTP; every few jobs one of them abandons its jobs and continues as
a new worker. Acks are counted in the test: no job twice, none missing, none leased to two workers at a time.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.contract import Json, ok
from tests.support.length import pick
from tests.support.queue_client import counts, make_queue
from tests.support.server import Server, until

WORKERS = 50
JOBS = pick(short=800, long=4000)
LEASE_MS = 1500
DEATHS = pick(short=16, long=80)


@dataclass
class SharedRecord:
    """Shared record of all workers: acks, and which worker holds which lease."""

    acked: Counter[int] = field(default_factory=Counter)
    held: dict[int, tuple[str, Json]] = field(default_factory=dict)  # by seq: the node and its claimed job
    deliveries: dict[int, list[int]] = field(default_factory=dict)  # by seq: the delivery counts
    faults: list[Any] = field(default_factory=list)
    deaths: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def claimed_job(self, node: str, job: Json, asked_ms: int) -> None:
        seq = job["$seq"]
        with self.lock:
            self.deliveries.setdefault(seq, []).append(job["deliveries"])
            name, held = self.held.get(seq, ("", {"deliveries": 0, "deadline": 0}))
            if held["deliveries"] > job["deliveries"]:
                return  # the lease had expired before this thread ran again
            # The claim was executed some time after it was asked: leases certainly overlap only if the other one ends after
            # this answer arrived.
            if held["deadline"] > time.time() * 1000 + 50:
                self.faults.append(("two holders", seq, name, held, node, asked_ms))
            self.held[seq] = (node, job)

    def finished(self, seqs: list[int]) -> None:
        with self.lock:
            for seq in seqs:
                self.acked[seq] += 1
                self.held.pop(seq, None)

    def should_die(self) -> bool:
        with self.lock:
            self.deaths += 1
            return self.deaths <= DEATHS


class Worker(threading.Thread):
    def __init__(self, server: Server, topic: str, record: SharedRecord, number: int) -> None:
        super().__init__(name=f"w{number}", daemon=True)
        self.server, self.topic, self.record = server, topic, record
        self.rng = random.Random(number)
        self.stopping = threading.Event()
        self.lives = 0

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.run_one_life()
        except Exception as error:
            self.record.faults.append(repr(error))

    def run_one_life(self) -> None:
        """The life of one worker, under its own node name."""
        self.lives += 1
        node = f"{self.name}.{self.lives}"
        connection = http.client.HTTPConnection(self.server.host, self.server.port, timeout=60)
        try:
            while not self.stopping.is_set():
                asked_ms = int(time.time() * 1000)
                claimed = self.post(connection, "claim", {"node": node, "max": 8, "wait_ms": 200})["claimed"]
                for job in claimed:
                    self.record.claimed_job(node, job, asked_ms)
                if claimed and self.rng.random() < 0.1 and self.record.should_die():
                    return
                self.settle(connection, node, claimed)
        finally:
            connection.close()

    def settle(self, connection: http.client.HTTPConnection, node: str, jobs: list[Json]) -> None:
        """Ack most jobs and nack some."""
        good = [job for job in jobs if self.rng.random() > 0.05]
        bad = [job for job in jobs if job not in good]
        for verb, some in (("nack", bad), ("ack", good)):
            if not some:
                continue
            seqs = [job["$seq"] for job in some]
            body = {"node": node, "seqs": seqs, "lease_ids": [job["lease_id"] for job in some]}
            if verb == "nack":
                with self.record.lock:
                    for seq in seqs:
                        self.record.held.pop(seq, None)
            answer = self.post(connection, verb, body)
            if verb == "ack":
                self.record.finished([seq for seq in seqs if seq not in answer["skipped"]])

    def post(self, connection: http.client.HTTPConnection, verb: str, body: Json) -> Json:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"/v0/topics/{self.topic}/{verb}", json.dumps(body), headers)
        response = connection.getresponse()
        answer: Json = json.loads(response.read())
        assert response.status == 200, answer
        return answer


@pytest.mark.parametrize(("durability", "jitter_ms"), [("fsync", 0), ("disk", 20)])
def test_fifty_workers_with_deaths_finish_every_job(
    start_server: Callable[..., Server], durability: str, jitter_ms: int
) -> None:
    server = start_server()
    make_queue(server, "jobs", durability=durability, lease_ms=LEASE_MS, claim_jitter_ms=jitter_ms)
    record = SharedRecord()
    workers = [Worker(server, "jobs", record, number) for number in range(WORKERS)]
    for worker in workers:
        worker.start()
    for first in range(0, JOBS, 100):
        ok(server.write("jobs", *range(first, first + 100)))
    until(lambda: record.faults or len(record.acked) == JOBS, 120)
    for worker in workers:
        worker.stopping.set()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert not record.faults, record.faults[:5]
    assert record.acked == Counter(range(1, JOBS + 1)), "each job is acked exactly once"
    assert counts(server, "jobs") == {"ready": 0, "in_flight": 0, "dead_lettered": 0}
    assert record.deaths >= DEATHS / 4, "too few workers died"
    wrong = {
        seq: found for seq, found in record.deliveries.items() if sorted(found) != [*range(1, len(found) + 1)]
    }
    assert not wrong, "delivery counts are wrong"
    again = sum(len(found) - 1 for found in record.deliveries.values())
    print(f"{again} redeliveries, {min(record.deaths, DEATHS)} deaths")


def test_coalesced_claims_keep_all_workers_busy(start_server: Callable[..., Server]) -> None:
    """Twenty workers that claim everything: each window divides the jobs about evenly."""
    server = start_server()
    make_queue(server, "jobs", claim_jitter_ms=250, lease_ms=60_000)
    shares: Counter[str] = Counter()
    lock = threading.Lock()

    def work(node: str) -> None:
        while True:
            body = {"node": node, "max": 1000, "wait_ms": 2000}
            claimed = ok(server.post("/v0/topics/jobs/claim", body))["claimed"]
            if not claimed:
                return
            with lock:
                shares[node] += len(claimed)
            ok(server.post("/v0/topics/jobs/ack", {"node": node, "seqs": [job["$seq"] for job in claimed]}))

    threads = [threading.Thread(target=work, args=(f"w{i}",)) for i in range(20)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        ok(server.write("jobs", *range(400)))
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert sum(shares.values()) == 2000
    assert len(shares) == 20, "a worker got no job"
    assert max(shares.values()) <= 2000 / 20 * 4, shares
