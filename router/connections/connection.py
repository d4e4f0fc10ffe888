"""One client connection: hot requests are served straight from the received bytes, all others by aiohttp.

A connection is always in one of seven states.

    idle      nothing is open; the next request is looked at
    fast      a plain hot request is with its shard; further input waits in the buffer
    slow      aiohttp has one request, whose end is known; input beyond it waits in the buffer
    stream    an answer without an end is being written; what comes in is thrown away, and its end is the stream's
    socket    it is a WebSocket: aiohttp has all input, and a conversation answers
    handed    HTTP/2 has the connection for good
    closing   the last answer is written; what still comes is thrown away

aiohttp is given exactly one request at a time and its answer is waited for, so answers cannot swap, whichever way each
of them was made. What is complete and plain (`topics.protocols.http1.plain_head`) is served here; all else goes to aiohttp, once
`topics.protocols.http1.framing` has found nothing ambiguous in it. While a client does not take its answers, no further request of it is
begun: one answer is the most that waits in a transport.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, cast

from router.connections.http2 import Http2Connection
from router.connections.websockets import WebSocketSink
from router.requests.call import error_response
from router.watch.sinks import (
    STREAM_STALL_US,
    ConnectionSink,
    abandon,
    discard_bytes,
    without_websocket,
)
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

FAST_BODY_MAX = 1 << 20  # a larger body streams through aiohttp, which holds back a fast sender
READ_AHEAD_MAX = 256 * 1024  # input that waits behind an open request
JOIN_MAX = 64 * 1024  # a body up to this size leaves in one write with its head
BYTES_PER_S_MIN = 16 * 1024  # a slower sender or reader is not waited for
HOLD_FROM = 64 * 1024  # an unfinished fast request of this size counts among the bodies being received
LINGER_US = 2_000_000
ENDED_US = 2_000_000  # how long a client that sends nothing more may wait for its answer

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_ORIGIN = re.compile(rb"\r\norigin:[ \t]*([^\r\n]*)", re.IGNORECASE)

IDLE, FAST, SLOW, STREAM = "idle", "fast", "slow", "stream"
SOCKET, HANDED, CLOSING = "socket", "handed", "closing"


class Connection(asyncio.Protocol):
    __slots__ = (
        "_advancing",
        "_aiohttp",
        "_arrived",
        "_arrived_before",
        "_buffer",
        "_chunks",
        "_ended",
        "_fresh",
        "_held",
        "_http2",
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
        self._plain: PlainHead | None = None  # of the request that is still arriving
        self._aiohttp: AiohttpConnection | None = None
        self._http2: Http2Connection | None = None
        self._sink: ConnectionSink | None = None
        self._slow_left = 0  # bytes of aiohttp's request that have not come yet
        self._chunks: ChunkedBody | None = None  # in place of that, for a body that does not say its length
        self._arrived = 0  # bytes of aiohttp's request that have come
        self._arrived_before = 0  # of the request that is still arriving, when `began_us` was set
        self._stalled_us = 0  # since when the client has not taken what was written; 0: it does
        self._stalled_bytes = 0
        self._stalled_max = 0
        self._whole_bytes = 0  # of large answers that are not sent to their ends
        self._held = 0
        self._open: Request | None = None  # the request that is with the gate
        self._paused = False  # we do not read
        self._advancing = False
        self._fresh = True  # nothing has come yet but a part of one request
        self._ended = False  # the client sends nothing more
        self.active_us = 0
        self.began_us = 0  # when the request that is still arriving began; 0: none is

    # -- the transport's calls -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own are no subclass of it
        self.active_us = self._server.now_us()
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._server.connections.discard(self)
        self._all_taken()
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
        """A client that has sent all may still wait for its answers: it is for us to close."""
        self._ended = True
        if self._http2 is not None:
            self._http2.client_ended()  # it closes when the last stream is answered
        elif self._sink is not None:
            self._shut()
            self._sink.lost()
        elif self.state is CLOSING or self._is_receiving or not self._is_blocked:
            self._shut()
        return True

    def data_received(self, data: bytes) -> None:
        if self.state is CLOSING or self.state is STREAM:
            return
        self.active_us = self._server.now_us()
        if self._http2 is not None:
            self._http2.data_received(data)
            return
        if self.state is SOCKET:
            self._feed_socket(data)
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
            self._settle()
        else:
            self._advance()

    def pause_writing(self) -> None:
        self._stalled_us = self.active_us = self._server.now_us()
        self._stalled_max = 0
        self._look_at_stalled()
        if self._http2 is not None:
            self._http2.pause_writing()
        if self._aiohttp is not None:
            self._aiohttp.pause_writing()
        if self._sink is not None:
            self._sink.is_full = True

    def resume_writing(self) -> None:
        self._all_taken()
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

    def _look_at_stalled(self) -> int:
        """What the client has still to take. A transport keeps a body whole until then, so that is what counts."""
        assert self.transport is not None
        size = self.transport.get_write_buffer_size()
        self._stalled_max = max(self._stalled_max, size)
        self._set_stalled(max(size, self._whole_bytes))
        return size

    def _all_taken(self) -> None:
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
        """No request may be begun: one is open, or the answers before it are not taken."""
        return self.state is not IDLE or self._stalled_us != 0

    @property
    def _is_receiving(self) -> bool:
        """aiohttp has a request that is not complete."""
        return self._slow_left != 0 or self._chunks is not None

    def _advance(self) -> None:
        """Take requests from the buffer until one is open or the rest is not enough for another."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._buffer and self.state is IDLE and not self._stalled_us and self.transport is not None:
                if not self._take_one():
                    break
        except FramingError as refusal:
            self._refuse(self._let_read(error_response(refusal.code, str(refusal))))
        finally:
            self._advancing = False
        if self.transport is not None:
            self._settle()

    def _settle(self) -> None:
        """No request can be taken now: see to what is waited for."""
        assert self.transport is not None
        size = len(self._buffer)
        blocked = self._is_blocked
        if blocked and size > READ_AHEAD_MAX:
            self.transport.pause_reading()  # again, maybe: aiohttp resumes it for reasons of its own
            self._paused = True
        elif self._paused:
            self.transport.resume_reading()
            self._paused = False
        if blocked:
            return
        if self._ended:
            self._shut()
            return
        if not size:
            self.began_us = 0
        elif not self.began_us:
            self.began_us, self._arrived_before = self.active_us, 0
        if (size >= HOLD_FROM or self._held) and not self._hold(size):
            detail: dict[str, object] = {"limit": "bodies"}
            refusal = error_response("throttled", "too many bodies are being received", detail)
            self._refuse(self._let_read(refusal))

    def _hold(self, size: int) -> bool:
        more = size - self._held
        if more > 0 and not self._server.receiving.take(more):
            return False
        if more < 0:
            self._server.receiving.give(-more)
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
            self._plain = plain  # its head need not be read again
            self._buffer = bytearray(data)  # many small parts are not copied again and again
            return False
        if self._plain is not None:
            data = bytes(data)
        self._plain = None
        self._buffer = data[plain.end :]
        self.state = FAST
        self.began_us = 0
        self._fresh = False
        if self._held:
            self._hold(0)
        self._server.fast_requests += 1
        self._handle(plain.request(data[plain.head_len : plain.end], self.active_us))
        return True

    def _is_refused(self, plain: PlainHead) -> bool:
        """A large body is not waited for when its head already says that it is for nothing."""
        refusal = self._server.gate.screen(plain.request(b"", self.active_us), plain.body_len)
        if refusal is not None:
            self._refuse(refusal)
        return refusal is not None

    def _skip_blank_lines(self) -> None:
        """Some clients end a body with a line of its own; RFC 9112, 2.2."""
        at = 0
        while self._buffer[at : at + 2] == b"\r\n":
            at += 2
        self._buffer = self._buffer[at:]

    def opened(self, request: Request) -> None:
        """The gate is asked: should the client go, it hears of it."""
        self._open = request

    def _handle(self, request: Request) -> None:
        self.opened(request)
        try:
            self._server.gate.handle(request, self._answer_fast)
        except Exception:
            logger.exception("a request failed")
            if self.state is FAST:
                self._answer_fast(error_response("internal", "the request failed; the server's log says why"))

    def _answer_fast(self, response: Response) -> None:
        if self.transport is None or self.state is not FAST:
            abandon(response)
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
            # Written as far as the client takes it now; with these limits we hear when it has taken the last byte.
            self._whole_bytes += len(body)
            transport.set_write_buffer_limits(0)
            transport.writelines((head, body))
        if self._stalled_us:
            self._look_at_stalled()
        elif self._stalled_bytes or self._whole_bytes:
            self._all_taken()

    def _done(self, keep_alive: bool) -> None:
        """The open request is answered."""
        self._open = None
        if not keep_alive:
            self._hang_up()
            return
        self.state = IDLE
        self.active_us = self._server.now_us()
        if self._buffer or self._paused or self._ended:
            self._advance()

    def _let_read(self, response: Response) -> Response:
        """The refusal of a request whose head was not read, so that a page can read it as far as its origin has come."""
        found = _ORIGIN.search(self._buffer, 0, HEAD_BYTES_MAX)
        return self._server.gate.let_read(found[1] if found else b"", response)

    def _refuse(self, response: Response) -> None:
        """Answer what is not read to its end; after that nobody knows where the next request begins."""
        self._write(response, False)
        self._hang_up()

    def _hang_up(self) -> None:
        """Close so that the answer arrives: a socket closed on unread input makes the peer lose it."""
        assert self.transport is not None
        self.state = CLOSING
        self.active_us = self._server.now_us()
        self._clear_input()
        self._leave_aiohttp()
        if self._ended:
            self._shut()
            return
        self.transport.write_eof()
        self.transport.resume_reading()

    def _leave_aiohttp(self) -> None:
        if self._aiohttp is not None:
            self._aiohttp.leave()
            self._aiohttp = None

    def _shut(self) -> None:
        """Close once all is written. The state keeps anything more from being begun or written."""
        assert self.transport is not None
        self.state = CLOSING
        self._clear_input()
        self.transport.close()

    def _clear_input(self) -> None:
        self._buffer = b""
        self._plain = self._chunks = None
        self._slow_left = self.began_us = 0
        self._hold(0)

    # -- answers without an end ----------------------------------------------------------------------------

    @property
    def is_streaming(self) -> bool:
        if self._http2 is not None:
            return self._http2.is_streaming
        return self.state is STREAM or self.state is SOCKET

    def _begin_stream(self, response: Response, stream: Stream, *, with_body: bool = True) -> None:
        """The head goes out, and the connection belongs to the stream until one of the two ends."""
        transport = self.transport
        assert transport is not None
        self._open = None
        transport.write(render_stream_head(response))
        if not with_body or self._ended or self._server.draining:  # who would end it, then?
            self._hang_up()
            stream.closed()
            return
        self.state = STREAM
        self._clear_input()
        self._leave_aiohttp()
        transport.resume_reading()  # else we would not hear that the client goes
        self._sink = ConnectionSink(self, transport, stream, is_full=self._stalled_us != 0)
        self._sink.open()

    def end_stream(self) -> None:
        """Its owner has written all: what is written is sent, and the connection closed."""
        if self.transport is not None and (self.state is STREAM or self.state is SOCKET):
            assert self._sink is not None
            self._sink.write = discard_bytes
            self._hang_up()

    def begin_websocket(self, handler: WebSocketHandler) -> WebSocketSink | None:
        """aiohttp has shaken hands; None when the client has gone over it."""
        if self.transport is None or self.state is not SLOW or self._aiohttp is None:
            handler.closed()
            return None
        self.state = SOCKET
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

    def _feed_socket(self, data: bytes) -> None:
        """What waits to become a message counts among the bodies being received."""
        assert self._aiohttp is not None
        assert isinstance(self._sink, WebSocketSink)
        data = self._sink.masks.check(data)
        if self._hold(self._held + len(data)):
            self._aiohttp.data_received(data)
        else:
            self._sink.end(TRY_AGAIN_LATER)

    def message_is_here(self) -> None:
        self._hold(0)

    @property
    def farewell_code(self) -> int:
        return GOING_AWAY if self._server.draining else NORMAL

    # -- the other ways ------------------------------------------------------------------------------------

    def _take_slow(self, data: bytes) -> bool:
        """Give the next request to aiohttp; False when too little of it is here to tell where it ends."""
        if self._fresh and data.startswith(b"PRI") and _PREFACE.startswith(data[: len(_PREFACE)]):
            if len(data) < len(_PREFACE):
                return False
            self._hand_to_http2(data)
            return True
        frame = read_frame(data)
        if frame is None:
            return False
        self._fresh = False
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
        """Pass on what belongs to the body of aiohttp's request; returns what comes after it."""
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
        """aiohttp's request is answered; returns whether the connection stays."""
        if self.transport is None or self.state is not SLOW:
            abandon(response)
            return False
        if response.stream is not None:
            self._begin_stream(response, response.stream, with_body=with_body)
            return False
        # What is answered before it is complete has no end that we know of.
        keep_alive = keep_alive and not self._server.draining and not self._is_receiving
        self._write(response, keep_alive, http10=http10, with_body=with_body)
        self._done(keep_alive)
        return keep_alive

    def answer_is_here(self, size: int) -> None:
        """Of aiohttp's request, which it will write when its task has its turn: until then it counts, too."""
        if self.transport is not None and self.state is SLOW:
            self._set_stalled(self._stalled_bytes + size)

    def slow_ended(self) -> None:
        """aiohttp has written an answer of its own, which ends with the connection."""
        if self.transport is not None and self.state is SLOW:
            self._hang_up()

    def _aiohttp_connection(self) -> AiohttpConnection:
        if self._aiohttp is None:
            assert self.transport is not None
            self._aiohttp = self._server.new_aiohttp_connection(self)
            self._aiohttp.connection_made(self.transport)
        return self._aiohttp

    def _hand_to_http2(self, data: bytes) -> None:
        assert self.transport is not None
        self.state = HANDED
        self._clear_input()
        self._http2 = self._server.new_http2_connection(self.transport)
        self._http2.data_received(data)

    # -- time ----------------------------------------------------------------------------------------------

    def sweep(self, now_us: int, *, idle_us: int, request_us: int) -> None:
        """Close what has been silent, or busy with one request or answer, for too long."""
        transport = self.transport
        if transport is None:
            return
        silent_us = now_us - self.active_us
        if self._stalled_us and self._is_unread(now_us, self._patience_us(request_us)):
            transport.abort()
        elif self._http2 is not None:
            self._http2.sweep(now_us - request_us)
            if not self._http2.busy and silent_us > idle_us:
                transport.close()
        elif self.state is CLOSING:
            if silent_us > LINGER_US:
                self._shut()
        elif self.began_us:
            self._check_progress(now_us, request_us)
        elif self._ended and self._open is not None and silent_us > ENDED_US:
            transport.abort()  # it most likely went altogether, which looks the same from here
        elif not self._is_blocked and silent_us > idle_us:
            self._shut()

    def _check_progress(self, now_us: int, request_us: int) -> None:
        """A request that is still arriving must bring enough in every span of the time allowed, not just at first."""
        if now_us - self.began_us <= request_us:
            return
        arrived = len(self._buffer) if self.state is IDLE else self._arrived
        if arrived - self._arrived_before < BYTES_PER_S_MIN * request_us // 1_000_000:
            refusal = error_response("request_timeout", "the request did not arrive in time")
            self._refuse(self._let_read(refusal))
        else:
            self._arrived_before = arrived
            self.began_us = now_us

    def _patience_us(self, request_us: int) -> int:
        if self._sink is not None or self.is_streaming:
            return max(request_us, STREAM_STALL_US)
        return request_us

    def _is_unread(self, now_us: int, patience_us: int) -> bool:
        """The client takes its answer too slowly, or not at all."""
        size = self._look_at_stalled()  # first: a stream may have written more since it was last looked at
        taken = self._stalled_max - size
        return now_us - self._stalled_us > patience_us + taken * 1_000_000 // BYTES_PER_S_MIN

    def drain(self) -> None:
        """The server stops: nothing new is begun here."""
        if self._http2 is not None:
            self._http2.drain()
        elif self.state is IDLE and self.transport is not None:
            self._shut()
