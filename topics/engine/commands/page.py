"""One page of a read: columns, and the buffers that its records lie in."""

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


@dataclass(slots=True)
class Page:
    """Rows of one diff: columns, and for each record where its frame lies in `buffers[which[i]]`."""

    topic: str
    seqs: list[int]
    timestamps: Column
    flags: Column
    tags: list[bytes | None] | None
    nodes: list[bytes | None] | None
    frames: list[bytes]  # buffers that hold frames
    which: Column | None  # per record the buffer; None: all in frames[0]
    starts: Column  # offset of the frame in its buffer
    lengths: Column  # of the whole frame
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    tombstone: Tombstone | None
    scanned: int
    more: bool = False  # of an answer by tag: further tags follow
    cold_segments: int = 0  # how many segments of the cold tier its records came from
    epoch: str = ""  # of the topic, if it was asked for

    @property
    def size(self) -> int:
        return int(np.sum(self.lengths))


@dataclass(slots=True)
class FramePage:
    """The rows of one diff as their frames alone, back to back in seq order over all `chunks`."""

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
