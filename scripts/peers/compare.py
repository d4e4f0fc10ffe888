"""Ratios between systems, and the aims that they are held against.

A ratio is the median over rounds of ours / theirs *in the same round*: the systems take turns, so a noisy
minute hits both sides of one quotient, and not one side of two medians.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

Point = dict[str, Any]  # one entry of "points" or "tail" in the results

OURS = "topics"
PEERS = ("redis", "nats")
SYSTEMS = (OURS, *PEERS)
NAMES = {
    "topics": "topics",
    "redis": "Redis Streams",
    "nats": "NATS JetStream",
    "nats-core": "NATS core",
}
WORKS = ("single", "batch", "read")
DURABILITIES = ("fsync", "disk")


@dataclass(frozen=True, slots=True)
class Aim:
    work: str
    clients: int
    durability: str | None  # None: whichever the work was measured at; a read costs the same at each
    against: str
    bound: float
    measure: Literal["records_per_s", "p50_ms"] = "records_per_s"

    @property
    def at_most(self) -> bool:
        """A latency may be at most so many times theirs; a rate must be at least so many times theirs."""
        return self.measure == "p50_ms"


AIM_PAYLOAD_BYTES = 100
AIMS = (
    Aim("single", 64, "fsync", "redis", 1.5),
    Aim("single", 64, "fsync", "nats", 10),
    Aim("batch", 16, "fsync", "redis", 1.7),
    Aim("batch", 16, "fsync", "nats", 50),
    Aim("single", 64, "disk", "redis", 0.7),
    Aim("batch", 16, "disk", "redis", 0.8),
    Aim("read", 16, None, "redis", 1.0),
    Aim("single", 1, "disk", "redis", 6, "p50_ms"),
)


@dataclass(frozen=True, slots=True)
class Judged:
    """An aim beside what was measured; `ratio` is None if one of the two sides was not."""

    aim: Aim
    ours: float | None
    theirs: float | None
    ratio: float | None

    @property
    def met(self) -> bool:
        if self.ratio is None:
            return False
        return self.ratio <= self.aim.bound if self.aim.at_most else self.ratio >= self.aim.bound

    @property
    def missed_by(self) -> float:
        """How far the ratio lies on the wrong side, as a share of the aim."""
        if self.ratio is None or self.met:
            return 0.0
        return abs(self.ratio - self.aim.bound) / self.aim.bound

    def as_json(self) -> dict[str, Any]:
        return {
            "work": self.aim.work,
            "clients": self.aim.clients,
            "durability": self.aim.durability,
            "measure": self.aim.measure,
            "against": self.aim.against,
            "ours": self.ours,
            "theirs": self.theirs,
            "ratio": self.ratio,
            "aim": self.aim.bound,
            "met": self.met,
        }


def judge(points: list[Point]) -> list[Judged]:
    """Every aim against the points; those that were not measured too, so that none goes missing unseen."""
    return [_judged(points, aim) for aim in AIMS]


def _judged(points: list[Point], aim: Aim) -> Judged:
    where: Point = {"work": aim.work, "clients": aim.clients, "payload_bytes": AIM_PAYLOAD_BYTES}
    if aim.durability:
        where["durability"] = aim.durability
    ours = find(points, system=OURS, **where)
    if ours:
        where["durability"] = ours["durability"]
    theirs = find(points, system=aim.against, **where)
    return Judged(
        aim,
        ours[aim.measure] if ours else None,
        theirs[aim.measure] if theirs else None,
        ratio(ours, theirs, aim.measure) if ours and theirs else None,
    )


def find(rows: list[Point], **where: Any) -> Point | None:
    return next((row for row in rows if all(row.get(key) == value for key, value in where.items())), None)


def ratio(ours: Point, theirs: Point, measure: str = "records_per_s") -> float | None:
    """None if no round has both figures: a slow system may finish no request at all in a short round."""
    both = [(a.get(measure), b.get(measure)) for a, b in zip(ours["rounds"], theirs["rounds"])]
    quotients = [a / b for a, b in both if a is not None and b]
    return median(quotients) if quotients else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measured point of ours beside the same point of a peer. A ratio below 1 is behind, always."""

    what: str
    against: str
    ours: str
    theirs: str
    ratio: float


def place(point: Point) -> str:
    clients = count_of(point["clients"], "client")
    return f"{point['work']}, {point['durability']}, {payload(point['payload_bytes'])}, {clients}"


def payload(size: int) -> str:
    return f"{size // 1024} KiB" if size % 1024 == 0 else f"{size} B"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def comparisons(points: list[Point], tail: list[Point]) -> list[Comparison]:
    return [*_rates(points), *_tail_latencies(tail)]


def pairs(points: list[Point]) -> Iterator[tuple[Point, Point]]:
    """Each point of ours with each peer's point at the same place."""
    for ours in points:
        if ours["system"] != OURS:
            continue
        where = {key: ours[key] for key in ("work", "durability", "clients", "payload_bytes")}
        for peer in PEERS:
            if theirs := find(points, system=peer, **where):
                yield ours, theirs


def _rates(points: list[Point]) -> Iterator[Comparison]:
    for ours, theirs in pairs(points):
        quotient = ratio(ours, theirs)
        if quotient is not None:
            yield Comparison(
                place(ours),
                theirs["system"],
                f"{ours['records_per_s']:,.0f} records/s",
                f"{theirs['records_per_s']:,.0f} records/s",
                quotient,
            )


def _tail_latencies(tail: list[Point]) -> Iterator[Comparison]:
    for ours in tail:
        if ours["system"] != OURS:
            continue
        for peer in PEERS:
            theirs = find(tail, system=peer, durability=ours["durability"], load=ours["load"])
            if theirs and theirs["p50_ms"] and ours["p50_ms"]:
                yield Comparison(
                    f"write to waiting reader, {ours['durability']}, {ours['load']}: p50",
                    peer,
                    f"{ours['p50_ms']:.2f} ms",
                    f"{theirs['p50_ms']:.2f} ms",
                    theirs["p50_ms"] / ours["p50_ms"],
                )


def behind(everything: list[Comparison]) -> list[Comparison]:
    """Worst first."""
    return sorted((one for one in everything if one.ratio < 1), key=lambda one: one.ratio)


def ahead_but_longer_p99(points: list[Point]) -> list[tuple[Point, Point]]:
    """Where the rate would hide it: at least their throughput, and yet a longer p99."""
    return [
        (ours, theirs)
        for ours, theirs in pairs(points)
        if (ratio(ours, theirs) or 0) >= 1 and (ratio(ours, theirs, "p99_ms") or 0) > 1
    ]
