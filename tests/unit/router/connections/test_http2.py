"""HTTP/2: every stream gets its own answer.

Every test ends with the connection lost and both budgets empty. The last tests use a real socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from h2.errors import ErrorCodes
from hyperframe.frame import (
    DataFrame,
    PriorityFrame,
)

from router.connections.http2 import (
    Http2Connection,
)
from tests.support.faults import fault
from tests.support.http2_bench import PING, Bench, ReceivedResponse, window_update
from topics.protocols.http.exchange import Request, Response
from topics.protocols.http2.session import SETTINGS, STREAMS_MAX

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
        origin="http://elsewhere",
        sec_fetch_site="cross-site",
        cookie="ignored",
    )
    bench.run()
    assert bench.admission.handled == [
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
            host=b"here",
            origin=b"http://elsewhere",
            fetch_site=b"cross-site",
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
    request = bench.admission.handled[0]
    assert (request.accept, request.authorization) == (b"a/b, c/d", b"first")


@pytest.mark.parametrize(
    ("sent", "declared"),
    [({}, 0), ({"content_length": "5", "body": b"12345"}, 5), ({"body": b"12345"}, None)],
)
def test_the_gate_hears_the_declared_length(bench: Bench, sent: dict[str, Any], declared: int | None) -> None:
    bench.client.request("/echo", **sent)
    bench.run()
    assert [length for _, length in bench.admission.screened] == [declared]


def test_connect_has_no_path_and_is_the_gates_to_refuse(bench: Bench) -> None:
    bench.admission.refusals[b"/"] = Response(405, b"{}")
    bench.client.h2.send_headers(1, [(":method", "CONNECT"), (":authority", "here:80")])
    bench.run()
    assert bench.client.got[1].status == 405


def test_head_and_204(bench: Bench) -> None:
    bench.admission.answers[b"/a"] = Response(200, b"12345", b"text/plain")
    bench.admission.answers[b"/b"] = Response(204, head=b"X-Y: z\r\n")
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
    bench.admission.answers[b"/a"] = Response(
        200, memoryview(b""), b"", b'Connection: close\r\nETag: "a:b"\r\n'
    )
    stream = bench.client.request("/a")
    bench.run()
    assert bench.client.got[stream].headers == {
        b":status": b"200",
        b"content-length": b"0",
        b"etag": b'"a:b"',
    }
    assert bench.client.got[stream].ended


def test_expect_100_continue(bench: Bench) -> None:
    bench.admission.refusals[b"/no"] = Response(401, b"{}")
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
    assert not bench.admission.waiting
    assert bench.client.got[other].body == b"other!"


def test_a_client_that_ends_a_refused_body_early(bench: Bench) -> None:
    bench.admission.refusals[b"/no"] = Response(401, b"{}")
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
    bodies = {request.path: request.body for request in bench.admission.handled}
    for path in reversed(paths):
        respond = bench.admission.waiting.pop(path.encode())
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
    bench.admission.answers[b"/none"] = Response(204)
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
    bench.admission.waiting.pop(b"/gone")(Response(200, b"late"))
    bench.admission.waiting.pop(b"/kept")(Response(200, b"kept"))
    bench.run()
    assert bench.client.got[gone] == ReceivedResponse()
    assert bench.client.got[kept].body == b"kept"


def test_request_and_reset_in_one_batch(bench: Bench) -> None:
    """h2 knows of the reset before admission gets the request."""
    bench.admission.answers[b"/now"] = Response(200, b"x")
    bench.admission.refusals[b"/no"] = Response(401, b"{}")
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
    respond = bench.admission.waiting.pop(b"/wait")
    respond(Response(200, b"one"))
    with pytest.raises(AssertionError):
        respond(Response(200, b"two"))


def test_streams_over_the_limit_are_refused_one_by_one(bench: Bench) -> None:
    eager = bench.client
    eager.h2.remote_settings = type(eager.h2.remote_settings)(client=False)  # has not seen our settings
    streams = [eager.request(f"/wait/{number}") for number in range(STREAMS_MAX + 10)]
    bench.run()
    assert [eager.got[stream].reset for stream in streams[STREAMS_MAX:]] == [ErrorCodes.REFUSED_STREAM] * 10
    assert len(bench.admission.waiting) == STREAMS_MAX
    for respond in bench.admission.waiting.values():
        respond(Response(200, b"ok"))
    bench.admission.waiting.clear()
    bench.run()
    assert all(eager.got[stream].body == b"ok" for stream in streams[:STREAMS_MAX])
    assert eager.goaway is None


def test_priority_frames_are_ignored(bench: Bench) -> None:
    bench.raw(PriorityFrame(7, depends_on=3, stream_weight=9).serialize())
    bench.client.h2.prioritize(9, weight=1, depends_on=1)
    stream = bench.client.request("/echo", b"x")
    bench.run()
    assert bench.client.got[stream].body == b"x"


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
    assert b"/late" not in bench.admission.waiting
    assert not bench.transport.closed
    # h2's client ignores everything after a GOAWAY, so the rest is read from the frames' payloads.
    bench.raw(DataFrame(half, b"done", flags=["END_STREAM"]).serialize())
    assert b"half done" in bench.transport.take()
    bench.raw(b"".join(window_update(stream, 1 << 20) for stream in (0, open_stream)))
    bench.admission.waiting.pop(b"/wait")(Response(200, body))
    assert bench.transport.take().count(b"d") >= len(body)
    assert bench.transport.closed and not bench.transport.aborted
    assert late not in bench.admission.waiting


def test_a_stream_that_is_reset_while_it_is_refused(bench: Bench) -> None:
    bench.client.request("/wait")
    bench.run()
    bench.server.drain()
    late = bench.client.request("/late")
    bench.client.h2.reset_stream(late)
    bench.raw(bench.client.h2.data_to_send())
    assert bench.server.busy
    bench.admission.waiting.pop(b"/wait")(Response(200))
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
    bench.admission.waiting.pop(b"/wait")(Response(200, b"goodbye"))
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
    bench.admission.waiting.pop(b"/wait")(Response(200, b"w"))
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
    bench.admission.waiting.pop(b"/wait")(Response(200, b"x" * 100_000))
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
    bench.admission.waiting.pop(b"/wait")(Response(200, b"x"))
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
    bench.admission.waiting.pop(b"/wait")(Response(200, b"x"))
    assert not bench.server.busy
    assert bench.server.last_activity_us == bench.now_us


# Real sockets


class Front(asyncio.Protocol):
    """What the front's protocol does for a connection that began with the preface."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.connection = Http2Connection(
            transport,  # type: ignore[arg-type]
            self.bench.admission,
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
    bench.admission.answers[b"/large"] = Response(200, bytes(range(256)) * 20_000)
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
