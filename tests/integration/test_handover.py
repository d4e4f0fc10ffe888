"""Connections handed over to workers and back: clients notice nothing, whatever they send and whichever process dies.

Method: a server that hands over at the first request, and its counters.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.contract import fresh
from tests.support.server import Server, is_alive, running, until
from topics.engine.core.placement import shard_of

SHARDS = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(
        tmp_path_factory.mktemp("handover"), environment={"TOPICS_HANDOVER": "1"}, shards=SHARDS
    ) as server:
        yield server


class Client:
    """One connection, kept open."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection("localhost", timeout=60)
        self._connection.sock = server.connect()
        self._sock = self._connection.sock
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # head and body are sent one by one

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        text = json.dumps(body) if body is not None else None
        self._connection.request(method, path, text, {"Content-Type": "application/json"})
        with self._connection.getresponse() as response:
            answer = response.read()
        assert self._connection.sock is self._sock, "the server has closed the connection"
        return response.status, json.loads(answer) if answer.startswith(b"{") else answer

    def write(self, topic: str, data: Any = 1) -> int:
        status, body = self.ask("POST", f"/v0/topics/{topic}", {"records": [{"data": data}]})
        assert status in (200, 201), body
        seq: int = body["first_seq"]
        return seq

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def connect() -> Iterator[Callable[[Server], Client]]:
    clients: list[Client] = []

    def connect(server: Server) -> Client:
        clients.append(Client(server))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def topic_of(shard: int) -> str:
    while shard_of(name := fresh("handed"), SHARDS) != shard:
        pass
    return name


def count(server: Server, name: str) -> int:
    text = server.get("/metrics").body.decode()
    return sum(int(n) for n in re.findall(rf"^topics_{name}\{{shard=\"\d+\"\}} (\d+)$", text, re.M))


def test_a_worker_serves_the_connection_of_its_topic(
    server: Server, connect: Callable[[Server], Client]
) -> None:
    client, topic = connect(server), topic_of(1)
    before = count(server, "handovers_total")
    assert [client.write(topic) for _ in range(5)] == [1, 2, 3, 4, 5]
    status, page = client.ask("POST", f"/v0/topics/{topic}/diff", {"limit": 3})
    assert (status, len(page["records"])) == (200, 3)
    assert count(server, "handovers_total") == before + 1
    assert count(server, "shard_connections") >= 1


def test_all_else_is_answered_by_the_front(server: Server, connect: Callable[[Server], Client]) -> None:
    client, topic = connect(server), topic_of(0)
    before = count(server, "handovers_returned_total")
    client.write(topic)
    assert client.ask("GET", f"/v0/topics/{topic}")[0] == 200
    assert client.ask("GET", "/v0/nowhere")[0] == 404
    assert client.write(topic) == 2
    assert client.ask("DELETE", f"/v0/topics/{topic}")[0] in (200, 204)
    assert count(server, "handovers_returned_total") >= before + 1


def test_a_connection_that_alternates_settles_at_the_front(
    server: Server, connect: Callable[[Server], Client]
) -> None:
    client, topics = connect(server), [topic_of(0), topic_of(1)]
    before = count(server, "handovers_total")
    for n in range(50):
        assert [client.write(topic) for topic in topics] == [n + 1] * 2
    assert count(server, "handovers_total") <= before + 2
    # It goes to a worker again once it stays with one shard.
    for _ in range(20):
        client.write(topics[0])
    assert count(server, "handovers_total") > before + 1


def test_pipelined_requests_for_several_processes_are_answered_in_order(server: Server) -> None:
    topics = [topic_of(0), topic_of(1)]
    requests = b""
    for n in range(40):
        body = b'{"records":[{"data":%d}]}' % n
        path = f"/v0/topics/{topics[n // 3 % 2]}" if n % 10 else "/v0/nowhere"
        requests += (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
    expected = [404 if n % 10 == 0 else 200 for n in range(40)]
    sock = server.connect()
    sock.sendall(requests)
    sock.settimeout(60)
    out = b""
    while out.count(b"HTTP/1.1 ") < 40:
        part = sock.recv(1 << 16)
        assert part, "the server has closed the connection"
        out += part
    sock.close()
    found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", out)]
    assert [min(status, 200) if status < 300 else status for status in found] == expected
    for at, topic in enumerate(topics):
        written = [n for n in range(40) if n % 10 and n // 3 % 2 == at]
        page = server.post(f"/v0/topics/{topic}/diff", {"limit": 100}).json
        assert [record["data"] for record in page["records"]] == written


def test_the_death_of_the_worker_closes_its_connections(
    start_server: Callable[..., Server], connect: Callable[[Server], Client]
) -> None:
    server = start_server(environment={"TOPICS_HANDOVER": "1"}, shards=1)
    client = connect(server)
    assert client.write("t") == 1
    until(lambda: count(server, "shard_connections") == 1 or client.write("t") == 0)
    os.kill(server.pid("shard 0"), signal.SIGKILL)
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        for _ in range(100):
            client.ask("POST", "/v0/topics/t", {"records": [{"data": 1}]})
    until(lambda: server.get("/v0/ready").status == 200)
    again = connect(server)
    assert again.write("t") >= 2
    until(lambda: again.write("t") and count(server, "shard_connections") == 1)


def test_the_death_of_the_front_does_not(
    start_server: Callable[..., Server], connect: Callable[[Server], Client]
) -> None:
    server = start_server(environment={"TOPICS_HANDOVER": "1"}, shards=1)
    client = connect(server)
    until(lambda: client.write("t") and count(server, "shard_connections") == 1)
    pid = server.pid("front 0")
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid))
    assert client.write("t") > 1
    until(lambda: server.get("/v0/ready").status == 200)
    assert client.write("t") > 2
    # The new front takes back what its predecessor has handed over.
    other = connect(server)
    until(lambda: other.write("t") and count(server, "shard_connections") == 2)
    assert client.ask("GET", "/v0/topics/t")[0] == 200


def test_a_stop_answers_open_requests_and_keeps_what_was_acknowledged(
    start_server: Callable[..., Server], connect: Callable[[Server], Client]
) -> None:
    server = start_server(environment={"TOPICS_HANDOVER": "1"}, shards=SHARDS)
    client, idle = connect(server), connect(server)
    topic = topic_of(1)
    until(lambda: client.write(topic) and idle.write(topic) and count(server, "shard_connections") == 2)
    last = client.write(topic)
    client._connection.request(
        "POST", f"/v0/topics/{topic}/diff", json.dumps({"from_seq": last, "wait_ms": 30_000}),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    assert server.stop() == 0
    response = client._connection.getresponse()
    assert response.status in (200, 503)
    response.read()
    server.start()
    assert server.get(f"/v0/topics/{topic}").json["head_seq"] == last


def test_requests_of_one_key_are_counted_over_all_processes(
    start_server: Callable[..., Server], connect: Callable[[Server], Client]
) -> None:
    """What a worker serves counts at the front, until its client disconnects or the worker dies."""
    environment = {
        "TOPICS_HANDOVER": "1",
        "TOPICS_API_KEYS": "root,polls:read",
        "TOPICS_MAX_INFLIGHT_PER_KEY": "2",
    }
    server = start_server(environment=environment, shards=1)
    root, polls = server.with_key("root"), server.with_key("polls")
    root.write("t", 1)
    body = b'{"from_seq":1,"wait_ms":30000}'
    poll = (
        b"POST /v0/topics/t/diff HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer polls\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )

    def fill() -> list[socket.socket]:
        waiting: list[socket.socket] = []

        def is_full() -> bool:
            waiting.append(server.connect())
            waiting[-1].sendall(poll)
            return polls.get("/v0/topics/t").status == 429

        until(is_full)
        return waiting

    for sock in fill():
        sock.close()
    until(lambda: polls.get("/v0/topics/t").status == 200)
    waiting = fill()
    os.kill(server.pid("shard 0"), signal.SIGKILL)
    until(lambda: polls.get("/v0/topics/t").status == 200)
    for sock in waiting:
        sock.close()
