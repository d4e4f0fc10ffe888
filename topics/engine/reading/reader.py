"""Reading: from a cursor to a page of frames.

First the plan, from index rows alone: floors and losses, then a masked slice (`selection.py`). Then the bytes: sealed segments
by one `pread` a page (`hot_segments.py`); the newest log entries from memory (`tail_cache.py`), older ones from their files,
checked frame by frame. What lies in the cold tier alone comes from a cache of its blocks (`cold_frames.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from topics.api import limits
from topics.api.errors import Corrupt
from topics.engine.commands.topics import Diff, FramePage, Page, Tombstone
from topics.engine.core.ports import Disk
from topics.engine.core.subjects import TagFilter
from topics.engine.reading.cold_blocks import BlockCache
from topics.engine.reading.cold_frames import ColdFrames
from topics.engine.reading.frame_reader import Expected, Frames, Offsets, read_frames
from topics.engine.reading.hot_segments import CheckedRows, HotSegments
from topics.engine.reading.selection import Picked, Wanted, collect
from topics.engine.reading.tail_cache import TailCache
from topics.engine.reading.tombstones import next_gap
from topics.engine.storage.frames import DEAD, HAS_NODE, HAS_TAG, is_record
from topics.engine.storage.index import Chunk
from topics.engine.topic.log import Run, TopicLog
from topics.engine.topic.rows import find_run

FETCH_ALONE = 8  # pages up to this many records look in the cache record by record
CHECKED_CHUNKS_MAX = 256  # of which it is kept which rows in the log were checked


@dataclass(slots=True)
class _Span:
    """Frames that lie back to back, in a log file or a block."""

    where: int | bytes | bytearray
    start: int
    end: int = 0
    records: list[tuple[int, int]] = field(default_factory=list)  # seq and length


class Reader:
    def __init__(self, disk: Disk, topics_dir: str, cache_bytes: int, cold_cache_bytes: int = 0) -> None:
        self._disk = disk
        self._topics_dir = topics_dir
        self.cache = TailCache(cache_bytes)
        self.cold = BlockCache(cold_cache_bytes)
        self.wal_handles: dict[int, int] = {}
        self._segments = HotSegments(disk, self.topic_dir)
        self._cold_frames = ColdFrames(disk, self.cold, self.topic_dir)
        # By topic and chunk, in the log.
        self._checked: OrderedDict[tuple[int, int], CheckedRows] = OrderedDict()

    def topic_dir(self, topic_id: int) -> str:
        return f"{self._topics_dir}/{topic_id:016x}"

    # -- the plan ------------------------------------------------------------------------------------------

    def diff(self, log: TopicLog, command: Diff) -> Page | FramePage:
        view = log.view
        head = view.head
        cursor = read_up_to = command.from_seq
        if command.epoch is not None:
            cursor = self._in_epoch(log, command.epoch, cursor)
        if command.synced and cursor <= head:
            head = max(min(log.synced_head, head), cursor)
        earliest = min(view.first_seq, head + 1)
        tombstone: Tombstone | None = None
        if cursor < read_up_to:
            tombstone = Tombstone(
                cursor + 1, min(read_up_to, head), "crash", read_up_to - cursor, cursor + 1, head
            )
        elif cursor > head:
            tombstone = Tombstone(1, head, "recreated", head, earliest, head)
            cursor = earliest - 1
        if command.from_ts:
            cursor = self._not_before(log, cursor, command.from_ts)
        tombstone, next_seq, stop, head = next_gap(view, cursor + 1, head, tombstone)
        cursor = next_seq - 1
        nodes = command.nodes if view.config.dedupe_node else ()
        wanted = Wanted(log, nodes, command.match) if nodes or command.match is not None else None
        if command.frames:
            frame_page = self._frame_page(log, command, wanted, cursor, stop, earliest, tombstone)
            if command.include_epoch:
                frame_page.epoch = log.epoch
            return frame_page
        limit = min(command.limit or limits.DIFF_LIMIT_DEFAULT, limits.DIFF_LIMIT_MAX)
        budget = min(command.max_bytes or limits.DIFF_BYTES_DEFAULT, limits.DIFF_BYTES_MAX)
        page = Page.empty(
            log.name, next_from_seq=cursor, head_seq=head, earliest_seq=earliest, tombstone=tombstone
        )
        if command.include_epoch:
            page.epoch = log.epoch
        picked = collect(log, page, cursor, stop, limit, budget, "size", wanted)
        if picked:
            self.fill(log, page, self._cold_frames.within_reach(log, page, picked))
        return page

    @staticmethod
    def _in_epoch(log: TopicLog, epoch: str, cursor: int) -> int:
        """The cursor as it stands now: beyond the head if it is of another topic of this name, below the seqs that were
        given twice since its epoch.
        """
        now = log.cursor_of(epoch, cursor)
        return max(cursor, log.view.head + 1) if now is None else now

    @staticmethod
    def _not_before(log: TopicLog, cursor: int, from_ts: int) -> int:
        """The cursor moved up to the first record that is not older than `from_ts`.

        It stays when everything live is young enough, and stops before a loss that no older live record follows:
        what was lost there may have been young enough too.
        """
        view = log.view
        found = log.find(view.first_seq) if view.first_seq <= view.head else None
        if found is None or found[0].ts_at(found[1]) >= from_ts:
            return cursor
        start = log.first_since(from_ts)
        for first, last, _ in reversed(view.losses):
            if last < start:
                if any(chunk.live(low, high).any() for chunk, low, high in log.spans(last + 1, start)):
                    break
                start = first
        return max(cursor, start - 1)

    def _frame_page(
        self,
        log: TopicLog,
        command: Diff,
        wanted: Wanted | None,
        cursor: int,
        stop: int,
        earliest: int,
        tombstone: Tombstone | None,
    ) -> FramePage:
        limit = min(command.limit or limits.FRAMES_LIMIT_MAX, limits.FRAMES_LIMIT_MAX)
        budget = min(command.max_bytes or limits.DIFF_BYTES_MAX, limits.DIFF_BYTES_MAX)
        page = FramePage(log.name, [], 0, cursor, log.view.head, earliest, tombstone, 0)
        picked = collect(log, page, cursor, stop, limit, budget, "length", wanted)
        picked = self._cold_frames.within_reach(log, page, picked)
        page.cold_segments = self._cold_frames.need(log, picked)
        for chunk, rows in picked:
            page.chunks += self._slices(log, chunk, log.runs, rows)
            page.count += len(rows)
        return page

    @staticmethod
    def undelivered(
        log: TopicLog,
        page: Page,
        cursor: int,
        stop: int,
        limit: int,
        budget: int,
        match: TagFilter | None,
    ) -> list[tuple[Chunk, Picked]]:
        """Live rows of [cursor, stop) for a consumer; what a staged delete takes is not among them."""
        wanted = Wanted(log, (), match) if match is not None else None
        after = max(cursor, log.first_seq) - 1
        return collect(log, page, after, max(stop, after + 1), limit, budget, "size", wanted, DEAD)

    # -- the bytes -----------------------------------------------------------------------------------------

    def fill(self, log: TopicLog, page: Page, picked: list[tuple[Chunk, Picked]]) -> None:
        """Add the picked rows' columns and frames to the page. Copies: rows go on changing while a page waits."""
        page.cold_segments = self._cold_frames.need(log, picked)
        blocks = [chunk.take(rows) for chunk, rows in picked]
        found = Frames(page.frames)
        for (chunk, rows), block in zip(picked, blocks, strict=True):
            self._fetch(
                log,
                chunk,
                log.runs,
                rows,
                block["offset"].astype(np.int64),
                block["length"].astype(np.int64),
                found,
            )
        block = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        seqs = [rows + chunk.first_seq for chunk, rows in picked]
        page.seqs = (seqs[0] if len(seqs) == 1 else np.concatenate(seqs)).tolist()
        page.timestamps = block["ts"].astype(np.int64)
        page.flags = block["flags"] & (0xFF ^ DEAD)
        page.lengths = block["length"].astype(np.int64)
        page.starts, page.which = found.columns()
        combined = int(np.bitwise_or.reduce(page.flags))
        if combined & HAS_TAG:
            names = log.tags.strings.names
            page.tags = [names[i] for i in block["tag"].tolist()]
        if combined & HAS_NODE:
            names = log.nodes.names
            page.nodes = [names[i] for i in block["node"].tolist()]

    def frames_of(self, log: TopicLog, chunk: Chunk, runs: list[Run], rows: Picked) -> bytes:
        """The frames of these rows back to back, as a segment wants them."""
        return b"".join(self._slices(log, chunk, runs, rows)) if len(rows) else b""

    def frames_of_few(self, log: TopicLog, chunk: Chunk) -> tuple[bytes, list[int], list[int]]:
        """The living frames of a small chunk without files, back to back, with place and length of each row's there. Row by row: a
        checkpoint does this for every small topic that has changed, and numpy would cost it more than it saves.
        """
        runs, floor, row = log.runs, log.first_seq, -1
        at = find_run(runs, max(floor, chunk.first_seq))
        until = runs[at + 1][0] if at + 1 < len(runs) else chunk.next_seq
        spans: list[_Span] = []
        offsets, lengths = [0] * chunk.count, [0] * chunk.count
        size = 0
        for offset, length, _, flags, _, _, _ in chunk.each():
            row += 1
            seq = chunk.first_seq + row
            if flags & DEAD or not length or seq < floor:
                continue
            if spans and spans[-1].end == offset and seq < until:
                span = spans[-1]
            else:
                if seq >= until:
                    at = find_run(runs, seq)
                    until = runs[at + 1][0] if at + 1 < len(runs) else chunk.next_seq
                span = _Span(runs[at][1], offset)
                spans.append(span)
            span.end = offset + length
            span.records.append((seq, length))
            offsets[row], lengths[row] = size, length
            size += length
        return b"".join([self._take_span(log, span) for span in spans]), offsets, lengths

    def _take_span(self, log: TopicLog, span: _Span) -> bytes:
        where, start, size = span.where, span.start, span.end - span.start
        if not isinstance(where, int):
            return bytes(where[start : span.end])
        cached = self.cache.find(where, start, size)
        if cached is not None:
            return cached[0][cached[1] : cached[1] + size]
        data = self._disk.read(self.wal_handles[where], start, size)
        at = 0
        for seq, length in span.records:
            if not is_record(data[at : at + length], log.id, seq):
                raise Corrupt(f"log file {where}", start + at, "this is not the record, or it has changed")
            at += length
        return data

    def _slices(self, log: TopicLog, chunk: Chunk, runs: list[Run], rows: Picked) -> list[bytes]:
        """The frames of these rows back to back, in as few pieces as there are runs of neighbours."""
        block = chunk.take(rows)
        lengths = block["length"].astype(np.int64)
        found = Frames([])
        self._fetch(log, chunk, runs, rows, block["offset"].astype(np.int64), lengths, found)
        starts, which = found.columns()
        ends = starts + lengths
        # Neighbours in one buffer are taken by one slice.
        apart = starts[1:] != ends[:-1]
        if which is not None:
            apart |= which[1:] != which[:-1]
        firsts = [0, *(np.flatnonzero(apart) + 1).tolist()]
        lasts = [*(first - 1 for first in firsts[1:]), len(rows) - 1]
        return [
            found.buffers[0 if which is None else int(which[first])][int(starts[first]) : int(ends[last])]
            for first, last in zip(firsts, lasts, strict=True)
        ]

    def _fetch(
        self,
        log: TopicLog,
        chunk: Chunk,
        runs: list[Run],
        rows: Picked,
        offsets: Offsets,
        lengths: Offsets,
        found: Frames,
    ) -> None:
        """Read the frames of ascending rows of one chunk, source by source."""
        at, count = int(np.searchsorted(rows, chunk.stored)), len(rows)
        if at:
            stored = self._cold_frames if self.is_cold(log, chunk) else self._segments
            stored.fetch(log, chunk, rows[:at], offsets[:at], lengths[:at], found)
        if at == count:
            return
        checked = self._checked_in_log(log, chunk)
        in_log = rows[at:]
        unchecked = not checked.covers(in_log)
        while at < count:
            run = find_run(runs, chunk.first_seq + int(rows[at]))
            until = runs[run + 1][0] if run + 1 < len(runs) else chunk.next_seq
            end = int(np.searchsorted(rows, until - chunk.first_seq))
            where = runs[run][1]
            if isinstance(where, int):
                check = (log.id, rows[at:end] + chunk.first_seq) if unchecked else None
                self._fetch_log(where, offsets[at:end], lengths[at:end], found, check)
            else:
                found.add(bytes(where), offsets[at:end])
            at = end
        if unchecked:
            checked.add(in_log, chunk)

    def _checked_in_log(self, log: TopicLog, chunk: Chunk) -> CheckedRows:
        key = (log.id, chunk.first_seq)
        checked = self._checked.get(key)
        if checked is None:
            if len(self._checked) >= CHECKED_CHUNKS_MAX:
                self._checked.popitem(last=False)
            checked = self._checked[key] = CheckedRows()
        return checked

    def _fetch_log(
        self, number: int, offsets: Offsets, lengths: Offsets, found: Frames, check: Expected
    ) -> None:
        name = f"log file {number}"
        if len(offsets) <= FETCH_ALONE:
            for i in range(len(offsets)):
                cached = self.cache.find(number, int(offsets[i]), int(lengths[i]))
                if cached is not None:
                    found.add(cached[0], offsets[i : i + 1] * 0 + cached[1])
                else:
                    one = slice(i, i + 1)
                    alone = None if check is None else (check[0], check[1][one])
                    read_frames(
                        self._disk, self.wal_handles[number], name, offsets[one], lengths[one], found, alone
                    )
            return
        first = int(offsets[0])
        cached = self.cache.find(number, first, int(offsets[-1] + lengths[-1]) - first)
        if cached is not None:
            found.add(cached[0], offsets - (first - cached[1]))
        else:
            read_frames(self._disk, self.wal_handles[number], name, offsets, lengths, found, check)

    # -- segments ------------------------------------------------------------------------------------------

    def is_cold(self, log: TopicLog, chunk: Chunk) -> bool:
        """Whether a segment can be read from the cold tier only."""
        return self._cold_frames.is_cold(log, chunk)

    def damaged_rows(self, log: TopicLog, chunk: Chunk) -> tuple[list[int], list[int]]:
        """The rows of a chunk of the hot tier that cannot be read, and those that were erased and whose delete was lost."""
        return self._segments.damaged_rows(log, chunk)

    def distrust(self) -> None:
        """Check everything anew when it is read next."""
        self._checked.clear()
        self._segments.distrust()

    def close_segment(self, topic_id: int, first_seq: int, generation: int) -> None:
        self._segments.close_segment(topic_id, first_seq, generation)

    def close_topic(self, topic_id: int) -> None:
        self._segments.close_topic(topic_id)
        self._cold_frames.forget_topic(topic_id)

    def close(self) -> None:
        self._segments.close()
