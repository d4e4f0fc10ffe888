"""WebSocket frames of a server: unfragmented, unmasked, uncompressed. RFC 6455, 5.2.

    byte 0    1000 oooo   FIN, and the opcode: 1 text, 8 close
    byte 1    0lll llll   payload length; 126: in the next 2 bytes; 127: in the next 8

A frame is encoded once and written to all its receivers. A client's frames have `1lll llll`, and a mask of 4 bytes before
the payload; aiohttp parses them, but also accepts frames without a mask.
"""

from __future__ import annotations

import struct

_TEXT, _CLOSE = 0x81, 0x88
_INVALID = b"\xf0\x80"  # a frame with reserved bits set
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


class MaskChecker:
    """Checks that all frames of a client are masked. RFC 6455, 5.1 requires closing the connection otherwise.

    An unmasked frame is replaced by an invalid one, which aiohttp rejects after it has processed the frames before it.
    """

    __slots__ = ("_head", "_skip")

    def __init__(self) -> None:
        self._head = b""  # incomplete frame header, not passed on yet
        self._skip = 0  # bytes left of the frame's mask and payload

    def check(self, data: bytes) -> bytes:
        """The bytes to pass on to aiohttp."""
        if self._head:
            data, self._head = self._head + data, b""
        at, end = self._skip, len(data)
        while at + 2 <= end:
            size = data[at + 1] - 0x80
            if size < 0:
                return data[:at] + _INVALID
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
