"""An HTTP proxy in front of a server that calls a function at a chosen request: before the server gets it, while the
server works on it, or after the answer but before the client gets it. The client's connection then ends without an
answer.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

When = Literal["before", "during", "after"]


@dataclass
class _Trap:
    ending: str  # of the path
    when: When
    action: Callable[[int], None]  # called with the pid of the client
    skip: int


class WatchingProxy:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (str(parts.hostname), int(parts.port or 80))
        self._lock = threading.Lock()
        self._trap: _Trap | None = None
        self.sprung = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def at(self, ending: str, when: When, action: Callable[[int], None], *, skip: int = 0) -> None:
        """Once, at the next request of such a path after the first few."""
        self.sprung.clear()
        self._trap = _Trap(ending, when, action, skip)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _caught(self, path: str) -> _Trap | None:
        with self._lock:
            trap = self._trap
            if trap is None or not path.partition("?")[0].endswith(trap.ending):
                return None
            if trap.skip:
                trap.skip -= 1
                return None
            self._trap = None
            return trap

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None: ...

            def _forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                trap = proxy._caught(self.path)
                connection = http.client.HTTPConnection(*proxy._target, timeout=120)
                try:
                    if trap is None or trap.when != "before":
                        connection.request(self.command, self.path, body or None, dict(self.headers))
                    if trap is not None:
                        if trap.when == "after":
                            connection.getresponse().read()
                        trap.action(client_pid(self.client_address[1]))
                        proxy.sprung.set()
                        self.close_connection = True
                        return
                    answer = connection.getresponse()
                    content = answer.read()
                except (OSError, http.client.HTTPException):
                    self.close_connection = True  # the server closed the connection: close this one too
                    return
                finally:
                    connection.close()
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in {"connection", "transfer-encoding", "content-length"}:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_DELETE = _forward

        return Handler


def client_pid(port: int) -> int:
    """The local process whose end of a connection has this port."""
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].rpartition(":")[2], 16) == port:
            inodes.add(f"socket:[{fields[9]}]")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or closed this one
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{name}") in inodes:
                        return int(pid)
    raise AssertionError(f"no process has port {port}")


@contextlib.contextmanager
def watching(url: str) -> Iterator[WatchingProxy]:
    proxy = WatchingProxy(url)
    try:
        yield proxy
    finally:
        proxy.close()
