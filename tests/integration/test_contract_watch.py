"""Goal: a watch session is created as requested, or refused with the right error and nothing is created.

Method: whole answers are compared. The effect of options is checked in the frames of the session's stream.
"""

from __future__ import annotations

import itertools
import re
import time
from typing import Any

import pytest

from tests.support.contract import U32_MAX, U64_MAX, Json, fresh, ok, refused, send_text
from tests.support.server import Server
from tests.support.sse_client import follow, head_only, open_stream, watch

MIB = 1 << 20


def sessions(server: Server) -> int:
    """Old sessions may be swept meanwhile, so tests check only that the count does not grow."""
    return int(ok(server.get("/v0/metrics", Accept="application/json"))["watch_sessions"])


# -- the answer --------------------------------------------------------------------------------------------


def test_a_whole_answer(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, 1, 2, 3)
    body = watch(shared_server, topic)
    assert list(body) == ["wid", "stream_url", "session_ttl_ms", "topics"]
    assert re.fullmatch(r"wid_[A-Za-z0-9_-]{22}", body["wid"])
    assert body["stream_url"] == f"/v0/watch/{body['wid']}"
    assert body["session_ttl_ms"] == 300_000
    assert body["topics"] == {topic: {"from_seq": 0, "head_seq": 3, "earliest_seq": 1}}


def test_every_session_has_an_id_of_its_own(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, 1)
    wids = {watch(shared_server, topic)["wid"] for _ in range(20)}
    assert len(wids) == 20
    assert len({wid[4:10] for wid in wids}) == 20  # not a counter


@pytest.mark.parametrize(
    ("start", "from_seq"),
    [
        ({}, 0),
        ({"from_seq": 0}, 0),
        ({"from_seq": 2}, 2),
        ({"from_seq": 5}, 5),
        ({"from_seq": 99}, 99),
        ({"from_seq": U64_MAX}, U64_MAX),
        ({"tail": False, "from_seq": 2}, 2),
        ({"tail": True}, 5),
        ({"tail": True, "from_seq": 2}, 5),
        ({"from_seq": 1, "unknown": {}}, 1),
    ],
)
def test_where_a_topic_begins(shared_server: Server, topic: str, start: Json, from_seq: int) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"cap_records": 3})
    shared_server.write(topic, *range(5))
    found = watch(shared_server, {topic: start})["topics"]
    assert found == {topic: {"from_seq": from_seq, "head_seq": 5, "earliest_seq": 3}}


def test_several_topics_and_an_empty_one(shared_server: Server) -> None:
    one, two, empty = fresh(), fresh(), fresh()
    shared_server.write(one, 1, 2)
    shared_server.write(two, 1)
    shared_server.put(f"/v0/topics/{empty}")
    body = watch(shared_server, {one: {"from_seq": 1}, two: {"tail": True}, empty: {"tail": True}})
    assert body["topics"] == {
        one: {"from_seq": 1, "head_seq": 2, "earliest_seq": 1},
        two: {"from_seq": 1, "head_seq": 1, "earliest_seq": 1},
        empty: {"from_seq": 0, "head_seq": 0, "earliest_seq": 1},
    }


# -- refusals ----------------------------------------------------------------------------------------------

BAD: list[tuple[str, Any]] = [
    ("no topics", {}),
    ("topics is null", {"topics": None}),
    ("topics is empty", {"topics": {}}),
    ("topics is a list", {"topics": ["{t}"]}),
    ("topics is a string", {"topics": "{t}"}),
    ("a start is null", {"topics": {"{t}": None}}),
    ("a start is a number", {"topics": {"{t}": 5}}),
    ("too many topics", {"topics": {f"n{i}": {} for i in range(257)}}),
    *((f"from_seq {value!r}", {"topics": {"{t}": {"from_seq": value}}}) for value in (-1, 1.0, "1", True, None, 2**64)),
    *((f"tail {value!r}", {"topics": {"{t}": {"tail": value}}}) for value in (1, "true", None)),
    *((f"limit {value!r}", {"limit": value}) for value in (-1, 1.5, "1", None, U32_MAX + 1)),
    *((f"max_batch_bytes {value!r}", {"max_batch_bytes": value}) for value in (-1, 5.0, "1", None, U64_MAX + 1)),
    *((f"heartbeat_ms {value!r}", {"heartbeat_ms": value}) for value in (-1, 1e3, "1", None, U64_MAX + 1)),
    *((f"consistency {value!r}", {"consistency": value}) for value in ("Strong", "", "linear", None, 1)),
    *((f"{name} {value!r}", {name: value})
      for name in ("include_meta", "include_tags", "include_data") for value in (None, 1, "true")),
    *((f"node {value!r}", {"node": value}) for value in (5, [5], {"a": 1}, [None])),
    *((f"group {value!r}", {"group": value}) for value in ("", "g" * 129, "é" * 65, 5, ["g"])),
    ("a group that filters", {"group": "g", "node": "n"}),
]  # fmt: skip


@pytest.mark.parametrize("body", [body for _, body in BAD], ids=[name for name, _ in BAD])
def test_bodies_that_are_refused(shared_server: Server, body: Json) -> None:
    shared_server.write("watch-bad", 1, idempotency_key="once")
    filled = {"topics": {"watch-bad": {}}, **body}
    topics = filled["topics"]
    if isinstance(topics, dict):
        filled["topics"] = {name.replace("{t}", "watch-bad"): start for name, start in topics.items()}
    if not body:
        filled = {}
    before = sessions(shared_server)
    refused(shared_server.post("/v0/watch", filled), 400, "invalid_request")
    assert sessions(shared_server) <= before


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "5", "null", '"x"', '{"topics":{"t":{}},"limit":NaN}', '{"topics":{"t":{}}} x', b"\xff"],
)
def test_invalid_bodies(shared_server: Server, text: str | bytes) -> None:
    refused(send_text(shared_server, "POST", "/v0/watch", text), 400, "invalid_request")


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/jso"])
def test_another_content_type(shared_server: Server, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    for body in (b'{"topics":{"absent":{}}}', b"{", b""):
        refused(shared_server.request("POST", "/v0/watch", body, headers), 415, "unsupported_media_type")


def test_harmless_fields_and_values(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, 1)
    for fields in (
        {"unknown": [1], "wid": "mine"},
        {"node": None},
        {"node": []},
        {"node": ""},
        {"group": None, "node": "n"},
        {"group": "g" * 128},
        {"limit": U32_MAX, "max_batch_bytes": U64_MAX, "heartbeat_ms": U64_MAX},
        {"limit": 0, "max_batch_bytes": 0, "heartbeat_ms": 0},
    ):
        assert list(watch(shared_server, topic, **fields)["topics"]) == [topic]


@pytest.mark.parametrize("query", ["", "?lenient=false", "?lenient=0", "?lenient=yes", "?lenient="])
def test_an_unknown_topic_is_not_found(shared_server: Server, topic: str, query: str) -> None:
    shared_server.write(topic, 1)
    absent = fresh("absent")
    before = sessions(shared_server)
    reply = shared_server.post(f"/v0/watch{query}", {"topics": {topic: {}, absent: {}}})
    refused(reply, 404, "topic_not_found", {"topic": absent})
    assert sessions(shared_server) <= before
    refused(shared_server.get(f"/v0/topics/{absent}"), 404, "topic_not_found")  # nothing was created


@pytest.mark.parametrize("query", ["?lenient=true", "?lenient=1"])
def test_lenient_drops_unknown_topics(shared_server: Server, topic: str, query: str) -> None:
    shared_server.write(topic, 1)
    session = watch(shared_server, {fresh("absent"): {}, topic: {}, "no/name": {}}, query=query)
    assert list(session["topics"]) == [topic]
    stream = open_stream(shared_server, session)
    [_, caught_up] = stream.take("record", "caught-up")
    assert caught_up.cursors == {topic: 1}
    stream.close()


def test_lenient_may_leave_nothing(shared_server: Server) -> None:
    session = watch(shared_server, {fresh("absent"): {}}, query="?lenient=true")
    assert session["topics"] == {}
    assert open_stream(shared_server, session).rest() == []


def test_as_many_topics_as_may_be(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, 1)
    most = {topic: {}, **{fresh("absent"): {} for _ in range(255)}}
    assert list(watch(shared_server, most, query="?lenient=1")["topics"]) == [topic]
    too_many = {**most, fresh("absent"): {}}
    refused(shared_server.post("/v0/watch?lenient=1", {"topics": too_many}), 400, "invalid_request")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v0/watch"),
        ("PUT", "/v0/watch"),
        ("DELETE", "/v0/watch"),
        ("POST", "/v0/watch/wid_x"),
        ("DELETE", "/v0/watch/wid_x"),
        ("PUT", "/v0/watch/wid_x"),
    ],
)
def test_other_methods(shared_server: Server, method: str, path: str) -> None:
    refused(shared_server.request(method, path), 405, "method_not_allowed")


@pytest.mark.parametrize(("path", "allowed"), [("/v0/watch", {"POST"}), ("/v0/watch/wid_x", {"GET", "HEAD"})])
def test_options(shared_server: Server, path: str, allowed: set[str]) -> None:
    reply = shared_server.request("OPTIONS", path)
    assert reply.status == 204
    assert set(re.split(r",\s*", reply.headers["allow"])) - {"OPTIONS"} == allowed


# -- effect of options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "frames"),
    [
        (None, [256] * 4 + [76]),
        (0, [256] * 4 + [76]),
        (1000, [1000, 100]),
        (1001, [1000, 100]),
        (U32_MAX, [1000, 100]),
    ],
)
def test_limit_is_per_frame(shared_server: Server, limit: int | None, frames: list[int]) -> None:
    shared_server.post("/v0/topics/watch-limit", {"records": [{"data": 0}] * 1100, "idempotency_key": "once"})
    stream = follow(shared_server, "watch-limit", **({} if limit is None else {"limit": limit}))
    *records, caught_up = stream.until_caught_up()
    assert [len(frame.data["records"]) for frame in records] == frames
    assert [frame.event for frame in records] == ["record"] * len(frames)
    assert caught_up.data == {"topic": "watch-limit", "head_seq": 1100}
    stream.close()


@pytest.mark.parametrize(
    ("max_batch_bytes", "frames"),
    [
        (1, [1] * 10),
        (99, [1] * 10),
        (200, [2] * 5),
        (399, [3, 3, 3, 1]),
        (1000, [10]),
        (0, [10]),
        (None, [10]),
    ],
)
def test_max_batch_bytes_counts_the_bytes_of_records(
    shared_server: Server, max_batch_bytes: int | None, frames: list[int]
) -> None:
    shared_server.write("watch-bytes", *["x" * 98] * 10, idempotency_key="once")
    fields = {} if max_batch_bytes is None else {"max_batch_bytes": max_batch_bytes}
    stream = follow(shared_server, "watch-bytes", **fields)
    *records, _ = stream.until_caught_up()
    assert [len(frame.data["records"]) for frame in records] == frames
    stream.close()


@pytest.mark.parametrize(
    ("max_batch_bytes", "first"), [(None, 1), (262_144, 1), (524_288, 2), (0, 4), (U64_MAX, 32)]
)
def test_the_default_and_the_largest_max_batch_bytes(
    shared_server: Server, max_batch_bytes: int | None, first: int
) -> None:
    for i in range(9):
        shared_server.write("watch-large", *["x" * (MIB // 4 - 2)] * 4, idempotency_key=f"once-{i}")
    fields = {} if max_batch_bytes is None else {"max_batch_bytes": max_batch_bytes}
    stream = follow(shared_server, "watch-large", **fields)
    [record] = stream.take("record")
    assert record.seqs == list(range(1, first + 1))
    stream.close()


@pytest.mark.parametrize("heartbeat_ms", [0, 1, 30])
def test_the_heartbeat_has_a_minimum(shared_server: Server, topic: str, heartbeat_ms: int) -> None:
    """conftest.py lowers the minimum for the tests' server: no stream sends heartbeats more often than that."""
    shared_server.put(f"/v0/topics/{topic}")
    stream = follow(shared_server, topic, heartbeat_ms=heartbeat_ms)
    stream.take("caught-up")
    times = [frame.data for frame in (stream.read() for _ in range(4)) if frame is not None]
    floor = max(heartbeat_ms, 20)
    assert all(later - earlier >= 0.5 * floor for earlier, later in itertools.pairwise(times)), times
    assert abs(times[0] - time.time() * 1000) < 60_000
    stream.close()


def test_heartbeats_come_when_idle_and_are_no_events(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, 1)
    stream = follow(shared_server, topic, heartbeat_ms=20)
    stream.take("record", "caught-up")
    for i in range(3):
        frame = stream.read()
        assert frame is not None
        assert (frame.event, frame.id) == ("hb", None)
        shared_server.write(topic, i)
        [record, _] = stream.take("record", "caught-up")
        assert record.seqs == [i + 2]
    stream.close()


# -- HEAD --------------------------------------------------------------------------------------------------


def test_head_is_get_without_the_stream(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, 1)
    session = watch(shared_server, topic)
    stream = open_stream(shared_server, session)
    stream.take("record", "caught-up")
    headers = head_only(shared_server, session["stream_url"])
    assert headers["content-type"].startswith("text/event-stream")
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-store", "no")
    assert "content-length" not in headers, "a stream has no length, and this one is not empty"
    # HEAD does not take over the session's stream.
    shared_server.write(topic, 2)
    [record, _] = stream.take("record", "caught-up")
    assert record.seqs == [2]
    stream.close()
    assert shared_server.request("HEAD", "/v0/watch/wid_AAAAAAAAAAAAAAAAAAAAAA").status == 404
    assert shared_server.request("HEAD", session["stream_url"], None, {"Accept": "text/html"}).status == 406
