"""Shared parts of the engine's benchmark: a shell around the engine, timing, comparison with a floor, result rows."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from topics.api.config import EngineConfig, TopicConfig
from topics.api.errors import TopicsError
from topics.engine.commands import topics as c
from topics.engine.core.ports import Disk
from topics.engine.runtime.engine import Engine, Job, Outcome
from workers.shard.posix import PosixDisk, SystemClock

NEVER = 1 << 60
# Checkpoints only on request: a part of one within a timed turn would distort the result.
QUIET = EngineConfig(snapshot_wal_bytes=NEVER, snapshot_interval_ms=NEVER, segment_max_age_ms=NEVER)
PAYLOADS = [(b'{"id":%d,"text":"' % i).ljust(98, b"x") + b'"}' for i in range(100)]  # 100 bytes each


@dataclass
class Row:
    """One line of the table. `ours` and `floor` are in `unit`; without a floor, the ratio compares two sizes."""

    work: str
    ours: float
    unit: str
    floor: float | None = None
    ratio: float | None = None
    aim: str = ""
    met: bool | None = None
    note: str = ""


@dataclass
class Run:
    """Working directory and amount of work."""

    root: str
    quick: bool

    def count(self, full: int) -> int:
        return max(1, full // 20) if self.quick else full

    @contextmanager
    def directory(self, name: str) -> Iterator[str]:
        path = f"{self.root}/{name}"
        shutil.rmtree(path, ignore_errors=True)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


class Shell:
    """Runs an engine as a server does. Turns and finishes are timed separately from jobs, which a server runs in threads."""

    def __init__(self, path: str, config: EngineConfig = QUIET, *, disk: Disk | None = None) -> None:
        self.disk = disk or PosixDisk(path)
        self.engine = Engine.open(self.disk, SystemClock(), config)
        self.loop_ns = 0  # in turn and finish
        self.job_ns = 0
        self.longest_ns = 0
        self.job_kinds: dict[str, int] = {}

    def reset(self) -> None:
        self.loop_ns = self.job_ns = self.longest_ns = 0
        self.job_kinds = {}

    def send(self, *commands: c.Command) -> list[object]:
        """Run one turn and all its jobs; return the results in order."""
        tokens = range(len(commands))
        replies = dict(self.drain(self._timed(lambda: self.engine.turn(list(zip(tokens, commands))))))
        results = [replies[token] for token in tokens]
        for result in results:
            if isinstance(result, TopicsError):
                raise result
        return results

    def ask(self, command: c.Command) -> float:
        """Run one command; return the nanoseconds of its turn, without its jobs."""
        gc.collect(0)
        began = time.perf_counter_ns()
        outcome = self.engine.turn([(0, command)])
        taken = time.perf_counter_ns() - began
        replies = self.drain(outcome)
        assert not any(isinstance(result, TopicsError) for _, result in replies), replies
        return taken

    def checkpoint(self) -> None:
        self.engine.checkpoint()
        before = self.engine.counters["checkpoints"]
        while self.engine.counters["checkpoints"] == before or self.engine._has_background_work():
            self.drain(self._timed(lambda: self.engine.turn([])))
            if self.engine.shard.state.read_only is not None:
                raise RuntimeError(self.engine.shard.state.read_only)

    def fill(
        self, topic: str, count: int, tag: Callable[[int], bytes | None] | None = None, start: int = 0
    ) -> None:
        """Append `count` records in writes of 100; `tag` maps their numbers, which begin at `start`."""
        for first in range(start, start + count, 100):
            size = min(100, start + count - first)
            tags = [tag(first + i) for i in range(size)] if tag is not None else None
            self.send(c.Append(topic, c.Records(PAYLOADS[:size], tags=tags)))

    def abandon(self) -> None:
        """Release files without a clean stop, like a killed process."""
        self.engine.reader.close()
        spare = self.engine.wal.spare
        for file in [*self.engine.wal.files, *([spare] if spare else [])]:
            self.disk.close(file.handle)

    def _timed(self, call: Callable[[], Outcome]) -> Outcome:
        began = time.perf_counter_ns()
        outcome = call()
        taken = time.perf_counter_ns() - began
        self.loop_ns += taken
        self.longest_ns = max(self.longest_ns, taken)
        return outcome

    def _run(self, job: Job) -> None:
        began = time.perf_counter_ns()
        job.run()
        taken = time.perf_counter_ns() - began
        self.job_ns += taken
        self.job_kinds[job.kind] = self.job_kinds.get(job.kind, 0) + taken

    def drain(self, outcome: Outcome) -> list[tuple[object, object]]:
        replies = outcome.replies
        jobs = outcome.jobs
        while jobs:
            job = jobs.pop(0)
            self._run(job)
            outcome = self._timed(lambda job=job: self.engine.finish(job, None))
            replies += outcome.replies
            jobs += outcome.jobs
        return replies


class WatchedDisk(PosixDisk):
    """Counts bytes read by file extension, and the time spent allocating and syncing."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._suffixes: dict[int, str] = {}
        self.bytes_read: dict[str, int] = {}
        self.wait_ns = 0  # zero-filling and syncing

    def open(self, path: str, *, create: bool = False) -> int:
        handle = super().open(path, create=create)
        self._suffixes[handle] = os.path.splitext(path)[1]
        return handle

    def read(self, handle: int, offset: int, length: int) -> bytes:
        data = super().read(handle, offset, length)
        suffix = self._suffixes[handle]
        self.bytes_read[suffix] = self.bytes_read.get(suffix, 0) + len(data)
        return data

    def allocate(self, handle: int, length: int) -> None:
        self.wait_ns += int(elapsed(lambda: super(WatchedDisk, self).allocate(handle, length)))

    def sync(self, handle: int) -> None:
        self.wait_ns += int(elapsed(lambda: super(WatchedDisk, self).sync(handle)))

    def sync_dir(self, path: str) -> None:
        self.wait_ns += int(elapsed(lambda: super(WatchedDisk, self).sync_dir(path)))


def plain(topic: str, durability: str = "disk", **settings: int) -> c.PutTopic:
    return c.PutTopic(topic, TopicConfig(durability=durability, **settings))  # type: ignore[arg-type]


def against_floor(
    ours: Callable[[], float], floor: Callable[[], float], rounds: int
) -> tuple[float, float, float]:
    """Run both alternately; return the medians of each, and of the ratios of neighbouring runs."""
    mine: list[float] = []
    lowest: list[float] = []
    for _ in range(rounds):
        lowest.append(floor())
        mine.append(ours())
    return median(mine), median(lowest), median(a / b for a, b in zip(mine, lowest))


def elapsed(work: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - began
