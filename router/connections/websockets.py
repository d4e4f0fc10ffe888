"""WebSockets: aiohttp shakes hands and reads messages, a conversation answers with frames of its own.

Both write whole frames, each in one go, so theirs cannot mix. Nothing is read from a client that does not take what was
written to it, or whose last messages are not answered: what it sends then waits in its own socket, not here.
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
# It warns of every client that offers a subprotocol, and a log is not for clients to fill.
logging.getLogger("aiohttp.websocket").setLevel(logging.ERROR)

MESSAGE_BYTES_MAX = 16 << 20  # a front reads it whole, which takes up to 0.3 s; larger writes go over HTTP


def asks_for_websocket(request: BaseRequest) -> bool:
    """Whether it is a handshake as RFC 6455, 4.2.1 has it."""
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
    """The sink of a WebSocket. Its end is said in a frame, and whoever reads from the client waits for room in it."""

    __slots__ = ("_conversation", "_reader", "_write", "masks")

    def __init__(
        self,
        connection: Connection,
        transport: asyncio.Transport,
        conversation: WebSocketHandler,
        *,
        is_full: bool,
    ) -> None:
        super().__init__(connection, transport, conversation, is_full=is_full)
        self._conversation = conversation
        self._reader: asyncio.Future[None] | None = None  # waits for room
        self._write = transport.write
        self.write = self._write_frames
        self.masks = MaskChecker()  # of the client's frames

    def _write_frames(self, data: bytes) -> None:
        self._write(data)
        if self._reader is not None:
            self._wake()

    def close(self) -> None:
        self.end(self._connection.farewell_code)

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

    async def room(self) -> None:
        """Wait until the client takes what is written to it, and the conversation has time for more."""
        while (self.is_full or self._conversation.is_busy) and not self.is_over:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)


class Socket(web.WebSocketResponse):
    """aiohttp's end of a WebSocket. Pings are answered by `_listen`, so that each of them counts as a message."""

    def __init__(self, owner: Connection, message_bytes_max: int) -> None:
        # aiohttp's limit is the first size that it does not take.
        super().__init__(compress=False, autoping=False, max_msg_size=message_bytes_max + 1)
        self._owner = owner

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        self.headers.popall("Server", None)  # which other answers do not name either

    def _close_transport(self) -> None:
        # A transport that is closed with input unread takes the close frame with it.
        self._owner.end_stream()


async def serve_websocket(
    owner: Connection, request: BaseRequest, conversation: WebSocketHandler, message_bytes_max: int
) -> web.StreamResponse:
    """Make the connection a WebSocket, and pass on what comes, until one of the two ends it."""
    socket = Socket(owner, message_bytes_max)
    try:
        await socket.prepare(request)
    except BaseException as error:
        conversation.closed()
        if isinstance(error, ConnectionError):
            return socket  # the client has gone
        raise
    sink = owner.begin_websocket(conversation)
    if sink is not None:
        try:
            await _listen(owner, socket, sink, conversation)
        except ConnectionError:
            pass  # it went while a pong was written
        finally:
            sink.close()
            sink.lost()
    return socket


async def _listen(
    owner: Connection, socket: Socket, sink: WebSocketSink, conversation: WebSocketHandler
) -> None:
    while not sink.is_over:
        message = await socket.receive()
        owner.message_is_here()
        if sink.is_over:
            return
        if message.type is WSMsgType.PING:
            await socket.pong(message.data)
        elif message.type is not WSMsgType.PONG and not _pass_on(message, conversation, sink):
            return
        await sink.room()


def _pass_on(message: WSMessage, conversation: WebSocketHandler, sink: WebSocketSink) -> bool:
    """False when it was the last."""
    try:
        if message.type is WSMsgType.TEXT:
            conversation.received(message.data)
        elif message.type is WSMsgType.BINARY:
            conversation.received_bytes()
        else:
            return False
    except Exception:
        logger.exception("a conversation failed")
        sink.end(INTERNAL_ERROR)
    return True
