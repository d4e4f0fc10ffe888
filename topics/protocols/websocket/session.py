"""A WebSocket as a state machine: received bytes in, messages out. The frames are parsed by `websockets`.

One message is taken at a time, so the owner of the socket can stop between any two, and everything behind them stays
unparsed. Messages to the client are frames of `topics.protocols.websocket.frames`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias

from websockets.exceptions import PayloadTooBig, ProtocolError
from websockets.frames import Close, Frame, Opcode

from topics.protocols.websocket.frames import INVALID_DATA, MESSAGE_TOO_BIG, PROTOCOL_ERROR

CONTROL_BYTES_MAX = 125  # payload; RFC 6455, 5.5
MESSAGE_BYTES_MAX = 16 << 20  # parsed in one go, which takes up to 0.3 s; larger writes must use HTTP


@dataclass(slots=True)
class Ping:
    payload: bytes


@dataclass(slots=True)
class Nothing:
    """A pong, or a part of a message: nothing to do."""


@dataclass(slots=True)
class Closed:
    """The client has sent a close frame."""


Message: TypeAlias = str | bytes | Ping | Nothing | Closed
_NOTHING = Nothing()


class WebSocketError(Exception):
    """What arrived is not valid. `code` is the close code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the WebSocket is closed with {code}")
        self.code = code


class WebSocketSession:
    __slots__ = ("_buffer", "_is_text", "_message", "_parser", "_taken", "message_bytes_max")

    def __init__(self, message_bytes_max: int) -> None:
        self.message_bytes_max = min(message_bytes_max, MESSAGE_BYTES_MAX)
        self._buffer = bytearray()
        self._message: bytearray | None = None  # fragments of an incomplete message
        self._is_text = False
        self._taken = 0  # bytes of the incomplete frame that the parser has
        self._parser: Generator[None, None, Frame] | None = None  # of an incomplete frame

    @property
    def buffered(self) -> int:
        """Bytes in memory: input that is not parsed, and fragments of an incomplete message."""
        return len(self._buffer) + self._taken + len(self._message or b"")

    def receive(self, data: bytes) -> None:
        self._buffer += data

    def next_message(self) -> Message | None:
        """What the next frame brings; None until more has arrived. Raises WebSocketError, after which nothing more may be read."""
        frame = self._next_frame()
        return None if frame is None else self._take(frame)

    def _next_frame(self) -> Frame | None:
        if self._parser is None:
            self._parser = self._parse()
        try:
            next(self._parser)
        except StopIteration as parsed:
            self._parser, self._taken = None, 0
            frame: Frame = parsed.value
            return frame
        except ProtocolError:
            raise WebSocketError(PROTOCOL_ERROR) from None
        except PayloadTooBig:
            raise WebSocketError(MESSAGE_TOO_BIG) from None
        return None

    def _parse(self) -> Generator[None, None, Frame]:
        """Parse one frame. Control frames may come between the fragments of a message, however little room it leaves."""
        while not self._buffer:
            yield
        is_control = self._buffer[0] & 0x08
        room = CONTROL_BYTES_MAX if is_control else self.message_bytes_max - len(self._message or b"")
        try:
            return (yield from Frame.parse(self._read, mask=True, max_size=room))
        except PayloadTooBig:
            if is_control:  # no limit of ours: a larger one is malformed
                raise ProtocolError("a control frame is too long") from None
            raise

    def _read(self, size: int) -> Generator[None, None, bytes]:
        while len(self._buffer) < size:
            yield
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        self._taken += size
        return data

    def _take(self, frame: Frame) -> Message:
        match frame.opcode:
            case Opcode.PING:
                return Ping(bytes(frame.data))
            case Opcode.PONG:
                return _NOTHING
            case Opcode.CLOSE:
                return _read_close(frame)
            case Opcode.CONT:
                if self._message is None:
                    raise WebSocketError(PROTOCOL_ERROR)
                self._message += frame.data
                if not frame.fin:
                    return _NOTHING
                data, self._message = bytes(self._message), None
            case _:
                if self._message is not None:
                    raise WebSocketError(PROTOCOL_ERROR)
                self._is_text = frame.opcode is Opcode.TEXT
                if not frame.fin:
                    self._message = bytearray(frame.data)
                    return _NOTHING
                data = bytes(frame.data)
        return _decode(data) if self._is_text else data


def _read_close(frame: Frame) -> Closed:
    try:
        Close.parse(bytes(frame.data))
    except ProtocolError:
        raise WebSocketError(PROTOCOL_ERROR) from None
    except UnicodeDecodeError:
        raise WebSocketError(INVALID_DATA) from None
    return Closed()


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise WebSocketError(INVALID_DATA) from None
