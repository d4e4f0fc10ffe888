"""Performance targets for fan-out: ratios to NATS core, and bounds for topics alone."""

from __future__ import annotations

from collections.abc import Iterator

from peers.aims import AimResult
from peers.compare import NAMES, OURS, Comparison, Point, find, ratio

MOST_WATCHERS = 1000
IDLE_STREAMS = 10_000
SEEN_P50_MS = 0.3
FLAT_FROM = 10
FLAT = 1.2  # growth up to this factor, with a hundred times the watchers, counts as flat
CLASS = "ephemeral"  # in memory only, like the peers

# Names of the peers in this section: NATS is used without JetStream.
AGAINST = {"redis": "redis", "nats": "nats-core"}


def judge(fanout: list[Point], idle: list[Point]) -> list[AimResult]:
    """All aims, including those that were not measured."""
    most = f"{MOST_WATCHERS} watchers"
    return [
        _against_nats(fanout, "lock-step", 1.0, f"{most}, one record at a time: deliveries/s"),
        _against_nats(fanout, "burst", 0.5, f"{most}, in bursts: records delivered/s"),
        _latency(fanout),
        _growth(fanout),
        _idle(idle),
    ]


def _against_nats(fanout: list[Point], shape: str, bound: float, what: str) -> AimResult:
    where = {"shape": shape, "watchers": MOST_WATCHERS, "durability": CLASS}
    ours, theirs = find(fanout, system=OURS, **where), find(fanout, system="nats", **where)
    return AimResult(
        what,
        bound,
        at_most=False,
        unit="×",
        value=ratio(ours, theirs, "deliveries_per_s") if ours and theirs else None,
        against="nats",
        called=NAMES["nats-core"],
        ours=ours["deliveries_per_s"] if ours else None,
        theirs=theirs["deliveries_per_s"] if theirs else None,
    )


def _latency(fanout: list[Point]) -> AimResult:
    row = find(fanout, system=OURS, shape="lock-step", watchers=1, durability=CLASS)
    p50_ms = row["p50_ms"] if row else None
    return AimResult(
        "1 watcher: p50 from write to seen", SEEN_P50_MS, at_most=True, unit="ms", value=p50_ms, ours=p50_ms
    )


def _growth(fanout: list[Point]) -> AimResult:
    few, many = (
        find(fanout, system=OURS, shape="lock-step", watchers=count, durability=CLASS)
        for count in (FLAT_FROM, MOST_WATCHERS)
    )
    growth = server_cost(many) / server_cost(few) if few and many else None
    what = f"processor time a delivery at {MOST_WATCHERS} watchers, in µs, over that at {FLAT_FROM}"
    return AimResult(
        what,
        FLAT,
        at_most=True,
        unit="×",
        value=growth,
        ours=server_cost(many) if many else None,
    )


def _idle(idle: list[Point]) -> AimResult:
    row = next((row for row in idle if "core_share" in row and row["streams"] >= IDLE_STREAMS), None)
    share = row["core_share"] * 100 if row else None
    what = f"{IDLE_STREAMS:,} idle streams: share of a core"
    return AimResult(what, 2.0, at_most=True, unit="%", value=share, ours=share)


def server_cost(row: Point) -> float:
    """CPU time of all processes of the server per delivery, in microseconds."""
    return float(sum(used for role, used in row["cpu_us_per_delivery"].items() if role != "load"))


def comparisons(fanout: list[Point]) -> Iterator[Comparison]:
    """Comparisons with each peer: deliveries per second, and p50 if it was measured."""
    for ours in fanout:
        if ours["system"] != OURS or ours["durability"] != CLASS:
            continue
        where = {key: ours[key] for key in ("shape", "watchers", "durability")}
        what = f"fan-out, {ours['shape']}, {ours['watchers']} watcher{'s' * (ours['watchers'] > 1)}"
        for peer, name in AGAINST.items():
            theirs = find(fanout, system=peer, **where)
            quotient = ratio(ours, theirs, "deliveries_per_s") if theirs else None
            if not theirs or quotient is None:
                continue
            rates = [f"{one['deliveries_per_s']:,.0f} deliveries/s" for one in (ours, theirs)]
            yield Comparison(what, name, rates[0], rates[1], quotient)
            if slower := ratio(ours, theirs, "p50_ms"):
                times = [f"{one['p50_ms']:.2f} ms" for one in (ours, theirs)]
                yield Comparison(f"{what}: p50", name, times[0], times[1], 1 / slower)
