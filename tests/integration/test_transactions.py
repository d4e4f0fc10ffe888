"""Sink transactions over HTTP: bodies and errors of the contract, authorization, and a worker that is killed.

Goal: a producer that repeats every unanswered call finds each of its batches once and in order. Method: one shared
server for bodies and errors; one with keys; one whose shard is killed again and again while producers continue.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.contract import Json, ok, refused
from tests.support.length import pick
from tests.support.server import Reply, Server, until

UNKNOWN = "0123456789abcdef"


def path(topic: str, txn: str = "", action: str = "") -> str:
    return f"/v0/topics/{topic}/transactions" + (f"/{txn}/{action}" if txn else "")


def begin(server: Server, topic: str, batch: int = 1, producer: str = "p", **fields: Any) -> Json:
    return ok(server.post(path(topic), {"producer": producer, "batch": batch, **fields}))


def stage(server: Server, topic: str, txn: str, part: str, chunk: int, *data: Any, **fields: Any) -> Reply:
    body = {"part": part, "chunk": chunk, "records": [{"data": one} for one in data], **fields}
    return server.post(path(topic, txn, "stage"), body)


def commit(server: Server, topic: str, txn: str, *parts: tuple[str, int, int], **fields: Any) -> Reply:
    named = [{"part": part, "chunks": chunks, "records": records} for part, chunks, records in parts]
    return server.post(path(topic, txn, "commit"), {"parts": named, **fields})


def data_of(server: Server, topic: str) -> list[Any]:
    found: list[Any] = []
    from_seq = 0
    while True:
        page = ok(server.diff(topic, from_seq=from_seq, limit=1000))
        found += [record["data"] for record in page["records"]]
        if page["caught_up"]:
            return found
        from_seq = page["next_from_seq"]


def figure(server: Server, name: str) -> int:
    text = server.get("/v0/metrics").body.decode()
    (line,) = (line for line in text.splitlines() if line.startswith(f"topics_transaction{name} "))
    return int(line.split()[1])


# -- bodies ------------------------------------------------------------------------------------------------


def test_a_batch_from_begin_to_end(shared_server: Server, topic: str) -> None:
    begun = begin(shared_server, topic)
    txn = begun["txn"]
    assert begun == {
        "topic": topic, "txn": txn, "state": "open", "first_seq": None, "last_seq": None, "count": None,
    }  # fmt: skip
    assert begin(shared_server, topic) == begun
    staged = ok(stage(shared_server, topic, txn, "0-1", 0, 1, 2, node="n"))
    assert staged == {"topic": topic, "part": "0-1", "chunk": 0, "records": 2, "repeated": False}
    assert ok(stage(shared_server, topic, txn, "0-1", 0, 1, 2)) == staged | {"repeated": True}
    ok(stage(shared_server, topic, txn, "0-0", 0, 0))
    done = ok(commit(shared_server, topic, txn, ("0-0", 1, 1), ("0-1", 1, 2)))
    assert done == begun | {"state": "committed", "first_seq": 1, "last_seq": 3, "count": 3}
    assert ok(commit(shared_server, topic, txn)) == done
    assert begin(shared_server, topic) == done
    records = ok(shared_server.diff(topic))["records"]
    assert [(record["data"], record.get("$node")) for record in records] == [(0, None), (1, "n"), (2, "n")]
    refused(shared_server.post(path(topic, txn, "abort")), 409, "txn_committed")
    refused(stage(shared_server, topic, txn, "0-2", 0, 1), 409, "txn_committed")
    assert begin(shared_server, topic, 0)["state"] == "committed"


def test_a_large_batch_is_answered_before_its_end_when_asked_to(shared_server: Server, topic: str) -> None:
    txn = begin(shared_server, topic)["txn"]
    for chunk in range(3):
        ok(stage(shared_server, topic, txn, "a", chunk, *range(chunk * 5000, chunk * 5000 + 5000)))
    reply = commit(shared_server, topic, txn, ("a", 3, 15_000), wait_ms=0)
    assert reply.status in (200, 202)
    if reply.status == 202:
        body = ok(reply, 202)
        assert body["state"] == "committing" and 0 <= body["progress"] <= 1
    done = ok(commit(shared_server, topic, txn, ("a", 3, 15_000)))
    assert (done["first_seq"], done["last_seq"], done["count"]) == (1, 15_000, 15_000)
    assert data_of(shared_server, topic) == list(range(15_000))


def test_an_aborted_batch(shared_server: Server, topic: str) -> None:
    txn = begin(shared_server, topic)["txn"]
    ok(stage(shared_server, topic, txn, "a", 0, 1))
    body = ok(shared_server.post(path(topic, txn, "abort")))
    assert body == {"topic": topic, "txn": txn, "state": "aborted"}
    refused(shared_server.post(path(topic, txn, "abort")), 404, "txn_not_found")
    refused(commit(shared_server, topic, txn), 404, "txn_not_found")
    assert begin(shared_server, topic)["txn"] == txn
    error = refused(commit(shared_server, topic, txn, ("a", 1, 1)), 409, "txn_incomplete")
    assert error["parts"] == [{"part": "a", "chunks": 1, "missing": [0]}]


def test_watchers_and_queues_get_the_records(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"type": "queue"})
    txn = begin(shared_server, topic)["txn"]
    ok(stage(shared_server, topic, txn, "a", 0, "job"))
    ok(commit(shared_server, topic, txn, ("a", 1, 1)))
    claimed = ok(shared_server.post(f"/v0/topics/{topic}/claim", {"node": "w"}))
    assert [job["data"] for job in claimed["claimed"]] == ["job"]


def test_routers_copy_the_records(shared_server: Server, topic: str) -> None:
    ok(shared_server.put(f"/v0/routers/{topic}-copy", {"source": topic, "dest": f"{topic}-copy"}), 201)
    txn = begin(shared_server, topic)["txn"]
    ok(stage(shared_server, topic, txn, "a", 0, *range(10)))
    ok(commit(shared_server, topic, txn, ("a", 1, 10)))
    assert data_of(shared_server, f"{topic}-copy") == list(range(10))


@pytest.mark.parametrize(
    ("action", "body"),
    [
        ("", {}),
        ("", {"producer": "p"}),
        ("", {"producer": "", "batch": 1}),
        ("", {"producer": "x" * 257, "batch": 1}),
        ("", {"producer": "p", "batch": -1}),
        ("", {"producer": "p", "batch": 1 << 64}),
        ("", {"producer": "p", "batch": "1"}),
        ("stage", {"part": "a", "chunk": 0, "records": []}),
        ("stage", {"part": "a", "chunk": 0}),
        ("stage", {"part": "", "chunk": 0, "records": [{"data": 1}]}),
        ("stage", {"part": "a" * 129, "chunk": 0, "records": [{"data": 1}]}),
        ("stage", {"part": "a", "chunk": -1, "records": [{"data": 1}]}),
        ("stage", {"part": "a", "chunk": 0, "records": [{"tag": "x"}]}),
        ("stage", {"part": "a", "chunk": 0, "records": [{"data": 1, "tag": "x" * 257}]}),
        ("commit", {}),
        ("commit", {"parts": [{"part": "a"}]}),
        ("commit", {"parts": [{"part": "", "chunks": 1, "records": 1}]}),
        ("commit", {"parts": [{"part": "a", "chunks": 0, "records": 0}] * 2}),
    ],
)
def test_bad_bodies(shared_server: Server, topic: str, action: str, body: Json) -> None:
    txn = begin(shared_server, topic, 7)["txn"]
    target = path(topic, txn, action) if action else path(topic)
    refused(shared_server.post(target, body), 400, "invalid_request")


def test_unknown_topics_and_transactions(shared_server: Server, topic: str) -> None:
    refused(stage(shared_server, topic, UNKNOWN, "a", 0, 1), 404, "topic_not_found")
    refused(
        shared_server.post(path(topic), {"producer": "p", "batch": 1, "create": False}),
        404,
        "topic_not_found",
    )
    begin(shared_server, topic)
    for txn in (UNKNOWN, "x", "0123456789ABCDEF", "%ff"):
        refused(stage(shared_server, topic, txn, "a", 0, 1), 404, "txn_not_found")
        refused(commit(shared_server, topic, txn), 404, "txn_not_found")
        refused(shared_server.post(path(topic, txn, "abort")), 404, "txn_not_found")
    refused(shared_server.get(path(topic)), 405, "method_not_allowed")
    refused(shared_server.post(path(topic, UNKNOWN, "other")), 404, "not_found")
    refused(shared_server.post(f"/v0/topics/{topic}/transactions/{UNKNOWN}"), 404, "not_found")
    plain = {"Content-Type": "text/plain"}
    refused(shared_server.request("POST", path(topic), b"{}", plain), 415, "unsupported_media_type")


def test_a_full_topic(shared_server: Server, topic: str) -> None:
    ok(shared_server.put(f"/v0/topics/{topic}", {"cap_records": 2, "discard": "reject"}), 201)
    ok(shared_server.write(topic, 1))
    txn = begin(shared_server, topic)["txn"]
    ok(stage(shared_server, topic, txn, "a", 0, 1, 2))
    refused(commit(shared_server, topic, txn, ("a", 1, 2)), 422, "topic_full")
    ok(shared_server.post(f"/v0/topics/{topic}/delete", {"before_seq": 2}))
    assert ok(commit(shared_server, topic, txn, ("a", 1, 2)))["count"] == 2


# -- authorization -----------------------------------------------------------------------------------------


def test_scopes_and_prefixes(start_server: Callable[..., Server]) -> None:
    keys = "writer:write:team.,reader:read,boss"
    server = start_server(environment={"TOPICS_API_KEYS": keys, "TOPICS_TXN_MAX_BYTES": "2000"})
    reader, writer = server.with_key("reader"), server.with_key("writer")
    body = {"producer": "p", "batch": 1}
    refused(server.post(path("team.a"), body), 401, "unauthorized")
    refused(reader.post(path("team.a"), body), 403, "forbidden")
    refused(writer.post(path("other"), body), 403, "forbidden")
    for action in ("stage", "commit", "abort"):
        refused(reader.post(path("team.a", UNKNOWN, action), {}), 403, "forbidden")
        refused(writer.post(path("other", UNKNOWN, action), {}), 403, "forbidden")
    txn = begin(writer, "team.a")["txn"]
    error = refused(stage(writer, "team.a", txn, "a", 0, "x" * 2000), 429, "throttled")
    assert error == {"limit": "txn_max_bytes", "max": 2000}
    ok(stage(writer, "team.a", txn, "a", 0, "x"))
    ok(commit(writer, "team.a", txn, ("a", 1, 1)))


# -- kills -------------------------------------------------------------------------------------------------


class RetryingProducer:
    """A producer that repeats every call until it gets a definite answer."""

    def __init__(self, server: Server, topic: str, batches: int, records: int) -> None:
        self.server, self.topic, self.batches, self.records = server, topic, batches, records
        self.commits = threading.Event()  # set just before a commit
        self.problem: str | None = None

    @property
    def expected(self) -> list[Any]:
        batches = range(1, self.batches + 1)
        return [[batch, part, i] for batch in batches for part in "bac" for i in range(self.records)]

    def run(self) -> None:
        try:
            for batch in range(1, self.batches + 1):
                while not self.send(batch):
                    pass
        except Exception as error:
            self.problem = repr(error)

    def call(self, target: str, body: Json) -> Reply:
        give_up = time.monotonic() + 100
        while True:
            try:
                reply = self.server.post(target, body)
            except (OSError, http.client.HTTPException):
                reply = None
            if reply is not None and reply.status not in (429, 500, 503):
                return reply
            assert time.monotonic() < give_up, (target, reply)
            time.sleep(0.02)

    def send(self, batch: int) -> bool:
        """One attempt at a batch; False: it has to begin again."""
        begun = ok(self.call(path(self.topic), {"producer": "p", "batch": batch}))
        if begun["state"] == "committed":
            return True
        parts = []
        for part in "bac":
            records = [{"data": [batch, part, i]} for i in range(self.records)]
            body = {"part": part, "chunk": 0, "records": records}
            reply = self.call(path(self.topic, begun["txn"], "stage"), body)
            if reply.status in (404, 409):
                return False
            assert reply.status == 200, reply.body
            parts.append({"part": part, "chunks": 1, "records": self.records})
        self.commits.set()
        while True:
            reply = self.call(path(self.topic, begun["txn"], "commit"), {"parts": parts, "wait_ms": 5000})
            if reply.status != 202:
                assert reply.status in (200, 404), reply.body
                return reply.status == 200


def test_a_shard_that_is_killed_while_it_commits(start_server: Callable[..., Server]) -> None:
    server = start_server(environment={"TOPICS_WAL_SHARDS": "1"})
    ok(server.put("/v0/topics/small", {"durability": "fsync"}), 201)
    ok(server.put("/v0/topics/large", {"durability": "disk"}), 201)
    producers = [
        RetryingProducer(server, "small", pick(short=150, long=400), 3),
        RetryingProducer(server, "large", 3, 4000),
    ]
    threads = [threading.Thread(target=producer.run) for producer in producers]
    for thread in threads:
        thread.start()
    for delay_ms in (3, 20, 60):
        commits = producers[1].commits
        commits.clear()
        if not until(lambda commits=commits: commits.is_set() or not threads[1].is_alive()):  # type: ignore[misc]
            break
        time.sleep(delay_ms / 1000)
        pid = server.pid("shard 0")
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: server.children().get("shard 0") not in (None, pid))  # type: ignore[misc]
    for thread in threads:
        thread.join()
    assert [producer.problem for producer in producers] == [None, None]
    for producer in producers:
        assert data_of(server, producer.topic) == producer.expected
    until(lambda: not list(server.data_dir.glob("topics/*/txn-*")))


def test_a_stop_keeps_open_transactions(start_server: Callable[..., Server]) -> None:
    server = start_server(environment={"TOPICS_WAL_SHARDS": "1"})
    txn = begin(server, "t")["txn"]
    ok(stage(server, "t", txn, "a", 0, 1, 2))
    assert server.stop() == 0
    server.start()
    assert begin(server, "t")["state"] == "open"
    assert ok(stage(server, "t", txn, "a", 0, 1, 2))["repeated"]
    assert figure(server, "s_open") == 1 and figure(server, "_bytes_staged") > 0
    assert server.stop() == 0
    server.environment = {"TOPICS_WAL_SHARDS": "3"}  # so that another shard owns the topic
    server.start()
    assert ok(commit(server, "t", txn, ("a", 1, 2)))["count"] == 2
    assert data_of(server, "t") == [1, 2]
    assert until(lambda: figure(server, "_bytes_staged") == 0), "its file is removed once the end is synced"
    assert (figure(server, "s_open"), figure(server, "s_committed_total")) == (0, 1)


def test_a_body_that_is_large(shared_server: Server, topic: str) -> None:
    """The limit is that of a write."""
    txn = begin(shared_server, topic)["txn"]
    records = [{"data": "x" * 1_000_000} for _ in range(12)]
    body = json.dumps({"part": "a", "chunk": 0, "records": records}).encode()
    headers = {"Content-Type": "application/json"}
    ok(shared_server.request("POST", path(topic, txn, "stage"), body, headers))
    ok(commit(shared_server, topic, txn, ("a", 1, 12)))
    assert ok(shared_server.get(f"/v0/topics/{topic}"))["count"] == 12
