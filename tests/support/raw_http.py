"""A raw HTTP/1 client: requests are bytes, and answers are read by their Content-Length alone."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from tests.support.server import Reply, Server


class Closed(Exception):
    """The server closed the connection instead of answering; `rest` is what it sent before."""

    def __init__(self, rest: bytes) -> None:
        super().__init__(rest)
        self.rest = rest


@dataclass
class RawReply(Reply):
    raw: bytes = b""  # head and body exactly as received


class RawClient:
    def __init__(self, server: Server, timeout_s: float = 30.0) -> None:
        self.socket = server.connect(timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""

    def close(self) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def read(self, *, with_body: bool = True) -> RawReply:
        """The next answer. Interim responses (status 100) count as answers."""
        while (end := self._rest.find(b"\r\n\r\n")) < 0:
            self._more()
        head = self._rest[:end].decode("latin-1").split("\r\n")
        found = re.fullmatch(r"HTTP/1\.1 (\d{3}) .+", head[0])
        assert found is not None, head[0]
        headers = {}
        for line in head[1:]:
            name, _, value = line.partition(": ")
            assert name.lower() not in headers, f"{name} twice"
            headers[name.lower()] = value
        end += 4 + (int(headers.get("content-length", "0")) if with_body else 0)
        while len(self._rest) < end:
            self._more()
        raw, self._rest = self._rest[:end], self._rest[end:]
        body = raw[raw.index(b"\r\n\r\n") + 4 :]
        return RawReply(int(found[1]), headers, body, raw)

    def read_all(self) -> list[RawReply]:
        """All answers until the server closes."""
        replies = []
        while True:
            try:
                replies.append(self.read())
            except Closed as closed:
                assert not closed.rest, closed.rest
                return replies

    def _more(self) -> None:
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            raise Closed(self._rest)
        self._rest += data
