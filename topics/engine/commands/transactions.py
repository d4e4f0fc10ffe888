"""Commands on sink transactions, and their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from topics.engine.commands.records import Records

TransactionStatus: TypeAlias = Literal["open", "committing", "committed", "aborted"]


@dataclass(slots=True)
class BeginTransaction:
    """Open the transaction of this batch, or return its state if it exists."""

    topic: str
    producer: str
    batch: int
    ttl_ms: int = 3_600_000
    create: bool | None = None


@dataclass(slots=True)
class StageChunk:
    topic: str
    txn: int
    part: str
    chunk: int
    records: Records


@dataclass(slots=True)
class CommitTransaction:
    """Commit. `parts`: name, number of chunks and number of records of each part, in the order of appending."""

    topic: str
    txn: int
    parts: list[tuple[str, int, int]]
    wait_ms: int = 0


@dataclass(slots=True)
class AbortTransaction:
    topic: str
    txn: int


@dataclass(slots=True)
class TransactionState:
    """State of a transaction. For a committed batch `first_seq` and `last_seq` are 0 if it has no records. They are 0 and `count` is
    None if only a later batch of the producer is remembered.
    """

    topic: str
    txn: int
    state: TransactionStatus
    first_seq: int = 0
    last_seq: int = 0
    count: int | None = None
    progress: float = 0.0
    created: bool = False


@dataclass(slots=True)
class ChunkStaged:
    topic: str
    part: str
    chunk: int
    records: int
    repeated: bool = False


TransactionChange: TypeAlias = BeginTransaction | StageChunk | CommitTransaction | AbortTransaction
TransactionResult: TypeAlias = TransactionState | ChunkStaged
