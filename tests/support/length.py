"""How far tests go that take a sample of what they could try: the same little part in every run, much more with `pytest --long`.

One seed is behind all samples. It is committed, so that a run says the same tomorrow; `--long` draws another one and prints it,
and `--seed N` takes that one again.
"""

from __future__ import annotations

import pytest

SEED = 0
# tests/conftest.py sets both before anything is collected: they may be asked for while modules are imported.
seed = SEED
long = False


def pick(*, short: int, long: int) -> int:
    """How many examples, seeds or bugs; or of how many steps one is looked at."""
    return long if is_long() else short


def is_long() -> bool:
    return long


def only_long(why: str) -> pytest.MarkDecorator:
    """Marks a test that a normal run leaves out, because another one shows the same promise for less; `why` names that one."""
    return pytest.mark.skipif(not is_long(), reason=f"with --long; {why}")


def some() -> int:
    """Of how many disk calls one is looked at."""
    return pick(short=16, long=1)


def turn(of: int) -> int:
    """Which one of so many is in the sample, from 0 on."""
    return seed % of


def calls(count: int, *, each: int, shifted: bool = False) -> range:
    """The numbers of so many calls, or one of `each` (at least one), others when `shifted`; with `--long` all."""
    each = pick(short=min(each, count), long=1)
    return range(1 + (turn(each) + shifted * (each // 2)) % each, count + 1, each)


def seeds(*, short: int, long: int) -> range:
    """Seeds for random walks: so many from that of the run on."""
    return range(seed, seed + pick(short=short, long=long))
