"""Reading: from a cursor to a page of frames.

First the plan, from index rows alone: floors and losses, then a masked slice. Then the bytes: sealed segments by one
`pread` a page, each 1 MiB block checked against its digest the first time it is touched; what is not sealed yet is
checked frame by frame; the newest log entries come from memory. What lies in the cold tier alone comes from a cache of its
blocks; when some are missing there, ColdMiss says which.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from topics.engine import limits
from topics.engine.cold import Block, BlockCache, ColdMiss, SegmentWant
from topics.engine.commands import Diff, FramePage, Page, Tombstone
from topics.engine.errors import Corrupt
from topics.engine.files import xxh
from topics.engine.frames import DEAD, DELETED, ERASED, FLAGS_AT, HAS_NODE, HAS_TAG, is_record
from topics.engine.index import Chunk
from topics.engine.ports import Disk
from topics.engine.sealing import read_sum
from topics.engine.segments import BLOCK_BYTES, COLD, SegmentMeta, segment_path
from topics.engine.subjects import TagFilter, TagMatch
from topics.engine.topic_log import Run, TopicLog, find_run

OPEN_SEGMENTS_MAX = 256  # handles kept; the one used longest ago is closed
FILTER_STEP_ROWS = 8192  # looked at together by a read with a tag match
FEW_LOOKED_AT = 64  # rows, dead ones included
FETCH_ALONE = 8  # pages up to this many records look in the cache record by record

Picked = npt.NDArray[np.intp]  # row numbers of one chunk, ascending
Offsets = npt.NDArray[np.int64]
_Expected = (
    tuple[int, Picked] | None
)  # topic and seqs of the records that should be found, if they are to be checked


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
        self._bytes -= sum(map(len, self._bodies[start:stop]))
        del self._places[start:stop], self._bodies[start:stop]
        self._first -= min(self._first, stop) - min(self._first, start)


class DamagedSegment(Corrupt):
    """A stored chunk does not agree with its digests; whoever catches it finds out which records are gone.

    Of the cold tier it is known at once, for what was to be read: rows that are damaged, and rows that were erased.
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


class _Frames:
    """Buffers with frames in them, and where each frame starts, gathered source by source."""

    __slots__ = ("_starts", "buffers")

    def __init__(self, buffers: list[bytes]) -> None:
        self.buffers = buffers
        self._starts: list[Offsets] = []

    def add(self, buffer: bytes, starts: Offsets) -> None:
        self.buffers.append(buffer)
        self._starts.append(starts)

    def check_erased(self, first: int, path: str) -> None:
        """A record that is read is alive; when its bytes were erased, its delete has been lost."""
        for buffer, starts in zip(
            self.buffers[first:], self._starts[first - len(self.buffers) :], strict=True
        ):
            if (np.frombuffer(buffer, np.uint8)[starts + FLAGS_AT] & ERASED).any():
                raise Corrupt(path, 0, "a record was erased and its delete is not known")

    def columns(self) -> tuple[Offsets, Offsets | None]:
        """The start of every frame, and in which buffer it lies unless there is only one."""
        if len(self.buffers) == 1:
            return self._starts[0], None
        which = np.repeat(np.arange(len(self.buffers)), [len(starts) for starts in self._starts])
        return np.concatenate(self._starts), which


class _Wanted:
    """Which live rows one read wants: none that came from its own nodes, only those whose tag matches.

    Rows hold ids, and one name may have several while deletes wait for their sync. A literal match knows its ids
    at once. Any other asks for each id it meets, once a read, and how much one read may ask and look at is bounded.
    """

    __slots__ = ("_avoid", "_match", "_names", "_names_left", "_only", "_rows_left", "_verdicts")

    def __init__(self, log: TopicLog, nodes: tuple[bytes, ...], match: TagMatch | TagFilter | None) -> None:
        self._avoid = [i for node in nodes for i in log.nodes.every_id_of(node)]
        self._match = match
        self._names = log.tags.strings.names
        literal = match.literal if match is not None else None
        self._only = log.tags.strings.every_id_of(literal) if literal is not None else None
        # Per tag id: 0 not asked yet, 1 matches, 2 does not. Untagged rows (id 0) never match.
        several = match is not None and literal is None
        self._verdicts = np.zeros(len(self._names) if several else 1, dtype=np.uint8)
        self._verdicts[0] = 2
        self._rows_left = limits.FILTER_ROWS_MAX
        self._names_left = limits.FILTER_NAMES_MAX

    def stop(self, low: int, high: int, upto: int) -> int:
        """How far to look at once: matches may be rare, so further than the page could need."""
        if self._match is None:
            return upto
        return min(high, max(upto, low + FILTER_STEP_ROWS), low + self._rows_left)

    @property
    def tired(self) -> bool:
        """Whether this read has looked at enough, whatever it found."""
        return self._match is not None and (self._rows_left <= 0 or self._names_left <= 0)

    def narrow(self, alive: npt.NDArray[np.bool_], chunk: Chunk, low: int, high: int) -> None:
        """Take from `alive`, the mask of the rows [low, high), what is not wanted."""
        if self._avoid:
            nodes = chunk.rows["node"][low:high]
            for node in self._avoid:
                alive &= nodes != node
        if self._match is None:
            return
        self._rows_left -= high - low
        tags = chunk.rows["tag"][low:high]
        if self._only is None:
            # Of living rows alone: what a dead one holds may be no id any more.
            rows = np.flatnonzero(alive)
            ids = tags[rows]
            self._ask(ids)
            alive[rows] = self._verdicts[ids] == 1
            return
        matching = np.zeros(high - low, dtype=np.bool_)
        for tag in self._only:
            matching |= tags == tag
        alive &= matching

    def _ask(self, tags: npt.NDArray[np.uint32]) -> None:
        """Find out about the tag ids that were not met before."""
        assert self._match is not None
        unknown = np.unique(tags[self._verdicts[tags] == 0]).tolist()
        matches, names = self._match.matches, self._names
        for tag in unknown:
            self._verdicts[tag] = 1 if matches(names[tag]) else 2
        self._names_left -= len(unknown)


class _CheckedRows:
    """Rows of a chunk whose frames have been compared with their digests: one range, which grows as readers go on.

    Like the blocks of a sealed segment, a frame is checked the first time it is read by this process.
    """

    __slots__ = ("_end", "_start")

    def __init__(self) -> None:
        self._start = self._end = 0

    def covers(self, rows: Picked) -> bool:
        return self._start <= int(rows[0]) and int(rows[-1]) < self._end

    def add(self, rows: Picked, chunk: Chunk) -> None:
        """These rows are good. They say something of the range between them only if they are all that live there."""
        start, end = int(rows[0]), int(rows[-1]) + 1
        if int(np.count_nonzero(chunk.live(start, end, DELETED))) != len(rows):
            return
        if start <= self._end and end >= self._start:
            start, end = min(start, self._start), max(end, self._end)
        self._start, self._end = start, end


@dataclass(slots=True)
class FewRecords:
    """The columns of a page as plain lists, while it is made record by record."""

    seqs: list[int] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    tags: list[bytes | None] = field(default_factory=list)
    nodes: list[bytes | None] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)
    which: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    # The log entry that the last one was found in: the file, where it begins there, its length.
    where: object = None
    begins: int = 0
    size: int = 0

    def page(self, log: TopicLog) -> Page:
        return Page(
            log.name, self.seqs, self.timestamps, self.flags, self.tags, self.nodes, self.frames, self.which,
            self.starts, self.lengths, 0, log.view.head, log.first_seq, None, 0,
        )  # fmt: skip


@dataclass(slots=True)
class _Span:
    """Frames that lie back to back, in a log file or a block."""

    where: int | bytes | bytearray
    start: int
    end: int = 0
    records: list[tuple[int, int]] = field(default_factory=list)  # seq and length


class _OpenSegment:
    __slots__ = ("blocks", "checked", "handle", "path", "sealed", "verified")

    def __init__(self, handle: int, path: str, blocks: list[bytes] | None, *, sealed: bool) -> None:
        self.handle = handle
        self.path = path
        self.sealed = sealed
        self.blocks = blocks  # digests of a sealed segment whose .sum can be read
        self.checked = _CheckedRows()  # of any other: its records are checked one by one
        self.verified: set[int] = set()


class Reader:
    def __init__(self, disk: Disk, topics_dir: str, cache_bytes: int, cold_cache_bytes: int = 0) -> None:
        self._disk = disk
        self._topics_dir = topics_dir
        self.cache = TailCache(cache_bytes)
        self.cold = BlockCache(cold_cache_bytes)
        self._cold_sums: OrderedDict[tuple[int, int, int], list[bytes] | None] = OrderedDict()
        self.wal_handles: dict[int, int] = {}
        self._open: OrderedDict[tuple[int, int, int], _OpenSegment] = OrderedDict()
        self._checked: OrderedDict[tuple[int, int], _CheckedRows] = (
            OrderedDict()
        )  # by topic and chunk, in the log

    def topic_dir(self, topic_id: int) -> str:
        return f"{self._topics_dir}/{topic_id:016x}"

    # -- the plan ------------------------------------------------------------------------------------------

    def diff(self, log: TopicLog, command: Diff) -> Page | FramePage:
        view = log.view
        head = view.head
        cursor = command.from_seq
        if command.synced and cursor <= head:
            head = max(min(log.safe_head, head), cursor)
        earliest = min(view.first_seq, head + 1)
        tombstone: Tombstone | None = None
        floor = view.evict_floor
        if cursor > head:
            tombstone = Tombstone(1, head, "recreated", head, earliest, head)
            cursor = earliest - 1
        if command.from_ts:
            cursor = self._not_before(log, cursor, command.from_ts)
        if cursor + 1 < floor and tombstone is None:
            head = max(head, floor - 1)  # what is gone need not be synced first
            reason = self._reason(view.cap_lost, view.ttl_lost, cursor + 1)
            tombstone = Tombstone(cursor + 1, floor - 1, reason, floor - 1 - cursor, floor, head)
            cursor = floor - 1
        stop = head + 1
        for first, last, reason in view.losses:
            if last <= cursor or last < floor:
                continue
            if first <= cursor + 1 and tombstone is None:
                head = max(head, last)
                tombstone = Tombstone(cursor + 1, last, reason, last - cursor, last + 1, head)
                cursor = last
                continue
            stop = min(stop, first)
            break
        nodes = command.nodes if view.config.dedupe_node else ()
        wanted = _Wanted(log, nodes, command.match) if nodes or command.match is not None else None
        if command.frames:
            return self._frame_page(log, command, wanted, cursor, stop, earliest, tombstone)
        limit = min(command.limit or limits.DIFF_LIMIT_DEFAULT, limits.DIFF_LIMIT_MAX)
        budget = min(command.max_bytes or limits.DIFF_BYTES_DEFAULT, limits.DIFF_BYTES_MAX)
        page = Page(log.name, [], [], [], None, None, [], None, [], [], cursor, head, earliest, tombstone, 0)
        picked = self._collect(log, page, cursor, stop, limit, budget, "size", wanted)
        if picked:
            self.fill(log, page, self._within_reach(log, page, picked))
        return page

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
        wanted: _Wanted | None,
        cursor: int,
        stop: int,
        earliest: int,
        tombstone: Tombstone | None,
    ) -> FramePage:
        limit = min(command.limit or limits.FRAMES_LIMIT_MAX, limits.FRAMES_LIMIT_MAX)
        budget = min(command.max_bytes or limits.DIFF_BYTES_MAX, limits.DIFF_BYTES_MAX)
        page = FramePage(log.name, [], 0, cursor, log.view.head, earliest, tombstone, 0)
        picked = self._collect(log, page, cursor, stop, limit, budget, "length", wanted)
        picked = self._within_reach(log, page, picked)
        page.cold_segments = self._need(log, picked)
        for chunk, rows in picked:
            page.chunks += self._slices(log, chunk, log.runs, rows)
            page.count += len(rows)
        return page

    @staticmethod
    def _reason(cap_lost: int, ttl_lost: int, gap_from: int) -> str:
        by_cap, by_ttl = cap_lost >= gap_from, ttl_lost >= gap_from
        return "mixed" if by_cap and by_ttl else "cap" if by_cap else "ttl"

    def _collect(
        self,
        log: TopicLog,
        page: Page | FramePage,
        cursor: int,
        stop: int,
        limit: int,
        budget: int,
        weight: str,
        wanted: _Wanted | None,
        dead: int = DELETED,
    ) -> list[tuple[Chunk, Picked]]:
        """The rows of a page, and how far it got. `weight` is the column that the byte budget counts."""
        first = max(cursor + 1, log.view.first_seq)
        picked: list[tuple[Chunk, Picked]] = []
        examined = max(cursor, min(first, stop) - 1)
        full = False
        for chunk, low, high in log.spans(first, stop):
            while low < high and not full:
                upto = min(high, low + max(limit * 2, 64))
                if wanted is not None:
                    upto = wanted.stop(low, high, upto)
                rows, examined_row, limit, budget, full = self._pick(
                    chunk, low, upto, limit, budget, weight, wanted, bool(picked), dead
                )
                if len(rows):
                    picked.append((chunk, rows))
                examined = chunk.first_seq + examined_row
                low = upto
                if wanted is not None and wanted.tired:
                    full = True
            if full:
                break
        if not full:
            examined = max(examined, stop - 1)
        page.scanned = examined - cursor
        page.next_from_seq = max(examined, cursor)
        return picked

    def undelivered(
        self,
        log: TopicLog,
        page: Page,
        cursor: int,
        stop: int,
        limit: int,
        budget: int,
        match: TagFilter | None,
    ) -> list[tuple[Chunk, Picked]]:
        """Live rows of [cursor, stop) for a consumer; what a staged delete takes is not among them."""
        wanted = _Wanted(log, (), match) if match is not None else None
        after = max(cursor, log.first_seq) - 1
        return self._collect(log, page, after, max(stop, after + 1), limit, budget, "size", wanted, DEAD)

    def take_few(
        self, log: TopicLog, few: FewRecords, cursor: int, stop: int, limit: int, budget: int
    ) -> int | None:
        """As `undelivered` and `fill`, for a few records that are all in memory: numpy would cost more than it saves.

        Adds to the records and returns the seq behind the last one; None when it is not as simple as that.
        """
        after = max(cursor, log.first_seq)
        left = FEW_LOOKED_AT
        for chunk, first, until in log.spans(after, stop):
            for row in range(first, until):
                left -= 1
                fields = chunk.get(row)
                if fields[3] & DEAD or not fields[1]:
                    if not left:
                        return None
                    continue
                if few.seqs and fields[6] > budget:
                    return chunk.first_seq + row
                if not left or not self._add_few(log, few, chunk, row, fields):
                    return None
                budget -= fields[6]
                limit -= 1
                if not limit:
                    return chunk.first_seq + row + 1
        return max(stop, after)

    def add_few(self, log: TopicLog, few: FewRecords, seqs: list[int]) -> bool:
        """Add these records, if all are in memory."""
        for seq in seqs:
            found = log.find(seq)
            if found is None or not self._add_few(log, few, *found, found[0].get(found[1])):
                return False
        return True

    def _add_few(
        self,
        log: TopicLog,
        few: FewRecords,
        chunk: Chunk,
        row: int,
        fields: tuple[int, int, int, int, int, int, int],
    ) -> bool:
        offset, length, ts, flags, tag, node, _ = fields
        seq = chunk.first_seq + row
        if row < chunk.stored:
            return False
        runs = log.runs
        where = runs[-1][1] if runs and runs[-1][0] <= seq else runs[find_run(runs, seq)][1] if runs else None
        # Neighbours lie in one entry of the log: what was found for one is looked at for the next.
        at = offset - few.begins
        if where != few.where or at < 0 or at + length > few.size:
            cached = self.cache.find(where, offset, length) if isinstance(where, int) else None
            if cached is None:
                return False
            few.frames.append(cached[0])
            at = cached[1]
            few.where, few.begins, few.size = where, offset - at, len(cached[0])
        few.seqs.append(seq)
        few.timestamps.append(ts)
        few.flags.append(flags & (0xFF ^ DEAD))
        few.lengths.append(length)
        few.starts.append(at)
        few.which.append(len(few.frames) - 1)
        few.tags.append(log.tags.strings.names[tag] if tag else None)
        few.nodes.append(log.nodes.names[node] if node else None)
        return True

    @staticmethod
    def _pick(
        chunk: Chunk,
        low: int,
        high: int,
        limit: int,
        budget: int,
        weight: str,
        wanted: _Wanted | None,
        some: bool,
        dead: int,
    ) -> tuple[Picked, int, int, int, bool]:
        """Live rows of [low, high) up to the limits: rows, last examined row, what is left, whether it is full."""
        alive = chunk.live(low, high, dead)
        if wanted is not None:
            wanted.narrow(alive, chunk, low, high)
        found = np.flatnonzero(alive)
        if not len(found):
            return found, high - 1, limit, budget, False
        sizes = np.cumsum(chunk.rows[weight][low:high][found[:limit]], dtype=np.int64)
        taken = int(np.searchsorted(sizes, budget, side="right"))
        if not taken and not some:
            taken = 1  # a page holds at least one record, however large
        rows = found[:taken] + low
        if taken == limit:
            return rows, int(rows[-1]), 0, 0, True
        if taken < len(found):
            # The record that did not fit was looked at and left: the next page begins with it.
            return rows, int(found[taken]) + low - 1, limit - taken, 0, True
        return rows, high - 1, limit - taken, budget - int(sizes[-1]), False

    # -- the bytes -----------------------------------------------------------------------------------------

    def fill(self, log: TopicLog, page: Page, picked: list[tuple[Chunk, Picked]]) -> None:
        """Add the picked rows' columns and frames to the page. Copies: rows go on changing while a page waits."""
        page.cold_segments = self._need(log, picked)
        blocks = [chunk.take(rows) for chunk, rows in picked]
        found = _Frames(page.frames)
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
        found = _Frames([])
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
        found: _Frames,
    ) -> None:
        """Read the frames of ascending rows of one chunk, source by source."""
        at, count = int(np.searchsorted(rows, chunk.stored)), len(rows)
        if at:
            self._fetch_stored(log, chunk, rows[:at], offsets[:at], lengths[:at], found)
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

    def _checked_in_log(self, log: TopicLog, chunk: Chunk) -> _CheckedRows:
        key = (log.id, chunk.first_seq)
        checked = self._checked.get(key)
        if checked is None:
            if len(self._checked) >= OPEN_SEGMENTS_MAX:
                self._checked.popitem(last=False)
            checked = self._checked[key] = _CheckedRows()
        return checked

    def _fetch_log(
        self, number: int, offsets: Offsets, lengths: Offsets, found: _Frames, check: _Expected
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
                    self._read(self.wal_handles[number], name, offsets[one], lengths[one], found, alone)
            return
        first = int(offsets[0])
        cached = self.cache.find(number, first, int(offsets[-1] + lengths[-1]) - first)
        if cached is not None:
            found.add(cached[0], offsets - (first - cached[1]))
        else:
            self._read(self.wal_handles[number], name, offsets, lengths, found, check)

    def _fetch_stored(
        self, log: TopicLog, chunk: Chunk, rows: Picked, offsets: Offsets, lengths: Offsets, found: _Frames
    ) -> None:
        if self.is_cold(log, chunk):
            self._fetch_cold(log, chunk, rows, offsets, lengths, found)
            return
        segment = self._segment(log, chunk)
        try:
            unchecked = segment.blocks is None and not segment.checked.covers(rows)
            check = (log.id, rows + chunk.first_seq) if unchecked else None
            if segment.blocks is not None:
                self._verify_blocks(segment, int(offsets[0]), int(offsets[-1] + lengths[-1]))
            before = len(found.buffers)
            self._read(segment.handle, segment.path, offsets, lengths, found, check)
            found.check_erased(before, segment.path)
            if unchecked:
                segment.checked.add(rows, chunk)
        except Corrupt as error:
            raise DamagedSegment(chunk, error.path, error.offset, error.problem) from None

    # -- the cold tier -------------------------------------------------------------------------------------

    def is_cold(self, log: TopicLog, chunk: Chunk) -> bool:
        """Whether a segment can be read from the cold tier only: while it is in both places, hot is better."""
        meta = chunk.meta
        if meta is None or meta.tier != COLD:
            return False
        return not self._disk.exists(segment_path(self.topic_dir(log.id), meta, "data"))

    def _within_reach(
        self, log: TopicLog, page: Page | FramePage, picked: list[tuple[Chunk, Picked]]
    ) -> list[tuple[Chunk, Picked]]:
        """What of a page can be had by a bounded number of fetches; the page ends there."""
        room = limits.COLD_BLOCKS_PER_READ
        for i, (chunk, rows) in enumerate(picked):
            if not self.is_cold(log, chunk):
                continue
            used = np.cumsum(_blocks_added(chunk, rows))
            fits = int(np.searchsorted(used, room, side="right"))
            if not fits and not i:
                fits = 1  # a page holds at least one record, however large
            if fits < len(rows):
                reached = chunk.first_seq + int(rows[fits]) - 1
                page.scanned -= page.next_from_seq - reached
                page.next_from_seq = reached
                return [*picked[:i], *([(chunk, rows[:fits])] if fits else [])]
            room -= int(used[-1])
        return picked

    def _need(self, log: TopicLog, picked: list[tuple[Chunk, Picked]]) -> int:
        """Make sure of the blocks of all these rows at once; returns how many cold segments they are of."""
        wants: list[SegmentWant] = []
        missing = False
        for chunk, rows in picked:
            if not self.is_cold(log, chunk):
                continue
            meta = chunk.meta
            assert meta is not None
            key = (log.id, meta.first_seq, meta.generation)
            blocks = _blocks_of(chunk, rows)
            missing |= any((*key, block) not in self.cold for block in blocks)
            if wants and wants[-1].segment == key:
                wants[-1].blocks = sorted({*wants[-1].blocks, *blocks})
                continue
            path = segment_path(self.topic_dir(log.id), meta, "data")
            wants.append(SegmentWant(key, path, meta.data_bytes, self._digests_of(log, meta), blocks))
        if missing:
            raise ColdMiss(wants)
        return len({want.segment for want in wants})

    def _digests_of(self, log: TopicLog, meta: SegmentMeta) -> list[bytes] | None:
        key = (log.id, meta.first_seq, meta.generation)
        if key not in self._cold_sums:
            if len(self._cold_sums) >= OPEN_SEGMENTS_MAX:
                self._cold_sums.popitem(last=False)
            self._cold_sums[key] = self._block_digests(self.topic_dir(log.id), meta)
        return self._cold_sums[key]

    def _fetch_cold(
        self, log: TopicLog, chunk: Chunk, rows: Picked, offsets: Offsets, lengths: Offsets, found: _Frames
    ) -> None:
        """Frames out of blocks that are in memory, block by block; one that lies across blocks is put together."""
        meta = chunk.meta
        assert meta is not None
        key = (log.id, meta.first_seq, meta.generation)
        firsts, lasts = offsets // BLOCK_BYTES, (offsets + lengths - 1) // BLOCK_BYTES
        across = firsts != lasts
        apart = np.flatnonzero((np.diff(firsts) != 0) | across[1:] | across[:-1]) + 1
        doubtful: list[int] = []
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
            if not all(agrees for _, agrees in blocks) or (flags & ERASED).any():
                doubtful += part.tolist()
            found.add(data, starts)
        if doubtful:
            self._look_at_each(log, chunk, rows, offsets, lengths, doubtful, key)

    def _block(self, key: tuple[int, int, int], number: int) -> Block:
        block = self.cold.get((*key, number))
        assert block is not None, "it was asked for before"
        return block

    def _look_at_each(
        self,
        log: TopicLog,
        chunk: Chunk,
        rows: Picked,
        offsets: Offsets,
        lengths: Offsets,
        doubtful: list[int],
        key: tuple[int, int, int],
    ) -> None:
        bad: list[int] = []
        erased: list[int] = []
        for i in doubtful:
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
            path = segment_path(self.topic_dir(log.id), chunk.meta, "data")
            offset = int(offsets[doubtful[0]])
            raise DamagedSegment(chunk, path, offset, "a record of the cold tier is damaged", (bad, erased))

    def damaged_rows(self, log: TopicLog, chunk: Chunk) -> tuple[list[int], list[int]]:
        """Check every live stored record of a chunk by itself; the blocks around the good ones are trusted after.

        The second list is of records that were erased: their delete has been lost, and they must not come back.
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

    def _read(
        self, handle: int, path: str, offsets: Offsets, lengths: Offsets, found: _Frames, check: _Expected
    ) -> None:
        """Fetch frames by as few reads as their gaps allow."""
        ends = offsets + lengths
        between = offsets[1:] - ends[:-1]
        cuts = (np.flatnonzero((between < 0) | (between > limits.READ_GAP_BYTES)) + 1).tolist()
        for first, stop in zip([0, *cuts], [*cuts, len(offsets)], strict=True):
            base, reach = int(offsets[first]), int(ends[stop - 1])
            data = self._disk.read(handle, base, reach - base)
            if len(data) != reach - base:
                raise Corrupt(path, base, "the file ends before the record does")
            starts = offsets[first:stop] - base
            if check is not None:
                topic_id, seqs = check
                places = zip(starts.tolist(), (ends[first:stop] - base).tolist(), seqs[first:stop].tolist())
                for start, end, seq in places:
                    if not is_record(data[start:end], topic_id, seq):
                        raise Corrupt(path, base + start, "this is not the record, or it has changed")
            found.add(data, starts)

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
        directory = self.topic_dir(log.id)
        blocks = self._block_digests(directory, meta) if meta.sealed else None
        path = segment_path(directory, meta, "data")
        segment = _OpenSegment(self._disk.open(path), path, blocks, sealed=meta.sealed)
        self._open[key] = segment
        if len(self._open) > OPEN_SEGMENTS_MAX:
            _, oldest = self._open.popitem(last=False)
            self._disk.close(oldest.handle)
        return segment

    def _block_digests(self, directory: str, meta: SegmentMeta) -> list[bytes] | None:
        try:
            return read_sum(self._disk, directory, meta.first_seq, meta.generation)[0].blocks
        except (Corrupt, FileNotFoundError):
            return None  # the records have digests of their own

    def _verify_blocks(self, segment: _OpenSegment, start: int, end: int) -> None:
        assert segment.blocks is not None
        for block in range(start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1):
            if block in segment.verified:
                continue
            data = self._disk.read(segment.handle, block * BLOCK_BYTES, BLOCK_BYTES)
            if block >= len(segment.blocks) or xxh(data) != segment.blocks[block]:
                raise Corrupt(segment.path, block * BLOCK_BYTES, "a block does not agree with its digest")
            segment.verified.add(block)

    def distrust(self) -> None:
        """Check everything anew when it is read next."""
        self._checked.clear()
        for segment in self._open.values():
            segment.verified.clear()
            segment.checked = _CheckedRows()

    def close_segment(self, topic_id: int, first_seq: int, generation: int) -> None:
        segment = self._open.pop((topic_id, first_seq, generation), None)
        if segment is not None:
            self._disk.close(segment.handle)

    def close_topic(self, topic_id: int) -> None:
        for key in [key for key in self._open if key[0] == topic_id]:
            self._disk.close(self._open.pop(key).handle)
        self.cold.forget_topic(topic_id)
        for key in [key for key in self._cold_sums if key[0] == topic_id]:
            del self._cold_sums[key]

    def close(self) -> None:
        for segment in self._open.values():
            self._disk.close(segment.handle)
        self._open.clear()


def _spans_of(chunk: Chunk, rows: Picked) -> tuple[Offsets, Offsets]:
    """The first and the last block of each row's frame."""
    taken = chunk.take(rows)
    starts = taken["offset"].astype(np.int64)
    return starts // BLOCK_BYTES, (starts + taken["length"] - 1) // BLOCK_BYTES


def _blocks_of(chunk: Chunk, rows: Picked) -> list[int]:
    firsts, lasts = _spans_of(chunk, rows)
    found: list[int] = np.unique(np.concatenate((firsts, lasts, (firsts + lasts) // 2))).tolist()
    return found  # a frame is little more than a block at most: it touches three of them


def _blocks_added(chunk: Chunk, rows: Picked) -> Offsets:
    """How many blocks each row needs that those before it do not."""
    firsts, lasts = _spans_of(chunk, rows)
    before = np.concatenate(([-1], lasts[:-1]))
    return lasts - np.maximum(firsts - 1, before)
