"""A server that sends a fixed response after every fixed number of bytes, to measure the load generator itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from peers.load import plan, start
from peers.protocols import Exchange


@contextmanager
def null_server(exchange: Exchange, answer: bytes) -> Iterator[tuple[str, int]]:
    """Run the server; yields its address and process id."""
    size = len(exchange.numbered(0))
    text = plan(
        "127.0.0.1:0", exchange.protocol, {"mode": "null", "most": size}, [("request", Exchange("", answer))]
    )
    process = start(text)
    assert process.stdout is not None
    try:
        yield f"127.0.0.1:{int(process.stdout.readline())}", process.pid
    finally:
        process.terminate()
        process.communicate()
