"""Plots as small SVG files: every value is one element on one line, so that changes show in a diff.

There are two kinds: `lines` (a value over steps such as clients, in adjacent panels) and `spans` (p50, p99 and p99.9 of
each row on one axis). Colours are the Okabe-Ito palette, which colour-blind readers can distinguish; each series also has
a marker and a label. Plots have their own background, so that text stays readable on dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

WIDTH = 760
GAP = 16
TITLE_HEIGHT = 34
PANEL_HEIGHT = 250
ROW_HEIGHT = 20
TICKS_MAX = 9
LABEL_GAP = 13  # minimum distance of labels with 11 px

STYLE = """\
text { font: 11px system-ui, "DejaVu Sans", sans-serif; fill: #24292f }
.title { font-size: 14px; font-weight: 600 }
.head { font-size: 12px; font-weight: 600 }
.page { fill: #ffffff }
.grid { stroke: #d8dee4 }
.faint { fill: #57606a }
.line { fill: none; stroke-width: 2 }
.range { stroke-width: 1; opacity: .6 }
.s0 { stroke: #0072b2 } .f0 { fill: #0072b2 }
.s1 { stroke: #d55e00 } .f1 { fill: #d55e00 }
.s2 { stroke: #00805e } .f2 { fill: #00805e }
.s3 { stroke: #a8508a } .f3 { fill: #a8508a }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.page { fill: #0d1117 }
.grid { stroke: #30363d }
.faint { fill: #9da7b1 }
.s0 { stroke: #56b4e9 } .f0 { fill: #56b4e9 }
.s1 { stroke: #e69f00 } .f1 { fill: #e69f00 }
.s2 { stroke: #2fc59a } .f2 { fill: #2fc59a }
.s3 { stroke: #cc79a7 } .f3 { fill: #cc79a7 }
}"""
COLOURS = 4


@dataclass(frozen=True, slots=True)
class Value:
    """A value with the minimum and maximum of its rounds."""

    middle: float
    low: float
    high: float


def value_of(row: dict[str, Any], measure: str) -> Value:
    """A value of a row of the results, with the range of its rounds."""
    rounds = [one[measure] for one in row["rounds"]]
    return Value(row[measure], min(rounds), max(rounds))


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    colour: int
    values: dict[str, Value]  # by step


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    y_label: str
    series: list[Series]


@dataclass(frozen=True, slots=True)
class Span:
    """One row of `spans`: percentiles in ascending order."""

    group: str
    name: str
    colour: int
    marks: list[float]


@dataclass(slots=True)
class Axis:
    """A logarithmic axis over all values, extended to round numbers; `start` and `end` are in pixels."""

    values: Iterable[float]
    start: float
    end: float
    ticks: list[float] = field(init=False)

    def __post_init__(self) -> None:
        values = [value for value in self.values if value > 0] or [1.0]
        self.ticks = log_ticks(min(values), max(values))

    def at(self, value: float) -> float:
        low, high = math.log10(self.ticks[0]), math.log10(self.ticks[-1])
        share = (math.log10(max(value, self.ticks[0])) - low) / (high - low)
        return self.start + share * (self.end - self.start)


def log_ticks(low: float, high: float) -> list[float]:
    """Ticks at 1, 2 and 5 of each decade if these are not too many, else at decades; both ends enclose the values."""
    fine = _ticks_around(low, high, (1, 2, 5))
    ticks = fine if len(fine) <= TICKS_MAX else _ticks_around(low, high, (1,))
    # A single value that is a tick gives only one tick, but an axis needs two.
    return ticks if len(ticks) > 1 else [low / 2, low, low * 2]


def _ticks_around(low: float, high: float, digits: Sequence[int]) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in digits]
    first = max((i for i, tick in enumerate(ticks) if tick <= low), default=0)
    last = min((i for i, tick in enumerate(ticks) if tick >= high), default=len(ticks) - 1)
    return ticks[first : last + 1]


def short(value: float) -> str:
    """1500 → 1.5k: a short label for a tick."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def lines(
    title: str,
    x_label: str,
    steps: Sequence[str],
    panels: Sequence[Panel],
    *,
    one_scale: bool = True,
) -> str:
    """Panels, two per row. Those of one row share a scale, unless `one_scale` is false because their units differ."""
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    width = (WIDTH - GAP * (columns + 1)) / columns
    parts: list[str] = []
    for i, panel in enumerate(panels):
        left = GAP + (i % columns) * (width + GAP)
        top = TITLE_HEIGHT + (i // columns) * PANEL_HEIGHT
        row = panels[i - i % columns :][:columns] if one_scale else [panel]
        parts += _line_panel(panel, steps, extremes(row), x_label, (left, top, width))
    return _svg(title, TITLE_HEIGHT + rows * PANEL_HEIGHT, parts)


def extremes(panels: Sequence[Panel]) -> list[float]:
    values = [value for panel in panels for one in panel.series for value in one.values.values()]
    return [end for value in values for end in (value.low, value.high)]


def _line_panel(
    panel: Panel,
    steps: Sequence[str],
    values: list[float],
    x_label: str,
    box: tuple[float, float, float],
) -> list[str]:
    left, top, width = box
    longest = max((len(one.name) for one in panel.series), default=0) + 5
    first, last = left + 44, left + width - 10 - 6.4 * longest  # room for tick labels and direct labels
    axis = Axis(values, top + PANEL_HEIGHT - 46, top + 38)
    parts = [_text(left, top + 12, panel.title, "head"), _text(left, top + 27, panel.y_label, "faint")]
    for tick in axis.ticks:
        y = axis.at(tick)
        parts.append(_line(first - 8, y, last + 8, y, "grid"))
        parts.append(_text(first - 12, y + 4, short(tick), "faint", "end"))
    at = {step: first + i * (last - first) / max(1, len(steps) - 1) for i, step in enumerate(steps)}
    parts += [_text(x, axis.start + 17, step, "faint", "middle") for step, x in at.items()]
    parts.append(_text((first + last) / 2, axis.start + 33, x_label, "faint", "middle"))
    for one in panel.series:
        parts += _series(one, at, axis)
    return parts + _direct_labels(panel.series, at, axis)


def _series(one: Series, at: dict[str, float], axis: Axis) -> list[str]:
    colour = one.colour % COLOURS
    known = [(at[step], one.values[step]) for step in at if step in one.values]
    path = " ".join(f"{_px(x)},{_px(axis.at(value.middle))}" for x, value in known)
    parts = [f'<polyline class="line s{colour}" points="{path}"/>']
    for x, value in known:
        parts.append(_line(x, axis.at(value.low), x, axis.at(value.high), f"range s{colour}"))
        parts.append(_marker(x, axis.at(value.middle), colour, f"{one.name}: {value.middle:,.3f}"))
    return parts


def _direct_labels(series: Sequence[Series], at: dict[str, float], axis: Axis) -> list[str]:
    """Labels at the end of each line, moved apart where they would overlap."""
    ends: list[tuple[float, str, int]] = []
    for one in series:
        known = [one.values[step].middle for step in at if step in one.values]
        if known:
            ends.append((axis.at(known[-1]), f"{one.name} {short(known[-1])}", one.colour % COLOURS))
    ends.sort()
    ys = spread([y for y, _, _ in ends])
    right = max(at.values()) + 10
    return [_text(right, y + 4, text, f"f{colour}") for y, (_, text, colour) in zip(ys, ends)]


def spread(rising: Sequence[float]) -> list[float]:
    """The positions with at least LABEL_GAP between neighbours; each cluster keeps its centre."""
    clusters: list[list[float]] = []
    for position in rising:
        clusters.append([position])
        while len(clusters) > 1 and _end(clusters[-2]) + LABEL_GAP > _start(clusters[-1]):
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    return [_start(cluster) + i * LABEL_GAP for cluster in clusters for i in range(len(cluster))]


def _start(cluster: list[float]) -> float:
    return sum(cluster) / len(cluster) - (len(cluster) - 1) * LABEL_GAP / 2


def _end(cluster: list[float]) -> float:
    return _start(cluster) + (len(cluster) - 1) * LABEL_GAP


def spans(title: str, x_label: str, names: Sequence[str], rows: Sequence[Span]) -> str:
    """A row per span: a line from its first to its last mark, with shrinking marks; `names` labels the marks."""
    longest = max(max(len(row.name), len(row.group)) for row in rows)
    axis = Axis([mark for row in rows for mark in row.marks], GAP + 6.6 * longest + 24, WIDTH - 78)
    marks: list[str] = []
    y = TITLE_HEIGHT + 20.0
    top, group = y, ""
    for row in rows:
        if row.group != group:
            y += 28 if group else 14
            marks.append(_text(GAP, y, row.group, "head"))
            group = row.group
        y += ROW_HEIGHT
        marks += _span(row, axis, y)
    bottom = y + 14
    grid = []
    for tick in axis.ticks:
        grid.append(_line(axis.at(tick), top, axis.at(tick), bottom, "grid"))
        grid.append(_text(axis.at(tick), bottom + 15, short(tick), "faint", "middle"))
    marks.append(_text((axis.start + axis.end) / 2, bottom + 32, x_label, "faint", "middle"))
    marks.append(_text(axis.start, TITLE_HEIGHT + 12, f"large to small mark: {', '.join(names)}", "faint"))
    return _svg(title, bottom + 44, [*grid, *marks])


def _span(row: Span, axis: Axis, y: float) -> list[str]:
    colour = row.colour % COLOURS
    parts = [_text(axis.start - 14, y + 4, row.name, f"f{colour}", "end")]
    parts.append(_line(axis.at(row.marks[0]), y, axis.at(row.marks[-1]), y, f"line s{colour}"))
    for i, mark in enumerate(row.marks):
        parts.append(
            f'<circle class="f{colour}" cx="{_px(axis.at(mark))}" cy="{_px(y)}" r="{max(2, 5 - 1.5 * i):g}"/>'
        )
    ends = " / ".join(short(mark) for mark in (row.marks[0], row.marks[-1]))
    parts.append(_text(axis.at(row.marks[-1]) + 9, y + 4, ends, "faint"))
    return parts


def _marker(x: float, y: float, colour: int, title: str) -> str:
    """Octagon, square, triangle or diamond, in addition to the colour."""
    shapes = (
        [(-4.0, -1.5), (-1.5, -4), (1.5, -4), (4, -1.5), (4, 1.5), (1.5, 4), (-1.5, 4), (-4, 1.5)],
        [(-3.5, -3.5), (3.5, -3.5), (3.5, 3.5), (-3.5, 3.5)],
        [(0.0, -5.0), (4.5, 3.5), (-4.5, 3.5)],
        [(0.0, -5.0), (5, 0), (0, 5), (-5, 0)],
    )
    path = " ".join(f"{_px(x + dx)},{_px(y + dy)}" for dx, dy in shapes[colour])
    return f'<polygon class="f{colour}" points="{path}"><title>{escape(title)}</title></polygon>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_px(height)}" width="{WIDTH}" height="{_px(height)}" role="img">'
    page = f'<rect class="page" width="{WIDTH}" height="{_px(height)}" rx="6"/>'
    body = [head, f"<title>{escape(title)}</title>", f"<style>\n{STYLE}\n</style>", page]
    return "\n".join([*body, _text(GAP, 21, title, "title"), *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{kind}" x="{_px(x)}" y="{_px(y)}"{placed}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{_px(x1)}" y1="{_px(y1)}" x2="{_px(x2)}" y2="{_px(y2)}"/>'


def _px(value: float) -> str:
    """Rounded to half a pixel, to keep the file small."""
    return f"{round(value * 2) / 2:g}"
