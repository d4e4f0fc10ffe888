"""Writing to topics with Spark: every row is there once, however often tasks, commits and queries are retried.

Method: a real server and a real Spark. Tasks fail once or always, controlled by files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from spark_pipeline.tasks.sending import (
    BadRow,
    BatchFailed,
    Chunk,
    Fields,
    Target,
    abort,
    abort_batch,
    chunks_of,
    commit,
    stage,
)
from tests.spark.conftest import record, run_to_end, url_of
from tests.support.length import is_long
from tests.support.server import Server, until


@pytest.fixture
def topic(server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"k.{request.node.name.split('[')[0][5:40]}"
    yield name
    server.delete(f"/v0/topics/{name}")


def read(server: Server, topic: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor, caught_up = 0, False
    while not caught_up:
        answer = server.diff(topic, from_seq=cursor, limit=10_000, include_tags=True)
        if answer.status == 404:
            return []
        found += answer.json["records"]
        cursor, caught_up = answer.json["next_from_seq"], answer.json["caught_up"]
    return found


def numbers(server: Server, topic: str) -> list[int]:
    return sorted(one["data"]["n"] for one in read(server, topic))


def rows(spark: Any, count: int, parts: int = 2) -> Any:
    return spark.range(0, count, 1, parts).selectExpr(
        "to_json(named_struct('n', id)) AS data", "concat('t', id % 3) AS tag"
    )


def write(frame: Any, server: Server, topic: str, **options: str) -> None:
    given = {"url": url_of(server), "topic": topic, **options}
    frame.write.format("topics").options(**given).mode("append").save()


def transactions_end(server: Server) -> None:
    """Wait until none is open. Their files are removed after the commit is answered, and folders of topics may be removed meanwhile."""

    def staged() -> list[str]:
        return [name for _, _, names in os.walk(server.data_dir) for name in names if name.startswith("txn-")]

    until(lambda: not staged())


@pytest.mark.parametrize("delivery", ["staged", "direct"])
def test_a_batch(spark: Any, server: Server, topic: str, delivery: str) -> None:
    frame = rows(spark, 20).selectExpr("data AS body", "tag", "'me' AS who", "'{\"v\":1}' AS meta")
    write(frame, server, topic, delivery=delivery, dataColumn="body", nodeColumn="who")
    found = read(server, topic)
    assert sorted(one["data"]["n"] for one in found) == list(range(20))
    assert all(one["$tag"] == f"t{one['data']['n'] % 3}" for one in found)
    assert {(one["$node"], json.dumps(one["meta"])) for one in found} == {("me", '{"v": 1}')}
    if delivery == "staged":
        assert [one["data"]["n"] for one in found] == list(range(20)), (
            "records are in the order of the partitions"
        )
    write(frame, server, topic, delivery=delivery, dataColumn="body")
    assert len(read(server, topic)) == 40, "another run is another batch"


def test_records_are_written_as_they_were_read(spark: Any, server: Server, topic: str) -> None:
    """JSON stays JSON and bytes stay bytes, though both are read as binary."""
    source = f"{topic}.source"
    server.post(f"/v0/topics/{source}", {"records": [record(n) for n in range(1, 4)]})
    server.post(f"/v0/topics/{source}", {"records": [{"data_base64": "AAH/"}]})
    write(spark.read.format("topics").options(url=url_of(server), topic=source).load(), server, topic)
    kept = [{k: v for k, v in one.items() if k not in {"$ts", "$topic"}} for one in read(server, topic)]
    given = [{k: v for k, v in one.items() if k not in {"$ts", "$topic"}} for one in read(server, source)]
    assert kept == given
    server.delete(f"/v0/topics/{source}")


def failing_while(path: Path, n: int, *, once: bool) -> Any:
    """A function of rows that fails at this one while the file exists."""
    from pyspark.sql.functions import udf

    def perhaps(text: str) -> str:
        if json.loads(text)["n"] == n and path.exists():
            if once:
                path.unlink()
            raise RuntimeError("poisoned")
        return text

    return udf(perhaps, "string", useArrow=False)


def test_a_task_that_is_tried_again_writes_once(
    spark: Any, server: Server, topic: str, tmp_path: Path
) -> None:
    """The first attempt of the second task has staged rows when it fails."""
    poison = tmp_path / "poison"
    poison.touch()
    frame = rows(spark, 24_000)
    write(frame.select(failing_while(poison, 23_990, once=True)("data").alias("data")), server, topic)
    assert not poison.exists()
    assert numbers(server, topic) == list(range(24_000))


def test_two_tries_of_a_task_and_repeated_commits(server: Server, topic: str) -> None:
    """Without Spark: an attempt whose result is lost, a repeated commit, and an abort after it."""
    target = Target(url_of(server), topic)

    def chunks() -> Iterator[Chunk]:
        batch = pa.record_batch([pa.array(['{"n":1}', '{"n":2}', '{"n":3}'])], names=["data"])
        return chunks_of([batch], Fields("data", is_text=True), rows_max=2)

    assert stage(target, "q", 0, "1-1", iter(())) is None, "no rows, no transaction"
    lost, kept = (stage(target, "q", 0, "0-0", chunks()) for _ in range(2))
    assert lost is not None and kept is not None
    assert (kept.txn, kept.chunks, kept.records) == (lost.txn, 2, 3)
    assert read(server, topic) == [], "staged rows are not readable"
    commit(target, [kept])
    commit(target, [kept])
    abort(target, [kept.txn])
    assert numbers(server, topic) == [1, 2, 3]
    replayed = stage(target, "q", 0, "0-9", chunks())
    assert replayed is not None and replayed.chunks == 0, "the batch is already published"
    commit(target, [replayed])
    assert numbers(server, topic) == [1, 2, 3]
    later = stage(target, "q", 2, "0-0", chunks())
    assert later is not None
    commit(target, [later])
    overtaken = stage(target, "q", 0, "0-9", chunks())
    assert overtaken is not None and overtaken.chunks == 0
    commit(target, [overtaken])
    assert numbers(server, topic) == sorted([1, 2, 3] * 2)
    gone = stage(target, "q", 3, "0-0", chunks())
    assert gone is not None
    abort_batch(target, "q", 3)
    with pytest.raises(BatchFailed, match="Run it again, with a longer txnTtl"):
        commit(target, [gone])


def test_chunks_are_bounded_and_hold_one_value_each() -> None:
    def sizes(values: list[Any], **limits: int) -> list[int]:
        batch = pa.record_batch([pa.array(values)], names=["data"])
        fields = Fields("data", is_text=isinstance(values[0], str))
        return [len(one.records) for one in chunks_of([batch, batch], fields, **limits)]

    assert sizes(["1"] * 5, rows_max=4) == [4, 4, 2]
    assert sizes(['"%s"' % ("ä" * 500)] * 3, bytes_max=2200) == [2, 2, 2], (
        "the bound is in bytes, not in characters"
    )
    assert sizes([b"x" * 5000, b""], bytes_max=100) == [1, 1, 1, 1], "a large value has its own chunk"
    for text in ('1},{"data":2', "", "{", "1 2"):
        with pytest.raises(BadRow, match="which is not valid JSON"):
            sizes([text])
    with pytest.raises(BadRow, match="has a null"):
        sizes(["1", None])


def test_a_batch_that_fails_leaves_nothing(spark: Any, server: Server, topic: str) -> None:
    frame = rows(spark, 20).selectExpr("IF(data LIKE '%19%', 'no json', data) AS data")
    with pytest.raises(Exception, match=r"which is not valid JSON.*to_json"):
        write(frame, server, topic)
    assert read(server, topic) == []


def test_a_named_producer(spark: Any, server: Server, topic: str) -> None:
    """A batch with a number is written once; without one each run is another batch. Neither conflicts with other producers."""
    frame = rows(spark, 4)
    for batch in ("7", "7", "8", "7"):
        write(frame, server, topic, producer="etl", batch=batch)
    assert numbers(server, topic) == sorted([0, 1, 2, 3] * 2)
    for _ in range(2):
        write(frame, server, topic, producer="other")
    assert numbers(server, topic) == sorted([0, 1, 2, 3] * 4)
    write(frame, server, topic, producer="other", batch=str(2**62))
    with pytest.raises(Exception, match="a concurrent write of producer other finished first"):
        write(frame, server, topic, producer="other")
    assert len(read(server, topic)) == 20
    with pytest.raises(Exception, match="batch needs the option producer"):
        write(frame, server, topic, batch="1")


def test_invalid_options(spark: Any, server: Server, topic: str) -> None:
    frame = rows(spark, 2)
    with pytest.raises(Exception, match="tagColumn: there is no column kind; the columns are data, tag"):
        write(frame, server, topic, tagColumn="kind")
    with pytest.raises(Exception, match="it must be JSON text, as from to_json"):
        write(frame.selectExpr("1 AS data"), server, topic)
    with pytest.raises(Exception, match="topics cannot be overwritten"):
        given = {"url": url_of(server), "topic": topic}
        frame.write.format("topics").options(**given).mode("overwrite").save()


# ── Streams ───────────────────────────────────────────────────────────────────────────


def run(spark: Any, server: Server, source: str, topic: str, folder: Path, poison: Path) -> None:
    """Copy what is there. While the file exists, the row of n = 12 fails, which is in the second batch."""
    options = {"url": url_of(server), "topic": source, "columns": "data", "dataAs": "json"}
    options |= {"maxRecordsPerTrigger": "10", "minPartitions": "2"}
    stream = spark.readStream.format("topics").options(**options).load()
    text = stream.select(failing_while(poison, 12, once=False)("data").alias("data"))
    query = text.writeStream.format("topics").options(
        url=url_of(server), topic=topic, checkpointLocation=str(folder / "checkpoint")
    )
    run_to_end(query)


@pytest.fixture
def source(server: Server, topic: str) -> Iterator[str]:
    name = f"{topic}.source"
    server.post(f"/v0/topics/{name}", {"records": [record(n) for n in range(1, 16)]})
    yield name
    server.delete(f"/v0/topics/{name}")


def test_a_stream_that_fails_and_is_started_again_writes_each_row_once(
    spark: Any, server: Server, topic: str, source: str, tmp_path: Path
) -> None:
    poison = tmp_path / "poison"
    poison.touch()
    with pytest.raises(Exception, match="poisoned"):
        run(spark, server, source, topic, tmp_path, poison)
    assert numbers(server, topic) == list(range(1, 11)), "only the first batch is published"
    poison.unlink()
    run(spark, server, source, topic, tmp_path, poison)
    assert numbers(server, topic) == list(range(1, 16))
    transactions_end(server)
    if not is_long():  # test_kills.py kills between publishing and Spark's commit
        return
    # The sink has published the last batch, but Spark does not know.
    commits = tmp_path / "checkpoint" / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
    for name in (f"{last}", f".{last}.crc"):
        (commits / name).unlink(missing_ok=True)
    server.post(f"/v0/topics/{source}", {"records": [record(16)]})
    run(spark, server, source, topic, tmp_path, poison)
    assert numbers(server, topic) == list(range(1, 17))
    transactions_end(server)
