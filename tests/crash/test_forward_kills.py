"""Goal: routers copy each record once and in the order of its source, although workers are killed (-9) meanwhile.

Method: writers on two shards; rules to the other shard, to the same shard, by a pattern and along a chain; the workers are killed
in turn. A read of a dest returns every copy of a record that was acked before it, or an error. At the end every dest is compared with its sources.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from tests.crash.load import topics_on
from tests.crash.processes import kill
from tests.support.contract import Json, ok
from tests.support.faults import fault
from tests.support.length import pick
from tests.support.server import Server, until

pytestmark = pytest.mark.crash

KILLS = pick(short=2, long=6)
WRITES_BETWEEN = 60
PAUSE_S = 0.004

SOURCES = {topics_on(shard, 2, 1, "in.")[0]: shard for shard in (0, 1)}
FAR = {source: topics_on(1 - shard, 2, 2, "far")[1] for source, shard in SOURCES.items()}
NEAR = {source: topics_on(shard, 2, 2, "near")[1] for source, shard in SOURCES.items()}
CHAINED = {source: topics_on(shard, 2, 2, "last")[1] for source, shard in SOURCES.items()}  # of FAR
ALL = "all"  # by a pattern
RULES = {
    **{f"far-{source}": (source, FAR[source]) for source in SOURCES},
    **{f"near-{source}": (source, NEAR[source]) for source in SOURCES},
    **{f"chain-{source}": (FAR[source], CHAINED[source]) for source in SOURCES},
    "pattern": ("in.>", ALL),
}


@dataclass
class Writer(threading.Thread):
    """Writes numbers in order, each repeated with its key until it is acked."""

    server: Server
    topic: str
    acked: int = 0
    surprises: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(name=self.topic, daemon=True)
        self.stopping = threading.Event()

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        connection = http.client.HTTPConnection(self.server.host, self.server.port, timeout=60)
        while not self.stopping.is_set():
            number = self.acked + 1
            body = {"records": [{"data": [self.topic, number]}], "idempotency_key": str(number)}
            headers = {"Content-Type": "application/json"}
            connection.request("POST", f"/v0/topics/{self.topic}", json.dumps(body), headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
            if response.status in (200, 201):
                self.acked = number
            elif (response.status, answer["error"]["code"]) != (503, "not_ready"):
                self.surprises.append((response.status, answer))
            self.stopping.wait(PAUSE_S)


class Reader(threading.Thread):
    """Reads a dest after each acked write to its source."""

    def __init__(self, server: Server, writer: Writer, dest: str) -> None:
        super().__init__(name=dest, daemon=True)
        self.server, self.writer, self.dest = server, writer, dest
        self.stopping = threading.Event()
        self.missed: list[Any] = []
        self.seen = self.excused = 0

    def run(self) -> None:
        while not self.stopping.is_set():
            acked = self.writer.acked
            reply = self.server.request("GET", f"/v0/topics/{self.dest}")
            if reply.status != 200 or "catch_up_timed_out" in reply.json["performance"]:
                self.excused += 1
            else:
                self.seen += 1
                if reply.json["head_seq"] < acked:
                    self.missed.append((acked, reply.json["head_seq"]))
            self.stopping.wait(PAUSE_S)


def read_all(server: Server, topic: str) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    from_seq = 0
    while True:
        page: Json = ok(server.diff(topic, from_seq=from_seq, limit=1000))
        assert page["tombstone"] is None
        found += [tuple(record["data"]) for record in page["records"]]
        from_seq = page["next_from_seq"]
        if page["caught_up"]:
            return found


def go_on(writers: list[Writer]) -> None:
    goal = sum(writer.acked for writer in writers) + WRITES_BETWEEN
    until(lambda: sum(writer.acked for writer in writers) >= goal)


def copied(server: Server, source: str, dest: str) -> list[tuple[str, int]]:
    return [row for row in read_all(server, dest) if row[0] == source]


def has_all(server: Server, source: str, dest: str, count: int) -> bool:
    """Reads wait for the last rule that copies here; copies by the rules before it may arrive shortly after."""
    return len(copied(server, source, dest)) >= count


@fault(
    "worker",
    "kill -9 of workers that forward to each other",
    "each copy is there once and in order; a read returns copies of what was acked before it, or an error",
)
def test_workers_that_are_killed_while_they_forward(start_server: Callable[..., Server]) -> None:
    server = start_server()
    for topic in {*SOURCES, *FAR.values(), *NEAR.values(), *CHAINED.values(), ALL}:
        ok(server.put(f"/v0/topics/{topic}", {"durability": "fsync" if "far" in topic else "disk"}), 201)
    for name, (source, dest) in RULES.items():
        ok(server.put(f"/v0/routers/{name}", {"source": source, "dest": dest}), 201)
    writers = [Writer(server, source) for source in SOURCES]
    readers = [Reader(server, writer, FAR[writer.topic]) for writer in writers]
    for thread in (*writers, *readers):
        thread.start()
    try:
        for i in range(KILLS):
            go_on(writers)
            kill(server.pid(f"shard {i % 2}"))
        go_on(writers)
    finally:
        for thread in (*writers, *readers):
            thread.stopping.set()
        for thread in (*writers, *readers):
            thread.join(90)
    server.wait_ready()
    assert [writer.surprises for writer in writers] == [[]] * len(writers)
    assert [reader.missed for reader in readers] == [[]] * len(readers)
    assert all(reader.seen for reader in readers)
    expected = {
        writer.topic: [(writer.topic, number) for number in range(1, writer.acked + 1)] for writer in writers
    }

    for source in SOURCES:
        sent = read_all(server, source)
        assert sent[: len(expected[source])] == expected[source]
        for dest in (FAR[source], NEAR[source], CHAINED[source], ALL):
            until(partial(has_all, server, source, dest, len(sent)))
            assert copied(server, source, dest) == sent, dest
    for name, (_, dest) in RULES.items():
        assert ok(server.get(f"/v0/routers/{name}"))["forwarded_total"] == len(read_all(server, dest))
