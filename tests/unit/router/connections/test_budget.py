"""The memory budget of a front for its clients."""

from __future__ import annotations

import pytest

from router.connections.budget import ByteBudget
from tests.support.faults import fault


@fault(
    "front",
    "more bodies are being received than a front may hold",
    "further ones are refused with 429 and limit bodies; those that are whole are served",
)
def test_budget_is_never_passed_but_for_one_alone() -> None:
    budget = ByteBudget(100)
    assert budget.take(60)
    assert not budget.take(41), "it would be too much"
    assert budget.held == 60, "a refusal takes nothing"
    assert budget.take(40)
    assert not budget.take(1)
    budget.release(100)
    assert budget.take(1000), "one alone may be larger than the whole budget"
    assert not budget.take(1)
    budget.release(1000)
    assert budget.held == 0


def test_giving_back_too_much_is_a_bug() -> None:
    budget = ByteBudget(100)
    budget.take(5)
    with pytest.raises(AssertionError):
        budget.release(6)
