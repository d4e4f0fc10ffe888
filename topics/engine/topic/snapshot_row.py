"""Rows of a snapshot: the state of the shard, then one row for each topic. Both directions, capture and restore, are here.

What a feature keeps in them it captures and restores itself (`RowPart`). A row with state of a feature that the shard runs without
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from topics.api.config import TopicConfig
from topics.api.errors import FeatureAbsent
from topics.engine.commands.forwards import Forward
from topics.engine.storage.segments import SegmentMeta
from topics.engine.topic.consumer import ConsumerRow, DeadLettersRow
from topics.engine.topic.flows import Epochs, InflowRow, OutflowRow
from topics.engine.topic.log import Loss, Range, TopicLog
from topics.engine.topic.merges import Merges
from topics.engine.topic.transactions import TransactionsRow


class ShardRow(msgspec.Struct, array_like=True):
    """First row of a snapshot: state of the whole shard."""

    number: int
    base_lsn: int  # the topic rows contain every change up to this LSN
    next_id: int
    time_ceiling_ms: int
    now_ms: int
    mono_ms: int
    boot_id: str
    clean_lsn: int  # last LSN if the shutdown was clean, else 0
    forwards: list[Forward] = []  # only in the catalog's shard
    forward_uid: int = 0
    outflows: list[OutflowRow] = []
    first_id: int = 0  # see topic_ids.py
    adopted: bytes = b""
    others: bytes | None = None

    def features(self) -> Iterator[str]:
        """The features that have state in this row."""
        if self.forwards or self.outflows or self.forward_uid:
            yield "forwards"

    def restore_parts(self, parts: Mapping[str, RowPart], path: str) -> None:
        for feature in self.features():
            part_of(parts, feature, path).restore_shard(self)


class TopicRow(msgspec.Struct, array_like=True):
    """State of one topic in a snapshot."""

    id: int
    name: str
    config: TopicConfig
    applied_lsn: int
    head: int
    first_seq: int
    count: int
    live_bytes: int
    cap_lost: int
    ttl_lost: int
    losses: list[Loss]
    ceiling: int
    dedupe: list[tuple[bytes, tuple[int, int, int]]]
    segments: list[SegmentMeta]
    last_write_ts: int
    ram_ranges: list[Range]
    erasing: list[list[Range]]
    sum_chain: bytes
    may_expire: bool  # some records have their own TTL
    # First seq, number of rows and frames of a topic without segment files.
    inline: tuple[int, int, bytes] | None = None
    consumers: list[ConsumerRow] = []
    dead_letters: DeadLettersRow | None = None
    inflows: list[InflowRow] = []
    epochs: Epochs = []
    merges: Merges | None = None
    transactions: TransactionsRow | None = None
    is_trimmed: bool = True  # False: a per-tag cap was lowered and not enforced on all existing records yet

    @classmethod
    def capture(
        cls,
        log: TopicLog,
        parts: Iterable[RowPart],
        *,
        applied_lsn: int,
        now_ms: int,
        segments: list[SegmentMeta],
        ram_ranges: list[Range],
        inline: tuple[int, int, bytes] | None,
    ) -> TopicRow:
        """The staged state of a topic, whose records are in these segments, in RAM or in the row itself."""
        config = log.config
        row = cls(
            id=log.id,
            name=log.name,
            config=config,
            applied_lsn=applied_lsn,
            head=log.next_seq - 1,
            first_seq=log.first_seq,
            count=log.count,
            live_bytes=log.bytes,
            cap_lost=log.cap_lost,
            ttl_lost=log.ttl_lost,
            losses=log.logged_losses(),
            ceiling=log.ceiling,
            dedupe=log.dedupe.live(
                now_ms=now_ms,
                window_ms=config.idempotency_window_ms,
                stores_ram=config.durability != "ephemeral",
            ),
            segments=segments,
            last_write_ts=log.view.last_write_ts,
            ram_ranges=ram_ranges,
            erasing=list(log.erasing),
            sum_chain=log.sum_chain,
            may_expire=bool(log.expiries),
            inline=inline,
            epochs=list(log.epochs),
            is_trimmed=log.trim_from is None,
        )
        for part in parts:
            part.capture(log, row)
        return row

    def restore(self, log: TopicLog, parts: Mapping[str, RowPart], path: str) -> None:
        """Set the state of a new topic, staged and published. Its records are loaded when they are needed."""
        view = log.view
        view.head, view.first_seq, view.count, view.bytes = (
            self.head,
            self.first_seq,
            self.count,
            self.live_bytes,
        )
        view.cap_lost, view.ttl_lost, view.losses = self.cap_lost, self.ttl_lost, self.losses
        view.last_write_ts, log.applied_lsn = self.last_write_ts, self.applied_lsn
        log.next_seq, log.first_seq, log.count, log.bytes = (
            self.head + 1,
            self.first_seq,
            self.count,
            self.live_bytes,
        )
        log.cap_lost, log.ttl_lost = self.cap_lost, self.ttl_lost
        log.ceiling = log.ceiling_synced = self.ceiling
        log.sum_chain = self.sum_chain
        log.may_expire = self.may_expire
        log.dedupe.restore(self.dedupe)
        log.epochs = self.epochs
        log.erasing = self.erasing
        if not self.is_trimmed:
            log.trim_from = 0
        log.inline = self.inline
        if self.segments or self.inline is not None or self.ram_ranges:
            log.stored = self.segments
        for feature in self.features():
            part_of(parts, feature, path).restore(log, self)

    def features(self) -> Iterator[str]:
        """The features that have state in this row."""
        if self.consumers or self.dead_letters is not None:
            yield "consumers"
        if self.inflows:
            yield "forwards"
        if self.merges is not None:
            yield "merges"
        if self.transactions is not None:
            yield "transactions"


Skipped = msgspec.Raw


class TopicSegments(msgspec.Struct, array_like=True):
    """Prefix of a TopicRow that decodes only the id and the segments."""

    id: int
    name: Skipped
    config: Skipped
    applied_lsn: Skipped
    head: Skipped
    first_seq: Skipped
    count: Skipped
    live_bytes: Skipped
    cap_lost: Skipped
    ttl_lost: Skipped
    losses: Skipped
    ceiling: Skipped
    dedupe: Skipped
    segments: list[SegmentMeta]


@dataclass(frozen=True, slots=True)
class RowPart:
    """How a feature captures and restores what it keeps in the rows of a snapshot."""

    capture: Callable[[TopicLog, TopicRow], None]
    restore: Callable[[TopicLog, TopicRow], None]
    capture_shard: Callable[[ShardRow], None] = lambda row: None
    restore_shard: Callable[[ShardRow], None] = lambda row: None


def part_of(parts: Mapping[str, RowPart], feature: str, path: str) -> RowPart:
    part = parts.get(feature)
    if part is None:
        raise FeatureAbsent(path, feature)
    return part
