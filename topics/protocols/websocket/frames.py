"""WebSocket frames of a server, ready to be written: whole, unmasked and not compressed. RFC 6455, 5.2.

    byte 0    1000 oooo   final, and the opcode: 1 text, 8 close
    byte 1    0lll llll   the length of the payload; 126: in the next 2 bytes; 127: in the next 8

A message is made once and written to all who get it. A client's frames have `1lll llll` and a mask of 4 bytes in front
of the payload; aiohttp reads them, but also those without a mask.
"""

from __future__ import annotations

import struct

_TEXT, _CLOSE = 0x81, 0x88
_REFUSED = b"\xf0\x80"  # with bits that nobody may set
_SHORT = struct.Struct(">BB").pack
_MIDDLE = struct.Struct(">BBH").pack
_LONG = struct.Struct(">BBQ").pack

NORMAL, GOING_AWAY, INTERNAL_ERROR, TRY_AGAIN_LATER = 1000, 1001, 1011, 1013


PING_FRAME = b"\x89\x00"


def text_frame(payload: bytes) -> bytes:
    """One text message; the payload is UTF-8."""
    size = len(payload)
    if size < 126:
        return _SHORT(_TEXT, size) + payload
    if size < 1 << 16:
        return _MIDDLE(_TEXT, 126, size) + payload
    return _LONG(_TEXT, 127, size) + payload


def close_frame(code: int) -> bytes:
    return _MIDDLE(_CLOSE, 2, code)


class Masks:
    """Follows the frames of a client for their masks, without which RFC 6455, 5.1 wants the connection closed.

    In place of a frame that has none aiohttp gets one that it refuses as well. So what was sent before it is answered first.
    """

    __slots__ = ("_head", "_skip")

    def __init__(self) -> None:
        self._head = b""  # of a frame whose length is not all here; aiohttp has none of it
        self._skip = 0  # what is left of the frame's mask and payload

    def checked(self, data: bytes) -> bytes:
        """What aiohttp may have now."""
        if self._head:
            data, self._head = self._head + data, b""
        at, end = self._skip, len(data)
        while at + 2 <= end:
            size = data[at + 1] - 0x80
            if size < 0:
                return data[:at] + _REFUSED
            head_len = 2 if size < 126 else 4 if size == 126 else 10
            if at + head_len > end:
                break
            if head_len > 2:
                size = int.from_bytes(data[at + 2 : at + head_len], "big")
            at += head_len + 4 + size
        if at < end:
            self._head, self._skip = data[at:], 0
            return data[:at]
        self._skip = at - end
        return data
