"""Clients of a simulated server that claim jobs from queues and records from named consumers, and settle them or not.

Some share a node's name, so that only the lease id tells their jobs apart. They settle late, twice, or jobs of
others; they disconnect; they repeat requests without an answer. When all is quiet, `take_all` waits until every lease
has ended, and takes everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.sim.actors import RETRY_AFTER_US, Actor, NextRequest, is_stopping, json_request
from tests.sim.world import MS
from tests.support.history import Op
from topics.protocols.http.exchange import Request

if TYPE_CHECKING:
    from tests.sim.clients import ClientPool, FinalReader

LEASE_MAX_MS, DELAY_MAX_MS = 4000, 2000  # the longest that is requested
OVER_US = (LEASE_MAX_MS + DELAY_MAX_MS + 1000) * MS
MOVED_US = 10_000 * MS  # until dead letters have arrived, including retries

LETTERS = "letters"  # the dead letter topic

# The possible configs of each queue; it begins with the first.
QUEUES: dict[str, list[dict[str, Any]]] = {
    "jobs-fsync": [
        {"type": "queue", "durability": "fsync", "lease_ms": 300},
        {"type": "queue", "durability": "fsync", "lease_ms": 1500},
    ],
    "jobs-kept": [{"type": "queue", "durability": "fsync", "lease_ms": 400, "leases_durable": True}],
    "jobs-disk": [{"type": "queue", "lease_ms": 200}, {"type": "queue", "lease_ms": 200, "cap_records": 9}],
    "jobs-disk-kept": [{"type": "queue", "lease_ms": 250, "leases_durable": True}],
    "jobs-shared": [
        {"type": "queue", "durability": "fsync", "lease_ms": 600, "claim_jitter_ms": 15},
        {
            "type": "queue",
            "durability": "fsync",
            "lease_ms": 600,
            "claim_jitter_ms": 15,
            "leases_durable": True,
        },
    ],
    "jobs-dead": [
        {
            "type": "queue",
            "durability": "fsync",
            "lease_ms": 150,
            "max_deliveries": 2,
            "dead_letter": LETTERS,
        },
    ],
    "jobs-dead-disk": [
        {"type": "queue", "lease_ms": 150, "max_deliveries": 1, "dead_letter": LETTERS},
        {
            "type": "queue",
            "lease_ms": 150,
            "max_deliveries": 3,
            "dead_letter": LETTERS,
            "leases_durable": True,
        },
    ],
    "jobs-ttl": [{"type": "queue", "durability": "fsync", "lease_ms": 200, "ttl_ms": 700}],
    "jobs-memory": [{"type": "queue", "durability": "memory", "lease_ms": 200}],
}
# The possible configs of each consumer.
CONSUMERS: dict[str, list[dict[str, Any]]] = {
    "every": [{"ack_wait_ms": 300}, {"ack_wait_ms": 900}],
    "tagged": [{"ack_wait_ms": 300, "filter": "a.*"}],
    "upto": [{"ack_wait_ms": 500, "ack": "all"}],
    "fresh": [{"ack_wait_ms": 300, "deliver": "new"}],
    "narrow": [{"ack_wait_ms": 200, "max_ack_pending": 4}],
    "mortal": [{"ack_wait_ms": 150, "max_deliver": 2, "dead_letter": LETTERS}],
    "hopeless": [{"ack_wait_ms": 150, "max_deliver": 2}],
}
CONSUMED = ("fsync", "fsync-too", "fsync-capped", "disk", "disk-too", "disk-tags", "changing", "jobs-fsync")
KINDS = ("claim", "ack", "nack", "extend", "put_consumer", "consumer")


@dataclass(frozen=True, slots=True)
class WorkSource:
    """A source of work: a queue, or a named consumer of a topic."""

    topic: str
    consumer: str = ""

    @property
    def of(self) -> dict[str, Any]:
        return {"consumer": self.consumer} if self.consumer else {}

    @property
    def is_mortal(self) -> bool:
        """Whether records that are delivered too often go to the dead letters."""
        config = CONSUMERS[self.consumer] if self.consumer else QUEUES[self.topic]
        return "dead_letter" in config[0]


@dataclass(frozen=True, slots=True)
class HeldJob:
    source: WorkSource
    seq: int
    lease_id: str


class QueueWorker(Actor):
    """Claims, works, settles."""

    patience = 0.98

    def __init__(self, pool: ClientPool, name: str, node: str, sources: list[WorkSource]) -> None:
        super().__init__(pool, name, begins_within_us=8 * MS)
        self.node, self.sources = node, sources
        self.hands: list[HeldJob] = []
        self.past: list[HeldJob] = []

    def on_answer(self, op: Op) -> None:
        rng = self.rng
        if op.ok and op.kind == "claim":
            source = WorkSource(op.topic, op.request.get("consumer", ""))
            self.hands += [HeldJob(source, job["$seq"], job["lease_id"]) for job in op.answer["claimed"]]
            self.pool.server.counts["fetched" if source.consumer else "claimed"] += op.answer["count"]
            if op.answer["claimed"] and rng.random() < 0.1:
                self._await_end(source, op.answer["claimed"][0]["deadline"])
                return
        elif op.status == 404 and op.answer["error"]["code"] == "consumer_not_found":
            config = rng.choice(CONSUMERS[op.request["consumer"]])
            self._again = ("put_consumer", op.topic, {"consumer": op.request["consumer"], **config})
        elif op.status == 404 and op.topic in QUEUES:
            self._again = ("put", op.topic, QUEUES[op.topic][0])
        elif op.kind in ("ack", "nack") and not op.ok and not op.refused and rng.random() < 0.7:
            self._again = (op.kind, op.topic, op.request)
        self.world.after(self._pause_us(op), self.go)

    def _await_end(self, source: WorkSource, deadline: int) -> None:
        """Settle in the last millisecond of a lease."""
        clock = self.pool.server.machine.clock
        wait_us = (deadline - clock.wall_ms()) * MS - self.world.now_us % MS + self.rng.choice((0, 0, MS))
        self._again = ("claim", source.topic, {**source.of, "node": self.node, "max": 100})
        self.world.after(max(0, wait_us), self.go)

    def _pause_us(self, op: Op) -> int:
        rng, think = self.rng, self.pool.workload.think_us
        if rng.random() < 0.06:
            return rng.choice((110, 320, 700)) * MS  # some work takes longer than its lease
        if op.ok or self._again is not None:
            return rng.choice((0, think // 4, think))
        if is_stopping(op):
            return RETRY_AFTER_US
        return rng.choice((2, 10, 40)) * MS

    # -- the next request ------------------------------------------------------------------------------------

    def _next(self) -> NextRequest:
        rng = self.rng
        if self.hands and rng.random() < 0.65:
            return self._settle(self.hands)
        if self.past and rng.random() < 0.06:
            return self._settle(self.past)  # again, or too late
        source = rng.choice(self.sources)
        mood = rng.random()
        if source.consumer and mood < 0.1:
            config = rng.choice(CONSUMERS[source.consumer])
            return "put_consumer", source.topic, {**source.of, **config}
        if source.consumer and mood < 0.14:
            return "consumer", source.topic, {**source.of}
        return "claim", source.topic, self._claim(source)

    def _claim(self, source: WorkSource) -> dict[str, Any]:
        rng = self.rng
        request: dict[str, Any] = {**source.of, "node": self.node, "max": rng.choice((1, 1, 2, 5, 100))}
        if rng.random() < 0.6:
            request["lease_ms"] = rng.choice((100, 100, 250, 1000, LEASE_MAX_MS))
        if rng.random() < 0.4:
            request["wait_ms"] = rng.choice((20, 120, 400))
        return request

    def _settle(self, held: list[HeldJob]) -> NextRequest:
        rng = self.rng
        source = rng.choice(held).source
        mine = [one for one in held if one.source == source]
        chosen = rng.sample(mine, rng.randint(1, min(len(mine), 8)))
        kind = rng.choices(("ack", "nack", "extend"), (6, 3, 2))[0]
        request: dict[str, Any] = {**source.of, "node": self.node, "seqs": [one.seq for one in chosen]}
        if rng.random() < 0.6:
            request["lease_ids"] = [one.lease_id if rng.random() < 0.9 else "" for one in chosen]
        if kind == "extend":
            request["lease_ms"] = rng.choice((100, 300, LEASE_MAX_MS))
        elif kind == "nack":
            request["delay_ms"] = rng.choice((0, 0, 40, 300, DELAY_MAX_MS))
            request["kind"] = rng.choice(("retry", "retry", "release"))
            if source.is_mortal and rng.random() < 0.4:
                request["kind"], request["reason"] = "dead", "broken"
        if kind != "extend" or rng.random() < 0.1:
            self.hands = [one for one in self.hands if one not in chosen]
            self.past = [*self.past, *chosen][-20:]
        return kind, source.topic, request


# -- end of the run ------------------------------------------------------------------------------------------


def take_all(final_reader: FinalReader) -> None:
    """Wait until nothing is leased or delayed any more, note that, and take everything."""
    pool = final_reader.pool
    sources = sorted({source for worker in pool.workers for source in worker.sources}, key=repr)
    if not sources:
        return
    pool.world.run_for(OVER_US)
    pool.history.happened("over")
    for source in sources:
        state = final_reader.ask("state", source.topic, {})
        if not state.ok or (not source.consumer and state.answer["type"] != "queue"):
            continue
        final_reader.ask("diff", source.topic, {"from_seq": 0, "limit": 1000, "include_tags": True})
        if source.consumer and not final_reader.ask("consumer", source.topic, {**source.of}).ok:
            continue
        wish = {**source.of, "node": final_reader.name, "max": 1000, "lease_ms": 100}
        final_reader.ask("claim", source.topic, wish)
        final_reader.ask("state", source.topic, {})
    pool.world.run_for(MOVED_US)
    final_reader.ask("diff", LETTERS, {"from_seq": 0, "limit": 1000, "include_tags": True})
    _bury(final_reader, [source for source in sources if source.is_mortal])


def _bury(final_reader: FinalReader, sources: list[WorkSource]) -> None:
    """Claim what has had its last delivery, so that it is on its way to the dead letters when the next thing happens."""
    pool = final_reader.pool
    for source in sources:
        pool.world.run_for(150 * MS)
        final_reader.ask(
            "claim", source.topic, {**source.of, "node": final_reader.name, "max": 1000, "lease_ms": 100}
        )
    if sources:
        pool.world.run_for(pool.rng.choice((0, MS, 2 * MS, 4 * MS, 8 * MS)))


def work_sources(topics: list[str], names: list[str]) -> list[WorkSource]:
    """The queues among these topics, and these consumers of all that are consumed."""
    queues = [WorkSource(topic) for topic in topics if topic in QUEUES]
    return queues + [WorkSource(topic, name) for topic in topics if topic in CONSUMED for name in names]


# -- requests as values --------------------------------------------------------------------------------------

_METHODS = {"put_consumer": b"PUT", "consumer": b"GET"}


def make_call(kind: str, topic: str, request: dict[str, Any]) -> Request:
    """Of a queue without, of a named consumer with `consumer` in the request."""
    path, name = f"/v0/topics/{topic}", request.get("consumer")
    verb = "" if kind in _METHODS else f"/{'fetch' if name and kind == 'claim' else kind}"
    path += f"/consumers/{name}{verb}" if name else verb
    method = _METHODS.get(kind, b"POST")
    body = {key: value for key, value in request.items() if key != "consumer"}
    return json_request(method, path, body if method != b"GET" else None)
