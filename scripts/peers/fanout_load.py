"""Load generator for fan-out, run as a separate process: many watchers of one stream, and one writer.

One thread, raw sockets, edge-triggered epoll and one shared buffer: otherwise, with a thousand watchers, the generator
would dominate the measurement. `drive` starts it and returns its results. Two shapes:

- *lock-step*: the writer sends a record when all watchers have seen the previous one (and it was acknowledged, if the
  system does that). The latency to each watcher is recorded.
- *burst*: the writer sends a batch when the previous one is acknowledged and the watchers are on average at most
  AHEAD_MAX records behind. At the end each watcher must have seen each record exactly once.
"""

from __future__ import annotations

import select
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

from peers.fanout_protocols import MARK, WATCHING, open_watchers, open_writer
from peers.load import answer_with, cpu_s, in_a_process, percentiles, result_of
from peers.protocols import BadAnswer

BATCH = 100
AHEAD_MAX = 300
STALLED_S = 10.0
BUFFER_BYTES = 1 << 18
EVENTS_MAX = 4096
READABLE = select.EPOLLIN | select.EPOLLET


@dataclass
class Fanout:
    protocol: str
    address: str
    shape: str  # lock-step, burst or idle
    watchers: int
    seconds: float
    warm_up: float = 1.0
    pids: dict[str, list[int]] = field(default_factory=dict)  # processes whose CPU time to report, by role


class Hub:
    """All connections, and counters of what was written and seen."""

    def __init__(self, task: Fanout) -> None:
        self._watching = WATCHING[task.protocol]()
        watchers = open_watchers(task.address, self._watching, task.watchers)
        self._writer = open_writer(task.address, self._watching)
        self._lines = [*watchers, self._writer]
        self._epoll = select.epoll()
        for line in self._lines:
            line.settimeout(None)  # with a timeout, every read would call poll first
            self._epoll.register(line.fileno(), READABLE)
        self._receive = {line.fileno(): line.recv_into for line in self._lines}
        self._send = {line.fileno(): line.sendall for line in self._lines}
        asking = {line.fileno(): self._watching.asking() for line in watchers}
        self._asking = {fd: one.feed for fd, one in asking.items() if one}
        self._buffer = bytearray(BUFFER_BYTES)
        self._requests = {count: self._watching.write(count) for count in (1, BATCH)}
        self._watchers = len(watchers)
        self._sent_at = 0.0
        self.seen = dict.fromkeys(asking, 0)
        self.total = 0
        self.written = 0
        self.acknowledged = True
        self.latencies = array("d")

    @property
    def all_seen(self) -> bool:
        return self.total >= self.written * self._watchers

    @property
    def behind(self) -> float:
        """Average number of records that watchers have not seen yet."""
        return self.written - self.total / self._watchers

    def write(self, count: int) -> None:
        request, self._answers = self._requests[count]
        self.acknowledged = self._answers is None
        self.written += count
        self._sent_at = time.perf_counter()
        self._writer.sendall(request)

    def turn(self, timed: bool) -> None:
        """Wait for data and process it."""
        events = self._epoll.poll(STALLED_S, EVENTS_MAX)
        if not events:
            raise BadAnswer(b"nothing came for %d s, %d records behind" % (STALLED_S, self.behind))
        receive, buffer, asking, seen = self._receive, self._buffer, self._asking, self.seen
        clock, sent_at, keep = time.perf_counter, self._sent_at, self.latencies.append
        for fd, _ in events:
            size = receive[fd](buffer)
            if fd not in seen:
                self._answered(size)
                continue
            found = buffer.count(MARK, 0, size)
            if found:
                self.total += found
                seen[fd] += found
                if timed:
                    keep(clock() - sent_at)
            elif not size:
                raise BadAnswer(b"a watcher's connection was closed")
            if asking and (request := asking[fd](buffer, size, found)):
                self._send[fd](request)
            if size == BUFFER_BYTES:  # there may be more, but edge-triggered epoll reports it only once
                self._epoll.modify(fd, READABLE)

    def _answered(self, size: int) -> None:
        if not size:
            raise BadAnswer(b"the writer's connection was closed")
        if self._answers and self._answers.feed(bytes(self._buffer[:size])):
            self.acknowledged = True

    def idle(self, seconds: float) -> None:
        """Read heartbeats while nothing is written."""
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            for fd, _ in self._epoll.poll(left, EVENTS_MAX):
                if not self._receive[fd](self._buffer):
                    raise BadAnswer(b"a connection was closed")

    def close(self) -> None:
        for line in self._lines:
            line.close()


def lock_step(hub: Hub, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        hub.write(1)
        while not (hub.all_seen and hub.acknowledged):
            hub.turn(True)


def burst(hub: Hub, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        if hub.acknowledged and hub.behind <= AHEAD_MAX:
            hub.write(BATCH)
        hub.turn(False)


def drain(hub: Hub) -> None:
    """Wait for all records, and check that each watcher has seen each record exactly once."""
    while not (hub.all_seen and hub.acknowledged):
        hub.turn(False)
    wrong = sum(count != hub.written for count in hub.seen.values())
    if wrong:
        raise BadAnswer(b"%d watchers did not see each of %d records once" % (wrong, hub.written))


SHAPES = {"lock-step": lock_step, "burst": burst, "idle": Hub.idle}


def measure(task: Fanout) -> dict[str, Any]:
    hub = Hub(task)
    shape = SHAPES[task.shape]
    shape(hub, task.warm_up)
    hub.latencies = array("d")
    before = (time.perf_counter(), hub.total, hub.written, cpu_s(task.pids))
    shape(hub, task.seconds)
    after = (time.perf_counter(), hub.total, hub.written, cpu_s(task.pids))
    if task.shape != "idle":
        drain(hub)
    hub.close()
    took = after[0] - before[0]
    return {
        "deliveries_per_s": round((after[1] - before[1]) / took, 1),
        "writes_per_s": round((after[2] - before[2]) / took, 1),
        "count": after[1] - before[1],
        "seconds": round(took, 3),
        "cpu_s": {role: round(used - before[3][role], 4) for role, used in after[3].items()},
        **(percentiles(hub.latencies) if hub.latencies else {}),
    }


def drive(task: Fanout) -> dict[str, Any]:
    """Run the generator and return its results."""
    return result_of(in_a_process("fanout_load", task))


if __name__ == "__main__":
    answer_with(measure)
