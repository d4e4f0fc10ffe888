"""Goal: the index of forwards finds the same rules and cycles as a plain search over all rules.

Method: small cases by hand, and random rules compared with the plain search.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import msgspec
import pytest

from topics.engine.commands.forwards import Forward, source_matches, source_prefix
from workers.forward.rules.book import RuleBook

_uids = itertools.count(1)


def rule(source: str, dest: str, name: str = "", **fields: object) -> Forward:
    uid = next(_uids)
    return msgspec.structs.replace(Forward(uid, name or f"r{uid}", source, dest, state="active"), **fields)


def book_of(*rules: Forward) -> RuleBook:
    book = RuleBook()
    for one in rules:
        book.put(one)
    return book


def found(book: RuleBook, *, source: str | None = None, dest: str | None = None, **wanted: str) -> list[str]:
    prefix, after = wanted.get("prefix", ""), wanted.get("after", "")
    rows = book.page(lambda one: True, prefix=prefix, after=after, source=source, dest=dest, count=1000)
    return [one.name for one in rows]


def test_names_of_sources() -> None:
    assert source_prefix("a.b") == "a.b"
    assert (source_prefix("a.>"), source_prefix("a.*.c"), source_prefix(">")) == ("a.", "a.", "")
    assert source_matches("a..b", "a..b")
    assert source_matches("a.>", "a.b.c")
    assert not source_matches("a.>", "a")
    assert not source_matches("a.*", "a..b")


def test_a_rule_is_found_until_it_is_dropped() -> None:
    first, second = rule("a", "b", "x"), rule("a.>", "c", "y")
    book = book_of(first, second)
    assert (book.find("x"), book.get(second.uid), book.count) == (first, second, 2)
    changed = msgspec.structs.replace(first, preserve_tag=False)
    book.put(changed)
    assert book.find("x") == changed
    assert list(book) == [changed, second]
    for one in (first, second):
        book.drop(one.uid)
        book.drop(one.uid)
    assert (book.find("x"), book.count, book.unsettled) == (None, 0, {})
    assert book.find_cycle("b", "a") is None


def test_a_name_may_be_taken_by_another_rule_before_the_first_is_dropped() -> None:
    first, second = rule("a", "b", "x"), rule("a", "c", "x")
    book = book_of(first, second)
    book.drop(first.uid)
    assert book.find("x") == second


def test_rules_being_made_or_ended_are_known() -> None:
    one = rule("a", "b", state="making")
    book = book_of(one)
    assert list(book.unsettled) == [one.uid]
    assert found(book) == []
    book.put(msgspec.structs.replace(one, state="active"))
    assert list(book.unsettled) == []
    assert found(book) == [one.name]
    book.put(msgspec.structs.replace(one, state="ending"))
    assert list(book.unsettled) == [one.uid]
    assert found(book) == []


def test_fan_in() -> None:
    book = book_of(rule("a", "d", "x"))
    assert book.has_other_source(rule("b", "d", "y"))
    assert not book.has_other_source(rule("a", "d", "y"))
    assert not book.has_other_source(rule("b", "d", "x")), (
        "that one has another dest, which is another refusal"
    )
    assert not book.has_other_source(rule("b", "e", "y"))
    book.put(msgspec.structs.replace(book.find("x") or rule("a", "d"), state="ending"))
    assert not book.has_other_source(rule("b", "d", "y"))


def test_pages() -> None:
    names = ["a", "a->b", "ab", "b", "c"]
    book = book_of(*(rule("s" if name < "b" else "t", f"d{name}", name) for name in reversed(names)))
    assert found(book) == names
    assert found(book, prefix="a") == ["a", "a->b", "ab"]
    assert found(book, prefix="a", after="a->b") == ["ab"]
    assert found(book, prefix="b", after="a") == ["b"]
    assert found(book, prefix="a", after="b") == []
    assert found(book, after="ab") == ["b", "c"]
    assert found(book, source="t") == ["b", "c"]
    assert found(book, source="t", prefix="c") == ["c"]
    assert found(book, dest="dab") == ["ab"]
    assert found(book, dest="dab", source="t") == []
    assert found(book, source="none") == found(book, dest="none") == []


def test_the_shortest_circle_is_told() -> None:
    book = book_of(rule("a", "b"), rule("b", "c"), rule("c", "d"), rule("b", "d"))
    assert book.find_cycle("d", "a") == ["d", "a", "b", "d"]
    assert book.find_cycle("a", "d") is None
    assert book.find_cycle("d.>", "a") is None


def test_circles_through_patterns() -> None:
    book = book_of(rule("a.>", "pool"), rule("pool", "next"))
    assert book.find_cycle("next", "a.x") == ["next", "a.x", "pool", "next"]
    assert book.find_cycle("next", "a") is None
    assert book.find_cycle("n*", "a.x") is None
    assert book.find_cycle("*", "a.x") == ["pool", "a.x", "pool"]


def test_a_rule_that_ends_closes_no_circle() -> None:
    one = rule("a", "b")
    book = book_of(one)
    assert book.find_cycle("b", "a") == ["b", "a", "b"]
    book.put(msgspec.structs.replace(one, state="ending"))
    assert book.find_cycle("b", "a") is None


TOPICS = [*"abcd", "e.f", "e.g", "e.f.g"]
SOURCES = [*TOPICS, "e.>", "e.*", "*", "*.*.g"]


def plain_cycle(rules: Iterable[Forward], source: str, dest: str) -> int | None:
    """The length of the shortest cycle in topics, counting both first and last."""
    known, level, steps = {dest}, {dest}, 2
    while level:
        if any(source_matches(source, topic) for topic in level):
            return steps
        level = {one.dest for one in rules for topic in level if source_matches(one.source, topic)} - known
        known |= level
        steps += 1
    return None


@pytest.mark.parametrize("seed", range(20))
def test_circles_as_a_plain_search_finds_them(seed: int) -> None:
    rng = random.Random(seed)
    book = RuleBook()
    for _ in range(rng.randrange(1, 12)):
        book.put(rule(rng.choice(SOURCES), rng.choice(TOPICS)))
        if rng.random() < 0.2:
            book.drop(rng.choice(list(book)).uid)
    rules = list(book)
    for source, dest in itertools.product(SOURCES, TOPICS):
        cycle = book.find_cycle(source, dest)
        assert (len(cycle) if cycle else None) == plain_cycle(rules, source, dest)
        if cycle:
            assert cycle[0] == cycle[-1]
            assert cycle[1] == dest
            assert source_matches(source, cycle[0])
            for here, there in itertools.pairwise(cycle[1:]):
                assert any(source_matches(one.source, here) and one.dest == there for one in rules)
