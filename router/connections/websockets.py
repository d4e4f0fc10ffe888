"""WebSockets of a front: messages go to a handler, which writes its own frames.

While a client does not read, or too many of its messages are unanswered, no message is taken from it and nothing is read:
its messages wait in the socket buffers.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from router.watch.sinks import ConnectionSink
from topics.protocols.http.exchange import WebSocketHandler
from topics.protocols.websocket.frames import (
    INTERNAL_ERROR,
    NORMAL,
    TRY_AGAIN_LATER,
    close_frame,
    pong_frame,
)
from topics.protocols.websocket.session import (
    Closed,
    Message,
    Nothing,
    Ping,
    WebSocketError,
    WebSocketSession,
)

if TYPE_CHECKING:
    from router.connections.connection import Connection

FRAMES_PER_TURN = 256  # of one client that sends many at once; then other connections have their turn

logger = logging.getLogger("topics.front")


class WebSocketSink(ConnectionSink):
    """The sink of a WebSocket, which also receives. It ends with a close frame."""

    __slots__ = ("_handler", "_is_reading", "_is_waiting", "_session", "_write")

    def __init__(
        self,
        connection: Connection,
        transport: asyncio.Transport,
        handler: WebSocketHandler,
        session: WebSocketSession,
        *,
        is_full: bool,
    ) -> None:
        super().__init__(connection, transport, handler, is_full=is_full)
        self._handler = handler
        self._session = session
        self._is_reading = False
        self._is_waiting = (
            False  # until the client reads, the handler accepts more messages, or others had their turn
        )
        self._write = transport.write
        self.write = self._write_frames

    # -- sending -------------------------------------------------------------------------------------------

    def _write_frames(self, data: bytes) -> None:
        self._write(data)
        if self._is_waiting and not self._is_reading:
            # Not at once: a handler is never called from within its own call to the sink.
            self._is_waiting = False
            self._read_soon()

    def close(self) -> None:
        self.end(self._connection.close_code)

    def end(self, code: int) -> None:
        if not self.is_over:
            self.write(close_frame(code))
        super().close()

    def drained(self) -> None:
        super().drained()
        self._read()

    # -- receiving -----------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        self._session.receive(data)
        self._read()

    def _read_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        """Take messages while the client reads and the handler accepts more."""
        if self._is_reading:
            return
        self._is_reading = True
        try:
            self._take_messages()
        except WebSocketError as error:
            self.end(error.code)
        finally:
            self._is_reading = False
        if not self.is_over and not self._connection.hold_messages(
            self._session.buffered, pause=self._is_waiting
        ):
            self.end(TRY_AGAIN_LATER)

    def _take_messages(self) -> None:
        for _ in range(FRAMES_PER_TURN):
            if self.is_over:
                return
            self._is_waiting = self.is_full or self._handler.is_busy
            if self._is_waiting:
                return
            message = self._session.next_message()
            if message is None:
                return
            self._dispatch(message)
        self._is_waiting = True
        self._read_soon()

    def _dispatch(self, message: Message) -> None:
        try:
            match message:
                case str():
                    self._handler.received(message)
                case bytes():
                    self._handler.received_bytes()
                case Ping():
                    self.write(pong_frame(message.payload))
                case Nothing():
                    pass
                case Closed():
                    self.end(NORMAL)
        except Exception:
            logger.exception("a WebSocket handler failed")
            self.end(INTERNAL_ERROR)
