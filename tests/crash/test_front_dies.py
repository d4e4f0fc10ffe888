"""Goal: a front holds no state: when it dies, clients lose connections, but no data, and the port stays open.

Method: kill -9 of the front under load; connections made while there is no front must be served by the next one.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable

import pytest

from tests.crash.load import acks, check_all, load, topics_on
from tests.crash.processes import kill, stopped
from tests.support.faults import fault
from tests.support.server import Server, until

pytestmark = pytest.mark.crash

HANG_MS = "3000"  # longer than a start on a busy machine: a child that is still importing cannot answer
TOPICS = topics_on(0, 2, 2) + topics_on(1, 2, 2)


@fault(
    "front",
    "killed (-9) while clients write",
    "connections break; the workers continue; no acked write is lost",
)
def test_a_front_s_death_costs_no_data_and_no_worker(start_server: Callable[..., Server]) -> None:
    server = start_server()
    workers = {name: pid for name, pid in server.children().items() if name.startswith("shard")}
    with load(server, TOPICS, front_dies=True) as writers:
        for _ in range(2):
            target = acks(writers) + 200
            until(lambda target=target: acks(writers) >= target)
            kill(server.pid("front 0"))
        target = acks(writers) + 200
        until(lambda: acks(writers) >= target)
    check_all(server, writers)
    children = server.children()
    assert {name: children[name] for name in workers} == workers


def ask(connection: http.client.HTTPConnection, i: int) -> None:
    body = b'{"records":[{"data":%d}]}' % i
    connection.request("POST", "/v0/topics/t", body, {"Content-Type": "application/json"})


def answer(connection: http.client.HTTPConnection, i: int) -> int:
    """The status; repeated while the shard answers that it did not execute the request in time."""
    deadline_s = time.monotonic() + 120
    while True:
        reply = connection.getresponse()
        if reply.status != 503 or time.monotonic() > deadline_s:
            return reply.status
        assert json.loads(reply.read())["error"]["code"] == "not_ready"
        ask(connection, i)


@fault("front", "connections are made while there is none", "the next front serves them")
def test_a_connection_made_while_there_is_no_front_is_served_by_the_next(
    start_server: Callable[..., Server],
) -> None:
    server = start_server()
    front = server.pid("front 0")
    assert server.process is not None
    with stopped(server.process.pid):  # so it is not restarted
        kill(front)
        connections = []
        for i in range(50):
            connection = http.client.HTTPConnection(server.host, server.port, timeout=120)
            ask(connection, i)
            connections.append(connection)
    statuses = [answer(connection, i) for i, connection in enumerate(connections)]
    for connection in connections:
        connection.close()
    assert sorted(statuses) == [200] * 49 + [201]
    assert server.diff("t", limit=100).json["head_seq"] == 50


@fault("front", "it hangs", "the supervisor restarts it; the port stays open")
def test_a_front_that_hangs_is_replaced(start_server: Callable[..., Server]) -> None:
    server = start_server(environment={"TOPICS_PING_TIMEOUT_MS": HANG_MS})
    hung = server.pid("front 0")
    with stopped(hung):
        assert server.write("t", 1).status == 201  # by the next front
    assert server.pid("front 0") != hung
