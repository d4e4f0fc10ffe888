"""What a schedule remembers: which times are settled, and how the last runs went. One file of JSON, replaced as a whole.

interrupted     is not settled: after a restart the job goes on, if its window is still open
killed          the same, but not without end: a job that takes its process with it three times has failed
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import msgspec

from topics.system.read_only_disk import read_small

HISTORY_MAX = 50  # runs of a job
DETAIL_MAX = 4000  # characters of a result
BYTES_MAX = 256 << 20  # of the file


class Run(msgspec.Struct):
    """One run of a job, or one that did not happen."""

    due_s: float
    began_s: float
    ended_s: float
    result: str  # done · damaged · later · cannot · failed · interrupted · skipped
    message: str = ""
    missed: int = 0
    figures: dict[str, float] = {}


class JobState(msgspec.Struct):
    handled_s: float  # the last time that is settled
    runs: list[Run] = []  # newest last
    totals: dict[str, int] = {}  # runs by result, since the file was made
    missed_total: int = 0
    running_since_s: float = 0.0
    next_s: float = 0.0
    last_done_s: float = 0.0
    tries: int = 0  # of the time that is not settled
    kills: int = 0  # of them, those that ended with the process
    again_s: float = 0.0  # not before


class State(msgspec.Struct):
    version: int = 1
    jobs: dict[str, JobState] = {}


class StateFile:
    """The file, and a lock beside it: two schedules with one state would do everything twice."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    def lock(self) -> None:
        """BlockingIOError when another process has it."""
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
        """ValueError when it is there and cannot be understood: what is settled must not be guessed."""
        try:
            content = read_small(self.path, BYTES_MAX)
        except FileNotFoundError:
            return State()
        try:
            found = msgspec.json.decode(content, type=State)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(
                f"{self.path} is no state of a schedule ({error}); move it away to begin anew"
            ) from error
        if found.version != 1:
            raise ValueError(f"{self.path} is of version {found.version}, which this program does not know")
        return found

    def save(self, state: State) -> None:
        write_whole(self.path, msgspec.json.format(msgspec.json.encode(state)))


def write_whole(path: Path, content: bytes) -> None:
    """The old file or the new one, whatever happens."""
    draft = path.with_name(f".{path.name}.new")
    with draft.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    os.replace(draft, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def add_run(job: JobState, run: Run) -> None:
    run.message = run.message[:DETAIL_MAX]
    before = job.runs[-1] if job.runs else None
    if before is not None and (before.due_s, before.result) == (run.due_s, run.result):
        job.runs.pop()  # one line is enough for what is tried again and again
    job.runs = [*job.runs, run][-HISTORY_MAX:]
    job.totals[run.result] = job.totals.get(run.result, 0) + 1
    job.missed_total += run.missed
    if run.result == "done":
        job.last_done_s = run.ended_s


def as_rows(state: State) -> list[dict[str, Any]]:
    """Runs of all jobs, oldest first, as reports show them."""
    rows = [
        {"job": name, **msgspec.structs.asdict(run)} for name, job in state.jobs.items() for run in job.runs
    ]
    return sorted(rows, key=lambda row: (row["began_s"], row["job"]))
