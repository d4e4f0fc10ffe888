"""Merges of neighbouring segments: the log frame, the state in the topic's snapshot row, and the swap of rows in memory.

A merge plan is committed with one log frame. From then on each group of segments is one segment of a new generation in the cold
tier. The old segments are *retired*: the server no longer reads them, but their files stay for a while, for readers of an older
manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from topics.api.limits import COMMITTED_KEPT, COMMITTED_RESULTS_KEPT
from topics.engine.storage.control import FailedGroup, Merged, MergedGroup, MergeInput
from topics.engine.storage.frames import DEAD
from topics.engine.storage.index import ROW_BYTES, Chunk
from topics.engine.storage.segments import COLD, ROW, Rows, SegmentMeta, runs_of
from topics.engine.topic.rows import TopicRows


class Committed(msgspec.Struct, frozen=True, array_like=True):
    """A committed plan, kept so that a repeated commit gets the same response. Of older plans only the id is kept."""

    plan_id: str
    manifest: int = 0
    groups: list[MergedGroup] = []
    failed: list[FailedGroup] = []


class Retired(msgspec.Struct, frozen=True, array_like=True):
    plan_id: str
    retired_at_ms: int
    segments: list[MergeInput]


class Merges(msgspec.Struct, frozen=True, array_like=True):
    """A topic's merges, in its snapshot row. Never changed in place: a checkpoint may hold a reference."""

    retired: list[Retired] = []
    committed: list[Committed] = []  # newest last

    def with_plan(self, merged: Merged, now_ms: int) -> Merges:
        fresh = Committed(merged.plan_id, merged.manifest, merged.groups, merged.failed)
        committed = [*self.committed, fresh][-COMMITTED_KEPT:]
        bare = len(committed) - COMMITTED_RESULTS_KEPT
        committed = [Committed(one.plan_id) if i < bare else one for i, one in enumerate(committed)]
        segments = [segment for inputs in merged.inputs for segment in inputs]
        retired = [*self.retired, Retired(merged.plan_id, now_ms, segments)] if segments else self.retired
        return Merges(retired, committed)

    def without(self, gone: set[tuple[int, int]]) -> Merges:
        """Drop retired segments whose files have been removed."""
        retired: list[Retired] = []
        for entry in self.retired:
            kept = [one for one in entry.segments if (one.first_seq, one.generation) not in gone]
            if kept:
                retired.append(Retired(entry.plan_id, entry.retired_at_ms, kept))
        return Merges(retired, self.committed)

    def find(self, plan_id: str) -> Committed | None:
        return next((one for one in self.committed if one.plan_id == plan_id), None)

    @property
    def retired_names(self) -> set[tuple[int, int]]:
        return {(one.first_seq, one.generation) for entry in self.retired for one in entry.segments}

    @property
    def retired_segments(self) -> int:
        return sum(len(entry.segments) for entry in self.retired)

    @property
    def retired_bytes(self) -> int:
        return sum(one.bytes for entry in self.retired for one in entry.segments)


NO_MERGES = Merges()


def is_covered(metas: Sequence[SegmentMeta], first_seq: int) -> bool:
    """Whether one of these segments replaces the segment that began at `first_seq`: as a newer generation of it, or as a merge.

    A merged segment always has a generation above 0, and no other segment ever lies inside one.
    """
    return any(
        meta.first_seq == first_seq
        or (meta.generation > 0 and meta.first_seq < first_seq < meta.first_seq + meta.rows)
        for meta in metas
    )


def retired_meta(segment: MergeInput) -> SegmentMeta:
    return SegmentMeta(segment.first_seq, segment.generation, tier=COLD)


def chunks_of(log: TopicRows, first_seq: int, next_seq: int) -> list[Chunk] | None:
    """The chunks that cover exactly [first_seq, next_seq) without a gap, or None."""
    chunks = [chunk for chunk, _, _ in log.spans(first_seq, next_seq)]
    at = first_seq
    for chunk in chunks:
        if chunk.first_seq != at:
            return None
        at = chunk.next_seq
    return chunks if chunks and at == next_seq else None


@dataclass(slots=True)
class JoinedRows:
    """The rows of several chunks in one buffer. `late`: records that died after the merged segment was written."""

    buffer: bytearray
    late: npt.NDArray[np.intp]
    dead_bytes: int


def join_rows(chunks: Sequence[Chunk], rows: Rows) -> JoinedRows:
    """Join rows, with their offsets in the new segment.

    May run off the loop: `swap_chunks` copies the flags again if they have changed in the meantime.
    """
    buffer = bytearray(len(rows) * ROW_BYTES)
    joined = np.frombuffer(buffer, dtype=ROW)
    at = 0
    for chunk in chunks:
        joined[at : at + chunk.count] = chunk.rows
        at += chunk.count
    joined["offset"], joined["length"] = rows["offset"], rows["length"]
    return JoinedRows(buffer, *_late(joined))


def _late(rows: Rows) -> tuple[npt.NDArray[np.intp], int]:
    """Dead records that are in the new segment, and their bytes."""
    late = np.flatnonzero(((rows["flags"] & DEAD) != 0) & (rows["length"] > 0))
    return late, int(rows["length"][late].sum(dtype=np.int64))


def swap_chunks(
    log: TopicRows, chunks: Sequence[Chunk], meta: SegmentMeta, joined: JoinedRows, *, is_fresh: bool = False
) -> Chunk:
    """Replace several chunks by the merged one. The next checkpoint marks late deletes in its segment.

    `is_fresh`: no flag has changed since the rows were joined, so they need not be copied again.
    """
    merged = Chunk.from_buffer(meta, joined.buffer, chunks[0].opened_ms)
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
