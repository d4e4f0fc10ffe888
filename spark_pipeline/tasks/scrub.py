"""Scrub of one segment: checks .sum against the manifest, .idx and .dict against .sum, and each record's digest."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from spark_pipeline.tasks.segments import Damage, SegmentReader
from topics.api.errors import Corrupt, TopicsError
from topics.api.limits import MIB
from topics.engine.storage.manifest import Segment
from topics.engine.storage.sealing import verify_blocks
from topics.engine.storage.segments import BLOCK_BYTES
from topics.system.read_only_disk import ReadOnlyDisk

READ_ROWS = 100_000
READ_BYTES = 16 * MIB
DAMAGES_MAX = 1000  # ranges per segment; the rest is reported as one range


@dataclass(frozen=True, slots=True)
class ScrubTask:
    topic: str
    topic_id: str
    folder: str
    segment: Segment


@dataclass(slots=True)
class ScrubResult:
    topic: str
    segment: str
    records: int = 0
    bytes: int = 0
    damage: list[Damage] = field(default_factory=list)


def scrub_segment(task: ScrubTask) -> ScrubResult:
    """Find the damage of a segment. An OSError other than a missing file is not damage, and is raised."""
    segment = task.segment
    damage: list[Damage] = []
    reader = SegmentReader(task.folder, segment, int(task.topic_id, 16), "record", damage)
    result = ScrubResult(task.topic, segment.name, damage=damage)
    try:
        rows = reader.index()
        reader.names()
        present = np.flatnonzero(rows["length"])
        for piece in reader.pieces(rows, present, rows_max=READ_ROWS, bytes_max=READ_BYTES):
            result.records += len(piece.rows)
        result.bytes = segment.data_bytes + segment.idx_bytes + segment.dict_bytes
        if not damage:
            # Also bytes of dead records, and bytes between records.
            _scrub_blocks(reader, damage)
    except (TopicsError, FileNotFoundError) as error:
        path, offset = (error.path, error.offset) if isinstance(error, Corrupt) else (reader.path("data"), 0)
        damage.append(Damage(path, offset, segment.first_seq, segment.next_seq - 1, _problem(error)))
    if len(damage) > DAMAGES_MAX:
        rest = damage[DAMAGES_MAX - 1 :]
        what = f"{rest[0].what}, and {len(rest) - 1} further ranges"
        damage[DAMAGES_MAX - 1 :] = [
            Damage(rest[0].path, rest[0].offset, rest[0].first_seq, rest[-1].last_seq, what)
        ]
    return result


def _scrub_blocks(reader: SegmentReader, damage: list[Damage]) -> None:
    segment, path = reader.segment, reader.path("data")
    steps = verify_blocks(ReadOnlyDisk(), path, segment.data_bytes, reader.sum.blocks)
    problems = None
    while problems is None:
        try:
            next(steps)
        except StopIteration as end:
            problems = end.value
    for problem in problems:
        if any(reader.sum.blocks[problem.offset // BLOCK_BYTES]):
            # The damage affects no record, so there are no seqs.
            damage.append(Damage(path, problem.offset, 0, 0, f"between records: {problem.what}"))


def _problem(error: Exception) -> str:
    return error.problem if isinstance(error, Corrupt) else str(error)
