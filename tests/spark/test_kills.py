"""Processes that are killed with SIGKILL at the worst moments: whoever goes on or runs it again makes it good, and each record is there once.

Method: a proxy between Spark and the server tells when a certain call comes, and kills before it, in it, or after it. Victims are the driver's Python, a
Python worker and the server. (JVMs are killed in test_cluster.py, and a merge's driver in test_consolidate.py.)
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
from tests.spark.conftest import ended, record, segments_of, seqs_of, url_of
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
    """A stream in batches of ten, until there is nothing left."""
    options = {"columns": "data", "dataAs": "json", "maxRecordsPerTrigger": str(BATCH), "minPartitions": "2"}
    stream = spark.readStream.format("topics").options(url=source, topic=f"{topic}.source", **options).load()
    query = stream.writeStream.format("topics").options(url=sink, topic=topic, checkpointLocation=folder)
    ended(query)


DRIVER = """
import sys
from spark_pipeline.session import session
from tests.spark.test_kills import copy
copy(session("local[2]"), *sys.argv[1:])
"""


def killed(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(is_alive(pid) for pid in pids))


class Driver:
    """A process with a session of Spark's own."""

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
            # What is left of it: a JVM may take a moment to find out that nobody wants it any more.
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


# ── The sink ──────────────────────────────────────────────────────────────────────────


@only_long("starts Spark once more: the next test kills the process that commits, and starts the query again")
@pytest.mark.timeout(900)  # on whatever machine
def test_a_stream_whose_driver_is_killed_at_a_commit(
    spark: Any, server: Server, proxy: WatchingProxy, topic: str, tmp_path: Path
) -> None:
    """The second batch is published, and Spark does not know it."""
    proxy.at("/commit", "after", lambda _: killed(driver.process.pid), skip=1)
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
    """One that stages is killed and its task is done again; one that commits takes the query with it, which is started again: its
    batch is published, and Spark does not know it.
    """
    source, checkpoint = url_of(server), str(tmp_path / "checkpoint")

    def killed_twice(worker: int) -> None:
        killed(worker)
        proxy.at("/commit", "after", killed, skip=1)

    proxy.at("/stage", "after", killed_twice)
    with pytest.raises(Exception, match=r"(?i)worker"):
        copy(spark, source, proxy.url, topic, checkpoint)
    assert proxy.sprung.wait(60)
    assert numbers(server, topic) == list(range(1, COUNT + 1)), "both batches are whole"
    server.post(f"/v0/topics/{topic}.source", {"records": [record(COUNT + 1)]})
    copy(spark, source, proxy.url, topic, checkpoint)
    assert numbers(server, topic) == list(range(1, COUNT + 2))
    transactions_end(server)


@pytest.mark.parametrize(("count", "when"), [(24_000, "during"), (50, "before")])
def test_a_server_that_is_killed_at_a_commit(
    spark: Any, server: Server, proxy: WatchingProxy, topic: str, count: int, when: Any
) -> None:
    """The larger one is decided first, and appended bit by bit."""

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
    """A merge that is killed before its last step, once for each group: all files are there but the one that names them."""
    mark = Path(marks) / str(task.group.group)
    if not mark.exists():
        mark.touch()
        merge._put_sidecar = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    return merge.merge_group(task)


class Deadly:
    """Spark, with tasks that kill their workers."""

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
    """Each group takes its first worker with it; then the server dies while it publishes."""
    before, count = seqs_of(server, "m18"), segments_of(server, "m18")

    def die(_: int) -> None:
        server.kill()
        server.start()

    proxy.at("/commit", "during", die)
    through = Server(server.folder, host="127.0.0.1", port=int(proxy.url.rpartition(":")[2]))
    outcome = job(through, "m18", Deadly(SparkEngine(spark), tmp_path), SMALL).run()
    assert proxy.sprung.is_set()
    assert len(list(tmp_path.iterdir())) >= 2
    assert outcome.state == "committed"
    assert seqs_of(server, "m18") == before
    assert segments_of(server, "m18") < count
