"""How watchers of each system open, what their writer sends, and how records are counted without parsing them.

Every record holds `MARK` once, a byte that nothing else on the wire contains: neither the head of an answer nor an event's
id. So what a watcher has seen is how often that byte came, however the bytes were cut.

| | a watcher | the writer |
|---|---|---|
| topics | a session (POST), then its event stream (GET), from the end of the topic | one POST a batch |
| Redis | XREAD BLOCK, asked again after every answer | a pipeline of XADD |
| NATS core | a plain SUB | PUB, which nobody acknowledges; many end with a PING, whose PONG says that they were taken |
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
OPENED_AT_ONCE = 64  # fewer than any server lets wait to be accepted
WAIT_S = 30.0

REDIS_HEAD = b"*1\r\n*2\r\n$3\r\nfan\r\n*"  # of an answer to XREAD; the number of its records follows
REDIS_HEAD_MAX = len(REDIS_HEAD) + 12


class Asking(Protocol):
    """A watcher that must ask again after each answer."""

    def feed(self, data: bytearray, size: int, found: int) -> bytes:
        """So many bytes came with so many records in them; what to send now, if anything."""


class Watching:
    """One system's side of it."""

    opened = b""  # what says that a watcher is in place; empty: it need not be waited for
    writer_hello = b""
    writer_opened = b""

    def hellos(self, address: str, count: int) -> list[bytes]:
        """What each of so many watchers sends first."""
        raise NotImplementedError

    def write(self, count: int) -> tuple[bytes, Answers | None]:
        """So many records, and how their acknowledgement is known; None: nobody sends one."""
        raise NotImplementedError

    def asking(self) -> Asking | None:
        """None: a watcher is told without asking."""
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
        # Within one millisecond of our own the server counts up: a reader's place is how many records it has seen.
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
    """One connection's answers to XREAD: each says first how many records it has, and the next is asked for after it."""

    def __init__(self) -> None:
        self._seen = 0
        self._due = 0  # as many are seen when the answer that is coming is complete
        self._between = True  # no answer has begun since the last was complete
        self._head = b""  # of an answer, cut before its number of records ended

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
    """All that came after the first `seen` records, or the next to come."""
    last = b"1-%d" % (seen - 1) if seen else b"0"
    return protocols.redis_command(b"XREAD", b"BLOCK", b"0", b"STREAMS", STREAM.encode(), last)


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    line = socket.create_connection((host, int(port)), timeout=WAIT_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def open_watchers(address: str, watching: Watching, count: int) -> list[socket.socket]:
    """All of them in place: what is written from now on is for all to see."""
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
    """Read until this has come, and the end of its line or paragraph with it."""
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
