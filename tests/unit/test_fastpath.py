"""One connection: is every request answered once, in order and whole, however its bytes arrive?

Connections have a transport that only remembers and a gate that echoes, so every cut of the input is exact and nothing
sleeps. aiohttp is the real one.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, cast

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from router.aiohttp_server import DISCARD_MAX, Handler
from router.budget import ByteBudget
from router.call import Services, error_response
from router.exchange import Request, Respond, Response
from router.fastpath import (
    CLOSING,
    FAST_BODY_MAX,
    HOLD_FROM,
    IDLE,
    LINGER_US,
    READ_AHEAD_MAX,
    Connection,
    read_plain_head,
)
from router.framing import CHUNK_EXTRA_BYTES_MAX, HEAD_BYTES_MAX, Chunks, Refused, read_frame
from router.server import Server
from tests.support import length
from tests.support.faults import fault
from topics.settings import Settings

BODY_BYTES_MAX = 2 << 20
HEAD = b"Host: x\r\nContent-Type: application/json\r\n"


class Transport:
    """A socket's double. A peer that does not read leaves `unread` bytes in it."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.unread = 0
        self.high_water = 65_536
        self.reads = True
        self.closed = self.aborted = self.ended = False
        self.protocol: Connection | None = None

    def write(self, data: bytes) -> None:
        assert not self.ended and not self.aborted
        self.writes.append(bytes(data))

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.write(b"".join(parts))
        if self.unread > self.high_water and self.protocol is not None:
            self.protocol.pause_writing()

    def set_write_buffer_limits(self, high: int = 65_536) -> None:
        self.high_water = high

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, _name: str, default: Any = None) -> Any:
        return default

    @property
    def out(self) -> bytes:
        return re.sub(rb"Date: [^\r]*\r\n", b"", b"".join(self.writes))


class Page(bytearray):
    """A body that can be seen to go."""


class Gate:
    """Echoes a request; one whose path ends with `wait` is answered when the test says so."""

    def __init__(self) -> None:
        self.handled: list[Request] = []
        self.waiting: list[Callable[[], None]] = []
        self.size = 0  # of answers
        self.fails = False
        self.page: Page | None = None  # in place of the echo

    def screen(self, request: Request, declared: int | None) -> Response | None:
        if request.path == b"/refused":
            return error_response("unauthorized", "no")
        if (declared or 0) > BODY_BYTES_MAX:
            return self.too_large()
        return None

    def handle(self, request: Request, respond: Respond) -> None:
        refusal = self.screen(request, len(request.body))
        if refusal is not None:
            respond(refusal)
            return
        self.handled.append(request)
        if self.fails:
            raise RuntimeError("a fault")
        if request.path.endswith((b"wait", b"wait/diff")):
            self.waiting.append(lambda: respond(self._echo(request)))
        else:
            respond(self._echo(request))

    def _echo(self, request: Request) -> Response:
        if self.page is not None:
            return Response(200, memoryview(self.page))
        body = bytes(request.body)
        fields = {
            "method": request.method.decode(),
            "path": request.path.decode("latin-1"),
            "query": request.query.decode(),
            "body": body.decode("latin-1") if len(body) < 1000 else len(body),
            "key": request.idempotency_key.decode("latin-1"),
            "type": request.content_type.decode("latin-1"),
            "pad": "x" * self.size,
        }
        return Response(200, json.dumps(fields).encode())

    def too_large(self) -> Response:
        return error_response("payload_too_large", "too large")


class World:
    """A server without a socket, whose clock the test sets."""

    def __init__(self, fast_path: bool = True) -> None:
        self.now_us = 1_000_000
        config = Settings(fast_path=fast_path)
        services = Services(cast(Any, None), config, lambda: self.now_us, "0", 0)
        self.server = Server(services, asyncio.get_running_loop())
        self.gate = Gate()
        self.server.gate = cast(Any, self.gate)
        handler = Handler(cast(Any, self.gate), self.server.receiving, BODY_BYTES_MAX, self.server.now_us)
        self.server._aiohttp = web.Server(cast(Any, handler))

    def connect(self) -> tuple[Connection, Transport]:
        connection, transport = Connection(self.server), Transport()
        transport.protocol = connection
        connection.connection_made(cast(Any, transport))
        return connection, transport

    def sweep(self, connection: Connection, *, after_us: int, idle_us: int = 75_000_000) -> None:
        self.now_us += after_us
        connection.sweep(self.now_us, idle_us=idle_us, request_us=60_000_000)


async def rest(turns: int = 12) -> None:
    """Let aiohttp's tasks run."""
    for _ in range(turns):
        await asyncio.sleep(0)


def run(test: Callable[..., Awaitable[None]], *args: Any) -> None:
    asyncio.run(cast(Any, test(*args)))


def fast(path: bytes = b"/v0/topics/a", body: bytes = b"{}", headers: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n%b" % (path, HEAD, headers, len(body), body)


def slow(path: bytes = b"/v0/topics/a", method: bytes = b"GET", headers: bytes = b"") -> bytes:
    return b"%b %b HTTP/1.1\r\nHost: x\r\n%b\r\n" % (method, path, headers)


def chunked(path: bytes, *chunks: bytes, trailer: bytes = b"") -> bytes:
    body = b"".join(b"%x;a=b\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"POST %b HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n%b0\r\n%b\r\n" % (
        path,
        HEAD,
        body,
        trailer,
    )


def answers(out: bytes) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Status, head and body of each answer in the output."""
    while out:
        head, _, out = out.partition(b"\r\n\r\n")
        found = re.search(rb"Content-Length: (\d+)", head)
        size = int(found[1]) if found else 0
        body, out = out[:size], out[size:]
        assert len(body) == size
        yield int(head[9:12]), head, json.loads(body) if body else {}


CORPUS = {
    "fast write": fast(),
    "fast diff": fast(b"/v0/topics/a.b:c-d_9/diff", b'{"limit":1}'),
    "fast claim": fast(b"/v0/topics/a/claim", b'{"node":"w"}'),
    "fast ack": fast(b"/v0/topics/a/ack", b'{"node":"w","seqs":[1]}'),
    "fast fetch": fast(b"/v0/topics/a/consumers/b.c/fetch", b'{"node":"w"}'),
    "put consumer": fast(b"/v0/topics/a/consumers/b.c", b"{}"),
    "empty body": fast(body=b""),
    "query and key": fast(b"/v0/topics/a?return_seqs=false&node=x", headers=b"Idempotency-Key: k\r\n"),
    "body like a request": fast(body=b"\r\n\r\nPOST /v0/topics/b HTTP/1.1\r\nContent-Length: 3\r\n\r\n"),
    "get": slow(),
    "head": slow(method=b"HEAD"),
    "odd header": fast(headers=b"X-Odd: 1\r\n"),
    "encoded name": fast(b"/v0/topics/a%20b", b"{}"),
    "chunked": chunked(b"/v0/topics/a", b"abc", b"\r\n0\r\n\r\n", trailer=b"X-Sum: 1\r\n"),
    "refused": fast(b"/refused", b"body of a refused request"),
    "expect": fast(headers=b"Expect: 100-continue\r\n"),
    "upgrade": slow(headers=b"Connection: upgrade\r\nUpgrade: websocket\r\n"),
    "upgrade to HTTP/2": slow(
        headers=b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    ),
    "blank line before": b"\r\n\r\n" + fast(body=b"later"),
    "absolute": slow(b"http://x:80/v0/topics/q?touch=false"),
}
MARKS = fast(b"/v0/topics/mark-1", b'"1"') + slow(b"/v0/topics/mark-2") + fast(b"/v0/topics/mark-3", b'"3"')


# -- cuts --------------------------------------------------------------------------------------------------


async def send(parts: list[bytes], *, fast_path: bool = True) -> tuple[World, bytes]:
    world = World(fast_path)
    connection, transport = world.connect()
    for part in parts:
        connection.data_received(part)
        if connection._aiohttp is not None:
            await rest()
    await rest(40)
    assert connection.state is IDLE and not connection._buffer
    connection.connection_lost(None)
    await rest()
    assert world.server.receiving.held == 0 and world.server.stalled_bytes == 0
    # Whether the 100 was still needed depends on how much of the body was there.
    return world, transport.out.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")


@pytest.mark.parametrize("name", CORPUS)
def test_a_request_may_be_cut_anywhere(name: str) -> None:
    async def test() -> None:
        stream = CORPUS[name] + MARKS
        _, expected = await send([stream])
        if name != "head":  # whose answer has a length and no body
            paths = [body.get("path") for _, _, body in answers(expected)]
            assert len(paths) == 4 and paths[1:] == [f"/v0/topics/mark-{i}" for i in (1, 2, 3)]
        for i in range(1, len(stream), length.some()):
            assert (await send([stream[:i], stream[i:]]))[1] == expected, i
        assert (await send([stream[i : i + 1] for i in range(len(stream))]))[1] == expected
        assert (await send([stream], fast_path=False))[1] == expected

    run(test)


def test_hot_requests_take_the_fast_path_and_no_others() -> None:
    async def test() -> None:
        hot = {
            "fast write",
            "fast diff",
            "fast claim",
            "fast ack",
            "fast fetch",
            "empty body",
            "query and key",
            "body like a request",
            "blank line before",
        }
        for name, request in CORPUS.items():
            world, _ = await send([request])
            counted = (world.server.fast_requests, world.server.slow_requests)
            assert counted == ((1, 0) if name in hot else (0, 1)), name
            world, _ = await send([request], fast_path=False)
            assert world.server.fast_requests == 0

    run(test)


# Kind, and whether it is answered only later.
KINDS = st.sampled_from(("fast", "fast wait", "get", "get wait", "chunked", "odd", "odd wait", "refused"))


def numbered(kind: str, number: int) -> bytes:
    path = b"/v0/topics/n%d%b" % (number, b"wait" if kind.endswith("wait") else b"")
    match kind.split(maxsplit=1)[0]:
        case "fast":
            return fast(path, b"%d" % number)
        case "get":
            return slow(path)
        case "chunked":
            return chunked(path, b"%d" % number)
        case "refused":
            return fast(b"/refused", b"%d" % number)
    return fast(path, b"%d" % number, b"X-Odd: 1\r\n")


async def pipeline(kinds: list[str], chance: random.Random) -> None:
    """All of these on one connection, cut and answered at random: the answers come in order."""
    stream = b"".join(numbered(kind, i) for i, kind in enumerate(kinds))
    world = World()
    connection, transport = world.connect()
    while stream or world.gate.waiting or connection.state is not IDLE:
        if stream and chance.random() < 0.6:
            size = chance.choice((1, 2, 17, 100, 1000, 5000))
            connection.data_received(stream[:size])
            stream = stream[size:]
        if world.gate.waiting and (chance.random() < 0.3 or not stream):
            assert len(world.gate.waiting) == 1, "only one request is open at a time"
            world.gate.waiting.pop()()
        await rest(chance.choice((0, 1, 5)))
    got = list(answers(transport.out))
    assert len(got) == len(kinds)
    for i, (kind, (status, head, body)) in enumerate(zip(kinds, got)):
        assert b"Connection: close" not in head
        if kind == "refused":
            assert status == 401
            continue
        assert status == 200
        assert body["path"] == f"/v0/topics/n{i}" + ("wait" if kind.endswith("wait") else "")
        assert body["body"] == ("" if kind.startswith("get") else str(i))
    assert transport.reads


@settings(max_examples=60, deadline=None)
@given(st.lists(KINDS, max_size=12), st.randoms(use_true_random=False))
def test_answers_never_swap(kinds: list[str], chance: random.Random) -> None:
    run(pipeline, kinds, chance)


@pytest.mark.parametrize("seed", range(6))
def test_long_pipelines(seed: int) -> None:
    chance = random.Random(seed)
    kinds = ("fast", "fast wait", "get", "get wait", "chunked", "odd", "odd wait", "refused")
    run(pipeline, chance.choices(kinds, k=50), chance)


def test_a_large_fast_body_in_small_parts() -> None:
    async def test() -> None:
        body = random.Random(1).randbytes(FAST_BODY_MAX)
        request = fast(body=body) + MARKS
        world, out = await send([request[i : i + 700] for i in range(0, len(request), 700)])
        assert bytes(world.gate.handled[0].body) == body
        assert [reply["body"] for _, _, reply in answers(out)] == [FAST_BODY_MAX, '"1"', "", '"3"']
        assert world.server.fast_requests == 3

    run(test)


def test_a_body_beyond_the_fast_paths_goes_through_aiohttp() -> None:
    async def test() -> None:
        world, out = await send([fast(body=bytes(FAST_BODY_MAX + 1)) + MARKS])
        assert next(answers(out))[2]["body"] == FAST_BODY_MAX + 1
        assert world.server.slow_requests == 2

    run(test)


# -- what is plain -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        (b"POST ", b"post "),
        (b"POST ", b"PUT "),
        (b" HTTP/1.1", b" HTTP/1.0"),
        (b"/a ", b"/a/delete "),
        (b"/a ", b"/%61 "),
        (b"/a ", b"/-a "),
        (b"/a ", b"/" + b"a" * 256 + b" "),
        (b"/a ", b"/a#b "),
        (b"/a ", b"/a?x=%41 "),
        (b"/v0", b"http://x/v0"),
        (b"Host: x\r\n", b""),
        (b"Host: x\r\n", b"Host: x\r\nHost: x\r\n"),
        (b"Host: x\r\n", b"Host: x y\r\n"),
        (b"Host: x\r\n", b"Host : x\r\n"),
        (b"Host: x\r\n", b"Host: x\n"),
        (b"Host: x\r\n", b"Host: x\r\n folded\r\n"),
        (b"Host: x\r\n", b"Host: x\r\nExpect: 100-continue\r\n"),
        (b"Host: x\r\n", b"Host: x\r\nTransfer-Encoding: chunked\r\n"),
        (b"Host: x\r\n", b"Host: x\r\nContent-Encoding: gzip\r\n"),
        (b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n"),
        (b"Host: x\r\n", b"Host: x\r\nConnection: upgrade\r\n"),
        (b"Host: x\r\n", b"Host: x\r\nUser-Agent: a\0b\r\n"),
        (b"Host: x\r\n", b"Host: x\r\nUser-Agent: a\rb\r\n"),
        (b"Host: x\r\n", b"Host: x\r\nUser-Agent: " + b"a" * HEAD_BYTES_MAX + b"\r\n"),
        (b"Content-Length: 2", b"Content-Length: +2"),
        (b"Content-Length: 2", b"Content-Length: 2,2"),
        (b"Content-Length: 2", b"Content-Length: 0x2"),
        (b"Content-Length: 2", b"Content-Length:"),
        (b"Content-Length: 2", b"Content-Length: " + b"1" * 16),
        (b"Content-Length: 2", b"Content-Length: 2\r\nContent-Length: 2"),
        (b"Content-Length: 2\r\n", b""),
    ],
)
def test_what_is_not_plain(change: tuple[bytes, bytes]) -> None:
    request = fast()
    assert read_plain_head(request) is not None
    changed = request.replace(*change)
    assert changed != request
    assert read_plain_head(changed) is None


def test_a_plain_head_in_parts_is_none() -> None:
    request = fast()
    head_len = len(request) - 2
    for i in range(head_len):
        assert read_plain_head(request[:i]) is None
    plain = read_plain_head(request[:head_len])
    assert plain is not None and (plain.head_len, plain.body_len) == (head_len, 2)


@given(st.binary(max_size=200))
def test_two_readers_agree_on_the_end(noise: bytes) -> None:
    """What is plain has the same end for `read_frame`, which reads what aiohttp gets."""
    request = fast(headers=b"User-Agent: " + noise + b"\r\n")
    plain = read_plain_head(request)
    if plain is not None:
        frame = read_frame(request)
        assert frame is not None and not frame.chunked
        assert (frame.head_len, frame.body_len) == (plain.head_len, plain.body_len)


# -- chunked bodies ----------------------------------------------------------------------------------------


def follow(parts: list[bytes]) -> tuple[bytes, bytes, bool]:
    chunks, passed, after = Chunks(), b"", b""
    for part in parts:
        if chunks.done:
            after += part
            continue
        out, rest_ = chunks.feed(part)
        passed, after = passed + out, after + rest_
    return passed, after, chunks.done


def test_a_chunked_body_may_be_cut_anywhere() -> None:
    body = b'5 ;ext="a"\r\nhello\r\n0A\r\n0123456789\r\n0\r\nX-A: 1\r\nX-B: 2\r\n\r\nGET / HTTP/1.1\r\n'
    expected = (b"5\r\nhello\r\n0A\r\n0123456789\r\n0\r\n\r\n", b"GET / HTTP/1.1\r\n", True)
    for i in range(len(body) + 1):
        assert follow([body[:i], body[i:]]) == expected
    assert follow([body[i : i + 1] for i in range(len(body))]) == expected


@pytest.mark.parametrize(
    "body",
    [
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        b"5 \r\nhello\r\n",
        b" 5\r\nhello\r\n",
        b"\r\nhello",
        b"ffffffffffffffff5\r\nhello\r\n",
        b"5\nhello\r\n",
        b"5\rhello\r\n",
        b"5\r\nhelloo\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhelloXY0\r\n\r\n",
        b"5\r\nhelloX\n0\r\n\r\n",
        b"5\r\nhello\rY0\r\n\r\n",
        b"5\r\nhello\r0\r\n\r\n",
        b"5;a\0b\r\nhello\r\n",
        b"5;a\rb\r\nhello\r\n",
        b"5;" + b"a" * 300 + b"\r\nhello\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\n X-A: 1\r\n\r\n",
        b"0\r\n" + b"X-A: 1234567890\r\n" * (CHUNK_EXTRA_BYTES_MAX // 10),
        b"1;" + b"a" * 200 + b"\r\nx\r\n" + (b"1;" + b"a" * 200 + b"\r\nx\r\n") * 100,
    ],
)
def test_chunks_that_are_none(body: bytes) -> None:
    with pytest.raises(Refused):
        follow([body])
    with pytest.raises(Refused):
        follow([body[i : i + 1] for i in range(len(body))])


def test_a_bad_chunk_is_refused_at_once_and_nothing_is_carried_out() -> None:
    async def test() -> None:
        world = World()
        connection, transport = world.connect()
        request = chunked(b"/v0/topics/a", b"abc").replace(b"3;a=b", b"4;a=b")
        for i in range(len(request)):
            connection.data_received(request[i : i + 1])
            await rest(3)
        [(status, head, body)] = answers(transport.out)
        assert status == 400 and b"Connection: close" in head and body["error"]["code"] == "invalid_request"
        assert connection.state is CLOSING and transport.ended and not world.gate.handled
        assert world.server.receiving.held == 0
        assert not others()

    run(test)


def others() -> list[Any]:
    """Tasks that are still there."""
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


# -- room --------------------------------------------------------------------------------------------------


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
            most = max(most, len(connection._buffer))
            world.gate.waiting.pop()()
        assert most <= READ_AHEAD_MAX + len(part)
        while world.gate.waiting:
            world.gate.waiting.pop()()
        assert len(list(answers(transport.out))) == sent + 1
        assert transport.reads and connection.state is IDLE

    run(test)


def test_no_request_is_begun_for_a_client_that_does_not_read() -> None:
    async def test() -> None:
        world = World()
        world.gate.size = 100_000
        connection, transport = world.connect()
        connection.data_received(fast() + fast(b"/v0/topics/wait"))
        transport.unread = 150_000
        connection.pause_writing()
        assert world.server.stalled_bytes == 150_000
        world.gate.waiting.pop()()
        handled = len(world.gate.handled)
        for _ in range(10):
            connection.data_received(slow() + fast() * 50)
        assert len(world.gate.handled) == handled, "it still has to read"
        while transport.reads:
            connection.data_received(fast() * 1000)
        assert len(connection._buffer) < 2 * READ_AHEAD_MAX
        transport.unread = 0
        connection.resume_writing()
        await rest(200)
        assert world.server.stalled_bytes == 0
        assert transport.reads and not connection._buffer and len(world.gate.handled) > handled + 500

    run(test)


def test_an_answer_counts_whole_until_its_last_byte_is_taken() -> None:
    """The transport keeps it in one piece, however little of it is left."""

    async def test() -> None:
        world = World()
        world.gate.size = 1 << 20
        connection, transport = world.connect()
        transport.unread = 1  # of what is written next
        connection.data_received(fast() + fast())
        assert world.server.stalled_bytes >= 1 << 20
        assert len(world.gate.handled) == 1
        transport.unread = 0
        connection.resume_writing()
        assert world.server.stalled_bytes == 0 and transport.high_water > 0
        assert len(world.gate.handled) == 2

    run(test)


def test_an_answer_that_aiohttp_has_not_written_yet_counts() -> None:
    async def test() -> None:
        world = World()
        world.gate.size = 1 << 20
        connection, transport = world.connect()
        connection.data_received(slow(b"/v0/topics/wait"))
        await rest()
        world.gate.waiting.pop()()
        assert not transport.writes and world.server.stalled_bytes >= 1 << 20
        await rest()
        assert len(transport.out) > 1 << 20 and world.server.stalled_bytes == 0

    run(test)


def test_aiohttp_keeps_no_answer_that_is_written() -> None:
    async def test() -> None:
        world = World()
        connection, transport = world.connect()
        world.gate.page = Page(1 << 20)
        kept = weakref.ref(world.gate.page)
        connection.data_received(slow())
        await rest()
        assert len(transport.out) > 1 << 20
        world.gate.page = None
        assert kept() is None

    run(test)


@fault("client", "a client takes nothing of its answer any more", "it is cut; a slow one is not")
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
            connection.data_received(b"P")  # sending is no reading
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
        assert world.server.receiving.held == 300_000
        connection.data_received(request[300_000:])
        assert world.server.receiving.held == 0, "the gate has it"
        world.gate.waiting.pop()()
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
        assert world.server.receiving.held == 150_000

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
        world.gate.waiting.pop()()
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
            assert not world.gate.handled and not others()

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
        world.gate.waiting.pop()()
        await rest()
        assert transport.out == b"" and not world.server.connections and not others()

    run(test)


@pytest.mark.parametrize("before", [b"", slow()])
def test_a_connection_lost_in_the_turn_of_its_request(before: bytes) -> None:
    """aiohttp's task has not seen the request yet; it must not fail over what is gone."""
    faults: list[dict[str, Any]] = []
    bad = chunked(b"/v0/topics/a", b"abc").replace(b"3;a=b", b"4;a=b")

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        for request in (slow(b"/v0/topics/b"), fast(headers=b"X-Odd: 1\r\n")[:-1], bad):
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
            assert len(world.gate.handled) == bool(before) and not others()

    run(test)
    assert faults == []


@fault(
    "client",
    "a client vanishes in the middle of a body",
    "nothing is carried out, and nothing is logged as an error",
)
def test_a_client_that_leaves_in_its_body_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        for turns in range(8):  # of aiohttp's tasks, until the client is gone
            for path in (b"/v0/topics/a/delete", b"/refused"):
                for request in (fast(path, b"body"), chunked(path, b"body")):
                    world = World()
                    connection, _ = world.connect()
                    connection.data_received(request[:-1])
                    await rest(turns)
                    connection.connection_lost(None)
                    await rest()
                    assert not world.gate.handled and not others() and world.server.receiving.held == 0

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
            # The rest is read for a while and thrown away, so that the answer is not lost.
            assert transport.ended and not transport.closed and transport.reads
            connection.data_received(fast())
            assert not world.gate.handled and not connection._buffer and not others()
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
        assert not world.gate.handled and world.server.receiving.held == 0 and not others()

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
            world.gate.waiting.pop()()
            connection.data_received(fast() + slow() + b"P")
            transport.writes.clear()
            handled = len(world.gate.handled)
            end(connection)
            world.sweep(connection, after_us=59_000_000)
            if end is Connection.drain:
                assert transport.closed
                connection.resume_writing()
                await rest()
                assert not transport.writes and len(world.gate.handled) == handled
            else:
                assert not transport.closed
                connection.resume_writing()
                await rest()
                assert transport.closed and len(world.gate.handled) == handled + 2

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
        world.gate.fails = True
        connection.data_received(fast() + slow())
        await rest()
        got = list(answers(transport.out))
        assert [status for status, _, _ in got] == [500, 500]
        assert [body["error"]["code"] for _, _, body in got] == ["internal", "internal"]

    run(test)


# -- time --------------------------------------------------------------------------------------------------


@fault("client", "a client sends half a request and goes silent", "408 in time, and the connection is closed")
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
        assert transport.ended and connection.state is CLOSING
        assert len(world.gate.handled) == 2 and not others()

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


@fault("client", "a connection stays silent", "it is closed in time; one that waits for an answer is not")
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
        while world.gate.waiting:
            world.gate.waiting.pop()()
        await rest()
        for _, transport in opened:
            [(status, head, _)] = answers(transport.out)
            assert status == 200 and b"Connection: close" in head and transport.ended

    run(test)


# -- HTTP/2 ------------------------------------------------------------------------------------------------


def test_the_preface_of_http2_counts_only_at_the_beginning() -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

    async def test() -> None:
        for i in range(1, len(preface)):
            world = World()
            connection, transport = world.connect()
            connection.data_received(preface[:i])
            assert transport.out == b"" and connection._http2 is None
            connection.data_received(preface[i:])
            assert connection._http2 is not None and transport.writes
        for first in (fast(), slow()):
            world = World()
            connection, transport = world.connect()
            connection.data_received(first + preface)
            await rest()
            assert connection._http2 is None
            assert [status for status, _, _ in answers(transport.out)] == [200, 400]

    run(test)


def test_fields_of_a_request_are_the_same_on_both_ways() -> None:
    async def test() -> None:
        headers = (
            b"Accept:application/json \t\r\nAccept-Encoding: gzip, br\r\nAuthorization: Bearer  a b\r\n"
            b"Idempotency-Key: \xc3\xa9\xff \r\n"
        )
        request = fast(b"/v0/topics/a/diff?x=1&y=", b"[]", headers)
        (one, _), (two, _) = await send([request]), await send([request], fast_path=False)
        first, second = one.gate.handled[0], two.gate.handled[0]
        assert first == second
        assert first.idempotency_key == b"\xc3\xa9\xff" and first.authorization == b"Bearer  a b"

    run(test)


def test_repeated_list_headers_are_one_list() -> None:
    async def test() -> None:
        headers = b"Accept: a/b\r\nAccept: application/vnd.topics.frames\r\nIdempotency-Key: 1\r\nIdempotency-Key: 2\r\n"
        world, _ = await send([fast(headers=headers)])
        [request] = world.gate.handled
        assert request.accept == b"a/b, application/vnd.topics.frames" and request.idempotency_key == b"1"

    run(test)


def test_targets_that_are_whole_urls() -> None:
    async def test() -> None:
        targets = {
            b"http://x/v0/topics/a?b=c": (b"/v0/topics/a", b"b=c"),
            b"HTTPS://x:1": (b"/", b""),
            b"http://x?a=/b": (b"/", b"a=/b"),
            b"/a?b=http://c/d": (b"/a", b"b=http://c/d"),
            b"//x/v0/topics/a": (b"//x/v0/topics/a", b""),
        }
        for target, expected in targets.items():
            world, _ = await send([slow(target)])
            [request] = world.gate.handled
            assert (request.path, request.query) == expected, target

    run(test)
