"""Hostile HTTP/2: no client gets more than its share, and malformed input does not harm the front.

Every test ends with the connection lost and both budgets empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    HeadersFrame,
    PriorityFrame,
    SettingsFrame,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from router.connections import http2
from router.connections.http2 import NOISE_FORGIVEN_PER_S, READ_BYTES_MAX
from tests.support import length
from tests.support.faults import fault
from tests.support.http2_bench import PING, PREFACE, Bench, Client, window_update
from topics.protocols.http.exchange import Response
from topics.protocols.http2.session import ENCODER_TABLE_BYTES_MAX

NOISE_MAX = 100


@pytest.fixture(autouse=True, scope="module")
def less_noise() -> Iterator[None]:
    """A tenth of what a connection is allowed, since every frame of it is made here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http2, "NOISE_MAX", NOISE_MAX)
        yield


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
    for _ in range(NOISE_MAX):  # the client's settings count, too
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
    for _ in range(2 * NOISE_MAX):
        stream = bench.client.request("/wait")
        bench.client.request("/echo", b"x")
        bench.client.h2.reset_stream(stream)
        bench.run()
    assert not bench.transport.closed


def test_resets_are_forgiven_with_time(bench: Bench) -> None:
    for _ in range(2 * NOISE_MAX):
        stream = bench.client.request("/wait")
        bench.run()
        bench.client.h2.reset_stream(stream)
        bench.run()
        bench.now_us += 1_000_000 // NOISE_FORGIVEN_PER_S
    assert not bench.transport.closed


def test_resets_that_the_client_provokes_count_too(bench: Bench) -> None:
    """A client that violates a stream's rules makes us reset it, which costs the same."""
    for _ in range(NOISE_MAX - 1):
        stream = bench.client.request("/wait")
        bench.raw(bench.client.h2.data_to_send() + window_update(stream, 2**31 - 1))
        bench.run()
        assert bench.client.got[stream].reset == ErrorCodes.FLOW_CONTROL_ERROR
    stream = bench.client.request("/wait")
    bench.raw(bench.client.h2.data_to_send() + window_update(stream, 2**31 - 1))
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
    monkeypatch.setattr("router.connections.http2.PAUSED_BYTES_MAX", 50_000)
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
    assert not bench.admission.handled and other == 1


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
        PREFACE + window_update(0, 2**31 - 1),
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
    bench.admission.refusals[b"/no"] = Response(401, b"{}")
    bench.admission.answers[b"/none"] = Response(204)
    return bench


@settings(max_examples=length.pick(short=10, long=150))
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
        # After a refusal the rest may be irrelevant; what came first decides about the reset.
        assert got.body == expected.body
    for bench in (whole, split):
        assert not bench.server.busy
        bench.check_and_end()


@fault("request", "garbled HTTP/2 bytes", "an answer or the end of the connection; the front goes on")
@settings(max_examples=length.pick(short=10, long=300))
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
    small = min(2000, len(bytes_in))  # all but the large body
    for at in range(0, small, step):
        bench.server.data_received(bytes(bytes_in[at : min(at + step, small)]))
    bench.server.data_received(bytes(bytes_in[small:]))
    bench.server.sweep(bench.now_us + 1)
    bench.check_and_end()
