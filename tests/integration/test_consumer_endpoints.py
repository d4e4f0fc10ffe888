"""Goal: access to queues and consumers over HTTP: scopes, paths and methods, and waiting claims.

Method: a server with a key for each scope; every key is tried on every route.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.contract import Pending, ok, refused
from tests.support.raw_http import RawClient
from tests.support.server import Reply, Server, running, until

KEYS = {
    "all": "k-all",
    "read": "k-read:read",
    "write": "k-write:write",
    "rw": "k-rw:rw",
    "delete": "k-delete:delete",
    "admin": "k-admin:admin",
    "team": "k-team::team.",
}
JSON = {"Content-Type": "application/json"}
SETTLE = {"node": "w", "seqs": [], "lease_ms": 500}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {"TOPICS_API_KEYS": ",".join(KEYS.values())}
    with running(tmp_path_factory.mktemp("guarded"), environment=environment) as server:
        yield server


def ask(server: Server, key: str, method: str, path: str, body: Any = None) -> Reply:
    return server.request(method, path, body, {"Authorization": f"Bearer {KEYS[key].partition(':')[0]}"})


NEEDS: list[tuple[str, str, str, Any]] = [
    ("rw", "POST", "claim", {"node": "w"}),
    ("write", "POST", "ack", SETTLE),
    ("write", "POST", "nack", SETTLE),
    ("write", "POST", "extend", SETTLE),
    ("read", "GET", "consumers", None),
    ("admin", "PUT", "consumers/c", {}),
    ("read", "GET", "consumers/c", None),
    ("delete", "DELETE", "consumers/other", None),
    ("rw", "POST", "consumers/c/fetch", {"node": "w"}),
    ("write", "POST", "consumers/c/ack", SETTLE),
    ("write", "POST", "consumers/c/nack", SETTLE),
    ("write", "POST", "consumers/c/extend", SETTLE),
    ("write", "POST", "consumers/c/term", SETTLE),
    ("admin", "POST", "consumers/c/pause", None),
    ("admin", "POST", "consumers/c/resume", None),
    ("admin", "POST", "consumers/c/reset", {"to": "start"}),
    ("", "PUT", "claim", None),
    ("", "POST", "consumers/c", None),
    ("", "GET", "consumers/c/fetch", None),
]


@pytest.mark.parametrize(("scope", "method", "path", "body"), NEEDS)
def test_every_scope_on_every_route(
    guarded: Server, topic: str, scope: str, method: str, path: str, body: Any
) -> None:
    ok(ask(guarded, "all", "PUT", f"/v0/topics/{topic}", {"type": "queue"}), 201)
    ok(ask(guarded, "all", "PUT", f"/v0/topics/{topic}/consumers/c"), 201)
    allowed = {"": {*KEYS} - {"team"}, "rw": {"all", "rw"}}.get(scope, {"all", scope})
    if scope in ("read", "write"):
        allowed = allowed | {"rw"}
    for key in {*KEYS} - {"team"}:
        reply = ask(guarded, key, method, f"/v0/topics/{topic}/{path}", body)
        if key not in allowed:
            refused(reply, 403, "forbidden", {})
        elif scope:
            ok(reply)
        else:
            refused(reply, 405, "method_not_allowed")
    refused(ask(guarded, "team", method, f"/v0/topics/{topic}/{path}", body), *WRONG_NAME[bool(scope)])


WRONG_NAME: dict[bool, tuple[int, str]] = {True: (403, "forbidden"), False: (405, "method_not_allowed")}


def test_dead_letters_stay_inside_the_prefixes(guarded: Server) -> None:
    ok(ask(guarded, "team", "PUT", "/v0/topics/team.a"), 201)
    path = "/v0/topics/team.a/consumers/c"
    refused(ask(guarded, "team", "PUT", path, {"dead_letter": "lost"}), 403, "forbidden", {"topic": "lost"})
    ok(ask(guarded, "team", "PUT", path, {"dead_letter": "team.lost"}), 201)


# -- paths -------------------------------------------------------------------------------------------------


def test_wrong_methods_say_which_are_right(shared_server: Server, topic: str) -> None:
    for path, allow in {
        "claim": "POST, OPTIONS",
        "consumers": "GET, HEAD, OPTIONS",
        "consumers/c": "PUT, GET, DELETE, HEAD, OPTIONS",
        "consumers/c/ack": "POST, OPTIONS",
    }.items():
        reply = shared_server.request("PATCH", f"/v0/topics/{topic}/{path}")
        refused(reply, 405, "method_not_allowed")
        assert reply.headers["allow"] == allow


@pytest.mark.parametrize(
    "path",
    [
        "claim/",
        "consumers/",
        "consumers//fetch",
        "consumers/c/",
        "consumers/c/fetch/",
        "consumers/c/d",
        "term",
    ],
)
def test_unknown_paths(shared_server: Server, topic: str, path: str) -> None:
    refused(shared_server.post(f"/v0/topics/{topic}/{path}", {"node": "w"}), 404, "not_found")


def test_names_of_consumers(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    base = f"/v0/topics/{topic}/consumers"
    for name in ("a%20b", "a%2Fb", "%FF", ".a", "a" * 256):
        refused(shared_server.put(f"{base}/{name}", {}), 400, "invalid_request")
        assert refused(shared_server.get(f"{base}/{name}"), 404, "consumer_not_found")["topic"] == topic
        assert not ok(shared_server.delete(f"{base}/{name}"))["deleted"]
    assert ok(shared_server.put(f"{base}/a%2Db"), 201)["consumer"] == "a-b"
    assert ok(shared_server.get(f"{base}/a-b"))["consumer"] == "a-b"
    refused(
        shared_server.put("/v0/topics/absent/consumers/c", {}), 404, "topic_not_found", {"topic": "absent"}
    )


def test_a_list_in_pages(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    base = f"/v0/topics/{topic}/consumers"
    names = sorted(f"c{i}" for i in range(7))
    for name in names:
        ok(shared_server.put(f"{base}/{name}"), 201)
    found, cursor = [], ""
    while True:
        page = ok(shared_server.get(f"{base}?page_size=3&cursor={cursor}"))
        found += [row["consumer"] for row in page["consumers"]]
        cursor = page.get("next_cursor", "")
        if not cursor:
            break
    assert found == names
    refused(shared_server.get(f"{base}?cursor=%21"), 400, "invalid_request")


def test_empty_bodies(shared_server: Server, topic: str) -> None:
    path = f"/v0/topics/{topic}"
    shared_server.put(path, {"type": "queue"})
    refused(shared_server.request("POST", f"{path}/claim"), 400, "invalid_request")
    refused(shared_server.request("POST", f"{path}/claim", b"", JSON), 400, "invalid_request")
    refused(shared_server.request("POST", f"{path}/claim", b"{}", {}), 415, "unsupported_media_type")
    refused(shared_server.request("POST", f"{path}/ack"), 415, "unsupported_media_type")
    refused(shared_server.request("POST", f"{path}/ack", b"", JSON), 400, "invalid_request")
    ok(shared_server.request("PUT", f"{path}/consumers/c"), 201)
    assert ok(shared_server.request("POST", f"{path}/consumers/c/pause"))["paused"]
    assert not ok(shared_server.request("POST", f"{path}/consumers/c/resume"))["paused"]


def test_a_consumer_may_be_idle_for_a_month(shared_server: Server, topic: str) -> None:
    """Its deadline is further away than the longest wait of the worker's loop."""
    shared_server.put(f"/v0/topics/{topic}")
    path = f"/v0/topics/{topic}/consumers/c"
    made = ok(shared_server.put(path, {"inactive_ttl_ms": 2**64 - 1}), 201)
    assert made["config"]["inactive_ttl_ms"] == 30 * 86_400_000
    before = shared_server.children()
    for _ in range(3):
        ok(shared_server.get(path))
    assert shared_server.children() == before


# -- waiting claims ----------------------------------------------------------------------------------------


def test_a_claim_waits_for_a_job(shared_server: Server, topic: str) -> None:
    path = f"/v0/topics/{topic}"
    shared_server.put(path, {"type": "queue"})
    claim = Pending(shared_server, "POST", f"{path}/claim", {"node": "w", "wait_ms": 30_000})
    fetch = Pending(shared_server, "POST", f"{path}/consumers/c/fetch", {"node": "w", "wait_ms": 30_000})
    refused(fetch.reply(), 404, "consumer_not_found", {"topic": topic, "consumer": "c"})
    ok(shared_server.put(f"{path}/consumers/c"), 201)
    fetch = Pending(shared_server, "POST", f"{path}/consumers/c/fetch", {"node": "w", "wait_ms": 30_000})
    until(lambda: ok(shared_server.get(f"{path}/consumers/c"))["waiting"])
    shared_server.write(topic, 1)
    assert [job["data"] for job in ok(claim.reply())["claimed"]] == [1]
    assert [job["data"] for job in ok(fetch.reply())["claimed"]] == [1]


def test_a_waiting_claim_ends_when_its_topic_is_deleted(shared_server: Server, topic: str) -> None:
    path = f"/v0/topics/{topic}"
    shared_server.put(path)
    ok(shared_server.put(f"{path}/consumers/c"), 201)
    fetch = Pending(shared_server, "POST", f"{path}/consumers/c/fetch", {"node": "w", "wait_ms": 30_000})
    until(lambda: ok(shared_server.get(f"{path}/consumers/c"))["waiting"])
    ok(shared_server.delete(path))
    refused(fetch.reply(), 404, "topic_not_found", {"topic": topic})


def test_a_stop_does_not_wait_for_claims(start_server: Callable[..., Server], topic: str) -> None:
    server = start_server()
    server.put(f"/v0/topics/{topic}")
    ok(server.put(f"/v0/topics/{topic}/consumers/c"), 201)
    path = f"/v0/topics/{topic}/consumers/c/fetch"
    fetch = Pending(server, "POST", path, {"node": "w", "wait_ms": 30_000})
    until(lambda: ok(server.get(f"/v0/topics/{topic}/consumers/c"))["waiting"])
    assert server.stop() == 0
    refused(fetch.reply(), 503, "shutting_down", {"outcome": "unknown"})


# -- clients that disconnect while they wait ---------------------------------------------------------------


def test_a_claim_whose_client_disconnected_leases_nothing(shared_server: Server, topic: str) -> None:
    server = shared_server
    assert server.put(f"/v0/topics/{topic}", {}).status == 201
    assert server.put(f"/v0/topics/{topic}/consumers/c", {"max_waiting": 2}).status == 201
    path = f"/v0/topics/{topic}/consumers/c"
    for node in ("gone-1", "gone-2"):
        body = b'{"node":"%b","wait_ms":30000}' % node.encode()
        head = f"POST {path}/fetch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client = RawClient(server)
        client.send(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: ok(server.get(path))["waiting"] > 0)
        client.close()
        until(lambda: ok(server.get(path))["waiting"] == 0)
    server.write(topic, 1)
    fetched = ok(server.post(f"{path}/fetch", {"node": "here"}))
    assert [(row["$seq"], row["deliveries"]) for row in fetched["claimed"]] == [(1, 1)]
