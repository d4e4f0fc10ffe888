"""Chunks of the row index in memory: for each record its position, time, flags, tag and node. topic/rows.py joins them.

The index is a list of chunks, each a contiguous buffer of 32-byte rows with a numpy view. Row i of a chunk is seq first+i,
so a lookup is arithmetic. A chunk becomes one segment. Its first `stored` rows are in the segment's files, the others in the
log (or in RAM); `offset` is an offset in the one or the other.

A numpy view pins its bytearray, so a chunk grows by copying into a larger buffer. Single rows are written with `pack_into`,
at a fifth of the cost of an assignment through the structured view; batches are written by columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from topics.engine.storage.frames import DELETED
from topics.engine.storage.segments import ROW, ROW_STRUCT, IndexFiles, IndexHash, Mask, SegmentMeta

ROW_BYTES = ROW_STRUCT.size
SMALL = 64  # below this many rows plain Python beats numpy
_FIRST_CAPACITY = 16

Rows = npt.NDArray[np.void]
Column = npt.NDArray[np.int64]
Ints = list[int] | npt.NDArray[np.uint8] | npt.NDArray[np.uint32] | Column
Times = npt.NDArray[np.uint64]


class Chunk:
    __slots__ = (
        "_buffer",
        "_rows",
        "capacity",
        "closed",
        "count",
        "expiries",
        "first_seq",
        "frame_bytes",
        "index_hash",
        "marked",
        "meta",
        "node_ids",
        "opened_ms",
        "rebuilt_index",
        "rows_max",
        "stored",
        "tag_ids",
        "unmarked",
    )

    def __init__(self, first_seq: int, rows_max: int, opened_ms: int) -> None:
        self.first_seq = first_seq
        self.rows_max = rows_max
        self.capacity = min(_FIRST_CAPACITY, rows_max)
        self._buffer = bytearray(self.capacity * ROW_BYTES)
        self._rows: Rows = np.frombuffer(self._buffer, dtype=ROW)
        self.count = 0
        self.stored = 0  # rows in the segment's files
        self.frame_bytes = 0
        self.opened_ms = opened_ms
        self.closed = False  # full; will be sealed
        self.meta: SegmentMeta | None = None
        # Ids of tags and nodes in the segment's dictionary, while it is open.
        self.tag_ids: dict[bytes, int] = {}
        self.node_ids: dict[bytes, int] = {}
        # Row and expiry time of records with their own TTL that are not in the segment's files yet, by row.
        self.expiries: list[tuple[int, int]] | tuple[()] = ()
        self.unmarked: list[tuple[int, int]] = []  # stored row spans whose delete is not in the .del file yet
        self.marked: Mask | None = None  # rows whose delete is in the .del file
        self.index_hash: IndexHash | None = None  # while it is open and has files
        self.rebuilt_index: IndexFiles | None = None  # written before the segment grows again

    @classmethod
    def from_rows(cls, meta: SegmentMeta, rows: Rows, rows_max: int, opened_ms: int) -> Chunk:
        """A chunk of rows read from an .idx file."""
        return cls.from_buffer(meta, bytearray(rows.view(np.uint8)), opened_ms, rows_max)

    @classmethod
    def from_buffer(cls, meta: SegmentMeta, buffer: bytearray, opened_ms: int, rows_max: int = 0) -> Chunk:
        """A chunk that takes ownership of a buffer of rows."""
        count = len(buffer) // ROW_BYTES
        chunk = cls(meta.first_seq, max(rows_max, count), opened_ms)
        chunk._buffer = buffer
        chunk._rows = np.frombuffer(buffer, dtype=ROW)
        chunk.capacity = chunk.count = chunk.stored = count
        chunk.frame_bytes = meta.data_bytes
        chunk.meta = meta
        chunk.closed = meta.sealed
        return chunk

    @property
    def next_seq(self) -> int:
        return self.first_seq + self.count

    @property
    def rows(self) -> Rows:
        return self._rows[: self.count]

    @property
    def room(self) -> int:
        return self.rows_max - self.count

    def _grow(self, needed: int) -> None:
        capacity = min(self.rows_max, max(needed, self.capacity * 2))
        grown = bytearray(capacity * ROW_BYTES)
        grown[: self.count * ROW_BYTES] = memoryview(self._buffer)[: self.count * ROW_BYTES]
        self._buffer, self.capacity = grown, capacity
        self._rows = np.frombuffer(grown, dtype=ROW)

    def add(self, offset: int, length: int, ts: int, flags: int, tag: int, node: int, size: int) -> None:
        if self.count == self.capacity:
            self._grow(self.count + 1)
        ROW_STRUCT.pack_into(self._buffer, self.count * ROW_BYTES, offset, length, ts, flags, tag, node, size)
        self.count += 1
        self.frame_bytes += length

    def add_batch(
        self,
        offsets: Ints,
        lengths: Ints,
        ts: int | Times,
        flags: Ints | None,
        tags: Ints | None,
        nodes: Ints | None,
        sizes: Ints,
    ) -> None:
        count = len(lengths)
        if self.count + count > self.capacity:
            self._grow(self.count + count)
        rows = self._rows[self.count : self.count + count]
        rows["offset"] = offsets
        rows["length"] = lengths
        rows["ts"] = ts
        rows["flags"] = 0 if flags is None else flags
        rows["tag"] = 0 if tags is None else tags
        rows["node"] = 0 if nodes is None else nodes
        rows["size"] = sizes
        self.count += count
        self.frame_bytes += int(rows["length"].sum(dtype=np.int64))

    def get(self, i: int) -> tuple[int, int, int, int, int, int, int]:
        """offset, length, ts, flags, tag, node, size of row `i`."""
        return ROW_STRUCT.unpack_from(self._buffer, i * ROW_BYTES)

    def iter_rows(self) -> Iterator[tuple[int, int, int, int, int, int, int]]:
        """`get` of every row, for small chunks."""
        return ROW_STRUCT.iter_unpack(memoryview(self._buffer)[: self.count * ROW_BYTES])

    def flags_at(self, i: int) -> int:
        return self._buffer[i * ROW_BYTES + 16]

    def length_at(self, i: int) -> int:
        return int.from_bytes(self._buffer[i * ROW_BYTES + 4 : i * ROW_BYTES + 8], "little")

    def ts_at(self, i: int) -> int:
        return int.from_bytes(self._buffer[i * ROW_BYTES + 8 : i * ROW_BYTES + 16], "little")

    def set_flag(self, i: int, flag: int) -> None:
        self._buffer[i * ROW_BYTES + 16] |= flag

    def live(self, first: int, stop: int, dead: int = DELETED) -> npt.NDArray[np.bool_]:
        """Mask of the rows [first, stop) that exist and have none of the `dead` flags."""
        rows = self._rows[first:stop]
        alive: npt.NDArray[np.bool_] = ((rows["flags"] & dead) == 0) & (rows["length"] != 0)
        return alive

    def take(self, picked: npt.NDArray[np.intp]) -> Rows:
        """These rows, ascending; a view if they are adjacent. Gathering rows as plain bytes is ten times faster."""
        first, stop = int(picked[0]), int(picked[-1]) + 1
        if stop - first == len(picked):
            return self._rows[first:stop]
        return self._rows.view(f"V{ROW_BYTES}")[picked].view(ROW)

    def cut(self, count: int) -> None:
        """Drop the rows from `count` on, which were staged and never written."""
        self.frame_bytes -= int(self._rows["length"][count : self.count].sum(dtype=np.int64))
        self.count = count
        self.expiries = [entry for entry in self.expiries if entry[0] < count]
