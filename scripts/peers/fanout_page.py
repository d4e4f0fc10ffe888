"""Section of the page about fan-out."""

from __future__ import annotations

from typing import Any

from peers import wording
from peers.compare import OURS, Point, find, ratio
from peers.fanout_aims import CLASS, server_cost
from peers.markdown import (
    ABSENT,
    Plots,
    cost_by_role,
    figure,
    generator_note,
    picture,
    rate,
    table,
    times,
    why_missing,
)
from peers.plots import Panel, Series, Value, lines, value_of

CONTENDERS = {
    ("topics", "ephemeral"): "topics",
    ("topics", "disk"): "topics, disk",
    ("redis", "ephemeral"): "Redis XREAD",
    ("nats", "ephemeral"): "NATS core",
}
COLOURS = (0, 3, 1, 2)  # the same for a system in all plots
TITLE = "One write, many watchers"


def section(results: dict[str, Any], plots: Plots) -> list[str]:
    measured = results.get("fanout", [])
    blocks = [f"## {TITLE}"]
    if not measured:
        return [*blocks, ABSENT]
    plots["fanout.svg"] = _plot(measured)
    blocks += [wording.FANOUT, picture("fanout.svg", "deliveries, latency and cost over watchers")]
    heads = _heads(results["meta"])
    for shape, cell in (("lock-step", _timed_cell), ("burst", _rate_cell)):
        rows = [row for row in measured if row["shape"] == shape]
        if rows:
            blocks += [
                f"### {wording.SHAPES[shape]}",
                wording.SHAPE_CELLS[shape],
                _rates(rows, heads, cell),
            ]
    full = generator_note(
        measured,
        lambda row: f"{CONTENDERS[row['system'], row['durability']]}, {row['shape']}, {row['watchers']:,}",
    )
    blocks += ["### What a delivery costs", wording.DELIVERY, _costs(measured, heads), full]
    return blocks + _idle(results.get("idle", []))


def _heads(meta: dict[str, Any]) -> list[str]:
    reasons = {system: why_missing(meta, system) for system, _ in CONTENDERS}
    return [f"{name} ({reasons[key[0]]})" if reasons[key[0]] else name for key, name in CONTENDERS.items()]


def _at(rows: list[Point], watchers: int) -> dict[tuple[str, str], Point | None]:
    return {(s, d): find(rows, system=s, durability=d, watchers=watchers) for s, d in CONTENDERS}


def _rates(rows: list[Point], heads: list[str], cell: Any) -> str:
    peers = [("redis", CLASS), ("nats", CLASS)]
    body = []
    for watchers in sorted({row["watchers"] for row in rows}):
        found = _at(rows, watchers)
        quotients = [_quotient(found[OURS, CLASS], found[peer]) for peer in peers]
        body.append([f"{watchers:,}", *(cell(one) if one else "–" for one in found.values()), *quotients])
    return table(["watchers", *heads, *(f"topics / {CONTENDERS[peer]}" for peer in peers)], body)


def _quotient(ours: Point | None, theirs: Point | None) -> str:
    return times(ratio(ours, theirs, "deliveries_per_s")) if ours and theirs else "–"


def _timed_cell(row: Point) -> str:
    return f"**{rate(row['deliveries_per_s'])}**<br>{figure(row['p50_ms'])} / {figure(row['p99_ms'])}"


def _rate_cell(row: Point) -> str:
    return f"**{rate(row['deliveries_per_s'])}**"


def _costs(measured: list[Point], heads: list[str]) -> str:
    body = []
    for shape in wording.SHAPES:
        rows = [row for row in measured if row["shape"] == shape]
        for watchers in sorted({row["watchers"] for row in rows}):
            cells = [_cost_cell(one) if one else "–" for one in _at(rows, watchers).values()]
            body.append([shape, f"{watchers:,}", *cells])
    return table(["shape", "watchers", *heads], body)


def _cost_cell(row: Point) -> str:
    return f"{cost_by_role(row['cpu_us_per_delivery'])}; {row['generator_share']:.0%}"


def _idle(idle: list[Point]) -> list[str]:
    blocks = []
    for row in idle:
        streams = f"{row['streams']:,} idle streams"
        if "skipped" in row:
            blocks.append(f"**{streams}** were not measured: {row['skipped']}.")
            continue
        parts = ", ".join(f"{role} {share:.2%}" for role, share in row["by_role"].items())
        blocks.append(
            f"**{streams}** of topics, each with its heartbeat, took {row['core_share']:.2%} of a core over "
            f"{row['seconds']:.0f} s ({parts})."
        )
    return ["### Idle streams", *blocks] if blocks else []


def _plot(measured: list[Point]) -> str:
    steps = [f"{count:,}" for count in sorted({row["watchers"] for row in measured})]
    timed = [row for row in measured if row["shape"] == "lock-step"]
    bursts = [row for row in measured if row["shape"] == "burst"]
    panels = [
        Panel("one record at a time", "deliveries per second (log)", _series(timed, "deliveries_per_s")),
        Panel("in bursts", "records delivered per second (log)", _series(bursts, "deliveries_per_s")),
        Panel("one record at a time", "p50 from write to seen, ms (log)", _series(timed, "p50_ms")),
        Panel("one record at a time", "server's CPU time per delivery, µs (log)", _series(timed, "")),
    ]
    return lines(TITLE, "watchers", steps, [one for one in panels if one.series], one_scale=False)


def _series(rows: list[Point], measure: str) -> list[Series]:
    """Series of a measure, or of the cost if `measure` is empty."""
    found = []
    for colour, (key, name) in zip(COLOURS, CONTENDERS.items()):
        own = [row for row in rows if (row["system"], row["durability"]) == key]
        values = {f"{row['watchers']:,}": _value(row, measure) for row in own}
        if values:
            found.append(Series(name, colour, values))
    return found


def _value(row: Point, measure: str) -> Value:
    if not measure:
        cost = server_cost(row)
        return Value(cost, cost, cost)
    return value_of(row, measure)
