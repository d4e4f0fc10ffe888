"""A fake server with scripted answers, to observe how a browser reacts.

Streams are at /NAME for any name. The first and the last request for a name get a stream, those in between the answer under
test.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

RETRY_MS = 50

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 4\r\nConnection: close\r\n\r\npage"


def frame(number: int) -> bytes:
    return b'event: caught-up\nid: id-%d\ndata: {"topic":"t"}\n\n' % number


@dataclass
class ScriptedServer:
    port: int = 0
    answers: dict[str, bytes | None] = field(default_factory=dict)  # by name; None: a reset
    times: int = 2  # how many requests get that answer
    seen: dict[str, list[str]] = field(default_factory=dict)  # Last-Event-ID of each request
    closing: threading.Event = field(default_factory=threading.Event)

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, handler: socketserver.StreamRequestHandler) -> None:
        name, last_event_id = _request(handler)
        if name not in self.answers:
            handler.wfile.write(PAGE)
            return
        seen = self.seen.setdefault(name, [])
        seen.append(last_event_id)
        if 1 < len(seen) <= 1 + self.times:
            _end(handler, self.answers[name])
            return
        handler.wfile.write(STREAM_HEAD + b"retry: %d\n\n" % RETRY_MS + frame(len(seen)))
        if len(seen) == 1:
            # End in the middle of a frame.
            handler.wfile.write(frame(99)[:-1])
            return
        self.closing.wait()

    @contextlib.contextmanager
    def listening(self) -> Iterator[ScriptedServer]:
        """Listens inside the block, each time on the same port; outside of it, connections are refused."""
        self.closing.clear()
        with _Server(("127.0.0.1", self.port), _handler(self.answer)) as server:
            self.port = server.server_address[1]
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            try:
                yield self
            finally:
                self.closing.set()
                server.shutdown()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


def _handler(
    answer: Callable[[socketserver.StreamRequestHandler], None],
) -> type[socketserver.BaseRequestHandler]:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                answer(self)

    return Handler


def _request(handler: socketserver.StreamRequestHandler) -> tuple[str, str]:
    """Path without its slash, and Last-Event-ID."""
    path = handler.rfile.readline().split()[1].decode()
    last_event_id = ""
    while line := handler.rfile.readline().strip():
        header, _, value = line.partition(b":")
        if header.lower() == b"last-event-id":
            last_event_id = value.strip().decode()
    return path.removeprefix("/"), last_event_id


def _end(handler: socketserver.StreamRequestHandler, answer: bytes | None) -> None:
    if answer is None:
        # A linger of zero makes close() send a reset.
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    else:
        handler.wfile.write(answer)
