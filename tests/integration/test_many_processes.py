"""Goal: several fronts behave like one server: all give the same answers, and the death of one does not affect the others.

Method: two fronts on one port. Which one has a connection is read from its descriptors under /proc.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.support.faults import fault
from tests.support.server import Reply, Server, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("fronts"), {"TOPICS_FRONTS": "2"}, shards=3)
    try:
        yield made.start()
    finally:
        made.close()


def connections_of(pid: int, port: int) -> int:
    """The server's established connections that this process holds."""
    sockets = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            sockets.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
    held = 0
    with open(f"/proc/{pid}/net/tcp", encoding="ascii") as table:
        for line in table.readlines()[1:]:
            columns = line.split()
            local_port = int(columns[1].rpartition(":")[2], 16)
            held += local_port == port and columns[3] == "01" and f"socket:[{columns[9]}]" in sockets
    return held


class Client:
    """A persistent connection to one front."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection(server.host, server.port, timeout=120)
        self._connection.connect()

    def get(self, path: str, **headers: str) -> Reply:
        self._connection.request("GET", path, headers=headers)
        response = self._connection.getresponse()
        return Reply(response.status, dict(response.getheaders()), response.read())

    def close(self) -> None:
        self._connection.close()


def fronts_of(server: Server) -> dict[str, int]:
    return {name: pid for name, pid in server.children().items() if name.startswith("front")}


def held_by(server: Server) -> dict[str, int]:
    return {name: connections_of(pid, server.port) for name, pid in fronts_of(server).items()}


@pytest.fixture
def clients(server: Server) -> Iterator[list[Client]]:
    """Enough connections that both fronts have some; there are no others."""
    made = [Client(server) for _ in range(40)]
    for client in made:
        assert client.get("/v0/health").status == 200
    until(lambda: sum(held_by(server).values()) == len(made))
    yield made
    for client in made:
        client.close()


def test_both_fronts_serve(server: Server, clients: list[Client]) -> None:
    held = held_by(server)
    assert sorted(held) == ["front 0", "front 1"]
    assert all(count >= 1 for count in held.values()), held


def test_every_front_gives_the_same_answers(server: Server, clients: list[Client]) -> None:
    for i in range(30):
        assert server.write(f"same-{i}", i).status == 201
    lists, readies, metrics = set(), set(), set()
    for client in clients:
        page = client.get("/v0/topics?page_size=1000&prefix=same-").json
        lists.add(tuple((row["topic"], row["head_seq"]) for row in page["topics"]))
        readies.add(client.get("/readyz").body)
        report = client.get("/v0/metrics", Accept="application/json").json
        metrics.add((report["topics"], report["records_live"], report["bytes_live"], report["ready"]))
    assert (len(lists), len(readies), len(metrics)) == (1, 1, 1)
    assert len(next(iter(lists))) == 30


def test_a_write_through_one_front_is_read_through_every_front(server: Server, clients: list[Client]) -> None:
    for i in range(20):
        assert server.write("mixed", i).status in (200, 201)
    for client in clients:
        assert client.get("/v0/topics/mixed").json["head_seq"] == 20


@fault("front", "one of several fronts is killed", "clients of the others notice nothing")
def test_the_death_of_a_front_does_not_affect_the_other(server: Server, clients: list[Client]) -> None:
    fronts = fronts_of(server)
    doomed, survivor = fronts["front 0"], fronts["front 1"]
    # A connection from the start, which is not one of these, may still be open on the server's side.
    until(lambda: sum(connections_of(front, server.port) for front in fronts.values()) == len(clients))
    kept = connections_of(survivor, server.port)
    os.kill(doomed, signal.SIGKILL)
    until(lambda: doomed not in server.children().values())
    served = lost = 0
    for client in clients:
        try:
            served += client.get("/readyz").status == 200
        except (OSError, http.client.HTTPException):
            lost += 1
    assert (served, lost) == (kept, len(clients) - kept)
    until(lambda: server.children().get("front 0") not in (None, doomed))
    assert server.children()["front 1"] == survivor
    for i in range(20):  # new connections go to both again
        assert server.write("after", i).status in (200, 201)


@fault(
    "worker",
    "a worker is killed under several fronts",
    "every front refuses its topics at once, and serves them again when it is back",
)
def test_every_front_notices_the_death_of_a_worker(start_server: Callable[..., Server]) -> None:
    server = start_server(environment={"TOPICS_FRONTS": "2"})
    made = [Client(server) for _ in range(20)]

    def all_refuse() -> bool:
        """Its successors are killed too, and start later each time: until one is down while all of these are asked."""
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(server.children()["shard 1"], signal.SIGKILL)
        return all(client.get("/readyz").status == 503 for client in made)

    until(all_refuse)
    until(lambda: all(client.get("/readyz").status == 200 for client in made))
    for client in made:
        client.close()
