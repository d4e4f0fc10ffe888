"""Server-sent events: from the bytes of a stream to what they say."""

from __future__ import annotations

from dataclasses import dataclass

LINE_BYTES_MAX = 64 << 20  # several times what the largest event can have


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    data: bytes


class EventReader:
    """Takes bytes as they come. An event that the end of a connection cuts off has not happened.

    ValueError: a line without an end, which no topics server sends.
    """

    def __init__(self) -> None:
        self.last_id = ""  # of the last whole event: what a later connection goes on from
        self.retry_ms = 2000
        self.forget()

    def forget(self) -> None:
        """The connection has ended; what it did not finish is dropped."""
        self._rest: list[bytes] = []  # of a line that is not whole yet
        self._rest_bytes = 0
        self._begin()

    def _begin(self) -> None:
        self._name, self._id, self._data = "message", self.last_id, list[bytes]()

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that these bytes end."""
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
            return self._end()
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
            case _:  # a comment has an empty name; fields that are not known mean nothing
                pass
        return None

    def _end(self) -> Event | None:
        self.last_id = self._id
        event = Event(self._name, b"\n".join(self._data)) if self._data else None
        self._begin()
        return event
