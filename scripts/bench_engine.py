"""Benchmark of the engine against minimal baselines ("floors") measured in the same run: `scripts/bench engine [--quick] [--json PATH]`.

Prints a table and writes it as JSON. Ratios are medians over rounds in which floor and engine alternate, so that a
busy machine slows down both. `--quick` does a twentieth of the work: a smoke test without meaningful results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict

import bench_engine_hot
import bench_engine_memory
import bench_engine_scale
import bench_engine_turns
from bench_engine_support import Row, Run

GROUPS = [
    *bench_engine_hot.ROWS,
    *bench_engine_turns.ROWS,
    *bench_engine_scale.ROWS,
    *bench_engine_memory.ROWS,
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench engine", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a twentieth of the work")
    parser.add_argument(
        "--json", default="bench-out/engine.json", metavar="PATH", help="output file for the results"
    )
    parser.add_argument("--dir", default="bench-out/data", help="where to create data directories")
    parser.add_argument("--only", default="", metavar="NAME", help="only groups whose name contains this")
    parser.add_argument("--resident", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.resident:
        path, kind, count = options.resident
        bench_engine_memory.measure_resident(path, kind, int(count))
        return 0
    run = Run(os.path.abspath(options.dir), options.quick)
    began = time.monotonic()
    rows: list[Row] = []
    for group in GROUPS:
        if options.only in group.__name__:
            began_group = time.monotonic()
            try:
                rows += group(run)
            except Exception as error:  # one broken row must not hide the others
                rows.append(Row(group.__name__, 0, "", met=False, note=f"failed: {error}"))
            print(f"{group.__name__}: {time.monotonic() - began_group:.0f} s", file=sys.stderr, flush=True)
    show(rows)
    os.makedirs(os.path.dirname(os.path.abspath(options.json)), exist_ok=True)
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump(
            {
                "quick": options.quick,
                "python": platform.python_version(),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "seconds": round(time.monotonic() - began, 1),
                "rows": [asdict(row) for row in rows],
            },
            file,
            indent=1,
            ensure_ascii=False,
        )
    print(f"\n{time.monotonic() - began:.0f} s; saved to {options.json}")
    return 0


def show(rows: list[Row]) -> None:
    print("| work | ours | floor | ratio | aim | met | note |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        floor = f"{row.floor:.3g}" if row.floor is not None else "–"
        ratio = f"{row.ratio:.2f}" if row.ratio is not None else "–"
        met = "–" if row.met is None else "yes" if row.met else "NO"
        print(
            f"| {row.work} | {row.ours:.3g} {row.unit} | {floor} | {ratio} | {row.aim} | {met} | {row.note} |"
        )


if __name__ == "__main__":
    sys.exit(main())
