"""Goal: authentication and authorization: every scope on every route, prefixes, the order of checks, and invalid keys.

Method: one server with a key for each row of the contract; a table says which scope a route needs, and every key is tried
on every route. Servers that must refuse to start are run until they exit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server
from tests.support.contract import Json, Pending, fresh, ok, refused
from tests.support.server import Reply, Server, running, until

IN_FLIGHT_MAX = 3
KEYS = {
    "all": "s3cret-all",
    "read": "s3cret-read:read",
    "write": "s3cret-write:write",
    "delete": "s3cret-delete:delete",
    "admin": "s3cret-admin:admin",
    "team": "s3cret-team::team.|tools:",
    "team-rw": "s3cret-team-rw:rw:team.",
    "busy": "s3cret-busy:read",
}
ENTRIES = ", ,:read,::x, ".join(KEYS.values())  # empty entries and empty secrets are skipped


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {"TOPICS_API_KEYS": ENTRIES, "TOPICS_MAX_INFLIGHT_PER_KEY": str(IN_FLIGHT_MAX)}
    with running(tmp_path_factory.mktemp("guarded"), environment=environment) as server:
        yield server
        assert "s3cret" not in server.log


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name].partition(':')[0]}"}


def ask(server: Server, key: str, method: str, path: str, body: Any = None) -> Reply:
    return server.request(method, path, body, bearer(key))


# -- authentication ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "authorization",
    [
        None, "", "Bearer", "Bearer ", "Bearer nobody", "bearer s3cret-all", "BEARER s3cret-all", "Basic s3cret-all",
        "s3cret-all", "Token s3cret-all", "Bearer s3cret", "Bearer s3cret-all x", "Bearer s3cret-read:read", "Bearer ,",
        "Bearer :read", "Bearer S3CRET-ALL",
    ],
)  # fmt: skip
def test_without_a_valid_key_everything_is_unauthorized(guarded: Server, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    for method, path in (
        ("GET", "/v0/topics"),
        ("GET", "/v0/topics?token=s3cret-all"),
        ("GET", "/v0/nowhere"),
        ("PATCH", "/v0/topics"),
        ("OPTIONS", "/v0/topics"),
        ("POST", "/v0/topics/x"),
        ("POST", "/v0/topics/x/diff"),
        ("POST", "/v0/topics/x/raw"),
        ("GET", "/v0/topics/x/records"),
        ("GET", "/v0/metrics"),
        ("GET", "/metrics"),
        ("GET", "/v0/openapi.json"),
        ("GET", "/"),
    ):
        refused(guarded.request(method, path, headers=headers), 401, "unauthorized", {})


@pytest.mark.parametrize(
    "authorization", ["Bearer s3cret-all", "Bearer   s3cret-all", "Bearer s3cret-all   "]
)
def test_a_key_is_trimmed(guarded: Server, authorization: str) -> None:
    ok(guarded.get("/v0/topics", Authorization=authorization))


def test_a_refused_body_is_not_read(guarded: Server) -> None:
    """401 comes before all checks of the body."""
    for body in (b"{", b"x" * 3_000_000):
        refused(guarded.request("POST", "/v0/topics/x", body), 401, "unauthorized")


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/v0/health", "/v0/ready"])
@pytest.mark.parametrize("authorization", [None, "Bearer nobody"])
def test_probes_need_no_key(guarded: Server, path: str, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    assert guarded.request("GET", path, headers=headers).status == 200


@pytest.mark.parametrize("authorization", [None, "Bearer nobody", "Bearer s3cret-all"])
def test_the_front_page_needs_no_key(guarded: Server, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    assert guarded.request("GET", "/", headers={"Accept": "text/html", **headers}).status == 200
    # For all others it is an unknown path.
    for method, accept in (("GET", "*/*"), ("GET", "text/html;q=0"), ("POST", "text/html")):
        reply = guarded.request(method, "/", headers={"Accept": accept, **headers})
        if authorization == "Bearer s3cret-all":
            refused(reply, 404, "not_found")
        else:
            refused(reply, 401, "unauthorized")


# -- scopes ------------------------------------------------------------------------------------------------

WRITE = {"records": [{"data": 1}]}
NEEDS: list[tuple[str, str, str, Any]] = [
    ("read", "GET", "/v0/topics", None),
    ("read", "GET", "/v0/topics/{topic}", None),
    ("read", "HEAD", "/v0/topics/{topic}", None),
    ("read", "POST", "/v0/topics/{topic}/diff", None),
    ("read", "GET", "/v0/topics/{topic}/deleted", None),
    ("read", "GET", "/v0/topics/{topic}/tags", None),
    ("read", "GET", "/v0/topics/{topic}/last?tag=a", None),
    ("read", "GET", "/v0/topics/{topic}/records", None),
    ("read", "GET", "/v0/metrics", None),
    ("read", "GET", "/metrics", None),
    ("write", "POST", "/v0/topics/{topic}", WRITE),
    ("write", "POST", "/v0/topics/{topic}/raw", None),
    ("write", "GET", "/v0/topics/{topic}/unknown", None),
    ("write", "POST", "/v0/topics/{topic}/unknown/deeper", None),
    ("delete", "POST", "/v0/topics/{topic}/delete", {"before_seq": 1}),
    ("delete", "DELETE", "/v0/topics/{topic}", None),
    ("admin", "PUT", "/v0/topics/{topic}", {}),
    ("", "GET", "/v0/openapi.json", None),
    ("", "GET", "/v0/nowhere", None),
    ("", "PATCH", "/v0/topics/{topic}", None),
    ("", "PUT", "/v0/topics/{topic}/diff", None),
    ("", "DELETE", "/v0/topics", None),
    ("", "OPTIONS", "/v0/topics/{topic}", None),
]


@pytest.mark.parametrize(("scope", "method", "path", "body"), NEEDS)
@pytest.mark.parametrize("key", ["all", "read", "write", "delete", "admin"])
def test_every_scope_on_every_route(
    guarded: Server, topic: str, key: str, scope: str, method: str, path: str, body: Any
) -> None:
    ask(guarded, "all", "PUT", f"/v0/topics/{topic}")
    reply = ask(guarded, key, method, path.format(topic=topic), body)
    if key in ("all", scope) or not scope:
        assert reply.status not in (401, 403), reply.body
        assert (reply.status == 404) == ("unknown" in path or "nowhere" in path)
    elif method == "HEAD":
        assert reply.status == 403
    else:
        refused(reply, 403, "forbidden", {})


@pytest.mark.parametrize("path", ["/v0/topics/absent", "/v0/topics/absent/diff", "/v0/topics/absent/tags"])
def test_the_scope_is_checked_before_existence(guarded: Server, path: str) -> None:
    method = "POST" if path.endswith("diff") else "GET"
    refused(ask(guarded, "write", method, path), 403, "forbidden")
    refused(ask(guarded, "read", method, path), 404, "topic_not_found")


@pytest.mark.parametrize("config", [{}, {"ttl_ms": 5}, {"unknown": 1}])
def test_creating_with_a_config_needs_admin(guarded: Server, topic: str, config: Json) -> None:
    path = f"/v0/topics/{topic}"
    # Before the records are checked: this is 403, not 400.
    for records in ([{"data": 1}], []):
        refused(ask(guarded, "write", "POST", path, {"records": records, "config": config}), 403, "forbidden")
    # A request that cannot create anything needs no more than it does without the config.
    for more in ({"config": config, "create": False}, {"config": {**config, "auto_create": False}}):
        refused(ask(guarded, "write", "POST", path, {**WRITE, **more}), 404, "topic_not_found")
    both = {**WRITE, "config": {**config, "auto_create": False}, "create": True}
    refused(ask(guarded, "write", "POST", path, both), 403, "forbidden")
    refused(ask(guarded, "write", "POST", path, {**WRITE, "config": 5}), 400, "invalid_request")
    assert ok(ask(guarded, "write", "POST", path, {**WRITE, "config": None}), 201)["created"]
    assert not ok(ask(guarded, "write", "POST", path, {**WRITE, "config": config}))["created"]


def test_admin_alone_may_create_with_a_config_but_not_write(guarded: Server, topic: str) -> None:
    body = {**WRITE, "config": {"cap_records": 7}}
    refused(ask(guarded, "admin", "POST", f"/v0/topics/{topic}", body), 403, "forbidden")
    ok(ask(guarded, "all", "POST", f"/v0/topics/{topic}", body), 201)
    assert ok(ask(guarded, "read", "GET", f"/v0/topics/{topic}"))["config"]["cap_records"] == 7


# -- prefixes ----------------------------------------------------------------------------------------------

OUTSIDE = ["teams", "tea", "Team.a", "other", "tools", "x.team.a", "tool:s"]
INSIDE = ["team.", "team.a", "tools:a", "tools:"]


@pytest.mark.parametrize("name", INSIDE)
def test_names_inside_of_the_prefixes(guarded: Server, name: str) -> None:
    path = f"/v0/topics/{name}"
    assert ask(guarded, "team", "PUT", path).status in (200, 201)
    for method, sub, body in (
        ("POST", "", WRITE),
        ("POST", "/diff", None),
        ("POST", "/delete", {"before_seq": 9}),
        ("GET", "", None),
        ("GET", "/deleted", None),
        ("GET", "/tags", None),
        ("DELETE", "", None),
    ):
        ok(ask(guarded, "team", method, path + sub, body))


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_outside_of_the_prefixes(guarded: Server, name: str) -> None:
    for spelling in (name, "".join(f"%{ord(letter):02x}" for letter in name)):
        path = f"/v0/topics/{spelling}"
        for method, sub, body in (
            ("PUT", "", None),
            ("POST", "", WRITE),
            ("POST", "/diff", None),
            ("POST", "/delete", {"before_seq": 9}),
            ("GET", "", None),
            ("GET", "/deleted", None),
            ("GET", "/tags", None),
            ("GET", "/last?tag=a", None),
            ("DELETE", "", None),
            ("GET", "/unknown", None),
        ):
            refused(ask(guarded, "team", method, path + sub, body), 403, "forbidden")
        refused(ask(guarded, "team", "PATCH", path), 405, "method_not_allowed")


def test_a_prefix_is_compared_with_the_decoded_name(guarded: Server) -> None:
    ok(ask(guarded, "all", "PUT", "/v0/topics/team.encoded"), 201)
    ok(ask(guarded, "team", "GET", "/v0/topics/%74eam%2Eencoded"))
    refused(ask(guarded, "team", "GET", "/v0/topics/team%2f.x"), 403, "forbidden")


def test_scope_and_prefix_together(guarded: Server) -> None:
    ok(ask(guarded, "team-rw", "POST", "/v0/topics/team.rw", WRITE), 201)
    ok(ask(guarded, "team-rw", "POST", "/v0/topics/team.rw/diff"))
    refused(ask(guarded, "team-rw", "POST", "/v0/topics/tools:rw", WRITE), 403, "forbidden")
    refused(ask(guarded, "team-rw", "DELETE", "/v0/topics/team.rw"), 403, "forbidden")
    refused(ask(guarded, "team-rw", "PUT", "/v0/topics/team.rw"), 403, "forbidden")


def test_a_list_shows_what_the_key_may_see(guarded: Server) -> None:
    names = ["team.list-a", "team.list-b", "tools:list-a", "teams-list", "list-a"]
    for name in names:
        ask(guarded, "all", "PUT", f"/v0/topics/{name}")

    def listed(key: str, query: str = "") -> list[str]:
        rows = ok(ask(guarded, key, "GET", f"/v0/topics?page_size=1000&{query}"))["topics"]
        return [row["topic"] for row in rows if "list-" in row["topic"] or row["topic"] == "teams-list"]

    assert listed("read") == sorted(names)
    assert listed("team") == ["team.list-a", "team.list-b", "tools:list-a"]
    assert listed("team", "prefix=team") == ["team.list-a", "team.list-b"]
    assert listed("team", "prefix=team.list-b") == ["team.list-b"]
    assert listed("team", "prefix=list") == []
    assert listed("team-rw", "prefix=t") == ["team.list-a", "team.list-b"]


def test_pages_of_a_filtered_list(guarded: Server) -> None:
    names = [f"team.page-{i}" for i in range(5)]
    for name in [*names, "pager", "teams-page"]:
        ask(guarded, "all", "PUT", f"/v0/topics/{name}")
    seen: list[str] = []
    query = "/v0/topics?prefix=team.page&page_size=2"
    body = ok(ask(guarded, "team", "GET", query))
    while True:
        seen += [row["topic"] for row in body["topics"]]
        if "next_cursor" not in body:
            break
        body = ok(ask(guarded, "team", "GET", f"{query}&cursor={body['next_cursor']}"))
    assert seen == names


def test_dead_letters_stay_inside_of_the_prefixes(guarded: Server) -> None:
    name = fresh("team.dead")
    outside = {"type": "queue", "dead_letter": "other.dead"}
    for method, body in (("PUT", outside), ("POST", {**WRITE, "config": outside})):
        refused(
            ask(guarded, "team", method, f"/v0/topics/{name}", body),
            403,
            "forbidden",
            {"topic": "other.dead"},
        )
    inside = {"type": "queue", "dead_letter": "team.dead"}
    ok(ask(guarded, "team", "PUT", f"/v0/topics/{name}", inside), 201)
    ok(ask(guarded, "all", "PUT", f"/v0/topics/{name}", outside))


# -- requests in flight ------------------------------------------------------------------------------------


def test_requests_of_one_key_at_a_time(guarded: Server) -> None:
    """The order is 401, 429, 403; a slot is free again when a request ends, however it ends."""
    name = fresh("busy")
    ask(guarded, "all", "PUT", f"/v0/topics/{name}")
    path = f"/v0/topics/{name}/diff"
    polls = [
        Pending(guarded, "POST", path, {"wait_ms": 30_000}, bearer("busy")) for _ in range(IN_FLIGHT_MAX)
    ]
    until(lambda: ask(guarded, "busy", "GET", "/v0/topics").status == 429)
    detail = {"limit": "max_inflight_per_key", "max": IN_FLIGHT_MAX}
    for method, route in (("GET", "/v0/topics"), ("PUT", f"/v0/topics/{name}"), ("GET", "/v0/nowhere")):
        refused(ask(guarded, "busy", method, route), 429, "throttled", detail)
    refused(guarded.get("/v0/topics"), 401, "unauthorized")
    ok(ask(guarded, "read", "GET", "/v0/topics"))  # another key has its own slots
    assert guarded.get("/healthz").status == 200
    ok(ask(guarded, "all", "POST", f"/v0/topics/{name}", WRITE))
    for poll in polls:
        assert ok(poll.reply())["head_seq"] == 1
    ok(ask(guarded, "busy", "GET", "/v0/topics"))
    refused(ask(guarded, "busy", "PUT", f"/v0/topics/{name}"), 403, "forbidden")


# -- other key settings ------------------------------------------------------------------------------------

SPELLINGS = {
    "read": "read", "r": "read", "R": "read", "READ": "read", " read ": "read", "write": "write", "w": "write",
    "delete": "delete", "del": "delete", "d": "delete", "admin": "admin", "a": "admin", "rw": "read+write",
    "RW+D": "read+write+delete", "r+w+d+a": "read+write+delete+admin", "read + read": "read", "r++w": "read+write",
}  # fmt: skip
PROBES = {
    "read": ("GET", "/v0/topics", None),
    "write": ("POST", "/v0/topics/spelling", WRITE),
    "delete": ("POST", "/v0/topics/spelling/delete", {"before_seq": 0}),
    "admin": ("PUT", "/v0/topics/spelling", None),
}


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One key for each spelling of scopes, and probes that require a key."""
    spelled = ",".join(f"k{i}:{text}" for i, text in enumerate(SPELLINGS))
    environment = {
        "TOPICS_API_KEYS": f"root , r00t:: ,p1:: a. | b:c ,{spelled}",
        "TOPICS_PROBE_AUTH": "true",
    }
    with running(tmp_path_factory.mktemp("probed"), environment=environment) as server:
        until(lambda: server.get("/readyz", Authorization="Bearer root").status == 200)
        yield server


@pytest.mark.parametrize(("number", "text"), list(enumerate(SPELLINGS)))
def test_spellings_of_scopes(probed: Server, number: int, text: str) -> None:
    granted = SPELLINGS[text].split("+")
    probed.put("/v0/topics/spelling", Authorization="Bearer root")
    for scope, (method, path, body) in PROBES.items():
        reply = probed.request(method, path, body, {"Authorization": f"Bearer k{number}"})
        assert (reply.status == 403) == (scope not in granted), scope


def test_fields_of_an_entry_are_trimmed(probed: Server) -> None:
    for secret in ("root", "r00t"):
        ok(probed.get("/v0/topics", Authorization=f"Bearer {secret}"))
    for name, status in (("a.x", 200), ("b:cx", 200), ("b:", 403), (" a.", 403), ("c", 403)):
        path = f"/v0/topics/{name.replace(' ', '%20')}"
        assert probed.delete(path, Authorization="Bearer p1").status == status


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/v0/health", "/v0/ready"])
def test_probes_may_need_a_key(probed: Server, path: str) -> None:
    refused(probed.get(path), 401, "unauthorized")
    refused(probed.get(path, Authorization="Bearer nobody"), 401, "unauthorized")
    for key in ("root", "k3", "p1"):
        assert probed.get(path, Authorization=f"Bearer {key}").status == 200


def test_without_keys_the_header_is_ignored(shared_server: Server, topic: str) -> None:
    for authorization in ("Bearer nobody", "Basic x", "nonsense"):
        ok(shared_server.get("/v0/topics", Authorization=authorization))
    reply = shared_server.post(
        f"/v0/topics/{topic}", {**WRITE, "config": {"cap_records": 3}}, Authorization="Bearer nobody"
    )
    ok(reply, 201)


# -- refusals to start -------------------------------------------------------------------------------------


def refused_start(folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    return fork_server.refused({"TOPICS_DATA_DIR": str(folder / "data"), **environment})


@pytest.mark.parametrize("entry", ["read:reed", "x:read+everything", "x:+", "x:*", "ok,x:rwx:pre"])
def test_a_bad_key_entry_is_refused(tmp_path: Path, entry: str) -> None:
    secret = "swordfish"
    code, text = refused_start(tmp_path, {"TOPICS_API_KEYS": f"{secret}:r,{entry}"})
    assert code == 2
    assert "TOPICS_API_KEYS" in text
    assert secret not in text
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "environment",
    [
        {"TOPICS_HOST": "0.0.0.0"},
        {"TOPICS_HOST": "::"},
        {"TOPICS_HOST": "0.0.0.0:0"},
        {"TOPICS_HOST": "no-such-host.invalid"},
        {"TOPICS_HOST": "0.0.0.0", "TOPICS_ALLOW_INSECURE_NO_AUTH": "yes"},
        {"TOPICS_HOST": "0.0.0.0", "TOPICS_ALLOW_INSECURE_NO_AUTH": "0"},
        {"TOPICS_HOST": "0.0.0.0", "TOPICS_API_KEYS": " , ,:read,"},
    ],
)
def test_an_open_address_without_keys_is_refused(tmp_path: Path, environment: dict[str, str]) -> None:
    code, text = refused_start(tmp_path, environment)
    assert code == 2
    assert "TOPICS_ALLOW_INSECURE_NO_AUTH" in text


@pytest.mark.parametrize(
    "environment", [{"TOPICS_ALLOW_INSECURE_NO_AUTH": "true"}, {"TOPICS_API_KEYS": "s3cret"}]
)
def test_an_open_address_is_accepted_with_keys_or_explicit_consent(
    start_server: Callable[..., Server], environment: dict[str, str]
) -> None:
    server = start_server(environment={"TOPICS_HOST": "0.0.0.0", **environment}, wait_ready=False)
    assert server.host == "0.0.0.0"
