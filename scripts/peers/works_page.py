"""Sections of the page that compare topics with its peers: the three works, latency to a reader, CPU time."""

from __future__ import annotations

from typing import Any

from peers import compare, wording
from peers.compare import NAMES, OURS, PEERS, SYSTEMS, Point, payload
from peers.markdown import (
    ABSENT,
    Plots,
    figure,
    in_order,
    percentiles,
    picture,
    rate,
    system_heads,
    table,
    times,
)
from peers.plots import Panel, Series, Span, Value, lines, spans


def work(results: dict[str, Any], name: str, plots: Plots) -> list[str]:
    points = [point for point in results.get("points", []) if point["work"] == name]
    title = wording.WORK_TITLES[name]
    if not points:
        return [f"## {title}", ABSENT]
    plots[f"{name}.svg"] = _work_plot(points, title)
    blocks = [
        f"## {title}",
        wording.WORK_REQUESTS[name],
        picture(f"{name}.svg", f"{title}: records per second over clients"),
        wording.CELLS,
    ]
    for durability in in_order(points, "durability"):
        rows = [point for point in points if point["durability"] == durability]
        blocks += [f"### {title}, {wording.DURABILITY[durability]}", _work_table(rows, results["meta"])]
    return blocks


def _work_table(points: list[Point], meta: dict[str, Any]) -> str:
    head = ["payload", "clients", *system_heads(meta), *(f"topics / {NAMES[peer]}" for peer in PEERS)]
    places = sorted({(point["payload_bytes"], point["clients"]) for point in points})
    rows = []
    for size, clients in places:
        found = {s: compare.find(points, system=s, payload_bytes=size, clients=clients) for s in SYSTEMS}
        cells = [_work_cell(found[system]) for system in SYSTEMS]
        rows.append([payload(size), str(clients), *cells, *(_ratio_cell(found, peer) for peer in PEERS)])
    return table(head, rows)


def _work_cell(point: Point | None) -> str:
    return "–" if point is None else f"**{rate(point['records_per_s'])}**<br>{percentiles(point)}"


def _ratio_cell(found: dict[str, Point | None], peer: str, measure: str = "records_per_s") -> str:
    ours, theirs = found[OURS], found[peer]
    return times(compare.ratio(ours, theirs, measure)) if ours and theirs else "–"


def _work_plot(points: list[Point], title: str) -> str:
    places = [
        (d, p) for d in in_order(points, "durability") for p in sorted({p["payload_bytes"] for p in points})
    ]
    steps = [str(clients) for clients in sorted({point["clients"] for point in points})]
    panels = []
    for durability, size in places:
        here = [p for p in points if p["durability"] == durability and p["payload_bytes"] == size]
        series = [_clients_series(here, system) for system in in_order(here, "system")]
        panels.append(Panel(f"{durability}, {payload(size)}", "records per second (log)", series))
    return lines(title, "clients", steps, panels)


def _clients_series(points: list[Point], system: str) -> Series:
    values = {
        str(p["clients"]): _over_rounds(p) for p in points if p["system"] == system and p["records_per_s"]
    }
    return Series(NAMES[system], SYSTEMS.index(system), values)


def _over_rounds(point: Point) -> Value:
    rates = [one["records_per_s"] for one in point["rounds"] if one["records_per_s"]] or [
        point["records_per_s"]
    ]
    return Value(point["records_per_s"], min(rates), max(rates))


def paced(results: dict[str, Any]) -> list[str]:
    points = [point for point in results.get("points", []) if point["work"] in compare.PACED]
    title = "## Lone requests"
    if not points:
        return [title, ABSENT]
    rows = []
    for name, durability in dict.fromkeys((point["work"], point["durability"]) for point in points):
        found = {s: compare.find(points, system=s, work=name, durability=durability) for s in SYSTEMS}
        cells = [_latency_cell(found[system]) for system in SYSTEMS]
        quotients = [_ratio_cell(found, peer, "p50_ms") for peer in PEERS]
        rows.append([wording.PACED_NAMES[name], durability, *cells, *quotients])
    head = ["request", "durability", *system_heads(results["meta"])]
    head += [f"topics / {NAMES[peer]}" for peer in PEERS]
    return [title, wording.PACED, table(head, rows)]


def _latency_cell(point: Point | None) -> str:
    if point is None:
        return "–"
    p50, p90, p99 = (figure(point[name]) for name in ("p50_ms", "p90_ms", "p99_ms"))
    return f"**{p50}** / {p90} / {p99}"


def tail(results: dict[str, Any], plots: Plots) -> list[str]:
    measured = results.get("tail", [])
    title = "## From a write to a waiting reader"
    if not measured:
        return [title, ABSENT]
    rows = []
    for durability in in_order(measured, "durability"):
        for load in in_order(measured, "load"):
            cells = [
                _tail_cell(compare.find(measured, system=s, durability=durability, load=load))
                for s in SYSTEMS
            ]
            rows.append([durability, wording.LOADS.get(load, load), *cells])
    plots["tail.svg"] = spans(
        "From a write to a waiting reader",
        "milliseconds (log)",
        ("p50", "p99", "p99.9"),
        _tail_spans(measured),
    )
    head = ["durability", "load", *system_heads(results["meta"])]
    return [title, wording.TAIL, picture("tail.svg", "latency to a waiting reader"), table(head, rows)]


def _tail_cell(row: Point | None) -> str:
    if row is None:
        return "–"
    writes = f"{rate(row['writes_per_s'])} writes/s" if row.get("writes_per_s") else "one write at a time"
    return f"**{percentiles(row)}**<br>{writes}"


def _tail_spans(tail: list[Point]) -> list[Span]:
    rows = []
    for durability in in_order(tail, "durability"):
        for load in in_order(tail, "load"):
            for system in SYSTEMS:
                row = compare.find(tail, system=system, durability=durability, load=load)
                if row and row["p50_ms"]:
                    marks = [row["p50_ms"], row["p99_ms"], row["p999_ms"]]
                    group = f"{durability}, {wording.LOADS.get(load, load)}"
                    rows.append(Span(group, NAMES[system], SYSTEMS.index(system), marks))
    return rows


def processor(results: dict[str, Any]) -> list[str]:
    """CPU time per record, at one number of clients, since it changes little with it."""
    points = [point for point in results.get("points", []) if point.get("cpu_us_per_record")]
    title = "## CPU time per record"
    if not points:
        return [title, ABSENT]
    rows = []
    for name in in_order(points, "work"):
        of_work = [point for point in points if point["work"] == name]
        clients = min({point["clients"] for point in of_work}, key=lambda count: (abs(count - 64), count))
        for durability in in_order(of_work, "durability"):
            for size in sorted({point["payload_bytes"] for point in of_work}):
                where = {"durability": durability, "payload_bytes": size, "clients": clients}
                cells = [_cpu_cell(compare.find(of_work, system=s, **where)) for s in SYSTEMS]
                rows.append([f"{name}, {durability}, {payload(size)}, {clients} clients", *cells])
    return [title, wording.PROCESSOR, table(["work", *system_heads(results["meta"])], rows)]


def _cpu_cell(point: Point | None) -> str:
    if point is None:
        return "–"
    parts = {name: value for name, value in point["cpu_us_per_record"].items() if name != "load"}
    total = figure(sum(parts.values()), "µs")
    return total if len(parts) < 2 else f"{total} ({', '.join(f'{n} {figure(v)}' for n, v in parts.items())})"
