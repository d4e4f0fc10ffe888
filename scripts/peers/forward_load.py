"""Load generator for the added latency of a copy, run as a separate process: one writer, and watchers of source and destination.

The next record is sent when both watchers have seen the previous one and it is acknowledged. The added latency is the
time between the arrival of the record at the source's watcher and of its copy at the other one, measured in one thread.
"""

from __future__ import annotations

import gc
import json
import select
import socket
import subprocess
import sys
import time
from array import array
from dataclasses import asdict, dataclass, field
from typing import Any

from peers.fanout_protocols import SseWatching, await_text, connect
from peers.load import SCRIPTS, cpu_s, result_of
from peers.protocols import MARK, BadAnswer

STALLED_S = 10.0
RECEIVED_MAX = 1 << 16


@dataclass
class Pair:
    address: str
    source: str
    dest: str
    seconds: float
    warm_up: float = 1.0
    pids: dict[str, list[int]] = field(default_factory=dict)  # processes whose CPU time to report, by role


class Timings:
    """When each watcher has seen the current record, whether it is acknowledged, and the latencies so far."""

    def __init__(self) -> None:
        self.sent_at = 0.0
        self.seen_at: dict[str, float] = {}
        self.acknowledged = True
        self.source = array("d")
        self.dest = array("d")
        self.added = array("d")

    @property
    def is_complete(self) -> bool:
        return self.acknowledged and len(self.seen_at) == 2

    def send(self, now: float) -> None:
        self.sent_at, self.seen_at, self.acknowledged = now, {}, False

    def see(self, watcher: str, marks: int, now: float) -> None:
        if not marks:
            return
        if marks > 1 or watcher in self.seen_at:
            raise BadAnswer(b"the watcher of the %b saw a record twice" % watcher.encode())
        self.seen_at[watcher] = now

    def keep(self) -> None:
        source, dest = self.seen_at["source"], self.seen_at["dest"]
        self.source.append(source - self.sent_at)
        self.dest.append(dest - self.sent_at)
        self.added.append(dest - source)


class Lines:
    """The three connections."""

    def __init__(self, pair: Pair) -> None:
        source = SseWatching(pair.source)
        self._write = source.write(1)
        self._came = b""  # of the answer to the writer
        self._writer = connect(pair.address)
        self._watchers = {
            "source": open_watcher(pair.address, source),
            "dest": open_watcher(pair.address, SseWatching(pair.dest)),
        }
        self._names = {line.fileno(): name for name, line in self._watchers.items()}
        self._epoll = select.epoll()
        self._all: dict[int, socket.socket] = {}
        for line in (*self._watchers.values(), self._writer):
            line.settimeout(None)
            self._all[line.fileno()] = line
            self._epoll.register(line.fileno(), select.EPOLLIN)
        self.timings = Timings()

    def run(self, seconds: float) -> None:
        timings = self.timings
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            timings.send(time.perf_counter())
            self._writer.sendall(self._write.request)
            while not timings.is_complete:
                self._turn()
            timings.keep()

    def _turn(self) -> None:
        events = self._epoll.poll(STALLED_S)
        if not events:
            missing = {"source", "dest"} - self.timings.seen_at.keys()
            raise BadAnswer(b"nothing came for %d s; missing: %b" % (STALLED_S, " ".join(missing).encode()))
        for fd, _ in events:
            data = self._all[fd].recv(RECEIVED_MAX)
            now = time.perf_counter()
            if not data:
                raise BadAnswer(b"a connection was closed")
            if fd in self._names:
                self.timings.see(self._names[fd], data.count(MARK), now)
                continue
            self._came += data
            if self._write.is_complete(self._came):
                self._came = b""
                self.timings.acknowledged = True

    def close(self) -> None:
        for line in self._all.values():
            line.close()


def measure(pair: Pair) -> dict[str, Any]:
    lines = Lines(pair)
    lines.run(pair.warm_up)
    timings = lines.timings
    timings.source, timings.dest, timings.added = array("d"), array("d"), array("d")
    began, before = time.perf_counter(), cpu_s(pair.pids)
    lines.run(pair.seconds)
    took, after = time.perf_counter() - began, cpu_s(pair.pids)
    lines.close()
    return {
        **percentiles(timings.added),
        **{f"source_{name}": value for name, value in percentiles(timings.source).items()},
        **{f"dest_{name}": value for name, value in percentiles(timings.dest).items()},
        "count": len(timings.added),
        "seconds": round(took, 3),
        "cpu_s": {role: round(used - before[role], 4) for role, used in after.items()},
    }


def open_watcher(address: str, watching: SseWatching) -> socket.socket:
    [hello] = watching.hellos(address, 1)
    line = connect(address)
    line.sendall(hello.request)
    await_text(line, watching.opened)
    return line


def percentiles(latencies: array[float]) -> dict[str, float]:
    """Percentiles of latencies in seconds, as milliseconds."""
    ordered = sorted(latencies)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000, 4)

    return {"p50_ms": at(0.5), "p99_ms": at(0.99), "p999_ms": at(0.999)}


def drive(pair: Pair) -> dict[str, Any]:
    """Run the generator and return its results."""
    process = subprocess.Popen(
        [sys.executable, "-m", "peers.forward_load", json.dumps(asdict(pair))],
        cwd=SCRIPTS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    return result_of(process)


if __name__ == "__main__":
    gc.disable()  # there are no reference cycles, and collections would add latency
    try:
        print(json.dumps(measure(Pair(**json.loads(sys.argv[1])))))
    except (BadAnswer, OSError) as error:
        sys.exit(str(error))
