"""A TCP proxy in front of a server that breaks connections on request: all at once, or in the middle of an answer."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

from tests.support.accepting import Accepting, shut


class CuttingProxy:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (str(parts.hostname), int(parts.port or 80))
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._relays: list[threading.Thread] = []
        self._answers_to_lose = 0
        self._swallows: tuple[bytes, bytes] | None = None
        self.connections = 0
        self._accepting = Accepting(self._accepted)
        self.url = self._accepting.url

    def lose_answers(self, count: int) -> None:
        """Forward the next requests, but close the connection instead of returning their answers, this many times."""
        with self._lock:
            self._answers_to_lose = count

    def swallow(self, since: bytes, until: bytes) -> None:
        """Drop the next answer from where `text` appears, and close its connection where the other text appears."""
        with self._lock:
            self._swallows = since, until

    def cut(self) -> None:
        """Close all current connections."""
        with self._lock:
            for sock in self._sockets:
                shut(sock)

    def close(self) -> None:
        self._accepting.close()
        self.cut()
        for relay in self._relays:
            relay.join(60)
            assert not relay.is_alive()

    def _accepted(self, client: socket.socket) -> None:
        self.connections += 1
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        with self._lock:
            self._sockets |= {client, server}
        relay = threading.Thread(target=self._relay, args=(client, server), daemon=True)
        self._relays.append(relay)
        relay.start()

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        answers = threading.Thread(target=self._pump, args=(server, client, True), daemon=True)
        answers.start()
        self._pump(client, server, False)
        answers.join()
        # Only when neither thread uses them any more: see `Accepting`.
        with self._lock:
            self._sockets -= {client, server}
        client.close()
        server.close()

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
        shut(source)
        shut(sink)

    def _loses(self) -> bool:
        with self._lock:
            if not self._answers_to_lose:
                return False
            self._answers_to_lose -= 1
            return True


@contextlib.contextmanager
def cutting(url: str) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(url)
    try:
        yield proxy
    finally:
        proxy.close()
