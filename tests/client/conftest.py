"""Servers and clients for the tests of the client: each test runs with the sync and the async one, on one server."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.client.both_clients import Loop, make
from tests.support.cutting_proxy import CuttingProxy, cutting
from topics import Client
from topics.testing import TestServer, running_server

ENVIRONMENT = {
    "TOPICS_VERIFY": "1",
    "TOPICS_TEST_MIN_HEARTBEAT_MS": "20",
    "TOPICS_LOG_FORMAT": "json",
    "TOPICS_API_KEYS": "root,reader:read:open.",
}


@pytest.fixture(scope="session")
def session_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServer]:
    with running_server(tmp_path_factory.mktemp("client"), shards=2, environment=ENVIRONMENT) as server:
        yield server


@pytest.fixture(scope="module")
def server(session_server: TestServer) -> Iterator[TestServer]:
    """For tests that use only their own topics."""
    yield session_server
    # With TOPICS_VERIFY it checks all of its topics after every turn.
    with Client(session_server.url, token="root") as client:
        for row in list(client.topics()):
            client.delete_topic(row.topic)


@pytest.fixture(scope="session")
def restartable_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServer]:
    """A server that a test may stop and start."""
    with running_server(tmp_path_factory.mktemp("restartable_server"), environment=ENVIRONMENT) as server:
        yield server


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(params=["threads", "asyncio"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def connect(kind: str, loop: Loop) -> Iterator[Callable[..., Any]]:
    """Makes a client of this kind; it is closed when the test ends."""
    clients: list[Any] = []

    def connect(url: str, **options: Any) -> Any:
        options.setdefault("token", "root")
        clients.append(make(kind, loop, url, **options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def client(server: TestServer, connect: Callable[..., Any]) -> Any:
    return connect(server.url)


@pytest.fixture
def proxy(server: TestServer) -> Iterator[CuttingProxy]:
    with cutting(server.url) as proxy:
        yield proxy


_numbers = itertools.count(1)


@pytest.fixture
def topic() -> str:
    """A topic name that no other test uses."""
    return f"t{next(_numbers)}"
