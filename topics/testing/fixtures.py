"""Pytest fixtures. In a conftest.py:

    from topics.testing.fixtures import topics_client, topics_server  # noqa: F401

`topics_server` is one server for the whole run, so each test should use its own topics. `topics_client` is a client of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from topics.client import Client
from topics.testing import TestServer, running_server


@pytest.fixture(scope="session")
def topics_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServer]:
    """A server, started once per test run."""
    with running_server(tmp_path_factory.mktemp("topics")) as server:
        yield server


@pytest.fixture
def topics_client(topics_server: TestServer) -> Iterator[Client]:
    """A client of that server."""
    with topics_server.client() as client:
        yield client
