"""Real servers for the integration tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.server import Server, running, until


@pytest.fixture(scope="session")
def session_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {"TOPICS_VERIFY": "1", "TOPICS_TEST_MIN_HEARTBEAT_MS": "20"}
    with running(tmp_path_factory.mktemp("server"), environment=environment) as server:
        yield server


@pytest.fixture(scope="module")
def shared_server(session_server: Server) -> Iterator[Server]:
    """One server per process, for tests that use only their own topics."""
    yield session_server
    drop_all(session_server)


def drop_all(server: Server) -> None:
    """With TOPICS_VERIFY the server checks all of its topics after every turn: those of other modules would make it slow."""
    for router in server.get("/v0/routers?page_size=1000").json["routers"]:
        server.delete(f"/v0/routers/{router['router']}")
    until(lambda: not left_of(server))


def left_of(server: Server) -> list[str]:
    """Deletes all topics; returns those that there were."""
    names = [row["topic"] for row in server.get("/v0/topics?page_size=1000").json["topics"]]
    for name in names:
        server.delete(f"/v0/topics/{quote(name, safe='')}")
    return names


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers for one test, with the options of `Server`; they are stopped when it ends."""
    servers: list[Server] = []
    numbers = itertools.count()

    def start(*, wait_ready: bool = True, **options: Any) -> Server:
        folder = options.pop("folder", None) or tmp_path / f"server-{next(numbers)}"
        folder.mkdir(exist_ok=True)
        server = Server(folder, **options)
        servers.append(server)
        return server.start(wait_ready=wait_ready)

    yield start
    for server in servers:
        server.close()


_topic_numbers = itertools.count(1)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> Iterator[str]:
    """A topic name that no other test uses."""
    name = f"t{next(_topic_numbers)}"
    yield name
    if "shared_server" in request.fixturenames:
        request.getfixturevalue("shared_server").delete(f"/v0/topics/{name}")
