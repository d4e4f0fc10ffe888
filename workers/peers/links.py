"""Requests to other workers, and their replies. Pure: no socket, and the clock is injected.

Inputs: `tell`, `ask`, `receive` (a message of another worker), `set_peers` (the running workers), `expire`. Outputs:
messages (`take_messages`) and, for each accepted request, exactly one call of its `on_reply`: with the reply, or with
None if the outcome is unknown, because the other worker died or has not replied for GIVE_UP_US.

A link belongs to one incarnation. Requests to a worker that has died are never sent to its successor.

Limits per worker: requests in flight (REQUESTS_MAX) and their bytes (BYTES_MAX). Beyond them, or if the worker is not
running, `ask` returns False and the caller tries again later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from topics.api.limits import MIB
from topics.link import wire

REQUESTS_MAX = 1024
BYTES_MAX = 48 * MIB  # copies and dead letters have smaller limits of their own, so other requests find room
REQUEST_COST = 256  # of an entry, besides its body
WINDOW_UPDATE_BYTES = 4 * MIB  # as in fronts: workers limit the replies that are not reported as received

# A worker refuses a request that it has not begun within its budget, and may then park it for a cap. A request is given
# up only after both, so that a retry cannot overtake the original.
BUDGET_MS = 10_000
PARK_US = 5_000_000
GIVE_UP_US = 30_000_000
assert GIVE_UP_US > BUDGET_MS * 1000 + PARK_US

Send: TypeAlias = Callable[[bytes, int, int, int, bytes, wire.Buffer], None]
OnReply: TypeAlias = Callable[[wire.Reply | None], None]
OnPush: TypeAlias = Callable[[int, wire.Reply], None]  # shard, a reply without a request
Message: TypeAlias = tuple[int, list[wire.Buffer]]  # shard, parts


@dataclass(slots=True)
class _InFlight:
    cost: int
    sent_us: int
    on_reply: OnReply


@dataclass(slots=True, eq=False)
class _Link:
    """A running worker: messages to send, and requests without a reply, both in the order of the calls."""

    incarnation: int
    small: list[bytes] = field(default_factory=list)  # items of the next message
    messages: list[list[wire.Buffer]] = field(default_factory=list)
    in_flight: dict[int, _InFlight] = field(default_factory=dict)
    cost: int = 0
    received: int = 0  # bytes of its messages since the last window update

    def add(self, head: bytes, body: bytes) -> None:
        self.small += (head, body)

    def add_separate(self, head: bytes, body: bytes) -> None:
        self.join()  # keep the order
        self.messages.append([wire.message_head(self.incarnation) + head, body])

    def join(self) -> None:
        if self.small:
            self.messages.append([b"".join((wire.message_head(self.incarnation), *self.small))])
            self.small = []


class PeerLinks:
    def __init__(self, now_us: Callable[[], int], on_push: OnPush) -> None:
        self._now_us = now_us
        self._on_push = on_push
        self._links: dict[int, _Link] = {}
        self._last_number = 0

    # -- out -----------------------------------------------------------------------------------------------

    def tell(self, shard: int, op: int, body: bytes) -> None:
        """Send a message without a reply, limited by the caller. Dropped if the worker is down."""
        link = self._links.get(shard)
        if link is not None:
            link.add(wire.request_head(0, self._now_us(), 0, op, 0, b"", b"", len(body)), body)

    def ask(self, shard: int, op: int, topic: bytes, body: bytes, on_reply: OnReply) -> bool:
        """Send a request. False: not accepted, and `on_reply` will not be called."""
        link = self._links.get(shard)
        size = len(body)
        cost = size + REQUEST_COST
        if link is None or len(link.in_flight) >= REQUESTS_MAX or link.cost + cost > BYTES_MAX:
            return False
        self._last_number = number = self._last_number + 1
        now_us = self._now_us()
        link.in_flight[number] = _InFlight(cost, now_us, on_reply)
        link.cost += cost
        if size >= wire.SEPARATE_BODY_BYTES:
            head = wire.request_head(
                number, now_us, BUDGET_MS, op, 0, topic, b"", wire.SEPARATE, wire.MSGPACK
            )
            link.add_separate(head, body)
        else:
            link.add(
                wire.request_head(number, now_us, BUDGET_MS, op, 0, topic, b"", size, wire.MSGPACK), body
            )
        return True

    def take_messages(self) -> list[Message]:
        """Messages to send; those to the same worker are in the order of the calls."""
        taken: list[Message] = []
        for shard, link in self._links.items():
            link.join()
            if link.messages:
                taken += [(shard, parts) for parts in link.messages]
                link.messages = []
        return taken

    # -- in ------------------------------------------------------------------------------------------------

    def receive(self, shard: int, message: bytes, separate: wire.Buffer | None = None) -> None:
        link = self._links.get(shard)
        if link is None or wire.read_message_head(message) != link.incarnation:
            return  # from a previous incarnation, whose requests are already given up
        for reply in wire.read_replies(message, separate):
            if reply.kind == wire.GRANT:
                self._on_push(shard, reply)
                continue
            request = link.in_flight.pop(reply.id, None)
            if request is not None:  # else it was given up
                link.cost -= request.cost
                request.on_reply(reply)
        link.received += len(message) if separate is None else len(message) + len(separate)
        if link.received >= WINDOW_UPDATE_BYTES:
            link.add(wire.window_update(link.received), b"")
            link.received = 0

    # -- peers and time ------------------------------------------------------------------------------------

    def set_peers(self, living: dict[int, int]) -> None:
        """The other running workers, as shard → incarnation."""
        gone = [shard for shard, link in self._links.items() if living.get(shard) != link.incarnation]
        lost = [request for shard in gone for request in self._links.pop(shard).in_flight.values()]
        for shard, incarnation in living.items():
            if shard not in self._links:
                self._links[shard] = _Link(incarnation)
        for request in lost:
            request.on_reply(None)

    def expire(self) -> None:
        """Give up requests that have waited for GIVE_UP_US."""
        late_us = self._now_us() - GIVE_UP_US
        for link in self._links.values():
            while link.in_flight:
                number, request = next(iter(link.in_flight.items()))
                if request.sent_us > late_us:
                    break
                del link.in_flight[number]
                link.cost -= request.cost
                request.on_reply(None)

    @property
    def wake_at_us(self) -> int | None:
        """When the oldest request is given up."""
        oldest = [
            next(iter(link.in_flight.values())).sent_us for link in self._links.values() if link.in_flight
        ]
        return min(oldest) + GIVE_UP_US if oldest else None
