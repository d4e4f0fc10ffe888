"""A server that sends a fixed response after every fixed number of bytes, to measure the load generator itself."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvloop

from peers.load import in_a_process
from peers.protocols import HELLO_END, Exchange


@dataclass
class Script:
    hello_bytes: int  # 0: no greeting
    request_bytes: int
    answer: bytes


class Connection(asyncio.Protocol):
    def __init__(self, script: Script) -> None:
        self._script = script
        self._greeted = not script.hello_bytes
        self._due = script.hello_bytes or script.request_bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = transport.write  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._due -= len(data)
        if self._due > 0:
            return
        self._write(self._script.answer if self._greeted else HELLO_END)
        self._greeted = True
        self._due = self._script.request_bytes


@contextmanager
def null_server(exchange: Exchange, answer: bytes) -> Iterator[tuple[str, int]]:
    """Run the server; yields its address and process id."""
    script = Script(len(exchange.hello(0)), len(exchange.numbered(0)), answer)
    process = in_a_process("null_server", script)
    assert process.stdout is not None
    try:
        yield f"127.0.0.1:{int(process.stdout.readline())}", process.pid
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


async def serve(script: Script) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Connection(script), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(pickle.load(sys.stdin.buffer)))
