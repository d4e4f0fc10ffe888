"""Commands on consumers, and their results.

The consumer `""` of a queue is its built-in one: an ack deletes the job. A named consumer has its own cursor on any topic,
and its acks delete nothing unless the topic's `retention` says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from topics.api.config import ConsumerConfig
from topics.engine.commands.page import Page, Tombstone

QUEUE = ""  # name of the built-in consumer of a queue

SettleKind: TypeAlias = Literal["ack", "nack", "extend", "term"]
NackKind: TypeAlias = Literal["retry", "release", "dead"]


@dataclass(slots=True)
class MovesDeadLetters:
    """A command that may send dead letters. The shard sets the number of the last one it sent, and the time."""

    topic: str
    last_dead_letter: int = field(default=0, init=False, repr=False)
    dead_letters_ms: int = field(default=0, init=False, repr=False)  # monotonic clock


@dataclass(slots=True)
class Claim(MovesDeadLetters):
    """Deliver records to a node under leases. A leased record is not delivered again until it is settled or the lease expires.

    If there is nothing to deliver, the result is empty, or the claim waits: up to `wait_ms`, or without limit if `standing`.
    The result of a standing claim is records, a tombstone or an error, never empty.
    """

    consumer: str = QUEUE
    node: bytes = b""
    max: int = 1
    lease_ms: int = 0  # 0: as configured for the topic or consumer
    max_bytes: int = 0  # 0: CLAIM_BYTES_DEFAULT
    wait_ms: int = 0
    standing: bool = False
    connection: int = 0  # if not 0, `Release` with this number returns the unsettled records of this claim


@dataclass(slots=True)
class Claimed:
    """Records in ascending order of seq, with one lease each. Without acks the lease ids are 0."""

    topic: str
    consumer: str
    page: Page
    lease_ids: list[int]
    deadlines: list[int]
    deliveries: list[int]
    ready: int  # records that can still be claimed
    tombstone: Tombstone | None = None  # records lost before the consumer reached them


@dataclass(slots=True)
class Settle(MovesDeadLetters):
    """Ack, nack, extend or terminate leases of `node`. A seq that the node has no lease on is skipped.

    `lease_ids` is empty or as long as `seqs`; 0 matches any lease of the node. With a consumer of ack policy "all" only the
    highest seq counts: every record delivered up to it is acked.
    """

    kind: SettleKind
    node: bytes
    seqs: list[int]
    lease_ids: list[int] = field(default_factory=list)
    consumer: str = QUEUE
    delay_ms: int = 0  # of a nack
    nack: NackKind = "retry"
    reason: str = ""  # of a nack "dead" or a term: stored in the meta of the dead letter
    lease_ms: int = 0  # of an extend


@dataclass(slots=True)
class Settled:
    topic: str
    consumer: str
    kind: SettleKind
    count: int
    skipped: list[int]
    ready: int
    in_flight: int
    deadlines: dict[int, int] = field(default_factory=dict)  # of an extend: by seq
    synced: bool = False  # the result waited for a sync


@dataclass(slots=True)
class Release:
    """A connection closed: its leased records become ready at once, and its standing claim gets no result."""

    topic: str
    consumer: str
    connection: int


@dataclass(slots=True)
class Released:
    topic: str
    count: int


@dataclass(slots=True)
class PutConsumer:
    topic: str
    consumer: str
    config: ConsumerConfig


@dataclass(slots=True)
class DropConsumer:
    topic: str
    consumer: str


@dataclass(slots=True)
class ConsumerDropped:
    topic: str
    consumer: str
    deleted: bool


@dataclass(slots=True)
class PauseConsumer:
    """Stop deliveries until `until_ms` (engine time; 0: until resumed), or resume them if not `paused`."""

    topic: str
    consumer: str
    paused: bool
    until_ms: int = 0


@dataclass(slots=True)
class ResetConsumer:
    """Move the cursor to a seq, a time, the start or the end. Leases and delivery counts are dropped.

    With `dry_run` nothing changes, and the result says what would.
    """

    topic: str
    consumer: str
    to: Literal["start", "end", "seq", "ts"]
    value: int = 0
    dry_run: bool = False
    epoch: str | None = None  # in which the seq was read; see flows.py


@dataclass(slots=True)
class ConsumerReset:
    state: ConsumerState
    dry_run: bool
    from_seq: int  # old cursor: the next seq that was never delivered
    to_seq: int  # new cursor
    redelivers: int  # live records that are delivered again
    skips: int  # live records that are no longer delivered


@dataclass(slots=True)
class GetConsumer:
    topic: str
    consumer: str


@dataclass(slots=True)
class ListConsumers:
    topic: str
    after: str = ""
    limit: int = 100


@dataclass(slots=True)
class ConsumerState:
    topic: str
    consumer: str
    config: ConsumerConfig
    created: bool  # by this request
    created_ts: int
    cursor: int  # the next seq that was never delivered
    delivered: int  # deliveries, including redeliveries
    redelivered: int
    ack_floor: int  # everything up to here is settled
    ack_pending: int  # delivered and not settled: leased, or waiting for redelivery
    in_flight: int  # under a lease that has not expired
    acked: int
    dead_lettered: int
    given_up: int  # dropped after the last delivery, without a dead letter topic
    waiting: int  # parked fetches and streams
    lag_records: int  # live records that match and were never delivered
    lag_ms: int  # the age of the oldest of them
    last_activity_ts: int
    paused: bool
    paused_until_ts: int
    stalled: bool  # records are ready, but too many deliveries are unsettled
    tombstone: Tombstone | None = None  # returned by the next fetch


@dataclass(slots=True)
class ConsumerList:
    """Up to `limit` + 1 rows; the extra row means that there are more."""

    topic: str
    consumers: list[ConsumerState]


# -- dead letters: between shards --------------------------------------------------------------------------------


@dataclass(slots=True)
class DeadLetter:
    """A record to be appended to a dead letter topic. (source_id, number) identifies it; the numbers of a source increase."""

    source: str  # topic name
    source_id: int
    consumer: str
    seq: int
    number: int
    target: str
    deliveries: int
    reason: str
    data: bytes  # JSON text or raw bytes
    meta: bytes  # JSON text of the new meta, an object
    tag: bytes | None
    node: bytes | None
    raw: bool = False
    header_len: int = 0  # of raw data: length of its header block


@dataclass(slots=True)
class TakeDeadLetters:
    """To the target's shard: append the dead letters that it does not have yet in one batch, and store the last number."""

    topic: str
    source_id: int
    dead_letters: list[DeadLetter]


@dataclass(slots=True)
class DeadLettersTaken:
    topic: str
    source_id: int
    last_number: int


@dataclass(slots=True)
class SettleDeadLetters:
    """To the source's shard: the target has the dead letters up to `number` (`done`), or refused them, and they are ready again."""

    topic: str
    source_id: int
    number: int
    done: bool


@dataclass(slots=True)
class DeadLettersSettled:
    topic: str


ConsumerChange: TypeAlias = (
    Claim
    | Settle
    | Release
    | PutConsumer
    | DropConsumer
    | PauseConsumer
    | ResetConsumer
    | TakeDeadLetters
    | SettleDeadLetters
)
ConsumerQuery: TypeAlias = GetConsumer | ListConsumers
ConsumerResult: TypeAlias = (
    Claimed | Settled | Released | ConsumerState | ConsumerDropped | ConsumerReset | ConsumerList | DeadLettersTaken
    | DeadLettersSettled
)  # fmt: skip
