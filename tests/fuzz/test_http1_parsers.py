"""Goal: whatever our HTTP/1 parser accepts, h11 and httptools read in the same way: method, target, headers, body and end.

Method: kept and mutated inputs of the fuzz target. The bytes of each accepted request go to fresh parsers, which must find
exactly one request in them, so all three agree on where each request of the connection ends. We are stricter than both, so
nothing is said about what we refuse.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import h11
import httptools
import pytest

from tests.fuzz.mutate import Mutator
from tests.fuzz.runner import starting_points
from tests.fuzz.targets import http1
from tests.support.length import pick
from topics.protocols.http.exchange import Request, Response
from topics.protocols.http.fields import collect_fields, set_fields
from topics.protocols.http1.framing import FramingError
from topics.protocols.http1.session import IDLE, BodyTooLarge, Http1Session

MUTATIONS = pick(short=2_000, long=200_000)
SEED = 20_26
# llhttp has a fixed list of methods. We answer others, and close the connection.
LLHTTP_METHODS = frozenset(
    b"DELETE GET HEAD POST PUT CONNECT OPTIONS TRACE COPY LOCK MKCOL MOVE PROPFIND PROPPATCH SEARCH UNLOCK BIND REBIND "
    b"UNBIND ACL REPORT MKACTIVITY CHECKOUT MERGE M-SEARCH NOTIFY SUBSCRIBE UNSUBSCRIBE PATCH PURGE MKCALENDAR LINK "
    b"UNLINK SOURCE QUERY".split()
)


@dataclass
class Read:
    """A request as a parser reads it."""

    method: bytes = b""
    target: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""

    def request(self) -> Request:
        """As the session would make it, from what that parser found."""
        authority, target = b"", self.target
        if target.lower().startswith((b"http://", b"https://")):
            rest = target.partition(b"://")[2]
            size = min((at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0), default=len(rest))
            authority, target = rest[:size], rest[size:]
            if not target.startswith(b"/"):
                target = b"/" + target
        path, _, query = target.partition(b"?")
        request = Request(self.method, path, query, 0, self.body)
        set_fields(request, collect_fields([(name.lower(), value) for name, value in self.headers]))
        if authority:
            request.host = authority
        return request


def accepted(data: bytes, *, reads_plain: bool) -> list[tuple[Request, bytes]]:
    """The requests of a connection that sends this, and the bytes of each."""
    session = Http1Session(body_bytes_max=1 << 20, reads_plain=reads_plain)
    session.receive(data)
    found: list[tuple[Request, bytes]] = []
    at = 0
    while session.state is IDLE:
        try:
            while (event := session.next_event(0)) is not None and not isinstance(event, Request):
                if isinstance(event, str):
                    return found  # HTTP/2
        except (FramingError, BodyTooLarge):
            return found
        if event is None:
            return found
        end = len(data) - session.buffered
        while data[at : at + 2] == b"\r\n":  # blank lines before a request
            at += 2
        found.append((event, data[at:end]))
        at = end
        session.respond(Response(200), keep_alive=True)
    return found


def by_h11(data: bytes) -> Read:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    read = Read()
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        assert event is not h11.NEED_DATA, "h11 waits for more"
        if isinstance(event, h11.Request):
            read.method, read.target, read.headers = event.method, event.target, list(event.headers)
        elif isinstance(event, h11.Data):
            read.body += bytes(event.data)
    assert connection.trailing_data[0] == b"", "h11 sees an earlier end"
    return read


class Collector:
    def __init__(self) -> None:
        self.read = Read()
        self.ends = 0
        self.is_head = True

    def on_url(self, url: bytes) -> None:
        assert not self.ends, "httptools sees an earlier end"
        self.read.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_head:  # trailers are ignored
            self.read.headers.append((name, value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.is_head = False

    def on_body(self, body: bytes) -> None:
        self.read.body += body

    def on_message_complete(self) -> None:
        self.ends += 1


def by_httptools(data: bytes) -> Read:
    collector = Collector()
    parser = httptools.HttpRequestParser(collector)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade as upgrade:
        assert upgrade.args[0] == len(data), "httptools sees an earlier end"
    assert collector.ends == 1, "httptools waits for more"
    collector.read.method = parser.get_method()
    return collector.read


def check(data: bytes) -> int:
    found = accepted(data, reads_plain=True)
    assert found == accepted(data, reads_plain=False), "plain requests are read in the same way"
    for ours, sent in found:
        ours.wants_websocket = False
        assert by_h11(sent).request() == ours, sent
        if ours.method in LLHTTP_METHODS:
            assert by_httptools(sent).request() == ours, sent
    return len(found)


INPUTS = [data[1:] for data in starting_points(http1.TARGET)]


def test_kept_inputs() -> None:
    assert sum(map(check, INPUTS)) >= len(http1.seeds()), "most seeds are requests"


def test_mutated_inputs() -> None:
    mutants = Mutator(SEED, INPUTS, http1.TOKENS)
    assert sum(check(data) for data in itertools.islice(mutants, MUTATIONS)) > MUTATIONS // 8


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX-A: b\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-A: b\r\n c\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na",
    ],
)
def test_where_we_are_stricter_than_h11(data: bytes) -> None:
    assert by_h11(data).method and accepted(data, reads_plain=True) == []
