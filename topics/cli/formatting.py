"""Text output: tables, sizes, times, and escaping of control characters."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Lines of a table with headings. The first `left` columns are left-aligned, the others right-aligned."""
    all_rows = [heads, *rows]
    widths = [max(len(row[column]) for row in all_rows) for column in range(len(heads))]
    lines = []
    for row in all_rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def format_size(size: int) -> str:
    """For example 17 B, 4.0 KiB, 123 MiB."""
    scaled, unit = float(size), 0
    while scaled >= 1024 and unit + 1 < len(_UNITS):
        scaled, unit = scaled / 1024, unit + 1
    digits = 0 if unit == 0 or scaled >= 100 else 1
    return f"{scaled:.{digits}f} {_UNITS[unit]}"


def format_time(ts_ms: int) -> str:
    try:
        time = datetime.fromtimestamp(ts_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(ts_ms)
    return time.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def printable(text: str) -> str:
    """Escape unprintable characters, so that data cannot control the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)
