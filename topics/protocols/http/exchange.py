"""Request and response types, independent of the HTTP version.

HTTP/1 and HTTP/2 each build a `Request` and pass it to `Admission.handle` with a callback that takes the
`Response`. The callback is called exactly once, immediately or later, always on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Body: TypeAlias = bytes | memoryview


def release_nothing() -> None:
    pass


@dataclass(slots=True)
class Request:
    """A request. `path` is percent-encoded, without the query. Absent headers are empty."""

    method: bytes
    path: bytes
    query: bytes
    received_us: int
    body: Body = b""
    content_type: bytes = b""
    content_encoding: bytes = b""
    authorization: bytes = b""
    accept: bytes = b""
    accept_encoding: bytes = b""
    idempotency_key: bytes = b""
    traceparent: bytes = b""
    strict: bytes = b""
    host: bytes = b""
    origin: bytes = b""  # several are joined by commas; browsers send only one
    fetch_site: bytes = b""  # Sec-Fetch-Site: relation of the requesting page to this server
    last_event_id: bytes = b""
    wants_websocket: bool = False  # a valid WebSocket handshake over HTTP/1.1
    # Releases what the request holds. Called when it is answered, or when its client disconnects before that.
    release: Callable[[], None] = release_nothing


class Sink(Protocol):
    """Output of a stream: an HTTP/1 connection, an HTTP/2 stream, or the connection of a WebSocket."""

    @property
    def is_full(self) -> bool:
        """The client is not reading: nothing more should be written until `Stream.drained`."""

    def write(self, data: bytes) -> None:
        """Write bytes to the client. Also allowed when the sink is full or closed."""

    def close(self) -> None:
        """End the stream after what was written."""

    def abort(self) -> None:
        """End the stream at once, dropping unsent bytes."""


class Stream(Protocol):
    """Source of a streaming response.

    `opened` is called once the head of the response is written, if the client is still connected. `closed` is always
    called, once and last: the client has disconnected, possibly before the head was written, or the sink was closed.
    None of these methods is called from within a call to the sink.
    """

    def opened(self, sink: Sink) -> None: ...

    def drained(self) -> None:
        """The sink is no longer full."""

    def closed(self) -> None: ...


class WebSocketHandler(Stream, Protocol):
    """A stream that also receives messages: the server side of a WebSocket. Its sink takes whole WebSocket frames."""

    @property
    def is_busy(self) -> bool:
        """Too many messages are unanswered: do not read more. Checked again after each write."""

    def received(self, message: str) -> None: ...

    def received_bytes(self) -> None:
        """A binary message arrived. Its content is not passed on: there are no binary commands."""


@dataclass(slots=True)
class Response:
    """A response. `head` contains additional header lines, each with its CRLF.

    With a `stream` there is no body: the stream writes it. With a `websocket` the connection becomes a WebSocket if the
    request was a valid handshake; otherwise the client gets a 400.
    """

    status: int
    body: Body = b""
    content_type: bytes = b"application/json"
    head: bytes = b""
    stream: Stream | None = None
    websocket: WebSocketHandler | None = None


Respond: TypeAlias = Callable[[Response], None]
