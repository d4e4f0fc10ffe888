"""An open job stream: jobs of a queue or records of a consumer, pushed by the shard and written as server-sent events.

A push is held while the client does not read, and acknowledged (JOBS_ACK) when there is room again. So at most
PUSHES_AHEAD pushes are held for a client that does not read. After a while it is disconnected, and its jobs are redelivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from topics.link import wire
from topics.protocols.http import sse
from topics.protocols.http.errors import STATUS
from topics.protocols.http.exchange import Sink

if TYPE_CHECKING:
    from topics.protocols.http.ports import Streams

HEARTBEAT_US = 15_000_000


class JobEventStream:
    heartbeat_us = HEARTBEAT_US

    def __init__(
        self, service: Streams, shard: int, number: int, topic: str, on_closed: Callable[[], None]
    ) -> None:
        self.shard = shard
        self.number = number  # of its OPEN_JOBS
        self.wrote_us = 0
        self.is_closed = False
        self._service = service
        self._topic = topic
        self._on_closed = on_closed
        self._sink: Sink | None = None
        self._held: deque[bytes] = deque()
        self._unacked = 0  # pushes that filled the client's buffer, and are acknowledged when it has room
        self._final_event = b""

    # -- called by the connection --------------------------------------------------------------------------

    def opened(self, sink: Sink) -> None:
        if self.is_closed:  # ended before it could start
            sink.write(sse.RETRY + self._final_event)
            sink.close()
            return
        self._sink = sink
        self._write(sse.RETRY)
        self._service.job_stream_opened(self)
        self._write_held()

    def drained(self) -> None:
        self._service.stalled.pop(self, None)
        self._ack_written()
        self._write_held()

    def closed(self) -> None:
        self._detach()
        self._sink = None
        self._on_closed()

    # -- called by the service -----------------------------------------------------------------------------

    def receive(self, reply: wire.Reply) -> None:
        """Process a push from the shard, or the error that ends the stream."""
        if reply.code == wire.OK:
            self._held.append(bytes(reply.body))
            self._write_held()
            return
        failure = reply.failure
        # The API uses numbers for errors after which reconnecting is useless.
        status = STATUS[failure.code]
        code = status if status in (404, 409) else failure.code
        self.end(sse.error(code, failure.message, topic=self._topic))

    def _write_held(self) -> None:
        sink = self._sink
        if sink is None or self.is_closed:
            return
        while self._held and not sink.is_full:
            self._write(self._held.popleft())
            self._unacked += 1
        if sink.is_full:
            self._service.stalled.setdefault(self, self._service.now_us())
        else:
            self._ack_written()

    def _ack_written(self) -> None:
        """Acknowledge written pushes, when the client has room again."""
        while self._unacked:
            self._unacked -= 1
            self._service.ack_jobs(self)

    def _write(self, text: bytes) -> None:
        if self._sink is not None:
            self._sink.write(text)
            self.wrote_us = self._service.now_us()

    # -- closing -------------------------------------------------------------------------------------------

    def heartbeat(self, now_ms: int) -> None:
        if self._sink is not None and not self._sink.is_full:
            self._write(sse.heartbeat(now_ms))

    def end_with(self, code: str, message: str) -> None:
        self.end(sse.error(code, message))

    def end(self, last: bytes) -> None:
        """Close the stream after writing `last`."""
        if self.is_closed:
            return
        self._detach()
        self._final_event = last
        if self._sink is not None:
            self._sink.write(last)
            self._sink.close()

    def _detach(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._held.clear()
            self._service.job_stream_closed(self)
