"""How far tests go that take a sample of what they could try: a little in every run, all of it with `pytest --long`."""

from __future__ import annotations

long = False  # tests/conftest.py says so before anything is collected: it may be asked while modules are imported


def pick(*, short: int, long: int) -> int:
    """How many examples, seeds or bugs; or of how many steps one is looked at."""
    return long if is_long() else short


def is_long() -> bool:
    return long


def some() -> int:
    """Of how many disk calls one is looked at."""
    return pick(short=4, long=1)
