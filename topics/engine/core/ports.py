"""The doors through which the engine meets the world: a disk, a clock, and perhaps a second store for old segments.

Paths are relative to the data directory and use `/`. A handle is a small int
that stays valid until `close`. Every call may raise OSError; whoever calls
decides what that means (a failed WAL write or sync is final).
"""

from __future__ import annotations

import builtins
from collections.abc import Generator, Iterable
from typing import Protocol


class Disk(Protocol):
    """Bytes that last. Written bytes are readable at once; only synced ones survive a power cut."""

    def open(self, path: str, *, create: bool = False) -> int:
        """Open read-write. `create` makes the file when absent, and never truncates it."""

    def close(self, handle: int) -> None: ...

    def size(self, handle: int) -> int: ...

    def read(self, handle: int, offset: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file."""

    def write(self, handle: int, offset: int, data: bytes) -> None:
        """All of `data` at `offset`, or an OSError with any prefix of it written."""

    def truncate(self, handle: int, length: int) -> None: ...

    def allocate(self, handle: int, length: int) -> None:
        """Zero-fill up to `length`, so that later writes neither extend nor run out of space."""

    def sync(self, handle: int) -> None:
        """fdatasync: contents and length survive a power cut once this returns."""

    def exists(self, path: str) -> bool: ...

    def list(self, path: str) -> list[str]:
        """Sorted names in a directory; empty when it does not exist."""

    def make_dir(self, path: str) -> None:
        """Create it and its missing parents; no error when it exists."""

    def rename(self, old: str, new: str) -> None:
        """Atomic; replaces `new`. Works on files and directories."""

    def remove(self, path: str) -> None:
        """Remove a file; no error when it is absent."""

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory; no error when it is absent."""

    def sync_dir(self, path: str) -> None:
        """Creations, renames and removals in this directory survive once this returns."""

    def sync_all(self) -> None:
        """syncfs: everything written before the call survives once it returns."""

    def free_bytes(self) -> int:
        """How much can still be written here."""

    def boot_id(self) -> str:
        """Changes when the machine restarts, so that a process crash can be told from a power cut."""

    def random_u64(self) -> int:
        """For file salts: a value that other files do not have. Seeded in simulation."""


class SegmentStore(Protocol):
    """Whole files under names, as an object store has them: nothing is renamed, appended to or written in place.

    A name has `/` in it. Calls may take seconds and come from several threads at once. Each may raise OSError, which
    changes nothing that can be seen; FileNotFoundError says that there is no such file.
    """

    def put(self, key: str, pieces: Iterable[bytes]) -> None:
        """The file is there whole or not at all, and lasts once this returns; one of that name is replaced."""

    def put_steps(self, key: str, pieces: Iterable[bytes]) -> Generator[None, None, None]:
        """The same, about a piece with each step, for whoever wants to take his time. Closed before its end it has done nothing that
        can be seen. Nothing else may be put or deleted between two steps."""

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file."""

    def delete(self, key: str) -> None:
        """Gone for good once this returns; no error when it is absent."""

    def list(self, prefix: str) -> builtins.list[str]:
        """Sorted names that begin with `prefix`, of whole files only."""

    def exists(self, key: str) -> bool: ...

    def length(self, key: str) -> int: ...


class Clock(Protocol):
    """Where time comes from."""

    def wall_ms(self) -> int:
        """Milliseconds since the epoch; may jump either way."""

    def monotonic_ms(self) -> int:
        """Milliseconds since some start; never runs back."""
