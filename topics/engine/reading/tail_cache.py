"""The newest log entries in memory: what was just written is read again from here, not from its file."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class TailCache:
    """The newest log entries as they were written, bounded by bytes; the oldest go first.

    Entries come in the order of file number and offset, so one ascending list of places finds any of them; the
    emptied front is cut off when it is half of the list.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._places: list[int] = []  # file number and offset in one int
        self._bodies: list[bytes] = []
        self._first = 0  # entries before it are gone

    def add(self, file_number: int, start: int, body: bytes) -> None:
        self._places.append(file_number << 32 | start)
        self._bodies.append(body)
        self._bytes += len(body)
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._bodies[self._first])
            self._bodies[self._first] = b""
            self._first += 1
        if self._first * 2 > len(self._bodies) + 64:
            del self._places[: self._first], self._bodies[: self._first]
            self._first = 0

    def find(self, file_number: int, offset: int, length: int) -> tuple[bytes, int] | None:
        place = file_number << 32 | offset
        i = bisect_right(self._places, place) - 1
        if i < self._first:
            return None
        body, at = self._bodies[i], place - self._places[i]
        return (body, at) if at + length <= len(body) else None

    def forget_file(self, file_number: int) -> None:
        """The file is gone or an erase changed it: what is remembered of it must not be served."""
        start = bisect_left(self._places, file_number << 32)
        stop = bisect_left(self._places, (file_number + 1) << 32)
        self._bytes -= sum(map(len, self._bodies[start:stop]))
        del self._places[start:stop], self._bodies[start:stop]
        self._first -= min(self._first, stop) - min(self._first, start)
