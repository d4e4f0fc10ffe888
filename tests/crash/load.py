"""Writers that record every acknowledgement, and a comparison of these records with the topic.

Each thread writes the numbers 0, 1, 2, … to one topic, one at a time. The server's answers are recorded here, outside of the
server, so that no crash can change them.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.server import Server
from topics.engine.core.placement import shard_of

PAUSE_S = 0.002  # between two tries while a shard is down
CLASSES = ("fsync", "disk")


@dataclass
class Record:
    """The answers that one writer got."""

    acked: dict[int, int] = field(default_factory=dict)  # number → seq
    unknown: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)  # certainly not executed
    surprises: list[Any] = field(default_factory=list)  # answers that a crash does not explain
    ack_times: list[float] = field(default_factory=list)

    def longest_gap_s(self, since: float, until: float) -> float:
        """The longest time without an ack in this interval."""
        inside = [at for at in self.ack_times if since < at < until]
        points = [since, *inside, until]
        return max(b - a for a, b in itertools.pairwise(points))


class Writer(threading.Thread):
    """`retries`: a write with unknown outcome is repeated with its idempotency key until it is acked."""

    def __init__(
        self, server: Server, topic: str, *, retries: bool = False, front_dies: bool = False
    ) -> None:
        super().__init__(name=topic, daemon=True)
        self.server, self.topic, self.retries, self.front_dies = server, topic, retries, front_dies
        self.record = Record()
        self.stopping = threading.Event()
        self._connection: http.client.HTTPConnection | None = None

    def run(self) -> None:
        number = 0
        while not self.stopping.is_set():
            try:
                done = self._write(number)
            except Exception as error:
                self.record.surprises.append(repr(error))
                return
            number += 1 if done or not self.retries else 0
            if not done:
                self.stopping.wait(PAUSE_S)
        if self._connection is not None:
            self._connection.close()

    def _write(self, number: int) -> bool:
        """Whether it was acked."""
        body: dict[str, Any] = {"records": [{"data": number}]}
        if self.retries:
            body["idempotency_key"] = str(number)
        try:
            status, answer = self._post(json.dumps(body).encode())
        except (OSError, http.client.HTTPException) as error:
            self._connection = None
            self.record.unknown.add(number)
            if not self.front_dies:
                self.record.surprises.append(repr(error))
            return False
        return self._note(number, status, answer)

    def _note(self, number: int, status: int, answer: dict[str, Any]) -> bool:
        record = self.record
        if status == 200:
            record.acked[number] = answer["first_seq"]
            record.ack_times.append(time.monotonic())
            return True
        error = answer["error"]
        if status != 503 or error["code"] != "not_ready":
            record.surprises.append((status, answer))
        if error.get("detail", {}).get("outcome") == "unknown":
            record.unknown.add(number)
        else:
            record.refused.add(number)
        return False

    def _post(self, body: bytes) -> tuple[int, dict[str, Any]]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self.server.host, self.server.port, timeout=60)
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", f"/v0/topics/{self.topic}", body, headers)
        response = self._connection.getresponse()
        return response.status, json.loads(response.read())


@contextlib.contextmanager
def load(server: Server, topics: list[str], **options: bool) -> Iterator[dict[str, Writer]]:
    """Writers on all these topics, half of class fsync and half of class disk."""
    for i, topic in enumerate(topics):
        assert server.put(f"/v0/topics/{topic}", {"durability": CLASSES[i % 2]}).status in (200, 201)
    writers = {topic: Writer(server, topic, **options) for topic in topics}
    for writer in writers.values():
        writer.start()
    try:
        yield writers
    finally:
        for writer in writers.values():
            writer.stopping.set()
        for writer in writers.values():
            writer.join(90)
            assert not writer.is_alive(), f"{writer.topic} still waits for an answer"


def topics_on(shard: int, shards: int, count: int, prefix: str = "t") -> list[str]:
    """Topic names that are placed on this shard."""
    names = (f"{prefix}{i}" for i in range(10_000))
    found = [name for name in names if shard_of(name, shards) == shard]
    return found[:count]


def acks(writers: dict[str, Writer]) -> int:
    return sum(len(writer.record.acked) for writer in writers.values())


def read_all(server: Server, topic: str) -> list[tuple[int, Any]]:
    """Seq and data of every record; fails if there is a gap."""
    rows: list[tuple[int, Any]] = []
    cursor = 0
    while True:
        reply = server.diff(topic, from_seq=cursor, limit=1000)
        assert reply.status == 200, (topic, reply)
        page = reply.json
        assert page["tombstone"] is None, (topic, page["tombstone"])
        rows += [(row["$seq"], row["data"]) for row in page["records"]]
        if page["caught_up"]:
            return rows
        cursor = page["next_from_seq"]


def compare(rows: list[tuple[int, Any]], record: Record) -> None:
    """Every acked number is there once, at its seq; one with unknown outcome at most once; a refused one never."""
    numbers = [number for _, number in rows]
    assert numbers == sorted(set(numbers)), "records are out of order or duplicated"
    stored = {number: seq for seq, number in rows}
    lost = {number: seq for number, seq in record.acked.items() if stored.get(number) != seq}
    assert not lost, f"acked records are missing: {lost}"
    strange = stored.keys() - record.acked.keys() - record.unknown
    assert not strange, f"refused records were written: {strange}"


def check_all(server: Server, writers: dict[str, Writer]) -> None:
    """Compare, write more, and compare again: records that were missing must not appear later."""
    before = {topic: read_all(server, topic) for topic in writers}
    for topic, writer in writers.items():
        assert not writer.record.surprises, (topic, writer.record.surprises[:3])
        compare(before[topic], writer.record)
        assert server.write(topic, "later").status == 200
    for topic, rows in before.items():
        assert read_all(server, topic)[:-1] == rows, topic
