"""The data directory as the supervisor sees it; the shards' files in it belong to the workers.

LOCK          flock'ed for the supervisor's life; contains its pid
layout.json   {"format":1,"generation":1,"shards":N}, written once
RUN           path of the directory with the processes' sockets, which lies elsewhere: paths
              of Unix sockets are limited to 107 bytes
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from workers.exit_codes import BadConfiguration, DirectoryLocked
from workers.posix_disk import make_durable_dir, sync_directory

LAYOUT_FORMAT = 1
RUN_PREFIX = "topics-run-"
# The longest name in a run directory is shard-000-<19 digits>.sock.
_SOCKET_NAME_BYTES = 36
_SOCKET_PATH_BYTES_MAX = 100

logger = logging.getLogger("topics.supervisor")


class Layout(msgspec.Struct, frozen=True):
    format: int
    generation: int
    shards: int


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

    def layout(self, wanted_shards: int | None, default_shards: int) -> Layout:
        """The stored layout, made at the first start. `wanted_shards` is what the configuration insists on."""
        path = self.path / "layout.json"
        if not path.exists():
            return self._make_layout(path, wanted_shards or default_shards)
        layout = read_layout(path)
        if wanted_shards is not None and wanted_shards != layout.shards:
            raise BadConfiguration(
                f"TOPICS_WAL_SHARDS is {wanted_shards}, but the data directory {self.path} has {layout.shards} shards; "
                f"set TOPICS_WAL_SHARDS={layout.shards} (changing the count is not supported yet)"
            )
        return layout

    def make_run_dir(self) -> Path:
        """A new private directory for sockets; the one that a killed server left is removed."""
        record = self.path / "RUN"
        if record.exists():
            _remove_run_dir(Path(record.read_text().strip()))
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
        (self.path / "RUN").unlink(missing_ok=True)

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
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise DirectoryLocked(
                f"the data directory {self.path} is in use by another server, pid {holder}; "
                "stop it or set TOPICS_DATA_DIR to another directory"
            ) from None
        try:
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            # The lock holds without it; the pid only helps people.
            logger.warning("cannot write the pid to LOCK", extra={"fields": {"reason": error}})

    def _make_layout(self, path: Path, shards: int) -> Layout:
        # A guessed count would look for topics in the wrong shards, and find none.
        if any(re.fullmatch(r"layout-\d+", name) for name in os.listdir(self.path)):
            raise BadConfiguration(
                f"{path} is missing, but {self.path} has data; restore the file from a backup"
            )
        layout = Layout(format=LAYOUT_FORMAT, generation=1, shards=shards)
        write_atomically(path, msgspec.json.encode(layout) + b"\n")
        return layout


def write_atomically(path: Path, data: bytes) -> None:
    """Readers see the old content or the new, also after a crash."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        with open(fd, "wb") as file:
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
        layout = msgspec.json.decode(path.read_bytes(), type=Layout)
    except (OSError, msgspec.DecodeError) as error:
        raise BadConfiguration(f"{path} cannot be read: {error}") from error
    if layout.format != LAYOUT_FORMAT:
        raise BadConfiguration(
            f"{path} has format {layout.format}; this version of the server knows format {LAYOUT_FORMAT} only"
        )
    if layout.shards < 1:
        raise BadConfiguration(f"{path} says {layout.shards} shards")
    return layout


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
