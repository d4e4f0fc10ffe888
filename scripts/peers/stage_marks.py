"""Timestamps of points that a process of the instrumented server passes, kept in memory and written to a file at its exit.

A mark is four integers: the point, the request it belongs to (0: all in flight), one more number, and the time in
nanoseconds. perf_counter_ns reads the machine's monotonic clock, which is the same in all processes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

MARKS_MAX = 2_000_000
CELLS = 4

# The front.
PARSING = 1  # per request: its bytes were received
PLACED = 2  # per request: it waits for the end of the tick
LINKED = 3  # all placed requests were passed to the link
RETURNED = 4  # a message with responses was received
ANSWERING = 5  # the next response is known
WRITTEN = 6  # per request: its response was passed to the kernel, unless its buffer is full

# The worker.
RECEIVED = 10  # per request: its message was received
DECODED = 19  # all requests of a message are decoded
TAKEN = 11  # per request: it is part of the turn
TURN = 12  # a turn begins; number: 0, or the sync (from 1 on) that it reports
APPENDING = 13  # everything is decided; the group is built and written
APPENDED = 14
PUBLISHED = 15  # per request; number: its first seq
WOKEN = 16  # waiting readers were served
READ = 17  # per request: a read is rendered; number: its last seq
SENT = 18  # the responses of the turn were passed to the link
SYNCING = 20  # in the sync thread; number: the sync
SYNCED = 21

Mark = tuple[int, int, int, int]  # point, request, number, nanoseconds


class Marks:
    """Marks of one thread, in a preallocated buffer without locks."""

    def __init__(self) -> None:
        self._cells = array("q", bytes(8 * CELLS * MARKS_MAX))
        self._at = 0

    def put(self, point: int, request: int, number: int, ns: int) -> None:
        at, cells = self._at, self._cells
        if at == len(cells):
            return  # the analysis detects a full file
        cells[at] = point
        cells[at + 1] = request
        cells[at + 2] = number
        cells[at + 3] = ns
        self._at = at + CELLS

    def save(self, path: Path) -> None:
        path.write_bytes(memoryview(self._cells)[: self._at])


def load(path: Path) -> Iterator[Mark]:
    cells = array("q", path.read_bytes())
    if len(cells) >= CELLS * MARKS_MAX:
        raise RuntimeError(f"{path.name} is full: measure for a shorter time")
    ordered = iter(cells)
    return zip(ordered, ordered, ordered, ordered)
