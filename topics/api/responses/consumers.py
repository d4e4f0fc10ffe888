"""Responses about queues and consumers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from topics.api.responses.records import Count, Milliseconds, NextCursor, Performance, Seq, TimeMs, Tombstone

LeaseId = Annotated[
    str,
    Meta(
        pattern="^lease_[0-9a-f]{1,16}$", description="Identifies this delivery; see `lease_ids` of an ack."
    ),
]
OfConsumer = Annotated[str, Meta(description="Named consumers only.")] | UnsetType
Ready = Annotated[Count, Meta(description="Records ready for delivery after this request.")]
InFlight = Annotated[Count, Meta(description="Records under an active lease.")]
Skipped = Annotated[list[Count], Meta(description="Seqs on which `node` holds no such lease; unchanged.")]


class SettlePerformance(Struct):
    """Time spent on the request. `fsync_ms` is present if it waited for a sync."""

    server_total_ms: Milliseconds
    fsync_ms: Milliseconds | UnsetType = UNSET


class Job(Struct):
    """A delivered record. Fields that it does not have are absent, never `null`."""

    seq: Seq = field(name="$seq")
    ts: Annotated[TimeMs, Meta(description="When it was written.")] = field(name="$ts")
    deliveries: Annotated[int, Meta(ge=1, description="Number of deliveries, this one included.")]
    lease_id: LeaseId | UnsetType = UNSET
    deadline: Annotated[TimeMs, Meta(description="When the lease expires.")] | UnsetType = UNSET
    tag: str | UnsetType = field(name="$tag", default=UNSET)
    encoding: Literal["base64"] | UnsetType = field(name="$encoding", default=UNSET)
    data: Any = UNSET
    meta: Any = UNSET
    headers: str | UnsetType = UNSET
    bytes: Annotated[Count, Meta(description="Size of `data`, which `headers_only` omits.")] | UnsetType = (
        UNSET
    )


class Claimed(Struct):
    """Jobs, ordered by seq. An empty list is normal."""

    topic: str
    claimed: list[Job]
    count: Count
    ready: Ready
    performance: Performance


class Fetched(Struct):
    """Records, ordered by seq. An empty list is normal."""

    topic: str
    consumer: str
    claimed: list[Job]
    count: Count
    ready: Ready
    tombstone: Annotated[Tombstone | None, Meta(description="Lost records that this consumer will not get.")]
    performance: Performance


class Acked(Struct):
    """Acknowledged records."""

    topic: str
    acked: Count
    skipped: Skipped
    ready: Ready
    in_flight: InFlight
    performance: SettlePerformance
    consumer: OfConsumer = UNSET


class Nacked(Struct):
    """Records returned for redelivery."""

    topic: str
    nacked: Count
    skipped: Skipped
    ready: Ready
    in_flight: InFlight
    performance: SettlePerformance
    consumer: OfConsumer = UNSET


class Extended(Struct):
    """Extended leases."""

    topic: str
    extended: Count
    skipped: Skipped
    deadlines: Annotated[dict[str, TimeMs], Meta(description="Expiry of the lease, by seq.")]
    performance: SettlePerformance
    consumer: OfConsumer = UNSET


class Termed(Struct):
    """Records that will not be delivered again."""

    topic: str
    consumer: str
    termed: Count
    skipped: Skipped
    ready: Ready
    in_flight: InFlight
    performance: SettlePerformance


class ConsumerConfig(Struct):
    """The effective configuration of a consumer."""

    ack: Literal["none", "all", "explicit"]
    ack_wait_ms: Annotated[int, Meta(ge=100, le=86_400_000)]
    max_deliver: Count
    backoff_ms: list[Count]
    filter: Annotated[
        list[tuple[Literal["tag"], Literal["Eq", "Glob", "Subject"], str]] | None,
        Meta(description="A record must match any of these; null: every record."),
    ]
    deliver: Literal["all", "new", "last", "last_per_tag"] | dict[Literal["from_seq", "from_ts"], Count]
    max_ack_pending: Count
    max_waiting: Count
    headers_only: bool
    dead_letter: str | None
    inactive_ttl_ms: Count
    replay: Literal["instant", "original"]


class ConsumerRow(Struct):
    """Configuration, position and counters of a consumer."""

    topic: str
    consumer: str
    config: ConsumerConfig
    created_ts: TimeMs
    next_seq: Annotated[Seq, Meta(description="First seq that has not been delivered.")]
    ack_floor: Annotated[Count, Meta(description="All records up to this seq are acknowledged.")]
    delivered: Annotated[Count, Meta(description="Deliveries, redeliveries included.")]
    redelivered: Count
    acked: Count
    ack_pending: Annotated[Count, Meta(description="Records delivered and not yet acknowledged.")]
    in_flight: InFlight
    dead_lettered: Count
    given_up: Annotated[
        Count, Meta(description="Records that had their last delivery without a dead letter topic to go to.")
    ]
    waiting: Annotated[Count, Meta(description="Waiting fetches and streams.")]
    lag_records: Annotated[Count, Meta(description="Matching live records that have not been delivered.")]
    lag_ms: Annotated[Count, Meta(description="Age of the oldest of them.")]
    last_activity_ts: TimeMs
    paused: bool
    paused_until_ts: TimeMs | None
    stalled: Annotated[
        bool, Meta(description="Whether records are waiting although `max_ack_pending` is reached.")
    ]
    tombstone: Annotated[Tombstone | None, Meta(description="The tombstone that the next fetch returns.")]


class Consumer(ConsumerRow):
    """Configuration, position and counters of a consumer."""

    performance: Performance


class ConsumerPut(Consumer):
    """A consumer that was created, or whose configuration was replaced."""

    created: bool


class ConsumerList(Struct):
    """Consumers, ordered by name."""

    topic: str
    consumers: list[ConsumerRow]
    performance: Performance
    next_cursor: NextCursor = UNSET


class ConsumerDeleted(Struct):
    """`deleted` is false if the consumer did not exist."""

    topic: str
    consumer: str
    deleted: bool
    performance: Performance


class ConsumerReset(Struct):
    """The new position of the consumer; with `dry_run`, the position it would get."""

    topic: str
    consumer: str
    dry_run: bool
    from_seq: Annotated[Seq, Meta(description="`next_seq` before.")]
    to_seq: Annotated[Seq, Meta(description="`next_seq` after.")]
    redelivers: Annotated[Count, Meta(description="Matching live records that will be delivered again.")]
    skips: Annotated[Count, Meta(description="Matching live records that will not be delivered.")]
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
