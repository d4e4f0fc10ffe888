"""Configuration of topics, consumers and the engine."""

from __future__ import annotations

from typing import Literal

import msgspec

from topics.api import limits

Durability = Literal["ephemeral", "memory", "disk", "fsync"]


class TopicConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """Configuration of a topic. Every create and config frame stores all of it; an absent field has its default."""

    type: Literal["log", "queue"] = "log"
    ttl_ms: int = 0
    cap_records: int = 0
    cap_bytes: int = 0
    discard: Literal["old", "reject"] = "old"
    durability: Durability = "disk"
    priority: int | None = None
    auto_priority: bool = True
    auto_create: bool = True
    idempotency_window_ms: int = 120_000
    dedupe_node: bool = True
    lease_ms: int = 30_000
    claim_jitter_ms: int = 0
    max_deliveries: int = 0
    dead_letter: str | None = None
    leases_durable: bool = False
    cap_per_tag: int = 0
    max_record_bytes: int = 0
    # When acks of consumers delete records. A queue's own consumer always deletes what it acks.
    retention: Literal["limits", "interest", "work_queue"] = "limits"


class ConsumerConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """Configuration of a consumer. Every change stores all of it; an absent field has its default."""

    ack: Literal["none", "all", "explicit"] = "explicit"
    ack_wait_ms: int = 30_000
    max_deliver: int = 0  # 0: unlimited
    backoff_ms: tuple[int, ...] = ()  # lease of delivery 1, 2, …; the last one applies to all further ones
    filter: tuple[tuple[Literal["Eq", "Glob", "Subject"], str], ...] = ()  # any of them; empty: every record
    deliver: Literal["all", "new", "last", "last_per_tag", "from_seq", "from_ts"] = "all"
    deliver_value: int = 0  # of from_seq and from_ts
    max_ack_pending: int = 1000
    max_waiting: int = 512
    headers_only: bool = False
    dead_letter: str | None = None
    inactive_ttl_ms: int = 0  # 0: never removed
    replay: Literal["instant", "original"] = "instant"


class EngineConfig(msgspec.Struct, frozen=True):
    """Configuration of one shard's engine: paths and limits."""

    shard: int = 0
    shard_dir: str = "layout-1/shard-00"
    topics_dir: str = "topics"
    wal_file_bytes: int = 64 * limits.MIB
    segment_max_events: int = 10_000
    segment_max_bytes: int = 64 * limits.MIB
    segment_max_age_ms: int = 3_600_000
    snapshot_wal_bytes: int = 64 * limits.MIB
    snapshot_interval_ms: int = 60_000
    log_bytes_max: int = 0  # since the last checkpoint; writes beyond it are refused; 0: no limit
    cache_bytes: int = 32 * limits.MIB
    memory_bytes_max: int = 256 * limits.MIB  # payloads that are only in memory
    index_rows_max: int = 50_000_000  # rows in memory before idle topics are unloaded
    inline_bytes: int = 4096  # a topic with fewer bytes of frames is stored in the snapshot, without files
    rewrite_dead_share: float = 0.5  # a sealed segment with a larger share of dead bytes is compacted
    reclaim_bytes_per_s: int = 32 * limits.MIB  # read and written by compaction; 0: no limit
    max_topics: int = 100_000
    max_total_bytes: int = 0
    min_free_bytes: int = 0  # appends are refused with less free disk space; 0: only when there is none
    reserve_bytes: int = 0  # size of a file that is released when the disk is full; see reserve.py
    hot_retain_segments: int = 4  # newest sealed segments of a topic that stay out of the cold tier
    hot_retain_bytes: int = 0  # limit on their bytes; 0: none
    relocate_bytes_per_s: int = 32 * limits.MIB  # moved to the cold tier; 0: no limit
    cold_cache_bytes: int = 32 * limits.MIB  # cache of recently read cold blocks
    cold_dir: str = ""  # reported to jobs, never opened by the engine
    retire_grace_ms: int = 86_400_000  # how long the files of merged segments are kept
    plan_ttl_ms: int = 7 * 86_400_000  # how long an unleased plan is kept
    txn_bytes_max: int = 16 << 30  # staged per transaction
    txn_shard_bytes_max: int = 64 << 30  # staged in all open transactions
    verify: bool = False  # check every invariant after every turn
