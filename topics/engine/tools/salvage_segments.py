"""What can still be read of a damaged segment, and the same segment written again from it.

The records are the truth. Each carries its topic, its seq and a digest, so those that are whole are found whatever
happened around them; index, names and sums are made again from them. Nothing is made up: a record that does not
agree with its digest is gone, and its seq is announced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from topics.api.errors import Corrupt, TopicsError, UnsupportedFormat
from topics.engine.core.ports import Disk
from topics.engine.shard.staging import as_ranges
from topics.engine.storage import frames
from topics.engine.storage.files import HEADER_BYTES, VERSION, header, read_file, xxh
from topics.engine.storage.marks import salvage_deleted
from topics.engine.storage.sealing import drain, read_sum, seal_steps, verify
from topics.engine.storage.segments import (
    DEL_MAGIC,
    DEL_VERSION,
    IDX_MAGIC,
    Mask,
    Rows,
    SegmentMeta,
    SegmentWriter,
    read_dict,
    read_rows,
    segment_path,
)
from topics.engine.topic.log import Range
from topics.engine.upkeep.loading import SegmentIndex, index_of_records


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


# ── Checking ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Fault:
    """Something about one file of a segment that is not as it was written."""

    path: str
    offset: int
    what: str


def check_segment(
    disk: Disk, topic_dir: str, topic_id: int, meta: SegmentMeta, chain: bytes | None
) -> list[Fault]:
    """Everything that can be known to be wrong with a segment. UnsupportedFormat when it is of a later version."""
    _check_versions(disk, topic_dir, meta)
    faults = [Fault(p.path, p.offset, p.what) for p in verify(disk, topic_dir, meta, chain)]
    faults += _check_marks(disk, topic_dir, meta)
    if not meta.sealed and not faults and meta.rows:
        faults += _check_open(disk, topic_dir, topic_id, meta)
    return faults


def _check_versions(disk: Disk, topic_dir: str, meta: SegmentMeta) -> None:
    """A later version is told from rot by the digests: where those vouch for this version, it was this one."""
    try:
        vouched = meta.sealed and bool(read_sum(disk, topic_dir, meta.first_seq, meta.generation))
    except (Corrupt, OSError):
        vouched = False
    problems = verify(disk, topic_dir, msgspec.structs.replace(meta, sealed=False), None)
    for problem in problems:
        if vouched and not problem.path.endswith(".del"):
            continue
        if meta.idx_digest and problem.path.endswith((".idx", ".dict")):
            continue
        if meta.del_bytes and problem.path.endswith(".del"):
            continue  # of the version that the snapshot knows
        head = file_or_nothing(disk, problem.path)[:12]
        version = int.from_bytes(head[8:12], "little")
        latest = DEL_VERSION if problem.path.endswith(".del") else VERSION
        if len(head) == 12 and head.startswith(b"TPCS") and version > latest:
            raise UnsupportedFormat(problem.path, version)


def _check_marks(disk: Disk, topic_dir: str, meta: SegmentMeta) -> list[Fault]:
    if not meta.has_del or meta.del_bytes:
        return []  # marks of version 2 have digests
    path = segment_path(topic_dir, meta, "del")
    data = file_or_nothing(disk, path)
    if not data.startswith(header(DEL_MAGIC)):
        return []  # reported with the other headers, or of version 2
    marks = np.frombuffer(data, dtype=np.uint8)[HEADER_BYTES : HEADER_BYTES + meta.rows]
    odd = np.flatnonzero(marks > 1)
    if not len(odd):
        return []
    seq = meta.first_seq + int(odd[0])
    return [Fault(path, HEADER_BYTES + int(odd[0]), f"the mark of seq {seq} is neither 0 nor 1")]


def _check_open(disk: Disk, topic_dir: str, topic_id: int, meta: SegmentMeta) -> list[Fault]:
    """A segment that still grows has no digests; its records have, and everything else must follow from them."""
    salvage = salvage_segment(disk, topic_dir, topic_id, meta)
    path = segment_path(topic_dir, meta, "data")
    if not salvage.whole:
        at = HEADER_BYTES
        for start, end in sorted(salvage.found.values()):
            if start != at:
                break
            at = end
        return [Fault(path, at, "a record does not agree with its digest")]
    try:
        rows = read_rows(disk, topic_dir, meta)
        tags, nodes, expiries = read_dict(disk, topic_dir, meta)
    except Corrupt as error:
        return [Fault(error.path, error.offset, error.problem)]
    made = index_of_records(path, salvage.data, HEADER_BYTES, meta, None, topic_id)
    return _compare(topic_dir, meta, SegmentIndex(rows, tags, nodes, expiries, None), made)


def _compare(topic_dir: str, meta: SegmentMeta, stored: SegmentIndex, made: SegmentIndex) -> list[Fault]:
    idx, names = segment_path(topic_dir, meta, "idx"), segment_path(topic_dir, meta, "dict")
    live = made.rows["length"] > 0
    made.rows["flags"] &= 0xFF ^ frames.ERASED  # an erase changes records and their digests, not the index
    stored.rows["flags"] &= 0xFF ^ frames.ERASED
    for column in ("length", "offset", "ts", "flags", "size"):
        here = np.ones(meta.rows, dtype=np.bool_) if column == "length" else live
        wrong = np.flatnonzero(here & (stored.rows[column] != made.rows[column]))
        if len(wrong):
            offset = HEADER_BYTES + 32 * int(wrong[0])
            return [
                Fault(
                    idx, offset, f"the {column} of seq {meta.first_seq + int(wrong[0])} is not its record's"
                )
            ]
    for column, old, new in (("tag", stored.tags, made.tags), ("node", stored.nodes, made.nodes)):
        ids = stored.rows[column]
        for row in np.flatnonzero(live).tolist():
            right = made.rows[column][row]
            known = int(ids[row]) <= len(old)
            name = old[int(ids[row]) - 1] if ids[row] and known else None
            if not known or name != (new[int(right) - 1] if right else None):
                where = names if name is not None and right else idx
                offset = 0 if where is names else HEADER_BYTES + 32 * row
                return [
                    Fault(where, offset, f"the {column} of seq {meta.first_seq + row} is not its record's")
                ]
    kept = {(int(e["row"]), int(e["time"])) for e in stored.expiries}
    if kept != {(int(e["row"]), int(e["time"])) for e in made.expiries}:
        return [Fault(names, 0, "the times at which records end are not those of the records")]
    return []
