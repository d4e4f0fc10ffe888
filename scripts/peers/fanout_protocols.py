"""Protocols of watchers and writers of each system, with counting of records without parsing.

Every record contains `MARK` once, a byte that occurs nowhere else on the wire. So the number of records that a watcher
has seen is the number of these bytes, however the data is split.

| | watcher | writer |
|---|---|---|
| topics | a session (POST), then its event stream (GET), from the end of the topic | one POST per batch |
| Redis | XREAD BLOCK, repeated after every response | a pipeline of XADD |
| NATS core | a plain SUB | PUB, without acknowledgement; a batch ends with a PING, whose PONG confirms it |
"""

from __future__ import annotations

import json
import socket
from typing import Protocol

from peers import protocols
from peers.protocols import HELLO, HELLO_END, Answers, BadAnswer, Exchange

STREAM = "fan"
MARK = b"~"
RECORD = b'{"id":1748,"text":"' + b"x" * 78 + MARK + b'"}'  # 100 bytes, as in the other works
OPENED_AT_ONCE = 64  # less than the listen backlog of any of the servers
WAIT_S = 30.0

REDIS_HEAD = b"*1\r\n*2\r\n$3\r\nfan\r\n*"  # start of a response to XREAD; the number of its records follows
REDIS_HEAD_MAX = len(REDIS_HEAD) + 12


class Asking(Protocol):
    """A watcher that must send a new request after each response."""

    def feed(self, data: bytearray, size: int, found: int) -> bytes:
        """Process received bytes, which contain `found` records; return the next request, if any."""


class Watching:
    """The protocol of one system."""

    opened = b""  # received when a watcher is ready; empty: no need to wait
    writer_hello = b""
    writer_opened = b""

    def hellos(self, address: str, count: int) -> list[bytes]:
        """The first request of each watcher."""
        raise NotImplementedError

    def write(self, count: int) -> tuple[bytes, Answers | None]:
        """A request that writes `count` records, and a parser for its acknowledgement; None: there is none."""
        raise NotImplementedError

    def asking(self) -> Asking | None:
        """None: the server pushes."""
        return None


class SseWatching(Watching):
    opened = b"event: caught-up\n"

    def __init__(self, topic: str = STREAM) -> None:
        self._topic = topic

    def hellos(self, address: str, count: int) -> list[bytes]:
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
        return [f"GET /v0/watch/{wid} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for wid in wids]

    def write(self, count: int) -> tuple[bytes, Answers | None]:
        body = b'{"records":[' + b",".join([b'{"data":%b}' % RECORD] * count) + b"]}"
        request = protocols.http_post(f"/v0/topics/{self._topic}?return_seqs=false", body)
        return request, Exchange("http", request).answers()


class RedisWatching(Watching):
    def hellos(self, address: str, count: int) -> list[bytes]:
        return [redis_xread(0)] * count

    def write(self, count: int) -> tuple[bytes, Answers | None]:
        # With a fixed millisecond in the id the server numbers the records, so a reader's position is a count.
        one = protocols.redis_command(b"XADD", STREAM.encode(), b"1-*", b"d", RECORD)
        return one * count, Exchange("resp", one, lines=2 * count).answers()

    def asking(self) -> Asking | None:
        return RedisReader()


class NatsWatching(Watching):
    opened = HELLO_END
    writer_hello = HELLO["nats"]
    writer_opened = HELLO_END

    def hellos(self, address: str, count: int) -> list[bytes]:
        return [b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB fan 1\r\nPING\r\n'] * count

    def write(self, count: int) -> tuple[bytes, Answers | None]:
        one = b"PUB %b %d\r\n%b\r\n" % (STREAM.encode(), len(RECORD), RECORD)
        if count == 1:
            return one, None
        return one * count + b"PING\r\n", Exchange("nats", one, end=HELLO_END).answers()


WATCHING: dict[str, type[Watching]] = {"http": SseWatching, "resp": RedisWatching, "nats": NatsWatching}


class RedisReader:
    """Responses to XREAD on one connection. Each starts with its number of records; then the next request is sent."""

    def __init__(self) -> None:
        self._seen = 0
        self._due = 0  # records seen when the current response is complete
        self._between = True  # no response has begun since the last one
        self._head = b""  # incomplete start of a response

    def feed(self, data: bytearray, size: int, found: int) -> bytes:
        if self._between and not self._begins(data, size):
            return b""
        self._seen += found
        if self._seen < self._due or data[size - 1] != 0x0A:
            return b""
        self._between = True
        return redis_xread(self._seen)

    def _begins(self, data: bytearray, size: int) -> bool:
        head = self._head + data[: min(size, REDIS_HEAD_MAX)]
        if not head.startswith(REDIS_HEAD[: len(head)]):
            raise BadAnswer(bytes(head))
        end = head.find(b"\r", len(REDIS_HEAD))
        if end < 0:
            self._head = head
            return False
        self._due = self._seen + int(head[len(REDIS_HEAD) : end])
        self._head = b""
        self._between = False
        return True


def redis_xread(seen: int) -> bytes:
    """Request for all records after the first `seen`, or the next one."""
    last = b"1-%d" % (seen - 1) if seen else b"0"
    return protocols.redis_command(b"XREAD", b"BLOCK", b"0", b"STREAMS", STREAM.encode(), last)


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    line = socket.create_connection((host, int(port)), timeout=WAIT_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def open_watchers(address: str, watching: Watching, count: int) -> list[socket.socket]:
    """Open watchers, and wait until all of them will see new records."""
    lines: list[socket.socket] = []
    hellos = watching.hellos(address, count)
    for first in range(0, count, OPENED_AT_ONCE):
        wave = []
        for hello in hellos[first : first + OPENED_AT_ONCE]:
            wave.append(connect(address))
            wave[-1].sendall(hello)
        for line in wave:
            await_text(line, watching.opened)
        lines += wave
    return lines


def open_writer(address: str, watching: Watching) -> socket.socket:
    line = connect(address)
    line.sendall(watching.writer_hello)
    await_text(line, watching.writer_opened)
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
    answers = Exchange("http", b"").answers()
    came = b""
    while True:
        data = line.recv(1 << 16)
        if not data:
            raise BadAnswer(came[:500] or b"the connection was closed")
        came += data
        if answers.feed(data):
            return came.partition(b"\r\n\r\n")[2]
