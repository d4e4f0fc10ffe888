"""Bodies over HTTP/2, in and out: they respect windows and budgets, and do not block each other.

Every test ends with the connection lost and both budgets empty.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from router.connections.http2 import (
    SLICE_BYTES_MAX,
    WRITE_BYTES_MAX,
)
from tests.support.faults import fault
from tests.support.http2_bench import BODY_BYTES_MAX, Bench, ReceivedResponse
from topics.protocols.http.exchange import Request, Respond, Response

# Request bodies


def test_a_refusal_from_the_head_does_not_wait_for_the_body(bench: Bench) -> None:
    bench.admission.refusals[b"/no"] = Response(401, b'{"error":{"code":"unauthorized","message":"m"}}')
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
    assert not bench.admission.handled


@pytest.mark.parametrize("how", ["ends", "resets", "is swept", "is drained"])
def test_an_answered_stream_whose_request_is_open(bench: Bench, how: str) -> None:
    bench.admission.refusals[b"/no"] = Response(401, b"{}")
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
    assert not bench.admission.handled
    assert bench.client.got[stream].status == 401


def test_a_refused_request_that_is_complete_is_not_reset(bench: Bench) -> None:
    bench.admission.refusals[b"/no"] = Response(401, b"{}")
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
    assert not bench.admission.handled


def test_discarded_data_still_opens_the_window(bench: Bench) -> None:
    """A connection on which bodies are refused must not use up its window."""
    window = bench.client.h2.outbound_flow_control_window
    for _ in range(100):
        bench.client.request("/echo", b"x" * (BODY_BYTES_MAX + 1))
        bench.run()
    assert bench.client.h2.outbound_flow_control_window > window // 2 - BODY_BYTES_MAX
    stream = bench.client.request("/echo", b"x" * BODY_BYTES_MAX)
    bench.run()
    assert bench.client.got[stream].status == 200


def test_received_bytes_are_counted_until_the_gate_has_them(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(receiving=100_000)
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

    bench.admission.handle = fail  # type: ignore[method-assign]
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


# Response bodies


def test_a_large_answer_follows_the_clients_window(bench: Bench) -> None:
    body = bytes(range(256)) * 4000
    bench.client.reading = False
    stream = bench.client.request("/wait")
    bench.run()
    bench.admission.waiting.pop(b"/wait")(Response(200, memoryview(body)))
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
    bench.admission.waiting.pop(b"/wait")(Response(200, body))
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
        bench.admission.waiting.pop(b"/wait/%d" % number)(Response(200, b"%d" % number * size))
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
    bench.admission.waiting.pop(b"/wait/large")(Response(200, b"l" * 500_000))
    bench.admission.waiting.pop(b"/wait/small")(Response(200, b"s"))
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
    bench.admission.waiting.pop(b"/wait")(Response(200, body))
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
def test_an_answer_that_the_budget_has_no_room_for(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(sending=300_000)
    bench.client.reading = False
    streams = [bench.client.request(f"/wait/{number}") for number in range(3)]
    bench.run()
    for number in range(3):
        bench.admission.waiting.pop(b"/wait/%d" % number)(Response(200, b"b" * 200_000))
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
        bench.admission.waiting.pop(path)(Response(200, b"x" * 1000))
    assert bench.sending.held == 2000
    bench.client.h2.reset_stream(gone)
    bench.run()
    assert bench.sending.held == 1000
    bench.server.resume_writing()
    bench.run()
    assert bench.client.got[kept].body == b"x" * 1000
    assert bench.client.got[gone] == ReceivedResponse()


def test_data_sent_at_once_needs_no_budget(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(sending=1)
    bench.sending.take(1)
    bench.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 4 << 20})
    bench.client.h2.increment_flow_control_window(4 << 20)
    stream = bench.client.request("/wait")
    bench.run()
    bench.admission.waiting.pop(b"/wait")(Response(200, b"b" * 2_000_000))
    bench.run()
    assert len(bench.client.got[stream].body) == 2_000_000
    bench.sending.release(1)


def test_a_stream_may_get_further_chunks(bench: Bench) -> None:
    """As for event streams: a head, pieces as they come, and an end that may be empty."""
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
