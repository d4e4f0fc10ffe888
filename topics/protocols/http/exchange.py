"""A request and a response, as plain values: what the three ways in have in common.

The fast path, aiohttp and HTTP/2 each make a `Request` and hand it to `Admission.handle` with a function that takes the
`Response`. That function is called exactly once, at once or later, always on the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Body: TypeAlias = bytes | memoryview


def nobody() -> None:
    """Nothing was taken that would have to be given back."""


@dataclass(slots=True)
class Request:
    """`path` is as sent, still percent-encoded, without the query. Absent headers are empty."""

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
    origin: bytes = b""  # several, which no browser sends, are joined by commas
    fetch_site: bytes = b""  # Sec-Fetch-Site: how the page that asks is related to this server
    last_event_id: bytes = b""
    wants_websocket: bool = False  # it asks to become one, over HTTP/1.1
    leave: Callable[[], None] = nobody  # called when the client goes away before its answer


class Sink(Protocol):
    """Where the bytes of a stream go: an HTTP/1 connection, one HTTP/2 stream, or a WebSocket's connection."""

    @property
    def is_full(self) -> bool:
        """The client does not take what was written: nothing more should be, until `Stream.drained`."""

    def write(self, data: bytes) -> None:
        """Bytes for the client, as they are. They are taken also when it is full or gone."""

    def close(self) -> None:
        """The stream ends after what was written."""

    def abort(self) -> None:
        """The stream ends at once; what the client has not taken is lost."""


class Stream(Protocol):
    """Whoever fills a response that has no end of its own.

    `opened` is called once the head of the response is written, if the client is still there. `closed` is called once
    in any case, and last: the client has gone, also before the head could be written, or the sink was closed. None of
    them is called from within a call to the sink.
    """

    def opened(self, sink: Sink) -> None: ...

    def drained(self) -> None:
        """The sink is not full any more."""

    def closed(self) -> None: ...


class Conversation(Stream, Protocol):
    """A stream that also listens: the server's end of a WebSocket. Its sink takes whole WebSocket frames."""

    @property
    def is_busy(self) -> bool:
        """So much waits to be answered that no more should be read. It is looked at again after each write."""

    def received(self, message: str) -> None: ...

    def received_bytes(self) -> None:
        """A binary message came, whose content nobody wants."""


@dataclass(slots=True)
class Response:
    """`head` is further header lines, each with its CRLF; the three below are not among them.

    With a `stream` there is no body: the stream writes one, for as long as it likes. With a `conversation` the
    connection becomes a WebSocket, if the client asked for one as the protocol demands; else it gets a 400.
    """

    status: int
    body: Body = b""
    content_type: bytes = b"application/json"
    head: bytes = b""
    stream: Stream | None = None
    conversation: Conversation | None = None


Respond: TypeAlias = Callable[[Response], None]
