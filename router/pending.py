"""The front's bookkeeping: which shard a request belongs to, what is on its way, and when to refuse. Pure.

Events in: `send` (a request for a shard), `receive` (a message from one), `worker_up`, `worker_down`, `expire`. What comes
out are messages (`take_messages`) and calls of the `on_reply` that came with a request: exactly one each, with the
shard's answer or with the front's own. No socket and no clock in here, so that a simulation can drive it.

A shard is told how much of its answers is taken (WINDOW_UPDATE_BYTES), and does not run ahead of that without a limit.

Bounds, per shard: requests on their way (PENDING_MAX) and their bytes (CREDIT_BYTES). Beyond them a request is refused
with 429; nothing queues without a limit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from topics.api.http_errors import STATUS, error_body, error_head
from topics.link import wire
from topics.link.control_channel import Outage

logger = logging.getLogger("topics.front")

PENDING_MAX = 65_536
CREDIT_BYTES = 128 << 20
WINDOW_UPDATE_BYTES = 4 << 20  # far less than a shard may run ahead, or both would wait
REQUEST_COST = 256  # what an entry takes beside its body

# A shard that has not begun a request by then refuses it; a long poll may take 30 s from there.
BUDGET_MS = 30_000
GIVE_UP_US = 65_000_000

READS = (wire.DIFF, wire.DIFF_FRAMES, wire.WATCH_READ)
# What may be parked. A claim is no read: it may be handed something after its client has gone, and nobody can undo that
# but time, so it stays on the books until it is answered.
POLLS = (*READS, wire.CLAIM)

OnReply: TypeAlias = Callable[[wire.Reply], None]
OnPush: TypeAlias = Callable[[int, wire.Reply], None]  # shard, what it says without having been asked
Message: TypeAlias = tuple[int, list[wire.Buffer]]  # shard, parts


@dataclass(slots=True)
class Pending:
    op: int
    cost: int
    received_us: int
    on_reply: OnReply


class Link:
    """One shard as the front sees it: a living incarnation or none, what waits to be sent, what waits for an answer."""

    __slots__ = ("apart", "cost", "head", "incarnation", "outbox", "pending", "taken")

    def __init__(self) -> None:
        self.incarnation: int | None = None
        self.head = b""
        self.outbox: list[bytes] = []
        self.apart: list[list[wire.Buffer]] = []
        self.pending: dict[int, Pending] = {}
        self.cost = 0
        self.taken = 0  # bytes of its messages, since it was told


def refusal(code: str, message: str, detail: dict[str, object] | None = None) -> wire.Reply:
    status = STATUS[code]
    return wire.Reply(0, status, wire.JSON, error_head(status), error_body(code, message, detail))


class PendingRequests:
    def __init__(self, shards: int, on_send: Callable[[], None] = lambda: None) -> None:
        self.links = [Link() for _ in range(shards)]
        self.outages: list[Outage] = []  # processes that do not work, as the supervisor says
        self.refused_full = 0
        self._next_id = 0
        self._on_send = on_send  # something waits to be sent
        self.on_push: OnPush = lambda shard, reply: None
        self.on_up: Callable[[int], None] = lambda shard: None
        self.on_down: Callable[[int], None] = lambda shard: None

    # -- requests ------------------------------------------------------------------------------------------

    def send(
        self,
        shard: int,
        op: int,
        flags: int,
        topic: bytes,
        args: bytes,
        body: wire.Buffer,
        received_us: int,
        on_reply: OnReply,
    ) -> int:
        """Returns the request's number, 0 when it was refused at once."""
        link = self.links[shard]
        if link.incarnation is None:
            on_reply(self._down(shard))
            return 0
        size = len(body)
        # The body of a read is small and gone when it waits at the shard; that of a write is there until it is logged.
        cost = REQUEST_COST if op in READS else size + REQUEST_COST
        pending = link.pending
        if pending and (len(pending) >= PENDING_MAX or link.cost + cost > CREDIT_BYTES):
            self.refused_full += 1
            on_reply(refusal("throttled", "this topic's shard has too much work waiting", {"limit": "queue"}))
            return 0
        self._next_id = number = self._next_id + 1
        pending[number] = Pending(op, cost, received_us, on_reply)
        link.cost += cost
        if size >= wire.SEPARATE_BODY_BYTES:
            self._join(link)  # what came before goes before
            head = wire.request_head(number, received_us, BUDGET_MS, op, flags, topic, args, wire.SEPARATE)
            link.apart.append([link.head + head, body])
        else:
            link.outbox.append(
                wire.request_head(number, received_us, BUDGET_MS, op, flags, topic, args, size)
            )
            if size:
                link.outbox.append(body)  # type: ignore[arg-type]
        self._on_send()
        return number

    def _down(self, shard: int) -> wire.Reply:
        """The answer for a shard without a worker: what it waits for, or that it keeps failing."""
        detail: dict[str, object] = {"shard": shard, "replay_progress": 0.0}
        outage = next((outage for outage in self.outages if outage.shard == shard), None)
        if outage is None:
            return refusal("not_ready", "this topic's shard is starting; try again shortly", detail)
        detail["failures"] = outage.failures
        return refusal("not_ready", f"this topic's shard does not serve: {outage.text}", detail)

    def take_number(self) -> int:
        """For something that a shard may speak of without being asked: no request has it, so it is never taken for an answer."""
        self._next_id += 1
        return self._next_id

    def tell(self, shard: int, op: int, number: int, topic: bytes = b"", args: bytes = b"") -> None:
        """Something without an answer, about what has that number. A shard that is down need not hear it."""
        link = self.links[shard]
        if link.incarnation is not None:
            link.outbox.append(wire.request_head(number, 0, 0, op, 0, topic, args, 0))
            self._on_send()

    @staticmethod
    def _join(link: Link) -> None:
        if link.outbox:
            link.apart.append([b"".join([link.head, *link.outbox])])
            link.outbox = []

    def take_messages(self) -> list[Message]:
        """What waits, one message a shard unless bodies are large."""
        messages: list[Message] = []
        for shard, link in enumerate(self.links):
            if link.outbox:
                self._join(link)
            if link.apart:
                messages += [(shard, parts) for parts in link.apart]
                link.apart = []
        return messages

    # -- replies -------------------------------------------------------------------------------------------

    def receive(self, shard: int, message: bytes, apart: wire.Buffer | None = None) -> None:
        link = self.links[shard]
        if wire.read_message_head(message) != link.incarnation:
            return
        pending = link.pending
        for reply in wire.read_replies(message, apart):
            entry = pending.pop(reply.id, None)
            if entry is None:  # it was not asked for, or was given up
                self._push(shard, reply)
            else:
                link.cost -= entry.cost
                try:  # as _answer does, without the call: this is the hot path
                    entry.on_reply(reply)
                except Exception:
                    logger.exception("an answer could not be passed on")
        link.taken += len(message) if apart is None else len(message) + len(apart)
        if link.taken >= WINDOW_UPDATE_BYTES:
            link.outbox.append(wire.window_update(link.taken))
            link.taken = 0
            self._on_send()

    def _push(self, shard: int, reply: wire.Reply) -> None:
        try:
            self.on_push(shard, reply)
        except Exception:
            logger.exception("news could not be passed on")

    def forget(self, shard: int, number: int) -> None:
        """Whoever asked is gone. A read has no other purpose, so nothing waits for it any longer."""
        link = self.links[shard]
        entry = link.pending.get(number)
        if entry is not None and entry.op in READS:
            del link.pending[number]
            link.cost -= entry.cost
            entry.on_reply(refusal("not_ready", "the client is gone"))

    # -- lives and deaths ----------------------------------------------------------------------------------

    def set_peers(self, living: dict[int, int]) -> tuple[list[int], list[int]]:
        """Which workers live, as shard → incarnation: one with another incarnation is another worker, and the old one
        is dead by now. Returns the shards whose worker is gone and those that have a new one; some are both.
        """
        gone: list[int] = []
        new: list[int] = []
        for shard, link in enumerate(self.links):
            incarnation = living.get(shard)
            if link.incarnation is not None and link.incarnation != incarnation:
                gone.append(shard)
                self.worker_down(shard)
            if link.incarnation is None and incarnation is not None:
                new.append(shard)
                self.worker_up(shard, incarnation)
        return gone, new

    def worker_up(self, shard: int, incarnation: int) -> None:
        link = self.links[shard]
        assert link.incarnation is None, "the worker before it was never reported down"
        link.incarnation = incarnation
        link.head = wire.message_head(incarnation)
        self.on_up(shard)

    def worker_down(self, shard: int) -> None:
        """Everything on its way to it is answered: what it may have done is not known."""
        link = self.links[shard]
        link.incarnation = None
        link.outbox, link.apart = [], []
        link.taken = 0
        pending, link.pending = link.pending, {}
        link.cost = 0
        for entry in pending.values():
            _answer(entry, _lost(entry.op, "this topic's shard stopped while it had the request"))
        self.on_down(shard)

    def expire(self, now_us: int) -> None:
        """Give up what has waited longer than any request may. Entries are in the order of their sending."""
        for link in self.links:
            while link.pending:
                number, entry = next(iter(link.pending.items()))
                if now_us - entry.received_us < GIVE_UP_US:
                    break
                del link.pending[number]
                link.cost -= entry.cost
                _answer(entry, _lost(entry.op, "this topic's shard did not answer in time"))

    def end_reads(self, before_us: int) -> None:
        """The server stops: long polls are not waited for. What a claim gets after this its lease gives back."""
        for link in self.links:
            for number, entry in list(link.pending.items()):
                if entry.op in POLLS and entry.received_us <= before_us:
                    del link.pending[number]
                    link.cost -= entry.cost
                    unknown: dict[str, object] = {"outcome": "unknown"}
                    detail = unknown if entry.op in wire.CHANGES else None
                    text = "the server is stopping; retry after it has restarted"
                    _answer(entry, refusal("shutting_down", text, detail))

    @property
    def in_flight(self) -> int:
        return sum(len(link.pending) for link in self.links)


def _answer(entry: Pending, reply: wire.Reply) -> None:
    try:
        entry.on_reply(reply)
    except Exception:  # or all that come after it in the message, and were acked, would never be answered
        logger.exception("an answer could not be passed on")


def _lost(op: int, message: str) -> wire.Reply:
    if op in wire.CHANGES:
        text = f"{message}; it may or may not have been carried out"
        return refusal("not_ready", text, {"outcome": "unknown"})
    return refusal("not_ready", f"{message}; try again shortly")
