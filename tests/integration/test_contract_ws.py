"""Goal: a WebSocket carries commands and pushes as the contract says, and an invalid message does not close it.

Method: a client that refuses every frame and key that the contract does not allow. After each refusal a ping shows
that the socket is open.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.contract import U32_MAX, U64_MAX, Json, data_of, fresh, ok, refused, state_of
from tests.support.h2_client import Http2Client
from tests.support.server import Server, running, until
from tests.support.ws_client import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    Closed,
    WebSocket,
    refused_upgrade,
)

MIB = 1 << 20


@pytest.fixture
def ws(shared_server: Server) -> Iterator[WebSocket]:
    made = WebSocket(shared_server)
    yield made
    made.close()


def seqs(message: Json) -> list[int]:
    return [record["$seq"] for record in message["records"]]


def alive(ws: WebSocket) -> None:
    assert ws.ask("ping", request_id="alive") == {"op": "pong", "request_id": "alive"}


def fails(ws: WebSocket, op: str, code: str, **fields: Any) -> None:
    """The command is refused with its request_id, and the socket stays open."""
    error = ws.ask(op, request_id="failing", **fields)
    assert (error["op"], error["code"]) == ("error", code), error
    alive(ws)


# -- the upgrade -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Upgrade": None, "Connection": None, "Sec-WebSocket-Key": None, "Sec-WebSocket-Version": None},
        {"Upgrade": None},
        {"Upgrade": "h2c"},
        {"Connection": None},
        {"Sec-WebSocket-Key": None},
        {"Sec-WebSocket-Key": "short"},
        {"Sec-WebSocket-Version": None},
        {"Sec-WebSocket-Version": "12"},
    ],
)
def test_invalid_upgrades(shared_server: Server, headers: dict[str, str | None]) -> None:
    reply = refused_upgrade(shared_server, headers)
    refused(reply, 400, "invalid_request")
    assert reply.headers["sec-websocket-version"] == "13"


def test_there_is_no_websocket_over_http2(shared_server: Server) -> None:
    client = Http2Client(shared_server)
    refused(client.request("GET", "/v0/ws"), 400, "invalid_request")
    client.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_other_methods(shared_server: Server, method: str) -> None:
    refused(shared_server.request(method, "/v0/ws"), 405, "method_not_allowed")


# -- messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_id", [None, 0, 5, 1.5, -1, "", "é", True, [1, {"a": None}], {"a": [1]}, 2**70]
)
def test_any_request_id_comes_back(ws: WebSocket, request_id: Any) -> None:
    assert ws.ask("ping", request_id=request_id) == {"op": "pong", "request_id": request_id}


def test_no_request_id_is_null(ws: WebSocket) -> None:
    assert ws.ask("ping") == {"op": "pong", "request_id": None}
    assert ws.ask("ping", unknown=[1]) == {"op": "pong", "request_id": None, "ignored": ["unknown"]}


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "nonsense", "[]", "5", "null", '"ping"', "{}", '{"op":5}', '{"op":null}', '{"op":"Ping"}',
        '{"op":"claim"}', '{"request_id":1}', '{"op":"ping"} x', '{"op":"ping","request_id":NaN}',
        '{"op":"subscribe","topic":5}', '{"op":"subscribe","topics":["t"]}', '{"op":"subscribe","topic":"t","limit":-1}',
        '{"op":"subscribe","topic":"t","from_seq":1.0}', '{"op":"subscribe","topic":"t","tail":1}',
        '{"op":"subscribe","topic":"t","include_data":null}', '{"op":"unsubscribe","topics":{"t":1}}',
        '{"op":"publish","topic":"t","records":[{"data":1}],"create":"yes"}',
    ],
)  # fmt: skip
def test_invalid_messages(ws: WebSocket, text: str) -> None:
    ws.send_text(text)
    error = ws.next()
    assert (error["op"], error["request_id"], error["code"]) == ("error", None, "invalid_json")
    alive(ws)


def test_binary_is_not_understood(ws: WebSocket) -> None:
    for payload in (b'{"op":"ping"}', b"", b"\0" * 70_000):
        ws.send_frame(BINARY, payload)
        error = ws.next()
        assert (error["op"], error["code"]) == ("error", "unsupported_message")
    alive(ws)


def test_protocol_pings_are_answered(ws: WebSocket) -> None:
    for payload in (b"", b"hello", b"x" * 125):
        ws.send_frame(PING, payload)
        assert ws.next_frame() == (PONG, payload)
    ws.send_frame(PONG, b"unasked")
    alive(ws)


def test_a_message_in_parts(ws: WebSocket) -> None:
    ws.send_frame(TEXT, b'{"op":"pi', final=False)
    ws.send_frame(PING, b"between")
    ws.send_frame(CONTINUATION, b'ng","request_id"', final=False)
    ws.send_frame(CONTINUATION, b":7}")
    assert ws.next_frame() == (PONG, b"between")
    assert ws.next() == {"op": "pong", "request_id": 7}


def test_a_close_is_answered(ws: WebSocket) -> None:
    ws.send_frame(CLOSE, (1000).to_bytes(2))
    with pytest.raises(Closed) as closed:
        ws.next()
    assert closed.value.code in (1000, 1005)


def test_many_commands_at_once_are_answered_in_order(ws: WebSocket) -> None:
    for i in range(200):
        ws.send("ping", request_id=i)
    assert [ws.next()["request_id"] for _ in range(200)] == list(range(200))


# -- subscribe ---------------------------------------------------------------------------------------------


def test_backlog_then_live(shared_server: Server, ws: WebSocket, topic: str) -> None:
    shared_server.write(topic, "a", {"b": 1})
    reply = ws.ask("subscribe", topic=topic, request_id="r")
    assert reply == {
        "op": "subscribed",
        "request_id": "r",
        "topics": {topic: {"from_seq": 0, "head_seq": 2, "earliest_seq": 1}},
    }
    [record, caught_up] = ws.take("record", "caught_up")
    page = ok(shared_server.diff(topic))
    assert record == {
        "op": "record", "topic": topic, "from_seq": 0, "to_seq": 2, "head_seq": 2, "records": page["records"],
    }  # fmt: skip
    assert caught_up == {"op": "caught_up", "topic": topic, "head_seq": 2}
    shared_server.write(topic, 3)
    [record, caught_up] = ws.take("record", "caught_up")
    assert (record["from_seq"], seqs(record), record["to_seq"], caught_up["head_seq"]) == (2, [3], 3, 3)


def test_where_topics_begin(shared_server: Server, ws: WebSocket) -> None:
    one, two, three = fresh(), fresh(), fresh()
    for name in (one, two, three):
        shared_server.write(name, 1, 2, 3)
    reply = ws.ask("subscribe", topic=one, tail=True, topics={two: {"from_seq": 2}, three: {"tail": True}})
    assert {name: row["from_seq"] for name, row in reply["topics"].items()} == {one: 3, two: 2, three: 3}
    pushes = [ws.next() for _ in range(4)]  # ordered within a topic, not between topics
    assert sorted(message["op"] for message in pushes) == ["caught_up"] * 3 + ["record"]
    # The topic's entry in the map takes precedence over the fields beside it.
    reply = ws.ask("subscribe", topic=one, from_seq=1, topics={one: {"from_seq": 2}})
    assert reply["topics"] == {one: {"from_seq": 2, "head_seq": 3, "earliest_seq": 1}}


def test_invalid_subscriptions(shared_server: Server, ws: WebSocket, topic: str) -> None:
    shared_server.write(topic, 1)
    fails(ws, "subscribe", "invalid_request")
    fails(ws, "subscribe", "invalid_request", topics={})
    fails(ws, "subscribe", "topic_not_found", topic=fresh("absent"))
    # One unknown topic fails the whole command: nothing of the known one is sent.
    fails(ws, "subscribe", "topic_not_found", topics={topic: {}, fresh("absent"): {}})
    fails(ws, "subscribe", "topic_not_found", topic=topic, topics={fresh("absent"): {}}, lenient=False)
    shared_server.write(topic, 2)
    alive(ws)


def test_lenient_drops_unknown_topics(shared_server: Server, ws: WebSocket, topic: str) -> None:
    shared_server.write(topic, 1)
    reply = ws.ask("subscribe", topic=fresh("absent"), topics={topic: {}, fresh("absent"): {}}, lenient=True)
    assert list(reply["topics"]) == [topic]
    ws.take("record", "caught_up")
    assert ws.ask("subscribe", topic=fresh("absent"), lenient=True)["topics"] == {}


@pytest.mark.parametrize(
    "fields", [{}, {"include_data": False}, {"include_meta": False}, {"include_tags": True}]
)
def test_optional_fields_are_included_on_request(
    shared_server: Server, ws: WebSocket, topic: str, fields: Json
) -> None:
    record = {"data": [1], "tag": "t", "meta": {"k": 1}, "node": "n"}
    shared_server.post(f"/v0/topics/{topic}", {"records": [record, {"data": None}]})
    ws.ask("subscribe", topic=topic, **fields)
    [found, _] = ws.take("record", "caught_up")
    assert found["records"] == ok(shared_server.diff(topic, **fields))["records"]


@pytest.mark.parametrize(
    ("fields", "pages"),
    [
        ({}, [1000, 100]),
        ({"limit": U32_MAX}, [1000, 100]),
        ({"limit": 600}, [600, 500]),
        ({"max_batch_bytes": 500}, [500, 500, 100]),
    ],
)
def test_the_size_of_pages(shared_server: Server, ws: WebSocket, fields: Json, pages: list[int]) -> None:
    shared_server.post("/v0/topics/ws-limit", {"records": [{"data": 0}] * 1100, "idempotency_key": "once"})
    ws.ask("subscribe", topic="ws-limit", **fields)
    assert [len(message["records"]) for message in ws.take(*["record"] * len(pages))] == pages
    ws.take("caught_up")


@pytest.mark.parametrize(("max_batch_bytes", "first"), [(None, 4), (0, 4), (MIB // 2, 2), (U64_MAX, 32)])
def test_max_batch_bytes(
    shared_server: Server, ws: WebSocket, max_batch_bytes: int | None, first: int
) -> None:
    for i in range(9):
        shared_server.write("ws-large", *["x" * (MIB // 4 - 2)] * 4, idempotency_key=f"once-{i}")
    ws.ask(
        "subscribe",
        topic="ws-large",
        **({} if max_batch_bytes is None else {"max_batch_bytes": max_batch_bytes}),
    )
    [record] = ws.take("record")
    assert seqs(record) == list(range(1, first + 1))


def test_own_records_are_left_out(shared_server: Server, ws: WebSocket, topic: str) -> None:
    records = [{"data": 0, "node": name} for name in ("me", "you", "me", None)]
    shared_server.post(f"/v0/topics/{topic}", {"records": records})
    ws.ask("subscribe", topic=topic, node=["me"])
    [record, _] = ws.take("record", "caught_up")
    assert (record["from_seq"], seqs(record), record["to_seq"]) == (0, [2, 4], 4)
    assert ws.ask("publish", topic=topic, records=[{"data": 1}], node="me")["op"] == "ack"
    shared_server.write(topic, 1)
    record = until(lambda: next((m for m in [ws.next()] if m["op"] == "record"), None))
    assert (seqs(record), record["to_seq"]) == ([6], 6)


def test_subscribing_again_begins_again(shared_server: Server, ws: WebSocket, topic: str) -> None:
    shared_server.post(f"/v0/topics/{topic}", {"records": [{"data": i, "tag": "t"} for i in range(3)]})
    ws.ask("subscribe", topic=topic)
    [record, _] = ws.take("record", "caught_up")
    assert "$tag" not in record["records"][0]
    ws.ask("subscribe", topic=topic, from_seq=1, include_tags=True, request_id=2)
    [record, _] = ws.take("record", "caught_up")
    assert (seqs(record), record["records"][0]["$tag"]) == ([2, 3], "t")
    shared_server.write(topic, 4)
    [record, _] = ws.take("record", "caught_up")  # once, not for both subscriptions
    assert seqs(record) == [4]
    alive(ws)


def test_unsubscribe(shared_server: Server, ws: WebSocket) -> None:
    one, two, three = fresh(), fresh(), fresh()
    for name in (one, two, three):
        shared_server.write(name, 1)
    ws.ask("subscribe", topics={one: {"tail": True}, two: {"tail": True}, three: {"tail": True}})
    ws.take("caught_up", "caught_up", "caught_up")
    reply = ws.ask("unsubscribe", topic=one, topics=[two], request_id="u")
    assert (reply["op"], sorted(reply["topics"])) == ("unsubscribed", sorted([one, two]))
    for name in (one, two, three):
        shared_server.write(name, 2)
    [record, _] = ws.take("record", "caught_up")
    assert record["topic"] == three
    for fields in ({"topic": fresh("absent")}, {"topics": [one, two]}, {"topics": []}, {"topic": one}):
        assert ws.ask("unsubscribe", **fields)["op"] == "unsubscribed"
    alive(ws)


def test_after_unsubscribed_nothing_follows(shared_server: Server, ws: WebSocket, topic: str) -> None:
    for i in range(20):
        shared_server.write(topic, *range(50))
        ws.send("subscribe", topic=topic, limit=3, request_id=f"s{i}")
        ws.send("unsubscribe", topic=topic, request_id=f"u{i}")
        while (message := ws.next())["op"] != "unsubscribed":
            assert message.get("topic", topic) == topic
        assert message["request_id"] == f"u{i}"
        alive(ws)  # with nothing in between


# -- gaps and deleted topics -------------------------------------------------------------------------------


def test_a_gap_always_has_its_true_reason(shared_server: Server, ws: WebSocket, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"cap_records": 3})
    shared_server.write(topic, *range(10))
    ws.ask("subscribe", topic=topic)
    [tombstone, record, _] = ws.take("tombstone", "record", "caught_up")
    assert tombstone == {
        "op": "tombstone", "topic": topic, "reason": "cap", "gap_from": 1, "gap_to": 7, "earliest_seq": 8, "head_seq": 10,
    }  # fmt: skip
    assert (record["from_seq"], seqs(record)) == (7, [8, 9, 10])
    shared_server.write(topic, *range(5))
    [tombstone, record, _] = ws.take("tombstone", "record", "caught_up")
    assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == ("cap", 11, 12)
    assert seqs(record) == [13, 14, 15]


def test_a_gap_of_expired_records(shared_server: Server, ws: WebSocket, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"ttl_ms": 1})
    shared_server.write(topic, 1, 2)
    until(lambda: state_of(shared_server, topic)["count"] == 0)
    ws.ask("subscribe", topic=topic)
    [tombstone, _] = ws.take("tombstone", "caught_up")
    assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == ("ttl", 1, 2)


@pytest.mark.parametrize("count", [0, 3])
def test_a_cursor_from_another_topic_of_that_name(
    shared_server: Server, ws: WebSocket, topic: str, count: int
) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    if count:
        shared_server.write(topic, *range(count))
    ws.ask("subscribe", topic=topic, from_seq=9)
    [tombstone] = ws.take("tombstone")
    assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == ("recreated", 1, count)
    if count:
        assert seqs(ws.take("record")[0]) == [1, 2, 3]
    ws.take("caught_up")


def test_a_deleted_topic_ends_alone(shared_server: Server, ws: WebSocket) -> None:
    doomed, other = fresh(), fresh()
    for name in (doomed, other):
        shared_server.write(name, 1)
    ws.ask("subscribe", topics={doomed: {"tail": True}, other: {"tail": True}})
    ws.take("caught_up", "caught_up")
    shared_server.delete(f"/v0/topics/{doomed}")
    assert ws.take("topic_deleted")[0]["topic"] == doomed
    ok(shared_server.write(doomed, 1), 201)
    shared_server.write(other, 2)
    [record, _] = ws.take("record", "caught_up")
    assert record["topic"] == other
    ws.ask("subscribe", topic=doomed)  # subscribing again is allowed
    ws.take("record", "caught_up")


# -- publish -----------------------------------------------------------------------------------------------


def test_publish(shared_server: Server, ws: WebSocket, topic: str) -> None:
    ack = ws.ask(
        "publish", topic=topic, records=[{"data": 1, "tag": "t"}, {"data": 2}], node="n", request_id=[1]
    )
    performance = ack.pop("performance")
    assert performance["server_total_ms"] >= 0
    assert ack == {
        "op": "ack", "request_id": [1], "topic": topic, "first_seq": 1, "last_seq": 2, "seqs": [1, 2], "head_seq": 2,
        "count": 2, "created": True, "deduped": False,
    }  # fmt: skip
    page = ok(shared_server.diff(topic, include_tags=True))
    assert [(row["data"], row.get("$tag"), row["$node"]) for row in page["records"]] == [
        (1, "t", "n"),
        (2, None, "n"),
    ]
    ack = ws.ask("publish", topic=topic, records=[{"data": 3}], return_seqs=False, disable_backpressure=True)
    assert (ack["seqs"], ack["first_seq"], ack["last_seq"], ack["created"]) == (None, 3, 3, False)


def test_a_publish_is_deduped(ws: WebSocket, topic: str) -> None:
    fields = {"topic": topic, "records": [{"data": 1}], "idempotency_key": "k"}
    first, again = ws.ask("publish", **fields), ws.ask("publish", **fields)
    assert (first["deduped"], again["deduped"], again["seqs"]) == (False, True, [1])


def test_publishes_that_are_refused(shared_server: Server, ws: WebSocket, topic: str) -> None:
    one = [{"data": 1}]
    fails(ws, "publish", "topic_not_found", topic=topic, records=one, create=False)
    fails(ws, "publish", "topic_not_found", topic=topic, records=one, config={"auto_create": False})
    fails(ws, "publish", "invalid_request", topic=topic, records=[])
    fails(ws, "publish", "invalid_request", topic="no name", records=one)
    fails(ws, "publish", "invalid_request", topic=topic, records=[{"data": 1, "tag": "t" * 257}])
    fails(ws, "publish", "invalid_request", topic=topic, records=one, idempotency_key="k" * 257)
    fails(ws, "publish", "batch_too_large", topic=topic, records=one * 10_001)
    fails(ws, "publish", "record_too_large", topic=topic, records=[{"data": "x" * MIB}])
    refused(shared_server.get(f"/v0/topics/{topic}"), 404, "topic_not_found")
    full = {"topic": topic, "records": one, "config": {"cap_records": 1, "discard": "reject"}}
    assert ws.ask("publish", **full)["created"]
    fails(ws, "publish", "topic_full", topic=topic, records=one)
    assert data_of(shared_server, topic) == [1]


@pytest.mark.parametrize(
    "fields",
    [
        {"topic": "ws-bad"},
        {"records": [{"data": 1}]},
        {"topic": "ws-bad", "records": {}},
        {"topic": "ws-bad", "records": None},
        {"topic": "ws-bad", "records": [{"tag": "no data"}]},
        {"topic": "ws-bad", "records": [5]},
    ],
)
def test_a_publish_without_records_or_topic(ws: WebSocket, fields: Json) -> None:
    ws.send("publish", request_id=1, **fields)
    assert ws.next()["code"] in ("invalid_json", "invalid_request")
    alive(ws)


def test_an_ack_comes_before_the_published_record(shared_server: Server, ws: WebSocket, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    ws.ask("subscribe", topic=topic)
    ws.take("caught_up")
    for seq in range(1, 20):
        assert ws.ask("publish", topic=topic, records=[{"data": seq}])["first_seq"] == seq
        [record, _] = ws.take("record", "caught_up")
        assert seqs(record) == [seq]


def test_publishes_in_a_row_keep_their_order(shared_server: Server, ws: WebSocket, topic: str) -> None:
    for i in range(100):
        ws.send("publish", topic=topic, records=[{"data": i}], request_id=i)
    assert [ws.next()["request_id"] for _ in range(100)] == list(range(100))
    assert data_of(shared_server, topic) == list(range(100))


# -- keys --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = "s3cret-all,s3cret-read:read,s3cret-write:write,s3cret-team::team.,s3cret-delete:delete"
    with running(tmp_path_factory.mktemp("guarded-ws"), environment={"TOPICS_API_KEYS": keys}) as server:
        yield server


def test_every_command_is_checked_on_its_own(guarded: Server, topic: str) -> None:
    everyone = guarded.with_key("s3cret-all")
    for server in (guarded, guarded.with_key("nobody")):
        refused(refused_upgrade(server), 401, "unauthorized")
    inside, one = fresh("team.a"), [{"data": 1}]
    for name in (topic, inside):
        ok(everyone.write(name, 1), 201)
    may: dict[str, tuple[bool, bool, bool]] = {  # subscribe, publish, publish with a config
        "s3cret-all": (True, True, True),
        "s3cret-read": (True, False, False),
        "s3cret-write": (False, True, False),
        "s3cret-delete": (False, False, False),
    }
    for secret, allowed in may.items():
        ws = WebSocket(guarded.with_key(secret))
        alive(ws)
        commands: list[tuple[str, Json]] = [
            ("subscribe", {"topics": {topic: {"tail": True}}}),
            ("publish", {"topic": inside, "records": one}),
            ("publish", {"topic": inside, "records": one, "config": {}}),
        ]
        for (op, fields), is_allowed in zip(commands, allowed):
            reply = ws.ask(op, request_id=op, **fields)
            assert (reply.get("code") == "forbidden") == (not is_allowed), reply
            if reply["op"] == "subscribed":
                ws.take("caught_up")
        ws.close()
    ws = WebSocket(guarded.with_key("s3cret-team"))
    fails(ws, "subscribe", "forbidden", topic=topic)
    fails(ws, "subscribe", "forbidden", topics={inside: {}, topic: {}}, lenient=True)
    fails(ws, "publish", "forbidden", topic=topic, records=one)
    fails(ws, "subscribe", "forbidden", topic="absent")
    ws.ask("subscribe", topic=inside)
    ws.take("record", "caught_up")
    ws.close()
