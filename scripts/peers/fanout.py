"""One stream and its many watchers: from a write until each has seen it, and what a delivery costs.

In memory alone on all sides (topics' class `ephemeral`, Redis without its log, NATS core), in turns; topics' class `disk`
beside them. And streams that are open while nothing is written, of topics alone.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

from peers.fanout_load import Fanout, drive
from peers.fanout_protocols import STREAM
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
)  # the last three where it is timed
IDLE_S = 30.0  # two heartbeats of each stream, whenever it was opened
OTHER_FILES = 500  # that a process holds beside its streams
# Sessions outlive their streams by minutes, and one measurement must not run into the caps of the next.
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
    """A row for each contender; one that fails has a row that says so."""
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
    target.clear(STREAM)  # what a failure may have left
    if isinstance(target, Topics):
        target.make(STREAM)  # a peer's is there with its first record, or never
    task = Fanout(target.protocol, target.address, shape, watchers, seconds, warm_up_s(seconds))
    task.pids = target.pids()
    try:
        return drive(task)
    finally:
        target.clear(STREAM)
        settle(target)


def measure_idle(fleet: Fleet, streams: int, *, seconds: float, say: Say) -> Iterator[dict[str, Any]]:
    """Processor time of all of topics' processes while many streams are open and nobody writes."""
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
    task = Fanout(
        target.protocol, target.address, "idle", streams, seconds, warm_up=2.0, pids=target.server.all_pids()
    )
    try:
        result = drive(task)
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
    """As many open files as this process may allow itself; servers that it starts later inherit them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        most = 1 << 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
