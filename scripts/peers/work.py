"""Points of the comparison: one kind of work at one durability, number of clients and payload size, for all systems.

Writes go to an initially empty stream; reads get the first 1000 of 10 000 records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from peers import protocols
from peers.load import Load, cpu_s, drive
from peers.null_server import null_server
from peers.systems import Fleet, Target, memory_bytes

RECORDS = {"single": 1, "batch": 100, "read": 1000}
BACKLOG = 10_000
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


def all_points() -> Iterator[Point]:
    """All points. Reads are measured at one durability only, since their cost does not depend on it."""
    for work in RECORDS:
        for durability in ("disk",) if work == "read" else ("fsync", "disk"):
            for payload_bytes in (100, 1024):
                for clients in (1, 16, 64, 256):
                    yield Point(work, durability, clients, payload_bytes)


def warm_up_s(seconds: float) -> float:
    return min(1.0, seconds / 2)


def run_s(seconds: float) -> float:
    """Estimated duration of one measurement, with its setup."""
    return seconds + warm_up_s(seconds) + 1.2


def measure(fleet: Fleet, point: Point, *, seconds: float, rounds: int, say: Say) -> list[dict[str, Any]]:
    """Yield one row per system, also for failed ones."""
    targets = fleet.at(point.durability)
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
                target.clear()
                settle(target)
            except FAILURES as error:
                failures[target.system] = str(error)
    return [
        {**summary(point, target.system, results[target.system]), "memory_mb": memory[target.system] >> 20}
        for target in targets
        if target.system not in failures
    ] + [{**identity(point, system), "failed": why} for system, why in failures.items()]


def measure_once(target: Target, point: Point, seconds: float) -> dict[str, Any]:
    payload = protocols.payload(point.payload_bytes)
    records = RECORDS[point.work]
    target.clear()  # in case of an earlier failure
    target.make()
    if point.work == "read":
        target.fill(payload, BACKLOG)
        settle(target)
        exchange = protocols.sized(target.address, target.read(records), payload)
    else:
        exchange = target.write(payload, records)
    load = Load(target.address, exchange, point.clients, seconds, warm_up_s(seconds), pids=target.pids())
    return drive(load)


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
    figures = ("records_per_s", "p50_ms", "p99_ms", "p999_ms")
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
            payload = protocols.payload(point.payload_bytes)
            records = RECORDS[point.work]
            target.make()
            target.fill(payload, 1000)
            exchange = target.write(payload, records)
            if point.work == "read":
                exchange = protocols.sized(target.address, target.read(records), payload)
            answer = protocols.ask(target.address, exchange)
            target.clear()
            with null_server(exchange, answer) as (address, pid):
                load = Load(
                    address, exchange, point.clients, seconds, warm_up_s(seconds), pids={"server": [pid]}
                )
                result = drive(load)
            yield {
                "protocol": target.protocol,
                "work": point.work,
                "clients": point.clients,
                "payload_bytes": point.payload_bytes,
                "records_per_s": result["records_per_s"],
                "load_cpu_us_per_request": round(result["cpu_s"]["load"] * 1e6 / result["count"], 2),
                "busy": {role: round(used / result["seconds"], 3) for role, used in result["cpu_s"].items()},
            }
