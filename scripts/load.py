"""The load generator, a process of its own: keeps N connections busy with one request for some seconds.

    python scripts/load.py HOST:PORT --connections 64 --seconds 5 [--warm-up 1] < request

The request comes on standard input as raw HTTP/1.1 bytes; each connection repeats it in a closed loop. Prints one line of JSON: requests a second, bytes a second, latencies in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time

import uvloop


class Client(asyncio.Protocol):
    def __init__(self, run: Run) -> None:
        self._run = run
        self._parts: list[bytes] = []
        self._missing = 0  # bytes of the response that have not come yet; 0: its head has not
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(self._run.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
            self._run.bytes += len(data)
        else:
            if self._parts:
                self._parts.append(data)
                data = b"".join(self._parts)
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._parts = [data]
                return
            self._parts = []
            if not data.startswith(b"HTTP/1.1 2"):
                self._run.fail(data)
                return
            at = data.find(b"Content-Length: ")
            length = int(data[at + 16 : data.find(b"\r", at)])
            self._run.bytes += len(data)
            self._missing = end + 4 + length - len(data)
        if not self._missing:
            self._run.answered(time.perf_counter() - self._sent_at)
            self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._run.fail(b"connection lost")


class Run:
    def __init__(self, request: bytes) -> None:
        self.request = request
        self.latencies: list[float] = []
        self.bytes = 0
        self.failure = b""

    def answered(self, seconds: float) -> None:
        self.latencies.append(seconds)

    def fail(self, text: bytes) -> None:
        self.failure = self.failure or text[:500]


async def measure(options: argparse.Namespace, request: bytes) -> dict[str, object]:
    loop = asyncio.get_running_loop()
    host, _, port = options.address.rpartition(":")
    run = Run(request)
    for _ in range(options.connections):
        _, client = await loop.create_connection(lambda: Client(run), host, int(port))
        client.send()
    await asyncio.sleep(options.warm_up)
    run.latencies, run.bytes = [], 0
    began = time.perf_counter()
    await asyncio.sleep(options.seconds)
    took = time.perf_counter() - began
    latencies = sorted(run.latencies)
    if run.failure or not latencies:
        raise SystemExit(f"failed: {run.failure!r}")

    def at(share: float) -> float:
        return round(latencies[min(len(latencies) - 1, int(len(latencies) * share))] * 1000, 3)

    return {
        "per_s": round(len(latencies) / took, 1),
        "bytes_per_s": round(run.bytes / took),
        "p50_ms": at(0.5),
        "p99_ms": at(0.99),
        "p999_ms": at(0.999),
        "count": len(latencies),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("address")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--warm-up", type=float, default=1)
    options = parser.parse_args()
    request = sys.stdin.buffer.read()
    print(json.dumps(uvloop.run(measure(options, request))))


if __name__ == "__main__":
    main()
