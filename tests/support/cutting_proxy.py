"""A TCP proxy in front of a server that breaks connections when a test says so: all at once, or with an answer on its way."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit


class CuttingProxy:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (str(parts.hostname), int(parts.port or 80))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._answers_to_lose = 0
        self._swallows: tuple[bytes, bytes] | None = None
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_answers(self, count: int) -> None:
        """The server gets the next requests; instead of so many answers the connection ends."""
        with self._lock:
            self._answers_to_lose = count

    def swallow(self, since: bytes, until: bytes) -> None:
        """Of the next answer that has this text, nothing from there on arrives; with the other text its connection ends."""
        with self._lock:
            self._swallows = since, until

    def cut(self) -> None:
        """End all connections of now."""
        with self._lock:
            sockets = list(self._sockets)
        for sock in sockets:
            self._end(sock)

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets |= {client, server}
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        swallowed, end = None, b""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer and self._loses():
                    break
                if is_answer and swallowed is None:
                    with self._lock:
                        since, end = self._swallows or (b"", b"")
                        if since and since in data:
                            self._swallows = None
                            data, _, swallowed = data.partition(since)
                    sink.sendall(data)
                elif swallowed is not None:
                    swallowed += data
                else:
                    sink.sendall(data)
                if swallowed is not None and end in swallowed:
                    break
        self._end(source)
        self._end(sink)

    def _loses(self) -> bool:
        with self._lock:
            if not self._answers_to_lose:
                return False
            self._answers_to_lose -= 1
            return True

    def _end(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
        with self._lock:
            self._sockets.discard(sock)


@contextlib.contextmanager
def cutting(url: str) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(url)
    try:
        yield proxy
    finally:
        proxy.close()
