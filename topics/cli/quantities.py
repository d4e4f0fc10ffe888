"""Durations, sizes, moments and settings as people write them."""

from __future__ import annotations

import datetime
import re
from typing import Any

import click
import msgspec

_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
_BYTES = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BYTES |= {f"{unit}b": size for unit, size in _BYTES.items() if unit not in ("", "b")}
_BYTES |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([a-zA-Z]*)")
U64_MAX = (1 << 64) - 1


def milliseconds(text: str) -> int | None:
    """Of 250ms, 10m, 1h30m; None when it is no duration."""
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return round(sum(float(number) * _MS[unit] for number, unit in parts))


# Types of options. Their names are what the help shows.


def duration(text: str) -> int:
    """In milliseconds."""
    found = milliseconds(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no duration; write 250ms, 10s, 5m, 1h30m or 7d")
    return found


def durations(text: str) -> list[int]:
    return [duration(part) for part in text.split(",")]


def when(text: str) -> datetime.timedelta | datetime.datetime:
    """How long ago, or a time."""
    ago_ms = milliseconds(text)
    try:
        if ago_ms is not None:
            return datetime.timedelta(milliseconds=ago_ms)
        return datetime.datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        advice = "write how long ago (10m, 1h30m), or 2026-11-17T04:30:00Z"
        raise click.BadParameter(f"{text!r} is no time; {advice}") from None


def size(text: str) -> int:
    """In bytes."""
    match = _SIZE.fullmatch(text)
    unit = _BYTES.get(match[2].lower()) if match is not None else None
    if match is None or unit is None:
        raise click.BadParameter(f"{text!r} is no size; write 1000, 64KiB, 10MiB or 2GB")
    return round(float(match[1]) * unit)


def filled(text: str) -> str:
    """A name. What it may be, the server says; without one it would be asked something else."""
    if not text:
        raise click.BadParameter("it is empty; is a variable of your shell not set?")
    return text


def setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE; the value is JSON, or else a text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise click.BadParameter(f"{text!r} is no setting; write NAME=VALUE")
    try:
        return name.replace("-", "_"), msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name.replace("-", "_"), value


SEQ = click.IntRange(0, U64_MAX)
COUNT = click.IntRange(1, U64_MAX)
