"""Plants one bug at a time in a copy of the tree, and runs a simulation until it finds the bug.

Each tests/planted/*.patch is one bug. Its first lines, which `git apply` ignores, say what it breaks, which
simulation looks for it ("server" by default) and which seed is known to find it:

    Breaks: a durable write is answered before its sync.
    sim: server
    seed: 17

A line `first: 2000` says that runs with lower seeds do not cover the feature.

`scripts/planted [NAME ...]` searches from that seed, or from seed 0, and stores the seed it found. CI
(tests/sim/test_planted.py) begins with the stored seed. It is a hint: a change to the product or the simulation that
changes the use of random numbers changes every run, so CI also tries the seeds that follow. A bug that no seed finds
any more shows a blind spot of the simulation.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).parent
# Files that a simulation imports.
PARTS = ("topics", "workers", "router", "tests/__init__.py", "tests/sim", "tests/support")
SIMULATIONS = {"server": "tests.sim.server_walk", "engine": "tests.sim.walk"}
SEEDS = 200
CHUNK_SEEDS = 10
MORE_SEEDS = 60  # how many more seeds are tried when the stored one does not find it
# CPU seconds of one process, so a busy machine cannot look like a hang. A simulation that hangs counts as a find.
START_CPU_SECONDS, SEED_CPU_SECONDS = 8, 4
MEMORY_BYTES_MAX = 2 << 30

_SEED_LINE = re.compile(r"^seed: (\d+)$", re.MULTILINE)
_SIM_LINE = re.compile(r"^sim: (\w+)$", re.MULTILINE)
_FIRST_LINE = re.compile(r"^first: (\d+)$", re.MULTILINE)
_BREAKS_LINE = re.compile(r"^Breaks: (.+)$", re.MULTILINE)
_SEED_SAID = re.compile(r"\bseed (\d+)")


class DoesNotApply(Exception):
    """The patch no longer applies to the current code."""


@dataclass(frozen=True, slots=True)
class Bug:
    name: str
    breaks: str
    sim: str  # the simulation to run
    seed: int | None  # known to find it
    path: Path
    first: int = 0  # where a search begins


@dataclass(frozen=True, slots=True)
class Found:
    seed: int
    how: str  # the end of the simulation's output
    seconds: float


def read_bug(path: Path) -> Bug:
    head = path.read_text().partition("--- a/")[0]
    breaks, sim, seed, first = (
        line.search(head) for line in (_BREAKS_LINE, _SIM_LINE, _SEED_LINE, _FIRST_LINE)
    )
    if breaks is None:
        raise ValueError(f'{path.name} lacks the line "Breaks: …"')
    return Bug(
        path.stem,
        breaks[1],
        sim[1] if sim else "server",
        int(seed[1]) if seed else None,
        path,
        int(first[1]) if first else 0,
    )


def all_bugs() -> list[Bug]:
    return [read_bug(path) for path in sorted(PATCHES.glob("*.patch"))]


def write_seed(bug: Bug, sim: str, seed: int) -> None:
    diff = bug.path.read_text().partition("--- a/")[2]
    first = f"first: {bug.first}\n" if bug.first else ""
    bug.path.write_text(f"Breaks: {bug.breaks}\nsim: {sim}\n{first}seed: {seed}\n\n--- a/{diff}")


@contextmanager
def planted(bug: Bug) -> Iterator[Path]:
    """A copy of the tree with the bug applied."""
    with tempfile.TemporaryDirectory(prefix=f"planted-{bug.name}-") as folder:
        tree = Path(folder)
        for part in PARTS:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, tree / part, symlinks=True)
            else:
                (tree / part).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / part, tree / part)
        # git would treat a folder inside a repository as part of it.
        env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
        applied = subprocess.run(
            ["git", "apply", str(bug.path)], cwd=tree, env=env, capture_output=True, text=True, check=False
        )
        if applied.returncode:
            raise DoesNotApply(
                f"{bug.path.name} no longer applies; recreate it for the current code:\n{applied.stderr}"
            )
        yield tree


def simulate(tree: Path, simulation: str, first: int, last: int) -> Found | None:
    """Run these seeds in the tree until one fails."""
    command = [sys.executable, "-m", SIMULATIONS[simulation], str(first), "--until", str(last)]
    cpu_seconds = START_CPU_SECONDS + SEED_CPU_SECONDS * (last - first + 1)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))

    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=limit,
        check=False,
    )
    took = time.monotonic() - began
    if not done.returncode:
        return None
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return _which_hangs(tree, simulation, first, last, took)
    text = done.stdout.decode("utf-8", "replace")
    said = _SEED_SAID.findall(text)
    if not said:
        raise RuntimeError(f"{' '.join(command)} failed without naming a seed:\n{text[-3000:]}")
    return Found(int(said[-1]), _last_words(text), took)


def _which_hangs(tree: Path, simulation: str, first: int, last: int, took: float) -> Found | None:
    if first == last:
        return Found(first, f"seed {first} hangs", took)
    found = (simulate(tree, simulation, seed, seed) for seed in range(first, last + 1))
    return next(filter(None, found), None)


def _last_words(text: str) -> str:
    """The end of a failure's output: everything after the line with the seed."""
    lines = text.strip().splitlines()
    at = max((i for i, line in enumerate(lines) if _SEED_SAID.search(line)), default=0)
    words = " ".join(line.strip() for line in lines[at : at + 3])
    return words[:300]


def search(bug: Bug, simulation: str, *, first: int = 0, seeds: int = SEEDS) -> Found | None:
    """The first seed that fails with the bug and passes without it; None when there is none."""
    end = first + seeds
    with planted(bug) as tree:
        while first < end:
            last = min(first + CHUNK_SEEDS, end) - 1
            found = simulate(tree, simulation, first, last)
            if found is not None and simulate(ROOT, simulation, found.seed, found.seed) is None:
                return found
            first = found.seed + 1 if found is not None else last + 1
    return None


def find_again(bug: Bug) -> Found | None:
    """Try the stored seed first, then some more: a change elsewhere may have changed what its run does."""
    assert bug.seed is not None
    with planted(bug) as tree:
        found = simulate(tree, bug.sim, bug.seed, bug.seed)
    return found or search(bug, bug.sim, first=bug.seed + 1, seeds=MORE_SEEDS)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/planted", description="Search for planted bugs with a simulation."
    )
    parser.add_argument("names", nargs="*", help="patches in tests/planted, without .patch; all by default")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many to try, {SEEDS} by default")
    parser.add_argument("--sim", choices=SIMULATIONS, help="instead of the one that the patch names")
    parser.add_argument("--keep", action="store_true", help="leave the seeds in the patches as they are")
    options = parser.parse_args()
    bugs = {bug.name: bug for bug in all_bugs()}
    unknown = [name for name in options.names if name not in bugs]
    if unknown:
        parser.error(f"no such patch: {', '.join(unknown)}")
    missed = 0
    for name in options.names or bugs:
        missed += not _look_for(bugs[name], options.sim or bugs[name].sim, options.seeds, keep=options.keep)
    print(f"{len(options.names or bugs) - missed} found, {missed} missed")
    return 1 if missed else 0


def _look_for(bug: Bug, sim: str, seeds: int, *, keep: bool) -> bool:
    found = search(bug, sim, first=bug.first, seeds=seeds)
    if found is None:
        print(f"MISSED {bug.name}: {seeds} seeds of the {sim} simulation", flush=True)
        return False
    print(f"found  {bug.name}: seed {found.seed}, {found.seconds:.1f} s: {found.how}", flush=True)
    if not keep:
        write_seed(bug, sim, found.seed)
    return True


if __name__ == "__main__":
    sys.exit(main())
