"""Request heads of the fast path: POSTs to hot routes, with a valid Content-Length and only the headers in `_PLAIN`."""

from __future__ import annotations

import re

from topics.protocols.http.exchange import Request
from topics.protocols.http1.framing import FIELD, HEAD_BYTES_MAX, HOST

KNOWN_HEADS_MAX = 2048
KNOWN_HEAD_BYTES_MAX = 1024

_REQUEST = re.compile(
    rb"POST (/v0/topics/[A-Za-z0-9][A-Za-z0-9._:-]{0,254}"
    rb"(?:/diff|/claim|/ack|/consumers/[A-Za-z0-9][A-Za-z0-9._:-]{0,254}/(?:fetch|ack))?)(?:\?([A-Za-z0-9_=&.-]*))? HTTP/1\.1\r\n"
    rb"((?:[A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*\r\n)+)\r\n"
)
_TOPICS = b"POST /v0/topics/"
_LENGTH = re.compile(rb"[0-9]{1,15}")
_PLAIN = {
    b"host": "host",
    b"user-agent": "",
    b"content-length": "content_length",
    b"content-type": "content_type",
    b"accept": "accept",
    b"accept-encoding": "accept_encoding",
    b"accept-language": "",
    b"authorization": "authorization",
    b"cache-control": "",
    b"connection": "connection",
    b"idempotency-key": "idempotency_key",
    b"origin": "origin",
    b"priority": "",
    b"referer": "",
    b"topics-strict": "strict",
    b"traceparent": "traceparent",
    b"tracestate": "",
    b"x-request-id": "",
}
_PASSED = (
    "content_type", "authorization", "accept", "accept_encoding", "idempotency_key", "traceparent", "strict", "host", "origin",
)  # fmt: skip
_NOT_CACHED = [_PASSED.index(name) for name in ("authorization", "idempotency_key", "traceparent")]


class PlainHead:
    """A parsed head: path, query, headers, and the lengths of head and body."""

    __slots__ = ("body_len", "end", "fields", "head_len", "path", "query")

    def __init__(
        self, path: bytes, query: bytes, fields: tuple[bytes, ...], head_len: int, body_len: int
    ) -> None:
        self.path, self.query, self.fields = path, query, fields
        self.head_len, self.body_len, self.end = head_len, body_len, head_len + body_len

    def request(self, body: bytes, received_us: int) -> Request:
        (
            content_type, authorization, accept, accept_encoding, idempotency_key, traceparent, strict, host, origin,
        ) = self.fields  # fmt: skip
        return Request(
            b"POST",
            self.path,
            self.query,
            received_us,
            body,
            content_type,
            b"",
            authorization,
            accept,
            accept_encoding,
            idempotency_key,
            traceparent,
            strict,
            host,
            origin,
        )


# A client sends the same head over and over. Heads with a secret or a unique header are not cached.
_known_heads: dict[bytes, PlainHead] = {}


def find_plain_head(data: bytes) -> PlainHead | None:
    """`read_plain_head` with a cache."""
    end = data.find(b"\r\n\r\n", 0, KNOWN_HEAD_BYTES_MAX)
    if end < 0:
        return read_plain_head(data)
    head = data[: end + 4]
    plain = _known_heads.get(head)
    if plain is None:
        plain = read_plain_head(head)
        if plain is not None and not any(plain.fields[at] for at in _NOT_CACHED):
            if len(_known_heads) >= KNOWN_HEADS_MAX:
                _known_heads.clear()
            _known_heads[head] = plain
    return plain


def may_become_plain(data: bytes) -> bool:
    """Whether `data`, which has no plain head, may be the beginning of one."""
    return data.startswith(_TOPICS[: len(data)]) and len(data) < HEAD_BYTES_MAX and data.find(b"\r\n\r\n") < 0


def topic_of(path: bytes) -> bytes:
    """The topic in the path of a plain head, where nothing is percent-encoded."""
    return path[len(b"/v0/topics/") :].partition(b"/")[0]


def read_plain_head(data: bytes) -> PlainHead | None:
    """Parse the head at the start of `data`; None if it is incomplete or not plain."""
    found = _REQUEST.match(data, 0, HEAD_BYTES_MAX)
    if found is None:
        return None
    path, query, block = found.groups()
    fields: dict[str, bytes] = {}
    seen: set[bytes] = set()
    for name, value in FIELD.findall(block):
        name = name.lower()
        field = _PLAIN.get(name)
        if field is None or name in seen:
            return None
        seen.add(name)
        if field:
            fields[field] = value.strip(b" \t")
    length = fields.pop("content_length", b"")
    if not _LENGTH.fullmatch(length):
        return None
    if "host" not in fields or not HOST.fullmatch(fields["host"]):
        return None
    if fields.pop("connection", b"keep-alive").lower() != b"keep-alive":
        return None
    passed = tuple(fields.get(name, b"") for name in _PASSED)
    return PlainHead(path, query or b"", passed, found.end(), int(length))
