"""HTTP/1 message framing: where a request begins and ends. Every ambiguous request is rejected.

If two parsers disagree on where a request ends, a client can smuggle one request inside another. So these rules are
stricter than those of RFC 9112: lines end with CR LF, names and values have no control characters, one Host, one
Content-Length or `Transfer-Encoding: chunked`, and no header twice that may only occur once.
"""

from __future__ import annotations

import re

from topics.protocols.http.exchange import Request
from topics.protocols.http.fields import collect_fields, set_fields
from topics.protocols.websocket.handshake import is_handshake

HEAD_BYTES_MAX = 16 * 1024  # as with HTTP/2
HEADERS_MAX = 128
CHUNK_LINE_BYTES_MAX = 256
# Extensions and trailers are ignored; this limits how much of a body they may take.
CHUNK_EXTRA_BYTES_MAX = 16 * 1024

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_LINE = re.compile(rb"(" + _TOKEN + rb") ([\x21\x22\x24-\x7e]+) HTTP/1\.([01])")
_FIELDS = re.compile(rb"(?:" + _TOKEN + rb":[\t\x20-\x7e\x80-\xff]*\r\n)*")
# White space around the value is stripped afterwards: a pattern for it takes quadratic time.
FIELD = re.compile(rb"([^:]+):([^\r]*)\r\n")
_ABSOLUTE = re.compile(rb"https?://([^/?]+)([/?].*)?", re.IGNORECASE)
_LENGTH = re.compile(rb"[0-9]{1,15}")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,12})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r\n")

HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:%\[\]-]*")

# After others the connection is closed: a proxy may know the method, and disagree on where the request ends.
_METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS"))
# Headers that may not be repeated; RFC 9110, 5.3. Content-Length, Host and Transfer-Encoding have errors of their own.
_SINGLE = frozenset(
    (
        b"content-location",
        b"content-range",
        b"content-type",
        b"etag",
        b"max-forwards",
        b"server",
        b"user-agent",
    )
)


class FramingError(Exception):
    """The request is malformed or too large. `code` is the error code of the response."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


class Head:
    """A parsed head. The request has no body yet."""

    __slots__ = ("body_len", "expects", "head_len", "keep_alive", "request", "version", "websocket_key")

    def __init__(
        self,
        request: Request,
        head_len: int,
        body_len: int | None,
        *,
        version: bytes = b"1",
        keep_alive: bool = True,
        expects: bool = False,
        websocket_key: bytes = b"",
    ) -> None:
        self.request = request
        self.head_len = head_len
        self.body_len = body_len  # None: a chunked body
        self.version = version  # minor
        self.keep_alive = keep_alive
        self.expects = expects  # the client waits for a 100 Continue before it sends the body
        self.websocket_key = websocket_key  # of a valid handshake


def read_head(data: bytes, now_us: int) -> Head | None:
    """Parse the head at the start of `data`; None if it is incomplete."""
    end = data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
    if end < 0:
        _check_part(data)
        return None
    line_end = data.find(b"\r\n")
    method, target, version = _read_line(data, line_end)
    block = data[line_end + 2 : end + 2]
    if _FIELDS.fullmatch(block) is None:
        raise FramingError("a header line is malformed")
    headers = [(name.lower(), value.strip(b" \t")) for name, value in FIELD.findall(block)]
    if len(headers) > HEADERS_MAX:
        raise FramingError(f"a request may have at most {HEADERS_MAX} headers", "header_fields_too_large")
    authority, target = _split_target(target)
    _check_host([value for name, value in headers if name == b"host"], version)
    _check_repeated([name for name, _ in headers if name in _SINGLE])
    body_len = _read_length(headers, version)
    fields = collect_fields(headers)
    path, _, query = target.partition(b"?")
    request = Request(method, path, query, now_us)
    set_fields(request, fields)
    if authority:
        request.host = authority
    options = read_options(headers)
    is_upgrade = method == b"GET" and version == b"1" and body_len == 0 and is_handshake(fields, options)
    request.wants_websocket = is_upgrade
    return Head(
        request,
        end + 4,
        body_len,
        version=version,
        keep_alive=method in _METHODS
        and b"close" not in options
        and (version == b"1" or b"keep-alive" in options),
        expects=body_len != 0 and version == b"1" and fields.get(b"expect", b"").lower() == b"100-continue",
        websocket_key=fields[b"sec-websocket-key"] if is_upgrade else b"",
    )


def read_options(headers: list[tuple[bytes, bytes]]) -> set[bytes]:
    """The options of all Connection headers."""
    options = b",".join([value for name, value in headers if name == b"connection"]).lower()
    return {option.strip(b" \t") for option in options.split(b",")}


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
        _split_target(_read_line(data, line_end)[1])


def _read_line(data: bytes, line_end: int) -> tuple[bytes, bytes, bytes]:
    """Method, target and minor version."""
    found = _LINE.fullmatch(data, 0, line_end)
    if found is None:
        raise FramingError("the request line must be `METHOD /path HTTP/1.1`")
    method, target, version = found.groups()
    if method == b"CONNECT" or (target == b"*" and method != b"OPTIONS"):
        raise FramingError("this server is not a proxy: request a path")
    return method, target, version


def _split_target(target: bytes) -> tuple[bytes, bytes]:
    """The authority, and the path with its query. A target in absolute form has both and overrides Host; RFC 9112, 3.2.2."""
    if target.startswith(b"/") or target == b"*":
        return b"", target
    found = _ABSOLUTE.fullmatch(target)
    if found is None or not HOST.fullmatch(found[1]):
        raise FramingError("this server is not a proxy: request a path")
    path = found[2] or b"/"
    return found[1], path if path.startswith(b"/") else b"/" + path


def _check_host(hosts: list[bytes], version: bytes) -> None:
    if len(hosts) > 1 or (not hosts and version == b"1"):
        raise FramingError("a request must have exactly one Host header")
    if hosts and not HOST.fullmatch(hosts[0]):
        raise FramingError("the Host header is malformed")


def _check_repeated(names: list[bytes]) -> None:
    if len(names) != len(set(names)):
        twice = next(name for name in names if names.count(name) > 1)
        raise FramingError(f"the header {twice.decode()} may occur only once")


def _read_length(headers: list[tuple[bytes, bytes]], version: bytes) -> int | None:
    """The length of the body; None if it is chunked."""
    lengths = [value for name, value in headers if name == b"content-length"]
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings:
        if lengths:
            raise FramingError("a request must not have both Content-Length and Transfer-Encoding")
        if len(codings) > 1 or codings[0].lower() != b"chunked" or version != b"1":
            raise FramingError("the only supported Transfer-Encoding is chunked, in HTTP/1.1")
        return None
    if len(lengths) > 1 or (lengths and not _LENGTH.fullmatch(lengths[0])):
        raise FramingError("Content-Length must be a single number")
    return int(lengths[0]) if lengths else 0


class ChunkedBody:
    """Parser of a chunked body. Extensions and trailers are checked and removed."""

    __slots__ = ("_extra", "_line", "_size", "_step", "done")

    def __init__(self) -> None:
        self._step = self._read_size
        self._line = b""  # received part of an incomplete line
        self._size = 0  # bytes left of the chunk, with its CR LF
        self._extra = 0
        self.done = False

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """The data of the chunks, and the bytes after the end of the body. Raises FramingError."""
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
        content = self._size - 2
        self._size -= len(part)
        if content > 0:
            parts.append(part[:content])
        if not self._size:
            self._step = self._read_size
        return at + len(part)

    def _read_trailer(self, data: bytes, at: int, parts: list[bytes]) -> int:
        line, at = self._take_line(data, at)
        if line == b"\r\n":
            self.done = True
        elif line:
            if _FIELDS.fullmatch(line) is None:
                raise FramingError("a trailer is malformed")
            self._count_extra(len(line))
        return at
