"""Batch reads: partitions are planned once and read independently."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)

from spark_pipeline.source.losses import handle_gaps, report_lost
from spark_pipeline.source.options import SourceOptions
from spark_pipeline.source.planning import plan_batch
from spark_pipeline.tasks.http_reading import Gap, HttpSlice, read_http
from spark_pipeline.tasks.read_ahead import read_ahead
from spark_pipeline.tasks.reading import Range, Slice, Wanted, read_slice
from spark_pipeline.tasks.segments import Damage


@dataclass
class FilesPartition(InputPartition):
    slices: Sequence[Slice]


@dataclass
class HttpPartition(InputPartition):
    part: HttpSlice


def read_partition(
    partition: InputPartition, options: SourceOptions, wanted: Wanted, *, fail_on_loss: bool
) -> Iterator[Any]:
    """Yield the record batches of a partition."""
    if isinstance(partition, HttpPartition):
        gaps: list[Gap] = []
        for batch in read_ahead(read_http(partition.part, wanted, gaps)):
            # Fail before yielding records after the gap.
            if gaps and fail_on_loss:
                handle_gaps(gaps, options.report, fail=True)
            yield batch
        handle_gaps(gaps, options.report, fail=fail_on_loss)
        return
    if not isinstance(partition, FilesPartition):
        return  # without partitions Spark reads one of its own
    damage: list[Damage] = []
    for part in partition.slices:
        for batch in read_slice(part, wanted, damage if options.skip_corrupt else None):
            if batch.num_rows:
                yield batch
    report_lost(options.report, damage=damage)


class TopicsReader(DataSourceReader):
    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self._options = options
        self._wanted = replace(options.wanted, columns=tuple(columns))

    def partitions(self) -> Sequence[InputPartition]:
        options = replace(self._options, wanted=self._wanted)
        plan = plan_batch(options)
        handle_gaps(plan.gaps, options.report, fail=bool(options.fail_on_loss))
        files = [FilesPartition(slices) for slices in plan.files]
        return [*files, *(HttpPartition(part) for part in plan.http)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        fail = bool(self._options.fail_on_loss)
        return read_partition(partition, self._options, self._wanted, fail_on_loss=fail)


class PushingReader(TopicsReader):
    """A reader with filter pushdown. Spark applies all filters again, so narrowing need not be exact."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        span, tags = self._wanted.range, self._wanted.tags
        for one in filters:
            span = narrowed(span, one)
            tags = _narrowed_tags(tags, one)
        self._wanted = replace(self._wanted, range=span, tags=tags)
        yield from filters


def is_pushing_down() -> bool:
    """Whether Spark is about to push filters to the reader.

    If pushdown is disabled, which is the default, Spark rejects readers that support it, and does not tell the source.
    The calling module gives it away.
    """
    frame = sys._getframe(1)
    for _ in range(4):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith("data_source_pushdown_filters.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def narrowed(span: Range, one: Filter) -> Range:
    """The range, narrowed by a filter on seq or ts."""
    column = getattr(one, "attribute", None)
    if column not in {("seq",), ("ts",)} or not hasattr(one, "value"):
        return span
    value = one.value if column == ("seq",) else _as_ms(one.value)
    if not isinstance(value, int):
        return span
    low, high = (span.start_seq, span.end_seq) if column == ("seq",) else (span.start_ts, span.end_ts)
    # Times were truncated to ms, so both ends are widened by one.
    match one:
        case EqualTo():
            low, high = max(low, value), min(high, value + 1)
        case GreaterThan() | GreaterThanOrEqual():
            low = max(low, value)
        case LessThan() | LessThanOrEqual():
            high = min(high, value + 1)
    if column == ("seq",):
        return replace(span, start_seq=low, end_seq=max(high, 0))
    return replace(span, start_ts=low, end_ts=max(high, 0))


def _as_ms(value: object) -> int | None:
    if not isinstance(value, datetime):
        return None
    time = value if value.tzinfo else value.replace(tzinfo=UTC)
    return int(time.timestamp() * 1000 // 1)


def _narrowed_tags(tags: tuple[str, ...] | None, one: Filter) -> tuple[str, ...] | None:
    if getattr(one, "attribute", None) != ("tag",):
        return tags
    match one:
        case EqualTo(value=str(value)):
            wanted = (value,)
        case In(value=tuple() | list() as values) if all(isinstance(value, str) for value in values):
            wanted = tuple(values)
        case _:
            return tags
    return wanted if tags is None else tuple(tag for tag in tags if tag in wanted)
