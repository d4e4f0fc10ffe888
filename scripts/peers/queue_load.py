"""The generator for queues, a process of its own: producers and workers of one queue, side by side.

One thread, raw sockets, one epoll for all. A worker claims, acks all it got in one go, and claims again. A producer sends
a batch when the last was acknowledged and there is room: so many jobs are on their way or waiting at most, so that a
queue is neither empty nor ever longer. In the end the queue is drained, and every job must have been handed out and
acknowledged once.
"""

from __future__ import annotations

import select
import socket
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

from peers.fanout_protocols import await_text, connect
from peers.load import LONGEST_S, answer_with, cpu_s, in_a_process, percentiles, result_of
from peers.protocols import HELLO_END, BadAnswer, Exchange
from peers.queue_protocols import QUEUE, calls

STALLED_S = 10.0
RECEIVED_MAX = 1 << 16  # a larger piece of memory would be mapped anew for every answer


@dataclass
class Work:
    protocol: str
    address: str
    produce: Exchange  # one batch
    producers: int
    workers: int
    waiting_max: int
    seconds: float
    warm_up: float = 1.0
    queue: str = QUEUE
    held: int = 0  # jobs in the queue before; they stay as many, and the queue is not drained
    pids: dict[str, list[int]] = field(default_factory=dict)  # whose processor time to report, by role


class Shift:
    """What all producers and workers share."""

    def __init__(self, work: Work) -> None:
        self.calls = calls(work.protocol, work.queue)
        self.drains = not work.held
        self.over = False
        self.producing = 0
        self.sent = work.held
        self.acked = 0
        self.handed_out: list[list[bytes]] = []
        self.claims = array("d")
        self.acks = array("d")
        self._room = work.waiting_max - work.produce.records

    @property
    def has_room(self) -> bool:
        return self.sent - self.acked <= self._room

    @property
    def may_stop(self) -> bool:
        """Nothing more will come, so that a worker who finds nothing is done."""
        return self.over and not self.producing


class Producer:
    def __init__(self, shift: Shift, batch: Exchange, number: int) -> None:
        self._shift = shift
        self._request = batch.numbered(number)
        self._feed = batch.answers().feed
        self._jobs = batch.records
        self.idle = True

    def next(self) -> bytes:
        """A batch if there is room for it, else nothing."""
        shift = self._shift
        if shift.over or not shift.has_room:
            return b""
        self.idle = False
        shift.producing += 1
        shift.sent += self._jobs
        return self._request

    def feed(self, data: bytes) -> bytes:
        if not self._feed(data):
            return b""
        self.idle = True
        self._shift.producing -= 1
        return self.next()


class Worker:
    def __init__(self, shift: Shift, number: int) -> None:
        self._shift = shift
        self._number = number
        self._claim = shift.calls.claim(number)
        self._came = b""
        self._jobs: list[bytes] = []  # claimed, and their ack is on its way
        self._sent_at = 0.0
        self.idle = True

    def next(self) -> bytes:
        self.idle = False
        self._sent_at = time.perf_counter()
        return self._claim

    def feed(self, data: bytes) -> bytes:
        came = self._came + data if self._came else data
        request = self._after_ack(came) if self._jobs else self._after_claim(came)
        self._came = came if request is None else b""
        return request or b""

    def _after_claim(self, came: bytes) -> bytes | None:
        shift = self._shift
        jobs = shift.calls.claimed(came)
        if jobs is None:
            return None
        if not jobs:
            self.idle = shift.may_stop
            return b"" if self.idle else self.next()
        now = time.perf_counter()
        shift.claims.append(now - self._sent_at)
        shift.handed_out.append(jobs)
        self._jobs = jobs
        self._sent_at = now
        return shift.calls.ack(self._number, jobs)

    def _after_ack(self, came: bytes) -> bytes | None:
        shift = self._shift
        count = len(self._jobs)
        if not shift.calls.acked(came, count):
            return None
        shift.acks.append(time.perf_counter() - self._sent_at)
        shift.acked += count
        self._jobs = []
        self.idle = shift.over and not shift.drains
        return b"" if self.idle else self.next()


class Floor:
    """The connections, and who is at their ends."""

    def __init__(self, work: Work) -> None:
        self.shift = Shift(work)
        self._epoll = select.epoll()
        self._lines: dict[int, socket.socket] = {}
        self._ends: dict[int, Producer | Worker] = {}
        workers = [Worker(self.shift, number) for number in range(work.workers)]
        numbers = range(work.workers, work.workers + work.producers)
        producers = [Producer(self.shift, work.produce, number) for number in numbers]
        self._producers = [
            (self._join(work, end, number), end) for number, end in zip(numbers, producers, strict=True)
        ]
        for number, end in enumerate(workers):
            self._join(work, end, number).sendall(end.next())
        self._wake_producers()

    def _join(self, work: Work, end: Producer | Worker, number: int) -> socket.socket:
        line = connect(work.address)
        if hello := work.produce.hello(number):
            line.sendall(hello)
            await_text(line, HELLO_END)
        line.settimeout(None)  # with a timeout every read would poll first
        self._lines[line.fileno()] = line
        self._ends[line.fileno()] = end
        self._epoll.register(line.fileno(), select.EPOLLIN)
        return line

    @property
    def all_idle(self) -> bool:
        return all(end.idle for end in self._ends.values())

    def run(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._turn()
            self._wake_producers()

    def finish(self) -> None:
        self.shift.over = True
        while not self.all_idle:
            self._turn()
        for line in self._lines.values():
            line.close()
        self._check()

    def _turn(self) -> None:
        events = self._epoll.poll(STALLED_S)
        if not events:
            shift = self.shift
            raise BadAnswer(
                b"nothing came for %d s; %d jobs sent, %d done" % (STALLED_S, shift.sent, shift.acked)
            )
        for fd, _ in events:
            data = self._lines[fd].recv(RECEIVED_MAX)
            if not data:
                raise BadAnswer(b"a connection was closed")
            if request := self._ends[fd].feed(data):
                self._lines[fd].sendall(request)

    def _wake_producers(self) -> None:
        for line, producer in self._producers:
            if producer.idle and (request := producer.next()):
                line.sendall(request)

    def _check(self) -> None:
        """What was lost, or handed out twice, must not have been counted as fast."""
        shift = self.shift
        jobs = [job for claim in shift.handed_out for job in claim]
        if len(set(jobs)) != len(jobs):
            raise BadAnswer(b"%d of %d jobs came twice" % (len(jobs) - len(set(jobs)), len(jobs)))
        if shift.drains and shift.acked != shift.sent:
            raise BadAnswer(b"%d jobs sent, %d done" % (shift.sent, shift.acked))


@dataclass
class Mark:
    """The state of all counters at one moment."""

    at: float
    acked: int
    cpu: dict[str, float]

    @classmethod
    def now(cls, work: Work, shift: Shift) -> Mark:
        return cls(time.perf_counter(), shift.acked, cpu_s(work.pids))


def measure(work: Work) -> dict[str, Any]:
    floor = Floor(work)
    shift = floor.shift
    floor.run(work.warm_up)
    shift.claims, shift.acks = array("d"), array("d")
    before = Mark.now(work, shift)
    floor.run(work.seconds)
    while not (shift.claims and shift.acks) and time.perf_counter() - before.at < LONGEST_S:
        floor.run(0.5)
    after = Mark.now(work, shift)
    claims, acks = shift.claims, shift.acks
    shift.claims, shift.acks = array("d"), array("d")
    floor.finish()
    if not claims or not acks:
        raise BadAnswer(b"no job was done")
    took = after.at - before.at
    return {
        "jobs_per_s": round((after.acked - before.acked) / took, 1),
        **percentiles(claims),
        **{f"ack_{name}": value for name, value in percentiles(acks).items()},
        "jobs_per_claim": round((after.acked - before.acked) / len(acks), 2),
        "count": after.acked - before.acked,
        "seconds": round(took, 3),
        "cpu_s": {role: round(used - before.cpu[role], 4) for role, used in after.cpu.items()},
    }


def drive(work: Work) -> dict[str, Any]:
    """Let the generator run, and return its figures."""
    return result_of(in_a_process("queue_load", work))


if __name__ == "__main__":
    answer_with(measure)
