"""Kinds of log frames, and the payloads of control frames as MessagePack arrays. Fields are only ever added at the end.

`KINDS` says what a log can hold. What a frame changes is known to the feature that logs it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from topics.api.config import ConsumerConfig, TopicConfig
from topics.engine.commands.forwards import Forward
from topics.engine.storage import frames


class TopicCreated(msgspec.Struct, frozen=True, array_like=True):
    name: str
    config: TopicConfig
    ceiling: int


class ConfigChanged(msgspec.Struct, frozen=True, array_like=True):
    config: TopicConfig
    ceiling: int
    head: int


class Deletion(msgspec.Struct, frozen=True, array_like=True):
    ranges: list[tuple[int, int]]
    erase: bool = False


class Floors(msgspec.Struct, frozen=True, array_like=True):
    cap_lost: int
    ttl_lost: int


class Skipped(msgspec.Struct, frozen=True, array_like=True):
    first: int
    count: int


class Lost(msgspec.Struct, frozen=True, array_like=True):
    first: int
    last: int
    reason: str


class Swapped(msgspec.Struct, frozen=True, array_like=True):
    first_seq: int
    generation: int
    cap_lost: int
    ttl_lost: int
    tier: str = "hot"


class TimeCeiling(msgspec.Struct, frozen=True, array_like=True):
    ceiling_ms: int
    now_ms: int
    mono_ms: int
    boot_id: str


class ConsumerStored(msgspec.Struct, frozen=True, array_like=True):
    """A consumer was created or changed; its config and position."""

    name: str
    config: ConsumerConfig
    cursor: int
    initial_seqs: list[int]
    created_ms: int


class DeadLettersReceived(msgspec.Struct, frozen=True, array_like=True):
    source_id: int
    number: int


class OutflowOpen(msgspec.Struct, frozen=True, array_like=True):
    """A forward copies topics of this shard from now on, or its rule changed."""

    forward: Forward
    starts: list[tuple[int, int, int]]  # topic id, epoch, seq


class InflowOpen(msgspec.Struct, frozen=True, array_like=True):
    uid: int
    name: str
    source: str = ""  # empty for rules stored by versions without this field


class Copied(msgspec.Struct, frozen=True, array_like=True):
    """Copied up to this seq of the source; in one envelope with the copies. Negative: the source was dropped."""

    uid: int
    source_id: int
    epoch: int
    seq: int
    total: int


class WalStart(msgspec.Struct, frozen=True, array_like=True):
    """First frame of every file: the preceding file, how it ended, and the boot on which this file was started."""

    file_number: int
    previous_file: int
    previous_lsn: int  # later entries in earlier files are void: recovery copied the valid ones
    previous_digest: bytes
    boot_id: str


class Event(msgspec.Struct, frozen=True, array_like=True):
    """A change to one consumer, as logged. Fields may be added at the end, never moved."""

    consumer: str
    kind: int
    seqs: list[int] = []
    until_ms: int = 0  # the lease deadline, the end of a delay, or the end of a pause
    node: bytes = b""
    first_id: int = 0  # lease id of the first seq; the others follow consecutively
    deliveries: list[int] = []  # delivery count of each seq; empty: all 1, or unchanged
    cursor: int = 0  # 0: unchanged
    number: int = 0  # number of the first dead letter
    target: str = ""
    reason: str = ""
    streamed: bool = False  # delivered over a connection, which does not survive a restart


class MergeInput(msgspec.Struct, frozen=True, array_like=True):
    """A merged segment, and the size of its files without the last digest file."""

    first_seq: int
    generation: int
    bytes: int


class MergedGroup(msgspec.Struct, frozen=True, array_like=True):
    group: int
    first_seq: int
    next_seq: int
    generation: int
    bytes_in: int  # of .data
    bytes_out: int
    live: int

    @property
    def rows(self) -> int:
        return self.next_seq - self.first_seq


class FailedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group that was not published."""

    group: int
    segment: str
    reason: str


class Merged(msgspec.Struct, frozen=True, array_like=True):
    """Log frame: a plan was committed. It includes the eviction floors, as records expire without a frame."""

    plan_id: str
    manifest: int
    cap_lost: int
    ttl_lost: int
    groups: list[MergedGroup]
    inputs: list[list[MergeInput]]  # by group
    failed: list[FailedGroup] = []


class Decision(msgspec.Struct, array_like=True):
    """A commit decision, which is final. `offset`: of the entry in the transaction's file that lists the chunks to append."""

    offset: int
    chunks: int
    records: int
    size: int
    done: int = 0  # chunks that are in the log
    first_seq: int = 0
    last_seq: int = 0
    count: int = 0  # records that are in the log
    size_done: int = 0


class Opened(msgspec.Struct, frozen=True, array_like=True):
    txn: int
    number: int
    producer: str
    batch: int
    ttl_ms: int


class Decided(msgspec.Struct, frozen=True, array_like=True):
    txn: int
    decision: Decision


class Advanced(msgspec.Struct, frozen=True, array_like=True):
    """Progress of a commit, in the envelope with the records. `ended`: all of them are now in the log."""

    txn: int
    ended: bool
    done: int
    first_seq: int
    last_seq: int
    count: int
    size_done: int
    at_ms: int
    forgotten: list[str]  # idle producers, dropped to make room


# ── Kinds ─────────────────────────────────────────────────────────────────────────────


class Scope(Enum):
    FILE = "file"  # the log file itself
    SHARD = "shard"  # its header has no topic
    TOPIC = "topic"


class ReplayOrder(Enum):
    """When a frame of a topic whose rows are not loaded is replayed."""

    DEFERRED = "deferred"  # perhaps only when the topic is first used, after the frames before it
    LOADED = "loaded"  # at once, after its rows are loaded
    AT_ONCE = "at once"  # it does not depend on rows


class FrameKind:
    """What frames of one number are."""

    def __init__(self, number: int, name: str, payload: Any, scope: Scope, replay: ReplayOrder) -> None:
        self.number = number
        self.name = name
        self.payload = payload  # type of the MessagePack payload; None: a record
        self.scope = scope
        self.replay = replay
        self.decode = msgspec.msgpack.Decoder(payload).decode


def _kind(
    number: int,
    name: str,
    payload: Any,
    scope: Scope = Scope.TOPIC,
    replay: ReplayOrder = ReplayOrder.DEFERRED,
) -> tuple[int, FrameKind]:
    return number, FrameKind(number, name, payload, scope, replay)


KINDS: dict[int, FrameKind] = dict(
    (
        _kind(frames.APPEND, "append", None),
        _kind(frames.TOPIC_CREATE, "topic-create", TopicCreated, replay=ReplayOrder.AT_ONCE),
        _kind(frames.TOPIC_DELETE, "topic-delete", None, replay=ReplayOrder.AT_ONCE),
        _kind(frames.FORWARD_PUT, "forward-put", Forward, Scope.SHARD),
        _kind(frames.FORWARD_DELETE, "forward-delete", int, Scope.SHARD),
        _kind(frames.DELETE, "delete", Deletion),
        _kind(frames.EVICT, "evict", Floors),
        _kind(
            frames.CONFIG, "config", ConfigChanged, replay=ReplayOrder.LOADED
        ),  # deferring depends on the class
        _kind(frames.LEASE, "lease", Event),
        _kind(frames.SEQ_CEILING, "seq-ceiling", int),
        _kind(frames.TIME_CEILING, "time-ceiling", TimeCeiling, Scope.SHARD),
        _kind(frames.SEGMENT_SWAP, "segment-swap", Swapped),
        _kind(frames.SKIP, "skip", Skipped),
        _kind(frames.LOSS, "loss", Lost),
        _kind(frames.WAL_START, "wal-start", WalStart, Scope.FILE),
        _kind(frames.ERASE_DONE, "erase-done", list[tuple[int, int]]),
        _kind(frames.CONSUMER_PUT, "consumer-put", ConsumerStored),
        _kind(frames.CONSUMER_DELETE, "consumer-delete", str),
        _kind(frames.LETTERS_TAKEN, "letters-taken", DeadLettersReceived),
        _kind(frames.OUTFLOW_OPEN, "outflow-open", OutflowOpen, Scope.SHARD),
        _kind(frames.OUTFLOW_CLOSE, "outflow-close", int, Scope.SHARD),
        # Not deferred: a forward that is missing in its topic is treated as ended.
        _kind(frames.INFLOW_OPEN, "inflow-open", InflowOpen, replay=ReplayOrder.AT_ONCE),
        _kind(frames.INFLOW_CLOSE, "inflow-close", int, replay=ReplayOrder.AT_ONCE),
        _kind(frames.COPIED, "copied", Copied, replay=ReplayOrder.AT_ONCE),
        _kind(frames.EPOCH, "epoch", int, replay=ReplayOrder.AT_ONCE),
        _kind(frames.SEGMENT_MERGE, "segment-merge", Merged),
        _kind(frames.TXN_OPENED, "txn-opened", Opened, replay=ReplayOrder.AT_ONCE),
        _kind(frames.TXN_DECIDED, "txn-decided", Decided, replay=ReplayOrder.AT_ONCE),
        _kind(frames.TXN_ADVANCED, "txn-advanced", Advanced, replay=ReplayOrder.AT_ONCE),
        _kind(frames.TXN_ENDED, "txn-ended", int, replay=ReplayOrder.AT_ONCE),
    )
)


def kind_name(number: int) -> str:
    """The name of a kind of frame; its number if this version does not know it."""
    return KINDS[number].name if number in KINDS else str(number)
