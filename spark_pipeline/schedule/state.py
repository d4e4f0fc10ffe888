"""Persistent state of a schedule: which due times are handled, and the last runs. A JSON file, replaced atomically.

An interrupted run is not handled: after a restart the job resumes, if its window is still open. The same applies after
the process was killed, except that a job during which that happens three times in a row has failed.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import msgspec

from topics.system.read_only_disk import read_small

HISTORY_MAX = 50  # runs per job
MESSAGE_MAX = 4000  # characters of a message
BYTES_MAX = 256 << 20  # size of the file


class Run(msgspec.Struct):
    """A run of a job, or a skipped one."""

    due_s: float
    began_s: float
    ended_s: float
    result: str  # done · damaged · later · cannot · failed · interrupted · skipped
    message: str = ""
    missed: int = 0
    figures: dict[str, float] = {}


class JobState(msgspec.Struct):
    handled_s: float  # the last due time that is handled
    runs: list[Run] = []  # newest last
    totals: dict[str, int] = {}  # runs by result, since the file was created
    missed_total: int = 0
    running_since_s: float = 0.0
    next_s: float = 0.0
    last_done_s: float = 0.0
    tries: int = 0  # for the current due time
    kills: int = 0  # tries during which the process was killed
    again_s: float = 0.0  # earliest time of the next try


class State(msgspec.Struct):
    version: int = 1
    jobs: dict[str, JobState] = {}


class StateFile:
    """The state file with a lock: two schedules with the same state would run every job twice."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    def lock(self) -> None:
        """Raises BlockingIOError if another process holds the lock."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(handle)
            raise
        self._lock = handle

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def load(self) -> State:
        """Read the file; ValueError if it is invalid."""
        try:
            content = read_small(self.path, BYTES_MAX)
        except FileNotFoundError:
            return State()
        try:
            state = msgspec.json.decode(content, type=State)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(
                f"{self.path} is not the state of a schedule ({error}); move it away to start afresh"
            ) from error
        if state.version != 1:
            raise ValueError(f"{self.path} has version {state.version}, which is not supported")
        return state

    def save(self, state: State) -> None:
        replace_file(self.path, msgspec.json.format(msgspec.json.encode(state)))


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def add_run(job: JobState, run: Run) -> None:
    run.message = run.message[:MESSAGE_MAX]
    before = job.runs[-1] if job.runs else None
    if before is not None and (before.due_s, before.result) == (run.due_s, run.result):
        job.runs.pop()  # keep one entry for repeated tries
    job.runs = [*job.runs, run][-HISTORY_MAX:]
    job.totals[run.result] = job.totals.get(run.result, 0) + 1
    job.missed_total += run.missed
    if run.result == "done":
        job.last_done_s = run.ended_s


def as_rows(state: State) -> list[dict[str, Any]]:
    """Runs of all jobs, oldest first, for reports."""
    rows = [
        {"job": name, **msgspec.structs.asdict(run)} for name, job in state.jobs.items() for run in job.runs
    ]
    return sorted(rows, key=lambda row: (row["began_s"], row["job"]))
