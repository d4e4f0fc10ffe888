"""Goal: a hostile client cannot corrupt others' data, use up their slots or slow them down.

Method: attacks found in reviews, against a real server, with a normal client beside them.
"""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import fault
from tests.support.server import Server, until

KEYS = "root,reader:read:evil.,writer:write+delete:wd."
ROOT = {"Authorization": "Bearer root"}
READER = {"Authorization": "Bearer reader"}
WRITER = {"Authorization": "Bearer writer"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = Server(tmp_path_factory.mktemp("hostile"), environment={"TOPICS_API_KEYS": KEYS}, shards=1)
    try:
        yield made.start()
    finally:
        made.close()


def zipped(body: bytes) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    return {"body": gzip.compress(body), "headers": headers}


def test_keys_that_are_not_utf8_are_refused(server: Server) -> None:
    body = json.dumps({"records": [{"data": 1}]}).encode()
    for key in ("caf\xe9", "caf\xe8"):
        headers = {**ROOT, "Content-Type": "application/json", "Idempotency-Key": key}
        reply = server.request("POST", "/v0/topics/keys", body, headers)
        assert (reply.status, reply.error["code"]) == (400, "invalid_request")
    assert server.request("GET", "/v0/topics/keys", headers=ROOT).status == 404


@fault("request", "a huge body for a route without records", "413")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("diff", b'{"node":[%b"a"]}' % (b'"a",' * 500_000)),
        ("diff", b'{"from_seq":1,"wait_ms":30000,"pad":"%b"}' % (b"x" * (2 << 20))),
        ("delete", b'{"seqs":[%b1]}' % (b"1," * 1_000_000)),
    ],
)
def test_a_body_without_records_has_a_limit_of_its_own(server: Server, path: str, body: bytes) -> None:
    server.request("POST", "/v0/topics/evil.t", {"records": [{"data": 1}]}, ROOT)
    sent = zipped(body)
    reply = server.request("POST", f"/v0/topics/evil.t/{path}", sent["body"], {**ROOT, **sent["headers"]})
    assert (reply.status, reply.error["code"]) == (413, "payload_too_large")


@fault("request", "a read names too many nodes", "400")
def test_too_many_nodes_are_refused(server: Server) -> None:
    server.request("POST", "/v0/topics/evil.t", {"records": [{"data": 1}]}, ROOT)
    names = [f"n{i}" for i in range(257)]
    reply = server.request("POST", "/v0/topics/evil.t/diff", {"node": names}, READER)
    assert (reply.status, reply.error["code"]) == (400, "invalid_request")
    assert server.request("POST", "/v0/topics/evil.t/diff", {"node": names[:256]}, READER).status == 200
    assert server.request("POST", "/v0/topics/evil.t/diff", {"node": ["a"] * 300}, READER).status == 200


@fault("request", "more NDJSON lines than a write may have", "400 before they are parsed")
def test_too_many_lines_are_refused_unparsed(server: Server) -> None:
    headers = {**ROOT, "Content-Type": "application/x-ndjson"}
    reply = server.request("POST", "/v0/topics/lines", b"{}\n" * 5_000_000, headers)
    assert (reply.status, reply.error["code"]) == (400, "batch_too_large")


def cpu_s(server: Server) -> float:
    """CPU time of all its processes: unlike wall time it does not depend on what else the machine does."""
    stats = [
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in server.children().values()
    ]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def test_escapes_cost_no_more_than_other_text(server: Server) -> None:
    """Nine megabytes of escapes once took ten seconds, when each was handled separately."""
    text = '"' + "\\u0041" * 150_000 + '"'
    body = b'{"records":[%b]}' % ",".join(f'{{"data":{text}}}' for _ in range(10)).encode()
    headers = {**ROOT, "Content-Type": "application/json"}
    before = cpu_s(server)
    assert server.request("POST", "/v0/topics/escapes", body, headers).status == 201
    assert cpu_s(server) - before < 5
    state = server.request("GET", "/v0/topics/escapes", headers=ROOT).json
    assert state["bytes"] == 10 * (150_000 + 2)


def test_only_an_admin_creates_with_a_config_also_in_a_race(server: Server) -> None:
    path = "/v0/topics/wd.race"
    config = {"records": [{"data": 1}], "config": {"durability": "ephemeral", "cap_records": 1}}
    stop = threading.Event()

    def drop() -> None:
        while not stop.is_set():
            server.request("POST", path, {"records": [{"data": 1}]}, ROOT)
            server.request("DELETE", path, headers=WRITER)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(drop)
        try:
            replies = [server.request("POST", path, config, WRITER) for _ in range(150)]
        finally:
            stop.set()
    assert {reply.status for reply in replies} <= {200, 403}


def test_metrics_show_a_bound_key_its_own_topics_only(server: Server) -> None:
    for name in ("evil.mine", "payroll"):
        server.request("POST", f"/v0/topics/{name}", {"records": [{"data": 1}]}, ROOT)
    text = server.request("GET", "/v0/metrics", headers=READER).body.decode()
    assert 'topic="evil.mine"' in text
    assert "payroll" not in text


@fault("client", "clients disconnect during their long polls", "the polls are cancelled")
def test_long_polls_of_disconnected_clients_are_cancelled(start_server: Callable[..., Server]) -> None:
    """A client that closes, or shuts down its sending side, occupies a slot for seconds and not for 30."""
    made = start_server(environment={"TOPICS_API_KEYS": "root", "TOPICS_MAX_INFLIGHT_PER_KEY": "5"}, shards=1)
    made.request("POST", "/v0/topics/t", {"records": [{"data": 1}]}, ROOT)
    body = b'{"from_seq":1,"wait_ms":30000}'
    head = b"POST /v0/topics/t/diff HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer root\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    polls = [made.connect() for _ in range(5)]
    for connection in polls:
        connection.sendall(head + body)
    until(lambda: made.request("GET", "/v0/topics/t", headers=ROOT).status == 429)
    for connection in polls:
        connection.shutdown(1)  # SHUT_WR: cannot be told from a close
    assert (
        made.request("GET", "/v0/topics/t", headers=ROOT).status == 429
    )  # half-closed clients still wait for their answers
    until(lambda: made.request("GET", "/v0/topics/t", headers=ROOT).status == 200, 25)
    for connection in polls:
        connection.close()
