"""All jobs of a night: a server that is written to and relocates segments, and a schedule that merges, exports and reports. With
`--long` the schedule has its own Spark session (otherwise the tests of each job use one).

The lake, the report and a query are compared with the log, record by record.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from spark_pipeline.lake.parquet import folder_of, read_manifest
from tests.spark.conftest import segments_of, url_of
from tests.spark.test_schedule import OFTEN, Process
from tests.spark.test_sink import read
from tests.support.length import is_long
from tests.support.server import Server, until

ENVIRONMENT = {
    "TOPICS_HOT_RETAIN_SEGMENTS": "1",
    "TOPICS_SEGMENT_MAX_EVENTS": "100",
    "TOPICS_SEGMENT_MAX_AGE_MS": "0",
}
ENGINE = 'engine="spark"\nmaster="local[2]"' if is_long() else 'engine="local"\nworkers=1'
COUNT = 800
PAGE = 50


def records(first: int) -> list[dict[str, Any]]:
    return [
        {"data": {"n": n, "text": "x" * (n % 977)}, "tag": f"t{n % 5}"} for n in range(first, first + PAGE)
    ]


@contextmanager
def load(server: Server, topic: str, first: int) -> Iterator[None]:
    """Writes as fast as they are answered, but not so many that reading them takes long."""
    over = threading.Event()

    def write() -> None:
        at = first
        while not over.is_set():
            assert server.post(f"/v0/topics/{topic}", {"records": records(at)}).status == 200
            at += PAGE
            over.wait(0.05)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()


@pytest.mark.timeout(900)  # Spark may be started once more, also on a slow machine
def test_a_night(spark: Any, tmp_path: Path) -> None:
    folder, lake, out = tmp_path / "server", tmp_path / "lake", tmp_path / "out"
    folder.mkdir()
    server = Server(folder, environment={**ENVIRONMENT, "TOPICS_COLD_DIR": str(folder / "cold")}, shards=1)
    server.start()
    try:
        for first in range(0, COUNT, PAGE):
            assert server.post("/v0/topics/log", {"records": records(first)}).status in {200, 201}
        dead = list(range(7, COUNT, 7))
        assert server.post("/v0/topics/log/delete", {"seqs": dead}).json["deleted"] == len(dead)
        # A start relocates everything but the newest; otherwise that takes a minute.
        assert server.stop() == 0
        server.start()
        until(lambda: segments_of(server, "log") >= 6)
        jobs = (
            f'name="1-merge"\nrun="compact"\ntopics=["log"]\n{OFTEN}\ntarget_bytes="200k"',
            f'name="2-export"\nrun="export"\ntopics=["log"]\n{OFTEN}\nout="{lake}"',
            f'name="3-report"\nrun="report"\ntopics=["log"]\n{OFTEN}\nout="{out}"',
        )
        with load(server, "log", COUNT):
            schedule = Process(tmp_path, server, *jobs, engine=ENGINE)
            try:
                until(lambda: all(schedule.results().values()) or schedule.process.poll() is not None, 600)
                assert schedule.terminate() == 0, schedule.log.read_text()
            finally:
                schedule.process.kill()
        runs = schedule.file.load().jobs
        assert {name: job.runs[0].result for name, job in runs.items()} == dict.fromkeys(runs, "done")
        assert runs["1-merge"].runs[0].figures["groups"] >= 1
        check(spark, server, lake, out)
    finally:
        server.close()


def check(spark: Any, server: Server, lake: Path, out: Path) -> None:
    log = [(one["$seq"], one["$tag"], one["data"]) for one in read(server, "log")]
    manifest = read_manifest(folder_of(str(lake), "log"))
    assert manifest is not None
    assert manifest.next_seq >= 600
    exported = spark.read.parquet(str(lake)).where("topic = 'log'").orderBy("seq").collect()
    assert [(row.seq, row.tag, json.loads(row.data)) for row in exported] == [
        one for one in log if one[0] < manifest.next_seq
    ]
    asked = spark.read.format("topics").options(url=url_of(server), topic="log", dataAs="json").load()
    assert [(row.seq, row.tag, json.loads(row.data)) for row in asked.orderBy("seq").collect()] == log
    report = json.loads((out / "report.json").read_text())
    figures = report["topics"]["log"]
    head = figures["seq"]["head"]
    counted = [one for one in log if one[0] <= head]
    assert figures["records"]["live"] == len(counted)
    seqs = [0, *(seq for seq, _, _ in counted), head + 1]
    assert figures["gaps"][""] == sum(two - one > 1 for one, two in pairwise(seqs))
    assert figures["export_rows"] == {str(lake): len(exported)}
    assert {run["job"] for run in report["history"]} >= {"1-merge", "2-export"}
