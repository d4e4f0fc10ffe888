"""Request bodies: every body is answered as the contract says, and a refused one changes nothing.

The first byte of an input selects the operation, the second how: the rest is the body itself, or choices that
generate one from the grammar of JSON and the requests' own fields.
"""

from __future__ import annotations

import json

from tests.fuzz.front import check_answer
from tests.fuzz.mutate import Choices
from tests.fuzz.runner import Target, logged_errors
from tests.support.shard_answers import ShardAnswer
from tests.support.shard_rig import Rig
from topics.link import wire

# An operation and its encoding. JSON is the encoding of the others.
WRITE_LINES, WRITE_RAW, DIFF_FRAMES = (
    (wire.WRITE, wire.LINES),
    (wire.WRITE, wire.RAW),
    (wire.DIFF, wire.FRAMES),
)
OPS: tuple[int | tuple[int, int], ...] = (
    wire.WRITE,
    WRITE_LINES,
    wire.DIFF,
    DIFF_FRAMES,
    wire.DELETE,
    wire.PUT_TOPIC,
    wire.GET_TOPIC,
    wire.DROP_TOPIC,
    wire.LIST_TOPICS,
    wire.LAST_BY_TAG,
    wire.COUNT_BY_TAG,
    wire.LIST_DELETED,
    WRITE_RAW,
)
_TOPICS = ("t", "new", "small", "", "a b", "x" * 256, "\N{LATIN SMALL LETTER E WITH ACUTE}", "a/b")
_FIELDS = (
    *(
        "records",
        "data",
        "tag",
        "node",
        "meta",
        "ttl_ms",
        "data_base64",
        "idempotency_key",
        "create",
        "config",
    ),
    *("if_last_seq", "if_tag_last_seq", "seq", "disable_backpressure", "from_seq", "limit", "include_tags"),
    *("include_meta", "include_data", "wait_ms", "max_batch_bytes", "from_ts", "before_seq", "match", "seqs"),
    *("keep", "erase", "type", "cap_records", "cap_bytes", "discard", "durability", "durable", "priority"),
    *(
        "idempotency_window_ms",
        "lease_ms",
        "dead_letter",
        "cap_per_tag",
        "max_record_bytes",
        "auto_create",
        "x",
    ),
)
_SCALARS = (
    *(
        b"0",
        b"1",
        b"-1",
        b"2",
        b"3.5",
        b"1e400",
        b"-0",
        b"1.0",
        b"18446744073709551615",
        b"18446744073709551616",
    ),
    *(
        b"9223372036854775808",
        b"1152921504606846976",
        b"4294967296",
        b"1" * 400,
        b"NaN",
        b"Infinity",
        b"-Infinity",
    ),
    *(
        b"null",
        b"true",
        b"false",
        b'""',
        b'"a"',
        b'"a.b"',
        b'"a.*"',
        b'"*"',
        b'">"',
        b'"t"',
        b'"log"',
        b'"queue"',
    ),
    *(
        b'"fsync"',
        b'"ephemeral"',
        b'"reject"',
        b'"AAAA"',
        b'"\\ud800"',
        b'"\\u0000"',
        b'"\\uD83D\\uDE00"',
        b'"\xff"',
    ),
    *(
        b'"\xed\xa0\x80"',
        b'"' + b"x" * 300 + b'"',
        b'"' + b"\\n" * 200 + b'"',
        b"{}",
        b"[]",
        b'["tag","Eq","a"]',
    ),
    *(
        b'["tag","Subject","a.>"]',
        b'["tag","Glob","a*"]',
        b"[" * 900 + b"]" * 900,
        b'{"a":' * 600 + b"1" + b"}" * 600,
    ),
)
_BLANKS = (b"", b" ", b"\n", b"\t\r\n ")
DEPTH_MAX = 5


def run(data: bytes) -> None:
    choices = Choices(data)
    op, how = OPS[choices.number(len(OPS))], choices.byte()
    topic = _TOPICS[how >> 3 & 7]
    args = _args(choices) if how & 2 else wire.NO_ARGS
    flags = choices.byte() if how & 4 else 0
    body = choices.rest() if how & 1 else _value(choices, 0)
    rig = _rig()
    before = _state(rig)
    with logged_errors() as errors:
        reply = _ask(rig, op, topic, body, args, flags)
    assert not errors, errors
    assert reply.status < 500
    if reply.kind == wire.JSON:
        code = check_answer(reply.status, bytes(reply.body))
        json.loads(bytes(reply.body))  # fails if the answer is not valid JSON
        if code:
            assert _state(rig) == before, f"{code}, but the state has changed"
    good = rig.ask(wire.WRITE, "afterwards", {"records": [{"data": 1}]})
    assert good is not None and good.status == 201


def _rig() -> Rig:
    rig = Rig()
    rows = [{"data": i, "tag": f"a.{i % 2}", "node": "n", "meta": {"k": i}} for i in range(3)]
    rig.ask(wire.WRITE, "t", {"records": rows, "idempotency_key": "k"})
    rig.ask(wire.PUT_TOPIC, "small", {"cap_records": 2, "discard": "reject", "max_record_bytes": 50})
    return rig


def _ask(
    rig: Rig, op: int | tuple[int, int], topic: str, body: bytes, args: wire.Args, flags: int
) -> ShardAnswer:
    encoded = wire.encode_args(args)
    name = topic.encode()
    op, encoding = op if isinstance(op, tuple) else (op, wire.JSON)
    head = wire.request_head(1 << 40, rig.now_us(), 30_000, op, flags, name, encoded, len(body), encoding)
    rig.core.receive(b"client", wire.message_head(rig.incarnation) + head + body)
    rig.rest()
    if (b"client", 1 << 40) not in rig.replies:
        rig.clock.advance(31_000)  # a long poll
        rig.rest()
    return rig.replies[b"client", 1 << 40]


def _state(rig: Rig) -> list[object]:
    """The state that a refused request must not change."""
    rows = []
    for name, log in sorted(rig.core.engine.shard.state.published.items()):
        view = log.view
        rows.append(
            (name, log.config, view.head, view.first_seq, view.count, view.bytes, log.next_seq, log.count)
        )
    return rows


def _args(choices: Choices) -> wire.Args:
    texts = ("", "a", "a.1", "a.*", "*", ">", "..", "t", "x" * 300, "\0", "\ud7ff")

    def text() -> str:
        return texts[choices.number(len(texts))]

    chosen = choices.byte()
    return wire.Args(
        text() if chosen & 1 else None,
        [text()] if chosen & 2 else None,
        text(),
        text(),
        choices.number(1 << 16),
        text() if chosen & 4 else None,
        text() if chosen & 8 else None,
        bool(chosen & 16),
        text() if chosen & 32 else None,
        bool(chosen & 64) if chosen & 128 else None,
    )


# -- JSON generated from choices ---------------------------------------------------------------------------


def _value(choices: Choices, depth: int) -> bytes:
    kind = choices.number(8)
    blank = _BLANKS[choices.number(len(_BLANKS))] if kind & 1 else b""
    if depth == 0 and kind < 7:
        return _object(choices, depth, blank)
    if depth >= DEPTH_MAX or kind < 4 or choices.is_used_up:
        return blank + _SCALARS[choices.number(len(_SCALARS))]
    if kind < 6:
        return _object(choices, depth, blank)
    values = [_value(choices, depth + 1) for _ in range(choices.number(4))]
    return b"[" + blank + b",".join(values) + b"]"


def _object(choices: Choices, depth: int, blank: bytes) -> bytes:
    """Members may occur twice, and a list of records is made half of the time."""
    members = []
    for _ in range(1 + choices.number(4)):
        name = _FIELDS[choices.number(len(_FIELDS))].encode()
        if name == b"records":
            rows = (
                [_object(choices, depth + 1, blank) for _ in range(choices.number(4))]
                if depth < DEPTH_MAX
                else []
            )
            members.append(b'"records":[' + b",".join(rows) + b"]")
        else:
            members.append(b'"' + name + b'":' + blank + _value(choices, depth + 1))
    return b"{" + blank + b",".join(members) + b"}"


def seeds() -> list[bytes]:
    bodies: dict[int | tuple[int, int], list[object]] = {
        wire.WRITE: [
            {
                "records": [
                    {"data": {"a": [1, 2.5, "x"]}, "tag": "a.1", "node": "n", "meta": {"m": 1}, "ttl_ms": 5}
                ]
            },
            {
                "records": [{"data_base64": "AAECAw=="}],
                "idempotency_key": "k",
                "create": True,
                "config": {"type": "log"},
            },
            {"records": [{"data": 1}], "if_last_seq": 3, "if_tag_last_seq": {"tag": "a.1", "seq": 2}},
        ],
        wire.DIFF: [
            {"from_seq": 1, "limit": 2, "node": ["n"], "tag": ["tag", "Subject", "a.*"], "wait_ms": 10},
        ],
        DIFF_FRAMES: [{"from_seq": 0, "max_batch_bytes": 100, "from_ts": 5}],
        wire.DELETE: [{"before_seq": 2, "match": "a.*"}, {"seqs": [1, 2], "keep": 1, "erase": True}],
        wire.PUT_TOPIC: [
            {"type": "queue", "durability": "fsync", "ttl_ms": 10, "cap_per_tag": 1, "dead_letter": "d"}
        ],
    }
    raw = [(op, json.dumps(body).encode()) for op, found in bodies.items() for body in found]
    raw += [
        (WRITE_LINES, b'{"data":1}\n{"data":2,"tag":"b"}\n'),
        (WRITE_RAW, b"\xff\x00"),
        (wire.GET_TOPIC, b""),
        (wire.DROP_TOPIC, b""),
    ]
    made = [bytes([OPS.index(op), 1]) + body for op, body in raw]
    made += [bytes([OPS.index(op), 3]) + bytes(range(1, 20)) + b"{}" for op in OPS]
    return made + [bytes([i, 8 * i & 56]) + bytes(range(i, 200, 7)) for i in range(len(OPS))]


TOKENS = (
    *_SCALARS,
    *(b'"' + name.encode() + b'":' for name in _FIELDS),
    b",",
    b"{",
    b"}",
    b"[",
    b"]",
    b"\xff",
)
TARGET = Target("bodies", run, seeds, TOKENS, rounds=600)
