"""Parsing of durations and sizes with units: 250ms, 1h30m, 64KiB, 1.5GiB."""

from __future__ import annotations

import re
from fractions import Fraction

_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
_BYTES = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BYTES |= {f"{unit}b": size for unit, size in _BYTES.items() if unit not in ("", "b")}
_BYTES |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
# 18 digits always fit into a signed 64-bit integer.
_NUMBER = r"([0-9]{1,18}(?:\.[0-9]{1,18})?)"
_PART = re.compile(_NUMBER + r"(ms|[smhdw])")
_SIZE = re.compile(_NUMBER + r" ?([a-zA-Z]*)")


def milliseconds(text: str) -> int | None:
    """Parse a duration such as 250ms, 10m or 1h30m; None if it is not a whole number of milliseconds."""
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return _whole(sum((Fraction(number) * _MS[unit] for number, unit in parts), Fraction()))


def size_bytes(text: str) -> int | None:
    """Parse a size such as 1000, 64KiB, 1.5GiB or 2GB; None if it is not a whole number of bytes."""
    match = _SIZE.fullmatch(text)
    unit = _BYTES.get(match[2].lower()) if match is not None else None
    if match is None or unit is None:
        return None
    return _whole(Fraction(match[1]) * unit)


def _whole(number: Fraction) -> int | None:
    return number.numerator if number.denominator == 1 else None
