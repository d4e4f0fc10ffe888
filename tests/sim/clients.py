"""Clients of a simulated server: each sends one request at a time, whatever it likes, and writes down what it is told.

A client knows only what any HTTP client can know. Requests enter the shipped gate as `Request` values; what a connection
does besides (breaking, being slow) is made up here.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.sim import merge_jobs, sinks
from tests.sim import router_clients as routers
from tests.sim.actors import RETRY_AFTER_US, Actor, Wish, is_stopping
from tests.sim.exchanges import make_request, read_answer
from tests.sim.processes import SimFront, SimServer
from tests.sim.queue_workers import LETTERS, QUEUES, QueueWorker, Spot
from tests.sim.watchers import REST_US, Watcher
from tests.sim.world import MS, S
from tests.support.history import History, Op
from topics.protocols.http.exchange import Request, Response

SETTLE_US = 60 * S  # more than any wire, stall, parking place or pair of syncs can hold a request

TAGS = ["a.1", "a.2", "a.3", "b", "b.1"]
NODES = ["n1", "n2"]
MATCHES = ["a.1", "b", "a.*", "b*", "*"]

# A topic's name is its character: what it may be configured as, first the way it begins.
CHARACTERS: dict[str, list[dict[str, Any]]] = {
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
LOGS = list(CHARACTERS)
CHARACTERS |= QUEUES | {LETTERS: [{}]} | routers.FLOWING
OWN_TTL = ("fsync", "fsync-too", "disk", "disk-too")


def write_weights() -> dict[str, float]:
    return {
        "write": 50, "diff": 22, "poll": 4, "delete": 7, "put": 3, "state": 4, "list": 2, "last": 2, "tags": 1.5,
        "drop": 1.5, "skim": 4,
    }  # fmt: skip


@dataclass(slots=True)
class Appetite:
    """What the clients of one story do, and how often."""

    weights: dict[str, float] = field(default_factory=write_weights)
    topics: list[str] = field(default_factory=lambda: list(CHARACTERS))
    think_us: int = 3 * MS
    keyed: float = 0.5
    erase: float = 0.2
    huge: float = 0.004
    lines: float = 0.1
    frames: float = 0.15
    grouped: bool = False  # all watchers share one group
    routers: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # of these routers: most is written there


class Asker(Protocol):
    """Whoever sends requests."""

    name: str
    patience: float  # how often it waits for its answer

    def told(self, op: Op) -> None:
        """An answer, or the news that there will be none."""


class Crowd:
    """All clients of a story, and their history."""

    def __init__(self, server: SimServer, appetite: Appetite, clients: int, watchers: int = 0) -> None:
        self.server, self.world, self.rng = server, server.world, server.rng
        self.appetite = appetite
        self.history = History()
        self.heads: dict[str, int] = {}  # as far as any client knows
        self.times: dict[str, list[int]] = {}  # of records that were read last
        self.configured: set[str] = set()  # sources and dests of routers that somebody has put
        self.routers: set[str] = set()  # that are there, as far as any client knows
        self.serial = 0
        self.sent = 0
        self.stopped = False
        self.paused_until_us = 0
        self._open: dict[int, tuple[SimFront, Asker, Op]] = {}  # by the op's moment
        self._unsettled: list[Op] = []
        self.on_answer: Callable[[Op], None] = lambda op: None
        server.on_front_death = self._front_died
        self.clients = [Client(self, f"c{i}") for i in range(clients)]
        self.watchers = [Watcher(self, f"w{i}") for i in range(watchers)]
        self.workers: list[QueueWorker] = []
        self.sinks: list[sinks.Sink] = []
        self.mergers: list[merge_jobs.MergeJob | merge_jobs.SnapshotReader] = []

    def hire(self, workers: int, spots: list[Spot]) -> None:
        """Let some take jobs."""
        for i in range(workers):
            self.workers.append(QueueWorker(self, f"k{i}", f"node-{i % 2}", spots))

    def sink(self, producers: list[sinks.Producer], twins: list[bool]) -> None:
        """Let some write in batches; of a producer with a twin there are two at work."""
        for producer, has_twin in zip(producers, twins, strict=True):
            for i in range(1 + has_twin):
                self.sinks.append(sinks.Sink(self, f"{producer.name}{'ab'[i]}", producer))

    def merge(self, jobs: int, readers: int, topics: list[str]) -> None:
        """Let jobs merge cold segments of these topics, and others read them."""
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
        """Everything has come to rest: what was not answered will never be executed."""
        assert self.is_idle, "a client still waits"
        for op in self._unsettled:
            self.history.settled(op)
        self._unsettled = []

    def rest_watchers(self) -> None:
        """Let every watcher connect and take what there is, and say so."""
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

    def ask(self, client: Asker, kind: str, topic: str, request: dict[str, Any]) -> Op:
        op = self.history.sent(client.name, kind, topic, request)
        assert self.send(client, op, make_request(kind, topic, request))
        return op

    def send(self, client: Asker, op: Op, request: Request) -> bool:
        """Whether there was a front to talk to."""
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

    def _arrive(self, front: SimFront, client: Asker, op: Op, request: Request) -> None:
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

    def _answer(self, client: Asker, op: Op, response: Response) -> None:
        if self._open.pop(op.sent_at, None) is None:
            return
        self.history.answered(op, response.status, read_answer(op, response))
        self.on_answer(op)
        client.told(op)

    def _hang_up(self, client: Asker, op: Op, request: Request) -> None:
        """The client does not want to wait any longer."""
        if self._open.pop(op.sent_at, None) is not None:
            request.release()
            self._lost(op)
            client.told(op)

    def _front_died(self, front: SimFront) -> None:
        for number, (through, client, op) in list(self._open.items()):
            if through is front:
                del self._open[number]
                self._lost(op)
                self.world.after(self._net_us(), lambda client=client, op=op: client.told(op))
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

    def __init__(self, crowd: Crowd, name: str) -> None:
        super().__init__(crowd, name, begins_within_us=5 * MS)
        self.cursors: dict[str, int] = {}
        self.own = [f"own-{name}-{kind}" for kind in ("fsync", "disk")]
        self._retry: Op | None = None
        self._look_at = ""  # the dest of what it has just written

    def told(self, op: Op) -> None:
        self._retry = None
        if op.ok:
            self._learn(op)
            if op.kind == "write" and op.request.get("idempotency_key") and self.rng.random() < 0.08:
                self._retry = op
        elif op.kind == "write" and op.request.get("idempotency_key") and not op.refused:
            self._retry = op
        elif op.kind == "router" and op.status == 404:
            self.crowd.routers.discard(op.topic)
        think = self.crowd.appetite.think_us
        pause_us = self.rng.choice((0, think // 4, think, 3 * think))
        if (
            op.ok
            and op.kind == "write"
            and op.topic in self.crowd.appetite.sources
            and self.rng.random() < 0.4
        ):
            dests = routers.dests_of(op.topic, self.crowd.appetite.routers)
            self._look_at, pause_us = self.rng.choice(dests) if dests else "", 0
        if is_stopping(op):
            pause_us = RETRY_AFTER_US
        self.world.after(pause_us, self.go)

    def _learn(self, op: Op) -> None:
        if op.kind == "diff":
            self.cursors[op.topic] = op.answer["next_from_seq"]
            if op.answer["records"]:
                self.crowd.times[op.topic] = [record["$ts"] for record in op.answer["records"][-5:]]
        if op.kind in ("put_router", "router"):
            self.crowd.routers.add(op.topic)
        elif op.kind == "drop_router":
            self.crowd.routers.discard(op.topic)
        elif op.kind == "drop":
            self.crowd.routers.difference_update(op.answer["routers_removed"])
        if isinstance(op.answer, dict) and "head_seq" in op.answer:
            self.crowd.heads[op.topic] = op.answer["head_seq"]

    # -- what to do next -----------------------------------------------------------------------------------

    def _next(self) -> Wish:
        if self._retry is not None and self.rng.random() < 0.9:
            op = self._retry
            return op.kind, op.topic, op.request
        if self._look_at:
            topic, self._look_at = self._look_at, ""
            return self.rng.choice((("diff", topic, self._diff(topic)), ("state", topic, self._state(topic))))
        weights = self.crowd.appetite.weights
        kind = self.rng.choices(list(weights), list(weights.values()))[0]
        if kind in routers.KINDS:
            return self._about_routers(kind)
        if self.crowd.appetite.sources and (flowing := self._flowing(kind)):
            topic = flowing
        elif kind == "drop" or self.rng.random() < 0.12:
            topic = self.rng.choice(self.own)
        else:
            topic = self.rng.choice(self.crowd.appetite.topics)
        request: dict[str, Any] = getattr(self, f"_{kind}")(topic)
        return ("diff" if kind in ("poll", "skim") else kind), topic, request

    def _flowing(self, kind: str) -> str:
        """A topic for what is no request about routers, in a story that has some: most often one of theirs."""
        rng, appetite = self.rng, self.crowd.appetite
        if kind == "write" and rng.random() < 0.7:
            return rng.choice(appetite.sources)
        if kind == "drop":
            return rng.choice(appetite.topics) if rng.random() < 0.5 else ""
        return rng.choice(appetite.topics) if rng.random() < 0.9 else ""

    def _about_routers(self, kind: str) -> Wish:
        rng, crowd = self.rng, self.crowd
        unknown = [name for name in crowd.appetite.routers if name not in crowd.routers]
        if unknown and rng.random() < 0.7:
            kind, name = "put_router", rng.choice(unknown)
        else:
            name = rng.choice(crowd.appetite.routers)
        way = rng.choice(routers.ROUTERS[name])
        if kind == "put_router":
            for topic in (way["source"], way["dest"]):
                if topic in CHARACTERS and topic not in crowd.configured and rng.random() < 0.9:
                    crowd.configured.add(topic)
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
        configs = CHARACTERS[topic]
        return configs[0] if first else self.rng.choice(configs)

    def _seq(self, topic: str) -> int:
        head = self.crowd.heads.get(topic, 0)
        spots = [0, head, head - 1, head - 5, head // 2, head + 2, self.cursors.get(topic, 0)]
        return max(0, self.rng.choice(spots))

    def _write(self, topic: str) -> dict[str, Any]:
        rng, crowd, appetite = self.rng, self.crowd, self.crowd.appetite
        crowd.serial += 1
        name = f"{self.name}-{crowd.serial}"
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
        elif rng.random() < appetite.huge:
            records[0]["data"]["pad"] = "y" * 70_000  # a body that travels as a part of its own
        request: dict[str, Any] = {"records": records}
        if rng.random() < appetite.keyed:
            request["idempotency_key"] = name
        if rng.random() < appetite.lines and topic not in QUEUES:
            request["lines"] = True
            return request
        if topic.startswith("own-") or topic in QUEUES or rng.random() < 0.9:
            request["config"] = self._config(topic, first=True)
        if rng.random() < 0.03:
            request["create"] = rng.random() < 0.5
        if rng.random() < 0.06:
            request["if_last_seq"] = max(0, crowd.heads.get(topic, 0) - rng.choice((0, 0, 0, 1)))
        elif rng.random() < 0.03:
            request["if_tag_last_seq"] = {"tag": rng.choice(TAGS[:2]), "seq": self._seq(topic)}
        return request

    def _diff(self, topic: str) -> dict[str, Any]:
        """Read on from where it was."""
        rng = self.rng
        request: dict[str, Any] = {
            "from_seq": self.cursors.get(topic, 0),
            "limit": rng.choice((3, 10, 1000)),
            "include_tags": True,
        }
        if rng.random() < self.crowd.appetite.frames:
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
        if rng.random() < 0.1 and topic in self.crowd.times:
            request["from_ts"] = rng.choice(self.crowd.times[topic])
        if rng.random() < 0.2:
            request["max_batch_bytes"] = rng.choice((1, 200))
        if rng.random() < 0.1:
            request["include_data"] = False
        return request

    def _poll(self, topic: str) -> dict[str, Any]:
        return {
            "from_seq": self.crowd.heads.get(topic, 0),
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
        if rng.random() < self.crowd.appetite.erase:
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


class Auditor:
    """Reads everything there is, one request after the other, when all is quiet."""

    patience = 1.0

    def __init__(self, crowd: Crowd, name: str) -> None:
        self.crowd, self.name = crowd, name
        self._answer: Op | None = None

    def told(self, op: Op) -> None:
        self._answer = op

    def ask(self, kind: str, topic: str, request: dict[str, Any]) -> Op:
        self._answer = None
        op = self.crowd.ask(self, kind, topic, request)
        self.crowd.world.run_until(
            lambda: self._answer is not None, within_us=60 * S, what=f"an answer to {kind} {topic} {request}"
        )
        assert op.status is not None and op.status < 500, (
            f"a server that is well answers {op.status}: {op.answer}"
        )
        return op

    def read_all(self) -> None:
        sinks.ask_about_all(self.crowd.sinks, self.ask)
        for name in self.crowd.appetite.routers:
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
        for name in self.crowd.appetite.routers:
            self.ask("router", name, {})
        if self.crowd.appetite.routers:
            self.ask("routers", "", {})
