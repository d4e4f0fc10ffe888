"""Goal: authorization for routers (contract 2.3): scopes per method, prefixes of name, source and dest, filtered lists.

Method: one server with keys of every kind.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.contract import ok, refused
from tests.support.router_client import make, names, path_of, put, topics_like
from tests.support.server import Server, running

KEYS = "root,r:read,w:write,d:delete,a:admin,rest:r+w+d,tea::tea.|tea-,mix::tea.|jam.,star::*"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("guarded"), environment={"TOPICS_API_KEYS": KEYS}) as server:
        root = server.with_key("root")
        make(root, "tea.r", "tea.a", "tea.b")
        make(root, "tea.out", "tea.a", "jam.b")
        make(root, "tea.in", "jam.a", "tea.c")
        make(root, "jam.r", "tea.a", "tea.d")
        make(root, "tea.p", "tea.p.>", "tea.all")
        make(root, "tea.wide", "*.q", "tea.wide")
        yield server


BODY = {"source": "x", "dest": "y"}


@pytest.mark.parametrize(
    ("method", "path", "needed"),
    [("GET", "/v0/routers", "r"), ("GET", "/v0/routers/none", "r"), ("PUT", "/v0/routers/scoped", "a"),
     ("DELETE", "/v0/routers/scoped", "d")],
)  # fmt: skip
def test_scopes(guarded: Server, method: str, path: str, needed: str) -> None:
    body = BODY if method == "PUT" else None
    refused(guarded.request(method, path, body), 401, "unauthorized")
    for key in ("r", "w", "d", "a"):
        reply = guarded.with_key(key).request(method, path, body)
        if key != needed:
            refused(reply, 403, "forbidden")
        else:
            assert reply.status in (200, 201, 404)
    assert guarded.with_key("root").request(method, path, body).status in (200, 404)


def test_put_needs_admin_whatever_else_a_key_may(guarded: Server) -> None:
    refused(put(guarded.with_key("rest"), "scoped2", "x", "y"), 403, "forbidden")
    # Before the body is parsed.
    refused(guarded.with_key("rest").put("/v0/routers/scoped2", b"{"), 403, "forbidden")


def test_the_name_in_the_path(guarded: Server) -> None:
    tea = guarded.with_key("tea")
    for method in ("GET", "DELETE"):
        refused(tea.request(method, "/v0/routers/jam.r"), 403, "forbidden")
        refused(tea.request(method, "/v0/routers/none"), 403, "forbidden")
    refused(tea.put("/v0/routers/jam.r", {"source": "tea.a", "dest": "tea.d"}), 403, "forbidden")
    refused(tea.request("PUT", "/v0/routers/jam.r"), 403, "forbidden")  # also before the media type
    make(tea, "tea-x>y", "tea.a", "tea.e")


def test_forbidden_names_come_before_invalid_names(guarded: Server) -> None:
    tea = guarded.with_key("tea")
    refused(put(tea, "tea.new", "jam.a", "tea.x"), 403, "forbidden", {"topic": "jam.a"})
    refused(put(tea, "tea.new", "tea.a", "jam.x"), 403, "forbidden", {"topic": "jam.x"})
    refused(put(tea, "tea.new", "../a", "tea.x"), 403, "forbidden", {"topic": "../a"})
    refused(put(tea, "tea.new", "tea.a b", "jam"), 403, "forbidden", {"topic": "jam"})
    refused(put(tea, "tea.new", "tea.a b", "tea.x"), 400, "invalid_request")
    refused(put(tea, "tea.new", "jam.a", "tea.none", create_dest=False), 403, "forbidden", {"topic": "jam.a"})
    refused(tea.put("/v0/routers/tea.new", b'{"source":"jam"'), 415, "unsupported_media_type")
    refused(tea.put("/v0/routers/tea.new", {"source": "jam", "dest": 5}), 400, "invalid_request")


def test_a_pattern_must_lie_within_the_prefixes(guarded: Server) -> None:
    tea = guarded.with_key("tea")
    for source in (">", "*.x", "tea*", "*.>", "tea.*.>"):
        reply = put(tea, "tea.pattern", source, "tea-all")
        if source == "tea.*.>":
            ok(reply, 201)
        else:
            refused(reply, 403, "forbidden", {"topic": source})
    # A prefix is not a pattern: this key allows names that begin with a literal star, and there are none.
    star = guarded.with_key("star")
    refused(star.put("/v0/routers/%2Ar", {"source": "*.x", "dest": "*y"}), 403, "forbidden", {"topic": "*.x"})


def test_stored_names_count(guarded: Server) -> None:
    tea, mix = guarded.with_key("tea"), guarded.with_key("mix")
    for name in ("tea.out", "tea.in", "tea.wide"):
        refused(tea.get(path_of(name)), 403, "forbidden", {})
        refused(tea.delete(path_of(name)), 403, "forbidden", {})
    ok(tea.get(path_of("tea.r")))
    ok(mix.get(path_of("tea.out")))
    ok(mix.get(path_of("jam.r")))
    refused(tea.get(path_of("tea.none")), 404, "router_not_found", {"router": "tea.none"})
    assert ok(tea.delete(path_of("tea.none"))) == {"router": "tea.none", "deleted": False}


def test_a_refused_change_of_source_does_not_reveal_other_names(guarded: Server) -> None:
    tea = guarded.with_key("tea")
    refused(put(tea, "tea.out", "tea.a", "tea.z"), 403, "forbidden", {})
    detail = refused(
        put(guarded.with_key("mix"), "tea.out", "tea.a", "tea.z"), 409, "topic_exists_incompatible"
    )
    assert detail["existing_dest"] == "jam.b"
    assert topics_like(guarded.with_key("root"), "tea.z") == []


def test_a_refused_cycle_does_not_reveal_other_names(guarded: Server) -> None:
    root = guarded.with_key("root")
    make(root, "ring.1", "tea.ring", "jam.ring")
    make(root, "ring.2", "jam.ring", "tea.back")
    reply = put(guarded.with_key("tea"), "tea.ring", "tea.back", "tea.ring")
    cycle = ["tea.back", "tea.ring", "*", "tea.back"]
    assert refused(reply, 409, "router_cycle") == {"cycle": cycle}
    assert b"jam." not in reply.body
    detail = refused(put(guarded.with_key("mix"), "tea.ring", "tea.back", "tea.ring"), 409, "router_cycle")
    assert detail == {"cycle": ["tea.back", "tea.ring", "jam.ring", "tea.back"]}


@pytest.mark.parametrize(
    ("router", "source", "dest"),
    [("jam.d1", "tea.d1", "tea.e1"), ("tea.d2", "jam.d2", "tea.e2"), ("tea.d3", "tea.d3", "jam.e3"),
     ("tea.d4", "*.d4", "tea.e4")],
    ids=["name", "source", "dest", "pattern"],
)  # fmt: skip
def test_a_topic_stays_while_a_router_needs_it_that_the_key_may_not_use(
    guarded: Server, router: str, source: str, dest: str
) -> None:
    root, tea = guarded.with_key("root"), guarded.with_key("tea")
    make(root, router, source, dest)
    for topic in {source, dest}:
        if not topic.startswith("tea."):
            continue
        reply = tea.delete(f"/v0/topics/{topic}")
        refused(reply, 403, "forbidden", {})
        assert b"jam." not in reply.body
        ok(root.get(f"/v0/topics/{topic}"))
    ok(root.get(path_of(router)))
    assert ok(root.delete(f"/v0/topics/{dest}"))["routers_removed"] == [router]


def test_a_key_deletes_topics_with_routers_of_its_own(guarded: Server) -> None:
    tea = guarded.with_key("tea")
    make(tea, "tea.own", "tea.f1", "tea.f2")
    assert ok(tea.delete("/v0/topics/tea.f2"))["routers_removed"] == ["tea.own"]
    assert ok(tea.delete("/v0/topics/tea.f1"))["routers_removed"] == []


def test_lists_show_what_is_allowed_in_all_three_names(guarded: Server) -> None:
    assert {"tea.r", "tea.p"} <= set(names(guarded.with_key("tea")))
    assert not {"tea.out", "tea.in", "jam.r", "tea.wide"} & set(names(guarded.with_key("tea")))
    assert {"tea.r", "tea.out", "tea.in", "jam.r", "tea.p"} <= set(names(guarded.with_key("mix")))
    assert "tea.wide" not in names(guarded.with_key("mix"))
    assert names(guarded.with_key("star")) == []
    assert {"tea.wide", "jam.r"} <= set(names(guarded.with_key("r")))
    tea = guarded.with_key("tea")
    assert names(tea, "dest=jam.b") == []
    seen: list[str] = []
    query = "page_size=1"
    while True:
        page = ok(tea.get(f"/v0/routers?{query}"))
        assert len(page["routers"]) == 1, "hidden rows do not count against the page size"
        seen += [row["router"] for row in page["routers"]]
        if "next_cursor" not in page:
            break
        query = f"page_size=1&cursor={page['next_cursor']}"
    assert seen == names(tea)


def test_the_token_in_the_query_is_no_key_here(guarded: Server) -> None:
    refused(guarded.get("/v0/routers?token=root"), 401, "unauthorized")
