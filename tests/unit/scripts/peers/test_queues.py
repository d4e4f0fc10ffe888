"""Goal: the page shows all results of queues.

Method: real rendering of small made-up results whose ratios are computed by hand. The load generator's part is tested
in tests/integration/test_load_generator.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "scripts"))

from peers import merge_results, queue_aims, report  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"


def row(durability: str, workers: int, system: str, rates: list[float], **more: Any) -> dict[str, Any]:
    timed = {"p50_ms": 1.5, "p99_ms": 3.0, "ack_p50_ms": 0.5, "ack_p99_ms": 2.0}
    ours = {"front": 6.0, "shard": 9.0}
    return {
        "durability": durability,
        "workers": workers,
        "system": system,
        "rounds": [{"jobs_per_s": rate, **timed} for rate in rates],
        "jobs_per_s": sorted(rates)[len(rates) // 2],
        "jobs_per_claim": more.get("jobs_per_claim", 8.0),
        **timed,
        "cpu_us_per_job": {**(ours if system == "topics" else {"server": 10.0}), "load": 4.0},
        "generator_share": more.get("share", 0.5),
    }


def held_row(jobs: int, p50_ms: list[float]) -> dict[str, Any]:
    rounds = [{"p50_ms": one, "p99_ms": 9.0, "ack_p50_ms": 0.5, "ack_p99_ms": 2.0} for one in p50_ms]
    return {"jobs": jobs, "rounds": rounds, **rounds[len(rounds) // 2]}


def results() -> dict[str, Any]:
    return {
        "meta": {
            "date": "2026-01-02",
            "machine": "a made-up machine",
            "cores": 2,
            "kernel": "6.1",
            "python": "3.11",
            "filesystem": "ext4",
            "fsync_us": {"p50": 400, "p99": 1500},
            "versions": {},
            "missing": {},
            "seconds_per_point": 10,
            "rounds": 3,
            "command": "scripts/bench peers",
            "took_s": 1200,
        },
        "points": [],
        "queue": [
            # Quotients 0.9, 1.1 and 1.2, whose median meets the aim of 1.1; and half of those, 72 % below the aim of 2.
            row("fsync", 50, "topics", [900, 1100, 1200]),
            row("fsync", 50, "redis", [1000, 1000, 1000]),
            row("fsync", 50, "nats", [2000, 2000, 2000], share=0.95),
            row("disk", 50, "topics", [3000], jobs_per_claim=7.25),
            row("disk", 50, "redis", [6000]),
            row("disk", 50, "nats", [2500]),
        ],
        # Quotients 1.1, 1.5 and 1.2.
        "waiting": [held_row(1_000_000, [1.1, 1.5, 2.4]), held_row(1_000, [1.0, 1.0, 2.0])],
    }


def section(page: str, title: str) -> str:
    return page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_each_aim_has_its_verdict() -> None:
    summary = section(report.render(results())[0], "Summary")
    for line in (
        "| queue, 50 workers, disk: jobs/s | Redis Streams, `everysec` | 3,000 | 6,000 | 0.50 × | ≥ 0.7 × | **missed by 29%** |",
        "| queue, 50 workers, fsync: jobs/s | Redis Streams, `always` | 1,100 | 1,000 | 1.10 × | ≥ 1.1 × | met |",
        "| queue, 50 workers, fsync: jobs/s | NATS JetStream, sync `always` | 1,100 | 2,000 | 0.55 × | ≥ 2 × | **missed by 72%** |",
        "| p50 of a claim with 1,000,000 jobs waiting, in ms, over that with 1,000 | – | 1.5 | – | 1.20 × | ≤ 1.2 × | met |",
    ):
        assert line in summary
    assert "2 of 4 measured aims met." in summary


def test_an_aim_against_a_peer_that_is_not_here_says_so() -> None:
    without = results()
    without["queue"] = [one for one in without["queue"] if one["system"] != "nats"]
    without["meta"]["missing"] = {"nats": "it is not here"}
    summary = section(report.render(without)[0], "Summary")
    peer = "NATS JetStream, sync `always`"
    assert (
        f"| queue, 50 workers, fsync: jobs/s | {peer} | 1,100 | – | – | ≥ 2 × | not measured: it is not here |"
        in summary
    )


def test_unmeasured_aims_are_listed() -> None:
    held = queue_aims.judge([], [])
    assert len(held) == 4
    assert not any(one.met or one.missed_by for one in held)


def test_where_topics_is_behind_has_queues_too() -> None:
    behind = section(report.render(results())[0], "Where topics is behind")
    assert "| queue, disk, 50 workers | Redis Streams | 3,000 jobs/s | 6,000 jobs/s | 0.50 × |" in behind
    assert "In 2 of 4 comparisons: 1 of 2 against Redis Streams, 1 of 2 against NATS JetStream." in behind


def test_the_section_shows_every_system_and_the_generator() -> None:
    page, plots = report.render(results())
    text = section(page, "A queue and its workers")
    cell = "<br>claim 1.5 / 3<br>ack 0.5 / 2"
    assert f"| 50 | **3,000**{cell} | **6,000**{cell} | **2,500**{cell} | 0.50 × | 1.20 × |" in text
    assert "| disk | 50 | 15 µs (front 6, shard 9); 7.25; 50% | 10 µs; 8; 50% | 10 µs; 8; 50% |" in text
    assert "**The generator's core was full** at: NATS JetStream, fsync, 50 workers." in text
    assert "| 1,000,000 | 1.5 | 9 | 1.20 × | 0.5 | 2 | 1.00 × |" in text
    for name in ("queue.svg", "waiting.svg"):
        assert f"](benchmarks/{name})" in text
        ElementTree.fromstring(plots[name])
    heads = [one.text for one in ElementTree.fromstring(plots["queue.svg"]).iter(f"{SVG}text")]
    assert {"workers", "jobs per second (log)", "p50 of a claim, ms (log)", "fsync", "disk"} <= set(heads)


def test_a_run_without_queues_says_so() -> None:
    without = results()
    del without["queue"], without["waiting"]
    assert section(report.render(without)[0], "A queue and its workers").strip() == "Not part of this run."


def test_queues_that_are_added_bring_both_their_parts() -> None:
    earlier, later = results(), results()
    earlier["waiting"], later["failed"] = [], []
    later["queue"] = later["queue"][:2]
    whole = merge_results.merge(earlier, later, ("queue",))
    assert whole["queue"] == later["queue"]
    assert whole["waiting"] == later["waiting"]
    assert json.loads(json.dumps(whole["aims"])) == merge_results.aims(whole)
