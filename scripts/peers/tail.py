"""Latency from a write to a reader that waits at the end of the stream, on an idle server and at half load.

One process of the load generator has one reader and one writer, with one record at a time: the reader waits, the record is
written, the reader receives it. Load comes from a second process and goes to another stream of the same server, at half the
rate of single writes that 64 clients achieve.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peers import protocols
from peers.load import Load, drive, plan, result_of, start
from peers.systems import TAIL_STREAM, Fleet, Target
from peers.turns import summary, take_turns
from peers.work import Say, settle, warm_up_s

CLIENTS = 64
PAUSE_S = 0.002  # before each write, so that the reader is waiting
LOAD_HEADSTART_S = 1.0
PAYLOAD = protocols.payload(100)
FIGURES = ("writes_per_s", "p50_ms", "p90_ms", "p99_ms", "p999_ms")


def measure(
    fleet: Fleet, points: list[dict[str, Any]], *, seconds: float, rounds: int, say: Say
) -> Iterator[dict[str, Any]]:
    """Measure all systems, alternating. `points` are the results so far, which contain the maximum write rates."""
    for load in ("idle", "half"):
        for durability in ("fsync", "disk"):

            def once(target: Target, load: str = load) -> dict[str, Any]:
                rate = half_of_most(target, points, seconds) if load == "half" else 0.0
                return measure_once(target, rate, seconds)

            turns = take_turns(
                fleet.at(durability),
                rounds=rounds,
                once=once,
                say=say,
                name=lambda target, what=f"tail {durability} {load}": f"{what}, {target.system}",
            )
            for target, outcome in turns:
                row = {"system": target.system, "durability": durability, "load": load}
                if isinstance(outcome, str):
                    yield {**row, "failed": outcome}
                else:
                    count = sum(one["count"] for one in outcome)
                    yield {**row, **summary(outcome, FIGURES, each="write"), "count": count}


def half_of_most(target: Target, points: list[dict[str, Any]], seconds: float) -> float:
    for point in points:
        where = (
            point["system"],
            point["durability"],
            point["work"],
            point["clients"],
            point["payload_bytes"],
        )
        if where == (target.system, target.durability, "single", CLIENTS, 100) and "failed" not in point:
            return float(point["records_per_s"]) / 2
    target.make()
    exchange = target.write(PAYLOAD, 1)
    most = drive(Load(target.address, exchange, CLIENTS, min(2.0, seconds), warm_up_s(seconds)))
    target.clear()
    settle(target)
    return float(most["per_s"]) / 2


def measure_once(target: Target, rate: float, seconds: float) -> dict[str, Any]:
    headstart = LOAD_HEADSTART_S if rate else 0.0
    warm_up = warm_up_s(seconds) + headstart
    target.make(TAIL_STREAM)
    target.make()
    try:
        if rate:
            exchange = target.write(PAYLOAD, 1)
            load = Load(target.address, exchange, CLIENTS, seconds + warm_up, headstart, rate)
            background = start(load.plan())
        result = result_of(start(watch_plan(target, seconds, warm_up)))
        writes = result_of(background)["per_s"] if rate else 0.0
    finally:
        target.clear(TAIL_STREAM)
        target.clear()
        settle(target)
    return {**result, "writes_per_s": writes}


def watch_plan(target: Target, seconds: float, warm_up: float) -> bytes:
    """One reader and one writer, one record at a time."""
    wait = target.wait(TAIL_STREAM)
    settings: dict[str, object] = {
        "mode": "watch",
        "shape": "lock-step",
        "clients": 1,
        "first_number": protocols.TAIL,
        "seconds": seconds,
        "warm_up": warm_up,
        "polls": int(wait is not None),
        "pause_us": PAUSE_S * 1e6,
    }
    write = target.append(PAYLOAD, 1, TAIL_STREAM)
    requests = [("request", one) for one in (write, write, *([wait] if wait else []))]
    return plan(target.address, target.protocol, settings, requests, target.pids())
