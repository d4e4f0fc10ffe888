"""HTTP/1 message framing: finds the end of a request before aiohttp parses it, with stricter rules.

If two parsers disagree on where a request ends, a client can smuggle one request inside another. So every ambiguous
request is rejected here with 400 and the connection is closed, and aiohttp gets exactly one whole request at a time.
"""

from __future__ import annotations

import re

HEAD_BYTES_MAX = 16 * 1024  # as with HTTP/2
HEADERS_MAX = 128
CHUNK_LINE_BYTES_MAX = 256
# Extensions and trailers are ignored; this limits how much of a body they may take.
CHUNK_EXTRA_BYTES_MAX = 16 * 1024

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_LINE = re.compile(rb"(" + _TOKEN + rb") ([\x21\x22\x24-\x7e]+) HTTP/1\.([01])")
_FIELDS = re.compile(rb"(?:" + _TOKEN + rb":[\t\x20-\x7e\x80-\xff]*\r\n)*")
_FIELD = re.compile(rb"([^:]+):[ \t]*([^\r]*?)[ \t]*\r\n")
_TARGET = re.compile(rb"/|https?://[^/?@]+(?:[/?]|$)", re.IGNORECASE)
_METHODS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,12})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r\n")

HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:%\[\]-]*")


class FramingError(Exception):
    """The request is malformed or too large. `code` is the error code of the response."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


class Frame:
    """Lengths of a request. If `chunked`, the length of the body is not known in advance."""

    __slots__ = ("body_len", "chunked", "head_len")

    def __init__(self, head_len: int, body_len: int, chunked: bool) -> None:
        self.head_len, self.body_len, self.chunked = head_len, body_len, chunked


def read_frame(data: bytes) -> Frame | None:
    """The frame of the request at the start of `data`; None if its head is incomplete."""
    end = data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
    if end < 0:
        _check_part(data)
        return None
    line_end = data.find(b"\r\n")
    version = _check_line(data, line_end)
    block = data[line_end + 2 : end + 2]
    if _FIELDS.fullmatch(block) is None:
        raise FramingError("a header line is malformed")
    fields = [(name.lower(), value) for name, value in _FIELD.findall(block)]
    if len(fields) > HEADERS_MAX:
        raise FramingError(f"a request may have at most {HEADERS_MAX} headers", "header_fields_too_large")
    _check_host([value for name, value in fields if name == b"host"], version)
    lengths = [value for name, value in fields if name == b"content-length"]
    codings = [value for name, value in fields if name == b"transfer-encoding"]
    if codings:
        _check_codings(codings, lengths, version)
        return Frame(end + 4, 0, True)
    if len(lengths) > 1 or (lengths and not _LENGTH.fullmatch(lengths[0])):
        raise FramingError("Content-Length must be a single number")
    return Frame(end + 4, int(lengths[0]) if lengths else 0, False)


def _check_part(data: bytes) -> None:
    """Reject an incomplete head as soon as it cannot become valid."""
    if len(data) >= HEAD_BYTES_MAX:
        raise FramingError(
            f"the head of a request may have at most {HEAD_BYTES_MAX} bytes", "header_fields_too_large"
        )
    if data.count(b"\n") != data.count(b"\r\n") or b"\0" in data:
        raise FramingError("the request is not HTTP: lines must end with CR LF")
    line_end = data.find(b"\r\n")
    if line_end >= 0:
        _check_line(data, line_end)


def _check_line(data: bytes, line_end: int) -> bytes:
    """Check the request line, and return the minor version."""
    found = _LINE.fullmatch(data, 0, line_end)
    if found is None:
        raise FramingError("the request line must be `METHOD /path HTTP/1.1`")
    method, target, version = found.groups()
    if method == b"CONNECT" or not (_TARGET.match(target) or (method, target) == (b"OPTIONS", b"*")):
        raise FramingError("this server is not a proxy: request a path")
    return version


def with_known_method(head: bytes) -> bytes:
    """The head, with PATCH in place of a method that aiohttp does not know and would reject as malformed. No route has PATCH.

    The connection is closed afterwards: a proxy may know the method, and disagree on where the request ends.
    """
    if head.startswith(_METHODS):
        return head
    return b"PATCH" + head[head.index(b" ") : -2] + b"Connection: close\r\n\r\n"


def _check_host(hosts: list[bytes], version: bytes) -> None:
    if len(hosts) > 1 or (not hosts and version == b"1"):
        raise FramingError("a request must have exactly one Host header")
    if hosts and not HOST.fullmatch(hosts[0]):
        raise FramingError("the Host header is malformed")


def _check_codings(codings: list[bytes], lengths: list[bytes], version: bytes) -> None:
    if lengths:
        raise FramingError("a request must not have both Content-Length and Transfer-Encoding")
    if len(codings) > 1 or codings[0].lower() != b"chunked" or version != b"1":
        raise FramingError("the only supported Transfer-Encoding is chunked, in HTTP/1.1")


class ChunkedBody:
    """Parser of a chunked body that finds its end. Extensions and trailers are checked and removed."""

    __slots__ = ("_extra", "_line", "_size", "_step", "done")

    def __init__(self) -> None:
        self._step = self._read_size
        self._line = b""  # received part of an incomplete line
        self._size = 0  # bytes left of the chunk
        self._extra = 0
        self.done = False

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """The bytes of the body, still chunked, and those after its end. Raises FramingError."""
        parts: list[bytes] = []
        at = 0
        while at < len(data) and not self.done:
            at = self._step(data, at, parts)
        return b"".join(parts), data[at:]

    def _take_line(self, data: bytes, at: int) -> tuple[bytes, int]:
        """The line with its CR LF; empty if it is incomplete."""
        end = data.find(b"\n", at) + 1
        part = data[at : end or len(data)]
        if len(self._line) + len(part) > CHUNK_LINE_BYTES_MAX:
            raise FramingError("a line of the chunked body is too long")
        line = self._line + part
        self._line = b"" if end else line
        return (line if end else b""), at + len(part)

    def _count_extra(self, size: int) -> None:
        self._extra += size
        if self._extra > CHUNK_EXTRA_BYTES_MAX:
            raise FramingError("the chunked body has too many extensions or trailers")

    def _read_size(self, data: bytes, at: int, parts: list[bytes]) -> int:
        line, at = self._take_line(data, at)
        if line:
            found = _CHUNK_LINE.fullmatch(line)
            if found is None:
                raise FramingError("a chunk size is malformed")
            digits = found[1]
            self._count_extra(len(line) - len(digits) - 2)
            self._size = int(digits, 16)
            parts.append(digits + b"\r\n")
            if self._size:
                self._size += 2
                self._step = self._read_data
            else:
                self._step = self._read_trailer
        return at

    def _read_data(self, data: bytes, at: int, parts: list[bytes]) -> int:
        part = data[at : at + self._size]
        # The last two bytes of the chunk are its CR LF.
        for i in (2, 1):
            position = self._size - i
            if 0 <= position < len(part) and part[position] != (13 if i == 2 else 10):
                raise FramingError("a chunk does not have its declared size")
        self._size -= len(part)
        parts.append(part)
        if not self._size:
            self._step = self._read_size
        return at + len(part)

    def _read_trailer(self, data: bytes, at: int, parts: list[bytes]) -> int:
        line, at = self._take_line(data, at)
        if line == b"\r\n":
            parts.append(line)
            self.done = True
        elif line:
            if _FIELDS.fullmatch(line) is None:
                raise FramingError("a trailer is malformed")
            self._count_extra(len(line))
        return at
