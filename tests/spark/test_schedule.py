"""Schedules: when a job runs, how a missed run is made up for, and the stored state. No test waits: the clock is fake."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from spark_pipeline.cli.__main__ import main
from spark_pipeline.cli.arguments import use_engine
from spark_pipeline.jobs.consolidate import Consolidation, Parameters
from spark_pipeline.jobs.engines import LocalEngine
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.schedule.config import BadSchedule, Job, load
from spark_pipeline.schedule.metrics import Metrics
from spark_pipeline.schedule.scheduler import EngineGone, Result, Scheduler
from spark_pipeline.schedule.state import JobState, State, StateFile
from spark_pipeline.schedule.timing import BadCron, Cron, check_due
from spark_pipeline.tasks import server as http
from tests.spark.conftest import segments_of, seqs_of, url_of
from tests.support.server import ROOT, Server, until
from tests.support.signals import signal_another_thread

HOUR = 3600.0


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


class FakeClock:
    """Waiting takes no time; at the end of the period the schedule is stopped."""

    def __init__(self, now: str, end: str = "2099-01-01") -> None:
        self.now, self.end = at(now), at(end)
        self.scheduler: Scheduler | None = None
        self.waits = 0

    def now_s(self) -> float:
        return self.now

    def wait(self, timeout_s: float) -> None:
        self.waits += 1
        self.now += max(timeout_s, 0.001)
        if self.now >= self.end and self.scheduler is not None:
            self.scheduler.stop()

    def wake(self) -> None: ...


def write(folder: Path, *jobs: str, head: str = "") -> Path:
    path = folder / "schedule.toml"
    path.write_text(head + "".join(f"[[job]]\n{job}\n" for job in jobs))
    return path


NIGHTLY = 'name="nightly"\nrun="compact"\ntopics=[">"]\ncron="15 2 * * *"\nwindow="3h"'
HOURLY = 'name="hourly"\nrun="scrub"\ncron="0 * * * *"\nwindow="30m"'


class SimulatedSchedule:
    """A schedule that runs for some simulated time, with jobs that only record when they ran."""

    def __init__(self, folder: Path, *jobs: str) -> None:
        self.schedule = load(write(folder, *(jobs or (NIGHTLY, HOURLY))))
        self.file = StateFile(str(folder / "state" / "state.json"))
        self.file.path.parent.mkdir(exist_ok=True)
        self.log: list[tuple[str, str]] = []
        self.told = io.StringIO()
        self.result: Callable[[Job], Result] = lambda job: Result("done")

    def over(self, begin: str, end: str) -> list[tuple[str, str]]:
        clock = FakeClock(begin, end)
        before = len(self.log)

        def work(job: Job) -> Result:
            moment = datetime.fromtimestamp(clock.now, UTC)
            self.log.append((job.name, moment.strftime("%d %H:%M")))
            clock.now += 90
            return self.result(job)

        scheduler = Scheduler(self.schedule, self.file, work, Progress(self.told, as_json=True), clock=clock)
        clock.scheduler = scheduler
        scheduler.run()
        return self.log[before:]

    def runs(self, job: str) -> list[str]:
        return [run.result for run in self.file.load().jobs[job].runs]


# ── Times ─────────────────────────────────────────────────────────────────────────────


def test_times_before_and_after_a_moment() -> None:
    cron = Cron("15 2 * * *")
    exactly = at("2026-11-17T02:15")
    assert cron.until(exactly) == cron.until(exactly + 0.7) == exactly
    assert cron.until(exactly - 1) == exactly - 24 * HOUR
    assert cron.after(exactly) == exactly + 24 * HOUR
    assert cron.after(exactly - 0.5) == exactly


@pytest.mark.parametrize("text", ["", "* * * *", "61 * * * *", "0 0 30 2 *", "0 15 2 * * *", "@daily", 5])
def test_times_that_never_come_are_refused(text: Any) -> None:
    with pytest.raises(BadCron):
        Cron(text)


def test_tasks_due_at_a_time() -> None:
    cron, handled = Cron("0 * * * *"), at("2026-11-17T02:00")
    look_at = lambda now: check_due(cron, handled_s=handled, window_s=600, now_s=at(now))  # noqa: E731
    assert look_at("2026-11-17T02:59").verdict == "wait"
    assert look_at("2026-11-17T02:59").due_s == at("2026-11-17T03:00")
    assert (look_at("2026-11-17T03:00").verdict, look_at("2026-11-17T03:10").verdict) == ("run", "run")
    assert look_at("2026-11-17T03:10:01").verdict == "skip"
    late = look_at("2026-11-17T06:05")
    assert (late.verdict, late.due_s, late.missed) == ("run", at("2026-11-17T06:00"), 3)


# ── Running ───────────────────────────────────────────────────────────────────────────


def test_each_job_runs_once_at_each_of_its_times(tmp_path: Path) -> None:
    ran = SimulatedSchedule(tmp_path).over("2026-11-17T00:30", "2026-11-17T03:30")
    assert ran == [
        ("hourly", "17 01:00"),
        ("hourly", "17 02:00"),
        ("nightly", "17 02:15"),
        ("hourly", "17 03:00"),
    ]


def test_a_missed_run_is_made_up_for_within_its_window(tmp_path: Path) -> None:
    schedule = SimulatedSchedule(tmp_path, NIGHTLY)
    assert schedule.over("2026-11-16T12:00", "2026-11-17T01:00") == []
    assert schedule.over("2026-11-17T04:40", "2026-11-17T06:00") == [("nightly", "17 04:40")]
    # Down again for three nights, and up after the window has ended.
    assert schedule.over("2026-11-20T05:16", "2026-11-21T01:00") == []
    assert schedule.runs("nightly") == ["done", "skipped"]
    [skipped] = [run for run in schedule.file.load().jobs["nightly"].runs if run.result == "skipped"]
    assert skipped.missed == 2
    assert "2026-11-20T02:15:00" in skipped.message
    assert schedule.over("2026-11-21T02:00", "2026-11-21T03:00") == [("nightly", "21 02:15")]


def test_a_job_that_was_refused_is_tried_again_in_longer_pauses(tmp_path: Path) -> None:
    schedule = SimulatedSchedule(tmp_path, HOURLY)
    schedule.result = lambda job: Result("later", "somebody else is at it")
    ran = schedule.over("2026-11-17T00:30", "2026-11-17T01:59")
    assert [when for _, when in ran] == ["17 01:00", "17 01:02", "17 01:06", "17 01:11", "17 01:21"]
    assert schedule.runs("hourly") == ["later"]
    assert schedule.file.load().jobs["hourly"].totals == {"later": 5}
    schedule.result = lambda job: Result("done")
    assert schedule.over("2026-11-17T01:59", "2026-11-17T02:59") == [("hourly", "17 02:00")]


def test_a_failed_job_is_reported_and_not_repeated(tmp_path: Path) -> None:
    schedule = SimulatedSchedule(tmp_path, HOURLY)

    def broken(job: Job) -> Result:
        raise RuntimeError("out of luck")

    schedule.result = broken
    assert len(schedule.over("2026-11-17T00:30", "2026-11-17T02:30")) == 2
    assert schedule.runs("hourly") == ["failed", "failed"]
    assert "out of luck" in schedule.told.getvalue()


def test_an_interrupted_job_goes_on_after_the_start(tmp_path: Path) -> None:
    schedule = SimulatedSchedule(tmp_path, NIGHTLY)

    def interrupted(job: Job) -> Result:
        raise KeyboardInterrupt

    schedule.over("2026-11-17T01:00", "2026-11-17T02:00")
    schedule.result = interrupted
    assert schedule.over("2026-11-17T02:00", "2026-11-17T09:00") == [("nightly", "17 02:15")]
    schedule.result = lambda job: Result("done")
    assert schedule.over("2026-11-17T02:30", "2026-11-17T09:00") == [("nightly", "17 02:30")]
    assert schedule.runs("nightly") == ["interrupted", "done"]


def test_a_job_that_kills_its_process_is_given_up(tmp_path: Path) -> None:
    schedule = SimulatedSchedule(tmp_path, NIGHTLY)
    schedule.over("2026-11-17T01:00", "2026-11-17T02:00")

    class Killed(BaseException):
        pass

    def killed(job: Job) -> Result:
        raise Killed

    schedule.result = killed
    for minute in (15, 20, 25):
        with pytest.raises(Killed):
            schedule.over(f"2026-11-17T02:{minute}", "2026-11-17T09:00")
    assert schedule.over("2026-11-17T02:30", "2026-11-17T09:00") == []
    assert schedule.runs("nightly") == ["interrupted", "failed"]


def test_without_spark_the_process_ends_and_the_next_one_tries_again(tmp_path: Path) -> None:
    schedule = SimulatedSchedule(tmp_path, NIGHTLY)
    schedule.over("2026-11-17T01:00", "2026-11-17T02:00")

    def gone(job: Job) -> Result:
        raise EngineGone("Spark has died")

    schedule.result = gone
    assert schedule.over("2026-11-17T02:00", "2026-11-17T09:00") == [("nightly", "17 02:15")]
    assert schedule.over("2026-11-17T02:20", "2026-11-17T09:00") == [("nightly", "17 02:20")]
    schedule.result = lambda job: Result("done")
    assert schedule.over("2026-11-17T02:30", "2026-11-17T09:00") == [("nightly", "17 02:30")]
    assert schedule.runs("nightly") == ["interrupted", "done"]


def test_one_state_has_one_schedule(tmp_path: Path) -> None:
    first, second = StateFile(str(tmp_path / "s.json")), StateFile(str(tmp_path / "s.json"))
    first.lock()
    with pytest.raises(BlockingIOError):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


def test_an_invalid_state_is_not_overwritten(tmp_path: Path) -> None:
    schedule = SimulatedSchedule(tmp_path)
    schedule.file.path.write_text("{")
    with pytest.raises(ValueError, match="move it away"):
        schedule.over("2026-11-17T01:00", "2026-11-17T02:00")
    assert schedule.file.path.read_text() == "{"


# ── Output ────────────────────────────────────────────────────────────────────────────


def test_metrics_and_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = SimulatedSchedule(tmp_path)
    schedule.result = lambda job: Result("done", figures={"bytes_in": 7})
    schedule.over("2026-11-17T00:30", "2026-11-17T02:30")
    metrics = Metrics("127.0.0.1:0", str(tmp_path / "topics.prom"))
    try:
        metrics.publish(schedule.file.load(), 0)
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics") as answer:
            text = answer.read().decode()
    finally:
        metrics.close()
    assert (tmp_path / "topics.prom").read_text() == text
    assert 'topics_spark_job_runs_total{job="hourly",result="done"} 2' in text
    assert 'topics_spark_job_last_figure{job="nightly",figure="bytes_in"} 7' in text
    assert (
        f'topics_spark_job_last_done_timestamp_seconds{{job="nightly"}} {at("2026-11-17T02:16:30"):.0f}'
        in text
    )
    assert main(["status", "--state", str(schedule.file.path)]) == 0
    shown = capsys.readouterr().out
    assert "2026-11-18T02:15:00Z" in shown
    assert shown.count("90.0 s") == 2
    assert main(["status", "--state", str(schedule.file.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"]["hourly"]["totals"] == {"done": 2}
    assert main(["status", "--state", str(tmp_path / "none.json")]) == 3


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ('name="A b"\nrun="scrub"\ncron="0 * * * *"', "write a name like"),
        ('name="a"\nrun="dance"\ncron="0 * * * *"', "not one of compact"),
        ('name="a"\nrun="scrub"\ncron="0 * * *"', "five fields"),
        ('name="a"\nrun="scrub"\ncron="0 * * * *"\nwindow="soon"', "is not a duration"),
        ('name="a"\nrun="compact"\ncron="0 * * * *"\ntarget_bites="1g"', "no parameter 'target_bites'"),
        ('name="a"\nrun="compact"\ncron="0 * * * *"\nmin_garbage=7', "is not a number between 0 and 1"),
        ('name="a"\nrun="report"\ncron="0 * * * *"', "needs 'out'"),
        ('name="a"\nrun="scrub"\ntopics="*"\ncron="0 * * * *"', "a list of names"),
        ('name="a"\nrun="scrub"\ntopics=["ord*"]\ncron="0 * * * *"', "a wildcard must be a whole token"),
        ('name="a"\nrun="export"\ncron="0 * * * *"\nout="/lake"\nformt="delta"', "no parameter 'formt'"),
        ('name="a"\nrun="export"\ncron="0 * * * *"\nout="/lake"\nformat="orc"', "not one of parquet, delta"),
        ('name="a"\nrun="export"\ncron="0 * * * *"\nout="/lake"\nskip_damaged="yes"', "not true or false"),
        ('name="a"\nrun="report"\ncron="0 * * * *"\nout="/r"\nlake=["/a"]', "not a string or a number"),
    ],
)
def test_mistakes_in_the_file_are_reported_at_once(tmp_path: Path, job: str, said: str) -> None:
    with pytest.raises(BadSchedule, match=said):
        load(write(tmp_path, job))
    with pytest.raises(BadSchedule, match="two jobs"):
        load(write(tmp_path, HOURLY, HOURLY))


@pytest.mark.parametrize(
    "head",
    ['[spark]\nengine="local"\n', '[spark]\nengine="local"\nworkers=2\n', "[spark]\nidle=true\n", ""],
)
def test_commands_of_jobs_are_those_that_the_command_takes(tmp_path: Path, head: str) -> None:
    """Each command runs up to its work, which fails with an invalid address."""
    out = f'out="{tmp_path}"'
    jobs = [
        'name="a"\nrun="compact"\ntarget_bytes="4MiB"\nmin_segments=3\nmin_garbage=0.5\nmax_groups=2\nlease_ms=2000',
        'name="b"\nrun="purge"\nmin_garbage=0.01',
        f'name="c"\nrun="scrub"\n{out}',
        f'name="d"\nrun="report"\n{out}\ntop=5',
        f'name="e"\nrun="export"\n{out}\nformat="delta"\npart_bytes="1MiB"\nskip_damaged=true',
    ]
    path = write(
        tmp_path,
        *(f'{job}\ncron="0 * * * *"' for job in jobs),
        head=f'{head}[schedule]\nurl="ftp://nobody"\ncold_dir="/cold"\n',
    )
    schedule = load(path)
    # With a local engine: with Spark the commands would end the session that all tests share.
    with use_engine(LocalEngine(1)):
        for job in schedule.jobs:
            assert main(schedule.command_of(job)) == 3, job.name


# ── A process and a server ────────────────────────────────────────────────────────────


class Process:
    """`topics-spark schedule run`, with jobs that are due at once: its state says that they last ran an hour ago."""

    def __init__(
        self,
        folder: Path,
        server: Server,
        *jobs: str,
        lasting_s: float = HOUR,
        engine: str = 'engine="local"\nworkers=1',
    ) -> None:
        head = f'[spark]\n{engine}\n[schedule]\nurl="{url_of(server)}"\nmetrics="127.0.0.1:0"\n'
        self.config = write(folder, *jobs, head=head)
        self.file = StateFile(str(folder / "state.json"))
        names = [job.name for job in load(self.config).jobs]
        self.file.save(State(jobs={name: JobState(handled_s=time.time() - lasting_s) for name in names}))
        self.arguments = [
            *(sys.executable, "-m", "spark_pipeline.cli", "schedule", "run"),
            *("--config", str(self.config), "--state", str(self.file.path)),
        ]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self.arguments, cwd=ROOT, stderr=log)

    def steps(self) -> list[dict[str, Any]]:
        lines = self.log.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def has(self, step: str) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return any(one["step"] == step for one in self.steps())

    def results(self) -> dict[str, list[str]]:
        return {name: [run.result for run in job.runs] for name, job in self.file.load().jobs.items()}

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(240)


WAITING = """
import os
import signal
from spark_pipeline.schedule.scheduler import SystemClock

clock = SystemClock()
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"heard\\n"))  # print may be cut in two by it
os.write(1, b"waits\\n")
clock.wait(3600)
"""


def test_a_signal_is_noticed_that_does_not_interrupt_the_wait() -> None:
    program = (
        f"import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n{WAITING}"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as waiting:
        try:
            assert waiting.stdout is not None
            assert waiting.stdout.readline() == "waits\n"
            signal_another_thread(waiting.pid, signal.SIGTERM)
            assert waiting.communicate(timeout=120)[0] == "heard\n"
        finally:
            waiting.kill()


OFTEN = 'cron="* * * * *"\nwindow="1h"'
MERGE = f'name="merge"\nrun="compact"\ntopics=["m13"]\n{OFTEN}\ntarget_bytes=4000\nmin_segments=2\nlease_ms=3600000'


def test_a_stopped_merge_leaves_a_plan_to_resume(server: Server, tmp_path: Path) -> None:
    before, count = seqs_of(server, "m13"), segments_of(server, "m13")
    running = Process(tmp_path, server, MERGE)
    try:
        until(lambda: running.has("plan"), 240)
        assert running.terminate() == 0
    finally:
        running.process.kill()
    assert running.results() == {"merge": ["interrupted"]}
    assert segments_of(server, "m13") == count
    assert server.get("/v0/topics/m13/consolidation").json["plan"] is not None
    progress = Progress(io.StringIO(), as_json=True)
    parameters = Parameters(target_bytes=4000, min_segments=2)

    def merged() -> bool:
        """The lease was released: it expires within a second, and not in an hour."""
        with closing(LocalEngine(1)) as engine:
            job = Consolidation(http.Server(url_of(server)), "m13", engine, progress, parameters)
            return job.run().state == "committed"

    until(merged)
    assert segments_of(server, "m13") < count
    assert seqs_of(server, "m13") == before


def test_jobs_run_and_the_process_stops_when_told(server: Server, tmp_path: Path) -> None:
    report = f'name="report"\nrun="report"\ntopics=["no.such.>", "*"]\n{OFTEN}\nout="{tmp_path / "out"}"'
    nothing = f'name="nothing"\nrun="scrub"\ntopics=["no.such.*"]\n{OFTEN}'
    running = Process(tmp_path, server, report, nothing)
    try:
        until(lambda: all(running.results().values()), 240)
        port = running.steps()[0]["metrics_port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert 'topics_spark_job_runs_total{job="report",result="done"}' in answer.read().decode()
        again = subprocess.run(running.arguments, cwd=ROOT, capture_output=True, text=True, check=False)
        assert again.returncode == 3
        assert "is in use by another schedule" in again.stderr
        assert running.terminate() == 0
    finally:
        running.process.kill()
    state = running.file.load()
    assert {name: job.runs[0].result for name, job in state.jobs.items()} == {
        "report": "done",
        "nothing": "done",
    }
    assert state.jobs["report"].runs[0].figures["topics"] >= 4
    assert state.jobs["report"].runs[0].missed >= 59
    assert "no topic matches" in state.jobs["nothing"].runs[0].message
    assert json.loads((tmp_path / "out" / "report.json").read_text())["topics"]["m12"]
