"""Processes of Spark and the server are killed (-9) at the worst moments: after a retry or a restart each record is there once.

Method: a proxy between Spark and the server recognises a certain call, and kills a process before, during or after it: the driver's Python, a
Python worker or the server. (JVMs are killed in test_cluster.py, and a merge's driver in test_consolidate.py.)
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from spark_pipeline.jobs.engines import Running, SparkEngine
from spark_pipeline.tasks import merge
from tests.spark.conftest import record, run_to_end, segments_of, seqs_of, url_of
from tests.spark.test_consolidate import SMALL, job
from tests.spark.test_sink import numbers, rows, transactions_end
from tests.support.length import only_long
from tests.support.server import ROOT, Server, is_alive, until
from tests.support.watching_proxy import WatchingProxy, watching

COUNT = 15
BATCH = 10


@pytest.fixture
def proxy(server: Server) -> Iterator[WatchingProxy]:
    with watching(url_of(server)) as found:
        yield found


@pytest.fixture
def topic(server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"kill.{abs(hash(request.node.name)):x}"
    server.post(f"/v0/topics/{name}.source", {"records": [record(n) for n in range(1, COUNT + 1)]})
    yield name
    for one in (name, f"{name}.source"):
        server.delete(f"/v0/topics/{one}")


def copy(spark: Any, source: str, sink: str, topic: str, folder: str) -> None:
    """A stream in batches of ten, until everything is copied."""
    options = {"columns": "data", "dataAs": "json", "maxRecordsPerTrigger": str(BATCH), "minPartitions": "2"}
    stream = spark.readStream.format("topics").options(url=source, topic=f"{topic}.source", **options).load()
    query = stream.writeStream.format("topics").options(url=sink, topic=topic, checkpointLocation=folder)
    run_to_end(query)


DRIVER = """
import sys
from spark_pipeline.session import session
from tests.spark.test_kills import copy
copy(session("local[2]"), *sys.argv[1:])
"""


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(is_alive(pid) for pid in pids))


class Driver:
    """A process with its own Spark session."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def end(self) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=600)
            return self.process.returncode, out.decode(), err.decode()
        finally:
            # A JVM may take a moment to notice that its parent has ended.
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


# ── The sink ──────────────────────────────────────────────────────────────────────────


@only_long("starts Spark once more: the next test kills the process that commits, and restarts the query")
@pytest.mark.timeout(900)  # also on a slow machine
def test_a_stream_whose_driver_is_killed_at_a_commit(
    spark: Any, server: Server, proxy: WatchingProxy, topic: str, tmp_path: Path
) -> None:
    """The second batch is published, but Spark does not know."""
    proxy.at("/commit", "after", lambda _: kill(driver.process.pid), skip=1)
    driver = Driver("-c", DRIVER, url_of(server), proxy.url, topic, str(tmp_path / "checkpoint"))
    code, _, said = driver.end()
    assert proxy.sprung.wait(60), said
    assert code == -signal.SIGKILL
    assert numbers(server, topic) == list(range(1, COUNT + 1))
    server.post(f"/v0/topics/{topic}.source", {"records": [record(COUNT + 1)]})
    copy(spark, url_of(server), url_of(server), topic, str(tmp_path / "checkpoint"))
    assert numbers(server, topic) == list(range(1, COUNT + 2))
    transactions_end(server)


def test_a_stream_whose_workers_are_killed(
    spark: Any, server: Server, proxy: WatchingProxy, topic: str, tmp_path: Path
) -> None:
    """A killed worker that stages has its task repeated. A killed worker that commits fails the query, which is restarted: its
    batch is already published, but Spark does not know.
    """
    source, checkpoint = url_of(server), str(tmp_path / "checkpoint")

    def kill_worker_and_committer(worker: int) -> None:
        kill(worker)
        proxy.at("/commit", "after", kill, skip=1)

    proxy.at("/stage", "after", kill_worker_and_committer)
    with pytest.raises(Exception, match=r"(?i)worker"):
        copy(spark, source, proxy.url, topic, checkpoint)
    assert proxy.sprung.wait(60)
    assert numbers(server, topic) == list(range(1, COUNT + 1)), "both batches are complete"
    server.post(f"/v0/topics/{topic}.source", {"records": [record(COUNT + 1)]})
    copy(spark, source, proxy.url, topic, checkpoint)
    assert numbers(server, topic) == list(range(1, COUNT + 2))
    transactions_end(server)


@pytest.mark.parametrize(("count", "when"), [(24_000, "during"), (50, "before")])
def test_a_server_that_is_killed_at_a_commit(
    spark: Any, server: Server, proxy: WatchingProxy, topic: str, count: int, when: Any
) -> None:
    """A large batch is decided first, and then appended in parts."""

    def die(_: int) -> None:
        server.kill()
        server.start()

    proxy.at("/commit", when, die)
    given = {"url": proxy.url, "topic": topic}
    rows(spark, count).write.format("topics").options(**given).mode("append").save()
    assert proxy.sprung.is_set()
    assert numbers(server, topic) == list(range(count))
    transactions_end(server)


# ── Merges ────────────────────────────────────────────────────────────────────────────


def merge_and_die(marks: str, task: Any) -> Any:
    """A merge that is killed before its last step, once for each group: only the sidecar is missing."""
    mark = Path(marks) / str(task.group.group)
    if not mark.exists():
        mark.touch()
        merge._put_sidecar = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    return merge.merge_group(task)


class KillingEngine:
    """A Spark engine whose tasks kill their workers."""

    name, workers = "deadly", 2

    def __init__(self, engine: SparkEngine, marks: Path) -> None:
        self._engine, self._marks = engine, marks

    def start(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Running[Any]:
        deadly = functools.partial(merge_and_die, str(self._marks))
        deadly.__name__ = function.__name__  # type: ignore[attr-defined]
        return self._engine.start(deadly, tasks)

    def close(self) -> None: ...


def test_workers_and_a_server_that_are_killed_in_one_merge(
    spark: Any, server: Server, proxy: WatchingProxy, tmp_path: Path
) -> None:
    """The first worker of each group is killed; then the server is killed while it publishes."""
    before, count = seqs_of(server, "m18"), segments_of(server, "m18")

    def die(_: int) -> None:
        server.kill()
        server.start()

    proxy.at("/commit", "during", die)
    through = Server(server.folder, host="127.0.0.1", port=int(proxy.url.rpartition(":")[2]))
    outcome = job(through, "m18", KillingEngine(SparkEngine(spark), tmp_path), SMALL).run()
    assert proxy.sprung.is_set()
    assert len(list(tmp_path.iterdir())) >= 2
    assert outcome.state == "committed"
    assert seqs_of(server, "m18") == before
    assert segments_of(server, "m18") < count
