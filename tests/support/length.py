"""Sizes of samples: a small part of all cases in a normal run, many more with `pytest --long`.

All samples depend on one seed. It is committed, so each run takes the same ones; `--long` draws another seed and
prints it, and `--seed N` uses that one again.
"""

from __future__ import annotations

import pytest

SEED = 0
# tests/conftest.py sets both before collection, since they may be used while modules are imported.
seed = SEED
long = False


def pick(*, short: int, long: int) -> int:
    """How many examples, seeds or bugs to try; or of how many steps one is tried."""
    return long if is_long() else short


def is_long() -> bool:
    return long


def only_long(why: str) -> pytest.MarkDecorator:
    """Marks a test that a normal run skips, because a cheaper test, named in `why`, shows the same promise."""
    return pytest.mark.skipif(not is_long(), reason=f"with --long; {why}")


def some() -> int:
    """Of this many disk calls, one is tried."""
    return pick(short=16, long=1)


def turn(of: int) -> int:
    """Which one of this many is in the sample, from 0 on."""
    return seed % of


def calls(count: int, *, each: int, shifted: bool = False) -> range:
    """Numbers of the calls in the sample: one of every `each` (at least one), others when `shifted`; all with
    `--long`.
    """
    each = pick(short=min(each, count), long=1)
    return range(1 + (turn(each) + shifted * (each // 2)) % each, count + 1, each)


def seeds(*, short: int, long: int) -> range:
    """Seeds for random runs: consecutive ones, starting with the run's seed."""
    return range(seed, seed + pick(short=short, long=long))
