"""One connection: its bounds in memory and time, and how it ends.

Connections have an in-memory transport and an admission stub that echoes; time is a number.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from router.connections.budget import ByteBudget
from router.connections.connection import HOLD_FROM, Connection
from tests.support.connection_bench import (
    BODY_BYTES_MAX,
    HEAD,
    Page,
    World,
    answers,
    chunked,
    fast,
    others,
    rest,
    run,
    slow,
)
from tests.support.faults import fault
from topics.protocols.http1.pace import EVENTS_PER_TURN, LINGER_US, READ_AHEAD_MAX
from topics.protocols.http1.session import CLOSED, DISCARD_MAX, IDLE

# -- memory ------------------------------------------------------------------------------------------------


@fault("client", "a client sends requests without end before it reads", "only so much is read ahead")
def test_reading_ahead_is_bounded() -> None:
    async def test() -> None:
        world = World()
        connection, transport = world.connect()
        connection.data_received(fast(b"/v0/topics/wait"))
        sent = most = 0
        part = fast(b"/v0/topics/wait") * 200
        while sent < 3000:
            while transport.reads and sent < 3000:
                connection.data_received(part)
                sent += 200
            most = max(most, connection.session.buffered)
            world.admission.waiting.pop()()
        assert most <= READ_AHEAD_MAX + len(part)
        while world.admission.waiting:
            world.admission.waiting.pop()()
        assert len(list(answers(transport.out))) == sent + 1
        assert transport.reads and connection.session.state is IDLE

    run(test)


def test_no_request_is_begun_for_a_client_that_does_not_read() -> None:
    async def test() -> None:
        world = World()
        world.admission.size = 100_000
        connection, transport = world.connect()
        connection.data_received(fast() + fast(b"/v0/topics/wait"))
        transport.unread = 150_000
        connection.pause_writing()
        assert world.server.stalled_bytes == 150_000
        world.admission.waiting.pop()()
        world.admission.size = 0
        handled = len(world.admission.handled)
        for _ in range(10):
            connection.data_received(slow() + fast() * 50)
        assert len(world.admission.handled) == handled, "it still has to read"
        while transport.reads:
            connection.data_received(fast() * 1000)
        assert connection.session.buffered < 2 * READ_AHEAD_MAX
        transport.unread = 0
        connection.resume_writing()
        await rest(200)
        assert world.server.stalled_bytes == 0
        assert (
            transport.reads
            and not connection.session.buffered
            and len(world.admission.handled) > handled + 500
        )

    run(test)


def test_a_client_that_sends_many_requests_at_once_takes_turns() -> None:
    async def test() -> None:
        world = World()
        connection, transport = world.connect()
        connection.data_received(b"".join(slow(b"/v0/topics/n%d" % i) for i in range(500)))
        connection.eof_received()
        assert 0 < len(world.admission.handled) <= len(EVENTS_PER_TURN) and not transport.closed
        await rest(500)
        paths = [body["path"] for _, _, body in answers(transport.out)]
        assert paths == [f"/v0/topics/n{i}" for i in range(500)] and transport.closed

    run(test)


def test_an_answer_counts_whole_until_its_last_byte_is_taken() -> None:
    """The transport keeps it in one piece, however little of it is left."""

    async def test() -> None:
        world = World()
        world.admission.size = 1 << 20
        connection, transport = world.connect()
        transport.unread = 1  # of what is written next
        connection.data_received(fast() + fast())
        assert world.server.stalled_bytes >= 1 << 20
        assert len(world.admission.handled) == 1
        transport.unread = 0
        connection.resume_writing()
        assert world.server.stalled_bytes == 0 and transport.high_water > 0
        assert len(world.admission.handled) == 2

    run(test)


def test_no_answer_is_kept_that_is_written() -> None:
    async def test() -> None:
        world = World()
        connection, transport = world.connect()
        world.admission.page = Page(1 << 20)
        kept = weakref.ref(world.admission.page)
        connection.data_received(slow())
        await rest()
        assert len(transport.out) > 1 << 20
        world.admission.page = None
        assert kept() is None

    run(test)


@fault("client", "a client stops reading its answer", "its connection is cut; a slow one is not")
def test_a_stalled_client_is_cut_and_a_slow_one_is_not() -> None:
    async def test() -> None:
        world = World()
        connection, transport = world.connect()
        connection.data_received(fast())
        transport.unread = 8 << 20
        connection.pause_writing()
        for _ in range(9):  # 64 KiB/s
            transport.unread -= 10 * 65_536
            world.sweep(connection, after_us=10_000_000)
            connection.data_received(b"P")
            assert not transport.aborted
        assert world.server.stalled_bytes == transport.unread
        for _ in range(40):
            world.sweep(connection, after_us=10_000_000)
            connection.data_received(b"P")  # sending is not reading
        assert transport.aborted
        connection.connection_lost(None)
        assert world.server.stalled_bytes == 0

    run(test)


@fault(
    "front",
    "more bodies are being received than a front may hold",
    "further ones are refused with 429 and limit bodies; those that are whole are served",
)
def test_unfinished_fast_bodies_count_as_being_received() -> None:
    async def test() -> None:
        world = World()
        connection, transport = world.connect()
        request = fast(b"/v0/topics/wait", bytes(500_000))
        connection.data_received(request[: HOLD_FROM - 1])
        assert world.server.receiving.held == 0
        connection.data_received(request[HOLD_FROM - 1 : 300_000])
        assert world.server.receiving.held == connection.session.buffered > 299_000
        connection.data_received(request[300_000:])
        assert world.server.receiving.held == 0, "admission has it"
        world.admission.waiting.pop()()
        assert len(list(answers(transport.out))) == 1
        connection.data_received(request[:400_000])
        connection.connection_lost(None)
        assert world.server.receiving.held == 0

        world.server.receiving = ByteBudget(200_000)
        one, _ = world.connect()
        two, refused = world.connect()
        one.data_received(request[:150_000])
        two.data_received(request[:150_000])
        [(status, head, body)] = answers(refused.out)
        assert status == 429 and b"Connection: close" in head and b"Retry-After" in head
        assert body["error"]["detail"] == {"limit": "bodies"}
        assert world.server.receiving.held == one.session.buffered > 149_000

    run(test)


# -- ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [fast(b"/v0/topics/wait"), slow(b"/v0/topics/wait")])
def test_a_client_that_has_sent_all_still_gets_its_answers(request_: bytes) -> None:
    async def test() -> None:
        world = World()
        connection, transport = world.connect()
        connection.data_received(request_ + fast(b"/v0/topics/last"))
        await rest()
        assert connection.eof_received() is True
        assert not transport.closed
        world.admission.waiting.pop()()
        await rest()
        assert [body["path"] for _, _, body in answers(transport.out)] == [
            "/v0/topics/wait",
            "/v0/topics/last",
        ]
        assert transport.closed

    run(test)


@fault("client", "a client ends after half a request", "nothing is carried out")
@pytest.mark.parametrize(
    "request_", [fast(), chunked(b"/v0/topics/a", b"abc"), fast(headers=b"X-Odd: 1\r\n")]
)
def test_half_a_request_is_nothing_when_the_client_has_ended(request_: bytes) -> None:
    async def test() -> None:
        for i in range(len(request_)):
            world = World()
            connection, transport = world.connect()
            connection.data_received(request_[:i])
            await rest(4)
            connection.eof_received()
            assert transport.closed and not transport.writes
            connection.connection_lost(None)
            await rest(4)
            assert not world.admission.handled and not others()

    run(test)


@fault(
    "client", "a client is gone before its answer", "the answer goes nowhere, and its places are given back"
)
@pytest.mark.parametrize("request_", [fast(b"/v0/topics/wait"), slow(b"/v0/topics/wait")])
def test_an_answer_for_nobody(request_: bytes) -> None:
    async def test() -> None:
        world = World()
        connection, transport = world.connect()
        connection.data_received(request_ + fast())
        await rest()
        connection.connection_lost(ConnectionResetError())
        world.admission.waiting.pop()()
        await rest()
        assert transport.out == b"" and not world.server.connections and not others()

    run(test)


@pytest.mark.parametrize("before", [b"", slow()])
def test_a_connection_lost_in_the_turn_of_its_request(before: bytes) -> None:
    faults: list[dict[str, Any]] = []
    bad = chunked(b"/v0/topics/a", b"abc").replace(b"3;a=b", b"4;a=b")

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        for request in (slow(b"/v0/topics/wait"), fast(headers=b"X-Odd: 1\r\n")[:-1], bad):
            world = World()
            connection, transport = world.connect()
            connection.data_received(before) if before else None
            await rest()
            connection.data_received(request)
            connection.connection_lost(None)
            await rest()
            gc.collect()
            statuses = [status for status, _, _ in answers(transport.out)]
            assert statuses == [200] * bool(before) + [400] * (request is bad)
            assert len(world.admission.handled) == bool(before) + len(world.admission.waiting)
            assert not others()

    run(test)
    assert faults == []


@fault(
    "client",
    "a client disconnects in the middle of a body",
    "nothing is executed, and no error is logged",
)
def test_a_client_that_leaves_in_its_body_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        for turns in range(2):  # of the loop, until the client is gone
            for path in (b"/v0/topics/a/delete", b"/refused"):
                for request in (fast(path, b"body"), chunked(path, b"body")):
                    world = World()
                    connection, _ = world.connect()
                    connection.data_received(request[:-1])
                    await rest(turns)
                    connection.connection_lost(None)
                    await rest()
                    assert not world.admission.handled and not others() and world.server.receiving.held == 0

    run(test)
    assert caplog.records == []


def test_a_refused_body_that_is_too_long_to_read_ends_the_connection() -> None:
    async def test() -> None:
        for size in (DISCARD_MAX + 1, BODY_BYTES_MAX + 1):
            world = World()
            connection, transport = world.connect()
            head = b"POST /refused HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n" % (HEAD, size)
            connection.data_received(head + b"abc")
            await rest()
            [(status, answer, _)] = answers(transport.out)
            assert status == 401 and b"Connection: close" in answer
            # The rest is read for a while and discarded, so that the answer is not lost.
            assert transport.ended and not transport.closed and transport.reads
            connection.data_received(fast())
            assert not world.admission.handled and not connection.session.buffered and not others()
            world.sweep(connection, after_us=LINGER_US + 1)
            assert transport.closed

    run(test)


def test_a_body_turns_out_too_large() -> None:
    async def test() -> None:
        world = World()
        connection, transport = world.connect()
        connection.data_received(chunked(b"/v0/topics/a").removesuffix(b"0\r\n\r\n"))
        for _ in range(40):
            connection.data_received(b"10000\r\n" + bytes(65536) + b"\r\n")
            await rest(4)
        [(status, head, _)] = answers(transport.out)
        assert status == 413 and b"Connection: close" in head and transport.ended
        assert not world.admission.handled and world.server.receiving.held == 0 and not others()

    run(test)


def test_the_end_of_the_client_ends_the_lingering() -> None:
    async def test() -> None:
        world = World()
        connection, transport = world.connect()
        connection.data_received(b"GARBAGE\r\n")
        assert transport.ended and not transport.closed
        connection.eof_received()
        assert transport.closed

    run(test)


def test_nothing_is_begun_or_written_once_the_transport_closes() -> None:
    async def test() -> None:
        for end in (Connection.drain, Connection.eof_received):
            world = World()
            connection, transport = world.connect()
            connection.data_received(fast(b"/v0/topics/wait"))
            transport.unread = 100_000
            connection.pause_writing()
            world.admission.waiting.pop()()
            connection.data_received(fast() + slow() + b"P")
            transport.writes.clear()
            handled = len(world.admission.handled)
            end(connection)
            world.sweep(connection, after_us=59_000_000)
            if end is Connection.drain:
                assert transport.closed
                connection.resume_writing()
                await rest()
                assert not transport.writes and len(world.admission.handled) == handled
            else:
                assert not transport.closed
                connection.resume_writing()
                await rest()
                assert transport.closed and len(world.admission.handled) == handled + 2

    run(test)


def test_a_closing_connection_that_is_not_read_is_cut() -> None:
    async def test() -> None:
        world = World()
        connection, transport = world.connect()
        connection.data_received(fast())
        transport.unread = 100_000
        connection.pause_writing()
        connection.drain()
        assert transport.closed and not transport.aborted
        world.sweep(connection, after_us=61_000_000)
        assert transport.aborted

    run(test)


@fault(
    "front",
    "a fault in a front while it answers",
    "500 for that request; the connection and the others go on",
)
def test_a_fault_is_answered() -> None:
    async def test() -> None:
        world = World()
        connection, transport = world.connect()
        world.admission.fails = True
        connection.data_received(fast() + slow())
        await rest()
        got = list(answers(transport.out))
        assert [status for status, _, _ in got] == [500, 500]
        assert [body["error"]["code"] for _, _, body in got] == ["internal", "internal"]

    run(test)


# -- time --------------------------------------------------------------------------------------------------


@fault(
    "client",
    "a client sends half a request and then nothing",
    "408 after a timeout, and the connection is closed",
)
@pytest.mark.parametrize(
    "part",
    [
        b"P",
        b"POST /v0/topics/a HTTP/1.1\r\nHost:",
        fast(body=bytes(100))[:-1],
        fast(headers=b"X-Odd: 1\r\n")[:-1],
        chunked(b"/v0/topics/a", b"abc")[:-1],
        fast(b"/refused", b"abc")[:-1],
        b"PRI * HTTP/2.0\r\n",
    ],
)
def test_a_request_that_does_not_come_is_not_waited_for(part: bytes) -> None:
    async def test() -> None:
        world = World()
        connection, transport = world.connect()
        connection.data_received(fast() + slow())
        await rest()
        transport.writes.clear()
        if part.startswith(b"PRI"):  # only a new connection may
            connection.connection_lost(None)
            connection, transport = world.connect()
        connection.data_received(part)
        await rest()
        world.sweep(connection, after_us=59_000_000)
        assert transport.out == b""
        world.sweep(connection, after_us=2_000_000)
        await rest()
        [(status, head, body)] = answers(transport.out)
        assert status == 408 and b"Connection: close" in head and body["error"]["code"] == "request_timeout"
        assert transport.ended and connection.session.state is CLOSED
        assert len(world.admission.handled) == 2 and not others()

    run(test)


@pytest.mark.parametrize("path", [b"/v0/topics/a", b"/v0/topics/a/delete"])
def test_a_slow_sender_has_time_by_the_byte(path: bytes) -> None:
    async def test() -> None:
        world = World()
        connection, transport = world.connect()
        request = fast(path, bytes(1_040_000))
        for i in range(0, len(request), 100_000):  # 17 KB/s, for longer than a minute
            connection.data_received(request[i : i + 100_000])
            await rest()
            world.sweep(connection, after_us=6_000_000)
        [(status, _, _)] = answers(transport.out)
        assert status == 200

    run(test)


@fault("client", "a connection is idle", "it is closed after a timeout, unless it waits for an answer")
def test_silent_connections_are_closed_and_waiting_ones_are_not() -> None:
    async def test() -> None:
        world = World()
        for request in (b"", fast(), slow()):
            connection, transport = world.connect()
            connection.data_received(request) if request else None
            await rest()
            world.sweep(connection, after_us=74_000_000)
            assert not transport.closed
            world.sweep(connection, after_us=2_000_000)
            assert transport.closed
        for request in (fast(b"/v0/topics/wait"), slow(b"/v0/topics/wait")):
            connection, transport = world.connect()
            connection.data_received(request)
            await rest()
            world.sweep(connection, after_us=100_000_000)
            assert not transport.closed

    run(test)


def test_draining_ends_each_connection_after_its_answer() -> None:
    async def test() -> None:
        world = World()
        opened = []
        for request in (fast(b"/v0/topics/wait"), slow(b"/v0/topics/wait")):
            connection, transport = world.connect()
            connection.data_received(request + fast())
            opened.append((connection, transport))
        idle, idle_transport = world.connect()
        await rest()
        world.server.services.draining = True
        for connection, _ in opened:
            connection.drain()
        idle.drain()
        assert idle_transport.closed
        while world.admission.waiting:
            world.admission.waiting.pop()()
        await rest()
        for _, transport in opened:
            [(status, head, _)] = answers(transport.out)
            assert status == 200 and b"Connection: close" in head and transport.ended

    run(test)
