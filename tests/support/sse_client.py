"""A blocking client of event streams, over HTTP/1.1 and h2c, that is strict about every byte of a frame.

A frame is checked when it is read: order of lines, LF only, one line of data, order of the keys of an event, a
base64url id. Which frames may follow each other is checked by tests/support/frame_checker.py.
"""

from __future__ import annotations

import base64
import json
import re
import select
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from h2.config import H2Configuration
from h2.errors import ErrorCodes
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset
from h2.exceptions import ProtocolError

from tests.support.contract import Json, ok
from tests.support.h2_client import Session
from tests.support.raw_http import RawClient
from tests.support.server import Server, readable

Protocol = Literal["http1", "h2c"]
S = TypeVar("S", bound="EventStream")

FRAME_S = 120.0  # a frame that is due arrives within this time, also on a loaded machine

KEYS: dict[str, list[str]] = {
    "record": ["topic", "records", "from_seq", "to_seq", "head_seq"],
    "tombstone": ["topic", "reason", "gap_from", "gap_to", "earliest_seq", "head_seq"],
    "caught-up": ["topic", "head_seq"],
    "topic-deleted": ["topic", "head_seq", "reason"],
}
# Fields of jobs and of records of a consumer: those of all of them, then those of some.
JOB_KEYS = {"topic", "$seq", "$ts", "deliveries"}
JOB_KEYS_MORE = {"$tag", "lease_id", "deadline", "data", "bytes", "meta", "$encoding", "headers"}
ERROR_KEYS = {"code", "error", "message"}
ERROR_KEYS_MORE = {"retry_after_ms", "topics", "topic"}
_EVENT = re.compile(rb"event: ([a-z-]+)\n(?:id: ([A-Za-z0-9_-]+)\n)?data: ([^\r\n]+)\n\n")
_HEARTBEAT = re.compile(rb": hb (\d+)\n\n")


class NotOpened(AssertionError):
    """The answer was not a stream."""


@dataclass(frozen=True, slots=True)
class Frame:
    """`event` is `retry` or `hb` for frames that are not events; the data of `hb` is its time."""

    event: str
    data: Any
    id: str | None = None

    @property
    def cursors(self) -> dict[str, int]:
        """The cursors in the id."""
        assert self.id is not None, self
        return read_id(self.id)

    @property
    def seqs(self) -> list[int]:
        return [record["$seq"] for record in self.data["records"]]


def read_id(text: str) -> dict[str, int]:
    """The cursors, and the number of a save."""
    decoded = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    assert isinstance(decoded, dict)
    return {name: number for name, number in decoded.items() if name == "#" or not name.startswith("#")}


def make_id(cursors: Mapping[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(cursors).encode()).decode().rstrip("=")


def parse_frame(text: bytes) -> Frame:
    """One frame with its blank line."""
    if text == b"retry: 2000\n\n":
        return Frame("retry", 2000)
    if heartbeat := _HEARTBEAT.fullmatch(text):
        return Frame("hb", int(heartbeat[1]))
    found = _EVENT.fullmatch(text)
    assert found is not None, text[:300]
    event, data = found[1].decode(), json.loads(found[3])
    if event == "error":
        assert ERROR_KEYS <= set(data) <= ERROR_KEYS | ERROR_KEYS_MORE, data
        assert data["error"] and data["message"]
    else:
        assert found[2] is not None, f"{event} without an id"
        if event == "job" or "consumer" in data:
            _check_job(event, data, found[2])
        else:
            assert [key for key in data if key != "epoch"] == KEYS[event], (event, list(data))
    return Frame(event, data, found[2].decode() if found[2] else None)


def _check_job(event: str, data: Json, event_id: bytes) -> None:
    keys = set(data) - {"consumer"}
    if event == "tombstone":
        assert keys == set(KEYS["tombstone"]), data
        assert int(event_id) == data["gap_to"]
    else:
        assert event == ("record" if "consumer" in data else "job")
        assert JOB_KEYS <= keys <= JOB_KEYS | JOB_KEYS_MORE, data
        assert ("lease_id" in keys) == ("deadline" in keys)
        assert int(event_id) == data["$seq"]


class EventStream(ABC):
    """An open stream. Unread bytes wait in the socket, so a stream that is not read stalls."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.headers: dict[str, str] = {}
        self.ended = False
        self.waiting: deque[Frame] = deque()
        self.last_id: str | None = None  # of the last frame that `next` or `read` has returned
        self._bytes = bytearray()

    @abstractmethod
    def _take(self, data: bytes) -> bytes:
        """Extract the bytes of the stream from what the socket received; sets `ended`."""

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        """Close the connection, whatever is in flight."""
        self.socket.close()

    def receive(self) -> None:
        """One read from the socket, which has data or gets some within its timeout."""
        try:
            data = self.socket.recv(1 << 18)
        except ConnectionResetError:
            data = b""
        self._feed(self._take(data))
        if not data:
            self.ended = True
        if self.ended:
            assert not self._bytes, f"the stream ended inside a frame: {bytes(self._bytes[-300:])!r}"

    def _feed(self, data: bytes) -> None:
        searched = max(0, len(self._bytes) - 1)
        self._bytes += data
        while (end := self._bytes.find(b"\n\n", searched)) >= 0:
            self.waiting.append(parse_frame(bytes(self._bytes[: end + 2])))
            del self._bytes[: end + 2]
            searched = 0

    def read(self, timeout_s: float = FRAME_S) -> Frame | None:
        """The next frame of any kind; None at the end of the stream."""
        give_up = time.monotonic() + timeout_s
        while not self.waiting:
            if self.ended:
                return None
            left = give_up - time.monotonic()
            if left <= 0 or not readable(self.socket, left):
                raise AssertionError(f"no frame within {timeout_s} s")
            self.receive()
        frame = self.waiting.popleft()
        self.last_id = frame.id or self.last_id
        return frame

    def next(self, timeout_s: float = FRAME_S) -> Frame:
        """The next frame that is not a heartbeat."""
        while True:
            frame = self.read(timeout_s)
            assert frame is not None, "the stream has ended"
            if frame.event != "hb":
                return frame

    def take(self, *events: str) -> list[Frame]:
        """The next frames, which must be of these kinds."""
        frames = [self.next() for _ in events]
        assert [frame.event for frame in frames] == list(events), frames
        return frames

    def until_caught_up(self, topics: int = 1) -> list[Frame]:
        """Frames up to the one with which this many topics have caught up."""
        frames: list[Frame] = []
        found: set[str] = set()
        while len(found) < topics:
            frames.append(self.next())
            if frames[-1].event == "caught-up":
                found.add(frames[-1].data["topic"])
        return frames

    def until_records(self, count: int) -> list[Frame]:
        """Frames up to the one with which this many records have arrived."""
        frames: list[Frame] = []
        while count > 0:
            frames.append(self.next())
            if frames[-1].event == "record":
                count -= len(frames[-1].data["records"])
        assert count == 0, f"{-count} records too many"
        return frames

    def rest(self) -> list[Frame]:
        """Everything up to the end of the stream, without heartbeats."""
        frames: list[Frame] = []
        while (frame := self.read()) is not None:
            if frame.event != "hb":
                frames.append(frame)
        return frames


class Http1Stream(EventStream):
    """The response has no length: its body ends with the connection."""

    def __init__(
        self, server: Server, path: str, headers: Mapping[str, str], connection: socket.socket
    ) -> None:
        super().__init__(connection)
        lines = [f"GET {path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers.items())]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        received = b""
        while b"\r\n\r\n" not in received:
            data = connection.recv(1 << 16)
            if not data:
                raise NotOpened("closed instead of answered", received)
            received += data
        head, _, body = received.partition(b"\r\n\r\n")
        status, *fields = head.decode("latin-1").split("\r\n")
        if not status.startswith("HTTP/1.1 200 "):
            raise NotOpened(received)
        self.headers = {name.lower(): value for name, _, value in (field.partition(": ") for field in fields)}
        assert self.headers["connection"] == "close"
        assert not {"content-length", "transfer-encoding", "keep-alive"} & set(self.headers)
        self._feed(body)

    def _take(self, data: bytes) -> bytes:
        return data


class Http2Stream(EventStream):
    """One stream on a connection of its own. Unread data is not acknowledged, so the window closes."""

    def __init__(
        self, server: Server, path: str, headers: Mapping[str, str], connection: socket.socket
    ) -> None:
        super().__init__(connection)
        self._h2 = Session(H2Configuration(client_side=True))
        self._h2.initiate_connection()
        self._stream = self._h2.get_next_available_stream_id()
        pseudo = [(":method", "GET"), (":scheme", "http"), (":authority", "x"), (":path", path)]
        self._h2.send_headers(
            self._stream,
            [*pseudo, *((name.lower(), value) for name, value in headers.items())],
            end_stream=True,
        )
        self._flush()
        while not self.headers:
            self.receive()
            if self.ended and not self.headers:
                raise NotOpened("closed instead of answered")
        status = self.headers.pop(":status")
        if status != "200":
            raise NotOpened(status, bytes(self._bytes))

    def leave(self) -> None:
        """Reset the stream, keep the connection."""
        self._h2.reset_stream(self._stream, ErrorCodes.CANCEL)
        self._flush()

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data:
            try:
                self.socket.sendall(data)
            except OSError:
                pass  # the server has closed, but its last data is still unread

    def _take(self, data: bytes) -> bytes:
        if not data:
            return b""
        body = b""
        for event in self._h2.receive_data(data):
            match event:
                case ResponseReceived():
                    self.headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
                case DataReceived():
                    body += event.data
                    self._acknowledge(event)
                case StreamEnded() | StreamReset():
                    self.ended = True
        self._flush()
        return body

    def _acknowledge(self, event: DataReceived) -> None:
        try:
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        except ProtocolError:
            pass  # the stream ended with this frame


_KINDS: dict[Protocol, type[Http1Stream] | type[Http2Stream]] = {"http1": Http1Stream, "h2c": Http2Stream}


def watch(server: Server, topics: Mapping[str, Any] | str, *, query: str = "", **fields: Any) -> Json:
    """Create a session; returns the server's answer. One topic may be given by its name alone."""
    named = {topics: {}} if isinstance(topics, str) else topics
    return ok(server.post(f"/v0/watch{query}", {"topics": named, **fields}))


def open_stream(
    server: Server,
    session: Json | str,
    *,
    protocol: Protocol = "http1",
    last_event_id: str | None = None,
    query: str = "",
    connection: socket.socket | None = None,
    receive_buffer: int | None = None,
    **headers: str,
) -> EventStream:
    """GET a session's stream, which must open; its retry frame is read and checked."""
    path = session if isinstance(session, str) else session["stream_url"]
    sent = {**server.credentials, **headers}
    if last_event_id is not None:
        sent["Last-Event-ID"] = last_event_id
    if connection is None:
        connection = connect(server, receive_buffer)
    stream = _KINDS[protocol](server, path + query, sent, connection)
    check_headers(stream.headers)
    assert stream.next().event == "retry"
    return stream


def try_open(server: Server, session: Json | str, **options: Any) -> EventStream | None:
    """The stream, or None when it is refused or the connection fails."""
    try:
        return open_stream(server, session, **options)
    except (NotOpened, OSError):
        return None


def connect(server: Server, receive_buffer: int | None = None) -> socket.socket:
    """A connection; with a small buffer the server soon notices that it is not read."""
    connection = socket.socket(socket.AF_INET)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(120)
    connection.connect((server.host, server.port))
    return connection


def check_headers(headers: Mapping[str, str]) -> None:
    assert headers["content-type"].partition(";")[0] == "text/event-stream"
    assert headers["cache-control"] == "no-store"
    assert headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in headers


def head_only(server: Server, path: str, **headers: str) -> Mapping[str, str]:
    """The headers of an answer to HEAD, after which the connection ends or continues without a body."""
    client = RawClient(server)
    sent = {**server.credentials, **headers}
    lines = [f"HEAD {path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in sent.items())]
    client.send("\r\n".join([*lines, "", ""]).encode())
    reply = client.read(with_body=False)
    assert reply.status == 200, reply
    client.close()
    return reply.headers


def follow(
    server: Server, topics: Mapping[str, Any] | str, protocol: Protocol = "http1", **fields: Any
) -> EventStream:
    """Create a session and open its stream."""
    return open_stream(server, watch(server, topics, **fields), protocol=protocol)


def pump(
    streams: Sequence[S],
    done: Callable[[], bool],
    taken: Callable[[S, Frame], None],
    timeout_s: float = FRAME_S,
) -> None:
    """Read from all of the streams until done; each frame except heartbeats is passed to `taken`."""
    give_up = time.monotonic() + timeout_s
    poller = select.epoll()
    by_fd = {stream.fileno(): stream for stream in streams if not stream.ended}
    for fd in by_fd:
        poller.register(fd, select.EPOLLIN)
    try:
        _hand_over(streams, taken)
        while not done():
            assert time.monotonic() < give_up, f"not within {timeout_s} s: {done}"
            ready = [by_fd[fd] for fd, _ in poller.poll(0.1)]
            for stream in ready:
                stream.receive()
                if stream.ended:
                    poller.unregister(stream.fileno())
            _hand_over(ready, taken)
    finally:
        poller.close()


def _hand_over(streams: Iterable[S], taken: Callable[[S, Frame], None]) -> None:
    for stream in streams:
        while stream.waiting:
            frame = stream.read()
            assert frame is not None
            if frame.event != "hb":
                taken(stream, frame)
