"""Bytes of an HTTP/1 client: every request is answered as the contract says, however its bytes arrive.

The first byte of an input says how: with keys or without, and where the input is cut. The rest is sent
four times: in one piece, byte by byte, cut at random, and without the fast path; the answers must be the same.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable

import uvloop

from tests.fuzz.front import Answer, FrontWorld, read_answers
from tests.fuzz.runner import Target, logged_errors

_LOOP = uvloop.new_event_loop()
KEYS = "secret,reader:r:t"
_HEAD = b"Host: x\r\nContent-Type: application/json\r\n"


def run(data: bytes) -> None:
    how, data = (data[0], data[1:]) if data else (0, b"")
    keys = KEYS if how & 1 else ""
    whole = _drive([data], keys=keys)
    rng = random.Random(how)
    _compare(whole, _drive(_cut(data, rng), keys=keys), "cut at random")
    _compare(whole, _drive([data[i : i + 1] for i in range(len(data))], keys=keys), "byte by byte")
    _compare(whole, _drive([data], keys=keys, fast_path=False), "without the fast path")


def _drive(parts: Iterable[bytes], *, keys: str, fast_path: bool = True) -> list[Answer]:
    sent = list(parts)

    async def drive() -> bytes:
        world = FrontWorld(fast_path=fast_path, keys=keys)
        await world.feed(sent)
        await world.end()
        return bytes(world.transport.out)

    with logged_errors() as errors:
        out = _LOOP.run_until_complete(drive())
    assert not errors, errors
    data = b"".join(sent)
    answers = read_answers(out, data.count(b"HEAD ")) if not data.startswith(b"PRI") else []
    assert len(answers) <= data.count(b" HTTP/1.") + 1, "more answers than requests"
    return answers


def _cut(data: bytes, rng: random.Random) -> list[bytes]:
    places = sorted(rng.randint(0, len(data)) for _ in range(rng.randint(1, 8)))
    return [part for first, stop in zip([0, *places], [*places, len(data)]) if (part := data[first:stop])]


def _compare(whole: list[Answer], other: list[Answer], how: str) -> None:
    shown = f"{[(a.status, a.code) for a in whole]} at once, {[(a.status, a.code) for a in other]} {how}"
    assert len(whole) == len(other), shown
    for a, b in zip(whole, other):
        # A request with two mistakes that end its connection is refused for the one that is noticed first.
        if a.status >= 400 and b.status >= 400 and not a.stays and not b.stays:
            continue
        assert (a.status, a.body) == (b.status, b.body), f"{shown}: {a.body!r} {b.body!r}"


def post(path: bytes, body: bytes, head: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n%b" % (path, _HEAD, head, len(body), body)


def get(path: bytes, method: bytes = b"GET", head: bytes = b"") -> bytes:
    return b"%b %b HTTP/1.1\r\nHost: x\r\n%b\r\n" % (method, path, head)


def seeds() -> list[bytes]:
    packed = zlib.compress(b'{"records":[{"data":1}]}', 6, 31)
    write = post(b"/v0/topics/t", b'{"records":[{"data":1,"tag":"a.b"},{"data":"x"}]}')
    chunked = b"POST /v0/topics/t HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n" % _HEAD
    plain = [
        write,
        post(b"/v0/topics/t/diff", b'{"from_seq":0,"limit":2}'),
        post(b"/v0/topics/t/diff", b'{"from_seq":9,"wait_ms":100}') + write,
        post(b"/v0/topics/new?return_seqs=false", b'{"records":[{"data":{}}]}', b"Idempotency-Key: k\r\n"),
        post(b"/v0/topics/t", packed, b"Content-Encoding: gzip\r\n"),
        post(b"/v0/topics/t/delete", b'{"before_seq":2}') + get(b"/v0/topics/t"),
        post(
            b"/v0/topics/t/diff", b"", b"Accept: application/vnd.topics.frames\r\nAccept-Encoding: gzip\r\n"
        ),
        post(b"/v0/topics/t", b"x" * 5000),
        chunked + b'18\r\n{"records":[{"data":1}]}\r\n0\r\n\r\n' + write,
        chunked + b'a;x=y\r\n{"records"\r\ne\r\n:[{"data":1}]}\r\n0\r\nTrailer: x\r\n\r\n',
        get(b"/v0/topics") + get(b"/v0/topics/t?touch=false", b"HEAD") + get(b"/v0/health"),
        get(b"/v0/topics?prefix=t&page_size=1&cursor=YQ") + get(b"/v0/topics/t/tags") + get(b"/v0/ready"),
        get(b"/v0/topics/t/last?subject=a.%2A&each=true") + get(b"/v0/nothing") + get(b"/v0/topics/%ff"),
        get(b"/v0/topics/t", b"OPTIONS") + get(b"/v0/topics/t", b"PATCH") + get(b"/v0/topics/t", b"DELETE"),
        b"PUT /v0/topics/u HTTP/1.1\r\n" + _HEAD + b'Content-Length: 16\r\n\r\n{"cap_records":2}'[:-1],
        b"GET http://x/v0/health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + get(b"/v0/health"),
        post(b"/v0/topics/t", b'{"records":[{"data":1}]}', b"Expect: 100-continue\r\n"),
        get(b"/v0/health", head=b"Upgrade: websocket\r\nConnection: upgrade\r\n") + write,
    ]
    keyed = [
        post(b"/v0/topics/t/diff", b"{}", b"Authorization: Bearer reader\r\n") + write,
        post(b"/v0/topics/u", b'{"records":[{"data":1}]}', b"Authorization: Bearer secret\r\n"),
    ]
    return [b"\x02" + data for data in plain] + [b"\x03" + data for data in keyed]


TOKENS = (
    b"\r\n",
    b"\r\n\r\n",
    b"Content-Length: 0\r\n",
    b"Content-Length: 1152921504606846976\r\n",
    b"Content-Length: -1\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Connection: close\r\n",
    b"Connection: upgrade\r\n",
    b"Expect: 100-continue\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Host: y\r\n",
    b"0\r\n\r\n",
    b"fffffffff\r\n",
    b" HTTP/1.0",
    b" HTTP/1.1",
    b"GET /v0/health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"HEAD ",
    b"\0",
    b"\n",
    b"%00",
    b"%2F",
    b"\xff",
    b"?cursor=",
)

TARGET = Target("http1", run, seeds, TOKENS, rounds=200)
