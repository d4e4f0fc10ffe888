"""WebSockets: every message arrives complete in both directions, and each end is told when the other one closes.

A real server on a socket, whose admission answers every request with a WebSocket; clients are aiohttp's, or send raw bytes.
"""

from __future__ import annotations

import asyncio
import base64
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import WSMsgType

from router.connections.budget import ByteBudget
from router.watch.sinks import STREAM_STALL_US
from tests.integration.test_http1_streams import (
    LOOPS,
    PATIENT_S,
    NewLoop,
    RecordingOwner,
    SocketServer,
    StreamAdmission,
    run_on,
    stream_world,
)
from tests.support.connection_bench import answers, others, rest, run, slow
from tests.support.faults import fault
from topics.protocols.http.exchange import Request, Respond, Response
from topics.protocols.websocket.frames import PING_FRAME, close_frame, text_frame
from topics.protocols.websocket.session import WebSocketError, WebSocketSession

TEXT, BINARY, CONTINUED, CLOSE, PING, PONG = 1, 2, 0, 8, 9, 10


class Echo(RecordingOwner):
    """Sends back what it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = 0
        self.is_busy = False

    def received(self, message: str) -> None:
        self.messages += 1
        if message == "fail":
            raise RuntimeError("a fault")
        if message == "bye":
            self.open_sink.write(text_frame(b"goodbye"))
            self.open_sink.close()
        if message == "think":
            self.is_busy = True
        else:
            self.open_sink.write(text_frame(message.encode()))

    def received_bytes(self) -> None:
        self.open_sink.write(text_frame(b"bytes!"))


class SocketAdmission(StreamAdmission):
    """Answers every request with a WebSocket."""

    def handle(self, request: Request, respond: Respond) -> None:
        self.handled.append(request)
        echo = Echo()
        self.owners.append(echo)
        self.asked.set()
        response = Response(200, websocket=echo)
        if request.path == b"/wait":
            self.waiting.append(lambda: respond(response))
        else:
            respond(response)

    @property
    def echo(self) -> Echo:  # type: ignore[override]
        return cast(Echo, self.owners[-1])

    @echo.setter
    def echo(self, _admission: object) -> None:
        """Always echoes."""


def handshake(path: bytes = b"/ws", **changes: bytes | None) -> bytes:
    fields: dict[str, bytes | None] = {
        "Host": b"x",
        "Upgrade": b"websocket",
        "Connection": b"Upgrade",
        "Sec-WebSocket-Key": base64.b64encode(bytes(16)),
        "Sec-WebSocket-Version": b"13",
    }
    fields |= {name.replace("_", "-"): value for name, value in changes.items()}
    lines = [b"%b: %b\r\n" % (name.encode(), value) for name, value in fields.items() if value is not None]
    return b"GET %b HTTP/1.1\r\n%b\r\n" % (path, b"".join(lines))


def frame(payload: bytes, opcode: int = TEXT, *, final: bool = True, reserved: int = 0) -> bytes:
    """A client's frame."""
    mask = b"\x01\x80\xfe\x37"
    size = len(payload)
    first = (0x80 if final else 0) | reserved | opcode
    if size < 126:
        head = struct.pack(">BB", first, 0x80 | size)
    elif size < 1 << 16:
        head = struct.pack(">BBH", first, 0x80 | 126, size)
    else:
        head = struct.pack(">BBQ", first, 0x80 | 127, size)
    masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))
    return head + mask + masked


class RawClient:
    """A client that sends arbitrary bytes and reads frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def head(self) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENT_S)

    async def frame(self) -> tuple[int, bytes]:
        head = await asyncio.wait_for(self.reader.readexactly(2), PATIENT_S)
        size = head[1]
        assert head[0] & 0x80 and size < 128, "the frame is complete and unmasked"
        if size == 126:
            size = int.from_bytes(await self.reader.readexactly(2), "big")
        elif size == 127:
            size = int.from_bytes(await self.reader.readexactly(8), "big")
        return head[0] & 15, await asyncio.wait_for(self.reader.readexactly(size), PATIENT_S)

    async def close_code(self) -> int:
        while True:
            opcode, payload = await self.frame()
            if opcode == CLOSE:
                return int.from_bytes(payload[:2], "big")

    async def at_end(self) -> bool:
        return not await asyncio.wait_for(self.reader.read(), PATIENT_S)


@asynccontextmanager
async def open_websocket(site: SocketServer) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    url = f"http://127.0.0.1:{site.address[1]}/ws"
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url, max_msg_size=0, autoping=False) as client,
    ):
        yield client


async def connect_raw(site: SocketServer, more: bytes = b"") -> RawClient:
    client = RawClient(*await site.connect(handshake() + more))
    head = await client.head()
    assert head.startswith(b"HTTP/1.1 101 ") and b"Sec-WebSocket-Extensions" not in head
    return client


# -- messages ----------------------------------------------------------------------------------------------


@LOOPS
def test_messages_of_all_sizes(new_loop: NewLoop) -> None:
    async def test() -> None:
        async with SocketServer(SocketAdmission()) as site, open_websocket(site) as client:
            for size in (0, 1, 125, 126, 65_535, 65_536, 3_000_000):
                message = "é" * (size // 2) + "x" * (size % 2)
                await client.send_str(message)
                assert await client.receive_str(timeout=PATIENT_S) == message
            await client.send_bytes(b"\xff\xfe")
            assert await client.receive_str(timeout=PATIENT_S) == "bytes!"
            assert site.server.receiving.held == 0
            await client.ping(b"here?")
            pong = await client.receive(timeout=PATIENT_S)
            assert (pong.type, pong.data) == (WSMsgType.PONG, b"here?")
            await client.pong(b"not asked for")
            for i in range(500):
                await client.send_str(str(i))
            assert [await client.receive_str(timeout=PATIENT_S) for _ in range(500)] == [
                str(i) for i in range(500)
            ]

    run_on(new_loop, test)


def test_frames_are_read_by_another_client() -> None:
    """Checked with the reader of aiohttp's client, for all kinds of lengths."""

    async def test() -> None:
        async with SocketServer(SocketAdmission()) as site, open_websocket(site) as client:
            for size in (0, 1, 124, 125, 126, 127, 65_534, 65_535, 65_536, 65_537):
                site.admission.echo.open_sink.write(text_frame(b"a" * size))
                assert await client.receive_str(timeout=PATIENT_S) == "a" * size

    run(test)


@LOOPS
def test_fragments_with_pings_between_them(new_loop: NewLoop) -> None:
    async def test() -> None:
        async with SocketServer(SocketAdmission()) as site:
            client = await connect_raw(site)
            parts = [
                frame(b"one ", final=False),
                frame(b"p", PING),
                frame(b"two ", CONTINUED, final=False),
                frame(b"three", CONTINUED),
                frame(b"next"),
            ]
            for byte in b"".join(parts):
                client.writer.write(bytes((byte,)))
                await asyncio.sleep(0)
            assert [await client.frame() for _ in range(3)] == [
                (PONG, b"p"),
                (TEXT, b"one two three"),
                (TEXT, b"next"),
            ]
            client.writer.close()
            await site.admission.echo.wait_until("closed")

    run_on(new_loop, test)


def test_frames_right_after_the_handshake_are_not_lost() -> None:
    async def test() -> None:
        async with SocketServer(SocketAdmission()) as site:
            client = await connect_raw(site, frame(b"early") + frame(b"bird")[:3])
            assert await client.frame() == (TEXT, b"early")
            client.writer.close()
            await site.admission.echo.wait_until("closed")

    run(test)


def test_much_that_comes_before_the_handshake_is_answered() -> None:
    """Reading is paused by then, and must be resumed."""

    async def test() -> None:
        async with SocketServer(SocketAdmission()) as site:
            client = RawClient(*await site.connect(handshake(b"/wait")))
            await asyncio.wait_for(site.admission.asked.wait(), PATIENT_S)
            client.writer.write(frame(b"x" * 600_000) + frame(b"bye"))
            [connection] = site.server.connections
            while not connection._paused:
                await asyncio.sleep(0)
            site.admission.waiting.pop()()
            await client.head()
            assert await client.frame() == (TEXT, b"x" * 600_000)
            assert await client.frame() == (TEXT, b"goodbye")
            assert await client.close_code() == 1000
            client.writer.close()

    run(test)


# -- closing -----------------------------------------------------------------------------------------------


@LOOPS
def test_the_server_closes(new_loop: NewLoop) -> None:
    async def test() -> None:
        async with SocketServer(SocketAdmission()) as site, open_websocket(site) as client:
            await client.send_str("bye")
            assert await client.receive_str(timeout=PATIENT_S) == "goodbye"
            end = await client.receive(timeout=PATIENT_S)
            assert (end.type, end.data) == (WSMsgType.CLOSE, 1000)
            await site.admission.echo.wait_until("closed")
            assert site.admission.echo.events == ["opened", "closed"]
            await client.close()

    run_on(new_loop, test)


@LOOPS
def test_the_client_closes(new_loop: NewLoop) -> None:
    async def test() -> None:
        async with SocketServer(SocketAdmission()) as site:
            client = await connect_raw(site)
            client.writer.write(frame(b"last") + frame(struct.pack(">H", 1000), CLOSE) + frame(b"ignored"))
            assert await client.frame() == (TEXT, b"last")
            assert await client.close_code() == 1000 and await client.at_end()
            await site.admission.echo.wait_until("closed")
            assert site.admission.echo.messages == 1
            client.writer.close()
            while site.server.connections:
                await asyncio.sleep(0)

    run_on(new_loop, test)


@LOOPS
@pytest.mark.parametrize("how", ["eof", "reset"])
def test_the_client_disconnects_without_a_close_frame(new_loop: NewLoop, how: str) -> None:
    async def test() -> None:
        async with SocketServer(SocketAdmission()) as site:
            client = await connect_raw(site, frame(b"a"))
            assert await client.frame() == (TEXT, b"a")
            if how == "eof":
                client.writer.write_eof()
            else:
                linger = struct.pack("ii", 1, 0)
                client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                client.writer.transport.abort()
            echo = site.admission.echo
            await echo.wait_until("closed")
            assert echo.events == ["opened", "closed"]
            echo.open_sink.write(text_frame(b"late"))
            echo.open_sink.close()
            echo.open_sink.abort()
            while site.server.connections:
                await asyncio.sleep(0)
            client.writer.close()

    run_on(new_loop, test)


@LOOPS
def test_the_server_stops(new_loop: NewLoop) -> None:
    async def test() -> None:
        async with SocketServer(SocketAdmission()) as site:
            client = await connect_raw(site)
            drained = asyncio.ensure_future(site.server.drain())
            await asyncio.sleep(0)
            assert not drained.done()
            site.admission.echo.open_sink.close()
            assert await client.close_code() == 1001
            client.writer.close()
            await asyncio.wait_for(drained, PATIENT_S)

    run_on(new_loop, test)


def test_a_websocket_that_opens_while_the_server_stops() -> None:
    async def test() -> None:
        async with SocketServer(SocketAdmission()) as site:
            client = RawClient(*await site.connect(handshake(b"/wait")))
            await asyncio.wait_for(site.admission.asked.wait(), PATIENT_S)
            site.server.services.draining = True
            site.admission.waiting.pop()()
            await client.head()
            assert await client.close_code() == 1001
            await site.admission.echo.wait_until("closed")
            client.writer.close()

    run(test)


def test_abort() -> None:
    async def test() -> None:
        async with SocketServer(SocketAdmission()) as site:
            client = await connect_raw(site)
            site.admission.echo.open_sink.abort()
            assert await client.at_end()
            await site.admission.echo.wait_until("closed")
            client.writer.close()

    run(test)


@fault(
    "client", "invalid WebSocket frames", "the WebSocket is closed with the right code; the front continues"
)
@pytest.mark.parametrize(
    ("bytes_", "code"),
    [
        (frame(b"a", reserved=0x40), 1002),
        (frame(b"a", opcode=5), 1002),
        (frame(b"a" * 126, PING), 1002),
        (frame(b"a", CONTINUED), 1002),
        (frame(b"\xff\xff"), 1007),
        (struct.pack(">BBQ", 0x81, 0xFF, 1 << 40), 1009),
        (frame(b"a" * 1_000_001)[:14], 1009),
    ],
)
def test_invalid_frames(bytes_: bytes, code: int) -> None:
    async def test() -> None:
        async with SocketServer(SocketAdmission(), body_bytes_max=1_000_000) as site:
            client = await connect_raw(site, frame(b"before") + bytes_ + bytes(300_000))
            assert await client.frame() == (TEXT, b"before")
            assert await client.close_code() == code
            await site.admission.echo.wait_until("closed")
            assert site.server.receiving.held == 0
            client.writer.close()

    run(test)


@fault(
    "client", "frames without a mask", "the WebSocket is closed with 1002, after answers to earlier messages"
)
@pytest.mark.parametrize("bytes_", [text_frame(b"a"), text_frame(b"a" * 700), text_frame(b""), PING_FRAME])
def test_a_frame_without_a_mask(bytes_: bytes) -> None:
    async def test() -> None:
        async with SocketServer(SocketAdmission()) as site:
            client = await connect_raw(site, frame(b"before") + bytes_ + frame(b"after"))
            assert await client.frame() == (TEXT, b"before")
            assert await client.frame() == (CLOSE, (1002).to_bytes(2, "big"))
            await site.admission.echo.wait_until("closed")
            assert site.server.receiving.held == 0
            client.writer.close()

    run(test)


def test_frames_may_be_cut_anywhere() -> None:
    sizes = [0, 1, 125, 126, 127, 300, 65_535, 65_536, 70_000, 0]
    whole = b"".join(frame(b"a" * size) for size in sizes)
    chance = random.Random(1)
    for longest in (1, 3, 20, 5_000, 1 << 20):
        session, at, taken = WebSocketSession(1 << 20), 0, []
        while at < len(whole):
            end = at + chance.randint(1, longest)
            session.receive(whole[at:end])
            at = end
            while (message := session.next_message()) is not None:
                taken.append(message)
        assert taken == ["a" * size for size in sizes] and not session.buffered
        session.receive(b"\x81")
        assert session.next_message() is None
        session.receive(b"\x00")
        with pytest.raises(WebSocketError):
            session.next_message()


def test_the_largest_message() -> None:
    async def test() -> None:
        async with SocketServer(SocketAdmission(), body_bytes_max=100_000) as site:
            client = await connect_raw(site, frame(b"a" * 100_000))
            assert await client.frame() == (TEXT, b"a" * 100_000)
            client.writer.write(frame(b"a" * 60_000, final=False) + frame(b"b" * 40_001, CONTINUED))
            assert await client.close_code() == 1009
            client.writer.close()

    run(test)


@fault("front", "the handler of a WebSocket fails", "it is closed with 1011; the front continues")
def test_a_handler_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with SocketServer(SocketAdmission()) as site:
            client = await connect_raw(site, frame(b"fail") + frame(b"after"))
            assert await client.close_code() == 1011
            await site.admission.echo.wait_until("closed")
            assert site.admission.echo.messages == 1
            client.writer.close()

    run(test)
    assert [record.message for record in caplog.records] == ["a WebSocket handler failed"]


# -- flow control ------------------------------------------------------------------------------------------


@fault(
    "client", "a client sends over a WebSocket and does not read", "its messages are not read until it reads"
)
@LOOPS
def test_a_client_that_does_not_read(new_loop: NewLoop) -> None:
    async def test() -> None:
        async with SocketServer(SocketAdmission()) as site:
            client = await connect_raw(site)
            echo = site.admission.echo
            message = frame(b"m" * 50_000)
            sent = received = quiet = 0
            while quiet < 200:
                if sent - echo.messages < 20:
                    client.writer.write(message)
                    sent += 1
                quiet = quiet + 1 if echo.messages == received and echo.open_sink.is_full else 0
                received = echo.messages
                await asyncio.sleep(0)
            assert echo.open_sink.is_full and sent > echo.messages
            [connection] = site.server.connections
            assert connection.transport is not None and not cast(Any, connection.transport).is_reading()
            assert connection.transport.get_write_buffer_size() < 200_000
            assert 0 < site.server.stalled_bytes < 200_000 and site.server.receiving.held < 1 << 20
            for _ in range(sent):
                assert await client.frame() == (TEXT, b"m" * 50_000)
            assert echo.messages == sent and site.server.stalled_bytes == 0
            client.writer.close()
            await echo.wait_until("closed")

    run_on(new_loop, test)


@fault(
    "front",
    "too many unfinished messages are being received",
    "beyond the front's limit they are refused with 1013",
)
def test_unfinished_messages_count_as_being_received() -> None:
    async def test() -> None:
        async with SocketServer(SocketAdmission()) as site:
            site.server.receiving = ByteBudget(1_000_000)
            first, second = await connect_raw(site), await connect_raw(site)
            half = frame(b"x" * 900_000)
            first.writer.write(half[:600_000])
            while site.server.receiving.held < 600_000:
                await asyncio.sleep(0)
            second.writer.write(half[:600_000])
            assert await second.close_code() == 1013
            first.writer.write(half[600_000:])
            assert await first.frame() == (TEXT, b"x" * 900_000)
            for _ in range(12):
                first.writer.write(frame(b"p" * 100, PING) * 1000)
                for _ in range(1000):
                    assert (await first.frame())[0] == PONG
            assert site.server.receiving.held == 0, "pings do not accumulate"
            for client in (first, second):
                client.writer.close()

    run(test)


def test_sockets_are_swept_only_when_they_are_stuck() -> None:
    async def test() -> None:
        world, _ = stream_world(admission := SocketAdmission())
        connection, transport = world.connect()
        connection.data_received(handshake())
        await rest()
        world.sweep(connection, after_us=3_600_000_000)
        assert not transport.closed
        transport.unread = 70_000
        connection.pause_writing()
        world.now_us += STREAM_STALL_US - 1
        connection.sweep(world.now_us, idle_us=1, request_us=1)
        assert not transport.closed and world.server.stalled_bytes == 70_000
        connection.sweep(world.now_us + 2, idle_us=1, request_us=1)
        assert transport.aborted
        connection.connection_lost(None)
        await rest()
        assert admission.echo.events == ["opened", "closed"] and not others()
        assert world.server.stalled_bytes == 0

    run(test)


# -- handshakes --------------------------------------------------------------------------------------------

BAD = {
    "no upgrade": slow(b"/ws"),
    "another protocol": handshake(Upgrade=b"h2c"),
    "no Connection": handshake(Connection=None),
    "another Connection": handshake(Connection=b"keep-alive"),
    "no key": handshake(Sec_WebSocket_Key=None),
    "a short key": handshake(Sec_WebSocket_Key=b"YWJj"),
    "a key that is none": handshake(Sec_WebSocket_Key=b"%%%%%%%%%%%%%%%%%%%%%%=="),
    "no version": handshake(Sec_WebSocket_Version=None),
    "an old version": handshake(Sec_WebSocket_Version=b"8"),
    "a body": handshake(Content_Length=b"2") + b"{}",
    "another method": handshake().replace(b"GET", b"PUT"),
    "HTTP/1.0": handshake().replace(b"HTTP/1.1", b"HTTP/1.0"),
    "the fast path": b"POST /v0/topics/a HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_handshake(name: str) -> None:
    async def test() -> None:
        async with SocketServer(SocketAdmission()) as site:
            client = RawClient(
                *await site.connect(BAD[name] + slow(b"/next", headers=b"Connection: close\r\n"))
            )
            got = list(answers(await asyncio.wait_for(client.reader.read(), PATIENT_S)))
            assert len(got) == (1 if name == "HTTP/1.0" else 2), "the connection stays open"
            for status, head, body in got:
                assert status == 400 and b"Sec-WebSocket-Version: 13" in head
                assert body["error"]["code"] == "invalid_request"
            assert not site.admission.handled[0].wants_websocket
            assert all(owner.events == ["closed"] for owner in site.admission.owners)
            client.writer.close()

    run(test)


@pytest.mark.parametrize(
    "changes",
    [
        {"Upgrade": b"WebSocket"},
        {"Connection": b"keep-alive, Upgrade"},
        {"Sec_WebSocket_Extensions": b"permessage-deflate"},
        {"Origin": b"http://elsewhere"},
        {"Sec_WebSocket_Protocol": b"unknown"},
    ],
)
def test_a_good_handshake(changes: dict[str, bytes], caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with SocketServer(SocketAdmission()) as site:
            client = RawClient(*await site.connect(handshake(**changes) + frame(b"a")))
            head = await client.head()
            # The accept value of RFC 6455, 4.2.2 for a key of sixteen zeros.
            assert b"Sec-WebSocket-Accept: ICX+Yqv66kxgM0FcWaLWlFLwTAI=\r\n" in head
            assert b"deflate" not in head and b"Server:" not in head and b"Protocol:" not in head
            assert await client.frame() == (TEXT, b"a") and site.admission.handled[0].wants_websocket
            client.writer.close()

    run(test)
    assert caplog.records == []


@fault("client", "a client disconnects before its stream has begun", "the stream's owner is told once")
@pytest.mark.parametrize("turns", range(6))
def test_a_client_that_disconnects_early(turns: int, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        for answered_first in (True, False):
            world, _ = stream_world(admission := SocketAdmission())
            connection, _ = world.connect()
            connection.data_received(handshake(b"/wait"))
            await rest()
            if answered_first:
                admission.waiting.pop()()
                await rest(turns)
                connection.connection_lost(None)
            else:
                connection.connection_lost(None)
                await rest(turns)
                admission.waiting.pop()()
            await rest()
            assert admission.echo.events[-1:] == ["closed"] and not others()

    run(test)
    assert caplog.records == []


def test_the_bytes_of_frames() -> None:
    assert text_frame(b"") == b"\x81\x00"
    assert text_frame(b"a" * 126)[:4] == b"\x81\x7e\x00\x7e"
    assert text_frame(b"a" * 65_536)[:10] == b"\x81\x7f" + (65_536).to_bytes(8, "big")
    assert close_frame(1000) == b"\x88\x02\x03\xe8"
