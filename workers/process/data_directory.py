"""The data directory as the supervisor sees it; the shards' files in it belong to the workers.

LOCK          flock'ed for the supervisor's life; contains its pid
layout.json   which layout counts, and how many shards it has; see topics/engine/storage/layout.py
RUN           path of the directory with the processes' sockets, which lies elsewhere: paths
              of Unix sockets are limited to 107 bytes
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
from workers.shard.posix_disk import make_durable_dir, sync_directory

PRIVATE_UMASK = 0o077  # records are nobody's business but the owner's
RUN_PREFIX = "topics-run-"
RUN_BYTES_MAX = 4096  # of RUN: as long as a path can be
# The longest name in a run directory is shard-000-<19 digits>.sock.
_SOCKET_NAME_BYTES = 36
_SOCKET_PATH_BYTES_MAX = 100
# A process that changed the number of shards ends with its supervisor, but not before the disk call that it is in.
_ORPHAN_PATIENCE_S = 30.0
_MEND = "restore it from a backup, or run `topics verify --repair`"

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
        # The file stays: removing it would let a server that waits for the old file and one that makes a new file both hold a lock.
        os.close(self._lock_fd)

    @property
    def lock_fd(self) -> int:
        """For a process that must not outlive this one's hold on the directory."""
        return self._lock_fd

    def layout(self, new_shards: int) -> Layout:
        """The stored layout; at the first start one with so many shards is made."""
        path = self.path / LAYOUT_NAME
        return read_layout(path) if path.exists() else self._make_layout(path, new_shards)

    def has_stale_layouts(self, layout: Layout) -> bool:
        """Whether a change of the number of shards was stopped half way."""
        return bool(stale_layouts(os.listdir(self.path), layout.generation))

    def make_run_dir(self) -> Path:
        """A new private directory for sockets; the one that a killed server left is removed."""
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
        with suppress(OSError):  # a directory has its name, as `_record_run_dir` has said
            (self.path / "RUN").unlink(missing_ok=True)

    def _recorded_run_dir(self) -> Path | None:
        """The run directory of the server before. What cannot be read is replaced."""
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
        """Before it is made, so that no crash leaves one that nobody knows of."""
        try:
            write_atomically(self.path / "RUN", f"{path}\n".encode())
        except OSError as error:
            # A full disk must not keep the server from starting: deletes are the way out of it.
            logger.warning(
                "cannot record the run directory", extra={"fields": {"path": path, "reason": error}}
            )

    def _lock(self) -> None:
        give_up = time.monotonic() + _ORPHAN_PATIENCE_S
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
            # The lock holds without it; the pid only helps people.
            logger.warning("cannot write the pid to LOCK", extra={"fields": {"reason": error}})

    def _make_layout(self, path: Path, shards: int) -> Layout:
        # A guessed count would look for topics in the wrong shards, and find none.
        if any(generation_of(name) is not None for name in os.listdir(self.path)):
            raise BadConfiguration(
                f"{path} is missing, but {self.path} has data; restore the file from a backup"
            )
        layout = Layout.of(1, shards)
        write_atomically(path, encode_layout(layout))
        return layout


def write_atomically(path: Path, data: bytes, *, public: bool = False) -> None:
    """Readers see the old content or the new, also after a crash. `public`: other users may read it."""
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
        raise BadConfiguration(f"{path} cannot be read: {error.strerror}; {_MEND}") from error
    except Corrupt as error:
        raise BadConfiguration(f"{path} {error.problem}; {_MEND}") from error
    except UnsupportedFormat as error:
        known = LAYOUT_FORMATS[-1]
        raise BadConfiguration(
            f"{path} has format {error.version}; this version of the server knows those up to {known}"
        ) from error


def _is_dead(pid: str) -> bool:
    """Whether there is no such process: the lock is then held by one that it started, and that is about to end."""
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
    """Remove the sockets in it and then the directory. Whatever does not look like ours is left alone."""
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
