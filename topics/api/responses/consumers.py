"""The JSON bodies that the server sends about queues and consumers, as types; see `responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from topics.api.responses.records import Count, Milliseconds, NextCursor, Performance, Seq, TimeMs, Tombstone

LeaseId = Annotated[
    str, Meta(pattern="^lease_[0-9a-f]{1,16}$", description="Names this delivery; see `lease_ids` of an ack.")
]
OfConsumer = Annotated[str, Meta(description="Named consumers only.")] | UnsetType
Ready = Annotated[Count, Meta(description="What could be handed out after this.")]
InFlight = Annotated[Count, Meta(description="Under leases that have not ended.")]
Skipped = Annotated[
    list[Count], Meta(description="Seqs that `node` has no such lease on: nothing was done to them.")
]


class SettlePerformance(Struct):
    """What the answer took. `fsync_ms` is there when it waited for a sync."""

    server_total_ms: Milliseconds
    fsync_ms: Milliseconds | UnsetType = UNSET


class Job(Struct):
    """A record that was handed out. What it does not have is left out, never `null`."""

    seq: Seq = field(name="$seq")
    ts: Annotated[TimeMs, Meta(description="When it was written.")] = field(name="$ts")
    deliveries: Annotated[int, Meta(ge=1, description="How often it was handed out, this time included.")]
    lease_id: LeaseId | UnsetType = UNSET
    deadline: Annotated[TimeMs, Meta(description="When the lease ends.")] | UnsetType = UNSET
    tag: str | UnsetType = field(name="$tag", default=UNSET)
    encoding: Literal["base64"] | UnsetType = field(name="$encoding", default=UNSET)
    data: Any = UNSET
    meta: Any = UNSET
    headers: str | UnsetType = UNSET
    bytes: Annotated[Count, Meta(description="Instead of `data`, with `headers_only`.")] | UnsetType = UNSET


class Claimed(Struct):
    """Jobs in ascending order of their seqs. None is normal."""

    topic: str
    claimed: list[Job]
    count: Count
    ready: Ready
    performance: Performance


class Fetched(Struct):
    """Records in ascending order of their seqs. None is normal."""

    topic: str
    consumer: str
    claimed: list[Job]
    count: Count
    ready: Ready
    tombstone: Annotated[Tombstone | None, Meta(description="What this consumer will never get.")]
    performance: Performance


class Acked(Struct):
    """These are done."""

    topic: str
    acked: Count
    skipped: Skipped
    ready: Ready
    in_flight: InFlight
    performance: SettlePerformance
    consumer: OfConsumer = UNSET


class Nacked(Struct):
    """These are handed out again, now or later."""

    topic: str
    nacked: Count
    skipped: Skipped
    ready: Ready
    in_flight: InFlight
    performance: SettlePerformance
    consumer: OfConsumer = UNSET


class Extended(Struct):
    """These leases hold longer."""

    topic: str
    extended: Count
    skipped: Skipped
    deadlines: Annotated[dict[str, TimeMs], Meta(description="By seq: when the lease ends.")]
    performance: SettlePerformance
    consumer: OfConsumer = UNSET


class Termed(Struct):
    """These are never handed out again."""

    topic: str
    consumer: str
    termed: Count
    skipped: Skipped
    ready: Ready
    in_flight: InFlight
    performance: SettlePerformance


class ConsumerConfig(Struct):
    """A consumer's whole configuration as it is in force."""

    ack: Literal["none", "all", "explicit"]
    ack_wait_ms: Annotated[int, Meta(ge=100, le=86_400_000)]
    max_deliver: Count
    backoff_ms: list[Count]
    filter: Annotated[
        list[tuple[Literal["tag"], Literal["Eq", "Glob", "Subject"], str]] | None,
        Meta(description="Any of these; null: every record."),
    ]
    deliver: Literal["all", "new", "last", "last_per_tag"] | dict[Literal["from_seq", "from_ts"], Count]
    max_ack_pending: Count
    max_waiting: Count
    headers_only: bool
    dead_letter: str | None
    inactive_ttl_ms: Count
    replay: Literal["instant", "original"]


class ConsumerRow(Struct):
    """A consumer: its configuration, where it is, and what is in hand."""

    topic: str
    consumer: str
    config: ConsumerConfig
    created_ts: TimeMs
    next_seq: Annotated[Seq, Meta(description="The next seq that was never handed out.")]
    ack_floor: Annotated[Count, Meta(description="Everything up to here is done.")]
    delivered: Annotated[Count, Meta(description="Records handed out, each time counted.")]
    redelivered: Count
    acked: Count
    ack_pending: Annotated[Count, Meta(description="Handed out and not done.")]
    in_flight: InFlight
    dead_lettered: Count
    given_up: Annotated[Count, Meta(description="Had their last delivery, and no dead letter to go to.")]
    waiting: Annotated[Count, Meta(description="Fetches and streams that wait.")]
    lag_records: Annotated[Count, Meta(description="Live records that match and were never handed out.")]
    lag_ms: Annotated[Count, Meta(description="The age of the oldest of them.")]
    last_activity_ts: TimeMs
    paused: bool
    paused_until_ts: TimeMs | None
    stalled: Annotated[bool, Meta(description="There is work, and `max_ack_pending` is reached.")]
    tombstone: Annotated[Tombstone | None, Meta(description="What the next fetch will tell of.")]


class Consumer(ConsumerRow):
    """A consumer: its configuration, where it is, and what is in hand."""

    performance: Performance


class ConsumerPut(Consumer):
    """A consumer was created or its configuration replaced."""

    created: bool


class ConsumerList(Struct):
    """Consumers in ascending order of their names."""

    topic: str
    consumers: list[ConsumerRow]
    performance: Performance
    next_cursor: NextCursor = UNSET


class ConsumerDeleted(Struct):
    """`deleted` is false when there was no such consumer."""

    topic: str
    consumer: str
    deleted: bool
    performance: Performance


class ConsumerReset(Struct):
    """Where the consumer stands now, or, with `dry_run`, where it would stand."""

    topic: str
    consumer: str
    dry_run: bool
    from_seq: Annotated[Seq, Meta(description="`next_seq` before.")]
    to_seq: Annotated[Seq, Meta(description="`next_seq` after.")]
    redelivers: Annotated[Count, Meta(description="Live records that match and come again.")]
    skips: Annotated[Count, Meta(description="Live records that match and that it does not get any more.")]
    performance: Performance


BODIES: tuple[type[msgspec.Struct], ...] = (
    Claimed,
    Fetched,
    Acked,
    Nacked,
    Extended,
    Termed,
    Consumer,
    ConsumerPut,
    ConsumerList,
    ConsumerDeleted,
    ConsumerReset,
)
