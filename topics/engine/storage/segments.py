"""Segment files of a topic (`.data`, `.idx`, `.dict`): append, read, truncate, remove.

Checkpoints and recovery decide when. Sealed segments: sealing.py; `.del` files: delete_marks.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from topics.api.errors import Corrupt
from topics.api.limits import MIB
from topics.engine.core.ports import Disk
from topics.engine.storage.files import (
    HEADER_BYTES,
    TEMP_SUFFIX,
    Hasher,
    check_header,
    header,
    read_range,
    sync_parents,
    write_whole,
)

DATA_MAGIC = b"TPCSDAT\0"
IDX_MAGIC = b"TPCSIDX\0"
DICT_MAGIC = b"TPCSDIC\0"
SUM_MAGIC = b"TPCSSUM\0"
DEL_MAGIC = b"TPCSDEL\0"
DEL_VERSION = 2  # the other files have only one version

HOT, COLD = "hot", "cold"  # tiers: where the .data of a segment is

BLOCK_BYTES = MIB  # of .data, including the header, covered by one digest in .sum
DATA_BYTES_MAX = 0xFFFF_FFFF  # offsets in rows are u32
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

Rows = npt.NDArray[np.void]
Mask = npt.NDArray[np.bool_]

_NAME = re.compile(r"seg-([0-9a-f]{16})-([0-9]+)\.(data|idx|dict|sum|del)")
_BLOCK = Struct("<B3xII")  # kind, count, bytes of the entries
_NAME_LENGTH = np.dtype("<u2")
_TAGS, _NODES, _EXPIRIES = 1, 2, 3


class SegmentMeta(msgspec.Struct, array_like=True):
    """What a snapshot stores about a segment: the valid lengths of its files, and a summary."""

    first_seq: int
    generation: int = 0
    rows: int = 0
    data_bytes: int = HEADER_BYTES  # the first free offset of .data
    dict_bytes: int = 0  # 0: no .dict
    tag_names: int = 0
    node_names: int = 0
    sealed: bool = False
    tier: str = HOT
    has_del: bool = False
    live: int = 0  # increased by appends; deletes subtract, since only they know what was live
    ts_min: int = 0  # 0: no row with a time
    ts_max: int = 0
    link: bytes = b""  # if sealed: the chain of the next segment's .sum
    # Of .idx and .dict up to the lengths above, while it is open and has no .sum. Empty: not stored.
    idx_digest: bytes = b""
    dict_digest: bytes = b""
    del_bytes: int = 0  # 0: no .del, or one of version 1
    del_digest: bytes = b""
    dead_bytes: int = 0  # of .data, as of the last checkpoint that changed it

    @property
    def idx_bytes(self) -> int:
        return HEADER_BYTES + ROW_BYTES * self.rows


# ── Names ─────────────────────────────────────────────────────────────────────────────


def segment_name(first_seq: int, generation: int) -> str:
    return f"seg-{first_seq:016x}-{generation}"


def parse_segment_name(filename: str) -> tuple[int, int, str] | None:
    """First seq, generation and suffix (without the dot) of a segment's file, None for other names."""
    match = _NAME.fullmatch(filename)
    return (int(match[1], 16), int(match[2]), match[3]) if match else None


def segment_path(topic_dir: str, meta: SegmentMeta, suffix: str) -> str:
    return f"{topic_dir}/{segment_name(meta.first_seq, meta.generation)}.{suffix}"


# ── Appending ─────────────────────────────────────────────────────────────────────────


class IndexHash:
    """Running digests of a growing .idx and .dict. Computing them from the files would confirm any damage."""

    __slots__ = ("_idx", "_names")

    def __init__(self, idx: bytes = header(IDX_MAGIC), names: bytes = header(DICT_MAGIC)) -> None:
        self._idx, self._names = Hasher(idx), Hasher(names)

    @classmethod
    def from_files(cls, disk: Disk, topic_dir: str, meta: SegmentMeta) -> IndexHash:
        """The digests of the files as they are."""
        if not meta.rows:
            return cls()
        idx = read_range(disk, segment_path(topic_dir, meta, "idx"), 0, meta.idx_bytes)
        if not meta.dict_bytes:
            return cls(idx)
        return cls(idx, read_range(disk, segment_path(topic_dir, meta, "dict"), 0, meta.dict_bytes))

    def copy(self) -> IndexHash:
        copied = IndexHash.__new__(IndexHash)
        copied._idx, copied._names = self._idx.copy(), self._names.copy()
        return copied

    def grow(self, rows: bytes, blocks: bytes) -> None:
        self._idx.update(rows)
        self._names.update(blocks)

    def store_in(self, meta: SegmentMeta) -> None:
        meta.idx_digest = self._idx.digest() if meta.rows else b""
        meta.dict_digest = self._names.digest() if meta.dict_bytes else b""


@dataclass(frozen=True, slots=True)
class IndexFiles:
    """A rebuilt index: the whole content of .idx and .dict, to replace the files."""

    idx: bytes
    names: bytes  # empty: no .dict
    tag_names: int
    node_names: int

    @classmethod
    def build(cls, rows: Rows, tags: Sequence[bytes], nodes: Sequence[bytes], expiries: Rows) -> IndexFiles:
        blocks = _dict_blocks(tags, nodes, list(zip(expiries["row"].tolist(), expiries["time"].tolist())))
        names = header(DICT_MAGIC) + blocks if blocks else b""
        return cls(header(IDX_MAGIC) + rows.tobytes(), names, len(tags), len(nodes))

    def hash(self) -> IndexHash:
        return IndexHash(self.idx, self.names) if self.names else IndexHash(self.idx)

    def write(self, disk: Disk, topic_dir: str, meta: SegmentMeta) -> None:
        """Replace the files. The ids in .idx are only valid with their .dict, so .dict is removed while .idx changes."""
        names = segment_path(topic_dir, meta, "dict")
        disk.remove(names)
        disk.sync_dir(topic_dir)
        for path, content in ((segment_path(topic_dir, meta, "idx"), self.idx), (names, self.names)):
            if content:
                write_whole(disk, path + TEMP_SUFFIX, content)
                disk.rename(path + TEMP_SUFFIX, path)
        disk.sync_dir(topic_dir)
        meta.dict_bytes = len(self.names)
        meta.tag_names, meta.node_names = self.tag_names, self.node_names
        self.hash().store_in(meta)


class SegmentWriter:
    """Appends to the open segment of a topic, at the lengths in `meta`.

    Not at the ends of the files: a checkpoint that crashed or failed may have left more bytes, which are overwritten and cut off.
    """

    _MAGICS: Final = {"data": DATA_MAGIC, "idx": IDX_MAGIC, "dict": DICT_MAGIC}  # in the order of syncing

    def __init__(
        self, disk: Disk, topic_dir: str, meta: SegmentMeta, index_hash: IndexHash | None = None
    ) -> None:
        """`index_hash`: the digests so far, updated by `append`; without it they are computed from the files."""
        if meta.sealed:
            raise ValueError("cannot append to a sealed segment")
        self.meta = meta
        self._index_hash = index_hash
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
        """Write frames, rows and new names; `meta` changes only after all of them are written."""
        meta = self.meta
        if not len(rows):
            if frames or tags or nodes or expiries:
                raise ValueError("frames or names without rows")
            return
        data_end = meta.data_bytes + len(frames)
        _check_offsets(rows, meta.data_bytes, data_end)
        blocks = _dict_blocks(tags, nodes, expiries)
        dict_bytes = meta.dict_bytes
        if self._index_hash is None:
            self._index_hash = IndexHash.from_files(self._disk, self._dir, meta)
        added = np.ascontiguousarray(rows).tobytes()
        self._put("data", meta.data_bytes, frames, fresh=not meta.rows)
        self._put("idx", meta.idx_bytes, added, fresh=not meta.rows)
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
        self._index_hash.grow(added, blocks)
        self._index_hash.store_in(meta)

    def paths(self) -> list[str]:
        """Files written so far, in the order of `sync`."""
        return [
            segment_path(self._dir, self.meta, suffix) for suffix in self._MAGICS if suffix in self._handles
        ]

    def handles(self) -> list[int]:
        return [self._handles[suffix] for suffix in self._MAGICS if suffix in self._handles]

    def sync(self) -> None:
        """Sync the files. Only then may a snapshot have the new lengths."""
        created, self._created = self._created, False
        try:
            for handle in self.handles():
                self._disk.sync(handle)
            if created:
                # A synced file is lost in a power cut if its directory entry is not synced.
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
            # Left by a checkpoint that did not finish: its marks do not belong to the new segment.
            remove_files(self._disk, self._dir, self.meta, "sum", "del")
        handle = self._disk.open(segment_path(self._dir, self.meta, suffix), create=True)
        try:
            self._disk.write(handle, 0, header(self._MAGICS[suffix]))
        except OSError:
            # The handle is not kept: the next attempt must write the header again.
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
            # Writing at `length` would leave a hole that reads as zeros.
            self._disk.close(handle)
            raise Corrupt(path, size, f"has {size} bytes instead of {length}")
        self._handles[suffix] = handle
        return handle


def _check_offsets(rows: Rows, start: int, end: int) -> None:
    if end > DATA_BYTES_MAX:
        raise ValueError(f"a segment of {end} bytes exceeds the limit of {DATA_BYTES_MAX}")
    with_frame = rows[rows["length"] > 0]
    if len(with_frame):
        first = int(with_frame["offset"].min())
        last = int((with_frame["offset"].astype(np.int64) + with_frame["length"]).max())
        if first < start or last > end:
            raise ValueError(f"rows refer to bytes {first} to {last}, but the frames are {start} to {end}")


def _widen(low: int, high: int, rows: Rows) -> tuple[int, int]:
    """The time range extended by these rows; rows without a time are ignored."""
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
    # The lengths come first, so that a reader finds all names by one cumulative sum.
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
    """Tags and nodes (id 1 is the first entry) and record expiries (EXPIRY)."""
    if not meta.dict_bytes:
        return [], [], np.zeros(0, dtype=EXPIRY)
    path = segment_path(topic_dir, meta, "dict")
    tags, nodes, expiries = parse_dict(path, read_range(disk, path, 0, meta.dict_bytes))
    if (len(tags), len(nodes)) != (meta.tag_names, meta.node_names):
        raise Corrupt(
            path,
            0,
            f"has {len(tags)} tags and {len(nodes)} nodes instead of {meta.tag_names} and {meta.node_names}",
        )
    return tags, nodes, expiries


def parse_dict(path: str, data: bytes) -> tuple[list[bytes], list[bytes], Rows]:
    """Parse the content of a .dict, without a check of the number of names."""
    tags: list[bytes] = []
    nodes: list[bytes] = []
    expiries = [np.zeros(0, dtype=EXPIRY)]
    check_header(path, data, DICT_MAGIC)
    for kind, count, start, end in _blocks(path, data):
        if kind == _EXPIRIES:
            expiries.append(_expiries(path, data, start, end, count))
        else:
            (tags if kind == _TAGS else nodes).extend(_names(path, data, start, end, count))
    return tags, nodes, np.concatenate(expiries)


def _blocks(path: str, data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """For each block its kind, its count, and the start and end of its entries."""
    at = HEADER_BYTES
    while at < len(data):
        if len(data) - at < _BLOCK.size:
            raise Corrupt(path, at, "ends inside a block header")
        kind, count, size = _BLOCK.unpack_from(data, at)
        start, end = at + _BLOCK.size, at + _BLOCK.size + size
        if kind not in {_TAGS, _NODES, _EXPIRIES}:
            raise Corrupt(path, at, f"unknown block kind {kind}")
        if end > len(data):
            raise Corrupt(path, at, "a block extends past the end of the file")
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
    raise Corrupt(path, start, f"the length of a block of {count} names is wrong")


def _expiries(path: str, data: bytes, start: int, end: int, count: int) -> Rows:
    if end - start != count * EXPIRY.itemsize:
        raise Corrupt(path, start, f"the length of a block of {count} expiries is wrong")
    return np.frombuffer(data, dtype=EXPIRY, count=count, offset=start)


# ── Rows ──────────────────────────────────────────────────────────────────────────────


def runs_of(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Join adjacent ranges, given in order."""
    if not len(starts):
        return []
    gaps = np.flatnonzero(starts[1:] != ends[:-1])
    first = starts[np.concatenate(([0], gaps + 1))]
    last = ends[np.concatenate((gaps, [len(ends) - 1]))]
    return list(zip(first.tolist(), last.tolist()))


def count_live(rows: Rows, deleted: Mask | None) -> int:
    present = rows["length"] > 0
    return int(np.count_nonzero(present if deleted is None else present & ~deleted))


# ── Truncating and removing ───────────────────────────────────────────────────────────


def truncate_to_meta(disk: Disk, topic_dir: str, meta: SegmentMeta) -> Corrupt | None:
    """In recovery: drop what a checkpoint wrote after the snapshot. It is still in the log and will be written again.

    Corrupt if a file is too short; returned instead of raised for .idx and .dict, which can be rebuilt from .data.
    """
    broken: Corrupt | None = None
    for suffix, length, _ in expected_files(meta):
        path = segment_path(topic_dir, meta, suffix)
        try:
            _truncate(disk, path, length, _del_bytes_max(disk, path, meta) if suffix == "del" else length)
        except Corrupt as error:
            if suffix not in {"idx", "dict"}:
                raise
            broken = error
    remove_files(disk, topic_dir, meta, *_unexpected(meta))
    return broken


def _del_bytes_max(disk: Disk, path: str, meta: SegmentMeta) -> int:
    """The maximum length of .del."""
    if meta.del_bytes or not disk.exists(path):
        return meta.del_bytes
    handle = disk.open(path)
    try:
        version = disk.read(handle, 8, 4)
        # In version 1, marks past the last row would apply to records appended later.
        grown = version == DEL_VERSION.to_bytes(4, "little")
        return disk.size(handle) if grown else HEADER_BYTES + meta.rows
    finally:
        disk.close(handle)


def expected_files(meta: SegmentMeta) -> list[tuple[str, int, bytes]]:
    """Suffix, minimum length and magic of each file that must exist on the hot tier."""
    expected: list[tuple[str, int, bytes]] = []
    if meta.rows:
        if meta.tier != COLD:
            expected.append(("data", meta.data_bytes, DATA_MAGIC))
        expected.append(("idx", meta.idx_bytes, IDX_MAGIC))
    if meta.dict_bytes:
        expected.append(("dict", meta.dict_bytes, DICT_MAGIC))
    if meta.has_del:
        expected.append(("del", meta.del_bytes or HEADER_BYTES, DEL_MAGIC))
    return expected


def _unexpected(meta: SegmentMeta) -> list[str]:
    known = {suffix for suffix, _, _ in expected_files(meta)}
    if meta.sealed:
        known.add("sum")
    if meta.tier == COLD:
        known.add("data")  # kept on the hot tier until no snapshot refers to it there
    return [suffix for suffix in ("sum", "del", "dict", "idx", "data") if suffix not in known]


def _truncate(disk: Disk, path: str, least: int, most: int) -> None:
    if not disk.exists(path):
        raise Corrupt(path, 0, "is missing")
    handle = disk.open(path)
    try:
        size = disk.size(handle)
        if size < least:
            raise Corrupt(path, size, f"has {size} bytes instead of {least}")
        if size > most:
            disk.truncate(handle, most)
    finally:
        disk.close(handle)


def remove_segment(disk: Disk, topic_dir: str, first_seq: int, generation: int) -> None:
    """Remove all files of one generation. Not synced: files that come back after a power cut are orphans.

    `.sum` goes first, so that a crash cannot leave a .sum without the files it covers.
    """
    remove_files(disk, topic_dir, SegmentMeta(first_seq, generation), "sum", "del", "dict", "idx", "data")


def remove_files(disk: Disk, topic_dir: str, meta: SegmentMeta, *suffixes: str) -> None:
    for suffix in suffixes:
        path = segment_path(topic_dir, meta, suffix)
        disk.remove(path)
        if suffix in {"del", "idx", "dict"}:
            disk.remove(path + TEMP_SUFFIX)
