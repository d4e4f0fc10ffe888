"""Fan-out: one stream with many watchers. Measures the latency from a write to each watcher, and the cost of a delivery.

In memory only on all sides (topics with durability `ephemeral`, Redis without its log, NATS core), alternating; also
topics with durability `disk`. In addition idle streams, of topics alone.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

from peers.fanout_protocols import BATCH, STREAM, WATCHING
from peers.load import Pids, plan, result_of, start
from peers.protocols import Exchange
from peers.systems import Fleet, Target, Topics
from peers.turns import summary, take_turns
from peers.work import Say, settle, warm_up_s

SHAPES = ("lock-step", "burst")
WATCHERS = (1, 10, 100, 1000)
FIGURES = (
    "deliveries_per_s",
    "writes_per_s",
    "p50_ms",
    "p99_ms",
    "p999_ms",
)  # percentiles only in lock-step
IDLE_S = 30.0  # two heartbeats of each stream
OTHER_FILES = 500  # open files of a process besides its streams
# Sessions outlive their streams by minutes, so the defaults would be exceeded by later measurements.
ENVIRONMENT = {"TOPICS_MAX_WATCH_SESSIONS": "1000000", "TOPICS_MAX_SSE_CONNECTIONS": "100000"}


def contenders(folder: str, systems: tuple[str, ...], *, disk: bool = True) -> Fleet:
    raise_file_limit()
    fleet = Fleet(folder, systems, ("ephemeral",), **ENVIRONMENT)
    ours = fleet.targets.get(("topics", "ephemeral"))
    if disk and isinstance(ours, Topics):
        fleet.targets["topics", "disk"] = Topics("disk", ours.server)
    return fleet


def measure(
    fleet: Fleet, shape: str, watchers: int, *, seconds: float, rounds: int, say: Say
) -> Iterator[dict[str, Any]]:
    """Yield a row for each contender, also for failed ones."""
    turns = take_turns(
        list(fleet.targets.values()),
        rounds=rounds,
        once=lambda target: measure_once(target, shape, watchers, seconds),
        say=say,
        name=lambda target: f"fan-out {shape} {watchers} watchers, {target.system} {target.durability}",
    )
    for target, outcome in turns:
        row = {
            "shape": shape,
            "watchers": watchers,
            "system": target.system,
            "durability": target.durability,
        }
        if isinstance(outcome, str):
            yield {"section": "fan-out", **row, "failed": outcome}
        else:
            figures = [name for name in FIGURES if name in outcome[0]]
            yield {**row, **summary(outcome, figures, each="delivery")}


def measure_once(target: Target, shape: str, watchers: int, seconds: float) -> dict[str, Any]:
    target.clear(STREAM)  # in case of an earlier failure
    if isinstance(target, Topics):
        target.make(STREAM)  # peers create it with the first record, or need none
    try:
        return drive(target, shape, watchers, seconds, warm_up_s(seconds), target.pids())
    finally:
        target.clear(STREAM)
        settle(target)


def drive(
    target: Target, shape: str, watchers: int, seconds: float, warm_up: float, pids: Pids
) -> dict[str, Any]:
    """Run the load generator: many watchers of one stream, and one writer (scripts/load/watch.c)."""
    watching = WATCHING[target.protocol]()
    settings: dict[str, object] = {
        "mode": "watch",
        "shape": shape,
        "clients": watchers,
        "seconds": seconds,
        "warm_up": warm_up,
        "polls": int(watching.question is not None),
    }
    requests = [("request", watching.write(count)) for count in (1, BATCH)]
    if watching.question:
        requests.append(("request", watching.question))
    if watching.opened:
        requests.append(("opened", Exchange("", watching.opened)))
    requests += [("watcher", one) for one in watching.hellos(target.address, watchers)]
    return result_of(start(plan(target.address, target.protocol, settings, requests, pids)))


def measure_idle(fleet: Fleet, streams: int, *, seconds: float, say: Say) -> Iterator[dict[str, Any]]:
    """Measure the CPU time of all processes of topics with many open streams and no writes."""
    target = fleet.targets.get(("topics", "ephemeral"))
    if not isinstance(target, Topics):
        return
    row: dict[str, Any] = {"system": "topics", "streams": streams}
    possible = raise_file_limit() - OTHER_FILES
    if streams > possible:
        yield {**row, "skipped": f"a process may have {possible + OTHER_FILES} open files here"}
        return
    say(f"{streams} idle streams")
    target.clear(STREAM)
    target.make(STREAM)
    try:
        result = drive(target, "idle", streams, seconds, 2.0, target.server.all_pids())
        shares = {role: round(used / result["seconds"], 4) for role, used in result["cpu_s"].items()}
        own = shares.pop("load")
        yield {
            **row,
            "seconds": result["seconds"],
            "core_share": round(sum(shares.values()), 4),
            "by_role": shares,
            "generator_share": own,
        }
    finally:
        target.clear(STREAM)
        settle(target)


def raise_file_limit() -> int:
    """Raise the limit of open files to the maximum; servers started later inherit it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        most = 1 << 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
