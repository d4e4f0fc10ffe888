"""Types of options: durations, sizes, moments and settings as people write them."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from typing import Any

import click
import msgspec
from click.shell_completion import CompletionItem

from topics.system.quantities import milliseconds, size_bytes

U64_MAX = (1 << 64) - 1


# Their names are what the help shows.


def duration(text: str) -> int:
    """In milliseconds. A plain 0 needs no unit: it removes a limit."""
    found = 0 if text == "0" else milliseconds(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a duration; write 250ms, 10s, 5m, 1h30m or 7d")
    return found


def durations(text: str) -> list[int]:
    return [duration(part) for part in text.split(",")]


def moment(text: str) -> datetime.datetime:
    """Without a zone it is local time."""
    try:
        return datetime.datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a time; write 2026-11-17T04:30:00Z") from None


def when(text: str) -> datetime.timedelta | datetime.datetime:
    """How long ago, or a time."""
    ago_ms = milliseconds(text)
    try:
        if ago_ms is not None:
            return datetime.timedelta(milliseconds=ago_ms)
        return datetime.datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        advice = "write how long ago (10m, 1h30m), or 2026-11-17T04:30:00Z"
        raise click.BadParameter(f"{text!r} is not a time; {advice}") from None


def size(text: str) -> int:
    """In bytes."""
    found = size_bytes(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a size; write 1000, 64KiB, 10MiB or 2GB")
    return found


def filled(text: str) -> str:
    """A name. What it may be, the server says; without one it would be asked something else."""
    if not text:
        raise click.BadParameter("it is empty; is a variable of your shell not set?")
    return text


def setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE; the value is JSON, or else a text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise click.BadParameter(f"{text!r} is not a setting; write NAME=VALUE")
    try:
        return name.replace("-", "_"), msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name.replace("-", "_"), value


def _whole(least: int, most: int) -> Callable[[str], int]:
    """Not an IntRange: its help would show all digits of 2 ** 64 - 1."""

    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 20 and least <= int(text) <= most):
            raise click.BadParameter(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return number


SEQ = _whole(0, U64_MAX)
COUNT = _whole(1, sys.maxsize)


def complete_file(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


def complete_directory(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


cold_dir_option = click.option(
    "--cold-dir", type=filled, envvar="TOPICS_COLD_DIR", show_envvar=True, metavar="PATH",
    shell_complete=complete_directory, help="Directory of the cold tier.",
)  # fmt: skip
