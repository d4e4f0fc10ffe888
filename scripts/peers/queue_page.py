"""Section of the page about queues."""

from __future__ import annotations

from typing import Any

from peers import wording
from peers.compare import NAMES, OURS, PEERS, SYSTEMS, Point, find, ratio
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

TITLE = "A queue and its workers"
WAITING_TITLE = "A claim against the jobs that wait"


def section(results: dict[str, Any], plots: Plots) -> list[str]:
    measured = results.get("queue", [])
    waiting = results.get("waiting", [])
    if not measured and not waiting:
        return [f"## {TITLE}", ABSENT]
    return [f"## {TITLE}", *_beside(measured, results["meta"], plots), *_waiting(waiting, plots)]


def _beside(measured: list[Point], meta: dict[str, Any], plots: Plots) -> list[str]:
    if not measured:
        return []
    plots["queue.svg"] = _plot(measured)
    blocks = [wording.QUEUE, picture("queue.svg", "jobs per second and p50 of a claim over workers")]
    blocks.append(wording.QUEUE_CELLS)
    for durability in in_order(measured, "durability"):
        rows = [row for row in measured if row["durability"] == durability]
        blocks += [f"### {TITLE}, {wording.DURABILITY[durability]}", _rates(rows, meta)]
    full = generator_note(
        measured, lambda row: f"{NAMES[row['system']]}, {row['durability']}, {row['workers']} workers"
    )
    return [*blocks, "### What a job costs", wording.JOB_COST, _costs(measured, meta), full]


def _at(rows: list[Point], workers: int) -> dict[str, Point | None]:
    return {system: find(rows, system=system, workers=workers) for system in SYSTEMS}


def _rates(rows: list[Point], meta: dict[str, Any]) -> str:
    body = []
    for workers in sorted({row["workers"] for row in rows}):
        found = _at(rows, workers)
        quotients = [_quotient(found[OURS], found[peer]) for peer in PEERS]
        body.append([str(workers), *(_rate_cell(one) if one else "–" for one in found.values()), *quotients])
    return table(["workers", *system_heads(meta), *(f"topics / {NAMES[peer]}" for peer in PEERS)], body)


def _quotient(ours: Point | None, theirs: Point | None) -> str:
    return times(ratio(ours, theirs, "jobs_per_s")) if ours and theirs else "–"


def _rate_cell(row: Point) -> str:
    claim, ack = (f"{figure(row[f'{call}p50_ms'])} / {figure(row[f'{call}p99_ms'])}" for call in ("", "ack_"))
    return f"**{rate(row['jobs_per_s'])}**<br>claim {claim}<br>ack {ack}"


def _costs(measured: list[Point], meta: dict[str, Any]) -> str:
    body = []
    for durability in in_order(measured, "durability"):
        rows = [row for row in measured if row["durability"] == durability]
        for workers in sorted({row["workers"] for row in rows}):
            cells = [_cost_cell(one) if one else "–" for one in _at(rows, workers).values()]
            body.append([durability, str(workers), *cells])
    return table(["durability", "workers", *system_heads(meta)], body)


def _cost_cell(row: Point) -> str:
    cost = cost_by_role(row["cpu_us_per_job"])
    return f"{cost}; {figure(row['jobs_per_claim'])}; {row['generator_share']:.0%}"


def _waiting(waiting: list[Point], plots: Plots) -> list[str]:
    if not waiting:
        return []
    ordered = sorted(waiting, key=lambda row: int(row["jobs"]))
    plots["waiting.svg"] = _waiting_plot(ordered)
    body = [
        [
            f"{row['jobs']:,}",
            *(figure(row[name]) for name in ("p50_ms", "p99_ms")),
            times(ratio(row, ordered[0], "p50_ms")),
            *(figure(row[name]) for name in ("ack_p50_ms", "ack_p99_ms")),
            times(ratio(row, ordered[0], "ack_p50_ms")),
        ]
        for row in ordered
    ]
    of_smallest = "p50, of the smallest"
    head = ("waiting jobs", "claim, p50 ms", "p99 ms", of_smallest, "ack, p50 ms", "p99 ms", of_smallest)
    shown = picture("waiting.svg", "latency of claim and ack over waiting jobs")
    return [f"### {WAITING_TITLE}", wording.WAITING, shown, table(head, body)]


def _plot(measured: list[Point]) -> str:
    steps = [str(count) for count in sorted({row["workers"] for row in measured})]
    panels = []
    for measure, label in (("jobs_per_s", "jobs per second (log)"), ("p50_ms", "p50 of a claim, ms (log)")):
        for durability in in_order(measured, "durability"):
            rows = [row for row in measured if row["durability"] == durability]
            panels.append(Panel(durability, label, _series(rows, measure)))
    # A common scale per row makes sense only if a row shows one measure.
    return lines(TITLE, "workers", steps, panels, one_scale=len(panels) > 2)


def _series(rows: list[Point], measure: str) -> list[Series]:
    return [
        Series(
            NAMES[system],
            SYSTEMS.index(system),
            {str(row["workers"]): value_of(row, measure) for row in rows if row["system"] == system},
        )
        for system in in_order(rows, "system")
    ]


def _waiting_plot(waiting: list[Point]) -> str:
    steps = [f"{row['jobs']:,}" for row in waiting]
    panels = [
        Panel(
            call,
            "milliseconds (log)",
            [
                Series(name, i, {f"{row['jobs']:,}": value_of(row, f"{prefix}{name}_ms") for row in waiting})
                for i, name in enumerate(("p50", "p99"))
            ],
        )
        for call, prefix in (("claim", ""), ("ack", "ack_"))
    ]
    return lines(WAITING_TITLE, "waiting jobs", steps, panels)
