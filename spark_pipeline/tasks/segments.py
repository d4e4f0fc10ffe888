"""Reader of sealed segments with three levels of verification.

    none     only lengths and headers: for files that were just checked
    block    .idx and .dict as a whole, .data by blocks of 1 MiB: seventeen times as fast as by record
    record   the same, and the digest of each record

If .sum has no digest for a block (it contained a damaged record when it was sealed), its records are checked one by one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest

from topics.api.errors import Corrupt
from topics.engine.storage.files import HEADER_BYTES, Hasher, check_header, read_range, xxh
from topics.engine.storage.frames import DIGEST_BYTES, HEADER_DTYPE, OVERHEAD_BYTES
from topics.engine.storage.frames import HEADER_BYTES as FRAME_HEADER_BYTES
from topics.engine.storage.manifest import Segment
from topics.engine.storage.sealing import Sum, read_sum
from topics.engine.storage.segments import (
    BLOCK_BYTES,
    DATA_MAGIC,
    EXPIRY,
    IDX_MAGIC,
    ROW,
    ROW_BYTES,
    Mask,
    Rows,
    parse_dict,
)
from topics.system.read_only_disk import ReadOnlyDisk

Verify = Literal["none", "block", "record"]
VERIFY: tuple[Verify, ...] = get_args(Verify)
PAD_BYTES = 16  # after the data: short values are gathered 12 bytes at a time
NO_DIGEST = bytes(DIGEST_BYTES)

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Damage:
    """A range of unreadable records, both ends included, and the location of the damage."""

    path: str
    offset: int
    first_seq: int
    last_seq: int
    what: str


@dataclass(slots=True)
class Piece:
    """Frames of a segment in one buffer, with PAD_BYTES of padding."""

    data: bytearray
    rows: npt.NDArray[np.int64]  # their rows in the segment
    starts: Offsets  # in the buffer
    ends: Offsets


@dataclass
class SegmentReader:
    folder: str
    segment: Segment
    topic_id: int
    verify: Verify = "block"
    damage: list[Damage] | None = None  # None: damage is an error; otherwise it is added here and skipped
    _last_block: tuple[int, bytes] = field(default=(-1, b""), init=False)
    _disk: ReadOnlyDisk = field(default_factory=ReadOnlyDisk, init=False)

    def path(self, suffix: str) -> str:
        return f"{self.folder}/{self.segment.name}.{suffix}"

    @cached_property
    def sum(self) -> Sum:
        """The segment's summary, checked against the manifest."""
        segment = self.segment
        found, digest = read_sum(self._disk, self.folder, segment.first_seq, segment.generation)
        if digest.hex() != segment.sum_digest:
            raise Corrupt(self.path("sum"), 0, "its digest differs from the manifest")
        lengths = (found.rows, found.data_bytes, found.dict_bytes)
        if lengths != (segment.rows, segment.data_bytes, segment.dict_bytes):
            raise Corrupt(self.path("sum"), HEADER_BYTES, "its lengths differ from the manifest")
        return found

    def index(self) -> Rows:
        path = self.path("idx")
        content = read_range(self._disk, path, 0, HEADER_BYTES + ROW_BYTES * self.segment.rows)
        check_header(path, content, IDX_MAGIC)
        if self.verify != "none" and xxh(content) != self.sum.idx_digest:
            raise Corrupt(path, 0, "the digest of the index does not match")
        return np.frombuffer(content, dtype=ROW, offset=HEADER_BYTES)

    def names(self) -> tuple[list[bytes], list[bytes], Rows]:
        """Tags and nodes (the first has id 1), and the expiries of records with their own TTL."""
        segment = self.segment
        if not segment.dict_bytes:
            return [], [], np.zeros(0, dtype=EXPIRY)
        path = self.path("dict")
        content = read_range(self._disk, path, 0, segment.dict_bytes)
        if self.verify != "none" and xxh(content) != self.sum.dict_digest:
            raise Corrupt(path, 0, "the digest of the names does not match")
        tags, nodes, expiries = parse_dict(path, content)
        if (len(tags), len(nodes)) != (segment.tag_names, segment.node_names):
            raise Corrupt(path, 0, f"has {len(tags)} tags and {len(nodes)} nodes, unlike the manifest")
        return tags, nodes, expiries

    def pieces(
        self, rows: Rows, picked: npt.NDArray[np.int64], *, rows_max: int, bytes_max: int
    ) -> Iterator[Piece]:
        """Yield the frames of the picked rows in pieces. Damaged ones raise Corrupt, or are skipped and noted."""
        starts = rows["offset"][picked].astype(np.int64)
        ends = starts + rows["length"][picked]
        self._check_offsets(starts, ends)
        if not len(picked):
            return
        handle = os.open(self.path("data"), os.O_RDONLY | os.O_CLOEXEC)
        try:
            if self.verify != "none":
                check_header(self.path("data"), os.pread(handle, HEADER_BYTES, 0), DATA_MAGIC)
            first = 0
            while first < len(picked):
                stop = int(np.searchsorted(ends, starts[first] + bytes_max, side="right"))
                stop = min(max(stop, first + 1), first + rows_max)
                part = slice(first, stop)
                yield self._piece(handle, picked[part], starts[part], ends[part])
                first = stop
        finally:
            os.close(handle)
            self._last_block = (-1, b"")

    def _check_offsets(self, starts: Offsets, ends: Offsets) -> None:
        if not len(starts):
            return
        if (starts[1:] < ends[:-1]).any() or starts[0] < HEADER_BYTES or ends[-1] > self.segment.data_bytes:
            raise Corrupt(self.path("idx"), HEADER_BYTES, "rows overlap, or point outside of the data")

    def _piece(self, handle: int, picked: npt.NDArray[np.int64], starts: Offsets, ends: Offsets) -> Piece:
        low, high = int(starts[0]), int(ends[-1])
        if self.verify == "none":
            data, base = self._read(handle, low, high), low
            suspect: list[int] = []
        else:
            base = low // BLOCK_BYTES * BLOCK_BYTES
            data = self._read_blocks(handle, base, min(-(-high // BLOCK_BYTES) * BLOCK_BYTES, self._end))
            suspect = self._suspect_blocks(data, base, low, high)
        piece = Piece(data, picked, starts - base, ends - base)
        if suspect or self.verify == "record":
            piece = self._checked(piece, base, suspect)
        return piece

    @property
    def _end(self) -> int:
        return self.segment.data_bytes

    def _read(self, handle: int, low: int, high: int, known: bytes = b"") -> bytearray:
        """Read a range of bytes, of which the first ones are `known`."""
        data = bytearray(high - low + PAD_BYTES)
        data[: len(known)] = known
        view, done = memoryview(data), len(known)
        while done < high - low:
            count = os.preadv(handle, [view[done : high - low]], low + done)
            if not count:
                # The rest stays zero, which fails the digest checks of the missing records.
                if self.damage is None or self.verify == "none":
                    raise Corrupt(self.path("data"), low + done, f"ends {high - low - done} bytes early")
                break
            done += count
        return data

    def _read_blocks(self, handle: int, base: int, high: int) -> bytearray:
        """Read whole blocks. The last one is kept, since the next piece begins in it."""
        number, known = self._last_block
        data = self._read(handle, base, high, known if number * BLOCK_BYTES == base else b"")
        last = (high - 1) // BLOCK_BYTES
        self._last_block = last, bytes(memoryview(data)[last * BLOCK_BYTES - base : high - base])
        return data

    def _suspect_blocks(self, data: bytearray, base: int, low: int, high: int) -> list[int]:
        """The blocks whose digests do not match."""
        view, blocks = memoryview(data), self.sum.blocks
        found = []
        for number in range(low // BLOCK_BYTES, -(-high // BLOCK_BYTES)):
            start = number * BLOCK_BYTES
            end = min(start + BLOCK_BYTES, self._end)
            if Hasher(view[start - base : end - base]).digest() != blocks[number]:
                if self.damage is None and blocks[number] != NO_DIGEST:
                    raise Corrupt(self.path("data"), start, "the digest of a block does not match")
                found.append(number)
        return found

    def _checked(self, piece: Piece, base: int, suspect: list[int]) -> Piece:
        """Check the records of suspect blocks, or all of them, one by one; drop damaged ones."""
        starts, ends = piece.starts + base, piece.ends + base
        if self.verify == "record":
            to_check = np.ones(len(starts), dtype=np.bool_)
        else:
            to_check = np.zeros(len(starts), dtype=np.bool_)
            for number in suspect:
                to_check |= (starts < (number + 1) * BLOCK_BYTES) & (ends > number * BLOCK_BYTES)
        good: Mask = np.ones(len(starts), dtype=np.bool_)
        good[to_check] = self._intact(piece, to_check)
        if good.all():
            return piece
        self._note_damage(piece, base, np.flatnonzero(~good))
        return Piece(piece.data, piece.rows[good], piece.starts[good], piece.ends[good])

    def _intact(self, piece: Piece, which: Mask) -> Mask:
        """Whether these frames are intact and have the expected topic and seq: a valid frame in the wrong place is damage, too."""
        data, starts, ends = piece.data, piece.starts[which], piece.ends[which]
        every = np.ndarray(
            shape=(max(len(data) - FRAME_HEADER_BYTES + 1, 0),), dtype=HEADER_DTYPE, buffer=data, strides=(1,)
        )
        # For a frame that is too short, the header includes bytes after it and does not match.
        headers = every[np.minimum(starts, len(every) - 1)]
        intact: Mask = headers["length"] + 4 == ends - starts
        intact &= ends - starts >= OVERHEAD_BYTES
        intact &= headers["topic"] == self.topic_id
        intact &= headers["seq"] == piece.rows[which] + self.segment.first_seq
        view, digest = memoryview(data), xxh3_64_digest
        closes = (ends - DIGEST_BYTES).tolist()
        digests = b"".join([digest(view[start:close]) for start, close in zip(starts.tolist(), closes)])
        found = np.ndarray(shape=(len(data) - 7,), dtype="<u8", buffer=data, strides=(1,))[
            ends - DIGEST_BYTES
        ]
        intact &= found == np.frombuffer(digests, dtype="<u8")
        return intact

    def _note_damage(self, piece: Piece, base: int, bad: npt.NDArray[np.intp]) -> None:
        what = "the digests of records do not match"
        if self.damage is None:
            raise Corrupt(self.path("data"), base + int(piece.starts[bad[0]]), what)
        breaks = np.flatnonzero(np.diff(bad) != 1) + 1
        for run in np.split(bad, breaks):
            first, last = piece.rows[run[0]], piece.rows[run[-1]]
            seq = self.segment.first_seq
            offset = base + int(piece.starts[run[0]])
            self.damage.append(Damage(self.path("data"), offset, seq + int(first), seq + int(last), what))
