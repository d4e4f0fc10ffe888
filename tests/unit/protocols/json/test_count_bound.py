"""Goal: a body with too many objects is refused before it is decoded, wherever they are, and no other body is.

Method: bodies at the bound and one above, in every spelling that the cheap count of braces handles or does not.
"""

from __future__ import annotations

import pytest

from tests.support.faults import fault
from topics.api.errors import BatchTooLarge, InvalidRequest
from topics.link import wire
from topics.protocols.json.count_bound import RECORD_LINES, RECORDS, CountBound, has_more_lines
from topics.protocols.json.requests import read_lines, read_write
from topics.protocols.json.transactions import read_stage

MOST = 10_000
# One record each: the smallest ones, and ones with braces that begin no record.
SPELLINGS = [
    b"{}",
    b'{"data":1}',
    b'{"data":{"a":1}}',
    b'{"data": {"a": 1}}',
    b'{"data":[{},{}]}',
    b'{"data":":{"}',
]


@pytest.mark.parametrize("record", SPELLINGS)
@pytest.mark.parametrize("between", [b",", b", ", b" ,\n\t"])
def test_records_at_the_bound_and_beyond(record: bytes, between: bytes) -> None:
    for count in (1, MOST, MOST + 1, 3 * MOST):
        body = b'{"node":"n","records":[%b],"x":{}}' % between.join([record] * count)
        assert RECORDS.is_exceeded(body) == (count > MOST), count
        assert RECORDS.is_exceeded(memoryview(body)) == (count > MOST), count


@pytest.mark.parametrize("record", SPELLINGS)
def test_lines_at_the_bound_and_beyond(record: bytes) -> None:
    assert not RECORD_LINES.is_exceeded(b"\n".join([record] * MOST))
    assert RECORD_LINES.is_exceeded(b"\n".join([record] * (MOST + 2)))
    assert (
        has_more_lines(b"\n" * 11, 10) and not has_more_lines(b"\n" * 10, 10) and not has_more_lines(b"", 10)
    )


def test_names_at_the_bound_and_beyond() -> None:
    names = CountBound("topics", 256, dict)
    for count in (256, 257, 5000):
        body = b'{"topics":{%b}}' % b",".join(b'"t%d": {}' % i for i in range(count))
        assert names.is_exceeded(body) == (count > 256)


def test_nothing_behind_the_first_beyond_it_is_looked_at() -> None:
    flood = b'{"records":[' + b"{}," * (MOST + 1)
    assert RECORDS.is_exceeded(flood + b"\xff not JSON")
    assert not RECORDS.is_exceeded(b'{"other":[' + b"{}," * MOST * 2 + b"{}]}")
    assert not RECORDS.is_exceeded(b'{"records":[' + b"{}," * 100 + b"oops" + b"{}," * MOST * 2)


def request(body: bytes) -> wire.Request:
    return wire.Request(1, 0, 1000, wire.WRITE, 0, b"t", b"", memoryview(body))


@fault("request", "millions of tiny records in one body", "400 at record 10 001; the rest is not decoded")
def test_a_flood_of_records_is_refused_while_it_is_decoded() -> None:
    # The rest is not JSON, so an answer about the number of records shows that it was not read.
    for tail in (b"{}]}", b"oops"):
        body = b'{"part":"a","chunk":0,"records":[' + b"{}," * 50_000 + tail
        for read in (
            lambda r: read_write("t", r, wire.NO_ARGS, bool),
            lambda r: read_stage("t", r, wire.NO_ARGS),
        ):
            with pytest.raises(BatchTooLarge) as refused:
                read(request(body))
            assert refused.value.detail == {"records": MOST + 1, "max": MOST}
        with pytest.raises(BatchTooLarge):
            read_lines("t", request(b"{}\n" * 50_000 + tail), wire.NO_ARGS)
    with pytest.raises(InvalidRequest):
        read_write("t", request(b'{"records":[' + b"{}," * 100 + b"oops"), wire.NO_ARGS, bool)
