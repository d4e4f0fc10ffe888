"""The two doors through which the engine meets the world: a disk and a clock.

Paths are relative to the data directory and use `/`. A handle is a small int
that stays valid until `close`. Every call may raise OSError; whoever calls
decides what that means (a failed WAL write or sync is final).
"""

from __future__ import annotations

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

    def boot_id(self) -> str:
        """Changes when the machine restarts, so that a process crash can be told from a power cut."""

    def random_u64(self) -> int:
        """For file salts: a value that other files do not have. Seeded in simulation."""


class Clock(Protocol):
    """Where time comes from."""

    def wall_ms(self) -> int:
        """Milliseconds since the epoch; may jump either way."""

    def monotonic_ms(self) -> int:
        """Milliseconds since some start; never runs back."""
