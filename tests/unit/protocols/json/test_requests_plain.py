"""A write whose records have only data and tags uses a faster decoder, which gives the same command or error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from topics.api.errors import TopicsError
from topics.api.limits import BATCH_RECORDS_MAX, KEY_BYTES_MAX, RECORD_BYTES_MAX
from topics.engine.commands.topics import Append
from topics.link import wire
from topics.protocols.json import requests
from topics.protocols.json.requests import TAG_BYTES_MAX, read_write

LARGE = "x" * RECORD_BYTES_MAX
TAGS = st.none() | st.text(max_size=3) | st.just("é" * TAG_BYTES_MAX) | st.just("t" * TAG_BYTES_MAX)
DATA = st.none() | st.integers() | st.text(max_size=4) | st.just(LARGE) | st.just({"a": [1, " \n"]})
RECORDS = st.lists(
    st.fixed_dictionaries({"data": DATA}, optional={"tag": TAGS | st.integers()}), min_size=1, max_size=4
)
KEYS = st.sampled_from([None, "", "key", "k" * (KEY_BYTES_MAX + 1)])


def read(records: list[dict[str, Any]], key: str | None = None, flags: int = 0) -> Append | tuple[type, str]:
    """The command, or the error."""
    body = json.dumps({"records": records}).encode()
    request = wire.Request(1, 0, 1000, wire.WRITE, flags, b"t", b"", body)
    try:
        return read_write("t", request, wire.Args(idempotency_key=key), lambda name: True)
    except TopicsError as error:
        return type(error), str(error)


@given(RECORDS, KEYS, st.sampled_from([0, wire.WITH_EPOCH]))
@example([{"data": LARGE, "tag": "t"}], "", 0)
@example([{"data": LARGE, "tag": None}], "", 0)
@example([{"data": 1, "tag": ""}], None, 0)
@example([{"data": 1, "tag": "t" * (TAG_BYTES_MAX + 1)}, {"data": LARGE}], "key", 0)
def test_the_faster_decoder_makes_no_difference(
    records: list[dict[str, Any]], key: str | None, flags: int
) -> None:
    if not any("tag" in record for record in records):
        records[-1]["tag"] = "t"
    # A field with its default value uses the other decoder.
    assert read(records, key, flags) == read([record | {"ttl_ms": 0} for record in records], key, flags)


def test_a_tagged_write_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "read_body", lambda *arguments: pytest.fail("decoded twice"))
    found = read([{"data": 1, "tag": "a"}, {"data": 2}, {"data": 3, "tag": None}])
    assert isinstance(found, Append)
    assert found.records.tags == [b"a", None, None]
    assert found.records.payloads == [b"1", b"2", b"3"]


def test_too_many_tagged_records() -> None:
    records = [{"data": 1, "tag": "a"}] * (BATCH_RECORDS_MAX + 1)
    assert read(records) == read([record | {"ttl_ms": 0} for record in records])
    assert read([]) == read([])
