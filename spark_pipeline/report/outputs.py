"""The files of a report, each of them replaced as a whole: whoever looks meanwhile sees the last one."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from spark_pipeline.report.model import Report, as_json, rows_of
from spark_pipeline.report.page import page
from spark_pipeline.schedule.state import write_whole

SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("topic", pa.string()),
        ("metric", pa.string()),
        ("dimension", pa.string()),
        ("value", pa.float64()),
    ]
)


def write(report: Report, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "metrics.parquet", _parquet(report))
    write_whole(folder / "report.json", msgspec.json.format(msgspec.json.encode(as_json(report))))
    write_whole(folder / "report.html", page(report).encode())


def _parquet(report: Report) -> bytes:
    rows = list(rows_of(report))
    columns = [pa.array([report.run_id] * len(rows), pa.string())]
    columns += [pa.array([row[column] for row in rows], SCHEMA.field(column + 1).type) for column in range(4)]
    out = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), out, compression="zstd")
    return out.getvalue()
