"""Disk reserve: a file of zeros whose space is released when the disk is full.

Deletes free space on a full disk. They need a running shard, which takes a new log file to start, and a checkpoint, before which no
segment is unlinked. Half of the reserve is for starts only, so that a checkpoint that does not fit cannot use it up.
"""

from __future__ import annotations

from topics.engine.core.ports import Disk
from topics.engine.storage.files import is_full, parent

RESERVE_NAME = "reserve"


class Reserve:
    """Reserves up to `size` bytes in the file `path`; 0: no reserve."""

    def __init__(self, disk: Disk, path: str, size: int) -> None:
        self._disk = disk
        self._path = path
        self._size = size
        self.held = 0

    @property
    def is_complete(self) -> bool:
        return self.held >= self._size

    def load(self) -> None:
        """Find out how much an earlier process reserved."""
        if not self._size:
            return
        try:
            if not self._disk.exists(self._path):
                return
            handle = self._disk.open(self._path)
        except OSError:
            self._size = 0  # a directory, or not accessible: run without a reserve
            return
        self.held = self._disk.size(handle)
        self._disk.close(handle)

    def fill(self) -> None:
        """Allocate the whole reserve. On a full disk it keeps what it could get and raises the error."""
        if self.is_complete:
            return
        try:
            handle = self._disk.open(self._path, create=True)
            try:
                self._disk.allocate(handle, self._size)
                self._disk.sync(handle)
            finally:
                self.held = self._disk.size(handle)
                self._disk.close(handle)
            self._disk.sync_dir(parent(self._path))
        except OSError as error:
            if is_full(error):
                raise
            self._size = 0

    @property
    def for_checkpoint(self) -> int:
        """Bytes that a checkpoint may release: those of the half that is not for starts."""
        return max(0, self.held - self._size // 2)

    def release(self, size: int) -> None:
        """Release up to `size` bytes."""
        kept = max(0, self.held - size)
        if kept == self.held:
            return
        handle = self._disk.open(self._path)
        try:
            self._disk.truncate(handle, kept)
            self._disk.sync(handle)  # some file systems free the space only on a sync
        finally:
            self._disk.close(handle)
        self.held = kept
