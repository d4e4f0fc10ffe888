"""Supervisor ⇄ child: JSON messages, one a line, over an inherited pair of Unix stream sockets.

    supervisor → child   ping · settle · drain · peers
    child → supervisor   pong · locked · listening · ready · serving · owes · failed

    {"op":"peers","workers":[{"shard":0,"incarnation":17,"path":"/run/…/shard-00-17.sock"}]}

A worker says `locked` when another process holds its directory, `listening` when its socket is bound and `ready` when it has
recovered; a front says `serving` when it accepts. `failed` is the last thing that a child says, if it knows why it ends. `peers` names
the workers that may be talked to, all of them each time, and the processes that keep failing or wait for a lock. Before the workers of a server that stops are told to `drain` they are told to `settle`: from
then on each says with `owes`, at once and at every change, whether it has copies to send to others. Each child answers
every `ping` with a `pong`, also while it recovers or drains.

Nothing here blocks: `Channel` is for a poll loop, `LoopChannel` for asyncio.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import msgspec

LINE_BYTES_MAX = 1 << 20  # thousands of peers; more is not a message of ours
_RECEIVE_BYTES = 1 << 16

logger = logging.getLogger("topics.control")


class Ping(msgspec.Struct, frozen=True, tag_field="op", tag="ping"):
    pass


class Settle(msgspec.Struct, frozen=True, tag_field="op", tag="settle"):
    """No more requests come from fronts: send other workers what is owed to them."""


class Drain(msgspec.Struct, frozen=True, tag_field="op", tag="drain"):
    """Finish what is open and exit."""


class Peer(msgspec.Struct, frozen=True):
    """One worker process. The path belongs to the incarnation, so an old address never reaches a new process."""

    shard: int
    incarnation: int
    path: str


class Outage(msgspec.Struct, frozen=True):
    """Why a process does not do its work, when it is not just starting."""

    name: str
    shard: int | None  # None: it is a front
    failures: int  # ends in a row; 0: it waits for the lock of its directory
    reason: str  # of the last end

    @property
    def text(self) -> str:
        if not self.failures:
            return f"{self.name} waits for its lock: a process of the server before still holds it"
        return f"{self.name} keeps failing ({self.failures} times in a row): {self.reason}"


class Peers(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="op", tag="peers"):
    workers: list[Peer]
    outages: list[Outage] = []


class Pong(msgspec.Struct, frozen=True, tag_field="op", tag="pong"):
    pass


class Locked(msgspec.Struct, frozen=True, tag_field="op", tag="locked"):
    """Another process holds the shard's directory; this one waits for it."""


class Failed(msgspec.Struct, frozen=True, tag_field="op", tag="failed"):
    """It is about to end, for this reason."""

    reason: str


class Listening(msgspec.Struct, frozen=True, tag_field="op", tag="listening"):
    pass


class Ready(msgspec.Struct, frozen=True, tag_field="op", tag="ready"):
    pass


class Serving(msgspec.Struct, frozen=True, tag_field="op", tag="serving"):
    pass


class Owes(msgspec.Struct, frozen=True, tag_field="op", tag="owes"):
    owes: bool


Message = Ping | Settle | Drain | Peers | Pong | Locked | Listening | Ready | Serving | Owes | Failed

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message) + b"\n"


class LineBuffer:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """The messages that these bytes complete; ValueError for what is not one."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise ValueError(f"a control message exceeds {LINE_BYTES_MAX} bytes")
        return [_decoder.decode(line) for line in lines]


class Channel:
    """One end, for a loop that polls `fileno()`: readable → `receive`; writable, while `wants_write` → `flush`."""

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
        """All that has arrived. At the other side's end, or a line that is no message, the channel closes itself."""
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
        """Send now what the socket takes and keep the rest; to a closed channel, nothing."""
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
                # What the other side said before it went is still to be read, so only sending ends here.
                self._unsent.clear()
                return
            del self._unsent[:sent]

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._unsent.clear()
            self._socket.close()


class LoopChannel(Channel):
    """One end on the running asyncio loop: calls `on_message` for each message, and `on_close` when the other side ends."""

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
        """Deliver what has arrived. The loop calls this; after the other side's end it fetches its last words."""
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
            # While the descriptor is still ours: the loop may not watch one that is closed or someone else's.
            self._loop.remove_reader(self.fileno())
            self._loop.remove_writer(self.fileno())
            super().close()

    def _write(self) -> None:
        self.flush()
        if not self.wants_write:
            self._loop.remove_writer(self.fileno())
