"""Many simulated runs: `scripts/sim`. Progress on the way, totals at the end, the seeds that failed."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import TextIO

from tests.sim.server_walk import STEPS, Failed, Simulation
from tests.support.arguments import positive_count, positive_number, seed_number
from tests.support.sim_disk import SimulatedCrash

SHOW_EVERY_S = 1.0  # on a terminal, where a line replaces the last one
LOG_EVERY_S = 30.0
FAILURES_MAX = 20  # enough to see what is wrong
INTERRUPTED = 130
EXPLANATION = (
    "Failed starts come from injected faults, such as a full disk or one more power cut. One fault can do much: "
    "a power cut kills every shard and front. A lull is a quiet time."
)


def run_seed(work: tuple[int, int]) -> tuple[int, Counter[str], str]:
    """One run: its seed, its totals, and the failure if there is one."""
    seed, steps = work
    simulation = Simulation(seed, steps=steps)
    problem = ""
    try:
        simulation.run()
    except Failed as failure:
        problem = str(failure)
    except (
        SimulatedCrash
    ) as crash:  # not an Exception: it would end this process, and the run would go missing
        problem = f"seed {seed}: the simulation itself hit a planned disk fault ({crash})"
    counts = Counter(simulation.server.counts)
    counts["requests"] = simulation.pool.sent
    counts["acked writes"] = sum(op.kind == "write" and op.ok for op in simulation.history.ops)
    return seed, counts, problem


class Totals:
    def __init__(self, out: TextIO) -> None:
        self.counts: Counter[str] = Counter()
        self.seeds = 0
        self.failed: list[int] = []
        self._began = time.monotonic()
        self._shown_at = self._began
        self._out = out
        self._show_every_s = SHOW_EVERY_S if out.isatty() else LOG_EVERY_S

    def add(self, seed: int, counts: Counter[str], problem: str) -> None:
        self.seeds += 1
        self.counts += counts
        if problem:
            self.failed.append(seed)
            print(f"\n{problem}", file=self._out)
        if time.monotonic() - self._shown_at >= self._show_every_s:
            self._shown_at = time.monotonic()
            if self._out.isatty():
                print(f"\r{self.line()}", end="", file=self._out, flush=True)
            else:
                print(self.line(), file=self._out, flush=True)

    def line(self) -> str:
        took = time.monotonic() - self._began
        cycles = self.counts["recoveries"]
        return (
            f"{self.seeds} seeds, {cycles} recoveries ({cycles / took * 60:.0f} a minute), "
            f"{self.counts['power cuts']} power cuts, {len(self.failed)} failed, {took:.0f} s"
        )

    def report(self) -> None:
        print(f"\n{self.line()}", file=self._out)
        injected = {name for name in self.counts if callable(getattr(Simulation, name, None))}
        self._group("faults that were injected", injected)
        self._group("what happened", set(self.counts) - injected)
        print(EXPLANATION, file=self._out)
        if self.failed:
            print(f"failed seeds: {' '.join(map(str, self.failed))}", file=self._out)

    def _group(self, title: str, names: set[str]) -> None:
        print(f"{title}:", file=self._out)
        for name in sorted(names):
            print(f"  {name.replace('_', ' '):20} {self.counts[name]}", file=self._out)


def seeds(first: int, last: int | None, minutes: float | None) -> Iterator[int]:
    end = time.monotonic() + minutes * 60 if minutes is not None else None
    seed = first
    while (last is None or seed <= last) and (end is None or time.monotonic() < end):
        yield seed
        seed += 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/sim", description=__doc__)
    parser.add_argument("--seed", type=seed_number, help="the first one; by the clock when absent")
    parser.add_argument("--until", type=seed_number, help="the last one")
    parser.add_argument("--minutes", type=positive_number, help="go on for so long")
    parser.add_argument("--steps", type=positive_count, default=STEPS, help=f"requests per run [{STEPS}]")
    parser.add_argument(
        "--jobs", type=positive_count, default=os.cpu_count() or 1, help="processes [all CPUs]"
    )
    options = parser.parse_args()
    first = options.seed if options.seed is not None else time.time_ns() // 1000
    last = options.until
    if last is None and options.minutes is None:
        last = first
    if last is not None and last < first:
        parser.error(f"--until {last} is before the first seed, {first}")
    totals = Totals(sys.stdout)
    try:
        run_seeds(seeds(first, last, options.minutes), options.steps, options.jobs, totals)
    except KeyboardInterrupt:
        print("\ninterrupted; so far:", end="")
        totals.report()
        return INTERRUPTED
    totals.report()
    return 1 if totals.failed else 0


def run_seeds(row: Iterator[int], steps: int, jobs: int, totals: Totals) -> None:
    ahead = threading.Semaphore(2 * jobs)  # the pool would take an endless series of seeds at once
    enough = threading.Event()

    def work() -> Iterator[tuple[int, int]]:
        for seed in row:
            ahead.acquire()
            if enough.is_set():
                return
            yield seed, steps

    with multiprocessing.Pool(jobs, ignore_interrupts) as pool:
        try:
            for result in pool.imap_unordered(run_seed, work()):
                totals.add(*result)
                if len(totals.failed) >= FAILURES_MAX:
                    enough.set()
                ahead.release()
        finally:  # the pool's thread may be waiting for its next seed, and the pool for its thread
            enough.set()
            ahead.release()


def ignore_interrupts() -> None:
    """Ctrl-C reaches every process; the parent ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
