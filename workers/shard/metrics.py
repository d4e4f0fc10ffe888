"""Metrics of a shard: request latencies, refusals, syncs, and the report with the engine's counters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import islice

from topics.engine.commands import consumers as con
from topics.engine.commands import topics as cmd
from topics.engine.runtime.engine import Engine
from topics.engine.shard.reads import state_of
from topics.engine.topic.log import TopicLog
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

# Operation names in metrics. A read that may wait is a "poll", because its client chooses how long it takes.
OPERATIONS: dict[str, tuple[int, ...]] = {
    "write": (wire.WRITE, wire.WRITE_LINES, wire.WRITE_RAW),
    "read": (wire.DIFF, wire.LAST_BY_TAG, wire.COUNT_BY_TAG, wire.LIST_DELETED),
    "poll": (),
    "catch_up": (wire.WATCH_READ,),  # by a stream that is behind
    "claim": (wire.CLAIM,),
    "settle": (wire.ACK, wire.NACK, wire.EXTEND, wire.TERM),
    "delete": (wire.DELETE,),
    "topic": (wire.PUT_TOPIC, wire.GET_TOPIC, wire.DROP_TOPIC, wire.LIST_TOPICS),
    "consumer": (
        wire.PUT_CONSUMER, wire.GET_CONSUMER, wire.LIST_CONSUMERS, wire.DROP_CONSUMER, wire.PAUSE_CONSUMER,
        wire.RESET_CONSUMER,
    ),
    "transaction": (wire.TXN_BEGIN, wire.TXN_STAGE, wire.TXN_COMMIT, wire.TXN_ABORT),
    "consolidation": (wire.CONSOLIDATE,),
}  # fmt: skip
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


class ShardMetrics:
    def __init__(self, engine: Engine, write_ns: Callable[[], int]) -> None:
        self._engine = engine
        self._write_ns = write_ns  # duration of the last write to the log
        self.fsync_buckets = [0] * (len(FSYNC_BUCKETS_US) + 1)
        self.fsync_micros = 0
        self.queue_depth = 0
        self.queue_depth_peak = 0
        self.turns = Timer()
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
            age_ms = self._engine.clock.now_ms - int(result.timestamps[0])
            self._deliveries.add(max(0, age_ms * 1000 + since_turn_us))

    def readiness(self, progress: float) -> Readiness:
        shard = self._engine.shard
        return Readiness(progress, len(shard.state.published), shard.state.read_only)

    def report(self, progress: float) -> ShardReport:
        shard, counters = self._engine.shard, self._engine.counters
        ready = progress >= 1.0
        published, transactions = shard.state.published, shard.transactions
        queues, in_flight = shard.consumers.queue_totals() if ready else (0, 0)
        retired_segments, retired_bytes = self._engine.merge_service.retirement.totals()
        rows = (
            [self._row(published[name]) for name in islice(shard.state.names, TOPIC_ROWS_MAX)]
            if ready
            else []
        )
        consumers, dead_lettered = self._consumer_totals() if ready else (0, 0)
        return ShardReport(
            progress=progress,
            read_only=shard.state.read_only is not None,
            disk_full=shard.state.disk_full or shard.state.low_space,
            topics_by_class=shard.state.class_counts() if ready else {},
            queue_topics=queues,
            records_live=shard.state.records_live if ready else 0,
            bytes_live=shard.state.bytes_live if ready else 0,
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
            consumers=consumers,
            copies=counters.get("copies", 0),
            shard=self._engine.config.shard,
            topics_waiting=shard.delivery.backlog,
            topics_paused=len(shard.delivery.paused),
            band_bytes=[band.used for band in shard.delivery.scheduler.bands],
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
            requests={name: timer.timed() for name, timer in self._requests.items()},
            refusals=self._refusals,
            turns=self.turns.timed(),
            deliveries=self._deliveries.timed(),
            tombstones=self._tombstones,
            consumer_rows=list(islice(self._consumer_rows(), CONSUMER_ROWS_MAX)) if ready else [],
            dead_lettered=dead_lettered,
            corrupt=counters.get("corrupt", 0),
            checkpoints=counters["checkpoints"],
            log_bytes=self._engine.checkpointer.log_bytes,
            disk_free=self._engine.free_bytes,
            txn_open=transactions.open_transactions if transactions is not None else 0,
            txn_bytes=transactions.staged_bytes if transactions is not None else 0,
            txn_committed=counters["txn_committed"],
            txn_expired=counters["txn_expired"],
            txn_left=counters["txn_left"],
        )

    def _row(self, log: TopicLog) -> TopicRow:
        state = state_of(log)
        queue = self._engine.shard.consumers.queue_counts(log)
        row = TopicRow(
            state.topic, queue is not None, state.head_seq, state.earliest_seq, state.count, state.bytes
        )
        if queue is not None:
            row.ready, row.in_flight = queue.ready, queue.in_flight
            oldest = log.find(state.earliest_seq) if state.count else None
            if oldest is not None:
                row.oldest_ms = max(0, self._engine.clock.present_ms() - oldest[0].ts_at(oldest[1]))
        return row

    def _consumer_totals(self) -> tuple[int, int]:
        """Number of named consumers, and records dead-lettered by them and by queues."""
        count = dead_lettered = 0
        for log in self._engine.shard.state.published.values():
            consumers = log.consumers
            if consumers is not None:
                count += len(consumers.named)
                dead_lettered += consumers.dead_lettered
                dead_lettered += sum(one.counters.dead_lettered for one in consumers.named.values())
        return count, dead_lettered

    def _consumer_rows(self) -> Iterator[ConsumerRow]:
        shard = self._engine.shard
        for name in shard.state.names:
            log = shard.state.published[name]
            # The lag of a consumer of an unloaded topic is not known without loading it.
            if log.consumers is None or log.stored is not None or log.deferred:
                continue
            for consumer_name in sorted(log.consumers.named):
                consumer = log.consumers.named[consumer_name]
                lag = shard.leases.known_lag(log, consumer)
                if lag is None:
                    continue
                row = ConsumerRow(name, consumer_name, lag, len(consumer.entries))
                if consumer.filter is None:
                    row.lag_ms = (
                        shard.consumers.lag_ms(log, consumer, self._engine.clock.present_ms()) if lag else 0
                    )
                yield row
