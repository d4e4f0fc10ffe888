"""What the server says, as types. Fields that a later server adds are ignored; those it may leave out have defaults.

What these have to contain is kept true by a test against the types that the OpenAPI document is made of.
"""

from __future__ import annotations

import binascii
import datetime
from collections.abc import Iterator
from typing import Any, Literal, TypedDict, TypeVar

import msgspec
from msgspec import Struct, field

T = TypeVar("T")
Performance = dict[str, Any]


def as_datetime(ms: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)


# -- records -----------------------------------------------------------------------------------------------


class Record(Struct, kw_only=True):
    """A record as it is read. `data` is the JSON value that was written, or the bytes."""

    topic: str = ""
    seq: int = field(name="$seq")
    ts: int = field(name="$ts")  # when it was written, ms since the epoch
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
        """`data` as this type: a dataclass, a msgspec Struct, a TypedDict … msgspec.ValidationError if it is none."""
        return msgspec.convert(self.data, kind)


class Tombstone(Struct, kw_only=True):
    """Seqs that are gone although nobody deleted them; both ends belong to the range."""

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
        """The topic was deleted and made again: it is read from its beginning."""
        return self.reason == "recreated"

    def cursor_after(self, cursor: int) -> int:
        """Where a reader that was at `cursor` goes on. Where records before it are gone, others may have their seqs now."""
        return self.gap_from - 1 if self.is_new_topic or self.gap_from <= cursor else self.gap_to

    @property
    def text(self) -> str:
        if self.is_new_topic:
            return f"{self.topic} was deleted and created again; from its beginning"
        some = (
            f"record {self.gap_from} is"
            if self.gap_from == self.gap_to
            else f"records {self.gap_from} to {self.gap_to} are"
        )
        return f"{self.topic}: {some} gone ({self.reason})"


class Page(Struct, kw_only=True):
    """One read. Go on with `next_from_seq`."""

    topic: str
    records: list[Record]
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    caught_up: bool
    lag: int = 0
    tombstone: Tombstone | None = None
    epoch: str = ""  # send it with the next read, so that a topic that was created again is noticed
    performance: Performance = {}


class LastRecords(Struct, kw_only=True):
    topic: str
    records: list[Record]
    head_seq: int
    next_cursor: str | None = None
    performance: Performance = {}


class Written(Struct, kw_only=True):
    """What a write got. `deduped`: its key was known, so this is what the first attempt got."""

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
    """Deleted seqs; both ends belong to the range."""

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
    """A topic's configuration, as it is asked for. What is left out has its default."""

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
    """A topic's configuration as it is in force."""

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
    ready: int | None = None  # queues only: jobs that may be claimed now


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
    """A record that was handed out, under a lease unless its consumer needs no acks."""

    consumer: str | None = None
    holder: str = ""  # the node that has the lease
    deliveries: int = 1
    lease_id: str = ""
    deadline: int | None = None
    bytes: int | None = None  # instead of data, with headers_only


class Claimed(Struct, kw_only=True):
    """Jobs in the order of their seqs; none is normal. Iterating goes over the jobs."""

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
    """Of an ack, nack, extend or term: `done` so many. `skipped`: not leased to this node any more, or settled before."""

    done: int = 0
    skipped: list[int] = []
    deadlines: dict[int, int] = {}  # of extend, by seq
    ready: int = 0
    in_flight: int = 0


class SettledPart(Struct, kw_only=True):
    """The answer to one request of a `Settled`."""

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
    """A consumer's configuration, as it is asked for. What is left out has its default."""

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
    """A consumer: its configuration, where it is, and what is in hand."""

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
    created: bool = False  # of create_consumer
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
    created: bool = False  # of create_router
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
    """Where a batch is. Seqs and count are None unless it is the last one that its producer has committed."""

    topic: str
    txn: str
    state: Literal["open", "committing", "committed"]
    first_seq: int | None = None
    last_seq: int | None = None
    count: int | None = None
    progress: float | None = None  # 0 to 1, while it is committing
    performance: Performance = {}


class ChunkStaged(Struct, kw_only=True):
    topic: str
    part: str
    chunk: int
    records: int
    repeated: bool  # it was there already, and stays as it was
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
    """An event of a watch: records of one topic. The cursor was at `from_seq`, and is at `to_seq` now."""

    topic: str
    records: list[Record]
    from_seq: int
    to_seq: int
    head_seq: int
    epoch: str = ""


class CaughtUp(Struct, kw_only=True):
    """An event of a watch: there is no more of this topic for now."""

    topic: str
    head_seq: int


class TopicEnded(Struct, kw_only=True):
    """An event of a watch: the topic was deleted."""

    topic: str


class Interrupted(Struct, kw_only=True):
    """An event of a watch: it does not follow just now, and tries to again."""

    reason: str


class Resumed(Struct, kw_only=True):
    """An event of a watch: it follows again, from where it was."""


class Notice(Struct, kw_only=True):
    """An event of a watch: what the server wants people to know, such as topics that it cannot follow besides."""

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


def own(topic: str, records: list[Any]) -> None:
    """Tell records whose they are, and make bytes of what was written as bytes."""
    for record in records:
        record.topic = topic
        if record.encoding == "base64" and isinstance(record.data, str):
            record.data = binascii.a2b_base64(record.data)
