"""Reader: from a cursor to a page of records.

A read selects rows from the index (`tombstones.py`, `selection.py`) and then fetches their frames: from segments of the hot
tier (`hot_segments.py`) or the cold tier (`cold_segments.py`), from the newest log entries in memory (`tail_cache.py`), or
from log files, verified frame by frame.
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
from topics.engine.reading.cold_segments import ColdSegments
from topics.engine.reading.frame_reader import Expected, FrameBuffers, Offsets, read_frames
from topics.engine.reading.hot_segments import CheckedRows, HotSegments
from topics.engine.reading.selection import Picked, RowFilter, collect
from topics.engine.reading.tail_cache import TailCache
from topics.engine.reading.tombstones import next_gap
from topics.engine.storage.frames import DEAD, HAS_NODE, HAS_TAG, is_record
from topics.engine.storage.index import Chunk
from topics.engine.topic.log import Run, TopicLog
from topics.engine.topic.rows import find_run

SINGLE_LOOKUPS_MAX = 8  # pages of up to this many records look up the cache per record
CHECKED_CHUNKS_MAX = 256  # for which the verified rows in the log are remembered


@dataclass(slots=True)
class _Span:
    """Frames back to back in a log file or a buffer."""

    where: int | bytes | bytearray
    start: int
    end: int = 0
    records: list[tuple[int, int]] = field(default_factory=list)  # seq and length


class Reader:
    def __init__(self, disk: Disk, topics_dir: str, cache_bytes: int, cold_cache_bytes: int = 0) -> None:
        self._disk = disk
        self._topics_dir = topics_dir
        self.tail_cache = TailCache(cache_bytes)
        self.cold_blocks = BlockCache(cold_cache_bytes)
        self.wal_handles: dict[int, int] = {}
        self._hot = HotSegments(disk, self.topic_dir)
        self._cold = ColdSegments(disk, self.cold_blocks, self.topic_dir)
        # Verified rows that are still in the log, by topic and chunk.
        self._checked: OrderedDict[tuple[int, int], CheckedRows] = OrderedDict()

    def topic_dir(self, topic_id: int) -> str:
        return f"{self._topics_dir}/{topic_id:016x}"

    # -- selection -----------------------------------------------------------------------------------------

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
        row_filter = RowFilter(log, nodes, command.match) if nodes or command.match is not None else None
        if command.frames:
            frame_page = self._frame_page(log, command, row_filter, cursor, stop, earliest, tombstone)
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
        picked = collect(log, page, cursor, stop, limit, budget, "size", row_filter)
        if picked:
            self.fill(log, page, self._cold.limit_fetches(log, page, picked))
        return page

    @staticmethod
    def _in_epoch(log: TopicLog, epoch: str, cursor: int) -> int:
        """The cursor in the present epoch: beyond the head if the topic was recreated, and not beyond seqs that were assigned
        again after its epoch.
        """
        now = log.cursor_of(epoch, cursor)
        return max(cursor, log.view.head + 1) if now is None else now

    @staticmethod
    def _not_before(log: TopicLog, cursor: int, from_ts: int) -> int:
        """Move the cursor to the first record that is not older than `from_ts`.

        It stays if no live record is older, and stops before a lost range that is not followed by an older live record: the
        lost records may be new enough, too.
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
        row_filter: RowFilter | None,
        cursor: int,
        stop: int,
        earliest: int,
        tombstone: Tombstone | None,
    ) -> FramePage:
        limit = min(command.limit or limits.FRAMES_LIMIT_MAX, limits.FRAMES_LIMIT_MAX)
        budget = min(command.max_bytes or limits.DIFF_BYTES_MAX, limits.DIFF_BYTES_MAX)
        page = FramePage(log.name, [], 0, cursor, log.view.head, earliest, tombstone, 0)
        picked = collect(log, page, cursor, stop, limit, budget, "length", row_filter)
        picked = self._cold.limit_fetches(log, page, picked)
        page.cold_segments = self._cold.require_blocks(log, picked)
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
        """Live rows of [cursor, stop) for a consumer, without those of staged deletes."""
        row_filter = RowFilter(log, (), match) if match is not None else None
        after = max(cursor, log.first_seq) - 1
        return collect(log, page, after, max(stop, after + 1), limit, budget, "size", row_filter, DEAD)

    # -- frames --------------------------------------------------------------------------------------------

    def fill(self, log: TopicLog, page: Page, picked: list[tuple[Chunk, Picked]]) -> None:
        """Set the columns and frames of the page from the picked rows. Copies, since rows change while a page waits."""
        page.cold_segments = self._cold.require_blocks(log, picked)
        blocks = [chunk.take(rows) for chunk, rows in picked]
        found = FrameBuffers(page.frames)
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
        """The frames of these rows back to back, as in a segment."""
        return b"".join(self._slices(log, chunk, runs, rows)) if len(rows) else b""

    def frames_of_few(self, log: TopicLog, chunk: Chunk) -> tuple[bytes, list[int], list[int]]:
        """The live frames of a small chunk without files, back to back, with the offset and length of each row's frame. Without
        numpy: a checkpoint does this for each changed small topic, where the fixed cost of numpy calls would dominate.
        """
        runs, floor, row = log.runs, log.first_seq, -1
        at = find_run(runs, max(floor, chunk.first_seq))
        until = runs[at + 1][0] if at + 1 < len(runs) else chunk.next_seq
        spans: list[_Span] = []
        offsets, lengths = [0] * chunk.count, [0] * chunk.count
        size = 0
        for offset, length, _, flags, _, _, _ in chunk.iter_rows():
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
        cached = self.tail_cache.find(where, start, size)
        if cached is not None:
            return cached[0][cached[1] : cached[1] + size]
        data = self._disk.read(self.wal_handles[where], start, size)
        at = 0
        for seq, length in span.records:
            if not is_record(data[at : at + length], log.id, seq):
                raise Corrupt(
                    f"log file {where}", start + at, f"record {seq} is damaged, or a different record"
                )
            at += length
        return data

    def _slices(self, log: TopicLog, chunk: Chunk, runs: list[Run], rows: Picked) -> list[bytes]:
        """The frames of these rows in order, one piece per run of adjacent frames."""
        block = chunk.take(rows)
        lengths = block["length"].astype(np.int64)
        found = FrameBuffers([])
        self._fetch(log, chunk, runs, rows, block["offset"].astype(np.int64), lengths, found)
        starts, which = found.columns()
        ends = starts + lengths
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
        found: FrameBuffers,
    ) -> None:
        """Collect the frames of ascending rows of one chunk from its segment and from the log."""
        at, count = int(np.searchsorted(rows, chunk.stored)), len(rows)
        if at:
            stored = self._cold if self.is_cold(log, chunk) else self._hot
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
                expected = (log.id, rows[at:end] + chunk.first_seq) if unchecked else None
                self._fetch_log(where, offsets[at:end], lengths[at:end], found, expected)
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
        self, number: int, offsets: Offsets, lengths: Offsets, found: FrameBuffers, expected: Expected
    ) -> None:
        name = f"log file {number}"
        if len(offsets) <= SINGLE_LOOKUPS_MAX:
            for i in range(len(offsets)):
                cached = self.tail_cache.find(number, int(offsets[i]), int(lengths[i]))
                if cached is not None:
                    found.add(cached[0], offsets[i : i + 1] * 0 + cached[1])
                else:
                    one = slice(i, i + 1)
                    expected_one = None if expected is None else (expected[0], expected[1][one])
                    read_frames(
                        self._disk,
                        self.wal_handles[number],
                        name,
                        offsets[one],
                        lengths[one],
                        found,
                        expected_one,
                    )
            return
        first = int(offsets[0])
        cached = self.tail_cache.find(number, first, int(offsets[-1] + lengths[-1]) - first)
        if cached is not None:
            found.add(cached[0], offsets - (first - cached[1]))
        else:
            read_frames(self._disk, self.wal_handles[number], name, offsets, lengths, found, expected)

    # -- segments ------------------------------------------------------------------------------------------

    def is_cold(self, log: TopicLog, chunk: Chunk) -> bool:
        """Whether a segment is only in the cold tier."""
        return self._cold.is_cold(log, chunk)

    def damaged_rows(self, log: TopicLog, chunk: Chunk) -> tuple[list[int], list[int]]:
        """The rows of a hot chunk that are damaged, and those that were erased but whose delete was lost."""
        return self._hot.damaged_rows(log, chunk)

    def forget_checks(self) -> None:
        """Verify everything again when it is next read."""
        self._checked.clear()
        self._hot.forget_checks()

    def close_segment(self, topic_id: int, first_seq: int, generation: int) -> None:
        self._hot.close_segment(topic_id, first_seq, generation)

    def close_topic(self, topic_id: int) -> None:
        self._hot.close_topic(topic_id)
        self._cold.forget_topic(topic_id)

    def close(self) -> None:
        self._hot.close()
