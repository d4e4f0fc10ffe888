"""Responses about topics and records.

These types are not used for encoding: the hot responses are assembled from bytes. A field that may be absent is
`UnsetType`; one that may be `null` has `| None`. Clients ignore unknown fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from topics.api.config import Durability
from topics.api.http_errors import STATUS
from topics.api.requests import U64_MAX

Count = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": U64_MAX})]
Seq = Annotated[int, Meta(ge=1, extra_json_schema={"maximum": U64_MAX})]
EpochText = Annotated[
    str,
    Meta(
        description="Identifies the topic among those that have had this name and, for `memory` and `ephemeral`, how often its head went "
        "back. Opaque; send it with a cursor."
    ),
]
TimeMs = Annotated[int, Meta(ge=0, description="Milliseconds since the Unix epoch.")]
HeadSeq = Annotated[Count, Meta(description="Highest seq of the topic; 0 before the first record.")]
EarliestSeq = Annotated[
    Seq, Meta(description="First seq that still exists; `head_seq` + 1 if there is none.")
]
NextCursor = (
    Annotated[str, Meta(description="`cursor` of the next page; absent on the last page.")] | UnsetType
)
Milliseconds = Annotated[float, Meta(ge=0)]


class Performance(Struct):
    """Time spent on the request."""

    server_total_ms: Milliseconds


class WritePerformance(Struct):
    """Time spent on the write. `fsync_ms` is 0 unless the answer waited for a sync."""

    server_total_ms: Milliseconds
    wal_append_ms: Milliseconds
    fsync_ms: Milliseconds
    throttle_wait_ms: (
        Annotated[float, Meta(ge=0, description="Time added by a delayed sync.")] | UnsetType
    ) = UNSET
    pressure: Annotated[float, Meta(ge=0, le=1, description="Present above 0.2.")] | UnsetType = UNSET


class DiffPerformance(Struct):
    """Time spent on the read, and the number of rows it scanned."""

    server_total_ms: Milliseconds
    records_scanned: Count
    cold_segments_read: (
        Annotated[Count, Meta(description="Segments read from the cold tier; present if above 0.")]
        | UnsetType
    ) = UNSET


class Config(Struct):
    """The effective configuration of a topic."""

    type: Literal["log", "queue"]
    ttl_ms: Count
    cap_records: Count
    cap_bytes: Count
    discard: Literal["old", "reject"]
    durable: Annotated[bool, Meta(description="Whether `durability` is `fsync`.")]
    durability: Durability
    priority: int | None
    auto_priority: bool
    auto_create: bool
    idempotency_window_ms: Count
    dedupe_node: bool
    lease_ms: Annotated[int, Meta(ge=100, le=86_400_000)]
    claim_jitter_ms: Annotated[int, Meta(ge=0, le=5_000)]
    max_deliveries: Count
    dead_letter: str | None
    leases_durable: bool
    cap_per_tag: Annotated[Seq, Meta(description="Present if set.")] | UnsetType = UNSET
    max_record_bytes: Annotated[Seq, Meta(description="Present if set.")] | UnsetType = UNSET
    retention: (
        Annotated[Literal["interest", "work_queue"], Meta(description="Present if it is not `limits`.")]
        | UnsetType
    ) = UNSET


class TopicPut(Struct):
    """A topic that was created, or whose configuration was replaced."""

    topic: str
    created: bool
    config: Config
    performance: Performance


class QueueState(Struct):
    ready: Count
    in_flight: Count
    dead_lettered: Count


class TopicState(Struct):
    """One topic."""

    topic: str
    type: Literal["log", "queue"]
    head_seq: HeadSeq
    earliest_seq: EarliestSeq
    next_seq: Seq
    count: Annotated[Count, Meta(description="Live records: not deleted, evicted or expired.")]
    bytes: Annotated[Count, Meta(description="Bytes of the live records.")]
    config: Config
    effective_priority: int
    last_write_ts: TimeMs | None
    last_read_ts: TimeMs | None
    epoch: EpochText
    performance: Performance
    queue: Annotated[QueueState, Meta(description="Queues only.")] | UnsetType = UNSET


class TopicRow(Struct):
    topic: str
    head_seq: HeadSeq
    earliest_seq: EarliestSeq
    count: Count
    bytes: Count
    durable: bool
    effective_priority: int
    type: Literal["log", "queue"]
    durability: Durability
    ready: Annotated[Count, Meta(description="Queues only: jobs that can be claimed now.")] | UnsetType = (
        UNSET
    )


class TopicList(Struct):
    """Topics, ordered by name."""

    topics: list[TopicRow]
    performance: Performance
    next_cursor: NextCursor = UNSET


class TopicDeleted(Struct):
    """`deleted` is false if the topic did not exist."""

    topic: str
    deleted: bool
    routers_removed: Annotated[list[str], Meta(description="Names of the routers deleted with the topic.")]
    performance: Performance


class Written(Struct):
    """The seqs assigned to a write, in the order of its records."""

    topic: str
    first_seq: Seq
    last_seq: Seq
    head_seq: Annotated[Seq, Meta(description="Head after this write; if deduped, after the original one.")]
    count: Annotated[int, Meta(ge=1, description="Records in this write.")]
    created: Annotated[
        bool, Meta(description="Whether this write created the topic; the status is then 201.")
    ]
    deduped: Annotated[
        bool,
        Meta(
            description="Whether the idempotency key was known: nothing was appended, and the seqs are those of "
            "the original write."
        ),
    ]
    performance: WritePerformance
    seqs: (
        Annotated[list[Seq], Meta(min_length=1, description="Absent with `return_seqs=false`.")] | UnsetType
    ) = UNSET
    epoch: EpochText | UnsetType = UNSET


class Record(Struct):
    """A record. Fields that it does not have are absent, never `null`."""

    seq: Seq = field(name="$seq")
    ts: Annotated[TimeMs, Meta(description="When it was written.")] = field(name="$ts")
    node: str | UnsetType = field(name="$node", default=UNSET)
    tag: Annotated[str, Meta(description="Only if tags were requested.")] | UnsetType = field(
        name="$tag", default=UNSET
    )
    encoding: (
        Annotated[Literal["base64"], Meta(description="The record was written as bytes; `data` is base64.")]
        | UnsetType
    ) = field(name="$encoding", default=UNSET)
    data: Any = UNSET  # any JSON value, `null` included
    meta: Any = UNSET
    headers: (
        Annotated[str, Meta(description="Header block in base64, if the record was stored with one.")]
        | UnsetType
    ) = UNSET


class Tombstone(Struct):
    """Seqs lost without a delete. The range is exact and inclusive."""

    gap_from: Seq
    gap_to: Count
    reason: Annotated[
        str,
        Meta(description="`cap`, `ttl`, `mixed`, `crash`, `corrupt` or `recreated`; more may be added."),
    ]
    missed_estimate: Annotated[Count, Meta(description="Estimated number of records in the range.")]
    earliest_seq: Annotated[Seq, Meta(description="Seq at which reading continues.")]
    head_seq: HeadSeq


class DiffPage(Struct):
    """The records after `from_seq`, ordered by seq; gaps are normal."""

    topic: str
    records: list[Record]
    next_from_seq: Annotated[Count, Meta(description="Last seq scanned: the next `from_seq`.")]
    head_seq: HeadSeq
    earliest_seq: EarliestSeq
    caught_up: Annotated[bool, Meta(description="Whether `next_from_seq` is `head_seq`: no more for now.")]
    tombstone: Tombstone | None
    lag: Count
    performance: DiffPerformance
    epoch: EpochText | UnsetType = UNSET


class Deleted(Struct):
    """The result of a delete, and what is left."""

    topic: str
    deleted: Annotated[Count, Meta(description="Records removed by this call.")]
    earliest_seq: EarliestSeq
    head_seq: HeadSeq
    count: Count
    bytes: Count
    performance: Performance


class DeletedRange(Struct):
    first_seq: Seq
    last_seq: Seq


class DeletedRanges(Struct):
    """Deleted seqs in ascending order. A range that extends beyond `next_from_seq` continues on the next page."""

    topic: str
    ranges: list[DeletedRange]
    next_from_seq: Annotated[Count, Meta(description="The `from_seq` of the next page.")]
    head_seq: HeadSeq
    earliest_seq: EarliestSeq
    caught_up: Annotated[bool, Meta(description="Whether `next_from_seq` is `head_seq`.")]
    performance: Performance


class TagCount(Struct):
    tag: str
    count: Annotated[Count, Meta(description="Live records with this tag.")]


class TagList(Struct):
    """Tags, ordered by name."""

    topic: str
    tags: list[TagCount]
    performance: Performance
    next_cursor: NextCursor = UNSET


class LastRecords(Struct):
    """The newest record of the matching tags together, or of each of them. `records` may be empty."""

    topic: str
    records: list[Record]
    head_seq: HeadSeq
    performance: Performance
    next_cursor: NextCursor = UNSET


class WatchedTopic(Struct):
    from_seq: Annotated[Count, Meta(description="The stream starts after this seq.")]
    head_seq: HeadSeq
    earliest_seq: EarliestSeq
    epoch: EpochText | UnsetType = UNSET


class WatchMade(Struct):
    """A watch session, and the path of its stream."""

    wid: Annotated[
        str, Meta(description="Id of the watch. Without API keys, anyone who has it can open the stream.")
    ]
    stream_url: Annotated[str, Meta(description="Path of the stream.")]
    session_ttl_ms: Annotated[Count, Meta(description="How long the watch is kept without an open stream.")]
    topics: Annotated[
        dict[str, WatchedTopic], Meta(description="Current topics of the watch, pattern matches included.")
    ]
    performance: Performance


class Health(Struct):
    status: Literal["ok"]
    version: str
    uptime_ms: Count


class Readiness(Struct):
    status: Literal["ready"]
    wal_replay_complete: Annotated[bool, Meta(extra_json_schema={"const": True})]
    topics: Count


class WalMetrics(Struct):
    fsyncs: Count
    frames: Count
    batches: Count
    bytes_written: Count
    rotations: Count
    queue_depth: Count
    queue_depth_peak: Count
    submit_full_total: Count
    read_only: bool
    fsync_count: Count
    fsync_micros_total: Count


class Metrics(Struct):
    """The metrics of the Prometheus text, without those of single topics and consumers."""

    topics: Count
    topics_ephemeral: Count
    topics_memory: Count
    topics_disk: Count
    topics_fsync: Count
    routers: Count
    records_live: Count
    bytes_live: Count
    queue_topics: Count
    queue_leases_in_flight: Count
    consumers: Count
    copies: Count
    flows_owing: Count
    catch_ups: Count
    catch_ups_timed_out: Count
    pressure: Annotated[float, Meta(ge=0, le=1)]
    pressure_refused: Count
    topics_waiting: Count
    topics_paused: Count
    sse_connections: Count
    watch_sessions: Count
    ready: bool
    replay_progress: Annotated[float, Meta(ge=0, le=1)]
    processes_failing: Count
    uptime_ms: Count
    wal: WalMetrics
    performance: Performance


class ErrorDetail(Struct):
    code: Annotated[str, Meta(extra_json_schema={"enum": sorted(STATUS)})]
    message: Annotated[str, Meta(min_length=1, description="For people; it may change.")]
    detail: Annotated[dict[str, Any], Meta(description="Fields that depend on the code.")] | UnsetType = UNSET


class ErrorBody(Struct):
    """The body of every error response."""

    error: ErrorDetail


BODIES: tuple[type[msgspec.Struct], ...] = (
    TopicPut,
    TopicState,
    TopicList,
    TopicDeleted,
    Written,
    DiffPage,
    Deleted,
    DeletedRanges,
    TagList,
    LastRecords,
    WatchMade,
    Health,
    Readiness,
    Metrics,
    ErrorBody,
)
