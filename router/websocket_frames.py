"""Frames of the WebSocket protocol as the server sends them: whole text messages, not masked."""

from __future__ import annotations


def text_frame(payload: bytes) -> bytes:
    size = len(payload)
    if size < 126:
        return b"\x81%c%b" % (size, payload)
    if size < 1 << 16:
        return b"\x81\x7e%b%b" % (size.to_bytes(2, "big"), payload)
    return b"\x81\x7f%b%b" % (size.to_bytes(8, "big"), payload)
