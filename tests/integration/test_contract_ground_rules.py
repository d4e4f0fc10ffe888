"""Goal: the rules of all routes: routing, bodies, types, names, record fields, errors, pages.

Method: a client against a running server; one table of the contract is one parametrised test, and whole answers are
compared.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.contract import (
    DEFAULT_CONFIG,
    U32_MAX,
    U64_MAX,
    Json,
    data_of,
    fresh,
    is_number,
    ok,
    one_record,
    records_of,
    refused,
    send_text,
    state_of,
)
from tests.support.h2_client import Http2Client
from tests.support.server import Server

# -- transport and routing ---------------------------------------------------------------------------------


def test_a_connection_serves_many_requests(shared_server: Server, topic: str) -> None:
    connection = http.client.HTTPConnection(shared_server.host, shared_server.port)
    connection.connect()
    socket = connection.sock
    for method, path, body in (
        ("PUT", f"/v0/topics/{topic}", None),
        ("POST", f"/v0/topics/{topic}", '{"records":[{"data":1}]}'),
        ("POST", f"/v0/topics/{topic}/diff", None),
        ("GET", f"/v0/topics/{topic}", None),
        ("GET", "/v0/nowhere", None),
        ("POST", f"/v0/topics/{topic}/diff", "{"),
        ("GET", "/healthz", None),
    ):
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        assert response.version == 11
        assert connection.sock is socket, f"closed after {method} {path}"
    connection.close()


def test_an_upgrade_to_h2c_is_ignored(shared_server: Server) -> None:
    headers = {
        "Connection": "Upgrade, HTTP2-Settings",
        "Upgrade": "h2c",
        "HTTP2-Settings": "AAMAAABkAAQAoAAAAAIAAAAA",
    }
    reply = shared_server.request("GET", "/healthz", headers=headers)
    assert (reply.status, reply.json["status"]) == (200, "ok")


def test_http2_with_prior_knowledge_on_the_same_port(shared_server: Server, topic: str) -> None:
    """Every JSON route, over one connection."""
    client = Http2Client(shared_server)
    calls = [
        ("PUT", f"/v0/topics/{topic}", b"{}", 201),
        ("POST", f"/v0/topics/{topic}", b'{"records":[{"data":1,"tag":"a"}]}', 200),
        ("POST", f"/v0/topics/{topic}/diff", b"", 200),
        ("POST", f"/v0/topics/{topic}/delete", b'{"before_seq":1}', 200),
        ("GET", f"/v0/topics/{topic}/deleted", b"", 200),
        ("GET", f"/v0/topics/{topic}/tags", b"", 200),
        ("GET", f"/v0/topics/{topic}/last?tag=a", b"", 200),
        ("GET", f"/v0/topics/{topic}", b"", 200),
        ("GET", f"/v0/topics?prefix={topic}", b"", 200),
        ("DELETE", f"/v0/topics/{topic}", b"", 200),
        ("GET", f"/v0/topics/{topic}", b"", 404),
        ("PUT", f"/v0/topics/{topic}/diff", b"", 405),
        ("GET", "/v0/nowhere", b"", 404),
        ("GET", "/healthz", b"", 200),
        ("GET", "/readyz", b"", 200),
    ]
    for method, path, body, status in calls:
        reply = client.request(method, path, [("content-type", "application/json")], body)
        assert (reply.status, reply.headers["content-type"]) == (status, "application/json"), path
        assert ("error" in reply.json) == (status >= 400)
    assert client.request("GET", "/v0/metrics").status == 200
    client.close()


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v0",
        "/v0/",
        "/v0/topics/",
        "/v0/topic",
        "/v0/TOPICS",
        "/V0/topics",
        "/v1/topics",
        "/v0/topics/{topic}/",
        "/v0/topics/{topic}/diff/",
        "/v0/topics/{topic}/Diff",
        "/v0/topics/{topic}/diff/more",
        "/v0/topics/{topic}/nowhere",
        "/v0/topics//diff",
        "/v0/health/",
        "/healthz/",
        "/health",
        "/ready",
        "/metrics/",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS"])
def test_an_unknown_path_is_not_found(shared_server: Server, topic: str, method: str, path: str) -> None:
    refused(shared_server.request(method, path.format(topic=topic)), 404, "not_found", {})


ROUTES = {
    "/v0/topics": {"GET"},
    "/v0/topics/absent": {"GET", "PUT", "POST", "DELETE"},
    "/v0/topics/absent/diff": {"POST"},
    "/v0/topics/absent/raw": {"POST"},
    "/v0/topics/absent/records": {"GET"},
    "/v0/topics/absent/delete": {"POST"},
    "/v0/topics/absent/deleted": {"GET"},
    "/v0/topics/absent/tags": {"GET"},
    "/v0/topics/absent/last": {"GET"},
    "/v0/health": {"GET"},
    "/v0/ready": {"GET"},
    "/healthz": {"GET"},
    "/readyz": {"GET"},
    "/v0/metrics": {"GET"},
    "/metrics": {"GET"},
    "/v0/openapi.json": {"GET"},
}
METHODS = ("GET", "PUT", "POST", "DELETE", "PATCH", "UNHEARD-OF", "get")


@pytest.mark.parametrize(
    ("method", "path"),
    [(method, path) for path, known in ROUTES.items() for method in METHODS if method not in known],
)
@pytest.mark.parametrize("body", [None, b"{", b"no json"])
def test_a_wrong_method_is_refused_before_anything_else(
    shared_server: Server, method: str, path: str, body: bytes | None
) -> None:
    reply = shared_server.request(method, path, body)
    refused(reply, 405, "method_not_allowed", {})
    allowed = {"OPTIONS", *ROUTES[path], *({"HEAD"} if "GET" in ROUTES[path] else set())}
    assert set(reply.headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize("path", ROUTES)
def test_options_lists_the_methods(shared_server: Server, path: str) -> None:
    reply = shared_server.request("OPTIONS", path)
    assert (reply.status, reply.body) == (204, b"")
    assert "access-control-allow-origin" not in reply.headers
    allowed = {"OPTIONS", *ROUTES[path], *({"HEAD"} if "GET" in ROUTES[path] else set())}
    assert set(reply.headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize(
    "path",
    [
        "/v0/topics",
        "/v0/health",
        "/healthz",
        "/v0/ready",
        "/readyz",
        "/v0/metrics",
        "/metrics",
        "/v0/openapi.json",
    ],
)
def test_head_is_get_without_the_body(shared_server: Server, path: str) -> None:
    got, head = shared_server.get(path), shared_server.request("HEAD", path)
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert int(head.headers["content-length"]) > 0


def test_head_of_a_topic(shared_server: Server, topic: str) -> None:
    assert shared_server.request("HEAD", f"/v0/topics/{topic}").status == 404
    shared_server.put(f"/v0/topics/{topic}")
    head = shared_server.request("HEAD", f"/v0/topics/{topic}")
    assert (head.status, head.body) == (200, b"")
    assert shared_server.request("HEAD", f"/v0/topics/{topic}/diff").status == 405


def test_names_in_a_path_are_percent_decoded(shared_server: Server, topic: str) -> None:
    encoded = "".join(f"%{ord(character):02x}" for character in topic)
    ok(shared_server.put(f"/v0/topics/{encoded}"), 201)
    assert ok(shared_server.get(f"/v0/topics/{topic}"))["topic"] == topic
    assert ok(shared_server.write(encoded, 1))["topic"] == topic
    assert data_of(shared_server, encoded) == [1]


def test_names_are_case_sensitive(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, 1)
    refused(
        shared_server.get(f"/v0/topics/{topic.upper()}"), 404, "topic_not_found", {"topic": topic.upper()}
    )


@pytest.mark.parametrize(
    ("text", "with_seqs"),
    [
        ("true", 1),
        ("1", 1),
        ("false", 0),
        ("0", 0),
        ("False", 1),
        ("no", 1),
        ("", 1),
        ("2", 1),
        ("false%20", 1),
    ],
)
def test_query_booleans(shared_server: Server, topic: str, text: str, with_seqs: int) -> None:
    body = ok(shared_server.post(f"/v0/topics/{topic}?return_seqs={text}", {"records": [{"data": 1}]}), 201)
    assert ("seqs" in body) == bool(with_seqs)


def test_the_first_of_repeated_query_fields_counts(shared_server: Server, topic: str) -> None:
    body = {"records": [{"data": 1}]}
    assert "seqs" not in ok(
        shared_server.post(f"/v0/topics/{topic}?return_seqs=false&return_seqs=true", body), 201
    )


@pytest.mark.parametrize("text", ["abc", "", "1.5", "0x1", "one"])
def test_an_invalid_query_integer_counts_as_absent(shared_server: Server, topic: str, text: str) -> None:
    records = [{"data": 1, "tag": f"t{i}"} for i in range(3)]
    shared_server.post(f"/v0/topics/{topic}", {"records": records})
    assert len(ok(shared_server.get(f"/v0/topics/{topic}/tags?page_size=2"))["tags"]) == 2
    assert len(ok(shared_server.get(f"/v0/topics/{topic}/tags?page_size={text}"))["tags"]) == 3


# -- bodies ------------------------------------------------------------------------------------------------

WITH_BODY = [("PUT", ""), ("POST", ""), ("POST", "/diff"), ("POST", "/delete")]
BODIES = {"/diff": b"{}", "/delete": b'{"before_seq":1}', "": b'{"records":[{"data":1}]}'}


@pytest.mark.parametrize(("method", "sub"), WITH_BODY)
@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/xml", "text/json", " "])
def test_another_content_type_is_refused_before_parsing(
    shared_server: Server, topic: str, method: str, sub: str, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    for body in (BODIES[sub], b"{"):
        reply = shared_server.request(method, f"/v0/topics/{topic}{sub}", body, headers)
        refused(reply, 415, "unsupported_media_type")


@pytest.mark.parametrize(("method", "sub"), WITH_BODY)
@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/json5"],
)
def test_a_content_type_need_only_begin_right(
    shared_server: Server, topic: str, method: str, sub: str, content_type: str
) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    body = BODIES[sub] if method == "POST" else b"{}"
    ok(shared_server.request(method, f"/v0/topics/{topic}{sub}", body, {"Content-Type": content_type}))


def test_an_empty_body_is_all_defaults_for_put_and_diff(shared_server: Server, topic: str) -> None:
    assert ok(shared_server.request("PUT", f"/v0/topics/{topic}"), 201)["config"] == DEFAULT_CONFIG
    assert ok(shared_server.request("POST", f"/v0/topics/{topic}/diff"))["records"] == []
    for content_type in ("application/json", "text/plain"):
        headers = {"Content-Type": content_type}
        ok(shared_server.request("PUT", f"/v0/topics/{topic}", b"", headers))
        ok(shared_server.request("POST", f"/v0/topics/{topic}/diff", b"", headers))


@pytest.mark.parametrize("sub", ["", "/delete"])
def test_an_empty_body_is_refused_elsewhere(shared_server: Server, topic: str, sub: str) -> None:
    refused(shared_server.request("POST", f"/v0/topics/{topic}{sub}"), 415, "unsupported_media_type")
    headers = {"Content-Type": "application/json"}
    refused(shared_server.request("POST", f"/v0/topics/{topic}{sub}", b"", headers), 400, "invalid_request")


@pytest.mark.parametrize(("method", "sub"), WITH_BODY)
@pytest.mark.parametrize(
    "text",
    ["{", "[]", "null", "5", '"x"', "true", "{}{}", "{'a':1}", "{\"a\":1,}", "\ufeff{}", "NaN", '{"a":NaN}',
     '{"a":Infinity}', '{"a":-Infinity}', '{"a":01}', '{"a":1.}', '{"a":"\t"}', '{"a":"\\x"}', "{a:1}", "//\n{}"],
)  # fmt: skip
def test_malformed_json_is_refused(
    shared_server: Server, topic: str, method: str, sub: str, text: str
) -> None:
    refused(send_text(shared_server, method, f"/v0/topics/{topic}{sub}", text), 400, "invalid_request")


@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-Infinity", "01", "1.", ".5", "+1", "0x1", "'a'", "[1,]", '{"a":1,}', "undefined",
             '"\t"', '"\\q"', '"\\u12"', '"\\ud800"', "/**/1", '{"a":nan}', "tru", "", '"a', "{1:2}"],
)  # fmt: skip
def test_invalid_json_data_is_refused(shared_server: Server, topic: str, text: str) -> None:
    for member in (f'"data":{text}', f'"data":1,"meta":{{"a":{text}}}', f'"data":1,"unknown":{text}'):
        reply = send_text(shared_server, "POST", f"/v0/topics/{topic}", one_record(member))
        refused(reply, 400, "invalid_request")
    refused(shared_server.get(f"/v0/topics/{topic}"), 404, "topic_not_found")


@pytest.mark.parametrize(
    "place", ['"data":"%s"', '"data":1,"tag":"%s"', '"data":1,"unknown":"%s"', '"data":1,"meta":"%s"']
)
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80"])
def test_invalid_utf8_is_refused(shared_server: Server, topic: str, place: str, bad: bytes) -> None:
    body = b'{"records":[{' + place.encode().replace(b"%s", bad) + b"}]}"
    refused(send_text(shared_server, "POST", f"/v0/topics/{topic}", body), 400, "invalid_request")


@pytest.mark.parametrize("depth", [2_000, 100_000, 1_000_000])
@pytest.mark.parametrize(
    "body",
    [
        '{"records":[{"data":%s}]}',
        '{"records":[{"data":1,"meta":%s}]}',
        '{"records":[{"data":1}],"unknown":%s}',
        "%s",
    ],
)
def test_nesting_without_end_is_refused(shared_server: Server, topic: str, body: str, depth: int) -> None:
    for nested in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth, "[ " * depth):
        reply = send_text(shared_server, "POST", f"/v0/topics/{topic}", body.replace("%s", nested))
        refused(reply, 400, "invalid_request")
    assert shared_server.get("/healthz").status == 200


def test_deep_nesting_comes_back(shared_server: Server, topic: str) -> None:
    text = "[" * 400 + " 1 " + "]" * 400
    ok(send_text(shared_server, "POST", f"/v0/topics/{topic}", one_record(f'"data":{text}')), 201)
    assert text.encode() in shared_server.diff(topic).body


def test_unknown_fields_are_ignored_at_every_level(shared_server: Server, topic: str) -> None:
    odd = {"unknown": {"deep": [1, {}]}, "$seq": 5}
    made = ok(shared_server.put(f"/v0/topics/{topic}", {**odd, "cap_records": 5}), 201)
    assert made["ignored"] == ["unknown", "$seq"]
    record = {"data": 1, "tag": "a", **odd}
    written = ok(
        shared_server.post(f"/v0/topics/{topic}", {"records": [record] * 3, "config": odd, "odd": 1})
    )
    assert set(written.pop("ignored")) == {
        "odd", "records[].unknown", "records[].$seq", "config.unknown", "config.$seq"
    }  # fmt: skip
    read = ok(shared_server.diff(topic, include_tags=True, limit=1, unknown=1))
    (record,) = read["records"]
    assert record == {"$seq": 1, "$ts": record["$ts"], "$tag": "a", "data": 1}
    assert read["ignored"] == ["unknown"]
    frames = shared_server.post(
        f"/v0/topics/{topic}/diff", {"limit": 1, "a, b": 1, "c": 2}, Accept="application/vnd.topics.frames"
    )
    assert (frames.status, frames.headers["topics-ignored"]) == (200, "a%2C%20b, c")
    gone = ok(shared_server.post(f"/v0/topics/{topic}/delete", {"match": "a", **odd}))
    assert (gone["deleted"], gone["ignored"]) == (3, ["unknown", "$seq"])
    assert "ignored" not in ok(shared_server.diff(topic))


# Every operation whose body has fields, and a field of it; those without a status are refused later for other reasons.
WITH_A_BODY: dict[str, tuple[Json, int | None]] = {
    "PUT /v0/topics/{topic}": ({"type": "queue"}, 201),
    "POST /v0/topics/{topic}": ({"records": [{"data": 1}]}, 200),
    "POST /v0/topics/{topic}/diff": ({"from_seq": 0}, 200),
    "POST /v0/topics/{topic}/delete": ({"seqs": [99]}, 200),
    "POST /v0/topics/{topic}/claim": ({"node": "n"}, 200),
    "POST /v0/topics/{topic}/ack": ({"node": "n", "seqs": []}, 200),
    "POST /v0/topics/{topic}/nack": ({"node": "n", "seqs": []}, 200),
    "POST /v0/topics/{topic}/extend": ({"node": "n", "seqs": [], "lease_ms": 500}, 200),
    "PUT /v0/topics/{topic}/consumers/{consumer}": ({"deliver": {"from_seq": 1}}, 201),
    "POST /v0/topics/{topic}/consumers/{consumer}/fetch": ({"node": "n"}, 200),
    "POST /v0/topics/{topic}/consumers/{consumer}/ack": ({"node": "n", "seqs": []}, 200),
    "POST /v0/topics/{topic}/consumers/{consumer}/nack": ({"node": "n", "seqs": []}, 200),
    "POST /v0/topics/{topic}/consumers/{consumer}/extend": ({"node": "n", "seqs": [], "lease_ms": 500}, 200),
    "POST /v0/topics/{topic}/consumers/{consumer}/term": ({"node": "n", "seqs": []}, 200),
    "POST /v0/topics/{topic}/consumers/{consumer}/pause": ({"until_ts": 1}, 200),
    "POST /v0/topics/{topic}/consumers/{consumer}/reset": ({"to": {"seq": 1}}, 200),
    "POST /v0/topics/{topic}/consolidation": ({"min_segments": 2}, None),
    "POST /v0/topics/{topic}/consolidation/{plan_id}/renew": ({"lease": "l"}, None),
    "POST /v0/topics/{topic}/consolidation/{plan_id}/commit": ({"lease": "l"}, None),
    "POST /v0/topics/{topic}/consolidation/{plan_id}/abandon": ({"lease": "l"}, None),
    "POST /v0/topics/{topic}/snapshots": ({"ttl_ms": 1}, None),
    "POST /v0/topics/{topic}/snapshots/{snapshot_id}/renew": ({"ttl_ms": 1}, None),
    "POST /v0/topics/{topic}/transactions": ({"producer": "p", "batch": 1}, 200),
    "POST /v0/topics/{topic}/transactions/{txn}/stage": (
        {"part": "p", "chunk": 0, "records": [{"data": 1}]}, 200,
    ),
    "POST /v0/topics/{topic}/transactions/{txn}/commit": (
        {"parts": [{"part": "p", "chunks": 1, "records": 1}]}, 200,
    ),
    "PUT /v0/routers/{router}": ({"source": "{topic}", "dest": "{topic}.dest"}, 201),
    "POST /v0/watch": ({"topics": {"{topic}": {"tail": True}}}, 200),
}  # fmt: skip


def test_every_route_tells_of_unknown_fields_or_refuses_them(shared_server: Server, topic: str) -> None:
    operations = [
        f"{method.upper()} {path}"
        for path, methods in shared_server.get("/v0/openapi.json").json["paths"].items()
        for method, operation in methods.items()
        if any(parameter["name"] == "Topics-Strict" for parameter in operation.get("parameters", []))
    ]
    assert set(operations) == set(WITH_A_BODY)
    names = {
        "topic": topic,
        "consumer": "c",
        "router": topic,
        "plan_id": "x",
        "snapshot_id": "x",
        "txn": "0" * 16,
    }
    for name, (body, status) in WITH_A_BODY.items():
        method, path = name.split(" ")
        odd = json.loads(json.dumps({**body, "odd": 1, "odd2": {"even": 1}}).replace("{topic}", topic))
        strict = shared_server.request(method, path.format(**names), odd, {"Topics-Strict": "1"})
        refused(strict, 400, "invalid_request")
        assert strict.json["error"]["message"] == 'unknown field "odd"', name
        tolerant = shared_server.request(method, path.format(**names), odd)
        assert tolerant.status == status or status is None, (name, tolerant.body)
        if tolerant.status < 300:
            assert tolerant.json["ignored"] == ["odd", "odd2"], name
        if name.endswith("/transactions"):
            names["txn"] = tolerant.json["txn"]


def test_a_strict_request_names_the_nearest_field(shared_server: Server, topic: str) -> None:
    strict = {"Topics-Strict": "1"}
    for path, body, message in (
        ("", {"records": [{"data": 1, "tags": "a"}]}, 'unknown field "records[].tags"; did you mean "tag"?'),
        ("/diff", {"form_seq": 1}, 'unknown field "form_seq"; did you mean "from_seq"?'),
        ("/claim", {"nod": "n"}, 'unknown field "nod"; did you mean "node"?'),
    ):
        reply = shared_server.post(f"/v0/topics/{topic}{path}", body, **strict)
        refused(reply, 400, "invalid_request")
        assert reply.json["error"]["message"] == message
    refused(shared_server.get(f"/v0/topics/{topic}"), 404, "topic_not_found")
    ok(shared_server.post(f"/v0/topics/{topic}?odd=1", {"records": [{"data": {"odd": 1}}]}, **strict), 201)


def test_a_server_that_refuses_unknown_fields(start_server: Callable[..., Server]) -> None:
    server = start_server(environment={"TOPICS_STRICT_REQUESTS": "1"})
    refused(server.put("/v0/topics/t", {"durabilty": "fsync"}), 400, "invalid_request")
    refused(
        server.put("/v0/topics/t", {"durabilty": "fsync"}, **{"Topics-Strict": "0"}), 400, "invalid_request"
    )
    refused(server.put("/v0/routers/r", {"source": "a", "dest": "b", "odd": 1}), 400, "invalid_request")
    refused(server.post("/v0/watch", {"topics": {"a": {"tial": True}}}), 400, "invalid_request")
    ok(server.put("/v0/topics/t", {"durability": "fsync"}), 201)


# -- types -------------------------------------------------------------------------------------------------

U64_FIELDS = [
    ("PUT", "", {}, field)
    for field in ("ttl_ms", "cap_records", "cap_bytes", "idempotency_window_ms", "lease_ms", "claim_jitter_ms",
                  "max_deliveries", "cap_per_tag", "max_record_bytes")
] + [
    ("POST", "/diff", {}, "from_seq"),
    ("POST", "/diff", {}, "max_batch_bytes"),
    ("POST", "/diff", {}, "from_ts"),
    ("POST", "/delete", {}, "before_seq"),
    ("POST", "/delete", {}, "keep"),
    ("POST", "", {"records": [{"data": 1}]}, "if_last_seq"),
]  # fmt: skip
U32_FIELDS = [("POST", "/diff", {}, "limit"), ("POST", "/diff", {}, "wait_ms")]


@pytest.mark.parametrize(("method", "sub", "body", "field"), U64_FIELDS + U32_FIELDS)
@pytest.mark.parametrize("text", ["-1", "5.0", "1e1", "0.5", "true", '"5"', "[]", "{}"])
def test_unsigned_fields_accept_only_integers(
    shared_server: Server, topic: str, method: str, sub: str, body: Json, field: str, text: str
) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    sent = json.dumps({**body, field: 0}).replace(f'"{field}": 0', f'"{field}": {text}')
    refused(send_text(shared_server, method, f"/v0/topics/{topic}{sub}", sent), 400, "invalid_request")


@pytest.mark.parametrize(("method", "sub", "body", "field"), U64_FIELDS)
def test_the_range_of_a_u64(
    shared_server: Server, topic: str, method: str, sub: str, body: Json, field: str
) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    shared_server.write(topic, 1, 2)
    path = f"/v0/topics/{topic}{sub}"
    for beyond in (U64_MAX + 1, 10**30):
        refused(shared_server.request(method, path, {**body, field: beyond}), 400, "invalid_request")
    refused(
        send_text(shared_server, method, path, f'{{"records":[{{"data":1}}],"{field}":{"9" * 5000}}}'),
        400, "invalid_request",
    )  # fmt: skip
    for within in (2**63 - 1, 2**63, U64_MAX):
        reply = shared_server.request(method, path, {**body, field: within})
        assert reply.status == (409 if field == "if_last_seq" else 200), reply.body
    assert state_of(shared_server, topic)["head_seq"] == 2


@pytest.mark.parametrize(("method", "sub", "body", "field"), U32_FIELDS)
def test_the_range_of_a_u32(
    shared_server: Server, topic: str, method: str, sub: str, body: Json, field: str
) -> None:
    shared_server.write(topic, 1)
    for beyond in (U32_MAX + 1, U64_MAX, 10**30):
        refused(shared_server.diff(topic, **{field: beyond}), 400, "invalid_request")
    assert len(records_of(shared_server, topic, **{field: U32_MAX})) == 1


@pytest.mark.parametrize("value", [-(2**31), -1, 0, 2**31 - 1])
def test_priority_is_a_signed_32_bit_number(shared_server: Server, topic: str, value: int) -> None:
    assert (
        ok(shared_server.put(f"/v0/topics/{topic}", {"priority": value}), 201)["config"]["priority"] == value
    )
    for beyond in (-(2**31) - 1, 2**31):
        refused(shared_server.put(f"/v0/topics/{topic}", {"priority": beyond}), 400, "invalid_request")
    refused(shared_server.put(f"/v0/topics/{topic}", {"priority": 1.0}), 400, "invalid_request")


WRITE = {"records": [{"data": 1}]}
WRONG_TYPES = [
    ("PUT", "", {}, {"type": 5, "durable": 1, "durability": True, "discard": [], "priority": "1", "auto_priority": "true",
                     "auto_create": 0, "dedupe_node": "no", "dead_letter": 5, "leases_durable": 1}),
    ("PUT", "", {}, {"type": "stream", "discard": "new", "durability": "ram"}),
    ("PUT", "", {}, {"type": "LOG", "discard": "Old", "durability": "FSYNC"}),
    ("POST", "", WRITE, {"records": {}, "node": 5, "idempotency_key": 5, "create": "true", "config": [],
                         "disable_backpressure": 1, "if_tag_last_seq": "a"}),
    ("POST", "", WRITE, {"records": 5, "node": {}, "idempotency_key": [], "create": 1, "config": "x"}),
    ("POST", "", WRITE, {"records": [5], "config": {"ttl_ms": -1}, "if_tag_last_seq": {"tag": "a"}}),
    ("POST", "/diff", {}, {"node": 5, "include_tags": 1, "include_meta": "true", "include_data": 0, "tag": 5}),
    ("POST", "/diff", {}, {"node": [5], "include_tags": "no", "tag": {}}),
    ("POST", "/delete", {"before_seq": 1}, {"match": 5, "seqs": 5, "erase": 1}),
    ("POST", "/delete", {"before_seq": 1}, {"match": {}, "seqs": ["1"], "erase": "true"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "sub", "body", "field", "value"),
    [
        (method, sub, body, field, value)
        for method, sub, body, wrong in WRONG_TYPES
        for field, value in wrong.items()
    ],
)
def test_wrong_types_and_unknown_enum_values(
    shared_server: Server, topic: str, method: str, sub: str, body: Json, field: str, value: Any
) -> None:
    reply = shared_server.request(method, f"/v0/topics/{topic}{sub}", {**body, field: value})
    refused(reply, 400, "invalid_request")


@pytest.mark.parametrize(
    "member", [{"tag": 5}, {"tag": []}, {"node": 5}, {"ttl_ms": -1}, {"ttl_ms": 1.0}, {"data_base64": 5}]
)
def test_wrong_types_in_a_record(shared_server: Server, topic: str, member: Json) -> None:
    reply = shared_server.post(f"/v0/topics/{topic}", {"records": [{"data": 1, **member}]})
    refused(reply, 400, "invalid_request")


NULL_IS_ABSENT = [
    ("PUT", "", {}, ("durability", "priority", "dead_letter")),
    ("POST", "", WRITE, ("node", "idempotency_key", "create", "config", "if_last_seq", "if_tag_last_seq")),
    ("POST", "/diff", {}, ("node", "tag")),
    ("POST", "/delete", {"match": "x"}, ("before_seq", "seqs", "keep")),
    ("POST", "/delete", {"before_seq": 1}, ("match",)),
]


@pytest.mark.parametrize(
    ("method", "sub", "body", "field"),
    [(method, sub, body, field) for method, sub, body, fields in NULL_IS_ABSENT for field in fields],
)
def test_null_means_absent(
    shared_server: Server, topic: str, method: str, sub: str, body: Json, field: str
) -> None:
    ok(shared_server.put(f"/v0/topics/{topic}"), 201)
    ok(shared_server.request(method, f"/v0/topics/{topic}{sub}", {**body, field: None}))


def test_null_in_a_record_means_absent(shared_server: Server, topic: str) -> None:
    record = {"data": None, "tag": None, "node": None, "meta": None, "data_base64": None}
    ok(shared_server.post(f"/v0/topics/{topic}", {"records": [record]}), 201)
    (read,) = records_of(shared_server, topic, include_tags=True)
    assert read == {"$seq": 1, "$ts": read["$ts"], "data": None}


NULL_IS_REFUSED = [
    ("PUT", "", {}, ("type", "ttl_ms", "cap_records", "cap_bytes", "discard", "durable", "auto_priority", "auto_create",
                     "idempotency_window_ms", "dedupe_node", "lease_ms", "claim_jitter_ms", "max_deliveries",
                     "leases_durable")),
    ("POST", "", WRITE, ("records", "disable_backpressure")),
    ("POST", "/diff", {}, ("from_seq", "limit", "include_tags", "include_meta", "wait_ms", "max_batch_bytes")),
    ("POST", "/delete", {"before_seq": 1}, ("erase",)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "sub", "body", "field"),
    [(method, sub, body, field) for method, sub, body, fields in NULL_IS_REFUSED for field in fields],
)
def test_null_is_refused_elsewhere(
    shared_server: Server, topic: str, method: str, sub: str, body: Json, field: str
) -> None:
    ok(shared_server.put(f"/v0/topics/{topic}"), 201)
    reply = shared_server.request(method, f"/v0/topics/{topic}{sub}", {**body, field: None})
    refused(reply, 400, "invalid_request")


# -- data --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "null", "true", "false", "0", "-0", "1.0", "1e5", "1E+5", "-1.50", "1e999", "12345678901234567890123456789",
        "0.1000000000000000055511151231257827", '""', '"plain"', '"\\u00e9\\/\\n"', '"é\u2028😀"', '"\\ud83d\\ude00"',
        "[]", "{}", '{"b":1,"a":2}', '{"a":1,"a":2}', '[1, 2,\t3]', '{ "a" : [ ] }', '"a  b"', '{"$seq":99,"error":1}',
        '{"data":{"records":[]}}', '"}]}"', '"\\\\"', "9" * 6000,
    ],
)  # fmt: skip
def test_data_comes_back_as_it_was_sent(shared_server: Server, topic: str, text: str) -> None:
    body = one_record(f'"data":{text},"meta":{{"m":{text}}}}},{{"data":7')
    ok(send_text(shared_server, "POST", f"/v0/topics/{topic}", body), 201)
    read = shared_server.diff(topic).body
    assert b'"data":%b,"meta":{"m":%b}}' % (text.encode(), text.encode()) in read
    json.loads(read, parse_int=str)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('{\n"a":\r\n[1,\n2]}', '{ "a":  [1, 2]}'),
        ('[\r\r"a b\\n"]', '[  "a b\\n"]'),
    ],
)
def test_line_breaks_between_tokens_become_blanks(
    shared_server: Server, topic: str, text: str, read: str
) -> None:
    body = one_record(f'\n"data":{text},"meta":{text}')
    ok(send_text(shared_server, "POST", f"/v0/topics/{topic}", body), 201)
    page = shared_server.diff(topic).body
    assert b'"data":%b,"meta":%b}' % (read.encode(), read.encode()) in page
    assert b"\n" not in page
    assert b"\r" not in page


@pytest.mark.parametrize(
    ("data", "meta", "size"),
    [
        ("1", None, 1),
        ("null", None, 4),
        ('""', None, 2),
        ('"é"', None, 4),
        ('"\\u00e9"', None, 4),
        ('"\\ud83d\\ude00"', None, 6),
        ('"\\u0041\\/"', None, 4),
        ('"\\n\\u000a\\""', None, 8),
        ('"\\\\u0041"', None, 9),
        ('{ "a" : 1 ,\n "b" : " x " }', None, 17),
        ("[1, 2]", '{"k" : "v"}', 14),
        ("1", "null", 1),
        ("1", "{}", 3),
        ("1", '"text"', 7),
    ],
)
def test_bytes_are_those_of_the_compact_form(
    shared_server: Server, topic: str, data: str, meta: str | None, size: int
) -> None:
    member = "" if meta is None else f',"meta":{meta}'
    body = one_record(f'"data":{data}{member},"tag":"uncounted","node":"uncounted"')
    ok(send_text(shared_server, "POST", f"/v0/topics/{topic}", body), 201)
    assert state_of(shared_server, topic)["bytes"] == size


def test_times_are_milliseconds_and_seqs_begin_at_one(shared_server: Server, topic: str) -> None:
    before_ms = time.time_ns() // 1_000_000
    assert ok(shared_server.put(f"/v0/topics/{topic}"), 201)
    state = state_of(shared_server, topic)
    assert (state["head_seq"], state["last_write_ts"], state["last_read_ts"]) == (0, None, None)
    assert ok(shared_server.write(topic, 1))["first_seq"] == 1
    (read,) = records_of(shared_server, topic)
    assert isinstance(read["$ts"], int)
    # The engine's clock may differ a little from the wall clock, never by seconds here.
    assert before_ms - 2_000 <= read["$ts"] <= time.time_ns() // 1_000_000 + 2_000


# -- names -------------------------------------------------------------------------------------------------

GOOD_NAMES = ["a", "Z", "0", "a.b", "a_b", "a:b", "a-b", "A1._:-", "x" * 255, "0..", "a--"]
BAD_NAMES = [".a", "_a", ":a", "-a", "x" * 256, "a b", "a/b", "a>b", "a*", "é", "a\u00e9", "a\n", "a\x00", "a%", "ａ", "a?",
             "a#", "a,b", "~", "a\\b", "a\"b"]  # fmt: skip


def quoted(name: str) -> str:
    return "".join(f"%{byte:02X}" for byte in name.encode())


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_good_names(shared_server: Server, name: str) -> None:
    ok(shared_server.delete(f"/v0/topics/{quoted(name)}"))
    assert ok(shared_server.put(f"/v0/topics/{quoted(name)}"), 201)["topic"] == name
    assert ok(shared_server.get(f"/v0/topics/{name}"))["topic"] == name
    assert ok(shared_server.delete(f"/v0/topics/{name}"))["deleted"]
    assert ok(shared_server.write(name, 1), 201)["topic"] == name
    ok(shared_server.delete(f"/v0/topics/{name}"))


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_are_refused_where_they_could_be_created(
    shared_server: Server, topic: str, name: str
) -> None:
    path = f"/v0/topics/{quoted(name)}"
    refused(shared_server.put(path), 400, "invalid_request")
    refused(shared_server.post(path, {"records": [{"data": 1}]}), 400, "invalid_request")
    for kind in ("log", "queue"):
        reply = shared_server.put(f"/v0/topics/{topic}", {"type": kind, "dead_letter": name})
        refused(reply, 400, "invalid_request")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_do_not_exist_elsewhere(shared_server: Server, name: str) -> None:
    path = f"/v0/topics/{quoted(name)}"
    absent = {"topic": name}
    refused(shared_server.get(path), 404, "topic_not_found", absent)
    refused(shared_server.post(f"{path}/diff"), 404, "topic_not_found", absent)
    refused(shared_server.post(f"{path}/delete", {"before_seq": 1}), 404, "topic_not_found", absent)
    refused(shared_server.get(f"{path}/deleted"), 404, "topic_not_found", absent)
    refused(shared_server.get(f"{path}/tags"), 404, "topic_not_found", absent)
    refused(shared_server.get(f"{path}/last?tag=a"), 404, "topic_not_found", absent)
    dropped = {"topic": name, "deleted": False, "routers_removed": []}
    assert ok(shared_server.delete(path)) == dropped
    refused(shared_server.write(quoted(name), 1, create=False), 404, "topic_not_found", absent)


def test_a_name_that_is_not_utf8(shared_server: Server) -> None:
    refused(shared_server.put("/v0/topics/a%FF"), 400, "invalid_request")
    refused(shared_server.get("/v0/topics/a%FF"), 404, "topic_not_found")


# -- record fields -----------------------------------------------------------------------------------------

RECORD_CASES = [
    ({}, {}),
    ({"tag": "t"}, {"$tag": "t"}),
    ({"node": "n"}, {"$node": "n"}),
    ({"meta": {"k": 1}}, {"meta": {"k": 1}}),
    ({"meta": {}}, {"meta": {}}),
    ({"tag": "", "node": ""}, {"$tag": "", "$node": ""}),
    ({"tag": 't\u00e9\n"\\', "node": "n\u00e9\t"}, {"$tag": 't\u00e9\n"\\', "$node": "n\u00e9\t"}),
    ({"tag": "t", "node": "n", "meta": {"k": "v"}}, {"$tag": "t", "$node": "n", "meta": {"k": "v"}}),
    *(({"meta": value}, {"meta": value}) for value in (5, "text", [1], True, False)),
]


@pytest.mark.parametrize(("written", "read"), RECORD_CASES)
def test_record_fields(shared_server: Server, topic: str, written: Json, read: Json) -> None:
    ok(shared_server.post(f"/v0/topics/{topic}", {"records": [{"data": {"d": 1}, **written}]}), 201)
    (record,) = records_of(shared_server, topic, include_tags=True)
    assert record == {"$seq": 1, "$ts": record["$ts"], "data": {"d": 1}, **read}
    (bare,) = records_of(shared_server, topic)
    assert "$tag" not in bare
    (short,) = records_of(shared_server, topic, include_data=False, include_meta=False)
    assert set(short) == {"$seq", "$ts"} | ({"$node"} & set(read))


# -- performance -------------------------------------------------------------------------------------------


UNDER_PRESSURE = {"pressure", "throttle_wait_ms"}  # present when the machine is busy


def test_fields_of_performance(shared_server: Server) -> None:
    plain, synced = fresh(), fresh()
    shared_server.put(f"/v0/topics/{plain}")
    shared_server.put(f"/v0/topics/{synced}", {"durability": "fsync"})
    cases = {
        "put": shared_server.put(f"/v0/topics/{plain}"),
        "get": shared_server.get(f"/v0/topics/{plain}"),
        "list": shared_server.get("/v0/topics?page_size=1"),
        "delete": shared_server.post(f"/v0/topics/{plain}/delete", {"before_seq": 0}),
        "deleted": shared_server.get(f"/v0/topics/{plain}/deleted"),
        "tags": shared_server.get(f"/v0/topics/{plain}/tags"),
        "last": shared_server.get(f"/v0/topics/{plain}/last?tag=a"),
        "metrics": shared_server.get("/v0/metrics", Accept="application/json"),
        "drop": shared_server.delete("/v0/topics/absent"),
    }
    for name, reply in cases.items():
        assert list(reply.json["performance"]) == ["server_total_ms"], name
    write = shared_server.write(plain, 1).json["performance"]
    assert set(write) - UNDER_PRESSURE == {"server_total_ms", "wal_append_ms", "fsync_ms"}
    assert write["fsync_ms"] == 0
    write = shared_server.write(synced, 1).json["performance"]
    assert write["fsync_ms"] > 0
    assert write["server_total_ms"] >= write["fsync_ms"]
    diff = shared_server.diff(plain).json["performance"]
    assert set(diff) == {"server_total_ms", "records_scanned"}
    assert diff["records_scanned"] == 1
    assert all(is_number(value) for value in diff.values())


@pytest.mark.parametrize("path", ["/v0/health", "/healthz", "/v0/ready", "/readyz"])
def test_probes_have_no_performance(shared_server: Server, path: str) -> None:
    assert "performance" not in shared_server.get(path).json


# -- pages -------------------------------------------------------------------------------------------------


def names_by_pages(server: Server, query: str, size: int) -> list[list[str]]:
    pages, cursor = [], ""
    while True:
        body = ok(server.get(f"/v0/topics?{query}&page_size={size}&cursor={cursor}"))
        pages.append([row["topic"] for row in body["topics"]])
        if "next_cursor" not in body:
            return pages
        cursor = body["next_cursor"]
        assert cursor.replace("-", "").replace("_", "").isalnum(), (
            "a cursor must be usable in a URL unescaped"
        )


def test_pages_of_a_list(shared_server: Server, topic: str) -> None:
    names = sorted(f"{topic}-{suffix}" for suffix in ("a", "b", "B", "0", "a.b", "a:b", "_", "zz"))
    for name in names:
        shared_server.put(f"/v0/topics/{name}")
    for size in (1, 3, 7, 8, 9):
        pages = names_by_pages(shared_server, f"prefix={topic}-", size)
        assert pages == [names[i : i + size] for i in range(0, len(names), size)]


def test_a_cursor_means_rows_after_this_name(shared_server: Server, topic: str) -> None:
    for suffix in "abcd":
        shared_server.put(f"/v0/topics/{topic}-{suffix}")
    query = f"/v0/topics?prefix={topic}-&page_size=2"
    cursor = ok(shared_server.get(query))["next_cursor"]
    for suffix in "bc":
        shared_server.delete(f"/v0/topics/{topic}-{suffix}")
    shared_server.put(f"/v0/topics/{topic}-bb")
    rest = ok(shared_server.get(f"{query}&cursor={cursor}"))
    assert [row["topic"] for row in rest["topics"]] == [f"{topic}-bb", f"{topic}-d"]
    assert "next_cursor" not in rest


@pytest.mark.parametrize(
    "path", ["/v0/topics?", "/v0/topics/{topic}/tags?", "/v0/topics/{topic}/last?tag=a&each=1&"]
)
def test_invalid_cursors(shared_server: Server, topic: str, path: str) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    path = path.format(topic=topic)
    ok(shared_server.get(f"{path}cursor="))
    for cursor in (
        "%",
        "!!!",
        "A",
        "a%20b",
        "YQ==",
        "_w",
        "%FF",
        "a+b",
        "a.b",
        "\u00e9".encode().hex() + "*",
    ):
        refused(shared_server.get(f"{path}cursor={cursor}"), 400, "invalid_request")


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 1), ("1", 1), ("2", 2), ("99999999999999999999999", 101), ("1000", 101), ("x", 100), ("", 100)],
)
def test_page_size_is_clamped(shared_server: Server, text: str, count: int) -> None:
    shared_server.post(
        "/v0/topics/page-size",
        {"records": [{"data": 1, "tag": f"{i:03}"} for i in range(101)], "idempotency_key": "tags"},
    )
    assert len(ok(shared_server.get(f"/v0/topics/page-size/tags?page_size={text}"))["tags"]) == count
