"""The change in memory when neighbouring segments become one; what it means stands in merges.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from topics.engine.storage.frames import DEAD
from topics.engine.storage.index import ROW_BYTES, Chunk
from topics.engine.storage.segments import ROW, Rows, SegmentMeta, runs_of
from topics.engine.topic.log import TopicLog


def chunks_of(log: TopicLog, first_seq: int, next_seq: int) -> list[Chunk] | None:
    """The chunks that make up exactly these seqs, without a hole; None when none do."""
    chunks = [chunk for chunk, _, _ in log.spans(first_seq, next_seq)]
    at = first_seq
    for chunk in chunks:
        if chunk.first_seq != at:
            return None
        at = chunk.next_seq
    return chunks if chunks and at == next_seq else None


@dataclass(slots=True)
class Joined:
    """The rows of several chunks in one buffer, and which of the records there were dead by then."""

    buffer: bytearray
    late: npt.NDArray[np.intp]
    dead_bytes: int


def join_rows(chunks: Sequence[Chunk], rows: Rows) -> Joined:
    """With places in the new segment. May run off the loop: flags that change meanwhile are taken once more by `swap_in`."""
    buffer = bytearray(len(rows) * ROW_BYTES)
    joined = np.frombuffer(buffer, dtype=ROW)
    at = 0
    for chunk in chunks:
        joined[at : at + chunk.count] = chunk.rows
        at += chunk.count
    joined["offset"], joined["length"] = rows["offset"], rows["length"]
    return Joined(buffer, *_late(joined))


def _late(rows: Rows) -> tuple[npt.NDArray[np.intp], int]:
    """Records that are in the new segment and dead."""
    late = np.flatnonzero(((rows["flags"] & DEAD) != 0) & (rows["length"] > 0))
    return late, int(rows["length"][late].sum(dtype=np.int64))


def swap_in(
    log: TopicLog, chunks: Sequence[Chunk], meta: SegmentMeta, joined: Joined, *, is_fresh: bool = False
) -> Chunk:
    """Put one chunk in the place of several. What was deleted since its segment was made is marked there by the next checkpoint.
    `is_fresh`: no flag has changed since the rows were joined, which saves a pass over all of them."""
    merged = Chunk.over(meta, joined.buffer, chunks[0].opened_ms)
    late, meta.dead_bytes = joined.late, joined.dead_bytes
    if not is_fresh:
        flags = merged.rows["flags"]
        at = 0
        for chunk in chunks:
            flags[at : at + chunk.count] = chunk.rows["flags"]
            at += chunk.count
        late, meta.dead_bytes = _late(merged.rows)
    merged.unmarked = runs_of(late, late + 1)
    log.replace_chunks(chunks, merged)
    return merged
