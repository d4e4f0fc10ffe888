"""Event ids: ids assembled from parts can be decoded, and nothing that a client may send raises."""

from __future__ import annotations

from base64 import urlsafe_b64encode

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.engine.shard.appends import NAME
from topics.link import event_ids
from topics.link.watch import ID_TOPICS_MAX
from topics.protocols.http1.framing import HEAD_BYTES_MAX

topic_names = st.text("aZ09._:-", min_size=1, max_size=255).filter(NAME.match)
odd_names = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(
    lambda name: not name.startswith(event_ids.SAVE)
)
cursors = st.integers(0, (1 << 64) - 1)


def made(seen: dict[str, int], save: int | None = None) -> str:
    """An id as a stream makes it."""
    named = seen if save is None else {event_ids.SAVE: save, **seen}
    makers = [event_ids.first_piece, *([event_ids.piece] * len(named))]
    return event_ids.join(make(topic, at) for make, (topic, at) in zip(makers, named.items())).decode()


@given(st.dictionaries(topic_names | odd_names, cursors, max_size=20), st.none() | cursors)
def test_joined_event_ids_are_decoded_back(seen: dict[str, int], save: int | None) -> None:
    text = made(seen, save)
    assert "=" not in text
    assert event_ids.decode(text) == (save, seen)


@given(st.dictionaries(topic_names | odd_names, cursors, max_size=20))
def test_any_piece_may_come_first(seen: dict[str, int]) -> None:
    text = event_ids.join(event_ids.piece(topic, at) for topic, at in seen.items()).decode()
    assert event_ids.decode(text) == (None, seen)


def test_an_id_says_which_epochs_were_heard_of_beside_its_cursors() -> None:
    text = event_ids.join([event_ids.piece("a", 3), event_ids.epoch_piece("a", "1.0")]).decode()
    assert event_ids.decode(text) == (None, {"a": 3})
    assert event_ids.knows_epoch(text, "a", "1.0")
    assert not event_ids.knows_epoch(text, "a", "1.1")
    assert not event_ids.knows_epoch(text, "b", "1.0")
    assert not event_ids.knows_epoch("?", "a", "1.0")


def test_many_topics() -> None:
    seen = {f"orders.{i}": i * 1000 for i in range(10_000)}
    assert event_ids.decode(made(seen)) == (None, seen)
    assert event_ids.decode(made(seen, 7)) == (7, seen)


def test_an_id_that_names_all_topics_fits_the_head_of_a_request() -> None:
    longest = {f"{i:02d}{'x' * 62}": (1 << 64) - 1 for i in range(ID_TOPICS_MAX)}
    assert event_ids.lists_all(longest)
    assert not event_ids.lists_all([*longest, "y"])
    assert not event_ids.lists_all([f"{i}{'x' * 250}" for i in range(20)])
    assert len(made(longest)) <= HEAD_BYTES_MAX // 2


@given(st.text(max_size=200))
def test_no_text_raises(text: str) -> None:
    event_ids.decode(text)


@given(st.binary(max_size=200))
def test_no_bytes_in_base64_raise(data: bytes) -> None:
    event_ids.decode(urlsafe_b64encode(data).decode().rstrip("="))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def encoded(text: bytes) -> str:
    return urlsafe_b64encode(text).decode().rstrip("=")


@given(st.dictionaries(st.text(max_size=5) | st.just(event_ids.SAVE), json_values, max_size=4))
def test_json_that_is_not_of_cursors_is_refused(value: dict[str, object]) -> None:
    try:
        text = msgspec.json.encode(value)
    except OverflowError:
        return
    decoded = event_ids.decode(encoded(text))
    if decoded is not None:
        save, seen = decoded
        assert all(0 <= cursor < 1 << 64 for cursor in [*seen.values(), save or 0])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "====",
        "\u00e9",
        encoded(b"[]"),
        encoded(b"null"),
        encoded(b'{"a":1'),
        encoded(b'{"a":1}}'),
        encoded(b'{"a":-1}'),
        encoded(b'{"a":1.5}'),
        encoded(b'{"a":"1"}'),
        encoded(b'{"a":true}'),
        encoded(b'{"#":-1}'),
        encoded(b'{"a":18446744073709551616}'),
        encoded(b'{"a":' + b"9" * 5000 + b"}"),
        encoded(b'{"a":' + b"[" * 100_000),
        encoded(b'{"\xff":1}'),
        encoded(b'{"\\ud800":1}'),
        "A" * (event_ids.ID_BYTES_MAX + 1),
    ],
)
def test_foreign_event_ids_are_ignored(text: str) -> None:
    assert event_ids.decode(text) is None


def test_padding_that_a_client_kept_is_fine() -> None:
    assert event_ids.decode(urlsafe_b64encode(b'{"a":12}').decode()) == (None, {"a": 12})
