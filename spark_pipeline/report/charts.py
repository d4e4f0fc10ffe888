"""Charts as inline SVG. Colours come from the page's style sheet, with a dark mode; bars have tooltips with their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from spark_pipeline.tasks.statistics import HOUR_MS

WIDTH = 400
HEIGHT = 150
BARS_MAX = 120
_LEFT, _TOP, _BOTTOM = 4, 18, 18

Pairs = Sequence[tuple[str, float]]


def columns(pairs: Pairs, show: Callable[[float], str], label: str) -> str:
    """Vertical bars. The first and last bars and the highest value are labelled."""
    if not pairs:
        return '<p class="none">nothing to show</p>'
    most = max(value for _, value in pairs) or 1.0
    step = (WIDTH - 2 * _LEFT) / len(pairs)
    room = HEIGHT - _TOP - _BOTTOM
    bars = []
    for number, (name, value) in enumerate(pairs):
        high = room * value / most
        bars.append(
            f'<rect x="{_LEFT + number * step:.2f}" y="{_TOP + room - high:.2f}" width="{max(step - 1, step * 0.7):.2f}"'
            f' height="{high:.2f}"><title>{escape(name)}: {escape(show(value))}</title></rect>'
        )
    base = HEIGHT - _BOTTOM
    last = f'<text x="{WIDTH - _LEFT}" y="{HEIGHT - 4}" text-anchor="end">{escape(pairs[-1][0])}</text>'
    return (
        _svg(HEIGHT, label)
        + f'<line x1="0" x2="{WIDTH}" y1="{_TOP}" y2="{_TOP}" class="grid"/><line x1="0" x2="{WIDTH}" y1="{base}" y2="{base}" class="grid"/>'
        + f'<g class="bars">{"".join(bars)}</g>'
        + f'<text x="{_LEFT}" y="{_TOP - 5}">{escape(show(most))}</text>'
        + f'<text x="{_LEFT}" y="{HEIGHT - 4}">{escape(pairs[0][0])}</text>'
        + (last if len(pairs) > 1 else "")
        + "</svg>"
    )


def ranking(pairs: Pairs, show: Callable[[float], str], label: str) -> str:
    """Horizontal bars with labels."""
    if not pairs:
        return '<p class="none">nothing to show</p>'
    most = max(value for _, value in pairs) or 1.0
    line = 26
    found = []
    for number, (name, value) in enumerate(pairs):
        y = number * line
        found.append(
            f'<text x="0" y="{y + 12}">{escape(_short(name, 44))}<title>{escape(name)}</title></text>'
            f'<text x="{WIDTH}" y="{y + 12}" text-anchor="end">{escape(show(value))}</text>'
            f'<rect class="back" x="0" y="{y + 16}" width="{WIDTH}" height="5" rx="2"/>'
            f'<rect x="0" y="{y + 16}" width="{WIDTH * value / most:.2f}" height="5" rx="2"/>'
        )
    return _svg(line * len(pairs), label) + f'<g class="bars">{"".join(found)}</g></svg>'


def shares(parts: Sequence[tuple[str, float, str]], show: Callable[[float], str], label: str) -> str:
    """A stacked bar of (name, value, CSS class) with a legend."""
    total = sum(value for _, value, _ in parts)
    if not total:
        return '<p class="none">nothing to show</p>'
    x = 0.0
    bars, names = [], []
    for number, (name, value, kind) in enumerate(parts):
        wide = WIDTH * value / total
        text = f"{name}: {show(value)}, {_percent(value / total)}"
        bars.append(
            f'<rect class="{kind}" x="{x:.2f}" y="0" width="{wide:.2f}" height="22"><title>{escape(text)}</title></rect>'
        )
        y = 42 + 18 * number
        names.append(
            f'<rect class="{kind}" x="0" y="{y - 10}" width="10" height="10" rx="2"/><text x="16" y="{y}">{escape(text)}</text>'
        )
        x += wide
    return _svg(34 + 18 * len(parts), label) + "".join(bars) + "".join(names) + "</svg>"


def over_time(hours: Mapping[int, float]) -> list[tuple[str, float]]:
    """Bars for values by hour since the epoch, grouped into longer intervals if there are more than BARS_MAX."""
    if not hours:
        return []
    first, last = min(hours), max(hours)
    step = next(step for step in _steps() if (last // step - first // step) < BARS_MAX)
    found = dict.fromkeys(range(first // step, last // step + 1), 0.0)
    for hour, value in hours.items():
        found[hour // step] += value
    shape = "%d %b %H:00" if step < 24 else "%d %b %Y"
    return [
        (datetime.fromtimestamp(bar * step * HOUR_MS / 1000, UTC).strftime(shape), value)
        for bar, value in found.items()
    ]


def _steps() -> Sequence[int]:
    return [1, 2, 3, 6, 12, *(24 * 2**power for power in range(24))]


def _svg(height: float, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label, quote=True)}">'


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
