"""The figures of a report, counted where the records are: indexes of segments, and pages of what has no segment in the cold tier yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from spark_pipeline.tasks.http_reading import Gap, HttpSlice, read_frames
from spark_pipeline.tasks.reading import Slice, Wanted
from spark_pipeline.tasks.statistics import Statistics, statistics_of, statistics_of_frames
from topics.engine.errors import TopicsError

SEGMENTS_MAX = 64  # of one task: each is an index to read, a few MiB
HTTP_RECORDS_MIN = 20_000  # a task of fewer costs more than it saves


@dataclass(frozen=True, slots=True)
class FiguresTask:
    topic: str
    parts: tuple[Slice | HttpSlice, ...]


@dataclass(slots=True)
class Figures:
    """Of some parts of a topic."""

    topic: str
    cold: Statistics = field(default_factory=Statistics)
    hot: Statistics = field(default_factory=Statistics)
    lost: list[Gap] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)  # segment, why it could not be counted

    def add(self, other: Figures) -> None:
        self.cold.add(other.cold)
        self.hot.add(other.hot)
        self.lost += [gap for gap in other.lost if gap not in self.lost]
        self.failed += other.failed


def tasks_of(
    topic: str, slices: Sequence[Slice], http: Sequence[HttpSlice], workers: int
) -> list[FiguresTask]:
    """Some tasks for each worker, so that a slow one does not keep the others waiting."""
    step = max(min(-(-len(slices) // (workers * 2)), SEGMENTS_MAX), 1)
    found = [FiguresTask(topic, tuple(slices[first : first + step])) for first in range(0, len(slices), step)]
    return found + [FiguresTask(topic, (part,)) for part in http]


def split_http(whole: HttpSlice, workers: int) -> list[HttpSlice]:
    span = whole.end_seq - whole.start_seq
    if span <= 0:
        return []
    count = max(min(workers * 4, span // HTTP_RECORDS_MIN), 1)
    edges = [whole.start_seq + span * i // count for i in range(count + 1)]
    return [
        HttpSlice(whole.url, whole.token_env, whole.topic, first, stop) for first, stop in pairwise(edges)
    ]


def count(task: FiguresTask) -> Figures:
    found = Figures(task.topic)
    for part in task.parts:
        if isinstance(part, HttpSlice):
            found.hot.add(_count_http(part, found.lost))
            continue
        try:
            found.cold.add(statistics_of(part))
        except (TopicsError, OSError) as error:
            # The others count; the report tells which is missing.
            found.failed.append((part.segment.name, str(error)))
    return found


def _count_http(part: HttpSlice, lost: list[Gap]) -> Statistics:
    total = Statistics(rows=part.end_seq - part.start_seq)
    last = part.start_seq - 1
    for frames in read_frames(part, Wanted(), lost):
        total.add(statistics_of_frames(frames))
        here = frames.headers["seq"].astype(np.int64)
        total.gaps += int(np.count_nonzero(np.diff(here, prepend=last) > 1))
        last = int(here[-1])
    total.gaps += last + 1 < part.end_seq
    return total
