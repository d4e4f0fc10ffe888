"""Parser for server-sent events."""

from __future__ import annotations

from dataclasses import dataclass

LINE_BYTES_MAX = 64 << 20  # several times the largest event


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    data: bytes


class EventParser:
    """Parses a stream of bytes, over several connections.

    ValueError: a line is too long to be from a topics server.
    """

    def __init__(self) -> None:
        self.last_id = ""  # of the last complete event: where the next connection resumes
        self.retry_ms = 2000
        self.reset()

    def reset(self) -> None:
        """Start of a new connection: drop the incomplete event of the previous one."""
        self._rest: list[bytes] = []  # of an incomplete line
        self._rest_bytes = 0
        self._begin_event()

    def _begin_event(self) -> None:
        self._name, self._id, self._data = "message", self.last_id, list[bytes]()

    def feed(self, chunk: bytes) -> list[Event]:
        """Parse bytes; return the events that they complete."""
        if b"\n" not in chunk:
            self._rest.append(chunk)
            self._rest_bytes += len(chunk)
            if self._rest_bytes > LINE_BYTES_MAX:
                raise ValueError(f"a line of more than {LINE_BYTES_MAX} bytes")
            return []
        first, *lines = chunk.split(b"\n")
        lines.insert(0, b"".join([*self._rest, first]))
        self._rest = [lines.pop()]
        self._rest_bytes = len(self._rest[0])
        events = []
        for line in lines:
            event = self._line(line.removesuffix(b"\r"))
            if event is not None:
                events.append(event)
        return events

    def _line(self, line: bytes) -> Event | None:
        if not line:
            return self._end_event()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match field:
            case b"event":
                self._name = value.decode("utf-8", "replace")
            case b"data":
                self._data.append(value)
            case b"id" if b"\0" not in value:
                self._id = value.decode("utf-8", "replace")
            case b"retry" if value.isdigit():
                self.retry_ms = int(value)
            case _:  # a comment (its field name is empty) or an unknown field
                pass
        return None

    def _end_event(self) -> Event | None:
        self.last_id = self._id
        event = Event(self._name, b"\n".join(self._data)) if self._data else None
        self._begin_event()
        return event
