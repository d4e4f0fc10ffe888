"""The files of one segment: growing, reading, cutting and removing them. Sealed ones: see sealing.py; `.del`: delete_marks.py.

Nothing here decides when; a checkpoint or recovery does.
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
DEL_VERSION = 2  # of the other files only one version was ever written

HOT, COLD = "hot", "cold"  # tiers: where a segment's .data lies

BLOCK_BYTES = MIB  # of .data, the header included: what one digest in .sum covers
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
    """What a snapshot keeps of a segment: the lengths up to which its files count, and a summary."""

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
    live: int = 0  # appends add to it; whoever deletes subtracts, as only they know what was live
    ts_min: int = 0  # 0: no row with a time
    ts_max: int = 0
    link: bytes = b""  # once sealed: what the next segment's .sum names as its chain
    # Of .idx and .dict up to the lengths above, while it is open: then there is no .sum. Empty: not written down.
    idx_digest: bytes = b""
    dict_digest: bytes = b""
    del_bytes: int = 0  # 0: no .del, or one of version 1
    del_digest: bytes = b""
    dead_bytes: int = 0  # of .data, as of the last checkpoint that touched it

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


# ── Growing ───────────────────────────────────────────────────────────────────────────


class IndexHash:
    """The digests of a growing .idx and .dict, kept while they grow: reading them again would bless their rot."""

    __slots__ = ("_idx", "_names")

    def __init__(self, idx: bytes = header(IDX_MAGIC), names: bytes = header(DICT_MAGIC)) -> None:
        self._idx, self._names = Hasher(idx), Hasher(names)

    @classmethod
    def of_files(cls, disk: Disk, topic_dir: str, meta: SegmentMeta) -> IndexHash:
        """Of what the files hold, taken as they are."""
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

    def put_into(self, meta: SegmentMeta) -> None:
        meta.idx_digest = self._idx.digest() if meta.rows else b""
        meta.dict_digest = self._names.digest() if meta.dict_bytes else b""


@dataclass(frozen=True, slots=True)
class IndexFiles:
    """An index made again from the records: the whole .idx and .dict, to be put in place of what was there."""

    idx: bytes
    names: bytes  # empty: no .dict
    tag_names: int
    node_names: int

    @classmethod
    def of(cls, rows: Rows, tags: Sequence[bytes], nodes: Sequence[bytes], expiries: Rows) -> IndexFiles:
        blocks = _dict_blocks(tags, nodes, list(zip(expiries["row"].tolist(), expiries["time"].tolist())))
        names = header(DICT_MAGIC) + blocks if blocks else b""
        return cls(header(IDX_MAGIC) + rows.tobytes(), names, len(tags), len(nodes))

    def hash(self) -> IndexHash:
        return IndexHash(self.idx, self.names) if self.names else IndexHash(self.idx)

    def write(self, disk: Disk, topic_dir: str, meta: SegmentMeta) -> None:
        """Put the files in place. Ids of the one are nothing without the other, so .dict is gone while .idx changes."""
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
        self.hash().put_into(meta)


class SegmentWriter:
    """Appends to the open segment of a topic, at the lengths that `meta` gives.

    Not at the ends of the files: a checkpoint that crashed, or failed half-way, may
    have left more there, which is overwritten and cut off.
    """

    _MAGICS: Final = {"data": DATA_MAGIC, "idx": IDX_MAGIC, "dict": DICT_MAGIC}  # in the order of syncing

    def __init__(
        self, disk: Disk, topic_dir: str, meta: SegmentMeta, index_hash: IndexHash | None = None
    ) -> None:
        """`index_hash` goes along with what is written; without it the files are read once more for it."""
        if meta.sealed:
            raise ValueError("a sealed segment does not grow")
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
        if self._index_hash is None:
            self._index_hash = IndexHash.of_files(self._disk, self._dir, meta)
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
        self._index_hash.put_into(meta)

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
            remove_files(self._disk, self._dir, self.meta, "sum", "del")
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
    if not meta.dict_bytes:
        return [], [], np.zeros(0, dtype=EXPIRY)
    path = segment_path(topic_dir, meta, "dict")
    tags, nodes, expiries = parse_dict(path, read_range(disk, path, 0, meta.dict_bytes))
    if (len(tags), len(nodes)) != (meta.tag_names, meta.node_names):
        raise Corrupt(path, 0, f"holds {len(tags)} tags and {len(nodes)} nodes, not what was written")
    return tags, nodes, expiries


def parse_dict(path: str, data: bytes) -> tuple[list[bytes], list[bytes], Rows]:
    """What the bytes of a .dict say, however many names there should be."""
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


# ── Rows ──────────────────────────────────────────────────────────────────────────────


def runs_of(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
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


# ── Cutting and removing ──────────────────────────────────────────────────────────────


def truncate_to_meta(disk: Disk, topic_dir: str, meta: SegmentMeta) -> Corrupt | None:
    """At recovery: drop what a checkpoint wrote after the snapshot. The log holds it and writes it again.

    Corrupt when what is left is too short; returned for .idx and .dict, which can be made again from .data.
    """
    broken: Corrupt | None = None
    for suffix, length, _ in expected_files(meta):
        path = segment_path(topic_dir, meta, suffix)
        try:
            _cut(disk, path, length, _most(disk, path, meta) if suffix == "del" else length)
        except Corrupt as error:
            if suffix not in {"idx", "dict"}:
                raise
            broken = error
    remove_files(disk, topic_dir, meta, *_unexpected(meta))
    return broken


def _most(disk: Disk, path: str, meta: SegmentMeta) -> int:
    """How long .del may be."""
    if meta.del_bytes or not disk.exists(path):
        return meta.del_bytes
    handle = disk.open(path)
    try:
        version = disk.read(handle, 8, 4)
        # Of version 1 marks past the rows would hit records that are appended later.
        grown = version == DEL_VERSION.to_bytes(4, "little")
        return disk.size(handle) if grown else HEADER_BYTES + meta.rows
    finally:
        disk.close(handle)


def expected_files(meta: SegmentMeta) -> list[tuple[str, int, bytes]]:
    """Suffix, least length and magic of each file that must exist on the hot tier."""
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
        known.add("data")  # it is there too until no snapshot is left that looks for it there
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
    remove_files(disk, topic_dir, SegmentMeta(first_seq, generation), "sum", "del", "dict", "idx", "data")


def remove_files(disk: Disk, topic_dir: str, meta: SegmentMeta, *suffixes: str) -> None:
    for suffix in suffixes:
        path = segment_path(topic_dir, meta, suffix)
        disk.remove(path)
        if suffix in {"del", "idx", "dict"}:
            disk.remove(path + TEMP_SUFFIX)
