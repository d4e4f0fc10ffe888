"""Metrics of a shard: request latencies, refusals, syncs, and the report with the engine's counters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from topics.engine.commands import consumers as con
from topics.engine.commands import topics as cmd
from topics.engine.runtime.boundary import ShardEngine
from topics.engine.runtime.stats import ConsumerFigures, QueueTotals, TopicFigures
from topics.link import wire
from topics.link.reports import (
    CONSUMER_ROWS_MAX,
    FSYNC_BUCKETS_US,
    LATENCY_BUCKETS_US,
    TOPIC_ROWS_MAX,
    ConsumerRow,
    Readiness,
    ShardReport,
    Timed,
    TopicRow,
)

# Operations by their labels. A read that may wait is a "poll", because its client chooses how long it takes; "catch_up" is
# of streams that are behind.
OPERATIONS = wire.LABELLED | {"poll": frozenset(), "catch_up": frozenset((wire.WATCH_READ,))}
_WAITING = (wire.DIFF, wire.CLAIM)
_PAGES = (cmd.Page, cmd.FramePage, con.Claimed)


class Timer:
    __slots__ = ("buckets", "micros")

    def __init__(self) -> None:
        self.buckets = [0] * (len(LATENCY_BUCKETS_US) + 1)
        self.micros = 0

    def add(self, micros: int) -> None:
        self.micros += micros
        self.buckets[bisect_left(LATENCY_BUCKETS_US, micros)] += 1

    def timed(self) -> Timed:
        return Timed(self.buckets, self.micros)


@dataclass(slots=True)
class ClientCounts:
    """Connections that fronts have handed over."""

    open: int = 0
    taken: int = 0
    returned: int = 0
    refused: int = 0  # because of the limit


class ShardMetrics:
    def __init__(self, engine: ShardEngine, write_ns: Callable[[], int]) -> None:
        self._stats = engine.stats
        self._write_ns = write_ns  # duration of the last write to the log
        self.fsync_buckets = [0] * (len(FSYNC_BUCKETS_US) + 1)
        self.fsync_micros = 0
        self.queue_depth = 0
        self.queue_depth_peak = 0
        self.turns = Timer()
        self.clients = ClientCounts()
        self._deliveries = Timer()
        self._requests = {name: Timer() for name in OPERATIONS}
        self._by_op = {op: self._requests[name] for name, ops in OPERATIONS.items() for op in ops}
        self._refusals: dict[str, int] = {}
        self._tombstones: dict[str, int] = {}

    def append_ms(self) -> float:
        return self._write_ns() / 1e6

    def synced(self, took_ms: float) -> None:
        micros = int(took_ms * 1000)
        self.fsync_micros += micros
        self.fsync_buckets[bisect_left(FSYNC_BUCKETS_US, micros)] += 1

    def queued(self, depth: int) -> None:
        self.queue_depth = depth
        self.queue_depth_peak = max(self.queue_depth_peak, depth)

    def answered(self, op: int, command: cmd.Command, micros: int) -> None:
        """A request was executed, `micros` after the server received it."""
        timer = self._by_op.get(op)
        if timer is None:
            return  # from another worker, not from a client
        if op in _WAITING and command.wait_ms:  # type: ignore[union-attr]
            timer = self._requests["poll"]
        timer.add(micros)

    def refused(self, code: str) -> None:
        self._refusals[code] = self._refusals.get(code, 0) + 1

    def count_tombstone(self, result: object) -> None:
        """Count the tombstone, if any, in a page that is sent to a reader."""
        if isinstance(result, _PAGES) and result.tombstone is not None:
            reason = result.tombstone.reason
            self._tombstones[reason] = self._tombstones.get(reason, 0) + 1

    def delivered(self, result: object, since_turn_us: int) -> None:
        """A live page is sent to a feed, `since_turn_us` after its turn began."""
        if type(result) is cmd.Page and result.seqs:
            # int(): a large page has numpy integers, which msgspec cannot encode.
            age_ms = self._stats.now_ms - int(result.timestamps[0])
            self._deliveries.add(max(0, age_ms * 1000 + since_turn_us))

    def readiness(self, progress: float) -> Readiness:
        return Readiness(progress, self._stats.topics, self._stats.read_only)

    def report(self, progress: float) -> ShardReport:
        stats, counters = self._stats, self._stats.counters
        ready = progress >= 1.0
        totals = stats.queue_totals() if ready else QueueTotals(0, 0, 0, 0)
        retired_segments, retired_bytes = stats.retired
        fetches, failures, cold_readers = stats.cold_reads
        txn_open, txn_bytes = stats.transactions
        return ShardReport(
            progress=progress,
            read_only=stats.read_only is not None,
            disk_full=stats.is_full,
            topics_by_class=stats.topics_by_class if ready else {},
            queue_topics=totals.queues,
            records_live=stats.records_live if ready else 0,
            bytes_live=stats.bytes_live if ready else 0,
            frames=counters["frames"],
            batches=counters["batches"],
            fsyncs=counters["syncs"],
            bytes_written=counters["bytes_written"],
            rotations=counters["rotations"],
            queue_depth=self.queue_depth,
            queue_depth_peak=self.queue_depth_peak,
            fsync_micros_total=self.fsync_micros,
            fsync_buckets=self.fsync_buckets,
            topics=[_topic_row(one) for one in stats.topic_figures(TOPIC_ROWS_MAX)] if ready else [],
            leases_in_flight=totals.in_flight,
            consumers=totals.consumers,
            copies=counters.get("copies", 0),
            shard=stats.shard,
            topics_waiting=stats.backlog,
            topics_paused=stats.paused,
            band_bytes=stats.band_bytes,
            tiers=stats.tiers,
            relocations=counters.get("relocations", 0),
            cold_fetches=fetches,
            cold_failures=counters.get("cold_failures", 0) + failures,
            cold_readers=cold_readers,
            merges=counters.get("merges", 0),
            retired_segments=retired_segments,
            retired_bytes=retired_bytes,
            requests={name: timer.timed() for name, timer in self._requests.items()},
            refusals=self._refusals,
            turns=self.turns.timed(),
            deliveries=self._deliveries.timed(),
            tombstones=self._tombstones,
            consumer_rows=[_consumer_row(one) for one in islice(stats.consumer_figures(), CONSUMER_ROWS_MAX)]
            if ready
            else [],
            dead_lettered=totals.dead_lettered,
            corrupt=counters.get("corrupt", 0),
            checkpoints=counters["checkpoints"],
            log_bytes=stats.log_bytes,
            disk_free=stats.disk_free,
            txn_open=txn_open,
            txn_bytes=txn_bytes,
            txn_committed=counters["txn_committed"],
            txn_expired=counters["txn_expired"],
            txn_left=counters["txn_left"],
            clients=self.clients.open,
            clients_taken=self.clients.taken,
            clients_returned=self.clients.returned,
            clients_refused=self.clients.refused,
        )


def _topic_row(one: TopicFigures) -> TopicRow:
    row = TopicRow(one.name, one.is_queue, one.head, one.earliest, one.count, one.bytes)
    row.ready, row.in_flight, row.oldest_ms = one.ready, one.in_flight, one.oldest_ms
    return row


def _consumer_row(one: ConsumerFigures) -> ConsumerRow:
    row = ConsumerRow(one.topic, one.consumer, one.lag, one.pending)
    if one.lag_ms is not None:
        row.lag_ms = one.lag_ms
    return row
