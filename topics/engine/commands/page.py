"""Pages: the result of one read, as columns over the buffers that hold the records' frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Column: TypeAlias = Sequence[int] | npt.NDArray[np.integer]


@dataclass(slots=True)
class Tombstone:
    gap_from: int
    gap_to: int
    reason: str
    missed_estimate: int
    earliest_seq: int
    head_seq: int


@dataclass(slots=True, init=False)
class Page:
    """Records of one read, one entry per record in each column. `empty` makes a page; its columns are set afterwards."""

    topic: str
    seqs: list[int]
    timestamps: Column
    flags: Column
    tags: list[bytes | None] | None
    nodes: list[bytes | None] | None
    frames: list[bytes]  # buffers that hold frames
    which: Column | None  # index into `frames`; None: all records are in frames[0]
    starts: Column  # offset of the frame in its buffer
    lengths: Column  # of the whole frame
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    tombstone: Tombstone | None
    scanned: int
    more: bool  # of a read by tag: more tags follow
    cold_segments: int  # how many segments of the cold tier the records came from
    epoch: str  # of the topic, if requested

    @classmethod
    def empty(
        cls,
        topic: str,
        *,
        next_from_seq: int,
        head_seq: int,
        earliest_seq: int,
        tombstone: Tombstone | None = None,
        scanned: int = 0,
        more: bool = False,
    ) -> Page:
        # Not an __init__: calling a class with keywords costs 300 ns more than calling a method.
        page = cls()
        page.topic = topic
        page.seqs = []
        page.timestamps = []
        page.flags = []
        page.tags = None
        page.nodes = None
        page.frames = []
        page.which = None
        page.starts = []
        page.lengths = []
        page.next_from_seq = next_from_seq
        page.head_seq = head_seq
        page.earliest_seq = earliest_seq
        page.tombstone = tombstone
        page.scanned = scanned
        page.more = more
        page.cold_segments = 0
        page.epoch = ""
        return page

    @property
    def size(self) -> int:
        return int(np.sum(self.lengths))

    def take(self, rows: list[int]) -> Page:
        """A page of these records, in this order; the tombstone is left out."""
        at = np.array(rows, dtype=np.intp)
        page = self._without_records(self.next_from_seq, None)
        page.seqs = [self.seqs[i] for i in rows]
        page.timestamps = np.asarray(self.timestamps)[at]
        page.flags = np.asarray(self.flags)[at]
        page.tags = [self.tags[i] for i in rows] if self.tags is not None else None
        page.nodes = [self.nodes[i] for i in rows] if self.nodes is not None else None
        page.which = np.asarray(self.which)[at] if self.which is not None else None
        page.starts = np.asarray(self.starts)[at]
        page.lengths = np.asarray(self.lengths)[at]
        return page

    def slice(self, start: int, stop: int) -> Page:
        """A page of the records [start, stop). The first slice has the tombstone, the last one the page's end."""
        is_last = stop == len(self.seqs)
        page = self._without_records(
            self.next_from_seq if is_last else self.seqs[stop - 1], self.tombstone if start == 0 else None
        )
        page.seqs = self.seqs[start:stop]
        page.timestamps = self.timestamps[start:stop]
        page.flags = self.flags[start:stop]
        page.tags = self.tags[start:stop] if self.tags is not None else None
        page.nodes = self.nodes[start:stop] if self.nodes is not None else None
        page.which = self.which[start:stop] if self.which is not None else None
        page.starts = self.starts[start:stop]
        page.lengths = self.lengths[start:stop]
        return page

    def _without_records(self, next_from_seq: int, tombstone: Tombstone | None) -> Page:
        page = Page.empty(
            self.topic,
            next_from_seq=next_from_seq,
            head_seq=self.head_seq,
            earliest_seq=self.earliest_seq,
            tombstone=tombstone,
            scanned=self.scanned,
        )
        page.frames = self.frames
        return page


@dataclass(slots=True)
class FramePage:
    """Records of one read as frames only, back to back in seq order over all `chunks`."""

    topic: str
    chunks: list[bytes]
    count: int
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    tombstone: Tombstone | None
    scanned: int
    cold_segments: int = 0
    epoch: str = ""

    @property
    def size(self) -> int:
        return sum(map(len, self.chunks))
