"""Rows for the cost of a turn: of the engine alone, and through the worker's state machine, from message to message."""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Callable

from bench_engine_support import PAYLOADS, QUIET, Row, Run, Shell, plain

from topics.engine.commands import topics as c
from topics.engine.runtime.engine import Engine, Job
from topics.link import wire
from workers.shard.caps import Caps
from workers.shard.core import Actions, ShardCore
from workers.shard.metrics import ShardMetrics
from workers.shard.posix import PosixDisk, SystemClock

FRONT = b"front"
MANY = 64  # requests of a large turn
OWN_US = 15.0  # what the worker may add to the engine's turn of one write


class Meter:
    """Adds up the processor time of calls, or counts the Python functions that they call."""

    def __init__(self) -> None:
        self.ns = 0
        self.calls = 0
        self.counts = False

    def run(self, call: Callable[[], None]) -> None:
        if self.counts:
            sys.setprofile(self._count)
        began = time.process_time_ns()
        call()
        self.ns += time.process_time_ns() - began
        sys.setprofile(None)

    def _count(self, frame: object, event: str, arg: object) -> None:
        self.calls += event == "call"


class Worker:
    """A shard worker without sockets and threads: its jobs run at once, and its replies are read and dropped."""

    def __init__(self, path: str) -> None:
        self.disk = PosixDisk(path)
        engine = Engine(self.disk, SystemClock(), QUIET)
        caps = Caps(engine, shard=0, shards=1, incarnation=1, now_us=_now_us)
        metrics = ShardMetrics(engine, lambda: self.disk.write_ns)
        self.core = ShardCore(
            engine, caps, metrics, incarnation=1, now_us=_now_us, disk=self.disk, shards=1
        )  # fmt: skip
        self.engine = engine
        self.sent = 0  # bytes since the last acknowledgement
        self.messages: list[list[wire.Buffer]] = []
        self._numbers = itertools.count(1)
        for _ in engine.recover_steps():
            pass
        self.core.progress = 1.0
        self.core.start()
        self.do(self.core.turn())

    def do(self, actions: Actions) -> None:
        self.act(actions)
        if self.core.needs_tending:
            self.act(self.core.tend())

    def act(self, actions: Actions) -> None:
        for _, parts in actions.sends:
            self.sent += sum(map(len, parts))
            self.messages.append(parts)
        self.run(actions.jobs)

    def run(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.run()
            self.do(self.core.finish(job, None, 0.1))

    def message(self, op: int, topic: str, body: bytes, count: int = 1) -> bytes:
        """Requests as one message of a front."""
        parts = [wire.message_head(1)]
        at_us = _now_us()
        for _ in range(count):
            number = next(self._numbers)
            parts += [wire.request_head(number, at_us, 30_000, op, 0, topic.encode(), b"", len(body)), body]
        return b"".join(parts)

    def ask(self, op: int, topic: str, body: bytes) -> wire.Reply:
        """One request; returns its reply, also if that waits for a sync."""
        self.messages.clear()
        self.turn(self.message(op, topic, body))
        while not self.messages:
            self.do(self.core.turn())
        (reply,) = wire.read_replies(bytes(self.messages[0][0]), *self.messages[0][1:])
        assert b'"performance"' in reply.body, reply
        return reply

    def turn(self, message: bytes) -> None:
        self.core.receive(FRONT, message)
        self.do(self.core.turn())

    def acknowledge(self) -> None:
        """The front has received everything: its window stays open."""
        update = wire.message_head(1) + wire.window_update(self.sent)
        self.core.receive(FRONT, update)
        self.sent = 0
        self.messages.clear()

    def close(self) -> None:
        spare = self.engine.wal.spare
        self.engine.reader.close()
        for file in [*self.engine.wal.files, *([spare] if spare else [])]:
            self.disk.close(file.handle)


def turns(run: Run) -> list[Row]:
    """Turns of one request and of many: microseconds, and calls of Python functions."""
    with run.directory("turns") as path, run.directory("turns-engine") as engine_path:
        worker, shell = Worker(path), Shell(engine_path)
        for topic in ("t", "quiet"):
            shell.send(plain(topic))
            shell.fill(topic, run.count(2000))
        for topic, kind in (("t", b"log"), ("quiet", b"log"), ("jobs", b"queue")):
            worker.ask(wire.PUT_TOPIC, topic, b'{"durability":"disk","type":"%b"}' % kind)
        body = b'{"records":[{"data":"' + b"x" * 98 + b'"}]}'
        for topic in ("t", "quiet"):
            for _ in range(run.count(2000)):
                worker.ask(wire.WRITE, topic, body)
        head = worker.engine.shard.state.published["quiet"].view.head

        meter = Meter()

        def engine(*commands: c.Command) -> Callable[[], None]:
            requests = [(0, command) for command in commands]
            return lambda: meter.run(lambda: shell.drain(shell.engine.turn(requests)))

        def ask(op: int, topic: str, text: bytes, count: int = 1) -> None:
            message = worker.message(op, topic, text, count)
            meter.run(lambda: worker.turn(message))

        def claim_and_ack() -> None:
            ask(wire.WRITE, "jobs", body)
            ask(wire.CLAIM, "jobs", b'{"node":"n","max":1,"lease_ms":60000}')
            seq = worker.engine.shard.state.published["jobs"].view.head
            ask(wire.ACK, "jobs", b'{"node":"n","seqs":[%d]}' % seq)

        append = c.Append("t", c.Records([PAYLOADS[0]]))
        last, none = (b'{"from_seq":%d,"limit":1}' % after for after in (head - 1, head))
        works: dict[str, Callable[[], None]] = {
            "turn of 1 write, engine alone": engine(append),
            "turn of 1 write": lambda: ask(wire.WRITE, "t", body),
            f"turn of {MANY} writes, engine alone": engine(*[append] * MANY),
            f"turn of {MANY} writes": lambda: ask(wire.WRITE, "t", body, MANY),
            "turn of 1 diff of 1 row, engine alone": engine(c.Diff("quiet", head - 1, 1)),
            "turn of 1 diff of 1 row": lambda: ask(wire.DIFF, "quiet", last),
            "turn of 1 diff, caught up, engine alone": engine(c.Diff("quiet", head, 1)),
            "turn of 1 diff, caught up": lambda: ask(wire.DIFF, "quiet", none),
            "a write, a claim and an ack, a turn each": claim_and_ack,
        }
        best = dict.fromkeys(works, 1e9)
        for _ in range(50):
            for name, once in works.items():
                count = run.count(20 if str(MANY) in name else 300)
                gc.collect()
                meter.ns = 0
                for _ in range(count):
                    once()
                best[name] = min(best[name], meter.ns / count / 1000)
                worker.acknowledge()
        calls = {name: _calls(once, meter) for name, once in works.items()}
        worker.close()
        shell.abandon()
    rows = [
        Row(name, taken, "µs", best.get(f"{name}, engine alone"), note=f"{calls[name]} Python calls")
        for name, taken in best.items()
    ]
    for row in rows:
        if row.floor is not None:
            row.ratio = row.ours / row.floor
    single = rows[1]
    assert single.floor is not None
    single.aim, single.met = f"floor + {OWN_US:g} µs", single.ours - single.floor <= OWN_US
    return rows


def _calls(once: Callable[[], None], meter: Meter) -> int:
    """Calls of Python functions. The fewest of several: a turn may begin with the work of another."""
    meter.counts = True
    fewest = 1 << 30
    for _ in range(20):
        meter.calls = 0
        once()
        fewest = min(fewest, meter.calls)
    meter.counts = False
    return fewest


def _now_us() -> int:
    return time.monotonic_ns() // 1000


ROWS = [turns]
