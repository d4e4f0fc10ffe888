"""Runs scheduled jobs: the same commands a user would type, in this process, with a shared engine."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import Any

import msgspec

from spark_pipeline.cli.arguments import CANNOT, DAMAGED, INTERRUPTED, LATER, OK, use_engine
from spark_pipeline.java import NoJava
from spark_pipeline.jobs.engines import Engine, LocalEngine, SparkEngine, use_idle_priority
from spark_pipeline.schedule.config import Job, Schedule
from spark_pipeline.schedule.scheduler import EngineGone, Result
from spark_pipeline.session import NoSpark, session
from spark_pipeline.tasks.manifest import NoManifest
from spark_pipeline.tasks.server import Refused, Server, Unreachable, wanted_topics

RESULTS = {OK: "done", DAMAGED: "damaged", CANNOT: "cannot", LATER: "later"}
MESSAGE_MAX = 1000


class JobRunner:
    """Callable that runs a job. The engine is started for the first one and shared, unless reuse_session is off."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._engine: Engine | None = None

    def __call__(self, job: Job) -> Result:
        settings = self._schedule.settings
        server = Server(settings.url, settings.token_env)
        try:
            matched = tuple(one for one in job.topics if _has_topics(server, one))
        except (Unreachable, Refused) as error:
            return Result("cannot", str(error))
        except ValueError as error:
            return Result("failed", str(error))
        finally:
            server.close()
        if not matched:
            return Result("done", f"no topic matches {', '.join(job.topics)} yet")
        try:
            engine = self._get_engine()
        except (NoJava, NoSpark) as error:
            return Result("cannot", str(error))
        try:
            with use_engine(engine):
                result = run_command(self._arguments(replace(job, topics=matched)))
            if result.result != "done" and isinstance(engine, SparkEngine) and not engine.is_alive():
                raise EngineGone(f"Spark has died: {result.message}")
            return result
        finally:
            if not self._schedule.spark.reuse_session:
                self.close()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _get_engine(self) -> Engine:
        if isinstance(self._engine, SparkEngine) and not self._engine.is_alive():
            raise EngineGone("Spark has died since the last job")
        if self._engine is None:
            spark = self._schedule.spark
            if spark.idle:
                use_idle_priority()
            if spark.engine == "local":
                self._engine = LocalEngine(spark.workers)
            else:
                started = session(spark.master, memory=spark.memory, only_tasks=True)
                self._engine = SparkEngine(started, stop_session=True)
        return self._engine

    def _arguments(self, job: Job) -> list[str]:
        [run, *rest] = self._schedule.command_of(job)
        more = ["--state", self._schedule.settings.state] if job.run == "report" else []
        return [run, "--json", *more, *rest]


def _has_topics(server: Server, wanted: str) -> bool:
    """A pattern without matches must not fail the job for the other ones."""
    try:
        return bool(wanted_topics(server, wanted))
    except NoManifest:
        return False


def run_command(arguments: Sequence[str]) -> Result:
    """Run a `topics-spark` command whose result is JSON. Its last error line on stderr becomes the message."""
    from spark_pipeline.cli.__main__ import main

    out, err = io.StringIO(), _StderrTee()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as error:  # from argparse; a retry would not help
            return Result("failed", err.message or f"wrong arguments ({error.code})")
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return Result(RESULTS.get(code, "failed"), err.message, _figures(out.getvalue()))


class _StderrTee(io.TextIOBase):
    """Passes text on to stderr, and keeps the last line that is not JSON."""

    def __init__(self) -> None:
        self._to = sys.stderr
        self._line = ""
        self.message = ""

    def write(self, text: str, /) -> int:
        *lines, rest = (self._line + text).split("\n")
        self._line = rest[-MESSAGE_MAX:]
        for line in lines:
            if line.strip() and not line.startswith("{"):
                self.message = line.strip()[:MESSAGE_MAX]
        return self._to.write(text)

    def flush(self) -> None:
        self._to.flush()


def _figures(text: str) -> dict[str, float]:
    """The numbers of a result, summed over topics. Lists count by their length."""
    try:
        result: Any = msgspec.json.decode(text.strip() or "{}")
    except msgspec.DecodeError:
        return {}
    total: dict[str, float] = {}
    for row in result if isinstance(result, list) else [result]:
        for name, value in row.items() if isinstance(row, dict) else ():
            number = len(value) if isinstance(value, list) else value
            if isinstance(number, int | float) and not isinstance(number, bool):
                total[name] = total.get(name, 0) + number
    return total
