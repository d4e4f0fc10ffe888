"""Reading a sealed segment, and how much of what is read is compared with its digests.

    none     nothing but lengths and headers: for files that were checked a moment ago
    block    .idx and .dict as a whole, .data by the MiB: seventeen times as fast as record by record
    record   the same, and each record by its own digest

Where .sum has no digest for a block (it held a rotten record when it was sealed) its records are looked at one by one.
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
PAD_BYTES = 16  # behind what is read: short values are gathered 12 bytes at a time
NO_DIGEST = bytes(DIGEST_BYTES)

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Damage:
    """Records that could not be read, and where. Both ends are included."""

    path: str
    offset: int
    first_seq: int
    last_seq: int
    what: str


@dataclass(slots=True)
class Piece:
    """Some frames of a segment in one buffer, which has PAD_BYTES more than they need."""

    data: bytearray
    rows: npt.NDArray[np.int64]  # which rows these are
    starts: Places  # in the buffer
    ends: Places


@dataclass
class SegmentReader:
    folder: str
    segment: Segment
    topic_id: int
    verify: Verify = "block"
    damage: list[Damage] | None = (
        None  # None: damage is an error; else it goes here, and the records are left out
    )
    _held: tuple[int, bytes] = field(default=(-1, b""), init=False)
    _disk: ReadOnlyDisk = field(default_factory=ReadOnlyDisk, init=False)

    def path(self, suffix: str) -> str:
        return f"{self.folder}/{self.segment.name}.{suffix}"

    @cached_property
    def sum(self) -> Sum:
        """What was sealed; it agrees with the manifest."""
        segment = self.segment
        found, digest = read_sum(self._disk, self.folder, segment.first_seq, segment.generation)
        if digest.hex() != segment.sum_digest:
            raise Corrupt(self.path("sum"), 0, "is not the one that the manifest names")
        lengths = (found.rows, found.data_bytes, found.dict_bytes)
        if lengths != (segment.rows, segment.data_bytes, segment.dict_bytes):
            raise Corrupt(self.path("sum"), HEADER_BYTES, "has other lengths than the manifest")
        return found

    def index(self) -> Rows:
        path = self.path("idx")
        content = read_range(self._disk, path, 0, HEADER_BYTES + ROW_BYTES * self.segment.rows)
        check_header(path, content, IDX_MAGIC)
        if self.verify != "none" and xxh(content) != self.sum.idx_digest:
            raise Corrupt(path, 0, "the index does not agree with its digest")
        return np.frombuffer(content, dtype=ROW, offset=HEADER_BYTES)

    def names(self) -> tuple[list[bytes], list[bytes], Rows]:
        """Tags, nodes (id 1 is the first of the list), and ends of records with a TTL of their own."""
        segment = self.segment
        if not segment.dict_bytes:
            return [], [], np.zeros(0, dtype=EXPIRY)
        path = self.path("dict")
        content = read_range(self._disk, path, 0, segment.dict_bytes)
        if self.verify != "none" and xxh(content) != self.sum.dict_digest:
            raise Corrupt(path, 0, "the names do not agree with their digest")
        tags, nodes, expiries = parse_dict(path, content)
        if (len(tags), len(nodes)) != (segment.tag_names, segment.node_names):
            raise Corrupt(path, 0, f"holds {len(tags)} tags and {len(nodes)} nodes, not what was written")
        return tags, nodes, expiries

    def pieces(
        self, rows: Rows, picked: npt.NDArray[np.int64], *, rows_max: int, bytes_max: int
    ) -> Iterator[Piece]:
        """The frames of the picked rows, so many at a time. Damaged ones end this, or are left out and noted."""
        starts = rows["offset"][picked].astype(np.int64)
        ends = starts + rows["length"][picked]
        self._check_places(starts, ends)
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
            self._held = (-1, b"")

    def _check_places(self, starts: Places, ends: Places) -> None:
        if not len(starts):
            return
        if (starts[1:] < ends[:-1]).any() or starts[0] < HEADER_BYTES or ends[-1] > self.segment.data_bytes:
            raise Corrupt(self.path("idx"), HEADER_BYTES, "rows overlap, or point outside of the records")

    def _piece(self, handle: int, picked: npt.NDArray[np.int64], starts: Places, ends: Places) -> Piece:
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
            piece = self._sound(piece, base, suspect)
        return piece

    @property
    def _end(self) -> int:
        return self.segment.data_bytes

    def _read(self, handle: int, low: int, high: int, held: bytes = b"") -> bytearray:
        """These bytes, of which the first are known already."""
        data = bytearray(high - low + PAD_BYTES)
        data[: len(held)] = held
        view, done = memoryview(data), len(held)
        while done < high - low:
            count = os.preadv(handle, [view[done : high - low]], low + done)
            if not count:
                # Zeros agree with no digest: where damage is noted, the records tell which of them are gone.
                if self.damage is None or self.verify == "none":
                    raise Corrupt(self.path("data"), low + done, f"ends {high - low - done} bytes early")
                break
            done += count
        return data

    def _read_blocks(self, handle: int, base: int, high: int) -> bytearray:
        """Whole blocks. The last one is kept, since the next piece begins in it."""
        number, held = self._held
        data = self._read(handle, base, high, held if number * BLOCK_BYTES == base else b"")
        last = (high - 1) // BLOCK_BYTES
        self._held = last, bytes(memoryview(data)[last * BLOCK_BYTES - base : high - base])
        return data

    def _suspect_blocks(self, data: bytearray, base: int, low: int, high: int) -> list[int]:
        """The blocks that do not agree with their digests."""
        view, blocks = memoryview(data), self.sum.blocks
        found = []
        for number in range(low // BLOCK_BYTES, -(-high // BLOCK_BYTES)):
            start = number * BLOCK_BYTES
            end = min(start + BLOCK_BYTES, self._end)
            if Hasher(view[start - base : end - base]).digest() != blocks[number]:
                if self.damage is None and blocks[number] != NO_DIGEST:
                    raise Corrupt(self.path("data"), start, "a block does not agree with its digest")
                found.append(number)
        return found

    def _sound(self, piece: Piece, base: int, suspect: list[int]) -> Piece:
        """The records of suspect blocks, or all of them, one by one."""
        starts, ends = piece.starts + base, piece.ends + base
        if self.verify == "record":
            looked_at = np.ones(len(starts), dtype=np.bool_)
        else:
            looked_at = np.zeros(len(starts), dtype=np.bool_)
            for number in suspect:
                looked_at |= (starts < (number + 1) * BLOCK_BYTES) & (ends > number * BLOCK_BYTES)
        good: Mask = np.ones(len(starts), dtype=np.bool_)
        good[looked_at] = self._intact(piece, looked_at)
        if good.all():
            return piece
        self._note(piece, base, np.flatnonzero(~good))
        return Piece(piece.data, piece.rows[good], piece.starts[good], piece.ends[good])

    def _intact(self, piece: Piece, which: Mask) -> Mask:
        """Whether these frames are what was written, and the records that belong there: a whole one of another place is damage, too."""
        data, starts, ends = piece.data, piece.starts[which], piece.ends[which]
        every = np.ndarray(
            shape=(max(len(data) - FRAME_HEADER_BYTES + 1, 0),), dtype=HEADER_DTYPE, buffer=data, strides=(1,)
        )
        # A frame that is too short to be one is compared with what follows, and differs.
        headers = every[np.minimum(starts, len(every) - 1)]
        right: Mask = headers["length"] + 4 == ends - starts
        right &= ends - starts >= OVERHEAD_BYTES
        right &= headers["topic"] == self.topic_id
        right &= headers["seq"] == piece.rows[which] + self.segment.first_seq
        view, digest = memoryview(data), xxh3_64_digest
        closes = (ends - DIGEST_BYTES).tolist()
        digests = b"".join([digest(view[start:close]) for start, close in zip(starts.tolist(), closes)])
        found = np.ndarray(shape=(len(data) - 7,), dtype="<u8", buffer=data, strides=(1,))[
            ends - DIGEST_BYTES
        ]
        right &= found == np.frombuffer(digests, dtype="<u8")
        return right

    def _note(self, piece: Piece, base: int, bad: npt.NDArray[np.intp]) -> None:
        what = "records do not agree with their digests"
        if self.damage is None:
            raise Corrupt(self.path("data"), base + int(piece.starts[bad[0]]), what)
        breaks = np.flatnonzero(np.diff(bad) != 1) + 1
        for run in np.split(bad, breaks):
            first, last = piece.rows[run[0]], piece.rows[run[-1]]
            seq = self.segment.first_seq
            offset = base + int(piece.starts[run[0]])
            self.damage.append(Damage(self.path("data"), offset, seq + int(first), seq + int(last), what))
