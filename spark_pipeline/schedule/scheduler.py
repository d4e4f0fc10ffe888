"""The process that runs jobs at their times, one after the other: so no job ever overlaps with itself.

done, damaged, failed     settled: the next time is as usual
later, cannot             somebody else is at it, or the server is away: tried again, in ever longer pauses, while the window is open
interrupted               this process was told to stop: the plan stays with the server, and the next start goes on from there
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
from spark_pipeline.schedule.timing import look
from topics.cli.formatting import format_time

WAIT_S_MAX = 60.0  # a clock that was set is noticed by then
AGAIN_S = (60.0, 600.0)  # before a job is tried again: the first pause, doubled each time, and the longest
KILLS_MAX = 3
TRY_AGAIN = frozenset({"later", "cannot"})


class Clock(Protocol):
    def now_s(self) -> float: ...

    def wait(self, timeout_s: float) -> None:
        """Until it is over, or `wake` is called."""

    def wake(self) -> None:
        """May be called by a signal's handler."""


class SystemClock:
    def __init__(self) -> None:
        # A pipe, because a handler of a signal must not take a lock that it may have interrupted.
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # A signal that comes just before a wait must end it, too: Python's handler runs only after the wait.
        signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)

    def now_s(self) -> float:
        return time.time()

    def wait(self, timeout_s: float) -> None:
        if select.select([self._out], [], [], max(timeout_s, 0.0))[0]:
            os.read(self._out, 4096)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full of such news
            os.write(self._in, b"x")


@dataclass(slots=True)
class Result:
    result: str
    message: str = ""
    figures: dict[str, float] = field(default_factory=dict)


class EngineGone(Exception):
    """Spark has died, and this process cannot start another one."""


class Scheduler:
    def __init__(
        self,
        schedule: Schedule,
        file: StateFile,
        work: Callable[[Job], Result],
        progress: Progress,
        *,
        clock: Clock,
        publish: Callable[[State, float], None] = lambda state, now_s: None,
    ) -> None:
        self._jobs = schedule.jobs
        self._file = file
        self._work = work
        self._progress = progress
        self._clock = clock
        self._publish = publish
        self._in_job = False
        self.stopping = False
        self.broken = ""  # why it stopped by itself
        self.state = State()

    # -- running -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until `stop`. What the file says is taken over; its lock is the caller's business."""
        self.begin()
        while not self.stopping:
            next_s = self.step()
            if not self.stopping:
                self._clock.wait(min(max(next_s - self._clock.now_s(), 0.0), WAIT_S_MAX))

    def stop(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """Also the handler of signals. A job that runs is interrupted: what it holds is cancelled on the way out."""
        self.stopping = True
        self._clock.wake()
        if self._in_job:
            raise KeyboardInterrupt

    def begin(self) -> None:
        self.state = self._file.load()
        now_s = self._clock.now_s()
        for job in self._jobs:
            # A job that is new has missed nothing.
            known = self.state.jobs.setdefault(job.name, JobState(handled_s=now_s))
            if known.running_since_s:
                self._was_killed(job, known)
        self._save()

    def _was_killed(self, job: Job, known: JobState) -> None:
        known.kills += 1
        final = known.kills >= KILLS_MAX
        due_s = job.cron.until(known.running_since_s)
        said = "the process that ran it was killed"
        said += f" {known.kills} times; not tried again until it is due" if final else ""
        run = Run(
            due_s,
            known.running_since_s,
            self._clock.now_s(),
            "failed" if final else "interrupted",
            said,
        )
        known.running_since_s = 0.0
        add_run(known, run)
        if final:
            self._settle(known, due_s)
        self._tell(job, run)

    def step(self) -> float:
        """Do what is due, the longest due first. The moment when there is something to do again."""
        while not self.stopping:
            now_s = self._clock.now_s()
            todo: list[tuple[float, int]] = []
            moments: list[float] = []
            for number, job in enumerate(self._jobs):
                known = self.state.jobs[job.name]
                due = look(job.cron, handled_s=known.handled_s, window_s=job.window_s, now_s=now_s)
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
        said = f"it was due at {_time(due_s)}, and its window has ended"
        said += f" after {known.tries} tries" if known.tries else ""
        run = Run(due_s, now_s, now_s, "skipped", said, missed)
        add_run(known, run)
        self._settle(known, due_s)
        known.next_s = job.cron.after(now_s)
        self._save()
        self._tell(job, run)

    def _run(self, job: Job, due_s: float) -> None:
        known = self.state.jobs[job.name]
        began_s = self._clock.now_s()
        due = look(job.cron, handled_s=known.handled_s, window_s=job.window_s, now_s=began_s)
        missed = due.missed if not known.tries else 0
        known.running_since_s = began_s
        known.tries += 1
        self._save()
        self._progress.step("begin", f"{job.name}: begins, due at {_time(due_s)}", job=job.name, due_s=due_s)
        result = self._guarded(job)
        if self.broken:
            # As if this process had been killed, which it will be soon: the next start counts it.
            self._progress.step("broken", f"{job.name}: {self.broken}", job=job.name, message=self.broken)
            return
        ended_s = self._clock.now_s()
        run = Run(due_s, began_s, ended_s, result.result, result.message, missed, result.figures)
        known.running_since_s = 0.0
        known.kills = 0
        pause_s = min(AGAIN_S[0] * 2 ** (known.tries - 1), AGAIN_S[1])
        if result.result in TRY_AGAIN and ended_s + pause_s <= due_s + job.window_s:
            known.again_s = ended_s + pause_s
        elif result.result != "interrupted":
            self._settle(known, due_s)
        known.next_s = known.again_s or job.cron.after(ended_s)
        add_run(known, run)
        self._save()
        self._tell(job, run)

    def _guarded(self, job: Job) -> Result:
        try:
            try:
                self._in_job = True
                return self._work(job)
            finally:
                self._in_job = False
        except KeyboardInterrupt:
            self.stopping = True
            return Result(
                "interrupted", "told to stop; it goes on at the next start, while its window is open"
            )
        except EngineGone as error:
            self.stopping, self.broken = True, str(error)
            return Result("interrupted", str(error))
        except Exception as error:
            return Result("failed", f"{type(error).__name__}: {error}")

    @staticmethod
    def _settle(known: JobState, due_s: float) -> None:
        known.handled_s = max(known.handled_s, due_s)
        known.tries = known.kills = 0
        known.again_s = 0.0

    def _save(self) -> None:
        self._file.save(self.state)
        self._publish(self.state, self._clock.now_s())

    def _tell(self, job: Job, run: Run) -> None:
        text = f"{job.name}: {run.result}" + (f": {run.message}" if run.message else "")
        if run.missed:
            text += f" ({run.missed} earlier times were missed)"
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


def obey_signals(scheduler: Scheduler) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, scheduler.stop)


def _time(moment_s: float) -> str:
    return format_time(round(moment_s * 1000))
