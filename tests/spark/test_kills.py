"""Processes that are killed with SIGKILL at the worst moments: whoever goes on or runs it again makes it good, and each record is there once.

Method: a proxy between Spark and the server tells when a certain call comes, and kills before it, in it, or after it. Victims are the driver's Python, its
JVM, a Python worker and the server.
"""

from __future__ import annotations

import functools
import json
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
from tests.spark.conftest import record, segments_of, seqs_of, url_of
from tests.spark.test_consolidate import SMALL, job
from tests.spark.test_sink import numbers, rows, transactions_end
from tests.support.server import ROOT, Server, _children_of, is_alive, until
from tests.support.watching_proxy import WatchingProxy, watching

COUNT = 25
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
    running = query.trigger(availableNow=True).start()
    try:
        running.awaitTermination(240)
    finally:
        running.stop()


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


def jvm_of(driver: int) -> int:
    """The JVM below a driver, which may have a shell between."""

    def find(pid: int) -> int | None:
        for child in _children_of(pid):
            if Path(f"/proc/{child}/comm").read_text().strip() == "java":
                return child
            if (found := find(child)) is not None:
                return found
        return None

    return int(until(lambda: find(driver)))


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

    def kill(self, victim: str) -> None:
        killed(self.process.pid if victim == "driver" else jvm_of(self.process.pid))

    def end(self) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=240)
            return self.process.returncode, out.decode(), err.decode()
        finally:
            # What is left of it: a JVM may take a moment to find out that nobody wants it any more.
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


# ── The sink ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("victim", "when"), [("driver", "after"), ("jvm", "before")])
def test_a_stream_whose_driver_is_killed_at_a_commit(
    spark: Any, server: Server, proxy: WatchingProxy, topic: str, tmp_path: Path, victim: str, when: Any
) -> None:
    """Of three batches the first is there. Of the second the server knows all or nothing, and Spark knows nothing."""
    driver = Driver("-c", DRIVER, url_of(server), proxy.url, topic, str(tmp_path / "checkpoint"))
    try:
        proxy.at("/commit", when, lambda _: driver.kill(victim), skip=1)
        until(lambda: proxy.sprung.is_set() or driver.process.poll() is not None, 240)
    finally:
        code, _, said = driver.end()
    assert proxy.sprung.is_set(), said
    assert code != 0
    there = BATCH * (2 if when == "after" else 1)
    assert numbers(server, topic) == list(range(1, there + 1))
    copy(spark, url_of(server), url_of(server), topic, str(tmp_path / "checkpoint"))
    assert numbers(server, topic) == list(range(1, COUNT + 1))
    transactions_end(server)


def test_a_stream_whose_workers_are_killed(
    spark: Any, server: Server, proxy: WatchingProxy, topic: str, tmp_path: Path
) -> None:
    """One that stages is killed and its task is done again; one that commits takes the query with it, which is started again."""
    source, checkpoint = url_of(server), str(tmp_path / "checkpoint")
    proxy.at("/stage", "after", killed)
    copy(spark, source, proxy.url, topic, checkpoint)
    assert proxy.sprung.is_set()
    assert numbers(server, topic) == list(range(1, COUNT + 1))
    server.post(f"/v0/topics/{topic}.source", {"records": [record(n) for n in range(COUNT + 1, 51)]})
    proxy.at("/commit", "after", killed, skip=1)
    with pytest.raises(Exception, match=r"(?i)worker"):
        copy(spark, source, proxy.url, topic, checkpoint)
    assert proxy.sprung.is_set()
    copy(spark, source, proxy.url, topic, checkpoint)
    assert numbers(server, topic) == list(range(1, 51))
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


@pytest.mark.parametrize("victim", ["driver", "jvm"])
def test_a_merge_whose_driver_is_killed(server: Server, proxy: WatchingProxy, victim: str) -> None:
    name = {"driver": "m16", "jvm": "m17"}[victim]
    before, count = seqs_of(server, name), segments_of(server, name)
    command = [
        "-m",
        "spark_pipeline.cli",
        "compact",
        name,
        "--target-bytes",
        "4000",
        "--lease-ms",
        "1000",
        "--json",
    ]
    driver = Driver(*command, "--url", proxy.url, "--master", "local[1]")
    staging = server.folder / "cold" / "staging" / "plans"
    try:
        if victim == "driver":
            proxy.at("/commit", "before", lambda _: driver.kill(victim))
            ended = proxy.sprung.is_set
        else:
            ended = lambda: bool(list(staging.glob("*/group-*.json")))  # noqa: E731
        until(lambda: ended() or driver.process.poll() is not None, 240, every_s=0.001)
        if victim == "jvm":
            driver.kill(victim)
    finally:
        code, out, said = driver.end()
    assert seqs_of(server, name) == before
    if code == 0:
        # The JVM had done its work when it was killed: the driver did the rest.
        assert victim == "jvm"
        assert json.loads(out)[0]["state"] == "committed"
        return
    assert victim == "driver" or (code == 3 and "run it again, and it goes on from here" in said), said

    def again() -> dict[str, Any] | None:
        # While the lease of the dead job holds, this says so and ends.
        arguments = [*command, "--url", url_of(server), "--engine", "local", "--workers", "1"]
        run = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, check=False)
        assert run.returncode in {0, 4}, run.stderr.decode()
        return dict(json.loads(run.stdout)[0]) if run.returncode == 0 else None

    outcome = until(again)
    assert outcome["state"] == "committed"
    assert outcome["resumed"] >= 1
    assert seqs_of(server, name) == before
    assert segments_of(server, name) < count


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
