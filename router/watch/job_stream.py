"""One open stream of jobs: what a queue or a consumer hands out to one client, written as it comes from the shard.

A push that the client has no room for waits here, and is WORKED only when there is room again. So a client that takes
nothing keeps PUSHES_AHEAD pushes and no more; after a while it is let go, and what it holds goes to others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from topics.link import wire
from topics.protocols.http import sse
from topics.protocols.http.exchange import Sink

if TYPE_CHECKING:
    from router.watch.service import StreamService

HEARTBEAT_US = 15_000_000


class _Error(msgspec.Struct):
    code: str
    message: str


class _ErrorBody(msgspec.Struct):
    error: _Error


_error_body = msgspec.json.Decoder(_ErrorBody).decode


class JobEventStream:
    heartbeat_us = HEARTBEAT_US

    def __init__(
        self, desk: StreamService, shard: int, number: int, topic: str, on_closed: Callable[[], None]
    ) -> None:
        self.shard = shard
        self.number = number  # of its WORK
        self.wrote_us = 0
        self.is_closed = False
        self._desk = desk
        self._topic = topic
        self._on_closed = on_closed
        self._sink: Sink | None = None
        self._held: deque[bytes] = deque()
        self._unworked = 0  # pushes that were written and have filled the client's buffer
        self._farewell = b""

    # -- the connection's calls ----------------------------------------------------------------------------

    def opened(self, sink: Sink) -> None:
        if self.is_closed:  # it was ended before it could begin
            sink.write(sse.RETRY + self._farewell)
            sink.close()
            return
        self._sink = sink
        self._write(sse.RETRY)
        self._desk.jobs_opened(self)
        self._pass_on()

    def drained(self) -> None:
        self._desk.stalled.pop(self, None)
        self._were_taken()
        self._pass_on()

    def closed(self) -> None:
        self._leave()
        self._sink = None
        self._on_closed()

    # -- the shard's ---------------------------------------------------------------------------------------

    def take(self, reply: wire.Reply) -> None:
        """A push, or the end."""
        if reply.status == 200:
            self._held.append(bytes(reply.body))
            self._pass_on()
            return
        error = _error_body(reply.body).error
        # The contract has numbers for what ends a stream of jobs for good.
        code = reply.status if reply.status in (404, 409) else error.code
        self.end(sse.error(code, error.message, topic=self._topic))

    def _pass_on(self) -> None:
        sink = self._sink
        if sink is None or self.is_closed:
            return
        while self._held and not sink.is_full:
            self._write(self._held.popleft())
            self._unworked += 1
        if sink.is_full:
            self._desk.stalled.setdefault(self, self._desk.now_us())
        else:
            self._were_taken()

    def _were_taken(self) -> None:
        """What was written has left the client's buffer, or as good as."""
        while self._unworked:
            self._unworked -= 1
            self._desk.jobs_passed_on(self)

    def _write(self, text: bytes) -> None:
        if self._sink is not None:
            self._sink.write(text)
            self.wrote_us = self._desk.now_us()

    # -- the end -------------------------------------------------------------------------------------------

    def beat(self, now_ms: int) -> None:
        if self._sink is not None and not self._sink.is_full:
            self._write(sse.heartbeat(now_ms))

    def end_with(self, code: str, message: str) -> None:
        self.end(sse.error(code, message))

    def end(self, last: bytes) -> None:
        """Close the stream; `last` is what it has to say."""
        if self.is_closed:
            return
        self._leave()
        self._farewell = last
        if self._sink is not None:
            self._sink.write(last)
            self._sink.close()

    def _leave(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._held.clear()
            self._desk.jobs_closed(self)
