"""The ends of streams: where their bytes go, and how their owners hear of it.

The owner of a stream is called from `respond` or from the loop, never from within a call that it makes itself. So it may
close sinks while it goes through its table of them.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from topics.api.http_errors import STATUS, error_body, error_head
from topics.protocols.http.exchange import Response, Stream

if TYPE_CHECKING:
    from router.connections.connection import Connection

logger = logging.getLogger("topics.front")

# A stream's owner parts with a client that takes nothing, in words; whoever does not take those either is cut.
STREAM_STALL_US = 60_000_000


def abandon(response: Response) -> None:
    """Nobody is there to take this response; whoever would have filled it hears so."""
    for stream in (response.stream, response.websocket):
        if stream is not None:
            stream.closed()


def without_websocket(response: Response) -> Response:
    """What a client gets that has not asked for a WebSocket, or not as the protocol demands."""
    if response.websocket is None:
        return response
    abandon(response)
    return no_upgrade()


def no_upgrade() -> Response:
    status = STATUS["invalid_request"]
    body = error_body("invalid_request", "this is a WebSocket: ask for an upgrade, over HTTP/1.1")
    return Response(status, body, head=error_head(status) + b"Sec-WebSocket-Version: 13\r\n")


def discard_bytes(_data: bytes) -> None:
    """What is written after the end."""


class OwnedSink(ABC):
    """A sink, as its connection sees it: what happens to it is passed on to the stream's owner, and its end once."""

    __slots__ = ("_owner", "_told", "is_full")

    def __init__(self, owner: Stream, *, is_full: bool) -> None:
        self._owner = owner
        self._told = False  # that it is closed
        self.is_full = is_full

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Nothing more is taken."""

    @abstractmethod
    def _take_no_more(self) -> None: ...

    @abstractmethod
    def write(self, data: bytes, /) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...

    # What the connection calls

    def open(self) -> None:
        try:
            self._owner.opened(self)
        except Exception:
            logger.exception("a stream failed")
            self.abort()

    def drained(self) -> None:
        self.is_full = False
        if not self.is_over:
            self._owner.drained()

    def lost(self) -> None:
        self._take_no_more()
        if not self._told:
            self._told = True
            self._owner.closed()


class ConnectionSink(OwnedSink):
    """The sink that is a whole HTTP/1 connection, until it closes.

    An event goes to a thousand of these, so `write` is the transport's own, for as long as that takes anything.
    """

    __slots__ = ("_connection", "write")

    write: Callable[[bytes], None]

    def __init__(
        self, connection: Connection, transport: asyncio.Transport, owner: Stream, *, is_full: bool
    ) -> None:
        super().__init__(owner, is_full=is_full)
        self._connection = connection
        self.write = transport.write

    @property
    def is_over(self) -> bool:
        return self.write is discard_bytes

    def _take_no_more(self) -> None:
        self.write = discard_bytes

    def close(self) -> None:
        self._take_no_more()
        self._connection.end_stream()
        asyncio.get_running_loop().call_soon(self.lost)

    def abort(self) -> None:
        self._take_no_more()
        if self._connection.transport is not None:
            self._connection.transport.abort()
