"""Sealed segments: sealing with digests, verification, and rewriting without dead records.

Long operations are generators that yield about every MiB and return their result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from topics.api.errors import Corrupt, TopicsError
from topics.api.limits import SLICE_ROWS
from topics.engine.core.ports import Disk
from topics.engine.core.tasks import drain as drain
from topics.engine.storage.delete_marks import read_deleted
from topics.engine.storage.files import (
    HEADER_BYTES,
    VERSION,
    Hasher,
    check_header,
    header,
    read_exact,
    read_file,
    read_range,
    with_digest,
    without_digest,
    write_whole,
    xxh,
)
from topics.engine.storage.frames import DEAD, is_record
from topics.engine.storage.segments import (
    BLOCK_BYTES,
    DATA_MAGIC,
    DEL_MAGIC,
    DEL_VERSION,
    DICT_MAGIC,
    HASH_BLOCKS_PER_STEP,
    HOT,
    IDX_MAGIC,
    ROW,
    ROW_BYTES,
    SUM_MAGIC,
    Mask,
    Rows,
    SegmentMeta,
    count_live,
    expected_files,
    read_rows,
    remove_files,
    runs_of,
    segment_name,
    segment_path,
)

ReadAt = Callable[[int, int], bytes]  # offset, length → exactly these bytes
SYNC_BYTES = 8 * BLOCK_BYTES  # written between two syncs of a long file


class Sum(msgspec.Struct, frozen=True):
    """Content of .sum. `chain` identifies the preceding segment. `origin` is the digest of the first sealed generation: the
    chain of the next segment refers to it, so it stays valid when this segment is rewritten."""

    first_seq: int
    generation: int
    rows: int
    live: int
    data_bytes: int
    dict_bytes: int
    tag_names: int
    node_names: int
    ts_min: int
    ts_max: int
    idx_digest: bytes
    dict_digest: bytes
    blocks: list[bytes]
    chain: bytes
    # Zeros: this is the first sealed generation. Always 8 bytes, so that an erase can set it in place.
    origin: bytes = bytes(8)


@dataclass(frozen=True, slots=True)
class Problem:
    """Damage found by `verify` in a byte range of a file. Length 0: the whole file."""

    path: str
    offset: int
    length: int
    what: str


# ── Sealing ───────────────────────────────────────────────────────────────────────────


def seal(disk: Disk, topic_dir: str, meta: SegmentMeta, chain: bytes) -> bytes:
    return drain(seal_steps(disk, topic_dir, meta, chain))


def damaged_blocks(
    disk: Disk, topic_dir: str, meta: SegmentMeta, row_count: int, topic_id: int
) -> frozenset[int]:
    """The blocks of .data that contain a damaged record among the first `row_count`."""
    if not row_count:
        return frozenset()
    try:
        rows = read_rows(disk, topic_dir, meta)[:row_count]
    except TopicsError:
        return frozenset(range(-(-meta.data_bytes // BLOCK_BYTES)))  # unknown which
    kept = np.flatnonzero(rows["length"])
    rows, seqs = rows[kept], kept + meta.first_seq
    starts = rows["offset"].astype(np.int64)
    ends = starts + rows["length"]
    bad: set[int] = set()
    handle = disk.open(segment_path(topic_dir, meta, "data"))
    try:
        first = 0
        while first < len(rows):
            base = int(starts[first])
            stop = max(first + 1, int(np.searchsorted(ends, base + BLOCK_BYTES, side="right")))
            data = disk.read(handle, base, int(ends[stop - 1]) - base)
            part = slice(first, stop)
            spans = zip((starts[part] - base).tolist(), (ends[part] - base).tolist(), seqs[part].tolist())
            for start, end, seq in spans:
                if not is_record(data[start:end], topic_id, seq):
                    bad.update(range((base + start) // BLOCK_BYTES, (base + end - 1) // BLOCK_BYTES + 1))
            first = stop
    finally:
        disk.close(handle)
    return frozenset(bad)


def seal_steps(
    disk: Disk,
    topic_dir: str,
    meta: SegmentMeta,
    chain: bytes,
    origin: bytes = bytes(8),
    damaged: frozenset[int] = frozenset(),
) -> Generator[None, None, bytes]:
    """Write .sum for files that are already synced, and return the digest at its end.

    `damaged` blocks get a digest of zeros, which never matches, so that readers check their records one by one.

    The segment must not grow meanwhile. `.sum` is written last: if a snapshot or a segment swap in the log refers to it, all
    files that it covers are on disk.
    """
    blocks = yield from _block_digests(disk, segment_path(topic_dir, meta, "data"), meta.data_bytes)
    blocks = [bytes(8) if number in damaged else digest for number, digest in enumerate(blocks)]
    idx_digest, live = yield from _index_digest(disk, topic_dir, meta)
    # Prefer the digests kept while the files grew: .sum must not confirm damage that happened since.
    idx_digest, dict_digest = meta.idx_digest or idx_digest, meta.dict_digest
    if meta.dict_bytes and not dict_digest:
        dict_digest = yield from _file_digest(disk, segment_path(topic_dir, meta, "dict"), meta.dict_bytes)
    summary = Sum(
        first_seq=meta.first_seq,
        generation=meta.generation,
        rows=meta.rows,
        live=live,
        data_bytes=meta.data_bytes,
        dict_bytes=meta.dict_bytes,
        tag_names=meta.tag_names,
        node_names=meta.node_names,
        ts_min=meta.ts_min,
        ts_max=meta.ts_max,
        idx_digest=idx_digest,
        dict_digest=dict_digest,
        blocks=blocks,
        chain=chain,
        origin=origin,
    )
    content = with_digest(SUM_MAGIC, msgspec.msgpack.encode(summary))
    write_whole(disk, segment_path(topic_dir, meta, "sum"), content)
    disk.sync_dir(topic_dir)
    digest = content[-8:]
    meta.sealed, meta.link = True, origin if any(origin) else digest
    meta.idx_digest = meta.dict_digest = b""  # now in .sum
    return digest


def _block_digests(disk: Disk, path: str, length: int) -> Generator[None, None, list[bytes]]:
    digests: list[bytes] = []
    handle = disk.open(path)
    try:
        for offset in range(0, length, BLOCK_BYTES):
            size = min(BLOCK_BYTES, length - offset)
            digests.append(xxh(read_exact(disk, handle, path, offset, size)))
            if len(digests) % HASH_BLOCKS_PER_STEP == 0:
                yield
    finally:
        disk.close(handle)
    return digests


def _index_digest(disk: Disk, topic_dir: str, meta: SegmentMeta) -> Generator[None, None, tuple[bytes, int]]:
    """The digest of .idx and the number of its live rows. Rows count as live if .del cannot be read."""
    path = segment_path(topic_dir, meta, "idx")
    try:
        deleted = read_deleted(disk, topic_dir, meta)
    except (TopicsError, OSError):
        deleted = None
    step = BLOCK_BYTES // ROW_BYTES
    live = 0
    handle = disk.open(path)
    try:
        hasher = Hasher(read_exact(disk, handle, path, 0, HEADER_BYTES))
        for first in range(0, meta.rows, step):
            size = ROW_BYTES * min(step, meta.rows - first)
            piece = read_exact(disk, handle, path, HEADER_BYTES + ROW_BYTES * first, size)
            hasher.update(piece)
            mask = None if deleted is None else deleted[first : first + step]
            live += count_live(np.frombuffer(piece, dtype=ROW), mask)
            yield
    finally:
        disk.close(handle)
    return hasher.digest(), live


def _file_digest(disk: Disk, path: str, length: int) -> Generator[None, None, bytes]:
    hasher = Hasher()
    handle = disk.open(path)
    try:
        for offset in range(0, length, BLOCK_BYTES):
            hasher.update(read_exact(disk, handle, path, offset, min(BLOCK_BYTES, length - offset)))
            yield
    finally:
        disk.close(handle)
    return hasher.digest()


def read_sum(disk: Disk, topic_dir: str, first_seq: int, generation: int) -> tuple[Sum, bytes]:
    """The content of .sum and the digest at its end."""
    path = f"{topic_dir}/{segment_name(first_seq, generation)}.sum"
    content = read_file(disk, path)
    payload = without_digest(path, content, SUM_MAGIC)
    try:
        summary = msgspec.msgpack.decode(payload, type=Sum)
    except msgspec.DecodeError as error:
        raise Corrupt(path, HEADER_BYTES, f"cannot be decoded: {error}") from error
    if (summary.first_seq, summary.generation) != (first_seq, generation):
        raise Corrupt(path, HEADER_BYTES, f"belongs to {segment_name(summary.first_seq, summary.generation)}")
    if len(summary.blocks) != -(-summary.data_bytes // BLOCK_BYTES):
        raise Corrupt(path, HEADER_BYTES, f"{len(summary.blocks)} digests for {summary.data_bytes} bytes")
    return summary, content[-8:]


def sealed_rows(disk: Disk, topic_dir: str, meta: SegmentMeta) -> Rows:
    """The rows of a sealed segment, verified against .sum."""
    rows = read_rows(disk, topic_dir, meta)
    summary, _ = read_sum(disk, topic_dir, meta.first_seq, meta.generation)
    if xxh(header(IDX_MAGIC) + rows.tobytes()) != summary.idx_digest:
        raise Corrupt(segment_path(topic_dir, meta, "idx"), 0, "digest does not match")
    return rows


def meta_from_sum(
    disk: Disk, topic_dir: str, first_seq: int, generation: int, *, tier: str = "hot", has_del: bool = False
) -> SegmentMeta:
    """The meta of a generation that is in a segment swap of the log and not yet in a snapshot.

    `has_del` only if a .del was synced before the swap was logged. A .del that merely exists may be a torn file from a later
    checkpoint that crashed.
    """
    summary, digest = read_sum(disk, topic_dir, first_seq, generation)
    return SegmentMeta(
        first_seq=first_seq,
        generation=generation,
        rows=summary.rows,
        data_bytes=summary.data_bytes,
        dict_bytes=summary.dict_bytes,
        tag_names=summary.tag_names,
        node_names=summary.node_names,
        sealed=True,
        tier=tier,
        has_del=has_del,
        live=summary.live,
        ts_min=summary.ts_min,
        ts_max=summary.ts_max,
        link=summary.origin if any(summary.origin) else digest,
    )


# ── Verification ──────────────────────────────────────────────────────────────────────


def verify(disk: Disk, topic_dir: str, meta: SegmentMeta, expect_chain: bytes | None) -> list[Problem]:
    return drain(verify_steps(disk, topic_dir, meta, expect_chain))


def verify_steps(
    disk: Disk, topic_dir: str, meta: SegmentMeta, expect_chain: bytes | None
) -> Generator[None, None, list[Problem]]:
    """Verify a segment against its .sum; each damaged block of .data is reported separately.

    An open segment has no .sum: only the header and length of its .data are checked.
    """
    problems = _check_files(disk, topic_dir, meta)
    if not meta.sealed:
        broken = {problem.path for problem in problems}
        for suffix, length, digest in (
            ("idx", meta.idx_bytes, meta.idx_digest),
            ("dict", meta.dict_bytes, meta.dict_digest),
        ):
            path = segment_path(topic_dir, meta, suffix)
            if digest and path not in broken:
                problems += yield from _verify_file(disk, path, length, digest)
        return problems
    sum_path = segment_path(topic_dir, meta, "sum")
    try:
        summary, _ = read_sum(disk, topic_dir, meta.first_seq, meta.generation)
    except (TopicsError, OSError) as error:
        return [*problems, Problem(sum_path, 0, 0, _describe(error))]
    if expect_chain is not None and summary.chain != expect_chain:
        problems.append(Problem(sum_path, 0, 0, "the chain refers to a different preceding segment"))
    lengths = (summary.rows, summary.data_bytes, summary.dict_bytes)
    if lengths != (meta.rows, meta.data_bytes, meta.dict_bytes):
        return [*problems, Problem(sum_path, 0, 0, "the lengths differ from the snapshot")]
    broken = {problem.path for problem in problems}
    for suffix, length, digest in (
        ("idx", meta.idx_bytes, summary.idx_digest),
        ("dict", meta.dict_bytes, summary.dict_digest),
    ):
        path = segment_path(topic_dir, meta, suffix)
        if length and path not in broken:
            problems += yield from _verify_file(disk, path, length, digest)
    data_path = segment_path(topic_dir, meta, "data")
    if disk.exists(data_path):
        # Check all blocks even if the header or the length is wrong: the damaged blocks decide what is lost.
        problems = [problem for problem in problems if problem.path != data_path]
        problems += yield from verify_blocks(disk, data_path, meta.data_bytes, summary.blocks)
    return problems


def _check_files(disk: Disk, topic_dir: str, meta: SegmentMeta) -> list[Problem]:
    problems: list[Problem] = []
    for suffix, length, magic in expected_files(meta):
        path = segment_path(topic_dir, meta, suffix)
        try:
            _check_file(disk, path, length, magic)
            if suffix == "del":
                read_deleted(disk, topic_dir, meta)
        except (TopicsError, OSError) as error:
            problems.append(Problem(path, 0, length, _describe(error)))
    return problems


def _check_file(disk: Disk, path: str, length: int, magic: bytes) -> None:
    latest = DEL_VERSION if magic == DEL_MAGIC else VERSION
    handle = disk.open(path)
    try:
        check_header(path, disk.read(handle, 0, HEADER_BYTES), magic, latest)
        size = disk.size(handle)
        if size < length:
            raise Corrupt(path, size, f"has {size} bytes instead of {length}")
    finally:
        disk.close(handle)


def _verify_file(disk: Disk, path: str, length: int, digest: bytes) -> Generator[None, None, list[Problem]]:
    try:
        found = yield from _file_digest(disk, path, length)
    except (TopicsError, OSError) as error:
        return [Problem(path, 0, length, _describe(error))]
    return [] if found == digest else [Problem(path, 0, length, "digest does not match")]


def verify_blocks(
    disk: Disk, path: str, length: int, digests: Sequence[bytes]
) -> Generator[None, None, list[Problem]]:
    problems: list[Problem] = []
    handle = disk.open(path)
    try:
        for number, digest in enumerate(digests):
            offset = number * BLOCK_BYTES
            size = min(BLOCK_BYTES, length - offset)
            try:
                what = "" if xxh(disk.read(handle, offset, size)) == digest else "digest does not match"
            except OSError as error:
                what = _describe(error)
            if what:
                problems.append(Problem(path, offset, size, what))
            if (number + 1) % HASH_BLOCKS_PER_STEP == 0:
                yield
    finally:
        disk.close(handle)
    return problems


def _describe(error: Exception) -> str:
    return error.problem if isinstance(error, Corrupt) else str(error)


# ── Rewriting ─────────────────────────────────────────────────────────────────────────


def rewrite_steps(
    disk: Disk,
    topic_dir: str,
    meta: SegmentMeta,
    rows: Rows,
    deleted: Mask | None,
    new_generation: int,
    chain: bytes,
    *,
    read: ReadAt | None = None,
    topic_id: int = 0,
) -> Generator[None, None, tuple[SegmentMeta, Rows]]:
    """Write a new sealed generation of the segment without its dead records; the old generation stays unchanged.

    Rows are taken as of the first step: records deleted after it must be marked in the new generation afterwards. Frames are
    copied unchecked, and the new .sum would confirm damaged ones, so call `verify` first. With a `topic_id` each record is
    checked instead, and blocks with damaged records get no valid digest. `read` reads .data if it is not on this disk.
    """
    live = rows["length"] > 0
    if deleted is not None:
        live &= ~deleted
    new_rows, runs = _compact(segment_path(topic_dir, meta, "idx"), rows, live)
    new_meta = msgspec.structs.replace(
        meta,
        generation=new_generation,
        tier=HOT,
        data_bytes=HEADER_BYTES + int(new_rows["length"].sum(dtype=np.int64)),
        sealed=False,
        has_del=False,
        live=int(np.count_nonzero(live)),
        link=b"",
        del_bytes=0,
        del_digest=b"",
    )
    # Left by a crashed attempt at the same generation: its .sum and marks do not belong to the new files.
    remove_files(disk, topic_dir, new_meta, "sum", "del")
    target = segment_path(topic_dir, new_meta, "data")
    if read is not None:
        yield from _write_file(disk, target, _data_pieces(read, runs))
    else:
        yield from _copy_runs(disk, segment_path(topic_dir, meta, "data"), target, runs)
    yield from _write_file(disk, segment_path(topic_dir, new_meta, "idx"), _index_pieces(new_rows))
    if meta.dict_bytes:
        source = segment_path(topic_dir, meta, "dict")
        content = read_range(disk, source, 0, meta.dict_bytes)
        check_header(source, content, DICT_MAGIC)
        yield from _write_file(disk, segment_path(topic_dir, new_meta, "dict"), iter((content,)))
    damaged = damaged_blocks(disk, topic_dir, new_meta, new_meta.rows, topic_id) if topic_id else frozenset()
    yield from seal_steps(disk, topic_dir, new_meta, chain, meta.link, damaged)
    return new_meta, new_rows


def _compact(path: str, rows: Rows, live: Mask) -> tuple[Rows, list[tuple[int, int]]]:
    """The new rows, and the byte ranges of live frames, with adjacent ranges joined."""
    new_rows = np.zeros(len(rows), dtype=ROW)
    new_rows["ts"] = rows["ts"]
    kept = rows[live]
    starts = kept["offset"].astype(np.int64)
    ends = starts + kept["length"]
    if np.any(starts[1:] < ends[:-1]):
        raise Corrupt(path, HEADER_BYTES, "frames of different rows overlap")
    moved = kept.copy()
    moved["flags"] &= 0xFF ^ DEAD  # a staged delete may still fail
    moved["offset"] = HEADER_BYTES + np.cumsum(ends - starts) - (ends - starts)
    new_rows[live] = moved
    return new_rows, runs_of(starts, ends)


def _copy_runs(
    disk: Disk, source: str, target: str, runs: list[tuple[int, int]]
) -> Generator[None, None, None]:
    handle = disk.open(source)
    try:
        check_header(source, disk.read(handle, 0, HEADER_BYTES), DATA_MAGIC)
        pieces = _data_pieces(lambda at, length: read_exact(disk, handle, source, at, length), runs)
        yield from _write_file(disk, target, pieces)
    finally:
        disk.close(handle)


def _data_pieces(read: ReadAt, runs: list[tuple[int, int]]) -> Iterator[bytes]:
    yield header(DATA_MAGIC)
    for window in windows_of(runs):
        # One read for all runs of the window, including the dead bytes between them, is cheaper than one per run.
        base = window[0][0]
        data = read(base, window[-1][1] - base)
        yield b"".join([data[start - base : end - base] for start, end in window])


def windows_of(runs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Groups of runs that span at most one block; longer runs are split."""
    window: list[tuple[int, int]] = []
    for start, end in runs:
        if window and (end - window[0][0] > BLOCK_BYTES or len(window) >= SLICE_ROWS):
            yield window
            window = []
        while end - start > BLOCK_BYTES:
            yield [(start, start + BLOCK_BYTES)]
            start += BLOCK_BYTES
        window.append((start, end))
    if window:
        yield window


def _index_pieces(rows: Rows) -> Iterator[bytes]:
    yield header(IDX_MAGIC)
    step = BLOCK_BYTES // ROW_BYTES
    for start in range(0, len(rows), step):
        yield rows[start : start + step].tobytes()


def _write_file(disk: Disk, path: str, pieces: Iterator[bytes]) -> Generator[None, None, None]:
    """Write a file from the start and sync it, one step per piece."""
    handle = disk.open(path, create=True)
    try:
        disk.truncate(handle, 0)
        offset = synced = 0
        for piece in pieces:
            disk.write(handle, offset, piece)
            offset += len(piece)
            if offset - synced >= SYNC_BYTES:  # a single large sync would delay the syncs of the log
                disk.sync(handle)
                synced = offset
            yield
        disk.sync(handle)
    finally:
        disk.close(handle)
