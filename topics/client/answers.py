"""Types of the server's responses. Unknown fields are ignored; fields that the server may omit have defaults.

A test compares them with the types that the OpenAPI document is generated from.
"""

from __future__ import annotations

import binascii
import datetime
from collections.abc import Iterator
from typing import Any, Literal, TypedDict, TypeVar

import msgspec
from msgspec import Raw, Struct, field

T = TypeVar("T")
Performance = dict[str, Any]


def as_datetime(ms: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)


# -- records -----------------------------------------------------------------------------------------------


class Record(Struct, kw_only=True):
    """A record. `data` is the JSON value that was written, or the bytes."""

    topic: str = ""
    seq: int = field(name="$seq")
    ts: int = field(name="$ts")  # time of the write, ms since the epoch
    data: Any = None
    tag: str | None = field(name="$tag", default=None)
    node: str | None = field(name="$node", default=None)
    meta: Any = None
    encoding: str | None = field(name="$encoding", default=None)
    headers: str | None = None

    @property
    def time(self) -> datetime.datetime:
        return as_datetime(self.ts)

    def to(self, kind: type[T]) -> T:
        """Convert `data` to a dataclass, msgspec Struct, TypedDict … Raises msgspec.ValidationError if it does not fit."""
        return msgspec.convert(self.data, kind)


class Tombstone(Struct, kw_only=True):
    """A range of seqs that a reader has lost without a delete; both ends are inclusive."""

    topic: str = ""
    consumer: str | None = None
    reason: str
    gap_from: int
    gap_to: int
    earliest_seq: int = 0
    head_seq: int = 0
    missed_estimate: int | None = None
    epoch: str = ""  # of the topic from here on

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


class Page(Struct, kw_only=True):
    """The result of one read. Continue with `next_from_seq`."""

    topic: str
    records: list[Record]
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    caught_up: bool
    lag: int = 0
    tombstone: Tombstone | None = None
    epoch: str = ""  # pass it to the next read, which then detects that the topic was created again
    performance: Performance = {}


class LastRecords(Struct, kw_only=True):
    topic: str
    records: list[Record]
    head_seq: int
    next_cursor: str | None = None
    performance: Performance = {}


class Written(Struct, kw_only=True):
    """The result of a write. `deduped`: the idempotency key was known; this is the result of the first attempt."""

    topic: str
    first_seq: int
    last_seq: int
    head_seq: int
    count: int
    created: bool = False
    deduped: bool = False
    seqs: list[int] = []
    epoch: str = ""  # with `include_epoch`
    performance: Performance = {}


class Deleted(Struct, kw_only=True):
    topic: str
    deleted: int
    earliest_seq: int
    head_seq: int
    count: int
    bytes: int
    performance: Performance = {}


class DeletedRange(Struct, kw_only=True):
    """A range of deleted seqs; both ends are inclusive."""

    first_seq: int
    last_seq: int


class DeletedRanges(Struct, kw_only=True):
    topic: str
    ranges: list[DeletedRange]
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    caught_up: bool
    performance: Performance = {}


class TagCount(Struct, kw_only=True):
    tag: str
    count: int


class TagList(Struct, kw_only=True):
    topic: str
    tags: list[TagCount]
    next_cursor: str | None = None
    performance: Performance = {}


# -- topics ------------------------------------------------------------------------------------------------


class TopicOptions(TypedDict, total=False):
    """Settings of a topic in a request. Omitted ones have their defaults."""

    type: Literal["log", "queue"]
    ttl_ms: int
    cap_records: int
    cap_bytes: int
    discard: Literal["old", "reject"]
    durable: bool
    durability: Literal["ephemeral", "memory", "disk", "fsync"]
    priority: int | None
    auto_priority: bool
    auto_create: bool
    idempotency_window_ms: int
    dedupe_node: bool
    lease_ms: int
    claim_jitter_ms: int
    max_deliveries: int
    dead_letter: str | None
    leases_durable: bool
    cap_per_tag: int
    max_record_bytes: int
    retention: Literal["limits", "interest", "work_queue"]


class TopicConfig(Struct, kw_only=True):
    """Settings of a topic in a response."""

    type: str = "log"
    ttl_ms: int = 0
    cap_records: int = 0
    cap_bytes: int = 0
    discard: str = "old"
    durable: bool = False
    durability: str = "disk"
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
    retention: str = "limits"


class TopicPut(Struct, kw_only=True):
    topic: str
    created: bool
    config: TopicConfig
    performance: Performance = {}


class QueueState(Struct, kw_only=True):
    ready: int
    in_flight: int
    dead_lettered: int


class Topic(Struct, kw_only=True):
    topic: str
    type: str
    head_seq: int
    earliest_seq: int
    next_seq: int
    count: int
    bytes: int
    config: TopicConfig
    effective_priority: int = 0
    last_write_ts: int | None = None
    last_read_ts: int | None = None
    queue: QueueState | None = None
    epoch: str = ""
    performance: Performance = {}


class TopicRow(Struct, kw_only=True):
    topic: str
    head_seq: int
    earliest_seq: int
    count: int
    bytes: int
    durable: bool
    effective_priority: int = 0
    type: str = "log"
    durability: str = ""
    ready: int | None = None  # queues only: jobs ready to be claimed


class TopicList(Struct, kw_only=True):
    topics: list[TopicRow]
    next_cursor: str | None = None
    performance: Performance = {}


class TopicDeleted(Struct, kw_only=True):
    topic: str
    deleted: bool
    routers_removed: list[str] = []
    performance: Performance = {}


# -- queues and consumers ----------------------------------------------------------------------------------


class Job(Record, kw_only=True):
    """A delivered record, leased unless its consumer needs no acks."""

    consumer: str | None = None
    holder: str = ""  # the node that holds the lease
    deliveries: int = 1
    lease_id: str = ""
    deadline: int | None = None
    bytes: int | None = None  # instead of data, with headers_only


class Claimed(Struct, kw_only=True):
    """Claimed jobs in the order of their seqs, possibly none. Iterable."""

    topic: str
    jobs: list[Job] = field(name="claimed")
    ready: int
    consumer: str | None = None
    count: int = 0
    tombstone: Tombstone | None = None
    performance: Performance = {}

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)


class Settled(Struct, kw_only=True):
    """The result of ack, nack, extend or term."""

    done: int = 0  # number of jobs
    skipped: list[int] = []  # seqs already settled, or no longer leased to this node
    deadlines: dict[int, int] = {}  # extend only, by seq
    ready: int = 0
    in_flight: int = 0


class SettledPart(Struct, kw_only=True):
    """The response to one request; a `Settled` may take several."""

    topic: str
    skipped: list[int]
    acked: int = 0
    nacked: int = 0
    extended: int = 0
    termed: int = 0
    deadlines: dict[int, int] = {}
    ready: int = 0
    in_flight: int = 0
    consumer: str | None = None
    performance: Performance = {}


class ConsumerOptions(TypedDict, total=False):
    """Settings of a consumer in a request. Omitted ones have their defaults."""

    ack: Literal["none", "all", "explicit"]
    ack_wait_ms: int
    backoff_ms: list[int]
    max_deliver: int
    filter: str | list[str | list[str]] | None
    deliver: Literal["all", "new", "last", "last_per_tag"] | dict[Literal["from_seq", "from_ts"], int]
    max_ack_pending: int
    max_waiting: int
    headers_only: bool
    dead_letter: str | None
    inactive_ttl_ms: int
    replay: Literal["instant", "original"]


class ConsumerConfig(Struct, kw_only=True):
    ack: str = "explicit"
    ack_wait_ms: int = 30_000
    backoff_ms: list[int] = []
    max_deliver: int = 0
    filter: list[list[str]] | None = None
    deliver: str | dict[str, int] = "all"
    max_ack_pending: int = 1000
    max_waiting: int = 512
    headers_only: bool = False
    dead_letter: str | None = None
    inactive_ttl_ms: int = 0
    replay: str = "instant"


class Consumer(Struct, kw_only=True):
    """Configuration and state of a consumer."""

    topic: str
    consumer: str
    config: ConsumerConfig
    created_ts: int
    next_seq: int
    ack_floor: int
    delivered: int
    redelivered: int
    acked: int
    ack_pending: int
    in_flight: int
    dead_lettered: int
    given_up: int
    waiting: int
    lag_records: int
    lag_ms: int
    last_activity_ts: int
    paused: bool
    stalled: bool
    paused_until_ts: int | None = None
    tombstone: Tombstone | None = None
    created: bool = False  # create_consumer only
    performance: Performance = {}


class ConsumerList(Struct, kw_only=True):
    topic: str
    consumers: list[Consumer]
    next_cursor: str | None = None
    performance: Performance = {}


class ConsumerDeleted(Struct, kw_only=True):
    topic: str
    consumer: str
    deleted: bool
    performance: Performance = {}


class ConsumerReset(Struct, kw_only=True):
    topic: str
    consumer: str
    dry_run: bool
    from_seq: int
    to_seq: int
    redelivers: int
    skips: int
    performance: Performance = {}


# -- routers -----------------------------------------------------------------------------------------------


class Router(Struct, kw_only=True):
    router: str
    source: str
    dest: str
    guarantee: str
    preserve_node: bool = True
    preserve_tag: bool = True
    filter: Any = None
    allow_cycle: bool = False
    created: bool = False  # create_router only
    forwarded_total: int = 0
    performance: Performance = {}


class RouterRow(Struct, kw_only=True):
    router: str
    source: str
    dest: str
    guarantee: str
    forwarded_total: int = 0


class RouterList(Struct, kw_only=True):
    routers: list[RouterRow]
    next_cursor: str | None = None
    performance: Performance = {}


class RouterDeleted(Struct, kw_only=True):
    router: str
    deleted: bool
    performance: Performance = {}


# -- transactions ------------------------------------------------------------------------------------------


class Transaction(Struct, kw_only=True):
    """State of a batch. Seqs and count are set only for the producer's last committed batch."""

    topic: str
    txn: str
    state: Literal["open", "committing", "committed"]
    first_seq: int | None = None
    last_seq: int | None = None
    count: int | None = None
    progress: float | None = None  # 0 to 1 during the commit
    performance: Performance = {}


class ChunkStaged(Struct, kw_only=True):
    topic: str
    part: str
    chunk: int
    records: int
    repeated: bool  # it had been staged before and was not replaced
    performance: Performance = {}


class TransactionAborted(Struct, kw_only=True):
    topic: str
    txn: str
    state: str
    performance: Performance = {}


# -- streams -----------------------------------------------------------------------------------------------


class WatchedTopic(Struct, kw_only=True):
    from_seq: int
    head_seq: int
    earliest_seq: int
    epoch: str = ""


class WatchMade(Struct, kw_only=True):
    wid: str
    stream_url: str
    topics: dict[str, WatchedTopic]
    session_ttl_ms: int = 0
    performance: Performance = {}


class Records(Struct, kw_only=True):
    """Event of a watch: records of one topic. They move the cursor from `from_seq` to `to_seq`."""

    topic: str
    records: list[Record]
    from_seq: int
    to_seq: int
    head_seq: int
    epoch: str = ""


class CaughtUp(Struct, kw_only=True):
    """Event of a watch: all records of this topic so far have been delivered."""

    topic: str
    head_seq: int


class TopicEnded(Struct, kw_only=True):
    """Event of a watch: the topic was deleted."""

    topic: str


class Interrupted(Struct, kw_only=True):
    """Event of a watch: the connection was lost; the client tries to reconnect."""

    reason: str


class Resumed(Struct, kw_only=True):
    """Event of a watch: reconnected, and continuing where it stopped."""


class Notice(Struct, kw_only=True):
    """Event of a watch: a warning of the server, for example that it cannot follow any more topics."""

    code: int | str
    message: str = ""


# -- the server --------------------------------------------------------------------------------------------


class Health(Struct, kw_only=True):
    status: str
    version: str
    uptime_ms: int


class Readiness(Struct, kw_only=True):
    status: str
    wal_replay_complete: bool = True
    topics: int = 0


def fill_in(topic: str, records: list[Any]) -> None:
    """Fill in the topic of decoded records, and decode binary data."""
    for record in records:
        record.topic = topic
        if record.encoding == "base64" and isinstance(record.data, str):
            record.data = binascii.a2b_base64(record.data)


# -- undecoded data ----------------------------------------------------------------------------------------

# With `Client(raw=True)` the data of records stays the JSON text that the server sent. Binary data stays base64 text,
# as `encoding` says.

NO_DATA = Raw(b"null")


class RawRecord(Record, kw_only=True):
    data: Raw = NO_DATA


class RawJob(Job, kw_only=True):
    data: Raw = NO_DATA


# Lists are invariant, but these are only filled by the decoder and read.
class RawPage(Page, kw_only=True):
    records: list[RawRecord]  # type: ignore[assignment]


class RawLastRecords(LastRecords, kw_only=True):
    records: list[RawRecord]  # type: ignore[assignment]


class RawRecords(Records, kw_only=True):
    records: list[RawRecord]  # type: ignore[assignment]


class RawClaimed(Claimed, kw_only=True):
    jobs: list[RawJob] = field(name="claimed")  # type: ignore[assignment]


RAW_TYPES: dict[Any, Any] = {
    Job: RawJob,
    Page: RawPage,
    LastRecords: RawLastRecords,
    Records: RawRecords,
    Claimed: RawClaimed,
}
