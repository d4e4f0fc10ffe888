"""Bytes of an HTTP/2 client: every stream is answered at most once, and the connection stays consistent.

An input is what follows the preface. It is sent in one piece and in several; the answer must consist of frames, its header blocks
must decode in order, and every status must be one of the contract.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import uvloop
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes
from hpack import Decoder
from hyperframe.frame import DataFrame, Frame, HeadersFrame, PingFrame, RstStreamFrame, SettingsFrame

from tests.fuzz.front import FrontWorld, check_answer
from tests.fuzz.runner import Target, logged_errors

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_LOOP = uvloop.new_event_loop()
_HEADERS = [(":method", "POST"), (":scheme", "http"), (":authority", "x"), (":path", "/v0/topics/t")]


def run(data: bytes) -> None:
    how, data = (data[0], data[1:]) if data else (0, b"")
    sent = PREFACE + data
    rng = random.Random(how)
    places = sorted(rng.randint(0, len(sent)) for _ in range(rng.randint(1, 8)))
    _drive([sent])
    _drive(sent[first:stop] for first, stop in zip([0, *places], [*places, len(sent)]))


def _drive(parts: Iterable[bytes]) -> None:
    async def drive() -> bytes:
        world = FrontWorld()
        await world.feed(part for part in parts if part)
        await world.end()
        return bytes(world.transport.out)

    with logged_errors() as errors:
        out = _LOOP.run_until_complete(drive())
    assert not errors, errors
    if not out.startswith(b"HTTP/1.1 "):  # the input was cut inside the preface
        _check(out)


def _check(out: bytes) -> None:
    """Every stream: one final status, its body, an end; after that at most a reset."""
    statuses: dict[int, int] = {}
    bodies: dict[int, bytes] = {}
    ended: set[int] = set()
    decoder = Decoder()
    decoder.max_allowed_table_size = 1 << 32  # an input may have offered this much
    for frame in _frames(out):
        number = frame.stream_id
        if isinstance(frame, HeadersFrame):
            assert "END_HEADERS" in frame.flags, "the server's header blocks fit into one frame"
            status = int(dict(decoder.decode(frame.data, raw=True))[b":status"])
            if status == 100:
                continue
            assert number not in statuses, "a stream is answered twice"
            statuses[number] = status
        elif isinstance(frame, DataFrame):
            assert number in statuses and number not in ended, "data outside of an answer"
            bodies[number] = bodies.get(number, b"") + frame.data
        if isinstance(frame, HeadersFrame | DataFrame) and "END_STREAM" in frame.flags:
            ended.add(number)
    for number in ended:
        check_answer(statuses[number], bodies.get(number, b""))


def _frames(out: bytes) -> Iterator[Frame]:
    at = 0
    while at < len(out):
        assert len(out) - at >= 9, "the answer ends inside a frame"
        frame, size = Frame.parse_frame_header(memoryview(out)[at : at + 9])
        assert at + 9 + size <= len(out), "the answer ends inside a frame"
        frame.parse_body(memoryview(out)[at + 9 : at + 9 + size])
        yield frame
        at += 9 + size


def _client() -> H2Connection:
    client = H2Connection(H2Configuration(client_side=True, validate_outbound_headers=False))
    client.initiate_connection()
    return client


def _ask(client: H2Connection, path: str, body: bytes = b"", method: str = "POST", **more: str) -> None:
    stream = client.get_next_available_stream_id()
    headers = [(":method", method), *_HEADERS[1:3], (":path", path), ("content-type", "application/json")]
    headers += [(name.replace("_", "-"), value) for name, value in more.items()]
    client.send_headers(stream, headers, end_stream=not body)
    if body:
        client.send_data(stream, body, end_stream=True)


def seeds() -> list[bytes]:
    def made(*asked: tuple[str, bytes, str]) -> bytes:
        client = _client()
        for path, body, method in asked:
            _ask(client, path, body, method)
        return b"\x02" + client.data_to_send().removeprefix(PREFACE)

    write = ("/v0/topics/t", b'{"records":[{"data":1}]}', "POST")
    poll = ("/v0/topics/t/diff", b'{"from_seq":9,"wait_ms":50}', "POST")
    windows = _client()
    windows.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 10, SettingCodes.HEADER_TABLE_SIZE: 0})
    windows.increment_flow_control_window(1000)
    _ask(windows, "/v0/openapi.json", method="GET")
    windows.ping(b"12345678")
    windows.reset_stream(1)
    _ask(windows, "/v0/topics/t", b"{}", expect="100-continue", content_length="2")
    raw = SettingsFrame(0).serialize() + PingFrame(0, opaque_data=b"x" * 8).serialize()
    return [
        made(write),
        made(write, ("/v0/topics/t/diff", b"{}", "POST"), ("/v0/topics", b"", "GET")),
        made(poll, write, ("/v0/nothing", b"", "HEAD"), ("/v0/topics/t", b"", "OPTIONS")),
        made(("/v0/topics/t/tags?page_size=1", b"", "GET"), ("/v0/topics/t", b"x" * 5000, "POST")),
        b"\x02" + windows.data_to_send().removeprefix(PREFACE),
        b"\x02" + raw + RstStreamFrame(1).serialize(),
    ]


TOKENS = (
    b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",  # SETTINGS, empty
    b"\x00\x00\x00\x04\x01\x00\x00\x00\x00",  # its acknowledgement
    b"\x00\x00\x08\x06\x00\x00\x00\x00\x00pingping",
    b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\x7f\xff\xff\xff",  # WINDOW_UPDATE
    b"\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x08",  # RST_STREAM of 1
    b"\x00\x00\x08\x07\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00",  # GOAWAY
    b"\x00\x00\x00\x00\x01\x00\x00\x00\x01",  # DATA, empty, the end of 1
    b"\x00\x00\x00\x09\x04\x00\x00\x00\x01",  # CONTINUATION
    b"\x00\x00\x05\x02\x00\x00\x00\x00\x03\x00\x00\x00\x01\x10",  # PRIORITY
    b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\xff\xff\xff\xff",  # a window of 2^32 - 1
    b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x00",  # a window of 0
    b"\xff\xff\xff",
    b"\x3f\xff\xff\xff\xff\x07",  # a table size update
    b"\x82\x86\x84",
)

TARGET = Target("http2", run, seeds, TOKENS, rounds=200)
