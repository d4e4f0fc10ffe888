"""Segment stores: the one on a disk, and how segment files are read and deleted in any of them.

A DiskSegmentStore writes each file to a staging directory and renames it into place:

    <root>/topics/<id>/seg-…              as on the hot tier
    <root>/staging/<process>/incoming     the file being written; left behind if the process was killed
    <root>/staging/plans/<plan id>/       files that jobs make for a merge plan; listed only on request

Under one staging name only one process at a time may put and delete. Any number of processes may read.
"""

from __future__ import annotations

import builtins
from collections.abc import Generator, Iterable
from functools import partial

from topics.api.errors import Corrupt
from topics.api.limits import SLICE_TOPICS
from topics.engine.core.ports import Disk, SegmentStore
from topics.engine.core.tasks import Blocking, Steps
from topics.engine.storage.files import ensure_dir, parent
from topics.engine.storage.segments import SegmentMeta, segment_path

COLD_IO_KIND = "cold_move"  # of blocking calls
PLANS_PREFIX = "staging/plans/"
INDEX_SUFFIXES = ("idx", "dict", "sum")  # on the hot tier as well
SEGMENT_SUFFIXES = ("data", *INDEX_SUFFIXES)  # in the order of copying
# Sync in steps: a small synced write on the same disk waits for one step, not for a whole segment.
SYNC_BYTES = 2 << 20


def read_small_file(store: SegmentStore, key: str, bytes_max: int) -> bytes:
    """A whole file. Corrupt if it is longer than any file that a server writes there."""
    size = store.length(key)
    if size > bytes_max:
        raise Corrupt(key, bytes_max, f"has {size} bytes, more than the limit of {bytes_max}")
    return store.read_range(key, 0, size)


def delete_segment(store: SegmentStore, directory: str, meta: SegmentMeta) -> None:
    """Delete the files of a segment, .sum first: a .sum must not be left without the files it covers."""
    for suffix in reversed(SEGMENT_SUFFIXES):
        store.delete(segment_path(directory, meta, suffix))


def delete_keys(store: SegmentStore, keys: list[str]) -> Steps:
    """Delete files off the loop, the .sum files first."""

    def delete(some: list[str]) -> None:
        for key in some:
            store.delete(key)

    keys = sorted(keys, key=lambda key: (not key.endswith(".sum"), key))
    for first in range(0, len(keys), SLICE_TOPICS):
        yield Blocking(COLD_IO_KIND, partial(delete, keys[first : first + SLICE_TOPICS]))


class DiskSegmentStore:
    """A SegmentStore in a directory."""

    def __init__(self, disk: Disk, staging: str = "staging/0") -> None:
        self._disk = disk
        self._incoming = f"{staging}/incoming"
        self._has_leftover = True  # of an interrupted put, which may contain records to be erased

    def put(self, key: str, pieces: Iterable[bytes]) -> None:
        for _ in self.put_steps(key, pieces):
            pass

    def put_steps(self, key: str, pieces: Iterable[bytes]) -> Generator[None, None, None]:
        disk = self._disk
        self._remove_leftover()
        ensure_dir(disk, parent(self._incoming))
        self._has_leftover = True
        handle = disk.open(self._incoming, create=True)
        try:
            offset = synced = 0
            for piece in pieces:
                if offset:
                    yield
                disk.write(handle, offset, piece)
                offset += len(piece)
                if offset - synced >= SYNC_BYTES:
                    disk.sync(handle)
                    synced = offset
            disk.sync(handle)
        finally:
            disk.close(handle)
        ensure_dir(disk, parent(key))
        disk.rename(self._incoming, key)
        self._has_leftover = False
        disk.sync_dir(parent(key))
        # If only the target directory were synced, the file could come back under its old name, too.
        disk.sync_dir(parent(self._incoming))

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        handle = self._disk.open(key)
        try:
            return self._disk.read(handle, offset, length)
        finally:
            self._disk.close(handle)

    def delete(self, key: str) -> None:
        self._remove_leftover()
        directory = parent(key)
        if not self._disk.exists(directory):
            return
        self._disk.remove(key)
        self._disk.sync_dir(directory)
        while not self._disk.list(directory):
            self._disk.remove_dir(directory)
            directory = parent(directory)
            if not directory.startswith(PLANS_PREFIX):
                return  # jobs may create nested directories

    def list(self, prefix: str) -> builtins.list[str]:
        found: builtins.list[str] = []
        self._walk(parent(prefix), found)
        # Unfinished files are hidden; the files of plans are shown on request.
        hidden = "staging/" if not prefix.startswith(PLANS_PREFIX) else "\0"
        return sorted(key for key in found if key.startswith(prefix) and not key.startswith(hidden))

    def exists(self, key: str) -> bool:
        return self._disk.exists(key)

    def length(self, key: str) -> int:
        handle = self._disk.open(key)
        try:
            return self._disk.size(handle)
        finally:
            self._disk.close(handle)

    def _walk(self, directory: str, found: builtins.list[str]) -> None:
        for name in self._disk.list(directory):
            path = f"{directory}/{name}" if directory else name
            try:
                self._walk(path, found)
            except NotADirectoryError:
                found.append(path)

    def _remove_leftover(self) -> None:
        """Remove the staging file of an interrupted put."""
        if self._has_leftover:
            directory = parent(self._incoming)
            if self._disk.exists(self._incoming):
                self._disk.remove(self._incoming)
            if self._disk.exists(directory):
                self._disk.sync_dir(directory)
            self._has_leftover = False
