"""Clients of a simulated server: each sends one random request at a time, and the history records the answers.

A client knows only what an HTTP client can know. Requests enter the shipped admission as `Request` values; the
behaviour of connections (breaking, being slow) is simulated here.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.sim import merge_jobs, sinks
from tests.sim import router_clients as routers
from tests.sim.actors import RETRY_AFTER_US, Actor, NextRequest, is_stopping
from tests.sim.exchanges import make_request, read_answer
from tests.sim.processes import SimFront, SimServer
from tests.sim.queue_workers import LETTERS, QUEUES, QueueWorker, WorkSource
from tests.sim.watchers import REST_US, Watcher
from tests.sim.world import MS, S
from tests.support.history import History, Op
from topics.protocols.http.exchange import Request, Response

SETTLE_US = 60 * S  # more than any link, stall, waiting claim or pair of syncs can delay a request

TAGS = ["a.1", "a.2", "a.3", "b", "b.1"]
NODES = ["n1", "n2"]
MATCHES = ["a.1", "b", "a.*", "b*", "*"]

# The possible configs of each topic; it begins with the first.
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "fsync": [{"durability": "fsync"}, {"durability": "fsync", "cap_records": 7}],
    "fsync-too": [{"durability": "fsync"}, {"durability": "fsync", "dedupe_node": False}],
    "fsync-capped": [{"durability": "fsync", "cap_records": 6}, {"durability": "fsync", "cap_bytes": 400}],
    "fsync-ttl": [
        {"durability": "fsync", "ttl_ms": 900},
        {"durability": "fsync", "ttl_ms": 200, "cap_records": 5},
    ],
    "disk": [{}, {"cap_records": 8}],
    "disk-too": [{}, {"dedupe_node": False}],
    "disk-ttl": [{"ttl_ms": 700, "cap_records": 9}, {"ttl_ms": 300}],
    "disk-tags": [{"cap_per_tag": 2}, {"cap_per_tag": 1, "cap_records": 5}],
    "reject": [
        {"durability": "fsync", "discard": "reject", "cap_records": 12},
        {"discard": "reject", "cap_bytes": 900},
    ],
    "memory": [{"durability": "memory"}, {"durability": "memory", "cap_records": 5}],
    "ephemeral": [{"durability": "ephemeral"}],
    "changing": [{"durability": "fsync"}, {"durability": "disk"}, {"durability": "fsync", "cap_records": 5}],
}
LOGS = list(CONFIGS)
CONFIGS |= QUEUES | {LETTERS: [{}]} | routers.FLOWING
OWN_TTL = ("fsync", "fsync-too", "disk", "disk-too")


def write_weights() -> dict[str, float]:
    return {
        "write": 50, "diff": 22, "poll": 4, "delete": 7, "put": 3, "state": 4, "list": 2, "last": 2, "tags": 1.5,
        "drop": 1.5, "skim": 4,
    }  # fmt: skip


@dataclass(slots=True)
class Workload:
    """What the clients of one run do, and how often."""

    weights: dict[str, float] = field(default_factory=write_weights)
    topics: list[str] = field(default_factory=lambda: list(CONFIGS))
    think_us: int = 3 * MS
    keyed: float = 0.5
    erase: float = 0.2
    huge: float = 0.004
    lines: float = 0.1
    frames: float = 0.15
    grouped: bool = False  # all watchers share one group
    routers: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # of these routers: most records are written there


class Requester(Protocol):
    """A sender of requests."""

    name: str
    patience: float  # how often it waits for its answer

    def on_answer(self, op: Op) -> None:
        """Called with the answer, or when there will be none."""


class ClientPool:
    """All clients of a run, and their history."""

    def __init__(self, server: SimServer, workload: Workload, clients: int, watchers: int = 0) -> None:
        self.server, self.world, self.rng = server, server.world, server.rng
        self.workload = workload
        self.history = History()
        self.heads: dict[str, int] = {}  # as far as any client knows
        self.times: dict[str, list[int]] = {}  # of records that were read last
        self.configured: set[str] = set()  # sources and dests of routers that were put
        self.routers: set[str] = set()  # existing ones, as far as any client knows
        self.serial = 0
        self.sent = 0
        self.stopped = False
        self.paused_until_us = 0
        self._open: dict[int, tuple[SimFront, Requester, Op]] = {}  # by the op's moment
        self._unsettled: list[Op] = []
        self.on_answer: Callable[[Op], None] = lambda op: None
        server.on_front_death = self._front_died
        self.clients = [Client(self, f"c{i}") for i in range(clients)]
        self.watchers = [Watcher(self, f"w{i}") for i in range(watchers)]
        self.workers: list[QueueWorker] = []
        self.sinks: list[sinks.Sink] = []
        self.mergers: list[merge_jobs.MergeJob | merge_jobs.SnapshotReader] = []

    def add_workers(self, workers: int, sources: list[WorkSource]) -> None:
        """Add clients that claim jobs."""
        for i in range(workers):
            self.workers.append(QueueWorker(self, f"k{i}", f"node-{i % 2}", sources))

    def add_sinks(self, producers: list[sinks.Producer], twins: list[bool]) -> None:
        """Add producers of transactions; a producer with a twin has two clients at work."""
        for producer, has_twin in zip(producers, twins, strict=True):
            for i in range(1 + has_twin):
                self.sinks.append(sinks.Sink(self, f"{producer.name}{'ab'[i]}", producer))

    def add_merges(self, jobs: int, readers: int, topics: list[str]) -> None:
        """Add jobs that merge cold segments of these topics, and readers of snapshots."""
        proposals = merge_jobs.Proposals()
        self.mergers += [merge_jobs.MergeJob(self, f"m{i}", topics, proposals) for i in range(jobs)]
        self.mergers += [merge_jobs.SnapshotReader(self, f"s{i}", topics) for i in range(readers)]

    @property
    def is_idle(self) -> bool:
        return not self._open

    def stop(self) -> None:
        """No client begins anything new."""
        self.stopped = True

    def settle(self) -> None:
        """Everything is at rest: unanswered requests will never be executed."""
        assert self.is_idle, "a client still waits"
        for op in self._unsettled:
            self.history.settled(op)
        self._unsettled = []

    def rest_watchers(self) -> None:
        """Let every watcher connect and catch up."""
        if self.watchers:
            for watcher in self.watchers:
                watcher.come_to_rest()
            self.world.run_until(
                lambda: all(watcher.is_at_rest for watcher in self.watchers),
                within_us=120 * S,
                what="every watcher is connected",
            )
            self.world.run_for(REST_US)
            self.history.happened("rest")

    # -- the network ---------------------------------------------------------------------------------------

    @property
    def has_front(self) -> bool:
        return any(front is not None and front.alive for front in self.server.fronts)

    def ask(self, client: Requester, kind: str, topic: str, request: dict[str, Any]) -> Op:
        op = self.history.sent(client.name, kind, topic, request)
        assert self.send(client, op, make_request(kind, topic, request))
        return op

    def send(self, client: Requester, op: Op, request: Request) -> bool:
        """Whether there was a front to send it to."""
        fronts = [front for front in self.server.fronts if front is not None and front.alive]
        if not fronts:
            return False
        front = self.rng.choice(fronts)
        self.sent += 1
        self._open[op.sent_at] = (front, client, op)
        self.world.after(self._net_us(), lambda: self._arrive(front, client, op, request))
        return True

    def _net_us(self) -> int:
        return self.rng.choice((30, 60, 200))

    def _arrive(self, front: SimFront, client: Requester, op: Op, request: Request) -> None:
        if op.sent_at not in self._open:
            return  # the connection broke before
        answered = False

        def respond(response: Response) -> None:
            nonlocal answered
            assert not answered, f"a second answer to {op}"
            answered = True
            self.world.after(self._net_us(), lambda: self._answer(client, op, response))

        front.handle(request, respond)
        if client.patience < 1 and self.rng.random() > client.patience:
            self.world.after(self.rng.randrange(3 * MS), lambda: self._hang_up(client, op, request))

    def _answer(self, client: Requester, op: Op, response: Response) -> None:
        if self._open.pop(op.sent_at, None) is None:
            return
        self.history.answered(op, response.status, read_answer(op, response))
        self.on_answer(op)
        client.on_answer(op)

    def _hang_up(self, client: Requester, op: Op, request: Request) -> None:
        """The client does not wait any longer."""
        if self._open.pop(op.sent_at, None) is not None:
            request.release()
            self._lost(op)
            client.on_answer(op)

    def _front_died(self, front: SimFront) -> None:
        for number, (through, client, op) in list(self._open.items()):
            if through is front:
                del self._open[number]
                self._lost(op)
                self.world.after(self._net_us(), lambda client=client, op=op: client.on_answer(op))
        for watcher in self.watchers:
            watcher.front_died(front)

    def _lost(self, op: Op) -> None:
        self._unsettled.append(op)

        def settle() -> None:
            if op in self._unsettled:
                self._unsettled.remove(op)
                self.history.settled(op)

        self.world.after(SETTLE_US, settle)


class Client(Actor):
    patience = 0.99

    def __init__(self, pool: ClientPool, name: str) -> None:
        super().__init__(pool, name, begins_within_us=5 * MS)
        self.cursors: dict[str, int] = {}
        self.own = [f"own-{name}-{kind}" for kind in ("fsync", "disk")]
        self._retry: Op | None = None
        self._look_at = ""  # the dest of its last write

    def on_answer(self, op: Op) -> None:
        self._retry = None
        if op.ok:
            self._learn(op)
            if op.kind == "write" and op.request.get("idempotency_key") and self.rng.random() < 0.08:
                self._retry = op
        elif op.kind == "write" and op.request.get("idempotency_key") and not op.refused:
            self._retry = op
        elif op.kind == "router" and op.status == 404:
            self.pool.routers.discard(op.topic)
        think = self.pool.workload.think_us
        pause_us = self.rng.choice((0, think // 4, think, 3 * think))
        if (
            op.ok
            and op.kind == "write"
            and op.topic in self.pool.workload.sources
            and self.rng.random() < 0.4
        ):
            dests = routers.dests_of(op.topic, self.pool.workload.routers)
            self._look_at, pause_us = self.rng.choice(dests) if dests else "", 0
        if is_stopping(op):
            pause_us = RETRY_AFTER_US
        self.world.after(pause_us, self.go)

    def _learn(self, op: Op) -> None:
        if op.kind == "diff":
            self.cursors[op.topic] = op.answer["next_from_seq"]
            if op.answer["records"]:
                self.pool.times[op.topic] = [record["$ts"] for record in op.answer["records"][-5:]]
        if op.kind in ("put_router", "router"):
            self.pool.routers.add(op.topic)
        elif op.kind == "drop_router":
            self.pool.routers.discard(op.topic)
        elif op.kind == "drop":
            self.pool.routers.difference_update(op.answer["routers_removed"])
        if isinstance(op.answer, dict) and "head_seq" in op.answer:
            self.pool.heads[op.topic] = op.answer["head_seq"]

    # -- the next request ----------------------------------------------------------------------------------

    def _next(self) -> NextRequest:
        if self._retry is not None and self.rng.random() < 0.9:
            op = self._retry
            return op.kind, op.topic, op.request
        if self._look_at:
            topic, self._look_at = self._look_at, ""
            return self.rng.choice((("diff", topic, self._diff(topic)), ("state", topic, self._state(topic))))
        weights = self.pool.workload.weights
        kind = self.rng.choices(list(weights), list(weights.values()))[0]
        if kind in routers.KINDS:
            return self._about_routers(kind)
        if self.pool.workload.sources and (flowing := self._flowing(kind)):
            topic = flowing
        elif kind == "drop" or self.rng.random() < 0.12:
            topic = self.rng.choice(self.own)
        else:
            topic = self.rng.choice(self.pool.workload.topics)
        request: dict[str, Any] = getattr(self, f"_{kind}")(topic)
        return ("diff" if kind in ("poll", "skim") else kind), topic, request

    def _flowing(self, kind: str) -> str:
        """A topic for a request that is not about routers; in a run with routers, most often one of theirs."""
        rng, workload = self.rng, self.pool.workload
        if kind == "write" and rng.random() < 0.7:
            return rng.choice(workload.sources)
        if kind == "drop":
            return rng.choice(workload.topics) if rng.random() < 0.5 else ""
        return rng.choice(workload.topics) if rng.random() < 0.9 else ""

    def _about_routers(self, kind: str) -> NextRequest:
        rng, pool = self.rng, self.pool
        unknown = [name for name in pool.workload.routers if name not in pool.routers]
        if unknown and rng.random() < 0.7:
            kind, name = "put_router", rng.choice(unknown)
        else:
            name = rng.choice(pool.workload.routers)
        way = rng.choice(routers.ROUTERS[name])
        if kind == "put_router":
            for topic in (way["source"], way["dest"]):
                if topic in CONFIGS and topic not in pool.configured and rng.random() < 0.9:
                    pool.configured.add(topic)
                    return "put", topic, self._config(topic, first=True)
            return kind, name, way
        if kind == "routers":
            wish = rng.choice(
                (
                    {},
                    {},
                    {"prefix": name[:2]},
                    {"source": way["source"]},
                    {"dest": way["dest"]},
                    {"page_size": 2},
                )
            )
            return kind, "", wish
        return kind, name, {}

    def _config(self, topic: str, *, first: bool) -> dict[str, Any]:
        if topic.startswith("own-"):
            return {"durability": topic.rpartition("-")[2]}
        configs = CONFIGS[topic]
        return configs[0] if first else self.rng.choice(configs)

    def _seq(self, topic: str) -> int:
        head = self.pool.heads.get(topic, 0)
        sources = [0, head, head - 1, head - 5, head // 2, head + 2, self.cursors.get(topic, 0)]
        return max(0, self.rng.choice(sources))

    def _write(self, topic: str) -> dict[str, Any]:
        rng, pool, workload = self.rng, self.pool, self.pool.workload
        pool.serial += 1
        name = f"{self.name}-{pool.serial}"
        count = rng.choice((1, 1, 1, 2, 3, 5, 9))
        own_ttl = topic in OWN_TTL and rng.random() < 0.08
        tagged = rng.random() < (0.9 if "tags" in topic else 0.5)
        records: list[dict[str, Any]] = []
        for i in range(count):
            data: dict[str, Any] = {"w": name, "i": i, "of": count}
            if rng.random() < 0.3:
                data["pad"] = "x" * rng.choice((5, 40, 200))
            record: dict[str, Any] = {"data": data}
            if tagged:
                record["tag"] = rng.choice(TAGS)
            if rng.random() < 0.2:
                record["node"] = rng.choice(NODES)
            if rng.random() < 0.1:
                record["meta"] = {"m": name}
            if own_ttl:
                record["ttl_ms"] = rng.choice((0, 60, 400))
            records.append(record)
        if rng.random() < 0.02:
            for record in records:  # bytes instead of JSON, in all records or in none
                text = json.dumps(record.pop("data")).encode()
                record.pop("meta", None)
                record["data_base64"] = b64encode(text).decode()
        elif rng.random() < workload.huge:
            records[0]["data"]["pad"] = "y" * 70_000  # a body that is a message part of its own
        request: dict[str, Any] = {"records": records}
        if rng.random() < workload.keyed:
            request["idempotency_key"] = name
        if rng.random() < workload.lines and topic not in QUEUES:
            request["lines"] = True
            return request
        if topic.startswith("own-") or topic in QUEUES or rng.random() < 0.9:
            request["config"] = self._config(topic, first=True)
        if rng.random() < 0.03:
            request["create"] = rng.random() < 0.5
        if rng.random() < 0.06:
            request["if_last_seq"] = max(0, pool.heads.get(topic, 0) - rng.choice((0, 0, 0, 1)))
        elif rng.random() < 0.03:
            request["if_tag_last_seq"] = {"tag": rng.choice(TAGS[:2]), "seq": self._seq(topic)}
        return request

    def _diff(self, topic: str) -> dict[str, Any]:
        """Continue reading."""
        rng = self.rng
        request: dict[str, Any] = {
            "from_seq": self.cursors.get(topic, 0),
            "limit": rng.choice((3, 10, 1000)),
            "include_tags": True,
        }
        if rng.random() < self.pool.workload.frames:
            request["frames"] = True
        return request

    def _skim(self, topic: str) -> dict[str, Any]:
        """Read anywhere, with filters."""
        rng = self.rng
        request: dict[str, Any] = {"from_seq": self._seq(topic), "include_tags": rng.random() < 0.5}
        if rng.random() < 0.5:
            request["limit"] = rng.choice((1, 4, 1000))
        if rng.random() < 0.3:
            request["node"] = rng.choice([NODES[0], NODES])
        if rng.random() < 0.3:
            request["tag"] = rng.choice([*MATCHES, ["tag", "Subject", "a.*"], ["tag", "Subject", ">"]])
        if rng.random() < 0.1 and topic in self.pool.times:
            request["from_ts"] = rng.choice(self.pool.times[topic])
        if rng.random() < 0.2:
            request["max_batch_bytes"] = rng.choice((1, 200))
        if rng.random() < 0.1:
            request["include_data"] = False
        return request

    def _poll(self, topic: str) -> dict[str, Any]:
        return {
            "from_seq": self.pool.heads.get(topic, 0),
            "wait_ms": self.rng.choice((20, 300)),
            "include_tags": True,
        }

    def _delete(self, topic: str) -> dict[str, Any]:
        rng = self.rng
        request: dict[str, Any] = rng.choice(
            (
                {"before_seq": self._seq(topic)},
                {"match": rng.choice(MATCHES)},
                {"match": rng.choice(MATCHES), "before_seq": self._seq(topic)},
                {"seqs": sorted({self._seq(topic) for _ in range(3)})},
                {"keep": rng.randrange(1, 9)},
                {"match": rng.choice(MATCHES), "keep": rng.randrange(1, 3)},
            )
        )
        if rng.random() < self.pool.workload.erase:
            request["erase"] = True
        return request

    def _put(self, topic: str) -> dict[str, Any]:
        return self._config(topic, first=self.rng.random() < 0.5)

    def _state(self, topic: str) -> dict[str, Any]:
        return {"touch": self.rng.random() < 0.5}

    def _list(self, topic: str) -> dict[str, Any]:
        return self.rng.choice(({}, {"prefix": "fsync"}, {"page_size": 3}))

    def _last(self, topic: str) -> dict[str, Any]:
        request: dict[str, Any] = {"tag": self.rng.choice(MATCHES)}
        if self.rng.random() < 0.3:
            request = {"subject": self.rng.choice(("a.*", ">", "b"))}
        if self.rng.random() < 0.5:
            request["each"] = True
        return request

    def _tags(self, topic: str) -> dict[str, Any]:
        return self.rng.choice(({}, {"prefix": "a."}))

    def _drop(self, topic: str) -> dict[str, Any]:
        return {"if_empty": True} if self.rng.random() < 0.2 else {}


class FinalReader:
    """Reads everything, one request at a time, when all is quiet."""

    patience = 1.0

    def __init__(self, pool: ClientPool, name: str) -> None:
        self.pool, self.name = pool, name
        self._answer: Op | None = None

    def on_answer(self, op: Op) -> None:
        self._answer = op

    def ask(self, kind: str, topic: str, request: dict[str, Any]) -> Op:
        self._answer = None
        op = self.pool.ask(self, kind, topic, request)
        self.pool.world.run_until(
            lambda: self._answer is not None, within_us=60 * S, what=f"an answer to {kind} {topic} {request}"
        )
        assert op.status is not None and op.status < 500, (
            f"a healthy server answered {op.status}: {op.answer}"
        )
        return op

    def read_all(self) -> None:
        sinks.ask_about_all(self.pool.sinks, self.ask)
        for name in self.pool.workload.routers:
            self.ask("router", name, {})
        listed = self.ask("list", "", {"page_size": 1000})
        for topic in [row["topic"] for row in listed.answer["topics"]]:
            self.ask("state", topic, {})
            cursor = 0
            while True:
                page = self.ask("diff", topic, {"from_seq": cursor, "limit": 1000, "include_tags": True})
                if not page.ok or page.answer["caught_up"]:
                    break
                cursor = page.answer["next_from_seq"]
        for name in self.pool.workload.routers:
            self.ask("router", name, {})
        if self.pool.workload.routers:
            self.ask("routers", "", {})
