"""A request and a response, as plain values: what the three ways in have in common.

The fast path, aiohttp and HTTP/2 each make a `Request` and hand it to `Gate.handle` with a function that takes the
`Response`. That function is called exactly once, at once or later, always on the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

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
    leave: Callable[[], None] = nobody  # called when the client goes away before its answer


@dataclass(slots=True)
class Response:
    """`head` is further header lines, each with its CRLF; the three below are not among them."""

    status: int
    body: Body = b""
    content_type: bytes = b"application/json"
    head: bytes = b""


Respond: TypeAlias = Callable[[Response], None]
