"""Responses about sink transactions."""

from __future__ import annotations

from typing import Annotated

from topics.api.fields import Answer, Count, Seq, doc, one_of
from topics.api.responses.records import Performance

TxnId = Annotated[str, doc("Always the same for the same producer and batch.", pattern="^[0-9a-f]{16}$")]
BatchSeq = Annotated[
    Seq | None, doc("null: the batch is not committed, is empty, or is not the producer's last one.")
]


class Transaction(Answer, kw_only=True):
    """State of a transaction."""

    topic: str
    txn: TxnId
    state: Annotated[str, one_of("open", "committing", "committed")]
    first_seq: BatchSeq
    last_seq: BatchSeq
    count: Annotated[Count | None, doc("Records of the batch; null if unknown.")]
    progress: (
        Annotated[float, doc("While it is committing: the share that is appended.", minimum=0, maximum=1)]
        | None
    ) = None
    performance: Performance


class ChunkStaged(Answer, kw_only=True):
    """A staged chunk."""

    topic: str
    part: str
    chunk: Count
    records: Annotated[Count, doc("Records in the request.")]
    repeated: Annotated[bool, doc("The chunk was already staged; nothing changed.")]
    performance: Performance


class TransactionAborted(Answer, kw_only=True):
    """An aborted transaction; none of its records were appended."""

    topic: str
    txn: TxnId
    state: Annotated[str, one_of("aborted")]
    performance: Performance
