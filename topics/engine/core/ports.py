"""Ports of the engine: disk, clock, and an optional segment store for the cold tier.

Paths are relative to the data directory and use `/`. A handle is a small int that stays valid until `close`. Every call
may raise OSError; the caller decides what that means (a failed WAL write or sync is final).
"""

from __future__ import annotations

import builtins
from collections.abc import Generator, Iterable
from typing import Protocol


class Disk(Protocol):
    """File access. Written bytes can be read at once; only synced bytes survive a power cut."""

    def open(self, path: str, *, create: bool = False) -> int:
        """Open read-write. `create` creates a missing file; an existing one is never truncated."""

    def close(self, handle: int) -> None: ...

    def size(self, handle: int) -> int: ...

    def read(self, handle: int, offset: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file."""

    def write(self, handle: int, offset: int, data: bytes) -> None:
        """Write all of `data` at `offset`. After an OSError any prefix of it may have been written."""

    def truncate(self, handle: int, length: int) -> None: ...

    def allocate(self, handle: int, length: int) -> None:
        """Zero-fill up to `length`, so that later writes neither extend the file nor run out of space."""

    def sync(self, handle: int) -> None:
        """fdatasync: contents and length survive a power cut once this returns."""

    def exists(self, path: str) -> bool: ...

    def list(self, path: str) -> list[str]:
        """Sorted names in a directory; empty when it does not exist."""

    def make_dir(self, path: str) -> None:
        """Create a directory and its missing parents; no error if it exists."""

    def rename(self, old: str, new: str) -> None:
        """Atomic; replaces `new`. Works on files and directories."""

    def remove(self, path: str) -> None:
        """Remove a file; no error if it does not exist."""

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory; no error if it does not exist."""

    def sync_dir(self, path: str) -> None:
        """fsync of a directory: its creations, renames and removals survive once this returns."""

    def sync_all(self) -> None:
        """syncfs: everything written before the call survives once it returns."""

    def free_bytes(self) -> int:
        """Free space of the file system."""

    def boot_id(self) -> str:
        """Changes when the machine restarts; tells a process crash from a power cut."""

    def random_u64(self) -> int:
        """A random value for file salts. Seeded in simulation."""


class SegmentStore(Protocol):
    """Object store: whole files under keys. Files are never renamed, appended to or changed in place.

    A key contains `/`. Calls may take seconds and come from several threads at once. A call that raises OSError has had no
    visible effect; FileNotFoundError means that there is no such file.
    """

    def put(self, key: str, pieces: Iterable[bytes]) -> None:
        """Store or replace a file atomically; durable once this returns."""

    def put_steps(self, key: str, pieces: Iterable[bytes]) -> Generator[None, None, None]:
        """`put` in steps of about one piece each. Closed early, it has no visible effect. Nothing else may be put or deleted
        between two steps."""

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file."""

    def delete(self, key: str) -> None:
        """Delete a file, durably once this returns; no error if it does not exist."""

    def list(self, prefix: str) -> builtins.list[str]:
        """Sorted keys of the complete files that begin with `prefix`."""

    def exists(self, key: str) -> bool: ...

    def length(self, key: str) -> int: ...


class Clock(Protocol):
    """Source of time."""

    def wall_ms(self) -> int:
        """Milliseconds since the epoch; may jump either way."""

    def monotonic_ms(self) -> int:
        """Milliseconds since an arbitrary start; never runs backwards."""
