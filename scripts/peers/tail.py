"""Latency from a write to a reader that waits at the end of the stream, on an idle server and at half load.

A separate process has one reader and one writer, with one record at a time: the reader waits, the record is written, the
reader receives it. Load comes from the generator, another process, and goes to another stream of the same server, at half
the rate of single writes that 64 clients achieve.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvloop

from peers import protocols
from peers.load import Load, drive, in_a_process, percentiles, result_of
from peers.protocols import HELLO_END, BadAnswer, Exchange
from peers.systems import TAIL_STREAM, Fleet, Target
from peers.work import FAILURES, Say, settle, warm_up_s

CLIENTS = 64
PAUSE_S = 0.002  # before each write, so that the reader is waiting
LOAD_HEADSTART_S = 1.0


@dataclass
class Watch:
    address: str
    writes: list[Exchange]
    reads: list[Exchange]
    seconds: float
    warm_up: float


class Line(asyncio.Protocol):
    """A connection with one request at a time, which records when the response arrived."""

    def __init__(self, exchange: Exchange, number: int) -> None:
        self._hello = exchange.hello(number)
        self._number = number
        self._greeting = b""
        self._answers = exchange.answers()
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.answered: asyncio.Future[float] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        if self._hello:
            self.transport.write(self._hello)
        else:
            self.ready.set_result(None)

    def ask(self, exchange: Exchange) -> None:
        self.answered = asyncio.get_running_loop().create_future()
        if exchange.request:
            self.transport.write(exchange.numbered(self._number))

    def data_received(self, data: bytes) -> None:
        if not self.ready.done():
            self._greeting += data
            if HELLO_END in self._greeting:
                self.ready.set_result(None)
            return
        now = time.perf_counter()
        try:
            complete = self._answers.feed(data)
        except BadAnswer as error:
            self.answered.set_exception(error)
            return
        if complete:
            self.answered.set_result(now)


async def watch(task: Watch) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    host, _, port = task.address.rpartition(":")
    lines = []
    for exchange, number in ((task.reads[0], protocols.TAIL), (task.writes[0], protocols.TAIL + 1)):
        _, line = await loop.create_connection(
            lambda exchange=exchange, number=number: Line(exchange, number), host, int(port)
        )
        await line.ready
        lines.append(line)
    reader, writer = lines
    latencies = array("d")
    count_from = time.perf_counter() + task.warm_up
    for write, read in zip(task.writes, task.reads):
        reader.ask(read)
        await asyncio.sleep(PAUSE_S)
        sent_at = time.perf_counter()
        if sent_at > count_from + task.seconds:
            break
        writer.ask(write)
        seen_at = await asyncio.wait_for(reader.answered, 30)
        await asyncio.wait_for(writer.answered, 30)
        if sent_at > count_from:
            latencies.append(seen_at - sent_at)
    for line in lines:
        line.transport.abort()
    return {**percentiles(latencies), "count": len(latencies)}


def measure(
    fleet: Fleet, points: list[dict[str, Any]], *, seconds: float, say: Say
) -> Iterator[dict[str, Any]]:
    """Measure all systems, alternating. `points` are the results so far, which contain the maximum write rates."""
    for load in ("idle", "half"):
        for durability in ("fsync", "disk"):
            for target in fleet.at(durability):
                say(f"tail {durability} {load}, {target.system}")
                row = {"system": target.system, "durability": durability, "load": load}
                try:
                    rate = half_of_most(target, points, seconds) if load == "half" else 0.0
                    yield {**row, **measure_once(target, rate, seconds)}
                except FAILURES as error:
                    yield {**row, "failed": str(error)}


def half_of_most(target: Target, points: list[dict[str, Any]], seconds: float) -> float:
    for point in points:
        where = (
            point["system"],
            point["durability"],
            point["work"],
            point["clients"],
            point["payload_bytes"],
        )
        if where == (target.system, target.durability, "single", CLIENTS, 100) and "failed" not in point:
            return float(point["records_per_s"]) / 2
    target.make()
    exchange = target.write(protocols.payload(100), 1)
    most = drive(Load(target.address, exchange, CLIENTS, min(2.0, seconds), warm_up_s(seconds)))
    target.clear()
    settle(target)
    return float(most["per_s"]) / 2


def measure_once(target: Target, rate: float, seconds: float) -> dict[str, Any]:
    payload = protocols.payload(100)
    headstart = LOAD_HEADSTART_S if rate else 0.0
    warm_up = warm_up_s(seconds) + headstart
    most = int((seconds + warm_up) / PAUSE_S)
    numbers = range(1, most + 1)
    target.make(TAIL_STREAM)
    target.make()
    try:
        if rate:
            exchange = target.write(payload, 1)
            background = in_a_process(
                "load", Load(target.address, exchange, CLIENTS, seconds + warm_up, headstart, rate)
            )
        task = Watch(
            target.address,
            [target.next_write(number, payload) for number in numbers],
            [target.next_read(number) for number in numbers],
            seconds,
            warm_up,
        )
        result = result_of(in_a_process("tail", task))
        writes = result_of(background)["per_s"] if rate else 0.0
    finally:
        target.clear(TAIL_STREAM)
        target.clear()
        settle(target)
    return {"writes_per_s": writes, **result}


def main() -> None:
    task = pickle.load(sys.stdin.buffer)
    gc.disable()
    sys.stdout.buffer.write(pickle.dumps(uvloop.run(watch(task))))


if __name__ == "__main__":
    main()
