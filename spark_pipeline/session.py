"""A Spark session as the jobs want it: quiet, on a Java that was looked for, and knowing `format("topics")`."""

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
    """There is no Spark to use; the text says what to do."""


def session(
    master: str = "local[*]",
    *,
    app: str = "topics-spark",
    memory: str = MEMORY,
    options: Mapping[str, str] | None = None,
    only_tasks: bool = False,
) -> SparkSession:
    """Start a session, or return the one that this process has.

    With `only_tasks` no rows go through the JVM: the work is done by Python's tasks, as in all jobs of `topics-spark`.
    """
    if find_spec("pyspark") is None:
        raise NoSpark(f"PySpark is not installed: {install_command('spark')}")
    from pyspark.sql import SparkSession

    java = use_java()
    # Its Python workers are to be this Python with these modules, not whatever `python3` is.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if (HERE.parent / "pyproject.toml").exists():
        # A source tree, which the workers find only if they happen to run in it.
        _add_to_python_path(HERE.parent)
    builder = SparkSession.builder.master(master).appName(app)
    for name, value in {**_defaults(master, memory, java, only_tasks=only_tasks), **(options or {})}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _defaults(master: str, memory: str, java: Java, *, only_tasks: bool) -> dict[str, str]:
    options = [f"-Dlog4j2.configurationFile={(HERE / 'log4j2.properties').as_uri()}", *java.options()]
    if only_tasks:
        # Java's second compiler takes almost half of the processor time until the first job is done, and such a JVM
        # never does anything for so long that it would get that back.
        options.append("-XX:TieredStopAtLevel=1")
    found = {
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
        # A machine whose own name does not resolve, or whose firewall stands between it and itself, is no obstacle.
        found |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    return found


def _add_to_python_path(folder: Path) -> None:
    """For the workers, which get the environment and not sys.path."""
    have = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(folder) not in have:
        os.environ["PYTHONPATH"] = os.pathsep.join([*have, str(folder)])
