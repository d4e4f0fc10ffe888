"""Shared parts of the HTTP benchmark: servers, the load generator, raw requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peers.load import Load, drive
from peers.protocols import Exchange, http_post, payload
from peers.systems import TopicsServer

RECORD = json.loads(payload(100))  # 100 bytes of compact JSON


def request(path: str, body: Any, *headers: str) -> bytes:
    """One request as bytes, its body as compact JSON."""
    return http_post(path, json.dumps(body, separators=(",", ":")).encode(), *headers)


@contextmanager
def server(folder: str, **environment: str) -> Iterator[TopicsServer]:
    running = TopicsServer(folder, **environment)
    try:
        yield running
    finally:
        running.stop()


def load(
    to: TopicsServer, text: bytes, *, connections: int, seconds: float, warm_up: float = 0.5
) -> dict[str, Any]:
    """Run the load generator, a separate process, with that many busy connections."""
    return drive(Load(to.address, Exchange("http", text), connections, seconds, warm_up, pids=to.pids()))
