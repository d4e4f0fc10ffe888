"""Reads from segments of the cold tier, through the block cache. Missing blocks raise ColdMiss."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from topics.api import limits
from topics.engine.commands.topics import FramePage, Page
from topics.engine.core.ports import Disk
from topics.engine.reading.cold_blocks import Block, BlockCache, ColdMiss, SegmentKey, SegmentWant
from topics.engine.reading.frame_reader import FrameBuffers, Offsets
from topics.engine.reading.hot_segments import DamagedSegment, block_digests
from topics.engine.reading.selection import Picked
from topics.engine.storage.frames import ERASED, FLAGS_AT, is_record
from topics.engine.storage.index import Chunk
from topics.engine.storage.segments import BLOCK_BYTES, COLD, SegmentMeta, segment_path
from topics.engine.topic.log import TopicLog

DIGESTS_KEPT_MAX = 256  # segments


class ColdSegments:
    def __init__(self, disk: Disk, cache: BlockCache, topic_dir: Callable[[int], str]) -> None:
        self._disk = disk
        self._topic_dir = topic_dir
        self._cache = cache
        self._digests: OrderedDict[SegmentKey, list[bytes] | None] = OrderedDict()

    def is_cold(self, log: TopicLog, chunk: Chunk) -> bool:
        """Whether a segment is only in the cold tier. While it is in both tiers, the hot copy is read."""
        meta = chunk.meta
        if meta is None or meta.tier != COLD:
            return False
        return not self._disk.exists(segment_path(self._topic_dir(log.id), meta, "data"))

    def limit_fetches(
        self, log: TopicLog, page: Page | FramePage, picked: list[tuple[Chunk, Picked]]
    ) -> list[tuple[Chunk, Picked]]:
        """The rows of a page that need at most COLD_BLOCKS_PER_READ blocks; the page ends there."""
        room = limits.COLD_BLOCKS_PER_READ
        for i, (chunk, rows) in enumerate(picked):
            if not self.is_cold(log, chunk):
                continue
            used = np.cumsum(_blocks_added(chunk, rows))
            fits = int(np.searchsorted(used, room, side="right"))
            if not fits and not i:
                fits = 1  # a page has at least one record, however large
            if fits < len(rows):
                reached = chunk.first_seq + int(rows[fits]) - 1
                page.scanned -= page.next_from_seq - reached
                page.next_from_seq = reached
                return [*picked[:i], *([(chunk, rows[:fits])] if fits else [])]
            room -= int(used[-1])
        return picked

    def require_blocks(self, log: TopicLog, picked: list[tuple[Chunk, Picked]]) -> int:
        """Raise ColdMiss unless the blocks of all these rows are cached; return the number of cold segments."""
        wants: list[SegmentWant] = []
        missing = False
        for chunk, rows in picked:
            if not self.is_cold(log, chunk):
                continue
            meta = chunk.meta
            assert meta is not None
            key = (log.id, meta.first_seq, meta.generation)
            blocks = _blocks_of(chunk, rows)
            missing |= any((*key, block) not in self._cache for block in blocks)
            if wants and wants[-1].segment == key:
                wants[-1].blocks = sorted({*wants[-1].blocks, *blocks})
                continue
            path = segment_path(self._topic_dir(log.id), meta, "data")
            wants.append(SegmentWant(key, path, meta.data_bytes, self._digests_of(log, meta), blocks))
        if missing:
            raise ColdMiss(wants)
        return len({want.segment for want in wants})

    def _digests_of(self, log: TopicLog, meta: SegmentMeta) -> list[bytes] | None:
        key = (log.id, meta.first_seq, meta.generation)
        if key not in self._digests:
            if len(self._digests) >= DIGESTS_KEPT_MAX:
                self._digests.popitem(last=False)
            self._digests[key] = block_digests(self._disk, self._topic_dir(log.id), meta)
        return self._digests[key]

    def fetch(
        self,
        log: TopicLog,
        chunk: Chunk,
        rows: Picked,
        offsets: Offsets,
        lengths: Offsets,
        found: FrameBuffers,
    ) -> None:
        """Take frames from cached blocks, block by block. A frame that crosses a block boundary is assembled."""
        meta = chunk.meta
        assert meta is not None
        key = (log.id, meta.first_seq, meta.generation)
        firsts, lasts = offsets // BLOCK_BYTES, (offsets + lengths - 1) // BLOCK_BYTES
        across = firsts != lasts
        apart = np.flatnonzero((np.diff(firsts) != 0) | across[1:] | across[:-1]) + 1
        suspect: list[int] = []
        for part in np.split(np.arange(len(rows)), apart):
            first, last = int(firsts[part[0]]), int(lasts[part[0]])
            blocks = [self._block(key, number) for number in range(first, last + 1)]
            base = first * BLOCK_BYTES
            data = blocks[0][0]
            if last > first:
                base = int(offsets[part[0]])
                data = b"".join([block for block, _ in blocks])[base - first * BLOCK_BYTES :]
                data = data[: int(lengths[part[0]])]
            starts = offsets[part] - base
            flags = np.frombuffer(data, np.uint8)[starts + FLAGS_AT]
            if not all(is_intact for _, is_intact in blocks) or (flags & ERASED).any():
                suspect += part.tolist()
            found.add(data, starts)
        if suspect:
            self._check_each(log, chunk, rows, offsets, lengths, suspect, key)

    def _block(self, key: SegmentKey, number: int) -> Block:
        block = self._cache.get((*key, number))
        assert block is not None, "require_blocks comes first"
        return block

    def _check_each(
        self,
        log: TopicLog,
        chunk: Chunk,
        rows: Picked,
        offsets: Offsets,
        lengths: Offsets,
        suspect: list[int],
        key: SegmentKey,
    ) -> None:
        bad: list[int] = []
        erased: list[int] = []
        for i in suspect:
            row, start, end = int(rows[i]), int(offsets[i]), int(offsets[i] + lengths[i])
            first, last = start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
            data = b"".join([self._block(key, number)[0] for number in range(first, last + 1)])
            frame = data[start - first * BLOCK_BYTES : end - first * BLOCK_BYTES]
            if not is_record(frame, log.id, chunk.first_seq + row):
                bad.append(row)
            elif frame[FLAGS_AT] & ERASED:
                erased.append(row)
        if bad or erased:
            assert chunk.meta is not None
            path = segment_path(self._topic_dir(log.id), chunk.meta, "data")
            offset = int(offsets[suspect[0]])
            raise DamagedSegment(chunk, path, offset, "a record of the cold tier is damaged", (bad, erased))

    def forget_topic(self, topic_id: int) -> None:
        self._cache.forget_topic(topic_id)
        for key in [key for key in self._digests if key[0] == topic_id]:
            del self._digests[key]


def _spans_of(chunk: Chunk, rows: Picked) -> tuple[Offsets, Offsets]:
    """The first and the last block of each row's frame."""
    taken = chunk.take(rows)
    starts = taken["offset"].astype(np.int64)
    return starts // BLOCK_BYTES, (starts + taken["length"] - 1) // BLOCK_BYTES


def _blocks_of(chunk: Chunk, rows: Picked) -> list[int]:
    firsts, lasts = _spans_of(chunk, rows)
    found: list[int] = np.unique(np.concatenate((firsts, lasts, (firsts + lasts) // 2))).tolist()
    return found  # a frame is at most a little longer than a block, so it spans at most three


def _blocks_added(chunk: Chunk, rows: Picked) -> Offsets:
    """How many blocks each row needs in addition to those of the rows before it."""
    firsts, lasts = _spans_of(chunk, rows)
    before = np.concatenate(([-1], lasts[:-1]))
    return lasts - np.maximum(firsts - 1, before)
