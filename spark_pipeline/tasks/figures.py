"""The figures of a report, counted where the records are: indexes of segments, and pages of what has no segment in the cold tier yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from spark_pipeline.tasks.http_reading import Gap, HttpSlice, read_frames
from spark_pipeline.tasks.reading import Slice, Wanted
from spark_pipeline.tasks.statistics import Statistics, statistics_of, statistics_of_frames
from topics.api.errors import TopicsError

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

    def follow(self, other: Figures) -> None:
        """The parts behind these."""
        self.cold.follow(other.cold)
        self.hot.follow(other.hot)
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
            found.hot.follow(_count_http(part, found.lost))
            continue
        try:
            found.cold.follow(statistics_of(part))
        except (TopicsError, OSError) as error:
            # The others count; the report tells which is missing. It is no gap: nobody knows what is in it.
            found.failed.append((part.segment.name, str(error)))
            found.cold.follow(
                Statistics(first_seq=part.segment.first_seq, last_seq=part.segment.next_seq - 1)
            )
    return found


def _count_http(part: HttpSlice, lost: list[Gap]) -> Statistics:
    total = Statistics(rows=part.end_seq - part.start_seq)
    for frames in read_frames(part, Wanted(), lost):
        total.follow(statistics_of_frames(frames))
    return total
