"""What can still be read of a damaged segment, and the same segment written again from it.

The records are the truth. Each carries its topic, its seq and a digest, so those that are whole are found whatever
happened around them; index, names and sums are made again from them. Nothing is made up: a record that does not
agree with its digest is gone, and its seq is announced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from topics.api.errors import TopicsError
from topics.engine.core.ports import Disk
from topics.engine.shard.staging import as_ranges
from topics.engine.storage import frames
from topics.engine.storage.files import HEADER_BYTES, header, read_file, xxh
from topics.engine.storage.marks import salvage_deleted
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
    """The whole records of a segment by row, and the rows that are or may be lost."""

    found: dict[int, tuple[int, int]]  # row → start and end in `data`
    data: bytes
    whole: bool  # the records fill the file: nothing is missing between them
    deleted: Mask
    lost: list[int] = field(default_factory=list)

    def lost_ranges(self, first_seq: int) -> list[Range]:
        return as_ranges([first_seq + row for row in self.lost])


def file_or_nothing(disk: Disk, path: str) -> bytes:
    """The file's bytes; none when it is missing or the device cannot read it."""
    try:
        return read_file(disk, path)
    except OSError:
        return b""


def find_records(
    data: bytes, start: int, topic_id: int, meta: SegmentMeta
) -> tuple[dict[int, tuple[int, int]], bool]:
    """Every whole record of this topic and of these rows, and whether they lie back to back."""
    found: dict[int, tuple[int, int]] = {}
    needle = topic_id.to_bytes(8, "little")
    at, whole = start, True
    while at < len(data):
        end = _record_end(data, at, needle)
        if end:
            row = int.from_bytes(data[at + 14 : at + 22], "little") - meta.first_seq
            if 0 <= row < meta.rows:
                found[row] = (at, end)
            at = end
            continue
        whole = False
        # A record names its topic 6 bytes after its start: the next place where that stands may be one.
        named = data.find(needle, at + 7)
        if named < 0:
            break
        at = named - 6
    return found, whole


def _record_end(data: bytes, at: int, needle: bytes) -> int:
    """Where the whole record that starts here ends, or 0."""
    if data[at + 6 : at + 14] != needle or data[at + 4] != frames.APPEND:
        return 0
    end = at + 4 + int.from_bytes(data[at : at + 4], "little")
    return end if end <= len(data) and frames.frame_is_valid(data[at:end]) else 0


def read_marks(disk: Disk, topic_dir: str, meta: SegmentMeta) -> Mask:
    """Deleted rows as far as anything says so."""
    if not meta.has_del:
        return np.zeros(meta.rows, dtype=np.bool_)
    return salvage_deleted(file_or_nothing(disk, segment_path(topic_dir, meta, "del")), meta)


def salvage_segment(disk: Disk, topic_dir: str, topic_id: int, meta: SegmentMeta) -> Salvage:
    data = file_or_nothing(disk, segment_path(topic_dir, meta, "data"))[: meta.data_bytes]
    found, whole = find_records(data, HEADER_BYTES, topic_id, meta)
    whole = whole and len(data) == meta.data_bytes
    salvage = Salvage(found, data, whole, read_marks(disk, topic_dir, meta))
    if not whole:
        rows = _trusted_rows(disk, topic_dir, meta, found)
        there = np.ones(meta.rows, dtype=np.bool_) if rows is None else rows["length"] > 0
        there[list(found)] = False
        salvage.lost = np.flatnonzero(there & ~salvage.deleted).tolist()
    return salvage


def _trusted_rows(
    disk: Disk, topic_dir: str, meta: SegmentMeta, found: dict[int, tuple[int, int]]
) -> Rows | None:
    """The index, when it agrees with its digest and is right about every record that was found: then it is believed
    about the others."""
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
    """The segment again from its whole and living records, as `generation`; None when none is left."""
    picked = [place for row, place in sorted(salvage.found.items()) if not salvage.deleted[row]]
    if not picked:
        return None
    data = b"".join([salvage.data[start:end] for start, end in picked])
    made = SegmentMeta(meta.first_seq, generation)  # hot, wherever it was
    wanted = msgspec.structs.replace(made, rows=meta.rows, data_bytes=len(data))
    path = segment_path(topic_dir, meta, "data")
    content = index_of_records(path, data, 0, wanted, None, topic_id)
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
        return bytes(8)  # the .sum that knew it is gone
