"""The scheduler: runs jobs on their schedule, one after the other, so that no job overlaps with itself.

Results of a run:

    done, damaged, failed     final: the next run is at the next regular time
    later, cannot             another job is running, or the server is unreachable: retried with backoff within the window
    interrupted               this process was stopped: the plan stays on the server, and the next start resumes it
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

from spark_pipeline.jobs.progress import Progress
from spark_pipeline.schedule.config import Job, Schedule
from spark_pipeline.schedule.state import JobState, Run, State, StateFile, add_run
from spark_pipeline.schedule.timing import check_due
from topics.cli.formatting import format_time

WAIT_S_MAX = 60.0  # to notice a change of the system clock
RETRY_S = (60.0, 600.0)  # first pause before a retry, doubled each time, and the maximum
KILLS_MAX = 3
RETRIED = frozenset({"later", "cannot"})


class Clock(Protocol):
    def now_s(self) -> float: ...

    def wait(self, timeout_s: float) -> None:
        """Wait for the timeout or a call of `wake`."""

    def wake(self) -> None:
        """May be called from a signal handler."""


class SystemClock:
    def __init__(self) -> None:
        # A pipe, because a signal handler must not take a lock that the interrupted code may hold.
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # A signal just before a wait must end it, too; Python would run its handler only after the wait.
        signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)

    def now_s(self) -> float:
        return time.time()

    def wait(self, timeout_s: float) -> None:
        if select.select([self._out], [], [], max(timeout_s, 0.0))[0]:
            os.read(self._out, 4096)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so a wait will end anyway
            os.write(self._in, b"x")


@dataclass(slots=True)
class Result:
    result: str
    message: str = ""
    figures: dict[str, float] = field(default_factory=dict)


class EngineGone(Exception):
    """Spark has died, and this process cannot start it again."""


class Scheduler:
    def __init__(
        self,
        schedule: Schedule,
        file: StateFile,
        run_job: Callable[[Job], Result],
        progress: Progress,
        *,
        clock: Clock,
        publish: Callable[[State, float], None] = lambda state, now_s: None,
    ) -> None:
        self._jobs = schedule.jobs
        self._file = file
        self._run_job = run_job
        self._progress = progress
        self._clock = clock
        self._publish = publish
        self._in_job = False
        self.stopping = False
        self.failure = ""  # why the scheduler itself had to stop
        self.state = State()

    # -- running -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until `stop`. Starts with the state of the file, which the caller must have locked."""
        self.begin()
        while not self.stopping:
            next_s = self.step()
            if not self.stopping:
                self._clock.wait(min(max(next_s - self._clock.now_s(), 0.0), WAIT_S_MAX))

    def stop(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """Stop; also used as a signal handler. A running job is interrupted and cleans up."""
        self.stopping = True
        self._clock.wake()
        if self._in_job:
            raise KeyboardInterrupt

    def begin(self) -> None:
        self.state = self._file.load()
        now_s = self._clock.now_s()
        for job in self._jobs:
            # A new job has not missed any runs.
            known = self.state.jobs.setdefault(job.name, JobState(handled_s=now_s))
            if known.running_since_s:
                self._record_kill(job, known)
        self._save()

    def _record_kill(self, job: Job, known: JobState) -> None:
        known.kills += 1
        final = known.kills >= KILLS_MAX
        due_s = job.cron.until(known.running_since_s)
        message = "the scheduler was killed during the run"
        message += f" {known.kills} times; waiting for its next regular time" if final else ""
        run = Run(
            due_s,
            known.running_since_s,
            self._clock.now_s(),
            "failed" if final else "interrupted",
            message,
        )
        known.running_since_s = 0.0
        add_run(known, run)
        if final:
            self._finish(known, due_s)
        self._report(job, run)

    def step(self) -> float:
        """Run due jobs, the longest overdue first. Returns the time of the next one."""
        while not self.stopping:
            now_s = self._clock.now_s()
            todo: list[tuple[float, int]] = []
            moments: list[float] = []
            for number, job in enumerate(self._jobs):
                known = self.state.jobs[job.name]
                due = check_due(job.cron, handled_s=known.handled_s, window_s=job.window_s, now_s=now_s)
                known.next_s = due.due_s if due.verdict == "wait" else max(now_s, known.again_s)
                if due.verdict == "skip":
                    self._skip(job, known, due.due_s, due.missed, now_s)
                elif due.verdict == "run" and known.again_s <= now_s:
                    todo.append((due.due_s, number))
                moments.append(known.next_s)
            self._publish(self.state, now_s)
            if not todo:
                return min(moments)
            due_s, number = min(todo)
            self._run(self._jobs[number], due_s)
        return self._clock.now_s()

    def _skip(self, job: Job, known: JobState, due_s: float, missed: int, now_s: float) -> None:
        message = f"it was due at {_time(due_s)}, and its window has ended"
        message += f" after {known.tries} tries" if known.tries else ""
        run = Run(due_s, now_s, now_s, "skipped", message, missed)
        add_run(known, run)
        self._finish(known, due_s)
        known.next_s = job.cron.after(now_s)
        self._save()
        self._report(job, run)

    def _run(self, job: Job, due_s: float) -> None:
        known = self.state.jobs[job.name]
        began_s = self._clock.now_s()
        due = check_due(job.cron, handled_s=known.handled_s, window_s=job.window_s, now_s=began_s)
        missed = due.missed if not known.tries else 0
        known.running_since_s = began_s
        known.tries += 1
        self._save()
        self._progress.step(
            "begin", f"{job.name}: starting, due at {_time(due_s)}", job=job.name, due_s=due_s
        )
        result = self._guarded(job)
        if self.failure:
            # The state still says that the job is running, so the next start counts this as a kill.
            self._progress.step("broken", f"{job.name}: {self.failure}", job=job.name, message=self.failure)
            return
        ended_s = self._clock.now_s()
        run = Run(due_s, began_s, ended_s, result.result, result.message, missed, result.figures)
        known.running_since_s = 0.0
        known.kills = 0
        pause_s = min(RETRY_S[0] * 2 ** (known.tries - 1), RETRY_S[1])
        if result.result in RETRIED and ended_s + pause_s <= due_s + job.window_s:
            known.again_s = ended_s + pause_s
        elif result.result != "interrupted":
            self._finish(known, due_s)
        known.next_s = known.again_s or job.cron.after(ended_s)
        add_run(known, run)
        self._save()
        self._report(job, run)

    def _guarded(self, job: Job) -> Result:
        try:
            try:
                self._in_job = True
                return self._run_job(job)
            finally:
                self._in_job = False
        except KeyboardInterrupt:
            self.stopping = True
            return Result("interrupted", "stopped; it resumes at the next start, if its window is still open")
        except EngineGone as error:
            self.stopping, self.failure = True, str(error)
            return Result("interrupted", str(error))
        except Exception as error:
            return Result("failed", f"{type(error).__name__}: {error}")

    @staticmethod
    def _finish(known: JobState, due_s: float) -> None:
        known.handled_s = max(known.handled_s, due_s)
        known.tries = known.kills = 0
        known.again_s = 0.0

    def _save(self) -> None:
        self._file.save(self.state)
        self._publish(self.state, self._clock.now_s())

    def _report(self, job: Job, run: Run) -> None:
        text = f"{job.name}: {run.result}" + (f": {run.message}" if run.message else "")
        if run.missed:
            text += f" ({run.missed} earlier runs were missed)"
        self._progress.step(
            "end",
            text,
            job=job.name,
            result=run.result,
            message=run.message,
            missed=run.missed,
            duration_s=round(run.ended_s - run.began_s, 3),
            figures=run.figures,
        )


def stop_on_signals(scheduler: Scheduler) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, scheduler.stop)


def _time(moment_s: float) -> str:
    return format_time(round(moment_s * 1000))
