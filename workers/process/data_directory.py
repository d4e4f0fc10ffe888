"""The files of the data directory that belong to the supervisor; the shards' files belong to the workers.

LOCK          flocked while the supervisor runs; contains its pid
layout.json   the current layout and its number of shards; see topics/engine/storage/layout.py
RUN           path of the directory with the processes' sockets. It is elsewhere, because paths of Unix sockets are
              limited to 107 bytes
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from topics.api.errors import Corrupt, UnsupportedFormat
from topics.engine.storage.layout import (
    LAYOUT_BYTES_MAX,
    LAYOUT_FORMATS,
    LAYOUT_NAME,
    Layout,
    decode_layout,
    encode_layout,
    generation_of,
    stale_layouts,
)
from topics.system.read_only_disk import read_small
from workers.process.exit_codes import BadConfiguration, DirectoryLocked
from workers.shard.posix import make_durable_dir, sync_directory

PRIVATE_UMASK = 0o077  # only the owner may read records
RUN_PREFIX = "topics-run-"
RUN_BYTES_MAX = 4096  # of RUN: the maximum length of a path
# The longest name in a run directory is shard-000-<19 digits>.sock.
_SOCKET_NAME_BYTES = 36
_SOCKET_PATH_BYTES_MAX = 100
# An orphaned resharding process exits with its supervisor, but only after its current disk call.
_ORPHAN_TIMEOUT_S = 30.0
_HOW_TO_FIX = "restore it from a backup, or run `topics verify --repair`"

logger = logging.getLogger("topics.supervisor")


class DataDirectory:
    """Locked from construction to `close`."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).absolute()
        try:
            make_durable_dir(str(self.path))
            self._lock_fd = os.open(self.path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise BadConfiguration(f"cannot use the data directory {self.path}: {error.strerror}") from error
        try:
            self._lock()
        except BaseException:
            os.close(self._lock_fd)
            raise

    def close(self) -> None:
        # Never unlink the file: a server waiting for the old file and one that creates a new file would both get a lock.
        os.close(self._lock_fd)

    @property
    def lock_fd(self) -> int:
        """For a child that must keep the directory locked even if this process dies."""
        return self._lock_fd

    def layout(self, new_shards: int) -> Layout:
        """The stored layout; the first start creates one with `new_shards` shards."""
        path = self.path / LAYOUT_NAME
        return read_layout(path) if path.exists() else self._make_layout(path, new_shards)

    def has_stale_layouts(self, layout: Layout) -> bool:
        """Whether a change of the number of shards was interrupted."""
        return bool(stale_layouts(os.listdir(self.path), layout.generation))

    def make_run_dir(self) -> Path:
        """Create a private directory for sockets; the one left by a killed server is removed."""
        left = self._recorded_run_dir()
        if left is not None:
            _remove_run_dir(left)
        for parent in _run_dir_parents():
            path = Path(parent) / f"{RUN_PREFIX}{secrets.token_hex(6)}"
            if len(os.fsencode(path)) + 1 + _SOCKET_NAME_BYTES > _SOCKET_PATH_BYTES_MAX:
                continue
            self._record_run_dir(path)
            try:
                path.mkdir(mode=0o700)
            except OSError:
                continue
            return path
        raise BadConfiguration(
            "no directory for sockets: set XDG_RUNTIME_DIR or TMPDIR to a writable one with a short path"
        )

    def remove_run_dir(self, path: Path) -> None:
        _remove_run_dir(path)
        with suppress(OSError):  # RUN is a directory; `_record_run_dir` has logged that
            (self.path / "RUN").unlink(missing_ok=True)

    def _recorded_run_dir(self) -> Path | None:
        """The run directory of the previous server; None if RUN is missing or unreadable."""
        record = self.path / "RUN"
        try:
            text = read_small(record, RUN_BYTES_MAX)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("cannot read RUN", extra={"fields": {"path": record, "reason": error}})
            return None
        return None if b"\0" in text else Path(os.fsdecode(text.strip()))

    def _record_run_dir(self, path: Path) -> None:
        """Called before the directory is created, so that a crash never leaves an unknown one."""
        try:
            write_atomically(self.path / "RUN", f"{path}\n".encode())
        except OSError as error:
            # The server must start even if the disk is full: deletes free space.
            logger.warning(
                "cannot record the run directory", extra={"fields": {"path": path, "reason": error}}
            )

    def _lock(self) -> None:
        give_up = time.monotonic() + _ORPHAN_TIMEOUT_S
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                if _is_dead(holder) and time.monotonic() < give_up:
                    time.sleep(0.02)
                    continue
                raise DirectoryLocked(
                    f"the data directory {self.path} is in use by another server, pid {holder}; "
                    "stop it, or choose another directory with TOPICS_DATA_DIR or --data"
                ) from None
        try:
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            # The pid is only informative; the lock works without it.
            logger.warning("cannot write the pid to LOCK", extra={"fields": {"reason": error}})

    def _make_layout(self, path: Path, shards: int) -> Layout:
        # With a guessed number of shards, topics would be looked up in the wrong ones.
        if any(generation_of(name) is not None for name in os.listdir(self.path)):
            raise BadConfiguration(
                f"{path} is missing, but {self.path} has data; restore the file from a backup"
            )
        layout = Layout.of(1, shards)
        write_atomically(path, encode_layout(layout))
        return layout


def write_atomically(path: Path, data: bytes, *, public: bool = False) -> None:
    """Replace a file atomically, also across a crash. `public`: readable by other users."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        with open(fd, "wb") as file:
            if public:
                os.fchmod(fd, 0o644)
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.rename(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    sync_directory(str(path.parent))


def read_layout(path: Path) -> Layout:
    try:
        return decode_layout(str(path), read_small(path, LAYOUT_BYTES_MAX))
    except OSError as error:
        raise BadConfiguration(f"{path} cannot be read: {error.strerror}; {_HOW_TO_FIX}") from error
    except Corrupt as error:
        raise BadConfiguration(f"{path} {error.problem}; {_HOW_TO_FIX}") from error
    except UnsupportedFormat as error:
        newest = LAYOUT_FORMATS[-1]
        raise BadConfiguration(
            f"{path} has format {error.version}; this version of the server supports formats up to {newest}"
        ) from error


def _is_dead(pid: str) -> bool:
    """Whether there is no such process: then the lock is held by an orphaned child that is about to exit."""
    if not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _run_dir_parents() -> Iterator[str]:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        yield runtime
    yield tempfile.gettempdir()
    yield "/tmp"


def _remove_run_dir(path: Path) -> None:
    """Remove the sockets and then the directory. Anything else in it is left alone."""
    try:
        if not path.name.startswith(RUN_PREFIX) or not stat.S_ISDIR(path.lstat().st_mode):
            return
        for entry in path.iterdir():
            if stat.S_ISSOCK(entry.lstat().st_mode):
                entry.unlink(missing_ok=True)
        path.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("left the run directory behind", extra={"fields": {"path": path, "reason": error}})
