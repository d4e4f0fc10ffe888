"""Requests in flight of each API key, counted over all processes of the server.

A table in shared memory, made before the processes are forked: a column of counts per key, with one row per process. A process
writes its own row only, so there are no locks; two requests that arrive at different processes within the same microsecond may
both get the last slot. The supervisor clears the row of a process that has died.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

_BYTES = 4


class InFlightTable:
    def __init__(self, processes: int, keys: int) -> None:
        self._processes = processes
        self._keys = keys
        self._counts = memoryview(mmap.mmap(-1, max(1, processes * keys) * _BYTES)).cast("I")

    def total(self, key: int) -> int:
        first = key * self._processes
        return sum(self._counts[first : first + self._processes])

    def add(self, process: int, key: int, change: int) -> None:
        self._counts[key * self._processes + process] += change

    def clear(self, process: int) -> None:
        """The process has ended."""
        for key in range(self._keys):
            self._counts[key * self._processes + process] = 0


class InFlight:
    """The counts as one process sees and changes them."""

    def __init__(self, table: InFlightTable, process: int, digests: Sequence[bytes]) -> None:
        self._table = table
        self._process = process
        self._keys = {digest: number for number, digest in enumerate(digests)}

    def total(self, digest: bytes) -> int:
        """Of all processes."""
        return self._table.total(self._keys[digest])

    def begin(self, digest: bytes) -> None:
        self._table.add(self._process, self._keys[digest], 1)

    def end(self, digest: bytes) -> None:
        self._table.add(self._process, self._keys[digest], -1)


def alone(digests: Sequence[bytes]) -> InFlight:
    """The counts of a process without others."""
    return InFlight(InFlightTable(1, len(digests)), 0, digests)
