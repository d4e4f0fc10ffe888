"""Server-wide caps on topics and bytes: each shard holds a share and requests more before it refuses a write.

Shard 0 hosts the Catalog; every shard, including 0, has an Escrow. Both are free of I/O: events in, messages out.

    Escrow → Catalog   Report   the shard's current grant, how many catalog messages it has seen, how much more it wants
    Catalog → Escrow   Grant    the answer to a want: how much more it may hold, perhaps after a delay
                       Recall   keep what is used, return the rest, and report

Safety. The catalog counts as *held* by a shard what it reported last, plus every grant it cannot have seen at that time (see
`seen`). A shard never uses more than it holds, so the total usage stays below the cap as long as the total held does. Only
usage that is discovered, not requested, can exceed it: at a start with a lowered cap, or in a topic with deferred replay.
Then nothing is granted until usage has fallen. What a dead shard held stays counted until its next incarnation reports.

A want is refused only if necessary. Wants are queued, first come first served. The first is granted from what is free, in
chunks while there is plenty. Otherwise the catalog recalls from all other shards and waits until each has answered *that*
recall; a shard that is down, or has begun a new session, counts as answered. Then it grants what it can, with `final` set: a
dimension whose want exceeds what is free gets nothing.

One report at a time. A want is outstanding until its Grant arrives. A Recall is nevertheless answered at once, with a report
that repeats the want against the lowered grant. It replaces the outstanding want, at the same position in the queue. If that
was answered in the meantime (by a Grant that `seen` does not cover), the repeated want is void: the shard will see the Grant
and ask again if it is not enough. So each want gets exactly one Grant, and two shards that recall from each other cannot
deadlock.

Messages between two processes arrive in order and are lost only when one of them dies. A session lasts from `Escrow.begin` to
the death of either side. Every message has the session number and the incarnation, and messages of older ones are ignored,
because a message to a dead worker may reach its successor.

When an append or put raises OverGrant, the worker parks it and calls `want` with everything the error says it needs, topics
and bytes together. None means that a want is already outstanding, or no catalog is known; the request just stays parked, in
order. On a Grant the worker calls `granted`, passes the new grant to the engine, and handles parked requests again from the
first on, before any newer message, until one raises OverGrant again. If that is the first and the Grant was final, its client
gets the error; otherwise the worker calls `want` for it. It also does so for the first after a `begin`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from topics.api import limits

UNLIMITED = 1 << 62


class QuotaReport(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """A shard's grant, and how much more it wants."""

    shard: int
    incarnation: int
    granted_topics: int
    granted_bytes: int
    want_topics: int = 0
    want_bytes: int = 0
    session: int = 1
    seen: int = 0  # catalog messages received in this session
    begins: bool = False  # the first report of a session


class QuotaGrant(msgspec.Struct, frozen=True, array_like=True, tag="grant"):
    """How much more a shard may hold. `final`: no more is available, even if more was wanted."""

    topics: int
    bytes: int
    final: bool
    incarnation: int = 1
    session: int = 1


class QuotaRecall(msgspec.Struct, frozen=True, array_like=True, tag="recall"):
    incarnation: int = 1
    session: int = 1


Message: TypeAlias = tuple[int, QuotaGrant | QuotaRecall]  # shard to send it to, message


@dataclass(slots=True)
class _ShardQuota:
    """The catalog's state about one shard."""

    incarnation: int
    session: int
    topics: int = 0  # held, as reported last
    bytes: int = 0
    sent: int = 0  # messages sent in this session
    recall: int = 0  # number of the last recall
    is_down: bool = False
    unseen: list[tuple[int, QuotaGrant]] = field(
        default_factory=list
    )  # grants in transit, with message numbers

    def held(self) -> tuple[int, int]:
        topics = self.topics + sum(grant.topics for _, grant in self.unseen)
        return topics, self.bytes + sum(grant.bytes for _, grant in self.unseen)


class Catalog:
    """Grants shares of the caps to the shards. A cap of 0 means unlimited."""

    def __init__(self, shards: int, max_topics: int, max_total_bytes: int) -> None:
        self._shards = shards
        self._topics_max = max_topics
        self._bytes_max = max_total_bytes
        self._quotas: dict[int, _ShardQuota] = {}
        self._waiting: dict[int, tuple[int, int]] = {}  # shard → wanted topics and bytes, in order of arrival
        self._recalled: list[int] | None = (
            None  # shards that have not answered the recall for the first want yet
        )

    def report(self, report: QuotaReport) -> list[Message]:
        """Process a shard's report; returns the messages to send."""
        quota = self._quota_for(report)
        if quota is None:
            return []
        quota.topics, quota.bytes = report.granted_topics, report.granted_bytes
        quota.unseen = [entry for entry in quota.unseen if entry[0] > report.seen]
        if self._recalled is not None and report.shard in self._recalled and report.seen >= quota.recall:
            self._recalled.remove(report.shard)
        wants = report.want_topics, report.want_bytes
        if (any(wants) or report.shard in self._waiting) and not quota.unseen:
            self._waiting[report.shard] = wants
        return self._serve()

    def shard_down(self, shard: int, incarnation: int | None = None) -> list[Message]:
        """A shard has died. It is no longer waited for, but what it holds stays counted.

        With `incarnation`, a late notice does not affect a later incarnation that has already begun.
        """
        quota = self._quotas.get(shard)
        if quota is None or (incarnation is not None and incarnation < quota.incarnation):
            return []
        quota.is_down = True
        self._withdraw(shard)
        return self._serve()

    def _quota_for(self, report: QuotaReport) -> _ShardQuota | None:
        """The state of the reporting shard; None if the report belongs to an old session."""
        quota = self._quotas.get(report.shard)
        if report.begins:
            if quota is not None and (report.incarnation, report.session) <= (
                quota.incarnation,
                quota.session,
            ):
                return None
            # A new session: no messages are in transit, and it holds what it reports, as after a recall.
            self._withdraw(report.shard)
            quota = self._quotas[report.shard] = _ShardQuota(report.incarnation, report.session)
            return quota
        if quota is None or quota.is_down:
            return None
        known = (report.incarnation, report.session) == (quota.incarnation, quota.session)
        return quota if known else None

    def _withdraw(self, shard: int) -> None:
        """Drop a shard's want and the recall it has not answered."""
        if self._waiting and next(iter(self._waiting)) == shard:
            self._recalled = None
        self._waiting.pop(shard, None)
        if self._recalled is not None and shard in self._recalled:
            self._recalled.remove(shard)

    def _serve(self) -> list[Message]:
        """Answer queued wants from the first on, as far as possible."""
        out: list[Message] = []
        if len(self._quotas) < self._shards:
            return out  # total usage is not known yet
        while self._waiting:
            shard, (topics, size) = next(iter(self._waiting.items()))
            free_topics, free_bytes = self._free()
            short = topics > max(free_topics, 0) or size > max(free_bytes, 0)
            if short and self._recalled is None:
                self._recall(shard, out)
            if short and self._recalled:
                break
            quota = self._quotas[shard]
            grant = QuotaGrant(
                self._share(topics, free_topics, self._topics_max, limits.GRANT_TOPICS_MAX),
                self._share(size, free_bytes, self._bytes_max, limits.GRANT_BYTES_MAX),
                short,
                quota.incarnation,
                quota.session,
            )
            self._grant(shard, grant, out)
        return out

    def _free(self) -> tuple[int, int]:
        held = [quota.held() for quota in self._quotas.values()]
        return (
            (self._topics_max or UNLIMITED) - sum(topics for topics, _ in held),
            (self._bytes_max or UNLIMITED) - sum(size for _, size in held),
        )

    def _share(self, want: int, free: int, cap: int, chunk_max: int) -> int:
        """The grant in one dimension: a chunk while there is one for every shard, else only what is wanted."""
        if not want or want > free:
            return 0
        chunk = max(1, min(chunk_max, (cap or UNLIMITED) // (4 * self._shards)))
        return max(want, chunk) if want + chunk * self._shards <= free else want

    def _recall(self, asker: int, out: list[Message]) -> None:
        self._recalled = []
        for shard, quota in sorted(self._quotas.items()):
            if shard != asker and not quota.is_down:
                quota.sent += 1
                quota.recall = quota.sent
                self._recalled.append(shard)
                out.append((shard, QuotaRecall(quota.incarnation, quota.session)))

    def _grant(self, shard: int, grant: QuotaGrant, out: list[Message]) -> None:
        quota = self._quotas[shard]
        quota.sent += 1
        quota.unseen.append((quota.sent, grant))
        out.append((shard, grant))
        del self._waiting[shard]
        self._recalled = None


class Escrow:
    """One shard's side: `topics` and `bytes` are its grant, which is the engine's limit."""

    def __init__(self, shard: int, incarnation: int) -> None:
        self.topics = 0
        self.bytes = 0
        self._shard = shard
        self._incarnation = incarnation
        self._session = 0
        self._seen = 0
        self._connected = False
        self._asked: tuple[int, int] | None = (
            None  # topics and bytes of the request with the outstanding want
        )

    @property
    def is_asking(self) -> bool:
        return self._asked is not None

    def begin(self, used_topics: int, used_bytes: int) -> QuotaReport:
        """Begin a session with a catalog: keep what is used, which returns any grant beyond that."""
        self._session += 1
        self._seen = 0
        self._connected = True
        self._asked = None
        self.topics, self.bytes = used_topics, used_bytes
        return self._report(begins=True)

    def want(self, topics: int, size: int, used_topics: int, used_bytes: int) -> QuotaReport | None:
        """Request the part of a request's needs that exceeds the grant.

        None while a want is outstanding or no catalog is known.
        """
        if self._asked is not None or not self._connected:
            return None
        self._asked = (topics, size)
        # Usage discovered after the start (a topic with deferred replay) counts as held.
        self.topics, self.bytes = max(self.topics, used_topics), max(self.bytes, used_bytes)
        report = self._ask(used_topics, used_bytes)
        if not report.want_topics and not report.want_bytes:
            return self._report(topics, size)  # it fits now; requested anyway, so that an answer arrives
        return report

    def granted(self, grant: QuotaGrant) -> bool:
        """Apply the answer to the outstanding want. Returns False if it belongs to an old session and is ignored."""
        if not self._is_current(grant):
            return False
        self._seen += 1
        self._asked = None
        self.topics += grant.topics
        self.bytes += grant.bytes
        return True

    def recalled(self, recall: QuotaRecall, used_topics: int, used_bytes: int) -> QuotaReport | None:
        """Keep what is used and report. None if the recall belongs to an old session."""
        if not self._is_current(recall):
            return None
        self._seen += 1
        self.topics, self.bytes = used_topics, used_bytes
        return self._ask(used_topics, used_bytes)

    def catalog_lost(self) -> None:
        """The catalog is gone: drop the outstanding want. The grant stays valid until `begin` with a new catalog."""
        self._connected = False
        self._asked = None

    def _is_current(self, message: QuotaGrant | QuotaRecall) -> bool:
        return self._connected and (message.incarnation, message.session) == (
            self._incarnation,
            self._session,
        )

    def _ask(self, used_topics: int, used_bytes: int) -> QuotaReport:
        """A report with what the outstanding want needs beyond the current grant."""
        topics, size = self._asked or (0, 0)
        return self._report(
            max(0, used_topics + topics - self.topics) if topics else 0,
            max(0, used_bytes + size - self.bytes) if size else 0,
        )

    def _report(self, want_topics: int = 0, want_bytes: int = 0, *, begins: bool = False) -> QuotaReport:
        return QuotaReport(
            self._shard,
            self._incarnation,
            self.topics,
            self.bytes,
            want_topics,
            want_bytes,
            self._session,
            self._seen,
            begins,
        )
