"""Ratios between systems, and their aims.

A ratio is the median over rounds of ours / theirs *in the same round*: the systems take turns, so noise affects both
sides of a ratio.
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
WORKS = ("single", "batch", "read", "pooled")
PACED = ("lone", "caught-up", "diff")  # works whose rate is given, so that only latencies compare
DURABILITIES = ("fsync", "disk")


@dataclass(frozen=True, slots=True)
class Aim:
    work: str
    clients: int
    durability: str | None  # None: the one it was measured at; a read costs the same at each
    against: str
    bound: float
    measure: Literal["records_per_s", "p50_ms"] = "records_per_s"
    payload_bytes: int = 100

    @property
    def at_most(self) -> bool:
        """Whether the bound is a maximum, as for latencies, or a minimum, as for rates."""
        return self.measure == "p50_ms"


AIMS = (
    Aim("lone", 1, "disk", "redis", 3, "p50_ms"),
    Aim("lone", 1, "fsync", "redis", 1.5, "p50_ms"),
    Aim("single", 16, "disk", "redis", 0.4),
    Aim("single", 64, "disk", "redis", 0.45),
    Aim("single", 64, "fsync", "redis", 0.55),
    Aim("single", 64, "fsync", "nats", 10),
    Aim("batch", 16, "disk", "redis", 1.2),
    Aim("batch", 16, "fsync", "redis", 1.2),
    Aim("batch", 16, "fsync", "nats", 50),
    *(Aim("read", n, None, "redis", 1.0, payload_bytes=size) for size in (100, 1024) for n in (1, 16)),
)


@dataclass(frozen=True, slots=True)
class Judged:
    """An aim and its measured ratio; None if one of the two sides was not measured."""

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
        """How much worse than the aim the ratio is, as a fraction of the aim."""
        if self.ratio is None or self.met:
            return 0.0
        return abs(self.ratio - self.aim.bound) / self.aim.bound

    def as_json(self) -> dict[str, Any]:
        return {
            "work": self.aim.work,
            "clients": self.aim.clients,
            "durability": self.aim.durability,
            "payload_bytes": self.aim.payload_bytes,
            "measure": self.aim.measure,
            "against": self.aim.against,
            "ours": self.ours,
            "theirs": self.theirs,
            "ratio": self.ratio,
            "aim": self.aim.bound,
            "met": self.met,
        }


def judge(points: list[Point]) -> list[Judged]:
    """All aims, including those that were not measured."""
    return [_judged(points, aim) for aim in AIMS]


def _judged(points: list[Point], aim: Aim) -> Judged:
    where: Point = {"work": aim.work, "clients": aim.clients, "payload_bytes": aim.payload_bytes}
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
    """None if no round has both values: a slow system may complete no request in a short round."""
    both = [(a.get(measure), b.get(measure)) for a, b in zip(ours["rounds"], theirs["rounds"])]
    quotients = [a / b for a, b in both if a is not None and b]
    return median(quotients) if quotients else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A point of ours compared with a peer's. A ratio below 1 always means that topics is slower."""

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
    return [*_rates(points), *_paced_latencies(points), *_tail_latencies(tail)]


def pairs(points: list[Point]) -> Iterator[tuple[Point, Point]]:
    """Each point of ours with the same point of each peer."""
    for ours in points:
        if ours["system"] != OURS:
            continue
        where = {key: ours[key] for key in ("work", "durability", "clients", "payload_bytes")}
        for peer in PEERS:
            if theirs := find(points, system=peer, **where):
                yield ours, theirs


def _rates(points: list[Point]) -> Iterator[Comparison]:
    for ours, theirs in pairs(points):
        if ours["work"] in PACED:
            continue
        quotient = ratio(ours, theirs)
        if quotient is not None:
            yield Comparison(
                place(ours),
                theirs["system"],
                f"{ours['records_per_s']:,.0f} records/s",
                f"{theirs['records_per_s']:,.0f} records/s",
                quotient,
            )


def _paced_latencies(points: list[Point]) -> Iterator[Comparison]:
    for ours, theirs in pairs(points):
        slower = ratio(ours, theirs, "p50_ms") if ours["work"] in PACED else None
        if slower:
            what = f"{place(ours)}: p50"
            times = [f"{one['p50_ms']:.2f} ms" for one in (ours, theirs)]
            yield Comparison(what, theirs["system"], times[0], times[1], 1 / slower)


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
    """Comparisons in which topics is slower, worst first."""
    return sorted((one for one in everything if one.ratio < 1), key=lambda one: one.ratio)


def ahead_but_longer_p99(points: list[Point]) -> list[tuple[Point, Point]]:
    """Points with at least the peer's throughput, but a longer p99."""
    return [
        (ours, theirs)
        for ours, theirs in pairs(points)
        if ours["work"] not in PACED
        and (ratio(ours, theirs) or 0) >= 1
        and (ratio(ours, theirs, "p99_ms") or 0) > 1
    ]
