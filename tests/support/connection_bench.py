"""In-memory client connections of a front: a transport that records what is written, and an admission stub that
echoes requests.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, cast

from router.connections.connection import (
    Connection,
)
from router.server import Server
from topics.protocols.http.call import Services, error_response
from topics.protocols.http.exchange import Request, Respond, Response
from topics.system.settings import Settings

BODY_BYTES_MAX = 2 << 20
HEAD = b"Host: x\r\nContent-Type: application/json\r\n"


class Transport:
    """A fake socket transport. While the peer does not read, `unread` bytes stay buffered."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.unread = 0
        self.high_water = 65_536
        self.reads = True
        self.closed = self.aborted = self.ended = False
        self.protocol: Connection | None = None

    def write(self, data: bytes) -> None:
        assert not self.ended and not self.aborted
        self.writes.append(bytes(data))

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.write(b"".join(parts))
        if self.unread > self.high_water and self.protocol is not None:
            self.protocol.pause_writing()

    def set_write_buffer_limits(self, high: int = 65_536) -> None:
        self.high_water = high

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, _name: str, default: Any = None) -> Any:
        return default

    @property
    def out(self) -> bytes:
        return re.sub(rb"Date: [^\r]*\r\n", b"", b"".join(self.writes))


class Page(bytearray):
    """A body that records whether it was sent."""


class Admission:
    """Echoes each request. A request whose path ends with `wait` is answered when the test says so."""

    def __init__(self) -> None:
        self.handled: list[Request] = []
        self.waiting: list[Callable[[], None]] = []
        self.size = 0  # of answers
        self.fails = False
        self.page: Page | None = None  # returned instead of the echo

    def add_cors(self, origin: bytes, response: Response) -> Response:
        return response

    def check_head(self, request: Request, declared: int | None) -> Response | None:
        if request.path == b"/refused":
            return error_response("unauthorized", "no")
        if (declared or 0) > BODY_BYTES_MAX:
            return self.too_large()
        return None

    def handle(self, request: Request, respond: Respond) -> None:
        refusal = self.check_head(request, len(request.body))
        if refusal is not None:
            respond(refusal)
            return
        self.handled.append(request)
        if self.fails:
            raise RuntimeError("a fault")
        if request.path.endswith((b"wait", b"wait/diff")):
            self.waiting.append(lambda: respond(self._echo(request)))
        else:
            respond(self._echo(request))

    def _echo(self, request: Request) -> Response:
        if self.page is not None:
            return Response(200, memoryview(self.page))
        body = bytes(request.body)
        fields = {
            "method": request.method.decode(),
            "path": request.path.decode("latin-1"),
            "query": request.query.decode(),
            "body": body.decode("latin-1") if len(body) < 1000 else len(body),
            "key": request.idempotency_key.decode("latin-1"),
            "type": request.content_type.decode("latin-1"),
            "pad": "x" * self.size,
        }
        return Response(200, json.dumps(fields).encode())

    def too_large(self) -> Response:
        return error_response("payload_too_large", "too large")


class World:
    """The front's connection handling without sockets, on a clock that the test sets."""

    def __init__(self, fast_path: bool = True) -> None:
        self.now_us = 1_000_000
        config = Settings(fast_path=fast_path, max_body_bytes=BODY_BYTES_MAX)
        services = Services(cast(Any, None), config, lambda: self.now_us, "0", 0)
        self.server = Server(services, asyncio.get_running_loop())
        self.admission = Admission()
        self.server.admission = cast(Any, self.admission)

    def connect(self) -> tuple[Connection, Transport]:
        connection, transport = Connection(self.server), Transport()
        transport.protocol = connection
        connection.connection_made(cast(Any, transport))
        return connection, transport

    def sweep(self, connection: Connection, *, after_us: int, idle_us: int = 75_000_000) -> None:
        self.now_us += after_us
        connection.sweep(self.now_us, idle_us=idle_us, request_us=60_000_000)


async def rest(turns: int = 12) -> None:
    """Let the loop call what was scheduled."""
    for _ in range(turns):
        await asyncio.sleep(0)


def run(test: Callable[..., Awaitable[None]], *args: Any) -> None:
    asyncio.run(cast(Any, test(*args)))


def fast(path: bytes = b"/v0/topics/a", body: bytes = b"{}", headers: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n%b" % (path, HEAD, headers, len(body), body)


def slow(path: bytes = b"/v0/topics/a", method: bytes = b"GET", headers: bytes = b"") -> bytes:
    return b"%b %b HTTP/1.1\r\nHost: x\r\n%b\r\n" % (method, path, headers)


def chunked(path: bytes, *chunks: bytes, trailer: bytes = b"") -> bytes:
    body = b"".join(b"%x;a=b\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"POST %b HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n%b0\r\n%b\r\n" % (
        path,
        HEAD,
        body,
        trailer,
    )


def answers(out: bytes) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Status, head and body of each answer in the output."""
    while out:
        head, _, out = out.partition(b"\r\n\r\n")
        found = re.search(rb"Content-Length: (\d+)", head)
        size = int(found[1]) if found else 0
        body, out = out[:size], out[size:]
        assert len(body) == size
        yield int(head[9:12]), head, json.loads(body) if body else {}


def others() -> list[Any]:
    """Tasks that are still running."""
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
