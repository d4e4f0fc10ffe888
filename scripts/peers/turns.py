"""Rounds in which each contender has its turn, so that noise of the machine hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """Each with the results of its rounds, or with why it failed; who failed once is not asked again."""
    results: list[list[Result]] = [[] for _ in contenders]
    failures: dict[int, str] = {}
    for number in range(rounds):
        turn = number % max(1, len(contenders))  # so that nobody is always measured after the same other one
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
