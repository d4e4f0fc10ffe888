"""Pending requests of a front to the shards, with backpressure. No sockets and no clock, so that a simulation can drive it.

Input: `ask` (a request for a shard), `receive` (a message from one), `worker_up`, `worker_down`, `expire`. Output:
messages (`take_messages`), and exactly one call of each request's `on_reply`, with the shard's reply or an error of the
front.

Limits per shard: pending requests (PENDING_MAX) and their bytes (CREDIT_BYTES). Beyond them a request is refused with 429.
For flow control of replies, each shard gets a window update every WINDOW_UPDATE_BYTES.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from topics.link import wire
from topics.link.control_channel import Outage

logger = logging.getLogger("topics.front")

PENDING_MAX = 65_536
CREDIT_BYTES = 128 << 20
WINDOW_UPDATE_BYTES = 4 << 20  # far below the shard's window, or both sides would wait for each other
REQUEST_COST = 256  # memory of an entry in addition to its body

# A shard refuses a request that it has not begun within this time; a long poll may take 30 s more.
BUDGET_MS = 30_000
GIVE_UP_US = 65_000_000

OnReply: TypeAlias = Callable[[wire.Reply], None]
OnPush: TypeAlias = Callable[[int, wire.Reply], None]  # shard, unsolicited reply
Message: TypeAlias = tuple[int, list[wire.Buffer]]  # shard, parts


@dataclass(slots=True)
class Pending:
    op: int
    cost: int
    received_us: int
    on_reply: OnReply


class Link:
    """State of one shard: its worker's incarnation, if any, unsent messages, and pending requests."""

    __slots__ = ("cost", "head", "incarnation", "messages", "outbox", "pending", "received")

    def __init__(self) -> None:
        self.incarnation: int | None = None
        self.head = b""
        self.outbox: list[bytes] = []  # items of the next message
        self.messages: list[list[wire.Buffer]] = []  # complete messages, before the outbox
        self.pending: dict[int, Pending] = {}
        self.cost = 0
        self.received = 0  # bytes since the last window update


def error_reply(code: str, message: str, detail: dict[str, object] | None = None) -> wire.Reply:
    return wire.Reply(0, *wire.failed(code, message, detail))


class PendingRequests:
    def __init__(self, shards: int, on_send: Callable[[], None] = lambda: None) -> None:
        self.count = shards
        self.links = [Link() for _ in range(shards)]
        self.outages: list[Outage] = []  # failing processes, as reported by the supervisor
        self.refused_full = 0
        self._next_id = 0
        self._on_send = on_send  # called when there is something to send
        self.on_push: OnPush = lambda shard, reply: None
        self.on_up: Callable[[int], None] = lambda shard: None
        self.on_down: Callable[[int], None] = lambda shard: None

    # -- requests ------------------------------------------------------------------------------------------

    def ask(
        self,
        shard: int,
        op: int,
        flags: int,
        topic: bytes,
        args: bytes,
        body: wire.Buffer,
        received_us: int,
        on_reply: OnReply,
        encoding: int = wire.JSON,
    ) -> int:
        """Queue a request. Returns its number, 0 if it was refused at once."""
        link = self.links[shard]
        if link.incarnation is None:
            on_reply(self._unavailable(shard))
            return 0
        size = len(body)
        # The shard drops the small body of a read before it waits, and keeps that of a write until it is logged.
        cost = REQUEST_COST if op in wire.READS else size + REQUEST_COST
        pending = link.pending
        if pending and (len(pending) >= PENDING_MAX or link.cost + cost > CREDIT_BYTES):
            self.refused_full += 1
            detail: dict[str, object] = {"limit": "queue"}
            on_reply(error_reply("throttled", "too many requests are waiting for this topic's shard", detail))
            return 0
        self._next_id = number = self._next_id + 1
        pending[number] = Pending(op, cost, received_us, on_reply)
        link.cost += cost
        if size >= wire.SEPARATE_BODY_BYTES:
            self._finish_message(link)  # to keep the order
            head = wire.request_head(
                number, received_us, BUDGET_MS, op, flags, topic, args, wire.SEPARATE, encoding
            )
            link.messages.append([link.head + head, body])
        else:
            link.outbox.append(
                wire.request_head(number, received_us, BUDGET_MS, op, flags, topic, args, size, encoding)
            )
            if size:
                link.outbox.append(body)  # type: ignore[arg-type]
        self._on_send()
        return number

    def _unavailable(self, shard: int) -> wire.Reply:
        """The error for a shard without a worker: it is starting, or keeps failing."""
        detail: dict[str, object] = {"shard": shard, "replay_progress": 0.0}
        outage = next((outage for outage in self.outages if outage.shard == shard), None)
        if outage is None:
            return error_reply("not_ready", "this topic's shard is starting; try again shortly", detail)
        detail["failures"] = outage.failures
        return error_reply("not_ready", f"this topic's shard is not available: {outage.text}", detail)

    def new_number(self) -> int:
        """A number for unsolicited messages of a shard. It differs from those of all requests, so they are not taken for replies."""
        self._next_id += 1
        return self._next_id

    def tell(self, shard: int, op: int, number: int, topic: bytes = b"", args: bytes = b"") -> None:
        """Queue a request without a reply, about the stream or feed with that number. Dropped if the shard is down."""
        link = self.links[shard]
        if link.incarnation is not None:
            link.outbox.append(wire.request_head(number, 0, 0, op, 0, topic, args, 0))
            self._on_send()

    @staticmethod
    def _finish_message(link: Link) -> None:
        if link.outbox:
            link.messages.append([b"".join([link.head, *link.outbox])])
            link.outbox = []

    def take_messages(self) -> list[Message]:
        """All unsent messages; one per shard, unless there are large bodies."""
        messages: list[Message] = []
        for shard, link in enumerate(self.links):
            if link.outbox:
                self._finish_message(link)
            if link.messages:
                messages += [(shard, parts) for parts in link.messages]
                link.messages = []
        return messages

    # -- replies -------------------------------------------------------------------------------------------

    def receive(self, shard: int, message: bytes, separate: wire.Buffer | None = None) -> None:
        link = self.links[shard]
        if wire.read_message_head(message) != link.incarnation:
            return
        pending = link.pending
        for reply in wire.read_replies(message, separate):
            entry = pending.pop(reply.id, None)
            if entry is None:  # unsolicited, or the request has timed out
                self._push(shard, reply)
            else:
                link.cost -= entry.cost
                try:  # inlined _answer: this is the hot path
                    entry.on_reply(reply)
                except Exception:
                    logger.exception("failed to process a reply")
        link.received += len(message) if separate is None else len(message) + len(separate)
        if link.received >= WINDOW_UPDATE_BYTES:
            link.outbox.append(wire.window_update(link.received))
            link.received = 0
            self._on_send()

    def _push(self, shard: int, reply: wire.Reply) -> None:
        try:
            self.on_push(shard, reply)
        except Exception:
            logger.exception("failed to process a push")

    def cancel(self, shard: int, number: int) -> None:
        """Drop a pending read whose client has disconnected."""
        link = self.links[shard]
        entry = link.pending.get(number)
        if entry is not None and entry.op in wire.READS:
            del link.pending[number]
            link.cost -= entry.cost
            entry.on_reply(error_reply("not_ready", "the client has disconnected"))

    # -- workers -------------------------------------------------------------------------------------------

    def set_peers(self, live: dict[int, int]) -> tuple[list[int], list[int]]:
        """Set the live workers, as shard → incarnation. Another incarnation is another worker, and the old one is dead.
        Returns the shards whose worker is gone and those that have a new one; some are both.
        """
        gone: list[int] = []
        new: list[int] = []
        for shard, link in enumerate(self.links):
            incarnation = live.get(shard)
            if link.incarnation is not None and link.incarnation != incarnation:
                gone.append(shard)
                self.worker_down(shard)
            if link.incarnation is None and incarnation is not None:
                new.append(shard)
                self.worker_up(shard, incarnation)
        return gone, new

    def worker_up(self, shard: int, incarnation: int) -> None:
        link = self.links[shard]
        assert link.incarnation is None, "the previous worker was not reported down"
        link.incarnation = incarnation
        link.head = wire.message_head(incarnation)
        self.on_up(shard)

    def worker_down(self, shard: int) -> None:
        """Fail all requests that are pending at a worker that died. The outcome of changes is unknown."""
        link = self.links[shard]
        link.incarnation = None
        link.outbox, link.messages = [], []
        link.received = 0
        pending, link.pending = link.pending, {}
        link.cost = 0
        for entry in pending.values():
            _answer(entry, _lost(entry.op, "this topic's shard stopped while it processed the request"))
        self.on_down(shard)

    def expire(self, now_us: int) -> None:
        """Fail requests that have been pending longer than any request may take. Entries are in sending order."""
        for link in self.links:
            while link.pending:
                number, entry = next(iter(link.pending.items()))
                if now_us - entry.received_us < GIVE_UP_US:
                    break
                del link.pending[number]
                link.cost -= entry.cost
                _answer(entry, _lost(entry.op, "this topic's shard did not answer in time"))

    def end_polls(self, before_us: int) -> None:
        """Fail long polls, because the server is stopping. Jobs leased by a claim after this are redelivered when the lease ends."""
        for link in self.links:
            for number, entry in list(link.pending.items()):
                if entry.op in wire.POLLS and entry.received_us <= before_us:
                    del link.pending[number]
                    link.cost -= entry.cost
                    unknown: dict[str, object] = {"outcome": "unknown"}
                    detail = unknown if entry.op in wire.CHANGES else None
                    text = "the server is stopping; retry after it has restarted"
                    _answer(entry, error_reply("shutting_down", text, detail))

    @property
    def in_flight(self) -> int:
        return sum(len(link.pending) for link in self.links)


def _answer(entry: Pending, reply: wire.Reply) -> None:
    try:
        entry.on_reply(reply)
    except Exception:  # otherwise the remaining replies of the message would be lost
        logger.exception("failed to process a reply")


def _lost(op: int, message: str) -> wire.Reply:
    if op in wire.CHANGES:
        text = f"{message}; it may or may not have been carried out"
        return error_reply("not_ready", text, {"outcome": "unknown"})
    return error_reply("not_ready", f"{message}; try again shortly")
