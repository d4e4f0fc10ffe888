"""Small parts of the pipeline: options, progress, read-ahead, engines, filters that narrow a range."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThan, In, LessThan, LessThanOrEqual

from spark_pipeline.cli.arguments import size
from spark_pipeline.jobs.engines import LocalEngine
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.source.batch import narrowed
from spark_pipeline.source.options import BadOption, parse
from spark_pipeline.source.stream import TopicsStreamReader
from spark_pipeline.tasks.columns import COLUMNS
from spark_pipeline.tasks.read_ahead import read_ahead
from spark_pipeline.tasks.reading import SEQ_MAX, Range
from tests.support.server import until

GIVEN = {"path": "/cold", "topic": "orders"}


def test_defaults_of_options() -> None:
    found = parse(GIVEN)
    assert found.wanted.columns == COLUMNS
    assert found.wanted.range == Range(0, SEQ_MAX, 0, SEQ_MAX)
    assert (found.wanted.verify, found.partition_bytes_max, found.fail_on_loss) == ("block", 64 << 20, None)


def test_options_as_people_write_them() -> None:
    found = parse(
        {
            **GIVEN,
            "STARTTS": "2026-11-16T14:00:00Z",
            "endts": "1794837672551",
            "maxPartitionBytes": "32 MiB",
            "pinTtl": "2h",
            "startSeq": "1_000",
            "failOnDataLoss": "FALSE",
            "startingOffsets": "2026-11-16",
        }
    )
    assert found.wanted.range == Range(1000, SEQ_MAX, 1794837600000, 1794837672551)
    assert (found.partition_bytes_max, found.pin_ms, found.fail_on_loss) == (32 << 20, 7_200_000, False)
    assert found.starting_offsets == "ts:1794787200000"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("startTs", "yesterday"),
        ("maxPartitionBytes", "many"),
        ("pinTtl", "1y"),
        ("includeDeleted", "maybe"),
        ("endSeq", "-1"),
    ],
)
def test_invalid_options(option: str, value: str) -> None:
    with pytest.raises(BadOption, match=option):
        parse({**GIVEN, option: value})


def test_a_stream_without_a_server_fails_when_it_begins() -> None:
    """Spark replaces errors that are raised before that by an error of its own."""
    reader = TopicsStreamReader(parse(GIVEN), ["seq"])
    with pytest.raises(BadOption, match="give the option url"):
        reader.initialOffset()


def test_only_one_limit() -> None:
    with pytest.raises(BadOption, match="only one"):
        parse({**GIVEN, "maxRecordsPerTrigger": "1", "maxBytesPerTrigger": "1"})


def test_filters_narrow_and_never_lose() -> None:
    everything = Range()
    assert narrowed(everything, GreaterThan(("seq",), 5)).start_seq == 5
    assert narrowed(everything, EqualTo(("seq",), 5)) == Range(5, 6)
    assert narrowed(narrowed(everything, LessThan(("seq",), 9)), LessThanOrEqual(("seq",), 20)).end_seq == 10
    moment = datetime(2026, 11, 16, 14, 0, 0, 1500, tzinfo=UTC)
    assert narrowed(everything, LessThan(("ts",), moment)).end_ts == 1794837600002
    assert narrowed(everything, GreaterThan(("ts",), moment)).start_ts == 1794837600001
    # Filters that it does not know have no effect.
    assert narrowed(everything, In(("seq",), (1, 2))) == everything
    assert narrowed(everything, EqualTo(("meta",), "x")) == everything


def test_sizes_on_the_command_line() -> None:
    assert [size(text) for text in ("17", "4k", "1.5MiB", "2g", "1TB")] == [
        17,
        4096,
        3 << 19,
        2 << 30,
        1 << 40,
    ]


def test_progress_is_lines_of_json_without_a_terminal() -> None:
    out = io.StringIO()
    progress = Progress(out)
    progress.step("plan", "for people", groups=2)
    progress.bar("merging", 1, 2)
    progress.bar("merging", 2, 2)  # dropped: too soon after the first
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["step"] for line in lines] == ["plan", "progress"]
    assert lines[0]["groups"] == 2


def test_progress_is_a_bar_on_a_terminal() -> None:
    out = io.StringIO()
    progress = Progress(out, as_json=False)
    progress.bar("merging", 1, 2)
    progress.step("commit", "done \x1b[31m")
    assert "[###############...............] 1/2" in out.getvalue()
    assert out.getvalue().endswith("done \\x1b[31m\n")


def test_reading_ahead_gives_the_same_and_ends_when_left() -> None:
    assert list(read_ahead(iter(range(100)))) == list(range(100))
    made: list[int] = []

    def endless() -> Iterator[int]:
        while True:
            made.append(len(made))
            yield made[-1]

    threads = threading.active_count()
    items = read_ahead(endless())
    assert next(items) == 0
    items.close()  # type: ignore[attr-defined]
    until(lambda: threading.active_count() <= threads)
    assert len(made) <= 6, "reading ahead is bounded"

    def broken() -> Iterator[int]:
        yield 1
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        list(read_ahead(broken()))


def test_a_task_that_fails_ends_a_run_of_the_pool() -> None:
    engine = LocalEngine(1)
    try:
        running = engine.start(int, ["1", "2", "x", "4"])
        until(lambda: running.wait(0.1))
        with pytest.raises(ValueError, match="invalid literal"):
            running.results()
        assert engine.start(int, ["5"]).results() == [5], "the engine can be used again"
    finally:
        engine.close()
