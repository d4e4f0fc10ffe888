"""WebSockets: aiohttp does the handshake and parses messages, a handler writes its own frames.

Both write each frame in a single call, so frames cannot interleave. While a client does not read, or too many of its
messages are unanswered, nothing is read from it: its messages wait in the socket buffers.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11, WSMessage, WSMsgType, web
from aiohttp.web_request import BaseRequest

from router.watch.sinks import ConnectionSink
from topics.protocols.http.exchange import WebSocketHandler
from topics.protocols.websocket.frames import INTERNAL_ERROR, NORMAL, MaskChecker, close_frame

if TYPE_CHECKING:
    from router.connections.connection import Connection

logger = logging.getLogger("topics.front")
# aiohttp logs a warning for every client that offers a subprotocol, which would let clients fill the log.
logging.getLogger("aiohttp.websocket").setLevel(logging.ERROR)

MESSAGE_BYTES_MAX = 16 << 20  # parsed in one go, which takes up to 0.3 s; larger writes must use HTTP


def asks_for_websocket(request: BaseRequest) -> bool:
    """Whether the request is a valid handshake; RFC 6455, 4.2.1."""
    headers = request.headers
    if headers.get("Upgrade", "").strip().lower() != "websocket":
        return False
    options = ",".join(headers.getall("Connection", ())).lower().split(",")
    return (
        request.method == "GET"
        and request.version == HttpVersion11
        and not request.body_exists
        and "upgrade" in (option.strip() for option in options)
        and headers.get("Sec-WebSocket-Version", "").strip() == "13"
        and _is_key(headers.get("Sec-WebSocket-Key", ""))
    )


def _is_key(key: str) -> bool:
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):
        return False


class WebSocketSink(ConnectionSink):
    """The sink of a WebSocket. It ends with a close frame, and the reader of the connection waits while it is full."""

    __slots__ = ("_handler", "_reader", "_write", "masks")

    def __init__(
        self,
        connection: Connection,
        transport: asyncio.Transport,
        handler: WebSocketHandler,
        *,
        is_full: bool,
    ) -> None:
        super().__init__(connection, transport, handler, is_full=is_full)
        self._handler = handler
        self._reader: asyncio.Future[None] | None = None  # set while the reader waits
        self._write = transport.write
        self.write = self._write_frames
        self.masks = MaskChecker()

    def _write_frames(self, data: bytes) -> None:
        self._write(data)
        if self._reader is not None:
            self._wake()

    def close(self) -> None:
        self.end(self._connection.close_code)

    def end(self, code: int = NORMAL) -> None:
        if not self.is_over:
            self.write(close_frame(code))
        super().close()
        self._wake()

    def drained(self) -> None:
        super().drained()
        self._wake()

    def lost(self) -> None:
        super().lost()
        self._wake()

    async def ready(self) -> None:
        """Wait until the client reads and the handler accepts more messages."""
        while (self.is_full or self._handler.is_busy) and not self.is_over:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)


class Socket(web.WebSocketResponse):
    """aiohttp's part of a WebSocket. Pings are answered by `_listen`, so that each of them counts as a message."""

    def __init__(self, owner: Connection, message_bytes_max: int) -> None:
        # aiohttp's limit is the first size that it rejects.
        super().__init__(compress=False, autoping=False, max_msg_size=message_bytes_max + 1)
        self._owner = owner

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        self.headers.popall("Server", None)  # as in all other responses

    def _close_transport(self) -> None:
        # Closing a transport with unread input would discard the close frame.
        self._owner.end_stream()


async def serve_websocket(
    owner: Connection, request: BaseRequest, handler: WebSocketHandler, message_bytes_max: int
) -> web.StreamResponse:
    """Upgrade the connection to a WebSocket, and pass its messages to the handler until one side closes it."""
    socket = Socket(owner, message_bytes_max)
    try:
        await socket.prepare(request)
    except BaseException as error:
        handler.closed()
        if isinstance(error, ConnectionError):
            return socket  # the client has disconnected
        raise
    sink = owner.begin_websocket(handler)
    if sink is not None:
        try:
            await _listen(owner, socket, sink, handler)
        except ConnectionError:
            pass  # the client disconnected while a pong was written
        finally:
            sink.close()
            sink.lost()
    return socket


async def _listen(owner: Connection, socket: Socket, sink: WebSocketSink, handler: WebSocketHandler) -> None:
    while not sink.is_over:
        message = await socket.receive()
        owner.message_received()
        if sink.is_over:
            return
        if message.type is WSMsgType.PING:
            await socket.pong(message.data)
        elif message.type is not WSMsgType.PONG and not _dispatch(message, handler, sink):
            return
        await sink.ready()


def _dispatch(message: WSMessage, handler: WebSocketHandler, sink: WebSocketSink) -> bool:
    """Pass a message to the handler. Returns False if it was the last one."""
    try:
        if message.type is WSMsgType.TEXT:
            handler.received(message.data)
        elif message.type is WSMsgType.BINARY:
            handler.received_bytes()
        else:
            return False
    except Exception:
        logger.exception("a WebSocket handler failed")
        sink.end(INTERNAL_ERROR)
    return True
