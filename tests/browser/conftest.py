"""Fixtures for a browser, and for servers that keep their port over restarts."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.browser.clients import load_clients, url_of
from tests.integration.conftest import session_server, shared_server, start_server, topic
from tests.support import browser as browsers
from tests.support.browser import Browser, Page
from tests.support.server import Server

__all__ = ["session_server", "shared_server", "start_server", "topic"]

# Below the kernel's ephemeral ports: a client's connection could take one of those while the server is down.
PORTS = range(20_000, 30_000)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = browsers.program()
    if path is None:
        pytest.skip("not tested in a browser: chromium is not installed")
    with browsers.running(path, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[[Server], Page]]:
    """Opens pages of a server with the clients of page.js; they are closed when the test ends."""
    with contextlib.ExitStack() as pages:

        def open_one(server: Server) -> Page:
            page = pages.enter_context(browser.page(url_of(server)))
            load_clients(page)
            return page

        yield open_one


@pytest.fixture
def start_fixed_port_server(start_server: Callable[..., Server]) -> Callable[..., Server]:
    """Like start_server; `start` after a stop or a kill uses the same port."""

    def start(**environment: str) -> Server:
        options: dict[str, Any] = {"environment": {"TOPICS_PORT": str(_free_port()), **environment}}
        return start_server(**options)

    return start


def _free_port() -> int:
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port of {PORTS} is free")
