"""Bodies read in slices: the same result as in one go, and errors with positions from the start of the body."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import msgspec
import pytest

from tests.support import length
from topics.api.errors import BatchTooLarge, InvalidRequest, RecordTooLarge, TopicsError
from topics.engine.commands import topics as cmd
from topics.link import wire
from topics.protocols.encoding import Steps
from topics.protocols.json import large_bodies, requests
from topics.protocols.json import transactions as transaction_requests
from topics.protocols.json.json_text import SHORT, compact_size
from topics.protocols.json.large_bodies import read_large
from workers.shard.large_bodies import LargeBodies

Kind: TypeAlias = tuple[int, int]  # operation, encoding
WRITE, LINES, STAGE = (wire.WRITE, wire.JSON), (wire.WRITE, wire.LINES), (wire.TXN_STAGE, wire.JSON)
READ: dict[Kind, Callable[[wire.Request, wire.Args], Any]] = {
    WRITE: lambda r, a: requests.read_write("t", r, a, lambda _: True),
    LINES: lambda r, a: requests.read_lines("t", r, a),
    STAGE: lambda r, a: transaction_requests.read_stage("t", r, a)[0],
}
ARGS = wire.Args(txn="0000000000000001", node="front")


def request_of(body: bytes, kind: Kind = WRITE, flags: int = 0) -> wire.Request:
    op, encoding = kind
    return wire.Request(1, 0, 0, op, flags, b"t", b"", memoryview(body), encoding)


def sliced(body: bytes, kind: Kind = WRITE, flags: int = 0) -> tuple[Any, wire.Request, int]:
    """The command, the request with what was ignored, and the number of steps."""
    request = request_of(body, kind, flags)
    steps = read_large(request, ARGS.traceparent, lambda: (READ[kind](request, ARGS), None))
    for count in range(1_000_000):
        try:
            next(steps)
        except StopIteration as end:
            return end.value[0], request, count
    raise AssertionError("it does not end")


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "SLICE_BYTES", 32)


def is_same(body: bytes, kind: Kind = WRITE) -> bool:
    """Check that a body gives the same in one go and in slices; True if it was accepted."""
    whole = request_of(body, kind)
    try:
        expected = READ[kind](whole, ARGS)
    except TopicsError as refusal:
        with pytest.raises(type(refusal)):
            sliced(body, kind)
        return False
    command, request, _ = sliced(body, kind)
    assert _columns(command.records) == _columns(expected.records), body
    command.records = expected.records
    assert command == expected
    assert getattr(request, "ignored", []) == getattr(whole, "ignored", [])
    return True


def _columns(records: Any) -> list[Any]:
    """An empty column is the same as none."""
    count = len(records.payloads)
    sizes = records.sizes or list(map(len, records.payloads))
    return [
        records.payloads,
        records.tags or [None] * count,
        records.nodes or [None] * count,
        records.meta_lens or [0] * count,
        records.ttls_ms or [0] * count,
        sizes,
        records.raw,
    ]


STRINGS = [
    '"a"',
    '"\\""',
    '"\\\\"',
    '"},{"',
    '"\\u00e9"',
    '"é😀"',
    '"]}"',
    '"[\\"{"',
    '"records"',
    '"\\\\\\""',
]


def some_value(source: random.Random, depth: int = 3) -> str:
    kind = source.randrange(6 if depth else 3)
    if kind == 0:
        return source.choice(("1", "null", "-2.5e3", "true"))
    if kind <= 2:
        return source.choice(STRINGS)
    inner = [some_value(source, depth - 1) for _ in range(source.randrange(4))]
    blank = source.choice(("", "", " ", "\n "))
    if kind == 3:
        return "[" + f"{blank},".join(inner) + blank + "]"
    return "{" + f",{blank}".join(f"{source.choice(STRINGS)}:{blank}{value}" for value in inner) + "}"


def some_record(source: random.Random) -> str:
    members = [f'"data":{some_value(source)}'] if source.random() < 0.95 else ['"data_base64":"AAAA"']
    members += ['"tag":"x"'] * (source.random() < 0.2)
    members += ['"node":"y"'] * (source.random() < 0.2)
    members += [f'"meta":{{"m":{some_value(source)}}}'] * (source.random() < 0.2)
    members += ['"ttl_ms":5'] * (source.random() < 0.1)
    members += [f'"extra":{some_value(source)}'] * (source.random() < 0.05)
    source.shuffle(members)
    return "{" + ",".join(members) + "}"


def some_body(source: random.Random, kind: Kind) -> bytes:
    rows = [some_record(source) for _ in range(source.choice((0, 1, 1, 2, 3, 8)))]
    if kind == LINES:
        return source.choice(("\n", "\r\n", "\n\n")).join(row.replace("\n", "") for row in rows).encode()
    blank = source.choice(("", "", " ", "\n\t"))
    members = [f'"records"{blank}:{blank}[{blank}' + f"{blank},{blank}".join(rows) + f"{blank}]"]
    members += ['"part":"p"', '"chunk":0'] * (kind == STAGE)
    members += ['"node":"all"'] * (source.random() < 0.2)
    members += [f'"x":{{"records":[{some_value(source)}]}}'] * (source.random() < 0.2)
    members += ['"y\\"records":[1,2]'] * (source.random() < 0.1)
    source.shuffle(members)
    return ("{" + ",".join(members) + "}").encode()


def damaged(source: random.Random, body: bytes) -> bytes:
    at = source.randrange(len(body) + 1)
    match source.randrange(4):
        case 0:
            return body[:at]
        case 1:
            return (
                body[:at]
                + source.choice((b",", b"]", b"[", b"{", b"}", b'"', b"\\", b"\xff", b" "))
                + body[at:]
            )
        case 2:
            return body[:at] + body[at + 1 :]
    return body.replace(b"}", source.choice((b"},", b"}}", b"]")), 1)


@pytest.mark.parametrize("kind", READ)
def test_reads_as_in_one_go(kind: Kind, small_slices: None) -> None:
    source = random.Random(sum(kind))
    taken = refused = 0
    count = length.pick(short=100, long=2000)
    for _ in range(count):
        body = some_body(source, kind)
        if source.random() < 0.4:
            body = damaged(source, body)
        if is_same(body, kind):
            taken += 1
        else:
            refused += 1
    assert taken > count // 5 and refused > count // 5


def write_of(records: list[bytes]) -> bytes:
    return b'{"records":[%b]}' % b",".join(records)


ROW = b'{"data":"%b"}' % (b"x" * 6000)


def test_a_step_is_a_slice() -> None:
    command, _, steps = sliced(write_of([ROW] * 5000))
    assert len(command.records.payloads) == 5000
    assert steps > 2 * 5000 * len(ROW) // large_bodies.SLICE_BYTES - 2


def test_errors_count_from_the_start_of_the_body() -> None:
    rows = [ROW] * 400
    with pytest.raises(InvalidRequest, match=r"\$\.records\[300\]\.tag"):
        sliced(write_of([*rows[:300], b'{"data":1,"tag":2}', *rows[300:]]))
    with pytest.raises(InvalidRequest, match="record 300 has no data"):
        sliced(write_of([*rows[:300], b'{"tag":"a"}', *rows[300:]]))
    body = write_of([*rows[:300], b'{"data":"\xff"}', *rows[300:]])
    with pytest.raises(InvalidRequest, match=f"byte {body.index(255)}$"):
        sliced(body)
    lines = b"\n".join([*rows[:300], b'{"data":1,"tag":2}', *rows])
    with pytest.raises(InvalidRequest, match=r"\$\[300\]\.tag"):
        sliced(lines, LINES)


@pytest.mark.parametrize("kind", READ)
def test_bodies_refused_before_decoding(kind: Kind) -> None:
    beside = b'"part":"p","chunk":0,'
    separator = b"\n" if kind == LINES else b","

    def body_of(rows: list[bytes]) -> bytes:
        joined = separator.join(rows)
        return joined if kind == LINES else b'{%b"records":[%b]}' % (beside, joined)

    with pytest.raises(BatchTooLarge):
        sliced(body_of([b'{"data":1}'] * 10_001), kind)
    assert len(sliced(body_of([b'{"data":1}'] * 10_000), kind)[0].records.payloads) == 10_000
    tokens = b'{"data":[%b1]}' % (b"1," * (3 << 19))
    with pytest.raises(RecordTooLarge, match="record 1 "):
        sliced(body_of([b'{"data":1}', tokens]), kind)
    with pytest.raises(RecordTooLarge):
        sliced(body_of([b'{"data":%b1}' % (b" " * (9 << 20))]), kind)
    # A body that is large only because of blanks and escapes is accepted.
    escaped = b'{"data":"%b"}' % (b"\\u0041" * (1 << 20))[: 6 * ((1 << 20) - 2)]
    assert sliced(body_of([escaped]), kind)[0].records.sizes == [1 << 20]


def test_fields_besides_the_records_are_bounded() -> None:
    for body in (
        b'{"x":"%b","records":[{"data":1}]}' % (b"x" * (1 << 20)),
        b'{"records":[{"data":1}],"x":[%b1]}' % (b"1," * (1 << 19)),
        b'{"rec\\u006frds":[%b1]}' % (b"1," * (1 << 19)),
    ):
        with pytest.raises(TopicsError) as refusal:
            sliced(body)
        assert refusal.value.code == "payload_too_large"
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        sliced(b"[" * (2 << 20))


def test_a_second_list_of_records_is_refused() -> None:
    rows = b",".join([ROW] * 200)
    with pytest.raises(InvalidRequest, match="two lists of records"):
        sliced(b'{"records":[%b],"records":[{"data":1}]}' % rows)


def test_a_strict_request_and_ignored_fields() -> None:
    rows = [ROW] * 400
    body = write_of([*rows, b'{"data":1,"tga":"x"}'])
    assert sliced(body)[1].ignored == ["records[].tga"]
    with pytest.raises(InvalidRequest, match=r'unknown field "records\[\]\.tga"; did you mean "tag"'):
        sliced(body, flags=wire.STRICT)


def test_one_after_the_other_in_order() -> None:
    large = LargeBodies()
    for body in (write_of([ROW] * 300), write_of([b"{}"] * 400_000), write_of([ROW] * 200)):
        large.add(b"front", request_of(body))

    def begin(request: wire.Request) -> Steps:
        return read_large(request, "", lambda: (READ[WRITE](request, ARGS), None))

    found: list[int] = []
    while large.queue:
        try:
            read = large.step(begin)
        except BatchTooLarge:
            found.append(-1)
        else:
            if read is not None:
                large.pop()
                found.append(len(cast(cmd.Append, read[0]).records.payloads))
    assert found == [300, -1, 200]


def test_the_size_of_escapes_without_decoding() -> None:
    source = random.Random(7)
    codes = (0, 9, 0x1F, 0x22, 0x41, 0x5C, 0x7F, 0xE9, 0x7FF, 0x800, 0x2028, 0xFFFF)
    pieces = [f"\\u{code:04x}" for code in codes]
    pieces += ["\\ud83d\\ude00", "\\\\", '\\"', "\\/", "\\n", "/", "u0041", "é"]
    for _ in range(200):
        text = '"' + "".join(source.choices(pieces, k=SHORT)) + '"'
        expected = len(msgspec.json.encode(msgspec.json.decode(text)))
        assert compact_size(text.encode(), True) == expected
