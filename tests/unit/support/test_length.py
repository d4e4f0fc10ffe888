"""Goal: a sample is never empty, the samples of all seeds together omit nothing, and `--long` takes everything.

Method: the union of the samples of consecutive seeds.
"""

from __future__ import annotations

import pytest

from tests.support import length


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("count", "each"), [(1, 5), (7, 10), (41, 8), (100, 1)])
def test_every_call_has_its_turn(
    count: int, each: int, shifted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(length, "long", False)
    found: list[int] = []
    for seed in range(min(count, each)):
        monkeypatch.setattr(length, "seed", seed)
        sample = length.calls(count, each=each, shifted=shifted)
        assert len(sample) >= count // each and sample
        found += sample
    assert sorted(found) == list(range(1, count + 1))


def test_a_long_run_takes_all_calls_and_seeds_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length, "seed", 700)
    monkeypatch.setattr(length, "long", True)
    assert list(length.calls(50, each=8, shifted=True)) == list(range(1, 51))
    assert length.seeds(short=2, long=60) == range(700, 760)
    monkeypatch.setattr(length, "long", False)
    assert length.seeds(short=2, long=60) == range(700, 702)
