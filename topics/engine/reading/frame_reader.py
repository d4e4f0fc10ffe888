"""Reading frames from a file, and collecting them as buffers with offsets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from topics.api import limits
from topics.api.errors import Corrupt
from topics.engine.core.ports import Disk
from topics.engine.reading.selection import Picked
from topics.engine.storage.frames import ERASED, FLAGS_AT, is_record

Offsets = npt.NDArray[np.int64]
# Topic id and seqs that the frames must have; None: not checked.
Expected = tuple[int, Picked] | None


class FrameBuffers:
    """The frames of a page: buffers, and the offsets of the frames in each of them."""

    __slots__ = ("_starts", "buffers")

    def __init__(self, buffers: list[bytes]) -> None:
        self.buffers = buffers
        self._starts: list[Offsets] = []

    def add(self, buffer: bytes, starts: Offsets) -> None:
        self.buffers.append(buffer)
        self._starts.append(starts)

    def check_erased(self, first: int, path: str) -> None:
        """Raise Corrupt for an erased record from buffer `first` on: only live records are read, so its delete was lost."""
        for buffer, starts in zip(
            self.buffers[first:], self._starts[first - len(self.buffers) :], strict=True
        ):
            if (np.frombuffer(buffer, np.uint8)[starts + FLAGS_AT] & ERASED).any():
                raise Corrupt(path, 0, "an erased record is not marked as deleted")

    def columns(self) -> tuple[Offsets, Offsets | None]:
        """The offset of each frame, and the index of its buffer (None if there is only one buffer)."""
        if len(self.buffers) == 1:
            return self._starts[0], None
        which = np.repeat(np.arange(len(self.buffers)), [len(starts) for starts in self._starts])
        return np.concatenate(self._starts), which


def read_frames(
    disk: Disk,
    handle: int,
    path: str,
    offsets: Offsets,
    lengths: Offsets,
    found: FrameBuffers,
    expected: Expected,
) -> None:
    """Read frames at ascending offsets; frames with small gaps between them are read by one call."""
    ends = offsets + lengths
    between = offsets[1:] - ends[:-1]
    cuts = (np.flatnonzero((between < 0) | (between > limits.READ_GAP_BYTES)) + 1).tolist()
    for first, stop in zip([0, *cuts], [*cuts, len(offsets)], strict=True):
        base, reach = int(offsets[first]), int(ends[stop - 1])
        data = disk.read(handle, base, reach - base)
        if len(data) != reach - base:
            raise Corrupt(path, base, "the file ends inside a record")
        starts = offsets[first:stop] - base
        if expected is not None:
            topic_id, seqs = expected
            spans = zip(starts.tolist(), (ends[first:stop] - base).tolist(), seqs[first:stop].tolist())
            for start, end, seq in spans:
                if not is_record(data[start:end], topic_id, seq):
                    raise Corrupt(path, base + start, f"record {seq} is damaged, or a different record")
        found.add(data, starts)
