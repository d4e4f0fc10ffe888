"""One Spark session for all tests of this folder: they are sorted to the front, so that one pytest process runs them all."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.server import Server, until

T = TypeVar("T")
HERE = Path(__file__).parent
QUICK_SITE = HERE.parent / "support" / "spark_site"
HAS_SPARK = all(importlib.util.find_spec(name) for name in ("pyspark", "pyarrow"))
# test_java.py needs no Spark, and reports that it is missing.
collect_ignore = (
    [] if HAS_SPARK else [path.name for path in HERE.glob("test_*.py") if path.name != "test_java.py"]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.spark)
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session", autouse=True)
def quick_starts() -> Iterator[None]:
    """Settings for a faster start of each JVM: without its second compiler, which costs more than it saves in short runs, and with one
    garbage collection thread. And of each Python process that Spark starts: tests/support/spark_site.
    """
    options = os.environ.get("JDK_JAVA_OPTIONS", "")
    path = os.environ.get("PYTHONPATH")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JDK_JAVA_OPTIONS", f"{options} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC".strip())
        patch.setenv("PYTHONPATH", os.pathsep.join([str(QUICK_SITE), *([path] if path else [])]))
        yield


@pytest.fixture(scope="session")
def event_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of Spark's event log."""
    return tmp_path_factory.mktemp("spark-events")


@pytest.fixture(scope="session")
def spark(event_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from spark_pipeline.session import session

    options = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": event_log.as_uri(),
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.compress": "false",
        "spark.sql.shuffle.partitions": "2",
        # For a hundred rows, compiling a query takes longer than interpreting it.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.python.daemon.module": "tests.support.spark_daemon",
        "spark.sql.warehouse.dir": tmp_path_factory.mktemp("warehouse").as_uri(),
    }
    # A failed task is retried once.
    found = session("local[2,2]", app="tests", options=options)
    yield found
    found.stop()


def events_of(folder: Path) -> list[dict[str, Any]]:
    """The events that Spark has logged so far, without an incomplete last line."""
    lines = [line for path in folder.iterdir() for line in path.read_text().split("\n")[:-1]]
    return [json.loads(line) for line in lines]


def retry_start(attempt: Callable[[], T]) -> T:
    """Restart a stream whose Python process was not ready within ten seconds: on a busy machine that happens, and Spark has no
    setting for it. The stream continues from its checkpoint.
    """
    for tries_left in range(15, -1, -1):
        try:
            return attempt()
        except Exception as error:
            if not tries_left or "failed to connect back" not in str(error):
                raise
    raise AssertionError("the last attempt returns or raises")


def run_to_end(query: Any) -> None:
    """Run a stream until it has processed everything."""

    def run() -> None:
        running = query.trigger(availableNow=True).start()
        try:
            assert running.awaitTermination(240)
        finally:
            running.stop()

    retry_start(run)


TOPICS = tuple(f"m{i}" for i in range(1, 20))  # one for each test that changes its topic
COUNT = 100
PAGE_TOPIC = "orders"  # of docs/spark.md
WIDE_TOPIC = "wide"  # 40 records of 50 kB
WIDE_COUNT = 40
SEGMENT = 10


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose topics have 100 records each: 90 in nine cold segments, the newest ten are hot."""
    folder = tmp_path_factory.mktemp("server")
    environment = {
        "TOPICS_COLD_DIR": str(folder / "cold"),
        "TOPICS_HOT_RETAIN_SEGMENTS": "1",
        "TOPICS_SEGMENT_MAX_EVENTS": str(SEGMENT),
        "TOPICS_SEGMENT_MAX_AGE_MS": "0",
    }
    found = Server(folder, environment=environment, shards=1).start()
    found.environment = {**environment, "TOPICS_PORT": str(found.port)}  # the same after a restart
    try:
        for topic in (*TOPICS, PAGE_TOPIC):
            for first in range(1, COUNT + 1, 5):
                records = [record(n) for n in range(first, first + 5)]
                assert found.post(f"/v0/topics/{topic}", {"records": records}).status in {200, 201}
        for _ in range(0, WIDE_COUNT, 5):
            assert found.write(WIDE_TOPIC, *["x" * 50_000] * 5).status in {200, 201}
        assert found.stop() == 0  # the last snapshot has all records in segments
        found.start()
        until(lambda: all(segments_of(found, topic) >= 9 for topic in (*TOPICS, PAGE_TOPIC)))
        until(lambda: segments_of(found, WIDE_TOPIC) >= 3)
        # Now the snapshot says that they are cold: otherwise they would be relocated again after a kill.
        assert found.stop() == 0
        found.start()
        yield found
    finally:
        found.close()


def record(n: int) -> dict[str, Any]:
    return {
        "data": {"n": n, "text": "x" * n},
        "tag": f"tag-{n % 4}",
        "node": f"node-{n % 2}",
        "meta": {"m": n},
    }


def segments_of(server: Server, topic: str) -> int:
    from spark_pipeline.tasks.manifest import NoManifest, find_topics

    try:
        [found] = find_topics(str(server.folder / "cold"), topic)
    except NoManifest:
        return 0
    return len(found.manifest.segments)


def url_of(server: Server) -> str:
    return f"http://{server.host}:{server.port}"


def seqs_of(server: Server, topic: str) -> list[int]:
    """The seqs that a client reads."""
    found: list[int] = []
    cursor = 0
    while True:
        page = server.diff(topic, from_seq=cursor, limit=1000).json
        found += [one["$seq"] for one in page["records"]]
        cursor = page["next_from_seq"]
        if page["caught_up"]:
            return found
