"""The ends of streams: where their bytes go, and how their owners hear of it.

The owner of a stream is called from `respond` or from the loop, never from within a call that it makes itself. So it may
close sinks while it goes through its table of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from router.exchange import Response, Stream
from topics.http_errors import STATUS, error_body, error_head

if TYPE_CHECKING:
    from router.fastpath import Connection

logger = logging.getLogger("topics.front")

# A stream's owner parts with a client that takes nothing, in words; whoever does not take those either is cut.
STREAM_STALL_US = 60_000_000


def forsake(response: Response) -> None:
    """Nobody is there to take this response; whoever would have filled it hears so."""
    for stream in (response.stream, response.conversation):
        if stream is not None:
            stream.closed()


def without_conversation(response: Response) -> Response:
    """What a client gets that has not asked for a WebSocket, or not as the protocol demands."""
    if response.conversation is None:
        return response
    forsake(response)
    status = STATUS["invalid_request"]
    body = error_body("invalid_request", "this is a WebSocket: ask for an upgrade, over HTTP/1.1")
    return Response(status, body, head=error_head(status) + b"Sec-WebSocket-Version: 13\r\n")


def into_the_void(_data: bytes) -> None:
    """What is written after the end."""


class ConnectionSink:
    """The sink that is a whole HTTP/1 connection, until it closes.

    An event goes to a thousand of these, so `write` is the transport's own, for as long as that takes anything.
    """

    __slots__ = ("_connection", "_stream", "_told", "is_full", "write")

    def __init__(
        self, connection: Connection, transport: asyncio.Transport, stream: Stream, *, is_full: bool
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._told = False  # that it is closed
        self.is_full = is_full
        self.write: Callable[[bytes], None] = transport.write

    @property
    def is_over(self) -> bool:
        return self.write is into_the_void

    def close(self) -> None:
        self.write = into_the_void
        self._connection.end_stream()
        asyncio.get_running_loop().call_soon(self.lost)

    def abort(self) -> None:
        self.write = into_the_void
        if self._connection.transport is not None:
            self._connection.transport.abort()

    # What the connection calls

    def open(self) -> None:
        try:
            self._stream.opened(self)
        except Exception:
            logger.exception("a stream failed")
            self.abort()

    def drained(self) -> None:
        self.is_full = False
        if not self.is_over:
            self._stream.drained()

    def lost(self) -> None:
        self.write = into_the_void
        if not self._told:
            self._told = True
            self._stream.closed()
