"""Caps over all shards, held in escrow: a shard spends what it was granted and asks for more before it refuses.

Shard 0 hosts the Catalog; every shard, 0 as well, has an Escrow. Both are pure: events in, messages out.

    Escrow → Catalog   Report   "I hold this grant, I have seen so many of your messages, I want this much more"
    Catalog → Escrow   Grant    the answer to a want: so much more, maybe after a while
                       Recall   "keep what you use, give back the rest, and report"

Safety. The catalog counts as *held* what a shard reported last plus every grant it cannot have seen when it did
(`seen` says which). A shard never uses more than it holds, so the sum of what is used stays below the cap as long as
the sum of what is held does; only usage that is found, not asked for, can exceed it (at the start under a lowered
cap, or in a topic whose replay was put off), and then nothing is granted until it has fallen. What a dead shard held stays counted until its next incarnation reports.

A want is refused only when it must be. Wants wait in one line, first come first served. The first of them is granted
from what is free, in chunks while there is plenty. Else the catalog recalls from all other shards and waits until
each has answered *that* recall; a shard that is down, or has begun anew, counts as answered. Then it grants what it
can, and `final` says that this is all there is: a dimension whose want exceeds what is free gets nothing.

One report at a time. A want is outstanding until its Grant arrives. A Recall is answered all the same, at once: by a
report that repeats the want for the lowered grant. It takes the place of the outstanding one, in the same place of
the line; but if that was answered meanwhile (a Grant that `seen` does not cover), its want is void, because the
shard will see that Grant and ask again if it is not enough. So each want gets one Grant, and two shards that recall
from each other cannot wait for each other.

Messages between a pair arrive in order and are lost only when one side dies. A session lasts from `Escrow.begin` to
the death of either side. Its number and the incarnation travel with every message, both ways, and what belongs to
an older one is ignored: a message to a dead worker may reach the next one.

What the shell does with an append or put that met OverGrant: park it, and `want` all that the error says it takes,
topics and bytes in one. None means that a want is outstanding (or no catalog is known): just park it, in order. On a
Grant: `granted`, hand the escrow's grant to the engine, then ask the parked ones again from the front, before the next
message is looked at, until one meets OverGrant once more. If the front itself does and the Grant was final, its client
gets the error; any other is `want`ed anew. After a `begin` the front is wanted anew as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from topics.api import limits

UNLIMITED = 1 << 62


class QuotaReport(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """What a shard holds, and how much more than that it wants."""

    shard: int
    incarnation: int
    granted_topics: int
    granted_bytes: int
    want_topics: int = 0
    want_bytes: int = 0
    session: int = 1
    seen: int = 0  # messages of the catalog that came in this session
    begins: bool = False  # the first of a session


class QuotaGrant(msgspec.Struct, frozen=True, array_like=True, tag="grant"):
    """How much more a shard may hold. `final`: this is all there is, what was wanted is not."""

    topics: int
    bytes: int
    final: bool
    incarnation: int = 1
    session: int = 1


class QuotaRecall(msgspec.Struct, frozen=True, array_like=True, tag="recall"):
    incarnation: int = 1
    session: int = 1


Message: TypeAlias = tuple[int, QuotaGrant | QuotaRecall]  # to which shard


@dataclass(slots=True)
class _ShardQuota:
    """What the catalog knows of one shard."""

    incarnation: int
    session: int
    topics: int = 0  # held, as reported last
    bytes: int = 0
    sent: int = 0  # messages of this session
    recall: int = 0  # number of the last recall
    is_down: bool = False
    unseen: list[tuple[int, QuotaGrant]] = field(default_factory=list)  # grants under way, by number

    def held(self) -> tuple[int, int]:
        topics = self.topics + sum(grant.topics for _, grant in self.unseen)
        return topics, self.bytes + sum(grant.bytes for _, grant in self.unseen)


class Catalog:
    """Grants shares of the caps to the shards. 0 means no cap."""

    def __init__(self, shards: int, max_topics: int, max_total_bytes: int) -> None:
        self._shards = shards
        self._topics_max = max_topics
        self._bytes_max = max_total_bytes
        self._quotas: dict[int, _ShardQuota] = {}
        self._waiting: dict[int, tuple[int, int]] = {}  # shard → what it wants, first come first
        self._recalled: list[int] | None = None  # who is yet to answer the recall for the first in line

    def report(self, report: QuotaReport) -> list[Message]:
        """A shard reports; returns what to send, and to whom."""
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
        """A shard has died. It is waited for no longer, and what it holds stays counted.

        With `incarnation` the news may come late: they do not touch a later one that has begun already.
        """
        quota = self._quotas.get(shard)
        if quota is None or (incarnation is not None and incarnation < quota.incarnation):
            return []
        quota.is_down = True
        self._withdraw(shard)
        return self._serve()

    def _quota_for(self, report: QuotaReport) -> _ShardQuota | None:
        """The seat that a report is about; None when it comes from a session that is over."""
        quota = self._quotas.get(report.shard)
        if report.begins:
            if quota is not None and (report.incarnation, report.session) <= (
                quota.incarnation,
                quota.session,
            ):
                return None
            # Begun anew: nothing is under way, and it holds what it says, as after a recall.
            self._withdraw(report.shard)
            quota = self._quotas[report.shard] = _ShardQuota(report.incarnation, report.session)
            return quota
        if quota is None or quota.is_down:
            return None
        known = (report.incarnation, report.session) == (quota.incarnation, quota.session)
        return quota if known else None

    def _withdraw(self, shard: int) -> None:
        """Forget what a shard wanted and what it was to answer."""
        if self._waiting and next(iter(self._waiting)) == shard:
            self._recalled = None
        self._waiting.pop(shard, None)
        if self._recalled is not None and shard in self._recalled:
            self._recalled.remove(shard)

    def _serve(self) -> list[Message]:
        """Answer the line from its front as far as can be."""
        out: list[Message] = []
        if len(self._quotas) < self._shards:
            return out  # nobody knows yet what is used
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
        """What is granted of one dimension: a chunk while all shards could have one, else just what is wanted."""
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
    """One shard's side: `topics` and `bytes` are its grant, the bound that its engine is given."""

    def __init__(self, shard: int, incarnation: int) -> None:
        self.topics = 0
        self.bytes = 0
        self._shard = shard
        self._incarnation = incarnation
        self._session = 0
        self._seen = 0
        self._connected = False
        self._asked: tuple[int, int] | None = None  # what the request takes that the outstanding want is for

    @property
    def is_asking(self) -> bool:
        return self._asked is not None

    def begin(self, used_topics: int, used_bytes: int) -> QuotaReport:
        """A catalog is there: start with what is used. What was granted beyond that returns by this."""
        self._session += 1
        self._seen = 0
        self._connected = True
        self._asked = None
        self.topics, self.bytes = used_topics, used_bytes
        return self._report(begins=True)

    def want(self, topics: int, size: int, used_topics: int, used_bytes: int) -> QuotaReport | None:
        """Ask for what a request takes on top of what is used, as far as it is not granted.

        None while a want is outstanding or no catalog is known.
        """
        if self._asked is not None or not self._connected:
            return None
        self._asked = (topics, size)
        # What came to light after the start (a topic whose replay was put off) counts as held: it is used.
        self.topics, self.bytes = max(self.topics, used_topics), max(self.bytes, used_bytes)
        report = self._ask(used_topics, used_bytes)
        if not report.want_topics and not report.want_bytes:
            return self._report(topics, size)  # it fits by now; asked all the same, so that an answer comes
        return report

    def granted(self, grant: QuotaGrant) -> bool:
        """The answer to the outstanding want. False when it belongs to a session that is over: ignore it."""
        if not self._is_current(grant):
            return False
        self._seen += 1
        self._asked = None
        self.topics += grant.topics
        self.bytes += grant.bytes
        return True

    def recalled(self, recall: QuotaRecall, used_topics: int, used_bytes: int) -> QuotaReport | None:
        """Keep what is used and report. None when the recall belongs to a session that is over."""
        if not self._is_current(recall):
            return None
        self._seen += 1
        self.topics, self.bytes = used_topics, used_bytes
        return self._ask(used_topics, used_bytes)

    def catalog_lost(self) -> None:
        """The outstanding want is void. The grant stays good until a new catalog is there: then `begin`."""
        self._connected = False
        self._asked = None

    def _is_current(self, message: QuotaGrant | QuotaRecall) -> bool:
        return self._connected and (message.incarnation, message.session) == (
            self._incarnation,
            self._session,
        )

    def _ask(self, used_topics: int, used_bytes: int) -> QuotaReport:
        """A report with what the outstanding want needs beyond the grant as it is now."""
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
