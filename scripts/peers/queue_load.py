"""Load generator for queues, run as a separate process: producers and workers of one queue.

One thread, raw sockets, one epoll. A worker claims jobs, acks all of them at once, and claims again. A producer sends a
batch when the previous one is acknowledged and there is room: the number of queued jobs and jobs in flight is bounded, so
that the queue is never empty and does not grow. At the end the queue is drained, and every job must have been delivered
and acknowledged exactly once.
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
RECEIVED_MAX = 1 << 16  # malloc would map a larger buffer anew for every response


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
    held: int = 0  # jobs in the queue at the start; their number is kept, and the queue is not drained
    pids: dict[str, list[int]] = field(default_factory=dict)  # processes whose CPU time to report, by role


class State:
    """State shared by all producers and workers."""

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
        """No more jobs will come, so a worker that finds none is done."""
        return self.over and not self.producing


class Producer:
    def __init__(self, state: State, batch: Exchange, number: int) -> None:
        self._state = state
        self._request = batch.numbered(number)
        self._feed = batch.answers().feed
        self._jobs = batch.records
        self.idle = True

    def next(self) -> bytes:
        """The next batch if there is room for it, else nothing."""
        state = self._state
        if state.over or not state.has_room:
            return b""
        self.idle = False
        state.producing += 1
        state.sent += self._jobs
        return self._request

    def feed(self, data: bytes) -> bytes:
        if not self._feed(data):
            return b""
        self.idle = True
        self._state.producing -= 1
        return self.next()


class Worker:
    def __init__(self, state: State, number: int) -> None:
        self._state = state
        self._number = number
        self._claim = state.calls.claim(number)
        self._came = b""
        self._jobs: list[bytes] = []  # claimed, with their ack in flight
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
        state = self._state
        jobs = state.calls.claimed(came)
        if jobs is None:
            return None
        if not jobs:
            self.idle = state.may_stop
            return b"" if self.idle else self.next()
        now = time.perf_counter()
        state.claims.append(now - self._sent_at)
        state.handed_out.append(jobs)
        self._jobs = jobs
        self._sent_at = now
        return state.calls.ack(self._number, jobs)

    def _after_ack(self, came: bytes) -> bytes | None:
        state = self._state
        count = len(self._jobs)
        if not state.calls.acked(came, count):
            return None
        state.acks.append(time.perf_counter() - self._sent_at)
        state.acked += count
        self._jobs = []
        self.idle = state.over and not state.drains
        return b"" if self.idle else self.next()


class Connections:
    """The connections of all producers and workers."""

    def __init__(self, work: Work) -> None:
        self.state = State(work)
        self._epoll = select.epoll()
        self._lines: dict[int, socket.socket] = {}
        self._ends: dict[int, Producer | Worker] = {}
        workers = [Worker(self.state, number) for number in range(work.workers)]
        numbers = range(work.workers, work.workers + work.producers)
        producers = [Producer(self.state, work.produce, number) for number in numbers]
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
        line.settimeout(None)  # with a timeout, every read would call poll first
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
        self.state.over = True
        while not self.all_idle:
            self._turn()
        for line in self._lines.values():
            line.close()
        self._check()

    def _turn(self) -> None:
        events = self._epoll.poll(STALLED_S)
        if not events:
            state = self.state
            raise BadAnswer(
                b"nothing came for %d s; %d jobs sent, %d done" % (STALLED_S, state.sent, state.acked)
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
        """Check that no job was lost or delivered twice."""
        state = self.state
        jobs = [job for claim in state.handed_out for job in claim]
        if len(set(jobs)) != len(jobs):
            raise BadAnswer(b"%d of %d jobs came twice" % (len(jobs) - len(set(jobs)), len(jobs)))
        if state.drains and state.acked != state.sent:
            raise BadAnswer(b"%d jobs sent, %d done" % (state.sent, state.acked))


@dataclass
class Mark:
    """The state of all counters at one moment."""

    at: float
    acked: int
    cpu: dict[str, float]

    @classmethod
    def now(cls, work: Work, state: State) -> Mark:
        return cls(time.perf_counter(), state.acked, cpu_s(work.pids))


def measure(work: Work) -> dict[str, Any]:
    connections = Connections(work)
    state = connections.state
    connections.run(work.warm_up)
    state.claims, state.acks = array("d"), array("d")
    before = Mark.now(work, state)
    connections.run(work.seconds)
    while not (state.claims and state.acks) and time.perf_counter() - before.at < LONGEST_S:
        connections.run(0.5)
    after = Mark.now(work, state)
    claims, acks = state.claims, state.acks
    state.claims, state.acks = array("d"), array("d")
    connections.finish()
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
    """Run the generator and return its results."""
    return result_of(in_a_process("queue_load", work))


if __name__ == "__main__":
    answer_with(measure)
