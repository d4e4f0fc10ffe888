"""Output files of a report, each replaced atomically."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from spark_pipeline.report.model import Report, as_json, rows_of
from spark_pipeline.report.page import page
from spark_pipeline.schedule.state import replace_file

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
    replace_file(folder / "metrics.parquet", _parquet(report))
    replace_file(folder / "report.json", msgspec.json.format(msgspec.json.encode(as_json(report))))
    replace_file(folder / "report.html", page(report).encode())


def _parquet(report: Report) -> bytes:
    rows = list(rows_of(report))
    columns = [pa.array([report.run_id] * len(rows), pa.string())]
    columns += [pa.array([row[column] for row in rows], SCHEMA.field(column + 1).type) for column in range(4)]
    out = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), out, compression="zstd")
    return out.getvalue()
