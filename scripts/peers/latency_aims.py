"""Targets for topics alone: lone reads, processor time of a write, and latency to a waiting reader at half load."""

from __future__ import annotations

from peers.aims import AimResult
from peers.compare import OURS, Point, find

# Paced reads: the name in the summary, and the bound of p50 in ms.
LONE_READS = {"caught-up": ("diff that finds nothing", 0.10), "diff": ("diff of one record", 0.12)}
WRITE_COST_US = 17.0
WRITE_COST_CLIENTS = 64
SEEN_P99_MS = {"disk": 2.0, "fsync": 4.0}


def judge(points: list[Point], tail: list[Point]) -> list[AimResult]:
    """All aims, including those that were not measured."""
    reads = [
        _at_most(f"{name}, one every 2 ms: p50", bound, "ms", _p50_ms(points, work))
        for work, (name, bound) in LONE_READS.items()
    ]
    seen = [
        _at_most(
            f"write to waiting reader, {durability}, half load: p99", bound, "ms", _p99_ms(tail, durability)
        )
        for durability, bound in SEEN_P99_MS.items()
    ]
    what = f"write of one record, {WRITE_COST_CLIENTS} clients, disk: processor time"
    return [*reads, _at_most(what, WRITE_COST_US, "µs", _write_cost_us(points)), *seen]


def _at_most(what: str, bound: float, unit: str, value: float | None) -> AimResult:
    return AimResult(what, bound, at_most=True, unit=unit, value=value, ours=value)


def _p50_ms(points: list[Point], work: str) -> float | None:
    row = find(points, system=OURS, work=work)
    return row["p50_ms"] if row else None


def _p99_ms(tail: list[Point], durability: str) -> float | None:
    row = find(tail, system=OURS, durability=durability, load="half")
    return row["p99_ms"] if row else None


def _write_cost_us(points: list[Point]) -> float | None:
    where = {"work": "single", "durability": "disk", "clients": WRITE_COST_CLIENTS, "payload_bytes": 100}
    row = find(points, system=OURS, **where)
    return server_cost_us(row) if row else None


def server_cost_us(row: Point) -> float:
    """Processor time of all processes of the server, per record."""
    return float(sum(used for role, used in row["cpu_us_per_record"].items() if role != "load"))
