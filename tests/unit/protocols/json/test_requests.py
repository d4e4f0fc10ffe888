"""Raw bodies: each becomes a JSON value, a string or bytes, and never anything else than was sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from topics.api.errors import InvalidRequest, RecordTooLarge
from topics.api.limits import RECORD_BYTES_MAX
from topics.engine.commands.topics import Append
from topics.link import wire
from topics.protocols.json.requests import read_raw

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def read(body: bytes, flags: int = 0, **args: Any) -> Append:
    return read_raw(
        "t", wire.Request(1, 0, 1000, wire.WRITE, flags, b"t", b"", body, wire.RAW), wire.Args(**args)
    )


def stored(body: bytes, flags: int = 0) -> tuple[bytes, bool]:
    """The payload, and whether it is bytes."""
    records = read(body, flags).records
    return records.payloads[0], records.raw


@given(st.binary())
@example(b"")
@example(b"\xff{}")
@example(b"[" * 100_000)
@example(b'["\\ud800"]')
@example(b"\xef\xbb\xbf{}")
def test_every_body_is_stored_as_it_is(body: bytes) -> None:
    payload, is_bytes = stored(body)
    try:
        text = body.decode()
    except UnicodeDecodeError:
        assert (payload, is_bytes) == (body, True)
        return
    assert not is_bytes
    if payload[:1] == b'"':
        assert json.loads(payload) == text
    else:
        assert payload == body.strip(b" \t\n\r").replace(b"\n", b" ").replace(b"\r", b" ")
        json.loads(payload)


@given(VALUES, st.sampled_from([None, 1]), st.booleans(), st.sampled_from([b"", b" \r\n\t"]))
def test_json_keeps_its_value(value: Any, indent: int | None, ascii_only: bool, around: bytes) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    body = around + text + around
    payload, is_bytes = stored(body, wire.MUST_PARSE)
    assert not is_bytes and b"\n" not in payload
    assert json.loads(payload) == value
    # Without the content type only unambiguous bodies are JSON.
    guessed = json.loads(stored(body)[0])
    assert guessed == (value if isinstance(value, dict | list) else body.decode())


@pytest.mark.parametrize(
    "body", [b"", b"  ", b"{", b"NaN", b"[1,]", b'"\xff"', b"\xff", b"text", b"[" * 100_000]
)
def test_json_bodies_must_be_valid_json(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read(body, wire.MUST_PARSE)


def test_the_rest_of_the_record() -> None:
    traceparent = f"00-{1:032x}-{2:016x}-01"
    command = read(b"x", tag="a.b", node="n", create=False, idempotency_key="k", traceparent=traceparent)
    assert (command.topic, command.idempotency_key, command.create) == ("t", b"k", False)
    assert (command.records.tags, command.records.nodes) == ([b"a.b"], [b"n"])
    assert command.records.payloads == [b'"x"{"traceparent":"%b"}' % traceparent.encode()]
    assert read(b"\xff", traceparent=traceparent).records.payloads == [b"\xff"], "bytes have no meta"
    for args in (
        {"tag": "t" * 257},
        {"node": "n" * 129},
        {"idempotency_key": "k" * 257},
        {"idempotency_key": ""},
    ):
        with pytest.raises(InvalidRequest):
            read(b"x", **args)


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        (b"\xff" * RECORD_BYTES_MAX, True),
        (b"\xff" * (RECORD_BYTES_MAX + 1), False),
        (b"x" * (RECORD_BYTES_MAX - 2), True),  # and two quotes
        (b"x" * (RECORD_BYTES_MAX - 1), False),
        (b"\n" * (RECORD_BYTES_MAX // 2), False),  # escaped
        (b"[" + b" " * RECORD_BYTES_MAX + b"]", True),  # counts as compact JSON
    ],
)
def test_sizes(body: bytes, fits: bool) -> None:
    if fits:
        read(body)
        return
    with pytest.raises(RecordTooLarge):
        read(body)
