"""Section of the page about forwarding."""

from __future__ import annotations

from collections.abc import Callable
from operator import add
from typing import Any

from peers import wording
from peers.compare import NAMES, OURS, PEERS, SYSTEMS, Point, count_of, find, ratio
from peers.forward_aims import over_none
from peers.markdown import (
    ABSENT,
    Plots,
    cost_by_role,
    figure,
    generator_note,
    in_order,
    picture,
    rate,
    system_heads,
    table,
    times,
)
from peers.plots import Panel, Series, lines, value_of

TITLE = "One source and its copies"
LAG_TITLE = "Latency of a copy"
Cell = Callable[[Point], str]


def section(results: dict[str, Any], plots: Plots) -> list[str]:
    measured = results.get("forward", [])
    lag = results.get("lag", [])
    if not measured and not lag:
        return [f"## {TITLE}", ABSENT]
    return [f"## {TITLE}", *_copies(measured, results["meta"], plots), *_lag(lag)]


def _copies(measured: list[Point], meta: dict[str, Any], plots: Plots) -> list[str]:
    if not measured:
        return []
    plots["forward.svg"] = _plot(measured)
    heads = ["dests", *system_heads(meta)]
    copied = [row for row in measured if row["dests"]]
    blocks = [
        wording.FORWARD,
        picture("forward.svg", "copies per second and p50 of an ack over dests"),
        "### Latency of the writer's acks",
        wording.FORWARD_ACKS,
        table(heads, _rows(measured, lambda row: _ack_cell(measured, row))),
    ]
    if not copied:
        return blocks
    cells = _rows(copied, lambda row: _copy_cell(measured, row))
    ratios = [_quotients(copied, dests) for dests in _dests(copied)]
    return [
        *blocks,
        "### Copies per second",
        wording.FORWARD_COPIES,
        table([*heads, *(f"topics / {NAMES[peer]}" for peer in PEERS)], map(add, cells, ratios)),
        "### What a copy costs",
        wording.FORWARD_COST,
        table(heads, _rows(copied, _cost_cell)),
        generator_note(copied, lambda row: f"{NAMES[row['system']]}, {count_of(row['dests'], 'dest')}"),
    ]


def _rows(rows: list[Point], cell: Cell) -> list[list[str]]:
    """A row per number of destinations, with a cell per system."""
    body = []
    for dests in _dests(rows):
        found = [find(rows, system=system, dests=dests) for system in SYSTEMS]
        body.append([f"{dests:,}", *(cell(one) if one else "–" for one in found)])
    return body


def _dests(rows: list[Point]) -> list[int]:
    return sorted({row["dests"] for row in rows})


def _quotients(rows: list[Point], dests: int) -> list[str]:
    ours = find(rows, system=OURS, dests=dests)
    found = [find(rows, system=peer, dests=dests) for peer in PEERS]
    return [times(ratio(ours, one, "copies_per_s")) if ours and one else "–" for one in found]


def _ack_cell(measured: list[Point], row: Point) -> str:
    timed = f"**{figure(row['ack_p50_ms'])} / {figure(row['ack_p99_ms'])}**"
    return f"{timed}<br>{times(over_none(measured, row, 'ack_p50_ms'))}; {figure(row['writes_per_s'])}/s"


def _copy_cell(measured: list[Point], row: Point) -> str:
    written = f"{rate(row['records_per_s'])} written/s, {times(over_none(measured, row, 'records_per_s'))}"
    return f"**{rate(row['copies_per_s'])}**<br>{written}"


def _cost_cell(row: Point) -> str:
    return f"{cost_by_role(row['cpu_us_per_copy'])}; {row['generator_share']:.0%}"


def _plot(measured: list[Point]) -> str:
    steps = [f"{count:,}" for count in _dests(measured)]
    copied = [row for row in measured if row["dests"]]
    panels = [
        Panel("at full speed", "copies per second (log)", _series(copied, "copies_per_s")),
        Panel("50 writes per second", "p50 of an ack, ms (log)", _series(measured, "ack_p50_ms")),
    ]
    return lines(TITLE, "dests", steps, [one for one in panels if one.series], one_scale=False)


def _series(rows: list[Point], measure: str) -> list[Series]:
    return [
        Series(
            NAMES[system],
            SYSTEMS.index(system),
            {f"{row['dests']:,}": value_of(row, measure) for row in rows if row["system"] == system},
        )
        for system in in_order(rows, "system")
    ]


def _lag(lag: list[Point]) -> list[str]:
    if not lag:
        return []
    body = [
        [
            f"dest at {'the ' if row['placement'].startswith('same') else ''}{row['placement']}",
            *(
                f"{figure(row[f'{prefix}p50_ms'])} / {figure(row[f'{prefix}p99_ms'])}"
                for prefix in ("source_", "dest_")
            ),
            f"**{figure(row['p50_ms'])} / {figure(row['p99_ms'])}**",
        ]
        for row in lag
    ]
    head = (
        "",
        "write to watcher of the source, p50 / p99",
        "write to watcher of the dest",
        "added by the copy",
    )
    return [f"### {LAG_TITLE}", wording.LAG, table(head, body)]
