"""A page of a few records that are all in memory, made record by record: numpy would cost more than it saves."""

from __future__ import annotations

from dataclasses import dataclass, field

from topics.engine.commands.topics import Page
from topics.engine.reading.tail_cache import TailCache
from topics.engine.storage.frames import DEAD
from topics.engine.storage.index import Chunk
from topics.engine.topic.log import TopicLog
from topics.engine.topic.rows import find_run

LOOKED_AT_MAX = 64  # rows, dead ones included


@dataclass(slots=True)
class SmallPages:
    """The columns of a page as plain lists."""

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
    # The log entry that the last one was found in: the file, where it begins there, its length.
    where: object = None
    begins: int = 0
    size: int = 0

    def page(self) -> Page:
        log = self.log
        page = Page.empty(log.name, next_from_seq=0, head_seq=log.view.head, earliest_seq=log.first_seq)
        page.seqs, page.timestamps, page.flags = self.seqs, self.timestamps, self.flags
        page.tags, page.nodes = self.tags, self.nodes
        page.frames, page.which = self.frames, self.which
        page.starts, page.lengths = self.starts, self.lengths
        return page

    def take(self, cursor: int, stop: int, limit: int, budget: int) -> int | None:
        """As `undelivered` and `fill` of a reader do: add live records of [cursor, stop).

        Returns the seq behind the last one; None when it is not as simple as that.
        """
        log = self.log
        after = max(cursor, log.first_seq)
        left = LOOKED_AT_MAX
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
        """Add these records, if all are in memory."""
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
        # Neighbours lie in one entry of the log: what was found for one is looked at for the next.
        at = offset - self.begins
        if where != self.where or at < 0 or at + length > self.size:
            cached = self.cache.find(where, offset, length) if isinstance(where, int) else None
            if cached is None:
                return False
            self.frames.append(cached[0])
            at = cached[1]
            self.where, self.begins, self.size = where, offset - at, len(cached[0])
        self.seqs.append(seq)
        self.timestamps.append(ts)
        self.flags.append(flags & (0xFF ^ DEAD))
        self.lengths.append(length)
        self.starts.append(at)
        self.which.append(len(self.frames) - 1)
        self.tags.append(log.tags.strings.names[tag] if tag else None)
        self.nodes.append(log.nodes.names[node] if node else None)
        return True
