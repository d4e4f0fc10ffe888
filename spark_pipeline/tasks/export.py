"""Writes rows of a topic to Parquet files, one per run of rows of the same day, named by their range of seqs.

A task writes temporary files, with names that query engines ignore; the job renames them when all of them exist.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from spark_pipeline.tasks.columns import COLUMNS
from spark_pipeline.tasks.reading import Slice, Wanted, read_slice
from spark_pipeline.tasks.segments import Damage

ROW_GROUP_ROWS = 100_000
DAY_US = 86_400_000_000
WANTED = Wanted(
    columns=tuple(name for name in COLUMNS if name != "topic")
)  # the topic is in the directory name


@dataclass(frozen=True, slots=True)
class ExportTask:
    """Consecutive slices of one topic, and its output directory."""

    folder: str
    slices: Sequence[Slice]
    skip_damage: bool = False


@dataclass(frozen=True, slots=True)
class ExportFile:
    """A file in the topic's directory. Seqs are half-open; times are in ms."""

    path: str
    temporary: str
    rows: int
    bytes: int
    first_seq: int
    next_seq: int
    ts_min: int
    ts_max: int


@dataclass(slots=True)
class ExportResult:
    files: list[ExportFile] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)


def export_slices(task: ExportTask) -> ExportResult:
    """Write and sync temporary files. No files if there are no rows; after an error, none are left."""
    result = ExportResult()
    writer: _Writer | None = None
    try:
        for batch in _batches(task, result.damage if task.skip_damage else None):
            for day, run in _days(batch):
                if writer is None or writer.day != day:
                    if writer is not None:
                        result.files.append(writer.close())
                    writer = _Writer(task, day)
                writer.add(run)
        if writer is not None:
            result.files.append(writer.close())
        return result
    except BaseException:
        if writer is not None:
            writer.discard()
        for file in result.files:
            (Path(task.folder) / file.temporary).unlink(missing_ok=True)
        raise


def _batches(task: ExportTask, damage: list[Damage] | None) -> Iterator[Any]:
    for part in task.slices:
        for batch in read_slice(part, WANTED, damage):
            if batch.num_rows:
                yield batch


def _days(batch: Any) -> Iterator[tuple[int, Any]]:
    """Consecutive rows of the same day (UTC), in order."""
    days = np.asarray(batch.column(batch.schema.names.index("ts")).cast("int64")) // DAY_US
    edges = [0, *(np.flatnonzero(np.diff(days)) + 1).tolist(), len(days)]
    for first, stop in itertools.pairwise(edges):
        yield int(days[first]), batch.slice(first, stop - first)


class _Writer:
    """Writer of one file."""

    def __init__(self, task: ExportTask, day: int) -> None:
        self.day = day
        self._root = Path(task.folder)
        self._folder = f"date={datetime.fromtimestamp(day * DAY_US // 1_000_000, UTC):%Y-%m-%d}"
        (self._root / self._folder).mkdir(parents=True, exist_ok=True)
        self._temporary = f"{self._folder}/.part-{os.getpid()}-{os.urandom(8).hex()}"
        self._parquet = pq.ParquetWriter(self._root / self._temporary, WANTED.schema(), compression="zstd")
        self._rows = self._first_seq = self._last_seq = self._ts_max = 0
        self._ts_min = (day + 1) * DAY_US

    def add(self, batch: Any) -> None:
        seqs = batch.column(batch.schema.names.index("seq"))
        self._first_seq = self._first_seq or seqs[0].as_py()
        self._last_seq = seqs[-1].as_py()
        self._rows += batch.num_rows
        ts = np.asarray(batch.column(batch.schema.names.index("ts")).cast("int64"))
        self._ts_min, self._ts_max = min(self._ts_min, int(ts.min())), max(self._ts_max, int(ts.max()))
        self._parquet.write_batch(batch, row_group_size=ROW_GROUP_ROWS)

    def close(self) -> ExportFile:
        self._parquet.close()
        # Deterministic: the same rows get the same name.
        name = f"part-{self._first_seq:016x}-{self._last_seq + 1:016x}.parquet"
        return ExportFile(
            path=f"{self._folder}/{name}",
            temporary=self._temporary,
            rows=self._rows,
            bytes=sync(self._root / self._temporary),
            first_seq=self._first_seq,
            next_seq=self._last_seq + 1,
            ts_min=self._ts_min // 1000,
            ts_max=-(-self._ts_max // 1000),
        )

    def discard(self) -> None:
        self._parquet.close()
        (self._root / self._temporary).unlink(missing_ok=True)


def sync(path: Path) -> int:
    """fsync a file or directory; return its size."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)
