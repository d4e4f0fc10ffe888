"""Small pages: a few records that are all in memory, collected one by one, where numpy would cost more than it saves."""

from __future__ import annotations

from dataclasses import dataclass, field

from topics.engine.commands.topics import Page
from topics.engine.reading.tail_cache import TailCache
from topics.engine.storage.frames import DEAD
from topics.engine.storage.index import Chunk
from topics.engine.topic.log import TopicLog
from topics.engine.topic.rows import find_run

ROWS_EXAMINED_MAX = 64  # including dead ones


@dataclass(slots=True)
class SmallPage:
    """Builder of a page whose columns are plain lists."""

    log: TopicLog
    cache: TailCache
    seqs: list[int] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    tags: list[bytes | None] = field(default_factory=list)
    nodes: list[bytes | None] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)
    which: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    # The log entry of the last record: file, offset in the file, length.
    entry_file: object = None
    entry_offset: int = 0
    entry_length: int = 0

    def page(self) -> Page:
        log = self.log
        page = Page.empty(log.name, next_from_seq=0, head_seq=log.view.head, earliest_seq=log.first_seq)
        page.seqs, page.timestamps, page.flags = self.seqs, self.timestamps, self.flags
        page.tags, page.nodes = self.tags, self.nodes
        page.frames, page.which = self.frames, self.which
        page.starts, page.lengths = self.starts, self.lengths
        return page

    def take(self, cursor: int, stop: int, limit: int, budget: int) -> int | None:
        """Add live records of [cursor, stop), like `Reader.undelivered` and `fill`.

        Returns the seq after the last one, or None if the general path has to be taken.
        """
        log = self.log
        after = max(cursor, log.first_seq)
        left = ROWS_EXAMINED_MAX
        for chunk, first, until in log.spans(after, stop):
            for row in range(first, until):
                left -= 1
                fields = chunk.get(row)
                if fields[3] & DEAD or not fields[1]:
                    if not left:
                        return None
                    continue
                if self.seqs and fields[6] > budget:
                    return chunk.first_seq + row
                if not left or not self._add(chunk, row, fields):
                    return None
                budget -= fields[6]
                limit -= 1
                if not limit:
                    return chunk.first_seq + row + 1
        return max(stop, after)

    def add(self, seqs: list[int]) -> bool:
        """Add these records; False if one of them is not in memory."""
        for seq in seqs:
            found = self.log.find(seq)
            if found is None or not self._add(*found, found[0].get(found[1])):
                return False
        return True

    def _add(self, chunk: Chunk, row: int, fields: tuple[int, int, int, int, int, int, int]) -> bool:
        offset, length, ts, flags, tag, node, _ = fields
        seq = chunk.first_seq + row
        if row < chunk.stored:
            return False
        log = self.log
        runs = log.runs
        where = runs[-1][1] if runs and runs[-1][0] <= seq else runs[find_run(runs, seq)][1] if runs else None
        # Adjacent records are often in the same log entry, so try the entry of the last record first.
        at = offset - self.entry_offset
        if where != self.entry_file or at < 0 or at + length > self.entry_length:
            cached = self.cache.find(where, offset, length) if isinstance(where, int) else None
            if cached is None:
                return False
            self.frames.append(cached[0])
            at = cached[1]
            self.entry_file, self.entry_offset, self.entry_length = where, offset - at, len(cached[0])
        self.seqs.append(seq)
        self.timestamps.append(ts)
        self.flags.append(flags & (0xFF ^ DEAD))
        self.lengths.append(length)
        self.starts.append(at)
        self.which.append(len(self.frames) - 1)
        self.tags.append(log.tags.strings.names[tag] if tag else None)
        self.nodes.append(log.nodes.names[node] if node else None)
        return True
