"""docs/spark.md is run as it is, its Python and SQL in the session of these tests, and so are the jobs of the example."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from spark_pipeline.cli.__main__ import main
from spark_pipeline.cli.arguments import use_engine
from spark_pipeline.jobs.engines import SparkEngine
from spark_pipeline.schedule.config import load
from tests.spark.conftest import COUNT, retry_start
from tests.support.pages import PageRunner, blocks
from tests.support.server import ROOT, Server

PAGE = "docs/spark.md"
PAID = 3


@pytest.mark.timeout(900)  # five jobs and two streams, also on a slow machine
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
                retry_start(partial(runner.run, block))
    finally:
        runner.close()
    assert parquet.read_table(tmp_path / "lake" / "orders").num_rows == COUNT + PAID
    assert server.diff("clean").json["head_seq"] == PAID
    assert server.diff("kept").json["head_seq"] == COUNT + PAID
    assert server.diff("copy").json["head_seq"] == COUNT + PAID


def test_the_jobs_of_the_example_run(
    spark: Any, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Spark, one after the other, on one topic only: the others belong to other tests."""
    monkeypatch.setenv("TOPICS_URL", f"http://{server.host}:{server.port}")
    monkeypatch.chdir(tmp_path)
    schedule = load(ROOT / "deploy" / "examples" / "spark-report" / "schedule.toml")
    with use_engine(SparkEngine(spark)):
        for job in schedule.jobs:
            assert main(["orders" if word == ">" else word for word in schedule.command_of(job)]) == 0
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == [
        "metrics.parquet",
        "report.html",
        "report.json",
    ]
