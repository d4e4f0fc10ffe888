"""A client connection of a front: joins a transport of asyncio, the HTTP/1 state machine and admission.

`topics.protocols.http1.session` says what was received and what is to be sent; its states are those of the connection.
Here is what depends on the socket and on the server: pausing and closing it, clients that read or send too slowly, the
budget for request bodies. No request is started while the client does not read earlier responses, so at most one response is
buffered in the transport.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, cast

from router.connections.handover import NEVER
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
from topics.protocols.http.exchange import Body, Request, Response, Stream, WebSocketHandler
from topics.protocols.http1.framing import FramingError, Head
from topics.protocols.http1.pace import (
    BYTES_PER_S_MIN,
    EOF_WAIT_US,
    EVENTS_PER_TURN,
    LINGER_US,
    READ_AHEAD_MAX,
    may_read_us,
)
from topics.protocols.http1.session import (
    BODY,
    CLOSED,
    CONTINUE,
    IDLE,
    OPEN,
    STREAM,
    WEBSOCKET,
    BodyTooLarge,
    Http1Session,
)
from topics.protocols.websocket.frames import GOING_AWAY, NORMAL
from topics.protocols.websocket.session import WebSocketSession

if TYPE_CHECKING:
    from router.server import Server

logger = logging.getLogger("topics.front")

JOIN_MAX = 64 * 1024  # a body up to this size is joined with its head into one write
HOLD_FROM = 64 * 1024  # size from which an incomplete request counts towards the budget for request bodies


class Connection(asyncio.Protocol):
    __slots__ = (
        "_advancing",
        "_arrived_before",
        "_ended",
        "_held",
        "_http2",
        "_open",
        "_paused",
        "_refusal",
        "_requests_before",
        "_server",
        "_shard",
        "_sink",
        "_stalled_bytes",
        "_stalled_max",
        "_stalled_us",
        "_streak",
        "_whole_bytes",
        "_yields",
        "active_us",
        "began_us",
        "returns",
        "session",
        "transport",
    )

    def __init__(self, server: Server, *, returns: int = 0, early: bytes = b"") -> None:
        """`returns`: how often a worker has returned the connection; `early`: its unread bytes then."""
        self._server = server
        self.transport: asyncio.Transport | None = None
        self.session = Http1Session(
            body_bytes_max=server.body_bytes_max, reads_plain=server.fast_path, is_first=not returns
        )
        self.session.receive(early)
        self.returns = returns
        # It is handed over to the worker of a shard after that many requests in a row for its topics.
        handovers = server.handovers
        self._requests_before = handovers.requests_before(returns) if handovers is not None else NEVER
        self._shard, self._streak = -1, 0
        self._http2: Http2Connection | None = None
        self._sink: ConnectionSink | None = None
        self._open: Request | None = None  # the request passed to admission
        self._refusal: Response | None = None  # of the request whose body is discarded
        self._arrived_before = 0  # bytes of the incomplete request when `began_us` was set
        self._stalled_us = 0  # since when the client has not read; 0: it does
        self._stalled_bytes = 0
        self._stalled_max = 0
        self._whole_bytes = 0  # of large bodies that are not completely sent
        self._held = 0
        self._paused = False  # reading is paused
        self._advancing = False
        self._yields = False  # there are more requests, to be started in the next iteration of the loop
        self._ended = False  # the client has closed its side
        self.active_us = 0
        self.began_us = 0  # start of the incomplete request; 0: none

    # -- called by the transport ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # those of uvloop are not a subclass
        self.active_us = self._server.now_us()
        self._server.connections.add(self)
        if self.session.buffer:
            self._yield()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._server.connections.discard(self)
        self._stall_ended()
        self._clear_input()
        if self._open is not None:
            self._open.release()
            self._open = None
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
        elif self.session.state is CLOSED or not self._is_blocked:
            self._close()
        return True

    def data_received(self, data: bytes) -> None:
        session = self.session
        if session.state is CLOSED or session.state is STREAM:
            return
        self.active_us = self._server.now_us()
        if self._http2 is not None:
            self._http2.data_received(data)
        elif session.state is WEBSOCKET:
            cast(WebSocketSink, self._sink).receive(data)
        else:
            session.receive(data)
            self._advance()

    def pause_writing(self) -> None:
        self._stalled_us = self.active_us = self._server.now_us()
        self._stalled_max = 0
        self._update_stalled()
        if self._http2 is not None:
            self._http2.pause_writing()
        if self._sink is not None:
            self._sink.is_full = True

    def resume_writing(self) -> None:
        self._stall_ended()
        self.active_us = self._server.now_us()
        if self._http2 is not None:
            self._http2.resume_writing()
            return
        if self._sink is not None:
            self._sink.drained()
        if self.session.state is IDLE:
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
        """No request may be read: one is open, the client does not read its responses, or others have their turn."""
        state = self.session.state
        return state is not BODY and (state is not IDLE or self._stalled_us != 0 or self._yields)

    def _advance(self) -> None:
        """Start requests from the input until one is open, the rest is incomplete, or there were many."""
        if self._advancing:
            return
        self._advancing = True
        session = self.session
        try:
            for _ in EVENTS_PER_TURN:
                if self.transport is None or (self._stalled_us and session.state is not BODY):
                    break
                if self._streak >= self._requests_before and session.state is IDLE and self._hand_over():
                    break
                event = session.next_event(self.active_us)
                if event is None:
                    break
                if isinstance(event, Request):
                    self._handle(event)
                    if session.state is OPEN:
                        break
                elif isinstance(event, Head):
                    self._check_head(event)
                else:
                    self._start_http2()
            else:
                self._yield()
        except FramingError as refusal:
            self._refuse(self._add_cors(error_response(refusal.code, str(refusal))))
        except BodyTooLarge:
            self._refuse(self._add_cors(self._server.admission.too_large()))
        finally:
            self._advancing = False
        if self.transport is not None:
            self._update_flow_control()

    def _yield(self) -> None:
        if not self._yields:
            self._yields = True
            asyncio.get_running_loop().call_soon(self._continue)

    def _continue(self) -> None:
        self._yields = False
        if self.transport is not None and self.session.state is not CLOSED:
            self._advance()

    def _update_flow_control(self) -> None:
        """Update flow control, timeouts and budget after no further request could be started."""
        assert self.transport is not None
        session = self.session
        blocked = session.state is OPEN or self._is_blocked
        if blocked and len(session.buffer) > READ_AHEAD_MAX:
            self._pause_reading()
        elif self._paused:
            self._resume_reading()
        if blocked:
            return
        if self._ended:
            self._close()
            return
        if not session.arrived:
            self.began_us = 0
        elif not self.began_us:
            self.began_us, self._arrived_before = self.active_us, 0
        size = session.buffered
        if (size >= HOLD_FROM or self._held) and not self._hold(size):
            detail: dict[str, object] = {"limit": "bodies"}
            refusal = error_response("throttled", "too many request bodies are being received", detail)
            self._refuse(self._add_cors(refusal))

    def _pause_reading(self) -> None:
        assert self.transport is not None
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        assert self.transport is not None
        if self._paused:
            self._paused = False
            self.transport.resume_reading()

    def _hold(self, size: int) -> bool:
        more = size - self._held
        if more > 0 and not self._server.receiving.take(more):
            return False
        if more < 0:
            self._server.receiving.release(-more)
        self._held = size
        return True

    def _check_head(self, head: Head) -> None:
        """Refuse a request early if its head is enough to do so."""
        refusal = self._server.admission.check_head(head.request, head.body_len)
        if refusal is None:
            if head.expects:
                assert self.transport is not None
                self.transport.write(CONTINUE)
        elif self.session.discard_body():
            self._refusal = refusal
        else:
            self._refuse(refusal)

    def _handle(self, request: Request) -> None:
        self.began_us = 0
        if self._held:
            self._hold(0)
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            self._respond(refusal)
            return
        self._open = request
        if self._requests_before is not NEVER:
            self._count_streak(request)
        try:
            self._server.admission.handle(request, self._respond)
        except Exception:
            logger.exception("a request failed")
            if self.session.state is OPEN:
                self._respond(error_response("internal", "the request failed; see the server's log"))

    def _count_streak(self, request: Request) -> None:
        handovers = self._server.handovers
        assert handovers is not None
        shard = handovers.shard_of(request.path) if request.method == b"POST" else -1
        self._streak = self._streak + 1 if shard == self._shard else int(shard >= 0)
        self._shard = shard

    def _hand_over(self) -> bool:
        """Let a worker serve the connection from here on, if the next request is one for it. It is between two requests."""
        transport, handovers = self.transport, self._server.handovers
        if not self.session.buffer or self._ended or self._held or self._refusal is not None:
            return False
        assert transport is not None and handovers is not None
        if not handovers.give(self, self._shard if self._streak else None):
            return False
        self._clear_input()
        self.transport = None
        transport.abort()  # closes the descriptor of this process, not the connection
        return True

    def _respond(self, response: Response) -> None:
        if self.transport is None or self.session.state is not OPEN:
            discard(response)
            return
        if response.stream is not None:
            self._begin_stream(response, response.stream)
            return
        if response.websocket is not None:
            if self._open is not None and self._open.wants_websocket:
                self._begin_websocket(response.websocket)
                return
            response = without_websocket(response)
        head, body = self.session.respond(response, keep_alive=not self._server.draining)
        self._write(head, body)
        self._open = None
        if self.session.state is CLOSED:
            self._close_gracefully()
            return
        self.active_us = self._server.now_us()
        if self.session.buffer or self._paused or self._ended:
            self._advance()

    def _write(self, head: bytes, body: Body) -> None:
        transport = self.transport
        assert transport is not None
        if not len(body):
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

    def _add_cors(self, response: Response) -> Response:
        """Add CORS headers to the error for an incomplete request, if its Origin has arrived."""
        return self._server.admission.add_cors(self.session.origin, response)

    def _refuse(self, response: Response) -> None:
        """Respond to a request that is not read to its end, and close: the start of the next request is unknown."""
        head, body = self.session.respond(response, keep_alive=False)
        self._write(head, body)
        self._close_gracefully()

    def _close_gracefully(self) -> None:
        """Close only the sending side first: closing a socket with unread input would discard the response at the client."""
        assert self.transport is not None
        self.active_us = self._server.now_us()
        self._clear_input()
        if self._ended:
            self._close()
            return
        self.transport.write_eof()
        self._resume_reading()

    def _close(self) -> None:
        """Close after everything is written. In this state nothing more is started or written."""
        assert self.transport is not None
        self._clear_input()
        self.transport.close()

    def _clear_input(self) -> None:
        self.session.close()
        self._refusal = None
        self.began_us = 0
        self._hold(0)

    # -- streaming responses, WebSockets, HTTP/2 -----------------------------------------------------------

    @property
    def is_streaming(self) -> bool:
        if self._http2 is not None:
            return self._http2.is_streaming
        return self.session.state is STREAM or self.session.state is WEBSOCKET

    def _begin_stream(self, response: Response, stream: Stream) -> None:
        """Write the head. From here on the connection belongs to the stream until either one ends."""
        transport = self.transport
        assert transport is not None
        self._open = None
        head, may_follow = self.session.respond_stream(response)
        transport.write(head)
        if not may_follow or self._ended or self._server.draining:  # nothing would end the stream
            self._close_gracefully()
            stream.closed()
            return
        self._resume_reading()  # to notice a disconnect
        self._sink = ConnectionSink(self, transport, stream, is_full=self._stalled_us != 0)
        self._sink.open()

    def end_stream(self) -> None:
        """The stream has ended: send what is written, and close the connection."""
        if self.transport is not None and self.is_streaming:
            assert self._sink is not None
            self._sink.write = discard_bytes
            self._close_gracefully()

    def _begin_websocket(self, handler: WebSocketHandler) -> None:
        transport = self.transport
        assert transport is not None
        self._open = None
        transport.write(self.session.upgrade())
        self._resume_reading()
        socket = WebSocketSession(self._server.body_bytes_max)
        sink = WebSocketSink(self, transport, handler, socket, is_full=self._stalled_us != 0)
        self._sink = sink
        sink.open()
        if self._server.draining or self._ended:  # nothing would end it
            sink.close()
        early = self.session.take_rest()
        if early:
            self.data_received(early)

    def hold_messages(self, size: int, *, pause: bool) -> bool:
        """Count input of a WebSocket that is not processed towards the budget. Returns False if there is no room."""
        if pause:
            self._pause_reading()
        else:
            self._resume_reading()
        return self._hold(size)

    @property
    def close_code(self) -> int:
        return GOING_AWAY if self._server.draining else NORMAL

    def _start_http2(self) -> None:
        assert self.transport is not None
        data = self.session.take_rest()
        self.began_us = 0
        self._hold(0)
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
        elif self.session.state is CLOSED:
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
        arrived = self.session.arrived
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
        return now_us - self._stalled_us > may_read_us(timeout_us, read)

    def drain(self) -> None:
        """Start no further requests, because the server is stopping."""
        if self._http2 is not None:
            self._http2.drain()
        elif self.session.state is IDLE and self.transport is not None:
            self._close()
