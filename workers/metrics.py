"""What a shard counts, beyond what its engine counts itself."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import islice

from topics.engine.engine import Engine
from topics.engine.queries import state_of
from topics.engine.topic_log import TopicLog
from topics.reports import FSYNC_BUCKETS_US, TOPIC_ROWS_MAX, Readiness, ShardReport, TopicRow


class ShardMetrics:
    def __init__(self, engine: Engine, write_ns: Callable[[], int]) -> None:
        self._engine = engine
        self._write_ns = write_ns  # how long the last write to the log took
        self.fsync_buckets = [0] * (len(FSYNC_BUCKETS_US) + 1)
        self.fsync_micros = 0
        self.queue_depth = 0
        self.queue_depth_peak = 0

    def append_ms(self) -> float:
        return self._write_ns() / 1e6

    def synced(self, took_ms: float) -> None:
        micros = int(took_ms * 1000)
        self.fsync_micros += micros
        self.fsync_buckets[bisect_left(FSYNC_BUCKETS_US, micros)] += 1

    def queued(self, depth: int) -> None:
        self.queue_depth = depth
        self.queue_depth_peak = max(self.queue_depth_peak, depth)

    def readiness(self, progress: float) -> Readiness:
        shard = self._engine.shard
        return Readiness(progress, len(shard.published), shard.read_only)

    def report(self, progress: float) -> ShardReport:
        shard, counters = self._engine.shard, self._engine.counters
        ready = progress >= 1.0
        published = shard.published
        queues, in_flight = shard.queue_totals() if ready else (0, 0)
        retired_segments, retired_bytes = self._engine.consolidator.retirement.totals()
        rows = [self._row(published[name]) for name in islice(shard.names, TOPIC_ROWS_MAX)] if ready else []
        return ShardReport(
            progress=progress,
            read_only=shard.read_only is not None,
            disk_full=shard.disk_full or shard.low_space,
            topics_by_class=shard.class_counts() if ready else {},
            queue_topics=queues,
            records_live=shard.records_live if ready else 0,
            bytes_live=shard.bytes_live if ready else 0,
            frames=counters["frames"],
            batches=counters["batches"],
            fsyncs=counters["syncs"],
            bytes_written=counters["bytes_written"],
            rotations=counters["rotations"],
            queue_depth=self.queue_depth,
            queue_depth_peak=self.queue_depth_peak,
            fsync_micros_total=self.fsync_micros,
            fsync_buckets=self.fsync_buckets,
            topics=rows,
            leases_in_flight=in_flight,
            consumers=sum(map(_consumers_of, published.values())) if ready else 0,
            copies=counters.get("copies", 0),
            shard=self._engine.config.shard,
            topics_waiting=shard.backlog,
            topics_paused=len(shard.paused),
            band_bytes=[band.used for band in shard.scheduler.bands],
            tiers={
                tier: (usage.live, usage.dead, usage.reclaimable)
                for tier, usage in self._engine.checkpointer.usage.totals.items()
            },
            relocations=counters.get("relocations", 0),
            cold_fetches=self._engine.cold.fetches,
            cold_failures=counters.get("cold_failures", 0) + self._engine.cold.failures,
            cold_readers=self._engine.cold.waiting,
            merges=counters.get("merges", 0),
            retired_segments=retired_segments,
            retired_bytes=retired_bytes,
            txns_open=shard.open_transactions,
            txn_staged_bytes=shard.staged_bytes,
            txns_committed=counters["txn_committed"],
            txns_expired=counters["txn_expired"],
            txn_files_left=counters["txn_left"],
        )

    def _row(self, log: TopicLog) -> TopicRow:
        state = state_of(log)
        queue = self._engine.shard.queue_counts(log)
        row = TopicRow(
            state.topic, queue is not None, state.head_seq, state.earliest_seq, state.count, state.bytes
        )
        if queue is not None:
            row.ready, row.in_flight = queue.ready, queue.in_flight
        return row


def _consumers_of(log: TopicLog) -> int:
    return len(log.consumers.named) if log.consumers is not None else 0
