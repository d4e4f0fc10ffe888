"""Overlay disk: reads pass through to another disk, writes stay in memory.

Recovery can run on it without changing the data directory, and a repair can be completed before the first file is changed. A
file is its base plus the written pages; a directory is its base plus its entries, once they were listed.
"""

from __future__ import annotations

import builtins
import errno

from topics.engine.core.ports import Disk

PAGE_BYTES = 64 * 1024


class _File:
    """The first `base_bytes` bytes are those of the file `base` below, unless in a page. Bytes after them in no page are zeros."""

    __slots__ = ("base", "base_bytes", "pages", "size")

    def __init__(self, base: str | None, size: int) -> None:
        self.base = base
        self.size = self.base_bytes = size
        self.pages: dict[int, bytearray] = {}

    def changed(self, below: int) -> bool:
        return bool(self.pages) or self.size != below or self.base_bytes != below


class _Dir:
    __slots__ = ("base", "entries")

    def __init__(self, base: str | None) -> None:
        self.base = base
        self.entries: dict[str, _Node | None] | None = {} if base is None else None  # None: not listed yet


_Node = _File | _Dir


class OverlayDisk:
    """A Disk whose changes are kept in memory over `below`, which is only read."""

    def __init__(self, below: Disk) -> None:
        self._below = below
        self._root = _Dir("")
        self._handles: dict[int, tuple[_File, int | None]] = {}
        self._next_handle = 1

    # -- files ---------------------------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False) -> int:
        node = self._find(path)
        if isinstance(node, _Dir):
            raise OSError(errno.EISDIR, "is a directory", path)
        if node is None:
            if not create:
                raise OSError(errno.ENOENT, "no such file", path)
            directory, name = self._parent(path)
            node = _File(None, 0)
            directory[name] = node
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._handles[handle] = node, None if node.base is None else self._below.open(node.base)
        return handle

    def close(self, handle: int) -> None:
        below = self._handles.pop(handle)[1]
        if below is not None:
            self._below.close(below)

    def close_all(self) -> None:
        """Close the handles that an interrupted user of this disk left open."""
        for handle in tuple(self._handles):
            self.close(handle)

    def size(self, handle: int) -> int:
        return self._handles[handle][0].size

    def read(self, handle: int, offset: int, length: int) -> bytes:
        file, below = self._handles[handle]
        end = min(file.size, offset + length)
        if end <= offset:
            return b""
        data = b""
        if below is not None and offset < file.base_bytes:
            data = self._below.read(below, offset, min(end, file.base_bytes) - offset)
        if not file.pages and len(data) == end - offset:
            return data
        whole = bytearray(data)
        whole += bytes(end - offset - len(whole))
        for number in range(offset // PAGE_BYTES, (end - 1) // PAGE_BYTES + 1):
            page = file.pages.get(number)
            if page is not None:
                start = number * PAGE_BYTES
                low, high = max(offset, start), min(end, start + PAGE_BYTES)
                whole[low - offset : high - offset] = page[low - start : high - start]
        return bytes(whole)

    def write(self, handle: int, offset: int, data: bytes) -> None:
        file = self._handles[handle][0]
        at = 0
        while at < len(data):
            number, inside = divmod(offset + at, PAGE_BYTES)
            page = file.pages.get(number)
            if page is None:
                page = bytearray(self.read(handle, number * PAGE_BYTES, PAGE_BYTES))
                page += bytes(PAGE_BYTES - len(page))
            piece = data[at : at + PAGE_BYTES - inside]
            page[inside : inside + len(piece)] = piece
            file.pages[number] = page
            at += len(piece)
        file.size = max(file.size, offset + len(data))

    def truncate(self, handle: int, length: int) -> None:
        file = self._handles[handle][0]
        file.size, file.base_bytes = length, min(file.base_bytes, length)
        for number in [number for number in file.pages if number * PAGE_BYTES >= length]:
            del file.pages[number]
        last, inside = divmod(length, PAGE_BYTES)
        if last in file.pages:
            file.pages[last][inside:] = bytes(PAGE_BYTES - inside)

    def allocate(self, handle: int, length: int) -> None:
        file = self._handles[handle][0]
        file.size = max(file.size, length)

    def sync(self, handle: int) -> None:
        """Nothing is durable here."""

    # -- names ---------------------------------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        return self._find(path) is not None

    def list(self, path: str) -> builtins.list[str]:
        node = self._find(path)
        if isinstance(node, _File):
            raise OSError(errno.ENOTDIR, "not a directory", path)
        return [] if node is None else sorted(self._entries(node))

    def make_dir(self, path: str) -> None:
        node: _Dir = self._root
        for part in _parts(path):
            child = self._child(node, part)
            if child is None:
                child = self._entries(node)[part] = _Dir(None)
            if isinstance(child, _File):
                raise OSError(errno.ENOTDIR, "not a directory", path)
            node = child

    def rename(self, old: str, new: str) -> None:
        node = self._find(old)
        if node is None:
            raise OSError(errno.ENOENT, "no such file", old)
        if isinstance(node, _Dir):
            self._load_entries(node)
        directory, name = self._parent(new)
        source, source_name = self._parent(old)
        del source[source_name]
        directory[name] = node

    def remove(self, path: str) -> None:
        if isinstance(self._find(path), _File):
            directory, name = self._parent(path)
            del directory[name]

    def remove_dir(self, path: str) -> None:
        node = self._find(path)
        if isinstance(node, _Dir):
            if self._entries(node):
                raise OSError(errno.ENOTEMPTY, "not empty", path)
            directory, name = self._parent(path)
            del directory[name]

    def sync_dir(self, path: str) -> None:
        """Nothing is durable here."""

    def sync_all(self) -> None:
        """Nothing is durable here."""

    def free_bytes(self) -> int:
        return self._below.free_bytes()

    def boot_id(self) -> str:
        return self._below.boot_id()

    def random_u64(self) -> int:
        return self._below.random_u64()

    # -- changes -------------------------------------------------------------------------------------------

    def changes(self) -> tuple[builtins.list[str], builtins.list[str]]:
        """Files below that were removed, renamed or changed, and files that are new or changed."""
        old: builtins.list[str] = []
        new: builtins.list[str] = []
        self._compare(self._root, "", old, new)
        return sorted(old), sorted(new)

    def _compare(self, directory: _Dir, path: str, old: builtins.list[str], new: builtins.list[str]) -> None:
        entries = self._entries(directory)
        if directory.base is not None:
            for name in self._below.list(directory.base):
                if entries.get(name, self._root) is None:
                    continue  # never accessed
                original = f"{directory.base}/{name}" if directory.base else name
                node = entries.get(name)
                if isinstance(node, _Dir) and node.base == original:
                    continue
                if isinstance(node, _File) and node.base == original and not self._differs(node):
                    continue
                self._all_files(original, old)
        for name, entry in entries.items():
            here = f"{path}/{name}" if path else name
            if isinstance(entry, _Dir):
                self._compare(entry, here, old, new)
            elif isinstance(entry, _File) and (entry.base != here or self._differs(entry)):
                new.append(here)

    def _differs(self, file: _File) -> bool:
        assert file.base is not None
        handle = self._below.open(file.base)
        try:
            return file.changed(self._below.size(handle))
        finally:
            self._below.close(handle)

    def _all_files(self, path: str, found: builtins.list[str]) -> None:
        """All files at `path` or in its subdirectories of the disk below."""
        try:
            self._below.close(self._below.open(path))
            found.append(path)
        except IsADirectoryError:
            for name in self._below.list(path):
                self._all_files(f"{path}/{name}", found)

    # -- the tree ------------------------------------------------------------------------------------------

    def _entries(self, directory: _Dir) -> dict[str, _Node | None]:
        if directory.entries is None:
            assert directory.base is not None
            directory.entries = dict.fromkeys(self._below.list(directory.base))
        return directory.entries

    def _child(self, directory: _Dir, name: str) -> _Node | None:
        entries = self._entries(directory)
        node = entries.get(name)
        if node is None and name in entries:
            path = f"{directory.base}/{name}" if directory.base else name
            try:
                handle = self._below.open(path)
            except IsADirectoryError:
                node = _Dir(path)
            else:
                node = _File(path, self._below.size(handle))
                self._below.close(handle)
            entries[name] = node
        return node

    def _load_entries(self, directory: _Dir) -> None:
        """Resolve all files in a directory to their paths below, before the directory is renamed."""
        for name in tuple(self._entries(directory)):
            node = self._child(directory, name)
            if isinstance(node, _Dir):
                self._load_entries(node)

    def _find(self, path: str) -> _Node | None:
        node: _Node | None = self._root
        for part in _parts(path):
            if not isinstance(node, _Dir):
                return None
            node = self._child(node, part)
        return node

    def _parent(self, path: str) -> tuple[dict[str, _Node | None], str]:
        head, _, name = path.rpartition("/")
        node = self._find(head)
        if not isinstance(node, _Dir):
            raise OSError(errno.ENOENT, "no such directory", head)
        return self._entries(node), name


def _parts(path: str) -> builtins.list[str]:
    return [part for part in path.split("/") if part]
