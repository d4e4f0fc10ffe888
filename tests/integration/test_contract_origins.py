"""Contract, "Origin and Host": requests from web pages of other origins, and for foreign host names, are refused over every protocol.

Method: the same request as bytes for the fast path, for the full parser (with one more header) and over HTTP/2; also upgrades and streams.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.contract import refused
from tests.support.h2_client import Http2Client
from tests.support.raw_http import RawClient
from tests.support.server import Reply, Server, running
from tests.support.ws_client import upgrade_headers

APP, EVIL = "https://app.example", "http://evil.example"
WAYS = ("fast", "full", "http2")
BODY_MAX = 128 * 1024
CRLF = "\r\n"


def ask(
    server: Server,
    way: str,
    method: str,
    path: str,
    host: str = "localhost",
    body: bytes = b"",
    **headers: str,
) -> Reply:
    fields = [(name.replace("_", "-"), value) for name, value in {**server.credentials, **headers}.items()]
    if body:
        fields.append(("Content-Type", "application/json"))
    if way == "http2":
        h2 = Http2Client(server, authority=host)
        try:
            return h2.request(method, path, fields, body)
        finally:
            h2.close()
    if way == "full":
        fields.append(("X-Anything", "1"))
    if method == "POST":
        fields.append(("Content-Length", str(len(body))))
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {host}",
        *(f"{name}: {value}" for name, value in fields),
        "",
        "",
    ]
    client = RawClient(server)
    try:
        client.send("\r\n".join(lines).encode() + body)
        return client.read(with_body=method != "HEAD")
    finally:
        client.close()


@pytest.fixture(scope="module")
def listing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {
        "TOPICS_ALLOWED_HOSTS": "topics,x",
        "TOPICS_CORS_ORIGINS": APP,
        "TOPICS_MAX_BODY_BYTES": str(BODY_MAX),
    }
    with running(tmp_path_factory.mktemp("listing"), environment=environment) as server:
        yield server


@pytest.fixture(scope="module")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {"TOPICS_API_KEYS": "root", "TOPICS_CORS_ORIGINS": APP}
    with running(tmp_path_factory.mktemp("keyed"), environment=environment) as server:
        yield server.with_key("root")


ROUTES = [
    ("POST", "/v0/topics/{topic}/diff"),
    ("POST", "/v0/topics/{topic}"),
    ("GET", "/v0/topics/{topic}"),
    ("DELETE", "/v0/topics/{topic}"),
    ("GET", "/v0/topics/{topic}/work"),
    ("GET", "/v0/watch/unknown"),
    ("GET", "/v0/health"),
    ("GET", "/"),
    ("GET", "/nothing/here"),
    ("PATCH", "/v0/topics/{topic}"),
    ("OPTIONS", "/v0/topics/{topic}"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_refuses_other_pages_and_names(
    shared_server: Server, topic: str, way: str, method: str, path: str
) -> None:
    shared_server.write(topic, 1)
    path = path.format(topic=topic)
    body = b'{"records":[{"data":2}]}' if path.endswith(topic) and method == "POST" else b""
    for origin in (EVIL, "null", "http://localhost:1"):
        reply = ask(shared_server, way, method, path, body=body, Origin=origin)
        refused(reply, 403, "forbidden_origin", {"origin": origin})
        assert "access-control-allow-origin" not in reply.headers
    for host in ("evil.example", "evil.example:4000"):
        refused(ask(shared_server, way, method, path, host, body), 421, "misdirected_request", {"host": host})
        reply = ask(shared_server, way, method, path, host, body, Origin=f"http://{host}")
        refused(reply, 421, "misdirected_request", {"host": host})
    assert shared_server.get(f"/v0/topics/{topic}").json["head_seq"] == 1


@pytest.mark.parametrize("way", WAYS)
def test_the_servers_own_pages_and_names_are_served(shared_server: Server, topic: str, way: str) -> None:
    shared_server.write(topic, 1)
    path = f"/v0/topics/{topic}/diff"
    own = f"{shared_server.host}:{shared_server.port}"
    for host in (own, "localhost", "LOCALHOST:1", "[::1]:4000", "10.0.0.1"):
        assert ask(shared_server, way, "POST", path, host).status == 200
        reply = ask(shared_server, way, "POST", path, host, Origin=f"http://{host}")
        assert reply.status == 200
        assert not {"vary", "access-control-allow-origin"} & set(reply.headers)


def test_the_fast_path_is_taken(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, 1)
    path = f"/v0/topics/{topic}/diff"
    client = RawClient(shared_server)
    try:
        for line, status in (("", 200), ("Origin: http://localhost\r\n", 200), (f"Origin: {EVIL}\r\n", 403)):
            client.send(
                f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{line}Content-Length: 0\r\n\r\n".encode()
            )
            assert client.read().status == status  # and the connection stays open
    finally:
        client.close()


def test_unusual_headers(shared_server: Server) -> None:
    def status(text: str) -> int:
        client = RawClient(shared_server)
        try:
            client.send(text.replace("\n", "\r\n").encode())
            return client.read().status
        finally:
            client.close()

    assert status("GET /v0/health HTTP/1.0\n\n") == 200
    assert status("GET /v0/health HTTP/1.0\nOrigin: http://localhost\n\n") == 403
    assert status("GET /v0/health HTTP/1.1\nHost:\n\n") == 200
    # The target's authority takes precedence over Host.
    assert status("GET http://evil.example/v0/health HTTP/1.1\nHost: localhost\n\n") == 421
    assert status("GET http://localhost/v0/health HTTP/1.1\nHost: evil.example\n\n") == 200
    twice = "Origin: http://localhost\n" * 2
    assert status(f"GET /v0/health HTTP/1.1\nHost: localhost\n{twice}\n") == 403
    assert status(f"POST /v0/topics/t/diff HTTP/1.1\nHost: localhost\n{twice}Content-Length: 0\n\n") == 403


def test_an_upgrade_checks_the_origin(
    shared_server: Server, listing_server: Server, keyed_server: Server
) -> None:
    def upgrade(server: Server, **headers: str) -> Reply:
        return ask(server, "full", "GET", "/v0/ws", **upgrade_headers(server, **headers))

    for server, also in ((shared_server, 403), (listing_server, 101), (keyed_server, 101)):
        assert upgrade(server).status == 101
        assert upgrade(server, Origin="http://localhost").status == 101
        assert upgrade(server, Origin=APP).status == also
        refused(upgrade(server, Origin=EVIL), 403, "forbidden_origin", {"origin": EVIL})
    keyless = Server(keyed_server.folder, host=keyed_server.host, port=keyed_server.port)
    assert upgrade(keyless, Origin=EVIL).status == 403  # checked before the key
    assert upgrade(keyless, Origin=APP).status == 401


@pytest.mark.parametrize("way", WAYS)
def test_listed_pages_and_names(listing_server: Server, topic: str, way: str) -> None:
    listing_server.write(topic, 1)
    path = f"/v0/topics/{topic}/diff"
    assert ask(listing_server, way, "POST", path, "topics:4000").status == 200
    assert ask(listing_server, way, "POST", path, "other:4000").status == 421
    for target, status in ((path, 200), ("/v0/topics/none/diff", 404)):
        reply = ask(listing_server, way, "POST", target, Origin=APP)
        assert reply.status == status
        assert (reply.headers["access-control-allow-origin"], reply.headers["vary"]) == (APP, "Origin")
    assert ask(listing_server, way, "POST", path).headers["vary"] == "Origin"
    assert ask(listing_server, way, "POST", path, Origin=EVIL).status == 403
    # A stream, and an answer before the body is read.
    session = json.loads(
        ask(listing_server, way, "POST", "/v0/watch", body=b'{"topics":{"%b":{}}}' % topic.encode()).body
    )
    stream = ask(listing_server, "full", "GET", session["stream_url"], Origin=APP)
    assert (stream.status, stream.headers["access-control-allow-origin"]) == (200, APP)
    early = ask(listing_server, way, "POST", f"/v0/topics/{topic}/ack", Origin=APP, Content_Type="text/plain")
    assert (early.status, early.headers["access-control-allow-origin"]) == (415, APP)


def early_refusals(server: Server, way: str) -> Iterator[Reply]:
    """Answers that are sent before the request is read completely."""
    path, large = "/v0/topics/t", b"x" * (BODY_MAX + 1)
    yield ask(server, way, "POST", path, body=large, Origin=APP)  # 413
    yield ask(server, way, "PATCH", path, Origin=APP)  # 405
    yield ask(server, way, "POST", path, Origin=APP, Content_Type="text/plain")  # 415
    if way == "http2":
        h2 = Http2Client(server, authority="localhost")
        fields = [("content-type", "application/json"), ("origin", APP)]
        yield h2.request("POST", path, fields, large)  # 413, without a length
        h2.close()
        return
    length = f"Content-Length: 1{CRLF}Content-Length: 2"
    long_header = "X: " + "x" * 20_000
    chunked = "Content-Type: application/json" + CRLF + "Transfer-Encoding: chunked"
    for line, headers, body in (
        ("POST  /v0 HTTP/1.1", "", b""),  # 400
        (f"POST {path} HTTP/1.1", length, b""),  # 400
        (f"POST {path} HTTP/1.1", long_header, b""),  # 431
        (f"POST {path} HTTP/1.1", chunked, b"%x\r\n%b\r\n0\r\n\r\n" % (len(large), large)),  # 413
    ):
        client = RawClient(server)
        head = CRLF.join([line, "Host: localhost", f"Origin: {APP}", headers or "X: y", "", ""])
        client.send(head.encode() + body)
        yield client.read()
        client.close()


@pytest.mark.parametrize("way", ("full", "http2"))
def test_a_listed_page_can_read_early_refusals(
    listing_server: Server, keyed_server: Server, way: str
) -> None:
    keyless = Server(keyed_server.folder, host=keyed_server.host, port=keyed_server.port)
    replies = [*early_refusals(listing_server, way), ask(keyless, way, "POST", "/v0/topics/t", Origin=APP)]
    assert {reply.status for reply in replies} >= {401, 405, 413, 415} | (
        {400, 431} if way == "full" else set()
    )
    for reply in replies:
        assert 400 <= reply.status < 500
        assert reply.headers["access-control-allow-origin"] == APP, reply.status


def test_a_listed_page_can_use_and_read_all_headers(listing_server: Server) -> None:
    document = listing_server.get("/v0/openapi.json").json
    sent, read = set(), set()
    for operations in document["paths"].values():
        for operation in operations.values():
            parameters = operation.get("parameters", []) if isinstance(operation, dict) else []
            sent |= {each["name"] for each in parameters if each.get("in") == "header"}
            for response in operation["responses"].values() if isinstance(operation, dict) else ():
                read |= set(response.get("headers", ()))
    reply = ask(listing_server, "full", "OPTIONS", "/v0/topics/t", Origin=APP)
    assert {name.lower() for name in sent | {"Topics-Strict"}} <= listed(
        reply, "access-control-allow-headers"
    )
    reply = ask(listing_server, "fast", "POST", "/v0/topics/none/diff", Origin=APP)
    expected = {name.lower() for name in read | {"Topics-Ignored", "Retry-After"}}
    assert expected <= listed(reply, "access-control-expose-headers") | {"cache-control", "content-type"}


def listed(reply: Reply, header: str) -> set[str]:
    return set(reply.headers[header].lower().split(", "))


@pytest.mark.parametrize("way", WAYS)
def test_with_keys_only_upgrades_are_refused(keyed_server: Server, topic: str, way: str) -> None:
    keyed_server.write(topic, 1)
    path = f"/v0/topics/{topic}/diff"
    for host, origin in (("evil.example", EVIL), ("evil.example", "null"), ("any", "http://any")):
        reply = ask(keyed_server, way, "POST", path, host, Origin=origin)
        assert reply.status == 200
        assert "access-control-allow-origin" not in reply.headers
    assert ask(keyed_server, way, "POST", path, Origin=APP).headers["access-control-allow-origin"] == APP


@pytest.mark.parametrize("way", ("full", "http2"))
def test_a_preflight_needs_no_key(listing_server: Server, keyed_server: Server, way: str) -> None:
    keyless = Server(keyed_server.folder, host=keyed_server.host, port=keyed_server.port)
    for server in (listing_server, keyless):
        reply = ask(server, way, "OPTIONS", "/v0/topics/t", Origin=APP, Access_Control_Request_Method="PUT")
        assert (reply.status, reply.body) == (204, b"")
        assert reply.headers["access-control-allow-origin"] == APP
        assert "PUT" in reply.headers["access-control-allow-methods"]
        assert "Authorization" in reply.headers["access-control-allow-headers"]
    assert ask(keyless, way, "OPTIONS", "/v0/topics/t", Origin=EVIL).status == 401
    assert ask(keyless, way, "POST", "/v0/topics/t/diff", Origin=APP).status == 401


@pytest.mark.parametrize("way", ("full", "http2"))
@pytest.mark.parametrize("path", ["work?node=n", "consumers/c/stream?node=n"])
def test_a_page_cannot_lease_jobs_unseen(shared_server: Server, topic: str, way: str, path: str) -> None:
    """An <img> sends no Origin header, but Sec-Fetch-Site says that it is for another site."""
    shared_server.put(f"/v0/topics/{topic}", {"type": "queue"})
    for site in ("cross-site", "same-site"):
        reply = ask(shared_server, way, "GET", f"/v0/topics/{topic}/{path}", Sec_Fetch_Site=site)
        refused(reply, 403, "forbidden_origin", {})
    reply = ask(shared_server, "full", "GET", f"/v0/topics/{topic}/work?node=n", Sec_Fetch_Site="same-origin")
    assert reply.status == 200
    assert ask(shared_server, way, "GET", f"/v0/topics/{topic}", Sec_Fetch_Site="cross-site").status == 200
