"""An open-loop load: requests are sent when they are due, whether or not earlier ones are answered.

One process, many connections, each with up to PIPELINED unanswered requests. A request that is due while all connections are full
counts as offered, but is not sent: the server has stopped reading. The answers of a connection come in the order
of its requests, so the k-th status belongs to the k-th record, whose data is [connection, k].
"""

from __future__ import annotations

import errno
import multiprocessing
import re
import select
import socket
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

PIPELINED = 8
TOPICS = 16
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
_STATUS_BYTES = 12


def topic_of(connection: int) -> str:
    return f"bulk-{connection % TOPICS}"


@dataclass
class Result:
    offered: int = 0
    sent: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    acked: list[list[int]] = field(default_factory=list)  # by connection: the numbers of its records

    @property
    def acks(self) -> int:
        return sum(map(len, self.acked))


class Client:
    """One connection."""

    def __init__(self, number: int, address: tuple[str, int]) -> None:
        self.number = number
        self.socket = socket.create_connection(address, timeout=120)
        self.socket.setblocking(False)
        self.sent = self.answered = 0
        self.acked: list[int] = []
        self._rest = b""
        self._unsent = b""
        self._head = (
            f"POST /v0/topics/{topic_of(number)} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        ).encode()

    @property
    def has_room(self) -> bool:
        return not self._unsent and self.sent - self.answered < PIPELINED

    def send(self) -> None:
        body = b'{"records":[{"data":[%d,%d]}]}' % (self.number, self.sent)
        self._unsent = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        self.sent += 1
        self.flush()

    def flush(self) -> None:
        if self._unsent:
            try:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    raise

    def receive(self, statuses: dict[int, int]) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the server closed a connection")
        self._rest += data
        end = 0
        for found in _STATUS.finditer(self._rest):
            status = int(found[1])
            statuses[status] = statuses.get(status, 0) + 1
            if status in (200, 201):
                self.acked.append(self.answered)
            self.answered += 1
            end = found.end()
        self._rest = self._rest[max(end, len(self._rest) - _STATUS_BYTES + 1) :]


def run(address: tuple[str, int], connections: int, rate: float, seconds: float) -> Result:
    """`rate`: requests per second; 0: a closed loop, one request per connection at a time."""
    result = Result()
    clients = [Client(i, address) for i in range(connections)]
    poll = select.epoll()
    for client in clients:
        poll.register(client.socket, select.EPOLLIN)
    by_fd = {client.socket.fileno(): client for client in clients}
    began = time.monotonic()
    at = 0
    if not rate:
        for client in clients:
            client.send()
    while (now := time.monotonic()) < began + seconds:
        due = int(rate * (now - began)) - result.offered
        for _ in range(min(due, connections)):
            client = clients[at]
            at = (at + 1) % connections
            if client.has_room:
                client.send()
            else:
                client.flush()
        result.offered += max(due, 0)
        for fd, _ in poll.poll(0.001):
            client = by_fd[fd]
            client.receive(result.statuses)
            if not rate and client.answered == client.sent:
                client.send()
    give_up = time.monotonic() + 60
    while any(client.answered < client.sent for client in clients) and time.monotonic() < give_up:
        for client in clients:
            client.flush()
        for fd, _ in poll.poll(0.05):
            by_fd[fd].receive(result.statuses)
    result.sent = sum(client.sent for client in clients)
    result.acked = [client.acked for client in clients]
    for client in clients:
        client.socket.close()
    return result


def _child(pipe: Connection, address: tuple[str, int], connections: int, rate: float, seconds: float) -> None:
    pipe.send(run(address, connections, rate, seconds))


class LoadProcess:
    """A load in its own process."""

    def __init__(self, address: tuple[str, int], *, connections: int, rate: float, seconds: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(theirs, address, connections, rate, seconds))
        self._process.start()

    def result(self) -> Result:
        found: Result = self._pipe.recv()
        self._process.join()
        return found
