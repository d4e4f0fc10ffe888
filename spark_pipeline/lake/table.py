"""Shared parts of the export formats: a directory per topic, a lock, and files named by their range of seqs.

Order of a run: tasks write temporary files and sync them; these are renamed; directories are synced; then the table is
updated atomically. A crash before that leaves files that are not in the table: the next run deletes them and writes the
same rows again. So each row is in exactly one file, and a run with nothing new changes nothing.

Concurrent runs exclude each other with a lock on `_lock`, which is released when the process ends.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from spark_pipeline.tasks.export import ExportFile, sync

LOCK = "_lock"
_PART = re.compile(r"part-([0-9a-f]{16})-[0-9a-f]{16}\.parquet")


class ExportFailed(Exception):
    """The export failed; the message says what to do."""


class LakeUnavailable(ExportFailed):
    """No topic can be exported in this format, or to this directory."""


class Busy(Exception):
    """Another run is exporting the same topic."""


class Table(Protocol):
    """The export of one topic."""

    next_seq: int  # everything before it is exported, or was deleted

    def remove_orphans(self) -> None:
        """Delete files left by interrupted runs."""

    def publish(self, files: Sequence[ExportFile], next_seq: int) -> None:
        """Add these files and move the position, atomically."""


@dataclass(frozen=True, slots=True)
class Freshness:
    """State of an export."""

    format: str
    next_seq: int
    rows: int
    bytes: int
    files: int
    at_ms: int  # time of the last addition; 0: not known


def recreated_topic_error(folder: Path, topic: str) -> ExportFailed:
    return ExportFailed(
        f"{folder} belongs to an earlier topic named {topic}, which was deleted and created again: move the directory away, or export to another one"
    )


@contextmanager
def locked(folder: Path, topic: str) -> Iterator[None]:
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"another run is exporting {topic} to {folder}; run it again later") from None
        yield
    finally:
        os.close(fd)


def remove_files(folder: Path, is_orphan: Callable[[str, int], bool]) -> None:
    """Delete temporary files, and orphans as decided by path and first seq. Only files named by us."""
    for path in folder.glob("date=*/.part-*"):
        path.unlink(missing_ok=True)
    for path in folder.glob("date=*/part-*.parquet"):
        match = _PART.fullmatch(path.name)
        if match is not None and is_orphan(path.relative_to(folder).as_posix(), int(match[1], 16)):
            path.unlink(missing_ok=True)


def rename_into_place(folder: Path, files: Sequence[ExportFile]) -> None:
    """Rename temporary files to their final names."""
    for file in files:
        os.replace(folder / file.temporary, folder / file.path)
    for parent in sorted({(folder / file.path).parent for file in files}):
        sync(parent)
