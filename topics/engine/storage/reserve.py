"""Space that a shard holds for the time when the disk is full: a file of zeros that gives way to what a start and a checkpoint must write.

Deletes are the way out of a full disk. They need a shard that starts, which takes a fresh log file, and a checkpoint, without which no
segment is unlinked. One half of the reserve is for starts alone, so that a checkpoint that does not fit takes nothing from them.
"""

from __future__ import annotations

from topics.engine.core.ports import Disk
from topics.engine.storage.files import is_full, parent

RESERVE_NAME = "reserve"


class Reserve:
    """At most `wanted` bytes in the file `path`; none when that is 0."""

    def __init__(self, disk: Disk, path: str, wanted: int) -> None:
        self._disk = disk
        self._path = path
        self._wanted = wanted
        self.held = 0

    @property
    def is_whole(self) -> bool:
        return self.held >= self._wanted

    def look(self) -> None:
        """How much an earlier run has left."""
        if not self._wanted:
            return
        try:
            if not self._disk.exists(self._path):
                return
            handle = self._disk.open(self._path)
        except OSError:
            self._wanted = 0  # a directory, or somebody else's file: go without
            return
        self.held = self._disk.size(handle)
        self._disk.close(handle)

    def fill(self) -> None:
        """Make it whole. On a full disk what there is space for stays, and the error is raised."""
        if self.is_whole:
            return
        try:
            handle = self._disk.open(self._path, create=True)
            try:
                self._disk.allocate(handle, self._wanted)
                self._disk.sync(handle)
            finally:
                self.held = self._disk.size(handle)
                self._disk.close(handle)
            self._disk.sync_dir(parent(self._path))
        except OSError as error:
            if is_full(error):
                raise
            self._wanted = 0

    @property
    def for_checkpoint(self) -> int:
        """What is left of the half that is not for starts."""
        return max(0, self.held - self._wanted // 2)

    def release(self, size: int) -> None:
        """Let go of so many bytes, or of all there are."""
        kept = max(0, self.held - size)
        if kept == self.held:
            return
        handle = self._disk.open(self._path)
        try:
            self._disk.truncate(handle, kept)
            self._disk.sync(handle)  # some file systems give the space back only then
        finally:
            self._disk.close(handle)
        self.held = kept
