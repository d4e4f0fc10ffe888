"""Reading: from a cursor to a page of frames.

First the plan, from index rows alone: floors and losses, then a masked slice. Then the bytes: sealed segments by one
`pread` a page, each 1 MiB block checked against its digest the first time it is touched; what is not sealed yet is
checked frame by frame; the newest log entries come from memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict

import numpy as np

from topics.engine import limits
from topics.engine.commands import Diff, Page, Tombstone
from topics.engine.errors import Corrupt
from topics.engine.files import xxh
from topics.engine.frames import DELETED, HAS_NODE, HAS_TAG, frame_is_valid
from topics.engine.index import Chunk
from topics.engine.ports import Disk
from topics.engine.segments import BLOCK_BYTES, read_sum, segment_path
from topics.engine.topic_log import Run, TopicLog, find_run

OPEN_SEGMENTS_MAX = 256  # handles kept; the one used longest ago is closed
FETCH_ALONE = 8  # pages up to this many records look in the cache record by record

Row = tuple[int, int, int, int, int, int, int]


class TailCache:
    """The newest log entries as they were written, bounded by bytes; the oldest go first.

    Entries come in the order of file number and offset, so one ascending list of places finds any of them; the
    emptied front is cut off when it is half of the list.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._places: list[int] = []  # file number and offset in one int
        self._bodies: list[bytes] = []
        self._first = 0  # entries before it are gone

    def add(self, file_number: int, start: int, body: bytes) -> None:
        self._places.append(file_number << 32 | start)
        self._bodies.append(body)
        self._bytes += len(body)
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._bodies[self._first])
            self._bodies[self._first] = b""
            self._first += 1
        if self._first * 2 > len(self._bodies) + 64:
            del self._places[: self._first], self._bodies[: self._first]
            self._first = 0

    def find(self, file_number: int, offset: int, length: int) -> tuple[bytes, int] | None:
        place = file_number << 32 | offset
        i = bisect_right(self._places, place) - 1
        if i < self._first:
            return None
        body, at = self._bodies[i], place - self._places[i]
        return (body, at) if at + length <= len(body) else None

    def forget_file(self, file_number: int) -> None:
        """The file is gone or an erase changed it: what is remembered of it must not be served."""
        start = bisect_left(self._places, file_number << 32)
        stop = bisect_left(self._places, (file_number + 1) << 32)
        for i in range(max(start, self._first), stop):
            self._bytes -= len(self._bodies[i])
            self._bodies[i] = b""


class DamagedSegment(Corrupt):
    """A stored chunk does not agree with its digests; whoever catches it finds out which records are gone."""

    def __init__(self, chunk: Chunk, path: str, offset: int, problem: str) -> None:
        super().__init__(path, offset, problem)
        self.chunk = chunk


class _OpenSegment:
    __slots__ = ("blocks", "handle", "path", "verified")

    def __init__(self, handle: int, path: str, blocks: list[bytes] | None) -> None:
        self.handle = handle
        self.path = path
        self.blocks = blocks  # digests of a sealed segment
        self.verified: set[int] = set()


class Reader:
    def __init__(self, disk: Disk, topics_dir: str, cache_bytes: int) -> None:
        self._disk = disk
        self._topics_dir = topics_dir
        self.cache = TailCache(cache_bytes)
        self.wal_handles: dict[int, int] = {}
        self._open: OrderedDict[tuple[int, int, int], _OpenSegment] = OrderedDict()

    def topic_dir(self, topic_id: int) -> str:
        return f"{self._topics_dir}/{topic_id:016x}"

    # -- the plan ------------------------------------------------------------------------------------------

    def diff(self, log: TopicLog, command: Diff) -> Page:
        view = log.view
        head = view.head
        earliest = min(view.first_seq, head + 1)
        cursor = command.from_seq
        tombstone: Tombstone | None = None
        floor = view.evict_floor
        if cursor > head:
            tombstone = Tombstone(1, head, "recreated", head, earliest, head)
            cursor = earliest - 1
        elif cursor + 1 < floor:
            reason = self._reason(view.cap_lost, view.ttl_lost, cursor + 1)
            tombstone = Tombstone(cursor + 1, floor - 1, reason, floor - 1 - cursor, floor, head)
            cursor = floor - 1
        stop = head + 1
        for first, last, reason in view.losses:
            if last <= cursor or last < floor:
                continue
            if first <= cursor + 1 and tombstone is None:
                tombstone = Tombstone(cursor + 1, last, reason, last - cursor, last + 1, head)
                cursor = last
                continue
            stop = min(stop, first)
            break
        nodes = command.nodes if view.config.dedupe_node else ()
        limit = min(command.limit or limits.DIFF_LIMIT_DEFAULT, limits.DIFF_LIMIT_MAX)
        budget = min(command.max_bytes or limits.DIFF_BYTES_DEFAULT, limits.DIFF_BYTES_MAX)
        page = Page(log.name, [], [], [], None, None, [], None, [], [], cursor, head, earliest, tombstone, 0)
        self._collect(log, page, cursor, stop, limit, budget, nodes)
        return page

    @staticmethod
    def _reason(cap_lost: int, ttl_lost: int, gap_from: int) -> str:
        by_cap, by_ttl = cap_lost >= gap_from, ttl_lost >= gap_from
        return "mixed" if by_cap and by_ttl else "cap" if by_cap else "ttl"

    def _collect(
        self,
        log: TopicLog,
        page: Page,
        cursor: int,
        stop: int,
        limit: int,
        budget: int,
        nodes: tuple[bytes, ...],
    ) -> None:
        avoid = [i for node in nodes for i in log.nodes.every_id_of(node)]
        first = max(cursor + 1, log.view.first_seq)
        picked: list[tuple[Chunk, list[int]]] = []
        examined = max(cursor, min(first, stop) - 1)
        full = False
        for chunk, low, high in log.spans(first, stop):
            while low < high and not full:
                upto = min(high, low + max(limit * 2, 64))
                rows, examined_row, limit, budget, full = self._pick(
                    chunk, low, upto, limit, budget, avoid, bool(picked)
                )
                if rows:
                    picked.append((chunk, rows))
                examined = chunk.first_seq + examined_row
                low = upto
            if full:
                break
        if not full:
            examined = max(examined, stop - 1)
        page.scanned = examined - cursor
        page.next_from_seq = max(examined, cursor)
        if picked:
            self.fill(log, page, picked)

    @staticmethod
    def _pick(
        chunk: Chunk, low: int, high: int, limit: int, budget: int, avoid: list[int], some: bool
    ) -> tuple[list[int], int, int, int, bool]:
        """Live rows of [low, high) up to the limits: rows, last examined row, what is left, whether it is full."""
        alive = chunk.live(low, high, DELETED)
        if avoid:
            nodes = chunk.rows["node"][low:high]
            for node in avoid:
                alive &= nodes != node
        found = np.nonzero(alive)[0]
        if not len(found):
            return [], high - 1, limit, budget, False
        sizes = np.cumsum(chunk.rows["size"][low:high][found[:limit]], dtype=np.int64)
        taken = int(np.searchsorted(sizes, budget, side="right"))
        if not taken and not some:
            taken = 1  # a page holds at least one record, however large
        rows = (found[:taken] + low).tolist()
        if taken == limit:
            return rows, rows[-1], 0, 0, True
        if taken < len(found):
            # The record that did not fit was looked at and left: the next page begins with it.
            return rows, int(found[taken]) + low - 1, limit - taken, 0, True
        return rows, high - 1, limit - taken, budget - int(sizes[-1]), False

    # -- the bytes -----------------------------------------------------------------------------------------

    def fill(self, log: TopicLog, page: Page, picked: list[tuple[Chunk, list[int]]]) -> None:
        """Add the picked rows' columns and frames to the page."""
        which: list[int] = []
        with_tag = with_node = False
        tag_ids: list[int] = []
        node_ids: list[int] = []
        for chunk, rows in picked:
            block = chunk.rows[rows]
            offsets, lengths = block["offset"].tolist(), block["length"].tolist()
            flags = block["flags"].tolist()
            page.seqs += (np.array(rows, dtype=np.int64) + chunk.first_seq).tolist()
            page.timestamps += block["ts"].tolist()
            page.flags += flags
            page.lengths += lengths
            combined = int(np.bitwise_or.reduce(block["flags"]))
            with_tag |= bool(combined & HAS_TAG)
            with_node |= bool(combined & HAS_NODE)
            tag_ids += block["tag"].tolist()
            node_ids += block["node"].tolist()
            self._fetch(log, chunk, log.runs, rows, offsets, lengths, page, which)
        if with_tag:
            name = log.tags.strings.name
            page.tags = [name(i) if i else None for i in tag_ids]
        if with_node:
            name = log.nodes.name
            page.nodes = [name(i) if i else None for i in node_ids]
        if len(page.frames) > 1:
            page.which = which

    def _fetch(
        self,
        log: TopicLog,
        chunk: Chunk,
        runs: list[Run],
        rows: list[int],
        offsets: list[int],
        lengths: list[int],
        page: Page,
        which: list[int],
    ) -> None:
        """Read the frames of rows of one chunk, source by source."""
        at, count = 0, len(rows)
        while at < count:
            row = rows[at]
            if row < chunk.stored:
                end = at
                while end < count and rows[end] < chunk.stored:
                    end += 1
                self._fetch_stored(log, chunk, offsets[at:end], lengths[at:end], page, which)
            else:
                run = find_run(runs, chunk.first_seq + row)
                until = runs[run + 1][0] if run + 1 < len(runs) else chunk.next_seq
                end = at
                while end < count and chunk.first_seq + rows[end] < until:
                    end += 1
                where = runs[run][1]
                if isinstance(where, int):
                    self._fetch_log(where, offsets[at:end], lengths[at:end], page, which)
                else:
                    self._take(bytes(where), offsets[at:end], 0, page, which)
            at = end

    def frames_of(self, log: TopicLog, chunk: Chunk, runs: list[Run], rows: list[int]) -> bytes:
        """The frames of these rows back to back, as a segment wants them."""
        if not rows:
            return b""
        page = Page(log.name, [], [], [], None, None, [], None, [], [], 0, 0, 0, None, 0)
        which: list[int] = []
        block = chunk.rows[rows]
        lengths = block["length"].tolist()
        self._fetch(log, chunk, runs, rows, block["offset"].tolist(), lengths, page, which)
        pieces: list[bytes] = []
        at = 0
        while at < len(rows):
            # Neighbours in one buffer are taken by one slice.
            buffer, start = page.frames[which[at]], page.starts[at]
            end, stop = start + lengths[at], at + 1
            while stop < len(rows) and which[stop] == which[at] and page.starts[stop] == end:
                end += lengths[stop]
                stop += 1
            pieces.append(buffer[start:end])
            at = stop
        return b"".join(pieces)

    @staticmethod
    def _take(buffer: bytes, offsets: list[int], base: int, page: Page, which: list[int]) -> None:
        which += [len(page.frames)] * len(offsets)
        page.frames.append(buffer)
        page.starts += [offset - base for offset in offsets] if base else offsets

    def _fetch_log(
        self, number: int, offsets: list[int], lengths: list[int], page: Page, which: list[int]
    ) -> None:
        if len(offsets) <= FETCH_ALONE:
            for offset, length in zip(offsets, lengths, strict=True):
                found = self.cache.find(number, offset, length)
                if found is not None:
                    self._take(found[0], [found[1]], 0, page, which)
                else:
                    self._read(
                        self.wal_handles[number], f"log file {number}", [offset], [length], page, which, True
                    )
            return
        body = self.cache.find(number, offsets[0], offsets[-1] + lengths[-1] - offsets[0])
        if body is not None:
            self._take(body[0], offsets, offsets[0] - body[1], page, which)
            return
        self._read(self.wal_handles[number], f"log file {number}", offsets, lengths, page, which, True)

    def _fetch_stored(
        self,
        log: TopicLog,
        chunk: Chunk,
        offsets: list[int],
        lengths: list[int],
        page: Page,
        which: list[int],
    ) -> None:
        segment = self._segment(log, chunk)
        try:
            if segment.blocks is not None:
                self._verify_blocks(segment, offsets[0], offsets[-1] + lengths[-1])
            self._read(segment.handle, segment.path, offsets, lengths, page, which, segment.blocks is None)
        except Corrupt as error:
            raise DamagedSegment(chunk, error.path, error.offset, error.problem) from None

    def damaged_rows(self, log: TopicLog, chunk: Chunk) -> list[int]:
        """Check every live stored record of a chunk by itself; the blocks around the good ones are trusted after."""
        segment = self._segment(log, chunk)
        bad: list[int] = []
        for row in np.nonzero(chunk.live(0, chunk.stored))[0].tolist():
            offset, length = chunk.get(row)[:2]
            if not frame_is_valid(self._disk.read(segment.handle, offset, length)):
                bad.append(row)
        if segment.blocks is not None:
            segment.verified.update(range(len(segment.blocks)))
        return bad

    def _read(
        self,
        handle: int,
        path: str,
        offsets: list[int],
        lengths: list[int],
        page: Page,
        which: list[int],
        check_frames: bool,
    ) -> None:
        """Fetch frames by as few reads as their gaps allow."""
        at, count = 0, len(offsets)
        while at < count:
            end = at + 1
            reach = offsets[at] + lengths[at]
            while end < count and 0 <= offsets[end] - reach <= limits.READ_GAP_BYTES:
                reach = offsets[end] + lengths[end]
                end += 1
            base = offsets[at]
            data = self._disk.read(handle, base, reach - base)
            if len(data) != reach - base:
                raise Corrupt(path, base, "the file ends before the record does")
            if check_frames:
                for offset, length in zip(offsets[at:end], lengths[at:end], strict=True):
                    if not frame_is_valid(data[offset - base : offset - base + length]):
                        raise Corrupt(path, offset, "the record does not agree with its digest")
            self._take(data, offsets[at:end], base, page, which)
            at = end

    def _segment(self, log: TopicLog, chunk: Chunk) -> _OpenSegment:
        meta = chunk.meta
        assert meta is not None
        key = (log.id, meta.first_seq, meta.generation)
        segment = self._open.get(key)
        if segment is not None and (segment.blocks is not None) == meta.sealed:
            self._open.move_to_end(key)
            return segment
        if segment is not None:
            self._disk.close(self._open.pop(key).handle)
        directory = self.topic_dir(log.id)
        blocks = None
        if meta.sealed:
            blocks = read_sum(self._disk, directory, meta.first_seq, meta.generation)[0].blocks
        path = segment_path(directory, meta, "data")
        segment = _OpenSegment(self._disk.open(path), path, blocks)
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
                raise Corrupt(segment.path, block * BLOCK_BYTES, "a block does not agree with its digest")
            segment.verified.add(block)

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
