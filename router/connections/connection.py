"""A client connection: a fast path for the hot requests, aiohttp for the others, HTTP/2 if the client starts with its preface.

A connection is always in one of seven states.

    idle        no open request; waiting for the next one
    fast        a request of the fast path is open; further input is buffered
    slow        aiohttp has one request, whose end is known; input beyond it is buffered
    stream      a streaming response is being written; input is discarded, and EOF ends the stream
    websocket   aiohttp gets all input, and a WebSocket handler writes
    http2       HTTP/2 has taken over the connection
    closing     the last response is written; input is discarded

Requests are processed one at a time, so responses are in order, whichever path each of them takes. Complete requests with
a plain head (`topics.protocols.http1.plain_head`) are served here; all others go to aiohttp, after
`topics.protocols.http1.framing` has checked that they are not ambiguous. No request is started while the client does not
read earlier responses, so at most one response is buffered in the transport.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, cast

from router.connections.http2 import Http2Connection
from router.connections.websockets import WebSocketSink
from router.watch.sinks import (
    STREAM_STALL_US,
    ConnectionSink,
    discard,
    discard_bytes,
    without_websocket,
)
from topics.protocols.http.call import error_response
from topics.protocols.http.exchange import Request, Response, Stream, WebSocketHandler
from topics.protocols.http1.framing import (
    HEAD_BYTES_MAX,
    ChunkedBody,
    FramingError,
    read_frame,
    with_known_method,
)
from topics.protocols.http1.plain_head import PlainHead, find_plain_head
from topics.protocols.http1.responses import render_head, render_stream_head
from topics.protocols.websocket.frames import GOING_AWAY, NORMAL, TRY_AGAIN_LATER

if TYPE_CHECKING:
    from router.connections.aiohttp_server import AiohttpConnection
    from router.server import Server

logger = logging.getLogger("topics.front")

FAST_BODY_MAX = 1 << 20  # larger bodies go through aiohttp, which has flow control
READ_AHEAD_MAX = 256 * 1024  # input buffered behind an open request
JOIN_MAX = 64 * 1024  # a body up to this size is joined with its head into one write
BYTES_PER_S_MIN = 16 * 1024  # minimum rate of senders and readers
HOLD_FROM = 64 * 1024  # size from which an incomplete request counts towards the budget for request bodies
LINGER_US = 2_000_000
EOF_WAIT_US = 2_000_000  # how long a client that has closed its side may wait for a response

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_ORIGIN = re.compile(rb"\r\norigin:[ \t]*([^\r\n]*)", re.IGNORECASE)

IDLE, FAST, SLOW, STREAM = "idle", "fast", "slow", "stream"
WEBSOCKET, HTTP2, CLOSING = "websocket", "http2", "closing"


class Connection(asyncio.Protocol):
    __slots__ = (
        "_advancing",
        "_aiohttp",
        "_arrived",
        "_arrived_before",
        "_buffer",
        "_chunks",
        "_ended",
        "_held",
        "_http2",
        "_is_first",
        "_open",
        "_paused",
        "_plain",
        "_server",
        "_sink",
        "_slow_left",
        "_stalled_bytes",
        "_stalled_max",
        "_stalled_us",
        "_whole_bytes",
        "active_us",
        "began_us",
        "state",
        "transport",
    )

    def __init__(self, server: Server) -> None:
        self._server = server
        self.transport: asyncio.Transport | None = None
        self.state = IDLE
        self._buffer: bytes | bytearray = b""
        self._plain: PlainHead | None = None  # of an incomplete request
        self._aiohttp: AiohttpConnection | None = None
        self._http2: Http2Connection | None = None
        self._sink: ConnectionSink | None = None
        self._slow_left = 0  # bytes of aiohttp's request that have not arrived
        self._chunks: ChunkedBody | None = None  # instead, for a body of unknown length
        self._arrived = 0  # bytes of aiohttp's request that have arrived
        self._arrived_before = 0  # bytes of the incomplete request when `began_us` was set
        self._stalled_us = 0  # since when the client has not read; 0: it does
        self._stalled_bytes = 0
        self._stalled_max = 0
        self._whole_bytes = 0  # of large bodies that are not completely sent
        self._held = 0
        self._open: Request | None = None  # the request passed to admission
        self._paused = False  # reading is paused
        self._advancing = False
        self._is_first = True  # no complete request has arrived yet
        self._ended = False  # the client has closed its side
        self.active_us = 0
        self.began_us = 0  # start of the incomplete request; 0: none

    # -- called by the transport ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # those of uvloop are not a subclass
        self.active_us = self._server.now_us()
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._server.connections.discard(self)
        self._stall_ended()
        self._clear_input()
        if self._open is not None:
            self._open.release()
            self._open = None
        if self._aiohttp is not None:
            self._aiohttp.connection_lost(exc)
            self._aiohttp = None
        if self._http2 is not None:
            self._http2.connection_lost()
            self._http2 = None
        if self._sink is not None:
            self._sink.lost()
            self._sink = None

    def eof_received(self) -> bool:
        """Keep the transport open: a client that has closed its side may still wait for responses."""
        self._ended = True
        if self._http2 is not None:
            self._http2.eof_received()  # closes when the last stream is answered
        elif self._sink is not None:
            self._close()
            self._sink.lost()
        elif self.state is CLOSING or self._is_receiving or not self._is_blocked:
            self._close()
        return True

    def data_received(self, data: bytes) -> None:
        if self.state is CLOSING or self.state is STREAM:
            return
        self.active_us = self._server.now_us()
        if self._http2 is not None:
            self._http2.data_received(data)
            return
        if self.state is WEBSOCKET:
            self._feed_websocket(data)
            return
        if self.state is SLOW and self._is_receiving:
            try:
                data = self._feed_slow(data)
            except FramingError as refusal:
                self._refuse(error_response(refusal.code, str(refusal)))
                return
        if self._buffer:
            self._buffer += data
        else:
            self._buffer = data
        if self._plain is not None and len(self._buffer) < self._plain.end:
            self._update_flow_control()
        else:
            self._advance()

    def pause_writing(self) -> None:
        self._stalled_us = self.active_us = self._server.now_us()
        self._stalled_max = 0
        self._update_stalled()
        if self._http2 is not None:
            self._http2.pause_writing()
        if self._aiohttp is not None:
            self._aiohttp.pause_writing()
        if self._sink is not None:
            self._sink.is_full = True

    def resume_writing(self) -> None:
        self._stall_ended()
        self.active_us = self._server.now_us()
        if self._http2 is not None:
            self._http2.resume_writing()
            return
        if self._aiohttp is not None:
            self._aiohttp.resume_writing()
        if self._sink is not None:
            self._sink.drained()
        if self.state is IDLE:
            self._advance()

    def _update_stalled(self) -> int:
        """Update the count of unsent bytes, and return it. A transport keeps a body in memory until all of it is sent."""
        assert self.transport is not None
        size = self.transport.get_write_buffer_size()
        self._stalled_max = max(self._stalled_max, size)
        self._set_stalled(max(size, self._whole_bytes))
        return size

    def _stall_ended(self) -> None:
        self._stalled_us = 0
        self._set_stalled(0)
        if self._whole_bytes:
            self._whole_bytes = 0
            if self.transport is not None:
                self.transport.set_write_buffer_limits()

    def _set_stalled(self, size: int) -> None:
        self._server.stalled_bytes += size - self._stalled_bytes
        self._stalled_bytes = size

    # -- requests ------------------------------------------------------------------------------------------

    @property
    def _is_blocked(self) -> bool:
        """No request may be started: one is open, or the client does not read its responses."""
        return self.state is not IDLE or self._stalled_us != 0

    @property
    def _is_receiving(self) -> bool:
        """aiohttp's request is incomplete."""
        return self._slow_left != 0 or self._chunks is not None

    def _advance(self) -> None:
        """Start requests from the buffer until one is open or the rest is incomplete."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._buffer and self.state is IDLE and not self._stalled_us and self.transport is not None:
                if not self._take_one():
                    break
        except FramingError as refusal:
            self._refuse(self._add_cors(error_response(refusal.code, str(refusal))))
        finally:
            self._advancing = False
        if self.transport is not None:
            self._update_flow_control()

    def _update_flow_control(self) -> None:
        """Update flow control, timeouts and budget after no further request could be started."""
        assert self.transport is not None
        size = len(self._buffer)
        blocked = self._is_blocked
        if blocked and size > READ_AHEAD_MAX:
            self.transport.pause_reading()  # maybe again: aiohttp may have resumed it
            self._paused = True
        elif self._paused:
            self.transport.resume_reading()
            self._paused = False
        if blocked:
            return
        if self._ended:
            self._close()
            return
        if not size:
            self.began_us = 0
        elif not self.began_us:
            self.began_us, self._arrived_before = self.active_us, 0
        if (size >= HOLD_FROM or self._held) and not self._hold(size):
            detail: dict[str, object] = {"limit": "bodies"}
            refusal = error_response("throttled", "too many request bodies are being received", detail)
            self._refuse(self._add_cors(refusal))

    def _hold(self, size: int) -> bool:
        more = size - self._held
        if more > 0 and not self._server.receiving.take(more):
            return False
        if more < 0:
            self._server.receiving.release(-more)
        self._held = size
        return True

    def _take_one(self) -> bool:
        if self._plain is None and self._buffer[:1] == b"\r":
            self._skip_blank_lines()
        data = cast(bytes, self._buffer)
        if not self._server.fast_path:
            return self._take_slow(data)
        plain = self._plain or find_plain_head(data)
        if plain is None or plain.body_len > FAST_BODY_MAX:
            return self._take_slow(data)
        if len(data) < plain.end:
            if plain.body_len >= HOLD_FROM and self._plain is None and self._is_refused(plain):
                return False
            self._plain = plain  # so that the head is parsed only once
            self._buffer = bytearray(data)  # so that appending many small parts is cheap
            return False
        if self._plain is not None:
            data = bytes(data)
        self._plain = None
        self._buffer = data[plain.end :]
        self.state = FAST
        self.began_us = 0
        self._is_first = False
        if self._held:
            self._hold(0)
        self._server.fast_requests += 1
        self._handle(plain.request(data[plain.head_len : plain.end], self.active_us))
        return True

    def _is_refused(self, plain: PlainHead) -> bool:
        """Refuse a request with a large body early if its head is enough to do so."""
        refusal = self._server.admission.check_head(plain.request(b"", self.active_us), plain.body_len)
        if refusal is not None:
            self._refuse(refusal)
        return refusal is not None

    def _skip_blank_lines(self) -> None:
        """Some clients send an empty line after a body; RFC 9112, 2.2."""
        at = 0
        while self._buffer[at : at + 2] == b"\r\n":
            at += 2
        self._buffer = self._buffer[at:]

    def opened(self, request: Request) -> None:
        """Release the request if the client disconnects."""
        self._open = request

    def _handle(self, request: Request) -> None:
        self.opened(request)
        try:
            self._server.admission.handle(request, self._answer_fast)
        except Exception:
            logger.exception("a request failed")
            if self.state is FAST:
                self._answer_fast(error_response("internal", "the request failed; see the server's log"))

    def _answer_fast(self, response: Response) -> None:
        if self.transport is None or self.state is not FAST:
            discard(response)
            return
        response = without_websocket(response)
        if response.stream is not None:
            self._begin_stream(response, response.stream)
            return
        keep_alive = not self._server.draining
        self._write(response, keep_alive)
        self._done(keep_alive)

    def _write(
        self, response: Response, keep_alive: bool, *, http10: bool = False, with_body: bool = True
    ) -> None:
        transport = self.transport
        assert transport is not None
        head = render_head(response, keep_alive=keep_alive, http10=http10)
        body = response.body
        if not with_body or not len(body):
            transport.write(head)
        elif len(body) <= JOIN_MAX:
            transport.write(head + body)
        else:
            # With a limit of 0, resume_writing is called when the last byte is sent.
            self._whole_bytes += len(body)
            transport.set_write_buffer_limits(0)
            transport.writelines((head, body))
        if self._stalled_us:
            self._update_stalled()
        elif self._stalled_bytes or self._whole_bytes:
            self._stall_ended()

    def _done(self, keep_alive: bool) -> None:
        """The response to the open request is written."""
        self._open = None
        if not keep_alive:
            self._close_gracefully()
            return
        self.state = IDLE
        self.active_us = self._server.now_us()
        if self._buffer or self._paused or self._ended:
            self._advance()

    def _add_cors(self, response: Response) -> Response:
        """Add CORS headers to the error for a request whose head was not parsed, if its Origin has arrived."""
        found = _ORIGIN.search(self._buffer, 0, HEAD_BYTES_MAX)
        return self._server.admission.add_cors(found[1] if found else b"", response)

    def _refuse(self, response: Response) -> None:
        """Respond to a request that is not read to its end, and close: the start of the next request is unknown."""
        self._write(response, False)
        self._close_gracefully()

    def _close_gracefully(self) -> None:
        """Close only the sending side first: closing a socket with unread input would discard the response at the client."""
        assert self.transport is not None
        self.state = CLOSING
        self.active_us = self._server.now_us()
        self._clear_input()
        self._detach_aiohttp()
        if self._ended:
            self._close()
            return
        self.transport.write_eof()
        self.transport.resume_reading()

    def _detach_aiohttp(self) -> None:
        if self._aiohttp is not None:
            self._aiohttp.detach()
            self._aiohttp = None

    def _close(self) -> None:
        """Close after everything is written. In this state nothing more is started or written."""
        assert self.transport is not None
        self.state = CLOSING
        self._clear_input()
        self.transport.close()

    def _clear_input(self) -> None:
        self._buffer = b""
        self._plain = self._chunks = None
        self._slow_left = self.began_us = 0
        self._hold(0)

    # -- streaming responses -------------------------------------------------------------------------------

    @property
    def is_streaming(self) -> bool:
        if self._http2 is not None:
            return self._http2.is_streaming
        return self.state is STREAM or self.state is WEBSOCKET

    def _begin_stream(self, response: Response, stream: Stream, *, with_body: bool = True) -> None:
        """Write the head. From here on the connection belongs to the stream until either one ends."""
        transport = self.transport
        assert transport is not None
        self._open = None
        transport.write(render_stream_head(response))
        if not with_body or self._ended or self._server.draining:  # nothing would end the stream
            self._close_gracefully()
            stream.closed()
            return
        self.state = STREAM
        self._clear_input()
        self._detach_aiohttp()
        transport.resume_reading()  # to notice a disconnect
        self._sink = ConnectionSink(self, transport, stream, is_full=self._stalled_us != 0)
        self._sink.open()

    def end_stream(self) -> None:
        """The stream has ended: send what is written, and close the connection."""
        if self.transport is not None and (self.state is STREAM or self.state is WEBSOCKET):
            assert self._sink is not None
            self._sink.write = discard_bytes
            self._close_gracefully()

    def begin_websocket(self, handler: WebSocketHandler) -> WebSocketSink | None:
        """Start a WebSocket after aiohttp's handshake. Returns None if the client has disconnected."""
        if self.transport is None or self.state is not SLOW or self._aiohttp is None:
            handler.closed()
            return None
        self.state = WEBSOCKET
        self._open = None
        early = self._buffer
        self._clear_input()
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        sink = WebSocketSink(self, self.transport, handler, is_full=self._stalled_us != 0)
        self._sink = sink
        sink.open()
        if self._server.draining:
            sink.close()
        if early:
            self.data_received(bytes(early))
        return sink

    def _feed_websocket(self, data: bytes) -> None:
        """Pass input to aiohttp. Incomplete messages count towards the budget for request bodies."""
        assert self._aiohttp is not None
        assert isinstance(self._sink, WebSocketSink)
        data = self._sink.masks.check(data)
        if self._hold(self._held + len(data)):
            self._aiohttp.data_received(data)
        else:
            self._sink.end(TRY_AGAIN_LATER)

    def message_received(self) -> None:
        self._hold(0)

    @property
    def close_code(self) -> int:
        return GOING_AWAY if self._server.draining else NORMAL

    # -- aiohttp and HTTP/2 --------------------------------------------------------------------------------

    def _take_slow(self, data: bytes) -> bool:
        """Pass the next request to aiohttp. Returns False if its head is incomplete."""
        if self._is_first and data.startswith(b"PRI") and _PREFACE.startswith(data[: len(_PREFACE)]):
            if len(data) < len(_PREFACE):
                return False
            self._start_http2(data)
            return True
        frame = read_frame(data)
        if frame is None:
            return False
        self._is_first = False
        self._server.slow_requests += 1
        self.state = SLOW
        self._arrived = 0
        self._buffer = b""
        if frame.chunked:
            self._chunks = ChunkedBody()
        self._slow_left = frame.body_len
        head = with_known_method(data[: frame.head_len])
        self._aiohttp_connection().data_received(head)
        self._buffer = self._feed_slow(data[frame.head_len :])
        return True

    def _feed_slow(self, data: bytes) -> bytes:
        """Pass the body of aiohttp's request on, and return the bytes after it."""
        if self._chunks is not None:
            part, rest = self._chunks.feed(data)
            if self._chunks.done:
                self._chunks = None
        else:
            part, rest = data[: self._slow_left], data[self._slow_left :]
            self._slow_left -= len(part)
        self._arrived += len(data) - len(rest)
        if not self._is_receiving:
            self.began_us = 0
        elif not self.began_us:
            self.began_us, self._arrived_before = self.active_us, 0
        if part:
            assert self._aiohttp is not None
            self._aiohttp.data_received(part)
        return rest

    def answer_slow(self, response: Response, keep_alive: bool, *, http10: bool, with_body: bool) -> bool:
        """Write the response to aiohttp's request. Returns whether the connection stays open."""
        if self.transport is None or self.state is not SLOW:
            discard(response)
            return False
        if response.stream is not None:
            self._begin_stream(response, response.stream, with_body=with_body)
            return False
        # If the request is incomplete, the start of the next one is unknown.
        keep_alive = keep_alive and not self._server.draining and not self._is_receiving
        self._write(response, keep_alive, http10=http10, with_body=with_body)
        self._done(keep_alive)
        return keep_alive

    def response_ready(self, size: int) -> None:
        """Count the response to aiohttp's request as buffered until aiohttp's task runs."""
        if self.transport is not None and self.state is SLOW:
            self._set_stalled(self._stalled_bytes + size)

    def slow_ended(self) -> None:
        """aiohttp has written a response itself, which ends with the connection."""
        if self.transport is not None and self.state is SLOW:
            self._close_gracefully()

    def _aiohttp_connection(self) -> AiohttpConnection:
        if self._aiohttp is None:
            assert self.transport is not None
            self._aiohttp = self._server.new_aiohttp_connection(self)
            self._aiohttp.connection_made(self.transport)
        return self._aiohttp

    def _start_http2(self, data: bytes) -> None:
        assert self.transport is not None
        self.state = HTTP2
        self._clear_input()
        self._http2 = self._server.new_http2_connection(self.transport)
        self._http2.data_received(data)

    # -- time ----------------------------------------------------------------------------------------------

    def sweep(self, now_us: int, *, idle_us: int, request_us: int) -> None:
        """Close the connection if it has been idle, receiving a request or sending a response for too long."""
        transport = self.transport
        if transport is None:
            return
        silent_us = now_us - self.active_us
        if self._stalled_us and self._is_too_slow(now_us, self._stall_timeout_us(request_us)):
            transport.abort()
        elif self._http2 is not None:
            self._http2.sweep(now_us - request_us)
            if not self._http2.busy and silent_us > idle_us:
                transport.close()
        elif self.state is CLOSING:
            if silent_us > LINGER_US:
                self._close()
        elif self.began_us:
            self._check_progress(now_us, request_us)
        elif self._ended and self._open is not None and silent_us > EOF_WAIT_US:
            transport.abort()  # most likely the client has closed both sides, which looks the same
        elif not self._is_blocked and silent_us > idle_us:
            self._close()

    def _check_progress(self, now_us: int, request_us: int) -> None:
        """Refuse an incomplete request that arrives too slowly, measured over each interval of the timeout."""
        if now_us - self.began_us <= request_us:
            return
        arrived = len(self._buffer) if self.state is IDLE else self._arrived
        if arrived - self._arrived_before < BYTES_PER_S_MIN * request_us // 1_000_000:
            refusal = error_response("request_timeout", "the request did not arrive in time")
            self._refuse(self._add_cors(refusal))
        else:
            self._arrived_before = arrived
            self.began_us = now_us

    def _stall_timeout_us(self, request_us: int) -> int:
        if self._sink is not None or self.is_streaming:
            return max(request_us, STREAM_STALL_US)
        return request_us

    def _is_too_slow(self, now_us: int, timeout_us: int) -> bool:
        """The client reads too slowly, or not at all."""
        size = self._update_stalled()  # first: a stream may have written more since the last call
        read = self._stalled_max - size
        return now_us - self._stalled_us > timeout_us + read * 1_000_000 // BYTES_PER_S_MIN

    def drain(self) -> None:
        """Start no further requests, because the server is stopping."""
        if self._http2 is not None:
            self._http2.drain()
        elif self.state is IDLE and self.transport is not None:
            self._close()
