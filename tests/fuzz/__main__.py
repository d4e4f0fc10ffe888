"""Command line of the fuzzer, behind scripts/fuzz.

--replay FILE    runs one input and shows the whole traceback
--seeded         the seeded mutator, which needs no further packages
(default)        guided by coverage, with atheris; interesting inputs go to --work, crashing ones beside it
--distil         adds the inputs of --work that reach new code to the corpus
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import secrets
import sys
from pathlib import Path

from tests.fuzz.runner import CORPUS, DEADLINE_S, Target, mutations, run_all, run_one, starting_points
from tests.support.arguments import positive_number

INPUT_BYTES_MAX = 4096
RSS_MB_MAX = 1500
USAGE, INTERRUPTED = 2, 130


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/fuzz")
    parser.add_argument("--target", required=True)
    parser.add_argument("--minutes", type=positive_number, default=1.0)
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--seeded", action="store_true")
    parser.add_argument("--distil", action="store_true")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--work", type=Path)
    parser.add_argument(
        "--inner", action="store_true", help="set by libFuzzer when it starts itself again to merge"
    )
    options, more = parser.parse_known_args()
    if more and not options.inner:
        parser.error(f"unknown: {' '.join(more)}")
    logging.lastResort = None  # logged errors are checked by the target
    if options.replay is not None:
        _target(options.target).run(options.replay.read_bytes())
        print(f"{options.target}: this input passes")
    elif options.seeded:
        _mutate(_target(options.target), options.minutes, options.seed)
    else:
        _guide(options, more)


def _target(name: str) -> Target:
    from tests.fuzz.targets import TARGETS

    if name not in TARGETS:
        print(f"no target {name}; the targets are {', '.join(TARGETS)}", file=sys.stderr)
        sys.exit(USAGE)
    return TARGETS[name]


def _mutate(target: Target, minutes: float, seed: int | None) -> None:
    seed = secrets.randbits(32) if seed is None else seed
    print(f"{target.name}: mutating from seed {seed} for {minutes} min", flush=True)
    count = run_all(target, mutations(target, seed, seconds=minutes * 60))
    print(f"{target.name}: {count} inputs, no failure")


def _guide(options: argparse.Namespace, inner_flags: list[str]) -> None:
    import atheris

    # Modules are instrumented on import, so none of ours may be imported before.
    # atheris prints the name of each module; that output is dropped.
    quiet = contextlib.redirect_stderr(io.StringIO())
    with quiet, atheris.instrument_imports(include=["topics", "workers", "router"]):
        from tests.fuzz import targets as _instrumented  # noqa: F401
    target = _target(options.target)
    # When it merges, libFuzzer builds a shell command from its first argument.
    command = f"{sys.executable} -m tests.fuzz --target {target.name} --inner"
    flags = inner_flags or _flags(target, options)
    bounds = [
        f"-max_len={INPUT_BYTES_MAX}",
        f"-timeout={round(4 * DEADLINE_S)}",
        f"-rss_limit_mb={RSS_MB_MAX}",
    ]
    atheris.Setup([command, *bounds, *flags], lambda data: run_one(target, data))
    atheris.Fuzz()


def _flags(target: Target, options: argparse.Namespace) -> list[str]:
    work: Path = options.work
    if options.distil:
        kept = CORPUS / target.name
        kept.mkdir(parents=True, exist_ok=True)
        return ["-merge=1", str(kept), str(work)]
    work.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(starting_points(target)):
        (work / f"start-{i:04}").write_bytes(data)
    flags = [f"-max_total_time={round(options.minutes * 60)}", *_dictionary(target, work)]
    return [*flags, f"-artifact_prefix={work}-failed-", "-print_final_stats=1", str(work)]


def _dictionary(target: Target, work: Path) -> list[str]:
    """A dictionary file for libFuzzer with the target's tokens; libFuzzer refuses an empty one."""
    words = [token for token in target.tokens if len(token) < 64]
    path = work.with_suffix(".dict")
    path.write_text("".join(f'"{_escaped(token)}"\n' for token in words))
    return [f"-dict={path}"] if words else []


def _escaped(token: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in token)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
