"""How far tests go that take a sample of what they could try: a little in every run, all of it with `pytest --long`."""

from __future__ import annotations

import datetime

day = datetime.date.today().toordinal()  # `pytest --day N` sets another one
long = False  # tests/conftest.py says so before anything is collected: it may be asked while modules are imported


def pick(*, short: int, long: int) -> int:
    """How many examples, seeds or bugs; or of how many steps one is looked at."""
    return long if is_long() else short


def is_long() -> bool:
    return long


def some() -> int:
    """Of how many disk calls one is looked at."""
    return pick(short=8, long=1)


def turn(of: int) -> int:
    """Whose turn it is among so many, from 0 on: what a sample leaves out today is looked at on another day."""
    return day % of


def calls(count: int, *, each: int, shifted: bool = False) -> range:
    """The numbers of so many calls, or one of `each` (at least one), others each day and when `shifted`; with `--long` all."""
    each = pick(short=min(each, count), long=1)
    return range(1 + (turn(each) + shifted * (each // 2)) % each, count + 1, each)


def part(*, short: int, of: int, long: int) -> range:
    """So many of the first `of` seeds, each day others of them; with `--long` all up to `long`."""
    if is_long():
        return range(long)
    first = short * turn(of // short)
    return range(first, first + short)
