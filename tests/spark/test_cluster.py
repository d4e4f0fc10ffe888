"""Several executors, each with its own JVM, on one machine: work is distributed, tasks of a killed one are repeated, and records do not pass through the driver.
When the driver's JVM is killed, the job says what to do, and the next one resumes.

Method: `local-cluster[2,1,1024]` in a separate process, and Spark's event log, which says which executor ran what and how many bytes the driver received.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from spark_pipeline.jobs.engines import LocalEngine
from spark_pipeline.tasks.merge import merge_group
from tests.spark.conftest import events_of, segments_of, url_of
from tests.spark.test_consolidate import job, retry_while_leased
from tests.spark.test_kills import Driver
from tests.spark.test_sink import read
from tests.support.length import only_long
from tests.support.server import Server, until

RECORD_BYTES = 50_000
COUNT = 100
TOPIC = "large"
OTHER = "m16"


def merge_and_kill(mark: str, jvm: int, task: Any) -> Any:
    """The first task of all kills a JVM when it is done: its executor's, or the driver's above it."""
    done = merge_group(task)
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return done
    pid = jvm or os.getppid()
    while Path(f"/proc/{pid}/comm").read_text().strip() != "java":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)
    raise SystemExit(1)


def drive(url: str, cold: str, events: str, mark: str) -> None:
    """The driver process: a scrub, a merge with a killed executor, and one whose driver is killed."""
    from spark_pipeline.cli.__main__ import main
    from spark_pipeline.cli.arguments import use_engine
    from spark_pipeline.jobs.engines import SparkEngine
    from spark_pipeline.jobs.progress import Progress
    from spark_pipeline.jobs.scrubbing import scrub
    from spark_pipeline.session import session
    from spark_pipeline.tasks.manifest import find_topics

    class KillingEngine(SparkEngine):
        jvm = 0

        def start(self, function: Any, tasks: Any) -> Any:
            deadly = functools.partial(merge_and_kill, f"{mark}-{self.jvm}", self.jvm)
            deadly.__name__ = function.__name__  # type: ignore[attr-defined]
            return super().start(deadly, tasks)

    options = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": Path(events).as_uri(),
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.compress": "false",
        # Both executors must be registered before the first task is started.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "240s",
        "spark.locality.wait": "0",
    }
    spark = session("local-cluster[2,1,1024]", options=options)
    assert not scrub(find_topics(cold, TOPIC), SparkEngine(spark), Progress(sys.stderr, as_json=True)).damage
    engine = KillingEngine(spark)
    command = ["compact", "--url", url, "--min-segments", "2", "--lease-ms", "3600000", "--json"]
    with use_engine(engine):
        assert main([*command, "--target-bytes", "1100000", TOPIC]) == 0
        sys.stdout.flush()
        engine.jvm = spark.sparkContext._gateway.proc.pid
        sys.exit(main([*command, "--target-bytes", "4000", OTHER]))


PROGRAM = "import sys; from tests.spark.test_cluster import drive; drive(*sys.argv[1:])"


@only_long("four JVMs: test_consolidate.py and test_kills.py kill workers, drivers and servers with one JVM")
@pytest.mark.timeout(900)  # also on a slow machine
def test_executors_and_a_driver_that_are_killed(server: Server, tmp_path: Path) -> None:
    for _ in range(0, COUNT, 10):
        records = [{"data": "x" * RECORD_BYTES} for _ in range(10)]
        assert server.post(f"/v0/topics/{TOPIC}", {"records": records}).status in {200, 201}
    assert server.stop() == 0  # the start relocates the segments
    server.start()
    until(lambda: segments_of(server, TOPIC) >= 9)
    before = {topic: read(server, topic) for topic in (TOPIC, OTHER)}
    count = segments_of(server, OTHER)
    events = tmp_path / "events"
    events.mkdir()
    driver = Driver(
        "-c", PROGRAM, url_of(server), str(server.folder / "cold"), str(events), str(tmp_path / "mark")
    )
    code, out, said = driver.end()
    assert code == 3, said
    assert "run it again to resume" in said
    for topic, records in before.items():
        assert read(server, topic) == records
    check_executors(events_of(events), json.loads(out)[0])
    assert segments_of(server, OTHER) == count
    with closing(LocalEngine(1)) as engine:
        outcome = retry_while_leased(lambda: job(server, OTHER, engine).run())
    assert outcome.state == "committed"
    assert outcome.resumed >= 1
    assert read(server, OTHER) == before[OTHER]
    assert segments_of(server, OTHER) < count
    server.delete(f"/v0/topics/{TOPIC}")


def check_executors(events: list[dict[str, Any]], outcome: dict[str, Any]) -> None:
    assert outcome["state"] == "committed"
    assert outcome["groups"] >= 4
    assert outcome["resumed"] >= 1, "finished groups of the killed executor were reused"
    assert outcome["bytes_out"] > 4_000_000
    kinds = Counter(one["Event"] for one in events)
    assert kinds["SparkListenerExecutorAdded"] >= 2
    assert kinds["SparkListenerExecutorRemoved"] >= 1
    done = [
        one
        for one in events
        if one["Event"] == "SparkListenerTaskEnd" and one["Task End Reason"]["Reason"] == "Success"
    ]
    assert len({one["Task Info"]["Executor ID"] for one in done}) >= 2, "both executors have scrubbed"
    received = sum(one["Task Metrics"]["Result Size"] for one in done)
    assert received < outcome["bytes_out"] / 50, "the driver received records"
