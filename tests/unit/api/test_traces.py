"""Goal: a valid `traceparent` reaches the record's meta, an invalid one changes nothing, and neither makes a write fail.

Method: headers by the table of the W3C recommendation; bodies with the header and without are read, and their records compared.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from topics.api import limits
from topics.api.traces import read_traceparent
from topics.engine.commands import topics as cmd
from topics.link import wire
from topics.protocols.json.requests import META_BYTES_MAX, read_lines, read_write

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("header", "read"),
    [
        (PARENT, PARENT),
        (f"00-{TRACE}-{SPAN}-00", f"00-{TRACE}-{SPAN}-00"),
        (f"00-{TRACE}-{SPAN}-ff", f"00-{TRACE}-{SPAN}-ff"),
        # A later version: the known fields are used.
        (f"01-{TRACE}-{SPAN}-01", PARENT),
        (f"cc-{TRACE}-{SPAN}-03-what the future brings", PARENT),
        (f"cc-{TRACE}-{SPAN}-02", f"00-{TRACE}-{SPAN}-00"),
        # Malformed.
        ("", ""),
        (f"00-{TRACE}-{SPAN}-01-more", ""),
        (f"00-{TRACE}-{SPAN}-01 ", ""),
        (f"ff-{TRACE}-{SPAN}-01", ""),
        (f"00-{'0' * 32}-{SPAN}-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (f"00-{TRACE.upper()}-{SPAN}-01", ""),
        (f"00-{TRACE[:-1]}-{SPAN}-01", ""),
        (f"00-{TRACE}-{SPAN}-1", ""),
        (f"00-{TRACE}-{SPAN}", ""),
        (f"0-{TRACE}-{SPAN}-01", ""),
        (f"cc-{TRACE}-{SPAN}-01.more", ""),
        (f"{PARENT}, {PARENT}", ""),
        (f"00_{TRACE}_{SPAN}_01", ""),
    ],
)
def test_headers(header: str, read: str) -> None:
    assert read_traceparent(header.encode()) == read


def test_bytes_that_are_no_text() -> None:
    assert read_traceparent(b"\xff" * 55) == ""
    assert read_traceparent(b"00-" + b"\n" * 52) == ""


# ---- in the record's meta


def records(body: Any, trace: str = PARENT) -> cmd.Records:
    text = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    request = wire.Request(1, 0, 0, wire.WRITE, 0, b"t", b"", text)
    return read_write("t", request, wire.Args(traceparent=trace), lambda name: True).records


def metas(found: cmd.Records) -> list[bytes]:
    lens = found.meta_lens or [0] * len(found.payloads)
    return [payload[len(payload) - size :] for payload, size in zip(found.payloads, lens)]


def one(**fields: Any) -> dict[str, Any]:
    return {"records": [{"data": 1, **fields}]}


OWN = b'{"traceparent":"%b"}' % PARENT.encode()


def test_records_without_meta_get_one() -> None:
    for body in (one(), one(tag="a"), one(meta=None), {**one(), "idempotency_key": "k"}):
        found = records(body)
        assert metas(found) == [OWN]
        assert (found.sizes or [len(p) for p in found.payloads]) == [1 + len(OWN)]


def test_all_records_of_a_batch_get_it() -> None:
    found = records({"records": [{"data": 1}, {"data": 2, "meta": {"a": 1}}]})
    assert metas(found) == [OWN, b'{"a":1,' + OWN[1:]]


def test_existing_trace_headers_are_kept_unchanged() -> None:
    text = b'{"records":[{"data": 1,"meta":{ "b" : 1.50, "a":[] } }]}'
    found = records(text)
    assert metas(found) == [b'{ "b" : 1.50, "a":[] ,' + OWN[1:]]
    # Its size is that of the compact form.
    assert found.sizes == [1 + len(b'{"b":1.50,"a":[],') + len(OWN) - 1]
    assert metas(records(one(meta={}))) == [OWN]


@pytest.mark.parametrize(
    "meta",
    [
        {"traceparent": "the writer's own"},
        {"a": 1, "traceparent": None},
        [1, 2],
        "text",
        {str(i): 1 for i in range(limits.META_KEYS_MAX)},
        {"a": "x" * (META_BYTES_MAX - 40)},
    ],
    ids=["own", "own null", "list", "string", "full", "long"],
)
def test_a_meta_that_cannot_take_it_is_left_alone(meta: Any) -> None:
    body = one(meta=meta)
    assert metas(records(body)) == metas(records(body, ""))
    assert records(body).sizes == records(body, "").sizes


def test_a_record_that_is_full_is_left_alone() -> None:
    body = {"records": [{"data": "x" * (limits.RECORD_BYTES_MAX - 2)}, {"data": 1}]}
    assert metas(records(body)) == [b"", OWN]


def test_bytes_have_no_meta() -> None:
    found = records({"records": [{"data_base64": "AAEC"}]})
    assert (found.payloads, found.meta_lens) == ([b"\0\1\2"], None)


def test_lines() -> None:
    request = wire.Request(1, 0, 0, wire.WRITE, 0, b"t", b"", b'{"data":1}\n{"data":2}\n', wire.LINES)
    found = read_lines("t", request, wire.Args(traceparent=PARENT)).records
    assert metas(found) == [OWN, OWN]


def test_without_a_header_nothing_changes() -> None:
    found = records(one(), "")
    assert (found.payloads, found.meta_lens, found.sizes) == ([b"1"], None, None)
