"""Read-only implementation of the engine's disk, for tools that inspect files while a server may be writing them.

Paths are file system paths, absolute or relative to the working directory, so that errors name the path that the user
passed.
"""

from __future__ import annotations

import builtins
import errno
import os
import stat
from typing import NoReturn


class ReadOnlyDisk:
    def open(self, path: str, *, create: bool = False) -> int:
        # Opening or reading a pipe or a device could block, or never end.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        mode = os.fstat(handle).st_mode
        if stat.S_ISREG(mode):
            return handle
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise OSError(errno.EINVAL, "not a file", path)

    def close(self, handle: int) -> None:
        os.close(handle)

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def read(self, handle: int, offset: int, length: int) -> bytes:
        pieces: list[bytes] = []
        while length > 0 and (piece := os.pread(handle, length, offset)):
            pieces.append(piece)
            offset, length = offset + len(piece), length - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def list(self, path: str) -> builtins.list[str]:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def free_bytes(self) -> int:
        return 0

    def boot_id(self) -> str:
        return ""

    def random_u64(self) -> int:
        return 0

    # -- writes are refused --------------------------------------------------------------------------------

    def write(self, handle: int, offset: int, data: bytes) -> None:
        _refuse()

    def truncate(self, handle: int, length: int) -> None:
        _refuse()

    def allocate(self, handle: int, length: int) -> None:
        _refuse()

    def sync(self, handle: int) -> None:
        _refuse()

    def make_dir(self, path: str) -> None:
        _refuse()

    def rename(self, old: str, new: str) -> None:
        _refuse()

    def remove(self, path: str) -> None:
        _refuse()

    def remove_dir(self, path: str) -> None:
        _refuse()

    def sync_dir(self, path: str) -> None:
        _refuse()

    def sync_all(self) -> None:
        _refuse()


def read_small(path: str | os.PathLike[str], bytes_max: int) -> bytes:
    """Read a whole file. Raises OSError if it is larger than `bytes_max`, or not a regular file."""
    disk, name = ReadOnlyDisk(), os.fspath(path)
    handle = disk.open(name)
    try:
        if (size := disk.size(handle)) > bytes_max:
            raise OSError(
                errno.EFBIG, f"{size} bytes are more than the expected maximum of {bytes_max}", name
            )
        return disk.read(handle, 0, size)
    finally:
        disk.close(handle)


def _refuse() -> NoReturn:
    raise OSError(errno.EROFS, "files are opened read-only")
