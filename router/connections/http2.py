"""Cleartext HTTP/2 connections, for clients that start with its preface. h2 handles frames and windows.

- h2 parses a whole batch before it returns the first event, so it may already know that a stream is closed. Events
  therefore only change our own tables; responses are sent by `_flush`, after the batch, when both agree.
- A removed stream is marked `gone`. A late `respond` holds a reference to the stream itself, not its number, and sees that.
- Request bytes are counted in `receiving` from their arrival until admission has the request. Response bytes are counted
  in `sending` while a window or the socket delays them: the whole body until its last byte is sent, as it is one buffer.
- Streaming responses are written by `router.connections.http2_streams`. They keep their stream open, and may be idle.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from h2 import events
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError

from router.connections.budget import ByteBudget
from router.connections.http2_streams import OpenStream, Sinks
from router.watch.sinks import STREAM_STALL_US, discard, without_websocket
from topics.protocols.http.errors import STATUS, error_body, error_head
from topics.protocols.http.exchange import Request, Respond, Response
from topics.protocols.http2.session import STREAMS_MAX, Http2Session, read_head, response_headers

# Large enough to keep a socket busy; small enough to be fair between streams, and to keep the transport's buffer, which is
# not counted, small.
SLICE_BYTES_MAX = 64 * 1024
WRITE_BYTES_MAX = 256 * 1024

# Frames that cost work without being useful: resets, empty DATA, PING, SETTINGS, streams over the limit. The count decreases
# with time and with each completed stream; well-behaved clients stay far below.
NOISE_MAX = 1000
NOISE_FORGIVEN_PER_S = 500
# h2 parses all its input before it returns. A full socket buffer of tiny frames would take seconds.
READ_BYTES_MAX = 16 * 1024
# A stream that is answered before its request has ended is not reset at once: curl 7.88 would drop the response that it
# has just read. Most clients stop sending by themselves.
LINGER_BYTES_MAX = 1 << 20
# Unsent acknowledgements of PING and SETTINGS, for a client that does not read.
PAUSED_BYTES_MAX = 1 << 20


def _refusal(code: str, message: str) -> Response:
    status = STATUS[code]
    return Response(status, error_body(code, message), head=error_head(status))


TOO_LARGE = _refusal("payload_too_large", "the body is larger than this server accepts")
THROTTLED = _refusal("throttled", "too many request bodies are being received; try again")
TIMED_OUT = _refusal("request_timeout", "the request did not arrive in time")


class RequestHandler(Protocol):
    def check_head(self, request: Request, declared_bytes: int | None) -> Response | None:
        """The error of a request that can be refused before its body is read, if any."""

    def add_cors(self, origin: bytes, response: Response) -> Response:
        """Add the CORS headers that let pages of a listed origin read the response."""

    def handle(self, request: Request, respond: Respond) -> None:
        """Process a request, and call `respond` exactly once, immediately or later."""


class Http2Connection:
    def __init__(
        self,
        transport: asyncio.Transport,
        admission: RequestHandler,
        *,
        body_bytes_max: int,
        receiving: ByteBudget,
        sending: ByteBudget,
        now_us: Callable[[], int],
    ) -> None:
        self._transport = transport
        self._admission = admission
        self._body_bytes_max = body_bytes_max
        self._receiving = receiving
        self._sending = sending
        self._now_us = now_us
        self._streams: dict[int, OpenStream] = {}
        self._outbox: deque[OpenStream] = deque()  # streams with something to send; may contain removed ones
        self._expecting: list[OpenStream] = []
        self._sinks = Sinks(flush=self._flush, abort=self._abort_stream)
        self._noise = 0.0
        self._noise_us = now_us()
        self._paused = False
        self._paused_bytes = 0
        self._is_flushing = False  # in a batch or a flush, which flushes at its end
        self._draining = False
        self._closed = False
        self.last_activity_us = now_us()
        self._h2 = Http2Session()
        self._write()

    @property
    def busy(self) -> bool:
        return bool(self._streams)

    @property
    def is_streaming(self) -> bool:
        """There are streaming responses, or their last bytes are not sent."""
        return bool(self._sinks)

    # -- called by the connection --------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.last_activity_us = self._now_us()
        self._is_flushing = True
        try:
            for start in range(0, len(data), READ_BYTES_MAX):
                self._read(data[start : start + READ_BYTES_MAX])
        finally:
            self._is_flushing = False
        self._flush()

    def _read(self, data: bytes) -> None:
        if self._closed:
            return
        try:
            batch = self._h2.feed(data)
        except ProtocolError:
            self._fail()  # h2 has queued the GOAWAY
            return
        for event in batch:
            handler = HANDLERS.get(type(event))
            if handler is not None and not self._closed:
                handler(self, event)

    def pause_writing(self) -> None:
        self._paused = True
        self._paused_bytes = 0
        self._sinks.fill_all()

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    def connection_lost(self) -> None:
        self._closed = True
        for stream in list(self._streams.values()):
            self._remove(stream)
        self._outbox.clear()
        self._expecting.clear()

    def eof_received(self) -> None:
        """A client that has closed its side may wait for responses, but streaming responses end."""
        for stream in self._sinks.streams():
            self._reset(stream, ErrorCodes.CANCEL)
        self.drain()

    def drain(self) -> None:
        if self._closed or self._draining:
            return
        self._draining = True
        self._write()
        self._transport.write(self._h2.goaway())
        self._flush()

    def sweep(self, before_us: int) -> None:
        stalled_before_us = min(before_us, self._now_us() - STREAM_STALL_US)
        for stream in list(self._streams.values()):
            if stream.queued:
                if stream.moved_us < (before_us if stream.sink is None else stalled_before_us):
                    self._reset(stream, ErrorCodes.CANCEL)
            elif not stream.ended and stream.request.received_us < before_us:
                if stream.lingers:
                    self._reset(stream, ErrorCodes.NO_ERROR)
                elif not stream.answered:
                    self._refuse(stream, TIMED_OUT)
        self._flush()

    # -- h2 events -----------------------------------------------------------------------------------------

    def _on_request(self, event: events.RequestReceived) -> None:
        if self._draining or len(self._streams) >= STREAMS_MAX:
            self._reset_id(event.stream_id, ErrorCodes.REFUSED_STREAM)
            self._count_noise()
            return
        request, declared_bytes, expects = read_head(event.headers, self._now_us())
        if declared_bytes is None and event.stream_ended is not None:
            declared_bytes = 0
        stream = self._streams[event.stream_id] = OpenStream(event.stream_id, request, declared_bytes)
        refusal = self._admission.check_head(request, declared_bytes)
        if refusal is None and (declared_bytes or 0) > self._body_bytes_max:
            refusal = self._admission.add_cors(request.origin, TOO_LARGE)
        if refusal is not None:
            self._answer(stream, refusal)
        elif expects:
            self._expecting.append(stream)

    def _on_data(self, event: events.DataReceived) -> None:
        # Memory is limited by the budget and the maximum body size, so the window can be reopened at once.
        self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        stream = self._streams.get(event.stream_id)
        if not event.data:
            if event.stream_ended is None:
                self._count_noise()
        elif stream is not None:
            self._receive(stream, event.data)

    def _receive(self, stream: OpenStream, data: bytes) -> None:
        if stream.answered:
            stream.discarded += len(data)
            if stream.lingers and stream.discarded > LINGER_BYTES_MAX:
                self._reset(stream, ErrorCodes.NO_ERROR)
        elif len(stream.body) + len(data) > self._body_bytes_max:
            self._refuse(stream, TOO_LARGE)
        elif not self._receiving.take(len(data)):
            self._refuse(stream, THROTTLED)
        elif not stream.body:
            stream.body = data
        else:
            # Not a list of chunks: many tiny ones would take far more memory than the bytes that are counted.
            if isinstance(stream.body, bytes):
                stream.body = bytearray(stream.body)
            stream.body += data

    def _refuse(self, stream: OpenStream, response: Response) -> None:
        self._answer(stream, self._admission.add_cors(stream.request.origin, response))

    def _on_ended(self, event: events.StreamEnded) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None:
            return
        stream.ended = True
        if stream.lingers:
            self._remove(stream)
        if stream.answered:
            return
        if stream.declared_bytes not in (None, len(stream.body)):
            self._reset(stream, ErrorCodes.PROTOCOL_ERROR)
            self._count_noise()
            return
        stream.request.body = bytes(stream.body)
        stream.request.received_us = self._now_us()  # the time a slow sender took does not count
        try:
            self._admission.handle(stream.request, partial(self._respond, stream))
        finally:
            self._release_body(stream)

    def _on_reset(self, event: events.StreamReset) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None:
            return
        self._remove(stream)
        # Also if h2 has reset the stream because of a protocol error: it costs the same.
        if not stream.lingers:
            self._count_noise()

    def _on_settings(self, _event: events.RemoteSettingsChanged) -> None:
        self._count_noise()
        if not self._h2.limit_settings():
            self._fail_for_abuse()

    def _on_goaway(self, _event: events.ConnectionTerminated) -> None:
        self._draining = True

    # -- closing -------------------------------------------------------------------------------------------

    def _count_noise(self, _event: events.Event | None = None) -> None:
        now_us = self._now_us()
        forgiven = (now_us - self._noise_us) * NOISE_FORGIVEN_PER_S / 1_000_000
        self._noise = max(0.0, self._noise - forgiven) + 1
        self._noise_us = now_us
        if self._noise > NOISE_MAX:
            self._fail_for_abuse()

    def _fail_for_abuse(self) -> None:
        if not self._closed:
            self._h2.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
            self._fail()

    def _fail(self) -> None:
        self._write()
        # close() would wait until the client has read everything, which a hostile one never does.
        if self._paused:
            self._transport.abort()
        else:
            self._transport.close()
        self.connection_lost()

    def _reset(self, stream: OpenStream, code: ErrorCodes) -> None:
        self._reset_id(stream.id, code)
        self._remove(stream)

    def _reset_id(self, stream_id: int, code: ErrorCodes) -> None:
        try:
            self._h2.reset_stream(stream_id, code)
        except ProtocolError:
            pass  # the client has reset it later in this batch

    def _remove(self, stream: OpenStream) -> None:
        del self._streams[stream.id]
        stream.gone = True
        stream.request.release()
        stream.queued = False
        self._release_body(stream)
        self._sending.release(stream.held)
        stream.held = 0
        stream.chunks.clear()
        if stream.sink is not None:
            self._sinks.remove(stream)

    def _release_body(self, stream: OpenStream) -> None:
        self._receiving.release(len(stream.body))
        stream.body = b""

    # -- sending -------------------------------------------------------------------------------------------

    def _respond(self, stream: OpenStream, response: Response) -> None:
        if stream.gone:
            discard(response)
            return
        self._answer(stream, response)
        if stream.sink is None:  # otherwise the sink schedules the flush
            self._flush()

    def _answer(self, stream: OpenStream, response: Response) -> None:
        assert not stream.answered, "a stream is answered once"
        stream.answered = True
        self._release_body(stream)
        response = without_websocket(response)
        stream.headers = response_headers(response)
        body = b"" if response.status == 204 or stream.request.method == b"HEAD" else response.body
        # While the server is stopping, nothing would end a new stream.
        if response.stream is None or stream.request.method == b"HEAD" or self._draining:
            self._queue(stream, body, final=True)
            discard(response)
        else:
            self._queue(stream, b"", final=False)
            self._sinks.add(stream, response.stream, is_full=self._paused)

    def _abort_stream(self, stream: OpenStream) -> None:
        if not stream.gone:
            self._reset(stream, ErrorCodes.CANCEL)
            self._flush()

    def _queue(self, stream: OpenStream, chunk: bytes | memoryview, *, final: bool) -> None:
        if chunk:
            stream.chunks.append(memoryview(chunk).cast("B"))
            stream.unsent += len(stream.chunks[-1])
            stream.kept += len(stream.chunks[-1])
        stream.final = final
        if not stream.queued:
            stream.queued = True
            stream.moved_us = self._now_us()
            self._outbox.append(stream)

    def _flush(self) -> None:
        if self._is_flushing or self._closed:
            return
        self._is_flushing = True
        try:
            for stream, chunk, final in self._sinks.take_gathered():
                self._queue(stream, chunk, final=final)
            self._send_continue()
            more = True
            while more and not self._closed:
                more = self._pump()
                self._write()
            self._count_unsent()
            if self._draining:
                self._end_lingering()
            self._write()
        except ProtocolError:
            # The caller of `respond` cannot handle it, and other connections must not be affected.
            self._transport.abort()
            self.connection_lost()
        finally:
            self._is_flushing = False
        if self._draining and not self._streams and not self._closed:
            self._transport.close()
            self._closed = True
        if not self._paused:
            self._sinks.notify_drained()

    def _send_continue(self) -> None:
        for stream in self._expecting:
            if not (stream.gone or stream.ended or stream.answered or stream.body):
                self._h2.send_headers(stream.id, [(b":status", b"100")])
        self._expecting.clear()

    def _pump(self) -> bool:
        """Send one frame of each stream in turn. Returns True if it stopped because of WRITE_BYTES_MAX."""
        room = WRITE_BYTES_MAX
        stuck = 0  # number of streams at the end of the queue that wait for the client's window
        while room > 0 and stuck < len(self._outbox) and not self._paused:
            stream = self._outbox.popleft()
            if stream.gone:
                continue
            size = self._send_frame(stream)
            room -= size
            if stream.queued:
                self._outbox.append(stream)
                stuck = 0 if size else stuck + 1
        return room <= 0

    def _send_frame(self, stream: OpenStream) -> int:
        """Send the head, if unsent, and as much of the first chunk as the window and fairness allow."""
        last = stream.final and not stream.unsent
        if stream.headers:
            self._h2.send_headers(stream.id, stream.headers, end_stream=last)
            stream.headers = []
        elif last:
            self._h2.end_stream(stream.id)
        if last:
            self._finish(stream)
            return 0
        if stream.chunks:
            return self._send_slice(stream)
        stream.queued = False  # until the next chunk
        return 0

    def _send_slice(self, stream: OpenStream) -> int:
        chunk = stream.chunks.popleft()
        window = self._h2.local_flow_control_window(stream.id)
        size = min(window, self._h2.max_outbound_frame_size, SLICE_BYTES_MAX, len(chunk))
        if size < len(chunk):
            stream.chunks.appendleft(chunk[max(size, 0) :])
        if size <= 0:
            return 0
        stream.unsent -= size
        stream.moved_us = self._now_us()
        if size == len(chunk):
            stream.kept = stream.unsent
            if stream.held > stream.kept:
                self._sending.release(stream.held - stream.kept)
                stream.held = stream.kept
        last = stream.final and not stream.unsent
        self._h2.send_data(stream.id, chunk[:size], end_stream=last)
        if last:
            self._finish(stream)
        elif not stream.chunks:
            stream.queued = False
        return size

    def _finish(self, stream: OpenStream) -> None:
        self._noise = max(0.0, self._noise - 1)
        if stream.ended:
            self._remove(stream)
        else:
            stream.queued = False
            stream.lingers = True

    def _end_lingering(self) -> None:
        for stream in list(self._streams.values()):
            if stream.lingers:
                self._reset(stream, ErrorCodes.NO_ERROR)

    def _count_unsent(self) -> None:
        for stream in list(self._outbox):
            if stream.gone or stream.held == stream.kept:
                continue
            if self._sending.take(stream.kept - stream.held):
                stream.held = stream.kept
            else:
                self._reset(stream, ErrorCodes.ENHANCE_YOUR_CALM)

    def _write(self) -> None:
        data = self._h2.data_to_send()
        if not data or self._closed:
            return
        self.last_activity_us = self._now_us()
        if self._paused:
            self._paused_bytes += len(data)
            if self._paused_bytes > PAUSED_BYTES_MAX:
                self._transport.abort()
                self.connection_lost()
                return
        self._transport.write(data)


HANDLERS: dict[type[events.Event], Callable[[Http2Connection, Any], None]] = {
    events.RequestReceived: Http2Connection._on_request,
    events.DataReceived: Http2Connection._on_data,
    events.StreamEnded: Http2Connection._on_ended,
    events.StreamReset: Http2Connection._on_reset,
    events.RemoteSettingsChanged: Http2Connection._on_settings,
    events.ConnectionTerminated: Http2Connection._on_goaway,
    events.PingReceived: Http2Connection._count_noise,
    events.PriorityUpdated: Http2Connection._count_noise,
    events.UnknownFrameReceived: Http2Connection._count_noise,
}
