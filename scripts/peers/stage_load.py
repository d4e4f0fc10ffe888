"""Writers and one waiting reader for the stage budget, on plain sockets in this process.

Not the load generator of the comparison: here each write must be followed by name, so every answer is read, and the
writes of a half loaded server come at random moments and not in step. select() waits with the precision for that.
"""

from __future__ import annotations

import random
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns

SECOND_NS = 1_000_000_000
LONE_PAUSE_NS = 1_000_000  # enough for the reader to wait again, and for all processes to sleep
WAIT_MS = 20_000
DATA = b'{"id":1748,"text":"%b"}' % (b"x" * 76)  # 100 bytes


@dataclass
class Seen:
    """By seq, in nanoseconds: when each write was sent, acknowledged, and received by the reader."""

    sent: dict[int, int] = field(default_factory=dict)
    acked: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    began_ns: int = 0
    ended_ns: int = 0

    @property
    def writes_per_s(self) -> float:
        return len(self.acked) * SECOND_NS / (self.ended_ns - self.began_ns)


class Client:
    """A connection with at most one request in flight."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._parts = b""
        self.sent_ns = 0

    def send(self, request: bytes) -> None:
        self.sent_ns = perf_counter_ns()
        self.socket.sendall(request)

    def receive(self) -> bytes | None:
        """The body of the response, once it is complete."""
        self._parts += self.socket.recv(1 << 20)
        head, end, body = self._parts.partition(b"\r\n\r\n")
        if not end or len(body) < _number_after(head, b"Content-Length: "):
            return None
        if not head.startswith(b"HTTP/1.1 2"):
            raise RuntimeError(f"refused: {self._parts[:500]!r}")
        self._parts = b""
        return body


class Load:
    def __init__(self, address: str, topic: str, connections: int, *, with_reader: bool = True) -> None:
        self._write = request(f"/v0/topics/{topic}", b'{"records":[{"data":%b}]}' % DATA)
        self._diff_path = f"/v0/topics/{topic}/diff"
        self._writers = [Client(address) for _ in range(connections)]
        self._reader = Client(address) if with_reader else None
        self._idle = list(self._writers)
        self._read_to = self._acked_to = 0
        self._by_fd = {client.socket.fileno(): client for client in self._writers}
        self._poll = select.epoll()
        for fd in self._by_fd:
            self._poll.register(fd, select.EPOLLIN)
        if self._reader is not None:
            self._by_fd[self._reader.socket.fileno()] = self._reader
            self._poll.register(self._reader.socket.fileno(), select.EPOLLIN)
            self._ask()

    def close(self) -> None:
        self._poll.close()
        for client in self._by_fd.values():
            client.socket.close()

    def run(self, seconds: float, rate: float | None) -> Seen:
        """Write at this rate per second, as fast as possible (0), or one at a time with pauses (None)."""
        chance = random.Random(1)
        seen = Seen(began_ns=perf_counter_ns())
        end_ns = seen.began_ns + round(seconds * SECOND_NS)
        next_ns = seen.began_ns + LONE_PAUSE_NS
        while (now_ns := perf_counter_ns()) < end_ns:
            if rate is None:
                if now_ns >= next_ns and self._is_quiet():
                    self._idle.pop().send(self._write)
            elif self._idle and (not rate or now_ns >= next_ns):
                self._idle.pop().send(self._write)
                next_ns += round(chance.expovariate(rate) * SECOND_NS) if rate else 0
                continue  # the next one may already be due
            wait_ns = next_ns - now_ns if self._idle and next_ns > now_ns else SECOND_NS // 100
            if self._receive(seen, wait_ns) and rate is None and self._is_quiet():
                next_ns = perf_counter_ns() + LONE_PAUSE_NS
        seen.ended_ns = perf_counter_ns()
        while len(self._idle) < len(self._writers):
            self._receive(seen, SECOND_NS // 100)
        return seen

    def _is_quiet(self) -> bool:
        """Whether every write is acknowledged and, if there is a reader, received by it."""
        return len(self._idle) == len(self._writers) and (
            self._reader is None or self._read_to >= self._acked_to
        )

    def _receive(self, seen: Seen, wait_ns: int) -> bool:
        ready, _, _ = select.select([self._poll], [], [], wait_ns / SECOND_NS)
        if not ready:
            return False
        for fd, _ in self._poll.poll(0):
            client = self._by_fd[fd]
            body = client.receive()
            if body is None:
                continue
            if client is self._reader:
                self._have_read(seen, body)
            else:
                self._acknowledged(seen, client, body)
        return True

    def _acknowledged(self, seen: Seen, client: Client, body: bytes) -> None:
        now_ns = perf_counter_ns()
        seq = _number_after(body, b'"first_seq":')
        seen.sent[seq], seen.acked[seq] = client.sent_ns, now_ns
        self._acked_to = max(self._acked_to, seq)
        self._idle.append(client)

    def _have_read(self, seen: Seen, body: bytes) -> None:
        now_ns = perf_counter_ns()
        read_to = _number_after(body, b'"next_from_seq":')
        for seq in range(self._read_to + 1, read_to + 1):
            seen.read[seq] = now_ns
        self._read_to = read_to
        self._ask()

    def _ask(self) -> None:
        assert self._reader is not None
        body = b'{"from_seq":%d,"wait_ms":%d,"limit":1000}' % (self._read_to, WAIT_MS)
        self._reader.send(request(self._diff_path, body))


@contextmanager
def load(address: str, topic: str, connections: int, *, with_reader: bool = True) -> Iterator[Load]:
    running = Load(address, topic, connections, with_reader=with_reader)
    try:
        yield running
    finally:
        running.close()


def request(path: str, body: bytes) -> bytes:
    lines = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return lines.encode() + b"\r\n\r\n" + body


def _number_after(text: bytes, name: bytes) -> int:
    at = text.find(name)
    if at < 0:
        raise RuntimeError(f"no {name!r} in {text[:500]!r}")
    digits = text[at + len(name) : at + len(name) + 20]
    end = next((i for i, digit in enumerate(digits) if not 48 <= digit <= 57), len(digits))
    return int(digits[:end])
