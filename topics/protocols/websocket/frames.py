"""WebSocket frames of a server: unfragmented, unmasked, uncompressed. RFC 6455, 5.2.

    byte 0    1000 oooo   FIN, and the opcode: 1 text, 8 close
    byte 1    0lll llll   payload length; 126: in the next 2 bytes; 127: in the next 8

A frame is encoded once and written to all its receivers. Frames of clients are parsed in
`topics.protocols.websocket.session`.
"""

from __future__ import annotations

import struct

_TEXT, _CLOSE, _PONG = 0x81, 0x88, 0x8A
_SHORT = struct.Struct(">BB").pack
_MIDDLE = struct.Struct(">BBH").pack
_LONG = struct.Struct(">BBQ").pack

NORMAL, GOING_AWAY, PROTOCOL_ERROR, INVALID_DATA, MESSAGE_TOO_BIG = 1000, 1001, 1002, 1007, 1009
INTERNAL_ERROR, TRY_AGAIN_LATER = 1011, 1013


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


def pong_frame(payload: bytes) -> bytes:
    """The payload is that of the ping, of at most 125 bytes."""
    return _SHORT(_PONG, len(payload)) + payload
