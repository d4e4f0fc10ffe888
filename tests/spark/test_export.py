"""Exports to a lake of Parquet files: every live record is in one file, also after crashes; a rerun changes nothing."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from spark_pipeline.cli import arguments
from spark_pipeline.cli.__main__ import main
from spark_pipeline.jobs import exporting
from spark_pipeline.jobs.engines import Engine, SparkEngine
from spark_pipeline.jobs.exporting import Job, export
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.lake import parquet, table
from spark_pipeline.tasks.manifest import find_topics
from tests.spark.conftest import url_of
from tests.support.cold_tier import TS, ColdTier, Record, some_records
from tests.support.server import Server

DAY_MS = 86_400_000
CALLS = 13  # renames and syncs of the export of `tier`


class InlineEngine:
    """An engine that runs tasks at once, in this process."""

    name, workers = "here", 1

    def start(self, function: Any, tasks: Sequence[Any]) -> Any:
        self.results = lambda: [function(task) for task in tasks]
        return self

    def wait(self, timeout_s: float) -> bool:
        return True

    def done(self) -> int:
        return 0

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def tier(tmp_path: Path) -> ColdTier:
    found = ColdTier(tmp_path / "cold")
    found.add(some_records(50))
    found.add([Record(b'{"n":%d}' % n, ts=TS + n * DAY_MS // 10) for n in range(51, 81)])
    found.dead = {3, 51, 52}
    found.publish()
    return found


def run(tier: ColdTier, out: Path, engine: Any = None, **options: Any) -> exporting.Exported:
    def start() -> AbstractContextManager[Engine]:
        return nullcontext(engine or InlineEngine())

    job = Job(str(out), **options)
    return export(find_topics(str(tier.root), "orders"), job, start, Progress(io.StringIO(), as_json=True))


def files(out: Path) -> dict[str, int]:
    return {str(path.relative_to(out)): path.stat().st_ino for path in out.rglob("*") if path.is_file()}


def seqs(out: Path) -> list[int]:
    """The seqs in the directory, without files that query engines skip by their names."""
    found: list[int] = (
        ds.dataset(out, format="parquet", partitioning="hive").to_table().column("seq").to_pylist()
    )
    return sorted(found)


def test_an_export_has_every_live_record_by_day(tier: ColdTier, tmp_path: Path) -> None:
    out = tmp_path / "lake"
    found = run(tier, out)
    assert (found.rows, seqs(out)) == (77, sorted(tier.live))
    rows = ds.dataset(out, format="parquet", partitioning="hive").to_table()
    assert set(rows.column("topic").to_pylist()) == {"orders"}
    for row in rows.to_pylist():
        assert f"{row['ts']:%Y-%m-%d}" == str(row["date"])
        assert row["data"] == tier.live[row["seq"]].data
    manifest = json.loads((out / "topic=orders/_manifest.json").read_bytes())
    assert (manifest["next_seq"], manifest["rows"], len(manifest["files"])) == (81, 77, found.files)
    for file in manifest["files"]:
        path = out / "topic=orders" / file["path"]
        assert path.name == f"part-{file['first_seq']:016x}-{file['next_seq']:016x}.parquet"
        assert (pq.read_metadata(path).num_rows, path.stat().st_size) == (file["rows"], file["bytes"])


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
    after = files(out)
    assert {name for name in before if after[name] != before[name]} == {"topic=orders/_manifest.json"}


@pytest.mark.parametrize("fails_at", range(1, CALLS + 1))
def test_a_run_that_dies_at_any_call_is_completed_by_the_next(
    tier: ColdTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """A run dies once after each rename and sync."""
    out, calls = tmp_path / "lake", 0
    replace, sync = os.replace, table.sync

    def counted(call: Any) -> Any:
        def run_it(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise KeyboardInterrupt
            return call(*arguments)

        return run_it

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", counted(replace))
        for module in (table, parquet):
            patch.setattr(module, "sync", counted(sync))
        with pytest.raises(KeyboardInterrupt):
            run(tier, out)
    manifest = out / "topic=orders" / "_manifest.json"
    assert manifest.exists() == (fails_at > CALLS - 2), "all calls but two come before the manifest"
    # Merged and grown meanwhile: the files differ from those of the first run.
    tier.add(some_records(5, tier.next_seq))
    tier.publish()
    run(tier, out, part_bytes=3000)
    assert seqs(out) == sorted(tier.live)
    assert not list(out.rglob(".*"))


def test_damage_is_never_passed_over_silently(tier: ColdTier, tmp_path: Path) -> None:
    path = tier.folder / f"{tier.segments[0].name}.data"
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    [left] = run(tier, tmp_path / "lake").left
    assert (left.topic, left.state) == ("orders", "damaged")
    assert not [name for name in files(tmp_path / "lake") if "part-" in name or "manifest" in name]
    found = run(tier, tmp_path / "lake", skip_damage=True)
    assert (found.rows, found.damaged) == (76, 1)


@pytest.mark.parametrize("skip", [[], ["--skip-damaged"]])
def test_files_that_are_merged_or_erased_meanwhile_are_for_later(
    tier: ColdTier, tmp_path: Path, capsys: pytest.CaptureFixture[str], skip: list[str]
) -> None:
    """Such files are not skipped as damage: their records are in other files by now, and the next run has to find them."""
    out = tmp_path / "lake"
    path = tier.folder / f"{tier.segments[0].name}.data"
    path.rename(tmp_path / "away")
    command = [
        "export",
        "--cold-dir",
        str(tier.root),
        "--out",
        str(out),
        "--engine",
        "local",
        "--workers",
        "1",
    ]
    assert main([*command, *skip]) == 4
    assert "merged or erased" in capsys.readouterr().err
    (tmp_path / "away").rename(path)
    assert main([*command, *skip]) == 0
    assert seqs(out) == sorted(tier.live)


def test_two_runs_and_a_recreated_topic(tier: ColdTier, tmp_path: Path) -> None:
    out = tmp_path / "lake"
    (out / "topic=orders").mkdir(parents=True)
    with table.locked(out / "topic=orders", "orders"):
        [left] = run(tier, out).left
    assert left.state == "busy"
    assert "run it again later" in left.message
    run(tier, out)
    again = ColdTier(tmp_path / "again", topic_id=0x401)
    again.add(some_records(100))
    again.publish()
    [left] = run(again, out).left
    assert left.state == "failed"
    assert "created again: move the directory away" in left.message


def test_an_error_of_one_topic_does_not_affect_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One is damaged, one was created again, one is being exported by another job: these are reported, and the others exported."""
    cold, out = tmp_path / "cold", tmp_path / "lake"
    names = ("anew", "busy", "damaged", "sound")
    tiers = {name: ColdTier(cold, topic=name, topic_id=0x400 + n) for n, name in enumerate(names)}
    for tier in tiers.values():
        tier.add(some_records(50))
        tier.publish()
    path = tiers["damaged"].folder / f"{tiers['damaged'].segments[0].name}.data"
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    other = ColdTier(tmp_path / "other", topic="anew", topic_id=0x7FF)
    other.add(some_records(50))
    other.publish()
    command = ["export", "--out", str(out), "--engine", "local", "--workers", "1", "--json"]
    assert main([*command, "--cold-dir", str(tmp_path / "other")]) == 0
    (out / "topic=busy").mkdir()
    capsys.readouterr()
    with table.locked(out / "topic=busy", "busy"):
        assert main([*command, "--cold-dir", str(cold)]) == 1
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert (found["topics"], found["rows"]) == (4, 50)
    assert {one["topic"]: one["state"] for one in found["left"]} == {
        "anew": "failed",
        "busy": "busy",
        "damaged": "damaged",
    }
    assert "topics-spark export: damaged: " in told.err
    assert "or skip it permanently with --skip-damaged" in told.err
    # A temporary obstacle is not damage.
    with table.locked(out / "topic=busy", "busy"):
        assert main([*command, "--cold-dir", str(cold), "--", "busy", "sound"]) == 4
    assert main([*command, "--cold-dir", str(cold), "--", "busy", "sound"]) == 0


def test_a_run_that_is_overtaken_takes_nothing_back(tier: ColdTier, tmp_path: Path) -> None:
    """Another run has finished with a newer manifest when this one gets the lock."""
    out, older = tmp_path / "lake", find_topics(str(tier.root), "orders")

    def overtaken() -> AbstractContextManager[Engine]:
        tier.add(some_records(20, tier.next_seq))
        tier.publish()
        run(tier, out, part_bytes=2000)
        return nullcontext(InlineEngine())

    late = export(older, Job(str(out)), overtaken, Progress(io.StringIO(), as_json=True))
    assert (late.files, late.rows) == (0, 0)
    assert run(tier, out).files == 0, "it continues after the newer manifest"
    assert seqs(out) == sorted(tier.live)


def test_the_command(
    tier: ColdTier, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "lake"
    command = ["export", "orders", "--cold-dir", str(tier.root), "--out", str(out), "--engine", "local"]
    assert main([*command, "--workers", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 77
    monkeypatch.delattr(arguments, "session")  # the engine is Spark, which must not be started
    assert main([*command[:-2]]) == 0
    assert "nothing new in 1 topics" in capsys.readouterr().out
    assert main([*command[:2], "--cold-dir", str(tmp_path), "--out", str(out)]) == 3
    # Damage that a task finds is reported with advice.
    path = tier.folder / f"{tier.segments[0].name}.data"
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    command[command.index(str(out))] = str(tmp_path / "other")
    assert main([*command, "--workers", "1"]) == 1
    assert "or skip it permanently with --skip-damaged" in capsys.readouterr().err


def test_with_a_server(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cold records are exported; a topic without any is no error."""
    server.write("fresh", 1)
    command = ["export", "--url", url_of(server), "--engine", "local", "--workers", "1", "--json"]
    command += ["--out", str(tmp_path / "lake"), "--", "m14", "fresh"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["topics"] == 2
    found = seqs(tmp_path / "lake")
    assert len(found) >= 90
    assert found == list(range(1, len(found) + 1))
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 0
    server.delete("/v0/topics/fresh")


def test_with_spark(spark: Any, tier: ColdTier, tmp_path: Path) -> None:
    out = tmp_path / "lake"
    run(tier, out, SparkEngine(spark), part_bytes=4000)
    read = spark.read.parquet(str(out)).where("topic = 'orders'")
    assert sorted(row.seq for row in read.select("seq").collect()) == sorted(tier.live)
    assert read.select("date").distinct().count() >= 3
