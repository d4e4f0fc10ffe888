"""The generator for the added latency of a copy, a process of its own: one writer, a watcher of the source and one of the dest.

The next record is sent when both watchers have seen the last one and it is acknowledged. What a copy adds is the time
from when the source's watcher has a record until the dest's has its copy, by one clock in one thread.
"""

from __future__ import annotations

import select
import socket
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

from peers.fanout_protocols import MARK, SseWatching, open_watchers, open_writer
from peers.load import answer_with, cpu_s, in_a_process, percentiles, result_of
from peers.protocols import BadAnswer

STALLED_S = 10.0
RECEIVED_MAX = 1 << 16


@dataclass
class Pair:
    address: str
    source: str
    dest: str
    seconds: float
    warm_up: float = 1.0
    pids: dict[str, list[int]] = field(default_factory=dict)  # whose processor time to report, by role


class Sight:
    """When the current record was seen by each watcher, and by the writer as acknowledged."""

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

    def see(self, who: str, marks: int, now: float) -> None:
        if not marks:
            return
        if marks > 1 or who in self.seen_at:
            raise BadAnswer(b"the watcher of the %b saw a record twice" % who.encode())
        self.seen_at[who] = now

    def keep(self) -> None:
        source, dest = self.seen_at["source"], self.seen_at["dest"]
        self.source.append(source - self.sent_at)
        self.dest.append(dest - self.sent_at)
        self.added.append(dest - source)


class Lines:
    """The three connections."""

    def __init__(self, pair: Pair) -> None:
        source = SseWatching(pair.source)
        self._request, self._answers = source.write(1)
        self._writer = open_writer(pair.address, source)
        self._watchers = {
            "source": open_watchers(pair.address, source, 1)[0],
            "dest": open_watchers(pair.address, SseWatching(pair.dest), 1)[0],
        }
        self._names = {line.fileno(): name for name, line in self._watchers.items()}
        self._epoll = select.epoll()
        self._all: dict[int, socket.socket] = {}
        for line in (*self._watchers.values(), self._writer):
            line.settimeout(None)
            self._all[line.fileno()] = line
            self._epoll.register(line.fileno(), select.EPOLLIN)
        self.sight = Sight()

    def run(self, seconds: float) -> None:
        sight = self.sight
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            sight.send(time.perf_counter())
            self._writer.sendall(self._request)
            while not sight.is_complete:
                self._turn()
            sight.keep()

    def _turn(self) -> None:
        events = self._epoll.poll(STALLED_S)
        if not events:
            missing = {"source", "dest"} - self.sight.seen_at.keys()
            raise BadAnswer(b"nothing came for %d s; missing: %b" % (STALLED_S, " ".join(missing).encode()))
        for fd, _ in events:
            data = self._all[fd].recv(RECEIVED_MAX)
            now = time.perf_counter()
            if not data:
                raise BadAnswer(b"a connection was closed")
            if fd in self._names:
                self.sight.see(self._names[fd], data.count(MARK), now)
            elif self._answers is not None and self._answers.feed(data):
                self.sight.acknowledged = True

    def close(self) -> None:
        for line in self._all.values():
            line.close()


def measure(pair: Pair) -> dict[str, Any]:
    lines = Lines(pair)
    lines.run(pair.warm_up)
    sight = lines.sight
    sight.source, sight.dest, sight.added = array("d"), array("d"), array("d")
    began, before = time.perf_counter(), cpu_s(pair.pids)
    lines.run(pair.seconds)
    took, after = time.perf_counter() - began, cpu_s(pair.pids)
    lines.close()
    return {
        **percentiles(sight.added),
        **{f"source_{name}": value for name, value in percentiles(sight.source).items()},
        **{f"dest_{name}": value for name, value in percentiles(sight.dest).items()},
        "count": len(sight.added),
        "seconds": round(took, 3),
        "cpu_s": {role: round(used - before[role], 4) for role, used in after.items()},
    }


def drive(pair: Pair) -> dict[str, Any]:
    """Let the generator run, and return its figures."""
    return result_of(in_a_process("forward_load", pair))


if __name__ == "__main__":
    answer_with(measure)
