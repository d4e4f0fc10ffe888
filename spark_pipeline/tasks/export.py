"""Writing some rows of a topic into a Parquet file, whose name says which they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from spark_pipeline.tasks.reading import Slice, Wanted, read_slice
from spark_pipeline.tasks.segments import Damage

ROW_GROUP_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class ExportTask:
    """Slices of one topic that follow one another. Seqs are half-open."""

    folder: str
    slices: Sequence[Slice]
    wanted: Wanted

    @property
    def name(self) -> str:
        """The same for the same rows: a rerun replaces the file by itself."""
        first, last = self.slices[0], self.slices[-1]
        low = first.segment.first_seq + first.first_row
        high = last.segment.first_seq + last.stop_row
        return f"part-{low:016x}-{high:016x}.parquet"


@dataclass(slots=True)
class ExportResult:
    name: str
    rows: int = 0
    bytes: int = 0
    seq_min: int = 0
    seq_max: int = 0
    damage: list[Damage] = field(default_factory=list)


def export_slices(task: ExportTask, *, on_corrupt: str = "fail") -> ExportResult:
    """Write the file aside, sync it and rename it. No file when there are no rows."""
    target = Path(task.folder) / task.name
    target.parent.mkdir(parents=True, exist_ok=True)
    result = ExportResult(task.name)
    damage = result.damage if on_corrupt == "skip" else None
    aside = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(6).hex()}")
    writer = None
    try:
        for part in task.slices:
            for batch in read_slice(part, task.wanted, damage):
                if not batch.num_rows:
                    continue
                writer = writer or pq.ParquetWriter(aside, task.wanted.schema(), compression="zstd")
                writer.write_batch(batch, row_group_size=ROW_GROUP_ROWS)
                result.rows += batch.num_rows
                _note_seqs(result, batch)
        if writer is None:
            return result
        writer.close()
        result.bytes = _sync(aside)
        os.replace(aside, target)
        _sync_dir(target.parent)
    finally:
        if writer is not None:
            writer.close()
        aside.unlink(missing_ok=True)
    return result


def _note_seqs(result: ExportResult, batch: object) -> None:
    names = batch.schema.names  # type: ignore[attr-defined]
    if "seq" not in names:
        return
    seqs = batch.column(names.index("seq"))  # type: ignore[attr-defined]
    result.seq_min = result.seq_min or seqs[0].as_py()
    result.seq_max = seqs[-1].as_py()


def _sync(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _sync_dir(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
