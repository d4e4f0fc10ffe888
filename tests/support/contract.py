"""Helpers of the contract tests: they check whole bodies and whole errors, and handle requests that stay open."""

from __future__ import annotations

import http.client
import itertools
import json
from collections.abc import Mapping
from typing import Any

from tests.support.server import Reply, Server, readable

Json = dict[str, Any]

DEFAULT_CONFIG: Json = {
    "type": "log",
    "ttl_ms": 0,
    "cap_records": 0,
    "cap_bytes": 0,
    "discard": "old",
    "durable": False,
    "durability": "disk",
    "priority": None,
    "auto_priority": True,
    "auto_create": True,
    "idempotency_window_ms": 120_000,
    "dedupe_node": True,
    "lease_ms": 30_000,
    "claim_jitter_ms": 0,
    "max_deliveries": 0,
    "dead_letter": None,
    "leases_durable": False,
}

U32_MAX, U64_MAX = 2**32 - 1, 2**64 - 1

_numbers = itertools.count(1)


def fresh(prefix: str = "c") -> str:
    """A topic name that is unique in this process."""
    return f"{prefix}-{next(_numbers)}"


def ok(reply: Reply, status: int = 200) -> Json:
    """The body of a success without `performance`, which must be present and consist of numbers."""
    assert reply.status == status, (reply.status, reply.body[:500])
    assert reply.headers["content-type"] == "application/json"
    body: Json = reply.json
    assert "error" not in body
    performance = body.pop("performance")
    assert is_number(performance["server_total_ms"])
    assert all(is_number(value) for value in performance.values())
    return body


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def refused(reply: Reply, status: int, code: str, detail: Json | None = None) -> Json:
    """The detail of an error, after a check of the whole error body. If `detail` is given it must be complete."""
    assert reply.status == status, (reply.status, reply.body[:500])
    assert reply.headers["content-type"] == "application/json"
    assert list(reply.json) == ["error"]
    error: Json = reply.json["error"]
    assert {"code", "message"} <= set(error) <= {"code", "message", "detail"}
    assert error["code"] == code
    assert isinstance(error["message"], str)
    assert error["message"].strip()
    found: Json = error.get("detail", {})
    assert isinstance(found, dict)
    assert reply.headers.get("retry-after") == ("1" if status in (429, 503) else None)
    if detail is not None:
        assert found == detail
    return found


def send_text(
    server: Server, method: str, path: str, text: str | bytes, content_type: str = "application/json"
) -> Reply:
    """Send a body exactly as given."""
    body = text.encode() if isinstance(text, str) else text
    return server.request(method, path, body, {"Content-Type": content_type})


def records_of(server: Server, topic: str, **fields: Any) -> list[Json]:
    return list(ok(server.diff(topic, **fields))["records"])


def check_lease(server: Server, topic: str, deadline: int, lease_ms: int) -> None:
    """Check that a lease of this length was given after the topic's first record was written. Writes a record to
    learn the shard's current time: after a jump of the wall clock (the machine was suspended) the shard's clock
    follows only slowly.
    """
    now = ok(server.write(topic, "now"))["last_seq"]
    (first,), (last,) = records_of(server, topic, limit=1), records_of(server, topic, from_seq=now - 1)
    assert first["$ts"] <= deadline - lease_ms <= last["$ts"]


def data_of(server: Server, topic: str, **fields: Any) -> list[Any]:
    return [record["data"] for record in records_of(server, topic, **fields)]


def state_of(server: Server, topic: str) -> Json:
    return ok(server.get(f"/v0/topics/{topic}?touch=false"))


class Pending:
    """A request that was sent; its answer is read later."""

    def __init__(
        self,
        server: Server,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 40.0,
    ) -> None:
        sent = {"Content-Type": "application/json", **(headers or {})}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        self._connection = http.client.HTTPConnection(server.host.strip("[]"), server.port, timeout=timeout_s)
        self._connection.request(method, path, data, sent)

    @property
    def is_answered(self) -> bool:
        return readable(self._connection.sock, 0)

    def reply(self) -> Reply:
        try:
            response = self._connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, headers, response.read())
        finally:
            self._connection.close()


def poll(server: Server, topic: str, **fields: Any) -> Pending:
    """A long poll that has reached its topic and is waiting there."""
    pending = Pending(server, "POST", f"/v0/topics/{topic}/diff", {"wait_ms": 30_000, **fields})
    # The front handles connections in the order in which their bytes arrived, so an answer to a later request shows
    # that the poll has arrived.
    for _ in range(2):
        server.get(f"/v0/topics/{topic}?touch=false")
    assert not pending.is_answered
    return pending


def one_record(members: str) -> str:
    """The JSON text of a write with one record, whose members are given verbatim."""
    return '{"records":[{' + members + "}]}"
