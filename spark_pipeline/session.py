"""Spark sessions: quiet logging, a Java runtime that is located automatically, and the data source `topics`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from spark_pipeline.java import Java, use_java
from topics.system.extras import install_command

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent
MEMORY = "1g"


class NoSpark(Exception):
    """Spark is not installed; the message says what to do."""


def session(
    master: str = "local[*]",
    *,
    app: str = "topics-spark",
    memory: str = MEMORY,
    options: Mapping[str, str] | None = None,
    only_tasks: bool = False,
) -> SparkSession:
    """Start a session, or return the existing one of this process.

    With `only_tasks`, all work is done by Python tasks, as in the jobs of `topics-spark`, and the JVM processes no rows.
    """
    if find_spec("pyspark") is None:
        raise NoSpark(f"PySpark is not installed: {install_command('spark')}")
    from pyspark.sql import SparkSession

    java = use_java()
    # Python workers must use this interpreter and its modules, not some `python3`.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if (HERE.parent / "pyproject.toml").exists():
        # A source checkout: workers would find it only in their current directory.
        _add_to_python_path(HERE.parent)
    builder = SparkSession.builder.master(master).appName(app)
    for name, value in {**_defaults(master, memory, java, only_tasks=only_tasks), **(options or {})}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _defaults(master: str, memory: str, java: Java, *, only_tasks: bool) -> dict[str, str]:
    options = [f"-Dlog4j2.configurationFile={(HERE / 'log4j2.properties').as_uri()}", *java.options()]
    if only_tasks:
        # The C2 compiler takes almost half of the CPU time until the first job is done. With so little work in the
        # JVM, that does not pay off.
        options.append("-XX:TieredStopAtLevel=1")
    config = {
        "spark.driver.memory": memory,
        "spark.driver.extraJavaOptions": " ".join(options),
        "spark.log.level": "ERROR",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "16",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
    }
    if master.startswith("local"):
        # Works even if the machine's own name does not resolve, or a firewall blocks its address.
        config |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    return config


def _add_to_python_path(folder: Path) -> None:
    """Workers inherit the environment, but not sys.path."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(folder) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, str(folder)])
