"""Protocols of watchers and writers of each system. Records are counted by their mark, without parsing.

| | watcher | writer |
|---|---|---|
| topics | a session (POST), then its event stream (GET), from the end of the topic | one POST per batch |
| Redis | XREAD BLOCK, repeated after every response | a pipeline of XADD |
| NATS core | a plain SUB | PUB, without acknowledgement; a batch ends with a PING, whose PONG confirms it |
"""

from __future__ import annotations

import json
import socket

from peers import protocols
from peers.protocols import HELLO_END, BadAnswer, Exchange

STREAM = "fan"
BATCH = 100
RECORD = protocols.payload(100)
WAIT_S = 30.0


class Watching:
    """The protocol of one system."""

    opened = b""  # received when a watcher is ready; empty: no need to wait
    question: Exchange | None = (
        None  # of a watcher that asks again after each answer; None: the server pushes
    )

    def hellos(self, address: str, count: int) -> list[Exchange]:
        """The first request of each watcher, if the server pushes."""
        return []

    def write(self, count: int) -> Exchange:
        """A request that writes `count` records; without replies if nothing is acknowledged."""
        raise NotImplementedError


class SseWatching(Watching):
    opened = b"event: caught-up\n"

    def __init__(self, topic: str = STREAM) -> None:
        self._topic = topic

    def hellos(self, address: str, count: int) -> list[Exchange]:
        body = json.dumps({"topics": {self._topic: {"tail": True}}}).encode()
        request = protocols.http_post("/v0/watch", body)
        wids: list[str] = []
        lines = [connect(address) for _ in range(min(16, count))]
        while len(wids) < count:
            asked = lines[: count - len(wids)]
            for line in asked:
                line.sendall(request)
            wids += [json.loads(http_body(line))["wid"] for line in asked]
        for line in lines:
            line.close()
        return [
            Exchange("http", f"GET /v0/watch/{wid} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            for wid in wids
        ]

    def write(self, count: int) -> Exchange:
        body = b'{"records":[' + b",".join([b'{"data":%b}' % RECORD] * count) + b"]}"
        request = protocols.http_post(f"/v0/topics/{self._topic}?return_seqs=false", body)
        return Exchange("http", request, count)


class RedisWatching(Watching):
    def __init__(self) -> None:
        place = (b"STREAMS", STREAM.encode(), b"%b-1" % protocols.CURSOR_ID)
        self.question = Exchange("resp", protocols.redis_command(b"XREAD", b"BLOCK", b"0", *place))

    def write(self, count: int) -> Exchange:
        # The records are numbered from 1, so a reader's position is a count.
        one = protocols.redis_command(b"XADD", STREAM.encode(), protocols.NEXT_ID + b"-1", b"d", RECORD)
        return Exchange("resp", one * count, count, count)


class NatsWatching(Watching):
    opened = HELLO_END

    def hellos(self, address: str, count: int) -> list[Exchange]:
        return [Exchange("nats", b"SUB fan 2\r\nPING\r\n")] * count

    def write(self, count: int) -> Exchange:
        one = b"PUB %b %d\r\n%b\r\n" % (STREAM.encode(), len(RECORD), RECORD)
        if count == 1:
            return Exchange("nats", one, replies=0)
        return Exchange("nats", one * count + b"PING\r\n", count)


WATCHING: dict[str, type[Watching]] = {"http": SseWatching, "resp": RedisWatching, "nats": NatsWatching}


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    line = socket.create_connection((host, int(port)), timeout=WAIT_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def await_text(line: socket.socket, text: bytes) -> bytes:
    """Read until this text has been received."""
    came = b""
    while text not in came:
        data = line.recv(1 << 16)
        if not data or came.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5", b"-")):
            raise BadAnswer(came[:500] or b"the connection was closed")
        came += data
    return came


def http_body(line: socket.socket) -> bytes:
    came = b""
    while not protocols.http_complete(came):
        data = line.recv(1 << 16)
        if not data:
            raise BadAnswer(came[:500] or b"the connection was closed")
        came += data
    return came.partition(b"\r\n\r\n")[2]
