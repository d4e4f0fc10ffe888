"""Status and metrics of a shard, as sent to a front, which merges the reports of all shards."""

from __future__ import annotations

import msgspec

FSYNC_BUCKETS_US = (50, 100, 250, 500, 1000, 5000, 10_000, 50_000, 100_000)
# The same buckets for all latencies, from the fastest request (100 µs) to well beyond any client's timeout (10 s).
LATENCY_BUCKETS_US = (
    100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 10_000_000,
)  # fmt: skip
TOPIC_ROWS_MAX = 1000  # topics with metrics of their own; more would overload a scraper
CONSUMER_ROWS_MAX = 200  # named consumers per shard with metrics of their own; each scrape computes their lag


class Readiness(msgspec.Struct, array_like=True):
    progress: float  # of recovery, 1 when done
    topics: int
    read_only: str | None


class TopicRow(msgspec.Struct, array_like=True):
    topic: str
    is_queue: bool
    head_seq: int
    earliest_seq: int
    count: int
    bytes: int
    ready: int = 0  # queues only
    in_flight: int = 0
    oldest_ms: int = 0  # age of a queue's oldest job


class ConsumerRow(msgspec.Struct, array_like=True):
    """A named consumer whose topic is in memory."""

    topic: str
    consumer: str
    lag: int  # matching records that were never delivered
    ack_pending: int
    lag_ms: int = -1  # age of the oldest of them; -1: unknown, because a filter would need a search


class Timed(msgspec.Struct, array_like=True):
    """A latency histogram: a count for each of LATENCY_BUCKETS_US, one for slower requests, and the sum."""

    buckets: list[int]
    micros: int


class ShardReport(msgspec.Struct, array_like=True):
    progress: float
    read_only: bool
    disk_full: bool
    topics_by_class: dict[str, int]
    queue_topics: int
    records_live: int
    bytes_live: int
    frames: int
    batches: int
    fsyncs: int
    bytes_written: int
    rotations: int
    queue_depth: int  # requests waiting for a turn or a sync
    queue_depth_peak: int
    fsync_micros_total: int
    fsync_buckets: list[int]  # a count for each of FSYNC_BUCKETS_US, and one for slower syncs
    topics: list[TopicRow]  # the first TOPIC_ROWS_MAX by name
    leases_in_flight: int = 0  # queues only
    consumers: int = 0  # named ones
    watch_sessions: int = 0
    streams_elsewhere: int = 0  # streams open at other fronts than the requesting one
    forwards: int = 0  # rules; reported by the shard that hosts the catalog
    copies: int = 0  # accepted by topics of this shard
    copy_batches: int = 0  # sent by this shard
    flows_owing: int = 0  # pairs of a rule and a source topic with copies that the dest does not have yet
    catch_ups: int = 0
    catch_ups_late: int = 0  # reads answered before their topic had caught up
    shard: int = 0
    pressure: float = 0.0
    pressure_refused: int = 0  # writes
    topics_waiting: int = 0  # for their turn in the delivery scheduler
    topics_paused: int = 0  # whose pushes wait for lower pressure
    band_bytes: list[int] = []  # delivered by band, from B0 on; includes the byte equivalent of other work
    # Bytes of segments by tier: live, dead, and the part of the dead that a rewrite or a consolidation frees.
    tiers: dict[str, tuple[int, int, int]] = {}
    relocations: int = 0  # segments moved to the cold tier
    cold_fetches: int = 0
    cold_failures: int = 0  # of moves and fetches
    cold_readers: int = 0  # reads waiting for the cold tier
    merges: int = 0  # merge outputs that have replaced segments
    retired_segments: int = 0  # replaced segments whose files still exist
    retired_bytes: int = 0
    requests: dict[str, Timed] = {}  # executed requests, by operation
    refusals: dict[str, int] = {}  # by error code
    turns: Timed | None = None
    deliveries: Timed | None = None  # age of the first record of each live page
    tombstones: dict[str, int] = {}  # announced to readers, by reason
    consumer_rows: list[ConsumerRow] = []  # the first CONSUMER_ROWS_MAX by topic and name
    dead_lettered: int = 0  # by existing topics and consumers
    corrupt: int = 0  # records found damaged
    checkpoints: int = 0
    log_bytes: int = 0  # since the last checkpoint
    disk_free: int = -1  # bytes; -1: not measured yet
    txn_open: int = 0
    txn_bytes: int = 0  # staged in open transactions
    txn_committed: int = 0
    txn_expired: int = 0
    txn_left: int = 0  # files that could not be removed; removed at the next start
    clients: int = 0  # connections that the worker serves itself
    clients_taken: int = 0
    clients_returned: int = 0
    clients_refused: int = 0

    @property
    def topic_count(self) -> int:
        return sum(self.topics_by_class.values())
