"""The cold tier as a local directory, which may be on a disk that is not always mounted.

The data directory and the cold directory contain the same `cold-id`. An empty mount point or another server's cold
directory has none or a different one: it is neither written to nor mistaken for a tier that has lost its files.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Generator, Iterable

from topics.engine.core.ports import Disk
from topics.engine.storage.layout import COLD_ID_NAME
from topics.engine.storage.segment_store import PLANS_PREFIX, DiskSegmentStore
from workers.shard.posix import PosixDisk, make_durable_dir, sync_directory

ID_NAME = COLD_ID_NAME
_ID = re.compile(rb"[0-9a-f]{32}")


class LocalSegmentStore(DiskSegmentStore):
    """Files under `root`, which is created if missing. `shard` separates the workers' unfinished files. With an
    `identity`, every call first checks that this is the right directory."""

    def __init__(
        self,
        root: str,
        shard: int = 0,
        *,
        identity: str | None = None,
        through: Callable[[PosixDisk], Disk] = lambda disk: disk,
    ) -> None:
        super().__init__(through(PosixDisk(root)), f"staging/shard-{shard:02d}")
        self._root = root
        self._identity = identity

    def put_steps(self, key: str, pieces: Iterable[bytes]) -> Generator[None, None, None]:
        self.check()
        for _ in super().put_steps(key, pieces):
            yield
            self.check()  # steps may be far apart

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        self.check()
        self._check_plain(key)
        return super().read_range(key, offset, length)

    def delete(self, key: str) -> None:
        self.check()
        if key.startswith(PLANS_PREFIX) and os.path.islink(os.path.dirname(self._at(key))):
            return  # links are not followed
        if self._is_staged_dir(key):
            shutil.rmtree(self._at(key))  # follows no links
        super().delete(key)

    def list(self, prefix: str) -> builtins.list[str]:
        self.check()
        directory = prefix.rstrip("/")
        if directory.startswith(PLANS_PREFIX) and os.path.islink(self._at(directory)):
            return [directory]  # links are not followed
        found = super().list(prefix)
        return found or ([directory] if self._is_staged_dir(directory) else [])

    def exists(self, key: str) -> bool:
        self.check()
        return super().exists(key)

    def length(self, key: str) -> int:
        self.check()
        self._check_plain(key)
        return super().length(key)

    def _at(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _check_plain(self, key: str) -> None:
        """Only open regular files of staging, to which jobs may write anything: a pipe would block, and a link may lead
        anywhere."""
        if key.startswith(PLANS_PREFIX) and not stat.S_ISREG(os.lstat(self._at(key)).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", key)

    def _walk(self, directory: str, found: builtins.list[str]) -> None:
        """In staging, a link counts as a file: its target must not be removed. So does an empty directory, which would
        make the next job for the same plan fail."""
        if directory.startswith(PLANS_PREFIX) and os.path.islink(self._at(directory)):
            raise NotADirectoryError(errno.ENOTDIR, "a symbolic link", directory)
        before = len(found)
        super()._walk(directory, found)
        if len(found) == before and self._is_staged_dir(directory):
            found.append(directory)

    def _is_staged_dir(self, key: str) -> bool:
        path = self._at(key)
        return key.startswith(PLANS_PREFIX) and os.path.isdir(path) and not os.path.islink(path)

    def check(self) -> None:
        if self._identity is None:
            return
        found = read_id(self._root)
        if found is None:
            what = f"{self._root}/{ID_NAME} is missing: is the disk mounted?"
        elif found != self._identity:
            what = f"{self._root} belongs to another data directory"
        else:
            return
        raise OSError(errno.ENODEV, what)


def read_id(directory: str) -> str | None:
    """The id of this directory; None if it has none. OSError: the file is damaged."""
    path = f"{directory}/{ID_NAME}"
    try:
        with open(path, "rb") as file:
            text = file.read(64).strip()
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        text = b""
    if not _ID.fullmatch(text):
        raise OSError(
            errno.EINVAL,
            f"{path} does not contain an id of 32 hexadecimal digits; copy the file from the other tier, which has the same id",
        )
    return text.decode("ascii")


def claim(data_dir: str, cold_dir: str) -> str:
    """The id that both directories share; created at the first start with a cold tier."""
    found = read_id(data_dir)
    if found is None:
        fresh = secrets.token_hex(16)
        if _make_id(data_dir, fresh):
            make_durable_dir(cold_dir)
            _make_id(cold_dir, fresh)
        found = read_id(data_dir)
        assert found is not None
    return found


def _make_id(directory: str, text: str) -> bool:
    """Create the file atomically; False: another worker was first."""
    temp = f"{directory}/{ID_NAME}-{text}"
    try:
        with open(temp, "x", encoding="ascii") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temp, f"{directory}/{ID_NAME}")
    except FileExistsError:
        return False
    finally:
        os.unlink(temp)
    sync_directory(directory)
    return True
