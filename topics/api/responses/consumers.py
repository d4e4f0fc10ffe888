"""Responses about queues and consumers. Those to claims and acks are built from bytes, in this form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, NotRequired, TypedDict

from msgspec import field

from topics.api.config import ConsumerSettings
from topics.api.fields import (
    ALWAYS,
    HIDDEN,
    Answer,
    Count,
    Milliseconds,
    NextCursor,
    Seq,
    TimeMs,
    doc,
)
from topics.api.responses.records import Performance, Record, Tombstone

LeaseId = Annotated[
    str, doc("Identifies this delivery; see `lease_ids` of an ack.", pattern="^lease_[0-9a-f]{1,16}$")
]
OfConsumer = Annotated[str, doc("Named consumers only.")] | None
Ready = Annotated[Count, doc("Records ready for delivery after this request.")]
InFlight = Annotated[Count, doc("Records under an active lease.")]
Skipped = Annotated[list[Count], doc("Seqs on which `node` holds no such lease; unchanged.")]
Deadlines = Annotated[dict[int, TimeMs], doc("Expiry of the lease, by seq.")]


class SettlePerformance(TypedDict):
    """Time spent on the request. `fsync_ms` is present if it waited for a sync."""

    server_total_ms: Milliseconds
    fsync_ms: NotRequired[Milliseconds]


class Job(Record, kw_only=True):
    """A delivered record. Fields that it does not have are absent, never `null`."""

    consumer: Annotated[str | None, HIDDEN] = None
    holder: Annotated[str, HIDDEN] = ""  # the node that holds the lease
    deliveries: Annotated[int, doc("Number of deliveries, this one included.", minimum=1), ALWAYS] = 1
    lease_id: LeaseId = ""
    deadline: Annotated[TimeMs, doc("When the lease expires.")] | None = None
    node: Annotated[str | None, HIDDEN] = field(name="$node", default=None)
    tag: str | None = field(name="$tag", default=None)
    bytes: Annotated[Count, doc("Size of `data`, which `headers_only` omits.")] | None = None


class Claimed(Answer, kw_only=True):
    """Jobs, ordered by seq. An empty list is normal."""

    topic: str
    consumer: Annotated[str | None, HIDDEN] = None
    jobs: list[Job] = field(name="claimed")
    count: Count
    ready: Ready
    tombstone: Annotated[Tombstone | None, HIDDEN] = None
    performance: Performance

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)


class Fetched(Claimed, kw_only=True):
    """Records, ordered by seq. An empty list is normal."""

    consumer: str
    tombstone: Annotated[Tombstone | None, doc("Lost records that this consumer will not get.")]


class SettledPart(Answer, kw_only=True):
    """The response to an ack, nack, extend or term: its kinds have different counts."""

    topic: str
    consumer: OfConsumer = None
    acked: Annotated[int, HIDDEN] = 0
    nacked: Annotated[int, HIDDEN] = 0
    extended: Annotated[int, HIDDEN] = 0
    termed: Annotated[int, HIDDEN] = 0
    skipped: Skipped
    deadlines: Annotated[dict[int, int], HIDDEN] = field(default_factory=dict)
    ready: Annotated[int, HIDDEN] = 0
    in_flight: Annotated[int, HIDDEN] = 0
    performance: SettlePerformance


class Acked(SettledPart, kw_only=True):
    """Acknowledged records."""

    acked: Count
    ready: Ready
    in_flight: InFlight


class Nacked(SettledPart, kw_only=True):
    """Records returned for redelivery."""

    nacked: Count
    ready: Ready
    in_flight: InFlight


class Extended(SettledPart, kw_only=True):
    """Extended leases."""

    extended: Count
    deadlines: Deadlines


class Termed(SettledPart, kw_only=True):
    """Records that will not be delivered again."""

    consumer: str
    termed: Count
    ready: Ready
    in_flight: InFlight


class Consumer(Answer, kw_only=True):
    """Configuration, position and counters of a consumer."""

    topic: str
    consumer: str
    config: ConsumerSettings
    created_ts: TimeMs
    next_seq: Annotated[Seq, doc("First seq that has not been delivered.")]
    ack_floor: Annotated[Count, doc("All records up to this seq are acknowledged.")]
    delivered: Annotated[Count, doc("Deliveries, redeliveries included.")]
    redelivered: Count
    acked: Count
    ack_pending: Annotated[Count, doc("Records delivered and not yet acknowledged.")]
    in_flight: InFlight
    dead_lettered: Count
    given_up: Annotated[
        Count, doc("Records that had their last delivery without a dead letter topic to go to.")
    ]
    waiting: Annotated[Count, doc("Waiting fetches and streams.")]
    lag_records: Annotated[Count, doc("Matching live records that have not been delivered.")]
    lag_ms: Annotated[Count, doc("Age of the oldest of them.")]
    last_activity_ts: TimeMs
    paused: bool
    paused_until_ts: TimeMs | None
    stalled: Annotated[bool, doc("Whether records are waiting although `max_ack_pending` is reached.")]
    tombstone: Annotated[Tombstone | None, doc("The tombstone that the next fetch returns.")]
    created: Annotated[bool, HIDDEN] = False
    performance: Annotated[Performance, HIDDEN] = field(default_factory=dict)  # type: ignore[assignment]


class ConsumerState(Consumer, kw_only=True):
    """Configuration, position and counters of a consumer."""

    performance: Performance


class ConsumerPut(ConsumerState, kw_only=True):
    """A consumer that was created, or whose configuration was replaced."""

    created: bool


class ConsumerList(Answer, kw_only=True):
    """Consumers, ordered by name."""

    topic: str
    consumers: list[Consumer]
    next_cursor: NextCursor = None
    performance: Performance


class ConsumerDeleted(Answer, kw_only=True):
    """`deleted` is false if the consumer did not exist."""

    topic: str
    consumer: str
    deleted: bool
    performance: Performance


class ConsumerReset(Answer, kw_only=True):
    """The new position of the consumer; with `dry_run`, the position it would get."""

    topic: str
    consumer: str
    dry_run: bool
    from_seq: Annotated[Seq, doc("`next_seq` before.")]
    to_seq: Annotated[Seq, doc("`next_seq` after.")]
    redelivers: Annotated[Count, doc("Matching live records that will be delivered again.")]
    skips: Annotated[Count, doc("Matching live records that will not be delivered.")]
    performance: Performance
