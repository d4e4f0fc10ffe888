"""Delete marks: the deleted rows of a segment, in its `.del` file. Each checkpoint appends a block.

    header (version 2) · blocks:  count u32 · count times (first row u32, row after the last u32) · digest

The digest of a block covers the previous digest (zeros for the first block), the count and the ranges. The snapshot has the
last digest and the valid length of the file. A crashed checkpoint can only leave extra bytes after it, so a mismatch within it
is damage. Version 1 had one byte per row and no digest; the next block converts it to version 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from topics.api.errors import Corrupt
from topics.engine.core.ports import Disk
from topics.engine.storage.files import (
    DIGEST_BYTES,
    HEADER_BYTES,
    TEMP_SUFFIX,
    check_header,
    header,
    read_file,
    write_whole,
    xxh,
)
from topics.engine.storage.segments import DEL_MAGIC, DEL_VERSION, Mask, SegmentMeta, runs_of, segment_path

_COUNT_BYTES = 4
_RANGE = np.dtype([("first", "<u4"), ("stop", "<u4")])


def read_deleted(disk: Disk, topic_dir: str, meta: SegmentMeta) -> Mask | None:
    """The deleted rows; None if there is no .del. Corrupt if a digest does not match."""
    if not meta.has_del:
        return None
    path = segment_path(topic_dir, meta, "del")
    data = read_file(disk, path)
    # If the snapshot has the digest, the version is known, and a damaged header does not matter.
    if not meta.del_bytes and check_header(path, data, DEL_MAGIC, DEL_VERSION) != DEL_VERSION:
        return _marks_of_version_1(data, meta)
    mask = np.zeros(meta.rows, dtype=np.bool_)
    reached = bytes(DIGEST_BYTES), HEADER_BYTES
    for ranges, is_valid, digest, end in mark_blocks(data[: meta.del_bytes or None]):
        if not is_valid:
            break
        _mark(mask, ranges)
        reached = digest, end
    if meta.del_bytes and reached != (meta.del_digest, meta.del_bytes):
        raise Corrupt(path, reached[1], "the digest of the delete marks does not match")
    return mask


def salvage_deleted(data: bytes, meta: SegmentMeta) -> Mask:
    """The deleted rows from all valid blocks of a damaged file; the header is not checked."""
    mask = np.zeros(meta.rows, dtype=np.bool_)
    if not meta.del_bytes and data[8:12] != DEL_VERSION.to_bytes(4, "little"):
        return _marks_of_version_1(data, meta)
    for ranges, is_valid, _, _ in mark_blocks(data[: meta.del_bytes or None]):
        if is_valid:
            _mark(mask, ranges)
    return mask


def mark_deleted(
    disk: Disk,
    topic_dir: str,
    meta: SegmentMeta,
    rows: Sequence[int] | npt.NDArray[np.integer],
    marked: Mask | None = None,
) -> str:
    """Add rows to .del and return its path, for `files.sync_file` before a snapshot refers to it.

    `marked`: the marks in the file so far, if known; then the file is not read, and damage to it does not matter.
    """
    path = segment_path(topic_dir, meta, "del")
    wanted = np.unique(np.asarray(rows, dtype=np.int64))
    if len(wanted) and not 0 <= wanted[0] <= wanted[-1] < meta.rows:
        raise ValueError(f"rows {wanted[0]} to {wanted[-1]} of a segment with {meta.rows} rows")
    known = np.zeros(meta.rows, dtype=np.bool_)
    if meta.has_del:
        before = read_deleted(disk, topic_dir, meta) if marked is None else marked
        assert before is not None
        known[: len(before)] = before
    wanted = wanted[~known[wanted]]
    if meta.del_bytes and (not len(wanted) or _append_block(disk, path, meta, wanted)):
        return path
    # The first marks, a file of version 1, or a file that was cut off: rewrite it.
    known[wanted] = True
    block, meta.del_digest = _encode_block(bytes(DIGEST_BYTES), np.flatnonzero(known))
    write_whole(disk, path + TEMP_SUFFIX, header(DEL_MAGIC, DEL_VERSION) + block)
    disk.rename(path + TEMP_SUFFIX, path)
    meta.del_bytes = HEADER_BYTES + len(block)
    meta.has_del = True
    return path


def encode_marks(mask: Mask) -> bytes:
    """The content of a .del file with these rows in one block."""
    return header(DEL_MAGIC, DEL_VERSION) + _encode_block(bytes(DIGEST_BYTES), np.flatnonzero(mask))[0]


def _append_block(disk: Disk, path: str, meta: SegmentMeta, rows: npt.NDArray[np.int64]) -> bool:
    """Append a block at the valid length; False if the file is shorter."""
    if not disk.exists(path):
        return False
    block, digest = _encode_block(meta.del_digest, rows)
    handle = disk.open(path)
    try:
        size = disk.size(handle)
        if size < meta.del_bytes:
            return False
        end = meta.del_bytes + len(block)
        disk.write(handle, meta.del_bytes, block)
        if size > end:
            disk.truncate(handle, end)
    finally:
        disk.close(handle)
    meta.del_bytes, meta.del_digest = end, digest
    return True


def _encode_block(previous: bytes, rows: npt.NDArray[np.int64]) -> tuple[bytes, bytes]:
    """A block of these ascending rows, and the digest at its end. `previous`: the digest of the block before."""
    ranges = np.array(runs_of(rows, rows + 1), dtype=_RANGE)
    body = len(ranges).to_bytes(_COUNT_BYTES, "little") + ranges.tobytes()
    digest = xxh(previous + body)
    return body + digest, digest


def mark_blocks(data: bytes) -> Iterator[tuple[npt.NDArray[np.void], bool, bytes, int]]:
    """For each block its ranges, whether its digest matches, the digest, and the end of the block."""
    at, previous = HEADER_BYTES, bytes(DIGEST_BYTES)
    while at + _COUNT_BYTES <= len(data):
        count = int.from_bytes(data[at : at + _COUNT_BYTES], "little")
        close = at + _COUNT_BYTES + count * _RANGE.itemsize
        end = close + DIGEST_BYTES
        if end > len(data):
            return
        ranges = np.frombuffer(data, dtype=_RANGE, count=count, offset=at + _COUNT_BYTES)
        digest = data[close:end]
        yield ranges, xxh(previous + data[at:close]) == digest, digest, end
        at, previous = end, digest


def _mark(mask: Mask, ranges: npt.NDArray[np.void]) -> None:
    for first, stop in ranges.tolist():
        mask[first:stop] = True


def _marks_of_version_1(data: bytes, meta: SegmentMeta) -> Mask:
    """One byte per row: 1 means deleted, anything else live. Rows past the end are live."""
    mask = np.zeros(meta.rows, dtype=np.bool_)
    marks = np.frombuffer(data, dtype=np.uint8)[HEADER_BYTES : HEADER_BYTES + meta.rows]
    mask[: len(marks)] = marks == 1
    return mask
