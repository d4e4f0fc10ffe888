"""Tiered disk: both tiers as one disk, for tools. A `.data` file that is not on the hot tier is read from the cold tier.

Verification and salvage need not know where a segment is. The cold tier is only read, and calls block until the store answers,
so it is not for a server.
"""

from __future__ import annotations

import builtins
import errno

from topics.engine.core.ports import Disk, SegmentStore


class TieredDisk:
    def __init__(self, hot: Disk, cold: SegmentStore, topics_dir: str = "topics") -> None:
        self.hot = hot
        self._cold = cold
        self._root = topics_dir
        self._names: dict[str, builtins.list[str]] | None = None  # by directory; the root has the directories
        self._handles: dict[int, tuple[str, int]] = {}
        self._next_handle = -1  # negative, unlike the handles of the hot tier

    # -- files ---------------------------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False) -> int:
        try:
            return self.hot.open(path, create=create)
        except FileNotFoundError:
            if path in self._listed():
                raise IsADirectoryError(errno.EISDIR, "is a directory", path) from None
            if not self._is_cold(path):
                raise
        handle, self._next_handle = self._next_handle, self._next_handle - 1
        self._handles[handle] = path, self._cold.length(path)
        return handle

    def close(self, handle: int) -> None:
        if handle < 0:
            del self._handles[handle]
        else:
            self.hot.close(handle)

    def size(self, handle: int) -> int:
        return self._handles[handle][1] if handle < 0 else self.hot.size(handle)

    def read(self, handle: int, offset: int, length: int) -> bytes:
        if handle < 0:
            return self._cold.read_range(self._handles[handle][0], offset, length)
        return self.hot.read(handle, offset, length)

    def write(self, handle: int, offset: int, data: bytes) -> None:
        self.hot.write(self._writable(handle), offset, data)

    def truncate(self, handle: int, length: int) -> None:
        self.hot.truncate(self._writable(handle), length)

    def allocate(self, handle: int, length: int) -> None:
        self.hot.allocate(self._writable(handle), length)

    def sync(self, handle: int) -> None:
        self.hot.sync(self._writable(handle))

    # -- names ---------------------------------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        return self.hot.exists(path) or self._is_cold(path) or path in self._listed()

    def list(self, path: str) -> builtins.list[str]:
        return sorted({*self.hot.list(path), *self._listed().get(path, [])})

    def make_dir(self, path: str) -> None:
        self.hot.make_dir(path)

    def rename(self, old: str, new: str) -> None:
        self.hot.rename(old, new)

    def remove(self, path: str) -> None:
        self.hot.remove(path)

    def remove_dir(self, path: str) -> None:
        self.hot.remove_dir(path)

    def sync_dir(self, path: str) -> None:
        self.hot.sync_dir(path)

    def sync_all(self) -> None:
        self.hot.sync_all()

    def free_bytes(self) -> int:
        return self.hot.free_bytes()

    def boot_id(self) -> str:
        return self.hot.boot_id()

    def random_u64(self) -> int:
        return self.hot.random_u64()

    # -- cold tier -----------------------------------------------------------------------------------------

    def _writable(self, handle: int) -> int:
        if handle < 0:
            raise OSError(errno.EROFS, "the cold tier is read-only", self._handles[handle][0])
        return handle

    def _is_cold(self, path: str) -> bool:
        directory, _, name = path.rpartition("/")
        return name in self._listed().get(directory, [])

    def _listed(self) -> dict[str, builtins.list[str]]:
        """The .data files of the cold tier. Listed once: the caller holds the locks of both tiers."""
        if self._names is None:
            self._names = {}
            for key in self._cold.list(f"{self._root}/"):
                directory, _, name = key.rpartition("/")
                if name.endswith(".data") and directory.count("/") == 1:
                    self._names.setdefault(directory, []).append(name)
            if self._names:
                self._names[self._root] = [directory.rpartition("/")[2] for directory in self._names]
        return self._names
