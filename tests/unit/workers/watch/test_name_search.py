"""Searches of topic names by pattern: their results, and the work of each step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice, product

from sortedcontainers import SortedList

from workers.watch import name_search
from workers.watch.name_search import NameSearch


class Names(SortedList[str]):
    def names_between(self, first: str, last: str, *, inclusive: bool) -> Iterable[str]:
        return self.irange(first, last, inclusive=(inclusive, True))


def search(
    patterns: list[str], names: list[str], matches_max: int = 1000
) -> tuple[dict[str, list[int]], int]:
    """What is found, and in how many steps."""
    found: list[dict[str, list[int]]] = []
    task = NameSearch(patterns, None, matches_max, found.append)
    sorted_names = Names(names)
    steps = 1
    while not task.step(sorted_names):
        assert not found
        steps += 1
    (result,) = found
    return result, steps


def test_finds_every_name_once_with_the_patterns_that_match_it() -> None:
    names = [f"t.{i:04}" for i in range(1030)]
    found, steps = search(["t.*", "t.0001", "u.>"], names, matches_max=2000)
    assert found == {name: [0, 1] if name == "t.0001" else [0] for name in names}
    assert steps == 3


def test_ends_with_one_match_more_than_the_maximum() -> None:
    found, _ = search([">"], [f"t.{i:04}" for i in range(100)], matches_max=10)
    assert len(found) == 11


def test_patterns_of_many_wildcards_make_steps_shorter_not_longer() -> None:
    patterns = [".".join((*head, *["a", "*"] * 10)) for head in islice(product("*a", repeat=8), 256)]
    names = [".".join(["a"] * 27 + [f"z{i:03}"]) for i in range(100)]
    task = NameSearch(patterns, None, 1000, lambda found: None)
    sorted_names, most = Names(names), 0
    ended = False
    while not ended:
        before = task._trie.visited
        ended = task.step(sorted_names)
        most = max(most, task._trie.visited - before)
    assert 256 * 20 < most <= name_search.NODES_PER_STEP + 256 * 28, "one name beyond the budget at most"
