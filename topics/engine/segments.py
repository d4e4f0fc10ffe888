"""The files of one segment: growing, sealing, checking, rewriting and removing them.

Nothing here decides when; a checkpoint, a scrub or retention does. Long work is a
generator that yields about every MiB and returns its result, so that the caller can
serve requests in between.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from topics.engine.errors import Corrupt, TopicsError
from topics.engine.files import (
    HEADER_BYTES,
    TEMP_SUFFIX,
    Hasher,
    check_header,
    header,
    read_exact,
    read_file,
    read_range,
    sync_parents,
    with_digest,
    without_digest,
    write_whole,
    xxh,
)
from topics.engine.frames import DEAD
from topics.engine.limits import MIB, SLICE_ROWS
from topics.engine.ports import Disk

DATA_MAGIC = b"TPCSDAT\0"
IDX_MAGIC = b"TPCSIDX\0"
DICT_MAGIC = b"TPCSDIC\0"
SUM_MAGIC = b"TPCSSUM\0"
DEL_MAGIC = b"TPCSDEL\0"

BLOCK_BYTES = MIB  # of .data, the header included: what one digest in .sum covers
DATA_BYTES_MAX = 0xFFFF_FFFF  # offsets in rows are u32
RUNS_MAX = 256  # at some 10 µs a write; more separate runs of deleted rows go into a new .del, which syncs
HASH_BLOCKS_PER_STEP = 4  # hashing a MiB takes a third of a millisecond

ROW = np.dtype(
    [
        ("offset", "<u4"),
        ("length", "<u4"),
        ("ts", "<u8"),
        ("flags", "u1"),
        ("pad", "u1", (3,)),
        ("tag", "<u4"),
        ("node", "<u4"),
        ("size", "<u4"),
    ]
)
ROW_STRUCT = Struct("<IIQB3xIII")
ROW_BYTES = ROW_STRUCT.size
EXPIRY = np.dtype([("row", "<u4"), ("time", "<u8")])

T = TypeVar("T")
Rows = npt.NDArray[np.void]
Mask = npt.NDArray[np.bool_]

_NAME = re.compile(r"seg-([0-9a-f]{16})-([0-9]+)\.(data|idx|dict|sum|del)")
_BLOCK = Struct("<B3xII")  # kind, count, bytes of the entries
_NAME_LENGTH = np.dtype("<u2")
_TAGS, _NODES, _EXPIRIES = 1, 2, 3


class SegmentMeta(msgspec.Struct, array_like=True):
    """What a snapshot keeps of a segment: the lengths up to which its files count, and a summary."""

    first_seq: int
    generation: int = 0
    rows: int = 0
    data_bytes: int = HEADER_BYTES  # the first free offset of .data
    dict_bytes: int = 0  # 0: no .dict
    tag_names: int = 0
    node_names: int = 0
    sealed: bool = False
    tier: str = "hot"
    has_del: bool = False
    live: int = 0  # appends add to it; whoever deletes subtracts, as only they know what was live
    ts_min: int = 0  # 0: no row with a time
    ts_max: int = 0
    link: bytes = b""  # once sealed: what the next segment's .sum names as its chain

    @property
    def idx_bytes(self) -> int:
        return HEADER_BYTES + ROW_BYTES * self.rows


class Sum(msgspec.Struct, frozen=True):
    """What .sum holds. `origin` is the digest of the first sealed generation, empty in that one:
    the next segment's chain goes on naming it when this segment is rewritten."""

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
    origin: bytes = bytes(
        8
    )  # all zero: this is the first sealed generation; always 8 bytes, so that an erase can set it


@dataclass(frozen=True, slots=True)
class Problem:
    """Damage found by `verify`: this byte range of this file. Length 0 means the file as a whole."""

    path: str
    offset: int
    length: int
    what: str


# ── Names ─────────────────────────────────────────────────────────────────────────────


def segment_name(first_seq: int, generation: int) -> str:
    return f"seg-{first_seq:016x}-{generation}"


def parse_segment_name(filename: str) -> tuple[int, int, str] | None:
    """First seq, generation and suffix (without the dot) of a segment's file, None for other names."""
    match = _NAME.fullmatch(filename)
    return (int(match[1], 16), int(match[2]), match[3]) if match else None


def segment_path(topic_dir: str, meta: SegmentMeta, suffix: str) -> str:
    return f"{topic_dir}/{segment_name(meta.first_seq, meta.generation)}.{suffix}"


# ── Growing ───────────────────────────────────────────────────────────────────────────


class SegmentWriter:
    """Appends to the open segment of a topic, at the lengths that `meta` gives.

    Not at the ends of the files: a checkpoint that crashed, or failed half-way, may
    have left more there, which is overwritten and cut off.
    """

    _MAGICS: Final = {"data": DATA_MAGIC, "idx": IDX_MAGIC, "dict": DICT_MAGIC}  # in the order of syncing

    def __init__(self, disk: Disk, topic_dir: str, meta: SegmentMeta) -> None:
        if meta.sealed:
            raise ValueError("a sealed segment does not grow")
        self.meta = meta
        self._disk = disk
        self._dir = topic_dir
        self._handles: dict[str, int] = {}
        self._created = False

    @property
    def data_bytes(self) -> int:
        return self.meta.data_bytes

    def append(
        self,
        frames: bytes,
        rows: Rows,
        tags: Sequence[bytes],
        nodes: Sequence[bytes],
        expiries: Sequence[tuple[int, int]],
    ) -> None:
        """Write frames, rows and new names; `meta` moves on only after all of it is written."""
        meta = self.meta
        if not len(rows):
            if frames or tags or nodes or expiries:
                raise ValueError("frames or names without rows")
            return
        data_end = meta.data_bytes + len(frames)
        _check_offsets(rows, meta.data_bytes, data_end)
        blocks = _dict_blocks(tags, nodes, expiries)
        dict_bytes = meta.dict_bytes
        self._put("data", meta.data_bytes, frames, fresh=not meta.rows)
        self._put("idx", meta.idx_bytes, np.ascontiguousarray(rows).tobytes(), fresh=not meta.rows)
        if blocks:
            offset = dict_bytes or HEADER_BYTES
            self._put("dict", offset, blocks, fresh=not dict_bytes)
            dict_bytes = offset + len(blocks)
        meta.ts_min, meta.ts_max = _widen(meta.ts_min, meta.ts_max, rows)
        meta.live += int(np.count_nonzero(rows["length"]))
        meta.rows += len(rows)
        meta.data_bytes = data_end
        meta.dict_bytes = dict_bytes
        meta.tag_names += len(tags)
        meta.node_names += len(nodes)

    def paths(self) -> list[str]:
        """Files written so far, in the order in which `sync` takes them."""
        return [
            segment_path(self._dir, self.meta, suffix) for suffix in self._MAGICS if suffix in self._handles
        ]

    def handles(self) -> list[int]:
        return [self._handles[suffix] for suffix in self._MAGICS if suffix in self._handles]

    def sync(self) -> None:
        """After this, and not before, a snapshot may name the new lengths."""
        created, self._created = self._created, False
        try:
            for handle in self.handles():
                self._disk.sync(handle)
            if created:
                # Without its directory entry a synced file is lost in a power cut all the same.
                self._disk.sync_dir(self._dir)
                sync_parents(self._disk, self._dir)
        except OSError:
            self._created = created
            raise

    def close(self) -> None:
        while self._handles:
            self._disk.close(self._handles.popitem()[1])

    def _put(self, suffix: str, offset: int, data: bytes, *, fresh: bool) -> None:
        handle = self._handles.get(suffix)
        if handle is None:
            handle = self._create(suffix) if fresh else self._reopen(suffix, offset)
        if data:
            self._disk.write(handle, offset, data)
        if self._disk.size(handle) > offset + len(data):
            self._disk.truncate(handle, offset + len(data))

    def _create(self, suffix: str) -> int:
        self._disk.make_dir(self._dir)
        if suffix == "data":
            # Left by a segment of the same name whose checkpoint was never finished: its marks are not ours.
            _remove(self._disk, self._dir, self.meta, "sum", "del")
        handle = self._disk.open(segment_path(self._dir, self.meta, suffix), create=True)
        try:
            self._disk.write(handle, 0, header(self._MAGICS[suffix]))
        except OSError:
            # Not kept: the next try must write the header again.
            self._disk.close(handle)
            raise
        self._handles[suffix] = handle
        self._created = True
        return handle

    def _reopen(self, suffix: str, length: int) -> int:
        path = segment_path(self._dir, self.meta, suffix)
        handle = self._disk.open(path)
        size = self._disk.size(handle)
        if size < length:
            # Writing on would leave a hole that reads as zeros.
            self._disk.close(handle)
            raise Corrupt(path, size, f"ends before byte {length}, up to which it was written")
        self._handles[suffix] = handle
        return handle


def _check_offsets(rows: Rows, start: int, end: int) -> None:
    if end > DATA_BYTES_MAX:
        raise ValueError(f"a segment of {end} bytes: offsets end at {DATA_BYTES_MAX}")
    with_frame = rows[rows["length"] > 0]
    if len(with_frame):
        first = int(with_frame["offset"].min())
        last = int((with_frame["offset"].astype(np.int64) + with_frame["length"]).max())
        if first < start or last > end:
            raise ValueError(f"rows point to bytes {first} to {last}, the frames are {start} to {end}")


def _widen(low: int, high: int, rows: Rows) -> tuple[int, int]:
    """The time range with these rows in it; rows without a time do not count."""
    times = rows["ts"][rows["ts"] > 0]
    if not len(times):
        return low, high
    first, last = int(times.min()), int(times.max())
    return (min(low, first) if low else first), max(high, last)


def _dict_blocks(tags: Sequence[bytes], nodes: Sequence[bytes], expiries: Sequence[tuple[int, int]]) -> bytes:
    parts = [_name_block(kind, names) for kind, names in ((_TAGS, tags), (_NODES, nodes)) if names]
    if expiries:
        entries = np.array([tuple(entry) for entry in expiries], dtype=EXPIRY).tobytes()
        parts.append(_BLOCK.pack(_EXPIRIES, len(expiries), len(entries)) + entries)
    return b"".join(parts)


def _name_block(kind: int, names: Sequence[bytes]) -> bytes:
    # The lengths first, so that a reader finds all names by one sum.
    entries = np.array([len(name) for name in names], dtype=_NAME_LENGTH).tobytes() + b"".join(names)
    return _BLOCK.pack(kind, len(names), len(entries)) + entries


# ── Reading ───────────────────────────────────────────────────────────────────────────


def read_rows(disk: Disk, topic_dir: str, meta: SegmentMeta) -> Rows:
    """A writable copy of the segment's rows."""
    if not meta.rows:
        return np.zeros(0, dtype=ROW)
    path = segment_path(topic_dir, meta, "idx")
    data = read_range(disk, path, 0, meta.idx_bytes)
    check_header(path, data, IDX_MAGIC)
    return np.frombuffer(data, dtype=ROW, offset=HEADER_BYTES).copy()


def read_dict(disk: Disk, topic_dir: str, meta: SegmentMeta) -> tuple[list[bytes], list[bytes], Rows]:
    """Tags and nodes (id 1 is the first of the list) and record expiries (EXPIRY)."""
    tags: list[bytes] = []
    nodes: list[bytes] = []
    expiries = [np.zeros(0, dtype=EXPIRY)]
    if meta.dict_bytes:
        path = segment_path(topic_dir, meta, "dict")
        data = read_range(disk, path, 0, meta.dict_bytes)
        check_header(path, data, DICT_MAGIC)
        for kind, count, start, end in _blocks(path, data):
            if kind == _EXPIRIES:
                expiries.append(_expiries(path, data, start, end, count))
            else:
                (tags if kind == _TAGS else nodes).extend(_names(path, data, start, end, count))
        if (len(tags), len(nodes)) != (meta.tag_names, meta.node_names):
            raise Corrupt(path, 0, f"holds {len(tags)} tags and {len(nodes)} nodes, not what was written")
    return tags, nodes, np.concatenate(expiries)


def _blocks(path: str, data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Kind, count, start and end of every block's entries."""
    at = HEADER_BYTES
    while at < len(data):
        if len(data) - at < _BLOCK.size:
            raise Corrupt(path, at, "ends inside a block header")
        kind, count, size = _BLOCK.unpack_from(data, at)
        start, end = at + _BLOCK.size, at + _BLOCK.size + size
        if kind not in {_TAGS, _NODES, _EXPIRIES}:
            raise Corrupt(path, at, f"block of unknown kind {kind}")
        if end > len(data):
            raise Corrupt(path, at, "a block runs past the end")
        yield kind, count, start, end
        at = end


def _names(path: str, data: bytes, start: int, end: int, count: int) -> list[bytes]:
    text = start + _NAME_LENGTH.itemsize * count
    if text <= end:
        lengths = np.frombuffer(data, dtype=_NAME_LENGTH, count=count, offset=start)
        ends = np.cumsum(lengths, dtype=np.int64) + text
        if (int(ends[-1]) if count else text) == end:
            return [
                data[first:last] for first, last in zip((ends - lengths).tolist(), ends.tolist(), strict=True)
            ]
    raise Corrupt(path, start, f"a block of {count} names does not add up")


def _expiries(path: str, data: bytes, start: int, end: int, count: int) -> Rows:
    if end - start != count * EXPIRY.itemsize:
        raise Corrupt(path, start, f"a block of {count} expiries does not add up")
    return np.frombuffer(data, dtype=EXPIRY, count=count, offset=start)


# ── Deleted rows ──────────────────────────────────────────────────────────────────────


def read_deleted(disk: Disk, topic_dir: str, meta: SegmentMeta) -> Mask | None:
    """Which rows are deleted; None when there is no .del. Rows past its end are live."""
    if not meta.has_del:
        return None
    path = segment_path(topic_dir, meta, "del")
    data = read_file(disk, path)
    check_header(path, data, DEL_MAGIC)
    mask = np.zeros(meta.rows, dtype=np.bool_)
    marks = np.frombuffer(data, dtype=np.uint8, offset=HEADER_BYTES)[: meta.rows]
    mask[: len(marks)] = marks == 1
    return mask


def mark_deleted(
    disk: Disk, topic_dir: str, meta: SegmentMeta, rows: Sequence[int] | npt.NDArray[np.integer]
) -> str:
    """Mark rows in .del and return its path, for `files.sync_file` before a snapshot names it.

    Only bytes that change are written in place: a power cut may garble what is being
    written, so that a live row's mark reads as 1, or a synced 1 as something else. The
    marks that it may garble so are new ones, and the log repeats those.
    """
    path = segment_path(topic_dir, meta, "del")
    marked = np.unique(np.asarray(rows, dtype=np.int64))
    if len(marked) and not 0 <= marked[0] <= marked[-1] < meta.rows:
        raise ValueError(f"rows {marked[0]} to {marked[-1]} of a segment of {meta.rows}")
    deleted = read_deleted(disk, topic_dir, meta)
    if deleted is None:
        deleted = np.zeros(meta.rows, dtype=np.bool_)
    marked = marked[~deleted[marked]]
    runs = _runs(marked, marked + 1)
    if len(runs) > RUNS_MAX:
        deleted[marked] = True
        write_whole(disk, path + TEMP_SUFFIX, header(DEL_MAGIC) + deleted.tobytes())
        disk.rename(path + TEMP_SUFFIX, path)
    else:
        _write_marks(disk, path, meta, runs)
    meta.has_del = True
    return path


def _write_marks(disk: Disk, path: str, meta: SegmentMeta, runs: list[tuple[int, int]]) -> None:
    handle = disk.open(path, create=not meta.has_del)
    try:
        if not meta.has_del:
            # A file that no snapshot names is of a crashed checkpoint: torn, or with marks whose
            # log entries are lost.
            disk.truncate(handle, 0)
            disk.write(handle, 0, header(DEL_MAGIC))
            disk.allocate(handle, HEADER_BYTES + meta.rows)
        for start, end in runs:
            disk.write(handle, HEADER_BYTES + start, b"\x01" * (end - start))
    finally:
        disk.close(handle)


def _runs(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Join ranges that touch; they are in order."""
    if not len(starts):
        return []
    gaps = np.flatnonzero(starts[1:] != ends[:-1])
    first = starts[np.concatenate(([0], gaps + 1))]
    last = ends[np.concatenate((gaps, [len(ends) - 1]))]
    return list(zip(first.tolist(), last.tolist()))


def count_live(rows: Rows, deleted: Mask | None) -> int:
    present = rows["length"] > 0
    return int(np.count_nonzero(present if deleted is None else present & ~deleted))


# ── Sealing ───────────────────────────────────────────────────────────────────────────


def drain(steps: Generator[None, None, T]) -> T:
    """Run stepwise work in one go."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result


def seal(disk: Disk, topic_dir: str, meta: SegmentMeta, chain: bytes) -> bytes:
    return drain(seal_steps(disk, topic_dir, meta, chain))


def seal_steps(
    disk: Disk, topic_dir: str, meta: SegmentMeta, chain: bytes, origin: bytes = bytes(8)
) -> Generator[None, None, bytes]:
    """Write .sum over files that are synced already, and return the digest that ends it.

    The segment must not grow meanwhile. `.sum` comes last: where one is named, by a
    snapshot or by a segment swap in the log, everything that it sums up is on disk.
    """
    blocks = yield from _block_digests(disk, segment_path(topic_dir, meta, "data"), meta.data_bytes)
    idx_digest, live = yield from _index_digest(disk, topic_dir, meta)
    dict_digest = b""
    if meta.dict_bytes:
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
    """The digest of .idx and how many of its rows are live."""
    path = segment_path(topic_dir, meta, "idx")
    deleted = read_deleted(disk, topic_dir, meta)
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
    """The content of .sum and the digest that ends it."""
    path = f"{topic_dir}/{segment_name(first_seq, generation)}.sum"
    content = read_file(disk, path)
    payload = without_digest(path, content, SUM_MAGIC)
    try:
        summary = msgspec.msgpack.decode(payload, type=Sum)
    except msgspec.DecodeError as error:
        raise Corrupt(path, HEADER_BYTES, f"cannot be decoded: {error}") from error
    if (summary.first_seq, summary.generation) != (first_seq, generation):
        raise Corrupt(path, HEADER_BYTES, f"is of {segment_name(summary.first_seq, summary.generation)}")
    if len(summary.blocks) != -(-summary.data_bytes // BLOCK_BYTES):
        raise Corrupt(path, HEADER_BYTES, f"{len(summary.blocks)} digests for {summary.data_bytes} bytes")
    return summary, content[-8:]


def meta_from_sum(
    disk: Disk, topic_dir: str, first_seq: int, generation: int, *, tier: str = "hot", has_del: bool = False
) -> SegmentMeta:
    """For a generation that a segment swap in the log names and no snapshot knows yet.

    `has_del` only when a .del was synced before the swap was logged. That one exists
    proves nothing: a later checkpoint that crashed may have left it, torn.
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


# ── Checking ──────────────────────────────────────────────────────────────────────────


def verify(disk: Disk, topic_dir: str, meta: SegmentMeta, expect_chain: bytes | None) -> list[Problem]:
    return drain(verify_steps(disk, topic_dir, meta, expect_chain))


def verify_steps(
    disk: Disk, topic_dir: str, meta: SegmentMeta, expect_chain: bytes | None
) -> Generator[None, None, list[Problem]]:
    """Compare a segment with its .sum; each damaged block of .data is a problem of its own.

    An open segment has no .sum: only the headers and lengths of its files are checked.
    """
    problems = _check_files(disk, topic_dir, meta)
    if not meta.sealed:
        return problems
    sum_path = segment_path(topic_dir, meta, "sum")
    try:
        summary, _ = read_sum(disk, topic_dir, meta.first_seq, meta.generation)
    except (TopicsError, OSError) as error:
        return [*problems, Problem(sum_path, 0, 0, _describe(error))]
    if expect_chain is not None and summary.chain != expect_chain:
        problems.append(Problem(sum_path, 0, 0, "the chain names another preceding segment"))
    lengths = (summary.rows, summary.data_bytes, summary.dict_bytes)
    if lengths != (meta.rows, meta.data_bytes, meta.dict_bytes):
        return [*problems, Problem(sum_path, 0, 0, "lengths differ from those of the snapshot")]
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
        # A bad header or end does not spare the rest: which blocks are whole decides what is lost.
        problems = [problem for problem in problems if problem.path != data_path]
        problems += yield from _verify_blocks(disk, data_path, meta.data_bytes, summary.blocks)
    return problems


def _check_files(disk: Disk, topic_dir: str, meta: SegmentMeta) -> list[Problem]:
    problems: list[Problem] = []
    for suffix, length, magic in _expected(meta):
        path = segment_path(topic_dir, meta, suffix)
        try:
            _check_file(disk, path, length, magic)
        except (TopicsError, OSError) as error:
            problems.append(Problem(path, 0, length, _describe(error)))
    return problems


def _expected(meta: SegmentMeta) -> list[tuple[str, int, bytes]]:
    """Suffix, least length and magic of each file that must exist."""
    expected: list[tuple[str, int, bytes]] = []
    if meta.rows:
        expected += [("data", meta.data_bytes, DATA_MAGIC), ("idx", meta.idx_bytes, IDX_MAGIC)]
    if meta.dict_bytes:
        expected.append(("dict", meta.dict_bytes, DICT_MAGIC))
    if meta.has_del:
        expected.append(("del", HEADER_BYTES, DEL_MAGIC))
    return expected


def _check_file(disk: Disk, path: str, length: int, magic: bytes) -> None:
    handle = disk.open(path)
    try:
        check_header(path, disk.read(handle, 0, HEADER_BYTES), magic)
        size = disk.size(handle)
        if size < length:
            raise Corrupt(path, size, f"ends before byte {length}")
    finally:
        disk.close(handle)


def _verify_file(disk: Disk, path: str, length: int, digest: bytes) -> Generator[None, None, list[Problem]]:
    try:
        found = yield from _file_digest(disk, path, length)
    except (TopicsError, OSError) as error:
        return [Problem(path, 0, length, _describe(error))]
    return [] if found == digest else [Problem(path, 0, length, "digest does not match")]


def _verify_blocks(
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
) -> Generator[None, None, tuple[SegmentMeta, Rows]]:
    """Write the segment again without its dead records, sealed; the old generation is left alone.

    Rows are taken as they are at the first step: what is deleted after it must be marked
    in the new generation when this is done. Frames are copied as they are, damaged ones too: the
    new .sum vouches for them and only their own digests tell, so `verify` comes first.
    """
    live = rows["length"] > 0
    if deleted is not None:
        live &= ~deleted
    new_rows, runs = _compact(segment_path(topic_dir, meta, "idx"), rows, live)
    new_meta = msgspec.structs.replace(
        meta,
        generation=new_generation,
        data_bytes=HEADER_BYTES + int(new_rows["length"].sum(dtype=np.int64)),
        sealed=False,
        has_del=False,
        live=int(np.count_nonzero(live)),
        link=b"",
    )
    # A crashed attempt at the same generation: its .sum and marks do not fit what is written now.
    _remove(disk, topic_dir, new_meta, "sum", "del")
    yield from _copy_runs(disk, topic_dir, meta, new_meta, runs)
    yield from _write_file(disk, segment_path(topic_dir, new_meta, "idx"), _index_pieces(new_rows))
    if meta.dict_bytes:
        source = segment_path(topic_dir, meta, "dict")
        content = read_range(disk, source, 0, meta.dict_bytes)
        check_header(source, content, DICT_MAGIC)
        yield from _write_file(disk, segment_path(topic_dir, new_meta, "dict"), iter((content,)))
    yield from seal_steps(disk, topic_dir, new_meta, chain, meta.link)
    return new_meta, new_rows


def _compact(path: str, rows: Rows, live: Mask) -> tuple[Rows, list[tuple[int, int]]]:
    """The new rows, and the byte ranges of live frames, neighbours joined."""
    new_rows = np.zeros(len(rows), dtype=ROW)
    new_rows["ts"] = rows["ts"]
    kept = rows[live]
    starts = kept["offset"].astype(np.int64)
    ends = starts + kept["length"]
    if np.any(starts[1:] < ends[:-1]):
        raise Corrupt(path, HEADER_BYTES, "frames of different rows overlap")
    moved = kept.copy()
    moved["flags"] &= 0xFF ^ DEAD  # a delete that is not logged yet may still come to nothing
    moved["offset"] = HEADER_BYTES + np.cumsum(ends - starts) - (ends - starts)
    new_rows[live] = moved
    return new_rows, _runs(starts, ends)


def _copy_runs(
    disk: Disk, topic_dir: str, meta: SegmentMeta, new_meta: SegmentMeta, runs: list[tuple[int, int]]
) -> Generator[None, None, None]:
    source = segment_path(topic_dir, meta, "data")
    handle = disk.open(source)
    try:
        check_header(source, disk.read(handle, 0, HEADER_BYTES), DATA_MAGIC)
        pieces = _data_pieces(disk, handle, source, runs)
        yield from _write_file(disk, segment_path(topic_dir, new_meta, "data"), pieces)
    finally:
        disk.close(handle)


def _data_pieces(disk: Disk, handle: int, path: str, runs: list[tuple[int, int]]) -> Iterator[bytes]:
    yield header(DATA_MAGIC)
    for window in _windows(runs):
        # One read for all runs of the window, dead bytes between them included: a read per
        # record would cost more than the bytes.
        base = window[0][0]
        data = read_exact(disk, handle, path, base, window[-1][1] - base)
        yield b"".join([data[start - base : end - base] for start, end in window])


def _windows(runs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Groups of runs that span at most a block; a longer run is cut."""
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
    """Fill a file from its beginning and sync it, a step per piece."""
    handle = disk.open(path, create=True)
    try:
        disk.truncate(handle, 0)
        offset = 0
        for piece in pieces:
            disk.write(handle, offset, piece)
            offset += len(piece)
            yield
        disk.sync(handle)
    finally:
        disk.close(handle)


# ── Cutting and removing ──────────────────────────────────────────────────────────────


def cut_to_meta(disk: Disk, topic_dir: str, meta: SegmentMeta) -> None:
    """At recovery: drop what a checkpoint wrote after the snapshot. The log holds it and writes it again."""
    for suffix, length, _ in _expected(meta):
        if suffix == "del":
            # Marks past the rows would hit records that are appended later.
            _cut(disk, segment_path(topic_dir, meta, suffix), HEADER_BYTES, HEADER_BYTES + meta.rows)
        else:
            _cut(disk, segment_path(topic_dir, meta, suffix), length, length)
    _remove(disk, topic_dir, meta, *_unexpected(meta))


def _unexpected(meta: SegmentMeta) -> list[str]:
    known = {suffix for suffix, _, _ in _expected(meta)}
    if meta.sealed:
        known.add("sum")
    return [suffix for suffix in ("sum", "del", "dict", "idx", "data") if suffix not in known]


def _cut(disk: Disk, path: str, least: int, most: int) -> None:
    if not disk.exists(path):
        raise Corrupt(path, 0, "is missing")
    handle = disk.open(path)
    try:
        size = disk.size(handle)
        if size < least:
            raise Corrupt(path, size, f"ends before byte {least}, up to which it was written")
        if size > most:
            disk.truncate(handle, most)
    finally:
        disk.close(handle)


def remove_segment(disk: Disk, topic_dir: str, first_seq: int, generation: int) -> None:
    """Remove all files of one generation. Not synced: what comes back after a power cut is an orphan.

    `.sum` goes first: when a crash stops this half-way, no .sum is left that promises the rest.
    """
    _remove(disk, topic_dir, SegmentMeta(first_seq, generation), "sum", "del", "dict", "idx", "data")


def _remove(disk: Disk, topic_dir: str, meta: SegmentMeta, *suffixes: str) -> None:
    for suffix in suffixes:
        path = segment_path(topic_dir, meta, suffix)
        disk.remove(path)
        if suffix == "del":
            disk.remove(path + TEMP_SUFFIX)
