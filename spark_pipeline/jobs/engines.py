"""Engines that run the tasks of a job: Spark, or a local process pool. Tasks and results are small and contain no records."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from spark_pipeline.tasks.manifest import FilesGone
from topics.api.errors import TopicsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
R = TypeVar("R")


class TaskFailed(Exception):
    """A task failed for a reason other than damaged records."""


class Damaged(TopicsError):
    """A task stopped at damaged data."""

    code = "corrupt"


@dataclass(frozen=True, slots=True)
class _Guarded:
    """Returns a function's errors about records and files as text: not all of them can be pickled."""

    function: Callable[[Any], Any]

    def __call__(self, task: Any) -> tuple[Any, type[Exception] | None, str]:
        try:
            return self.function(task), None, ""
        except FilesGone as error:
            return None, FilesGone, str(error)
        except TopicsError as error:
            return None, Damaged, str(error)


def _unguarded(outcomes: list[tuple[Any, type[Exception] | None, str]]) -> list[Any]:
    for _, problem, text in outcomes:
        if problem is not None:
            raise problem(text)
    return [result for result, _, _ in outcomes]


def last_line(error: BaseException) -> str:
    """The line with the actual error, out of Spark's long messages with stack traces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error:" in line or "Error]" in line]
    return (named or lines or [type(error).__name__])[0][:500]


class Running(Protocol[R]):
    """Running tasks."""

    def wait(self, timeout_s: float) -> bool:
        """Wait; return whether all tasks have ended or one has failed."""

    def done(self) -> int:
        """The number of tasks that have ended."""

    def results(self) -> list[R]:
        """Results in the order of the tasks. Raises Damaged, FilesGone, TaskFailed or OSError if a task failed."""

    def cancel(self) -> None:
        """Cancel the remaining tasks."""


class Engine(Protocol):
    name: str
    workers: int

    def start(self, function: Callable[[T], R], tasks: Sequence[T]) -> Running[R]:
        """Start one call per task. The function must be importable by other processes."""

    def close(self) -> None: ...


def use_idle_priority() -> None:
    """Run this process, and those it starts from now on, with idle CPU priority."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


# ── Processes ─────────────────────────────────────────────────────────────────────────


class LocalEngine:
    name = "local"

    def __init__(self, workers: int = 0) -> None:
        self.workers = workers or os.cpu_count() or 1
        # Spawned, not forked, because this process may have threads and open connections.
        self._pool = ProcessPoolExecutor(self.workers, mp_context=multiprocessing.get_context("spawn"))

    def start(self, function: Callable[[T], R], tasks: Sequence[T]) -> Running[R]:
        return _LocalRunning([self._pool.submit(_Guarded(function), task) for task in tasks])

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class _LocalRunning:
    def __init__(self, futures: list[Future[Any]]) -> None:
        self._futures = futures

    def wait(self, timeout_s: float) -> bool:
        ended, left = wait(self._futures, timeout_s, FIRST_EXCEPTION)
        return not left or any(not future.cancelled() and future.exception() for future in ended)

    def done(self) -> int:
        return sum(future.done() for future in self._futures)

    def results(self) -> list[Any]:
        try:
            return _unguarded([future.result() for future in self._futures])
        except BrokenProcessPool as error:
            raise TaskFailed("a worker process died, perhaps out of memory; run it again") from error
        finally:
            self.cancel()

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()


# ── Spark ─────────────────────────────────────────────────────────────────────────────


class SparkEngine:
    """Runs each task as a Spark task, on any executor with access to the cold tier. Spark may retry it."""

    name = "spark"

    def __init__(self, session: SparkSession, *, stop_session: bool = False) -> None:
        self._session = session
        self._stop_session = stop_session
        self.workers = int(session.sparkContext.defaultParallelism)

    def start(self, function: Callable[[T], R], tasks: Sequence[T]) -> Running[R]:
        return _SparkRunning(self._session, function, tasks)

    def is_alive(self) -> bool:
        try:
            self._session.sparkContext.statusTracker().getActiveJobsIds()
        except Exception:  # whatever a call to a dead JVM raises
            return False
        return True

    def close(self) -> None:
        if self._stop_session and self.is_alive():
            self._session.stop()


class _SparkRunning:
    def __init__(self, session: SparkSession, function: Callable[[Any], Any], tasks: Sequence[Any]) -> None:
        self._context = session.sparkContext
        self._group = f"topics-{uuid.uuid4().hex[:12]}"
        self._count = len(tasks)
        self._results: list[Any] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()
        # Spark's thread class also ends the corresponding JVM thread.
        from pyspark import InheritableThread

        self._thread = InheritableThread(
            target=self._run, args=(function, list(tasks)), daemon=True, session=session
        )
        self._thread.start()

    def _run(self, function: Callable[[Any], Any], tasks: list[Any]) -> None:
        try:
            # Job groups are per thread, so this one covers only this job.
            self._context.setJobGroup(
                self._group, f"topics-spark {function.__name__}", interruptOnCancel=False
            )
            if tasks:
                self._results = self._context.parallelize(tasks, len(tasks)).map(_Guarded(function)).collect()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)

    def done(self) -> int:
        if self._ended.is_set():
            return self._count
        tracker = self._context.statusTracker()
        done = 0
        for job in tracker.getJobIdsForGroup(self._group):
            info = tracker.getJobInfo(job)
            for stage in info.stageIds if info else ():
                found = tracker.getStageInfo(stage)
                done += found.numCompletedTasks if found else 0
        return done

    def results(self) -> list[Any]:
        self._ended.wait()
        if isinstance(self._error, Exception):
            raise TaskFailed(f"a Spark task failed: {last_line(self._error)}") from self._error
        if self._error is not None:
            raise self._error
        return _unguarded(self._results)

    def cancel(self) -> None:
        if not self._ended.is_set():
            with contextlib.suppress(Exception):  # the JVM may be dead, and its tasks with it
                self._context.cancelJobGroup(self._group)
