"""Subject patterns and tag matches."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import length
from topics.engine.core.subjects import TagFilter, TagMatch, overlap, parse_pattern


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        (b"a", b"a", True),
        (b"a", b"a.b", False),
        (b"a.b", b"a.b", True),
        (b"*", b"a", True),
        (b"*", b"a.b", False),
        (b"*", b"", False),
        (b">", b"a", True),
        (b">", b"a.b.c", True),
        (b">", b"", False),
        (b"a.>", b"a", False),
        (b"a.>", b"a.", False),
        (b"a.>", b"a.b", True),
        (b"a.>", b"a.b.c", True),
        (b"a.>", b"a.b..c", False),
        (b"a.>", b"ab.c", False),
        (b"a.*.c", b"a.b.c", True),
        (b"a.*.c", b"a..c", False),
        (b"a.*.c", b"a.b.d", False),
        (b"a.*.c", b"a.b.c.d", False),
        (b"*.b.>", b"a.b.c", True),
        (b"*.b.>", b"a.b", False),
        (b"*.b.>", b"a.c.c", False),
        (b"*.*", b"a.b", True),
        (b"*.*", b"a", False),
        # Only a whole token is a wildcard.
        (b"a*", b"ab", False),
        (b"a*", b"a*", True),
        (b"a>.b", b"a>.b", True),
        (b"*.b", b"*.b", True),
    ],
)
def test_matches(pattern: bytes, subject: bytes, expected: bool) -> None:
    assert parse_pattern(pattern).matches(subject) is expected
    assert TagMatch("Subject", pattern).matches(subject) is expected


@pytest.mark.parametrize(
    ("pattern", "prefix", "literal"),
    [
        (b"a.b", b"a.b", True),
        (b"a.*", b"a.", False),
        (b"a.b.>", b"a.b.", False),
        (b"a.*.c.>", b"a.", False),
        (b"*.a", b"", False),
        (b">", b"", False),
        (b"a*.b", b"a*.b", True),
    ],
)
def test_literal_part(pattern: bytes, prefix: bytes, literal: bool) -> None:
    parsed = parse_pattern(pattern)
    assert parsed.literal_prefix == prefix
    assert parsed.is_literal is literal


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (b"", "must not be empty"),
        (b".", "token 1 .* is empty"),
        (b"a..b", "token 2 .* is empty"),
        (b"a.", "token 2 .* is empty"),
        (b".a", "token 1 .* is empty"),
        (b">.a", "token 1 .* only come last"),
        (b"a.>.>", "token 2 .* only come last"),
    ],
)
def test_bad_patterns_say_why(pattern: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_pattern(pattern)
    with pytest.raises(ValueError, match=message):
        TagMatch("Subject", pattern)


def test_eq_and_glob() -> None:
    assert TagMatch("Eq", b"a*").matches(b"a*")
    assert not TagMatch("Eq", b"a*").matches(b"ab")
    assert TagMatch("Eq", b"").matches(b"")
    assert TagMatch("Glob", b"a.*").matches(b"a.")
    assert TagMatch("Glob", b"a.*").matches(b"a.b.c")
    assert not TagMatch("Glob", b"a.*").matches(b"a")
    assert TagMatch("Glob", b"*").matches(b"")
    # The part before the last star is literal.
    assert TagMatch("Glob", b"a*b*").matches(b"a*bc")
    assert not TagMatch("Glob", b"a*b*").matches(b"axbc")


def test_nothing_matches_an_untagged_record() -> None:
    for match in (TagMatch("Eq", b""), TagMatch("Glob", b"*"), TagMatch("Subject", b">")):
        assert not match.matches(None)


def test_constructor_checks() -> None:
    with pytest.raises(ValueError, match="must end with"):
        TagMatch("Glob", b"abc")
    with pytest.raises(ValueError, match="must end with"):
        TagMatch("Glob", b"")
    with pytest.raises(ValueError, match="Eq, Glob or Subject"):
        TagMatch("Near", b"abc")  # type: ignore[arg-type]


def test_equal_matches_are_equal_and_hashable() -> None:
    one, same, other = TagMatch("Subject", b"a.*"), TagMatch("Subject", b"a.*"), TagMatch("Glob", b"a.*")
    assert one == same and hash(one) == hash(same)
    assert one != other


TOKEN = st.sampled_from([b"a", b"b", b"ab", b"*", b">"])


def covers(pattern: list[bytes], subject: list[bytes]) -> bool:
    """The definition, token by token."""
    if not pattern:
        return not subject
    if not subject:
        return False
    if pattern == [b">"]:
        return True
    return pattern[0] in (b"*", subject[0]) and covers(pattern[1:], subject[1:])


@given(
    st.lists(TOKEN, min_size=1, max_size=4).filter(lambda tokens: b">" not in tokens[:-1]),
    st.lists(TOKEN, min_size=1, max_size=5),
)
def test_matches_as_defined(pattern: list[bytes], subject: list[bytes]) -> None:
    parsed, text = parse_pattern(b".".join(pattern)), b".".join(subject)
    assert parsed.matches(text) == covers(pattern, subject)
    if parsed.matches(text):
        assert text.startswith(parsed.literal_prefix)


# ---- overlaps

SHORT_TAGS = [bytes(tag) for size in range(8) for tag in product(b"ax.*", repeat=size)]
OF_TWO_BYTES = [tag for tag in SHORT_TAGS if len(tag) <= 2]


@cache
def matched(match: TagMatch) -> set[bytes]:
    return {tag for tag in SHORT_TAGS if match.matches(tag)}


@st.composite
def tag_matches(draw: st.DrawFn) -> TagMatch:
    """Any two patterns that overlap do so in one of SHORT_TAGS."""
    op = draw(st.sampled_from(["Eq", "Glob", "Subject"]))
    if op == "Subject":
        tokens = draw(st.lists(st.sampled_from([b"a", b"ax", b"*"]), max_size=2))
        tail = [b">"] if not tokens or draw(st.booleans()) else []
        return TagMatch("Subject", b".".join([*tokens, *tail]))
    text = draw(st.sampled_from(OF_TWO_BYTES))
    return TagMatch("Eq", text) if op == "Eq" else TagMatch("Glob", text + b"*")


@settings(max_examples=length.pick(short=50, long=2000))
@given(tag_matches(), tag_matches())
def test_two_matches_overlap_when_a_tag_is_meant_by_both(one: TagMatch, other: TagMatch) -> None:
    assert one.overlaps(other) == other.overlaps(one) == bool(matched(one) & matched(other))


def test_filters_overlap_when_any_of_their_matches_do() -> None:
    eu = TagFilter((TagMatch("Eq", b"eu.tea"), TagMatch("Subject", b"eu.jam.>")))
    us = TagFilter((TagMatch("Glob", b"us.*"), TagMatch("Eq", b"de.tea")))
    jam = TagFilter((TagMatch("Eq", b"us"), TagMatch("Subject", b"*.jam.*")))
    assert not overlap(eu, us)
    assert overlap(eu, jam) and overlap(us, jam)
    assert overlap(None, us) and overlap(us, None) and overlap(None, None)
