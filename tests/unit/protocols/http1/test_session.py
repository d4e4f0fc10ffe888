"""The HTTP/1 state machine: which events do bytes cause, and what may follow each response?"""

from __future__ import annotations

import pytest

from tests.support.connection_bench import chunked, fast, slow
from topics.protocols.http.exchange import Request, Response
from topics.protocols.http1.framing import FramingError, Head
from topics.protocols.http1.session import (
    BODY,
    CHECKED_FROM,
    CLOSED,
    DISCARD_MAX,
    FAST_BODY_MAX,
    HTTP2,
    IDLE,
    OPEN,
    PREFACE,
    STREAM,
    WEBSOCKET,
    BodyTooLarge,
    Event,
    Http1Session,
)

HANDSHAKE = slow(
    b"/v0/ws",
    headers=b"Upgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n",
)


def session_after(data: bytes) -> tuple[Http1Session, list[Event]]:
    session = Http1Session(body_bytes_max=1000)
    session.receive(data)
    events = []
    while (event := session.next_event(7)) is not None:
        events.append(event)
    return session, events


@pytest.mark.parametrize(
    ("data", "kinds", "state"),
    [
        (b"", [], IDLE),
        (b"\r\n", [], IDLE),
        (b"GET / HT", [], IDLE),
        (fast(), [Request], OPEN),
        (fast()[:-1], [], BODY),
        (fast(body=bytes(CHECKED_FROM))[:-1], [Head], BODY),
        (fast(body=bytes(FAST_BODY_MAX + 1)), [Head, Request], OPEN),
        (slow(), [Head, Request], OPEN),
        (fast() + slow(), [Request], OPEN),
        (fast(headers=b"X-Odd: 1\r\n")[:-1], [Head], BODY),
        (chunked(b"/a", b"abc"), [Head, Request], OPEN),
        (chunked(b"/a", b"abc")[:-1], [Head], BODY),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r", [], IDLE),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nmore", [str], HTTP2),
    ],
)
def test_events(data: bytes, kinds: list[type], state: str) -> None:
    session, events = session_after(data)
    assert [type(event) for event in events] == kinds and session.state is state
    if state is HTTP2:
        assert events == [PREFACE] and session.take_rest() == data
    if kinds[-1:] == [Request]:
        last = events[-1]
        assert isinstance(last, Request) and last.received_us == 7


def test_figures() -> None:
    request = chunked(b"/a", b"abc", b"defg")
    session = Http1Session(body_bytes_max=1000)
    for i in range(len(request) - 1):
        session.receive(request[i : i + 1])
        session.next_event(0)
        assert session.arrived == i + 1 and session.buffered <= i + 1
    assert session.buffered == 7
    session.receive(request[-1:] + b"GET")
    event = session.next_event(0)
    assert isinstance(event, Request) and event.body == b"abcdefg"
    assert session.arrived == session.buffered == 3, "of the next request"


@pytest.mark.parametrize(
    ("data", "stays", "head"),
    [
        (fast(), True, b"Content-Length: 2\r\nDate"),
        (slow(), True, b"Content-Length: 2\r\nDate"),
        (slow(headers=b"Connection: close\r\n"), False, b"Connection: close\r\n"),
        (slow(headers=b"Connection: x\r\nConnection: y, Close\r\n"), False, b"Connection: close\r\n"),
        (slow(method=b"FROB"), False, b"Connection: close\r\n"),
        (b"GET / HTTP/1.0\r\n\r\n", False, b"Connection: close\r\n"),
        (b"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", True, b"Connection: keep-alive\r\n"),
        (fast()[:-1], False, b"Connection: close\r\n"),
    ],
)
def test_responses(data: bytes, stays: bool, head: bytes) -> None:
    session, _ = session_after(data)
    sent, body = session.respond(Response(200, b"{}"), keep_alive=True)
    assert head in sent and body == b"{}" and session.state is (IDLE if stays else CLOSED)
    session, _ = session_after(data)
    sent, _ = session.respond(Response(200, b"{}"), keep_alive=False)
    assert b"Connection: close\r\n" in sent and session.state is CLOSED and not session.buffered


def test_a_head_request_gets_no_body() -> None:
    session, _ = session_after(slow(method=b"HEAD"))
    sent, body = session.respond(Response(200, b"{}"), keep_alive=True)
    assert b"Content-Length: 2\r\n" in sent and body == b"" and session.state is IDLE
    session, _ = session_after(slow(method=b"HEAD"))
    assert session.respond_stream(Response(200))[1] is False and session.state is CLOSED


def test_streams_and_websockets_take_the_connection_over() -> None:
    session, _ = session_after(slow())
    head, may_follow = session.respond_stream(Response(200, content_type=b"text/event-stream"))
    assert head.startswith(b"HTTP/1.1 200") and may_follow and session.state is STREAM
    session, events = session_after(HANDSHAKE + b"frames")
    assert isinstance(events[-1], Request) and events[-1].wants_websocket
    assert session.upgrade().startswith(b"HTTP/1.1 101") and session.state is WEBSOCKET
    assert session.take_rest() == b"frames" and session.next_event(0) is None


def test_the_body_of_a_refused_request_is_read_but_not_kept() -> None:
    head = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"
    session, _ = session_after(head % 9 + b"\r\nabc")
    assert session.discard_body()
    kept = session.buffered
    session.receive(b"defghi" + slow())
    event = session.next_event(0)
    assert kept == 3 and isinstance(event, Request) and session.state is OPEN
    session.respond(Response(401), keep_alive=True)
    assert isinstance(session.next_event(0), Head)
    for fields in (head % (DISCARD_MAX + 1), head % 9 + b"Expect: 100-continue\r\n"):
        assert not session_after(fields + b"\r\nabc")[0].discard_body()
    assert not session_after(chunked(b"/a", b"abc")[:-1])[0].discard_body()


def test_invalid_requests_are_refused() -> None:
    with pytest.raises(BodyTooLarge):
        session_after(chunked(b"/a", bytes(600), bytes(401)))
    for data in (
        slow().replace(b"Host: x\r\n", b""),
        slow(headers=b"ETag: 1\r\nETag: 1\r\n"),
        slow(b"http://a@x/"),
        b"PRI * HTTP/2.0\r\n\r\nno",
    ):
        with pytest.raises(FramingError):
            session_after(data)


def test_the_origin_is_known_as_soon_as_it_has_arrived() -> None:
    assert session_after(b"GET / HTTP/1.1\r\nHost: x\r\nOrigin: http://a\r\nAcc")[0].origin == b"http://a"
    assert session_after(fast(headers=b"Origin: http://a\r\n")[:-1])[0].origin == b"http://a"
    assert session_after(b"GET / HTTP/1.1\r\nHost")[0].origin == b""
