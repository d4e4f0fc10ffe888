"""Points in time that a process of the staged server passes, kept in memory and written to a file at its end.

A mark is four integers: which point, the request it belongs to (0: all that are on their way), one more number, and
the time in nanoseconds. perf_counter_ns reads the machine's monotonic clock, which is the same in every process.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

MARKS_MAX = 2_000_000
CELLS = 4

# The front.
PARSING = 1  # of request: its bytes were received
PLACED = 2  # of request: it waits for the end of the tick
LINKED = 3  # all placed requests are handed to the link
RETURNED = 4  # a message with answers has come
ANSWERING = 5  # the next answer is known
WRITTEN = 6  # of request: its answer is with the kernel, unless that takes no more

# The worker.
RECEIVED = 10  # of request: its message has come
DECODED = 19  # all requests of a message are commands
TAKEN = 11  # of request: it is part of the turn
TURN = 12  # a turn begins; number: 0, or which sync (from 1 on) it reports
APPENDING = 13  # all is decided; the group is made and written
APPENDED = 14
PUBLISHED = 15  # of request; number: its first seq
WOKEN = 16  # the waiting readers have looked
READ = 17  # of request: a read is rendered; number: the last seq in it
SENT = 18  # the turn's answers are handed to the link
SYNCING = 20  # on the thread that syncs; number: which sync
SYNCED = 21

Mark = tuple[int, int, int, int]  # which point, request, number, nanoseconds


class Marks:
    """For one thread: nothing is locked, and nothing grows while the server works."""

    def __init__(self) -> None:
        self._cells = array("q", bytes(8 * CELLS * MARKS_MAX))
        self._at = 0

    def put(self, point: int, request: int, number: int, ns: int) -> None:
        at, cells = self._at, self._cells
        if at == len(cells):
            return  # the analysis sees that the file is full
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
