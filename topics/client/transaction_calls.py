"""Transactions: batches of a producer that appear once and whole, however often any call is repeated; docs/transactions.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from topics.client import flows
from topics.client.answers import ChunkStaged, Transaction, TransactionAborted
from topics.client.calls import topic_path
from topics.client.flows import Core, Flow, Request, json_request
from topics.client.writing import body_of, encode, is_bytes

CHUNK_RECORDS_MAX = 10_000  # of one call
CHUNK_BYTES = 1 << 20  # what a chunk is filled up to
COMMIT_WAIT_MS = 10_000


def transaction_path(topic: str, *below: str) -> str:
    return topic_path(topic, "transactions", *below)


def begin_transaction(
    core: Core,
    topic: str,
    producer: str,
    batch: int,
    *,
    ttl_ms: int | None = None,
    create: bool | None = None,
) -> Flow[Transaction]:
    """Open the transaction of a producer's batch, or learn what became of it: `state` is open, committing or committed."""
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
    """Put a chunk of a part into it: `NewRecord`s, or their data alone. One that is there already stays as it is."""
    said: dict[str, Any] = {"part": part, "chunk": chunk}
    if node is not None:
        said["node"] = node
    return _stage(core, topic, txn, [encode(record) for record in records], said)


def _stage(
    core: Core, topic: str, txn: str, parts: list[bytes], said: Mapping[str, Any]
) -> Flow[ChunkStaged]:
    request = Request("POST", transaction_path(topic, txn, "stage"), body_of(parts, said), flows.JSON)
    return core.call(request, ChunkStaged)


def commit_transaction(
    core: Core, topic: str, txn: str, parts: Iterable[tuple[str, int, int]] = ()
) -> Flow[Transaction]:
    """Make it records: (part, chunks, records) in the order in which they appear. Returns when all of it is synced."""
    named = [{"part": part, "chunks": chunks, "records": count} for part, chunks, count in parts]
    body = msgspec.json.encode({"parts": named, "wait_ms": COMMIT_WAIT_MS})
    path = transaction_path(topic, txn, "commit")
    while True:
        request = Request("POST", path, body, flows.JSON, COMMIT_WAIT_MS / 1000)
        found = yield from core.call(request, Transaction)
        if found.state == "committed":
            return found


def abort_transaction(core: Core, topic: str, txn: str) -> Flow[TransactionAborted]:
    """Throw it away. It can be begun again."""
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
    """Write all of these records as the batch of a producer, once: of any number, and again for as long as its outcome is not known.

    `producer` is a lasting name, `batch` a number that rises. A batch at or below the last one that was committed is
    committed already: then nothing is written, and `records` is not even looked at.
    """
    begun = yield from begin_transaction(core, topic, producer, batch, create=create)
    if begun.state == "committed":
        return begun
    if begun.state == "committing":  # decided by an earlier try, which has said of what
        return (yield from commit_transaction(core, topic, begun.txn))
    part = core.new_key()  # of this try: what an earlier one has staged is not mixed with it
    chunks = count = 0
    for parts in _chunks(records):
        said = {"part": part, "chunk": chunks} | ({"node": node} if node is not None else {})
        yield from _stage(core, topic, begun.txn, parts, said)
        chunks, count = chunks + 1, count + len(parts)
    named = [(part, chunks, count)] if chunks else []
    return (yield from commit_transaction(core, topic, begun.txn, named))


def _chunks(records: Iterable[Any]) -> Iterator[list[bytes]]:
    """As many as fit into a call; bytes do not share one with other values."""
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
