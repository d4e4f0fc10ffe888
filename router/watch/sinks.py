"""Sinks of streaming responses.

A stream is called from `respond` or from the event loop, never from within its own call to the sink. So it may close
sinks while it iterates over them.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from topics.protocols.http.call import no_upgrade
from topics.protocols.http.exchange import Response, Stream

if TYPE_CHECKING:
    from router.connections.connection import Connection

logger = logging.getLogger("topics.front")

# A stream sends an error to a client that does not read, and closes. If that is not read either, the connection is aborted.
STREAM_STALL_US = 60_000_000


def discard(response: Response) -> None:
    """Close the stream of a response that cannot be sent because the client has disconnected."""
    for stream in (response.stream, response.websocket):
        if stream is not None:
            stream.closed()


def without_websocket(response: Response) -> Response:
    """The response, or an error in place of a WebSocket if the request was not a valid handshake."""
    if response.websocket is None:
        return response
    discard(response)
    return no_upgrade()


def discard_bytes(_data: bytes) -> None:
    """`write` of a sink that is closed."""


class OwnedSink(ABC):
    """Base class: passes the events of a connection on to the stream, and its end exactly once."""

    __slots__ = ("_closed", "_owner", "is_full")

    def __init__(self, owner: Stream, *, is_full: bool) -> None:
        self._owner = owner
        self._closed = False  # `closed` was called
        self.is_full = is_full

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Further writes are discarded."""

    @abstractmethod
    def _discard_writes(self) -> None: ...

    @abstractmethod
    def write(self, data: bytes, /) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...

    # -- called by the connection --------------------------------------------------------------------------

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
        self._discard_writes()
        if not self._closed:
            self._closed = True
            self._owner.closed()


class ConnectionSink(OwnedSink):
    """A sink that writes to an HTTP/1 connection.

    An event may go to a thousand of these, so `write` is the transport's own method until the sink is closed.
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

    def _discard_writes(self) -> None:
        self.write = discard_bytes

    def close(self) -> None:
        self._discard_writes()
        self._connection.end_stream()
        asyncio.get_running_loop().call_soon(self.lost)

    def abort(self) -> None:
        self._discard_writes()
        if self._connection.transport is not None:
            self._connection.transport.abort()
