"""Goal: the routes for curl: a body as one record, a page read with GET, and the page at `/`.

Method: a shared server. How each body is interpreted is tested in `tests/unit/workers/codec/test_requests.py`, and that all protocols
give the same answer in `test_protocol_parity.py`; here, that these routes are equivalent to the write and the read.
"""

from __future__ import annotations

import gzip
import re
from base64 import b64encode
from hashlib import sha256

import pytest

from tests.support.contract import Json, Pending, ok, records_of, refused, state_of
from tests.support.h2_client import Http2Client
from tests.support.server import Reply, Server

FORM = "application/x-www-form-urlencoded"
HTML = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def send(server: Server, topic: str, body: bytes, content_type: str | None = FORM, **headers: str) -> Reply:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    if content_type is not None:
        fields["Content-Type"] = content_type
    return server.request("POST", f"/v0/topics/{topic}/raw", body, fields)


def read(server: Server, topic: str, query: str = "") -> Json:
    return ok(server.get(f"/v0/topics/{topic}/records{query}"))


# -- raw ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "content_type", "data"),
    [
        (b"hello", FORM, "hello"),
        (b"hello", None, "hello"),
        (b"21.5", "text/plain", "21.5"),
        (b"21.5", "application/json", 21.5),
        (b"null", "Application/JSON; charset=utf-8", None),
        (b'{"a":1}', FORM, {"a": 1}),
        (b"[1]", "text/plain", [1]),
        (b'{"a":1', FORM, '{"a":1'),
        (b"", None, ""),
        ("é\n\x00".encode(), "text/csv", "é\n\x00"),
    ],
)
def test_a_body_is_a_record(
    shared_server: Server, topic: str, body: bytes, content_type: str | None, data: object
) -> None:
    written = ok(send(shared_server, topic, body, content_type), 201)
    same = ok(shared_server.write(f"{topic}.json", data), 201)
    assert written | {"topic": ""} == same | {"topic": ""}
    (record,) = records_of(shared_server, topic)
    assert set(record) == {"$seq", "$ts", "data"}
    assert record["data"] == data
    state, wanted = (state_of(shared_server, name) for name in (topic, f"{topic}.json"))
    assert state["bytes"] == wanted["bytes"]


def test_a_body_that_is_not_text_is_bytes(shared_server: Server, topic: str) -> None:
    ok(send(shared_server, topic, b"\x00\xff{}", "image/png"), 201)
    (record,) = records_of(shared_server, topic)
    assert (record["$encoding"], record["data"]) == ("base64", b64encode(b"\x00\xff{}").decode())


def test_json_text_is_kept(shared_server: Server, topic: str) -> None:
    body = b' {"b":1.50,\n"a":12345678901234567890123,"a":"\\u00e9"} '
    for content_type in ("application/json", FORM):
        send(shared_server, topic, body, content_type)
    page = shared_server.get(f"/v0/topics/{topic}/records").body
    assert page.count(b'"data":{"b":1.50, "a":12345678901234567890123,"a":"\\u00e9"}}') == 2


@pytest.mark.parametrize("body", [b"", b"{", b"NaN", b'{"a":NaN}', b'"\xff"', b"hello", b"\xef\xbb\xbf{}"])
def test_a_body_with_a_json_content_type_must_be_valid_json(
    shared_server: Server, topic: str, body: bytes
) -> None:
    refused(send(shared_server, topic, body, "application/json"), 400, "invalid_request")
    refused(shared_server.get(f"/v0/topics/{topic}"), 404, "topic_not_found")


def test_record_fields_in_query_and_headers(shared_server: Server, topic: str) -> None:
    path = f"{topic}/raw?tag=eu.t%C3%A9&node=desk&return_seqs=false&unknown=1"
    written = ok(shared_server.request("POST", f"/v0/topics/{path}", b"x", {"Idempotency-Key": "k"}), 201)
    assert "seqs" not in written
    again = ok(send(shared_server, topic, b"y", Idempotency_Key="k"))
    assert (again["deduped"], again["seqs"]) == (True, [1])
    traceparent = f"00-{1:032x}-{2:016x}-01"
    ok(send(shared_server, topic, gzip.compress(b"zipped"), Content_Encoding="gzip", traceparent=traceparent))
    first, second = records_of(shared_server, topic, include_tags=True)
    assert (first["$tag"], first["$node"], first["data"]) == ("eu.té", "desk", "x")
    assert (second["data"], second["meta"]) == ("zipped", {"traceparent": traceparent})


def test_refusals_are_those_of_a_write(shared_server: Server, topic: str) -> None:
    def ask(query: str = "", body: bytes = b"x", **headers: str) -> Reply:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        return shared_server.request("POST", f"/v0/topics/{topic}/raw{query}", body, fields)

    for query in ("?tag=" + "t" * 257, "?node=" + "n" * 129, "?tag=%ff", "?node=%ff"):
        refused(ask(query), 400, "invalid_request")
    refused(ask(Idempotency_Key="k" * 257), 400, "invalid_request")
    refused(ask(body=b"x" * (1 << 20)), 400, "record_too_large")
    refused(ask(Content_Encoding="br"), 415, "unsupported_media_type")
    refused(ask("?create=false"), 404, "topic_not_found", {"topic": topic})
    refused(shared_server.request("POST", "/v0/topics/-bad/raw", b"x"), 400, "invalid_request")
    shared_server.put(f"/v0/topics/{topic}", {"cap_records": 1, "discard": "reject"})
    ok(ask())
    refused(ask(), 422, "topic_full")


# -- records -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "fields"),
    [
        ("", {}),
        ("?from_seq=1&limit=2", {"from_seq": 1, "limit": 2}),
        ("?from_seq=001&limit=0", {"from_seq": 1}),
        ("?tag=eu.tea&include_tags=1", {"tag": "eu.tea", "include_tags": True}),
        ("?tag=eu.*", {"tag": "eu.*"}),
        ("?subject=eu.%3E&tag=us", {"tag": ["tag", "Subject", "eu.>"]}),
        ("?node=a&include_meta=false", {"node": "a", "include_meta": False}),
        ("?include_data=0&max_batch_bytes=10", {"include_data": False, "max_batch_bytes": 10}),
        ("?from_ts=99999999999999", {"from_ts": 99999999999999}),
        ("?from_seq=99999999999999999999999999&limit=99999999999", {"from_seq": 2**64 - 1}),
        ("?from_seq=-1&limit=x&wait_ms=&include_tags=yes&unknown=1", {}),
    ],
)
def test_get_and_diff_return_the_same(shared_server: Server, topic: str, query: str, fields: Json) -> None:
    records = [
        {"data": {"n": i}, "tag": tag, "node": node, "meta": {"m": i}}
        for i, (tag, node) in enumerate([("eu.tea", "a"), ("us", "b"), ("eu.jam", "b"), ("eu.tea", "b")])
    ]
    shared_server.post(f"/v0/topics/{topic}", {"records": records})
    assert read(shared_server, topic, query) == ok(shared_server.diff(topic, **fields))
    head = shared_server.request("HEAD", f"/v0/topics/{topic}/records{query}")
    assert (head.status, head.body) == (200, b"")


def test_frames_and_refusals_of_get(shared_server: Server, topic: str) -> None:
    refused(shared_server.get(f"/v0/topics/{topic}/records?wait_ms=20000"), 404, "topic_not_found")
    shared_server.write(topic, 1)
    refused(shared_server.get(f"/v0/topics/{topic}/records?subject=a..b"), 400, "invalid_request")
    frames = shared_server.get(f"/v0/topics/{topic}/records", Accept="application/vnd.topics.frames")
    assert frames.headers["topics-count"] == "1"


@pytest.mark.parametrize("http2", [False, True])
def test_get_waits(shared_server: Server, topic: str, http2: bool) -> None:
    shared_server.write(topic, 1)
    empty = read(shared_server, topic, "?from_seq=1&wait_ms=50")
    assert (empty["records"], empty["caught_up"]) == ([], True)
    path = f"/v0/topics/{topic}/records?from_seq=1&wait_ms=30000"
    if http2:
        client = Http2Client(shared_server)
        stream = client.send("GET", path)
        shared_server.write(topic, 2)
        reply = client.wait(stream)
        client.close()
    else:
        waiting = Pending(shared_server, "GET", path)
        shared_server.write(topic, 2)
        reply = waiting.reply()
    assert [record["data"] for record in ok(reply)["records"]] == [2]


# -- metrics and the front page ----------------------------------------------------------------------------


def test_metrics_has_a_short_name(shared_server: Server) -> None:
    short, long = shared_server.get("/metrics"), shared_server.get("/v0/metrics")
    assert short.status == 200
    assert short.headers["content-type"] == long.headers["content-type"]
    names = [re.findall(r"^# TYPE (\w+)", reply.body.decode(), re.MULTILINE) for reply in (short, long)]
    assert names[0] == names[1]
    assert "topics" in ok(shared_server.get("/metrics", Accept="application/json"))


def test_a_browser_gets_a_page(shared_server: Server) -> None:
    reply = shared_server.get("/", Accept=HTML)
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert (reply.headers["vary"], reply.headers["cache-control"]) == ("Accept", "no-cache")
    assert reply.headers["x-content-type-options"] == "nosniff"
    page, policy = reply.body.decode(), reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for kind in ("style", "script"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        assert f"{kind}-src 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" in policy
    for link in re.findall(r'href="(/[^"]*)"', page):
        assert shared_server.get(link).status == 200
    head = shared_server.request("HEAD", "/", headers={"Accept": "TEXT/HTML; charset=x"})
    assert (head.status, head.headers["content-length"], head.body) == (200, str(len(reply.body)), b"")


@pytest.mark.parametrize(
    ("method", "accept"),
    [
        ("GET", None), ("GET", "*/*"), ("GET", "text/*"), ("GET", "application/json"), ("GET", "text/htmlx"),
        ("GET", "text/html;q=0"), ("GET", "text/html; level=1; q=0.0, */*"), ("POST", HTML), ("OPTIONS", HTML),
    ],
)  # fmt: skip
def test_other_clients_get_no_page(shared_server: Server, method: str, accept: str | None) -> None:
    reply = shared_server.request(method, "/", headers={"Accept": accept} if accept else {})
    refused(reply, 404, "not_found", {})
    assert reply.headers["vary"] == "Accept"
