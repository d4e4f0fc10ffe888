"""Benchmark of topics against Redis Streams and NATS JetStream, on this machine, in one run: `scripts/bench peers`.

The systems take turns at every point, with equal durability and the same load generator (scripts/load). Writes a page with tables and
plots, and all raw results as JSON. A partial run (--only, --systems) writes to bench-out/ unless --docs is given.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from peers import (
    fanout,
    fanout_aims,
    forward_aims,
    forwards,
    machine,
    merge_results,
    queue_aims,
    queues,
    scaling,
    tail,
    work,
)
from peers.systems import Fleet, absent, version

SYSTEMS = ("topics", "redis", "nats")
DURABILITIES = ("fsync", "disk")
FULL_SECONDS = 5.0
FULL_ROUNDS = 2
SECTIONS = (*work.RECORDS, "null", "tail", "fanout", "queue", "forward", "scaling", "backlog", "stages")


RESULTS = (
    *("points", "null", "tail", "fanout", "idle", "queue", "waiting", "forward", "lag"),
    *("scaling", "backlog", "stages", "aims", "failed"),
)


Keep = Callable[[str, Iterable[dict[str, Any]]], None]


class Progress:
    """Prints each step to stderr with an estimate of the remaining time, based on the completed steps."""

    def __init__(self, steps: int, estimate_s: float) -> None:
        self._steps = steps
        self._estimate_s = estimate_s
        self._done = 0
        self._began = time.monotonic()

    def __call__(self, what: str) -> None:
        passed = time.monotonic() - self._began
        share = self._done / max(1, self._steps)
        # Starts with the planned duration; with every step the measured one counts for more.
        left = (1 - share) * self._estimate_s * (1 - share) + (
            passed / share * (1 - share) * share if share else 0
        )
        self._done += 1
        number = f"{min(self._done, self._steps)}/{self._steps}"
        print(f"[{number}] {what}, about {_minutes(left)} left", file=sys.stderr, flush=True)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _chosen(counts: Sequence[int], names: str) -> list[int]:
    return [count for count in counts if _is_chosen(count, names)]


def _is_chosen(number: int, names: str) -> bool:
    return not names or str(number) in names.split(",")


class Plan:
    def __init__(self, options: argparse.Namespace) -> None:
        self.seconds: float = options.seconds
        self.rounds: int = options.rounds
        self.systems = tuple(options.systems.split(","))
        self.only = tuple(options.only.split(",")) if options.only else SECTIONS
        unknown = set(self.systems) - set(SYSTEMS) | set(self.only) - set(SECTIONS)
        if unknown:
            raise SystemExit(f"unknown: {', '.join(sorted(unknown))}")
        self.points = [
            point
            for point in work.all_points()
            if point.work in self.only
            and (point in work.FIXED_POINTS or _is_chosen(point.clients, options.clients))
            and (point in work.FIXED_POINTS or _is_chosen(point.payload_bytes, options.payloads))
            and (not options.durability or point.durability == options.durability)
        ]
        self.watchers = _chosen(fanout.WATCHERS, options.watchers)
        self.workers = _chosen(queue_aims.WORKERS, options.workers)
        self.waiting = _chosen(queues.WAITING, options.waiting)
        self.dests = _chosen(forward_aims.DESTS, options.dests)
        self.durabilities = [one for one in DURABILITIES if options.durability in {"", one}]
        self.idle_streams: int = options.idle_streams
        self.whole = (
            self.only == SECTIONS
            and self.systems == SYSTEMS
            and len(self.points) == len(list(work.all_points()))
            and len(self.watchers) == len(fanout.WATCHERS)
            and len(self.workers) == len(queue_aims.WORKERS)
            and len(self.waiting) == len(queues.WAITING)
            and len(self.dests) == len(forward_aims.DESTS)
        )
        self.backlog = scaling.BACKLOGS[-1] if self.whole or options.only == "backlog" else 1_000_000

    def steps(self) -> tuple[int, float]:
        """The number of steps, and the estimated duration of all of them."""
        one = work.run_s(self.seconds)
        systems = len(self.systems)
        backlogs = sum(size <= self.backlog for size in scaling.BACKLOGS)
        each = {
            "points": (len(self.points) * self.rounds * systems, one),
            "null": (len(work.NULL_POINTS) * systems, work.run_s(self.short)),
            "tail": (4 * systems * self.rounds, one + 1),
            "fanout": (
                len(fanout.SHAPES)
                * len(self.watchers)
                * self.rounds
                * (systems + ("topics" in self.systems)),
                one + 1,
            ),
            "idle": (1, 2 * self.idle_s),
            "queue": (len(self.durabilities) * len(self.workers) * self.rounds * systems, one + 1),
            "waiting": (len(self.waiting) * (self.rounds + 1), one),
            "forward": (self.rounds * len(self._copied_to()), 2 * one + 5),
            "lag": (self.rounds * len(forward_aims.PLACEMENTS), one),
            "scaling": (len(scaling.SHARDS) * len(scaling.CLIENTS), one + 1),
            "backlog": (backlogs * 3, one + self.backlog / 1e6),
            "stages": (1, 12 * self.seconds),
        }
        chosen = [each[name] for name in each if name == "points" or name in self.only]
        if "fanout" in self.only:
            chosen.append(each["idle"])
        if self.measures_waiting:
            chosen.append(each["waiting"])
        if "forward" in self.only and "topics" in self.systems:
            chosen.append(each["lag"])
        return sum(count for count, _ in chosen), sum(count * seconds for count, seconds in chosen)

    def _copied_to(self) -> list[int]:
        """Each number of destinations, once per system that is measured with it."""
        return [
            count
            for system in self.systems
            for count in self.dests
            if system == "topics" or count <= forwards.PEER_DESTS_MAX
        ]

    @property
    def needs_fleet(self) -> bool:
        """Fan-out, forwarding and the parts about topics alone use separate servers."""
        return bool(self.points) or not {"null", "tail", "queue"}.isdisjoint(self.only)

    @property
    def measures_waiting(self) -> bool:
        """Waiting jobs are measured for topics only."""
        return "queue" in self.only and "topics" in self.systems

    @property
    def idle_s(self) -> float:
        return fanout.IDLE_S if self.seconds >= FULL_SECONDS else 2 * self.seconds

    @property
    def short(self) -> float:
        """Duration for measurements that only show what is not the bottleneck."""
        return min(2.0, self.seconds)


def measure(plan: Plan, folder: str, save: Callable[[dict[str, Any]], None], command: str) -> dict[str, Any]:
    began = time.monotonic()
    progress = Progress(*plan.steps())
    results: dict[str, Any] = {
        "meta": {
            **machine.describe(folder, probe_s=min(2.0, plan.seconds)),
            "seconds_per_point": plan.seconds * plan.rounds,
            "rounds": plan.rounds,
            "generator": "scripts/load",
            "command": command,
        },
        **{name: [] for name in RESULTS},
    }

    def keep(section: str, rows: Iterable[dict[str, Any]]) -> None:
        """Save results as they come, in case the run is aborted. A failure ends only its section."""
        try:
            for row in rows:
                results["failed" if "failed" in row else section].append(row)
        except work.FAILURES as error:
            results["failed"].append({"section": section, "failed": str(error)})
        meta["took_s"] = round(time.monotonic() - began)
        save(results)

    meta = results["meta"]
    meta["missing"] = {
        **dict.fromkeys(set(SYSTEMS) - set(plan.systems), "not part of this run"),
        **{name: why for name in plan.systems if (why := absent(name))},
    }
    meta["versions"] = {name: version(name) for name in SYSTEMS if name not in meta["missing"]}
    fleet = Fleet(f"{folder}/fleet", plan.systems if plan.needs_fleet else (), DURABILITIES)
    try:
        for point in plan.points:
            rows = work.measure(fleet, point, seconds=plan.seconds, rounds=plan.rounds, say=progress)
            keep("points", rows)
        if "null" in plan.only:
            keep("null", work.measure_null(fleet, seconds=plan.short, say=progress))
        if "tail" in plan.only:
            keep(
                "tail",
                tail.measure(
                    fleet, results["points"], seconds=plan.seconds, rounds=plan.rounds, say=progress
                ),
            )
        if "queue" in plan.only:
            _queue(plan, fleet, keep, progress)
    finally:
        fleet.stop()
    if "fanout" in plan.only:
        _fanout(plan, folder, keep, progress)
    if "forward" in plan.only:
        _forward(plan, folder, keep, progress)
    if plan.measures_waiting:
        keep(
            "waiting",
            queues.measure_waiting(
                folder, plan.waiting, seconds=plan.seconds, rounds=plan.rounds, say=progress
            ),
        )
    if "scaling" in plan.only:
        keep("scaling", scaling.measure_shards(folder, seconds=plan.seconds, say=progress))
    if "backlog" in plan.only:
        keep(
            "backlog", scaling.measure_backlog(folder, most=plan.backlog, seconds=plan.seconds, say=progress)
        )
    if "stages" in plan.only:
        progress("stages")
        keep("stages", _stages(folder, plan.seconds))
    keep("aims", merge_results.aims(results))
    return results


def _queue(plan: Plan, fleet: Fleet, keep: Keep, progress: Progress) -> None:
    for durability in plan.durabilities:
        for workers in plan.workers:
            rows = queues.measure(
                fleet, durability, workers, seconds=plan.seconds, rounds=plan.rounds, say=progress
            )
            keep("queue", rows)


def _fanout(plan: Plan, folder: str, keep: Keep, progress: Progress) -> None:
    fleet = fanout.contenders(f"{folder}/fanout", plan.systems)
    try:
        for shape in fanout.SHAPES:
            for watchers in plan.watchers:
                rows = fanout.measure(
                    fleet, shape, watchers, seconds=plan.seconds, rounds=plan.rounds, say=progress
                )
                keep("fanout", rows)
        idle = fanout.measure_idle(fleet, plan.idle_streams, seconds=plan.idle_s, say=progress)
        keep("idle", idle)
    finally:
        fleet.stop()


def _forward(plan: Plan, folder: str, keep: Keep, progress: Progress) -> None:
    fleet = forwards.contenders(f"{folder}/forward", plan.systems)
    measured = {"seconds": plan.seconds, "rounds": plan.rounds, "say": progress}
    try:
        keep("forward", forwards.measure(fleet, plan.dests, **measured))
        keep("lag", forwards.measure_lag(fleet, **measured))
    finally:
        fleet.stop()


def _stages(folder: str, seconds: float) -> Iterator[dict[str, Any]]:
    from peers import stages

    yield from stages.measure(folder, seconds=seconds)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench peers", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=FULL_SECONDS, help="duration of a measurement (%(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=FULL_ROUNDS, help="measurements per point (%(default)s)"
    )
    parser.add_argument("--only", default="", metavar="NAMES", help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--systems", default=",".join(SYSTEMS), metavar="NAMES", help="some of %(default)s")
    parser.add_argument(
        "--clients", default="", metavar="COUNTS", help="of writes, batches and reads: some of 1,16,64,256"
    )
    parser.add_argument("--payloads", default="", metavar="SIZES", help="some of 100,1024")
    parser.add_argument("--watchers", default="", metavar="COUNTS", help="some of 1,10,100,1000")
    parser.add_argument("--workers", default="", metavar="COUNTS", help="workers of a queue, some of 16,50")
    parser.add_argument(
        "--waiting", default="", metavar="COUNTS", help="jobs in a queue, some of 1000,100000,1000000"
    )
    parser.add_argument(
        "--dests", default="", metavar="COUNTS", help="destinations of copies, some of 0,1,10,100,1000"
    )
    parser.add_argument(
        "--idle-streams",
        type=int,
        default=fanout_aims.IDLE_STREAMS,
        help="number of idle streams (%(default)s)",
    )
    parser.add_argument("--durability", default="", choices=["", *DURABILITIES], help="only this durability")
    parser.add_argument(
        "--docs", metavar="FOLDER", help="directory for benchmarks.md [docs; bench-out for a partial run]"
    )
    parser.add_argument(
        "--add", action="store_true", help="add these parts to the results in docs, and keep the others"
    )
    parser.add_argument(
        "--json", metavar="PATH", help="output file for the results [benchmarks/results.json in --docs]"
    )
    parser.add_argument(
        "--dir", default="bench-out/data", help="where to create data directories (%(default)s)"
    )
    return parser


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped, too
    options = arguments().parse_args()
    plan = Plan(options)
    docs = Path(options.docs or ("docs" if plan.whole or options.add else "bench-out"))
    path = Path(options.json) if options.json else docs / "benchmarks" / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.path.abspath(options.dir)
    os.makedirs(folder, exist_ok=True)

    earlier = json.loads(path.read_text(encoding="utf-8")) if options.add else None

    def whole(results: dict[str, Any]) -> dict[str, Any]:
        return merge_results.merge(earlier, results, plan.only) if earlier else results

    def save(results: dict[str, Any]) -> None:
        path.write_text(json.dumps(whole(results), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    results = measure(plan, folder, save, shlex.join(["scripts/bench", "peers", *sys.argv[1:]]))
    from peers import report

    report.write(whole(results), docs)
    for name, why in results["meta"]["missing"].items():
        print(f"{name}: {why}", file=sys.stderr)
    for row in results["failed"]:
        print(f"failed: {row}", file=sys.stderr)
    print(f"{_minutes(results['meta']['took_s'])}; {docs / 'benchmarks.md'}, {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
