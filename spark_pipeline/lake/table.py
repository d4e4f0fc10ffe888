"""What the forms of a lake have in common: a folder for each topic, a lock, and files whose names say which rows they hold.

Order of a run: tasks write files aside and sync them; they get their names; folders are synced; then the table is told, in one
step. A crash before that step leaves files that the table does not know: the next run removes them first, and writes the same
rows again. So each row is in one file, and a run with nothing new changes nothing.

Runs keep out of each other's way by a lock on `_lock`, which ends with the process.
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
    """The text says what is in the way, and what to do."""


class LakeUnavailable(ExportFailed):
    """No topic can be exported in this form, or to this folder."""


class Busy(Exception):
    """Another run exports the same topic."""


class Table(Protocol):
    """One topic in a lake."""

    next_seq: int  # all before is exported, or was dead or gone

    def remove_orphans(self) -> None:
        """What a run has left that came to no end."""

    def publish(self, files: Sequence[ExportFile], next_seq: int) -> None:
        """From now on these files count, too, and the next run goes on from this seq."""


@dataclass(frozen=True, slots=True)
class Freshness:
    """How far an export is."""

    form: str
    next_seq: int
    rows: int
    bytes: int
    files: int
    at_ms: int  # when something was last added; 0: not known


def made_anew(folder: Path, topic: str) -> ExportFailed:
    return ExportFailed(
        f"{folder} holds an earlier topic of the name {topic}, which was deleted and made anew: move that folder away, or export to another one"
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
    """Files that were left aside, and those that are orphans by their path and first seq. Only names that are ours."""
    for path in folder.glob("date=*/.part-*"):
        path.unlink(missing_ok=True)
    for path in folder.glob("date=*/part-*.parquet"):
        match = _PART.fullmatch(path.name)
        if match is not None and is_orphan(path.relative_to(folder).as_posix(), int(match[1], 16)):
            path.unlink(missing_ok=True)


def give_names(folder: Path, files: Sequence[ExportFile]) -> None:
    """What was written aside gets its name, for good."""
    for file in files:
        os.replace(folder / file.aside, folder / file.path)
    for place in sorted({(folder / file.path).parent for file in files}):
        sync(place)
