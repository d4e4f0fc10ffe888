"""`format("topics")` with a server: batches of a snapshot, records that are not in the cold tier yet, and streams.

Goal: a batch has every record exactly once, from whichever tier; a stream has each once over restarts, reads at most its limit at a time, and
reports losses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_pipeline.tasks.http_reading import HttpSlice, read_http
from spark_pipeline.tasks.reading import Wanted
from tests.spark.conftest import COUNT, record, run_to_end, url_of
from tests.support.length import is_long
from tests.support.server import Server

ALL = list(range(1, COUNT + 1))


def batch(spark: Any, server: Server, **options: Any) -> Any:
    given = {
        "url": url_of(server),
        "topic": "m10",
        "columns": "seq,tag,node,data,meta",
        "dataAs": "json",
        **options,
    }
    return spark.read.format("topics").options(**given).load()


def check(rows: list[Any], seqs: list[int]) -> None:
    assert sorted(row.seq for row in rows) == seqs
    for row in rows:
        wanted = record(row.seq)
        assert json.loads(row.data) == wanted["data"]
        assert json.loads(row.meta) == wanted["meta"]
        assert (row.tag, row.node) == (wanted["tag"], wanted["node"])


def test_a_batch_has_cold_files_and_the_rest(spark: Any, server: Server) -> None:
    frame = batch(spark, server)
    check(frame.collect(), ALL)
    state = server.get("/v0/topics/m10/consolidation").json
    assert state["snapshots"] >= 1, "the files are not pinned"
    check(batch(spark, server, startSeq="85", endSeq="96").collect(), list(range(85, 96)))


def test_without_files_all_of_it_comes_over_http(spark: Any, server: Server) -> None:
    frame = batch(spark, server, coldFiles="no", minPartitions="3")
    assert frame.rdd.getNumPartitions() == 3
    check(frame.collect(), ALL)


def test_another_server_s_cold_directory_is_refused(spark: Any, server: Server, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"is .* the server's cold directory"):
        batch(spark, server, path=str(tmp_path)).collect()


def test_pages_of_frames_hold_what_is_asked_for(server: Server) -> None:
    gaps: list[Any] = []
    part = HttpSlice(url_of(server), "TOPICS_TOKEN", "m10", 10, 20)
    rows = [row for one in read_http(part, Wanted(verify="record"), gaps) for row in one.to_pylist()]
    assert [row["seq"] for row in rows] == list(range(10, 20))
    assert [json.loads(row["data"])["n"] for row in rows] == list(range(10, 20))
    assert gaps == []


# ── Streams ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def topic(server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    """A topic with 60 records for one test."""
    name = f"s.{request.node.name.split('[')[0][5:40]}"
    server.post(f"/v0/topics/{name}", {"records": [record(n) for n in range(1, 61)]})
    yield name
    server.delete(f"/v0/topics/{name}")


def drain(spark: Any, server: Server, topic: str, folder: Path, **options: Any) -> list[list[int]]:
    """Run a stream until it has read everything, and return the seqs of each micro-batch."""
    batches: list[list[int]] = []

    def keep(frame: Any, _: int) -> None:
        batches.append(sorted(row.seq for row in frame.collect()))

    given = {"url": url_of(server), "topic": topic, "columns": "seq", **options}
    stream = spark.readStream.format("topics").options(**given).load()
    query = stream.writeStream.foreachBatch(keep).option("checkpointLocation", str(folder / "checkpoint"))
    run_to_end(query)
    return [one for one in batches if one]


def test_a_stream_is_limited_resumes_after_a_restart_and_ends_at_losses(
    spark: Any, server: Server, topic: str, tmp_path: Path
) -> None:
    first = drain(spark, server, topic, tmp_path, maxRecordsPerTrigger="25")
    assert [len(one) for one in first] == [25, 25, 10]
    assert [seq for one in first for seq in one] == list(range(1, 61))
    server.write(topic, "more", "and more")
    again = drain(spark, server, topic, tmp_path, maxRecordsPerTrigger="25")
    assert [seq for one in again for seq in one] == [61, 62]
    server.put(f"/v0/topics/{topic}", {"cap_records": 10})
    for n in range(63, 101):
        server.write(topic, n)
    with pytest.raises(Exception, match=r"records 63 to \d+ of .* are lost \(cap\).*failOnDataLoss=false"):
        drain(spark, server, topic, tmp_path)
    found = drain(spark, server, topic, tmp_path, failOnDataLoss="false", report=str(tmp_path / "report"))
    kept = [seq for one in found for seq in one]
    assert kept == list(range(101 - len(kept), 101))
    told = [
        json.loads(line) for file in (tmp_path / "report").iterdir() for line in file.read_text().splitlines()
    ]
    assert told[0]["kind"] == "gap"
    assert (told[0]["first_seq"], told[0]["last_seq"]) == (63, 100 - len(kept))


@pytest.mark.parametrize("count", [70, *([1] if is_long() else [])])
def test_a_topic_that_was_created_again_ends_a_stream(
    spark: Any, server: Server, topic: str, tmp_path: Path, count: int
) -> None:
    """The new topic may be longer than the stream's offset, which is 61. The stream began in the middle."""
    found = drain(spark, server, topic, tmp_path, startingOffsets="50")
    assert [seq for one in found for seq in one] == list(range(50, 61))
    server.delete(f"/v0/topics/{topic}")
    server.write(topic, *range(count))
    with pytest.raises(Exception, match=r"was deleted and created again.*failOnDataLoss=false"):
        drain(spark, server, topic, tmp_path)
    found = drain(spark, server, topic, tmp_path, failOnDataLoss="false")
    assert found == [list(range(1, count + 1))]
    server.write(topic, "more")
    assert drain(spark, server, topic, tmp_path) == [[count + 1]]


def test_a_topic_that_is_created_again_under_a_batch_is_not_read_as_the_old_one(
    server: Server, topic: str
) -> None:
    """Without Spark: a partition of the old topic, and offsets of earlier versions, which have no epochs."""
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    from spark_pipeline.source.options import parse
    from spark_pipeline.source.stream import EPOCHS, TopicsStreamReader

    def reader(**options: str) -> TopicsStreamReader:
        return TopicsStreamReader(parse({"url": url_of(server), "topic": topic, **options}), ["seq"])

    stream = reader()
    begin = stream.initialOffset()
    old = begin[EPOCHS][topic]
    server.delete(f"/v0/topics/{topic}")
    server.write(topic, *range(80))
    gaps: list[Any] = []
    part = HttpSlice(url_of(server), "TOPICS_TOKEN", topic, 11, 61, old)
    assert list(read_http(part, Wanted(), gaps)) == []
    assert [(gap.first_seq, gap.last_seq, gap.reason) for gap in gaps] == [(11, 60, "recreated")]
    end = reader(failOnDataLoss="false").latestOffset({topic: 61, EPOCHS: {topic: old}}, ReadAllAvailable())
    assert end[topic] == 81
    assert end[EPOCHS] != begin[EPOCHS]
    assert reader().latestOffset({topic: 61}, ReadAllAvailable()) == end
    assert list(end) == [topic, EPOCHS]


def test_offsets(server: Server, topic: str) -> None:
    """The reader's answers, without Spark."""
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

    from spark_pipeline.source.options import parse
    from spark_pipeline.source.stream import EPOCHS, TopicsStreamReader

    def reader(**options: str) -> TopicsStreamReader:
        return TopicsStreamReader(parse({"url": url_of(server), **options}), ["seq"])

    def offset(**seqs: int) -> dict[str, Any]:
        epochs = {name: server.get(f"/v0/topics/{name}").json["epoch"] for name in sorted(seqs)}
        return {**{name: seqs[name] for name in sorted(seqs)}, EPOCHS: epochs}

    two = reader(topic=f"{topic},m10")
    assert json.dumps(two.initialOffset()) == json.dumps(offset(**{topic: 1, "m10": 1}))
    assert two.latestOffset(two.initialOffset(), ReadAllAvailable()) == offset(**{topic: 61, "m10": 101})
    limited = two.latestOffset(two.initialOffset(), ReadMaxRows(16))
    assert limited == offset(**{topic: 7, "m10": 11})
    # Even with a small limit each topic advances.
    assert two.latestOffset({topic: 60, "m10": 1}, ReadMaxBytes(1)) == offset(**{topic: 61, "m10": 2})
    at_end = offset(**{topic: 61, "m10": 101})
    assert two.latestOffset(at_end, ReadMaxRows(5)) == at_end
    # `latest` is resolved once.
    latest = reader(topic=topic, startingOffsets="latest")
    assert latest.initialOffset() == offset(**{topic: 61})
    server.write(topic, "more")
    assert latest.initialOffset() == offset(**{topic: 61})
    # With an AvailableNow trigger the end is what was there when the query began.
    now = reader(topic=topic)
    now.prepareForTriggerAvailableNow()
    server.write(topic, "too late")
    assert now.latestOffset(offset(**{topic: 1}), ReadAllAvailable()) == offset(**{topic: 62})
    at = server.diff(topic, from_seq=60, limit=1).json["records"][0]["$ts"]
    found = reader(topic=topic, startingOffsets=f"{at}").initialOffset()
    assert found == offset(**{topic: at}), "a number is a seq"
