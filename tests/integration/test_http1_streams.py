"""Streaming answers over HTTP/1: the stream's owner gets each callback once, and the client gets all bytes.

First on a fake transport, which makes every step exact; then on real sockets, with both event loops.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import uvloop

from router.connections.budget import ByteBudget
from router.connections.connection import Connection
from router.server import Server
from router.watch.sinks import STREAM_STALL_US
from tests.support.connection_bench import Admission, Transport, World, fast, others, rest, run, slow
from tests.support.faults import fault
from topics.protocols.http.call import Services
from topics.protocols.http.exchange import Request, Respond, Response, Sink
from topics.protocols.http1.pace import LINGER_US
from topics.protocols.http1.session import CLOSED, STREAM
from topics.system.settings import Settings

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\nX-A: b\r\n\r\n"
PATIENT_S = 120


class RecordingOwner:
    """A stream's owner that records its callbacks."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sink: Sink | None = None
        self.changed = asyncio.Event()

    def _record(self, what: str) -> None:
        assert "closed" not in self.events, "no callback may follow `closed`"
        self.events.append(what)
        self.changed.set()

    def opened(self, sink: Sink) -> None:
        self.sink = sink
        self._record("opened")

    def drained(self) -> None:
        self._record("drained")

    def closed(self) -> None:
        self._record("closed")

    @property
    def open_sink(self) -> Sink:
        assert self.sink is not None
        return self.sink

    async def wait_until(self, what: str) -> None:
        while what not in self.events:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), PATIENT_S)


class StreamAdmission:
    """Answers every request with a stream; for `/wait` only when the test says so."""

    def __init__(self) -> None:
        self.handled: list[Request] = []
        self.owners: list[RecordingOwner] = []
        self.waiting: list[Callable[[], None]] = []
        self.asked = asyncio.Event()
        self.echo: Admission | None = None  # answers requests for topics

    def add_cors(self, origin: bytes, response: Response) -> Response:
        return response

    def check_head(self, _request: Request, _declared: int | None) -> Response | None:
        return None

    def handle(self, request: Request, respond: Respond) -> None:
        if self.echo is not None and request.path.startswith(b"/v0/topics"):
            self.echo.handle(request, respond)
            return
        self.handled.append(request)
        owner = RecordingOwner()
        self.owners.append(owner)
        response = self.response(owner)
        self.asked.set()
        if request.path.endswith(b"wait"):
            self.waiting.append(lambda: respond(response))
        else:
            respond(response)

    def response(self, owner: RecordingOwner) -> Response:
        return Response(200, b"", b"text/event-stream", b"X-A: b\r\n", stream=owner)


def stream_world(admission: Any = None) -> tuple[World, StreamAdmission]:
    world = World()
    admission = admission or StreamAdmission()
    world.admission = admission
    world.server.admission = admission
    return world, admission


async def open_stream(request: bytes = b"") -> tuple[World, Connection, Transport, RecordingOwner]:
    world, admission = stream_world()
    connection, transport = world.connect()
    connection.data_received(request or slow(b"/s"))
    await rest()
    assert connection.session.state is STREAM
    return world, connection, transport, admission.owners[-1]


# -- on a fake transport -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        slow(b"/s"),
        b"GET /s HTTP/1.0\r\n\r\n",
        slow(b"/s", headers=b"Connection: close\r\n"),
        fast(b"/v0/topics/s"),
        fast(b"/s", headers=b"X-Odd: 1\r\n"),
    ],
)
def test_the_head_and_then_what_the_owner_writes(request_: bytes) -> None:
    async def test() -> None:
        world, connection, transport, owner = await open_stream(request_)
        assert transport.out == HEAD and owner.events == ["opened"]
        owner.open_sink.write(b"one")
        owner.open_sink.write(b"two")
        assert transport.writes[-2:] == [b"one", b"two"] and not transport.ended
        owner.open_sink.close()
        assert transport.ended and owner.events == ["opened"], (
            "a callback must not run inside the owner's own call"
        )
        owner.open_sink.write(b"late")
        owner.open_sink.close()
        await rest()
        assert owner.events == ["opened", "closed"] and transport.out == HEAD + b"onetwo"
        assert connection.session.state is CLOSED and not others()
        world.sweep(connection, after_us=LINGER_US + 1)
        assert transport.closed
        connection.connection_lost(None)
        assert owner.events == ["opened", "closed"]

    run(test)


def test_fields_that_a_stream_needs_reach_the_gate() -> None:
    async def test() -> None:
        world, admission = stream_world()
        connection, _ = world.connect()
        connection.data_received(slow(b"/s?token=a", headers=b"Last-Event-ID: 1-2\r\n"))
        await rest()
        assert admission.handled[0].last_event_id == b"1-2"

    run(test)


def test_answers_before_a_stream_come_first_and_requests_after_it_are_ignored() -> None:
    async def test() -> None:
        world, admission = stream_world()
        admission.echo = echo = Admission()
        connection, transport = world.connect()
        connection.data_received(fast() + slow(b"/v0/topics/b") + slow(b"/s") + fast() * 10)
        await rest(40)
        assert transport.out.count(b"HTTP/1.1 200") == 3 and transport.out.endswith(HEAD)
        connection.data_received(fast() * 5000)
        assert len(echo.handled) == 2 and not connection.session.buffered and transport.reads
        admission.owners[0].open_sink.write(b"still here")
        assert transport.out.endswith(b"still here")

    run(test)


def test_the_end_is_noticed_after_much_input_before_a_stream() -> None:
    async def test() -> None:
        world, admission = stream_world()
        connection, transport = world.connect()
        connection.data_received(slow(b"/wait"))
        await rest()
        connection.data_received(bytes(1 << 20))
        assert not transport.reads
        admission.waiting.pop()()
        await rest()
        assert transport.reads and not connection.session.buffered

    run(test)


def test_head_gets_the_head() -> None:
    async def test() -> None:
        world, admission = stream_world()
        connection, transport = world.connect()
        connection.data_received(slow(b"/s", method=b"HEAD"))
        await rest()
        assert transport.out == HEAD and transport.ended and connection.session.state is CLOSED
        assert admission.owners[0].events == ["closed"] and not others()

    run(test)


@fault("client", "a client disconnects before its stream has begun", "the stream's owner is told once")
@pytest.mark.parametrize("path", [b"/wait", b"/v0/topics/wait"])
@pytest.mark.parametrize("turns", range(4))
def test_a_client_that_disconnects_early(path: bytes, turns: int) -> None:
    async def test() -> None:
        for answered_first in (True, False):
            world, admission = stream_world()
            connection, _ = world.connect()
            connection.data_received(fast(path) if path.startswith(b"/v0") else slow(path))
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
            assert admission.owners[0].events[-1:] == ["closed"] and not others()

    run(test)


def test_a_half_closed_client_gets_no_stream() -> None:
    async def test() -> None:
        world, admission = stream_world()
        connection, transport = world.connect()
        connection.data_received(slow(b"/wait"))
        await rest()
        connection.eof_received()
        admission.waiting.pop()()
        await rest()
        assert transport.out == HEAD and transport.closed and admission.owners[0].events == ["closed"]

    run(test)


def test_a_stream_that_would_begin_while_the_server_stops() -> None:
    async def test() -> None:
        world, admission = stream_world()
        connection, transport = world.connect()
        connection.data_received(slow(b"/wait"))
        await rest()
        world.server.services.draining = True
        admission.waiting.pop()()
        await rest()
        assert transport.out == HEAD and transport.ended and admission.owners[0].events == ["closed"]

    run(test)


def test_a_connection_that_was_refused_meanwhile() -> None:
    async def test() -> None:
        world, admission = stream_world()
        connection, transport = world.connect()
        connection.data_received(slow(b"/wait"))
        await rest()
        connection._refuse(Response(400))
        admission.waiting.pop()()
        await rest()
        assert b" 200 " not in transport.out and admission.owners[0].events == ["closed"]

    run(test)


@pytest.mark.parametrize("end", [Connection.eof_received, lambda it: it.connection_lost(None)])
def test_the_end_of_the_client_ends_the_stream(end: Callable[[Connection], object]) -> None:
    async def test() -> None:
        _, connection, transport, owner = await open_stream()
        end(connection)
        assert owner.events == ["opened", "closed"]
        owner.open_sink.write(b"late")
        owner.open_sink.close()
        owner.open_sink.abort()
        connection.connection_lost(None)
        await rest()
        assert owner.events == ["opened", "closed"] and transport.out == HEAD

    run(test)


def test_abort() -> None:
    async def test() -> None:
        _, connection, transport, owner = await open_stream()
        owner.open_sink.write(b"half")
        owner.open_sink.abort()
        assert transport.aborted and owner.events == ["opened"]
        owner.open_sink.write(b"late")
        connection.connection_lost(None)
        assert owner.events == ["opened", "closed"]

    run(test)


def test_full_and_drained() -> None:
    async def test() -> None:
        world, connection, transport, owner = await open_stream()
        sink = owner.open_sink
        assert not sink.is_full
        transport.unread = 70_000
        connection.pause_writing()
        assert sink.is_full and world.server.stalled_bytes == 70_000
        transport.unread = 90_000
        world.sweep(connection, after_us=1_000_000)
        assert world.server.stalled_bytes == 90_000, "stalled bytes are counted"
        transport.unread = 0
        connection.resume_writing()
        assert not sink.is_full and owner.events == ["opened", "drained"] and world.server.stalled_bytes == 0
        connection.pause_writing()
        sink.close()
        connection.resume_writing()
        await rest()
        assert owner.events == ["opened", "drained", "closed"]

    run(test)


@fault(
    "client",
    "a watcher does not read",
    "its stream's owner may end it within a minute; then the connection is cut",
)
def test_streams_are_swept_only_when_they_are_stuck() -> None:
    async def test() -> None:
        world, connection, transport, owner = await open_stream()
        world.sweep(connection, after_us=3_600_000_000)
        assert not transport.closed, "an idle stream is not stalled"
        transport.unread = 70_000
        connection.pause_writing()
        world.now_us += STREAM_STALL_US - 1
        connection.sweep(world.now_us, idle_us=1, request_us=1)
        assert not transport.closed
        connection.sweep(world.now_us + 2, idle_us=1, request_us=1)
        assert transport.aborted
        connection.connection_lost(None)
        assert owner.events == ["opened", "closed"] and world.server.stalled_bytes == 0

    run(test)


@fault("front", "a stream's owner fails as it begins", "that connection is closed; the front continues")
def test_an_owner_that_fails_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        world, admission = stream_world()
        owner = RecordingOwner()

        def fail(_sink: Sink) -> None:
            raise RuntimeError("a fault")

        cast(Any, owner).opened = fail
        connection, transport = world.connect()
        admission.handle = lambda _request, respond: respond(admission.response(owner))  # type: ignore[method-assign]
        connection.data_received(slow(b"/s"))
        await rest()
        assert transport.aborted
        connection.connection_lost(None)
        assert owner.events == ["closed"]

    run(test)
    assert [record.message for record in caplog.records] == ["a stream failed"]


# -- real sockets ------------------------------------------------------------------------------------------


class SocketServer:
    """A server on a socket with the test's own admission."""

    def __init__(self, admission: Any, *, body_bytes_max: int = 64 << 20) -> None:
        loop = asyncio.get_running_loop()
        services = Services(
            cast(Any, self), Settings(max_body_bytes=body_bytes_max), lambda: int(loop.time() * 1e6), "0", 0
        )
        self.admission = admission
        admission.open = 0
        self.server = Server(services, loop)
        self.server.admission = admission
        self.server.receiving = ByteBudget(4 << 20)
        self.address: tuple[str, int] = ("", 0)

    def end_polls(self, _before_us: int) -> None:
        """As the front's core does."""

    async def __aenter__(self) -> SocketServer:
        listening = socket.create_server(("127.0.0.1", 0))
        self.address = listening.getsockname()
        await self.server.start(listening)
        return self

    async def __aexit__(self, *_error: object) -> None:
        for connection in list(self.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self.server.drain()

    async def connect(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address, limit=1 << 16)
        writer.write(request)
        return reader, writer

    async def watch(
        self, request: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, RecordingOwner]:
        self.admission.asked.clear()
        reader, writer = await self.connect(request)
        await asyncio.wait_for(self.admission.asked.wait(), PATIENT_S)
        owner = self.admission.owners[-1]
        await owner.wait_until("opened")
        return reader, writer, owner


LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
NewLoop = Callable[[], asyncio.AbstractEventLoop]


def run_on(new_loop: NewLoop, test: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(cast(Any, test()))


async def read_all(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(), PATIENT_S)


@LOOPS
@pytest.mark.parametrize("request_", [slow(b"/s"), b"GET /s HTTP/1.0\r\n\r\n", fast(b"/v0/topics/s")])
def test_close_sends_all_that_was_written(new_loop: NewLoop, request_: bytes) -> None:
    async def test() -> None:
        async with SocketServer(StreamAdmission()) as site:
            reader, writer, owner = await site.watch(request_)
            for i in range(2000):
                owner.open_sink.write(b"%d\n" % i * 2000)
            assert owner.open_sink.is_full
            owner.open_sink.close()
            head, _, body = (await read_all(reader)).partition(b"\r\n\r\n")
            assert b"Content-Length" not in head and b"Transfer-Encoding" not in head
            assert body == b"".join(b"%d\n" % i * 2000 for i in range(2000))
            writer.close()
            await owner.wait_until("closed")
            assert owner.events == ["opened", "closed"]

    run_on(new_loop, test)


@LOOPS
def test_a_client_that_reads_again(new_loop: NewLoop) -> None:
    async def test() -> None:
        async with SocketServer(StreamAdmission()) as site:
            reader, writer, owner = await site.watch(slow(b"/s"))
            written = 0
            while not owner.open_sink.is_full:
                owner.open_sink.write(bytes(100_000))
                written += 100_000
                await asyncio.sleep(0)
            assert site.server.stalled_bytes > 0
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.wait_for(reader.readexactly(written), PATIENT_S)
            await owner.wait_until("drained")
            assert not owner.open_sink.is_full and site.server.stalled_bytes == 0
            owner.open_sink.write(b"more")
            assert await asyncio.wait_for(reader.readexactly(4), PATIENT_S) == b"more"
            writer.close()
            await owner.wait_until("closed")

    run_on(new_loop, test)


@LOOPS
def test_input_is_ignored_and_a_reset_ends(new_loop: NewLoop) -> None:
    async def test() -> None:
        async with SocketServer(StreamAdmission()) as site:
            reader, writer, owner = await site.watch(slow(b"/s") + slow(b"/second"))
            for _ in range(30):
                writer.write(bytes(100_000))
                await asyncio.wait_for(writer.drain(), PATIENT_S)
            owner.open_sink.write(b"still here")
            await asyncio.wait_for(reader.readuntil(b"still here"), PATIENT_S)
            assert len(site.admission.handled) == 1
            writer.transport.abort()
            while "closed" not in owner.events:
                owner.open_sink.write(b"x" * 100)
                await asyncio.sleep(0)
            for _ in range(10):
                owner.open_sink.write(b"into the void")

    run_on(new_loop, test)


@LOOPS
def test_draining_waits_for_streams_to_end(new_loop: NewLoop) -> None:
    async def test() -> None:
        async with SocketServer(StreamAdmission()) as site:
            reader, writer, owner = await site.watch(slow(b"/s"))
            drained = asyncio.ensure_future(site.server.drain())
            owner.open_sink.write(bytes(8 << 20))
            await asyncio.sleep(0)
            assert not drained.done()
            owner.open_sink.close()
            body = await read_all(reader)
            assert len(body) > 8 << 20
            writer.close()
            await asyncio.wait_for(drained, PATIENT_S)

    run_on(new_loop, test)
