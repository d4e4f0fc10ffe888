"""The fast path, the full parser and HTTP/2 give the same answer to the same request."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.support.h2_client import Http2Client
from tests.support.raw_http import Closed, RawClient, RawReply
from tests.support.server import Reply, Server
from topics.protocols.http1.plain_head import read_plain_head
from topics.protocols.http1.session import FAST_BODY_MAX

MIB = 1 << 20
JSON = ("Content-Type", "application/json")
LINES = ("Content-Type", "application/x-ndjson")
FORM = ("Content-Type", "application/x-www-form-urlencoded")
FRAMES = ("Accept", "application/vnd.topics.frames")
HTML = ("Accept", "text/html,application/xhtml+xml,*/*;q=0.8")
STRICT = ("Topics-Strict", "1")
ROOT = ("Authorization", "Bearer root")
KEYS = "root,reader:read,app:rw:app.,boss::"


@dataclass
class Case:
    method: str
    path: str
    body: bytes = b""
    headers: list[tuple[str, str]] = field(default_factory=list)
    hot: bool = False  # takes the fast path over HTTP/1

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.headers} {self.body[:60]!r}"

    @property
    def raw(self) -> bytes:
        fields = [("Host", "x"), *self.headers]
        if self.body or self.method in ("POST", "PUT"):
            fields.append(("Content-Length", str(len(self.body))))
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
        return f"{self.method} {self.path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + self.body


def post(path: str, body: Any = b"", *headers: tuple[str, str], hot: bool = True, root: bool = True) -> Case:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {name for name, _ in headers}
    fields = [*([] if "Content-Type" in given or not content else [JSON]), *headers]
    return Case("POST", path, content, [*([ROOT] if root else []), *fields], hot)


def other(method: str, path: str, body: bytes = b"", *headers: tuple[str, str]) -> Case:
    return Case(method, path, body, [ROOT, *([JSON] if body else []), *headers])


def one(value: Any = 1, **fields: Any) -> dict[str, Any]:
    return {"records": [{"data": value, **fields}]}


def many(count: int) -> dict[str, Any]:
    return {"records": [{"data": {"i": i, "text": "word " * 8}, "tag": f"t.{i % 5}"} for i in range(count)]}


T = "/v0/topics/"
BIG = json.dumps(
    {"records": [{"data": "x" * 900_000}, {"data": "y" * 900_000}, {"data": "z" * 250_000}]}
).encode()

CORPUS = [
    # Writing.
    post(T + "w", one()),
    post(T + "w", one({"a": [1, None, "é"]}, tag="a.b", node="n", meta={"k": 1})),
    post(T + "w", many(30)),
    post(T + "w?return_seqs=false", many(3)),
    post(T + "w?return_seqs=0&unknown=1&&=&x", one()),
    post(T + "w?return_seqs=%66alse", one(), hot=False),
    post(T + "w", one(), ("Idempotency-Key", "k1")),
    post(T + "w", one(2), ("Idempotency-Key", "k1")),
    post(T + "w", one(2), ("idempotency-key", "k" * 257)),
    post(T + "w", one(3), ("Idempotency-Key", "caf\xc3\xa9 \xff")),
    post(T + "w", b'{"data":1}\n{"data":2,"tag":"x"}\n', LINES),
    post(T + "w?node=me&create=false", b'{"data":1}', LINES),
    post(T + "w", one(), ("Content-Type", "application/json; charset=utf-8")),
    post(T + "w", one(), ("Content-Type", "APPLICATION/JSON")),
    post(T + "w", {**one(), "if_last_seq": 1}),
    post(T + "new", {**one(), "create": False}),
    post(T + "new", {**one(), "config": {"durability": "fsync"}}),
    post(T + "w", one(), ("User-Agent", "a/1 (b)"), ("Accept", "*/*"), ("traceparent", "00-1-2-01")),
    post(T + "traced", one(), ("traceparent", f"00-{1:032x}-{2:016x}-01")),
    post(T + "traced", one(meta={"a": 1}), ("Traceparent", f"cc-{3:032x}-{4:016x}-03-more")),
    post(T + "traced", one(), *[("traceparent", f"00-{5:032x}-{6:016x}-01")] * 2, hot=False),
    post(T + "traced/diff"),
    post(T + "w", one(), ("X-Anything", "1"), hot=False),
    post(T + "w", one(), ("Accept-Encoding", "gzip, br")),
    post(
        T + "w",
        gzip.compress(b'{"records":[{"data":"zip"}]}', mtime=0),
        JSON,
        ("Content-Encoding", "gzip"),
        hot=False,
    ),
    post(
        T + "w",
        gzip.compress(b'{"records":[', mtime=0) + gzip.compress(b'{"data":"two members"}]}', mtime=0),
        JSON,
        ("Content-Encoding", "X-GZip"),
        hot=False,
    ),
    post(T + "w", b"no gzip", JSON, ("Content-Encoding", "gzip"), hot=False),
    post(T + "w", gzip.compress(bytes(4 * MIB), mtime=0), JSON, ("Content-Encoding", "gzip"), hot=False),
    post(T + "w", one(), ("Content-Encoding", "br"), hot=False),
    post(T + "w", one(), ("Content-Encoding", "identity"), hot=False),
    # Raw bodies.
    post(T + "raw/raw", b"", hot=False),
    post(T + "raw/raw?tag=a.b&node=n&return_seqs=0", b"plain text", FORM, hot=False),
    post(T + "raw/raw", b' {"a" :\n[1]} ', ("Content-Type", "text/plain"), hot=False),
    post(T + "raw/raw", b'{"a":', ("Content-Type", ""), hot=False),
    post(T + "raw/raw", b"\x00\xff", ("Content-Type", "image/png"), hot=False),
    post(T + "raw/raw", b"1.50", ("Content-Type", "APPLICATION/JSON;x"), hot=False),
    post(T + "raw/raw", b"NaN", JSON, hot=False),
    post(T + "raw/raw", b"\xff", JSON, hot=False),
    post(T + "raw/raw", b"", JSON, hot=False),
    post(T + "raw/raw", b"x", FORM, ("Idempotency-Key", "raw"), hot=False),
    post(T + "raw/raw", b"y", FORM, ("Idempotency-Key", "raw"), hot=False),
    post(T + "raw/raw", b"y", FORM, ("Idempotency-Key", "k" * 257), hot=False),
    post(T + "raw/raw?tag=" + "t" * 257, b"y", FORM, hot=False),
    post(T + "raw/raw?tag=%ff", b"y", FORM, hot=False),
    post(T + "raw/raw", b"z", FORM, ("traceparent", f"00-{7:032x}-{8:016x}-01"), hot=False),
    post(T + "raw/raw", gzip.compress(b"zip", mtime=0), FORM, ("Content-Encoding", "gzip"), hot=False),
    post(T + "raw/raw", b"zip", FORM, ("Content-Encoding", "br"), hot=False),
    post(T + "raw/raw", bytes(MIB + 1), FORM, hot=False),
    post(T + "raw/raw", b"x" * (4 * MIB), FORM, hot=False),
    post(T + "raw2/raw?create=false", b"x", FORM, hot=False),
    post(T + "-a/raw", b"x", FORM, hot=False),
    post(T + "raw/raw", b"x", FORM, ("Authorization", "Bearer reader"), root=False, hot=False),
    post(T + "big", BIG, hot=False),
    post(T + "big", {"records": [{"data": "m" * 900_000}]}),
    post(T + "big", {"records": [{"data": "m" * 1_040_000}]}),
    # Invalid writes.
    post(T + "w", b"{"),
    post(T + "w", b""),
    post(T + "w", b"", JSON),
    post(T + "w", b"[]"),
    post(T + "w", b"\xff\xfe"),
    post(T + "w", b"\0"),
    post(T + "w", {"records": []}),
    post(T + "w", {"records": [{"tag": "x"}]}),
    post(T + "w", one("x" * (MIB + 1)), hot=False),
    post(T + "w", b'{"data":1}\nx\n', LINES),
    post(T + "w", one(), ("Content-Type", "text/plain")),
    post(T + "w", b"{}", ("Content-Type", "")),
    post(T + "w", bytes(4 * MIB), hot=False),
    post(T + "w", bytes(2 * MIB), ("Content-Type", "text/plain"), hot=False),
    # Unknown fields.
    post(T + "w", {**one(delay_ms=5), "nod": "n"}),
    post(T + "w", one(delay_ms=5), STRICT),
    post(T + "w", {**one(), "nod": "n"}, ("topics-strict", " 1 ")),
    post(T + "w", one(delay_ms=5), ("Topics-Strict", "0")),
    post(T + "w", one(delay_ms=5), ("Topics-Strict", "1"), ("Topics-Strict", "0"), hot=False),
    post(T + "w", one(), STRICT),
    post(T + "w", b'{"data":1,"delay_ms":1}\n{"data":2}', LINES),
    post(T + "w", b'{"data":1,"delay_ms":1}', LINES, STRICT),
    post(T + "w", {"records": [{"data": "m" * 70_000, "delay_ms": 1}]}),
    post(T + "w/diff", {"limit": 1, "form_seq": 3, "a,b\u00e9\n": 1}),
    post(T + "w/diff", {"limit": 1, "form_seq": 3, "a,b\u00e9\n": 1}, FRAMES),
    post(T + "w/diff", {"limit": 1, "form_seq": 3}, FRAMES, STRICT),
    other("PUT", T + "typo", b'{"durabilty":"fsync"}'),
    other("PUT", T + "typo", b'{"durabilty":"fsync"}', STRICT),
    # Names.
    post(T + "A0._:-z", one()),
    post(T + "n" * 255, one()),
    post(T + "n" * 256, one(), hot=False),
    post(T + "a%62c", one(), hot=False),
    post(T + "%2Fetc", one(), hot=False),
    post(T + "a%00b", one(), hot=False),
    post(T + "a%zzb", one(), hot=False),
    post(T + "%ff", one(), hot=False),
    post(T + "-a", one(), hot=False),
    post(T + ".", one(), hot=False),
    post(T + "a+b", one(), hot=False),
    post(T + "a~b/diff", b"", hot=False),
    # Reading.
    post(T + "w/diff"),
    post(T + "w/diff", {"from_seq": 3, "limit": 2, "include_tags": True}),
    post(T + "w/diff", {"tag": "t.1", "include_data": False, "include_meta": False}),
    post(T + "w/diff", {"node": "n", "max_batch_bytes": 100}),
    post(T + "w/diff", {"from_seq": 99999, "wait_ms": 30}),
    post(T + "new/diff", {"from_seq": 1, "wait_ms": 30}),
    post(T + "w/diff", {"limit": -1}),
    post(T + "w/diff", {"limit": "1"}),
    post(T + "w/diff", b"x", ("Content-Type", "text/plain")),
    post(T + "none/diff"),
    post(T + "w/diff", b"", FRAMES),
    post(T + "w/diff", {"limit": 5}, FRAMES),
    post(T + "none/diff", b"", FRAMES),
    post(T + "w/diff", b"", ("Accept-Encoding", "gzip")),
    post(T + "w/diff", {"limit": 1}, ("Accept-Encoding", "gzip")),
    post(T + "big/diff"),
    post(T + "big/diff", {"max_batch_bytes": 8 * MIB}),
    other("GET", T + "w/deleted"),
    other("GET", T + "w/deleted?from_seq=2&limit=1"),
    other("GET", T + "raw/records"),
    other("GET", T + "raw/records?from_seq=1&limit=2&include_tags=1&include_meta=0"),
    other("GET", T + "w/records?tag=t.*&include_data=0&limit=3&include_tags=true"),
    other("GET", T + "w/records?subject=t.%3E&limit=3"),
    other("GET", T + "w/records?subject=.&limit=3"),
    other("GET", T + "w/records?node=n&max_batch_bytes=100&from_seq=x&limit=-1"),
    other("GET", T + "new/records?from_seq=1&wait_ms=30"),
    other("GET", T + "w/records?from_seq=99999999999999999999999&limit=99999999999"),
    other("GET", T + "w/records", b"a body that nobody asked for"),
    other("GET", T + "w/records?limit=2", b"", FRAMES),
    other("GET", T + "w/records", b"", ("Accept-Encoding", "gzip")),
    other("HEAD", T + "w/records"),
    other("GET", T + "none/records"),
    other("POST", T + "w/records", b"{}"),
    other("GET", T + "w/raw"),
    other("GET", T + "w/tags"),
    other("GET", T + "w/tags?prefix=t.&page_size=2"),
    other("GET", T + "w/tags?cursor=%%%"),
    other("GET", T + "w/last?tag=t.1"),
    other("GET", T + "w/last?subject=t.%3E&each=true&page_size=2"),
    other("GET", T + "w/last"),
    # Topics.
    other("PUT", T + "p", b'{"cap_records":5}'),
    other("PUT", T + "p"),
    other("PUT", T + "p", b'{"type":"queue"}'),
    other("PUT", T + "p", b"x"),
    other("PUT", T + "%20"),
    other("GET", T + "p"),
    other("GET", T + "w?touch=false"),
    other("GET", T + "none"),
    other("GET", T + "w", b"a body that nobody asked for"),
    other("HEAD", T + "w?touch=false"),
    other("HEAD", T + "none"),
    other("OPTIONS", T + "w"),
    other("OPTIONS", T + "w/diff"),
    other("OPTIONS", "/v0/none"),
    other("GET", "/v0/topics"),
    other("GET", "/v0/topics?prefix=n&page_size=1"),
    other("GET", "/v0/topics?cursor=!"),
    post(T + "w/delete", {"before_seq": 3}, hot=False),
    post(T + "w/delete", {}, hot=False),
    other("DELETE", T + "w?if_empty=true"),
    other("DELETE", T + "p"),
    other("DELETE", T + "p"),
    # Queues and consumers.
    post(T + "q", {**many(4), "config": {"type": "queue"}}),
    post(T + "q/claim", {"node": "w", "max": 2}),
    post(T + "q/claim", {"node": "w"}, ("Accept-Encoding", "gzip")),
    post(T + "q/claim", {"node": ""}),
    post(T + "q/claim"),
    post(T + "q/claim", b"{}", ("Content-Type", "text/plain")),
    post(T + "w/claim", {"node": "w"}),
    post(T + "q/ack", {"node": "w", "seqs": [1, 9], "lease_ids": ["", "lease_1"]}),
    post(T + "q/ack", {"node": "w", "seqs": list(range(1001))}),
    post(T + "q/nack", {"node": "w", "seqs": [2], "delay_ms": 60_000}, hot=False),
    post(T + "q/extend", {"node": "v", "seqs": [3], "lease_ms": 5}, hot=False),
    post(T + "q/claim", {"node": "w", "max": 9, "wait_ms": 30}),
    post(T + "q/claim", {"node": "w", "wait_ms": 30}),
    other("PUT", T + "q/consumers/c", b'{"filter":"t.*","headers_only":true}'),
    other("PUT", T + "q/consumers/c%2Fd"),
    post(T + "q/consumers/c/fetch", {"node": "w", "max": 2}),
    post(T + "q/consumers/%63/fetch", {"node": "w", "max": 2}, hot=False),
    post(T + "q/consumers/none/fetch", {"node": "w"}),
    post(T + "q/consumers/c/ack", {"node": "w", "seqs": [2, 3]}),
    post(T + "q/consumers/c/term", {"node": "w", "seqs": [4]}, hot=False),
    post(T + "q/consumers/c/pause", b"", hot=False),
    post(T + "q/consumers/c/resume", b"", hot=False),
    post(T + "q/consumers/c/reset", {"to": "start", "dry_run": True}, hot=False),
    other("GET", T + "q/consumers"),
    other("HEAD", T + "q/consumers/c"),
    other("GET", T + "q/consumers/c/fetch"),
    other("OPTIONS", T + "q/consumers/c"),
    other("DELETE", T + "q/consumers/c"),
    # Unknown paths and methods.
    other("GET", "/"),
    other("GET", "/", b"", HTML),
    other("HEAD", "/", b"", HTML),
    other("POST", "/", b"", HTML),
    other("OPTIONS", "/", b"", HTML),
    other("GET", "/", b"", ("Accept", "*/*, text/html;q=0")),
    other("GET", T),
    other("GET", T + "w/"),
    other("GET", T + "w/diff"),
    other("GET", T + "w//diff"),
    other("GET", T + "w/diff/"),
    other("PATCH", T + "w", b"{}"),
    other("DELETE", "/v0/topics"),
    other("POST", "/v0/topics", b"{}"),
    other("GET", "/V0/topics"),
    other("GET", "/../v0/topics"),
    other("GET", T + "?x"),
    post(T + "w/none", b"{}", hot=False),
    other("GET", "/v0/health"),
    other("HEAD", "/healthz"),
    other("GET", "/readyz"),
    other("GET", "/v0/openapi.json"),
    other("GET", "/v0/openapi.json", b"", ("Accept-Encoding", "gzip")),
    # Authentication and authorization.
    post(T + "w", one(), root=False),
    post(T + "w", b"{", root=False),
    post(T + "w", bytes(2 * MIB), root=False, hot=False),
    post(T + "w", one(), ("Authorization", "Bearer wrong"), root=False),
    post(T + "w", one(), ("Authorization", "Basic cm9vdA=="), root=False),
    post(T + "w", one(), ("Authorization", "Bearer  root "), root=False),
    post(T + "w", one(), ("Authorization", "Bearer \xff"), root=False),
    post(T + "w", one(), ("Authorization", "Bearer reader"), root=False),
    post(T + "w/diff", {"limit": 1}, ("Authorization", "Bearer reader"), root=False),
    post(T + "w", one(), ("Authorization", "Bearer app"), root=False),
    post(T + "app.x", one(), ("Authorization", "Bearer app"), root=False),
    post(T + "app.x/none", one(), ("Authorization", "Bearer app"), root=False, hot=False),
    Case("GET", "/v0/topics", headers=[("Authorization", "Bearer app")]),
    Case("GET", "/v0/topics"),
    Case("GET", "/v0/none"),
    Case("GET", "/healthz"),
    Case("GET", "/metrics"),
    Case("GET", "/"),
    Case("GET", "/", headers=[HTML]),
]


# -- comparison of answers ---------------------------------------------------------------------------------

CHANGING = (
    (re.compile(rb'"performance":\{[^{}]*\}'), b'"performance":{}'),
    (re.compile(rb'"(\$ts|\w+_ts|uptime_ms|effective_priority|deadline|lag_ms)":\d+'), rb'"\1":0'),
    (re.compile(rb'"lease_[0-9a-f]+"'), b'"lease_"'),
)
OF_THE_CONNECTION = ("date", "content-length", "connection")


def steady(reply: Reply) -> bytes:
    """The body without times and figures that differ between answers."""
    body = gzip.decompress(reply.body) if reply.headers.get("content-encoding") == "gzip" else reply.body
    if reply.headers.get("content-type") == FRAMES[1]:
        return b"".join(_frames(body))
    for pattern, text in CHANGING:
        body = pattern.sub(text, body)
    return body


def _frames(body: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(body):
        end = at + 4 + int.from_bytes(body[at : at + 4], "little")
        yield body[at : at + 22] + body[at + 30 : end - 8]  # without time and hash
        at = end


def steady_head(reply: RawReply) -> bytes:
    head = reply.raw[: len(reply.raw) - len(reply.body)]
    return re.sub(rb"(Date|Content-Length): [^\r]*", rb"\1: ", head)


def steady_headers(reply: Reply) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name not in OF_THE_CONNECTION}


class ProtocolClient:
    """A client of one protocol that keeps its connection as long as the server does."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._client: RawClient | None = None

    def ask(self, ask: Case) -> RawReply:
        if self._client is None:
            self._client = RawClient(self.server)
        self._client.send(ask.raw)
        reply = self._client.read(with_body=ask.method != "HEAD")
        if reply.headers.get("connection") == "close":
            with pytest.raises(Closed):
                self._client.read()
            self._client.close()
            self._client = None
        return reply

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


ENVIRONMENT = {"TOPICS_API_KEYS": KEYS, "TOPICS_MAX_BODY_BYTES": str(3 * MIB)}


@pytest.fixture
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Three empty servers: the answer to a request depends on those before it."""
    slow = {**ENVIRONMENT, "TOPICS_FAST_PATH": "0"}
    servers = [Server(tmp_path_factory.mktemp("way"), each) for each in (ENVIRONMENT, slow, ENVIRONMENT)]
    try:
        with ThreadPoolExecutor() as threads:
            list(threads.map(Server.start, servers))
        yield servers
    finally:
        for server in servers:
            server.close()


def test_the_same_request_gets_the_same_answer(servers: list[Server]) -> None:
    fast, slow = ProtocolClient(servers[0]), ProtocolClient(servers[1])
    http2 = Http2Client(servers[2])
    statuses = set()
    for ask in CORPUS:
        one, two = fast.ask(ask), slow.ask(ask)
        assert steady_head(one) == steady_head(two), ask
        assert steady(one) == steady(two), ask
        three = http2.request(ask.method, ask.path, ask.headers, ask.body)
        assert (three.status, steady_headers(three)) == (one.status, steady_headers(one)), ask
        if ask.method != "HEAD":
            assert steady(three) == steady(one), ask
            assert three.headers.get("content-length", "0") == str(len(three.body)), ask
        else:
            assert not one.body and not three.body
        statuses.add(one.status)
    for way in (fast, slow, http2):
        way.close()
    assert statuses >= {200, 201, 204, 400, 401, 403, 404, 405, 409, 413, 415}, (
        "the corpus covers all kinds of answers"
    )


def test_hot_requests_take_the_fast_path() -> None:
    """That connections follow `read_plain_head` is tested in `tests/unit/router/connections/test_connection.py`."""
    for ask in CORPUS:
        plain = read_plain_head(ask.raw)
        assert (plain is not None and plain.body_len <= FAST_BODY_MAX) == ask.hot, ask


# -- order of answers --------------------------------------------------------------------------------------

_numbers = itertools.count(1)


@dataclass
class Step:
    data: bytes
    topic: str
    status: tuple[int, ...]
    with_body: bool = True


def bare(ask: Case) -> bytes:
    return replace(ask, headers=[pair for pair in ask.headers if pair != ROOT]).raw


def random_step(chance: random.Random) -> Step:
    """A request whose answer contains a topic name that is unique to it."""
    name = f"order-{next(_numbers)}"
    kind = chance.choice(("write", "write", "diff", "poll", "put", "get", "odd", "chunked", "big", "head"))
    match kind:
        case "write":
            return Step(bare(post(T + name, one())), name, (201,))
        case "diff":
            return Step(bare(post(T + name + "/diff")), name, (404,))
        case "poll":  # on an existing topic, and longer than the requests after it take
            body = {"from_seq": 1, "wait_ms": chance.choice((5, 40))}
            make = bare(post(T + name, one()))
            return Step(make + bare(post(T + name + "/diff", body)), name, (201, 200))
        case "put":
            return Step(bare(other("PUT", T + name)), name, (201,))
        case "get":
            return Step(bare(other("GET", T + name)), name, (404,))
        case "head":
            return Step(bare(other("HEAD", T + name)), name, (404,), with_body=False)
        case "odd":
            return Step(bare(post(T + name, one(), ("X-Odd", "1"))), name, (201,))
        case "big":
            body = {"records": [{"data": "x" * 700_000}, {"data": "y" * 700_000}]}
            return Step(bare(post(T + name, body)), name, (201,))
    body = json.dumps(one()).encode()
    head = f"POST {T}{name} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    return Step(head.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), name, (201,))


def check_order(client: RawClient, steps: list[Step]) -> None:
    for step in steps:
        for status in step.status:
            reply = client.read(with_body=step.with_body)
            assert reply.status == status, (step, reply)
            if step.with_body:
                body = reply.json
                assert step.topic in (body.get("topic"), body.get("error", {}).get("detail", {}).get("topic"))


@pytest.mark.parametrize("seed", range(4))
def test_pipelined_answers_come_in_order(shared_server: Server, seed: int) -> None:
    chance = random.Random(seed)
    steps = [random_step(chance) for _ in range(50)]
    stream = b"".join(step.data for step in steps)
    client = RawClient(shared_server)
    with ThreadPoolExecutor(1) as threads:  # send and read concurrently
        sending = threads.submit(send_in_parts, client, stream, chance, seed)
        check_order(client, steps)
        sending.result()
    client.half_close()
    assert client.read_all() == []
    client.close()


def send_in_parts(client: RawClient, stream: bytes, chance: random.Random, seed: int) -> None:
    if seed == 0:
        client.send(stream)
        return
    while stream:
        size = chance.choice((1, 3, 50, 300, 5000, 200_000))
        client.send(stream[:size])
        stream = stream[size:]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("parts"), ENVIRONMENT).start()
    yield found
    found.close()


@pytest.mark.parametrize("index", range(0, len(CORPUS), 9))
def test_a_request_in_two_parts(server: Server, index: int) -> None:
    """All cuts are tested without sockets in `tests/unit/router/connections/test_connection.py`; these are some with sockets."""
    ask, chance = CORPUS[index], random.Random(index)
    whole = ProtocolClient(server).ask(ask)
    for _ in range(3):
        client = RawClient(server)
        at = chance.randrange(1, min(len(ask.raw), 2000))
        client.send(ask.raw[:at])
        time.sleep(0.003)
        client.send(ask.raw[at:])
        reply = client.read(with_body=ask.method != "HEAD")
        assert reply.status in (whole.status, 200), ask  # 200: the second write did not create the topic
        client.close()
