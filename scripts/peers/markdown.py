"""Markdown of the benchmark page: tables, numbers, names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from peers.compare import DURABILITIES, NAMES, SYSTEMS, WORKS, Point

ABSENT = "Not part of this run."
BUSY = 0.9  # of a core

Plots = dict[str, str]  # file name → SVG


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(head)
    body = [titles, ["---"] * len(titles), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(cell(text) for text in cells)} |" for cells in body)


def cell(text: str) -> str:
    """Escape a cell: on one line, without a bar."""
    return " ".join(text.split()).replace("|", "\\|")


def rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def figure(value: float | None, unit: str = "") -> str:
    """A number with three digits, which is more precise than the measurements."""
    if value is None:
        return "–"
    text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def times(ratio: float | None) -> str:
    if ratio is None:
        return "–"
    return f"{ratio:,.0f} ×" if ratio >= 100 else f"{ratio:.1f} ×" if ratio >= 10 else f"{ratio:.2f} ×"


def percentiles(row: Point) -> str:
    return " / ".join(figure(row.get(key)) for key in ("p50_ms", "p99_ms", "p999_ms"))


def in_order(rows: Iterable[Point], key: str) -> list[Any]:
    """The distinct values of a field, in the order of the page if defined there, else of first occurrence."""
    found = dict.fromkeys(row[key] for row in rows)
    ordered = [value for value in (*WORKS, *DURABILITIES, *SYSTEMS) if value in found]
    return ordered or list(found)


def picture(name: str, text: str) -> str:
    return f"![{text}](benchmarks/{name})"


def why_missing(meta: dict[str, Any], system: str) -> str | None:
    reason = meta.get("missing", {}).get(system)
    return f"not measured: {reason}" if reason else None


def system_heads(meta: dict[str, Any]) -> list[str]:
    """Column titles, with the reason for systems that could not be measured."""
    reasons = {system: why_missing(meta, system) for system in SYSTEMS}
    return [
        f"{NAMES[system]} ({reasons[system]})" if reasons[system] else NAMES[system] for system in SYSTEMS
    ]


def cost_by_role(cpu_us: dict[str, float]) -> str:
    """CPU time of a server: the total, and by role if there are several."""
    parts = {role: used for role, used in cpu_us.items() if role != "load"}
    by_role = f" ({', '.join(f'{role} {figure(used)}' for role, used in parts.items())})" * (len(parts) > 1)
    return f"{figure(sum(parts.values()), 'µs')}{by_role}"


def generator_note(measured: list[Point], place: Callable[[Point], str]) -> str:
    """A note on the points where the load generator may have been the bottleneck."""
    if full := [place(row) for row in measured if row["generator_share"] > BUSY]:
        return f"**The generator's core was full** at: {'; '.join(full)}."
    most = max(row["generator_share"] for row in measured)
    return f"The generator took at most {most:.0%} of a core."
