"""What a shard says about itself to a front, which joins the shards' reports into one answer."""

from __future__ import annotations

import msgspec

FSYNC_BUCKETS_US = (50, 100, 250, 500, 1000, 5000, 10_000, 50_000, 100_000)
# One set of bounds for all that is timed: 100 µs is about what a request takes at least, 10 s what nobody waits for.
LATENCY_BUCKETS_US = (
    100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 10_000_000,
)  # fmt: skip
TOPIC_ROWS_MAX = 1000  # topics with metrics of their own; more than that would drown a scraper
CONSUMER_ROWS_MAX = (
    200  # named consumers with metrics of their own, of each shard: each is looked at for a scrape
)


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
    ready: int = 0  # of queues
    in_flight: int = 0
    oldest_ms: int = 0  # age of a queue's oldest job


class ConsumerRow(msgspec.Struct, array_like=True):
    """Of a named consumer whose topic is in memory."""

    topic: str
    consumer: str
    lag: int  # records that it wants and that were never handed out
    ack_pending: int
    lag_ms: int = -1  # age of the oldest of them; -1: not known without a search, because it has a filter


class Timed(msgspec.Struct, array_like=True):
    """A histogram: counts per bound of LATENCY_BUCKETS_US, and those beyond; and the sum."""

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
    queue_depth: int  # requests that wait for a turn or a sync
    queue_depth_peak: int
    fsync_micros_total: int
    fsync_buckets: list[int]  # counts per bound of FSYNC_BUCKETS_US, and those beyond
    topics: list[TopicRow]  # the first TOPIC_ROWS_MAX by name
    leases_in_flight: int = 0  # of queues
    consumers: int = 0  # that have names
    watch_sessions: int = 0
    streams_elsewhere: int = 0  # open at other fronts than the one that asks
    forwards: int = 0  # rules; of the shard that has the catalog
    copies: int = 0  # that topics of this shard have taken
    copy_batches: int = 0  # sent by this shard
    flows_owing: int = 0  # rules, by topic that they copy, with something that their dests do not have yet
    catch_ups: int = 0
    catch_ups_late: int = 0  # reads that were answered before their topic had caught up
    shard: int = 0
    pressure: float = 0.0
    pressure_refused: int = 0  # writes
    topics_waiting: int = 0  # for their turn to be delivered
    topics_paused: int = 0  # whose pushes wait for less pressure
    band_bytes: list[int] = []  # delivered by band, from B0 on, with what stands for work that is no bytes
    # Bytes of segments by tier: live, dead, and of these what a rewrite or a consolidation frees.
    tiers: dict[str, tuple[int, int, int]] = {}
    relocations: int = 0  # segments that went to the cold tier
    cold_fetches: int = 0
    cold_failures: int = 0  # of moves and fetches
    cold_readers: int = 0  # reads that wait for the cold tier
    merges: int = 0  # outputs of jobs that took the place of segments
    retired_segments: int = 0  # replaced ones that still have files
    retired_bytes: int = 0
    requests: dict[str, Timed] = {}  # by operation, of those that were carried out
    refusals: dict[str, int] = {}  # by code
    turns: Timed | None = None
    deliveries: Timed | None = None  # of live pages: how old their first record was
    tombstones: dict[str, int] = {}  # announced to readers, by reason
    consumer_rows: list[ConsumerRow] = []  # the first CONSUMER_ROWS_MAX by topic and name
    dead_lettered: int = 0  # by the topics and consumers that are there
    corrupt: int = 0  # records found damaged
    checkpoints: int = 0
    log_bytes: int = 0  # since the last of them
    disk_free: int = -1  # bytes; -1: nobody has looked
    txn_open: int = 0
    txn_bytes: int = 0  # staged in them
    txn_committed: int = 0
    txn_expired: int = 0
    txn_left: int = 0  # files that could not be removed; the next start does so

    @property
    def topic_count(self) -> int:
        return sum(self.topics_by_class.values())
