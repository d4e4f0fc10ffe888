"""Goal: the subject trie returns exactly the subscribers whose pattern matches, in the order of subscription.

Method: a simple model, a list of subscriptions and the definition of a match, runs next to the trie under random
histories, short ones that shrink well and long ones that evict from the cache. After each history the structure is
checked: no node without a purpose, correct counts, a cache within its bounds.
"""

from __future__ import annotations

import gc
import weakref
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import length
from topics.api.limits import (
    MATCHES_CACHED_MAX,
    MATCHES_CACHED_SWEPT,
    SUBJECT_CHANGES_KEPT,
    SUBJECT_PATTERN_BYTES_MAX,
)
from topics.engine.core.subject_trie import SubjectTrie, _Node, _Subscribers

Subscription = tuple[bytes, int, bytes | None]


def covers(pattern: list[bytes], subject: list[bytes]) -> bool:
    """The definition, token by token."""
    if pattern == [b">"]:
        return bool(subject)
    if not pattern or not subject:
        return not pattern and not subject
    return pattern[0] in (b"*", subject[0]) and covers(pattern[1:], subject[1:])


class NaiveMatcher:
    """Checks every subscription, oldest first."""

    def __init__(self) -> None:
        self.subscriptions: list[Subscription] = []

    def insert(self, *subscription: *Subscription) -> bool:
        if subscription in self.subscriptions:
            return False
        self.subscriptions.append(subscription)
        return True

    def remove(self, *subscription: *Subscription) -> bool:
        if subscription not in self.subscriptions:
            return False
        self.subscriptions.remove(subscription)
        return True

    def match(self, subject: bytes) -> tuple[list[int], list[tuple[bytes, list[int]]]]:
        plain: list[int] = []
        groups: dict[bytes, list[int]] = {}
        parts = subject.split(b".")
        if b"" in parts:
            return [], []
        for pattern, subscriber, group in self.subscriptions:
            if covers(pattern.split(b"."), parts):
                members = plain if group is None else groups.setdefault(group, [])
                if subscriber not in members:
                    members.append(subscriber)
        return plain, list(groups.items())


def in_lists(trie: SubjectTrie[int], subject: bytes) -> tuple[list[int], list[tuple[bytes | str, list[int]]]]:
    matched = trie.match(subject)
    return list(matched.plain), [(name, list(members)) for name, members in matched.groups.items()]


def subscribers_inside(subscribers: _Subscribers[int] | None) -> int:
    if subscribers is None:
        return 0
    holders = [subscribers.plain, *subscribers.groups.values()]
    assert all(subscribers.groups.values()), "an empty group"
    assert not subscribers.is_empty
    for holder in holders:
        assert list(holder.values()) == sorted(holder.values())
    return sum(map(len, holders))


def check_inside(trie: SubjectTrie[int]) -> None:
    count = 0
    nodes: list[_Node[int]] = [trie._root]
    while nodes:
        node = nodes.pop()
        assert node is trie._root or not node.is_empty, "a node without subscribers below it"
        assert b"*" not in node.children and b">" not in node.children and b"" not in node.children
        count += subscribers_inside(node.here) + subscribers_inside(node.tail)
        nodes += [*node.children.values(), *([node.any_token] if node.any_token else [])]
    assert trie.count == count
    assert len(trie._cache) <= MATCHES_CACHED_MAX
    assert len(trie._changes) < 2 * SUBJECT_CHANGES_KEPT


def check_emptied(trie: SubjectTrie[int], model: NaiveMatcher) -> None:
    for subscription in list(model.subscriptions):
        assert trie.remove(*subscription)
    assert trie.count == 0
    assert trie._root.is_empty
    assert not any(cached.matched.plain or cached.matched.groups for cached in trie._cache.values())
    assert not trie._changes


# Subjects may contain the wildcard bytes as tokens; the trie must not treat them as wildcards.
TOKEN = st.sampled_from([b"a", b"b", b"*", b">", b"a*"])
PATTERN = (
    st.lists(TOKEN, min_size=1, max_size=4).filter(lambda tokens: b">" not in tokens[:-1]).map(b".".join)
)
SUBJECT = st.lists(st.one_of(TOKEN, st.just(b"")), min_size=1, max_size=5).map(b".".join)
SUBSCRIPTION = st.tuples(PATTERN, st.integers(0, 3), st.sampled_from([None, None, b"g", b"h"]))
STEP = st.one_of(
    st.tuples(st.just("insert"), SUBSCRIPTION),
    st.tuples(st.just("remove"), SUBSCRIPTION),
    st.tuples(st.just("remove one that is there"), st.integers(0, 60)),
    st.tuples(st.just("match"), SUBJECT),
)


@settings(max_examples=length.pick(short=40, long=300), deadline=None)
@given(st.lists(STEP, max_size=60), st.lists(SUBJECT, max_size=3))
def test_any_history_matches_as_the_naive_matcher(steps: list[tuple[str, Any]], watched: list[bytes]) -> None:
    trie, model = SubjectTrie[int](), NaiveMatcher()
    for kind, argument in steps:
        if kind == "match":
            assert in_lists(trie, argument) == model.match(argument)
            continue
        if kind == "remove one that is there":
            if not model.subscriptions:
                continue
            kind, argument = "remove", model.subscriptions[argument % len(model.subscriptions)]
        assert getattr(trie, kind)(*argument) == getattr(model, kind)(*argument)
        assert trie.count == len(model.subscriptions)
        # Queried after each change, so always in the cache. A literal pattern is a subject, too.
        for subject in [*watched, argument[0]]:
            assert in_lists(trie, subject) == model.match(subject)
    check_inside(trie)
    for subject in {pattern for pattern, _, _ in model.subscriptions}:
        assert in_lists(trie, subject) == model.match(subject)
    check_emptied(trie, model)


@settings(max_examples=length.pick(short=4, long=40), deadline=None)
@given(st.integers(0, 1 << 32))
def test_long_histories_that_sweep_the_cache_and_outrun_its_notes(seed: int) -> None:
    rng = Random(seed)
    trie, model = SubjectTrie[int](), NaiveMatcher()
    subjects = [b"%d.%d.%d" % (i % 3, i % 7, i) for i in range(MATCHES_CACHED_MAX + 200)]

    def any_pattern() -> bytes:
        tokens = [token if rng.random() < 0.5 else b"*" for token in rng.choice(subjects[:40]).split(b".")]
        if rng.random() < 0.3:
            tokens[rng.randrange(3) :] = [b">"]
        return b".".join(tokens)

    for _ in range(12):
        for _ in range(rng.choice([5, 3 * SUBJECT_CHANGES_KEPT])):
            if model.subscriptions and rng.random() < 0.45:
                subscription = rng.choice(model.subscriptions)
                assert trie.remove(*subscription) and model.remove(*subscription)
            else:
                subscription = (any_pattern(), rng.randrange(20), rng.choice([None, b"g", b"h"]))
                assert trie.insert(*subscription) == model.insert(*subscription)
        for subject in rng.sample(subjects[:60], 20):
            assert in_lists(trie, subject) == model.match(subject)
        if rng.random() < 0.2:
            for subject in subjects:
                trie.match(subject)
        check_inside(trie)
    check_emptied(trie, model)


def test_wildcards_and_their_limits() -> None:
    trie = SubjectTrie[str]()
    for pattern in (b"a.b", b"a.*", b"*.b", b"a.>", b">", b"*", b"a.b.*", b"a.b.>"):
        assert trie.insert(pattern, pattern.decode())
    assert trie.match(b"a.b").plain == ("a.b", "a.*", "*.b", "a.>", ">")
    assert trie.match(b"a").plain == (">", "*")
    assert trie.match(b"a.b.c").plain == ("a.>", ">", "a.b.*", "a.b.>")
    for nothing in (b"", b".", b"a.", b".a", b"a..b"):
        assert trie.match(nothing).plain == ()
        assert not trie.match(nothing).groups
        assert nothing not in trie._cache, "patterns that can never match must not use memory"


def test_one_subscriber_through_several_patterns_counts_once() -> None:
    trie = SubjectTrie[str]()
    for pattern in (b"a.b", b"a.*", b">"):
        trie.insert(pattern, "one")
        trie.insert(pattern, "member", b"g")
    assert trie.match(b"a.b").plain == ("one",)
    assert trie.match(b"a.b").groups == {b"g": ("member",)}
    assert trie.count == 6
    trie.remove(b"a.b", "one")
    assert trie.match(b"a.b").plain == ("one",)


def test_a_group_is_one_over_all_patterns() -> None:
    trie = SubjectTrie[str]()
    trie.insert(b"a.*", "first", b"g")
    trie.insert(b"a.>", "second", b"g")
    trie.insert(b"a.b", "third", b"g")
    trie.insert(b"a.b", "first", "other")
    trie.insert(b"a.b", "first", b"")
    assert trie.match(b"a.b").groups == {
        b"g": ("first", "second", "third"),
        "other": ("first",),
        b"": ("first",),
    }
    assert trie.match(b"a.b").plain == ()


@pytest.mark.parametrize("pattern", [b"a.b", b"a.*", b"a.>"])
@pytest.mark.parametrize("group", [None, b"g"])
def test_a_cached_result_follows_who_comes_and_who_goes(pattern: bytes, group: bytes | None) -> None:
    trie = SubjectTrie[str]()
    trie.insert(b">", "always")
    assert trie.match(b"a.b").plain == ("always",)
    trie.insert(pattern, "one", group)
    with_one = trie.match(b"a.b")
    assert (*with_one.plain, *with_one.groups.get(b"g", ())) == ("always", "one")
    trie.remove(pattern, "one", group)
    assert (trie.match(b"a.b").plain, trie.match(b"a.b").groups) == (("always",), {})


def test_the_same_twice_and_the_unknown_change_nothing() -> None:
    trie = SubjectTrie[str]()
    assert trie.insert(b"a.*", "one")
    assert not trie.insert(b"a.*", "one")
    for pattern, subscriber, group in [
        (b"a.*", "other", None),
        (b"a.*", "one", b"g"),
        (b"a", "one", None),
        (b"a.>", "one", None),
        (b"a.*.c", "one", None),
        (b"", "one", None),
        (b">.a", "one", None),
        (b"a..b", "one", None),
    ]:
        assert not trie.remove(pattern, subscriber, group)
    assert trie.count == 1
    assert trie.match(b"a.b").plain == ("one",)
    assert trie.remove(b"a.*", "one")
    assert not trie.remove(b"a.*", "one")
    assert trie.count == 0


@pytest.mark.parametrize("pattern", [b"", b".", b"a.", b".a", b"a..b", b">.a", b"a.>.>", b"a" * 256])
def test_invalid_patterns_are_refused_and_leave_nothing(pattern: bytes) -> None:
    trie = SubjectTrie[int]()
    with pytest.raises(ValueError, match="subject pattern"):
        trie.insert(pattern, 1)
    assert trie.count == 0
    assert trie._root.is_empty


def test_a_result_is_shared_until_a_change_concerns_it_and_never_altered() -> None:
    trie = SubjectTrie[int]()
    trie.insert(b"a.*", 1)
    before = trie.match(b"a.b")
    trie.insert(b"c.*", 2)
    trie.remove(b"c.*", 2)
    assert trie.match(b"a.b") is before
    trie.insert(b"a.>", 3)
    trie.insert(b"a.b", 4, b"g")
    after = trie.match(b"a.b")
    assert (after.plain, after.groups) == ((1, 3), {b"g": (4,)})
    assert (before.plain, before.groups) == ((1,), {})


def test_the_cache_is_swept_at_its_bound_and_the_newest_stay() -> None:
    trie = SubjectTrie[int]()
    trie.insert(b"*", 1)
    subjects = [b"%d" % i for i in range(MATCHES_CACHED_MAX + 1)]
    for subject in subjects[:-1]:
        trie.match(subject)
    assert list(trie._cache) == subjects[:-1]
    trie.match(subjects[-1])
    assert list(trie._cache) == subjects[-MATCHES_CACHED_SWEPT:]
    assert all(trie.match(subject).plain == (1,) for subject in subjects)
    assert MATCHES_CACHED_SWEPT <= len(trie._cache) <= MATCHES_CACHED_MAX


def test_removed_subscribers_are_released_after_a_bounded_number_of_changes() -> None:
    class Session:
        pass

    trie = SubjectTrie[object]()
    trie.insert(b">", 0)
    session = Session()
    gone = weakref.ref(session)
    trie.insert(b"a.>", session)
    trie.match(b"a.b")
    trie.remove(b"a.>", session)
    del session
    for i in range(2 * SUBJECT_CHANGES_KEPT):
        trie.insert(b"b.>", i)
    gc.collect()
    assert gone() is None


def test_the_deepest_patterns_there_can_be() -> None:
    tokens = [b"a"] * ((SUBJECT_PATTERN_BYTES_MAX + 1) // 2)
    trie = SubjectTrie[int]()
    for depth in range(len(tokens)):
        trie.insert(b".".join([b"*"] * depth + [b">"]), depth)
    assert trie.match(b".".join(tokens)).plain == tuple(range(len(tokens)))
    for depth in range(len(tokens)):
        assert trie.remove(b".".join([b"*"] * depth + [b">"]), depth)
    assert trie._root.is_empty


def test_every_mix_of_wildcards_and_a_subject_that_fits_them_all() -> None:
    trie = SubjectTrie[int]()
    mixes = list(product([b"a", b"*"], repeat=10))
    for i, tokens in enumerate(mixes):
        trie.insert(b".".join(tokens), i)
    assert trie.match(b".".join([b"a"] * 10)).plain == tuple(range(len(mixes)))
    assert trie.match(b".".join([b"b"] * 10)).plain == (len(mixes) - 1,)
    assert trie.match(b".".join([b"a"] * 9)).plain == ()
