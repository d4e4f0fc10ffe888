"""Rows of Arrow batches as records of a topic, in chunks that a server takes at once; and where chunks go.

JSON text goes into the body as it is. It is looked at before: text that is no JSON would be more than one value, or none.
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
CHUNK_BYTES = 4 * MIB  # as text: a record of 1 MiB more is still far below what a server takes
COMMIT_WAIT_MS = 10_000
ABORT_PATIENCE_S = 5.0  # what is not aborted expires

_JSON = msgspec.json.Decoder(msgspec.Raw)


class BadRow(ValueError):
    """A row that cannot be a record; the text says what to do about it."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Which columns make a record; None: not that field."""

    data: str
    is_text: bool  # of data: JSON, not bytes
    tag: str | None = None
    node: str | None = None
    meta: str | None = None
    flags: str | None = None  # of binary data: tells bytes from the JSON text that a topic gave


@dataclass(slots=True)
class Chunk:
    records: list[dict[str, Any]]
    is_raw: bool = False
    size: int = 0


def chunks_of(
    batches: Iterable[Any], fields: Fields, *, rows_max: int = CHUNK_ROWS, bytes_max: int = CHUNK_BYTES
) -> Iterator[Chunk]:
    """In the order of the rows. The same rows make the same chunks. Bytes and JSON are never in one chunk."""
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
                f"column {fields.data} has a null; leave such rows out, or write JSON's with coalesce({fields.data}, 'null')"
            )
        is_raw = not fields.is_text and (flags is None or bool(flags & RAW))
        record: dict[str, Any] = {}
        if is_raw:
            record["data_base64"] = base64.b64encode(data).decode()
            size = len(data) * 4 // 3
            if meta is not None:
                raise BadRow("bytes have no meta: leave the column out, or write data as JSON text")
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


def _json(text: str | bytes, column: str, made_with: str) -> tuple[msgspec.Raw, int]:
    """The text as it is, and its size, if it is one value of JSON."""
    content = text.encode() if isinstance(text, str) else text
    try:
        return _JSON.decode(content), len(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        start = content[:40].decode(errors="replace")
        raise BadRow(
            f"column {column} has {start!r}, which is no JSON ({error}); {made_with} makes JSON text of any column"
        ) from None


# ── Where chunks go ───────────────────────────────────────────────────────────────────


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
    """What one try of a task has put into a transaction. No chunks: it had no rows, or the batch is there already."""

    txn: str
    part: str
    chunks: int = 0
    records: int = 0


class BatchFailed(Exception):
    """A batch cannot be written like this; the text says what to do."""


def begin(server: Server, target: Target, producer: str, batch: int) -> tuple[str, str]:
    """The id of the batch's transaction, and its state. The same for every task and every try."""
    body = {"producer": producer, "batch": batch, "ttl_ms": target.ttl_ms}
    found = server.post(server.topic(target.topic, "/transactions"), body)
    return found["txn"], found["state"]


def stage(target: Target, producer: str, batch: int, name: str, chunks: Iterator[Chunk]) -> Staged | None:
    """Put chunks into the batch's transaction; None: there were none. `name` is of this task's place, and gets something of this try's own."""
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
            return Staged(txn, part)  # by an earlier try of the whole batch, just now
        raise _explained(target, error) from error
    finally:
        server.close()


def commit(target: Target, found: Sequence[Staged]) -> None:
    """Publish what these tries have staged, in this order. To be repeated as often as one likes."""
    if not found:
        return
    parts = [
        {"part": one.part, "chunks": one.chunks, "records": one.records} for one in found if one.chunks > 0
    ]
    txns = {one.txn for one in found}
    assert len(txns) == 1, f"tasks of one batch have staged into {len(txns)} transactions"
    server = target.server()
    try:
        path = target.path(server, found[0].txn, "commit")
        # Once it is decided it ends by itself, however long that takes.
        while server.post(path, {"parts": parts, "wait_ms": COMMIT_WAIT_MS})["state"] != "committed":
            pass
    except Refused as error:
        # A task was told that the batch is decided: it is there, and a later one since, so the server has forgotten the transaction.
        if error.code == "txn_not_found" and any(not one.chunks for one in found):
            return
        raise _explained(target, error) from error
    finally:
        server.close()


def abort(target: Target, txns: Iterable[str]) -> None:
    """Throw away what is not committed. If that fails it expires: no reason for another error."""
    server = Server(target.url, target.token_env, patience_s=ABORT_PATIENCE_S)
    try:
        for txn in txns:
            with suppress(Refused, Unreachable):
                server.post(target.path(server, txn, "abort"), {})
    finally:
        server.close()


def abort_batch(target: Target, producer: str, batch: int) -> None:
    """The same, where no task has told which transaction it is."""
    server = Server(target.url, target.token_env, patience_s=ABORT_PATIENCE_S)
    body = {"producer": producer, "batch": batch, "ttl_ms": target.ttl_ms, "create": False}
    try:
        with suppress(Refused, Unreachable):
            txn = server.post(server.topic(target.topic, "/transactions"), body)["txn"]
            server.post(target.path(server, txn, "abort"), {})
    finally:
        server.close()


def write_directly(target: Target, key: str, chunks: Iterable[Chunk]) -> int:
    """Ordinary writes, each with a key of its own: a second try of the same rows writes nothing again."""
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
    "txn_not_found": "what was staged is gone, because the transaction has expired or was aborted. Run it again, with a longer txnTtl if it takes so long",
    "txn_incomplete": "staged rows are missing: they were lost in a power cut, or another run has aborted this batch. Run it again",
    "topic_full": "the topic is full and set to reject; make room, then run it again",
    "forbidden": "the key needs the scope write for this topic",
}
_LIMIT_ADVICE: Mapping[str, str] = {
    "txn_producers": "a batch write without a name is a producer of its own, and 1000 within 7 days is what a topic remembers; give such writes a lasting name with the option producer",
    "txn_max_bytes": "the batch is larger than TOPICS_TXN_MAX_BYTES; write less at once (maxRecordsPerTrigger of a stream), or raise it",
}


def _explained(target: Target, error: Refused) -> Exception:
    advice = _LIMIT_ADVICE.get(str(error.detail.get("limit", ""))) or _ADVICE.get(error.code)
    what = f"topic {target.topic} at {target.url} refuses the rows: {error}"
    return BatchFailed(f"{what}. What to do: {advice}" if advice else what)
