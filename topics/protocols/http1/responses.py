"""Serialization of HTTP/1.1 responses."""

from __future__ import annotations

import time
from email.utils import formatdate
from http import HTTPStatus

from topics.protocols.http.exchange import Response
from topics.protocols.websocket.handshake import accept_value

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}
_NO_BODY = (204, 304)


class DateLine:
    """The Date header, formatted once per second."""

    def __init__(self) -> None:
        self._second = 0
        self._value = self._line = b""

    def __call__(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._value = formatdate(second, usegmt=True).encode()
            self._line = b"Date: %b\r\n" % self._value
        return self._line

    def value(self) -> bytes:
        self()
        return self._value


date_line = DateLine()


def render_head(response: Response, *, keep_alive: bool = True, http10: bool = False) -> bytes:
    """Everything before the body. An HTTP/1.0 client must be told if the connection stays open."""
    status = response.status
    if status in _NO_BODY:
        entity = b""
    else:
        entity = b"Content-Type: %b\r\nContent-Length: %d\r\n" % (response.content_type, len(response.body))
    if not keep_alive:
        entity += b"Connection: close\r\n"
    elif http10:
        entity += b"Connection: keep-alive\r\n"
    return b"%b%b%b%b\r\n" % (_STATUS_LINES[status], entity, date_line(), response.head)


def render_stream_head(response: Response) -> bytes:
    """Everything before a streaming body, which ends with the connection: no length, and no chunks that a proxy could buffer."""
    return b"%bContent-Type: %b\r\nConnection: close\r\n%b%b\r\n" % (
        _STATUS_LINES[response.status],
        response.content_type,
        date_line(),
        response.head,
    )


def render_upgrade(key: bytes) -> bytes:
    """The response to the handshake of a WebSocket."""
    return b"%bUpgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Accept: %b\r\n%b\r\n" % (
        _STATUS_LINES[101],
        accept_value(key),
        date_line(),
    )
