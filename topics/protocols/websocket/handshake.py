"""The opening handshake of a WebSocket, server side; RFC 6455, 4.2."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Container

from websockets.utils import accept_key


def is_handshake(fields: dict[bytes, bytes], options: Container[bytes]) -> bool:
    """Whether a GET with these headers, and these options of its Connection header, is a valid handshake."""
    return (
        fields.get(b"upgrade", b"").lower() == b"websocket"
        and b"upgrade" in options
        and fields.get(b"sec-websocket-version") == b"13"
        and _is_key(fields.get(b"sec-websocket-key", b""))
    )


def _is_key(key: bytes) -> bool:
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):
        return False


def accept_value(key: bytes) -> bytes:
    """The value of Sec-WebSocket-Accept."""
    return accept_key(key.decode()).encode()
