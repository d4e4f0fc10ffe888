"""Event streams that reconnect after a broken connection, a server restart, or the loss of a session.

    closed ── _connect ──► open ── ends, breaks or times out ──► Interrupted ── pause ──► closed
                             │
                             └── event ──► `_handle`

The first connection is retried like a call. Afterwards a stream reconnects forever, with a delay that grows up to the
server's `retry`.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar

import msgspec

from topics.client.answers import Interrupted, Resumed
from topics.client.errors import BadAnswer, ClientError, Disconnected, TimedOut, error_of
from topics.client.flows import (
    Close,
    Core,
    Flow,
    Open,
    Read,
    Repeat,
    Request,
    Response,
    Retries,
    Sleep,
    may_repeat,
)
from topics.client.sources import Source
from topics.client.sse import Event, EventParser

T = TypeVar("T")


class _Error(msgspec.Struct):
    """An `error` event: the reason for the end of the stream, or a warning."""

    code: int | str
    message: str = ""
    topic: str = ""


class ReconnectingStream(Source[T]):
    """Base class of record and job streams. Subclasses make the request and handle events."""

    idle_s = 35.0  # the server sends a heartbeat every 15 s

    def __init__(self, core: Core) -> None:
        self._core = core
        self._parser = EventParser()
        self._items: deque[T] = deque()
        self._stream: Any = None
        self._was_open = False
        self._is_closed = False
        self._end_reason = ""  # announced by the server
        self._is_interrupted = False  # and reported as such
        self._failures = 0  # in a row
        self._pause_s = 0.0
        self._give_up: float | None = None  # deadline of the first connection

    def take(self) -> T | None:
        return self._items.popleft() if self._items else None

    def begin(self) -> Flow[None]:
        while not self._was_open and not self._is_over:
            yield from self._step()

    def more(self) -> Flow[bool]:
        while not self._items and not self._is_over:
            yield from self._step()
        if self._is_over:
            yield from self._drop()
        return not self._is_over

    def _step(self) -> Flow[None]:
        if self._give_up is None:
            self._give_up = self._core.now() + self._core.retries.for_s
        try:
            if self._pause_s:
                yield Sleep(self._pause_s)
                self._pause_s = 0.0
            if self._stream is None:
                yield from self._connect()
            else:
                yield from self._read()
        except ClientError as error:
            yield from self._drop()
            if not may_repeat(error, Repeat.SAFE):
                self._is_closed = True
                raise
            self._interrupt(str(error), getattr(error, "retry_after_s", None))
            if not self._was_open:
                if self._core.now() + self._pause_s > self._give_up:
                    raise
                if isinstance(error, Disconnected) and error.outcome == "none":
                    self._core.log_outage(error, self._give_up)

    def close(self) -> Flow[None]:
        self._is_closed = True
        yield from self._drop()

    # -- for subclasses ------------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        """No more items can come."""
        return self._is_closed

    def _prepare(self) -> Flow[Request]:
        """Build the request that opens the stream."""
        raise NotImplementedError

    def _handle(self, event: Event) -> None:
        """Handle an event; items are appended to `_items`."""
        raise NotImplementedError

    def _retry_refused(self, error: ClientError) -> bool:
        """Handle a refused connection. True: try again at once."""
        return False

    def _connect_timed_out(self) -> None:
        """Handle a connection that got no response in time."""

    def _handle_error(self, code: int | str, message: str, topic: str) -> None:
        """Handle an `error` event."""
        self._end_reason = message or str(code)

    def _notify(self, item: Interrupted | Resumed) -> None:
        """Report a change of the connection's state."""

    # -- the connection ------------------------------------------------------------------------------------

    def _connect(self) -> Flow[None]:
        request = yield from self._prepare()
        try:
            opened = yield Open(request, self.idle_s)
        except TimedOut:
            self._connect_timed_out()
            raise
        if isinstance(opened, Response):
            error = error_of(self._core.url, opened.status, opened.body, opened.retry_after)
            if self._retry_refused(error):
                return
            raise error
        self._stream, self._was_open, self._end_reason = opened, True, ""
        self._core.outage.is_logged = False
        self._parser.reset()
        if self._is_interrupted:
            self._is_interrupted = False
            self._notify(Resumed())

    def _read(self) -> Flow[None]:
        chunk: bytes = yield Read(self._stream)
        if not chunk:
            yield from self._drop()
            if not self._is_over:
                self._interrupt(self._end_reason or "the connection ended")
            return
        try:
            events = self._parser.feed(chunk)
        except ValueError as error:
            raise BadAnswer(self._core.url, str(error)) from None
        for event in events:
            if event.name == "error":
                ended = self._core.decoded(event.data, _Error)
                self._handle_error(ended.code, ended.message, ended.topic)
            else:
                self._failures = 0
                self._handle(event)

    def _drop(self) -> Flow[None]:
        stream, self._stream = self._stream, None
        if stream is not None:
            yield Close(stream)

    def _interrupt(self, reason: str, asked_s: float | None = None) -> None:
        """Report the interruption once, and schedule the next attempt."""
        retries = Retries(first_s=0.1, most_s=max(0.1, self._parser.retry_ms / 1000))
        self._pause_s = retries.pause_s(self._failures, self._core.chance, asked_s)
        self._failures += 1
        if not self._is_interrupted:
            self._is_interrupted = True
            self._notify(Interrupted(reason=reason))
