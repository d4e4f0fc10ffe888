"""Tail cache: the newest log entries in memory, so that reads of recent records do not touch the log files."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class TailCache:
    """The newest log entries, limited by bytes; the oldest are evicted first.

    Entries are added in order of file number and offset, so a binary search in one list finds them. The evicted front is cut
    off when it is half of the list.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._positions: list[int] = []  # file number << 32 | offset
        self._bodies: list[bytes] = []
        self._first = 0  # entries before it are evicted

    def add(self, file_number: int, start: int, body: bytes) -> None:
        self._positions.append(file_number << 32 | start)
        self._bodies.append(body)
        self._bytes += len(body)
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._bodies[self._first])
            self._bodies[self._first] = b""
            self._first += 1
        if self._first * 2 > len(self._bodies) + 64:
            del self._positions[: self._first], self._bodies[: self._first]
            self._first = 0

    def find(self, file_number: int, offset: int, length: int) -> tuple[bytes, int] | None:
        """The entry that holds these bytes, and their offset in it."""
        position = file_number << 32 | offset
        i = bisect_right(self._positions, position) - 1
        if i < self._first:
            return None
        body, at = self._bodies[i], position - self._positions[i]
        return (body, at) if at + length <= len(body) else None

    def forget_file(self, file_number: int) -> None:
        """Drop the entries of a file that was removed, or changed by an erase."""
        start = bisect_left(self._positions, file_number << 32)
        stop = bisect_left(self._positions, (file_number + 1) << 32)
        self._bytes -= sum(map(len, self._bodies[start:stop]))
        del self._positions[start:stop], self._bodies[start:stop]
        self._first -= min(self._first, stop) - min(self._first, start)
