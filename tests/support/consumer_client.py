"""Client helpers for named consumers: they check whole answers."""

from __future__ import annotations

from typing import Any

from tests.support.contract import Json, Pending, ok
from tests.support.queue_client import NODE, seqs_of
from tests.support.server import Reply, Server, until

STATE = {
    "topic", "consumer", "config", "created_ts", "next_seq", "ack_floor", "delivered", "redelivered", "acked",
    "ack_pending", "in_flight", "dead_lettered", "given_up", "waiting", "lag_records", "lag_ms", "last_activity_ts",
    "paused", "paused_until_ts", "stalled", "tombstone",
}  # fmt: skip
SETTLES: dict[str, Json] = {"ack": {}, "nack": {}, "extend": {"lease_ms": 1000}, "term": {}}
COUNT_OF = {"ack": "acked", "nack": "nacked", "extend": "extended", "term": "termed"}


def path_of(topic: str, sub: str = "", name: str = "c") -> str:
    return f"/v0/topics/{topic}/consumers/{name}{sub and '/' + sub}"


def call(server: Server, topic: str, verb: str, name: str = "c", **body: Any) -> Reply:
    return server.post(path_of(topic, verb, name), {"node": NODE, **body})


def settle(server: Server, topic: str, verb: str, seqs: list[int], **body: Any) -> Json:
    return ok(call(server, topic, verb, seqs=seqs, **{**SETTLES[verb], **body}))


def look(server: Server, topic: str, name: str = "c") -> Json:
    state = ok(server.get(path_of(topic, name=name)))
    assert set(state) == STATE
    return state


def make(server: Server, topic: str, *data: Any, name: str = "c", **config: Any) -> Json:
    """Create a log with these records, and a consumer."""
    if data:
        assert server.write(topic, *data).status in (200, 201)
    else:
        assert server.put(f"/v0/topics/{topic}").status in (200, 201)
    return ok(server.put(path_of(topic, name=name), config), 201)


def fetch(server: Server, topic: str, max: int = 100, name: str = "c", **body: Any) -> list[Json]:
    """The records of a fetch; the whole answer is checked."""
    answer = ok(call(server, topic, "fetch", name, max=max, **body))
    assert set(answer) == {"topic", "consumer", "claimed", "count", "ready", "tombstone"}
    records: list[Json] = answer["claimed"]
    assert (answer["topic"], answer["consumer"], answer["count"]) == (topic, name, len(records))
    assert seqs_of(records) == sorted(set(seqs_of(records)))
    return records


def waiting_fetch(server: Server, topic: str, **body: Any) -> Pending:
    pending = Pending(server, "POST", path_of(topic, "fetch"), {"node": NODE, "wait_ms": 30_000, **body})
    until(lambda: look(server, topic)["waiting"] == 1)
    assert not pending.is_answered
    return pending
