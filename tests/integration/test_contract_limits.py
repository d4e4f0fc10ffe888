"""Goal: every cap holds exactly, deletes make room again, and environment variables set the caps.

Method: a server with small caps, emptied before each test; and one with invalid numbers, so that the defaults apply.
Clamped inputs are tested where they are used (reads, topics, pages); here are those that need many rows.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.contract import Json, fresh, ok, refused, state_of
from tests.support.server import Reply, Server, running, until

TOPICS_MAX = 6
BODY_MAX = 20_000
BYTES_MAX = 5_000
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {
        "TOPICS_MAX_TOPICS": str(TOPICS_MAX),
        "TOPICS_MAX_BODY_BYTES": str(BODY_MAX),
        "TOPICS_MAX_TOTAL_BYTES": str(BYTES_MAX),
    }
    with running(tmp_path_factory.mktemp("small"), environment=environment) as server:
        yield server


@pytest.fixture
def empty(small: Server) -> Server:
    for row in ok(small.get("/v0/topics?page_size=1000"))["topics"]:
        small.delete(f"/v0/topics/{row['topic']}")
    return small


# -- topics ------------------------------------------------------------------------------------------------


def test_a_cap_on_topics(empty: Server) -> None:
    names = [f"n{i}" for i in range(TOPICS_MAX)]
    for i, name in enumerate(names):
        ok(empty.put(f"/v0/topics/{name}") if i % 2 else empty.write(name, 1), 201)
    detail = {"limit": "max_topics", "max": TOPICS_MAX}
    refused(empty.put("/v0/topics/more"), 429, "throttled", detail)
    refused(empty.write("more", 1), 429, "throttled", detail)
    refused(empty.put("/v0/topics/.bad"), 400, "invalid_request")
    refused(empty.write("more", 1, create=False), 404, "topic_not_found")
    for name in names:  # existing topics may be changed
        ok(empty.put(f"/v0/topics/{name}", {"cap_records": 9}))
        ok(empty.write(name, 2))
    for name in ("more", "and-more"):
        ok(empty.delete(f"/v0/topics/{names.pop()}"))
        ok(empty.put(f"/v0/topics/{name}"), 201)
    refused(empty.put("/v0/topics/again"), 429, "throttled", detail)


def test_racing_creations_do_not_pass_the_cap(empty: Server) -> None:
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda i: empty.put(f"/v0/topics/race-{i}"), range(4 * TOPICS_MAX)))
    assert sorted(reply.status for reply in replies) == [201] * TOPICS_MAX + [429] * 3 * TOPICS_MAX
    assert len(ok(empty.get("/v0/topics"))["topics"]) == TOPICS_MAX


# -- bodies ------------------------------------------------------------------------------------------------


def padded(body: Json, size: int) -> bytes:
    """A valid body of exactly this many bytes."""
    text = json.dumps({**body, "padding": ""}).encode()
    return text.replace(b'"padding": ""', b'"padding": "' + b"x" * (size - len(text)) + b'"')


@pytest.mark.parametrize(
    ("method", "sub", "body"),
    [
        ("PUT", "", {}),
        ("POST", "", {"records": [{"data": 1}]}),
        ("POST", "/diff", {}),
        ("POST", "/delete", {"before_seq": 1}),
    ],
)
def test_a_cap_on_bodies(empty: Server, method: str, sub: str, body: Json) -> None:
    empty.put("/v0/topics/body")
    path = f"/v0/topics/body{sub}"
    ok(empty.request(method, path, padded(body, BODY_MAX), JSON))
    refused(empty.request(method, path, padded(body, BODY_MAX + 1), JSON), 413, "payload_too_large")
    # Before parsing, and after the check of the content type.
    refused(empty.request(method, path, b"{" * (BODY_MAX + 1), JSON), 413, "payload_too_large")
    refused(empty.request(method, path, b"{" * (BODY_MAX + 1)), 415, "unsupported_media_type")
    refused(empty.request(method, "/v0/topics/body/nowhere", b"{" * (BODY_MAX + 1)), 404, "not_found")


def test_the_cap_counts_uncompressed_bytes(empty: Server) -> None:
    headers = {**JSON, "Content-Encoding": "gzip"}
    body = {"records": [{"data": 1}]}
    ok(empty.request("POST", "/v0/topics/body", gzip.compress(padded(body, BODY_MAX)), headers), 201)
    for size in (BODY_MAX + 1, 100 * BODY_MAX):
        reply = empty.request("POST", "/v0/topics/body", gzip.compress(padded(body, size)), headers)
        refused(reply, 413, "payload_too_large")


def chunked(server: Server, path: str, body: bytes) -> Reply:
    """A chunked body, whose length is not declared."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head.encode())
        for i in range(0, len(body), 999):
            part = body[i : i + 999]
            connection.sendall(b"%x\r\n%b\r\n" % (len(part), part))
        connection.sendall(b"0\r\n\r\n")
        return read_reply(connection.makefile("rb"))


def read_reply(stream: object) -> Reply:
    status = int(stream.readline().split()[1])  # type: ignore[attr-defined]
    headers: dict[str, str] = {}
    while line := stream.readline().strip():  # type: ignore[attr-defined]
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    return Reply(status, headers, stream.read(int(headers["content-length"])))  # type: ignore[attr-defined]


def test_a_cap_on_bodies_in_chunks(empty: Server) -> None:
    body = {"records": [{"data": 1}]}
    ok(chunked(empty, "/v0/topics/body", padded(body, BODY_MAX)), 201)
    refused(chunked(empty, "/v0/topics/body", padded(body, BODY_MAX + 1)), 413, "payload_too_large")


@pytest.mark.parametrize("size", [2_000_000, 10**12])
def test_a_body_that_is_announced_too_large_is_not_waited_for(small: Server, size: int) -> None:
    with small.connect() as connection:
        head = f"POST /v0/topics/body HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
        connection.sendall(head.encode())
        refused(read_reply(connection.makefile("rb")), 413, "payload_too_large")


# -- bytes -------------------------------------------------------------------------------------------------


def write_bytes(server: Server, topic: str, size: int, **fields: object) -> Reply:
    return server.write(topic, "x" * (size - 2), **fields)


def test_a_cap_on_bytes(empty: Server) -> None:
    detail = {"limit": "max_total_bytes", "max": BYTES_MAX}
    for i in range(4):
        ok(write_bytes(empty, f"n{i}", 1000), 201)
    refused(write_bytes(empty, "n4", 1001), 429, "throttled", detail)
    refused(empty.get("/v0/topics/n4"), 404, "topic_not_found")  # the refused write created nothing
    ok(write_bytes(empty, "n4", 1000, idempotency_key="k"), 201)  # exactly at the cap
    refused(empty.write("n0", 1), 429, "throttled", detail)
    assert ok(write_bytes(empty, "n4", 1000, idempotency_key="k"))["deduped"]
    assert sum(state_of(empty, f"n{i}")["bytes"] for i in range(5)) == BYTES_MAX
    # Every way to remove a record frees its bytes.
    ok(empty.post("/v0/topics/n0/delete", {"before_seq": 2}))
    ok(write_bytes(empty, "n1", 1000))
    refused(empty.write("n0", 1), 429, "throttled", detail)
    ok(empty.delete("/v0/topics/n2"))
    ok(write_bytes(empty, "n0", 1000))
    refused(empty.write("n0", 1), 429, "throttled", detail)
    ok(empty.put("/v0/topics/n1", {"cap_records": 1}))
    ok(write_bytes(empty, "n3", 1000))
    refused(empty.write("n0", 1), 429, "throttled", detail)


def test_a_full_topic_comes_before_the_cap_on_bytes(empty: Server) -> None:
    empty.put("/v0/topics/full", {"cap_records": 1, "discard": "reject"})
    ok(write_bytes(empty, "full", BYTES_MAX))
    refused(empty.write("full", 1), 422, "topic_full")
    refused(empty.write("other", 1), 429, "throttled")


def test_racing_writes_do_not_pass_the_cap(empty: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda i: write_bytes(empty, f"n{i % 4}", 500), range(24)))
    assert sum(reply.status in (200, 201) for reply in replies) == BYTES_MAX // 500
    assert sum(reply.status == 429 for reply in replies) == 24 - BYTES_MAX // 500


# -- clamps that need many rows ----------------------------------------------------------------------------


def test_a_page_has_a_thousand_rows_at_most(shared_server: Server) -> None:
    name = fresh("rows")
    records = [{"data": i, "tag": f"{i:04}"} for i in range(1001)]
    ok(shared_server.post(f"/v0/topics/{name}?return_seqs=0", {"records": records}), 201)
    for member, path in (("tags", "tags?"), ("records", "last?tag=*&each=1&")):
        for size in ("1000", "1001", "99999999999999999999"):
            body = ok(shared_server.get(f"/v0/topics/{name}/{path}page_size={size}"))
            assert len(body[member]) == 1000
            rest = ok(shared_server.get(f"/v0/topics/{name}/{path}cursor={body['next_cursor']}"))
            assert len(rest[member]) == 1


# -- the environment ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def misconfigured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {
        "TOPICS_HOST": "127.0.0.1:0",
        "TOPICS_PORT": "1",  # ignored, because the host includes a port
        "TOPICS_WAL_SHARDS": "0",
        "TOPICS_MAX_TOPICS": "few",
        "TOPICS_MAX_BODY_BYTES": "1e3",
        "TOPICS_MAX_TOTAL_BYTES": "-5",
        "TOPICS_MAX_INFLIGHT_PER_KEY": "",
        "TOPICS_SEGMENT_MAX_EVENTS": "0",
        "TOPICS_SEGMENT_MAX_BYTES": " 64 MB",
        "TOPICS_SEGMENT_MAX_AGE_MS": "an hour",
        "TOPICS_MAX_BATCH_RECORDS": "x",
        "TOPICS_ALLOW_INSECURE_NO_AUTH": "perhaps",
        "TOPICS_PROBE_AUTH": "perhaps",
    }
    with running(tmp_path_factory.mktemp("misconfigured"), environment=environment) as server:
        yield server


def test_invalid_numbers_mean_the_default(misconfigured: Server) -> None:
    assert misconfigured.get("/readyz").status == 200
    assert set(misconfigured.children()) == {"shard 0", "front 0"}
    for i in range(10):
        ok(misconfigured.write(f"n{i}", "x" * 100_000), 201)


@pytest.mark.parametrize(("size", "is_taken"), [(67_108_864, True), (67_108_865, False)])
def test_the_default_cap_on_bodies(misconfigured: Server, size: int, is_taken: bool) -> None:
    with misconfigured.connect() as connection:
        head = (
            "POST /v0/topics/body HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
            f"Content-Length: {size}\r\n\r\n"
        )
        connection.sendall(head.encode())
        stream = connection.makefile("rb")
        if is_taken:
            assert stream.readline().startswith(b"HTTP/1.1 100 ")
        else:
            refused(read_reply(stream), 413, "payload_too_large")


def test_a_disconnected_client_frees_its_slots(start_server: Callable[..., Server]) -> None:
    server = start_server(environment={"TOPICS_API_KEYS": "secret", "TOPICS_MAX_INFLIGHT_PER_KEY": "3"})
    key = {"Authorization": "Bearer secret"}
    assert server.request("POST", "/v0/topics/t", {"records": [{"data": 1}]}, key).status == 201
    body = b'{"from_seq":1,"wait_ms":30000}'
    fast = b"POST /v0/topics/t/diff HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
    fast += b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    slow = fast + b"X-Odd: 1\r\n"  # a header that the fast path does not accept
    polls = [server.connect() for _ in range(3)]
    for connection, head in zip(polls, (fast, slow, slow)):
        connection.sendall(head + b"\r\n" + body)
    until(lambda: server.request("GET", "/v0/topics/t", headers=key).status == 429)
    for connection in polls:
        connection.close()
    # Before the polls would have ended by themselves.
    until(lambda: server.request("GET", "/v0/topics/t", headers=key).status == 200, 25)
