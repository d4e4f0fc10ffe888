"""Requests as bytes, for HTTP, Redis (RESP) and NATS, and single questions to a server for setup and checks.

The load generator (scripts/load) sends the requests; it replaces the names in `WIDTHS` by numbers of fixed width.
"""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass

CLIENT = b"{client}"  # the number of the connection: NATS sends responses to an inbox, and each client needs its own
TOPIC = b"{topic}"  # the next of the topics of a load
CURSOR = b"{cursor}"  # the place to read from, which follows the answers; padded with spaces, as JSON allows
CURSOR_ID = b"{cursor:0}"  # the same with leading zeros
NEXT_ID = b"{next:0}"  # counts up with each use
WIDTHS = {CLIENT: 5, TOPIC: 5, CURSOR: 20, CURSOR_ID: 20, NEXT_ID: 20}
NAMES = re.compile(b"|".join(re.escape(name) for name in WIDTHS))

MARK = b"~"  # once in each record and nowhere else on the wire: the generator counts records by it
ADMIN = 99_999  # number of the client that creates and deletes streams
TAIL = 99_000  # number of the client that watches the end of a stream

# Sent when a NATS connection opens; the PONG confirms the subscription.
HELLO = {
    "nats": b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true}\r\n'
    b"SUB _INBOX.{client} 1\r\nPING\r\n"
}
HELLO_END = b"PONG\r\n"


class BadAnswer(Exception):
    """The server refused the request, or sent an unexpected response."""


@dataclass(frozen=True)
class Exchange:
    """A request, which may be a pipeline, and what its answer must be."""

    protocol: str
    request: bytes
    records: int = 1  # written or read
    replies: int = 1  # responses that complete it; NATS: messages
    marks: int = -1  # records in the answer; -1: not checked
    timed: bool = True  # whether its latency counts

    def numbered(self, client: int, number: int = 0) -> bytes:
        """The request with its numbers."""

        def digits(name: re.Match[bytes]) -> bytes:
            value = client if name[0] == CLIENT else number
            return (b"%20d" % value) if name[0] == CURSOR else b"%0*d" % (WIDTHS[name[0]], value)

        return NAMES.sub(digits, self.request)

    def hello(self, client: int) -> bytes:
        return HELLO.get(self.protocol, b"").replace(CLIENT, b"%05d" % client)

    def is_complete(self, came: bytes) -> bool:
        """Whether the whole answer has come; refusals raise."""
        if self.protocol == "http":
            return http_complete(came)
        count = resp_replies(came) if self.protocol == "resp" else nats_messages(came)
        return count >= self.replies


def sent_size(text: bytes) -> int:
    """The length of a text, with numbers in place of their names."""
    return len(text) + sum(WIDTHS[name] - len(name) for name in NAMES.findall(text))


def http_complete(came: bytes) -> bool:
    end = came.find(b"\r\n\r\n")
    if end < 0:
        return False
    if not came.startswith(b"HTTP/1.1 2"):
        raise BadAnswer(came[:500])
    at = came.find(b"Content-Length: ", 0, end)
    return len(came) >= end + 4 + int(came[at + 16 : came.find(b"\r", at)])


def resp_replies(came: bytes) -> int:
    """The number of complete replies. Elements of arrays are counted instead of nested."""
    at = replies = pending = 0
    while (end := came.find(b"\r\n", at)) >= 0:
        kind, number = came[at : at + 1], came[at + 1 : end]
        if kind not in {b"+", b":", b"$", b"*"}:
            raise BadAnswer(came[at : at + 500])
        pending = pending or 1
        at = end + 2
        if kind == b"$" and int(number) >= 0:
            at += int(number) + 2
            if at > len(came):
                break
        pending -= 1
        if kind == b"*":
            pending += max(0, int(number))
        replies += not pending
    return replies


def nats_messages(came: bytes) -> int:
    """The number of complete messages and PONGs."""
    at = found = 0
    while (end := came.find(b"\r\n", at)) >= 0:
        words = came[at:end].split(b" ")
        at = end + 2
        if words[0] in {b"MSG", b"HMSG"}:
            content = came[at : at + int(words[-1])]
            at += int(words[-1]) + 2
            if at > len(came):
                break
            if content.startswith((b"NATS/1.0 4", b"NATS/1.0 5")) or b'"error"' in content[:500]:
                raise BadAnswer(content[:500])
            found += 1
        elif words[0] == b"PONG":
            found += 1
        elif words[0] not in {b"PING", b"INFO", b"+OK"}:
            raise BadAnswer(came[:500])
    return found


def payload(size: int) -> bytes:
    """A record of this size, the same for all systems: compact JSON with the mark."""
    return b'{"id":1748,"text":"' + b"x" * (size - 22) + MARK + b'"}'


def http_post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {sent_size(body)}"]).encode() + b"\r\n\r\n" + body


def redis_command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (sent_size(word), word) for word in words])


def nats_publish(subject: str, body: bytes, reply: bytes = b"_INBOX.{client}") -> bytes:
    return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply, sent_size(body), body)


def ask(address: str, exchange: Exchange, *, number: int = 0, timeout_s: float = 60) -> bytes:
    """Run one exchange on a new connection; return the response. `number` is that of its cursor."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
        hello = exchange.hello(ADMIN)
        if hello:
            connection.sendall(hello)
            greeting = b""
            while HELLO_END not in greeting:
                greeting += _received(connection)
        connection.sendall(exchange.numbered(ADMIN, number))
        came = _received(connection)
        while not exchange.is_complete(came):
            came += _received(connection)
    return came


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 18)
    if not data:
        raise BadAnswer(b"the connection was closed")
    return data


def nats_ask(address: str, subject: str, body: object) -> bytes:
    """A request to JetStream's management API."""
    text = json.dumps(body).encode() if body is not None else b""
    return ask(address, Exchange("nats", nats_publish(subject, text)))
