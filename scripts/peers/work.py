"""Points of the comparison: one kind of work at one durability, number of clients and payload size, for all systems.

Writes go to an initially empty stream; reads go through 10 000 records, 1000 at a time, each client from another place.
Lone requests are sent at a pace, so that they find sleeping processes: one after the other, they would keep them awake.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from peers import protocols
from peers.load import Load, cpu_s, drive
from peers.null_server import null_server
from peers.protocols import Exchange
from peers.systems import STREAM, Fleet, Target, memory_bytes

RECORDS = {"single": 1, "batch": 100, "read": 1000, "lone": 1, "caught-up": 1, "diff": 1, "pooled": 1}
BACKLOG = 10_000
LONE = ("lone", "caught-up", "diff")
LONE_EVERY_S = 0.002
DIFF_LIMIT = 1000  # records that a reader asks for when it does not know how many there are
TOPICS = 500
POOLED = 32  # connections for these topics
# NATS would have to read through a consumer, or to make hundreds of streams: no equal work.
WITHOUT_NATS = ("caught-up", "diff", "pooled")
QUIET_SHARE = 0.1  # of one core
QUIET_STEP_S = 0.2
QUIET_MAX_S = 10.0

# A failure of one system does not affect the results of the others.
FAILURES = (RuntimeError, OSError, protocols.BadAnswer)

Say = Callable[[str], None]  # prints what is measured next


@dataclass(frozen=True)
class Point:
    work: str
    durability: str
    clients: int
    payload_bytes: int

    def __str__(self) -> str:
        return f"{self.work} {self.durability} {self.clients} clients {self.payload_bytes} B"


# Works with one number of clients and one payload size.
FIXED_POINTS = (
    Point("lone", "fsync", 1, 100),
    Point("lone", "disk", 1, 100),
    Point("caught-up", "disk", 1, 100),
    Point("diff", "disk", 1, 100),
    Point("pooled", "disk", POOLED, 100),
)


def all_points() -> Iterator[Point]:
    """All points. Reads are measured at one durability only, since their cost does not depend on it."""
    for work in ("single", "batch", "read"):
        for durability in ("disk",) if work == "read" else ("fsync", "disk"):
            for payload_bytes in (100, 1024):
                for clients in (1, 16, 64, 256):
                    yield Point(work, durability, clients, payload_bytes)
    yield from FIXED_POINTS


def warm_up_s(seconds: float) -> float:
    return min(1.0, seconds / 2)


def run_s(seconds: float) -> float:
    """Estimated duration of one measurement, with its setup."""
    return seconds + warm_up_s(seconds) + 1.2


def measure(fleet: Fleet, point: Point, *, seconds: float, rounds: int, say: Say) -> list[dict[str, Any]]:
    """Yield one row per system, also for failed ones."""
    targets = [
        target
        for target in fleet.at(point.durability)
        if target.system != "nats" or point.work not in WITHOUT_NATS
    ]
    results: dict[str, list[dict[str, Any]]] = {target.system: [] for target in targets}
    failures: dict[str, str] = {}
    memory: dict[str, int] = {}
    for number in range(rounds):
        turn = number % len(targets)  # vary the order
        for target in [*targets[turn:], *targets[:turn]]:
            if target.system in failures:
                continue
            say(f"{point}, round {number + 1}, {target.system}")
            try:
                results[target.system].append(measure_once(target, point, seconds))
                memory[target.system] = memory_bytes(target.pids())
                clear(target, point)
                settle(target)
            except FAILURES as error:
                failures[target.system] = str(error)
    return [
        {**summary(point, target.system, results[target.system]), "memory_mb": memory[target.system] >> 20}
        for target in targets
        if target.system not in failures
    ] + [{**identity(point, system), "failed": why} for system, why in failures.items()]


def measure_once(target: Target, point: Point, seconds: float) -> dict[str, Any]:
    clear(target, point)  # in case of an earlier failure
    make(target, point)
    return drive(load_of(target, point, seconds))


def streams(point: Point) -> list[str]:
    return [f"{STREAM}-{number:05}" for number in range(TOPICS)] if point.work == "pooled" else [STREAM]


def clear(target: Target, point: Point) -> None:
    target.clear_all(streams(point))


def make(target: Target, point: Point) -> None:
    for stream in streams(point):
        target.make(stream)
    if point.work in {"read", "caught-up"}:
        target.fill(protocols.payload(point.payload_bytes), BACKLOG)
        settle(target)


def load_of(target: Target, point: Point, seconds: float) -> Load:
    payload = protocols.payload(point.payload_bytes)
    records, first = RECORDS[point.work], target.cursor_first
    exchanges: tuple[Exchange, ...]
    cursor = (first, 0)
    match point.work:
        case "read":
            exchanges, cursor = (target.read(records),), (first, first + BACKLOG)
        case "caught-up":
            exchanges, cursor = (target.read(DIFF_LIMIT, expected=0),), (first + BACKLOG, 0)
        case "diff":
            write = replace(target.append(payload, 1), records=0, timed=False)
            exchanges = (write, target.read(DIFF_LIMIT, expected=1))
        case "pooled":
            exchanges = (target.write(payload, 1, f"{STREAM}-{protocols.TOPIC.decode()}"),)
        case _:
            exchanges = (target.write(payload, records),)
    return Load(
        target.address,
        exchanges[0],
        point.clients,
        seconds,
        warm_up_s(seconds),
        pids=target.pids(),
        every_s=LONE_EVERY_S if point.work in LONE else 0.0,
        then=exchanges[1:],
        topics=TOPICS if point.work == "pooled" else 1,
        cursor=cursor,
    )


def settle(target: Target) -> None:
    """Wait until the system has finished the background work of the last measurement."""
    give_up = time.monotonic() + QUIET_MAX_S
    pids = target.pids()
    while time.monotonic() < give_up:
        before = cpu_s(pids)
        time.sleep(QUIET_STEP_S)
        after = cpu_s(pids)
        if sum(after[role] - before[role] for role in pids) <= QUIET_STEP_S * QUIET_SHARE:
            return


def identity(point: Point, system: str) -> dict[str, Any]:
    return {
        "work": point.work,
        "system": system,
        "durability": point.durability,
        "clients": point.clients,
        "payload_bytes": point.payload_bytes,
        "records_per_request": RECORDS[point.work],
    }


def summary(point: Point, system: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds."""
    figures = ("records_per_s", "p50_ms", "p90_ms", "p99_ms", "p999_ms")
    return {
        **identity(point, system),
        "rounds": rounds,
        **{name: round(median([one[name] for one in rounds]), 4) for name in figures},
        "cpu_us_per_record": cpu_us_per_record(rounds),
    }


def cpu_us_per_record(rounds: list[dict[str, Any]]) -> dict[str, float]:
    def cost(one: dict[str, Any], role: str) -> float:
        return float(one["cpu_s"][role] * 1e6 / max(1.0, one["records_per_s"] * one["seconds"]))

    return {role: round(median([cost(one, role) for one in rounds]), 3) for role in rounds[0]["cpu_s"]}


NULL_POINTS = [
    Point("single", "disk", 64, 100),
    Point("single", "disk", 256, 1024),
    Point("batch", "disk", 16, 100),
    Point("batch", "disk", 16, 1024),
    Point("read", "disk", 16, 100),
    Point("read", "disk", 16, 1024),
]


def measure_null(fleet: Fleet, *, seconds: float, say: Say) -> Iterator[dict[str, Any]]:
    """Measure the generator against a server that repeats a response of the real one, to find the generator's limit."""
    for target in fleet.at("disk"):
        for point in NULL_POINTS:
            say(f"{point}, the generator alone, {target.protocol}")
            clear(target, point)
            make(target, point)
            load = load_of(target, point, seconds)
            answer = protocols.ask(target.address, load.exchange, number=target.cursor_first)
            clear(target, point)
            with null_server(load.exchange, answer) as (address, pid):
                result = drive(replace(load, address=address, pids={"server": [pid]}))
            yield {
                "protocol": target.protocol,
                "work": point.work,
                "clients": point.clients,
                "payload_bytes": point.payload_bytes,
                "records_per_s": result["records_per_s"],
                "load_cpu_us_per_request": round(result["cpu_s"]["load"] * 1e6 / result["count"], 2),
                "busy": {role: round(used / result["seconds"], 3) for role, used in result["cpu_s"].items()},
            }
