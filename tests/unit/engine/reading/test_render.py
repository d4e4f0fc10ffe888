"""render_records: json reads its output back unchanged, for every kind of record and every choice of columns."""

from __future__ import annotations

import itertools
import json
from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from topics.engine.commands.topics import Page, Records
from topics.engine.reading.render import render_records
from topics.engine.storage.frames import encode_appends

TS = 1748470000123


def make_page(writes: list[Records], *, first_seq: int = 1, ts: int = TS, buffers: bool = False) -> Page:
    """A page of these writes, contiguous in one buffer, or each write in its own."""
    page = Page.empty("t", next_from_seq=0, head_seq=0, earliest_seq=0)
    page.tags, page.nodes = [], []
    page.which = [] if buffers else None
    data = b""
    for records in writes:
        pieces: list[bytes] = [b"junk"]
        lengths, flags = encode_appends(pieces, records, topic_id=7, first_seq=first_seq, ts=ts)
        count = len(lengths)
        page.seqs += range(first_seq, first_seq + count)
        page.timestamps += [ts] * count
        page.flags += flags or [0] * count
        page.lengths += lengths
        page.tags += records.tags or [None] * count  # type: ignore[operator]
        page.nodes += records.nodes or [None] * count  # type: ignore[operator]
        base = 4 + (0 if buffers else len(data))
        page.starts += [base + sum(lengths[:i]) for i in range(count)]
        if page.which is not None:
            page.which += [len(page.frames)] * count
            page.frames.append(b"".join(pieces))
        else:
            data += b"".join(pieces)
        first_seq += count
        ts += 1
    if not buffers:
        page.frames = [data]
    if not any(page.tags or ()):
        page.tags = None
    if not any(page.nodes or ()):
        page.nodes = None
    return page


def rendered(page: Page, **choice: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(b"[" + render_records(page, **choice) + b"]")
    return found


def test_an_empty_page_is_empty() -> None:
    assert render_records(make_page([])) == b""


def test_a_plain_record_is_spliced_as_it_is() -> None:
    page = make_page([Records([b'{"a" : 1}', b"2"])])
    assert render_records(page) == (
        b'{"$seq":1,"$ts":1748470000123,"data":{"a" : 1}},{"$seq":2,"$ts":1748470000123,"data":2}'
    )


def test_all_keys_in_order() -> None:
    page = make_page([Records([b'{"a":1}"m"'], tags=[b"t"], nodes=[b"n"], meta_lens=[3])])
    assert render_records(page, include_tags=True) == (
        b'{"$seq":1,"$ts":1748470000123,"$node":"n","$tag":"t","data":{"a":1},"meta":"m"}'
    )


def test_raw_records_are_base64() -> None:
    page = make_page(
        [Records([b"H:1\r\n\xff\x00", b"\x01"], tags=[b"t", None], header_lens=[5, 0], raw=True)]
    )
    assert render_records(page, include_tags=True) == (
        b'{"$seq":1,"$ts":1748470000123,"$tag":"t","$encoding":"base64","data":"/wA=","headers":"SDoxDQo="},'
        b'{"$seq":2,"$ts":1748470000123,"$encoding":"base64","data":"AQ=="}'
    )


@pytest.mark.parametrize("count", [1, 47, 48])
@pytest.mark.parametrize("buffers", [False, True])
def test_every_kind_of_record(count: int, buffers: bool) -> None:
    for has in itertools.product([False, True], repeat=4):
        check_kind(count, buffers, *has)


def check_kind(count: int, buffers: bool, tagged: bool, noded: bool, meta: bool, raw: bool) -> None:
    """Every second record has the fields of the parameters; a plain write follows."""
    odd = [i % 2 == 1 for i in range(count)]
    data = [b'{"i":%d,"text":"%b"}' % (i, b"x" * (i % 7)) for i in range(count)]
    extra = [b'"extra"' if has and meta else b"" for has in odd]
    records = Records(
        payloads=[e + d if raw else d + e for d, e in zip(data, extra)],
        tags=[b"tag.%d" % (i % 3) if has else None for i, has in enumerate(odd)] if tagged else None,
        nodes=[b"node %d" % (i % 2) if has else None for i, has in enumerate(odd)] if noded else None,
        raw=raw,
    )
    lens = [len(e) for e in extra] if meta else None
    if raw:
        records.header_lens = lens
    else:
        records.meta_lens = lens
    page = make_page([records, Records([b"1"])], buffers=buffers)
    for include_tags, include_meta, include_data in itertools.product([False, True], repeat=3):
        rows = rendered(page, include_tags=include_tags, include_meta=include_meta, include_data=include_data)
        expected: list[dict[str, Any]] = []
        for i in range(count):
            row: dict[str, Any] = {"$seq": i + 1, "$ts": TS}
            if noded and odd[i]:
                row["$node"] = f"node {i % 2}"
            if include_tags and tagged and odd[i]:
                row["$tag"] = f"tag.{i % 3}"
            if include_data and raw:
                row |= {"$encoding": "base64", "data": data[i]}
                if extra[i]:
                    row["headers"] = extra[i]
            elif include_data:
                row["data"] = json.loads(data[i])
            if not raw and include_meta and extra[i]:
                row["meta"] = "extra"
            expected.append(row)
        expected.append(
            {"$seq": count + 1, "$ts": TS + 1, "data": 1}
            if include_data
            else {"$seq": count + 1, "$ts": TS + 1}
        )
        for row in rows:
            for key in row.keys() & {"data", "headers"} if "$encoding" in row else ():
                row[key] = b64decode(row[key])
        assert rows == expected
        assert [list(row) for row in rows] == [list(row) for row in expected]


def test_extensions_that_readers_do_not_see() -> None:
    page = make_page([Records([b'"a"', b'"bc"'], ttls_ms=[5, 0], sizes=[9, 4])])
    assert [row["data"] for row in rendered(page)] == ["a", "bc"]


@pytest.mark.parametrize("name", ["é", "日本語 🦆", 'a"b\\c', "\x01\n\t", "\x7f", "a/b"])
def test_names_are_json_strings(name: str) -> None:
    records = Records([b"0"], tags=[name.encode()], nodes=[name.encode()])
    assert rendered(make_page([records]), include_tags=True)[0] | {"$ts": 0} == {
        "$seq": 1, "$ts": 0, "$node": name, "$tag": name, "data": 0,
    }  # fmt: skip


def test_names_that_are_no_text_survive_as_surrogates() -> None:
    raw = b'\xff"\xc3(\\ok\x80'
    row = rendered(make_page([Records([b"0"], tags=[raw])]), include_tags=True)[0]
    assert row["$tag"].encode("utf-8", "surrogateescape") == raw


@pytest.mark.parametrize("first_seq", [1, 9, 99, 950, 9_990, 99_999_000, 123_456_789_012, (1 << 53) - 200])
@pytest.mark.parametrize("ts", [1, 999_999_999_999, TS])
def test_numbers_of_any_width(first_seq: int, ts: int) -> None:
    page = make_page([Records([b"0"] * 100)], first_seq=first_seq, ts=ts)
    assert render_records(page) == b",".join(
        b'{"$seq":%d,"$ts":%d,"data":0}' % (first_seq + i, ts) for i in range(100)
    )


def test_columns_may_be_arrays() -> None:
    page = make_page([Records([b'{"n":%d}' % i for i in range(60)])])
    text = render_records(page)
    for name in ("seqs", "timestamps", "flags", "starts", "lengths"):
        setattr(page, name, np.array(getattr(page, name)))
    assert render_records(page) == text


@pytest.mark.parametrize("buffers", [False, True], ids=["one buffer", "buffers"])
@pytest.mark.parametrize(
    "sizes",
    [
        [[4] * 70],
        [[4] * 40, [4] * 60],
        [[4] * 50 + [5, 3] + [4] * 48],
        [[4] * 99 + [9]],
        [[3] * 60, [4] * 60],
    ],
    ids=["one write", "two writes", "two that differ", "the last differs", "writes of two sizes"],
)
def test_records_of_one_size_or_almost(sizes: list[list[int]], buffers: bool) -> None:
    """Such a page is rendered in one piece: similar pages must not be."""
    numbers = iter(range(10**2, 10**3))
    writes = [[b"%d" % (next(numbers) * 10 ** (size - 3)) for size in write] for write in sizes]
    page = make_page([Records(payloads) for payloads in writes], first_seq=970, buffers=buffers)
    expected, seq = [], 970
    for i, payloads in enumerate(writes):
        for payload in payloads:
            expected.append(b'{"$seq":%d,"$ts":%d,"data":%b}' % (seq, TS + i, payload))
            seq += 1
    assert render_records(page) == b",".join(expected)
