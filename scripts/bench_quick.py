"""Regression check for hot paths in two minutes: ratios to Redis, and the engine's floors: `scripts/bench quick`.

Measures ratios within one run and compares them with the expectations in scripts/bench_quick.json, which `--record` writes
from an idle machine. Since the measurements are short, a ratio fails only if it is worse than expected by more than --slack;
then the exit code is 1. Floors are compared with their aims.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_engine_hot import append_batches, append_singles, diff_to_json
from bench_engine_support import Run
from peers import compare, fanout, queues, work
from peers.fanout_aims import CLASS, server_cost
from peers.latency_aims import server_cost_us
from peers.load import program
from peers.systems import Fleet
from peers.work import Point

PEER = "redis"
SYSTEMS = ("topics", PEER)
FLOORS = (append_batches, append_singles, diff_to_json)
SECONDS = 0.5
ROUNDS = 3
EXPECTATIONS = Path(__file__).with_suffix(".json")

Row = dict[str, Any]
# What is compared with the peer, at each point of the comparison.
POINTS = {
    Point("lone", "disk", 1, 100): ("p50_ms",),
    Point("lone", "fsync", 1, 100): ("p50_ms",),
    Point("caught-up", "disk", 1, 100): ("p50_ms",),
    Point("diff", "disk", 1, 100): ("p50_ms",),
    Point("single", "disk", 16, 100): ("records_per_s",),
    Point("single", "disk", 64, 100): ("records_per_s", "processor time"),
    Point("single", "fsync", 64, 100): ("records_per_s",),
    Point("pooled", "disk", work.POOLED, 100): ("records_per_s",),
    Point("batch", "disk", 16, 100): ("records_per_s",),
    Point("batch", "fsync", 16, 100): ("records_per_s",),
    Point("read", "disk", 16, 100): ("records_per_s",),
    Point("read", "disk", 16, 1024): ("records_per_s",),
}
QUEUES = (("disk", 50), ("fsync", 50))
WATCHERS = {1: "p50_ms", 100: "deliveries_per_s"}


@dataclass
class Guarded:
    """A ratio, and what it must not be worse than; None: nothing is known yet."""

    work: str
    ratio: float
    bound: float | None
    at_most: bool

    @property
    def missed_by(self) -> float:
        """How much worse than the bound it is, as a fraction of the bound; 0: it is not."""
        if self.bound is None:
            return 0.0
        beyond = self.ratio - self.bound if self.at_most else self.bound - self.ratio
        return max(0.0, beyond / self.bound)


def against_peer(folder: str, only: str, seconds: float) -> Iterator[Guarded]:
    points = {
        point: measures
        for point, measures in POINTS.items()
        if any(only in name_of(str(point), one) for one in measures)
    }
    chosen = [one for one in QUEUES if only in name_of(queue_name(*one), "jobs_per_s")]
    if not points and not chosen:
        return
    fleet = Fleet(f"{folder}/fleet", SYSTEMS, ("fsync", "disk"))
    try:
        if PEER in fleet.missing:
            say(f"{fleet.missing[PEER]}: nothing to compare with")
            return
        for point, measures in points.items():
            say(str(point))
            rows = pair(work.measure(fleet, point, seconds=seconds, rounds=ROUNDS, say=quiet))
            yield from (guarded(str(point), measure, rows, server_cost_us) for measure in measures)
        for durability, workers in chosen:
            name = queue_name(durability, workers)
            say(name)
            rows = pair(queues.measure(fleet, durability, workers, seconds=seconds, rounds=ROUNDS, say=quiet))
            yield guarded(name, "jobs_per_s", rows, server_cost)
    finally:
        fleet.stop()


def fan_out(folder: str, only: str, seconds: float) -> Iterator[Guarded]:
    chosen = {
        watchers: measure
        for watchers, measure in WATCHERS.items()
        if only in name_of(fan_out_name(watchers), measure)
    }
    if not chosen:
        return
    fleet = fanout.contenders(f"{folder}/fanout", SYSTEMS, disk=False)
    try:
        if PEER in fleet.missing:
            return
        for watchers, measure in chosen.items():
            name = fan_out_name(watchers)
            say(name)
            rows = pair(
                fanout.measure(fleet, "lock-step", watchers, seconds=seconds, rounds=ROUNDS, say=quiet)
            )
            yield guarded(name, measure, rows, server_cost)
    finally:
        fleet.stop()


def pair(measured: list[Row] | Iterator[Row]) -> tuple[Row, Row]:
    """The rows of topics and of its peer."""
    rows = list(measured)
    for failed in [row for row in rows if "failed" in row]:
        raise SystemExit(f"failed: {failed}")
    ours, theirs = (compare.find(rows, system=system) for system in SYSTEMS)
    assert ours and theirs
    return ours, theirs


def guarded(what: str, measure: str, rows: tuple[Row, Row], cost: Callable[[Row], float]) -> Guarded:
    if measure == "processor time":
        ratio: float | None = cost(rows[0]) / cost(rows[1])
    else:
        ratio = compare.ratio(*rows, measure)
    if ratio is None:
        raise SystemExit(f"failed: {what}: no round has both systems; take longer ones, with --seconds")
    name = name_of(what, measure)
    return Guarded(name, ratio, expectations().get(name), at_most=not measure.endswith("_per_s"))


def expectations() -> dict[str, float]:
    found: dict[str, float] = json.loads(EXPECTATIONS.read_text()) if EXPECTATIONS.exists() else {}
    return found


def name_of(what: str, measure: str) -> str:
    return f"{what}: {measure} vs {PEER}"


def queue_name(durability: str, workers: int) -> str:
    return f"queue {durability} {workers} workers"


def fan_out_name(watchers: int) -> str:
    return f"fan-out lock-step {watchers} watchers {CLASS}"


def against_floors(folder: str, only: str) -> list[Guarded]:
    rows: list[Guarded] = []
    run = Run(folder, quick=False)  # quick runs do not reach the steady state
    for floor in FLOORS:
        if only in f"engine {floor.__name__}":
            say(f"engine {floor.__name__}")
            found = [(row.work, row.ratio, row.aim.split()) for row in floor(run)]
            rows += [
                Guarded(f"engine: {what}", ratio, float(aim[1]), at_most=True)
                for what, ratio, aim in found
                if ratio is not None and len(aim) == 3  # "≤ 2.5 x"
            ]
    return rows


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def quiet(what: str) -> None:
    """The steps of a measurement are not shown."""


def show(rows: list[Guarded], slack: float) -> None:
    print("| work | ratio | bound | |")
    print("|---|---|---|---|")
    for row in rows:
        bound = "–" if row.bound is None else f"{'≤' if row.at_most else '≥'} {row.bound:.2f}"
        verdict = f"{row.missed_by:.0%} worse" if row.missed_by else "ok" if row.bound is not None else "new"
        failed = " – FAILED" if row.missed_by > slack else ""
        print(f"| {row.work} | {row.ratio:.2f} | {bound} | {verdict}{failed} |")


def record(rows: list[Guarded]) -> None:
    """Keep these ratios as what is expected from now on; those that were not measured stay."""
    measured = {row.work: round(row.ratio, 3) for row in rows}
    EXPECTATIONS.write_text(json.dumps({**expectations(), **measured}, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench quick", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="duration of a measurement (%(default)s)"
    )
    parser.add_argument(
        "--slack", type=float, default=0.2, help="how much worse a ratio may be (%(default)s)"
    )
    parser.add_argument("--only", default="", metavar="NAME", help="only rows whose name contains this")
    parser.add_argument(
        "--json", default="bench-out/quick.json", metavar="PATH", help="output file for the results"
    )
    parser.add_argument("--dir", default="bench-out/data", help="where to create data directories")
    parser.add_argument(
        "--record", action="store_true", help="expect these ratios to Redis from now on, instead of failing"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped, too
    began = time.monotonic()
    folder = os.path.abspath(options.dir)
    os.makedirs(folder, exist_ok=True)
    program()  # compiles the load generator, if that is needed
    rows = [
        *against_peer(folder, options.only, options.seconds),
        *fan_out(folder, options.only, options.seconds),
    ]
    if options.record:
        record(rows)
    rows += against_floors(folder, options.only)
    show(rows, options.slack)
    os.makedirs(os.path.dirname(os.path.abspath(options.json)), exist_ok=True)
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump(
            [{**asdict(row), "missed_by": row.missed_by} for row in rows], file, indent=1, ensure_ascii=False
        )
    print(f"\n{time.monotonic() - began:.0f} s; saved to {options.json}")
    return int(not options.record and any(row.missed_by > options.slack for row in rows))


if __name__ == "__main__":
    sys.exit(main())
