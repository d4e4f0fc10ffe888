"""Reads records over HTTP as Arrow batches: pages of stored frames, whose digests are checked only on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from spark_pipeline.tasks.columns import Frames, constant, flags_column, schema_of, ts_column
from spark_pipeline.tasks.reading import Wanted
from spark_pipeline.tasks.server import FRAMES, Server
from topics.api.errors import Corrupt
from topics.api.limits import MIB
from topics.engine.storage.frames import frame_is_valid, frame_starts

PAGE_BYTES = 8 * MIB
PAGE_RECORDS = 10_000
_PAD = bytes(16)


class Gap(msgspec.Struct, frozen=True):
    """A range of lost records, both ends included, and the reason."""

    topic: str
    first_seq: int
    last_seq: int
    reason: str

    def __str__(self) -> str:
        return f"records {self.first_seq} to {self.last_seq} of {self.topic} are lost ({self.reason})"


@dataclass(frozen=True, slots=True)
class HttpSlice:
    """A half-open range of seqs of a topic, to be read from its server."""

    url: str
    token_env: str
    topic: str
    start_seq: int
    end_seq: int
    epoch: str | None = None  # of these seqs; None: not checked


def read_http(part: HttpSlice, wanted: Wanted, gaps: list[Gap]) -> Iterator[Any]:
    """Yield record batches; lost records within the range are added to `gaps`."""
    for frames in read_frames(part, wanted, gaps):
        yield _batch(part, wanted, frames)


def read_frames(part: HttpSlice, wanted: Wanted, gaps: list[Gap]) -> Iterator[Frames]:
    """Yield stored frames, page by page; lost records are added to `gaps`."""
    server = Server(part.url, part.token_env)
    try:
        at = part.start_seq - 1
        while at < part.end_seq - 1:
            body: dict[str, Any] = {
                "from_seq": at,
                "limit": min(PAGE_RECORDS, part.end_seq - 1 - at),
                "max_batch_bytes": PAGE_BYTES,
            }
            if wanted.range.start_ts:
                body["from_ts"] = wanted.range.start_ts
            if part.epoch is not None:
                body["epoch"] = part.epoch
            answer = server.request("POST", server.topic(part.topic, "/diff"), body, accept=FRAMES)
            if _note_gap(part, at, answer.headers.get("topics-tombstone"), gaps):
                break
            frames = _frames(part, wanted, answer.body)
            if len(frames.starts):
                yield frames
            reached = int(answer.headers["topics-next-from-seq"])
            if reached <= at or answer.headers.get("topics-caught-up") == "true":
                break  # the end of the topic
            at = reached
    finally:
        server.close()


def _note_gap(part: HttpSlice, at: int, tombstone: str | None, gaps: list[Gap]) -> bool:
    """Note a tombstone. True: these seqs now belong to other records, so nothing more can be read."""
    if tombstone is None:
        return False
    lost = msgspec.json.decode(tombstone)
    first, last = max(int(lost["gap_from"]), part.start_seq), min(int(lost["gap_to"]), part.end_seq - 1)
    is_reused = lost["reason"] == "recreated" or int(lost["gap_from"]) <= at
    if is_reused:
        first, last = at + 1, part.end_seq - 1
    if first <= last:
        gaps.append(Gap(part.topic, first, last, lost["reason"]))
    return is_reused


def _frames(part: HttpSlice, wanted: Wanted, body: bytes) -> Frames:
    """The frames of a page that are within the range."""
    path = f"{part.url}/v0/topics/{part.topic}"
    offsets: list[int] = []
    try:
        frame_starts(body, 0, len(body), offsets)
    except (ValueError, IndexError) as error:
        raise Corrupt(path, 0, f"a page of frames is malformed: {error}") from error
    starts = np.array(offsets, dtype=np.int64)
    ends = np.append(starts[1:], len(body)) if len(starts) else starts
    if wanted.verify == "record":
        for start, end in zip(starts.tolist(), ends.tolist()):
            if not frame_is_valid(body[start:end]):
                raise Corrupt(path, start, "the digest of a record does not match")
    frames = Frames.at(path, body + _PAD, starts, ends)
    headers, span = frames.headers, wanted.range
    seqs, times = headers["seq"].astype(np.int64), headers["ts"].astype(np.int64)
    kept = (seqs >= part.start_seq) & (seqs < part.end_seq) & (times >= span.start_ts) & (times < span.end_ts)
    return frames if kept.all() else Frames(path, frames.buffer, starts[kept], headers[kept])


def _batch(part: HttpSlice, wanted: Wanted, frames: Frames) -> Any:
    headers = frames.headers
    seqs, times = headers["seq"].astype(np.int64), headers["ts"].astype(np.int64)
    columns: dict[str, Any] = {}
    if {"data", "meta"} & set(wanted.columns):
        columns["data"], columns["meta"] = frames.data_and_meta(as_text=wanted.as_text)
    makers: dict[str, Callable[[], Any]] = {
        "topic": lambda: constant(part.topic, len(seqs)),
        "seq": lambda: pa.array(seqs),
        "ts": lambda: ts_column(times),
        "node": frames.node,
        "tag": frames.tag,
        "flags": lambda: flags_column(headers["flags"]),
    }
    arrays = [columns[name] if name in columns else makers[name]() for name in wanted.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema_of(wanted.columns, as_text=wanted.as_text))
