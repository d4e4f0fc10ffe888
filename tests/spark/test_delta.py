"""Exports to Delta tables: each live record is in one row of the newest version, also after crashes; a rerun changes nothing."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from spark_pipeline.cli.__main__ import main
from spark_pipeline.jobs.engines import SparkEngine
from spark_pipeline.jobs.exporting import Exported, Job, export
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.lake import delta, table
from spark_pipeline.lake.formats import folder_of, freshness_of
from spark_pipeline.lake.table import LakeUnavailable
from spark_pipeline.tasks.manifest import find_topics
from tests.spark.test_export import DAY_MS, InlineEngine, files
from tests.support.cold_tier import TS, ColdTier, Record, some_records

deltalake = pytest.importorskip("deltalake", reason="the extra `delta` is not installed")

NAME = "orders:eu"  # the name of its folder is escaped


@pytest.fixture
def tier(tmp_path: Path) -> ColdTier:
    found = ColdTier(tmp_path / "cold", topic=NAME)
    found.add(some_records(50))
    found.add([Record(b'{"n":%d}' % n, ts=TS + n * DAY_MS // 10) for n in range(51, 81)])
    found.dead = {3, 51, 52}
    found.publish()
    return found


def run(tier: ColdTier, out: Path, engine: Any = None, **options: Any) -> Exported:
    job = Job(str(out), "delta", **options)
    topics = find_topics(str(tier.root), ">")
    return export(
        topics, job, lambda: nullcontext(engine or InlineEngine()), Progress(io.StringIO(), as_json=True)
    )


def folder(out: Path) -> Path:
    return folder_of("delta", str(out), NAME)


def rows(out: Path) -> list[dict[str, Any]]:
    found = pa.table(deltalake.DeltaTable(folder(out)).to_pyarrow_dataset().to_table()).to_pylist()
    return sorted(found, key=lambda row: row["seq"])


def seqs(out: Path) -> list[int]:
    return [row["seq"] for row in rows(out)]


def test_a_table_has_every_live_record(tier: ColdTier, tmp_path: Path) -> None:
    out = tmp_path / "lake"
    found = run(tier, out, part_bytes=2000)
    assert (found.rows, seqs(out)) == (77, sorted(tier.live))
    for row in rows(out):
        assert row["date"] == row["ts"].date()
        assert row["data"] == tier.live[row["seq"]].data
    [fresh] = freshness_of(str(out), NAME)
    assert (fresh.format, fresh.next_seq, fresh.rows, fresh.files) == ("delta", 81, 77, found.files)
    assert fresh.at_ms > 0
    # Engines skip files by the statistics in the log.
    kept = deltalake.DeltaTable(folder(out)).to_pyarrow_dataset().to_table(filter=pc.field("seq") == 60)
    assert kept.num_rows == 1


def test_a_rerun_changes_nothing_and_new_records_are_added(tier: ColdTier, tmp_path: Path) -> None:
    out = tmp_path / "lake"
    run(tier, out, part_bytes=2000)
    before = files(out)
    assert run(tier, out).files == 0
    assert files(out) == before
    tier.add(some_records(20, tier.next_seq))
    tier.publish()
    assert run(tier, out).rows == 20
    assert seqs(out) == sorted(tier.live)
    # The dead records are not exported, but the export has advanced.
    dead = tier.add(some_records(5, tier.next_seq))
    tier.dead |= set(range(dead.first_seq, dead.next_seq))
    tier.publish()
    assert run(tier, out).rows == 0
    [fresh] = freshness_of(str(out), NAME)
    assert fresh.next_seq == tier.next_seq


CALLS = 16  # renames, syncs and commits of the first export of `tier`


@pytest.mark.parametrize("fails_at", range(1, CALLS + 1))
def test_a_run_that_dies_at_any_call_is_completed_by_the_next(
    tier: ColdTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """A run dies once before and once after each rename, sync and commit."""
    out, calls = tmp_path / "lake", 0

    class Died(BaseException):
        pass

    def counted(call: Any, *, after: bool = False) -> Any:
        def run_it(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fails_at:
                if after:
                    call(*arguments, **named)
                raise Died
            return call(*arguments, **named)

        return run_it

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", counted(os.replace))
        for module in (table, delta):
            patch.setattr(module, "sync", counted(module.sync))
        real = deltalake.DeltaTable
        patch.setattr(real, "create", counted(real.create, after=True))
        write = real.create_write_transaction
        patch.setattr(real, "create_write_transaction", counted(write, after=True))
        with pytest.raises(Died):
            run(tier, out)
    tier.add(some_records(5, tier.next_seq))
    tier.publish()
    run(tier, out, part_bytes=3000)
    assert seqs(out) == sorted(tier.live)
    known = {Path(uri).name for uri in deltalake.DeltaTable(folder(out)).file_uris()}
    assert {path.name for path in folder(out).glob("date=*/*")} == known, "files of the failed run are left"


def test_an_optimize_and_a_vacuum_do_no_harm(tier: ColdTier, tmp_path: Path) -> None:
    out = tmp_path / "lake"
    run(tier, out, part_bytes=1000)
    found = deltalake.DeltaTable(folder(out))
    version = found.version()
    assert found.optimize.compact()["numFilesRemoved"] > 1
    tier.add(some_records(20, tier.next_seq))
    tier.publish()
    assert run(tier, out).rows == 20
    old = deltalake.DeltaTable(folder(out), version=version).to_pyarrow_dataset().to_table()
    assert old.num_rows == 77, "files of older versions were removed"
    deltalake.DeltaTable(folder(out)).vacuum(0, dry_run=False, enforce_retention_duration=False)
    assert run(tier, out).files == 0
    assert seqs(out) == sorted(tier.live)


def left(tier: ColdTier, out: Path) -> str:
    """The reason why a run has exported nothing."""
    [found] = run(tier, out).left
    return found.message


def test_obstacles_are_reported(tier: ColdTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "lake"
    folder(out).mkdir(parents=True)
    with table.locked(folder(out), NAME):
        assert "run it again later" in left(tier, out)
    run(tier, out)
    again = ColdTier(tmp_path / "again", topic=NAME, topic_id=0x401)
    again.add(some_records(100))
    again.publish()
    assert "created again: move the directory away" in left(again, out)
    newest = max((folder(out) / "_delta_log").glob("*.json"))
    newest.write_bytes(newest.read_bytes()[:-20])
    assert "If the newest file of _delta_log is truncated" in left(tier, out)
    newest.unlink()
    run(tier, out)
    assert seqs(out) == sorted(tier.live)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(LakeUnavailable, match=r"pip install 'topics\[delta\]'"):
        run(tier, out)


def test_with_spark(spark: Any, tier: ColdTier, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tasks of Spark write; Spark reads the newest version by its files, without the Delta library."""
    out = tmp_path / "lake"
    run(tier, out, SparkEngine(spark), part_bytes=4000)
    uris = deltalake.DeltaTable(folder(out)).file_uris()
    read = spark.read.option("basePath", str(folder(out))).parquet(*uris)
    assert sorted(row.seq for row in read.select("seq").collect()) == sorted(tier.live)
    assert read.select("date").distinct().count() >= 3
    command = ["export", "--format", "delta", "--cold-dir", str(tier.root), "--out", str(out), "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 0
