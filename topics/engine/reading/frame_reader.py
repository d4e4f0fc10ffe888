"""Frames as a read finds them: in which buffer each one starts, and how they come out of a file."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from topics.api import limits
from topics.api.errors import Corrupt
from topics.engine.core.ports import Disk
from topics.engine.reading.selection import Picked
from topics.engine.storage.frames import ERASED, FLAGS_AT, is_record

Offsets = npt.NDArray[np.int64]
# Topic and seqs of the records that should be found, if they are to be checked.
Expected = tuple[int, Picked] | None


class Frames:
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


def read_frames(
    disk: Disk, handle: int, path: str, offsets: Offsets, lengths: Offsets, found: Frames, check: Expected
) -> None:
    """Fetch frames by as few reads as their gaps allow."""
    ends = offsets + lengths
    between = offsets[1:] - ends[:-1]
    cuts = (np.flatnonzero((between < 0) | (between > limits.READ_GAP_BYTES)) + 1).tolist()
    for first, stop in zip([0, *cuts], [*cuts, len(offsets)], strict=True):
        base, reach = int(offsets[first]), int(ends[stop - 1])
        data = disk.read(handle, base, reach - base)
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
