"""HTTP/2: does every stream get its own answer, and nothing hostile more than its share?

The client is h2's own, in memory, over a transport that only remembers; the gate is scripted. Every test ends with the
connection lost and both budgets empty. The last tests use a real socket.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import uvloop
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    SettingsFrame,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from router.budget import ByteBudget
from router.exchange import Request, Respond, Response
from router.http2 import (
    NOISE_FORGIVEN_PER_S,
    NOISE_MAX,
    READ_BYTES_MAX,
    SLICE_BYTES_MAX,
    WRITE_BYTES_MAX,
    Http2Connection,
)
from router.http2_session import ENCODER_TABLE_BYTES_MAX, SETTINGS, STREAMS_MAX
from tests.support import length
from tests.support.faults import fault

BODY_BYTES_MAX = 300_000
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Transport:
    """A socket's double. `high_water` is how much the peer leaves unread before writing is paused."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.high_water: int | None = None
        self.closed = self.aborted = False
        self.server: Http2Connection | None = None

    def write(self, data: bytes) -> None:
        assert not self.aborted
        self.writes.append(data)
        if self.high_water is not None and sum(map(len, self.writes)) > self.high_water:
            assert self.server is not None
            self.server.pause_writing()

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def take(self) -> bytes:
        data = b"".join(self.writes)
        self.writes.clear()
        return data


class Gate:
    """Answers a path from `answers`; what is not there waits for the test."""

    def __init__(self) -> None:
        self.refusals: dict[bytes, Response] = {}
        self.answers: dict[bytes, Response] = {}
        self.screened: list[tuple[Request, int | None]] = []
        self.handled: list[Request] = []
        self.waiting: dict[bytes, Respond] = {}

    def screen(self, request: Request, declared_bytes: int | None) -> Response | None:
        self.screened.append((request, declared_bytes))
        return self.refusals.get(request.path)

    def handle(self, request: Request, respond: Respond) -> None:
        self.handled.append(request)
        answer = self.answers.get(request.path)
        if answer is not None:
            respond(answer)
        elif request.path.startswith(b"/echo"):
            respond(Response(200, bytes(request.body), b"text/plain", b"X-Path: " + request.path + b"\r\n"))
        else:
            self.waiting[request.path] = respond


@dataclass
class Got:
    headers: dict[bytes, bytes] = field(default_factory=dict)
    informational: list[bytes] = field(default_factory=list)
    body: bytes = b""
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> int:
        return int(self.headers[b":status"])

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


class Client:
    """h2's client side. `reading` says whether windows are given back."""

    def __init__(self) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=True))
        self.h2.initiate_connection()
        self.got: dict[int, Got] = {}
        self.settings: dict[int, int] = {}
        self.goaway: events.ConnectionTerminated | None = None
        self.reading = True
        self.order: list[int] = []
        self.frame_bytes_max = 0

    def stream(self, stream_id: int) -> Got:
        return self.got.setdefault(stream_id, Got())

    def request(
        self, path: str, body: bytes | None = None, *, method: str = "", end: bool = True, **headers: str
    ) -> int:
        stream_id = self.h2.get_next_available_stream_id()
        head = [(":method", method or ("GET" if body is None else "POST")), (":path", path)]
        head += [(":scheme", "http"), (":authority", "here")]
        head += [(name.replace("_", "-"), value) for name, value in headers.items()]
        self.h2.send_headers(stream_id, head, end_stream=end and body is None)
        self.stream(stream_id)
        if body is not None:
            self.send(stream_id, body, end=end)
        return stream_id

    def send(self, stream_id: int, body: bytes, *, end: bool = True) -> None:
        pieces = [body[at : at + 16384] for at in range(0, len(body), 16384)] or [b""]
        for piece in pieces[:-1]:
            self.h2.send_data(stream_id, piece)
        self.h2.send_data(stream_id, pieces[-1], end_stream=end)

    def receive(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            self.on(event)

    def on(self, event: events.Event) -> None:
        match event:
            case events.ResponseReceived():
                assert not self.stream(event.stream_id).headers
                headers = dict(event.headers)
                assert headers.pop(b"date").endswith(
                    b" GMT"
                )  # every answer has one, and it is never the same
                self.stream(event.stream_id).headers = headers
            case events.InformationalResponseReceived():
                self.stream(event.stream_id).informational.append(dict(event.headers)[b":status"])
            case events.DataReceived():
                self.stream(event.stream_id).body += event.data
                self.order.append(event.stream_id)
                self.frame_bytes_max = max(self.frame_bytes_max, len(event.data))
                if self.reading:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case events.StreamEnded():
                self.stream(event.stream_id).ended = True
            case events.StreamReset():
                self.stream(event.stream_id).reset = event.error_code
            case events.RemoteSettingsChanged():
                self.settings = {code: change.new_value for code, change in event.changed_settings.items()}
            case events.ConnectionTerminated():
                self.goaway = event


class Bench:
    def __init__(self, *, receiving: int = 1 << 20, sending: int = 8 << 20) -> None:
        self.now_us = 1_000_000_000
        self.transport = Transport()
        self.gate = Gate()
        self.receiving = ByteBudget(receiving)
        self.sending = ByteBudget(sending)
        self.server = Http2Connection(
            self.transport,  # type: ignore[arg-type]
            self.gate,
            body_bytes_max=BODY_BYTES_MAX,
            receiving=self.receiving,
            sending=self.sending,
            now_us=lambda: self.now_us,
        )
        self.transport.server = self.server
        self.client = Client()

    def meet(self) -> Bench:
        self.run()
        return self

    def run(self) -> None:
        """Carries bytes both ways until nobody has any."""
        while True:
            up = self.client.h2.data_to_send()
            if up:
                self.server.data_received(up)
            down = self.transport.take()
            if down:
                self.client.receive(down)
            if not up and not down:
                return

    def raw(self, data: bytes) -> None:
        self.server.data_received(data)

    def check_and_end(self) -> None:
        if not self.server.busy:
            assert (self.receiving.held, self.sending.held) == (0, 0)
        self.server.connection_lost()
        assert not self.server.busy
        assert (self.receiving.held, self.sending.held) == (0, 0)
        for respond in self.gate.waiting.values():
            respond(Response(200, b"too late"))


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def build(**options: Any) -> Bench:
        benches.append(Bench(**options))
        return benches[-1].meet()

    yield build
    for bench in benches:
        bench.check_and_end()


@pytest.fixture
def bench(make: Callable[..., Bench]) -> Bench:
    return make()


# Heads


def test_the_server_speaks_first_and_advertises_its_bounds(bench: Bench) -> None:
    fresh = Bench()
    assert fresh.transport.writes, "the settings do not wait for the client"
    for code, value in SETTINGS.items():
        assert bench.client.h2.remote_settings[code] == value
    assert bench.client.h2.outbound_flow_control_window == 8 << 20


def test_a_request_reaches_the_gate_as_it_was_sent(bench: Bench) -> None:
    stream = bench.client.request(
        "/echo/a%2Fb?x=1?&y=%20",
        b'{"a":1}',
        content_type="application/json",
        content_encoding="gzip",
        authorization="Bearer k",
        accept="*/*",
        accept_encoding="gzip",
        idempotency_key="once",
        cookie="ignored",
    )
    bench.run()
    assert bench.gate.handled == [
        Request(
            method=b"POST",
            path=b"/echo/a%2Fb",
            query=b"x=1?&y=%20",
            received_us=bench.now_us,
            body=b'{"a":1}',
            content_type=b"application/json",
            content_encoding=b"gzip",
            authorization=b"Bearer k",
            accept=b"*/*",
            accept_encoding=b"gzip",
            idempotency_key=b"once",
        )
    ]
    got = bench.client.got[stream]
    assert got.headers == {
        b":status": b"200",
        b"content-type": b"text/plain",
        b"content-length": b"7",
        b"x-path": b"/echo/a%2Fb",
    }
    assert (got.body, got.ended, got.reset) == (b'{"a":1}', True, None)


def test_repeated_headers(bench: Bench) -> None:
    head = [(":method", "GET"), (":path", "/echo"), (":scheme", "http"), (":authority", "here")]
    head += [("accept", "a/b"), ("accept", "c/d"), ("authorization", "first"), ("authorization", "second")]
    bench.client.h2.send_headers(1, head, end_stream=True)
    bench.run()
    request = bench.gate.handled[0]
    assert (request.accept, request.authorization) == (b"a/b, c/d", b"first")


@pytest.mark.parametrize(
    ("sent", "declared"),
    [({}, 0), ({"content_length": "5", "body": b"12345"}, 5), ({"body": b"12345"}, None)],
)
def test_the_gate_hears_the_declared_length(bench: Bench, sent: dict[str, Any], declared: int | None) -> None:
    bench.client.request("/echo", **sent)
    bench.run()
    assert [length for _, length in bench.gate.screened] == [declared]


def test_connect_has_no_path_and_is_the_gates_to_refuse(bench: Bench) -> None:
    bench.gate.refusals[b"/"] = Response(405, b"{}")
    bench.client.h2.send_headers(1, [(":method", "CONNECT"), (":authority", "here:80")])
    bench.run()
    assert bench.client.got[1].status == 405


def test_head_and_204(bench: Bench) -> None:
    bench.gate.answers[b"/a"] = Response(200, b"12345", b"text/plain")
    bench.gate.answers[b"/b"] = Response(204, head=b"X-Y: z\r\n")
    head = bench.client.request("/a", method="HEAD")
    empty = bench.client.request("/b")
    bench.run()
    assert bench.client.got[head].headers == {
        b":status": b"200",
        b"content-type": b"text/plain",
        b"content-length": b"5",
    }
    assert bench.client.got[head].body == b""
    assert bench.client.got[empty].headers == {b":status": b"204", b"x-y": b"z"}
    assert all(got.ended for got in bench.client.got.values())


def test_empty_body_type_and_lines_that_http2_forbids(bench: Bench) -> None:
    bench.gate.answers[b"/a"] = Response(200, memoryview(b""), b"", b'Connection: close\r\nETag: "a:b"\r\n')
    stream = bench.client.request("/a")
    bench.run()
    assert bench.client.got[stream].headers == {
        b":status": b"200",
        b"content-length": b"0",
        b"etag": b'"a:b"',
    }
    assert bench.client.got[stream].ended


def test_expect_100_continue(bench: Bench) -> None:
    bench.gate.refusals[b"/no"] = Response(401, b"{}")
    waits = bench.client.request("/echo", b"", end=False, expect="100-continue")
    refused = bench.client.request("/no", b"", end=False, expect="100-continue")
    at_once = bench.client.request("/wait", b"here", expect="100-continue")
    bench.run()
    assert bench.client.got[waits].informational == [b"100"]
    assert bench.client.got[refused].informational == []
    assert bench.client.got[refused].status == 401
    assert bench.client.got[at_once].informational == []
    bench.client.send(waits, b"body")
    bench.run()
    assert bench.client.got[waits].body == b"body"


def test_trailers_are_ignored(bench: Bench) -> None:
    stream = bench.client.request("/echo", b"body", end=False)
    bench.client.h2.send_headers(stream, [("x-checksum", "1")], end_stream=True)
    bench.run()
    assert bench.client.got[stream].body == b"body"


@fault("request", "an HTTP/2 body of another length than declared", "refused, and never carried out")
@pytest.mark.parametrize("body", [None, b"four", b"sixsix"])
@pytest.mark.parametrize("trailers", [False, True])
def test_a_body_of_another_length_than_declared(bench: Bench, body: bytes | None, trailers: bool) -> None:
    other = bench.client.request("/echo", b"other", end=False)
    stream = bench.client.request("/wait", body, end=not trailers, content_length="5")
    if trailers:
        bench.client.h2.send_headers(stream, [("x-checksum", "1")], end_stream=True)
    bench.client.send(other, b"!")
    bench.run()
    assert bench.client.got[stream].reset == ErrorCodes.PROTOCOL_ERROR
    assert not bench.gate.waiting
    assert bench.client.got[other].body == b"other!"


def test_a_client_that_ends_a_refused_body_early(bench: Bench) -> None:
    bench.gate.refusals[b"/no"] = Response(401, b"{}")
    stream = bench.client.request("/no", b"first", end=False, content_length="1000")
    bench.run()
    bench.client.h2.end_stream(stream)
    after = bench.client.request("/echo", b"alive")
    bench.run()
    assert (bench.client.got[stream].status, bench.client.got[stream].reset) == (401, None)
    assert bench.client.got[after].body == b"alive"


# Streams


def test_interleaved_streams_get_their_own_answers_in_any_order(bench: Bench) -> None:
    paths = [f"/wait/{number}" for number in range(50)]
    streams = {path: bench.client.request(path, b"", end=False) for path in paths}
    for part in range(3):
        for path in paths:
            bench.client.send(streams[path], f"{path}:{part} ".encode(), end=part == 2)
    bench.run()
    bodies = {request.path: request.body for request in bench.gate.handled}
    for path in reversed(paths):
        respond = bench.gate.waiting.pop(path.encode())
        respond(Response(200, b"for " + bytes(bodies[path.encode()])))
    bench.run()
    for path in paths:
        got = bench.client.got[streams[path]]
        assert got.body == f"for {path}:0 {path}:1 {path}:2 ".encode()
        assert got.ended
    assert bench.client.order[0] == streams[paths[-1]]


def test_one_batch_is_one_write(bench: Bench) -> None:
    for number in range(20):
        bench.client.request(f"/echo/{number}", b"x" * 100)
    bench.raw(bench.client.h2.data_to_send())
    assert len(bench.transport.writes) == 1
    bench.run()
    assert all(got.body == b"x" * 100 for got in bench.client.got.values())


def test_many_answers_without_a_body_leave_in_one_batch(bench: Bench) -> None:
    bench.gate.answers[b"/none"] = Response(204)
    for _ in range(100):
        bench.client.request("/none")
    bench.raw(bench.client.h2.data_to_send())
    assert not bench.server.busy
    bench.run()
    assert all(got.ended for got in bench.client.got.values())


def test_an_answer_after_a_reset_goes_nowhere(bench: Bench) -> None:
    gone = bench.client.request("/gone")
    bench.run()
    bench.client.h2.reset_stream(gone, ErrorCodes.CANCEL)
    kept = bench.client.request("/kept")
    bench.run()
    bench.gate.waiting.pop(b"/gone")(Response(200, b"late"))
    bench.gate.waiting.pop(b"/kept")(Response(200, b"kept"))
    bench.run()
    assert bench.client.got[gone] == Got()
    assert bench.client.got[kept].body == b"kept"


def test_request_and_reset_in_one_batch(bench: Bench) -> None:
    """h2 knows of the reset before the gate hears of the request."""
    bench.gate.answers[b"/now"] = Response(200, b"x")
    bench.gate.refusals[b"/no"] = Response(401, b"{}")
    for path in ("/now", "/no", "/wait"):
        for body in (None, b"abc"):
            for expect in ("", "100-continue"):
                stream = bench.client.request(path, body, end=False, expect=expect)
                bench.client.h2.reset_stream(stream, ErrorCodes.CANCEL)
    ended = bench.client.request("/now")
    bench.client.h2.reset_stream(ended, ErrorCodes.CANCEL)
    after = bench.client.request("/echo", b"alive")
    bench.run()
    assert bench.client.got[after].body == b"alive"
    assert bench.client.goaway is None


def test_answering_twice_is_a_bug(bench: Bench) -> None:
    bench.client.request("/wait")
    bench.run()
    bench.client.h2.reset_stream(1)
    bench.client.request("/wait")
    bench.transport.high_water = 0
    bench.server.pause_writing()
    bench.run()
    respond = bench.gate.waiting.pop(b"/wait")
    respond(Response(200, b"one"))
    with pytest.raises(AssertionError):
        respond(Response(200, b"two"))


def test_streams_over_the_limit_are_refused_one_by_one(bench: Bench) -> None:
    eager = bench.client
    eager.h2.remote_settings = type(eager.h2.remote_settings)(client=False)  # has not seen ours
    streams = [eager.request(f"/wait/{number}") for number in range(STREAMS_MAX + 10)]
    bench.run()
    assert [eager.got[stream].reset for stream in streams[STREAMS_MAX:]] == [ErrorCodes.REFUSED_STREAM] * 10
    assert len(bench.gate.waiting) == STREAMS_MAX
    for respond in bench.gate.waiting.values():
        respond(Response(200, b"ok"))
    bench.gate.waiting.clear()
    bench.run()
    assert all(eager.got[stream].body == b"ok" for stream in streams[:STREAMS_MAX])
    assert eager.goaway is None


def test_priority_frames_are_ignored(bench: Bench) -> None:
    bench.raw(PriorityFrame(7, depends_on=3, stream_weight=9).serialize())
    bench.client.h2.prioritize(9, weight=1, depends_on=1)
    stream = bench.client.request("/echo", b"x")
    bench.run()
    assert bench.client.got[stream].body == b"x"


# Bodies on their way in


def test_a_refusal_from_the_head_does_not_wait_for_the_body(bench: Bench) -> None:
    bench.gate.refusals[b"/no"] = Response(401, b'{"error":{"code":"unauthorized","message":"m"}}')
    stream = bench.client.request("/no", b"first", end=False)
    bench.run()
    got = bench.client.got[stream]
    assert (got.status, got.code, got.ended, got.reset) == (401, "unauthorized", True, None)
    while got.reset is None:
        bench.client.send(stream, b"x" * 100_000, end=False)
        bench.run()
        assert bench.receiving.held == 0
    assert got.reset == ErrorCodes.NO_ERROR
    assert not bench.server.busy
    assert not bench.gate.handled


@pytest.mark.parametrize("how", ["ends", "resets", "is swept", "is drained"])
def test_an_answered_stream_whose_request_is_open(bench: Bench, how: str) -> None:
    bench.gate.refusals[b"/no"] = Response(401, b"{}")
    stream = bench.client.request("/no", b"first", end=False)
    bench.run()
    assert bench.server.busy
    match how:
        case "ends":
            bench.client.send(stream, b"last")
        case "resets":
            bench.client.h2.reset_stream(stream, ErrorCodes.NO_ERROR)
        case "is swept":
            bench.server.sweep(bench.now_us)
            assert bench.server.busy, "it is not old enough"
            bench.server.sweep(bench.now_us + 1)
        case "is drained":
            bench.server.drain()
            assert bench.transport.closed
            bench.transport.take()  # h2's client wants no RST_STREAM after a GOAWAY
    bench.run()
    assert not bench.server.busy
    assert not bench.gate.handled
    assert bench.client.got[stream].status == 401


def test_a_refused_request_that_is_complete_is_not_reset(bench: Bench) -> None:
    bench.gate.refusals[b"/no"] = Response(401, b"{}")
    stream = bench.client.request("/no", b"all of it")
    bench.run()
    assert (bench.client.got[stream].ended, bench.client.got[stream].reset) == (True, None)


def test_a_body_of_exactly_the_cap(bench: Bench) -> None:
    body = bytes(range(256)) * (BODY_BYTES_MAX // 256) + b"x" * (BODY_BYTES_MAX % 256)
    stream = bench.client.request("/echo", body)
    bench.run()
    assert bench.client.got[stream].body == body


def test_a_declared_body_over_the_cap(bench: Bench) -> None:
    stream = bench.client.request("/echo", b"x", end=False, content_length=str(BODY_BYTES_MAX + 1))
    bench.run()
    got = bench.client.got[stream]
    assert (got.status, got.code, got.ended) == (413, "payload_too_large", True)


@pytest.mark.parametrize("at_once", [True, False])
def test_an_undeclared_body_over_the_cap(bench: Bench, at_once: bool) -> None:
    stream = bench.client.request("/echo", b"x" * BODY_BYTES_MAX, end=False)
    if not at_once:
        bench.run()
        assert bench.receiving.held == BODY_BYTES_MAX
    bench.client.send(stream, b"y")
    bench.run()
    got = bench.client.got[stream]
    assert (got.status, got.code) == (413, "payload_too_large")
    assert got.reset is None
    assert bench.receiving.held == 0
    assert not bench.gate.handled


def test_what_is_thrown_away_still_opens_the_window(bench: Bench) -> None:
    """A connection on which bodies are refused must not run dry."""
    window = bench.client.h2.outbound_flow_control_window
    for _ in range(100):
        bench.client.request("/echo", b"x" * (BODY_BYTES_MAX + 1))
        bench.run()
    assert bench.client.h2.outbound_flow_control_window > window // 2 - BODY_BYTES_MAX
    stream = bench.client.request("/echo", b"x" * BODY_BYTES_MAX)
    bench.run()
    assert bench.client.got[stream].status == 200


def test_received_bytes_are_counted_until_the_gate_has_them(make: Callable[..., Bench]) -> None:
    bench = make(receiving=100_000)
    slow = bench.client.request("/echo/slow", b"s" * 90_000, end=False)
    bench.run()
    assert bench.receiving.held == 90_000
    refused = bench.client.request("/echo/refused", b"r" * 15_000)
    bench.run()
    got = bench.client.got[refused]
    assert (got.status, got.code, got.headers[b"retry-after"]) == (429, "throttled", b"1")
    assert bench.receiving.held == 90_000
    bench.client.send(slow, b"!")
    bench.run()
    assert bench.receiving.held == 0
    assert bench.client.got[slow].body == b"s" * 90_000 + b"!"


@fault(
    "client", "an HTTP/2 client vanishes in the middle of a body", "the bytes received so far are given back"
)
def test_received_bytes_are_given_back_by_a_reset_and_by_a_lost_connection(bench: Bench) -> None:
    first = bench.client.request("/echo", b"x" * 1000, end=False)
    bench.client.request("/echo", b"x" * 1000, end=False)
    bench.run()
    assert bench.receiving.held == 2000
    bench.client.h2.reset_stream(first)
    bench.run()
    assert bench.receiving.held == 1000
    bench.server.connection_lost()
    assert bench.receiving.held == 0


def test_a_gate_that_fails_leaves_no_bytes_behind(bench: Bench) -> None:
    def fail(_request: Request, _respond: Respond) -> None:
        raise RuntimeError

    bench.gate.handle = fail  # type: ignore[method-assign]
    bench.client.request("/echo", b"x" * 1000)
    with pytest.raises(RuntimeError):
        bench.run()
    assert bench.receiving.held == 0
    bench.server.connection_lost()


def test_a_body_in_many_tiny_frames(bench: Bench) -> None:
    stream = bench.client.request("/echo", b"", end=False)
    for _ in range(3000):
        bench.client.h2.send_data(stream, b"ab", pad_length=3)
    bench.client.h2.end_stream(stream)
    bench.run()
    assert bench.client.got[stream].body == b"ab" * 3000


# Bodies on their way out


def test_a_large_answer_follows_the_clients_window(bench: Bench) -> None:
    body = bytes(range(256)) * 4000
    bench.client.reading = False
    stream = bench.client.request("/wait")
    bench.run()
    bench.gate.waiting.pop(b"/wait")(Response(200, memoryview(body)))
    assert bench.sending.held == len(body), "it is one piece, and kept until its last byte is sent"
    bench.run()
    got = bench.client.got[stream]
    assert (len(got.body), got.ended) == (65535, False)
    bench.client.h2.increment_flow_control_window(100_000, stream)
    bench.run()
    assert len(got.body) == 65535, "the connection's window is still closed"
    bench.client.h2.increment_flow_control_window(10_000)
    bench.run()
    assert len(got.body) == 75535
    assert bench.sending.held == len(body)
    bench.client.h2.increment_flow_control_window(10_000_000)
    bench.client.h2.increment_flow_control_window(10_000_000, stream)
    bench.run()
    assert (got.body, got.ended) == (body, True)
    assert bench.sending.held == 0


def test_a_window_that_the_settings_shrink_below_zero(bench: Bench) -> None:
    body = b"z" * 200_000
    bench.client.reading = False
    stream = bench.client.request("/wait")
    bench.run()
    bench.gate.waiting.pop(b"/wait")(Response(200, body))
    bench.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 10})
    bench.run()
    bench.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 300_000})
    bench.client.h2.increment_flow_control_window(300_000)
    bench.run()
    assert bench.client.got[stream].body == body


def test_frames_are_as_large_as_the_client_and_fairness_allow(bench: Bench) -> None:
    bench.client.request("/echo", b"q" * 40_000)
    bench.run()
    assert bench.client.frame_bytes_max == 16384
    bench.client.h2.update_settings(
        {SettingCodes.MAX_FRAME_SIZE: 100_000, SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20}
    )
    bench.client.h2.increment_flow_control_window(1 << 20)
    bench.run()
    stream = bench.client.request("/echo", b"q" * 250_000)
    bench.run()
    assert bench.client.got[stream].body == b"q" * 250_000
    assert bench.client.frame_bytes_max == SLICE_BYTES_MAX


def test_a_large_body_does_not_starve_the_others(bench: Bench) -> None:
    bench.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
    bench.client.h2.increment_flow_control_window(8 << 20)
    for number in range(3):
        bench.client.request(f"/wait/{number}")
    bench.run()
    bench.server.pause_writing()
    for number, size in enumerate((900_000, 40_000, 40_000)):
        bench.gate.waiting.pop(b"/wait/%d" % number)(Response(200, b"%d" % number * size))
    bench.server.resume_writing()
    bench.run()
    assert bench.client.order[:9] == [1, 3, 5, 1, 3, 5, 1, 3, 5]
    assert [len(bench.client.got[stream].body) for stream in (1, 3, 5)] == [900_000, 40_000, 40_000]


def test_a_blocked_stream_does_not_hold_up_the_others(bench: Bench) -> None:
    bench.client.reading = False
    blocked = bench.client.request("/wait/large")
    other = bench.client.request("/wait/small")
    bench.client.h2.increment_flow_control_window(1 << 20)
    bench.run()
    bench.gate.waiting.pop(b"/wait/large")(Response(200, b"l" * 500_000))
    bench.gate.waiting.pop(b"/wait/small")(Response(200, b"s"))
    bench.run()
    assert not bench.client.got[blocked].ended
    assert bench.client.got[other].body == b"s"


def test_a_paused_transport_gets_no_more_than_one_write(bench: Bench) -> None:
    body = b"w" * 2_000_000
    bench.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 4 << 20})
    bench.client.h2.increment_flow_control_window(4 << 20)
    stream = bench.client.request("/wait")
    bench.run()
    bench.transport.high_water = 65536
    bench.gate.waiting.pop(b"/wait")(Response(200, body))
    written = sum(map(len, bench.transport.writes))
    assert WRITE_BYTES_MAX <= written < WRITE_BYTES_MAX + 70_000
    assert bench.sending.held > len(body) - written
    bench.client.receive(bench.transport.take())
    bench.client.h2.ping(b"01234567")
    bench.raw(bench.client.h2.data_to_send())
    assert sum(map(len, bench.transport.writes)) < 100, "only the acknowledgement"
    for _ in range(20):
        bench.client.receive(bench.transport.take())
        bench.server.resume_writing()
    bench.run()
    assert (bench.client.got[stream].body, bench.client.got[stream].ended) == (body, True)


@fault(
    "front",
    "more HTTP/2 answers wait for their clients than a front may hold",
    "the streams of further ones are reset",
)
def test_an_answer_that_the_budget_has_no_room_for(make: Callable[..., Bench]) -> None:
    bench = make(sending=300_000)
    bench.client.reading = False
    streams = [bench.client.request(f"/wait/{number}") for number in range(3)]
    bench.run()
    for number in range(3):
        bench.gate.waiting.pop(b"/wait/%d" % number)(Response(200, b"b" * 200_000))
    bench.run()
    assert [bench.client.got[stream].reset for stream in streams] == [
        None,
        ErrorCodes.ENHANCE_YOUR_CALM,
        ErrorCodes.ENHANCE_YOUR_CALM,
    ]
    assert bench.sending.held == 200_000
    bench.client.h2.reset_stream(streams[0])
    bench.run()
    assert bench.sending.held == 0


def test_a_stream_that_is_reset_while_it_waits_to_send(bench: Bench) -> None:
    gone, kept = bench.client.request("/wait/gone"), bench.client.request("/wait/kept")
    bench.run()
    bench.server.pause_writing()
    for path in (b"/wait/gone", b"/wait/kept"):
        bench.gate.waiting.pop(path)(Response(200, b"x" * 1000))
    assert bench.sending.held == 2000
    bench.client.h2.reset_stream(gone)
    bench.run()
    assert bench.sending.held == 1000
    bench.server.resume_writing()
    bench.run()
    assert bench.client.got[kept].body == b"x" * 1000
    assert bench.client.got[gone] == Got()


def test_what_can_be_sent_at_once_needs_no_budget(make: Callable[..., Bench]) -> None:
    bench = make(sending=1)
    bench.sending.take(1)
    bench.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 4 << 20})
    bench.client.h2.increment_flow_control_window(4 << 20)
    stream = bench.client.request("/wait")
    bench.run()
    bench.gate.waiting.pop(b"/wait")(Response(200, b"b" * 2_000_000))
    bench.run()
    assert len(bench.client.got[stream].body) == 2_000_000
    bench.sending.give(1)


def test_a_stream_may_get_further_chunks(bench: Bench) -> None:
    """What event streams will use: a head, pieces as they come, and an end that may bring nothing."""
    bench.client.request("/wait")
    bench.run()
    server, stream = bench.server, bench.server._streams[1]
    stream.answered = True
    stream.headers = [(b":status", b"200"), (b"date", b"Mon, 16 Nov 2026 00:00:00 GMT")]
    server._queue(stream, b"", final=False)
    server._flush()
    bench.now_us += 10
    server.sweep(bench.now_us)
    for piece in (b"one ", b"two "):
        server._queue(stream, piece, final=False)
        server._flush()
        bench.run()
        server.sweep(bench.now_us + 1)
    assert (bench.client.got[1].body, bench.client.got[1].ended) == (b"one two ", False)
    server._queue(stream, b"", final=True)
    server._flush()
    bench.run()
    assert (bench.client.got[1].ended, bench.client.got[1].reset) == (True, None)


# Ending


def test_drain_lets_open_streams_finish_and_takes_no_new_ones(bench: Bench) -> None:
    body = b"d" * 200_000
    open_stream = bench.client.request("/wait")
    half = bench.client.request("/echo", b"half ", end=False)
    bench.run()
    late = bench.client.request("/late")
    bench.server.drain()
    bench.server.drain()
    bench.raw(bench.client.h2.data_to_send())
    assert bench.transport.take().count(ErrorCodes.REFUSED_STREAM.to_bytes(4, "big")) >= 1
    assert b"/late" not in bench.gate.waiting
    assert not bench.transport.closed
    # h2's client hears nothing after a GOAWAY, so the rest is read from the frames' payloads.
    bench.raw(DataFrame(half, b"done", flags=["END_STREAM"]).serialize())
    assert b"half done" in bench.transport.take()
    bench.raw(b"".join(_window_update(stream, 1 << 20) for stream in (0, open_stream)))
    bench.gate.waiting.pop(b"/wait")(Response(200, body))
    assert bench.transport.take().count(b"d") >= len(body)
    assert bench.transport.closed and not bench.transport.aborted
    assert late not in bench.gate.waiting


def _window_update(stream_id: int, size: int) -> bytes:
    return b"\x00\x00\x04\x08\x00" + stream_id.to_bytes(4, "big") + size.to_bytes(4, "big")


def test_a_stream_that_is_reset_while_it_is_refused(bench: Bench) -> None:
    bench.client.request("/wait")
    bench.run()
    bench.server.drain()
    late = bench.client.request("/late")
    bench.client.h2.reset_stream(late)
    bench.raw(bench.client.h2.data_to_send())
    assert bench.server.busy
    bench.gate.waiting.pop(b"/wait")(Response(200))
    assert bench.transport.closed


def test_drain_of_an_idle_connection_closes_it(bench: Bench) -> None:
    bench.server.drain()
    assert bench.transport.closed
    bench.client.receive(bench.transport.take())
    assert bench.client.goaway is not None
    assert bench.client.goaway.error_code == ErrorCodes.NO_ERROR


def test_drain_closes_after_the_last_stream_is_reset(bench: Bench) -> None:
    stream = bench.client.request("/wait")
    bench.run()
    bench.server.drain()
    assert not bench.transport.closed
    bench.client.h2.reset_stream(stream)
    bench.raw(bench.client.h2.data_to_send())
    assert bench.transport.closed


def test_a_client_that_says_goodbye_gets_its_answers(bench: Bench) -> None:
    stream = bench.client.request("/wait")
    bench.run()
    bench.client.h2.close_connection()
    bench.raw(bench.client.h2.data_to_send() + PING)
    assert not bench.transport.closed
    assert b"01234567" in bench.transport.take()
    bench.gate.waiting.pop(b"/wait")(Response(200, b"goodbye"))
    assert b"goodbye" in bench.transport.take()
    assert bench.transport.closed and stream == 1


@fault("client", "an HTTP/2 request stalls half-way", "it is answered with 408")
def test_sweep_answers_requests_that_stall(bench: Bench) -> None:
    stalled = bench.client.request("/echo", b"some", end=False)
    bench.run()
    bench.now_us += 10
    fresh = bench.client.request("/echo", b"young", end=False)
    waiting = bench.client.request("/wait")
    bench.run()
    bench.server.sweep(bench.now_us)
    bench.run()
    got = bench.client.got[stalled]
    assert (got.status, got.code, got.ended, got.reset) == (408, "request_timeout", True, None)
    assert bench.receiving.held == 5
    bench.server.sweep(bench.now_us)
    bench.run()
    assert got.reset == ErrorCodes.NO_ERROR
    bench.client.send(fresh, b"!")
    bench.gate.waiting.pop(b"/wait")(Response(200, b"w"))
    bench.run()
    assert bench.client.got[fresh].body == b"young!"
    assert bench.client.got[waiting].body == b"w"
    assert bench.client.goaway is None


@fault(
    "client", "an HTTP/2 client does not take its answer", "the stream is reset, and its memory given back"
)
def test_sweep_resets_answers_that_do_not_move(bench: Bench) -> None:
    bench.client.reading = False
    stream = bench.client.request("/wait")
    bench.run()
    bench.gate.waiting.pop(b"/wait")(Response(200, b"x" * 100_000))
    began_us = bench.now_us
    bench.now_us += 10
    bench.client.h2.increment_flow_control_window(1)
    bench.client.h2.increment_flow_control_window(1, stream)
    bench.run()
    bench.server.sweep(began_us + 1)
    bench.run()
    assert bench.client.got[stream].reset is None, "it moved since"
    bench.server.sweep(bench.now_us + 1)
    bench.run()
    assert bench.client.got[stream].reset == ErrorCodes.CANCEL
    assert bench.sending.held == 0
    alive = bench.client.request("/wait", method="HEAD")
    bench.run()
    bench.gate.waiting.pop(b"/wait")(Response(200, b"x"))
    bench.run()
    assert bench.client.got[alive].status == 200


def test_activity_and_busy(bench: Bench) -> None:
    assert not bench.server.busy
    bench.now_us += 5
    bench.client.request("/wait")
    bench.run()
    assert bench.server.busy
    assert bench.server.last_activity_us == bench.now_us
    bench.now_us += 5
    bench.gate.waiting.pop(b"/wait")(Response(200, b"x"))
    assert not bench.server.busy
    assert bench.server.last_activity_us == bench.now_us


# Abuse


def _expect_calm(bench: Bench) -> None:
    assert bench.transport.closed
    bench.client.receive(bench.transport.take())
    assert bench.client.goaway is not None
    assert bench.client.goaway.error_code == ErrorCodes.ENHANCE_YOUR_CALM
    assert not bench.server.busy
    bench.raw(b"anything after that is ignored")


@fault("client", "an HTTP/2 client opens and resets streams in a row", "the connection is ended")
def test_rapid_reset(bench: Bench) -> None:
    for _ in range(NOISE_MAX):  # and the client's settings are the first noise
        assert not bench.transport.closed
        stream = bench.client.request("/wait")
        bench.client.h2.reset_stream(stream)
        bench.raw(bench.client.h2.data_to_send())
    _expect_calm(bench)


def test_rapid_reset_in_one_batch(bench: Bench) -> None:
    for _ in range(2 * NOISE_MAX):
        bench.client.h2.reset_stream(bench.client.request("/wait", b"x", end=False))
    bench.raw(bench.client.h2.data_to_send())
    _expect_calm(bench)


def test_resets_are_forgiven_when_streams_complete(bench: Bench) -> None:
    for _ in range(NOISE_MAX + 100):
        stream = bench.client.request("/wait")
        bench.client.request("/echo", b"x")
        bench.client.h2.reset_stream(stream)
        bench.run()
    assert not bench.transport.closed


def test_resets_are_forgiven_with_time(bench: Bench) -> None:
    for _ in range(NOISE_MAX + 100):
        stream = bench.client.request("/wait")
        bench.run()
        bench.client.h2.reset_stream(stream)
        bench.run()
        bench.now_us += 1_000_000 // NOISE_FORGIVEN_PER_S
    assert not bench.transport.closed


def test_resets_that_the_client_provokes_count_too(bench: Bench) -> None:
    """A client that breaks a stream's rules makes us reset it; the request costs the same."""
    for _ in range(NOISE_MAX - 1):
        stream = bench.client.request("/wait")
        bench.raw(bench.client.h2.data_to_send() + _window_update(stream, 2**31 - 1))
        bench.run()
        assert bench.client.got[stream].reset == ErrorCodes.FLOW_CONTROL_ERROR
    stream = bench.client.request("/wait")
    bench.raw(bench.client.h2.data_to_send() + _window_update(stream, 2**31 - 1))
    _expect_calm(bench)


@fault("client", "an HTTP/2 client sends empty frames without end", "the connection is ended")
@pytest.mark.parametrize("padding", [0, 20])
def test_empty_data_frames(bench: Bench, padding: int) -> None:
    stream = bench.client.request("/echo", b"x", end=False)
    bench.run()
    flags = ["PADDED"] if padding else []
    frame = DataFrame(stream, b"", pad_length=padding, flags=flags).serialize()
    for _ in range(NOISE_MAX + 1):
        bench.raw(frame)
    _expect_calm(bench)


PING = PingFrame(0, b"01234567").serialize()
FLOODS = {
    "ping": PING,
    "settings": SettingsFrame(0, {4: 65535}).serialize(),
    "priority": PriorityFrame(7).serialize(),
    "unknown": b"\x00\x00\x01\x63\x00\x00\x00\x00\x00x",
}


@fault("client", "an HTTP/2 client floods with pings, settings or other frames", "the connection is ended")
@pytest.mark.parametrize("frame", FLOODS)
def test_a_flood_of_frames_that_bring_nothing(bench: Bench, frame: str) -> None:
    bench.raw(FLOODS[frame] * (NOISE_MAX + 1))
    _expect_calm(bench)


def test_a_batch_is_not_read_to_its_end_when_it_is_noise(bench: Bench) -> None:
    bench.raw(PING * 100_000)
    assert sum(map(len, bench.transport.writes)) < 3 * READ_BYTES_MAX
    _expect_calm(bench)


@fault(
    "client",
    "an HTTP/2 client makes the server answer and never reads",
    "the connection is ended before the answers cost memory",
)
@pytest.mark.parametrize("frame", ["ping", "settings"])
def test_acknowledgements_that_nobody_reads(
    bench: Bench, frame: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http2.PAUSED_BYTES_MAX", 50_000)
    bench.client.request("/echo", b"x" * 1000, end=False)
    bench.run()
    bench.server.pause_writing()
    for _ in range(100):
        if bench.transport.closed:
            break
        bench.now_us += 1_000_000
        bench.raw(FLOODS[frame] * 100)
    assert bench.transport.aborted
    assert sum(map(len, bench.transport.writes)) <= 50_000
    assert bench.receiving.held == 0


def test_a_protocol_error_on_a_paused_transport_does_not_wait(bench: Bench) -> None:
    bench.server.pause_writing()
    bench.raw(DataFrame(99, b"x").serialize())
    assert bench.transport.aborted


@fault("request", "an HTTP/2 header block that unpacks to far more", "refused; the connection is ended")
def test_a_header_bomb(bench: Bench) -> None:
    for _ in range(2):
        stream = bench.client.h2.get_next_available_stream_id()
        head = [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "a")]
        bench.client.h2.send_headers(stream, [*head, ("x-bomb", "b" * 3000)] + [("x-bomb", "b" * 3000)] * 10)
        bench.raw(bench.client.h2.data_to_send())
    _expect_calm(bench)


@fault("request", "an HTTP/2 header block without end", "refused; the connection is ended")
def test_a_header_block_without_end(bench: Bench) -> None:
    bench.raw(HeadersFrame(1, b"\x82" * 16384).serialize())
    for _ in range(3):
        bench.raw(ContinuationFrame(1, b"\x82" * 16384).serialize())
    assert not bench.transport.closed
    bench.raw(ContinuationFrame(1, b"\x82").serialize())
    _expect_calm(bench)


def test_a_flood_of_unknown_settings(bench: Bench) -> None:
    bench.raw(SettingsFrame(0, {code: 1 for code in range(100, 200)}).serialize())
    _expect_calm(bench)


def test_a_client_cannot_make_our_header_table_grow(bench: Bench) -> None:
    for size in (1 << 31, 0, 1 << 31, 1 << 16, 1 << 20):
        bench.client.h2.update_settings({SettingCodes.HEADER_TABLE_SIZE: size})
    bench.run()
    for number in range(300):
        path = f"/echo/{number}" + "p" * 100
        stream = bench.client.request(path, b"x" * number)
        bench.run()
        assert bench.client.got[stream].headers[b"x-path"] == path.encode()
    assert bench.server._h2.encoder.header_table_size == ENCODER_TABLE_BYTES_MAX
    assert bench.server._h2.encoder.header_table._current_size <= ENCODER_TABLE_BYTES_MAX


def test_a_small_header_table_is_obeyed(bench: Bench) -> None:
    bench.client.h2.update_settings({SettingCodes.HEADER_TABLE_SIZE: 100})
    bench.run()
    for _ in range(3):
        stream = bench.client.request("/echo/aaaa", b"x")
        bench.run()
        assert bench.client.got[stream].headers[b"x-path"] == b"/echo/aaaa"


HEAD = [(":method", "GET"), (":path", "/echo"), (":scheme", "http"), (":authority", "here")]


@pytest.mark.parametrize(
    "head",
    [
        [(":method", "GET"), (":scheme", "http"), (":authority", "here")],
        [(":method", "GET"), (":path", ""), (":scheme", "http"), (":authority", "here")],
        [*HEAD, ("Upper", "x")],
        [*HEAD, ("connection", "close")],
        [*HEAD, ("transfer-encoding", "chunked")],
        [*HEAD, ("content-length", "-1")],
        [*HEAD, ("content-length", "1"), ("content-length", "2")],
        [*HEAD, ("x", "a\r\nb: c")],
        [*HEAD, (":path", "/twice")],
    ],
)
def test_malformed_heads_end_the_connection(bench: Bench, head: list[tuple[str, str]]) -> None:
    bench.client.h2.config.validate_outbound_headers = False
    bench.client.h2.config.normalize_outbound_headers = False
    other = bench.client.request("/echo", b"held", end=False)
    bench.run()
    bench.client.h2.send_headers(3, head, end_stream=True)
    bench.raw(bench.client.h2.data_to_send())
    assert bench.transport.closed
    bench.client.receive(bench.transport.take())
    assert bench.client.goaway is not None
    assert bench.client.goaway.error_code == ErrorCodes.PROTOCOL_ERROR
    assert not bench.gate.handled and other == 1


@fault("request", "malformed HTTP/2 bytes", "the connection is ended; the front goes on")
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        PREFACE[:-1] + b"x",
        PREFACE + b"\xff" * 100,
        PREFACE + HeadersFrame(2, b"\x82\x84\x86", flags=["END_HEADERS"]).serialize(),
        PREFACE + HeadersFrame(1, b"\xff\xff\xff\xff\xff", flags=["END_HEADERS"]).serialize(),
        PREFACE + DataFrame(1, b"x").serialize(),
        PREFACE + b"\x00\x00\x01\x00\x00\x00\x00\x00\x00x",
        PREFACE + b"\x00\x40\x01",
        PREFACE + b"\x00\x00\x03\x06\x00\x00\x00\x00\x00abc",
        PREFACE + b"\x00\x00\x01\x09\x00\x00\x00\x00\x01x",
        PREFACE + _window_update(0, 2**31 - 1),
    ],
)
def test_malformed_bytes_end_the_connection(data: bytes) -> None:
    bench = Bench()
    bench.raw(data)
    assert bench.transport.closed
    bench.check_and_end()


# Fuzz


def _conversation(client: Client) -> bytes:
    client.request("/echo/1", b"one" * 50)
    second = client.request("/echo/2", b"two", end=False)
    client.request("/no", b"refused" * 30)
    client.h2.ping(b"pingping")
    client.request("/none")
    client.send(second, b" and two")
    client.request("/echo/head", method="HEAD")
    third = client.request("/echo/3", b"three", end=False, expect="100-continue")
    gone = client.request("/wait")
    client.h2.reset_stream(gone)
    client.h2.send_headers(third, [("x-trailer", "t")], end_stream=True)
    client.request("/echo/large", b"L" * 40_000)
    return client.h2.data_to_send()


def _scripted() -> Bench:
    bench = Bench()
    bench.gate.refusals[b"/no"] = Response(401, b"{}")
    bench.gate.answers[b"/none"] = Response(204)
    return bench


@settings(max_examples=150, deadline=None)
@given(cuts=st.lists(st.integers(0, 42_000), max_size=60), byte_by_byte=st.integers(0, 1200))
def test_any_split_of_the_bytes_gives_the_same_answers(cuts: list[int], byte_by_byte: int) -> None:
    whole = _scripted()
    whole.raw(_conversation(whole.client))
    whole.run()
    split = _scripted()
    data = _conversation(split.client)
    edges = sorted({0, *(cut for cut in cuts if cut < len(data)), *range(byte_by_byte), len(data)})
    for start, end in pairwise(edges):
        split.raw(data[start:end])
    split.run()
    assert len(whole.client.got) == 8
    for stream, expected in whole.client.got.items():
        got = split.client.got[stream]
        assert (got.headers, got.ended) == (expected.headers, expected.ended)
        # After a refusal the rest may come too late to matter, and what came first decides about the reset.
        assert got.body == expected.body
    for bench in (whole, split):
        assert not bench.server.busy
        bench.check_and_end()


@fault("request", "garbled HTTP/2 bytes", "an answer or the end of the connection; the front goes on")
@settings(max_examples=length.pick(short=60, long=300), deadline=None)
@given(st.data())
def test_garbled_bytes_never_raise(data: st.DataObject) -> None:
    bench = _scripted()
    bytes_in = bytearray(_conversation(bench.client))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(len(PREFACE), 1500))
        match data.draw(st.integers(0, 2)):
            case 0:
                bytes_in[at] = data.draw(st.integers(0, 255))
            case 1:
                bytes_in[at:at] = data.draw(st.binary(max_size=20))
            case _:
                del bytes_in[at : at + data.draw(st.integers(1, 20))]
    step = data.draw(st.integers(1, 3000))
    for at in range(0, len(bytes_in), step):
        bench.server.data_received(bytes(bytes_in[at : at + step]))
    bench.server.sweep(bench.now_us + 1)
    bench.check_and_end()


# Real sockets


class Front(asyncio.Protocol):
    """What the front's protocol does for a connection that began with the preface."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.connection = Http2Connection(
            transport,  # type: ignore[arg-type]
            self.bench.gate,
            body_bytes_max=4 << 20,
            receiving=self.bench.receiving,
            sending=self.bench.sending,
            now_us=lambda: 0,
        )
        self.bench.server = self.connection

    def data_received(self, data: bytes) -> None:
        self.connection.data_received(data)

    def pause_writing(self) -> None:
        self.connection.pause_writing()

    def resume_writing(self) -> None:
        self.connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.connection.connection_lost()


async def _talk(bench: Bench) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Front(bench), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    client = bench.client
    bench.gate.answers[b"/large"] = Response(200, bytes(range(256)) * 20_000)
    large = client.request("/large")
    small = [client.request(f"/echo/{number}", b"%d" % number * 500) for number in range(50)]
    upload = client.request("/echo/upload", b"", end=False)
    rest = b"u" * 3_000_000
    while not all(got.ended for got in client.got.values()):
        while rest and (size := min(client.h2.local_flow_control_window(upload), 16384, len(rest))):
            client.h2.send_data(upload, rest[:size], end_stream=size == len(rest))
            rest = rest[size:]
        writer.write(client.h2.data_to_send())
        await writer.drain()
        data = await asyncio.wait_for(reader.read(65536), 20)
        assert data
        client.receive(data)
    assert client.got[large].body == bytes(range(256)) * 20_000
    assert client.got[upload].body == b"u" * 3_000_000
    assert [client.got[stream].body for stream in small] == [b"%d" % n * 500 for n in range(50)]
    bench.server.drain()
    last = await asyncio.wait_for(reader.read(), 20)
    client.receive(last)
    assert client.goaway is not None
    writer.close()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_over_a_real_socket(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    bench = Bench(receiving=16 << 20, sending=64 << 20)
    loop = new_loop()
    try:
        loop.run_until_complete(_talk(bench))
    finally:
        loop.close()
    bench.check_and_end()
