"""Streaming answers over HTTP/2: flow control is per stream, and the stream's owner gets each callback once.

The client is h2's, in memory. Writes are sent in the loop's next turn, so every test runs on a loop; the last ones use
a real server and socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from router.connections.http2_streams import FULL_BYTES
from router.watch.sinks import STREAM_STALL_US
from tests.integration.test_http1_streams import (
    LOOPS,
    PATIENT_S,
    NewLoop,
    RecordingOwner,
    SocketServer,
    StreamAdmission,
    rest,
    run_on,
)
from tests.support.faults import fault
from tests.support.http2_bench import Bench, Client, ReceivedResponse
from topics.protocols.http.exchange import Response, Sink


class StreamBench:
    """A bench with one open stream."""

    def __init__(self, bench: Bench | None = None, path: str = "/s") -> None:
        self.bench = bench or Bench().handshake()
        self.owner = RecordingOwner()
        self.bench.admission.answers[path.encode()] = Response(
            200, b"", b"text/event-stream", b"X-A: b\r\nConnection: close\r\n", stream=self.owner
        )
        self.id = self.bench.client.request(path)
        self.bench.run()

    @property
    def sink(self) -> Sink:
        return self.owner.open_sink

    @property
    def got(self) -> ReceivedResponse:
        return self.bench.client.got[self.id]

    async def turn(self) -> None:
        await rest(3)
        self.bench.run()


def run(test: Callable[[], Awaitable[Bench]]) -> None:
    async def whole() -> None:
        bench = await test()
        bench.check_and_end()

    asyncio.run(whole())


def test_the_head_and_then_what_the_owner_writes() -> None:
    async def test() -> Bench:
        watch = StreamBench()
        await watch.turn()
        assert watch.got.headers == {b":status": b"200", b"content-type": b"text/event-stream", b"x-a": b"b"}
        assert watch.owner.events == ["opened"] and watch.bench.server.is_streaming
        for part in (b"one", b"two"):
            watch.sink.write(part)
        assert not watch.bench.transport.writes
        await rest(3)
        assert len(watch.bench.transport.writes) == 1, "what is written in one turn is sent in one piece"
        watch.bench.run()
        assert watch.got.body == b"onetwo" and not watch.got.ended
        watch.sink.write(b"three")
        watch.sink.close()
        watch.sink.write(b"late")
        watch.sink.close()
        assert watch.owner.events == ["opened"], "a callback must not run inside the owner's own call"
        await watch.turn()
        assert watch.got.body == b"onetwothree" and watch.got.ended and watch.got.reset is None
        assert watch.owner.events == ["opened", "closed"] and not watch.bench.server.is_streaming
        return watch.bench

    run(test)


def test_an_event_for_many_streams_is_one_write() -> None:
    async def test() -> Bench:
        bench = Bench().handshake()
        watches = [StreamBench(bench, f"/s{i}") for i in range(100)]
        await watches[0].turn()
        for watch in watches:
            watch.sink.write(b"event" * 20)
        await rest(3)
        assert len(bench.transport.writes) == 1
        bench.run()
        assert all(watch.got.body == b"event" * 20 for watch in watches)
        return bench

    run(test)


def test_fields_that_a_stream_needs_reach_the_gate() -> None:
    async def test() -> Bench:
        bench = Bench().handshake()
        bench.client.request("/echo", last_event_id="1-2")
        bench.run()
        assert bench.admission.handled[0].last_event_id == b"1-2"
        return bench

    run(test)


def test_head_gets_the_head() -> None:
    async def test() -> Bench:
        bench = Bench().handshake()
        owner = RecordingOwner()
        bench.admission.answers[b"/s"] = Response(200, b"", b"text/event-stream", stream=owner)
        stream = bench.client.request("/s", method="HEAD")
        bench.run()
        late, late_owner = bench.client.request("/late", method="HEAD"), RecordingOwner()
        bench.run()
        bench.admission.waiting.pop(b"/late")(Response(200, stream=late_owner))
        bench.run()
        assert bench.client.got[late].ended and late_owner.events == ["closed"]
        got = bench.client.got[stream]
        assert got.status == 200 and got.ended and not got.body and b"content-length" not in got.headers
        assert owner.events == ["closed"]
        return bench

    run(test)


def test_a_websocket_is_refused() -> None:
    async def test() -> Bench:
        bench = Bench().handshake()
        owner = RecordingOwner()
        bench.admission.answers[b"/ws"] = Response(200, websocket=owner)  # type: ignore[arg-type]
        stream = bench.client.request("/ws")
        bench.run()
        got = bench.client.got[stream]
        assert got.status == 400 and got.code == "invalid_request" and got.ended
        assert owner.events == ["closed"]
        return bench

    run(test)


@fault("client", "a client disconnects before its stream has begun", "the stream's owner is told once")
def test_a_client_that_disconnects_early() -> None:
    async def test() -> Bench:
        bench = Bench().handshake()
        first, second = RecordingOwner(), RecordingOwner()
        bench.client.h2.reset_stream(bench.client.request("/reset"))
        bench.client.request("/lost")
        bench.run()
        bench.admission.waiting.pop(b"/reset")(Response(200, stream=first))
        bench.server.connection_lost()
        bench.admission.waiting.pop(b"/lost")(Response(200, stream=second))
        await rest()
        assert first.events == second.events == ["closed"]
        return bench

    run(test)


@pytest.mark.parametrize("how", ["reset", "lost", "ended"])
def test_the_end_of_the_client_ends_the_stream(how: str) -> None:
    async def test() -> Bench:
        watch = StreamBench()
        bench = watch.bench
        bench.client.request("/waits")
        watch.sink.write(b"a")
        await watch.turn()
        if how == "reset":
            bench.client.h2.reset_stream(watch.id, ErrorCodes.CANCEL)
            bench.run()
        elif how == "lost":
            bench.server.connection_lost()
        else:
            bench.server.eof_received()
        assert watch.owner.events == ["opened", "closed"]
        watch.sink.write(b"late")
        watch.sink.close()
        watch.sink.abort()
        await rest(3)
        assert b"late" not in b"".join(bench.transport.writes)
        if how != "lost":
            bench.admission.waiting.pop(b"/waits")(Response(200, b"an answer with an end"))
            assert b"an answer with an end" in bench.transport.take()
        return bench

    run(test)


def test_abort() -> None:
    async def test() -> Bench:
        watch = StreamBench()
        watch.sink.write(b"never sent")
        watch.sink.abort()
        assert watch.owner.events == ["opened"]
        await watch.turn()
        assert watch.owner.events == ["opened", "closed"]
        assert watch.got.reset == ErrorCodes.CANCEL and not watch.got.ended
        return watch.bench

    run(test)


def test_a_closed_window_fills_its_own_stream_only() -> None:
    async def test() -> Bench:
        watch = StreamBench()
        bench = watch.bench
        other = StreamBench(bench, "/other")
        bench.client.reading = False
        written = 0
        while not watch.sink.is_full:
            watch.sink.write(bytes(10_000))
            written += 10_000
            await watch.turn()
        window = 65_535
        assert written >= window + FULL_BYTES and len(watch.got.body) == window
        assert bench.sending.held >= FULL_BYTES, "waiting bytes are counted"
        assert not other.sink.is_full
        bench.client.h2.increment_flow_control_window(1 << 20)
        bench.client.h2.increment_flow_control_window(FULL_BYTES // 2 - 10_000, watch.id)
        bench.run()
        assert watch.sink.is_full and watch.owner.events == ["opened"]
        bench.client.h2.increment_flow_control_window(20_000, watch.id)
        bench.run()
        assert not watch.sink.is_full and watch.owner.events == ["opened", "drained"]
        bench.client.h2.increment_flow_control_window(1 << 20, watch.id)
        bench.run()
        assert len(watch.got.body) == written and bench.sending.held == 0
        return bench

    run(test)


def test_close_sends_bytes_that_wait_for_the_window() -> None:
    async def test() -> Bench:
        watch = StreamBench()
        bench = watch.bench
        bench.client.reading = False
        watch.sink.write(bytes(200_000))
        watch.sink.close()
        await watch.turn()
        assert watch.owner.events == ["opened", "closed"] and bench.server.is_streaming
        bench.client.h2.increment_flow_control_window(1 << 20)
        bench.client.h2.increment_flow_control_window(1 << 20, watch.id)
        bench.run()
        assert len(watch.got.body) == 200_000 and watch.got.ended and not bench.server.is_streaming
        return bench

    run(test)


def test_an_unread_connection_fills_all_its_streams() -> None:
    async def test() -> Bench:
        watch = StreamBench()
        bench = watch.bench
        other = StreamBench(bench, "/other")
        bench.server.pause_writing()
        assert watch.sink.is_full and other.sink.is_full
        late = StreamBench(bench, "/late")
        assert late.sink.is_full
        watch.sink.write(b"waits")
        await rest(3)
        assert not bench.transport.writes
        bench.server.resume_writing()
        bench.run()
        assert watch.got.body == b"waits"
        for each in (watch, other, late):
            assert each.owner.events == ["opened", "drained"] and not each.sink.is_full
        return bench

    run(test)


@fault("front", "more bytes wait in streams than a front may hold", "the stream that exceeds it is ended")
def test_the_budget_holds() -> None:
    async def test() -> Bench:
        bench = Bench(sending=300_000).handshake()
        bench.client.reading = False
        watch, other = StreamBench(bench), StreamBench(bench, "/other")
        for each in (watch, other):
            each.sink.write(bytes(250_000))
            await each.turn()
        assert bench.sending.held <= 300_000
        assert watch.owner.events == ["opened"]
        assert other.owner.events == ["opened", "closed"] and other.got.reset == ErrorCodes.ENHANCE_YOUR_CALM
        return bench

    run(test)


@fault(
    "client",
    "a watcher does not read",
    "its stream's owner may end it within a minute; then the connection is cut",
)
def test_streams_are_swept_only_when_they_are_stuck() -> None:
    async def test() -> Bench:
        watch = StreamBench()
        bench = watch.bench
        await watch.turn()
        bench.now_us += 3_600_000_000
        bench.server.sweep(bench.now_us - 1)
        assert watch.owner.events == ["opened"] and bench.server.busy
        bench.client.reading = False
        watch.sink.write(bytes(200_000))
        await watch.turn()
        bench.now_us += STREAM_STALL_US
        bench.server.sweep(bench.now_us - 1)
        assert watch.owner.events == ["opened"]
        bench.now_us += 2
        bench.server.sweep(bench.now_us - 1)
        bench.run()
        assert watch.owner.events == ["opened", "closed"] and watch.got.reset == ErrorCodes.CANCEL
        assert bench.sending.held == 0
        return bench

    run(test)


def test_draining_lets_streams_end() -> None:
    async def test() -> Bench:
        watch = StreamBench()
        bench = watch.bench
        bench.server.drain()
        await watch.turn()
        assert bench.client.goaway is not None and not bench.transport.closed
        watch.sink.write(b"goodbye")
        watch.sink.close()
        await rest(3)
        # h2's client reports nothing after a GOAWAY.
        assert b"goodbye" in bench.transport.take() and bench.transport.closed
        return bench

    run(test)


def test_a_stream_that_would_begin_while_the_server_stops() -> None:
    async def test() -> Bench:
        bench = Bench().handshake()
        owner = RecordingOwner()
        bench.client.request("/wait")
        bench.run()
        bench.server.drain()
        bench.admission.waiting.pop(b"/wait")(Response(200, b"", b"text/event-stream", stream=owner))
        await rest(3)
        assert owner.events == ["closed"] and bench.transport.closed
        return bench

    run(test)


@fault(
    "front", "a stream's owner fails as it begins, over HTTP/2", "that stream is reset; the front continues"
)
def test_an_owner_that_fails_at_once(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(RecordingOwner):
        def opened(self, sink: Sink) -> None:
            raise RuntimeError("a fault")

    async def test() -> Bench:
        bench = Bench().handshake()
        owner = Failing()
        bench.admission.answers[b"/s"] = Response(200, stream=owner)
        stream = bench.client.request("/s")
        bench.run()
        await rest()
        bench.run()
        assert owner.events == ["closed"] and bench.client.got[stream].reset == ErrorCodes.CANCEL
        return bench

    run(test)
    assert [record.message for record in caplog.records] == ["a stream failed"]


# -- real sockets ------------------------------------------------------------------------------------------


class H2SocketClient:
    """h2's client on a socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.client = Client()

    async def until(self, done: Callable[[], bool]) -> None:
        self.writer.write(self.client.h2.data_to_send())
        while not done():
            data = await asyncio.wait_for(self.reader.read(65536), PATIENT_S)
            assert data, "the server closed the connection"
            self.client.receive(data)
            self.writer.write(self.client.h2.data_to_send())


@LOOPS
def test_over_a_real_socket(new_loop: NewLoop) -> None:
    async def test() -> None:
        admission = StreamAdmission()
        async with SocketServer(admission) as site:
            caller = H2SocketClient(*await site.connect(b""))
            client = caller.client
            client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
            client.h2.increment_flow_control_window(1 << 24)
            ids = [client.request(f"/s{i}") for i in range(50)]
            await caller.until(lambda: all(client.got[i].headers for i in ids))
            for number in range(100):
                for owner in admission.owners:
                    owner.open_sink.write(b"%d," % number * 100)
                await asyncio.sleep(0)
            expected = b"".join(b"%d," % number * 100 for number in range(100))
            await caller.until(lambda: all(len(client.got[i].body) == len(expected) for i in ids))
            assert all(client.got[i].body == expected for i in ids)
            admission.owners[0].open_sink.close()
            await caller.until(lambda: client.got[ids[0]].ended)
            drained = asyncio.ensure_future(site.server.drain())
            for owner in admission.owners[1:]:
                owner.open_sink.write(b"end")
                owner.open_sink.close()
            last = await asyncio.wait_for(caller.reader.read(), PATIENT_S)
            assert last.count(b"end") == 49, "h2's client reports nothing after a GOAWAY"
            await asyncio.wait_for(drained, PATIENT_S)
            assert all(owner.events == ["opened", "closed"] for owner in admission.owners)
            caller.writer.close()

    run_on(new_loop, test)


@LOOPS
def test_a_client_that_does_not_read(new_loop: NewLoop) -> None:
    """With large HTTP/2 windows, so that the socket's buffers fill up."""

    async def test() -> None:
        admission = StreamAdmission()
        async with SocketServer(admission) as site:
            caller = H2SocketClient(*await site.connect(b""))
            client = caller.client
            client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 30})
            client.h2.increment_flow_control_window(1 << 30)
            stream = client.request("/s")
            await caller.until(lambda: bool(client.got[stream].headers))
            [owner] = admission.owners
            written = 0
            turns = 0
            while turns < 5:
                turns = turns + 1 if owner.open_sink.is_full else 0
                if not owner.open_sink.is_full:
                    owner.open_sink.write(bytes(50_000))
                    written += 50_000
                await asyncio.sleep(0)
            owner.events.clear()
            await caller.until(lambda: len(client.got[stream].body) == written)
            await owner.wait_until("drained")
            caller.writer.transport.abort()
            await owner.wait_until("closed")
            assert site.server._sending.held == 0

    run_on(new_loop, test)
