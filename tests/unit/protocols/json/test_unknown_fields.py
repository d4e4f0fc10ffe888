"""Goal: unknown fields of a body are found at every level and named, at a bounded cost; valid bodies never need the
search.
"""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from topics.api import requests
from topics.api.config import ConfigBody, ConsumerBody
from topics.api.errors import InvalidRequest
from topics.api.requests import (
    PublishBody,
    RecordBody,
    ResetBody,
    WatchBody,
    WriteBody,
)
from topics.link import wire
from topics.protocols.json.bodies import BodyType, UnknownField, read_body
from topics.protocols.json.unknown_fields import PATHS_MAX, SCANNED_MAX, Fields, ignored_header, strict

WRITE, CONFIG = BodyType(WriteBody), BodyType(ConfigBody)


def ignored(kind: type[msgspec.Struct], body: Any) -> list[str]:
    return BodyType(kind).read(json.dumps(body).encode(), is_strict=False)[1]


def refusal(kind: type[msgspec.Struct], body: Any) -> str:
    with pytest.raises(UnknownField) as caught:
        BodyType(kind).read(json.dumps(body).encode(), is_strict=True)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "body", "paths", "message"),
    [
        (ConfigBody, {"durabilty": "fsync"}, ["durabilty"],
         'unknown field "durabilty"; did you mean "durability"?'),
        (WriteBody, {"records": [{"data": {"x": 1}}, {"data": 1, "delay_ms": 1}, {"data": 1, "delay_ms": 2}]},
         ["records[].delay_ms"], 'unknown field "records[].delay_ms"'),
        (WriteBody, {"records": [{"data": 1, "meta": {"x": 1}}], "config": {"ttl": 1}}, ["config.ttl"],
         'unknown field "config.ttl"; did you mean "ttl_ms"?'),
        (WriteBody, {"records": [], "config": None, "if_tag_last_seq": {"tag": "a", "seq": 1, "sec": 2}},
         ["if_tag_last_seq.sec"], 'unknown field "if_tag_last_seq.sec"; did you mean "seq"?'),
        (WatchBody, {"topics": {"a.b": {"tial": 1}, "c": {}}}, ["topics.a.b.tial"],
         'unknown field "topics.*.tial"; did you mean "tail"?'),
        (ConsumerBody, {"deliver": {"from_seq": 1, "x": 1}}, ["deliver.x"], 'unknown field "deliver.x"'),
        (ResetBody, {"to": {"seq": 1, "x": 1}}, ["to.x"], 'unknown field "to.x"'),
        (PublishBody, {"op": "publish", "topic": "t", "request_id": {"x": 1}, "records": [], "x": 1}, ["x"],
         'unknown field "x"'),
        (ConfigBody, {"": 1}, [""], 'unknown field ""'),
        (ConfigBody, {"\0": 1}, [r"\x00"], r'unknown field "\x00"'),
    ],
)  # fmt: skip
def test_paths(kind: type[msgspec.Struct], body: Any, paths: list[str], message: str) -> None:
    assert ignored(kind, body) == paths
    assert refusal(kind, body) == message


def test_lines() -> None:
    lines = BodyType(RecordBody, lines=True)
    text = b'{"data":1}\n\n{"data":{"x":1},"delay":1}\n{"data":2,"delay":1,"taq":1}\n'
    records, paths = lines.read(text, is_strict=False)
    assert (len(records), paths) == (3, ["delay", "taq"])
    with pytest.raises(UnknownField, match='unknown field "delay"'):
        lines.read(text, is_strict=True)


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"ttl_ms":"x","odd":1}', "Expected `int`, got `str`"),
        (b"", "the body is empty"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"ttl_ms":1', "Input data was truncated"),
        (b'{"type":"lgo"}', "send one of log, queue"),
    ],
)
def test_other_errors_are_the_same_with_unknown_fields(text: bytes, message: str, is_strict: bool) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        CONFIG.read(text, is_strict=is_strict)
    assert not isinstance(caught.value, UnknownField)


def test_without_strictness_an_error_behind_an_unknown_field_is_found() -> None:
    for text, message in (
        (b'{"odd":1,"ttl_ms":"x"}', "ttl_ms"),
        (b'{"odd":1', "truncated"),
        (b'{"odd":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            CONFIG.read(text, is_strict=False)


def test_names_are_cut_and_escaped() -> None:
    names = ["z" * 500, "a\r\nSet-Cookie: x", "é,%", "`$` - at `$.records[1]`"]
    paths = ignored(ConfigBody, dict.fromkeys(names, 1))
    assert paths == ["z" * 64 + "…", "a\\r\\nSet-Cookie: x", "é,%", names[3]]
    line = ignored_header(paths)
    assert line.isascii()
    assert line.endswith(b", %C3%A9%2C%25, %60%24%60%20-%20at%20%60%24.records[1]%60\r\n")
    assert line.count(b"\r\n") == 1
    assert len(ignored_header(["é" * 64] * 16)) < 1100
    for name in names:
        assert refusal(ConfigBody, {name: 1}).isprintable()


def test_a_request_notes_what_was_ignored() -> None:
    def request(body: bytes, flags: int = 0) -> wire.Request:
        return wire.Request(1, 0, 0, wire.DIFF, flags, b"t", b"", body)

    odd = request(b'{"ttl_ms":5,"odd":1}', wire.NO_SEQS)
    assert read_body(CONFIG, odd).ttl_ms == 5
    assert (odd.flags, odd.ignored) == (wire.NO_SEQS | wire.IGNORED, ["odd"])
    good = request(b'{"ttl_ms":5}', wire.STRICT)
    assert read_body(CONFIG, good).ttl_ms == 5
    assert good.flags == wire.STRICT
    with pytest.raises(UnknownField):
        read_body(CONFIG, request(b'{"odd":1}', wire.STRICT))


def test_a_good_body_is_never_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fields, "unknown", None)
    monkeypatch.setattr(Fields, "refusal", None)
    text = b'{"records":[{"data":{"odd":1},"tag":"a","meta":{"odd":1}}],"node":"n","config":{"ttl_ms":1}}'
    assert WRITE.read(text, is_strict=False)[1] == []


def test_a_strict_type_is_the_type_and_has_its_fields_in_their_order() -> None:
    bodies = [
        body
        for body in (*vars(requests).values(), ConsumerBody)
        if isinstance(body, type) and issubclass(body, msgspec.Struct) and body is not msgspec.Struct
    ]
    for body in bodies:
        assert issubclass(strict(body), body)
        assert strict(body).__struct_fields__ == body.__struct_fields__
        fields = zip(msgspec.structs.fields(strict(body)), msgspec.structs.fields(body))
        assert all((one.default, one.required) == (two.default, two.required) for one, two in fields)


# -- large and hostile bodies ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        (
            b'{"records":[{"data":1}],%b}' % b",".join(b'"k%x":1' % i for i in range(2 * SCANNED_MAX)),
            PATHS_MAX,
        ),
        (b'{"records":[{"data":1}],%b"z":1}' % (b'"k":1,' * (2 * SCANNED_MAX)), 1),
        (b'{"records":[%b{"data":1}]}' % (b'{"data":1,"x":1},' * (SCANNED_MAX + 1)), 0),
        (b'{"records":[%b]}' % b",".join(b'{"data":1,"k%d":1}' % i for i in range(10_000)), PATHS_MAX),
    ],
    ids=["many names", "one name many times", "more records than anyone may send", "a name for each record"],
)
def test_the_search_is_bounded(text: bytes, paths: int) -> None:
    body = msgspec.json.Decoder(WriteBody).decode(text)
    fields = Fields(WriteBody)
    tracemalloc.start()
    try:
        found = fields.unknown(text, body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found) == len(set(found)) == paths
    assert peak < 1 << 20


def test_a_large_batch_names_its_field_once() -> None:
    records = [{"data": i, "delay_ms": 1} for i in range(10_000)]
    records[-1]["taq"] = "last"  # type: ignore[assignment]
    assert ignored(WriteBody, {"records": records}) == ["records[].delay_ms", "records[].taq"]
