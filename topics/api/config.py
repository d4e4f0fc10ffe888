"""A topic's configuration, and what the engine itself is told at start."""

from __future__ import annotations

from typing import Literal

import msgspec

from topics.api import limits

Durability = Literal["ephemeral", "memory", "disk", "fsync"]


class TopicConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """Stored in full by every create and config frame; a field that is absent there has its default."""

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
    # Additive to the contract.
    cap_per_tag: int = 0
    max_record_bytes: int = 0
    # What acks of consumers do to records. A queue's own consumer deletes what it acks, whatever stands here.
    retention: Literal["limits", "interest", "work_queue"] = "limits"


class ConsumerConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """Stored with every change of it; a field that is absent there has its default."""

    ack: Literal["none", "all", "explicit"] = "explicit"
    ack_wait_ms: int = 30_000
    max_deliver: int = 0  # 0: without end
    backoff_ms: tuple[int, ...] = ()  # how long the lease of delivery 1, 2 … holds; the last one goes on
    filter: tuple[tuple[Literal["Eq", "Glob", "Subject"], str], ...] = ()  # any of them; none: every record
    deliver: Literal["all", "new", "last", "last_per_tag", "from_seq", "from_ts"] = "all"
    deliver_value: int = 0  # of from_seq and from_ts
    max_ack_pending: int = 1000
    max_waiting: int = 512
    headers_only: bool = False
    dead_letter: str | None = None
    inactive_ttl_ms: int = 0  # 0: it stays
    replay: Literal["instant", "original"] = "instant"


class EngineConfig(msgspec.Struct, frozen=True):
    """Where one shard's files are, and its bounds."""

    shard: int = 0
    shard_dir: str = "layout-1/shard-00"
    topics_dir: str = "topics"
    wal_file_bytes: int = 64 * limits.MIB
    segment_max_events: int = 10_000
    segment_max_bytes: int = 64 * limits.MIB
    segment_max_age_ms: int = 3_600_000
    snapshot_wal_bytes: int = 64 * limits.MIB
    snapshot_interval_ms: int = 60_000
    log_bytes_max: int = 0  # since the last checkpoint: records beyond it are refused; 0: no bound
    cache_bytes: int = 32 * limits.MIB
    memory_bytes_max: int = 256 * limits.MIB  # payloads that live in RAM only
    index_rows_max: int = 50_000_000  # rows resident before idle topics are put away
    inline_bytes: int = 4096  # a topic with no more frames than this rides in the snapshot and has no files
    rewrite_dead_share: float = 0.5  # a sealed segment with more dead bytes than this is rewritten
    reclaim_bytes_per_s: int = 32 * limits.MIB  # that rewriting reads and writes; 0: as fast as it can
    max_topics: int = 100_000
    max_total_bytes: int = 0
    min_free_bytes: int = 0  # below so much space on the disk appends are refused; 0: only when there is none
    reserve_bytes: int = 0  # held in a file that gives way when the disk is full; see reserve.py
    hot_retain_segments: int = 4  # the newest sealed segments of a topic that stay out of the cold tier
    hot_retain_bytes: int = 0  # a further bound on them; 0: none
    relocate_bytes_per_s: int = 32 * limits.MIB  # that move to the cold tier; 0: as fast as it can
    cold_cache_bytes: int = 32 * limits.MIB  # blocks of the cold tier that were read last
    cold_dir: str = ""  # where jobs find the cold tier; only told, never opened
    retire_grace_ms: int = 86_400_000  # how long the files of merged segments stay
    plan_ttl_ms: int = 7 * 86_400_000  # how long a plan that nobody has leased stays
    txn_bytes_max: int = 16 << 30  # staged in one transaction
    txn_shard_bytes_max: int = 64 << 30  # in all that are open
    verify: bool = False  # check every invariant after every turn
