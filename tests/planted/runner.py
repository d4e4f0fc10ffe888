"""Plants one bug at a time in a copy of the tree and lets a simulation look for it there.

Each tests/planted/*.patch is one bug. Its first lines, which `git apply` passes over, say what it breaks, which simulation
looks for it ("server" unless said) and which seed of it is known to find it:

    Breaks: a durable write is answered before its sync.
    sim: server
    seed: 17

`scripts/planted [NAME ...]` searches from seed 0 on and writes down what it found; CI (tests/sim/test_planted.py) begins with
that seed, and looks at a few only. A simulation that no longer finds a bug has gone blind in one eye.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
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
PARTS = ("topics", "workers", "router", "tests", "scripts", "pyproject.toml")
SIMULATIONS = {"server": "tests.sim.server_walk", "engine": "tests.sim.walk"}
SEEDS = 200
CHUNK_SEEDS = 10
SEED_SECONDS_MAX = 30.0  # for one seed; what takes longer than that hangs, which is a find as well

_SEED_LINE = re.compile(r"^seed: (\d+)$", re.MULTILINE)
_SIM_LINE = re.compile(r"^sim: (\w+)$", re.MULTILINE)
_BREAKS_LINE = re.compile(r"^Breaks: (.+)$", re.MULTILINE)
_SEED_SAID = re.compile(r"\bseed (\d+)")


class DoesNotApply(Exception):
    """The code that a patch changes has changed itself."""


@dataclass(frozen=True, slots=True)
class Bug:
    name: str
    breaks: str
    sim: str  # the simulation that looks for it
    seed: int | None  # known to find it
    path: Path


@dataclass(frozen=True, slots=True)
class Found:
    seed: int
    how: str  # the last words of the simulation
    seconds: float


def read_bug(path: Path) -> Bug:
    head = path.read_text().partition("--- a/")[0]
    breaks, sim, seed = (line.search(head) for line in (_BREAKS_LINE, _SIM_LINE, _SEED_LINE))
    if breaks is None:
        raise ValueError(f'{path.name} has no line "Breaks: …"')
    return Bug(path.stem, breaks[1], sim[1] if sim else "server", int(seed[1]) if seed else None, path)


def all_bugs() -> list[Bug]:
    return [read_bug(path) for path in sorted(PATCHES.glob("*.patch"))]


def write_seed(bug: Bug, sim: str, seed: int) -> None:
    diff = bug.path.read_text().partition("--- a/")[2]
    bug.path.write_text(f"Breaks: {bug.breaks}\nsim: {sim}\nseed: {seed}\n\n--- a/{diff}")


@contextmanager
def planted(bug: Bug) -> Iterator[Path]:
    """A copy of the tree with the bug in it."""
    with tempfile.TemporaryDirectory(prefix=f"planted-{bug.name}-") as folder:
        tree = Path(folder)
        for part in PARTS:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, tree / part, symlinks=True)
            else:
                shutil.copy2(ROOT / part, tree / part)
        # A folder inside of a repository would be taken for a part of it.
        env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
        applied = subprocess.run(
            ["git", "apply", str(bug.path)], cwd=tree, env=env, capture_output=True, text=True, check=False
        )
        if applied.returncode:
            raise DoesNotApply(
                f"{bug.path.name} no longer applies; refresh it against the code as it is:\n{applied.stderr}"
            )
        yield tree


def simulate(tree: Path, simulation: str, first: int, last: int) -> Found | None:
    """Run these seeds in the tree, until one fails."""
    command = [sys.executable, "-m", SIMULATIONS[simulation], str(first), "--until", str(last)]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SEED_SECONDS_MAX * (last - first + 1),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Found(first, "it hangs", time.monotonic() - began)
    if not done.returncode:
        return None
    text = done.stdout.decode("utf-8", "replace")
    said = _SEED_SAID.findall(text)
    if not said:
        raise RuntimeError(f"{' '.join(command)} failed without naming a seed:\n{text[-3000:]}")
    return Found(int(said[-1]), _last_words(text), time.monotonic() - began)


def _last_words(text: str) -> str:
    """The part of a failure that says what was wrong: what follows the line with the seed."""
    lines = text.strip().splitlines()
    at = max((i for i, line in enumerate(lines) if _SEED_SAID.search(line)), default=0)
    words = " ".join(line.strip() for line in lines[at : at + 3])
    return words[:300]


def search(bug: Bug, simulation: str, *, first: int = 0, seeds: int = SEEDS) -> Found | None:
    """The first seed that finds the bug; None when none of them does."""
    with planted(bug) as tree:
        for start in range(first, first + seeds, CHUNK_SEEDS):
            last = min(start + CHUNK_SEEDS, first + seeds) - 1
            found = simulate(tree, simulation, start, last)
            if found is not None:
                return found
    return None


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
    found = search(bug, sim, seeds=seeds)
    if found is None:
        print(f"MISSED {bug.name}: {seeds} seeds of the {sim} simulation", flush=True)
        return False
    if simulate(ROOT, sim, found.seed, found.seed) is not None:
        print(f"MISSED {bug.name}: seed {found.seed} fails without the bug as well", flush=True)
        return False
    print(f"found  {bug.name}: seed {found.seed}, {found.seconds:.1f} s: {found.how}", flush=True)
    if not keep:
        write_seed(bug, sim, found.seed)
    return True


if __name__ == "__main__":
    sys.exit(main())
