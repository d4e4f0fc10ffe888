"""Goal: an entry grants exactly what its text says, an ambiguous one is refused, and no secret is leaked.

Method: one table of entries; properties over generated secrets.
"""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.api.api_keys import ALL_SCOPES, ApiKey, find_key, parse_keys, secrets_of

ALL = set(ALL_SCOPES)
SECRETS = (
    st.text(st.characters(exclude_characters=",:"), min_size=8)
    .map(str.strip)
    .filter(lambda text: len(text) >= 8)
)


@pytest.mark.parametrize(
    ("entry", "scopes", "prefixes"),
    [
        ("s", ALL, ()),
        ("s:", ALL, ()),
        ("s::", ALL, ()),
        ("s:read", {"read"}, ()),
        ("s:r", {"read"}, ()),
        ("s:W", {"write"}, ()),
        ("s:rw", {"read", "write"}, ()),
        ("s:Delete+ADMIN", {"delete", "admin"}, ()),
        ("s:del+a", {"delete", "admin"}, ()),
        ("s:d", {"delete"}, ()),
        ("s:read+", {"read"}, ()),
        (" s : read + write : a. | b. ", {"read", "write"}, ("a.", "b.")),
        ("s:read:orders.", {"read"}, ("orders.",)),
        ("s::orders.|bills:eu:", ALL, ("orders.", "bills:eu:")),
    ],
)
def test_entries(entry: str, scopes: set[str], prefixes: tuple[str, ...]) -> None:
    assert parse_keys(entry) == [ApiKey(hashlib.sha256(b"s").digest(), frozenset(scopes), prefixes)]  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", " ", ",", " , ,", ":read", " :read:x, ::", ":nonsense"])
def test_entries_without_a_secret_are_skipped(text: str) -> None:
    assert parse_keys(text) == []


def test_several_entries_keep_their_order() -> None:
    keys = parse_keys("a:r, ,b:w,:x,c")
    assert [set(key.scopes) for key in keys] == [{"read"}, {"write"}, ALL]
    assert secrets_of("a:r, ,b:w,:x,c") == ["a", "b", "c"]


@pytest.mark.parametrize("entry", ["swordfish:reed", "swordfish:read+reed", "ok,swordfish:reed:x"])
def test_an_unknown_scope_is_named(entry: str) -> None:
    with pytest.raises(ValueError, match="'reed'") as caught:
        parse_keys(entry)
    assert "swordfish" not in str(caught.value)


@pytest.mark.parametrize("entry", ["swordfish:+", "swordfish: + + ", "swordfish:read:|", "swordfish:: | "])
def test_separators_alone_are_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="separators") as caught:
        parse_keys(entry)
    assert "swordfish" not in str(caught.value)


@pytest.mark.parametrize(
    "entry", ["swordfish:swordfish", "swordfish,other:swordfish2", "other:swordfish2,swordfish"]
)
def test_a_secret_in_the_place_of_the_scopes_is_not_named(entry: str) -> None:
    with pytest.raises(ValueError, match="unknown scope") as caught:
        parse_keys(entry)
    assert "swordfish" not in str(caught.value)


@given(st.lists(SECRETS, min_size=1, unique=True))
def test_each_secret_finds_its_own_key(secrets: list[str]) -> None:
    keys = parse_keys(",".join(secrets))
    assert [find_key(keys, secret) for secret in secrets] == keys
    assert find_key(keys, secrets[0] + "x") in [None, *keys[1:]]


def test_the_first_of_two_entries_with_one_secret_counts() -> None:
    found = find_key(parse_keys("s:read,s:write"), "s")
    assert found is not None
    assert found.scopes == {"read"}


@pytest.mark.parametrize("secret", ["", "S", "s ", "ss", "\udcff", "\ud800", "ü"])
def test_other_secrets_find_nothing(secret: str) -> None:
    assert find_key(parse_keys("s"), secret) is None


def test_bytes_that_are_no_text_can_be_a_secret() -> None:
    secret = b"\xff\xfe".decode("utf-8", "surrogateescape")
    assert find_key(parse_keys(secret), secret) is not None


def test_prefixes_cover_names() -> None:
    (some,) = parse_keys("s::orders.|bills")
    assert [some.covers(name) for name in ("orders.eu", "orders", "bills", "bills2", "")] == [
        True,
        False,
        True,
        True,
        False,
    ]
    (every,) = parse_keys("s")
    assert every.covers("anything")


def test_only_digests_are_kept() -> None:
    assert "swordfish" not in repr(parse_keys("swordfish:read:x"))
