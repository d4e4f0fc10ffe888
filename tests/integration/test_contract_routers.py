"""Goal: `/v0/routers` behaves as section 7 of the contract says: fields, order of checks, answers, errors, lists.

Method: each test has its own topics and routers and compares whole answers. The copies are tested in test_forwarding.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.contract import Json, fresh, ok, refused, send_text
from tests.support.router_client import DEFAULTS, listed, look, make, names, path_of, put, topics_like
from tests.support.server import Server, running

# -- creating and changing ---------------------------------------------------------------------------------


def test_put_creates_and_returns_the_router(shared_server: Server, topic: str) -> None:
    name, dest = f"{topic}->{topic}.b", f"{topic}.b"
    rule: Json = {"router": name, "source": topic, "dest": dest, **DEFAULTS}
    assert make(shared_server, name, topic, dest) == rule | {"created": True}
    assert topics_like(shared_server, topic) == [topic, dest], "both are created"
    again = ok(put(shared_server, name, topic, dest))
    assert again == rule | {"created": False}, "repeating the PUT is no error"
    assert look(shared_server, name) == rule | {"forwarded_total": 0}


def test_every_field_is_stored_and_changed(shared_server: Server, topic: str) -> None:
    name, dest = fresh("router"), f"{topic}.b"
    fields: Json = {
        "preserve_node": False, "preserve_tag": False, "filter": ["tag", "Glob", "eu*"], "allow_cycle": True,
        "guarantee": "exactly_once",
    }  # fmt: skip
    made = make(shared_server, name, topic, dest, create_dest=True, unknown={"x": 1}, **fields)
    rule = {"router": name, "source": topic, "dest": dest, **fields}
    assert made == rule | {"created": True, "ignored": ["unknown"]}
    assert look(shared_server, name) == rule | {"forwarded_total": 0}
    changed = ok(put(shared_server, name, topic, dest, filter="us"))
    expected = DEFAULTS | {"filter": ["tag", "Eq", "us"]}
    assert changed == {"router": name, "source": topic, "dest": dest, "created": False, **expected}
    assert {field: look(shared_server, name)[field] for field in expected} == expected


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        (None, None),
        ("a", ["tag", "Eq", "a"]),
        ("", ["tag", "Eq", ""]),
        ("a*", ["tag", "Glob", "a*"]),
        ("*", ["tag", "Glob", "*"]),
        ("a*b", ["tag", "Eq", "a*b"]),
        ("a.>", ["tag", "Eq", "a.>"]),
        (["tag", "Eq", "a*"], ["tag", "Eq", "a*"]),
        (["tag", "Glob", "a*b*"], ["tag", "Glob", "a*b*"]),
        (["tag", "Subject", "a.*"], ["tag", "Subject", "a.*"]),
        (["tag", "Subject", "a.b"], ["tag", "Subject", "a.b"]),
        (["a.*", "b.>"], [["tag", "Subject", "a.*"], ["tag", "Subject", "b.>"]]),
        ([">"], [["tag", "Subject", ">"]]),
        (
            [["tag", "Eq", "x"], "a.*", ["tag", "Glob", "y*"]],
            [["tag", "Eq", "x"], ["tag", "Subject", "a.*"], ["tag", "Glob", "y*"]],
        ),
    ],
)
def test_filters_are_echoed_in_tuple_form(shared_server: Server, topic: str, given: Any, echoed: Any) -> None:
    name = fresh("router")
    assert make(shared_server, name, topic, f"{topic}.b", filter=given)["filter"] == echoed
    assert look(shared_server, name)["filter"] == echoed


@pytest.mark.parametrize(
    "wrong",
    [
        {"filter": 5}, {"filter": True}, {"filter": {}}, {"filter": []}, {"filter": ["tag"]}, {"filter": ["tag", "Eq"]},
        {"filter": ["tag", "Eq", "a", "b"]}, {"filter": ["node", "Eq", "a"]}, {"filter": ["tag", "Ne", "a"]},
        {"filter": ["tag", "eq", "a"]}, {"filter": ["tag", "Glob", "a"]}, {"filter": ["tag", "Glob", "*a"]},
        {"filter": ["tag", "Eq", 5]}, {"filter": ["tag", "Eq", None]}, {"filter": ["tag", "Subject", "a..b"]},
        {"filter": ["a.b"]}, {"filter": ["a.>.b"]}, {"filter": [["tag", "Eq"]]}, {"filter": [[]]}, {"filter": [5]},
        {"filter": ["a.*"] * 33}, {"filter": "t" * 257}, {"preserve_node": None}, {"preserve_node": 1},
        {"preserve_tag": "yes"}, {"preserve_tag": None}, {"create_dest": None}, {"create_dest": 0}, {"allow_cycle": None},
        {"allow_cycle": "false"}, {"guarantee": None}, {"guarantee": "best_effort"}, {"guarantee": 1}, {"source": None},
        {"source": 5}, {"source": ""}, {"source": ".a"}, {"source": "a b"}, {"source": "é"}, {"source": "x" * 256},
        {"dest": None}, {"dest": 5}, {"dest": ""}, {"dest": "-a"}, {"dest": "a/b"}, {"dest": "x" * 256}, {"dest": "a.*"},
        {"dest": "a>b"}, {"dest": ">"}, {"source": "a*"}, {"source": "a>"}, {"source": "a.>.b"}, {"source": "a..*"},
        {"source": "é.*"}, {"source": "a b.*"}, {"source": ".*"}, {"source": "a." * 127 + "*."},
    ],
)  # fmt: skip
def test_bad_bodies(shared_server: Server, topic: str, wrong: Json) -> None:
    name = fresh("router")
    body = {"source": topic, "dest": f"{topic}.b"} | wrong
    refused(shared_server.put(path_of(name), body), 400, "invalid_request")
    refused(shared_server.get(path_of(name)), 404, "router_not_found", {"router": name})
    assert topics_like(shared_server, topic) == []


@pytest.mark.parametrize("missing", ["source", "dest"])
def test_source_and_dest_are_required(shared_server: Server, topic: str, missing: str) -> None:
    body = {"source": topic, "dest": f"{topic}.b"}
    del body[missing]
    refused(shared_server.put(path_of(fresh("router")), body), 400, "invalid_request")


def test_a_source_is_not_its_own_dest(shared_server: Server, topic: str) -> None:
    for fields in ({}, {"allow_cycle": True}, {"create_dest": False}):
        refused(put(shared_server, fresh("router"), topic, topic, **fields), 400, "invalid_request")
    refused(put(shared_server, fresh("router"), f"{topic}.>", f"{topic}.b"), 400, "invalid_request")
    refused(put(shared_server, fresh("router"), f"{topic}.*", f"{topic}.b"), 400, "invalid_request")
    assert topics_like(shared_server, topic) == []


def test_invalid_bodies(shared_server: Server) -> None:
    path = path_of(fresh("router"))
    for text in ("{", "[]", "null", "5", '"x"', "", " ", '{"source":"a","dest":NaN}'):
        refused(send_text(shared_server, "PUT", path, text), 400, "invalid_request")
    refused(shared_server.request("PUT", path), 415, "unsupported_media_type")
    refused(send_text(shared_server, "PUT", path, "{}", "text/plain"), 415, "unsupported_media_type")
    refused(shared_server.put(path, b"x" * (1 << 21)), 415, "unsupported_media_type")
    large = b'{"source":"' + b"x" * (1 << 21)
    refused(send_text(shared_server, "PUT", path, large), 413, "payload_too_large")


@pytest.mark.parametrize("name", ["a", "9", "a->b", "A.b_c:d-9>", "x" * 255])
def test_good_names(shared_server: Server, topic: str, name: str) -> None:
    name = f"{topic}{name}"[:255]
    assert make(shared_server, name, topic, f"{topic}.b")["router"] == name
    assert look(shared_server, name)["router"] == name
    assert ok(shared_server.delete(path_of(name))) == {"router": name, "deleted": True}


@pytest.mark.parametrize("name", ["-a", ".a", ">a", "_a", "a b", "é", "a/b", "a*", "x" * 256])
def test_bad_names(shared_server: Server, topic: str, name: str) -> None:
    refused(put(shared_server, name, topic, f"{topic}.b"), 400, "invalid_request")
    # On other routes a malformed name simply does not exist.
    refused(shared_server.get(path_of(name)), 404, "router_not_found", {"router": name})
    assert ok(shared_server.delete(path_of(name))) == {"router": name, "deleted": False}
    assert topics_like(shared_server, topic) == []


def test_a_router_may_have_the_name_of_a_topic(shared_server: Server, topic: str) -> None:
    make(shared_server, topic, topic, f"{topic}.b")
    assert look(shared_server, topic)["source"] == topic


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("/v0/routers", {"GET", "HEAD"}), ("/v0/routers/absent", {"GET", "HEAD", "PUT", "DELETE"})],
)
def test_wrong_methods(shared_server: Server, path: str, allowed: set[str]) -> None:
    for method in {"GET", "PUT", "POST", "DELETE", "PATCH"} - allowed:
        reply = shared_server.request(method, path, b"{")
        refused(reply, 405, "method_not_allowed")
        assert set(reply.headers["allow"].split(", ")) == allowed | {"OPTIONS"}


@pytest.mark.parametrize(
    "path", ["/v0/routers/", "/v0/routers/a/", "/v0/routers/a/b", "/v0/routers//", "/v0/router/a"]
)
def test_unknown_paths(shared_server: Server, path: str) -> None:
    for method in ("GET", "PUT", "DELETE"):
        refused(shared_server.request(method, path), 404, "not_found", {})


# -- conflicts ---------------------------------------------------------------------------------------------


def test_a_missing_dest(shared_server: Server, topic: str) -> None:
    name, dest = fresh("router"), f"{topic}.b"
    refused(put(shared_server, name, topic, dest, create_dest=False), 404, "topic_not_found", {"topic": dest})
    assert topics_like(shared_server, topic) == [], "a refused router creates no topics"
    refused(shared_server.get(path_of(name)), 404, "router_not_found")
    shared_server.put(f"/v0/topics/{dest}")
    make(shared_server, name, topic, dest, create_dest=False)
    assert topics_like(shared_server, topic) == [topic, dest], "the source is created all the same"


def test_fan_in(shared_server: Server, topic: str) -> None:
    dest = f"{topic}.dest"
    make(shared_server, fresh("router"), topic, dest)
    other = fresh("router")
    detail = {"topic": dest, "reason": "router_dest_fan_in"}
    for source in (f"{topic}.other", f"{topic}.x.>"):
        refused(put(shared_server, other, source, dest), 409, "topic_exists_incompatible", detail)
    assert topics_like(shared_server, topic) == [topic, dest]
    make(shared_server, other, topic, dest, filter="x")
    assert names(shared_server, f"dest={dest}") == sorted(names(shared_server, f"source={topic}"))


def test_fan_in_of_patterns(shared_server: Server, topic: str) -> None:
    dest = f"{topic}-all"
    make(shared_server, fresh("router"), f"{topic}.>", dest)
    detail = {"topic": dest, "reason": "router_dest_fan_in"}
    for source in (f"{topic}.*", f"{topic}.a"):
        refused(put(shared_server, fresh("router"), source, dest), 409, "topic_exists_incompatible", detail)
    make(shared_server, fresh("router"), f"{topic}.>", dest, preserve_tag=False)


def test_a_dest_is_free_again(shared_server: Server, topic: str) -> None:
    name, dest = fresh("router"), f"{topic}.dest"
    make(shared_server, name, topic, dest)
    ok(shared_server.delete(path_of(name)))
    make(shared_server, fresh("router"), f"{topic}.other", dest)


def test_a_router_cannot_be_pointed_elsewhere(shared_server: Server, topic: str) -> None:
    name, dest = fresh("router"), f"{topic}.b"
    make(shared_server, name, topic, dest)
    detail = {
        "router": name, "reason": "router_repoint_forbidden", "existing_source": topic, "existing_dest": dest,
    }  # fmt: skip
    for other in ((topic, f"{topic}.c"), (f"{topic}.c", dest), (f"{topic}.c", f"{topic}.d"), (dest, topic)):
        refused(put(shared_server, name, *other), 409, "topic_exists_incompatible", detail)
    assert topics_like(shared_server, topic) == [topic, dest]
    assert look(shared_server, name)["dest"] == dest


def test_cycles(shared_server: Server, topic: str) -> None:
    a, b, c = (f"{topic}.{letter}" for letter in "abc")
    make(shared_server, fresh("router"), a, b)
    refused(put(shared_server, fresh("router"), b, a), 409, "router_cycle", {"cycle": [b, a, b]})
    make(shared_server, fresh("router"), b, c)
    refused(put(shared_server, fresh("router"), c, a), 409, "router_cycle", {"cycle": [c, a, b, c]})
    assert topics_like(shared_server, topic) == [a, b, c]
    make(shared_server, fresh("router"), c, a, allow_cycle=True)


def test_a_permitted_cycle_does_not_keep_others_from_changing(shared_server: Server, topic: str) -> None:
    first, second = fresh("router"), fresh("router")
    back = f"{topic}.b"
    make(shared_server, first, topic, back)
    make(shared_server, second, back, topic, allow_cycle=True)
    assert ok(put(shared_server, first, topic, back, filter="x"))["filter"] == ["tag", "Eq", "x"]
    # Removing the permission would leave a cycle that is not allowed.
    refused(put(shared_server, second, back, topic), 409, "router_cycle", {"cycle": [back, topic, back]})
    ok(put(shared_server, second, back, topic, allow_cycle=True))


def test_cycles_through_patterns(shared_server: Server, topic: str) -> None:
    """A pattern is an edge from every topic that it matches."""
    pool = f"{topic}-pool"
    make(shared_server, fresh("router"), f"{topic}.>", pool)
    cycle = [pool, f"{topic}.x", pool]
    refused(put(shared_server, fresh("router"), pool, f"{topic}.x"), 409, "router_cycle", {"cycle": cycle})
    make(shared_server, fresh("router"), pool, f"{topic}-next")
    reply = put(shared_server, fresh("router"), f"{topic}-next", f"{topic}.y.z")
    refused(reply, 409, "router_cycle", {"cycle": [f"{topic}-next", f"{topic}.y.z", pool, f"{topic}-next"]})
    other = f"{topic}-o.1"
    make(shared_server, fresh("router"), f"{topic}-next", other)
    reply = put(shared_server, fresh("router"), f"{topic}-o.*", pool)
    refused(reply, 409, "topic_exists_incompatible")  # fan-in is checked first
    reply = put(shared_server, fresh("router"), f"{topic}-o.*", f"{topic}.z")
    refused(reply, 409, "router_cycle", {"cycle": [other, f"{topic}.z", pool, f"{topic}-next", other]})


def test_removing_a_router_opens_the_circle(shared_server: Server, topic: str) -> None:
    name = fresh("router")
    make(shared_server, name, topic, f"{topic}.b")
    ok(shared_server.delete(path_of(name)))
    make(shared_server, fresh("router"), f"{topic}.b", topic)


def test_the_order_of_checks(start_server: Callable[..., Server]) -> None:
    server = start_server(environment={"TOPICS_MAX_ROUTERS": "2"})
    make(server, "ab", "a", "b")
    make(server, "bc", "b", "c")
    # A bad name before everything about topics; a missing dest before fan-in, changed source or dest, the cap and cycles.
    refused(put(server, "ab", ".bad", "b"), 400, "invalid_request")
    refused(put(server, "ab", "a", "none", create_dest=False), 404, "topic_not_found", {"topic": "none"})
    refused(put(server, "new", "a", "none", create_dest=False), 404, "topic_not_found", {"topic": "none"})
    # Fan-in before a changed source or dest, the cap and cycles.
    fan_in = {"topic": "b", "reason": "router_dest_fan_in"}
    refused(put(server, "bc", "c", "b"), 409, "topic_exists_incompatible", fan_in)
    refused(put(server, "new", "c", "b"), 409, "topic_exists_incompatible", fan_in)
    # A changed source or dest before cycles.
    assert refused(put(server, "bc", "c", "a"), 409, "topic_exists_incompatible")["router"] == "bc"
    # The cap before cycles.
    cap = {"limit": "max_routers", "max": 2}
    refused(put(server, "new", "c", "a"), 429, "throttled", cap)
    refused(put(server, "new", "x", "y"), 429, "throttled", cap)
    assert topics_like(server, "") == ["a", "b", "c"]
    assert ok(put(server, "ab", "a", "b", filter="x"))["created"] is False, (
        "the cap does not apply to changes"
    )
    ok(server.delete("/v0/routers/bc"))
    make(server, "new", "x", "y")
    text = server.get("/v0/metrics").body.decode()
    assert "\ntopics_routers 2\n" in text
    assert server.request("GET", "/v0/metrics", headers={"Accept": "application/json"}).json["routers"] == 2
    server.stop()
    server.start()
    assert names(server) == ["ab", "new"]
    assert look(server, "ab")["filter"] == ["tag", "Eq", "x"]
    refused(put(server, "more", "a", "d"), 429, "throttled", cap)


def test_topics_that_cannot_be_created(start_server: Callable[..., Server]) -> None:
    server = start_server(environment={"TOPICS_MAX_TOPICS": "2"})
    server.put("/v0/topics/a")
    cap = {"limit": "max_topics", "max": 2}
    refused(put(server, "r", "x", "y"), 429, "throttled", cap)
    assert topics_like(server, "") == ["a"]
    assert names(server) == []
    make(server, "r", "a", "y")
    refused(put(server, "p", "p.>", "z"), 429, "throttled", cap)
    assert names(server) == ["r"]
    assert topics_like(server, "") == ["a", "y"]


# -- lists -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rules_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("rules")) as server:
        for name, source, dest in (
            ("a->b", "a", "b"), ("a->b2", "a", "b"), ("a->c", "a", "c"), ("b->d", "b", "d"), ("z", "p.>", "all"),
        ):  # fmt: skip
            make(server, name, source, dest)
        yield server


def test_a_row_of_a_list(rules_server: Server) -> None:
    rows = listed(rules_server)
    assert [row["router"] for row in rows] == ["a->b", "a->b2", "a->c", "b->d", "z"]
    assert rows[-1] == {
        "router": "z", "source": "p.>", "dest": "all", "guarantee": "at_least_once", "forwarded_total": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("prefix=a-", ["a->b", "a->b2", "a->c"]),
        ("prefix=a-%3Eb", ["a->b", "a->b2"]),
        ("prefix=zz", []),
        ("prefix=", ["a->b", "a->b2", "a->c", "b->d", "z"]),
        ("source=a", ["a->b", "a->b2", "a->c"]),
        ("source=p.%3E", ["z"]),
        ("source=p", []),
        ("dest=b", ["a->b", "a->b2"]),
        ("source=a&dest=b", ["a->b", "a->b2"]),
        ("source=b&dest=b", []),
        ("dest=b&prefix=a-%3Eb2", ["a->b2"]),
        ("source=a&prefix=b", []),
        ("page_size=0", ["a->b"]),
        ("page_size=2", ["a->b", "a->b2"]),
        ("page_size=many", ["a->b", "a->b2", "a->c", "b->d", "z"]),
        ("page_size=1000000", ["a->b", "a->b2", "a->c", "b->d", "z"]),
        ("cursor=", ["a->b", "a->b2", "a->c", "b->d", "z"]),
    ],
)
def test_lists_are_filtered(rules_server: Server, query: str, found: list[str]) -> None:
    assert names(rules_server, query) == found


@pytest.mark.parametrize("query", ["", "source=a&", "prefix=a-&", "dest=b&"])
def test_lists_come_in_pages(rules_server: Server, query: str) -> None:
    whole = names(rules_server, query)
    seen: list[str] = []
    page = ok(rules_server.get(f"/v0/routers?{query}page_size=1"))
    while True:
        seen += [row["router"] for row in page["routers"]]
        assert set(page) <= {"routers", "next_cursor"}
        if "next_cursor" not in page:
            break
        page = ok(rules_server.get(f"/v0/routers?{query}page_size=1&cursor={page['next_cursor']}"))
    assert seen == whole
    assert len(whole) >= 2


def test_a_cursor_survives_changes_between_pages(rules_server: Server) -> None:
    page = ok(rules_server.get("/v0/routers?page_size=3"))
    make(rules_server, "a->c0", "a", "c0")
    make(rules_server, "a->a", "a", "a0")
    assert names(rules_server, f"cursor={page['next_cursor']}") == ["a->c0", "b->d", "z"]
    ok(rules_server.delete(path_of("a->c0")))
    ok(rules_server.delete(path_of("a->a")))
    assert names(rules_server, f"cursor={page['next_cursor']}") == ["b->d", "z"]
    refused(rules_server.get("/v0/routers?cursor=%21"), 400, "invalid_request")


# -- delete ------------------------------------------------------------------------------------------------


def test_delete(shared_server: Server, topic: str) -> None:
    name = fresh("router")
    make(shared_server, name, topic, f"{topic}.b")
    assert ok(shared_server.delete(path_of(name))) == {"router": name, "deleted": True}
    assert ok(shared_server.delete(path_of(name))) == {"router": name, "deleted": False}
    refused(shared_server.get(path_of(name)), 404, "router_not_found", {"router": name})
    assert names(shared_server, f"source={topic}") == []
    assert topics_like(shared_server, topic) == [topic, f"{topic}.b"]
    assert make(shared_server, name, f"{topic}.b", topic)["created"], "the name can be used again"


def test_head_and_options(shared_server: Server, topic: str) -> None:
    name = fresh("router")
    make(shared_server, name, topic, f"{topic}.b")
    head = shared_server.request("HEAD", path_of(name))
    assert (head.status, head.body) == (200, b"")
    options = shared_server.request("OPTIONS", path_of(name))
    assert options.status == 204
    assert set(options.headers["allow"].split(", ")) == {"GET", "HEAD", "PUT", "DELETE", "OPTIONS"}
