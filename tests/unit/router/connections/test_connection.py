"""One connection: every request is answered once, in order and complete, however its bytes arrive.

Connections have an in-memory transport and an admission stub that echoes, so every cut of the input is exact and
nothing sleeps.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import length
from tests.support.connection_bench import (
    World,
    answers,
    chunked,
    fast,
    others,
    rest,
    run,
    slow,
)
from topics.protocols.http.exchange import Request
from topics.protocols.http1.session import CLOSED, FAST_BODY_MAX, IDLE, Http1Session

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
    await rest()
    assert connection.session.state is IDLE and not connection.session.arrived
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
            for reads_plain in (True, False):
                session = Http1Session(body_bytes_max=1000, reads_plain=reads_plain)
                session.receive(request)
                event = session.next_event(1)
                assert isinstance(event, Request) == (reads_plain and name in hot), name

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
    while stream or world.admission.waiting or connection.session.state is not IDLE:
        if stream and chance.random() < 0.6:
            size = chance.choice((1, 2, 17, 100, 1000, 5000))
            connection.data_received(stream[:size])
            stream = stream[size:]
        if world.admission.waiting and (chance.random() < 0.3 or not stream):
            assert len(world.admission.waiting) == 1, "only one request is open at a time"
            world.admission.waiting.pop()()
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
        assert bytes(world.admission.handled[0].body) == body
        assert [reply["body"] for _, _, reply in answers(out)] == [FAST_BODY_MAX, '"1"', "", '"3"']

    run(test)


def test_a_body_beyond_the_fast_paths() -> None:
    async def test() -> None:
        world, out = await send([fast(body=bytes(FAST_BODY_MAX + 1)) + MARKS])
        assert next(answers(out))[2]["body"] == FAST_BODY_MAX + 1
        assert len(world.admission.handled) == 4

    run(test)


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
        assert connection.session.state is CLOSED and transport.ended and not world.admission.handled
        assert world.server.receiving.held == 0
        assert not others()

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
        first, second = one.admission.handled[0], two.admission.handled[0]
        assert first == second
        assert first.idempotency_key == b"\xc3\xa9\xff" and first.authorization == b"Bearer  a b"

    run(test)


def test_repeated_list_headers_are_one_list() -> None:
    async def test() -> None:
        headers = b"Accept: a/b\r\nAccept: application/vnd.topics.frames\r\nIdempotency-Key: 1\r\nIdempotency-Key: 2\r\n"
        world, _ = await send([fast(headers=headers)])
        [request] = world.admission.handled
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
            [request] = world.admission.handled
            assert (request.path, request.query) == expected, target

    run(test)
