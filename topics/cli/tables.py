"""Text for people: columns, sizes, times, and names that a terminal does not obey."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Lines with columns under their heads; the first `left` ones begin at the left, numbers end at the right."""
    every = [heads, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(heads))]
    found = []
    for row in every:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ]
        found.append("  ".join(cells).rstrip())
    return found


def as_bytes(size: int) -> str:
    """Like 17 B, 4.0 KiB, 123 MiB."""
    scaled, unit = float(size), 0
    while scaled >= 1024 and unit + 1 < len(_UNITS):
        scaled, unit = scaled / 1024, unit + 1
    digits = 0 if unit == 0 or scaled >= 100 else 1
    return f"{scaled:.{digits}f} {_UNITS[unit]}"


def as_time(ts_ms: int) -> str:
    try:
        time = datetime.fromtimestamp(ts_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(ts_ms)
    return time.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def safe(text: str) -> str:
    """The text as it may be printed: what is not printable becomes an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)
