"""Goal: each job that is given up ends in its dead letter topic once, whichever worker is killed.

Method: queues whose dead letter topics are on the other shard and on their own. Clients ack every third job and give up
the others, while the workers of queue and target are killed in turn. In the end each job must be where its last answer says.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from tests.crash.load import PAUSE_S, read_all, topics_on
from tests.crash.processes import kill
from tests.support.faults import fault
from tests.support.length import pick
from tests.support.server import Reply, Server, until

pytestmark = pytest.mark.crash

JOBS = pick(short=600, long=2400)
AT_ONCE = 20
KILLS = pick(short=4, long=12)
# Queue → dead letter topic: from shard to shard in both directions, and within one shard.
PLACES = dict(
    zip(
        [*topics_on(1, 2, 2, "queue"), *topics_on(0, 2, 1, "queue")],
        [*topics_on(0, 2, 1, "dead"), *topics_on(1, 2, 2, "dead")],
    )
)


def is_acked(number: int) -> bool:
    return number % 3 == 0


class Client(threading.Thread):
    """Works on one queue until it is empty. While a shard is down it retries."""

    def __init__(self, server: Server, queue: str) -> None:
        super().__init__(name=queue, daemon=True)
        self.server, self.queue = server, queue
        self.settled = 0
        self.stopping = threading.Event()
        self.surprises: list[object] = []

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self._work()
        except Exception as error:
            self.surprises.append(repr(error))

    def _work(self) -> None:
        body = {"node": "client", "max": AT_ONCE, "lease_ms": 1000, "wait_ms": 100}
        jobs = self._ask("claim", body).get("claimed", [])
        done = [job["$seq"] for job in jobs if is_acked(job["data"])]
        dead = [job["$seq"] for job in jobs if not is_acked(job["data"])]
        if done:
            self.settled += self._ask("ack", {"node": "client", "seqs": done}).get("acked", 0)
        if dead:
            body = {"node": "client", "seqs": dead, "kind": "dead", "reason": "in vain"}
            self.settled += self._ask("nack", body).get("nacked", 0)

    def _ask(self, call: str, body: dict[str, object]) -> dict[str, object]:
        reply = self.server.post(f"/v0/topics/{self.queue}/{call}", body)
        if reply.status == 503:
            self.stopping.wait(PAUSE_S)
            return {}
        assert reply.status == 200, (call, reply)
        return reply.json


def fill(server: Server) -> None:
    for number, (queue, target) in enumerate(PLACES.items()):
        config = {
            "type": "queue",
            "durability": ("fsync", "disk")[number % 2],
            "dead_letter": target,
            "max_deliveries": 1000,
        }
        assert server.put(f"/v0/topics/{queue}", config).status == 201
        assert server.write(queue, *range(JOBS)).status == 200


def count(server: Server, topic: str) -> int | None:
    reply: Reply = server.get(f"/v0/topics/{topic}")
    return reply.json["count"] if reply.status == 200 else None


@fault(
    "worker",
    "workers of a queue and of its dead letter topic are killed (-9) in turn while jobs are given up",
    "each job ends in one place; dead letters arrive later",
)
def test_each_job_ends_in_one_place(start_server: Callable[..., Server]) -> None:
    server = start_server()
    fill(server)
    clients = [Client(server, queue) for queue in PLACES]
    for client in clients:
        client.start()
    for i in range(KILLS):
        target = (i + 1) * len(PLACES) * JOBS // (KILLS + 2)
        until(lambda target=target: sum(client.settled for client in clients) >= target, 120)
        kill(server.pid(f"shard {i % 2}"))
        server.wait_ready()
    until(lambda: all(count(server, queue) == 0 for queue in PLACES), 120)
    for client in clients:
        client.stopping.set()
    for client in clients:
        client.join(60)
        assert not client.surprises
    for target in PLACES.values():
        found = Counter(number for _, number in read_all(server, target))
        assert found == Counter(number for number in range(JOBS) if not is_acked(number)), target
