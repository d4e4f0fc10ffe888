"""The JSON bodies that the server sends about sink transactions, as types; see `responses`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from topics.api.responses.records import Count, Performance, Seq

TxnId = Annotated[
    str, Meta(pattern="^[0-9a-f]{16}$", description="The same for the same producer and batch.")
]
BatchSeq = Annotated[
    Seq | None,
    Meta(description="null: the batch is not committed, has no records, or is not the producer's last one."),
]


class Transaction(Struct):
    """Where a transaction is."""

    topic: str
    txn: TxnId
    state: Literal["open", "committing", "committed"]
    first_seq: BatchSeq
    last_seq: BatchSeq
    count: Annotated[Count | None, Meta(description="Records of the batch; null when that is not known.")]
    performance: Performance
    progress: (
        Annotated[float, Meta(ge=0, le=1, description="How much of it is appended; while it is committing.")]
        | UnsetType
    ) = UNSET


class ChunkStaged(Struct):
    """A chunk is in the transaction."""

    topic: str
    part: str
    chunk: Count
    records: Annotated[Count, Meta(description="Records that were sent.")]
    repeated: Annotated[bool, Meta(description="It was there already; nothing was changed.")]
    performance: Performance


class TransactionAborted(Struct):
    """Nothing of it becomes a record."""

    topic: str
    txn: TxnId
    state: Literal["aborted"]
    performance: Performance


BODIES: tuple[type[msgspec.Struct], ...] = (Transaction, ChunkStaged, TransactionAborted)
