"""The aims for queues, and how the results stand against them."""

from __future__ import annotations

from collections.abc import Iterator

from peers import wording
from peers.compare import NAMES, OURS, PEERS, Comparison, Point, find, ratio
from peers.held import Held

WORKERS = (16, 50)
FSYNC_BOUND = 2.0  # of each peer
DISK_BOUND = 1.0  # of the slower peer
FEW, MANY = 1_000, 1_000_000
FLAT = 1.2  # what grows by less with a thousand times the jobs counts as flat


def judge(queue: list[Point], waiting: list[Point]) -> list[Held]:
    """Every aim, also those that were not measured, so that none goes missing unseen."""
    return [
        *(_beside(queue, "fsync", workers, peer, FSYNC_BOUND) for workers in WORKERS for peer in PEERS),
        *(_beside(queue, "disk", workers, _slower(queue, workers), DISK_BOUND) for workers in WORKERS),
        _growth(waiting),
    ]


def _slower(queue: list[Point], workers: int) -> str:
    """The peer with fewer jobs a second. One that was not measured might be slower still, so it is named then."""
    rates = {}
    for peer in PEERS:
        row = find(queue, system=peer, durability="disk", workers=workers)
        rates[peer] = row["jobs_per_s"] if row else -1.0
    return min(PEERS, key=lambda peer: rates[peer])


def _beside(queue: list[Point], durability: str, workers: int, peer: str, bound: float) -> Held:
    where = {"durability": durability, "workers": workers}
    ours, theirs = find(queue, system=OURS, **where), find(queue, system=peer, **where)
    called = f"{NAMES[peer]}{wording.PEER_SETTING[peer, durability]}"
    if durability == "disk":
        called = f"the slower: {called}" if theirs else "the slower peer"
    return Held(
        f"queue, {workers} workers, {durability}: jobs/s",
        bound,
        at_most=False,
        unit="×",
        value=ratio(ours, theirs, "jobs_per_s") if ours and theirs else None,
        against=peer,
        called=called,
        ours=ours["jobs_per_s"] if ours else None,
        theirs=theirs["jobs_per_s"] if theirs else None,
    )


def _growth(waiting: list[Point]) -> Held:
    few, many = find(waiting, jobs=FEW), find(waiting, jobs=MANY)
    return Held(
        f"p50 of a claim with {MANY:,} jobs waiting, in ms, over that with {FEW:,}",
        FLAT,
        at_most=True,
        unit="×",
        value=ratio(many, few, "p50_ms") if few and many else None,
        ours=many["p50_ms"] if many else None,
    )


def comparisons(queue: list[Point]) -> Iterator[Comparison]:
    """Ours beside each peer: jobs a second."""
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
