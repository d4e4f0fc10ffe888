"""Forwarding: one source and its copies. Measures the latency of the writer's acks, copies per second, and the lag of copies.

All systems alternate, each with 0, 1, 10 and 100 destinations; topics also with 1000. First, writes come at a fixed
rate, the same for any number of destinations, and their acks are timed. Then they come as fast as the system accepts
them, up to a number of copies; the clock stops when every destination has all of them. Finally, for topics alone, a
watcher of the destination is compared with one of the source.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from peers import forward_protocols, protocols
from peers.forward_aims import PLACEMENTS
from peers.forward_load import Pair
from peers.forward_load import drive as drive_pair
from peers.load import Load, cpu_s, drive
from peers.protocols import BadAnswer
from peers.systems import Fleet, Target, Topics
from peers.turns import summary, take_turns
from peers.work import Say, settle, warm_up_s

PEER_DESTS_MAX = 100
SHARDS = 2
PACE = 50.0  # writes per second, of one record each
PACED_CLIENTS = 4
FLOOD_CLIENTS = 4
BATCH = 100
COPIES_MAX = 1_000_000  # per measurement, to bound disk usage and time
POLL_S = 0.05  # polling takes CPU time from the measured system
DRAIN_S = 120.0
PAYLOAD = protocols.payload(100)
FIGURES = ("ack_p50_ms", "ack_p99_ms", "writes_per_s", "records_per_s")
COPY_FIGURES = (*FIGURES, "copies_per_s")
LAG_FIGURES = tuple(f"{prefix}{name}" for prefix in ("", "source_", "dest_") for name in ("p50_ms", "p99_ms"))

Contender = tuple[Target, int]  # a system and the number of destinations


def contenders(folder: str, systems: tuple[str, ...]) -> Fleet:
    """Separate servers: topics has two shards here, so that copies move between workers."""
    return Fleet(folder, systems, ("disk",), TOPICS_WAL_SHARDS=str(SHARDS))


def pairs(fleet: Fleet, dests: list[int]) -> list[Contender]:
    return [
        (target, count)
        for target in fleet.targets.values()
        for count in dests
        if count <= PEER_DESTS_MAX or isinstance(target, Topics)
    ]


def measure(
    fleet: Fleet, dests: list[int], *, seconds: float, rounds: int, say: Say
) -> Iterator[dict[str, Any]]:
    """Yield a row for each system and number of destinations, also for failed ones."""
    turns = take_turns(
        pairs(fleet, dests),
        rounds=rounds,
        once=lambda contender: measure_once(*contender, seconds),
        say=say,
        name=lambda contender: f"copies to {contender[1]} dests, {contender[0].system}",
    )
    for (target, count), outcome in turns:
        row = {"system": target.system, "dests": count}
        if isinstance(outcome, str):
            yield {"section": "forward", **row, "failed": outcome}
        else:
            yield {**row, **summary(outcome, COPY_FIGURES if count else FIGURES, each="copy")}


def measure_once(target: Target, dests: int, seconds: float) -> dict[str, Any]:
    forward_protocols.clear(target, dests)  # in case of an earlier failure
    forward_protocols.make(target, dests)
    try:
        settle(target)
        paced = paced_writes(target, dests, seconds)
        await_copies(target, dests)
        settle(target)
        return {**paced, **flood(target, dests, seconds)}
    finally:
        forward_protocols.clear(target, dests)
        settle(target)


def paced_writes(target: Target, dests: int, seconds: float) -> dict[str, Any]:
    write = forward_protocols.write(target, PAYLOAD, 1, dests)
    result = drive(Load(target.address, write, PACED_CLIENTS, seconds, warm_up_s(seconds), rate=PACE))
    return {
        "ack_p50_ms": result["p50_ms"],
        "ack_p99_ms": result["p99_ms"],
        "writes_per_s": result["per_s"],
    }


def flood(target: Target, dests: int, seconds: float) -> dict[str, Any]:
    """Measure copies per second, from the first write until the last copy exists."""
    write = forward_protocols.write(target, PAYLOAD, BATCH, dests)
    pids = target.pids()
    load = Load(target.address, write, FLOOD_CLIENTS, seconds, warm_up=0.0, most=requests_max(dests))
    held, before = forward_protocols.lengths(target, dests)[0], cpu_s(pids)
    result = drive(load)
    written = await_copies(target, dests) - held
    took = time.perf_counter() - result["began_at"] if dests else result["seconds"]
    after = cpu_s(pids)
    used = {role: round(after[role] - before[role], 4) for role in pids}
    return {
        "records_per_s": result["records_per_s"],
        "writing_s": result["seconds"],
        "count": written * max(1, dests),
        "seconds": round(took, 3),
        "cpu_s": {**used, "load": result["cpu_s"]["load"]},
        **({"copies_per_s": round(written * dests / took, 1)} if dests else {}),
    }


def requests_max(dests: int) -> int:
    """The maximum number of requests, at least one per client; without destinations only the time limits it."""
    return max(FLOOD_CLIENTS, COPIES_MAX // dests // BATCH) if dests else 0


def await_copies(target: Target, dests: int) -> int:
    """Wait until every destination has each record of the source exactly once; return their number."""
    give_up = time.monotonic() + DRAIN_S
    while True:
        head, found = forward_protocols.lengths(target, dests)
        if len(found) != dests:
            raise BadAnswer(b"%d dests instead of %d" % (len(found), dests))
        if all(count == head for count in found):
            return head
        if max(found) > head and forward_protocols.lengths(target, dests)[0] < max(found):
            raise BadAnswer(b"a dest has %d records of %d" % (max(found), head))
        if time.monotonic() > give_up:
            raise BadAnswer(b"after %d s a dest has %d records of %d" % (DRAIN_S, min(found), head))
        time.sleep(POLL_S)


def measure_lag(fleet: Fleet, *, seconds: float, rounds: int, say: Say) -> Iterator[dict[str, Any]]:
    """Measure the latency that a copy adds between a write and a watcher: within one worker, and between two."""
    target = fleet.targets.get(("topics", "disk"))
    if not isinstance(target, Topics):
        return
    turns = take_turns(
        list(PLACEMENTS),
        rounds=rounds,
        once=lambda placement: measure_lag_once(target, placement, seconds),
        say=say,
        name=lambda placement: f"latency of a copy, {placement}",
    )
    for placement, outcome in turns:
        if isinstance(outcome, str):
            yield {"section": "lag", "placement": placement, "failed": outcome}
        else:
            yield {"placement": placement, **summary(outcome, LAG_FIGURES, each="write")}


def measure_lag_once(target: Topics, placement: str, seconds: float) -> dict[str, Any]:
    source = "lag-source"
    dest = named_at(source, PLACEMENTS[placement])
    target.clear(source)
    target.clear(dest)
    target.make(source)
    forward_protocols.make_router(target, source, dest)
    try:
        settle(target)
        return drive_pair(Pair(target.address, source, dest, seconds, warm_up_s(seconds), target.pids()))
    finally:
        target.clear(source)
        target.clear(dest)
        settle(target)


def named_at(source: str, is_same: bool) -> str:
    """The name of a topic on the same worker as the source, or on another one."""
    from topics.engine.core.placement import shard_of

    names = (f"lag-dest-{i}" for i in range(1000))
    return next(name for name in names if (shard_of(name, SHARDS) == shard_of(source, SHARDS)) == is_same)
