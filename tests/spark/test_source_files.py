"""`spark.read.format("topics")` on a cold directory, with data frames and SQL.

Goal: the same records as in the files, with all options, with and without filter pushdown; and errors that say what to do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spark_pipeline.java import find_java
from tests.support.cold_tier import TS, ColdTier, Record, some_records
from tests.support.length import only_long

ROOT = Path(__file__).resolve().parents[2]
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> ColdTier:
    found = ColdTier(tmp_path_factory.mktemp("cold"))
    for count in (500, 20, 1000):
        found.add(some_records(count, found.next_seq))
    found.dead = {3, 501, 502, 1200}
    found.publish()
    other = ColdTier(found.root, topic="orders.eu", topic_id=0x500)
    other.add(some_records(10))
    other.publish()
    return found


def read(spark: Any, tier: ColdTier, **options: Any) -> Any:
    given = {"path": str(tier.root), "topic": "orders", **options}
    return spark.read.format("topics").options(**given).load()


def test_all_columns(spark: Any, tier: ColdTier) -> None:
    frame = read(spark, tier)
    assert frame.dtypes == [
        ("topic", "string"),
        ("seq", "bigint"),
        ("ts", "timestamp"),
        ("node", "string"),
        ("tag", "string"),
        ("data", "binary"),
        ("meta", "string"),
        ("flags", "int"),
    ]
    rows = {row.seq: row for row in frame.collect()}
    assert sorted(rows) == sorted(tier.live)
    for seq, record in tier.live.items():
        row = rows[seq]
        assert (bytes(row.data), row.tag, row.node, row.meta or "") == (
            record.data,
            record.tag,
            record.node,
            record.meta.decode(),
        )


def test_sql_over_a_temporary_view(spark: Any, tier: ColdTier) -> None:
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW orders USING topics OPTIONS (path '{tier.root}', topic 'orders', dataAs 'json')"
    )
    found = spark.sql(
        "SELECT tag, count(*) AS n, max(get_json_object(data, '$.n')) FROM orders WHERE tag IS NOT NULL GROUP BY tag"
    ).collect()
    counts: dict[str, int] = {}
    for record in tier.live.values():
        if record.tag is not None:
            counts[record.tag] = counts.get(record.tag, 0) + 1
    assert {row.tag: row.n for row in found} == counts


def test_columns_and_schema_prune(spark: Any, tier: ColdTier) -> None:
    frame = read(spark, tier, columns="ts,seq")
    assert frame.columns == ["ts", "seq"]
    assert frame.count() == len(tier.live)
    own = (
        spark.read.format("topics")
        .schema("tag string, seq long")
        .options(path=str(tier.root), topic="orders")
        .load()
    )
    assert {row.seq: row.tag for row in own.collect()} == {seq: one.tag for seq, one in tier.live.items()}


@only_long("starts Spark once more: the tests' own session does not register the source either")
def test_a_session_of_the_users_own_finds_the_source(tier: ColdTier) -> None:
    """With the tree on the path, as an editable install puts it there (tests/deploy/test_release.py), and no import of ours."""
    program = (
        "from pyspark.sql import SparkSession; spark = SparkSession.builder.master('local[1]').getOrCreate(); "
        f"print(spark.read.format('topics').options(path={str(tier.root)!r}, topic='orders').load().dtypes[1])"
    )
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "JAVA_HOME": str(find_java().home),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd="/", capture_output=True, text=True, check=False
    )
    assert done.stdout == "('seq', 'bigint')\n", done.stderr


def test_ranges_partitions_and_patterns(spark: Any, tier: ColdTier) -> None:
    part = read(spark, tier, startSeq="400", endSeq="600", startTs=str(TS + 450), columns="seq")
    assert sorted(row.seq for row in part.collect()) == [seq for seq in sorted(tier.live) if 450 <= seq < 600]
    assert read(spark, tier, minPartitions="5", columns="seq").rdd.getNumPartitions() >= 5
    assert read(spark, tier, maxPartitionBytes="1g", columns="seq").rdd.getNumPartitions() == 1
    both = read(spark, tier, topic="orders,orders.*", columns="topic,seq").groupBy("topic").count().collect()
    assert {row.topic: row["count"] for row in both} == {"orders": len(tier.live), "orders.eu": 10}


@pytest.mark.parametrize("enabled", ["false", "true"])
def test_filters_give_the_same_with_and_without_pushing_them_down(
    spark: Any, tier: ColdTier, enabled: str
) -> None:
    spark.conf.set(PUSHDOWN, enabled)
    try:
        frame = read(spark, tier, columns="seq,tag,ts,data")
        live = tier.live
        found = frame.where("seq >= 100 AND seq < 700 AND tag = 'tag-4'").collect()
        assert sorted(row.seq for row in found) == [
            seq for seq in sorted(live) if 100 <= seq < 700 and live[seq].tag == "tag-4"
        ]
        assert frame.where("seq = 77").count() == 1
        assert frame.where("seq > 5000").count() == 0
        assert frame.where("tag IN ('tag-1', 'raw')").count() == sum(
            one.tag in {"tag-1", "raw"} for one in live.values()
        )
        late = frame.where(f"ts > timestamp_millis({TS + 1000})").count()
        assert late == sum(one.ts > TS + 1000 for one in live.values())
        assert frame.where("tag IS NULL").count() == sum(one.tag is None for one in live.values())
        off = read(spark, tier, columns="seq", pushdown="off")
        assert off.where("seq < 10").count() == 8
    finally:
        spark.conf.unset(PUSHDOWN)


def test_pushed_filters_spare_segments(spark: Any, tmp_path: Path) -> None:
    """Even the file of an excluded segment may be missing."""
    tier = ColdTier(tmp_path)
    for _ in range(2):
        tier.add(some_records(50, tier.next_seq))
    tier.publish()
    (tier.folder / f"{tier.segments[1].name}.data").unlink()
    spark.conf.set(PUSHDOWN, "true")
    try:
        assert read(spark, tier).where("seq <= 50").count() == 50
    finally:
        spark.conf.unset(PUSHDOWN)


def test_deleted_records_on_request(spark: Any, tier: ColdTier) -> None:
    frame = read(spark, tier, includeDeleted="true", columns="seq,flags")
    assert {row.seq for row in frame.where("flags & 128 != 0").collect()} == tier.dead


def test_damage_fails_or_is_skipped_and_reported(spark: Any, tmp_path: Path) -> None:
    tier = ColdTier(tmp_path / "cold")
    tier.add([Record(b'"%d"' % i) for i in range(100)])
    tier.publish()
    path = tier.folder / f"{tier.segments[0].name}.data"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(Exception, match="digest of a block does not match"):
        read(spark, tier).collect()
    report = tmp_path / "report"
    frame = read(spark, tier, onCorrupt="skip", report=str(report), columns="seq,data")
    assert frame.count() == 99
    told = [json.loads(line) for file in report.iterdir() for line in file.read_text().splitlines()]
    assert {one["kind"] for one in told} == {"damage"}
    assert told[0]["first_seq"] == told[0]["last_seq"]


def test_losses_are_reported_and_fail_on_request(spark: Any, tmp_path: Path) -> None:
    tier = ColdTier(tmp_path / "cold")
    tier.add([Record(b"1", gone=5 <= i < 8) for i in range(20)])
    tier.publish(losses=[(6, 8, "crash")])
    report = tmp_path / "report"
    assert read(spark, tier, report=str(report)).count() == 17
    [file, *_] = report.iterdir()
    assert json.loads(file.read_text()) == {
        "topic": "orders", "first_seq": 6, "last_seq": 8, "reason": "crash", "kind": "gap",
    }  # fmt: skip
    with pytest.raises(Exception, match=r"records 6 to 8 of orders are lost \(crash\)"):
        read(spark, tier, failOnDataLoss="true").count()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"topic": ""}, "give the option topic"),
        ({"path": ""}, "path .the server's cold directory. or url"),
        ({"startSeqs": "1"}, "did you mean startSeq"),
        ({"startSeq": "x"}, "startSeq must be a number"),
        ({"columns": "seq,nope"}, "no column 'nope'"),
        ({"verify": "most"}, "verify must be one of block, none, record"),
        ({"topic": "nobody"}, "no topic 'nobody'"),
        ({"topic": "ord*"}, "a wildcard must be a whole token"),
        ({"path": "/nowhere"}, "TOPICS_COLD_DIR"),
    ],
)
def test_invalid_options_are_reported(spark: Any, tier: ColdTier, options: dict[str, str], says: str) -> None:
    with pytest.raises(Exception, match=says):
        read(spark, tier, **options).collect()
