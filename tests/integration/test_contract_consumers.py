"""Goal: named consumers behave as docs/consumers.md says: fields, bounds, order of checks, answers, errors.

Method: each test has its own topic and compares whole answers. Timeouts and crashes of consumers are tested with the engine;
this is the HTTP interface.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.consumer_client import (
    SETTLES,
    STATE,
    fetch,
    look,
    make,
    path_of,
    waiting_fetch,
)
from tests.support.contract import (
    U32_MAX,
    U64_MAX,
    Json,
    ok,
    refused,
    send_text,
)
from tests.support.queue_client import NODE, make_queue, seqs_of
from tests.support.server import Server

DAY_MS = 86_400_000
MONTH_MS = 30 * DAY_MS
DEFAULTS: Json = {
    "ack": "explicit", "ack_wait_ms": 30_000, "max_deliver": 0, "backoff_ms": [], "filter": None, "deliver": "all",
    "max_ack_pending": 1000, "max_waiting": 512, "headers_only": False, "dead_letter": None, "inactive_ttl_ms": 0,
    "replay": "instant",
}  # fmt: skip


# -- creating and changing ---------------------------------------------------------------------------------


def test_put_creates_and_replaces(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, 1, 2)
    path = path_of(topic)
    made = ok(shared_server.request("PUT", path), 201)
    assert set(made) == STATE | {"created"}
    assert made["config"] == DEFAULTS
    fixed = {
        "topic": topic, "consumer": "c", "created": True, "next_seq": 1, "ack_floor": 0, "delivered": 0,
        "redelivered": 0, "acked": 0, "ack_pending": 0, "in_flight": 0, "dead_lettered": 0, "given_up": 0,
        "waiting": 0, "lag_records": 2, "paused": False, "paused_until_ts": None, "stalled": False, "tombstone": None,
    }  # fmt: skip
    assert {name: made[name] for name in fixed} == fixed
    assert abs(made["created_ts"] - time.time() * 1000) < 60_000
    again = ok(shared_server.put(path, {"max_deliver": 5, "unknown": {"x": 1}}))
    assert (again["created"], again["config"]) == (False, {**DEFAULTS, "max_deliver": 5})
    assert ok(shared_server.put(path, {}))["config"] == DEFAULTS, "absent fields return to their defaults"
    assert look(shared_server, topic)["created_ts"] == made["created_ts"]


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"ack_wait_ms": 0}, {"ack_wait_ms": 100}),
        ({"ack_wait_ms": U64_MAX}, {"ack_wait_ms": DAY_MS}),
        ({"backoff_ms": [0, 500, U64_MAX]}, {"backoff_ms": [100, 500, DAY_MS]}),
        ({"max_ack_pending": 0}, {"max_ack_pending": 1}),
        ({"max_ack_pending": 100_001}, {"max_ack_pending": 100_000}),
        ({"max_waiting": 0}, {"max_waiting": 1}),
        ({"max_waiting": U32_MAX}, {"max_waiting": 10_000}),
        ({"max_deliver": U32_MAX}, {"max_deliver": U32_MAX}),
        ({"inactive_ttl_ms": 0}, {"inactive_ttl_ms": 0}),
        ({"inactive_ttl_ms": MONTH_MS}, {"inactive_ttl_ms": MONTH_MS}),
        ({"inactive_ttl_ms": U64_MAX}, {"inactive_ttl_ms": MONTH_MS}),
        ({"ack": "none"}, {"ack": "none"}),
        ({"ack": "all"}, {"ack": "all"}),
        ({"headers_only": True}, {"headers_only": True}),
        ({"replay": "original"}, {"replay": "original"}),
        ({"dead_letter": None}, {"dead_letter": None}),
        ({"dead_letter": "dead.x"}, {"dead_letter": "dead.x"}),
        ({"filter": None}, {"filter": None}),
        ({"filter": []}, {"filter": None}),
        ({"filter": "a"}, {"filter": [["tag", "Eq", "a"]]}),
        ({"filter": "a*"}, {"filter": [["tag", "Glob", "a*"]]}),
        ({"filter": ["tag", "Eq", "a*"]}, {"filter": [["tag", "Eq", "a*"]]}),
        ({"filter": ["tag", "Glob", "a*"]}, {"filter": [["tag", "Glob", "a*"]]}),
        ({"filter": ["a.*", "b.>"]}, {"filter": [["tag", "Subject", "a.*"], ["tag", "Subject", "b.>"]]}),
        ({"filter": ["a.*"]}, {"filter": [["tag", "Subject", "a.*"]]}),
        ({"deliver": "new"}, {"deliver": "new"}),
        ({"deliver": "last"}, {"deliver": "last"}),
        ({"deliver": "last_per_tag"}, {"deliver": "last_per_tag"}),
        ({"deliver": {"from_seq": 5}}, {"deliver": {"from_seq": 5}}),
        ({"deliver": {"from_ts": 7}}, {"deliver": {"from_ts": 7}}),
    ],
)
def test_settings_are_stored_clamped(shared_server: Server, topic: str, given: Json, stored: Json) -> None:
    assert make(shared_server, topic, **given)["config"] == DEFAULTS | stored
    assert look(shared_server, topic)["config"] == DEFAULTS | stored


@pytest.mark.parametrize(
    "wrong",
    [
        {"ack": "maybe"}, {"ack": None}, {"ack_wait_ms": -1}, {"ack_wait_ms": 1.5}, {"ack_wait_ms": "1"},
        {"ack_wait_ms": U64_MAX + 1}, {"max_deliver": -1}, {"max_deliver": U32_MAX + 1}, {"backoff_ms": 5},
        {"backoff_ms": [-1]}, {"backoff_ms": ["1"]}, {"backoff_ms": [100] * 33}, {"max_ack_pending": -1},
        {"max_ack_pending": None}, {"max_waiting": "1"}, {"headers_only": 1}, {"headers_only": None}, {"replay": "slow"},
        {"inactive_ttl_ms": -1}, {"dead_letter": ""}, {"dead_letter": ".bad"}, {"dead_letter": 5},
        {"filter": 5}, {"filter": {"tag": "a"}}, {"filter": ["tag", "Glob", "a"]}, {"filter": [5]},
        {"filter": ["a..b"]}, {"filter": ["a.>.b"]}, {"filter": [["tag", "Ne", "a"]]}, {"filter": ["x"] * 33},
        {"deliver": "everything"}, {"deliver": 5}, {"deliver": {}}, {"deliver": {"from_seq": 1, "from_ts": 2}},
        {"deliver": {"from_seq": -1}}, {"deliver": {"from_seq": "1"}}, {"deliver": {"from_ts": 1.5}}, {"deliver": None},
    ],
)  # fmt: skip
def test_bad_settings(shared_server: Server, topic: str, wrong: Json) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    refused(shared_server.put(path_of(topic), wrong), 400, "invalid_request")
    refused(shared_server.get(path_of(topic)), 404, "consumer_not_found", {"topic": topic, "consumer": "c"})


def test_a_topic_is_not_its_own_dead_letter(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    refused(shared_server.put(path_of(topic), {"dead_letter": topic}), 400, "invalid_request")


@pytest.mark.parametrize("name", ["a", "9", "A.b_c:d-9", "x" * 255])
def test_good_names(shared_server: Server, topic: str, name: str) -> None:
    assert make(shared_server, topic, 1, name=name)["consumer"] == name
    assert seqs_of(fetch(shared_server, topic, name=name)) == [1]


@pytest.mark.parametrize("name", ["-a", ".a", "_a", "a%20b", "%C3%A9", "a%2Fb", "a%3E", "x" * 256])
def test_bad_names(shared_server: Server, topic: str, name: str) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    refused(shared_server.put(path_of(topic, name=name), {}), 400, "invalid_request")
    # On other routes a malformed name simply does not exist.
    refused(shared_server.get(path_of(topic, name=name)), 404, "consumer_not_found")
    assert ok(shared_server.delete(path_of(topic, name=name)))["deleted"] is False


# -- unknown names, methods, bodies ------------------------------------------------------------------------

CALLS: list[tuple[str, str, Any]] = [
    ("GET", "", None),
    ("POST", "fetch", {"node": NODE}),
    ("POST", "ack", {"node": NODE, "seqs": [1]}),
    ("POST", "nack", {"node": NODE, "seqs": [1]}),
    ("POST", "extend", {"node": NODE, "seqs": [1], "lease_ms": 1000}),
    ("POST", "term", {"node": NODE, "seqs": [1]}),
    ("POST", "pause", {}),
    ("POST", "resume", {}),
    ("POST", "reset", {"to": "start"}),
]


@pytest.mark.parametrize(("method", "sub", "body"), CALLS)
def test_absent_topics_and_consumers(
    shared_server: Server, topic: str, method: str, sub: str, body: Any
) -> None:
    reply = shared_server.request(method, path_of(topic, sub), body)
    refused(reply, 404, "topic_not_found", {"topic": topic})
    shared_server.put(f"/v0/topics/{topic}")
    reply = shared_server.request(method, path_of(topic, sub), body)
    refused(reply, 404, "consumer_not_found", {"topic": topic, "consumer": "c"})


def test_put_and_list_on_absent_topics(shared_server: Server, topic: str) -> None:
    refused(shared_server.put(path_of(topic), {}), 404, "topic_not_found", {"topic": topic})
    refused(shared_server.get(f"/v0/topics/{topic}/consumers"), 404, "topic_not_found", {"topic": topic})
    refused(shared_server.get(f"/v0/topics/{topic}"), 404, "topic_not_found")


@pytest.mark.parametrize(
    ("sub", "allowed"),
    [
        ("/consumers", {"GET", "HEAD"}),
        ("/consumers/c", {"GET", "HEAD", "PUT", "DELETE"}),
        *((f"/consumers/c/{verb}", {"POST"}) for verb in ("fetch", *SETTLES, "pause", "resume", "reset")),
    ],
)
def test_wrong_methods(shared_server: Server, sub: str, allowed: set[str]) -> None:
    for method in {"GET", "PUT", "POST", "DELETE", "PATCH"} - allowed:
        reply = shared_server.request(method, f"/v0/topics/absent{sub}", b"{")
        refused(reply, 405, "method_not_allowed")
        assert set(reply.headers["allow"].split(", ")) == allowed | {"OPTIONS"}


@pytest.mark.parametrize(
    "sub",
    ["/consumers/", "/consumers/c/", "/consumers//fetch", "/consumers/c/nowhere", "/consumers/c/fetch/x"],
)
def test_unknown_paths(shared_server: Server, topic: str, sub: str) -> None:
    refused(shared_server.post(f"/v0/topics/{topic}{sub}", {}), 404, "not_found", {})


@pytest.mark.parametrize("sub", ["fetch", *SETTLES, "reset"])
def test_invalid_bodies(shared_server: Server, topic: str, sub: str) -> None:
    make(shared_server, topic, 1)
    path = path_of(topic, sub)
    for text in ("{", "[]", "null", "5", "", " "):
        refused(send_text(shared_server, "POST", path, text), 400, "invalid_request")
    refused(send_text(shared_server, "POST", path, "{}", "text/plain"), 415, "unsupported_media_type")


# -- get, list, delete -------------------------------------------------------------------------------------


def test_a_list_is_in_order_and_in_pages(shared_server: Server, topic: str) -> None:
    names = ["a", "b", "c.1", "c.2", "d"]
    for name in reversed(names):
        make(shared_server, topic, name=name)
    path = f"/v0/topics/{topic}/consumers"
    whole = ok(shared_server.get(path))
    assert set(whole) == {"topic", "consumers"}
    assert [row["consumer"] for row in whole["consumers"]] == names
    assert all(set(row) == STATE for row in whole["consumers"])
    seen: list[str] = []
    page = ok(shared_server.get(f"{path}?page_size=2"))
    while True:
        seen += [row["consumer"] for row in page["consumers"]]
        if "next_cursor" not in page:
            break
        page = ok(shared_server.get(f"{path}?page_size=2&cursor={page['next_cursor']}"))
    assert seen == names
    refused(shared_server.get(f"{path}?cursor=%21"), 400, "invalid_request")


def test_a_topic_without_consumers(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, 1)
    assert ok(shared_server.get(f"/v0/topics/{topic}/consumers")) == {"topic": topic, "consumers": []}


def test_delete(shared_server: Server, topic: str) -> None:
    make(shared_server, topic, 1)
    fetch(shared_server, topic)
    path = path_of(topic)
    assert ok(shared_server.delete(path)) == {"topic": topic, "consumer": "c", "deleted": True}
    assert ok(shared_server.delete(path)) == {"topic": topic, "consumer": "c", "deleted": False}
    refused(shared_server.get(path), 404, "consumer_not_found")
    ok(shared_server.put(path, {}), 201)
    assert fetch(shared_server, topic)[0]["deliveries"] == 1


def test_a_waiting_fetch_ends_when_its_consumer_is_deleted(shared_server: Server, topic: str) -> None:
    make(shared_server, topic)
    pending = waiting_fetch(shared_server, topic)
    ok(shared_server.delete(path_of(topic)))
    refused(pending.reply(), 404, "consumer_not_found", {"topic": topic, "consumer": "c"})
