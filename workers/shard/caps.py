"""Server-wide caps on topics and bytes: this shard's quota, and on shard 0 the catalog that distributes quotas.

A write beyond this shard's quota is parked while the worker requests more from the catalog, and retried when the grant
arrives. Only a final grant ("there is no more") leads to a 429. While the catalog cannot answer, because its shard or one
that it needs a report from is down, a parked write waits for PARK_US and then gets a 503.

Messages of the catalog are processed one at a time (`process_inbox`): after a grant, parked writes are retried before
the next message is read. Otherwise a recall right after a grant would take it away unused, over and over again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from topics.api.errors import OverGrant, TopicsError
from topics.engine.commands.topics import Command
from topics.engine.core.quotas import Catalog, Escrow, QuotaGrant, QuotaRecall, QuotaReport
from topics.engine.runtime.boundary import ShardEngine
from topics.link import wire
from workers.peers.links import PARK_US

PARKED_MAX = 10_000  # writes; further ones are refused

Push: TypeAlias = tuple[bytes, bytes]  # peer, message body

_encode = msgspec.msgpack.encode
_decode_report = msgspec.msgpack.Decoder(QuotaReport).decode
_decode_push = msgspec.msgpack.Decoder(QuotaGrant | QuotaRecall).decode


class Unavailable(TopicsError):
    code = "not_ready"


@dataclass(slots=True, eq=False)
class ParkedWrite:
    """A write that waits for quota. It keeps its time if it is retried and parked again."""

    since_us: int
    token: Any
    error: OverGrant


class Caps:
    def __init__(
        self, engine: ShardEngine, *, shard: int, shards: int, incarnation: int, now_us: Callable[[], int]
    ) -> None:
        config = engine.stats.config
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
        self._retries: list[ParkedWrite] = []  # for the next turn
        self._retried: dict[int, ParkedWrite] = {}  # those retried in this turn, by id() of the token
        self._requested_for: Any = None  # the token for which more quota was requested
        self._final: dict[int, Any] = {}  # tokens by id(): if over quota again, they are refused
        self._inbox: deque[QuotaGrant | QuotaRecall] = deque()
        self._pushes: list[Push] = []
        self.reports: list[bytes] = []  # for the catalog, if another worker hosts it

    # -- this shard ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """The shard has recovered: its usage is known."""
        self._serving = True
        if self.enabled:
            self._escrow.topics, self._escrow.bytes = self._used()  # until the catalog can grant more
            self._apply_grants()
            if self._catalog_is_up:
                self.catalog_up()

    def catalog_up(self) -> None:
        self._catalog_is_up = True
        if self.enabled and self._serving:
            self._report(self._escrow.begin(*self._used()))
            self._apply_grants()
            self._request_quota()
            self.process_inbox()

    def catalog_down(self) -> None:
        self._catalog_is_up = False
        self._escrow.catalog_lost()

    def park(self, token: Any, error: TopicsError) -> TopicsError | None:
        """Park a write that is over the quota. Returns None if it was parked, else the error to answer with."""
        if not isinstance(error, OverGrant) or not self.enabled:
            return error
        if id(token) in self._final:
            return error
        if len(self._parked) >= PARKED_MAX:
            return Unavailable("too many writes wait for quota under a server-wide cap; try again")
        before = self._retried.get(id(token))
        since_us = before.since_us if before is not None else self._now_us()
        self._parked.append(ParkedWrite(since_us, token, error))
        self._request_quota()
        return None

    @property
    def has_retries(self) -> bool:
        return bool(self._retries)

    def take_retries(self) -> list[tuple[Any, Command]]:
        retries, self._retries = self._retries, []
        self._retried = {id(entry.token): entry for entry in retries}
        return [(entry.token, entry.token[-1]) for entry in retries]

    def expired(self) -> list[tuple[Any, TopicsError]]:
        late = self._now_us() - PARK_US
        count = 0
        while count < len(self._parked) and self._parked[count].since_us <= late:
            count += 1
        gone, self._parked = self._parked[:count], self._parked[count:]
        error = Unavailable("the shards that enforce server-wide caps are not ready; try again shortly")
        return [(entry.token, error) for entry in gone]

    @property
    def wake_at_us(self) -> int | None:
        return self._parked[0].since_us + PARK_US if self._parked else None

    def _request_quota(self) -> None:
        """Request quota for the first parked write, unless it fits by now because space was freed."""
        if not self._parked or self._escrow.is_asking:
            return
        first = self._parked[0]
        if self._fits(first.error):
            self._retry_all()
            return
        report = self._escrow.want(first.error.topics, first.error.bytes, *self._used())
        self._apply_grants()  # usage may exceed the grant
        if report is not None:
            self._requested_for = first.token
            self._report(report)

    def _fits(self, error: OverGrant) -> bool:
        topics, size = self._used()
        return (not self._caps_topics or topics + error.topics <= self._escrow.topics) and (
            not self._caps_bytes or size + error.bytes <= self._escrow.bytes
        )

    def _retry_all(self) -> None:
        self._retries += self._parked
        self._parked = []

    def _used(self) -> tuple[int, int]:
        return self._engine.stats.used

    def _apply_grants(self) -> None:
        self._engine.set_quota(
            self._escrow.topics if self._caps_topics else None,
            self._escrow.bytes if self._caps_bytes else None,
        )

    def _report(self, report: QuotaReport) -> None:
        if self._catalog is not None:
            self._deliver(self._catalog.report(report))
        else:
            self.reports.append(_encode(report))

    # -- messages of the catalog ---------------------------------------------------------------------------

    def receive(self, body: wire.Buffer) -> None:
        try:
            self._inbox.append(_decode_push(body))
        except ValueError as error:
            raise wire.BadMessage(f"not a message of the catalog: {error}") from None
        self.process_inbox()

    @property
    def has_messages(self) -> bool:
        return bool(self._inbox)

    def process_inbox(self) -> None:
        """Process messages, up to a grant whose writes are not retried yet."""
        while self._inbox and not self._retries:
            message = self._inbox.popleft()
            if isinstance(message, QuotaRecall):
                self._on_recall(message)
            else:
                self._on_grant(message)

    def _on_recall(self, recall: QuotaRecall) -> None:
        report = self._escrow.recalled(recall, *self._used())
        self._apply_grants()
        if report is not None:
            self._report(report)

    def _on_grant(self, grant: QuotaGrant) -> None:
        if not self._escrow.granted(grant):
            return
        self._apply_grants()
        self._final = self._final_retries() if grant.final else {}
        self._requested_for = None
        self._retry_all()

    def _final_retries(self) -> dict[int, Any]:
        """The writes to refuse if they do not fit now: the first parked one, and all that need no less."""
        if not self._parked or self._parked[0].token is not self._requested_for:
            return {}  # the write that requested it has expired meanwhile
        first = self._parked[0].error
        return {
            id(entry.token): entry.token
            for entry in self._parked
            if entry.error.topics >= first.topics and entry.error.bytes >= first.bytes
        }

    # -- the catalog ---------------------------------------------------------------------------------------

    def receive_report(self, peer: bytes, body: wire.Buffer) -> None:
        if self._catalog is None:
            raise wire.BadMessage("a quota report reached a shard that does not host the catalog")
        try:
            report = _decode_report(body)
        except ValueError as error:
            raise wire.BadMessage(f"not a quota report: {error}") from None
        # The catalog counts the shards that have reported: reject unknown shards, and its own.
        if not 0 <= report.shard < self._shards or report.shard == self._shard:
            raise wire.BadMessage(f"a quota report of shard {report.shard}, of {self._shards}")
        known = self._peers.get(report.shard)
        if known is None or known[0] <= report.incarnation:  # the last report of a dead worker may come late
            self._peers[report.shard] = (report.incarnation, peer)
        self._deliver(self._catalog.report(report))
        self.process_inbox()

    def shard_down(self, shard: int, incarnation: int) -> None:
        """A worker has died. Its successor may have reported already: reports and deaths arrive on different channels."""
        if self._catalog is None or shard == self._shard:
            return
        known = self._peers.get(shard)
        if known is not None and known[0] <= incarnation:
            del self._peers[shard]
        self._deliver(self._catalog.shard_down(shard, incarnation))
        self.process_inbox()

    def _deliver(self, messages: list[tuple[int, QuotaGrant | QuotaRecall]]) -> None:
        for shard, message in messages:
            if shard == self._shard:
                self._inbox.append(message)
            elif shard in self._peers:
                self._pushes.append((self._peers[shard][1], _encode(message)))

    def pushes(self) -> list[Push]:
        pushes, self._pushes = self._pushes, []
        return pushes
