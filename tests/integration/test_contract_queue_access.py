"""Goal: authorization for queues and consumers: every scope on every call, prefixes; a key in the query is not accepted.

Method: one server with a key for each scope and pair of scopes; each call is tried with every key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.contract import fresh, ok, refused
from tests.support.server import Reply, Server, running

SCOPES = ["read", "write", "delete", "admin", "read+write", "write+delete+admin", "read+delete+admin"]
ENTRIES = ["k-all", *(f"k-{scopes}:{scopes}" for scopes in SCOPES), "k-team::team."]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {"TOPICS_API_KEYS": ",".join(ENTRIES)}
    with running(tmp_path_factory.mktemp("guarded"), environment=environment) as server:
        yield server


def ask(server: Server, key: str, method: str, path: str, body: Any = None) -> Reply:
    return server.with_key(f"k-{key}").request(method, path, body)


SETTLE = {"node": "w", "seqs": []}
NEEDS: list[tuple[str, str, str, Any]] = [
    ("read+write", "POST", "/claim", {"node": "w"}),
    ("write", "POST", "/ack", SETTLE),
    ("write", "POST", "/nack", SETTLE),
    ("write", "POST", "/extend", {**SETTLE, "lease_ms": 1000}),
    ("read", "GET", "/consumers", None),
    ("read", "GET", "/consumers/c", None),
    ("admin", "PUT", "/consumers/c", {}),
    ("delete", "DELETE", "/consumers/absent", None),
    ("read+write", "POST", "/consumers/c/fetch", {"node": "w"}),
    ("write", "POST", "/consumers/c/ack", SETTLE),
    ("write", "POST", "/consumers/c/nack", SETTLE),
    ("write", "POST", "/consumers/c/extend", {**SETTLE, "lease_ms": 1000}),
    ("write", "POST", "/consumers/c/term", SETTLE),
    ("admin", "POST", "/consumers/c/pause", {}),
    ("admin", "POST", "/consumers/c/resume", {}),
    ("admin", "POST", "/consumers/c/reset", {"to": "end"}),
]


def make(server: Server, name: str) -> None:
    assert ask(server, "all", "PUT", f"/v0/topics/{name}", {"type": "queue"}).status in (200, 201)
    assert ask(server, "all", "PUT", f"/v0/topics/{name}/consumers/c", {}).status in (200, 201)


@pytest.mark.parametrize(("needs", "method", "sub", "body"), NEEDS)
@pytest.mark.parametrize("key", ["all", *SCOPES])
def test_every_scope_on_every_call(
    guarded: Server, topic: str, key: str, needs: str, method: str, sub: str, body: Any
) -> None:
    make(guarded, topic)
    reply = ask(guarded, key, method, f"/v0/topics/{topic}{sub}", body)
    if key == "all" or set(needs.split("+")) <= set(key.split("+")):
        ok(reply)
    else:
        refused(reply, 403, "forbidden", {})


@pytest.mark.parametrize(("needs", "method", "sub", "body"), NEEDS)
def test_the_scope_is_checked_before_anything_else(
    guarded: Server, needs: str, method: str, sub: str, body: Any
) -> None:
    wrong = next(key for key in ("read", "write", "delete") if key not in needs.split("+"))
    refused(ask(guarded, wrong, method, f"/v0/topics/absent{sub}", b"{"), 403, "forbidden")


@pytest.mark.parametrize(("needs", "method", "sub", "body"), NEEDS)
def test_names_outside_of_the_prefixes(guarded: Server, needs: str, method: str, sub: str, body: Any) -> None:
    name = fresh("other")
    make(guarded, name)
    refused(ask(guarded, "team", method, f"/v0/topics/{name}{sub}", body), 403, "forbidden")
    inside = fresh("team.q")
    make(guarded, inside)
    ok(ask(guarded, "team", method, f"/v0/topics/{inside}{sub}", body))


def test_a_consumers_name_is_not_a_topics(guarded: Server) -> None:
    """Prefixes apply to the topic: a consumer may have any name."""
    name = fresh("team.q")
    make(guarded, name)
    ok(ask(guarded, "team", "PUT", f"/v0/topics/{name}/consumers/other", {}), 201)


def test_a_consumers_dead_letter_stays_inside_of_the_prefixes(guarded: Server) -> None:
    name = fresh("team.q")
    make(guarded, name)
    path = f"/v0/topics/{name}/consumers/d"
    refused(
        ask(guarded, "team", "PUT", path, {"dead_letter": "other.dead"}),
        403,
        "forbidden",
        {"topic": "other.dead"},
    )
    ok(ask(guarded, "team", "PUT", path, {"dead_letter": "team.dead"}), 201)
    ok(ask(guarded, "all", "PUT", path, {"dead_letter": "other.dead"}))


@pytest.mark.parametrize(("needs", "method", "sub", "body"), NEEDS)
def test_a_key_in_the_query_is_not_accepted(
    guarded: Server, topic: str, needs: str, method: str, sub: str, body: Any
) -> None:
    reply = guarded.request(method, f"/v0/topics/{topic}{sub}?token=k-all", body)
    refused(reply, 401, "unauthorized", {})
