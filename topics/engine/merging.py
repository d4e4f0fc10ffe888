"""The change in memory when neighbouring segments become one; what it means stands in merges.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from topics.engine.frames import DEAD
from topics.engine.index import ROW_BYTES, Chunk
from topics.engine.segments import ROW, Rows, SegmentMeta, runs_of
from topics.engine.topic_log import TopicLog


def chunks_of(log: TopicLog, first_seq: int, next_seq: int) -> list[Chunk] | None:
    """The chunks that make up exactly these seqs, without a hole; None when none do."""
    chunks = [chunk for chunk, _, _ in log.spans(first_seq, next_seq)]
    at = first_seq
    for chunk in chunks:
        if chunk.first_seq != at:
            return None
        at = chunk.next_seq
    return chunks if chunks and at == next_seq else None


def join_rows(chunks: Sequence[Chunk], rows: Rows) -> bytearray:
    """The rows of all chunks, with places in the new segment. Off the loop: flags may change meanwhile, and are taken once more later."""
    buffer = bytearray(len(rows) * ROW_BYTES)
    joined = np.frombuffer(buffer, dtype=ROW)
    at = 0
    for chunk in chunks:
        joined[at : at + chunk.count] = chunk.rows
        at += chunk.count
    joined["offset"], joined["length"] = rows["offset"], rows["length"]
    return buffer


def swap_in(log: TopicLog, chunks: Sequence[Chunk], meta: SegmentMeta, buffer: bytearray) -> Chunk:
    """Put one chunk in the place of several. What was deleted since its segment was made is marked there by the next checkpoint."""
    merged = Chunk.over(meta, buffer, chunks[0].opened_ms)
    flags = merged.rows["flags"]
    at = 0
    for chunk in chunks:
        flags[at : at + chunk.count] = chunk.rows["flags"]
        at += chunk.count
    late = np.flatnonzero(((flags & DEAD) != 0) & (merged.rows["length"] > 0))
    merged.unmarked = runs_of(late, late + 1)
    meta.dead_bytes = int(merged.rows["length"][late].sum(dtype=np.int64))
    log.replace_chunks(chunks, merged)
    return merged
