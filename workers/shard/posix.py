"""The engine's ports on a POSIX system: the disk on a real file system, and the system clock.

The disk is a thin layer over system calls, without a cache. A handle is the file descriptor itself, so the hot path is
one system call. Errors reach the caller unchanged; the engine decides what a failed write or sync means.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import time

# Filling a segment takes few calls of this size.
_ZEROS = bytes(1 << 20)
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_OPEN_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"

_libc = ctypes.CDLL(None, use_errno=True)


class SystemClock:
    """Wall and monotonic clocks of the kernel, in whole milliseconds without floats."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


class PosixDisk:
    """A disk in the directory `root`, which is created if missing."""

    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(root)
        self.write_ns = 0  # duration of the last write
        make_durable_dir(self._root)

    def open(self, path: str, *, create: bool = False) -> int:
        if create:
            return os.open(self._at(path), _OPEN_FLAGS | os.O_CREAT, 0o644)
        try:
            return os.open(self._at(path), _OPEN_FLAGS)
        except PermissionError:
            return os.open(self._at(path), _READ_FLAGS)  # another user's file, such as a merge job's output

    def close(self, handle: int) -> None:
        os.close(handle)

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def read(self, handle: int, offset: int, length: int) -> bytes:
        data = os.pread(handle, length, offset)
        if len(data) == length or not data:
            return data
        # A short read before the end of the file is possible (a signal, the 2 GiB limit per call); only an empty read
        # means end of file.
        chunks = [data]
        done = len(data)
        while done < length:
            data = os.pread(handle, length - done, offset + done)
            if not data:
                break
            chunks.append(data)
            done += len(data)
        return b"".join(chunks)

    def write(self, handle: int, offset: int, data: bytes) -> None:
        began = time.perf_counter_ns()
        done = os.pwrite(handle, data, offset)
        if done < len(data):
            self._write_rest(handle, offset, data, done)
        self.write_ns = time.perf_counter_ns() - began

    @staticmethod
    def _write_rest(handle: int, offset: int, data: bytes, done: int) -> None:
        # A short write is the first sign of a full disk: the next call reports ENOSPC.
        view = memoryview(data)
        while done < len(data):
            done += os.pwrite(handle, view[done:], offset + done)

    def truncate(self, handle: int, length: int) -> None:
        os.ftruncate(handle, length)

    def allocate(self, handle: int, length: int) -> None:
        # Real zeros rather than fallocate: converting unwritten extents would turn the fdatasync after each write into
        # a metadata commit.
        position = os.fstat(handle).st_size
        while position < length:
            missing = length - position
            chunk = _ZEROS if missing >= len(_ZEROS) else _ZEROS[:missing]
            position += os.pwrite(handle, chunk, position)

    def sync(self, handle: int) -> None:
        os.fdatasync(handle)

    def exists(self, path: str) -> bool:
        return os.path.exists(self._at(path))

    def list(self, path: str) -> builtins.list[str]:
        try:
            return sorted(os.listdir(self._at(path)))
        except FileNotFoundError:
            return []

    def make_dir(self, path: str) -> None:
        os.makedirs(self._at(path), exist_ok=True)

    def rename(self, old: str, new: str) -> None:
        os.rename(self._at(old), self._at(new))

    def remove(self, path: str) -> None:
        try:
            os.unlink(self._at(path))
        except FileNotFoundError:
            pass

    def remove_dir(self, path: str) -> None:
        try:
            os.rmdir(self._at(path))
        except FileNotFoundError:
            pass

    def sync_dir(self, path: str) -> None:
        sync_directory(self._at(path))

    def sync_all(self) -> None:
        syncfs = getattr(_libc, "syncfs", None)
        if syncfs is None:
            os.sync()
            return
        fd = os.open(self._root, _OPEN_DIR_FLAGS)
        try:
            if syncfs(fd) != 0:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error), self._root)
        finally:
            os.close(fd)

    def free_bytes(self) -> int:
        found = os.statvfs(self._root)
        return found.f_bavail * found.f_frsize

    def boot_id(self) -> str:
        try:
            with open(_BOOT_ID_PATH, encoding="ascii") as file:
                return file.read().strip()
        except OSError:
            return ""

    def random_u64(self) -> int:
        return int.from_bytes(os.urandom(8), "little")

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"


def sync_directory(path: str) -> None:
    fd = os.open(path, _OPEN_DIR_FLAGS)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_durable_dir(path: str) -> None:
    """Create `path` and sync the parent of each level created: the engine syncs only directories below the root."""
    made: list[str] = []
    level = path
    while not os.path.isdir(level):
        made.append(level)
        level = os.path.dirname(level)
    os.makedirs(path, exist_ok=True)
    for level in made:
        sync_directory(os.path.dirname(level))
