"""What one worker has to say to the others: requests out with numbers, answers in. Pure: no socket, and the clock is given.

Events in: `tell`, `ask`, `receive` (a message from another worker), `set_peers` (who lives), `expire`. What comes out are
messages (`take_messages`) and, for each request that was accepted, exactly one call of its `on_answer`: with the answer,
or with None when nobody knows what became of it, because the other worker died or has said nothing for GIVE_UP_US.

A link is to one incarnation. What was on its way to a worker that is gone is never sent to the next one.

Bounds, per worker: requests on their way (REQUESTS_MAX) and their bytes (BYTES_MAX). `ask` says no beyond them, and when
there is no such worker; whoever asks comes back later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from topics.api.limits import MIB
from topics.link import wire

REQUESTS_MAX = 1024
BYTES_MAX = 48 * MIB  # copies and letters have bounds of their own, and questions must find room beside both
REQUEST_COST = 256  # what an entry takes beside its body
WINDOW_UPDATE_BYTES = 4 * MIB  # as a front does: a worker counts what it has sent until it hears of it

# A worker that has not begun a request by then refuses it. It may then be parked for a cap. Nobody gives up before both
# are over: what is sent again must not meet its older copy behind it.
BUDGET_MS = 10_000
PARK_US = 5_000_000
GIVE_UP_US = 30_000_000
assert GIVE_UP_US > BUDGET_MS * 1000 + PARK_US

Send: TypeAlias = Callable[[bytes, int, int, int, bytes, wire.Buffer], None]
OnAnswer: TypeAlias = Callable[[wire.Reply | None], None]
OnPush: TypeAlias = Callable[[int, wire.Reply], None]  # shard, what it says without having been asked
Message: TypeAlias = tuple[int, list[wire.Buffer]]  # shard, parts


@dataclass(slots=True)
class _Asked:
    cost: int
    asked_us: int
    on_answer: OnAnswer


@dataclass(slots=True, eq=False)
class _Link:
    """One living worker: what waits to be sent to it, and what waits for its answer, both in the order of asking."""

    incarnation: int
    small: list[bytes] = field(default_factory=list)  # items of the next message
    messages: list[list[wire.Buffer]] = field(default_factory=list)
    asked: dict[int, _Asked] = field(default_factory=dict)
    cost: int = 0
    taken: int = 0  # bytes of its messages, since it was told

    def add(self, head: bytes, body: bytes) -> None:
        self.small += (head, body)

    def add_apart(self, head: bytes, body: bytes) -> None:
        self.join()  # what came before goes before
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
        """Something without an answer, bounded by whoever tells it. A worker that is down need not hear it."""
        link = self._links.get(shard)
        if link is not None:
            link.add(wire.request_head(0, self._now_us(), 0, op, 0, b"", b"", len(body)), body)

    def ask(self, shard: int, op: int, topic: bytes, body: bytes, on_answer: OnAnswer) -> bool:
        """Whether it is on its way: only then there will be an answer."""
        link = self._links.get(shard)
        size = len(body)
        cost = size + REQUEST_COST
        if link is None or len(link.asked) >= REQUESTS_MAX or link.cost + cost > BYTES_MAX:
            return False
        self._last_number = number = self._last_number + 1
        now_us = self._now_us()
        link.asked[number] = _Asked(cost, now_us, on_answer)
        link.cost += cost
        if size >= wire.SEPARATE_BODY_BYTES:
            head = wire.request_head(number, now_us, BUDGET_MS, op, 0, topic, b"", wire.SEPARATE)
            link.add_apart(head, body)
        else:
            link.add(wire.request_head(number, now_us, BUDGET_MS, op, 0, topic, b"", size), body)
        return True

    def take_messages(self) -> list[Message]:
        """What waits to be sent, to each worker in the order of asking."""
        taken: list[Message] = []
        for shard, link in self._links.items():
            link.join()
            if link.messages:
                taken += [(shard, parts) for parts in link.messages]
                link.messages = []
        return taken

    # -- in ------------------------------------------------------------------------------------------------

    def receive(self, shard: int, message: bytes, apart: wire.Buffer | None = None) -> None:
        link = self._links.get(shard)
        if link is None or wire.read_message_head(message) != link.incarnation:
            return  # of a worker that is gone: its requests are answered
        for reply in wire.read_replies(message, apart):
            if reply.kind == wire.PUSH:
                self._on_push(shard, reply)
                continue
            asked = link.asked.pop(reply.id, None)
            if asked is not None:  # else it was given up
                link.cost -= asked.cost
                asked.on_answer(reply)
        link.taken += len(message) if apart is None else len(message) + len(apart)
        if link.taken >= WINDOW_UPDATE_BYTES:
            link.add(wire.window_update(link.taken), b"")
            link.taken = 0

    # -- lives, deaths and time ----------------------------------------------------------------------------

    def set_peers(self, living: dict[int, int]) -> None:
        """Which other workers live, as shard → incarnation."""
        gone = [shard for shard, link in self._links.items() if living.get(shard) != link.incarnation]
        lost = [asked for shard in gone for asked in self._links.pop(shard).asked.values()]
        for shard, incarnation in living.items():
            if shard not in self._links:
                self._links[shard] = _Link(incarnation)
        for asked in lost:
            asked.on_answer(None)

    def expire(self) -> None:
        """Give up what has waited for too long."""
        late_us = self._now_us() - GIVE_UP_US
        for link in self._links.values():
            while link.asked:
                number, asked = next(iter(link.asked.items()))
                if asked.asked_us > late_us:
                    break
                del link.asked[number]
                link.cost -= asked.cost
                asked.on_answer(None)

    @property
    def wake_at_us(self) -> int | None:
        """When the next request is to be given up."""
        oldest = [next(iter(link.asked.values())).asked_us for link in self._links.values() if link.asked]
        return min(oldest) + GIVE_UP_US if oldest else None
