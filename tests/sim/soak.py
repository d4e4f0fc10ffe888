"""Many stories of simulated servers: `scripts/sim`. Progress on the way, totals at the end, the seeds that failed."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import TextIO

from tests.sim.server_walk import STEPS, Failed, Story

SHOW_EVERY_S = 1.0
FAILURES_MAX = 20  # enough to see what is wrong


def tell(work: tuple[int, int]) -> tuple[int, Counter[str], str]:
    """One story: its seed, what happened in it, and why it must not be."""
    seed, steps = work
    story = Story(seed, steps=steps)
    problem = ""
    try:
        story.run()
    except Failed as failure:
        problem = str(failure)
    counts = Counter(story.server.counts)
    counts["requests"] = story.crowd.sent
    counts["acked writes"] = sum(op.kind == "write" and op.ok for op in story.history.ops)
    return seed, counts, problem


class Totals:
    def __init__(self, out: TextIO) -> None:
        self.counts: Counter[str] = Counter()
        self.seeds = 0
        self.failed: list[int] = []
        self._began = time.monotonic()
        self._shown_at = 0.0
        self._out = out

    def add(self, seed: int, counts: Counter[str], problem: str) -> None:
        self.seeds += 1
        self.counts += counts
        if problem:
            self.failed.append(seed)
            print(f"\n{problem}", file=self._out)
        if time.monotonic() - self._shown_at >= SHOW_EVERY_S and self._out.isatty():
            self._shown_at = time.monotonic()
            print(f"\r{self.line()}", end="", file=self._out, flush=True)

    def line(self) -> str:
        took = time.monotonic() - self._began
        cycles = self.counts["recoveries"]
        return (
            f"{self.seeds} seeds, {cycles} recoveries ({cycles / took * 60:.0f} a minute), "
            f"{self.counts['power cuts']} power cuts, {len(self.failed)} failed, {took:.0f} s"
        )

    def report(self) -> None:
        print(f"\n{self.line()}", file=self._out)
        for name, count in sorted(self.counts.items()):
            print(f"  {name:20} {count}", file=self._out)
        if self.failed:
            print(f"failed seeds: {' '.join(map(str, self.failed))}", file=self._out)


def seeds(first: int, last: int | None, minutes: float | None) -> Iterator[int]:
    end = time.monotonic() + minutes * 60 if minutes is not None else None
    seed = first
    while (last is None or seed <= last) and (end is None or time.monotonic() < end):
        yield seed
        seed += 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="the first one; by the clock when absent")
    parser.add_argument("--until", type=int, help="the last one")
    parser.add_argument("--minutes", type=float, help="go on for so long")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"requests in a story [{STEPS}]")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes [all CPUs]")
    options = parser.parse_args()
    first = options.seed if options.seed is not None else time.time_ns() // 1000
    last = options.until
    if last is None and options.minutes is None:
        last = first
    totals = Totals(sys.stdout)
    ahead = threading.Semaphore(2 * options.jobs)  # the pool would take an endless row of seeds at once

    def work() -> Iterator[tuple[int, int]]:
        for seed in seeds(first, last, options.minutes):
            ahead.acquire()
            if len(totals.failed) >= FAILURES_MAX:
                return
            yield seed, options.steps

    with multiprocessing.Pool(options.jobs) as pool:
        for told in pool.imap_unordered(tell, work()):
            ahead.release()
            totals.add(*told)
    totals.report()
    return 1 if totals.failed else 0


if __name__ == "__main__":
    sys.exit(main())
