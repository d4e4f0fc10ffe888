"""The row index of one topic: chunks ordered by seq, and the location of bytes that are not in a segment yet.

"Live" here means live in the staged state: records of a delete that waits for its sync are already dead.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from topics.api.limits import SLICE_ROWS
from topics.engine.storage.frames import DEAD
from topics.engine.storage.index import SMALL, Chunk, Column, Ints, Rows, Times
from topics.engine.storage.strings import StringTable
from topics.engine.topic.tags import TagIndex

# The number of a log file, a RAM block of records that are never logged, or the frames of a small topic from its
# snapshot row.
Location = int | bytearray | bytes


class TopicRows:
    __slots__ = (
        "_rows_max",
        "_segment_bytes_max",
        "_starts",
        "chunks",
        "expiries",
        "first_seq",
        "next_seq",
        "nodes",
        "ram_bytes",
        "runs",
        "tags",
    )

    def __init__(self, *, segment_max_events: int, segment_max_bytes: int) -> None:
        self._rows_max = segment_max_events
        self._segment_bytes_max = segment_max_bytes
        self.next_seq = 1
        self.first_seq = 1  # staged: every row below is dead
        self.chunks: list[Chunk] = []
        self._starts: list[int] = []  # first seq of each chunk
        self.runs: list[tuple[int, Location]] = []  # first seq, and where the bytes are from there on
        self.ram_bytes = 0
        self.tags = TagIndex(hold=True)
        self.nodes = StringTable(hold=True)
        self.expiries: list[tuple[int, int]] = []  # heap of (expiry time, seq) of records with their own TTL

    # -- chunks --------------------------------------------------------------------------------------------

    def chunk_for_append(self, now_ms: int) -> Chunk:
        """The chunk for the next row; opens a new one if the last is full or closed."""
        if self.chunks:
            chunk = self.chunks[-1]
            if (
                not chunk.closed
                and chunk.count < chunk.rows_max
                and chunk.frame_bytes < self._segment_bytes_max
                and chunk.first_seq + chunk.count == self.next_seq
            ):
                return chunk
            self._close_last()
        chunk = Chunk(self.next_seq, self._rows_max, now_ms)
        self.chunks.append(chunk)
        self._starts.append(chunk.first_seq)
        return chunk

    def add_rows(
        self,
        offset: int,
        lengths: list[int],
        ts: int,
        flags: list[int] | None,
        tags: list[int] | None,
        nodes: list[int] | None,
        sizes: list[int],
    ) -> None:
        """Add the rows of one write, whose frames are contiguous from `offset` on."""
        if len(lengths) >= SMALL:
            each = np.array(lengths, dtype=np.int64)
            self.add_columns(np.cumsum(each) - each + offset, each, ts, flags, tags, nodes, sizes)
            return
        chunk = self.chunk_for_append(ts)
        for i, length in enumerate(lengths):
            if chunk.count == chunk.rows_max:
                chunk = self.chunk_for_append(ts)
            chunk.add(
                offset,
                length,
                ts,
                flags[i] if flags is not None else 0,
                tags[i] if tags is not None else 0,
                nodes[i] if nodes is not None else 0,
                sizes[i],
            )
            self.next_seq += 1
            offset += length

    def add_columns(
        self,
        offsets: Column,
        lengths: Column,
        ts: int | Times,
        flags: Ints | None,
        tags: Ints | None,
        nodes: Ints | None,
        sizes: Ints,
    ) -> None:
        """Add rows for the next seqs, across chunks if needed. A column that is None is all 0."""
        count = len(lengths)
        at = 0
        while at < count:
            chunk = self.chunk_for_append(ts if isinstance(ts, int) else int(ts[at]))
            stop = at + min(chunk.room, count - at)
            part = slice(at, stop)
            if stop - at < SMALL:
                rows = zip(
                    offsets[part].tolist(),
                    lengths[part].tolist(),
                    repeat(ts) if isinstance(ts, int) else ts[part].tolist(),
                    _values(flags, part),
                    _values(tags, part),
                    _values(nodes, part),
                    _values(sizes, part),
                )
                for row in rows:
                    chunk.add(*row)
            else:
                chunk.add_batch(
                    offsets[part],
                    lengths[part],
                    ts if isinstance(ts, int) else ts[part],
                    flags[part] if flags is not None else None,
                    tags[part] if tags is not None else None,
                    nodes[part] if nodes is not None else None,
                    sizes[part],
                )
            self.next_seq += stop - at
            at = stop

    def _close_last(self) -> None:
        last = self.chunks[-1]
        if last.count:
            last.closed = True
        else:
            self.chunks.pop()
            self._starts.pop()

    def prepend_chunks(self, chunks: list[Chunk]) -> None:
        """Insert chunks that were read from segments before the present ones."""
        self.chunks = chunks + self.chunks
        self._starts = [chunk.first_seq for chunk in self.chunks]

    def remove_chunk(self, chunk: Chunk) -> None:
        self.chunks.remove(chunk)
        self._starts = [c.first_seq for c in self.chunks]

    def replace_chunks(self, old: Sequence[Chunk], merged: Chunk) -> None:
        """Replace neighbouring chunks by one with the same rows."""
        at = self.chunks.index(old[0])
        assert self.chunks[at : at + len(old)] == list(old), "neighbours, in order"
        assert merged.count == sum(chunk.count for chunk in old)
        self.chunks[at : at + len(old)] = [merged]
        self._starts = [chunk.first_seq for chunk in self.chunks]

    def spans(self, first_seq: int, stop_seq: int) -> Iterator[tuple[Chunk, int, int]]:
        """(chunk, first row, stop row) spans that cover the seqs [first_seq, stop_seq)."""
        i = max(0, bisect_right(self._starts, first_seq) - 1)
        while i < len(self.chunks):
            chunk = self.chunks[i]
            if chunk.first_seq >= stop_seq:
                return
            first = max(0, first_seq - chunk.first_seq)
            stop = min(chunk.count, stop_seq - chunk.first_seq)
            if first < stop:
                yield chunk, first, stop
            i += 1

    def find(self, seq: int) -> tuple[Chunk, int] | None:
        i = bisect_right(self._starts, seq) - 1
        if i < 0:
            return None
        chunk = self.chunks[i]
        row = seq - chunk.first_seq
        return (chunk, row) if row < chunk.count else None

    # -- live records --------------------------------------------------------------------------------------

    def are_live(self, seqs: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which of these ascending seqs are live in the staged state."""
        alive = np.zeros(len(seqs), dtype=np.bool_)
        if len(seqs) < 8:
            for k in range(len(seqs)):
                alive[k] = self.is_live(int(seqs[k]))
            return alive
        lo, starts = 0, self._starts
        while lo < len(seqs):  # only chunks that contain some of them: a topic may have thousands
            i = bisect_right(starts, int(seqs[lo])) - 1
            hi = int(seqs.searchsorted(np.uint64(starts[i + 1]))) if i + 1 < len(starts) else len(seqs)
            if i >= 0:
                chunk = self.chunks[i]
                rows = (seqs[lo:hi] - np.uint64(chunk.first_seq)).astype(np.intp)
                inside = rows < chunk.count
                picked = chunk.rows[rows[inside]]
                good = ((picked["flags"] & DEAD) == 0) & (picked["length"] != 0)
                part = np.zeros(hi - lo, dtype=np.bool_)
                part[inside] = good
                alive[lo:hi] = part
            lo = hi
        return alive & (seqs >= np.uint64(self.first_seq))

    def is_live(self, seq: int) -> bool:
        if seq < self.first_seq:
            return False
        found = self.find(seq)
        return (
            found is not None and not found[0].flags_at(found[1]) & DEAD and found[0].length_at(found[1]) > 0
        )

    def count_live(self, first_seq: int, stop_seq: int) -> int:
        """The number of live records in [first_seq, stop_seq)."""
        spans = self.spans(max(first_seq, self.first_seq), stop_seq)
        return sum(int(chunk.live(first, stop, DEAD).sum()) for chunk, first, stop in spans)

    def live_in(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """The live seqs in these inclusive ranges."""
        found: list[int] = []
        for first_seq, last_seq in ranges:
            if first_seq == last_seq:
                found += [first_seq] if self.is_live(first_seq) else []
                continue
            for chunk, first, stop in self.spans(max(first_seq, self.first_seq), last_seq + 1):
                found += (np.flatnonzero(chunk.live(first, stop, DEAD)) + (chunk.first_seq + first)).tolist()
        return found

    def span_before(self, stop_seq: int, rows: int) -> tuple[Chunk, int, int] | None:
        """The last span below `stop_seq`, of up to `rows` rows; None if nothing is left above `first_seq`."""
        i = bisect_right(self._starts, stop_seq - 1) - 1
        while i >= 0:
            chunk = self.chunks[i]
            stop = min(chunk.count, stop_seq - chunk.first_seq)
            first = max(0, stop - rows, self.first_seq - chunk.first_seq)
            if first < stop:
                return chunk, first, stop
            if chunk.first_seq <= self.first_seq:
                return None
            i -= 1
        return None

    def last_live(self, stop_seq: int) -> int:
        """The last live seq below `stop_seq`, or 0."""
        for chunk in reversed(self.chunks):
            stop = min(chunk.count, stop_seq - chunk.first_seq)
            alive = np.flatnonzero(chunk.live(0, max(stop, 0), DEAD))
            if len(alive):
                last = chunk.first_seq + int(alive[-1])
                return last if last >= self.first_seq else 0
        return 0

    def tag_counts(self, first_seq: int, stop_seq: int) -> list[tuple[bytes | None, int]]:
        """(tag, count) pairs of the live records in [first_seq, stop_seq); a tag may appear several times."""
        names = self.tags.strings.names
        found: list[tuple[bytes | None, int]] = []
        for chunk, first, stop in self.spans(max(first_seq, self.first_seq), stop_seq):
            if stop - first < SMALL:
                for row in range(first, stop):
                    _, length, _, flags, tag, _, _ = chunk.get(row)
                    if length and not flags & DEAD:
                        found.append((names[tag] if tag else None, 1))
                continue
            ids = chunk.rows["tag"][first:stop][chunk.live(first, stop, DEAD)]
            each, counts = np.unique(ids, return_counts=True)
            found += [(names[tag] if tag else None, n) for tag, n in zip(each.tolist(), counts.tolist())]
        return found

    def delete_slice(self, first_seq: int, stop_seq: int) -> tuple[int, int]:
        """Where one slice of a delete of [first_seq, stop_seq) ends, and its estimated cost in microseconds.

        Most of the cost is per distinct tag and node.
        """
        if stop_seq - first_seq < SMALL:
            return stop_seq, 4 * (stop_seq - first_seq)
        for chunk, first, stop in self.spans(first_seq, stop_seq):
            rows = chunk.rows[first : min(stop, first + SLICE_ROWS)]
            few = rows[: 2 * SMALL]
            strings = _count_strings(few)
            if strings <= SMALL and len(rows) > len(
                few
            ):  # counting over all of them is slow, so only if needed
                strings = _count_strings(rows)
            if strings > SMALL:
                rows, strings = few, min(strings, 4 * SMALL)
            return chunk.first_seq + first + len(rows), len(rows) // 16 + 4 * strings
        return stop_seq, 0

    def eviction_end(self, records: int, size: int) -> int:
        """The last seq to evict so that at least `records` records and `size` bytes are removed from the front."""
        last = 0
        for chunk, first, stop in self.spans(self.first_seq, self.next_seq):
            if records < SMALL and size <= 0:
                for row in range(first, stop):
                    if records <= 0:
                        return last
                    if not chunk.flags_at(row) & DEAD and chunk.length_at(row):
                        records -= 1
                        last = chunk.first_seq + row
                if records <= 0:
                    return last
                continue
            picked = np.nonzero(chunk.live(first, stop, DEAD))[0]
            if not len(picked):
                continue
            sizes = np.cumsum(chunk.rows["size"][first:stop][picked], dtype=np.int64)
            enough = max(records, int(np.searchsorted(sizes, size)) + 1 if size > 0 else 0)
            if enough <= len(picked):
                return chunk.first_seq + first + int(picked[enough - 1])
            last = chunk.first_seq + first + int(picked[-1])
            records -= len(picked)
            size -= int(sizes[-1])
        return last

    def add_expiries(self, entries: Iterable[tuple[int, int]]) -> None:
        """Note seq and expiry time of records with a TTL of their own, ascending, whose rows have been added."""
        chunk: Chunk | None = None
        for seq, time in entries:
            heapq.heappush(self.expiries, (time, seq))
            if chunk is None or seq >= chunk.next_seq:
                found = self.find(seq)
                assert found is not None, "a row of every record"
                chunk = found[0]
            if not isinstance(chunk.expiries, list):
                chunk.expiries = []
            chunk.expiries.append((seq - chunk.first_seq, time))

    def expired_records(self, now_ms: int, limit: int) -> tuple[list[int], bool]:
        """Live records whose own TTL has expired, checking up to `limit`; and whether more are left to check."""
        expiries = self.expiries
        due: list[int] = []
        while expiries and expiries[0][0] < now_ms:
            if not limit:
                return sorted(due), True
            limit -= 1
            seq = heapq.heappop(expiries)[1]
            if self.is_live(seq):
                due.append(seq)
        return sorted(due), False

    def rebuild_strings(self) -> None:
        """Rebuild tags and nodes from the rows: the tables include changes that were discarded."""
        tags, nodes = TagIndex(hold=True), StringTable(hold=True)
        for chunk in self.chunks:
            rows = chunk.rows
            alive = np.nonzero(chunk.live(0, chunk.count, DEAD))[0]
            for i in alive.tolist():
                if chunk.first_seq + i < self.first_seq:
                    continue
                tag, node = int(rows["tag"][i]), int(rows["node"][i])
                if tag:
                    rows["tag"][i] = tags.add(chunk.first_seq + i, self.tags.strings.name(tag))
                if node:
                    rows["node"][i] = nodes.add(self.nodes.name(node))
        self.tags, self.nodes = tags, nodes

    # -- bytes that are not in a segment -------------------------------------------------------------------

    def trim_runs(self, first_seq: int) -> None:
        """Drop log runs and RAM blocks that no row from `first_seq` on needs."""
        keep = find_run(self.runs, first_seq)
        if keep > 0:
            for _, where in self.runs[:keep]:
                if isinstance(where, bytearray):
                    self.ram_bytes -= len(where)
            del self.runs[:keep]

    def is_in_ram(self, chunk: Chunk) -> bool:
        """Whether a chunk's unstored rows are in RAM blocks; a chunk never mixes them with logged ones."""
        if chunk.stored or not chunk.count:
            return False
        run = self.run_at(chunk.next_seq - 1)  # the last row: blocks of dead first rows may have been dropped
        return run >= 0 and isinstance(self.runs[run][1], bytearray)

    def trim_stored_runs(self) -> None:
        """Drop log runs below the first row that is not in a segment."""
        first = next((c.first_seq + c.stored for c in self.chunks if c.stored < c.count), self.next_seq)
        keep = [
            run
            for i, run in enumerate(self.runs)
            if isinstance(run[1], bytearray) or i + 1 == len(self.runs) or self.runs[i + 1][0] > first
        ]
        if first == self.next_seq:
            keep = [run for run in keep if isinstance(run[1], bytearray)]
        self.runs = keep

    def release_ram(self) -> int:
        """Drop RAM blocks whose rows are now in segments; returns the (negative) change of RAM bytes."""
        if not self.ram_bytes:
            return 0
        before = self.ram_bytes
        kept: list[tuple[int, Location]] = []
        for i, (seq, where) in enumerate(self.runs):
            until = self.runs[i + 1][0] if i + 1 < len(self.runs) else self.next_seq
            spans = list(self.spans(seq, until))
            if isinstance(where, bytearray) and spans and all(c.stored >= stop for c, _, stop in spans):
                self.ram_bytes -= len(where)
            else:
                kept.append((seq, where))
        self.runs = kept
        return self.ram_bytes - before

    def move_to_block(self, first_seq: int, stop_seq: int, block: bytes) -> None:
        """Relocate the rows [first_seq, stop_seq) to `block`; later rows stay where they are."""
        rest: list[tuple[int, Location]] = []
        if stop_seq < self.next_seq:
            at = find_run(self.runs, stop_seq)
            rest = [(stop_seq, self.runs[at][1]), *self.runs[at + 1 :]]
        self.runs = [(first_seq, block), *rest]

    def front_is_in_ram(self, last_seq: int) -> bool:
        """Whether all live records up to `last_seq` are only in RAM blocks."""
        run = self.run_at(self.first_seq)
        if run < 0 or not isinstance(self.runs[run][1], bytearray):
            return False
        first_logged = next((seq for seq, where in self.runs[run:] if isinstance(where, int)), self.next_seq)
        return last_seq < first_logged and all(
            not chunk.stored for chunk, _, _ in self.spans(self.first_seq, last_seq + 1)
        )

    def shift_rows(self, first_seq: int, shift: int, file_number: int) -> None:
        """Relocate the rows from `first_seq` on to another log file, with offsets shifted by `shift`."""
        for chunk, first, stop in self.spans(first_seq, self.next_seq):
            offsets = chunk.rows["offset"][first:stop]
            offsets += np.uint32(shift & 0xFFFF_FFFF)  # wraps around, so a negative shift works too
        while self.runs and self.runs[-1][0] >= first_seq:
            self.runs.pop()
        self.runs.append((first_seq, file_number))

    def run_at(self, seq: int) -> int:
        """Index in `runs` of the run that contains `seq`."""
        return find_run(self.runs, seq)


def _count_strings(rows: Rows) -> int:
    return len(np.unique(rows["tag"])) + len(np.unique(rows["node"]))


def _values(column: Ints | None, part: slice) -> Iterable[int]:
    if column is None:
        return repeat(0)
    if isinstance(column, list):
        return column[part]
    values: list[int] = column[part].tolist()
    return values


def _run_seq(run: tuple[int, Location]) -> int:
    return run[0]


def find_run(runs: list[tuple[int, Location]], seq: int) -> int:
    """Index of the run that contains `seq`."""
    return bisect_right(runs, seq, key=_run_seq) - 1
