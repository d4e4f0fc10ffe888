"""State of HTTP/2 streams, and sinks of streaming responses.

Writes to a sink are gathered and sent in the next iteration of the event loop: an event for many streams of one
connection becomes one write to its socket, and several events for one stream one frame.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from router.watch.sinks import OwnedSink
from topics.protocols.http.exchange import Request, Stream

FULL_BYTES = 64 * 1024  # unsent bytes at which a sink is full; it is drained at half of that


@dataclass(slots=True, eq=False)
class OpenStream:
    id: int
    request: Request
    declared_bytes: int | None
    body: bytes | bytearray = b""
    ended: bool = False  # the client has sent everything
    answered: bool = False
    gone: bool = False
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)  # unsent headers of the response
    chunks: deque[memoryview] = field(default_factory=deque)
    final: bool = False  # these are the last chunks
    unsent: int = 0
    kept: int = 0  # bytes of chunks that are not completely sent
    held: int = 0  # the part of `kept` that is counted in the budget
    queued: bool = False
    moved_us: int = 0  # time of the last progress
    lingers: bool = False  # the response is sent, but the request has not ended
    discarded: int = 0
    sink: StreamSink | None = None  # of a streaming response


class StreamSink(OwnedSink):
    """A sink that writes to one stream of an HTTP/2 connection."""

    __slots__ = ("_is_over", "_sinks", "_stream", "gathered", "gathered_bytes")

    def __init__(self, sinks: Sinks, stream: OpenStream, owner: Stream) -> None:
        super().__init__(owner, is_full=False)
        self._sinks = sinks
        self._stream = stream
        self._is_over = False
        self.gathered: list[bytes] = []
        self.gathered_bytes = 0

    @property
    def is_over(self) -> bool:
        return self._is_over

    def _discard_writes(self) -> None:
        self._is_over = True

    def write(self, data: bytes) -> None:
        if self._is_over:
            return
        self.gathered.append(data)
        self.gathered_bytes += len(data)
        if self.gathered_bytes + self._stream.unsent >= FULL_BYTES:
            self._sinks.fill(self._stream, self)
        self._sinks.gather(self._stream, self)

    def close(self) -> None:
        if not self._is_over:
            self._discard_writes()
            self._sinks.gather(self._stream, self)
            asyncio.get_running_loop().call_soon(self.lost)

    def abort(self) -> None:
        self._discard_writes()
        self._sinks.drop(self._stream)
        asyncio.get_running_loop().call_soon(self._sinks.abort, self._stream)


class Sinks:
    """The sinks of one connection: which of them have something to send, and which are full."""

    def __init__(self, *, flush: Callable[[], None], abort: Callable[[OpenStream], None]) -> None:
        self._flush = flush
        self.abort = abort
        self._open: dict[OpenStream, StreamSink] = {}
        self._gathering: dict[OpenStream, StreamSink] = {}
        self._full: dict[OpenStream, StreamSink] = {}
        self._flush_scheduled = False

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, stream: OpenStream, owner: Stream, *, is_full: bool) -> None:
        sink = stream.sink = self._open[stream] = StreamSink(self, stream, owner)
        if is_full:
            self.fill(stream, sink)
        self._flush_soon()
        sink.open()

    def remove(self, stream: OpenStream) -> None:
        sink = self._open.pop(stream, None)
        self._gathering.pop(stream, None)
        self._full.pop(stream, None)
        if sink is not None:
            sink.lost()

    def streams(self) -> list[OpenStream]:
        return list(self._open)

    def gather(self, stream: OpenStream, sink: StreamSink) -> None:
        if not stream.gone:
            self._gathering[stream] = sink
            self._flush_soon()

    def drop(self, stream: OpenStream) -> None:
        """Discard what the stream has gathered."""
        self._gathering.pop(stream, None)

    def _flush_soon(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flush_scheduled = False
        self._flush()

    def take_gathered(self) -> list[tuple[OpenStream, bytes, bool]]:
        """Streams with new bytes, the bytes, and whether they are the last."""
        taken = []
        for stream, sink in self._gathering.items():
            taken.append((stream, b"".join(sink.gathered), sink.is_over))
            sink.gathered.clear()
            sink.gathered_bytes = 0
        self._gathering.clear()
        return taken

    def fill(self, stream: OpenStream, sink: StreamSink) -> None:
        sink.is_full = True
        self._full[stream] = sink

    def fill_all(self) -> None:
        """Mark all sinks as full, because the connection's write buffer is."""
        for stream, sink in self._open.items():
            self.fill(stream, sink)

    def notify_drained(self) -> None:
        for stream, sink in list(self._full.items()):
            has_room = stream.unsent + sink.gathered_bytes < FULL_BYTES // 2
            # It may have been removed by the callback of another sink.
            if has_room and self._full.pop(stream, None) is not None:
                sink.drained()
