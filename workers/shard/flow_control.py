"""Flow control toward fronts: how far a shard's replies may run ahead of the front that receives them.

A front receives replies one after another, and only received ones count toward its memory limits; replies still in the
socket count toward none. So fronts send window updates with the bytes they have received (wire.WINDOW_UPDATE). While
more than WINDOW_BYTES of replies to a front are not received, the shard begins none of its reads and wakes none of its
long polls. A read is small to request, and its reply may have 8 MiB. Writes never wait.

A turn may be in progress when the window closes. So one shard has at most WINDOW_BYTES + TURN_READ_BYTES +
limits.WAKE_BYTES_MAX and one page on the way to a front.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

from topics.api import limits
from topics.engine.commands import consumers as con
from topics.engine.commands import topics as cmd
from topics.link import wire

if TYPE_CHECKING:
    from workers.shard.core import Token

Entry: TypeAlias = "tuple[Token, cmd.Command]"
Sends: TypeAlias = list[tuple[bytes, list[wire.Buffer]]]  # peer, parts of a message

WINDOW_BYTES = 16 * limits.MIB
TURN_READ_BYTES = 32 * limits.MIB  # all reads of one turn together
READS_PER_TURN = 32  # a page has at least one record, however large: this many stay within TURN_READ_BYTES
READS_UNSHARED = TURN_READ_BYTES // limits.DIFF_BYTES_MAX  # this many fit at their maximum size
PAGE_BYTES_MIN = 64 * limits.KIB
LARGE_READS = (cmd.Diff, cmd.LastByTag, con.Claim)


class ReplyWindow:
    """Bytes of replies sent to each front and not yet received by it."""

    def __init__(self) -> None:
        self._in_flight: dict[bytes, int] = {}
        self.closed: dict[bytes, None] = {}  # the fronts whose window is closed

    def sent(self, peer: bytes, size: int) -> None:
        self._in_flight[peer] = in_flight = self._in_flight.get(peer, 0) + size
        if in_flight > WINDOW_BYTES:
            self.closed[peer] = None

    def received(self, peer: bytes, size: int) -> None:
        self._in_flight[peer] = in_flight = max(0, self._in_flight.get(peer, 0) - size)
        if in_flight <= WINDOW_BYTES:
            self.closed.pop(peer, None)

    def forget(self, peer: bytes) -> None:
        self._in_flight.pop(peer, None)
        self.closed.pop(peer, None)

    def is_open(self, peer: bytes) -> bool:
        return peer not in self.closed


class ReadQueue:
    """Reads that wait for their front's window or for a later turn, in one queue per front, served round-robin."""

    def __init__(self, window: ReplyWindow) -> None:
        self._window = window
        self._by_front: dict[bytes, deque[Entry]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_front)

    @property
    def is_ready(self) -> bool:
        """Whether a queued read may begin."""
        return any(map(self._window.is_open, self._by_front))

    def admit(self, entries: list[Entry], may_begin: Callable[[Token], bool]) -> list[Entry]:
        """The new and queued requests that belong to this turn; the other reads are queued. A queued read begins only
        if `may_begin`: it may have waited too long.
        """
        if len(entries) <= READS_PER_TURN and not self._by_front and not self._window.closed:
            return entries
        begun: list[Entry] = []
        for entry in entries:
            # A job stream has a limit of its own, and its claim must come before a release that follows it.
            if isinstance(entry[1], LARGE_READS) and entry[0][1].op != wire.OPEN_JOBS:
                self._by_front.setdefault(entry[0][0], deque()).append(entry)
            else:
                begun.append(entry)
        room = READS_PER_TURN
        for peer in list(filter(self._window.is_open, self._by_front)):
            if not room:
                break
            queue = self._by_front.pop(peer)
            while queue and room:
                entry = queue.popleft()
                if may_begin(entry[0]):
                    begun.append(entry)
                    room -= 1
            if queue:
                self._by_front[peer] = queue  # behind the other fronts, which go first in the next turn
        return begun

    def withdraw(self, peer: bytes, matches: Callable[[object], bool]) -> bool:
        """Remove the matching reads of a front; returns whether there were any."""
        queue = self._by_front.get(peer, deque())
        kept = deque(entry for entry in queue if not matches(entry[0]))
        if len(kept) == len(queue):
            return False
        self._by_front[peer] = kept
        return True

    def forget(self, peer: bytes) -> None:
        self._by_front.pop(peer, None)


def share_pages(entries: list[Entry]) -> None:
    """Limit the page sizes of a turn with many reads to an equal share of TURN_READ_BYTES."""
    if len(entries) <= READS_UNSHARED:
        return
    reads = [command for _, command in entries if isinstance(command, LARGE_READS)]
    if len(reads) <= READS_UNSHARED:
        return
    share = max(PAGE_BYTES_MIN, TURN_READ_BYTES // len(reads))
    for command in reads:
        paged = isinstance(command, cmd.Diff) and not command.frames
        default = limits.DIFF_BYTES_DEFAULT if paged else limits.DIFF_BYTES_MAX
        command.max_bytes = min(command.max_bytes or default, share)


class ReplyBuffer:
    """Replies of a turn: small ones to the same peer are joined into one message."""

    def __init__(self, incarnation: int, window: ReplyWindow) -> None:
        self.head = wire.message_head(incarnation)
        self._window = window
        self._small: dict[bytes, list[bytes]] = {}  # by peer
        self._large: Sends = []

    def add(
        self, peer: bytes, request_id: int, code: int, kind: int, fields: bytes, body: wire.Buffer
    ) -> None:
        size = len(body)
        if size >= wire.SEPARATE_BODY_BYTES:
            first = self.head + wire.reply_head(request_id, code, kind, fields, wire.SEPARATE)
            self._large.append((peer, [first, body]))
            return
        small = self._small.get(peer)
        if small is None:
            small = self._small[peer] = [self.head]
        small.append(wire.reply_head(request_id, code, kind, fields, size))
        small.append(body)  # type: ignore[arg-type]

    def take(self, pushes: Iterable[tuple[bytes, bytes]] = ()) -> Sends:
        """All buffered messages, followed by `pushes`, which are replies without a request."""
        messages: Sends = [(peer, [b"".join(parts)]) for peer, parts in self._small.items()]
        messages += self._large
        for peer, sent in messages:
            self._window.sent(peer, sum(map(len, sent)))
        for peer, body in pushes:
            head = wire.reply_head(0, wire.OK, wire.GRANT, b"", len(body))
            messages.append((peer, [self.head + head + body]))
        if messages:
            self._small, self._large = {}, []
        return messages
