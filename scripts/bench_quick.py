"""Regression check for hot paths in two minutes: aims against Redis, fan-out, the engine's floors: `scripts/bench quick`.

Measures ratios within one run and compares them with their aims, or, if the published benchmarks miss an aim, with the
published ratio. Since the measurements are short, a ratio fails only if it is worse than that by more than --slack; then
the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from bench_engine_hot import append_batches, append_singles, diff_to_json
from bench_engine_support import Run
from peers import compare, fanout, work
from peers.load import SCRIPTS
from peers.systems import Fleet, absent

PEER = "redis"
FLOORS = (append_batches, append_singles, diff_to_json)
# Redis clients poll for each record, so a system that pushes should not deliver fewer.
FAN_OUT = {"shape": "lock-step", "watchers": 100, "durability": "ephemeral"}
FAN_OUT_NAME = f"fan-out lock-step 100 watchers deliveries_per_s vs {PEER}"
FAN_OUT_AIM = 1.0
SECONDS = 0.7
ROUNDS = 3
PUBLISHED = SCRIPTS.parent / "docs" / "benchmarks" / "results.json"


@dataclass
class Guarded:
    """A ratio and its aim."""

    work: str
    ratio: float
    aim: float
    at_most: bool
    published: float | None = None  # the ratio in docs/benchmarks

    @property
    def bound(self) -> float:
        if self.published is None:
            return self.aim
        return (max if self.at_most else min)(self.aim, self.published)

    @property
    def missed_by(self) -> float:
        """How much worse than the bound it is, as a fraction of the bound; 0: it is not."""
        beyond = self.ratio - self.bound if self.at_most else self.bound - self.ratio
        return max(0.0, beyond / self.bound)


def against_peer(folder: str, only: str, seconds: float) -> list[Guarded]:
    aims = [aim for aim in compare.AIMS if aim.against == PEER and only in name_of(aim)]
    if not aims:
        return []
    fleet = Fleet(f"{folder}/fleet", ("topics", PEER), ("fsync", "disk"))
    points: list[dict[str, Any]] = []
    try:
        if PEER in fleet.missing:
            say(f"{fleet.missing[PEER]}: nothing to compare with")
            return []
        for number, aim in enumerate(aims, 1):
            say(f"[{number}/{len(aims)}] {name_of(aim)}")
            point = work.Point(aim.work, aim.durability or "disk", aim.clients, compare.AIM_PAYLOAD_BYTES)
            points += work.measure(fleet, point, seconds=seconds, rounds=ROUNDS, say=lambda what: None)
    finally:
        fleet.stop()
    for failed in [point for point in points if "failed" in point]:
        raise SystemExit(f"failed: {failed}")
    published = read_published()
    return [
        Guarded(name_of(one.aim), one.ratio, one.aim.bound, one.aim.at_most, published.get(name_of(one.aim)))
        for one in compare.judge(points)
        if one.ratio is not None
    ]


def fan_out(folder: str, only: str, seconds: float) -> list[Guarded]:
    if only not in FAN_OUT_NAME or absent(PEER):
        return []
    say(FAN_OUT_NAME)
    fleet = fanout.contenders(f"{folder}/fanout", ("topics", PEER), disk=False)
    try:
        rows = list(
            fanout.measure(fleet, "lock-step", 100, seconds=seconds, rounds=ROUNDS, say=lambda what: None)
        )
    finally:
        fleet.stop()
    for failed in [row for row in rows if "failed" in row]:
        raise SystemExit(f"failed: {failed}")
    quotient = fan_out_ratio(rows)
    assert quotient is not None
    published = read_published().get(FAN_OUT_NAME)
    return [Guarded(FAN_OUT_NAME, quotient, FAN_OUT_AIM, at_most=False, published=published)]


def fan_out_ratio(rows: list[dict[str, Any]]) -> float | None:
    ours, theirs = (compare.find(rows, system=system, **FAN_OUT) for system in ("topics", PEER))
    return compare.ratio(ours, theirs, "deliveries_per_s") if ours and theirs else None


def read_published() -> dict[str, float]:
    if not PUBLISHED.exists():
        return {}
    results = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    found = {name_of(one.aim): one.ratio for one in compare.judge(results["points"])}
    found[FAN_OUT_NAME] = fan_out_ratio(results.get("fanout", []))
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def name_of(aim: compare.Aim) -> str:
    return f"{aim.work} {aim.durability or ''} {aim.clients} clients {aim.measure} vs {aim.against}".replace(
        "  ", " "
    )


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


def show(rows: list[Guarded], slack: float) -> None:
    print("| work | ratio | aim | published | |")
    print("|---|---|---|---|---|")
    for row in rows:
        sign = "≤" if row.at_most else "≥"
        published = f"{row.published:.2f}" if row.published is not None else "–"
        verdict = f"{row.missed_by:.0%} worse than {row.bound:.2f}" if row.missed_by else "ok"
        failed = " – FAILED" if row.missed_by > slack else ""
        print(f"| {row.work} | {row.ratio:.2f} | {sign} {row.aim:g} | {published} | {verdict}{failed} |")


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
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped, too
    began = time.monotonic()
    folder = os.path.abspath(options.dir)
    os.makedirs(folder, exist_ok=True)
    rows = against_peer(folder, options.only, options.seconds)
    rows += fan_out(folder, options.only, options.seconds)
    rows += against_floors(folder, options.only)
    show(rows, options.slack)
    os.makedirs(os.path.dirname(os.path.abspath(options.json)), exist_ok=True)
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump(
            [{**asdict(row), "missed_by": row.missed_by} for row in rows], file, indent=1, ensure_ascii=False
        )
    print(f"\n{time.monotonic() - began:.0f} s; saved to {options.json}")
    return int(any(row.missed_by > options.slack for row in rows))


if __name__ == "__main__":
    sys.exit(main())
