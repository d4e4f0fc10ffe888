"""`scripts/bench peers` runs with minimal loads: its results have the shape that the page of benchmarks is made from.

Each part starts its own servers. A normal run measures writes and one queue; `--long` measures all parts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.length import is_long

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = ("topics", "redis", "nats")
PARTS = (
    "single,read,lone,caught-up,diff,pooled,tail,fanout,queue,forward" if is_long() else "single,diff,queue"
)
WORKS = [work for work in ("single", "read", "lone", "caught-up", "diff", "pooled") if work in PARTS]
WAITING = [1000, 100_000] if is_long() else [1000]

sys.path.insert(0, str(ROOT / "scripts"))

from peers.load import compiler  # noqa: E402
from peers.work import WITHOUT_NATS  # noqa: E402

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler for the load generator")

in_long_runs = pytest.mark.skipif(not is_long(), reason="this part is measured with --long")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bench")
    command = [
        *(sys.executable, "scripts/bench_peers.py", "--seconds=0.2", "--rounds=2"),
        *(
            f"--only={PARTS}",
            "--clients=16",
            "--payloads=100",
            "--durability=disk",
        ),
        *(
            "--watchers=10",
            "--idle-streams=20",
            "--workers=16",
            f"--waiting={','.join(map(str, WAITING))}",
            "--dests=0,10",
        ),
        *(f"--docs={folder}/docs", f"--dir={folder}/data"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((folder / "docs" / "benchmarks" / "results.json").read_text())
    return folder, results


@pytest.fixture(params=SYSTEMS)
def system(request: pytest.FixtureRequest, run: Any) -> str:
    """Each installed system; the part of a missing one is skipped, with the reason."""
    name: str = request.param
    why = run[1]["meta"]["missing"].get(name)
    if why:
        pytest.skip(f"{name} was not measured: {why}")
    return name


def test_nothing_failed(run: Any) -> None:
    assert run[1]["failed"] == []


def test_its_points_have_every_figure(run: Any, system: str) -> None:
    points = [point for point in run[1]["points"] if point["system"] == system]
    assert [point["work"] for point in points] == [
        work for work in WORKS if system != "nats" or work not in WITHOUT_NATS
    ]
    for point in points:
        assert len(point["rounds"]) == 2
        assert point["records_per_s"] > 0
        assert 0 < point["p50_ms"] <= point["p99_ms"] <= point["p999_ms"]
        roles = {"front", "shard", "load"} if system == "topics" else {"server", "load"}
        assert set(point["cpu_us_per_record"]) == roles
        for one in point["rounds"]:
            assert {"per_s", "records_per_s", "p50_ms", "count", "seconds", "cpu_s"} <= set(one)


@in_long_runs
def test_its_waiting_reader_is_timed(run: Any, system: str) -> None:
    rows = [row for row in run[1]["tail"] if row["system"] == system]
    assert {(row["durability"], row["load"]) for row in rows} == {
        (durability, load) for durability in ("fsync", "disk") for load in ("idle", "half")
    }
    assert all(row["count"] > 0 and row["p50_ms"] > 0 for row in rows)
    assert all((row["writes_per_s"] > 0) == (row["load"] == "half") for row in rows)


@in_long_runs
def test_its_watchers_see_every_record(run: Any, system: str) -> None:
    """The generator itself checks that each watcher saw each record once, and reports a failure otherwise."""
    rows = [row for row in run[1]["fanout"] if row["system"] == system]
    classes = ("ephemeral", "disk") if system == "topics" else ("ephemeral",)
    assert {(row["shape"], row["durability"]) for row in rows} == {
        (shape, durability) for shape in ("lock-step", "burst") for durability in classes
    }
    for row in rows:
        assert row["watchers"] == 10
        assert row["deliveries_per_s"] > 0
        assert 0 < row["generator_share"] <= 1.1
        assert (row["shape"] == "burst") or (0 < row["p50_ms"] <= row["p99_ms"])


def test_its_queue_does_every_job(run: Any, system: str) -> None:
    """The generator itself checks that each job was delivered once and none is left, and reports a failure otherwise."""
    [row] = [row for row in run[1]["queue"] if row["system"] == system]
    assert (row["durability"], row["workers"]) == ("disk", 16)
    assert len(row["rounds"]) == 2
    assert row["jobs_per_s"] > 0
    assert 1 <= row["jobs_per_claim"] <= 8
    assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert 0 < row["ack_p50_ms"] <= row["ack_p99_ms"]
    assert set(row["cpu_us_per_job"]) == (
        {"front", "shard", "load"} if system == "topics" else {"server", "load"}
    )


def test_claims_are_timed_with_few_and_many_waiting_jobs(run: Any) -> None:
    rows = run[1]["waiting"]
    assert [row["jobs"] for row in rows] == WAITING
    assert all(row["jobs_per_claim"] == 8 and row["p50_ms"] > 0 for row in rows)


@in_long_runs
def test_its_copies_all_arrive(run: Any, system: str) -> None:
    """The measurement itself checks that each dest has each record once, and reports a failure otherwise."""
    rows = [row for row in run[1]["forward"] if row["system"] == system]
    assert [row["dests"] for row in rows] == [0, 10]
    for row in rows:
        assert len(row["rounds"]) == 2
        assert 0 < row["ack_p50_ms"] <= row["ack_p99_ms"]
        assert row["writes_per_s"] > 0 and row["records_per_s"] > 0
        assert ("copies_per_s" in row) == (row["dests"] > 0)
        assert all(one["count"] % max(1, row["dests"]) == 0 for one in row["rounds"])


@in_long_runs
def test_copies_are_timed_within_a_worker_and_between_two(run: Any) -> None:
    rows = run[1]["lag"]
    assert [row["placement"] for row in rows] == ["same worker", "another worker"]
    for row in rows:
        assert row["source_p50_ms"] > 0 and 0 < row["dest_p50_ms"] <= row["dest_p99_ms"]
        assert row["p50_ms"] <= row["p99_ms"]


@in_long_runs
def test_idle_streams_are_measured(run: Any) -> None:
    [row] = run[1]["idle"]
    assert row["streams"] == 20
    assert row["core_share"] >= 0
    assert set(row["by_role"]) == {"front", "shard", "supervisor"}


def test_the_machine_and_the_versions_are_kept(run: Any) -> None:
    folder, results = run
    meta = results["meta"]
    assert meta["seconds_per_point"] == pytest.approx(0.4)
    assert set(meta["versions"]) | set(meta["missing"]) == set(SYSTEMS)
    assert meta["fsync_us"]["p50"] > 0
    assert "--seconds=0.2" in meta["command"]
    assert "short run" in (folder / "docs" / "benchmarks.md").read_text()


def test_nothing_is_left_behind(run: Any) -> None:
    folder, _ = run
    assert list((folder / "data").iterdir()) == []


def test_instrumented_functions_exist() -> None:
    """The stage budget puts marks around methods of the server by name; in a process of its own, which stays wrapped."""
    wrap = "from peers.staged_server import *; m = Marks(); wrap_front(m); wrap_loop(m); wrap_engine(m); wrap_syncs(m)"
    done = subprocess.run(
        [sys.executable, "-c", wrap],
        cwd=ROOT / "scripts",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
