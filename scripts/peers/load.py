"""The load generator, run as a separate process: repeats one request with many clients for some seconds.

`drive` starts it and returns its results. A client is one connection with one request in flight (which may be a
pipeline); it sends the next one as soon as the response is complete, or, with a rate, when it is due. With a maximum
number of requests, the load ends with the last response, unless the time is over first.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import subprocess
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from peers.protocols import HELLO_END, BadAnswer, Exchange

SCRIPTS = Path(__file__).resolve().parents[1]
TICK_S = 0.001  # interval at which a paced load sends due requests
LONGEST_S = 20.0  # maximum wait for a first response, if that takes longer than the measurement


@dataclass
class Load:
    address: str
    exchange: Exchange
    clients: int
    seconds: float
    warm_up: float = 1.0
    rate: float = 0.0  # requests per second of all clients; 0: unlimited
    pids: dict[str, list[int]] = field(default_factory=dict)  # processes whose CPU time to report, by role
    most: int = 0  # maximum number of requests of all clients, without a rate; 0: unlimited


class Run:
    """State shared by all clients."""

    def __init__(self, load: Load) -> None:
        self.paced = load.rate > 0
        self.latencies = array("d")
        self.bytes = 0
        self.idle: deque[Client] = deque()
        self.left = float(load.most or "inf")  # requests that may still be sent
        self.failure: bytes | str = b""
        self.ended = asyncio.Event()  # early end: a failure, or all requests are done
        self.over = False
        self._clients = load.clients

    def rest(self, client: Client) -> None:
        self.idle.append(client)
        if len(self.idle) == self._clients:
            self.ended.set()

    def fail(self, text: bytes | str) -> None:
        if not self.over:
            self.failure = self.failure or text
            self.ended.set()


class Client(asyncio.Protocol):
    def __init__(self, run: Run, exchange: Exchange, number: int) -> None:
        self._run = run
        self._request = exchange.numbered(number)
        self._hello = exchange.hello(number)
        self._greeting = b""
        self._answers = exchange.answers()
        self._feed = self._answers.feed
        self._sent_at = 0.0
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def records(self) -> float:
        return self._answers.records

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._write = self.transport.write
        if self._hello:
            self._write(self._hello)
        else:
            self.ready.set_result(None)

    def send(self) -> None:
        self._sent_at = time.perf_counter()
        self._write(self._request)

    def data_received(self, data: bytes) -> None:
        run = self._run
        if not self.ready.done():
            self._greeting += data
            if HELLO_END in self._greeting:
                self.ready.set_result(None)
            return
        run.bytes += len(data)
        try:
            if not self._feed(data):
                return
        except BadAnswer as error:
            run.fail(error.args[0])
            return
        now = time.perf_counter()
        run.latencies.append(now - self._sent_at)
        if run.paced:
            run.idle.append(self)
        else:
            self.send_next(now)

    def send_next(self, now: float) -> None:
        run = self._run
        if run.left < 1:
            run.rest(self)
            return
        run.left -= 1
        self._sent_at = now
        self._write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        self._run.fail(f"connection lost: {exc}")
        if not self.ready.done():
            self.ready.set_exception(ConnectionError("refused"))


async def pace(run: Run, rate: float) -> None:
    """Send requests at the rate. If all clients are busy, due requests are dropped, to avoid bursts."""
    last = time.perf_counter()
    credit = 0.0
    while not run.over:
        await asyncio.sleep(TICK_S)
        now = time.perf_counter()
        credit += (now - last) * rate
        last = now
        while credit >= 1 and run.idle:
            credit -= 1
            run.idle.popleft().send()
        credit = min(credit, 1.0)


def cpu_s(pids: dict[str, list[int]]) -> dict[str, float]:
    """CPU time so far, by role; `load` is this process."""
    ticks = os.sysconf("SC_CLK_TCK")
    found = {}
    for role, group in pids.items():
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in group]
        found[role] = sum(int(one[11]) + int(one[12]) for one in fields) / ticks
    return {**found, "load": time.process_time()}


@dataclass
class Mark:
    """The state of all counters at one moment."""

    at: float
    records: float
    bytes: int
    cpu: dict[str, float]

    @classmethod
    def now(cls, load: Load, run: Run, clients: list[Client]) -> Mark:
        records = sum(client.records for client in clients)
        return cls(time.perf_counter(), records, run.bytes, cpu_s(load.pids))


async def measure(load: Load) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    host, _, port = load.address.rpartition(":")
    run = Run(load)
    clients = []
    for number in range(load.clients):
        _, client = await loop.create_connection(
            lambda number=number: Client(run, load.exchange, number), host, int(port)
        )
        await client.ready
        clients.append(client)
    if run.paced:
        run.idle.extend(clients)
        pacing = loop.create_task(pace(run, load.rate))
    else:
        for client in clients:
            client.send_next(time.perf_counter())
    await until(run, load.warm_up)
    run.latencies = array("d")
    before = Mark.now(load, run, clients)
    await until(run, load.seconds)
    while not run.latencies and not run.failure and time.perf_counter() - before.at < LONGEST_S:
        await until(run, 0.5)
    after = Mark.now(load, run, clients)
    run.over = True
    if run.paced:
        await pacing
    for client in clients:
        client.transport.abort()
    if run.failure or not run.latencies:
        return {"failure": repr(run.failure or "no answer")}
    # All processes share this clock, so the caller can continue the measurement after the last request.
    began = {"began_at": before.at} if load.most else {}
    return figures(run.latencies, before, after) | began


async def until(run: Run, seconds: float) -> None:
    """Wait, or until the run has ended early."""
    try:
        await asyncio.wait_for(run.ended.wait(), seconds)
    except TimeoutError:
        pass


def figures(latencies: array[float], before: Mark, after: Mark) -> dict[str, Any]:
    took = after.at - before.at
    return {
        "per_s": round(len(latencies) / took, 1),
        "records_per_s": round((after.records - before.records) / took, 1),
        "bytes_per_s": round((after.bytes - before.bytes) / took),
        **percentiles(latencies),
        "count": len(latencies),
        "seconds": round(took, 3),
        "cpu_s": {role: round(used - before.cpu[role], 4) for role, used in after.cpu.items()},
    }


def percentiles(latencies: array[float]) -> dict[str, float]:
    """Percentiles of latencies in seconds, as milliseconds."""
    ordered = sorted(latencies)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000, 4)

    return {"p50_ms": at(0.5), "p99_ms": at(0.99), "p999_ms": at(0.999)}


def in_a_process(module: str, task: object) -> subprocess.Popen[bytes]:
    """Start a module of this package with a pickled task on stdin; it writes its result to stdout."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"peers.{module}"],
        cwd=SCRIPTS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(task))
    process.stdin.close()
    return process


def result_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    text = process.stdout.read()
    if process.wait() or not text:
        raise RuntimeError("the load generator failed")
    result: dict[str, Any] = pickle.loads(text)
    if "failure" in result:
        raise RuntimeError(f"a request failed: {result['failure']}")
    return result


def answer_with(measure: Callable[[Any], dict[str, Any]]) -> None:
    """The other end of `in_a_process`: read the task, measure, and write the result or the failure."""
    task = pickle.load(sys.stdin.buffer)
    gc.disable()  # there are no reference cycles, and collections would add latency
    try:
        result = measure(task)
    except (BadAnswer, OSError) as error:
        result = {"failure": str(error)}
    sys.stdout.buffer.write(pickle.dumps(result))


def drive(load: Load) -> dict[str, Any]:
    """Run the generator and return its results."""
    return result_of(in_a_process("load", load))


if __name__ == "__main__":
    answer_with(lambda load: uvloop.run(measure(load)))
