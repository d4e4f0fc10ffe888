"""Configuration file of a schedule: TOML with `[spark]`, `[schedule]` and one `[[job]]` per job. Errors are found at load time.

A job runs the same command line that a user would type.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from spark_pipeline.cli.arguments import DEFAULT_URL, share, size
from spark_pipeline.schedule.timing import BadCron, Cron
from spark_pipeline.session import MEMORY
from spark_pipeline.tasks.names import ALL_TOPICS, split_names
from spark_pipeline.tasks.server import TOKEN_ENV

JOBS_MAX = 256
BYTES_MAX = 1 << 20
WINDOW_S_MAX = 7 * 86_400

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")  # also valid in names of systemd units
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class BadSchedule(ValueError):
    """The message names the file and the job, and says what to write instead."""


class SparkPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    engine: str = "spark"
    master: str = "local[*]"
    memory: str = MEMORY
    workers: Annotated[int, msgspec.Meta(ge=0)] = 0  # engine `local` only; 0: number of CPUs
    reuse_session: bool = True
    idle: bool = False  # idle CPU priority


class SchedulePart(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    url: str = ""
    token_env: str = TOKEN_ENV
    cold_dir: str = ""
    state: str = ""
    metrics: str = ""  # host:port
    metrics_file: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    run: str
    topics: tuple[str, ...]
    cron: Cron
    window_s: float
    parameters: dict[str, Any] = field(default_factory=dict)

    def command(self) -> list[str]:
        """The command line without the options for server and engine."""
        words = [self.run]
        for name, value in self.parameters.items():
            flag = f"--{name.replace('_', '-')}"
            if value is True:
                words.append(flag)
            elif value is not False:
                words += [flag, str(value)]
        # After `--`, so that a pattern that begins with a dash is not taken for an option.
        return [*words, "--", *self.topics]


@dataclass(frozen=True, slots=True)
class Schedule:
    spark: SparkPart
    settings: SchedulePart
    jobs: tuple[Job, ...]

    def server_arguments(self) -> list[str]:
        return ["--url", self.settings.url, "--token-env", self.settings.token_env]

    def engine_arguments(self) -> list[str]:
        spark = self.spark
        words = ["--engine", spark.engine, *(["--idle"] if spark.idle else [])]
        if spark.engine == "local":
            return [*words, *(["--workers", str(spark.workers)] if spark.workers else [])]
        return [*words, "--master", spark.master, "--memory", spark.memory]

    def command_of(self, job: Job) -> list[str]:
        """The complete command line, as for systemd and cron."""
        [run, *rest] = job.command()
        cold = ["--cold-dir", self.settings.cold_dir] if self.settings.cold_dir else []
        return [run, *self.server_arguments(), *cold, *self._lakes(job), *self.engine_arguments(), *rest]

    def _lakes(self, job: Job) -> list[str]:
        """A report includes the exports of the other jobs."""
        if job.run != "report" or "lake" in job.parameters:
            return []
        lakes = dict.fromkeys(str(one.parameters["out"]) for one in self.jobs if one.run == "export")
        return [word for lake in lakes for word in ("--lake", lake)]


# ── Reading ───────────────────────────────────────────────────────────────────────────


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def _form(text: str) -> str:
    from spark_pipeline.lake.formats import FORMATS

    if text not in FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(FORMATS)}")
    return text


_MERGE: dict[str, Callable[[str], Any]] = {"min_garbage": share, "max_groups": _count, "lease_ms": _count}
# Parameters of each kind of job, besides topics and times.
PARAMETERS: dict[str, dict[str, Callable[[str], Any]]] = {
    "compact": {**_MERGE, "target_bytes": size, "min_segments": _count},
    "purge": _MERGE,
    "scrub": {"out": _text},
    "report": {"out": _text, "top": _count, "lake": _text, "scrubs": _text},
    "export": {"out": _text, "format": _form, "part_bytes": size, "skip_damaged": str},
}
_FLAGS = frozenset({"skip_damaged"})
_REQUIRED = {"report": ("out",), "export": ("out",)}
_COMMON = ("name", "run", "topics", "cron", "window")


def load(path: str | Path) -> Schedule:
    try:
        with open(path, "rb") as file:
            text = file.read(BYTES_MAX + 1)
        if len(text) > BYTES_MAX:
            raise ValueError(f"the file is larger than {BYTES_MAX} bytes")
        tables = tomllib.loads(text.decode())
    except (
        ValueError,
        RecursionError,
    ) as error:  # also for invalid UTF-8 and numbers with too many digits
        raise BadSchedule(f"{path}: {error}") from error
    try:
        return _schedule(tables)
    except (BadSchedule, msgspec.ValidationError) as error:
        raise BadSchedule(f"{path}: {error}") from error


def _schedule(tables: dict[str, Any]) -> Schedule:
    unknown = sorted(tables.keys() - {"spark", "schedule", "job"})
    if unknown:
        raise BadSchedule(f"unknown table [{unknown[0]}]; valid ones are [spark], [schedule] and [[job]]")
    spark = msgspec.convert(tables.get("spark", {}), SparkPart)
    if spark.engine not in {"spark", "local"}:
        raise BadSchedule(f"[spark] engine: {spark.engine!r} is neither spark nor local")
    settings = msgspec.convert(tables.get("schedule", {}), SchedulePart)
    url = settings.url or os.environ.get("TOPICS_URL") or DEFAULT_URL
    settings = msgspec.structs.replace(settings, url=url, state=settings.state or default_state())
    rows = tables.get("job", [])
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise BadSchedule("it has no [[job]]")
    if len(rows) > JOBS_MAX:
        raise BadSchedule(f"{len(rows)} jobs; the maximum is {JOBS_MAX}")
    jobs = tuple(_job(row, number) for number, row in enumerate(rows, 1))
    names = [job.name for job in jobs]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise BadSchedule(f"two jobs are named {duplicate!r}")
    return Schedule(spark, settings, jobs)


def default_state() -> str:
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(home, "topics-spark", "schedule.json")


def _job(row: dict[str, Any], number: int) -> Job:
    where = f"job {number}"
    name = row.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadSchedule(f"{where}: name: {name!r} is not valid; write a name like nightly-compact")
    where = f"job {name}"
    run = row.get("run")
    if run not in PARAMETERS:
        raise BadSchedule(f"{where}: run: {run!r} is not one of {', '.join(PARAMETERS)}")
    topics = row.get("topics", [ALL_TOPICS])
    if not isinstance(topics, list) or not topics or not all(isinstance(one, str) and one for one in topics):
        raise BadSchedule(f'{where}: topics: write a list of names and patterns, like ["orders.>"]')
    try:
        split_names(",".join(topics))
    except ValueError as error:
        raise BadSchedule(f"{where}: topics: {error}") from error
    try:
        cron = Cron(row.get("cron", ""))
    except BadCron as error:
        raise BadSchedule(f"{where}: cron: {error}") from error
    window_s = _duration(row.get("window", "1h"), where)
    given = {key: value for key, value in row.items() if key not in _COMMON}
    return Job(name, run, tuple(topics), cron, window_s, _parameters(run, given, where))


def _parameters(run: str, given: dict[str, Any], where: str) -> dict[str, Any]:
    for required in _REQUIRED.get(run, ()):
        if required not in given:
            raise BadSchedule(f"{where}: {run} needs {required!r}")
    known = PARAMETERS[run]
    for key, value in given.items():
        if key not in known:
            raise BadSchedule(f"{where}: {run} has no parameter {key!r}; valid ones are {', '.join(known)}")
        if isinstance(value, bool) != (key in _FLAGS) or not isinstance(value, str | int | float):
            wanted = "true or false" if key in _FLAGS else "a string or a number"
            raise BadSchedule(f"{where}: {key}: {value!r} is not {wanted}")
        try:
            known[key](str(value))
        except argparse.ArgumentTypeError as error:
            raise BadSchedule(f"{where}: {key}: {error}") from error
    return given


def _duration(text: Any, where: str) -> float:
    match = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise BadSchedule(f"{where}: window: {text!r} is not a duration; write 30m or 3h")
    window_s = float(match[1]) * _SECONDS[match[2]]
    if not 0 < window_s <= WINDOW_S_MAX:
        raise BadSchedule(f"{where}: window: {text!r} is not between 1s and 7d")
    return window_s
