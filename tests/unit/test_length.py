"""Goal: what a sample leaves out today has its turn on another day, and no day is without a sample.

Method: the parts of all days, put together.
"""

from __future__ import annotations

import pytest

from tests.support import length


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("count", "each"), [(1, 5), (7, 10), (40, 8), (41, 8), (100, 1)])
def test_every_call_has_its_turn(
    count: int, each: int, shifted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(length, "long", False)
    found: list[int] = []
    for day in range(min(count, each)):
        monkeypatch.setattr(length, "day", 739_000 + day)
        today = length.calls(count, each=each, shifted=shifted)
        assert len(today) >= count // each and today
        found += today
    assert sorted(found) == list(range(1, count + 1))


@pytest.mark.parametrize(("short", "of"), [(12, 24), (2, 4), (10, 30)])
def test_every_seed_has_its_turn(short: int, of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length, "long", False)
    found: list[int] = []
    for day in range(of // short):
        monkeypatch.setattr(length, "day", 739_000 + day)
        today = length.part(short=short, of=of, long=10 * of)
        assert len(today) == short
        found += today
    assert sorted(found) == list(range(of))


def test_long_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length, "long", True)
    for day in range(3):
        monkeypatch.setattr(length, "day", 739_000 + day)
        assert list(length.calls(50, each=8, shifted=True)) == list(range(1, 51))
        assert length.part(short=2, of=4, long=60) == range(60)
