"""Export formats. Each uses its own directory per topic."""

from __future__ import annotations

from pathlib import Path

from spark_pipeline.lake import delta, parquet
from spark_pipeline.lake.table import Freshness, Table

FORMATS = ("parquet", "delta")


def folder_of(format: str, out: str, topic: str) -> Path:
    return delta.folder_of(out, topic) if format == "delta" else parquet.folder_of(out, topic)


def open_table(format: str, out: str, topic: str, topic_id: str) -> Table:
    folder = folder_of(format, out, topic)
    if format == "delta":
        return delta.DeltaTable(folder, topic, topic_id)
    return parquet.ParquetTable(folder, topic, topic_id)


def freshness_of(out: str, topic: str) -> list[Freshness]:
    """The state of a topic's exports, in all formats."""
    states = [
        parquet.freshness(parquet.folder_of(out, topic)),
        delta.freshness(delta.folder_of(out, topic)),
    ]
    return [state for state in states if state is not None]
