"""Control channel between the supervisor and a child: JSON lines over an inherited pair of Unix stream sockets.

    supervisor → child   ping · flush_copies · drain · peers
    child → supervisor   pong · locked · listening · ready · serving · copies_pending · failed

    {"op":"peers","workers":[{"shard":0,"incarnation":17,"path":"/run/…/shard-00-17.sock"}]}

A worker sends `locked` while another process holds its directory, `listening` when its socket is bound and `ready` when
it has recovered; a front sends `serving` when it accepts connections. `failed` gives the reason of an exit, if known.
`peers` always lists all reachable workers, and all processes that keep failing or wait for a lock. At shutdown workers
get `flush_copies` before `drain`: from then on each reports with `copies_pending`, at once and at every change, whether
it has copies to send to other workers. A child answers every `ping` with a `pong`, also while it recovers or drains.

Nothing here blocks: `Channel` is for a poll loop, `LoopChannel` for asyncio.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import msgspec

LINE_BYTES_MAX = 1 << 20  # room for thousands of peers
_RECEIVE_BYTES = 1 << 16

logger = logging.getLogger("topics.control")


class Ping(msgspec.Struct, frozen=True, tag_field="op", tag="ping"):
    pass


class FlushCopies(msgspec.Struct, frozen=True, tag_field="op", tag="flush_copies"):
    """No more requests come from fronts: send all pending copies to other workers."""


class Drain(msgspec.Struct, frozen=True, tag_field="op", tag="drain"):
    """Finish open requests and exit."""


class Peer(msgspec.Struct, frozen=True):
    """One worker process. The path is unique to the incarnation, so an old address never reaches a new process."""

    shard: int
    incarnation: int
    path: str


class Outage(msgspec.Struct, frozen=True):
    """A process that keeps failing, or that waits for the lock of its directory."""

    name: str
    shard: int | None  # None: a front
    failures: int  # exits in a row; 0: it waits for the lock
    reason: str  # of the last exit

    @property
    def text(self) -> str:
        if not self.failures:
            return f"{self.name} waits for its lock: a process of the previous server still holds it"
        return f"{self.name} keeps failing ({self.failures} times in a row): {self.reason}"


class Peers(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="op", tag="peers"):
    workers: list[Peer]
    outages: list[Outage] = []


class Pong(msgspec.Struct, frozen=True, tag_field="op", tag="pong"):
    pass


class Locked(msgspec.Struct, frozen=True, tag_field="op", tag="locked"):
    """Another process holds the shard's directory; this one waits for the lock."""


class Failed(msgspec.Struct, frozen=True, tag_field="op", tag="failed"):
    """The process is about to exit, for this reason."""

    reason: str


class Listening(msgspec.Struct, frozen=True, tag_field="op", tag="listening"):
    pass


class Ready(msgspec.Struct, frozen=True, tag_field="op", tag="ready"):
    pass


class Serving(msgspec.Struct, frozen=True, tag_field="op", tag="serving"):
    pass


class CopiesPending(msgspec.Struct, frozen=True, tag_field="op", tag="copies_pending"):
    pending: bool


Message = (
    Ping | FlushCopies | Drain | Peers | Pong | Locked | Listening | Ready | Serving | CopiesPending | Failed
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message) + b"\n"


class LineBuffer:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """The messages completed by these bytes. ValueError: a line is not a valid message."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise ValueError(f"a control message exceeds {LINE_BYTES_MAX} bytes")
        return [_decoder.decode(line) for line in lines]


class Channel:
    """One end, for a poll loop: call `receive` when `fileno()` is readable, `flush` when writable while `wants_write`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._lines = LineBuffer()
        self._unsent = bytearray()
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._unsent)

    def receive(self) -> list[Message]:
        """All messages that have arrived. The channel closes itself at EOF and at an invalid message."""
        messages: list[Message] = []
        while not self.closed:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            if not data:
                self.close()
                break
            try:
                messages += self._lines.feed(data)
            except ValueError as error:
                logger.error("control channel closed: %s", error)
                self.close()
        return messages

    def send(self, message: Message) -> None:
        """Send as much as the socket accepts and buffer the rest. Does nothing on a closed channel."""
        if not self.closed:
            self._unsent += encode(message)
            self.flush()

    def flush(self) -> None:
        while self._unsent and not self.closed:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except ConnectionError:
                # Messages sent by the peer before it closed can still be read, so only sending ends here.
                self._unsent.clear()
                return
            del self._unsent[:sent]

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._unsent.clear()
            self._socket.close()


class LoopChannel(Channel):
    """One end on the running asyncio loop: calls `on_message` for each message, and `on_close` at EOF."""

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[Message], None],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(sock)
        self._on_message = on_message
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.fileno(), self.read)

    def read(self) -> None:
        """Deliver received messages. Called by the loop, and once after the peer has exited, for its last messages."""
        if self.closed:
            return
        messages = self.receive()
        for message in messages:
            self._on_message(message)
        if self.closed:
            self._on_close()

    def send(self, message: Message) -> None:
        super().send(message)
        if self.wants_write:
            self._loop.add_writer(self.fileno(), self._write)

    def close(self) -> None:
        if not self.closed:
            # Before the descriptor is closed: its number may be reused while the loop still watches it.
            self._loop.remove_reader(self.fileno())
            self._loop.remove_writer(self.fileno())
            super().close()

    def _write(self) -> None:
        self.flush()
        if not self.wants_write:
            self._loop.remove_writer(self.fileno())
