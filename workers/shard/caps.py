"""Caps over all shards, as one worker meets them: its own escrow, and on shard 0 the catalog as well.

A write that is over this shard's grant is parked while the catalog is asked for more, and asked again when the answer
is there. Only an answer that says "this is all there is" becomes a client's 429. While the catalog cannot answer (its
shard, or one that it needs to hear from, is down) a parked write waits for PARK_US and then gets a 503.

What the catalog says is heard one message at a time (`attend`): after a grant the parked writes have their turn before
the next is looked at. Otherwise a recall on the heels of a grant would take it away unused, over and over again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from topics.api.errors import OverGrant, TopicsError
from topics.engine.commands.topics import Command
from topics.engine.runtime.engine import Engine
from topics.engine.shard.quotas import Catalog, Escrow, QuotaGrant, QuotaRecall, QuotaReport
from topics.link import wire
from workers.peers.links import PARK_US

PARKED_MAX = 10_000  # writes; the next one is told to come back

Push: TypeAlias = tuple[bytes, bytes]  # peer, message body

_encode = msgspec.msgpack.encode
_decode_report = msgspec.msgpack.Decoder(QuotaReport).decode
_decode_push = msgspec.msgpack.Decoder(QuotaGrant | QuotaRecall).decode


class Unavailable(TopicsError):
    code = "not_ready"


@dataclass(slots=True, eq=False)
class ParkedWrite:
    """A write that waits for room. Asked again and parked again, it keeps its time."""

    since_us: int
    token: Any
    error: OverGrant


class Caps:
    def __init__(
        self, engine: Engine, *, shard: int, shards: int, incarnation: int, now_us: Callable[[], int]
    ) -> None:
        config = engine.config
        self._engine = engine
        self._shard = shard
        self._shards = shards
        self._now_us = now_us
        self._caps_topics = config.max_topics > 0
        self._caps_bytes = config.max_total_bytes > 0
        self.enabled = self._caps_topics or self._caps_bytes
        self._escrow = Escrow(shard, incarnation)
        self._catalog = Catalog(shards, config.max_topics, config.max_total_bytes) if shard == 0 else None
        self._peers: dict[int, tuple[int, bytes]] = {}  # shard → incarnation, its socket at the catalog
        self._catalog_is_up = shard == 0
        self._serving = False
        self._parked: list[ParkedWrite] = []
        self._again: list[ParkedWrite] = []  # to be asked again in the next turn
        self._retried: dict[int, ParkedWrite] = {}  # by the token's id: those that this turn asks again
        self._asked_for: Any = None  # the token that the outstanding want is for
        self._last_chance: dict[int, Any] = {}  # tokens by their ids, whose refusal would be final
        self._inbox: deque[QuotaGrant | QuotaRecall] = deque()
        self._pushes: list[Push] = []
        self.reports: list[bytes] = []  # for the catalog, when another worker hosts it

    # -- this shard ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """The shard has recovered: from here on it has a usage to report."""
        self._serving = True
        if self.enabled:
            self._escrow.topics, self._escrow.bytes = self._used()  # until there is a catalog to ask for more
            self._hand_over()
            if self._catalog_is_up:
                self.catalog_up()

    def catalog_up(self) -> None:
        self._catalog_is_up = True
        if self.enabled and self._serving:
            self._report(self._escrow.begin(*self._used()))
            self._hand_over()
            self._ask()
            self.attend()

    def catalog_down(self) -> None:
        self._catalog_is_up = False
        self._escrow.catalog_lost()

    def park(self, token: Any, error: TopicsError) -> TopicsError | None:
        """Keep a write that is over the grant; returns the error that is to be answered when it is not kept."""
        if not isinstance(error, OverGrant) or not self.enabled:
            return error
        if id(token) in self._last_chance:
            return error
        if len(self._parked) >= PARKED_MAX:
            return Unavailable("too many writes wait for room under a cap of the server; try again")
        before = self._retried.get(id(token))
        since_us = before.since_us if before is not None else self._now_us()
        self._parked.append(ParkedWrite(since_us, token, error))
        self._ask()
        return None

    @property
    def has_released(self) -> bool:
        return bool(self._again)

    def released(self) -> list[tuple[Any, Command]]:
        """Writes to ask again."""
        again, self._again = self._again, []
        self._retried = {id(entry.token): entry for entry in again}
        return [(entry.token, entry.token[-1]) for entry in again]

    def expired(self) -> list[tuple[Any, TopicsError]]:
        late = self._now_us() - PARK_US
        count = 0
        while count < len(self._parked) and self._parked[count].since_us <= late:
            count += 1
        gone, self._parked = self._parked[:count], self._parked[count:]
        error = Unavailable("the shards that keep the caps of the server are not ready; try again shortly")
        return [(entry.token, error) for entry in gone]

    @property
    def wake_at_us(self) -> int | None:
        return self._parked[0].since_us + PARK_US if self._parked else None

    def _ask(self) -> None:
        """Want what the first in line takes. If something was freed here meanwhile it may just fit."""
        if not self._parked or self._escrow.is_asking:
            return
        first = self._parked[0]
        if self._fits(first.error):
            self._release()
            return
        report = self._escrow.want(first.error.topics, first.error.bytes, *self._used())
        self._hand_over()  # it may have found more in use than was granted
        if report is not None:
            self._asked_for = first.token
            self._report(report)

    def _fits(self, error: OverGrant) -> bool:
        topics, size = self._used()
        return (not self._caps_topics or topics + error.topics <= self._escrow.topics) and (
            not self._caps_bytes or size + error.bytes <= self._escrow.bytes
        )

    def _release(self) -> None:
        self._again += self._parked
        self._parked = []

    def _used(self) -> tuple[int, int]:
        shard = self._engine.shard
        return len(
            shard.staged
        ) + shard.topics_unknown, shard.bytes_live + shard.bytes_reserved + shard.bytes_unknown

    def _hand_over(self) -> None:
        shard = self._engine.shard
        if self._caps_topics:
            shard.topics_granted = self._escrow.topics
        if self._caps_bytes:
            shard.bytes_granted = self._escrow.bytes

    def _report(self, report: QuotaReport) -> None:
        if self._catalog is not None:
            self._deliver(self._catalog.report(report))
        else:
            self.reports.append(_encode(report))

    # -- what the catalog says -----------------------------------------------------------------------------

    def receive(self, body: wire.Buffer) -> None:
        try:
            self._inbox.append(_decode_push(body))
        except ValueError as error:
            raise wire.BadMessage(f"not a word of the catalog: {error}") from None
        self.attend()

    @property
    def has_mail(self) -> bool:
        return bool(self._inbox)

    def attend(self) -> None:
        """Hear what has come, up to a grant whose writes are yet to be asked again."""
        while self._inbox and not self._again:
            message = self._inbox.popleft()
            if isinstance(message, QuotaRecall):
                self._hear_recall(message)
            else:
                self._hear_grant(message)

    def _hear_recall(self, recall: QuotaRecall) -> None:
        report = self._escrow.recalled(recall, *self._used())
        self._hand_over()
        if report is not None:
            self._report(report)

    def _hear_grant(self, grant: QuotaGrant) -> None:
        if not self._escrow.granted(grant):
            return
        self._hand_over()
        self._last_chance = self._refused() if grant.final else {}
        self._asked_for = None
        self._release()

    def _refused(self) -> dict[int, Any]:
        """What "this is all there is" means for those in line: the first, and all that take no less than it."""
        if not self._parked or self._parked[0].token is not self._asked_for:
            return {}  # the one that was asked for has given up meanwhile
        first = self._parked[0].error
        return {
            id(entry.token): entry.token
            for entry in self._parked
            if entry.error.topics >= first.topics and entry.error.bytes >= first.bytes
        }

    # -- the catalog ---------------------------------------------------------------------------------------

    def receive_report(self, peer: bytes, body: wire.Buffer) -> None:
        if self._catalog is None:
            raise wire.BadMessage("a report for the catalog came to a shard that does not host it")
        try:
            report = _decode_report(body)
        except ValueError as error:
            raise wire.BadMessage(f"not a report: {error}") from None
        # The catalog counts whom it has heard: nobody may speak who does not exist, nor in its own name.
        if not 0 <= report.shard < self._shards or report.shard == self._shard:
            raise wire.BadMessage(f"a report of shard {report.shard}, of {self._shards}")
        known = self._peers.get(report.shard)
        if known is None or known[0] <= report.incarnation:  # the last words of a dead worker may come late
            self._peers[report.shard] = (report.incarnation, peer)
        self._deliver(self._catalog.report(report))
        self.attend()

    def shard_down(self, shard: int, incarnation: int) -> None:
        """A worker has died. Its successor may have reported already: the two pieces of news come by different ways."""
        if self._catalog is None or shard == self._shard:
            return
        known = self._peers.get(shard)
        if known is not None and known[0] <= incarnation:
            del self._peers[shard]
        self._deliver(self._catalog.shard_down(shard, incarnation))
        self.attend()

    def _deliver(self, messages: list[tuple[int, QuotaGrant | QuotaRecall]]) -> None:
        for shard, message in messages:
            if shard == self._shard:
                self._inbox.append(message)
            elif shard in self._peers:
                self._pushes.append((self._peers[shard][1], _encode(message)))

    def pushes(self) -> list[Push]:
        pushes, self._pushes = self._pushes, []
        return pushes
