"""Goal: the `traceparent` of a write is delivered with its records: by diff, stream, WebSocket, claim, copy and dead letter.

Method: a real server; the same record is read in every way.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.contract import ok, records_of
from tests.support.server import Server
from tests.support.sse_client import open_stream, watch

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
META = {"traceparent": PARENT}


def write(server: Server, topic: str, **fields: Any) -> None:
    body = {"records": [{"data": 1, **fields}]}
    assert server.post(f"/v0/topics/{topic}", body, traceparent=PARENT).status in (200, 201)


def test_read_and_watched(shared_server: Server, topic: str) -> None:
    write(shared_server, topic)
    (record,) = records_of(shared_server, topic)
    assert record["meta"] == META
    stream = open_stream(shared_server, watch(shared_server, topic)["stream_url"])
    try:
        (frame,) = stream.until_records(1)
    finally:
        stream.close()
    assert [record["meta"] for record in frame.data["records"]] == [META]


def test_claimed_and_dead_lettered(shared_server: Server, topic: str) -> None:
    config = {"type": "queue", "max_deliveries": 1, "dead_letter": f"{topic}.dead"}
    ok(shared_server.put(f"/v0/topics/{topic}", config), 201)
    ok(shared_server.put(f"/v0/topics/{topic}.dead"), 201)
    write(shared_server, topic)
    (job,) = ok(shared_server.post(f"/v0/topics/{topic}/claim", {"node": "w"}))["claimed"]
    assert job["meta"] == META
    ok(shared_server.post(f"/v0/topics/{topic}/nack", {"node": "w", "seqs": [job["$seq"]]}))
    ok(shared_server.post(f"/v0/topics/{topic}/claim", {"node": "w"}))
    (dead,) = ok(shared_server.post(f"/v0/topics/{topic}.dead/diff", {"wait_ms": 30_000}))["records"]
    assert dead["meta"]["traceparent"] == PARENT
    assert dead["meta"]["$dead_letter_from"] == topic


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
def test_forwarded(shared_server: Server, topic: str, guarantee: str) -> None:
    rule = {"source": topic, "dest": f"{topic}.copy", "guarantee": guarantee}
    ok(shared_server.put(f"/v0/routers/{topic}", rule), 201)
    write(shared_server, topic, meta={"own": 1})
    (copy,) = records_of(shared_server, f"{topic}.copy")
    assert copy["meta"] | {"own": 1, **META} == copy["meta"]


def test_malformed_headers_are_ignored(shared_server: Server, topic: str) -> None:
    for header in ("00-1-2-01", PARENT.upper(), f"{PARENT}, {PARENT}", "x" * 5000):
        reply = shared_server.post(f"/v0/topics/{topic}", {"records": [{"data": 1}]}, traceparent=header)
        assert reply.status in (200, 201)
    assert not any("meta" in record for record in records_of(shared_server, topic))
