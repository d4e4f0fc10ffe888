"""`topics-spark schedule` and `status`: scheduled jobs and their results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from spark_pipeline.cli.arguments import CANNOT, OK, add_output, execute, parser_of
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.schedule.config import Schedule, default_state, load
from spark_pipeline.schedule.emit import FORMS, emit
from spark_pipeline.schedule.job_runner import JobRunner
from spark_pipeline.schedule.metrics import Metrics
from spark_pipeline.schedule.scheduler import Scheduler, SystemClock, stop_on_signals
from spark_pipeline.schedule.state import State, StateFile
from topics.cli.formatting import format_time, printable, table


def main(argv: Sequence[str]) -> int:
    parser = parser_of("schedule", "Run jobs on a schedule, or print them for systemd or cron.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="run|emit")
    run = commands.add_parser("run", help="run the jobs of a configuration file until SIGTERM")
    run.add_argument("--state", metavar="file", help="state file; overrides the configuration")
    run.add_argument("--metrics", metavar="host:port", help="serve Prometheus metrics at /metrics")
    run.add_argument("--metrics-file", metavar="path", help="write the metrics to a file")
    out = commands.add_parser("emit", help="print the jobs of a configuration file for systemd or cron")
    out.add_argument("--form", choices=FORMS, required=True, help="output format")
    out.add_argument(
        "--program", default="topics-spark", metavar="path", help="path of topics-spark [topics-spark]"
    )
    for one in (run, out):
        one.add_argument(
            "--config", required=True, metavar="file", help="configuration file (TOML); see docs/spark.md"
        )
    arguments = parser.parse_args(argv)
    return execute("schedule", arguments, _run if arguments.command == "run" else _emit)


def _run(arguments: argparse.Namespace) -> int:
    schedule = load(arguments.config)
    changes = {
        name: getattr(arguments, name)
        for name in ("state", "metrics", "metrics_file")
        if getattr(arguments, name)
    }
    schedule = Schedule(schedule.spark, msgspec.structs.replace(schedule.settings, **changes), schedule.jobs)
    settings = schedule.settings
    file = StateFile(settings.state)
    try:
        file.lock()
    except BlockingIOError:
        print(
            f"topics-spark schedule: {file.path} is in use by another schedule; choose another --state",
            file=sys.stderr,
        )
        return CANNOT
    metrics = Metrics(settings.metrics, settings.metrics_file)
    run_job = JobRunner(schedule)
    progress = Progress(sys.stderr)
    scheduler = Scheduler(schedule, file, run_job, progress, clock=SystemClock(), publish=metrics.publish)
    stop_on_signals(scheduler)
    progress.step(
        "schedule",
        f"{len(schedule.jobs)} jobs, server {settings.url}, state in {settings.state}",
        jobs=[job.name for job in schedule.jobs],
        url=settings.url,
        state=settings.state,
        metrics_port=metrics.port,
    )
    try:
        scheduler.run()
    finally:
        run_job.close()
        metrics.close()
        file.unlock()
    if scheduler.failure:
        print(f"topics-spark schedule: {printable(scheduler.failure)}", file=sys.stderr)
        return CANNOT
    progress.step("stopped", "stopped")
    return OK


def _emit(arguments: argparse.Namespace) -> int:
    schedule = load(arguments.config)
    print(emit(schedule, arguments.form, program=arguments.program), end="")
    return OK


# ── status ────────────────────────────────────────────────────────────────────────────


def status(argv: Sequence[str]) -> int:
    parser = parser_of("status", "Show the last runs of scheduled jobs, and when they run next.")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--config", metavar="file", help="configuration file, which names the state file")
    where.add_argument("--state", metavar="file", help=f"state file [{default_state()}]")
    add_output(parser)
    arguments = parser.parse_args(argv)
    return execute("status", arguments, _status)


def _status(arguments: argparse.Namespace) -> int:
    path = arguments.state or (load(arguments.config).settings.state if arguments.config else default_state())
    file = StateFile(path)
    if not file.path.exists():
        raise ValueError(f"{path} does not exist: no schedule has run with it yet")
    state = file.load()
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(state)).decode())
    else:
        print("\n".join(status_lines(state)))
    return OK


def status_lines(state: State) -> list[str]:
    rows: list[list[Any]] = []
    for name, job in sorted(state.jobs.items()):
        last = job.runs[-1] if job.runs else None
        rows.append(
            [
                printable(name),
                "running" if job.running_since_s else last.result if last else "not yet",
                _time(last.began_s) if last else "",
                _time(job.next_s),
                printable(last.message)[:80] if last else "",
                f"{last.ended_s - last.began_s:.1f} s" if last else "",
                str(sum(job.totals.values())),
                str(job.missed_total),
            ]
        )
    heads = ["job", "last result", "began", "next", "message", "took", "runs", "missed"]
    return table(heads, rows, left=5)


def _time(moment_s: float) -> str:
    return f"{format_time(int(moment_s) * 1000)[:19]}Z" if moment_s else ""
