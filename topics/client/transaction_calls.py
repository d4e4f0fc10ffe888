"""Calls for transactions: batches that are written atomically and exactly once; see docs/transactions.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from topics.client import flows
from topics.client.answers import ChunkStaged, Transaction, TransactionAborted
from topics.client.calls import topic_path
from topics.client.flows import Core, Flow, Request, json_request
from topics.client.record_encoding import body_of, encode, is_bytes

CHUNK_RECORDS_MAX = 10_000  # per call
CHUNK_BYTES = 1 << 20  # target size of a chunk
COMMIT_WAIT_MS = 10_000


def transaction_path(topic: str, *suffix: str) -> str:
    return topic_path(topic, "transactions", *suffix)


def begin_transaction(
    core: Core,
    topic: str,
    producer: str,
    batch: int,
    *,
    ttl_ms: int | None = None,
    create: bool | None = None,
) -> Flow[Transaction]:
    """Begin the transaction of a producer's batch, or get its state: open, committing or committed."""
    body = {"producer": producer, "batch": batch, "ttl_ms": ttl_ms, "create": create}
    return core.call(json_request("POST", transaction_path(topic), body), Transaction)


def stage(
    core: Core,
    topic: str,
    txn: str,
    part: str,
    chunk: int,
    records: Iterable[Any],
    *,
    node: str | None = None,
) -> Flow[ChunkStaged]:
    """Stage a chunk of a part: `NewRecord`s, or plain data. A chunk that was staged before is not replaced."""
    fields: dict[str, Any] = {"part": part, "chunk": chunk}
    if node is not None:
        fields["node"] = node
    return _stage(core, topic, txn, [encode(record) for record in records], fields)


def _stage(
    core: Core, topic: str, txn: str, parts: list[bytes], fields: Mapping[str, Any]
) -> Flow[ChunkStaged]:
    request = Request("POST", transaction_path(topic, txn, "stage"), body_of(parts, fields), flows.JSON)
    return core.call(request, ChunkStaged)


def commit_transaction(
    core: Core, topic: str, txn: str, parts: Iterable[tuple[str, int, int]] = ()
) -> Flow[Transaction]:
    """Commit: `parts` are (part, chunks, records) in the order of the records. Returns when everything is synced."""
    named = [{"part": part, "chunks": chunks, "records": count} for part, chunks, count in parts]
    body = msgspec.json.encode({"parts": named, "wait_ms": COMMIT_WAIT_MS})
    path = transaction_path(topic, txn, "commit")
    while True:
        request = Request("POST", path, body, flows.JSON, COMMIT_WAIT_MS / 1000)
        transaction = yield from core.call(request, Transaction)
        if transaction.state == "committed":
            return transaction


def abort_transaction(core: Core, topic: str, txn: str) -> Flow[TransactionAborted]:
    """Abort the transaction. It can be begun again."""
    return core.call(Request("POST", transaction_path(topic, txn, "abort")), TransactionAborted)


def write_batch(
    core: Core,
    topic: str,
    producer: str,
    batch: int,
    records: Iterable[Any],
    *,
    node: str | None = None,
    create: bool | None = None,
) -> Flow[Transaction]:
    """Write any number of records as one batch of a producer, atomically and exactly once. Safe to repeat after errors.

    `producer` is a permanent name, `batch` an increasing number. A batch at or below the producer's last committed one
    is already committed: nothing is written, and `records` is not consumed.
    """
    begun = yield from begin_transaction(core, topic, producer, batch, create=create)
    if begun.state == "committed":
        return begun
    if begun.state == "committing":  # an earlier attempt has sent the commit with its parts
        return (yield from commit_transaction(core, topic, begun.txn))
    part = core.new_key()  # unique per attempt, so as not to mix with chunks of an earlier one
    chunks = count = 0
    for parts in _chunks(records):
        fields = {"part": part, "chunk": chunks} | ({"node": node} if node is not None else {})
        yield from _stage(core, topic, begun.txn, parts, fields)
        chunks, count = chunks + 1, count + len(parts)
    named = [(part, chunks, count)] if chunks else []
    return (yield from commit_transaction(core, topic, begun.txn, named))


def _chunks(records: Iterable[Any]) -> Iterator[list[bytes]]:
    """Encoded records in chunks that fit into a call. Bytes cannot share a call with other values."""
    parts: list[bytes] = []
    size, of_bytes = 0, False
    for record in records:
        part, has_bytes = encode(record), is_bytes(record)
        if parts and (
            size + len(part) > CHUNK_BYTES or len(parts) == CHUNK_RECORDS_MAX or has_bytes != of_bytes
        ):
            yield parts
            parts, size = [], 0
        parts.append(part)
        size, of_bytes = size + len(part), has_bytes
    if parts:
        yield parts
