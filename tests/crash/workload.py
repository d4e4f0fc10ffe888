"""Several clients with a mixed load, and a history of all requests and answers.

The payload of every record is unique: {"w": "<client>-<n>", "i": i, "of": n}. A write with an idempotency key is
repeated unchanged until its outcome is known. Clients pause during `hold` or while `alarm` is true: faults are
written to the history when no request is in flight, so that before and after are exact.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, urlencode

from tests.crash.load import topics_on
from tests.support.history import History, Op
from tests.support.server import Server, until
from topics.engine.core.placement import shard_of

SHARDS = 2
CLASSES = ("fsync", "disk", "memory")
TAGS = ("a.x", "a.y", "b.x", "b.y", "c")
PAD = "p" * 6000  # fills log files quickly without making the payloads hard to read
CAP_RECORDS = 120
RETRY_S = 0.01
# Small files, so that rotations, checkpoints, sealing and compaction happen within seconds.
SMALL_FILES = {
    "TOPICS_WAL_FILE_BYTES": str(1 << 20),
    "TOPICS_SEGMENT_MAX_EVENTS": "40",
    "TOPICS_SEGMENT_MAX_BYTES": str(256 << 10),
    "TOPICS_CACHE_BYTES": str(256 << 10),
}


class Recorder:
    """A History to which several threads write."""

    def __init__(self) -> None:
        self.history = History()
        self._lock = threading.Lock()
        self._open: dict[int, Op] = {}  # without an answer yet
        self.acks = 0  # writes that succeeded
        self.limits: set[str] = set()  # that a request was refused because of

    def sent(self, client: str, kind: str, topic: str, request: dict[str, Any]) -> Op:
        with self._lock:
            op = self.history.sent(client, kind, topic, request)
            self._open[id(op)] = op
            return op

    def answered(self, op: Op, status: int, answer: Any) -> None:
        with self._lock:
            del self._open[id(op)]
            self.history.answered(op, status, answer)
        if op.ok and op.kind == "write":
            self.acks += 1
        elif status == 429:
            self.limits.add(answer["error"]["detail"]["limit"])

    def happened(self, kind: str, topics: list[str] | None = None, note: str = "") -> None:
        with self._lock:
            self.history.happened(kind, topics, note)

    def nothing_in_flight(self) -> None:
        """All processes of the server have ended: unanswered requests cannot be executed any more."""
        with self._lock:
            for op in self._open.values():
                self.history.settled(op)
            self._open.clear()


class Client(threading.Thread):
    """One client, with its cursors and a topic that only it drops."""

    def __init__(self, workload: Workload, name: str, seed: int) -> None:
        super().__init__(name=name, daemon=True)
        self._workload = workload
        self._rng = random.Random(seed)
        self._own = f"own-{name}"
        self._heads: dict[str, int] = {}
        self._cursors: dict[str, int] = {}
        self._writes = 0
        self._connection: http.client.HTTPConnection | None = None
        self.failure: BaseException | None = None

    def run(self) -> None:
        rng = self._rng
        acts: list[tuple[Callable[[], None], int]] = [
            (self._write, 60),
            (self._read, 25),
            (self._delete, 2),  # rare, so that a checkpoint finds records to move into segments
            (self._put, 2),
            (self._drop, 1),
            (self._look, 8),
        ]
        try:
            while not self._workload.stopping.is_set():
                rng.choices([act for act, _ in acts], [weight for _, weight in acts])[0]()
        except BaseException as error:
            self.failure = error
        finally:
            self._close()

    # -- requests ------------------------------------------------------------------------------------------

    def ask(
        self, kind: str, topic: str, method: str, path: str, request: dict[str, Any], *, body: bool = True
    ) -> Op:
        """One request. Without `body`, `request` becomes the query."""
        self._workload.wait_while_held()
        text = json.dumps(request) if body else None
        if not body and request:
            path = f"{path}?{_query(request)}"
        op = self._workload.recorder.sent(self.name, kind, topic, request)
        try:
            if self._connection is None:
                server = self._workload.server
                self._connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
            self._connection.request(
                method, path, text, {"Content-Type": "application/json"} if text is not None else {}
            )
            response = self._connection.getresponse()
            status, answer = response.status, json.loads(response.read())
        except (OSError, http.client.HTTPException):
            self._close()  # the front died; the outcome of the request is unknown
            self._workload.stopping.wait(RETRY_S)
            return op
        self._workload.recorder.answered(op, status, answer)
        if status in (429, 500, 503):
            self._workload.stopping.wait(RETRY_S)
        return op

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # -- operations of a client ----------------------------------------------------------------------------

    def _topic(self) -> str:
        return self._own if self._rng.random() < 0.1 else self._rng.choice(self._workload.topics)

    def _write(self) -> None:
        rng, topic = self._rng, self._topic()
        self._writes += 1
        name, count = f"{self.name}-{self._writes}", rng.choice((1, 1, 2, 5, 9))
        records: list[dict[str, Any]] = []
        for i in range(count):
            records.append({"data": {"w": name, "i": i, "of": count}, "tag": rng.choice(TAGS)})
            if i % 2 == 0:
                records[-1]["meta"] = {"pad": PAD}
        request: dict[str, Any] = {"records": records}
        keyed = rng.random() < 0.7
        if keyed:
            request["idempotency_key"] = name
        while True:
            op = self.ask("write", topic, "POST", f"/v0/topics/{topic}", request)
            if op.ok:
                self._heads[topic] = op.answer["head_seq"]
            known = op.ok or (op.status is not None and op.status < 429)
            if known or not keyed or self._workload.stopping.is_set():
                return

    def _read(self) -> None:
        rng, topic = self._rng, self._topic()
        begin = rng.choice((self._cursors.get(topic, 0), self._cursors.get(topic, 0), 0))
        request = {
            "from_seq": begin,
            "limit": rng.choice((5, 50, 400)),
            "include_tags": rng.random() < 0.5,
            "include_meta": False,
        }
        op = self.ask("diff", topic, "POST", f"/v0/topics/{topic}/diff", request)
        if op.ok:
            self._cursors[topic] = op.answer["next_from_seq"]
            self._heads[topic] = op.answer["head_seq"]

    def _delete(self) -> None:
        rng, topic = self._rng, self._topic()
        head = self._heads.get(topic, 0)
        request: dict[str, Any] = rng.choice(
            (
                {"before_seq": max(1, head - rng.randrange(50, 400))},
                {"match": rng.choice(("a.*", "b.x", "c"))},
                {"seqs": sorted(rng.sample(range(1, head + 20), min(5, head + 1)))},
            )
        )
        if rng.random() < 0.3 and self._workload.erasing:
            request["erase"] = True
        self.ask("delete", topic, "POST", f"/v0/topics/{topic}/delete", request)

    def _put(self) -> None:
        config = {"durability": self._rng.choice(("fsync", "disk")), "priority": self._rng.randrange(9)}
        self.ask("put", self._own, "PUT", f"/v0/topics/{self._own}", config)

    def _drop(self) -> None:
        request = {"if_empty": True} if self._rng.random() < 0.3 else {}
        self.ask("drop", self._own, "DELETE", f"/v0/topics/{self._own}", request, body=False)

    def _look(self) -> None:
        rng, topic = self._rng, self._topic()
        match rng.randrange(4):
            case 0:
                self.ask("state", topic, "GET", f"/v0/topics/{topic}", {}, body=False)
            case 1:
                self.ask("list", "", "GET", "/v0/topics", {"page_size": 1000}, body=False)
            case 2:
                request = {"tag": rng.choice(TAGS)}
                self.ask("last", topic, "GET", f"/v0/topics/{topic}/last", request, body=False)
            case _:
                self.ask("tags", topic, "GET", f"/v0/topics/{topic}/tags", {}, body=False)

    # -- at the end ----------------------------------------------------------------------------------------

    def read_all(self, topic: str) -> None:
        self.ask("state", topic, "GET", f"/v0/topics/{topic}", {}, body=False)
        cursor, caught_up = 0, False
        while not caught_up:
            request = {"from_seq": cursor, "limit": 1000, "include_tags": True, "include_meta": False}
            op = self.ask("diff", topic, "POST", f"/v0/topics/{topic}/diff", request)
            if op.status == 404:
                return
            assert op.ok, op
            cursor, caught_up = op.answer["next_from_seq"], op.answer["caught_up"]
        self.ask("tags", topic, "GET", f"/v0/topics/{quote(topic)}/tags", {}, body=False)


def _query(request: dict[str, Any]) -> str:
    return urlencode({name: json.dumps(value) if value is True else value for name, value in request.items()})


class Workload:
    """The clients of one server. `alarm` is called before each request; clients pause while it is true."""

    def __init__(
        self,
        server: Server,
        *,
        seed: int,
        clients: int = 4,
        alarm: Callable[[], bool] = lambda: False,
        classes: tuple[str, ...] = CLASSES,
    ) -> None:
        self.server = server
        self.recorder = Recorder()
        self.stopping = threading.Event()
        self._alarm = alarm
        self._changed = threading.Condition()
        self._held = False
        self.erasing = True  # whether deletes may ask for an erase
        self._parked = 0
        self._configs = {
            topics_on(shard, SHARDS, 1, f"{name}-")[0]: {"durability": name}
            for name in classes
            for shard in range(SHARDS)
        } | {
            topics_on(shard, SHARDS, 1, "capped-")[0]: {"durability": "fsync", "cap_records": CAP_RECORDS}
            for shard in range(SHARDS)
        }
        self.topics = list(self._configs)
        self.clients = [Client(self, f"c{i}", seed * 1000 + i) for i in range(clients)]
        self._judge = Client(self, "judge", seed)

    @property
    def history(self) -> History:
        return self.recorder.history

    def names(self, shard: int | None = None) -> list[str]:
        """All topics that may exist, or those of one shard."""
        names = [*self.topics, *(f"own-{client.name}" for client in self.clients)]
        return [name for name in names if shard is None or shard_of(name, SHARDS) == shard]

    @property
    def acks(self) -> int:
        return self.recorder.acks

    # -- running -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[Workload]:
        for topic, config in self._configs.items():
            assert self._judge.ask("put", topic, "PUT", f"/v0/topics/{topic}", config).ok
        for client in self.clients:
            client.start()
        try:
            yield self
        finally:
            self.stopping.set()
            self.resume()
            for client in self.clients:
                client.join(90)
        for client in self.clients:
            assert not client.is_alive(), f"{client.name} still waits for an answer"
            if client.failure is not None:
                raise client.failure

    def wait_while_held(self) -> None:
        if threading.current_thread() not in self.clients:
            return
        with self._changed:
            self._parked += 1
            while (self._held or self._alarm()) and not self.stopping.is_set():
                self._changed.wait(0.05)
            self._parked -= 1

    def hold(self, *, wait: bool = True) -> None:
        """Send no new requests; with `wait`, until those in flight are answered."""
        self._held = True
        if wait:
            until(self._idle, 90, every_s=0.002)

    def resume(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def _idle(self) -> bool:
        with self._changed:
            alive = sum(client.is_alive() for client in self.clients)
            return self._parked >= alive

    # -- final reads ---------------------------------------------------------------------------------------

    def read_everything(self) -> None:
        """Read everything as the last entries of the history. Call it while no client runs."""
        for topic in self.names():
            self._judge.read_all(topic)
        self._judge.ask("list", "", "GET", "/v0/topics", {"page_size": 1000}, body=False)
