"""Rounds in which all contenders take turns, so that noise affects all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, TypeVar

from peers.work import FAILURES, Say

Contender = TypeVar("Contender")
Result = dict[str, Any]


def take_turns(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    once: Callable[[Contender], Result],
    say: Say,
    name: Callable[[Contender], str],
) -> Iterator[tuple[Contender, list[Result] | str]]:
    """Yield each contender with the results of its rounds, or its error. It is not run again after a failure."""
    results: list[list[Result]] = [[] for _ in contenders]
    failures: dict[int, str] = {}
    for number in range(rounds):
        turn = number % max(1, len(contenders))  # vary the order
        for i in [*range(turn, len(contenders)), *range(turn)]:
            if i in failures:
                continue
            say(f"{name(contenders[i])}, round {number + 1}")
            try:
                results[i].append(once(contenders[i]))
            except FAILURES as error:
                failures[i] = str(error)
    for i, contender in enumerate(contenders):
        yield contender, failures.get(i, results[i])


def summary(rounds: list[Result], figures: Sequence[str], *, each: str) -> Result:
    """Medians over the rounds: of these values, of the CPU time per `each` of the counted units, by role, and of the
    share of a core that the generator took.
    """
    costs = {
        role: round(median([one["cpu_s"][role] * 1e6 / max(1, one["count"]) for one in rounds]), 3)
        for role in rounds[0]["cpu_s"]
    }
    return {
        "rounds": rounds,
        **{name: round(median([one[name] for one in rounds]), 4) for name in figures},
        f"cpu_us_per_{each}": costs,
        "generator_share": round(median([one["cpu_s"]["load"] / one["seconds"] for one in rounds]), 3),
    }
