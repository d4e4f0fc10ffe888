"""A stream of events that comes back by itself: after a broken connection, a restart, a session that was forgotten.

    closed ── _open ──► open ── ends, breaks or is silent ──► Interrupted ── pause ──► closed
                          │
                          └── event ──► `_take`, what it means for whom

The first opening fails like a call does. Once it was open it is tried for ever, more slowly up to what the server asks for.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar

import msgspec

from topics.client.answers import Interrupted, Resumed
from topics.client.errors import BadAnswer, ClientError, Disconnected, TimedOut, error_of
from topics.client.event_stream import Event, EventReader
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

T = TypeVar("T")


class _Error(msgspec.Struct):
    """An event `error`: the stream ends, or it is advice."""

    code: int | str
    message: str = ""
    topic: str = ""


class Streaming(Source[T]):
    """What streams of records and of jobs have in common. Kinds of streams say how to open one, and what events mean."""

    idle_s = 35.0  # the server says something every 15 s, or it is gone

    def __init__(self, core: Core) -> None:
        self._core = core
        self._reader = EventReader()
        self._items: deque[T] = deque()
        self._stream: Any = None
        self._has_begun = False
        self._is_closed = False
        self._why = ""  # the stream said that it ends
        self._is_out = False  # it was told that we do not follow just now
        self._failures = 0  # in a row
        self._pause_s = 0.0
        self._give_up: float | None = None  # until it was open once

    def take(self) -> T | None:
        return self._items.popleft() if self._items else None

    def begin(self) -> Flow[None]:
        while not self._has_begun and not self._is_over:
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
            if not self._has_begun:
                if self._core.now() + self._pause_s > self._give_up:
                    raise
                if isinstance(error, Disconnected) and error.outcome == "none":
                    self._core.log_outage(error, self._give_up)

    def close(self) -> Flow[None]:
        self._is_closed = True
        yield from self._drop()

    # -- for kinds of streams ------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        """Nothing can come any more."""
        return self._is_closed

    def _prepare(self) -> Flow[Request]:
        """What opens the stream."""
        raise NotImplementedError

    def _take(self, event: Event) -> None:
        """What an event means; items go to `_items`."""
        raise NotImplementedError

    def _refused(self, error: ClientError) -> bool:
        """Whether a refused opening can be put right by trying again at once."""
        return False

    def _unanswered(self) -> None:
        """The opening was not answered in time."""

    def _ends(self, code: int | str, message: str, topic: str) -> None:
        """The server said why the stream will end, or gave advice."""
        self._why = message or str(code)

    def _note(self, item: Interrupted | Resumed) -> None:
        """For those who want to know."""

    # -- the connection ------------------------------------------------------------------------------------

    def _connect(self) -> Flow[None]:
        request = yield from self._prepare()
        try:
            opened = yield Open(request, self.idle_s)
        except TimedOut:
            self._unanswered()
            raise
        if isinstance(opened, Response):
            error = error_of(self._core.url, opened.status, opened.body, opened.retry_after)
            if self._refused(error):
                return
            raise error
        self._stream, self._has_begun, self._why = opened, True, ""
        self._core.outage.is_logged = False
        self._reader.forget()
        if self._is_out:
            self._is_out = False
            self._note(Resumed())

    def _read(self) -> Flow[None]:
        chunk: bytes = yield Read(self._stream)
        if not chunk:
            yield from self._drop()
            if not self._is_over:
                self._interrupt(self._why or "the connection ended")
            return
        try:
            events = self._reader.feed(chunk)
        except ValueError as error:
            raise BadAnswer(self._core.url, str(error)) from None
        for event in events:
            if event.name == "error":
                said = self._core.decoded(event.data, _Error)
                self._ends(said.code, said.message, said.topic)
            else:
                self._failures = 0
                self._take(event)

    def _drop(self) -> Flow[None]:
        stream, self._stream = self._stream, None
        if stream is not None:
            yield Close(stream)

    def _interrupt(self, why: str, asked_s: float | None = None) -> None:
        """Not now. The next attempt waits a moment, up to what the server has said for all streams."""
        retries = Retries(first_s=0.1, most_s=max(0.1, self._reader.retry_ms / 1000))
        self._pause_s = retries.pause_s(self._failures, self._core.chance, asked_s)
        self._failures += 1
        if not self._is_out:
            self._is_out = True
            self._note(Interrupted(reason=why))
