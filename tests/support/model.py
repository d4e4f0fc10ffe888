"""The semantics of topics as plain dicts and lists; the engine must agree with it.

Written from the contract for clarity only: no index, no files, no slices. It imports nothing of the engine, so it
cannot share its mistakes. Every operation takes `now`, the engine's time. It returns a plain tuple whose first item
is its kind, or `Refused`; a refused operation changes nothing.

Decisions where the contract leaves room:

- `now - ts > ttl_ms` ends a record by the topic's TTL (strict, announced); `now > expires` ends it by its own
  (strict, without a tombstone). The earlier moment decides which of the two it was, not the time of a read.
- A dedupe key is known while `now - first_success <= idempotency_window_ms`.
- A refused write that would have created its topic leaves no topic behind.
- `keep` spares the newest N of all live records, or of each matching tag.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

Match = tuple[str, bytes]  # ("eq", tag) or ("prefix", text); ("prefix", b"") matches any tag


class Refused(NamedTuple):
    code: str
    actual: int | None = None  # of wrong_last_seq


class Gap(NamedTuple):
    """A tombstone. `earliest_seq` and the estimate are advisory and not modelled."""

    gap_from: int
    gap_to: int
    reason: str


class Loss(NamedTuple):
    first: int
    last: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rec:
    seq: int
    ts: int
    tag: bytes | None
    node: bytes | None
    payload: bytes
    size: int
    expires: int = 0

    def row(self) -> tuple[int, int, bytes | None, bytes | None, bytes]:
        return (self.seq, self.ts, self.tag, self.node, self.payload)


@dataclass(frozen=True, slots=True)
class NewRec:
    """A record as a writer sends it."""

    payload: bytes
    tag: bytes | None = None
    node: bytes | None = None
    ttl_ms: int = 0
    size: int | None = None

    def accounted(self) -> int:
        return len(self.payload) if self.size is None else self.size


@dataclass(frozen=True, slots=True)
class Conf:
    """The fields of a topic's config that matter here."""

    ttl_ms: int = 0
    cap_records: int = 0
    cap_bytes: int = 0
    discard: str = "old"
    durability: str = "disk"
    auto_create: bool = True
    idempotency_window_ms: int = 120_000
    dedupe_node: bool = True
    cap_per_tag: int = 0
    max_record_bytes: int = 0
    type: str = "log"


@dataclass(slots=True)
class PageView:
    rows: list[tuple[int, int, bytes | None, bytes | None, bytes]]
    next_from_seq: int  # the least that the reader may be told
    next_from_seq_max: int  # the most: dead seqs after the last row may count as examined
    head_seq: int
    earliest_seq: int
    gap: Gap | None


@dataclass(slots=True)
class Topic:
    conf: Conf
    instance: int
    head: int = 0
    live: dict[int, Rec] = field(default_factory=dict)  # ascending, because seqs are
    cap_high: int = 0  # highest seq lost to a cap
    ttl_high: int = 0  # highest seq lost to the topic's TTL
    losses: list[Loss] = field(default_factory=list)  # ascending, disjoint
    keys: dict[bytes, tuple[int, int, int, int]] = field(
        default_factory=dict
    )  # first success, first seq, count, head
    classes: set[str] = field(default_factory=set)  # every durability class it ever had
    ram_keys: set[bytes] = field(default_factory=set)  # keys that every restart forgets, with their records
    moved_keys: set[bytes] = field(
        default_factory=set
    )  # the same, until the class was changed: now forgotten only with their records

    def __post_init__(self) -> None:
        self.classes.add(self.conf.durability)

    def copy(self) -> Topic:
        """Records and configs are immutable, so only the containers are copied."""
        return replace(
            self,
            live=dict(self.live),
            losses=list(self.losses),
            keys=dict(self.keys),
            classes=set(self.classes),
            ram_keys=set(self.ram_keys),
            moved_keys=set(self.moved_keys),
        )

    @property
    def floor(self) -> int:
        return 1 + max(self.cap_high, self.ttl_high)

    @property
    def earliest(self) -> int:
        return next(iter(self.live), self.head + 1)

    @property
    def count(self) -> int:
        return len(self.live)

    @property
    def bytes(self) -> int:
        return sum(rec.size for rec in self.live.values())

    # ---- retention

    def expire(self, now: int) -> None:
        """Remove expired records; called first by every operation."""
        ttl = self.conf.ttl_ms
        for rec in list(self.live.values()):
            by_topic = rec.ts + ttl + 1 if ttl else None
            by_itself = rec.expires + 1 if rec.expires else None
            ends = min((end for end in (by_topic, by_itself) if end is not None), default=None)
            if ends is None or now < ends:
                continue
            del self.live[rec.seq]
            if ends == by_topic and by_topic != by_itself:
                self.ttl_high = max(self.ttl_high, rec.seq)
        window = self.conf.idempotency_window_ms
        self.keys = {key: known for key, known in self.keys.items() if window and now - known[0] <= window}

    def remember(self, key: bytes, known: tuple[int, int, int, int]) -> None:
        self.keys[key] = known
        self.ram_keys.discard(key)
        self.moved_keys.discard(key)
        if self.conf.durability == "ephemeral":
            self.ram_keys.add(key)

    def change(self, conf: Conf) -> None:
        self.conf = conf
        self.classes.add(conf.durability)
        if conf.durability != "ephemeral":  # a checkpoint may store what was in RAM
            self.moved_keys |= self.ram_keys
            self.ram_keys = set()

    def outlasts(self, key: bytes, seqs: set[int]) -> bool | None:
        """Whether the key is remembered after a restart that shows these records. None: its own records were dead
        before.
        """
        _, first, count, _ = self.keys[key]
        batch = set(range(first, first + count))
        if batch & seqs:
            return True
        return False if key in self.ram_keys or batch & self.live.keys() else None

    def trim(self) -> None:
        """Apply the caps: per tag without a tombstone, then from the front, announced."""
        if self.conf.cap_per_tag:
            for rec in self._all_but_newest(self.conf.cap_per_tag, per_tag=True, of=self.live.values()):
                del self.live[rec.seq]
        if self.conf.discard == "reject":
            return
        while self.live and self._over(self.count, self.bytes):
            seq = self.earliest
            del self.live[seq]
            self.cap_high = max(self.cap_high, seq)

    def _over(self, count: int, size: int) -> bool:
        conf = self.conf
        return bool(
            (conf.cap_records and count > conf.cap_records) or (conf.cap_bytes and size > conf.cap_bytes)
        )

    def _all_but_newest(self, keep: int, *, per_tag: bool, of: Iterable[Rec]) -> list[Rec]:
        seen: dict[bytes | None, int] = {}
        gone = []
        for rec in sorted(of, key=lambda rec: rec.seq, reverse=True):
            if per_tag and rec.tag is None:
                continue
            group = rec.tag if per_tag else None
            seen[group] = seen.get(group, 0) + 1
            if seen[group] > keep:
                gone.append(rec)
        return gone

    # ---- loss ranges

    def lose(self, first: int, last: int, reason: str) -> None:
        """A loss in the middle of live records. Adjacent losses with the same reason are one range."""
        if self.losses and self.losses[-1].last + 1 == first and self.losses[-1].reason == reason:
            first = self.losses.pop().first
        self.losses.append(Loss(first, last, reason))

    # ---- reading

    def diff(
        self,
        now: int,
        from_seq: int,
        *,
        limit: int = 256,
        max_bytes: int = 0,
        nodes: tuple[bytes, ...] = (),
        match: Match | None = None,
        from_ts: int = 0,
        frames: bool = False,
    ) -> PageView:
        """With `frames` the size of a page is counted in bytes of frames, which are not modelled: do not set
        `max_bytes`.
        """
        self.expire(now)
        if frames:
            limit, max_bytes = min(limit or 1_000_000, 1_000_000), 1 << 60
        else:
            limit, max_bytes = min(limit or 256, 1000), min(max_bytes or 1 << 20, 8 << 20)
        gap: Gap | None = None
        cursor = from_seq
        if from_seq > self.head:
            gap = Gap(1, self.head, "recreated")
            cursor = self._not_before(self.earliest - 1, from_ts)
        else:
            cursor = from_seq = self._not_before(from_seq, from_ts)
            if from_seq + 1 < self.floor:
                gap = Gap(from_seq + 1, self.floor - 1, self.reason_from(from_seq + 1))
                cursor = self.floor - 1
            for loss in self.losses:
                if gap is None and loss.first <= from_seq + 1 <= loss.last:
                    gap = Gap(from_seq + 1, loss.last, loss.reason)
                    cursor = loss.last
        end = min([loss.first - 1 for loss in self.losses if loss.first > cursor], default=self.head)
        end = max(end, cursor)

        rows: list[Rec] = []
        size = 0
        full_at: int | None = None
        for seq, rec in self.live.items():
            if not cursor < seq <= end:
                continue
            if self.conf.dedupe_node and rec.node is not None and rec.node in nodes:
                continue
            if match is not None and not tag_matches(rec.tag, match):
                continue
            if len(rows) == limit or (rows and size + rec.size > max_bytes):
                full_at = seq
                break
            rows.append(rec)
            size += rec.size
        if full_at is not None:
            low, high = rows[-1].seq, full_at - 1
        elif len(rows) == limit or (rows and size >= max_bytes):
            low, high = rows[-1].seq, end
        else:
            low = high = end
        return PageView([rec.row() for rec in rows], low, high, self.head, self.earliest, gap)

    def _not_before(self, from_seq: int, from_ts: int) -> int:
        """Where a read by time begins. It does not move when all live records are young enough, so gaps are still
        reported.

        A loss after the last record that is too old may have been young enough.
        """
        if not self.live or self.live[self.earliest].ts >= from_ts:
            return from_seq
        young = [rec.seq for rec in self.live.values() if rec.ts >= from_ts]
        start = min(young, default=self.head + 1)
        old = max(rec.seq for rec in self.live.values() if rec.ts < from_ts)
        start = min([start, *(loss.first for loss in self.losses if old < loss.first < start)])
        return max(from_seq, start - 1)

    def reason_from(self, gap_from: int) -> str:
        by_cap, by_ttl = self.cap_high >= gap_from, self.ttl_high >= gap_from
        return "mixed" if by_cap and by_ttl else "cap" if by_cap else "ttl"

    def matching(self, match: Match) -> list[Rec]:
        return [rec for rec in self.live.values() if tag_matches(rec.tag, match)]

    def view(self) -> tuple[object, ...]:
        """Everything visible to a reader, to compare two topics."""
        return (self.conf, self.head, tuple(self.live.values()), self.floor, tuple(self.losses))


def tag_matches(tag: bytes | None, match: Match) -> bool:
    kind, text = match
    if tag is None:
        return False
    return tag == text if kind == "eq" else tag.startswith(text)


class Model:
    """All topics of one shard."""

    def __init__(self) -> None:
        self.topics: dict[str, Topic] = {}
        self.instances = 0

    def copy(self) -> Model:
        twin = Model()
        twin.topics = {name: topic.copy() for name, topic in self.topics.items()}
        twin.instances = self.instances
        return twin

    def _make(self, conf: Conf) -> Topic:
        self.instances += 1
        return Topic(conf, self.instances)

    # ---- writes

    def append(
        self,
        now: int,
        name: str,
        records: list[NewRec],
        *,
        key: bytes | None = None,
        create: bool | None = None,
        conf: Conf | None = None,
        if_last_seq: int | None = None,
        if_tag_last_seq: tuple[bytes, int] | None = None,
    ) -> tuple[object, ...]:
        if not records or key == b"" or (key is not None and len(key) > 256):
            return Refused("invalid_request")
        if len(records) > 10_000:
            return Refused("batch_too_large")
        if any(len(rec.tag or b"") > 1024 or len(rec.node or b"") > 128 for rec in records):
            return Refused("invalid_request")
        if any(rec.accounted() > 1 << 20 for rec in records):
            return Refused("record_too_large")

        topic = self.topics.get(name)
        created = topic is None
        if topic is None:
            wanted = create if create is not None else (conf or Conf()).auto_create
            if not wanted:
                return Refused("topic_not_found")
            topic = Topic(conf or Conf(), 0)  # joins the others once the write is accepted
        topic.expire(now)
        if key is not None and key in topic.keys:
            _, first, count, head = topic.keys[key]
            return ("appended", first, count, head, False, True)
        if if_last_seq is not None and topic.head != if_last_seq:
            return Refused("wrong_last_seq", topic.head)
        if if_tag_last_seq is not None:
            tag, wanted_seq = if_tag_last_seq
            actual = max((rec.seq for rec in topic.live.values() if rec.tag == tag), default=0)
            if actual != wanted_seq:
                return Refused("wrong_last_seq", actual)
        if topic.conf.max_record_bytes and any(
            rec.accounted() > topic.conf.max_record_bytes for rec in records
        ):
            return Refused("record_too_large")
        if topic.conf.discard == "reject":
            size = sum(rec.accounted() for rec in records)
            if topic._over(len(records), size):
                return Refused("record_too_large")
            if topic._over(topic.count + len(records), topic.bytes + size):
                return Refused("topic_full")

        if created:
            topic = self.topics[name] = self._make(topic.conf)
        first = topic.head + 1
        for rec in records:
            topic.head += 1
            expires = now + rec.ttl_ms if rec.ttl_ms else 0
            topic.live[topic.head] = Rec(
                topic.head, now, rec.tag, rec.node, rec.payload, rec.accounted(), expires
            )
        if key is not None and topic.conf.idempotency_window_ms:
            topic.remember(key, (now, first, len(records), topic.head))
        topic.trim()
        return ("appended", first, len(records), topic.head, created, False)

    def skip(self, now: int, name: str, count: int) -> tuple[object, ...]:
        topic = self.topics.get(name)
        if topic is None:
            return Refused("topic_not_found")
        topic.expire(now)
        topic.head += count
        return ("skipped", topic.head - count + 1, count, topic.head)

    def delete(
        self,
        now: int,
        name: str,
        *,
        before_seq: int | None = None,
        match: Match | None = None,
        seqs: list[int] | None = None,
        keep: int | None = None,
    ) -> tuple[object, ...]:
        if before_seq is None and match is None and seqs is None and keep is None:
            return Refused("invalid_request")
        topic = self.topics.get(name)
        if topic is None:
            return Refused("topic_not_found")
        topic.expire(now)
        chosen = [
            rec
            for rec in topic.live.values()
            if (before_seq is None or rec.seq < before_seq)
            and (match is None or tag_matches(rec.tag, match))
            and (seqs is None or rec.seq in seqs)
        ]
        if keep is not None:
            chosen = topic._all_but_newest(keep, per_tag=match is not None, of=chosen)
        for rec in chosen:
            del topic.live[rec.seq]
        return ("deleted", len(chosen), topic.earliest, topic.head, topic.count, topic.bytes)

    def put(self, now: int, name: str, conf: Conf) -> tuple[object, ...]:
        topic = self.topics.get(name)
        if topic is None:
            self.topics[name] = self._make(conf)
            return ("put", True, conf)
        if topic.conf.type != conf.type:
            return Refused("topic_exists_incompatible")
        topic.expire(now)  # under the old config, so that a looser one brings nothing back
        topic.change(conf)
        topic.expire(now)
        topic.trim()
        return ("put", False, conf)

    def drop(self, now: int, name: str, *, if_empty: bool = False) -> tuple[object, ...]:
        topic = self.topics.get(name)
        if topic is None:
            return ("dropped", False)
        topic.expire(now)
        if if_empty and topic.live:
            return Refused("topic_not_empty")
        del self.topics[name]
        return ("dropped", True)

    # ---- reads

    def diff(
        self,
        now: int,
        name: str,
        from_seq: int = 0,
        *,
        limit: int = 256,
        max_bytes: int = 0,
        nodes: tuple[bytes, ...] = (),
        match: Match | None = None,
        from_ts: int = 0,
        frames: bool = False,
    ) -> PageView | Refused:
        topic = self.topics.get(name)
        if topic is None:
            return Refused("topic_not_found")
        return topic.diff(
            now,
            from_seq,
            limit=limit,
            max_bytes=max_bytes,
            nodes=nodes,
            match=match,
            from_ts=from_ts,
            frames=frames,
        )

    def state(self, now: int, name: str) -> tuple[object, ...]:
        topic = self.topics.get(name)
        if topic is None:
            return Refused("topic_not_found")
        topic.expire(now)
        return ("state", topic.head, topic.earliest, topic.count, topic.bytes, topic.conf)

    def list(self, now: int, *, prefix: str = "", after: str = "", limit: int = 100) -> tuple[object, ...]:
        names = sorted(name for name in self.topics if name.startswith(prefix) and name > after)
        return ("list", [(name, *self.state(now, name)[1:5]) for name in names[: limit + 1]])

    def last_by_tag(self, now: int, name: str, match: Match, *, each: bool = False) -> tuple[object, ...]:
        topic = self.topics.get(name)
        if topic is None:
            return Refused("topic_not_found")
        topic.expire(now)
        newest: dict[bytes | None, Rec] = {}
        for rec in topic.matching(match):
            newest[rec.tag] = rec
        rows = sorted(newest.values(), key=lambda rec: rec.seq)
        return ("rows", [rec.row() for rec in (rows if each else rows[-1:])])

    def next_by_tag(self, now: int, name: str, match: Match, from_seq: int) -> tuple[object, ...]:
        topic = self.topics.get(name)
        if topic is None:
            return Refused("topic_not_found")
        topic.expire(now)
        return ("rows", [rec.row() for rec in topic.matching(match) if rec.seq >= from_seq][:1])

    def count_by_tag(self, now: int, name: str, match: Match) -> tuple[object, ...]:
        topic = self.topics.get(name)
        if topic is None:
            return Refused("topic_not_found")
        topic.expire(now)
        counts: dict[bytes, int] = {}
        for rec in topic.matching(match):
            assert rec.tag is not None
            counts[rec.tag] = counts.get(rec.tag, 0) + 1
        return ("counts", sorted(counts.items()))
