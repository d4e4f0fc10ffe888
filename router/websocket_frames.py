"""WebSocket frames of a server, ready to be written: whole, unmasked and not compressed. RFC 6455, 5.2.

    byte 0    1000 oooo   final, and the opcode: 1 text, 8 close
    byte 1    0lll llll   the length of the payload; 126: in the next 2 bytes; 127: in the next 8

A message is made once and written to all who get it.
"""

from __future__ import annotations

import struct

_TEXT, _CLOSE = 0x81, 0x88
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
