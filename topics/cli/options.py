"""Option types (durations, sizes, times, settings) and options that several commands share."""

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


# Help texts show the names of these functions.


def duration(text: str) -> int:
    """A duration in milliseconds. A plain 0, which removes a limit, needs no unit."""
    found = 0 if text == "0" else milliseconds(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a duration; write 250ms, 10s, 5m, 1h30m or 7d")
    return found


def durations(text: str) -> list[int]:
    return [duration(part) for part in text.split(",")]


def moment(text: str) -> datetime.datetime:
    """A timestamp; local time if it has no zone."""
    try:
        return datetime.datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a time; write 2026-11-17T04:30:00Z") from None


def when(text: str) -> datetime.timedelta | datetime.datetime:
    """A duration ago, or a timestamp."""
    ago_ms = milliseconds(text)
    try:
        if ago_ms is not None:
            return datetime.timedelta(milliseconds=ago_ms)
        return datetime.datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        advice = "write 10m or 1h30m for that long ago, or 2026-11-17T04:30:00Z"
        raise click.BadParameter(f"{text!r} is not a time; {advice}") from None


def size(text: str) -> int:
    """A size in bytes."""
    found = size_bytes(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a size; write 1000, 64KiB, 10MiB or 2GB")
    return found


def non_empty(text: str) -> str:
    """A name. The server checks its syntax, but an empty one would address another resource."""
    if not text:
        raise click.BadParameter("it is empty; is a shell variable not set?")
    return text


def setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE. A value that is not valid JSON is a string."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise click.BadParameter(f"{text!r} is not a setting; write NAME=VALUE")
    try:
        return name.replace("-", "_"), msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name.replace("-", "_"), value


def _integer(minimum: int, maximum: int) -> Callable[[str], int]:
    """Not click.IntRange: its help would show all digits of 2 ** 64 - 1."""

    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 20 and minimum <= int(text) <= maximum):
            raise click.BadParameter(f"{text!r} is not an integer from {minimum} to {maximum}")
        return int(text)

    return number


SEQ = _integer(0, U64_MAX)
COUNT = _integer(1, sys.maxsize)


def complete_file(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


def complete_directory(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


cold_dir_option = click.option(
    "--cold-dir", type=non_empty, envvar="TOPICS_COLD_DIR", show_envvar=True, metavar="PATH",
    shell_complete=complete_directory, help="Directory of the cold tier.",
)  # fmt: skip
