"""Salvage of damaged segments: find the intact records and write a new segment from them.

Each record has its topic, its seq and a digest, so intact records are found whatever the damage around them. Index, names
and sums are rebuilt from the records. A record that does not match its digest is lost, and its seq is announced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from topics.api.errors import TopicsError
from topics.engine.core.ports import Disk
from topics.engine.shard.state import as_ranges
from topics.engine.storage import frames
from topics.engine.storage.delete_marks import salvage_deleted
from topics.engine.storage.files import HEADER_BYTES, header, read_file, xxh
from topics.engine.storage.sealing import drain, read_sum, seal_steps
from topics.engine.storage.segments import (
    IDX_MAGIC,
    Mask,
    Rows,
    SegmentMeta,
    SegmentWriter,
    read_rows,
    segment_path,
)
from topics.engine.topic.log import Range
from topics.engine.upkeep.loading import index_of_records


@dataclass(slots=True)
class Salvage:
    """The intact records of a segment by row, and the rows that are or may be lost."""

    found: dict[int, tuple[int, int]]  # row → start and end in `data`
    data: bytes
    is_complete: bool  # the records are contiguous and fill the file
    deleted: Mask
    lost: list[int] = field(default_factory=list)

    def lost_ranges(self, first_seq: int) -> list[Range]:
        return as_ranges([first_seq + row for row in self.lost])


def file_or_nothing(disk: Disk, path: str) -> bytes:
    """The file's bytes; empty if it is missing or unreadable."""
    try:
        return read_file(disk, path)
    except OSError:
        return b""


def find_records(
    data: bytes, start: int, topic_id: int, meta: SegmentMeta
) -> tuple[dict[int, tuple[int, int]], bool]:
    """Find all intact records of this topic and segment. Also returns whether they are contiguous."""
    found: dict[int, tuple[int, int]] = {}
    needle = topic_id.to_bytes(8, "little")
    at, is_complete = start, True
    while at < len(data):
        end = _record_end(data, at, needle)
        if end:
            row = int.from_bytes(data[at + 14 : at + 22], "little") - meta.first_seq
            if 0 <= row < meta.rows:
                found[row] = (at, end)
            at = end
            continue
        is_complete = False
        # The topic id is at byte 6 of a record: search for its next occurrence.
        id_at = data.find(needle, at + 7)
        if id_at < 0:
            break
        at = id_at - 6
    return found, is_complete


def _record_end(data: bytes, at: int, needle: bytes) -> int:
    """End of the intact record that starts at `at`, or 0."""
    if data[at + 6 : at + 14] != needle or data[at + 4] != frames.APPEND:
        return 0
    end = at + 4 + int.from_bytes(data[at : at + 4], "little")
    return end if end <= len(data) and frames.frame_is_valid(data[at:end]) else 0


def read_marks(disk: Disk, topic_dir: str, meta: SegmentMeta) -> Mask:
    """The rows that the readable part of .del marks as deleted."""
    if not meta.has_del:
        return np.zeros(meta.rows, dtype=np.bool_)
    return salvage_deleted(file_or_nothing(disk, segment_path(topic_dir, meta, "del")), meta)


def salvage_segment(disk: Disk, topic_dir: str, topic_id: int, meta: SegmentMeta) -> Salvage:
    data = file_or_nothing(disk, segment_path(topic_dir, meta, "data"))[: meta.data_bytes]
    found, is_complete = find_records(data, HEADER_BYTES, topic_id, meta)
    is_complete = is_complete and len(data) == meta.data_bytes
    salvage = Salvage(found, data, is_complete, read_marks(disk, topic_dir, meta))
    if not is_complete:
        rows = _trusted_rows(disk, topic_dir, meta, found)
        missing = np.ones(meta.rows, dtype=np.bool_) if rows is None else rows["length"] > 0
        missing[list(found)] = False
        salvage.lost = np.flatnonzero(missing & ~salvage.deleted).tolist()
    return salvage


def _trusted_rows(
    disk: Disk, topic_dir: str, meta: SegmentMeta, found: dict[int, tuple[int, int]]
) -> Rows | None:
    """The index if it matches its digest and every record that was found: then it is trusted for the lost ones."""
    try:
        rows = read_rows(disk, topic_dir, meta)
        digest = meta.idx_digest
        if meta.sealed:
            digest = read_sum(disk, topic_dir, meta.first_seq, meta.generation)[0].idx_digest
    except (TopicsError, OSError):
        return None
    if digest and xxh(header(IDX_MAGIC) + rows.tobytes()) != digest:
        return None
    for row, (start, end) in found.items():
        if (int(rows["offset"][row]), int(rows["length"][row])) != (start, end - start):
            return None
    return rows


def rewrite(
    disk: Disk,
    topic_dir: str,
    topic_id: int,
    meta: SegmentMeta,
    salvage: Salvage,
    generation: int,
    chain: bytes | None,
) -> SegmentMeta | None:
    """Write a new generation of the segment with its intact, live records; None if there are none."""
    picked = [span for row, span in sorted(salvage.found.items()) if not salvage.deleted[row]]
    if not picked:
        return None
    data = b"".join([salvage.data[start:end] for start, end in picked])
    made = SegmentMeta(meta.first_seq, generation)  # hot, even if the old one was cold
    sized = msgspec.structs.replace(made, rows=meta.rows, data_bytes=len(data))
    path = segment_path(topic_dir, meta, "data")
    content = index_of_records(path, data, 0, sized, None, topic_id)
    content.rows["offset"][content.rows["length"] > 0] += HEADER_BYTES
    writer = SegmentWriter(disk, topic_dir, made)
    try:
        expiries = list(zip(content.expiries["row"].tolist(), content.expiries["time"].tolist()))
        writer.append(data, content.rows, content.tags, content.nodes, expiries)
        writer.sync()
    finally:
        writer.close()
    if meta.sealed:
        chain = _chain_of(disk, topic_dir, meta) if chain is None else chain
        drain(seal_steps(disk, topic_dir, made, chain, meta.link or bytes(8)))
    return made


def _chain_of(disk: Disk, topic_dir: str, meta: SegmentMeta) -> bytes:
    try:
        return read_sum(disk, topic_dir, meta.first_seq, meta.generation)[0].chain
    except (TopicsError, OSError):
        return bytes(8)  # unknown: it was in the lost .sum
