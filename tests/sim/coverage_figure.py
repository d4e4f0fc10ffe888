"""How much of the shipped code the whole-server simulation runs: `python -m tests.sim.coverage_figure [SEEDS]`.

This counts the lines of the shipped modules that the simulation executes; `LEFT_OUT` names the modules that it
replaces, with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 12
TYPICAL = (2042, 1016, 2062)  # short runs that execute most of it

# Every module on the way from the parsed head of a request to the disk.
RUN = (
    "topics/engine", "topics/link/wire.py", "topics/api/requests.py", "topics/protocols/http/errors.py", "workers/shard/core.py",
    "workers/shard/caps.py", "topics/protocols/json/requests.py", "topics/protocols/json/replies.py", "router/pending.py", "topics/protocols/http/admission.py",
    "topics/protocols/http/call.py", "topics/protocols/http/query.py", "topics/protocols/http/endpoints/records.py", "topics/protocols/http/endpoints/topics.py",
    "topics/link/watch.py", "topics/link/event_ids.py", "workers/watch/service.py", "workers/watch/feeds.py", "workers/watch/sessions.py",
    "workers/watch/session_file.py", "router/watch/fanout.py", "topics/protocols/watchers.py", "topics/protocols/http/event_stream.py", "router/watch/service.py", "topics/protocols/http/sse.py",
    "topics/protocols/http/endpoints/watch.py",
)  # fmt: skip
LEFT_OUT = {
    "topics/engine/tools/verify.py": "offline",
    "topics/engine/tools/repair.py": "offline",
    "topics/engine/tools/salvage_log.py": "offline",
    "topics/engine/tools/salvage_segments.py": "offline",
    "topics/engine/storage/overlay.py": "offline",
    "workers/shard/loop.py": "sockets and threads",
    "workers/shard/posix.py": "the real disk",
    "workers/process/supervisor.py": "processes",
    "router/shard_client.py": "sockets",
    "router/connections/connection.py": "bytes of HTTP",
}


def measure(seeds: Iterable[int]) -> dict[str, tuple[int, int]]:
    """Executed lines and all lines, by module."""
    counter = coverage.Coverage(
        data_file=None,
        config_file=False,
        include=[str(ROOT / name) + ("" if name.endswith(".py") else "/*") for name in RUN],
    )
    counter.start()
    # Imported only now, so that the lines of definitions count too.
    from tests.sim.server_walk import Simulation

    for seed in seeds:
        Simulation(seed).run()
    counter.stop()
    figures: dict[str, tuple[int, int]] = {}
    for path in sorted(counter.get_data().measured_files()):
        name = str(Path(path).relative_to(ROOT))
        if name not in LEFT_OUT and not name.endswith("__init__.py"):
            _, lines, _, missing, _ = counter.analysis2(path)
            figures[name] = (len(lines) - len(missing), len(lines))
    return figures


def share(figures: dict[str, tuple[int, int]]) -> float:
    return sum(run for run, _ in figures.values()) / sum(lines for _, lines in figures.values())


def main() -> None:
    figures = measure(range(int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS))
    for name, (run, lines) in figures.items():
        print(f"{name:40} {run:5} of {lines:5} lines  {run / lines:6.1%}")
    print(f"{'all':40} {share(figures):.1%}")


if __name__ == "__main__":
    main()
