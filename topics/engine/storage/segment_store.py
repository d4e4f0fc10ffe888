"""A SegmentStore over a Disk: files in directories, each of them made aside and renamed into its place.

    <root>/topics/<id>/seg-…          as on the hot tier
    <root>/staging/<who>/incoming     the file that is being put; whoever was killed there left it behind
    <root>/staging/plans/<plan id>/   what jobs make for a plan of merges; listed only when asked for

One process may put and delete at a time under one staging name, and any number may read.
"""

from __future__ import annotations

import builtins
from collections.abc import Generator, Iterable

from topics.engine.core.ports import Disk
from topics.engine.storage.files import ensure_dir, parent

PLANS_PREFIX = "staging/plans/"
# Who syncs a small write on the same disk waits behind so much, not behind a whole segment.
SYNC_BYTES = 2 << 20


class DiskSegmentStore:
    def __init__(self, disk: Disk, staging: str = "staging/0") -> None:
        self._disk = disk
        self._incoming = f"{staging}/incoming"
        self._has_left = True  # perhaps something of an earlier put, which may hold what was to be erased

    def put(self, key: str, pieces: Iterable[bytes]) -> None:
        for _ in self.put_steps(key, pieces):
            pass

    def put_steps(self, key: str, pieces: Iterable[bytes]) -> Generator[None, None, None]:
        disk = self._disk
        self._clear()
        ensure_dir(disk, parent(self._incoming))
        self._has_left = True
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
        self._has_left = False
        disk.sync_dir(parent(key))
        # A rename that only the other directory remembers would bring the file back under its old name.
        disk.sync_dir(parent(self._incoming))

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        handle = self._disk.open(key)
        try:
            return self._disk.read(handle, offset, length)
        finally:
            self._disk.close(handle)

    def delete(self, key: str) -> None:
        self._clear()
        directory = parent(key)
        if not self._disk.exists(directory):
            return
        self._disk.remove(key)
        self._disk.sync_dir(directory)
        while not self._disk.list(directory):
            self._disk.remove_dir(directory)
            directory = parent(directory)
            if not directory.startswith(PLANS_PREFIX):
                return  # a job may make directories in directories

    def list(self, prefix: str) -> builtins.list[str]:
        found: builtins.list[str] = []
        self._walk(parent(prefix), found)
        # What is unfinished is nobody's business, but what jobs make for a plan is.
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

    def _clear(self) -> None:
        """Remove what a put left that did not come to its end."""
        if self._has_left:
            directory = parent(self._incoming)
            if self._disk.exists(self._incoming):
                self._disk.remove(self._incoming)
            if self._disk.exists(directory):
                self._disk.sync_dir(directory)
            self._has_left = False
