"""Responses about topics, records, watches and the server. The replies to writes and reads are built from bytes, in this form."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, NotRequired, TypedDict, TypeVar

import msgspec
from msgspec import field

from topics.api.config import DURABILITIES, TOPIC_TYPES, TopicSettings
from topics.api.errors import CODES
from topics.api.fields import (
    ALWAYS,
    HIDDEN,
    Answer,
    Count,
    EarliestSeq,
    EpochText,
    HeadSeq,
    Milliseconds,
    NextCursor,
    Seq,
    TimeMs,
    doc,
    one_of,
    schema,
)

T = TypeVar("T")


class Performance(TypedDict):
    """Time spent on the request."""

    server_total_ms: Milliseconds
    catch_up_timed_out: NotRequired[
        Annotated[bool, doc("Present if not all copies of a router had arrived when this was answered.")]
    ]


class WritePerformance(TypedDict):
    """Time spent on the write. `fsync_ms` is 0 unless the answer waited for a sync."""

    server_total_ms: Milliseconds
    wal_append_ms: Milliseconds
    fsync_ms: Milliseconds
    throttle_wait_ms: NotRequired[Annotated[float, doc("Time added by a delayed sync.", minimum=0)]]
    pressure: NotRequired[Annotated[float, doc("Present above 0.2.", minimum=0, maximum=1)]]


class DiffPerformance(Performance):
    """Time spent on the read, and the number of rows it scanned."""

    records_scanned: Count
    cold_segments_read: NotRequired[
        Annotated[Count, doc("Segments read from the cold tier; present if above 0.")]
    ]


# -- records -----------------------------------------------------------------------------------------------


class Record(Answer, kw_only=True):
    """A record. Fields that it does not have are absent, never `null`."""

    topic: Annotated[str, HIDDEN] = ""
    seq: Seq = field(name="$seq")
    ts: Annotated[TimeMs, doc("When it was written.")] = field(name="$ts")
    node: str | None = field(name="$node", default=None)
    tag: Annotated[str, doc("Only if tags were requested.")] | None = field(name="$tag", default=None)
    encoding: (
        Annotated[str, one_of("base64"), doc("The record was written as bytes; `data` is base64.")] | None
    ) = field(name="$encoding", default=None)
    data: Any = None  # any JSON value, `null` included; in the client also the bytes that were written
    meta: Any = None
    headers: Annotated[str, doc("Header block in base64, if the record was stored with one.")] | None = None

    @property
    def time(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self.ts / 1000, datetime.UTC)

    def to(self, kind: type[T]) -> T:
        """Convert `data` to a dataclass, msgspec Struct, TypedDict … Raises msgspec.ValidationError if it does not fit."""
        return msgspec.convert(self.data, kind)


class Tombstone(Answer, kw_only=True):
    """Seqs lost without a delete. The range is exact and inclusive."""

    topic: Annotated[str, HIDDEN] = ""
    consumer: Annotated[str | None, HIDDEN] = None
    reason: Annotated[
        str, doc("`cap`, `ttl`, `mixed`, `crash`, `corrupt` or `recreated`; more may be added.")
    ]
    gap_from: Seq
    gap_to: Count
    earliest_seq: Annotated[Seq, doc("Seq at which reading continues."), ALWAYS] = 0
    head_seq: Annotated[HeadSeq, ALWAYS] = 0
    missed_estimate: Annotated[Count | None, doc("Estimated number of records in the range."), ALWAYS] = (
        None  # events of streams have none
    )
    epoch: Annotated[str, HIDDEN] = ""  # of the topic from here on

    @property
    def is_new_topic(self) -> bool:
        """The topic was deleted and created again: reading continues at its beginning."""
        return self.reason == "recreated"

    def cursor_after(self, cursor: int) -> int:
        """Where a reader at `cursor` continues. If seqs before it were lost, new records may have reused them."""
        return self.gap_from - 1 if self.is_new_topic or self.gap_from <= cursor else self.gap_to

    @property
    def text(self) -> str:
        if self.is_new_topic:
            return f"{self.topic} was deleted and created again; reading from its beginning"
        if self.gap_from > self.gap_to:  # the head went back, and nothing has been written since
            lost = f"records from {self.gap_from} on are"
        elif self.gap_from == self.gap_to:
            lost = f"record {self.gap_from} is"
        else:
            lost = f"records {self.gap_from} to {self.gap_to} are"
        return f"{self.topic}: {lost} lost ({self.reason})"


class Page(Answer, kw_only=True):
    """The records after `from_seq`, ordered by seq; gaps are normal."""

    topic: str
    records: list[Record]
    next_from_seq: Annotated[Count, doc("Last seq scanned: the next `from_seq`.")]
    head_seq: HeadSeq
    earliest_seq: EarliestSeq
    caught_up: Annotated[bool, doc("Whether `next_from_seq` is `head_seq`: no more for now.")]
    tombstone: Tombstone | None
    lag: Count
    epoch: EpochText = ""
    performance: DiffPerformance


class LastRecords(Answer, kw_only=True):
    """The newest record of the matching tags together, or of each of them. `records` may be empty."""

    topic: str
    records: list[Record]
    head_seq: HeadSeq
    next_cursor: NextCursor = None
    performance: Performance


class Written(Answer, kw_only=True):
    """The seqs assigned to a write, in the order of its records."""

    topic: str
    first_seq: Seq
    last_seq: Seq
    seqs: Annotated[list[Seq], doc("Absent with `return_seqs=false`.", minItems=1)] = field(
        default_factory=list
    )
    head_seq: Annotated[Seq, doc("Head after this write; if deduped, after the original one.")]
    count: Annotated[int, doc("Records in this write.", minimum=1)]
    created: Annotated[bool, doc("Whether this write created the topic; the status is then 201.")]
    deduped: Annotated[
        bool,
        doc(
            "Whether the idempotency key was known: nothing was appended, and the seqs are those of the original write."
        ),
    ]
    epoch: EpochText = ""
    performance: WritePerformance


class Deleted(Answer, kw_only=True):
    """The result of a delete, and what is left."""

    topic: str
    deleted: Annotated[Count, doc("Records removed by this call.")]
    earliest_seq: EarliestSeq
    head_seq: HeadSeq
    count: Count
    bytes: Count
    performance: Performance


class DeletedRange(Answer, kw_only=True):
    """A range of deleted seqs; both ends are inclusive."""

    first_seq: Seq
    last_seq: Seq


class DeletedRanges(Answer, kw_only=True):
    """Deleted seqs in ascending order. A range that extends beyond `next_from_seq` continues on the next page."""

    topic: str
    ranges: list[DeletedRange]
    next_from_seq: Annotated[Count, doc("The `from_seq` of the next page.")]
    head_seq: HeadSeq
    earliest_seq: EarliestSeq
    caught_up: Annotated[bool, doc("Whether `next_from_seq` is `head_seq`.")]
    performance: Performance


class TagCount(Answer, kw_only=True):
    tag: str
    count: Annotated[Count, doc("Live records with this tag.")]


class TagList(Answer, kw_only=True):
    """Tags, ordered by name."""

    topic: str
    tags: list[TagCount]
    next_cursor: NextCursor = None
    performance: Performance


# -- topics ------------------------------------------------------------------------------------------------


class TopicPut(Answer, kw_only=True):
    """A topic that was created, or whose configuration was replaced."""

    topic: str
    created: bool
    config: TopicSettings
    performance: Performance


class QueueState(Answer, kw_only=True):
    ready: Count
    in_flight: Count
    dead_lettered: Count


class Topic(Answer, kw_only=True):
    """One topic."""

    topic: str
    type: Annotated[str, one_of(*TOPIC_TYPES)]
    head_seq: HeadSeq
    earliest_seq: EarliestSeq
    next_seq: Seq
    count: Annotated[Count, doc("Live records: not deleted, evicted or expired.")]
    bytes: Annotated[Count, doc("Bytes of the live records.")]
    config: TopicSettings
    effective_priority: int
    last_write_ts: TimeMs | None
    last_read_ts: TimeMs | None
    epoch: EpochText
    queue: Annotated[QueueState | None, doc("Queues only.")] = None
    performance: Performance


class TopicRow(Answer, kw_only=True):
    topic: str
    head_seq: HeadSeq
    earliest_seq: EarliestSeq
    count: Count
    bytes: Count
    durable: bool
    effective_priority: int
    type: Annotated[str, one_of(*TOPIC_TYPES)]
    durability: Annotated[str, one_of(*DURABILITIES)]
    ready: Annotated[Count, doc("Queues only: jobs that can be claimed now.")] | None = None


class TopicList(Answer, kw_only=True):
    """Topics, ordered by name."""

    topics: list[TopicRow]
    next_cursor: NextCursor = None
    performance: Performance


class TopicDeleted(Answer, kw_only=True):
    """`deleted` is false if the topic did not exist."""

    topic: str
    deleted: bool
    routers_removed: Annotated[list[str], doc("Names of the routers deleted with the topic.")]
    performance: Performance


# -- watches and the server --------------------------------------------------------------------------------


class WatchedTopic(Answer, kw_only=True):
    from_seq: Annotated[Count, doc("The stream starts after this seq.")]
    head_seq: HeadSeq
    earliest_seq: EarliestSeq
    epoch: EpochText = ""


class WatchMade(Answer, kw_only=True):
    """A watch session, and the path of its stream."""

    wid: Annotated[str, doc("Id of the watch. Without API keys, anyone who has it can open the stream.")]
    stream_url: Annotated[str, doc("Path of the stream.")]
    session_ttl_ms: Annotated[Count, doc("How long the watch is kept without an open stream.")]
    topics: Annotated[dict[str, WatchedTopic], doc("Current topics of the watch, pattern matches included.")]
    performance: Performance


class Health(Answer, kw_only=True):
    status: Annotated[str, one_of("ok")]
    version: str
    uptime_ms: Count


class Readiness(Answer, kw_only=True):
    status: Annotated[str, one_of("ready")]
    wal_replay_complete: Annotated[bool, schema(const=True)]
    topics: Count


class WalMetrics(Answer, kw_only=True):
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


class Metrics(Answer, kw_only=True):
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
    pressure: Annotated[float, schema(minimum=0, maximum=1)]
    pressure_refused: Count
    topics_waiting: Count
    topics_paused: Count
    sse_connections: Count
    watch_sessions: Count
    ready: bool
    replay_progress: Annotated[float, schema(minimum=0, maximum=1)]
    processes_failing: Count
    uptime_ms: Count
    wal: WalMetrics
    performance: Performance


class ErrorDetail(Answer, kw_only=True):
    code: Annotated[str, one_of(*CODES)]
    message: Annotated[str, doc("For people; it may change.", minLength=1)]
    detail: Annotated[dict[str, Any], doc("Fields that depend on the code.")] = field(default_factory=dict)


class ErrorBody(Answer, kw_only=True):
    """The body of every error response."""

    error: ErrorDetail
