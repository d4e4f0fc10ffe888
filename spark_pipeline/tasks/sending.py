"""Writes rows of Arrow batches to a topic as records, in chunks.

JSON text is copied into the request body unchanged, after a check that it is a single valid JSON value.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from spark_pipeline.tasks.server import TOKEN_ENV, Refused, Server, Unreachable
from topics.api.limits import MIB
from topics.engine.storage.frames import RAW

CHUNK_ROWS = 5_000
CHUNK_BYTES = 4 * MIB  # as text; far below the server's limit, even with one more record of 1 MiB
COMMIT_WAIT_MS = 10_000
ABORT_PATIENCE_S = 5.0  # transactions that are not aborted expire

_JSON = msgspec.json.Decoder(msgspec.Raw)


class BadRow(ValueError):
    """A row cannot be written as a record; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Columns for the fields of a record; None: without this field."""

    data: str
    is_text: bool  # data is JSON text, not bytes
    tag: str | None = None
    node: str | None = None
    meta: str | None = None
    flags: str | None = None  # for binary data read from a topic: tells bytes from JSON text


@dataclass(slots=True)
class Chunk:
    records: list[dict[str, Any]]
    is_raw: bool = False
    size: int = 0


def chunks_of(
    batches: Iterable[Any], fields: Fields, *, rows_max: int = CHUNK_ROWS, bytes_max: int = CHUNK_BYTES
) -> Iterator[Chunk]:
    """Chunks in the order of the rows, deterministically. Bytes and JSON are never in the same chunk."""
    chunk = Chunk([])
    for batch in batches:
        for record, is_raw, size in _records(batch, fields):
            full = len(chunk.records) >= rows_max or chunk.size + size > bytes_max
            if chunk.records and (full or chunk.is_raw != is_raw):
                yield chunk
                chunk = Chunk([])
            chunk.is_raw = is_raw
            chunk.records.append(record)
            chunk.size += size
    if chunk.records:
        yield chunk


def _records(batch: Any, fields: Fields) -> Iterator[tuple[dict[str, Any], bool, int]]:
    names = batch.schema.names

    def column(name: str | None) -> list[Any]:
        return [None] * batch.num_rows if name is None else batch.column(names.index(name)).to_pylist()

    rows = zip(*(column(name) for name in (fields.data, fields.tag, fields.node, fields.meta, fields.flags)))
    for data, tag, node, meta, flags in rows:
        if data is None:
            raise BadRow(
                f"column {fields.data} has a null; filter such rows out, or write JSON null with coalesce({fields.data}, 'null')"
            )
        is_raw = not fields.is_text and (flags is None or bool(flags & RAW))
        record: dict[str, Any] = {}
        if is_raw:
            record["data_base64"] = base64.b64encode(data).decode()
            size = len(data) * 4 // 3
            if meta is not None:
                raise BadRow("binary data cannot have meta: drop the column, or write data as JSON text")
        else:
            record["data"], size = _json(data, fields.data, "to_json(…)")
        if tag is not None:
            record["tag"] = tag
        if node is not None:
            record["node"] = node
        if meta is not None:
            record["meta"], meta_size = _json(meta, str(fields.meta), "to_json(struct(…))")
            size += meta_size
        yield record, is_raw, size + 64


def _json(text: str | bytes, column: str, function: str) -> tuple[msgspec.Raw, int]:
    """The text unchanged, and its size; BadRow if it is not a valid JSON value."""
    content = text.encode() if isinstance(text, str) else text
    try:
        return _JSON.decode(content), len(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        start = content[:40].decode(errors="replace")
        raise BadRow(
            f"column {column} has {start!r}, which is not valid JSON ({error}); {function} converts any column to JSON text"
        ) from None


# ── Writing chunks ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Target:
    url: str
    topic: str
    token_env: str = TOKEN_ENV
    ttl_ms: int = 3_600_000

    def server(self) -> Server:
        return Server(self.url, self.token_env)

    def path(self, server: Server, txn: str, verb: str) -> str:
        return server.topic(self.topic, f"/transactions/{txn}/{verb}")


@dataclass(frozen=True, slots=True)
class Staged:
    """What an attempt of a task has staged. No chunks: it had no rows, or the batch is already committed."""

    txn: str
    part: str
    chunks: int = 0
    records: int = 0


class BatchFailed(Exception):
    """A batch cannot be written; the message says what to do."""


def begin(server: Server, target: Target, producer: str, batch: int) -> tuple[str, str]:
    """Begin the batch's transaction; return its id and state. The id is the same for all tasks and attempts."""
    body = {"producer": producer, "batch": batch, "ttl_ms": target.ttl_ms}
    transaction = server.post(server.topic(target.topic, "/transactions"), body)
    return transaction["txn"], transaction["state"]


def stage(target: Target, producer: str, batch: int, name: str, chunks: Iterator[Chunk]) -> Staged | None:
    """Stage chunks in the batch's transaction; None: there were none. `name` identifies the task; a random suffix the attempt."""
    first = next(chunks, None)
    if first is None:
        return None
    server = target.server()
    part = f"{name}-{os.urandom(8).hex()}"
    try:
        txn, state = begin(server, target, producer, batch)
        if state != "open":
            return Staged(txn, part)
        count = records = 0
        chunk: Chunk | None = first
        while chunk is not None:
            body = {"part": part, "chunk": count, "records": chunk.records}
            server.post(target.path(server, txn, "stage"), body)
            count, records = count + 1, records + len(chunk.records)
            chunk = next(chunks, None)
        return Staged(txn, part, count, records)
    except Refused as error:
        if error.code == "txn_committed":
            return Staged(txn, part)  # an earlier attempt of the whole batch has just committed it
        raise _explained(target, error) from error
    finally:
        server.close()


def commit(target: Target, staged: Sequence[Staged]) -> None:
    """Commit these staged parts, in this order. Idempotent."""
    if not staged:
        return
    parts = [
        {"part": one.part, "chunks": one.chunks, "records": one.records} for one in staged if one.chunks > 0
    ]
    txns = {one.txn for one in staged}
    assert len(txns) == 1, f"tasks of one batch have staged into {len(txns)} transactions"
    server = target.server()
    try:
        path = target.path(server, staged[0].txn, "commit")
        # Once decided, the commit completes on the server, however long that takes.
        while server.post(path, {"parts": parts, "wait_ms": COMMIT_WAIT_MS})["state"] != "committed":
            pass
    except Refused as error:
        # A task saw that the batch was committed. A later batch was committed since, so the server dropped the transaction.
        if error.code == "txn_not_found" and any(not one.chunks for one in staged):
            return
        raise _explained(target, error) from error
    finally:
        server.close()


def abort(target: Target, txns: Iterable[str]) -> None:
    """Abort transactions. Errors are ignored: they expire anyway."""
    server = Server(target.url, target.token_env, patience_s=ABORT_PATIENCE_S)
    try:
        for txn in txns:
            with suppress(Refused, Unreachable):
                server.post(target.path(server, txn, "abort"), {})
    finally:
        server.close()


def abort_batch(target: Target, producer: str, batch: int) -> None:
    """Abort the transaction of a batch when its id is not known."""
    server = Server(target.url, target.token_env, patience_s=ABORT_PATIENCE_S)
    body = {"producer": producer, "batch": batch, "ttl_ms": target.ttl_ms, "create": False}
    try:
        with suppress(Refused, Unreachable):
            txn = server.post(server.topic(target.topic, "/transactions"), body)["txn"]
            server.post(target.path(server, txn, "abort"), {})
    finally:
        server.close()


def write_directly(target: Target, key: str, chunks: Iterable[Chunk]) -> int:
    """Write chunks with idempotency keys, so that a retry of the same rows writes nothing twice."""
    server = target.server()
    count = 0
    try:
        for number, chunk in enumerate(chunks):
            body = {"records": chunk.records, "idempotency_key": f"{key}:{number}"}
            server.post(server.topic(target.topic, "?return_seqs=false"), body)
            count += len(chunk.records)
        return count
    except Refused as error:
        raise _explained(target, error) from error
    finally:
        server.close()


_ADVICE: Mapping[str, str] = {
    "txn_not_found": "the staged rows are gone, because the transaction expired or was aborted. Run it again, with a longer txnTtl if needed",
    "txn_incomplete": "staged rows are missing: they were lost in a power failure, or another run aborted this batch. Run it again",
    "topic_full": "the topic is full and rejects writes; delete records, then run it again",
    "forbidden": "the key needs the scope write for this topic",
}
_LIMIT_ADVICE: Mapping[str, str] = {
    "txn_producers": "each batch write without a name is a new producer, of which a topic allows 1000 within 7 days; set the option producer to a permanent name",
    "txn_max_bytes": "the batch is larger than TOPICS_TXN_MAX_BYTES; write less at once (for a stream: maxRecordsPerTrigger), or raise the limit",
}


def _explained(target: Target, error: Refused) -> Exception:
    advice = _LIMIT_ADVICE.get(str(error.detail.get("limit", ""))) or _ADVICE.get(error.code)
    problem = f"{target.url} refuses the rows for topic {target.topic}: {error}"
    return BatchFailed(f"{problem}. What to do: {advice}" if advice else problem)
