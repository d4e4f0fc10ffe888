"""One Spark session for all of these tests: they are sorted to the front, so one process of pytest runs them all."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
HAS_SPARK = all(importlib.util.find_spec(name) for name in ("pyspark", "pyarrow"))
# test_java.py can do without, and tells that something is missing.
collect_ignore = (
    [] if HAS_SPARK else [path.name for path in HERE.glob("test_*.py") if path.name != "test_java.py"]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.spark)
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def event_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Spark writes down what it did."""
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
        "spark.sql.warehouse.dir": tmp_path_factory.mktemp("warehouse").as_uri(),
    }
    found = session("local[2]", app="tests", options=options)
    yield found
    found.stop()
