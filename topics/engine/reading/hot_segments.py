"""Reads from segments of the hot tier. Files stay open, and data is verified the first time it is read.

A sealed segment has a digest per 1 MiB block. A segment that is not sealed yet, or whose digests cannot be read, is verified
frame by frame.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from topics.api.errors import Corrupt
from topics.engine.core.ports import Disk
from topics.engine.reading.cold_blocks import SegmentKey
from topics.engine.reading.frame_reader import FrameBuffers, Offsets, read_frames
from topics.engine.reading.selection import Picked
from topics.engine.storage.files import xxh
from topics.engine.storage.frames import DELETED, ERASED, FLAGS_AT, is_record
from topics.engine.storage.index import Chunk
from topics.engine.storage.sealing import read_sum
from topics.engine.storage.segments import BLOCK_BYTES, SegmentMeta, segment_path
from topics.engine.topic.log import TopicLog

OPEN_SEGMENTS_MAX = 256  # open handles; the least recently used one is closed


class DamagedSegment(Corrupt):
    """A stored chunk does not match its digests; the handler finds out which records are lost.

    For the cold tier, `found` has the damaged and the erased rows among those that were read.
    """

    def __init__(
        self,
        chunk: Chunk,
        path: str,
        offset: int,
        problem: str,
        found: tuple[list[int], list[int]] | None = None,
    ) -> None:
        super().__init__(path, offset, problem)
        self.chunk = chunk
        self.found = found


class CheckedRows:
    """The range of rows of a chunk whose frames were verified; it grows as readers advance.

    Like the blocks of a sealed segment, a frame is verified the first time this process reads it.
    """

    __slots__ = ("_end", "_start")

    def __init__(self) -> None:
        self._start = self._end = 0

    def covers(self, rows: Picked) -> bool:
        return self._start <= int(rows[0]) and int(rows[-1]) < self._end

    def add(self, rows: Picked, chunk: Chunk) -> None:
        """Add verified rows. They only cover the range between them if they are all of its live rows."""
        start, end = int(rows[0]), int(rows[-1]) + 1
        if int(np.count_nonzero(chunk.live(start, end, DELETED))) != len(rows):
            return
        if start <= self._end and end >= self._start:
            start, end = min(start, self._start), max(end, self._end)
        self._start, self._end = start, end


class _OpenSegment:
    __slots__ = ("blocks", "checked", "handle", "path", "sealed", "verified")

    def __init__(self, handle: int, path: str, blocks: list[bytes] | None, *, sealed: bool) -> None:
        self.handle = handle
        self.path = path
        self.sealed = sealed
        self.blocks = blocks  # digests of a sealed segment; None if not sealed, or if .sum cannot be read
        self.checked = CheckedRows()  # if there are no digests: rows verified one by one
        self.verified: set[int] = set()


class HotSegments:
    def __init__(self, disk: Disk, topic_dir: Callable[[int], str]) -> None:
        self._disk = disk
        self._topic_dir = topic_dir
        self._open: OrderedDict[SegmentKey, _OpenSegment] = OrderedDict()

    def fetch(
        self,
        log: TopicLog,
        chunk: Chunk,
        rows: Picked,
        offsets: Offsets,
        lengths: Offsets,
        found: FrameBuffers,
    ) -> None:
        """Read the frames of ascending stored rows."""
        segment = self._segment(log, chunk)
        try:
            unchecked = segment.blocks is None and not segment.checked.covers(rows)
            expected = (log.id, rows + chunk.first_seq) if unchecked else None
            if segment.blocks is not None:
                self._verify_blocks(segment, int(offsets[0]), int(offsets[-1] + lengths[-1]))
            before = len(found.buffers)
            read_frames(self._disk, segment.handle, segment.path, offsets, lengths, found, expected)
            found.check_erased(before, segment.path)
            if unchecked:
                segment.checked.add(rows, chunk)
        except Corrupt as error:
            raise DamagedSegment(chunk, error.path, error.offset, error.problem) from None

    def damaged_rows(self, log: TopicLog, chunk: Chunk) -> tuple[list[int], list[int]]:
        """Verify each live stored record of a chunk: returns the damaged rows and the erased rows.

        The delete of an erased row was lost, and the record must not come back. All blocks count as verified afterwards.
        """
        segment = self._segment(log, chunk)
        bad: list[int] = []
        erased: list[int] = []
        for row in np.nonzero(chunk.live(0, chunk.stored))[0].tolist():
            offset, length = chunk.get(row)[:2]
            frame = self._disk.read(segment.handle, offset, length)
            if not is_record(frame, log.id, chunk.first_seq + row):
                bad.append(row)
            elif frame[FLAGS_AT] & ERASED:
                erased.append(row)
        if segment.blocks is not None:
            segment.verified.update(range(len(segment.blocks)))
        return bad, erased

    def _segment(self, log: TopicLog, chunk: Chunk) -> _OpenSegment:
        meta = chunk.meta
        assert meta is not None
        key = (log.id, meta.first_seq, meta.generation)
        segment = self._open.get(key)
        if segment is not None and segment.sealed == meta.sealed:
            self._open.move_to_end(key)
            return segment
        if segment is not None:
            self._disk.close(self._open.pop(key).handle)
        directory = self._topic_dir(log.id)
        blocks = block_digests(self._disk, directory, meta) if meta.sealed else None
        path = segment_path(directory, meta, "data")
        segment = _OpenSegment(self._disk.open(path), path, blocks, sealed=meta.sealed)
        self._open[key] = segment
        if len(self._open) > OPEN_SEGMENTS_MAX:
            _, oldest = self._open.popitem(last=False)
            self._disk.close(oldest.handle)
        return segment

    def _verify_blocks(self, segment: _OpenSegment, start: int, end: int) -> None:
        assert segment.blocks is not None
        for block in range(start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1):
            if block in segment.verified:
                continue
            data = self._disk.read(segment.handle, block * BLOCK_BYTES, BLOCK_BYTES)
            if block >= len(segment.blocks) or xxh(data) != segment.blocks[block]:
                raise Corrupt(segment.path, block * BLOCK_BYTES, "block digest does not match")
            segment.verified.add(block)

    def forget_checks(self) -> None:
        """Verify everything again when it is next read."""
        for segment in self._open.values():
            segment.verified.clear()
            segment.checked = CheckedRows()

    def close_segment(self, topic_id: int, first_seq: int, generation: int) -> None:
        segment = self._open.pop((topic_id, first_seq, generation), None)
        if segment is not None:
            self._disk.close(segment.handle)

    def close_topic(self, topic_id: int) -> None:
        for key in [key for key in self._open if key[0] == topic_id]:
            self._disk.close(self._open.pop(key).handle)

    def close(self) -> None:
        for segment in self._open.values():
            self._disk.close(segment.handle)
        self._open.clear()


def block_digests(disk: Disk, directory: str, meta: SegmentMeta) -> list[bytes] | None:
    """The block digests of a sealed segment; None if its .sum cannot be read."""
    try:
        return read_sum(disk, directory, meta.first_seq, meta.generation)[0].blocks
    except (Corrupt, FileNotFoundError):
        return None  # the records have their own digests
