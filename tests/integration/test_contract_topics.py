"""Goal: topics are created, changed, shown, listed and deleted as the contract says, with every field of a config.

Method: whole answers are compared, except `performance`; times are compared with bounds.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.contract import DEFAULT_CONFIG, U64_MAX, Json, data_of, fresh, ok, poll, refused, state_of
from tests.support.server import Server, until

# -- config ------------------------------------------------------------------------------------------------


def put(server: Server, topic: str, status: int = 200, **config: Any) -> Json:
    body = ok(server.put(f"/v0/topics/{topic}", config), status)
    assert set(body) == {"topic", "created", "config"}
    assert (body["topic"], body["created"]) == (topic, status == 201)
    return dict(body["config"])


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({}, {}),
        ({"type": "log"}, {}),
        ({"type": "queue"}, {"type": "queue"}),
        ({"ttl_ms": 0}, {}),
        ({"ttl_ms": U64_MAX}, {"ttl_ms": U64_MAX}),
        ({"cap_records": 5}, {"cap_records": 5}),
        ({"cap_records": U64_MAX}, {"cap_records": U64_MAX}),
        ({"cap_bytes": 5}, {"cap_bytes": 5}),
        ({"cap_bytes": U64_MAX}, {"cap_bytes": U64_MAX}),
        ({"discard": "old"}, {}),
        ({"discard": "reject"}, {"discard": "reject"}),
        ({"durable": False}, {}),
        ({"durable": True}, {"durable": True, "durability": "fsync"}),
        ({"durability": "ephemeral"}, {"durability": "ephemeral"}),
        ({"durability": "memory"}, {"durability": "memory"}),
        ({"durability": "disk"}, {}),
        ({"durability": "fsync"}, {"durable": True, "durability": "fsync"}),
        ({"durability": "memory", "durable": True}, {"durability": "memory"}),
        ({"durability": "fsync", "durable": False}, {"durable": True, "durability": "fsync"}),
        ({"durability": None, "durable": True}, {"durable": True, "durability": "fsync"}),
        ({"priority": 0}, {"priority": 0}),
        ({"priority": 5000}, {"priority": 5000}),
        ({"priority": None}, {}),
        ({"auto_priority": False}, {"auto_priority": False}),
        ({"auto_create": False}, {"auto_create": False}),
        ({"idempotency_window_ms": 0}, {"idempotency_window_ms": 0}),
        ({"idempotency_window_ms": U64_MAX}, {"idempotency_window_ms": U64_MAX}),
        ({"dedupe_node": False}, {"dedupe_node": False}),
        ({"lease_ms": 0}, {"lease_ms": 100}),
        ({"lease_ms": 99}, {"lease_ms": 100}),
        ({"lease_ms": 100}, {"lease_ms": 100}),
        ({"lease_ms": 86_400_000}, {"lease_ms": 86_400_000}),
        ({"lease_ms": 86_400_001}, {"lease_ms": 86_400_000}),
        ({"lease_ms": U64_MAX}, {"lease_ms": 86_400_000}),
        ({"claim_jitter_ms": 5000}, {"claim_jitter_ms": 5000}),
        ({"claim_jitter_ms": 5001}, {"claim_jitter_ms": 5000}),
        ({"claim_jitter_ms": U64_MAX}, {"claim_jitter_ms": 5000}),
        ({"max_deliveries": 7}, {"max_deliveries": 7}),
        ({"max_deliveries": U64_MAX}, {"max_deliveries": U64_MAX}),
        ({"dead_letter": "elsewhere"}, {"dead_letter": "elsewhere"}),
        ({"leases_durable": True}, {"leases_durable": True}),
        ({"cap_per_tag": 3}, {"cap_per_tag": 3}),
        ({"max_record_bytes": 9}, {"max_record_bytes": 9}),
    ],
)
@pytest.mark.parametrize("way", ["put", "update", "write"])
def test_every_field_of_a_config(
    shared_server: Server, topic: str, given: Json, stored: Json, way: str
) -> None:
    """Set by a PUT that creates, by one that updates, and by a write that creates."""
    expected = {**DEFAULT_CONFIG, **stored}
    if way == "write":
        created = ok(shared_server.write(topic, 1, config=given, create=True), 201)
        assert created["created"]
    else:
        if way == "update":
            put(
                shared_server, topic, 201, type=expected["type"], priority=3, cap_records=1, dedupe_node=False
            )
        assert put(shared_server, topic, 201 if way == "put" else 200, **given) == expected
    assert state_of(shared_server, topic)["config"] == expected


def test_dead_letter_of_a_queue_is_another_topic(shared_server: Server, topic: str) -> None:
    reply = shared_server.put(f"/v0/topics/{topic}", {"type": "queue", "dead_letter": topic})
    refused(reply, 400, "invalid_request")
    reply = shared_server.write(topic, 1, config={"type": "queue", "dead_letter": topic})
    refused(reply, 400, "invalid_request")
    put(shared_server, topic, 201, dead_letter=topic)  # has no effect on a log


# -- PUT ---------------------------------------------------------------------------------------------------


def test_put_creates_once(shared_server: Server, topic: str) -> None:
    assert put(shared_server, topic, 201, ttl_ms=60_000) == {**DEFAULT_CONFIG, "ttl_ms": 60_000}
    assert put(shared_server, topic, ttl_ms=60_000) == {**DEFAULT_CONFIG, "ttl_ms": 60_000}
    assert put(shared_server, topic, cap_records=5) == {**DEFAULT_CONFIG, "cap_records": 5}
    assert put(shared_server, topic) == DEFAULT_CONFIG


@pytest.mark.parametrize(("old", "new"), [("log", "queue"), ("queue", "log")])
def test_the_type_is_fixed(shared_server: Server, topic: str, old: str, new: str) -> None:
    put(shared_server, topic, 201, type=old, cap_records=4)
    detail = {"topic": topic, "existing_type": old, "requested_type": new}
    reply = shared_server.put(f"/v0/topics/{topic}", {"type": new})
    refused(reply, 409, "topic_exists_incompatible", detail)
    if old == "queue":  # a body without a type means a log
        refused(shared_server.put(f"/v0/topics/{topic}", {}), 409, "topic_exists_incompatible", detail)
        refused(shared_server.put(f"/v0/topics/{topic}"), 409, "topic_exists_incompatible", detail)
    assert state_of(shared_server, topic)["config"]["cap_records"] == 4
    put(shared_server, topic, type=old)


def test_tighter_caps_act_at_once_and_looser_ones_restore_nothing(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, *range(10))
    put(shared_server, topic, cap_records=4)
    state = state_of(shared_server, topic)
    assert (state["head_seq"], state["earliest_seq"], state["count"], state["bytes"]) == (10, 7, 4, 4)
    put(shared_server, topic, cap_bytes=2)
    assert data_of(shared_server, topic, from_seq=6) == [8, 9]
    put(shared_server, topic)
    assert data_of(shared_server, topic) == [8, 9]


def test_a_tighter_ttl_acts_at_once(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, 1, 2)

    def is_empty() -> bool:
        put(shared_server, topic, ttl_ms=1)
        return bool(state_of(shared_server, topic)["count"] == 0)

    until(is_empty)
    put(shared_server, topic)
    assert data_of(shared_server, topic, from_seq=2) == []
    assert shared_server.diff(topic).json["tombstone"]["reason"] == "ttl"


def test_a_changed_durability_holds_from_then_on(shared_server: Server, topic: str) -> None:
    for durability in ("ephemeral", "fsync", "memory", "disk"):
        put(shared_server, topic, 201 if durability == "ephemeral" else 200, durability=durability)
        reply = shared_server.write(topic, durability)
        assert (reply.json["performance"]["fsync_ms"] > 0) == (durability == "fsync")
    assert data_of(shared_server, topic) == ["ephemeral", "fsync", "memory", "disk"]


# -- GET ---------------------------------------------------------------------------------------------------


def test_the_state_of_a_topic(shared_server: Server, topic: str) -> None:
    refused(shared_server.get(f"/v0/topics/{topic}"), 404, "topic_not_found", {"topic": topic})
    put(shared_server, topic, 201)
    empty = {
        "topic": topic,
        "type": "log",
        "head_seq": 0,
        "earliest_seq": 1,
        "next_seq": 1,
        "count": 0,
        "bytes": 0,
        "config": DEFAULT_CONFIG,
        "effective_priority": 0,
        "last_write_ts": None,
        "last_read_ts": None,
    }
    empty["epoch"] = state_of(shared_server, topic)["epoch"]
    assert state_of(shared_server, topic) == empty
    shared_server.write(topic, "a", "bc", "def")
    shared_server.post(f"/v0/topics/{topic}/delete", {"seqs": [1]})
    state = state_of(shared_server, topic)
    written = state["last_write_ts"]
    assert abs(written - time.time_ns() // 1_000_000) < 5_000
    assert state == {
        **empty, "head_seq": 3, "earliest_seq": 2, "next_seq": 4, "count": 2, "bytes": 9, "last_write_ts": written,
    }  # fmt: skip
    shared_server.post(f"/v0/topics/{topic}/delete", {"before_seq": 99})
    state = state_of(shared_server, topic)
    assert (state["earliest_seq"], state["count"], state["bytes"]) == (4, 0, 0)


def test_a_queue_shows_its_jobs(shared_server: Server, topic: str) -> None:
    put(shared_server, topic, 201, type="queue")
    assert state_of(shared_server, topic)["queue"] == {"ready": 0, "in_flight": 0, "dead_lettered": 0}
    shared_server.write(topic, 1, 2)
    state = state_of(shared_server, topic)
    assert (state["type"], state["queue"]) == ("queue", {"ready": 2, "in_flight": 0, "dead_lettered": 0})


@pytest.mark.parametrize(
    ("query", "touches"), [("", 1), ("?touch=true", 1), ("?touch=false", 0), ("?touch=0", 0), ("?touch=x", 1)]
)
def test_touch(shared_server: Server, topic: str, query: str, touches: int) -> None:
    put(shared_server, topic, 201)
    shared_server.get(f"/v0/topics/{topic}{query}")
    assert (state_of(shared_server, topic)["last_read_ts"] is not None) == bool(touches)


def test_a_diff_counts_as_consumption(shared_server: Server, topic: str) -> None:
    put(shared_server, topic, 201)
    shared_server.diff(topic)
    state = state_of(shared_server, topic)
    assert state["last_read_ts"] > 0
    assert 490 <= state["effective_priority"] <= 500


@pytest.mark.parametrize(
    ("config", "unread", "read"),
    [
        ({}, 0, 500),
        ({"auto_priority": False}, 0, 0),
        ({"priority": 0}, 0, 0),
        ({"priority": 7}, 7, 7),
        ({"priority": 1000}, 1000, 1000),
        ({"priority": 1001}, 1000, 1000),
        ({"priority": 2**31 - 1}, 1000, 1000),
        ({"priority": -(2**31)}, -1000, -1000),
    ],
)
def test_effective_priority(shared_server: Server, topic: str, config: Json, unread: int, read: int) -> None:
    put(shared_server, topic, 201, **config)
    assert state_of(shared_server, topic)["effective_priority"] == unread
    found = ok(shared_server.get(f"/v0/topics/{topic}"))["effective_priority"]
    assert isinstance(found, int)
    assert read - 10 <= found <= read


# -- list --------------------------------------------------------------------------------------------------


def test_rows_of_a_list(shared_server: Server, topic: str) -> None:
    one, two, three, jobs = (f"{topic}-{name}" for name in ("a", "b", "c", "d"))
    put(shared_server, two, 201, durability="fsync", priority=9)
    put(shared_server, jobs, 201, type="queue", priority=1)
    shared_server.write(jobs, 1, 2, 3)
    shared_server.post(f"/v0/topics/{jobs}/claim", {"node": "n"})
    put(shared_server, three, 201, durability="memory")
    shared_server.write(one, "x", "y")
    shared_server.post(f"/v0/topics/{one}/delete", {"before_seq": 2})
    body = ok(shared_server.get(f"/v0/topics?prefix={topic}-"))
    rows = [
        (one, 2, 2, 1, 3, False, 0, "log", "disk"),
        (two, 0, 1, 0, 0, True, 9, "log", "fsync"),
        (three, 0, 1, 0, 0, False, 0, "log", "memory"),
        (jobs, 3, 1, 3, 3, False, 1, "queue", "disk", 2),
    ]
    names = ("topic", "head_seq", "earliest_seq", "count", "bytes", "durable", "effective_priority")
    names += ("type", "durability", "ready")
    assert body == {"topics": [dict(zip(names, row)) for row in rows]}


def test_a_list_touches_when_it_is_asked_to(shared_server: Server, topic: str) -> None:
    put(shared_server, topic, 201)
    for query, touches in (("", False), ("&touch=false", False), ("&touch=maybe", False), ("&touch=1", True)):
        shared_server.get(f"/v0/topics?prefix={topic}{query}")
        assert (state_of(shared_server, topic)["last_read_ts"] is not None) == touches


@pytest.mark.parametrize("prefix", ["%2e", "no-such-prefix", "%C3%A9", "a%20b", "%00", "z" * 300])
def test_a_prefix_without_topics(shared_server: Server, prefix: str) -> None:
    assert ok(shared_server.get(f"/v0/topics?prefix={prefix}")) == {"topics": []}


# -- DELETE ------------------------------------------------------------------------------------------------


def test_deleting_a_topic(shared_server: Server, topic: str) -> None:
    path = f"/v0/topics/{topic}"
    absent = {"topic": topic, "deleted": False, "routers_removed": []}
    assert ok(shared_server.delete(path)) == absent
    shared_server.write(topic, 1, 2, idempotency_key="k")
    assert ok(shared_server.delete(path)) == {**absent, "deleted": True}
    assert ok(shared_server.delete(path)) == absent
    refused(shared_server.get(path), 404, "topic_not_found")
    refused(shared_server.diff(topic), 404, "topic_not_found")


@pytest.mark.parametrize("query", ["if_empty=true", "if_empty=1"])
def test_if_empty(shared_server: Server, topic: str, query: str) -> None:
    path = f"/v0/topics/{topic}?{query}"
    assert not ok(shared_server.delete(path))["deleted"]
    shared_server.write(topic, 1, 2, 3)
    shared_server.post(f"/v0/topics/{topic}/delete", {"seqs": [2]})
    refused(shared_server.delete(path), 409, "topic_not_empty", {"topic": topic, "count": 2})
    assert data_of(shared_server, topic) == [1, 3]
    shared_server.post(f"/v0/topics/{topic}/delete", {"before_seq": 9})
    assert ok(shared_server.delete(path))["deleted"]


@pytest.mark.parametrize("query", ["if_empty=false", "if_empty=0", "if_empty=", "if_empty=yes", ""])
def test_without_if_empty(shared_server: Server, topic: str, query: str) -> None:
    shared_server.write(topic, 1)
    assert ok(shared_server.delete(f"/v0/topics/{topic}?{query}"))["deleted"]


def test_a_later_topic_of_the_name_is_a_new_one(shared_server: Server, topic: str) -> None:
    put(shared_server, topic, 201, cap_records=2, type="queue")
    shared_server.post(f"/v0/topics/{topic}", {"records": [{"data": 1, "tag": "a"}], "idempotency_key": "k"})
    shared_server.delete(f"/v0/topics/{topic}")
    again = ok(shared_server.write(topic, 2, idempotency_key="k"), 201)
    assert (again["first_seq"], again["deduped"], again["created"]) == (1, False, True)
    assert state_of(shared_server, topic)["config"] == DEFAULT_CONFIG
    assert ok(shared_server.get(f"/v0/topics/{topic}/tags"))["tags"] == []


def test_a_topic_deleted_under_a_long_poll(shared_server: Server) -> None:
    for recreated in (False, True):
        name = fresh()
        put(shared_server, name, 201)
        waiting = poll(shared_server, name)
        shared_server.delete(f"/v0/topics/{name}")
        if recreated:
            shared_server.write(name, "another topic")
        refused(waiting.reply(), 404, "topic_not_found", {"topic": name})
