"""docs/spark.md is run as it stands: its Python and its SQL in the session of these tests, on their server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pyarrow import parquet

from spark_pipeline.schedule.config import load
from tests.spark.conftest import COUNT
from tests.support.pages import PageRunner, blocks
from tests.support.server import Server

PAGE = "docs/spark.md"
PAID = 3


def test_the_page_prints_what_it_shows(spark: Any, server: Server, tmp_path: Path) -> None:
    paid = [{"data": {"order": n}, "tag": "paid"} for n in range(PAID)]
    assert server.post("/v0/topics/orders", {"records": paid}).status == 200
    places = {
        "127.0.0.1:4000": f"{server.host}:{server.port}",
        "/mnt/cold": str(server.folder / "cold"),
        "/lake": str(tmp_path / "lake"),
    }
    runner = PageRunner(tmp_path, places)
    try:
        for block in blocks(PAGE):
            if block.language == "toml":
                (tmp_path / "schedule.toml").write_text(block.text)
                assert load(tmp_path / "schedule.toml").jobs
            elif block.language == "sql":
                queries = [
                    f"spark.sql('''{one}''').collect()\n" for one in block.text.split(";") if one.strip()
                ]
                runner.run(replace(block, language="python", text="".join(queries)))
            elif block.runs:
                runner.run(block)
    finally:
        runner.close()
    assert parquet.read_table(tmp_path / "lake" / "orders").num_rows == COUNT + PAID
    assert server.diff("clean").json["head_seq"] == PAID
    assert server.diff("copy").json["head_seq"] == COUNT + PAID
