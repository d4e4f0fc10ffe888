"""What a shard can be asked about consumers, and what it answers.

The consumer `""` of a queue is its built-in one: an ack deletes the job. A named consumer has a place of its own on
any topic and leaves the log alone, unless the topic's `retention` says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from topics.api.config import ConsumerConfig
from topics.engine.commands.page import Page, Tombstone

QUEUE = ""  # the name of a queue's own consumer

SettleKind: TypeAlias = Literal["ack", "nack", "extend", "term"]
NackKind: TypeAlias = Literal["retry", "release", "dead"]


@dataclass(slots=True)
class MovesDeadLetters:
    """A command that may send dead letters. The shard notes the number of the last one that it sent, and when."""

    topic: str
    letters: int = field(default=0, init=False, repr=False)
    letters_ms: int = field(default=0, init=False, repr=False)  # on the monotonic clock


@dataclass(slots=True)
class Claim(MovesDeadLetters):
    """Hand out records under leases, each to one node until it is settled or its lease has expired.

    Without anything to hand out the answer is empty, or waits: up to `wait_ms`, or, `standing`, for as long as it takes.
    A standing claim is answered only with records or a tombstone, or with an error.
    """

    consumer: str = QUEUE
    node: bytes = b""
    max: int = 1
    lease_ms: int = 0  # 0: as the topic or the consumer says
    max_bytes: int = 0  # 0: CLAIM_BYTES_DEFAULT
    wait_ms: int = 0
    standing: bool = False
    connection: int = 0  # not 0: `Release` of that number gives back what this claim got and was not settled


@dataclass(slots=True)
class Claimed:
    """The page's records in ascending order, and for each its lease. Of a consumer without acks the lease ids are 0."""

    topic: str
    consumer: str
    page: Page
    lease_ids: list[int]
    deadlines: list[int]
    deliveries: list[int]
    ready: int  # what could be claimed after this
    tombstone: Tombstone | None = None  # what the consumer will never get: lost before it came there


@dataclass(slots=True)
class Settle(MovesDeadLetters):
    """What became of records that `node` has leases on. A seq without such a lease is skipped.

    `lease_ids` is empty or as long as `seqs`; 0 stands for "whichever lease the node has". At a consumer that
    acks all the highest seq counts, and everything that was handed out up to there is acked.
    """

    kind: SettleKind
    node: bytes
    seqs: list[int]
    lease_ids: list[int] = field(default_factory=list)
    consumer: str = QUEUE
    delay_ms: int = 0  # of a nack
    nack: NackKind = "retry"
    reason: str = ""  # of a nack "dead" or a term: goes into the dead letter's meta
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
    synced: bool = False  # the answer waited for a sync


@dataclass(slots=True)
class Release:
    """A connection is gone: what was leased over it is ready again at once. Its standing claim goes without an answer."""

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
    """Nothing is handed out until `until_ms` (engine time; 0: until somebody resumes it), or, not `paused`, from now on."""

    topic: str
    consumer: str
    paused: bool
    until_ms: int = 0


@dataclass(slots=True)
class ResetConsumer:
    """Begin again at a seq, a time, the start or the end. What was handed out is forgotten.

    With `dry_run` nothing changes and the answer says what would.
    """

    topic: str
    consumer: str
    to: Literal["start", "end", "seq", "ts"]
    value: int = 0
    dry_run: bool = False
    epoch: str | None = None  # of the seq; see flows.py


@dataclass(slots=True)
class ConsumerReset:
    state: ConsumerState
    dry_run: bool
    from_seq: (
        int  # where it stood, and where it stands or would stand: the next seq that was never handed out
    )
    to_seq: int
    redelivers: int  # live records that it gets again
    skips: int  # live records that it does not get any more


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
    cursor: int  # the next seq that was never handed out
    delivered: int  # records handed out, each redelivery counted
    redelivered: int
    ack_floor: int  # everything up to here is settled
    ack_pending: int  # handed out and not settled: leased, or waiting to be handed out again
    in_flight: int  # of them under a lease that holds
    acked: int
    dead_lettered: int
    given_up: int  # had their last delivery and no dead letter to go to
    waiting: int  # parked fetches and streams
    lag_records: int  # live records that match and were never handed out
    lag_ms: int  # the age of the oldest of them
    last_activity_ts: int
    paused: bool
    paused_until_ts: int
    stalled: bool  # there is work and it may not be handed out: too much is not settled
    tombstone: Tombstone | None = None  # the next fetch will tell of this


@dataclass(slots=True)
class ConsumerList:
    """Up to `limit` + 1 rows: the extra one says that there is more."""

    topic: str
    consumers: list[ConsumerState]


# -- dead letters: between shards --------------------------------------------------------------------------------


@dataclass(slots=True)
class DeadLetter:
    """A record on its way to a dead letter topic. (source id, number) names it for good: numbers of one source rise."""

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
    header_len: int = 0  # of raw bytes: as much of the data is its header block


@dataclass(slots=True)
class TakeDeadLetters:
    """At the target: append those letters that are not there yet, in one batch, and remember the last number."""

    topic: str
    source_id: int
    letters: list[DeadLetter]


@dataclass(slots=True)
class DeadLettersTaken:
    topic: str
    source_id: int
    last_number: int


@dataclass(slots=True)
class EndMove:
    """At the source: the target has the letters up to `number` (`done`), or refused them and they become ready again."""

    topic: str
    source_id: int
    number: int
    done: bool


@dataclass(slots=True)
class MoveEnded:
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
    | EndMove
)
ConsumerQuery: TypeAlias = GetConsumer | ListConsumers
ConsumerResult: TypeAlias = (
    Claimed | Settled | Released | ConsumerState | ConsumerDropped | ConsumerReset | ConsumerList | DeadLettersTaken
    | MoveEnded
)  # fmt: skip
