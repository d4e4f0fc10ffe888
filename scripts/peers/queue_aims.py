"""Performance targets for queues."""

from __future__ import annotations

from collections.abc import Iterator

from peers import wording
from peers.aims import AimResult
from peers.compare import NAMES, OURS, PEERS, Comparison, Point, find, ratio

WORKERS = (16, 50)
# Jobs per second with the most workers, by durability and peer.
BOUNDS = {("disk", "redis"): 0.7, ("fsync", "redis"): 1.1, ("fsync", "nats"): 2.0}
FEW, MANY = 1_000, 1_000_000
FLAT = 1.2  # growth up to this factor, with a thousand times the jobs, counts as flat


def judge(queue: list[Point], waiting: list[Point]) -> list[AimResult]:
    """All aims, including those that were not measured."""
    held = [_beside(queue, durability, peer, bound) for (durability, peer), bound in BOUNDS.items()]
    return [*held, _growth(waiting)]


def _beside(queue: list[Point], durability: str, peer: str, bound: float) -> AimResult:
    workers = WORKERS[-1]
    where = {"durability": durability, "workers": workers}
    ours, theirs = find(queue, system=OURS, **where), find(queue, system=peer, **where)
    return AimResult(
        f"queue, {workers} workers, {durability}: jobs/s",
        bound,
        at_most=False,
        unit="×",
        value=ratio(ours, theirs, "jobs_per_s") if ours and theirs else None,
        against=peer,
        called=f"{NAMES[peer]}{wording.PEER_SETTING[peer, durability]}",
        ours=ours["jobs_per_s"] if ours else None,
        theirs=theirs["jobs_per_s"] if theirs else None,
    )


def _growth(waiting: list[Point]) -> AimResult:
    few, many = find(waiting, jobs=FEW), find(waiting, jobs=MANY)
    return AimResult(
        f"p50 of a claim with {MANY:,} jobs waiting, in ms, over that with {FEW:,}",
        FLAT,
        at_most=True,
        unit="×",
        value=ratio(many, few, "p50_ms") if few and many else None,
        ours=many["p50_ms"] if many else None,
    )


def comparisons(queue: list[Point]) -> Iterator[Comparison]:
    """Comparisons with each peer: jobs per second."""
    for ours in queue:
        if ours["system"] != OURS:
            continue
        where = {key: ours[key] for key in ("durability", "workers")}
        for peer in PEERS:
            theirs = find(queue, system=peer, **where)
            quotient = ratio(ours, theirs, "jobs_per_s") if theirs else None
            if theirs and quotient is not None:
                rates = [f"{one['jobs_per_s']:,.0f} jobs/s" for one in (ours, theirs)]
                what = f"queue, {ours['durability']}, {ours['workers']} workers"
                yield Comparison(what, peer, rates[0], rates[1], quotient)
