"""Performance targets for forwarding: latency of the writer's acks, copies per second, and lag of copies."""

from __future__ import annotations

from collections.abc import Iterator

from peers import wording
from peers.aims import AimResult
from peers.compare import NAMES, OURS, PEERS, Comparison, Point, count_of, find, ratio

DESTS = (0, 1, 10, 100, 1000)
PLACEMENTS = {"same worker": True, "another worker": False}  # whether source and dest are on the same worker
FLAT = 1.2  # growth up to this factor counts as flat
MOST = 1000
FLAT_ACK = (1, 100, MOST)
KEPT = 0.95  # of the writes per second, at a fixed rate
AGAINST, COMPARED = "nats", (10, 100)
LAG_MS = 2.0


def judge(forward: list[Point], lag: list[Point]) -> list[AimResult]:
    """All aims, including those that were not measured."""
    return [
        *(_ack(forward, dests) for dests in FLAT_ACK),
        _kept(forward),
        *(_against_peer(forward, dests) for dests in COMPARED),
        _lag(lag),
    ]


def over_none(forward: list[Point], row: Point, measure: str) -> float | None:
    """A value relative to that of the same system without destinations, in the same round."""
    none = find(forward, system=row["system"], dests=0)
    return ratio(row, none, measure) if none else None


def _ack(forward: list[Point], dests: int) -> AimResult:
    row = find(forward, system=OURS, dests=dests)
    return AimResult(
        f"source with {count_of(dests, 'router')}, at a pace: p50 of an ack, in ms, over that with none",
        FLAT,
        at_most=True,
        unit="×",
        value=over_none(forward, row, "ack_p50_ms") if row else None,
        ours=row["ack_p50_ms"] if row else None,
    )


def _kept(forward: list[Point]) -> AimResult:
    row = find(forward, system=OURS, dests=MOST)
    return AimResult(
        f"source with {MOST} routers, at a pace: writes/s, over those with none",
        KEPT,
        at_most=False,
        unit="×",
        value=over_none(forward, row, "writes_per_s") if row else None,
        ours=row["writes_per_s"] if row else None,
    )


def _against_peer(forward: list[Point], dests: int) -> AimResult:
    ours, theirs = (find(forward, system=system, dests=dests) for system in (OURS, AGAINST))
    return AimResult(
        f"one source, {dests} dests: copies/s",
        1.0,
        at_most=False,
        unit="×",
        value=ratio(ours, theirs, "copies_per_s") if ours and theirs else None,
        against=AGAINST,
        called=f"{NAMES[AGAINST]}{wording.PEER_SETTING[AGAINST, 'disk']}",
        ours=ours["copies_per_s"] if ours else None,
        theirs=theirs["copies_per_s"] if theirs else None,
    )


def _lag(lag: list[Point]) -> AimResult:
    row = find(lag, placement="another worker")
    p50_ms = row["p50_ms"] if row else None
    what = "dest at another worker: p50 of what a copy adds from write to seen"
    return AimResult(what, LAG_MS, at_most=True, unit="ms", value=p50_ms, ours=p50_ms)


def comparisons(forward: list[Point]) -> Iterator[Comparison]:
    """Comparisons with each peer: copies per second."""
    for ours in forward:
        if ours["system"] != OURS or not ours["dests"]:
            continue
        for peer in PEERS:
            theirs = find(forward, system=peer, dests=ours["dests"])
            quotient = ratio(ours, theirs, "copies_per_s") if theirs else None
            if theirs and quotient is not None:
                rates = [f"{one['copies_per_s']:,.0f} copies/s" for one in (ours, theirs)]
                what = f"one source, {count_of(ours['dests'], 'dest')}"
                yield Comparison(what, peer, rates[0], rates[1], quotient)
