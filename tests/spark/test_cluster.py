"""Several executors, each a JVM of its own, on this machine: work is spread over them, one that is killed is made good, and records stay out of the driver.

Method: `local-cluster[2,1,1024]` in a process of its own, and Spark's event log, which says who did what and how many bytes the driver got.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from spark_pipeline.tasks.merge import merge_group
from tests.spark.conftest import segments_of, url_of
from tests.spark.test_kills import Driver
from tests.support.server import Server, until

RECORD_BYTES = 50_000
COUNT = 100
TOPIC = "large"


def merge_and_kill_an_executor(mark: str, task: Any) -> Any:
    """The first of all takes the JVM above it with it."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return merge_group(task)
    pid = os.getppid()
    while Path(f"/proc/{pid}/comm").read_text().strip() != "java":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)
    raise SystemExit(1)


def drive(url: str, cold: str, events: str, mark: str) -> None:
    """Of the driver's process: a scrub, and a merge with a kill in it."""
    from spark_pipeline.jobs.consolidate import Consolidation, Parameters
    from spark_pipeline.jobs.engines import SparkEngine
    from spark_pipeline.jobs.progress import Progress
    from spark_pipeline.jobs.scrubbing import scrub
    from spark_pipeline.session import session
    from spark_pipeline.tasks import server as http
    from spark_pipeline.tasks.manifest import find_topics

    class Deadly(SparkEngine):
        def start(self, function: Any, tasks: Any) -> Any:
            deadly = functools.partial(merge_and_kill_an_executor, mark)
            deadly.__name__ = function.__name__  # type: ignore[attr-defined]
            return super().start(deadly, tasks)

    options = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": Path(events).as_uri(),
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.compress": "false",
        # Both have come before the first task is given out.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "240s",
        "spark.locality.wait": "0",
    }
    spark = session("local-cluster[2,1,1024]", options=options)
    progress = Progress(sys.stderr, as_json=True)
    assert not scrub(find_topics(cold, TOPIC), SparkEngine(spark), progress).damage
    parameters = Parameters(target_bytes=1_100_000, min_segments=2)
    outcome = Consolidation(http.Server(url), TOPIC, Deadly(spark), progress, parameters).run()
    print(json.dumps([outcome.state, outcome.groups, outcome.bytes_out]))
    spark.stop()


PROGRAM = "import sys; from tests.spark.test_cluster import drive; drive(*sys.argv[1:])"


def test_two_executors_of_which_one_is_killed(server: Server, tmp_path: Path) -> None:
    for _ in range(0, COUNT, 10):
        records = [{"data": "x" * RECORD_BYTES} for _ in range(10)]
        assert server.post(f"/v0/topics/{TOPIC}", {"records": records}).status in {200, 201}
    assert server.stop() == 0  # with a start they move
    server.start()
    until(lambda: segments_of(server, TOPIC) >= 9)
    before = server.diff(TOPIC, limit=1000).json["records"]
    events = tmp_path / "events"
    events.mkdir()
    driver = Driver(
        "-c", PROGRAM, url_of(server), str(server.folder / "cold"), str(events), str(tmp_path / "mark")
    )
    code, out, said = driver.end()
    assert code == 0, said
    state, groups, merged_bytes = json.loads(out)
    assert (state, server.diff(TOPIC, limit=1000).json["records"]) == ("committed", before)
    assert groups >= 4
    assert merged_bytes > 4_000_000
    told = [json.loads(line) for path in events.iterdir() for line in path.read_text().splitlines()]
    kinds = Counter(one["Event"] for one in told)
    assert kinds["SparkListenerExecutorAdded"] >= 2
    assert kinds["SparkListenerExecutorRemoved"] >= 1
    done = [
        one
        for one in told
        if one["Event"] == "SparkListenerTaskEnd" and one["Task End Reason"]["Reason"] == "Success"
    ]
    assert len({one["Task Info"]["Executor ID"] for one in done}) >= 2, "both have scrubbed"
    received = sum(one["Task Metrics"]["Result Size"] for one in done)
    assert received < merged_bytes / 50, "the driver gets figures, no records"
    server.delete(f"/v0/topics/{TOPIC}")
