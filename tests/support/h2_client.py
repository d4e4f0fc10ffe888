"""A small blocking HTTP/2 client: prior knowledge, one request at a time or several at once."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.exceptions import ProtocolError
from hyperframe.frame import Frame, GoAwayFrame

from tests.support.server import Reply, Server

Headers = Iterable[tuple[str, str]]
_NOT_SENT = ("host", "connection", "content-length", "transfer-encoding")


class Session(H2Connection):
    """h2 closes both directions at a GOAWAY, but open streams are still answered."""

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        return [], [ConnectionTerminated()]


class Http2Client:
    def __init__(self, server: Server, timeout_s: float = 30.0, authority: str = "x") -> None:
        self._authority = authority
        self.socket = server.connect(timeout_s)
        self._h2 = Session(H2Configuration(client_side=True, validate_outbound_headers=False))
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(32 << 20)
        self._replies: dict[int, Reply] = {}
        self._done: set[int] = set()
        self.closed = False
        self._flush()

    def close(self) -> None:
        self.socket.close()

    def request(self, method: str, path: str, headers: Headers = (), body: bytes = b"") -> Reply:
        return self.wait(self.send(method, path, headers, body))

    def send(self, method: str, path: str, headers: Headers = (), body: bytes = b"") -> int:
        """Send the request; an answer that arrives before the whole body is sent ends the sending."""
        stream = self._h2.get_next_available_stream_id()
        sent = [(":method", method), (":scheme", "http"), (":authority", self._authority), (":path", path)]
        sent += [(name.lower(), value) for name, value in headers if name.lower() not in _NOT_SENT]
        if body:
            sent.append(("content-length", str(len(body))))
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in sent]
        self._h2.send_headers(stream, encoded, end_stream=not body)
        while body and stream not in self._done:
            room = min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size)
            if not room:
                self._receive()
                continue
            part, body = body[:room], body[room:]
            self._h2.send_data(stream, part, end_stream=not body)
            self._flush()
        self._flush()
        return stream

    def wait(self, stream: int) -> Reply:
        while stream not in self._done:
            assert not self.closed, "the connection ended before the answer"
            self._receive()
        return self._replies.pop(stream)

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def wait_closed(self) -> None:
        while not self.closed:
            self._receive()

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data:
            self.socket.sendall(data)

    def _receive(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            self.closed = True
            return
        for event in self._h2.receive_data(data):
            match event:
                case ResponseReceived():
                    headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
                    status = int(headers.pop(":status"))
                    self._replies[event.stream_id] = Reply(status, headers, b"")
                case DataReceived():
                    self._replies[event.stream_id].body += event.data
                    self._acknowledge(event)
                case StreamEnded() | StreamReset():
                    self._done.add(event.stream_id)
        try:
            self._flush()
        except OSError:
            pass  # half-closed: no window updates are needed

    def _acknowledge(self, event: DataReceived) -> None:
        try:
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        except ProtocolError:
            pass  # the stream ended with this frame
