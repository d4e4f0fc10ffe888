"""The engine's disk on a real file system: thin calls into the kernel, no cache, no state of its own.

A handle is the file descriptor itself, so the hot path is one system call. The
kernel's errors reach the caller unchanged; what a failed write or sync means is
the engine's decision.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import time

# Large enough that filling a segment takes few calls, small enough to stay out of the way of the allocator.
_ZEROS = bytes(1 << 20)
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_OPEN_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"

_libc = ctypes.CDLL(None, use_errno=True)


class PosixDisk:
    """Disk over the directory `root`, which is created when absent."""

    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(root)
        self.write_ns = 0  # how long the last write took
        make_durable_dir(self._root)

    def open(self, path: str, *, create: bool = False) -> int:
        if create:
            return os.open(self._at(path), _OPEN_FLAGS | os.O_CREAT, 0o644)
        try:
            return os.open(self._at(path), _OPEN_FLAGS)
        except PermissionError:
            return os.open(self._at(path), _READ_FLAGS)  # somebody else's, such as a job's: it may be read

    def close(self, handle: int) -> None:
        os.close(handle)

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def read(self, handle: int, offset: int, length: int) -> bytes:
        data = os.pread(handle, length, offset)
        if len(data) == length or not data:
            return data
        # The kernel may return less than asked before the end (a signal, the 2 GiB limit of one
        # call); only an empty read says that the file has ended.
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
        # A short write is how a filling disk first shows itself: the next call reports ENOSPC.
        view = memoryview(data)
        while done < len(data):
            done += os.pwrite(handle, view[done:], offset + done)

    def truncate(self, handle: int, length: int) -> None:
        os.ftruncate(handle, length)

    def allocate(self, handle: int, length: int) -> None:
        # Real zeros rather than fallocate: an unwritten extent would have to be converted at the
        # first sync after each write into it, which makes that fdatasync a metadata commit.
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
    """Create `path`, syncing the parent of each level made: the engine can only sync from the root down."""
    made: list[str] = []
    level = path
    while not os.path.isdir(level):
        made.append(level)
        level = os.path.dirname(level)
    os.makedirs(path, exist_ok=True)
    for level in made:
        sync_directory(os.path.dirname(level))
