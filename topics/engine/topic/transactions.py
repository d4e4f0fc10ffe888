"""Sink transactions of one topic: open transactions, and the last committed batch of each producer.

    open ──▶ decided ──▶ ended, its batch is the producer's last one
      └────▶ ended (aborted, expired, superseded by a later batch, or the topic was dropped)

Each arrow is a log frame; the `note_…` methods apply it, live and in replay. A transaction that fits one envelope is never in
the decided state: its records and its end are written together. For a larger one, the decision is synced before anything is
appended. Each further envelope has records and the number of chunks that are now in the log; after a restart the commit
continues from there.

Batches of a producer are committed in ascending order, so keeping the last one is enough to recognise all earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec
import xxhash

from topics.api.limits import TXN_PRODUCER_IDLE_MS, TXN_PRODUCERS_FORGOTTEN_MAX, TXN_PRODUCERS_MAX
from topics.engine.commands.transactions import CommitTransaction
from topics.engine.storage.control import Advanced, Decided, Decision, Opened
from topics.engine.storage.files import HEADER_BYTES
from topics.engine.storage.transaction_file import ChunkHead, ChunkPosition, file_name

LogT = TypeVar("LogT")  # TopicLog, which imports this module


# -- stored in the log and in snapshots --------------------------------------------------------------------


class Producer(msgspec.Struct, array_like=True):
    """A producer's last committed batch."""

    name: str
    batch: int
    first_seq: int  # 0: the batch has no records
    last_seq: int
    count: int
    at_ms: int


class OpenRow(msgspec.Struct, array_like=True):
    opened: Opened
    decision: Decision | None


class TransactionsRow(msgspec.Struct, array_like=True):
    """The transactions in the topic's snapshot row."""

    number: int
    producers: list[Producer]
    opened: list[OpenRow]


# -- in memory ---------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class StagedChunk:
    """A chunk that waits to be written to the transaction's file."""

    token: object
    head: ChunkHead
    entry: bytes

    @property
    def key(self) -> tuple[str, int]:
        return self.head.part, self.head.chunk


@dataclass(slots=True, eq=False)
class CommitWaiter:
    """A commit request that waits for its outcome."""

    token: object
    command: CommitTransaction
    until_ms: int  # on the monotonic clock
    is_answered: bool = False


@dataclass(slots=True, eq=False)
class OpenTransaction(Generic[LogT]):
    log: LogT
    id: int
    number: int
    producer: str
    batch: int
    ttl_ms: int
    decision: Decision | None = None
    logged: Decision | None = None  # as far as logged: where a restart continues
    is_ended: bool = False
    expires_ms: int = 0  # on the monotonic clock
    # Its file.
    is_indexed: bool = True  # False after a restart, until the file is read
    chunks: dict[tuple[str, int], tuple[ChunkPosition, int]] = field(
        default_factory=dict
    )  # with the largest record
    end: int = HEADER_BYTES
    bytes: int = 0  # written, or waiting to be
    order: list[ChunkPosition] | None = None  # the chunks to append, once decided
    # Requests.
    waiting: list[StagedChunk] = field(default_factory=list)
    writing: list[StagedChunk] = field(default_factory=list)
    commit_waiters: list[CommitWaiter] = field(default_factory=list)
    resume_ms: int = 0  # when work on it is retried

    @property
    def name(self) -> str:
        return file_name(self.id, self.number)

    @property
    def is_idle(self) -> bool:
        return self.decision is None and not (self.waiting or self.writing or self.commit_waiters)

    @property
    def progress(self) -> float:
        decision = self.decision
        return decision.done / decision.chunks if decision is not None and decision.chunks else 0.0

    @property
    def reserved(self) -> int:
        """Bytes that are decided but not in the log yet."""
        return self.decision.size - self.decision.size_done if self.decision is not None else 0

    def decide(self, decision: Decision | None) -> None:
        self.decision = decision
        self.logged = _copy(decision)

    def row(self) -> OpenRow:
        opened = Opened(self.id, self.number, self.producer, self.batch, self.ttl_ms)
        return OpenRow(opened, _copy(self.logged))


class TopicTransactions(Generic[LogT]):
    """The transactions of one topic, in the staged state."""

    __slots__ = ("committed", "ended", "number", "open", "producers")

    def __init__(self) -> None:
        self.number = 0  # of the transaction opened last
        self.producers: dict[str, Producer] = {}
        self.open: dict[int, OpenTransaction[LogT]] = {}  # by id
        self.committed: dict[int, str] = {}  # transaction id of each producer's last batch → producer
        self.ended: dict[
            int, OpenTransaction[LogT]
        ] = {}  # ended, with a file that is not removed yet; by number

    @classmethod
    def restored(cls, log: LogT, row: TransactionsRow) -> TopicTransactions[LogT]:
        made = cls()
        made.number = row.number
        for producer in row.producers:
            made._set_producer(producer)
        for opened in row.opened:
            made.note_opened(log, opened.opened).decide(opened.decision)
        return made

    def row(self) -> TransactionsRow | None:
        if not self.number:
            return None
        producers = [msgspec.structs.replace(producer) for producer in self.producers.values()]
        return TransactionsRow(self.number, producers, [txn.row() for txn in self.open.values()])

    def note_opened(self, log: LogT, opened: Opened) -> OpenTransaction[LogT]:
        known = self.open.get(opened.txn)
        if known is not None and known.number == opened.number:
            known.ttl_ms = opened.ttl_ms
            return known
        txn = OpenTransaction(log, opened.txn, opened.number, opened.producer, opened.batch, opened.ttl_ms)
        self.open[txn.id] = txn
        self.number = max(self.number, txn.number)
        return txn

    def note_decided(self, decided: Decided) -> None:
        txn = self.open.get(decided.txn)
        if txn is not None:
            txn.decide(decided.decision)

    def note_ended(self, txn_id: int) -> OpenTransaction[LogT] | None:
        """The transaction has ended, committed or not; its file may be removed."""
        txn = self.open.pop(txn_id, None)
        if txn is not None:
            txn.is_ended = True
            self.ended[txn.number] = txn
        return txn

    def note_advanced(self, entry: Advanced, *, is_logged: bool = True) -> None:
        txn = self.open.get(entry.txn)
        if txn is None:
            return
        decision = txn.decision
        if decision is not None:
            decision.done, decision.count, decision.size_done = entry.done, entry.count, entry.size_done
            decision.first_seq, decision.last_seq = entry.first_seq, entry.last_seq
            txn.logged = _copy(decision) if is_logged else txn.logged
        if not entry.ended:
            return
        for name in entry.forgotten:
            gone = self.producers.pop(name, None)
            if gone is not None:
                self.committed.pop(transaction_id(name, gone.batch), None)
        self._set_producer(
            Producer(txn.producer, txn.batch, entry.first_seq, entry.last_seq, entry.count, entry.at_ms)
        )
        for other in self.ended_by(txn):
            self.note_ended(other.id)

    def ended_by(self, txn: OpenTransaction[LogT]) -> list[OpenTransaction[LogT]]:
        """The transactions that the commit of one ends: itself, and open ones of the producer's earlier batches."""
        return [
            other
            for other in self.open.values()
            if other.producer == txn.producer and other.batch <= txn.batch
        ]

    def _set_producer(self, producer: Producer) -> None:
        before = self.producers.get(producer.name)
        if before is not None:
            self.committed.pop(transaction_id(before.name, before.batch), None)
        self.producers[producer.name] = producer
        self.committed[transaction_id(producer.name, producer.batch)] = producer.name

    def evictable_producers(self, producer: str, now_ms: int) -> list[str] | None:
        """Idle producers to drop to make room for this one; empty: none needed; None: all are active."""
        if producer in self.producers or len(self.producers) < TXN_PRODUCERS_MAX:
            return []
        idle = [
            known.name for known in self.producers.values() if now_ms - known.at_ms > TXN_PRODUCER_IDLE_MS
        ]
        return idle[:TXN_PRODUCERS_FORGOTTEN_MAX] or None

    def is_blocked(self, txn: OpenTransaction[LogT]) -> bool:
        """Whether another batch of the same producer is being appended."""
        return any(
            other.decision is not None and other.producer == txn.producer and other is not txn
            for other in self.open.values()
        )

    @property
    def reserved(self) -> tuple[int, int]:
        """Records and bytes that are decided but not in the log yet."""
        left = [txn.decision for txn in self.open.values() if txn.decision is not None]
        records = sum(decision.records - decision.count for decision in left)
        return records, sum(txn.reserved for txn in self.open.values())


def _copy(decision: Decision | None) -> Decision | None:
    return msgspec.structs.replace(decision) if decision is not None else None


def transaction_id(producer: str, batch: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{producer}\0{batch}".encode())
