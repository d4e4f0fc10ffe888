"""Responses about sink transactions."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from topics.api.responses.records import Count, Performance, Seq

TxnId = Annotated[
    str, Meta(pattern="^[0-9a-f]{16}$", description="Always the same for the same producer and batch.")
]
BatchSeq = Annotated[
    Seq | None,
    Meta(description="null: the batch is not committed, is empty, or is not the producer's last one."),
]


class Transaction(Struct):
    """State of a transaction."""

    topic: str
    txn: TxnId
    state: Literal["open", "committing", "committed"]
    first_seq: BatchSeq
    last_seq: BatchSeq
    count: Annotated[Count | None, Meta(description="Records of the batch; null if unknown.")]
    performance: Performance
    progress: (
        Annotated[float, Meta(ge=0, le=1, description="While it is committing: the share that is appended.")]
        | UnsetType
    ) = UNSET


class ChunkStaged(Struct):
    """A staged chunk."""

    topic: str
    part: str
    chunk: Count
    records: Annotated[Count, Meta(description="Records in the request.")]
    repeated: Annotated[bool, Meta(description="The chunk was already staged; nothing changed.")]
    performance: Performance


class TransactionAborted(Struct):
    """An aborted transaction; none of its records were appended."""

    topic: str
    txn: TxnId
    state: Literal["aborted"]
    performance: Performance


BODIES: tuple[type[msgspec.Struct], ...] = (Transaction, ChunkStaged, TransactionAborted)
