"""An HTTP/1 connection as a state machine: received bytes in, requests out; responses in, bytes to send out.

It has no socket and no clock. The owner of the socket passes what it receives to `receive`, takes events from `next_event`
until there is none, and writes what `respond` returns. It decides when to stop reading, from the figures below, and when
to give up.

    state       means                                           left by
    IDLE        no request is open; waiting for a head          a head -> BODY, or OPEN if the request is complete
    BODY        a head was parsed; its body is arriving         its end -> OPEN; a response -> CLOSED
    OPEN        a request waits for its response                `respond` -> IDLE or CLOSED; `respond_stream`, `upgrade`
    STREAM      a streaming response is being written; input is discarded
    WEBSOCKET   the connection is a WebSocket
    HTTP2       the client has started with the preface of HTTP/2
    CLOSED      the last response is written; input is discarded

Requests are processed one at a time, so responses are in order. Input behind an open request is buffered.

    event       means
    Head        a head was parsed, its body was not. The request may be refused before the body is read
    Request     a complete request. Small hot requests (`plain_head`) come without a Head before them
    PREFACE     the connection is HTTP/2; `take_rest` returns its bytes
"""

from __future__ import annotations

import re
from typing import Final, Literal, TypeAlias

from topics.protocols.http.exchange import Body, Request, Response
from topics.protocols.http1.framing import HEAD_BYTES_MAX, ChunkedBody, Head, read_head
from topics.protocols.http1.plain_head import find_plain_head
from topics.protocols.http1.responses import render_head, render_stream_head, render_upgrade

IDLE, BODY, OPEN, CLOSED = "idle", "body", "open", "closed"
STREAM, WEBSOCKET, HTTP2 = "stream", "websocket", "http2"

FAST_BODY_MAX = 1 << 20  # of a hot request without a Head before it
# Body size from which the head of an incomplete hot request is an event of its own.
CHECKED_FROM = 64 * 1024
# The body of a refused request is read up to this size, so that the connection can be reused.
DISCARD_MAX = 1 << 20

PREFACE: Final = "preface"
Event: TypeAlias = Request | Head | Literal["preface"]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_BLANK_LINES = re.compile(rb"\A(?:\r\n)+")
_ORIGIN = re.compile(rb"\r\norigin:[ \t]*([^\r\n]*)", re.IGNORECASE)


class BodyTooLarge(Exception):
    """A chunked body is larger than the server accepts."""


class Http1Session:
    __slots__ = (
        "_arrived",
        "_body",
        "_chunks",
        "_discards",
        "_head",
        "_is_first",
        "_left",
        "_reads_plain",
        "body_bytes_max",
        "buffer",
        "state",
    )

    def __init__(self, *, body_bytes_max: int, reads_plain: bool = True, is_first: bool = True) -> None:
        """`is_first`: the input begins with the first bytes of the connection."""
        self.body_bytes_max = body_bytes_max  # of a chunked body; others are known from their head
        self._reads_plain = reads_plain
        self.state = IDLE
        self.buffer = b""  # received and not parsed; not to be changed by others
        self._head: Head | None = None  # of the request, unless it is plain and was complete at once
        self._body: bytes | bytearray = b""
        self._left = 0  # bytes of the body that have not arrived
        self._chunks: ChunkedBody | None = None  # instead, for a body of unknown length
        self._discards = False
        self._arrived = 0
        self._is_first = is_first  # no head has been parsed yet

    # -- figures -------------------------------------------------------------------------------------------

    @property
    def buffered(self) -> int:
        """Bytes in memory: input that is not parsed, and the body so far."""
        return len(self.buffer) + len(self._body)

    @property
    def arrived(self) -> int:
        """Bytes of the incomplete request that have arrived; 0 if there is none. Includes a discarded body."""
        return self._arrived + len(self.buffer)

    @property
    def origin(self) -> bytes:
        """The Origin of the incomplete request, as far as it has arrived."""
        if self._head is not None:
            return self._head.request.origin
        found = _ORIGIN.search(self.buffer, 0, HEAD_BYTES_MAX)
        return found[1] if found else b""

    # -- input ---------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        self.buffer = self.buffer + data if self.buffer else data

    def next_event(self, now_us: int) -> Event | None:
        """The next event; None until more has arrived, or a response was sent. Raises FramingError and BodyTooLarge."""
        if self.state is BODY:
            return self._read_body(now_us)
        data = self.buffer
        if self.state is not IDLE or not data:
            return None
        plain = find_plain_head(data) if self._reads_plain else None
        if plain is None:
            return self._read_head(data, now_us)
        self._is_first = False
        end = plain.end
        if len(data) >= end and plain.body_len <= FAST_BODY_MAX:
            self.buffer = data[end:]
            self.state = OPEN
            return plain.request(data[plain.head_len : end], now_us)
        head = Head(plain.request(b"", now_us), plain.head_len, plain.body_len)
        self._begin_body(head)
        return head if plain.body_len >= CHECKED_FROM else self._read_body(now_us)

    def _read_head(self, data: bytes, now_us: int) -> Event | None:
        if data.startswith(b"\r\n"):  # some clients send an empty line after a body; RFC 9112, 2.2
            self.buffer = _BLANK_LINES.sub(b"", data)
            return self.next_event(now_us)
        if self._is_first and data.startswith(b"PRI") and _PREFACE.startswith(data[: len(_PREFACE)]):
            if len(data) < len(_PREFACE):
                return None
            self.state = HTTP2
            return PREFACE
        head = read_head(data, now_us)
        if head is not None:
            self._is_first = False
            self._begin_body(head)
        return head

    def _begin_body(self, head: Head) -> None:
        self.state = BODY
        self._head = head
        self._arrived = head.head_len
        self.buffer = self.buffer[head.head_len :]
        if head.body_len is None:
            self._chunks = ChunkedBody()
        else:
            self._left = head.body_len

    def discard_body(self) -> bool:
        """The request is refused: do not keep its body. Returns False if the body is too large to be worth reading."""
        head = self._head
        assert head is not None
        self._discards = not head.expects and head.body_len is not None and head.body_len <= DISCARD_MAX
        return self._discards

    def _read_body(self, now_us: int) -> Request | None:
        data = self.buffer
        if self._chunks is not None:
            part, self.buffer = self._chunks.feed(data)
            is_complete = self._chunks.done
        else:
            part, self.buffer = data[: self._left], data[self._left :]
            self._left -= len(part)
            is_complete = not self._left
        self._arrived += len(data) - len(self.buffer)
        if not self._discards:
            self._keep(part)
        return self._complete(now_us) if is_complete else None

    def _keep(self, part: bytes) -> None:
        if self._chunks is not None and len(self._body) + len(part) > self.body_bytes_max:
            raise BodyTooLarge
        if not self._body:
            self._body = part
        else:
            # Not a list of parts: many tiny ones would take far more memory than the bytes that are counted.
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += part

    def _complete(self, now_us: int) -> Request:
        assert self._head is not None
        request = self._head.request
        request.body = bytes(self._body)
        request.received_us = now_us  # the time a slow sender took does not count
        self.state = OPEN
        self._end_body()
        return request

    def _end_body(self) -> None:
        self._body, self._chunks = b"", None
        self._left = self._arrived = 0
        self._discards = False

    # -- output --------------------------------------------------------------------------------------------

    def respond(self, response: Response, *, keep_alive: bool) -> tuple[bytes, Body]:
        """Head and body to send in response to the request. Closes, if it is incomplete: the start of the next one is unknown."""
        head, body, is_old = self._head, response.body, False
        if head is not None:
            self._head = None
            keep_alive = keep_alive and head.keep_alive
            is_old = head.version == b"0"
            if head.request.method == b"HEAD":
                body = b""
        if self.state is OPEN and keep_alive:
            self.state = IDLE
        else:
            keep_alive = False
            self.close()
        return render_head(response, keep_alive=keep_alive, http10=is_old), body

    def respond_stream(self, response: Response) -> tuple[bytes, bool]:
        """The head of a streaming response, and whether the stream may follow: not after a HEAD. The connection ends with it."""
        is_head = self._head is not None and self._head.request.method == b"HEAD"
        self.close()
        if not is_head:
            self.state = STREAM
        return render_stream_head(response), not is_head

    def upgrade(self) -> bytes:
        """The response to the handshake of a WebSocket, `Request.wants_websocket`. `take_rest` returns what came behind it."""
        assert self._head is not None
        key, self._head = self._head.websocket_key, None
        self.state = WEBSOCKET
        return render_upgrade(key)

    def take_rest(self) -> bytes:
        rest, self.buffer = self.buffer, b""
        return rest

    def close(self) -> None:
        """Drop what has arrived: nothing more is read."""
        self.state = CLOSED
        self.buffer = b""
        self._head = None
        self._end_body()
