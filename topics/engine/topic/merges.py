"""Merges of neighbouring segments: the log entry, the state in the topic's snapshot row, and the swap of rows in memory.

A merge plan is committed with one log entry. From then on each group of segments is one segment of a new generation in the cold
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
from topics.engine.storage.frames import DEAD
from topics.engine.storage.index import ROW_BYTES, Chunk
from topics.engine.storage.segments import COLD, ROW, Rows, SegmentMeta, runs_of
from topics.engine.topic.rows import TopicRows


class Input(msgspec.Struct, frozen=True, array_like=True):
    """A segment that was merged, and the bytes of all its files but the last digest file."""

    first_seq: int
    generation: int
    bytes: int


class MergedGroup(msgspec.Struct, frozen=True, array_like=True):
    group: int
    first_seq: int
    next_seq: int
    generation: int
    bytes_in: int  # of .data
    bytes_out: int
    live: int

    @property
    def rows(self) -> int:
        return self.next_seq - self.first_seq


class FailedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group of which nothing was published."""

    group: int
    segment: str
    reason: str


class Merged(msgspec.Struct, frozen=True, array_like=True):
    """A plan was committed. Time may have ended some of the dead without an entry of its own: the floors go along."""

    plan_id: str
    manifest: int
    cap_lost: int
    ttl_lost: int
    groups: list[MergedGroup]
    inputs: list[list[Input]]  # by group
    failed: list[FailedGroup] = []


class Committed(msgspec.Struct, frozen=True, array_like=True):
    """A committed plan, so that whoever asks again hears the same. Of older ones only the name is kept."""

    plan_id: str
    manifest: int = 0
    groups: list[MergedGroup] = []
    failed: list[FailedGroup] = []


class Retired(msgspec.Struct, frozen=True, array_like=True):
    plan_id: str
    retired_at_ms: int
    segments: list[Input]


class Merges(msgspec.Struct, frozen=True, array_like=True):
    """What a topic keeps of its merges, in its snapshot row. Never changed in place: a checkpoint may hold it."""

    retired: list[Retired] = []
    committed: list[Committed] = []  # the newest last

    def with_plan(self, merged: Merged, now_ms: int) -> Merges:
        fresh = Committed(merged.plan_id, merged.manifest, merged.groups, merged.failed)
        committed = [*self.committed, fresh][-COMMITTED_KEPT:]
        bare = len(committed) - COMMITTED_RESULTS_KEPT
        committed = [Committed(one.plan_id) if i < bare else one for i, one in enumerate(committed)]
        segments = [segment for inputs in merged.inputs for segment in inputs]
        retired = [*self.retired, Retired(merged.plan_id, now_ms, segments)] if segments else self.retired
        return Merges(retired, committed)

    def without(self, gone: set[tuple[int, int]]) -> Merges:
        """These segments have no files any more."""
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


def covered(metas: Sequence[SegmentMeta], first_seq: int) -> bool:
    """Whether a segment that began here has another generation, or was merged into one of these: no merged one is a first generation,
    and nothing else ever lies within a segment."""
    return any(
        meta.first_seq == first_seq
        or (meta.generation > 0 and meta.first_seq < first_seq < meta.first_seq + meta.rows)
        for meta in metas
    )


def retired_meta(segment: Input) -> SegmentMeta:
    return SegmentMeta(segment.first_seq, segment.generation, tier=COLD)


def chunks_of(log: TopicRows, first_seq: int, next_seq: int) -> list[Chunk] | None:
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
    log: TopicRows, chunks: Sequence[Chunk], meta: SegmentMeta, joined: Joined, *, is_fresh: bool = False
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
