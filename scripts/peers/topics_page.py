"""Sections of the page about topics alone (shards, backlog, stages) and about the load generator."""

from __future__ import annotations

from statistics import median
from typing import Any

from peers import wording
from peers.compare import DURABILITIES, NAMES, Point, count_of, find, payload, place
from peers.markdown import ABSENT, Plots, figure, in_order, picture, rate, table, times
from peers.plots import Panel, Series, Span, Value, lines, spans

ENOUGH_HEADROOM = 1.5
BUSY_CORE = 0.9


def scaling(results: dict[str, Any], plots: Plots) -> list[str]:
    measured = results.get("scaling", [])
    title = "## Shards"
    if not measured:
        return [title, ABSENT]
    rows = []
    for work in in_order(measured, "work"):
        of_work = sorted((row for row in measured if row["work"] == work), key=lambda row: row["shards"])
        for row in of_work:
            gain = row["records_per_s"] / of_work[0]["records_per_s"]
            cpu = row["cpu_us_per_record"]
            costs = (cpu.get("front"), cpu.get("shard"), _server_cpu(row))
            cells = (rate(row["records_per_s"]), times(gain), *(figure(cost) for cost in costs))
            rows.append([wording.WORK_NAMES.get(work, work), str(row["shards"]), *cells])
    plots["scaling.svg"] = _scaling_plot(measured)
    head = (
        "work",
        "shards",
        "records/s",
        "of one shard",
        "front, µs per record",
        "workers, µs per record",
        "together",
    )
    about = wording.SCALING.format(cores=results["meta"]["cores"])
    return [
        title,
        about,
        picture("scaling.svg", "throughput and CPU time over shards"),
        table(head, rows),
    ]


def _server_cpu(row: Point) -> float:
    return float(sum(value for name, value in row["cpu_us_per_record"].items() if name != "load"))


def _scaling_plot(scaling: list[Point]) -> str:
    works = in_order(scaling, "work")
    steps = [str(shards) for shards in sorted({row["shards"] for row in scaling})]
    rates, costs = [], []
    for i, work in enumerate(works):
        of_work = [row for row in scaling if row["work"] == work]
        rates.append(Series(work, i, {str(row["shards"]): _exactly(row["records_per_s"]) for row in of_work}))
        costs.append(Series(work, i, {str(row["shards"]): _exactly(_server_cpu(row)) for row in of_work}))
    panels = [
        Panel("throughput", "records per second (log)", rates),
        Panel("CPU time, front and workers", "µs per record (log)", costs),
    ]
    return lines("Shards of one server", "shards", steps, panels, one_scale=False)


def _exactly(value: float) -> Value:
    return Value(value, value, value)


def backlog(results: dict[str, Any], plots: Plots) -> list[str]:
    measured = sorted(results.get("backlog", []), key=lambda row: row["records"])
    title = "## Cost against the backlog"
    if not measured:
        return [title, ABSENT]
    rows = []
    for work in in_order(measured, "work"):
        of_work = [row for row in measured if row["work"] == work]
        for row in of_work:
            growth = row["p50_ms"] / of_work[0]["p50_ms"]
            latency = (figure(row["p50_ms"]), figure(row["p99_ms"]), times(growth))
            rows.append([work, f"{row['records']:,}", rate(row["per_s"]), *latency])
    plots["backlog.svg"] = _backlog_plot(measured)
    head = ("work", "records in the topic", "requests/s", "p50 ms", "p99 ms", "p50, of the smallest")
    return [
        title,
        wording.BACKLOG,
        picture("backlog.svg", "latency over the size of the topic"),
        table(head, rows),
    ]


def _backlog_plot(backlog: list[Point]) -> str:
    steps = list(dict.fromkeys(f"{row['records']:,}" for row in backlog))
    panels = []
    for work in in_order(backlog, "work"):
        of_work = [row for row in backlog if row["work"] == work]
        series = [
            Series(name, i, {f"{row['records']:,}": _exactly(row[key]) for row in of_work})
            for i, (name, key) in enumerate((("p50", "p50_ms"), ("p99", "p99_ms")))
        ]
        panels.append(Panel(work, "milliseconds (log)", series))
    return lines("Cost against the backlog", "records in the topic", steps, panels)


def stages(results: dict[str, Any], plots: Plots) -> list[str]:
    measured = results.get("stages", [])
    title = "Where the time of a write goes"
    if not measured:
        return [f"## {title}", ABSENT]
    blocks = [f"## {title}", wording.STAGES]
    for durability in in_order(measured, "durability"):
        rows = [row for row in measured if row["durability"] == durability]
        blocks.append(f"### {title}, {wording.DURABILITY[durability]}")
        if marks := _stage_spans(rows):
            name = f"stages-{durability}.svg"
            plots[name] = spans(f"{title}, {durability}", "microseconds (log)", ("p50", "p99"), marks)
            blocks.append(picture(name, f"time of each stage of a write, {durability}"))
        blocks.append(_stage_table(rows))
    return blocks


def _stage_table(rows: list[Point]) -> str:
    loads = in_order(rows, "load")
    head = ("stage", *(f"{wording.LOADS.get(load, load)}, p50 / p99 µs" for load in loads), "budget", "")
    body = []
    for stage in in_order(rows, "stage"):
        found = [find(rows, stage=stage, load=load) for load in loads]
        times_us = [f"{figure(one['p50_us'])} / {figure(one['p99_us'])}" if one else "–" for one in found]
        known = next(one for one in found if one)
        notes = dict.fromkeys(one["note"] for one in found if one and one.get("note"))
        body.append([stage, *times_us, _budget(known.get("seed_budget")), "<br>".join(notes)])
    return table(head, body)


def _stage_spans(rows: list[Point]) -> list[Span]:
    """Only whole stages; their parts are in the table."""
    return [
        Span(wording.LOADS.get(load, load), row["stage"], i, [row["p50_us"], row["p99_us"]])
        for i, load in enumerate(in_order(rows, "load"))
        for row in rows
        if row["load"] == load and "/" not in row["stage"] and row["p50_us"] and row["p99_us"]
    ]


def _budget(value: Any) -> str:
    return figure(value, "µs") if isinstance(value, int | float) else value or "–"


def generator(results: dict[str, Any]) -> list[str]:
    null, points = results.get("null", []), results.get("points", [])
    title = "## The load generator against a null server"
    if not null:
        return [title, ABSENT]
    rows, tight = [], []
    for row in null:
        fastest = _fastest(points, row)
        headroom = row["records_per_s"] / fastest["records_per_s"] if fastest else None
        clients = count_of(row["clients"], "client")
        where = f"{row['protocol']}, {row['work']}, {payload(row['payload_bytes'])}, {clients}"
        if headroom is not None and headroom < ENOUGH_HEADROOM:
            tight.append(f"{where} ({times(headroom)})")
        rows.append([where, *_null_cells(row, fastest), times(headroom)])
    head = ("work", "null server, records/s", "generator, µs per request", "fastest measured", "headroom")
    return [title, wording.GENERATOR, _limit_words(tight, _busy(points)), table(head, rows)]


def _null_cells(row: Point, fastest: Point | None) -> list[str]:
    measured = f"{rate(fastest['records_per_s'])}, {fastest['durability']}" if fastest else "–"
    return [rate(row["records_per_s"]), figure(row.get("load_cpu_us_per_request")), measured]


def _fastest(points: list[Point], null: Point) -> Point | None:
    """The same requests to the real system, at its faster durability."""
    where = {"system": wording.PROTOCOL_SYSTEM[null["protocol"]]}
    where |= {key: null[key] for key in ("work", "clients", "payload_bytes")}
    found = [
        one for d in DURABILITIES if (one := find(points, durability=d, **where)) and one["records_per_s"]
    ]
    return max(found, key=lambda point: float(point["records_per_s"]), default=None)


def _busy(points: list[Point]) -> list[str]:
    shares = ((point, _core_in_use(point)) for point in points)
    return [f"{NAMES[p['system']]}, {place(p)} ({share:.0%})" for p, share in shares if share > BUSY_CORE]


def _core_in_use(point: Point) -> float:
    shares = [r["cpu_s"]["load"] / r["seconds"] for r in point["rounds"] if "load" in r.get("cpu_s", {})]
    return median(shares) if shares else 0.0


def _limit_words(tight: list[str], busy: list[str]) -> str:
    """A note on the points where the generator may have been the bottleneck."""
    if not tight and not busy:
        return "At no point of this run was the generator near its limit."
    words = []
    if tight:
        words.append(f"**Little headroom**, so that the system may be faster than shown: {'; '.join(tight)}.")
    if busy:
        words.append(f"**The generator's core was full** at: {'; '.join(busy)}.")
    return " ".join(words)
