"""Requests as bytes, and detection of complete responses, for HTTP, Redis (RESP) and NATS.

Responses are not parsed, to keep the load generator fast. A client has one request in flight, so a response is complete
when its length, its number of lines or its end mark has been received.
"""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass, replace

# Placeholder for a client's number: NATS sends responses to an inbox, and each client needs its own.
CLIENT = b"{client}"
ADMIN = 99_999  # number of the client that creates and deletes streams
TAIL = 99_000  # number of the client that watches the end of a stream

# Sent when a NATS connection opens; the PONG confirms the subscription.
HELLO = {
    "nats": b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true}\r\n'
    b"SUB _INBOX.{client} 1\r\nPING\r\n"
}
HELLO_END = b"PONG\r\n"


# At the start of a response: an error of Redis, or an error or status of NATS.
REFUSED = re.compile(rb"\A-|-ERR|NATS/1\.0 [45]")


class BadAnswer(Exception):
    """The server refused the request, or sent an unexpected response."""


@dataclass(frozen=True)
class Exchange:
    """A request, and how to recognize the end of its response.

    HTTP has a length; the others a number of lines, an end mark, or a size known in advance because nothing changes.
    """

    protocol: str
    request: bytes
    records: int = 1
    lines: int = 0
    end: bytes = b""
    size: int = 0

    def numbered(self, client: int) -> bytes:
        return self.request.replace(CLIENT, b"%05d" % client)

    def hello(self, client: int) -> bytes:
        return HELLO.get(self.protocol, b"").replace(CLIENT, b"%05d" % client)

    def answers(self) -> Answers:
        if self.protocol == "http":
            return HttpAnswers(self.records)
        if self.size:
            return SizedAnswers(self.records, self.size)
        if self.end:
            return MarkedAnswers(self.records, self.end)
        if self.protocol == "nats":
            return NatsLines(self.records, self.lines)
        return RedisLines(self.records, self.lines)


class Answers:
    """Responses to one client. `feed` returns True when a response is complete."""

    def __init__(self, records: int) -> None:
        self._records = records
        self._complete = 0

    def feed(self, data: bytes) -> bool:
        raise NotImplementedError

    @property
    def records(self) -> float:
        """Records acknowledged so far, including those of an incomplete pipeline."""
        return self._complete * self._records


class HttpAnswers(Answers):
    def __init__(self, records: int) -> None:
        super().__init__(records)
        self._head = b""
        self._missing = 0  # bytes of the body not received yet; 0: the head is incomplete

    def feed(self, data: bytes) -> bool:
        if self._missing:
            self._missing -= len(data)
        else:
            if self._head:
                data = self._head + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._head = data
                return False
            self._head = b""
            if not data.startswith(b"HTTP/1.1 2"):
                raise BadAnswer(data[:500])
            at = data.find(b"Content-Length: ", 0, end)
            self._missing = end + 4 + int(data[at + 16 : data.find(b"\r", at)]) - len(data)
        if self._missing:
            return False
        self._complete += 1
        return True


class RedisLines(Answers):
    def __init__(self, records: int, lines: int) -> None:
        super().__init__(records)
        self._lines = lines
        self._seen = 0
        self._due = lines

    def feed(self, data: bytes) -> bool:
        if b"\n-" in data or (
            data[:1] == b"-" and data[1:2].isalpha()
        ):  # an id cut in two also begins with -
            raise BadAnswer(data[:500])
        self._seen += data.count(b"\n")
        return self._full(data)

    def _full(self, data: bytes) -> bool:
        if self._seen < self._due:
            return False
        if self._seen > self._due:
            raise BadAnswer(b"more than one answer: " + data[:500])
        self._due += self._lines
        return True

    @property
    def records(self) -> float:
        return self._seen * self._records / self._lines


class NatsLines(RedisLines):
    """Acknowledgements of two lines each, with PINGs of the server in between."""

    def __init__(self, records: int, lines: int) -> None:
        super().__init__(records, lines)
        self._rest = b""

    def feed(self, data: bytes) -> bool:
        if b'"error"' in data or b"-ERR" in data or b"NATS/1.0 " in data:
            raise BadAnswer(data[:500])
        if self._rest:
            data = self._rest + data
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        self._seen += data.count(b"\n", 0, end) - data.count(b"PING\r\n", 0, end)
        return self._full(data)


class MarkedAnswers(Answers):
    def __init__(self, records: int, end: bytes) -> None:
        super().__init__(records)
        self._end = end
        self._last = b""

    def feed(self, data: bytes) -> bool:
        if not self._last and REFUSED.search(data, 0, 200):
            raise BadAnswer(data[:500])
        found = self._end in self._last + data
        self._last = b"" if found else (self._last + data)[-len(self._end) :]
        self._complete += found
        return found


class SizedAnswers(Answers):
    """Responses of a known size, from a stream that does not change: searching for their ends would be expensive.

    A PING of the NATS server in between shifts the detected ends by six bytes, which does not matter.
    """

    def __init__(self, records: int, size: int) -> None:
        super().__init__(records)
        self._size = size
        self._missing = size

    def feed(self, data: bytes) -> bool:
        if self._missing == self._size and REFUSED.search(data, 0, 200):
            raise BadAnswer(data[:500])
        self._missing -= len(data)
        if self._missing > 0:
            return False
        self._missing += self._size
        self._complete += 1
        return True


def payload(size: int) -> bytes:
    """A record of this size, the same for all systems: compact JSON."""
    return b'{"id":1748,"text":"' + b"x" * (size - 21) + b'"}'


def http_post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}"]).encode() + b"\r\n\r\n" + body


def redis_command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def nats_publish(subject: str, body: bytes, reply: bytes = b"_INBOX.{client}") -> bytes:
    return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply, len(body), body)


def ask(address: str, exchange: Exchange, *, timeout_s: float = 60) -> bytes:
    """Run one exchange on a new connection; return the response."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
        hello = exchange.hello(ADMIN)
        if hello:
            connection.sendall(hello)
            greeting = b""
            while HELLO_END not in greeting:
                greeting += _received(connection)
        connection.sendall(exchange.numbered(ADMIN))
        answers = exchange.answers()
        parts = [_received(connection)]
        while not answers.feed(parts[-1]):
            parts.append(_received(connection))
    return b"".join(parts)


def sized(address: str, exchange: Exchange, record: bytes) -> Exchange:
    """The exchange with the size of its response, after a check that it has the right number of records."""
    answer = ask(address, exchange)
    if answer.count(record) != exchange.records:
        raise BadAnswer(b"%d records instead of %d" % (answer.count(record), exchange.records))
    return replace(exchange, size=len(answer))


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 18)
    if not data:
        raise BadAnswer(b"the connection was closed")
    return data


def nats_ask(address: str, subject: str, body: object) -> bytes:
    """A request to JetStream's management API."""
    text = json.dumps(body).encode() if body is not None else b""
    return ask(address, Exchange("nats", nats_publish(subject, text), lines=2))
