"""The forms that a lake can have. Each has a folder of its own for a topic."""

from __future__ import annotations

from pathlib import Path

from spark_pipeline.lake import delta, parquet
from spark_pipeline.lake.table import Freshness, Table

FORMS = ("parquet", "delta")


def folder_of(form: str, out: str, topic: str) -> Path:
    return delta.folder_of(out, topic) if form == "delta" else parquet.folder_of(out, topic)


def open_table(form: str, out: str, topic: str, topic_id: str) -> Table:
    folder = folder_of(form, out, topic)
    if form == "delta":
        return delta.DeltaTable(folder, topic, topic_id)
    return parquet.ParquetTable(folder, topic, topic_id)


def freshness_of(out: str, topic: str) -> list[Freshness]:
    """How far the exports of a topic are; empty: there are none."""
    found = [
        parquet.freshness(parquet.folder_of(out, topic)),
        delta.freshness(delta.folder_of(out, topic)),
    ]
    return [one for one in found if one is not None]
