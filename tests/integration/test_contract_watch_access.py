"""Goal: authorization of watches, the order of refusals, caps on sessions and streams, and streams when the server stops.

Method: one server with a key for each case; separate servers for caps and for the stop. Freed slots are polled for.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.contract import Json, fresh, ok, refused
from tests.support.h2_client import Http2Client
from tests.support.server import Reply, Server, running, until
from tests.support.sse_client import EventStream, Http2Stream, Protocol, follow, open_stream, try_open, watch
from tests.support.ws_client import Closed, WebSocket, refused_upgrade

PER_KEY_MAX = 3
NO_WID = "/v0/watch/wid_AAAAAAAAAAAAAAAAAAAAAA"
KEYS = "s3cret-all,s3cret-read:read,s3cret-write:write,s3cret-team::team.,s3cret-busy:read,s3cret odd&=:read"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {"TOPICS_API_KEYS": KEYS, "TOPICS_MAX_SSE_CONNECTIONS_PER_KEY": str(PER_KEY_MAX)}
    with running(tmp_path_factory.mktemp("watched"), environment=environment) as server:
        yield server
        assert "s3cret" not in server.log


@pytest.fixture
def full_access(guarded: Server) -> Server:
    return guarded.with_key("s3cret-all")


@pytest.fixture
def watched(full_access: Server) -> str:
    name = fresh("watched")
    ok(full_access.write(name, 1), 201)
    return name


# -- POST --------------------------------------------------------------------------------------------------


def test_a_watch_needs_a_key_that_may_read(guarded: Server, watched: str) -> None:
    body = {"topics": {watched: {}}}
    for token in ("", "?token=s3cret-all"):
        refused(guarded.post(f"/v0/watch{token}", body), 401, "unauthorized")
    refused(guarded.with_key("nobody").post("/v0/watch", b"{"), 401, "unauthorized")
    # The scope is checked before the body.
    for sent in (body, b"{", {"topics": {"absent": {}}}):
        refused(guarded.with_key("s3cret-write").post("/v0/watch", sent), 403, "forbidden", {})
    for secret in ("s3cret-read", "s3cret-all"):
        ok(guarded.with_key(secret).post("/v0/watch", body))


def test_names_outside_of_the_prefixes(guarded: Server, full_access: Server, watched: str) -> None:
    inside = fresh("team.a")
    ok(full_access.write(inside, 1), 201)
    team = guarded.with_key("s3cret-team")
    assert list(watch(team, inside)["topics"]) == [inside]
    for other in (watched, "absent", "teams", "Team.a"):
        for query in ("", "?lenient=true"):
            reply = team.post(f"/v0/watch{query}", {"topics": {inside: {}, other: {}}})
            refused(reply, 403, "forbidden", {"topic": other})


def test_the_order_of_refusals(guarded: Server, watched: str) -> None:
    team = guarded.with_key("s3cret-team")
    forbidden, absent = {watched: {}}, {fresh("team.absent"): {}}
    refused(
        team.request("POST", "/v0/watch", b"{", {"Content-Type": "text/plain"}), 415, "unsupported_media_type"
    )
    refused(team.post("/v0/watch", {"topics": forbidden, "consistency": "no"}), 400, "invalid_request")
    refused(team.post("/v0/watch", {"topics": {}}), 400, "invalid_request")
    refused(team.post("/v0/watch", {"topics": {**absent, **forbidden}}), 403, "forbidden")
    refused(team.post("/v0/watch", {"topics": absent}), 404, "topic_not_found")


# -- GET ---------------------------------------------------------------------------------------------------


def get(server: Server, path: str, protocol: Protocol, **headers: str) -> Reply:
    if protocol == "http1":
        return server.get(path, **headers)
    client = Http2Client(server)
    try:
        return client.request("GET", path, {**server.credentials, **headers}.items())
    finally:
        client.close()


@pytest.mark.parametrize("protocol", ["http1", "h2c"])
@pytest.mark.parametrize("accept", ["text/html", "application/json", "text/*;q=1"])
def test_requests_that_do_not_accept_a_stream(
    guarded: Server, watched: str, protocol: Protocol, accept: str
) -> None:
    session = watch(guarded.with_key("s3cret-all"), watched)
    for path in (NO_WID, session["stream_url"]):  # before existence and owner are checked
        refused(get(guarded, path, protocol, Accept=accept), 406, "not_acceptable")


@pytest.mark.parametrize(
    "accept",
    [
        "text/event-stream",
        "Text/Event-Stream",
        "*/*",
        "text/html, text/event-stream;q=0.5",
        "text/html,*/*;q=0.1",
    ],
)
@pytest.mark.parametrize("protocol", ["http1", "h2c"])
def test_requests_that_accept_a_stream(
    full_access: Server, watched: str, protocol: Protocol, accept: str
) -> None:
    stream = open_stream(full_access, watch(full_access, watched), protocol=protocol, Accept=accept)
    stream.take("record", "caught-up")
    stream.close()


@pytest.mark.parametrize("protocol", ["http1", "h2c"])
@pytest.mark.parametrize(
    "path", [NO_WID, "/v0/watch/x", "/v0/watch/wid_", "/v0/watch/%00", "/v0/watch/" + "a" * 300]
)
def test_an_unknown_wid_is_not_found(guarded: Server, path: str, protocol: Protocol) -> None:
    for server in (guarded, guarded.with_key("nobody"), guarded.with_key("s3cret-all")):
        refused(get(server, path, protocol), 404, "not_found")


@pytest.mark.parametrize("protocol", ["http1", "h2c"])
def test_a_stream_is_its_maker_s(guarded: Server, watched: str, protocol: Protocol) -> None:
    maker = guarded.with_key("s3cret-read")
    path = watch(maker, watched)["stream_url"]
    others = ["nobody", "s3cret-all", "s3cret-write", "s3cret-rea", "S3CRET-READ", ""]
    for server in (guarded, *(guarded.with_key(secret) for secret in others)):
        refused(get(server, path, protocol), 401, "unauthorized")
        assert server.request("HEAD", path).status == 401
    for other in others:
        refused(get(guarded, f"{path}?token={other}", protocol), 401, "unauthorized")
    stream = open_stream(maker, path, protocol=protocol)
    stream.take("record", "caught-up")
    stream.close()


@pytest.mark.parametrize("protocol", ["http1", "h2c"])
@pytest.mark.parametrize(
    ("secret", "query"),
    [
        ("s3cret-read", "?token=s3cret-read"),
        ("s3cret-read", "?token=s3cret%2Dread"),
        ("s3cret-read", "?x=1&token=s3cret-read&token=nobody"),
        ("s3cret odd&=", "?token=s3cret+odd%26%3D"),
        ("s3cret odd&=", "?token=s3cret%20odd%26%3d"),
    ],
)
def test_a_key_in_the_query(
    guarded: Server, watched: str, secret: str, query: str, protocol: Protocol
) -> None:
    session = watch(guarded.with_key(secret), watched)
    stream = open_stream(guarded, session, query=query, protocol=protocol)
    stream.take("record", "caught-up")
    stream.close()


def test_the_first_token_counts_and_only_for_streams(guarded: Server, watched: str) -> None:
    path = watch(guarded.with_key("s3cret-read"), watched)["stream_url"]
    refused(guarded.get(f"{path}?token=nobody&token=s3cret-read"), 401, "unauthorized")
    refused(guarded.get(f"/v0/topics/{watched}?token=s3cret-all"), 401, "unauthorized")
    refused(refused_upgrade(guarded, path="/v0/ws?token=s3cret-all"), 401, "unauthorized")


def test_a_session_made_without_keys_needs_none(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, 1)
    session = watch(shared_server, topic)
    stream = open_stream(shared_server, session, Authorization="Bearer nobody", query="?token=nobody")
    stream.take("record", "caught-up")
    stream.close()


# -- caps --------------------------------------------------------------------------------------------------


def open_once(server: Server, session: Json) -> EventStream:
    """Retried until there is a free slot."""
    stream: EventStream = until(lambda: try_open(server, session))
    return stream


def test_streams_are_counted_per_key(guarded: Server, full_access: Server, watched: str) -> None:
    busy = guarded.with_key("s3cret-busy")
    sessions = [watch(busy, watched) for _ in range(PER_KEY_MAX + 1)]
    streams = [
        open_stream(busy, sessions[0]),
        open_stream(busy, sessions[1], protocol="h2c"),
    ]
    websocket = WebSocket(busy)
    last = sessions[PER_KEY_MAX]["stream_url"]
    for protocol in ("http1", "h2c"):
        refused(get(busy, last, protocol), 429, "throttled")
        # The owner is checked before the count.
        refused(get(full_access, last, protocol), 401, "unauthorized")
        refused(get(busy, NO_WID, protocol), 404, "not_found")
    refused(refused_upgrade(busy), 429, "throttled")
    refused(get(guarded, f"{last}?token=s3cret-busy", "http1"), 429, "throttled")
    follow(full_access, watched).close()  # other keys have their own count
    ok(busy.get("/v0/topics"))  # and requests have theirs

    # However a stream ends, its slot is free again.
    streams[0].close()
    streams[0] = open_once(busy, sessions[3])
    second = streams[1]
    assert isinstance(second, Http2Stream)
    second.leave()
    streams[1] = open_once(busy, sessions[2])
    websocket.close()
    streams.append(open_once(busy, sessions[0]))
    for stream in streams:
        stream.close()


def sse_connections(server: Server) -> int:
    return int(ok(server.get("/v0/metrics", Accept="application/json"))["sse_connections"])


def test_the_server_s_caps(start_server: Callable[..., Server]) -> None:
    limits = {"TOPICS_MAX_WATCH_SESSIONS": "5", "TOPICS_MAX_SSE_CONNECTIONS": "2"}
    server = start_server(environment=limits, shards=3)
    for name in ("t", "doomed"):
        ok(server.write(name, 1), 201)

    def make(number: int) -> Reply:
        return server.post("/v0/watch", {"topics": {"doomed" if number % 2 else "t": {}}})

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(make, range(16)))
    sessions: list[Json] = [ok(reply) for reply in replies if reply.status == 200]
    assert len(sessions) == 5  # check and reservation are one step
    for reply in replies:
        if reply.status != 200:
            refused(reply, 429, "throttled", {"limit": "max_watch_sessions", "max": 5})
    refused(server.post("/v0/watch", {"topics": {"absent": {}}}), 404, "topic_not_found")
    assert ok(server.get("/v0/metrics", Accept="application/json"))["watch_sessions"] == 5

    first, second = (open_stream(server, session) for session in sessions[:2])
    until(lambda: sse_connections(server) == 2)
    for protocol in ("http1", "h2c"):
        refused(get(server, sessions[2]["stream_url"], protocol), 429, "throttled")
        refused(get(server, NO_WID, protocol), 404, "not_found")
        refused(get(server, sessions[2]["stream_url"], protocol, Accept="text/html"), 406, "not_acceptable")
    refused(refused_upgrade(server), 429, "throttled")
    first.close()
    until(lambda: sse_connections(server) == 1)
    websocket = WebSocket(server)
    refused(get(server, sessions[2]["stream_url"], "http1"), 429, "throttled")
    websocket.close()
    until(lambda: sse_connections(server) == 1)
    second.close()
    until(lambda: sse_connections(server) == 0)
    # A stream that the server ends frees its slot, too.
    doomed = [
        open_stream(server, session)
        for session in [session for session in sessions if "doomed" in session["topics"]][:2]
    ]
    server.delete("/v0/topics/doomed")
    for stream in doomed:
        assert stream.rest()[-1].event == "topic-deleted"
    until(lambda: sse_connections(server) == 0)


# -- server stop -------------------------------------------------------------------------------------------


def test_a_stop_ends_streams_with_an_error_frame(start_server: Callable[..., Server]) -> None:
    server = start_server()
    ok(server.write("t", 1), 201)
    session = watch(server, "t")
    streams = [open_stream(server, session), follow(server, "t"), follow(server, "t", "h2c")]
    for stream in streams:
        stream.take("record", "caught-up")
    websocket = WebSocket(server)
    websocket.ask("subscribe", topic="t", request_id=1)
    websocket.take("record", "caught_up")
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    for stream in streams:
        [error] = stream.rest()
        assert (error.event, error.data["code"]) == ("error", "server_shutting_down")
    last = websocket.next()
    assert (last["op"], last["code"]) == ("error", "server_shutting_down")
    with pytest.raises(Closed):
        websocket.next()
    assert server.process.wait(120) == 0
