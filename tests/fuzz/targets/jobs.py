"""Queues and consumers: every call is answered as the contract says, whatever its body and the calls before it.

An input is a sequence of calls on one queue and one log, with jumps of the clock and a restart in between. Bodies
consist of the fields of the call, with values that are mostly valid. All invariants are checked in every turn.
"""

from __future__ import annotations

import json

from tests.fuzz.front import check_answer
from tests.fuzz.mutate import Choices
from tests.fuzz.runner import Target, logged_errors
from tests.support.shard_rig import Rig
from topics.link import wire

STEPS_MAX = 24
U64 = 2**64 - 1

_NODES = ("w", "v", "", "n" * 129)
_SEQS = ([1], [1, 2, 3], [], [2, 2], [4, 9, U64], list(range(1, 9)), [U64 + 1], [-1], "1", None)
_TIMES = (0, 1, 100, 5000, 86_400_000, U64, U64 + 1, -1, 1.5, None)
_COUNTS = (1, 3, 0, 1000, 2**32 - 1, 2**32, U64, None)
_REASONS = ("", "because", "x" * 1025, "\N{SNOWMAN}" * 300, 5)
_FENCES = ([], ["lease_0"], ["", "", ""], ["lease_f00"], ["lease_F"], [""] * 8, None)
_TAGS = ("a.0", "a.*", ">", "tag", "", "x" * 257, "a..b")
_FILTERS = (
    None,
    "a.*",
    "a.1",
    [],
    ["a.*"],
    ["tag", "Subject", "a.>"],
    [["tag", "Eq", "a.0"], ">"],
    ["a..b"],
    [5],
    5,
)
_BEGINNINGS = (
    "all", "new", "last", "last_per_tag", {"from_seq": 2}, {"from_seq": U64}, {"from_ts": 5}, {"from_ts": U64}, {}, "x",
)  # fmt: skip

_SETTLE = {"node": _NODES, "seqs": _SEQS, "lease_ids": _FENCES}
_TAKE = {"node": _NODES, "max": _COUNTS, "lease_ms": _TIMES, "wait_ms": _COUNTS, "max_bytes": _COUNTS}
CALLS: tuple[tuple[int, dict[str, tuple[object, ...]]], ...] = (
    (wire.CLAIM, _TAKE),
    (wire.ACK, _SETTLE),
    (wire.NACK, _SETTLE | {"delay_ms": _TIMES, "kind": ("retry", "release", "dead", "x"), "reason": _REASONS}),
    (wire.EXTEND, _SETTLE | {"lease_ms": _TIMES}),
    (wire.TERM, _SETTLE | {"reason": _REASONS}),
    (
        wire.PUT_CONSUMER,
        {
            "ack": ("explicit", "all", "none", "x"),
            "ack_wait_ms": _TIMES,
            "max_deliver": _COUNTS,
            "backoff_ms": ([], [100, 1000], [U64], [1] * 33),
            "filter": _FILTERS,
            "deliver": _BEGINNINGS,
            "max_ack_pending": _COUNTS,
            "max_waiting": _COUNTS,
            "headers_only": (False, True),
            "dead_letter": (None, "lost", "q", "no name"),
            "inactive_ttl_ms": _TIMES,
            "replay": ("instant", "original"),
        },
    ),
    (wire.GET_CONSUMER, {}),
    (wire.LIST_CONSUMERS, {}),
    (wire.DROP_CONSUMER, {}),
    (wire.PAUSE_CONSUMER, {"until_ts": _TIMES}),
    (wire.RESET_CONSUMER, {"to": ("start", "end", {"seq": 2}, {"seq": U64}, {"ts": 5}, {"ts": U64}, {}), "dry_run": (False, True)}),
    (wire.WRITE, {"records": ([{"data": 1, "tag": "a.1"}], [{"data": 2}] * 3, [{"data": 3, "ttl_ms": 50}])}),
    (wire.DELETE, {"seqs": _SEQS, "keep": (1, 0, 3)}),
    (wire.GET_TOPIC, {}),
    (wire.PUT_TOPIC, {"type": ("queue", "log"), "retention": ("limits", "interest", "work_queue"), "cap_records": (0, 2), "claim_jitter_ms": (0, 20), "leases_durable": (False, True), "max_deliveries": (0, 1), "dead_letter": (None, "lost"), "ttl_ms": (0, 100)}),
)  # fmt: skip
_JUMPS_MS = (1, 150, 6000, 31_000, 90_000_000)


def run(data: bytes) -> None:
    choices = Choices(data)
    rig = _rig()
    with logged_errors() as errors:
        for _ in range(STEPS_MAX):
            if choices.is_used_up:
                break
            how = choices.byte()
            if how >= 0xF8:
                rig = _restarted(rig)
            elif how >= 0xE0:
                rig.clock.advance(_JUMPS_MS[how % len(_JUMPS_MS)])
                rig.rest()
            else:
                _call(rig, choices, how)
    assert not errors, errors
    good = rig.ask(wire.WRITE, "afterwards", {"records": [{"data": 1}]})
    assert good is not None
    assert good.status == 201


def _rig() -> Rig:
    rig = Rig()
    rows = [{"data": i, "tag": f"a.{i % 2}", "node": "n", "meta": {"k": i}} for i in range(5)]
    rig.ask(
        wire.PUT_TOPIC,
        "q",
        {"type": "queue", "dead_letter": "lost", "max_deliveries": 2, "leases_durable": True},
    )
    for topic in ("q", "t"):
        rig.ask(wire.WRITE, topic, {"records": rows})
    rig.ask(wire.PUT_CONSUMER, "t", {"max_deliver": 2}, args=wire.encode_args(wire.Args(consumer="c")))
    return rig


def _restarted(rig: Rig) -> Rig:
    rig.rest()
    rig.disk.kill()
    return Rig(clock=rig.clock, disk=rig.disk, incarnation=rig.incarnation + 1)


def _call(rig: Rig, choices: Choices, how: int) -> None:
    op, fields = CALLS[choices.number(len(CALLS))]
    topic, consumer = ("t", "c") if how & 1 else ("q", "c" if how & 2 else "")
    if how & 0x60 == 0x60 and how & 0x80:
        consumer = "other"
    body = {name: _chosen(choices, values) for name, values in fields.items() if choices.byte() & 3}
    text = json.dumps(body).encode() if how & 0x1C else choices.bytes(40)
    args = wire.encode_args(wire.Args(consumer=consumer, page_size=2, after="b" if how & 8 else ""))
    key = rig.receive(op, topic, text, args=args)
    rig.rest()
    reply = rig.replies.get(key)
    if reply is None:
        return  # it waits, and may be answered when the clock has jumped
    assert reply.status < 500, bytes(reply.body)
    check_answer(reply.status, bytes(reply.body))
    if op == wire.CLAIM and reply.status == 200:
        seqs = [job["$seq"] for job in json.loads(bytes(reply.body))["claimed"]]
        assert seqs == sorted(set(seqs)), seqs


def _chosen(choices: Choices, values: tuple[object, ...]) -> object:
    """The first values are the valid ones, and are chosen most often."""
    number = choices.byte()
    return values[number % 2 if number < 128 and len(values) > 1 else number % len(values)]


def seeds() -> list[bytes]:
    """Sequences of all calls: in order, the same one repeatedly, and with jumps and restarts in between."""
    made: list[bytes] = []
    for i, (_, fields) in enumerate(CALLS):
        for how in (0x04, 0x05, 0x06, 0x0C):
            made.append(
                bytes([how, i, *(b"\x01\x00" * len(fields)), 0x04, 0, 1, 0, 1, 1, 0xE1, 0x05, 1, 1, 0, 1, 1])
            )
    every = b"".join(bytes([0x05, i, *(b"\x01\x02" * len(fields))]) for i, (_, fields) in enumerate(CALLS))
    return [
        *made,
        every,
        every.replace(b"\x05", b"\x04"),
        every + b"\xff" + every,
        b"\xe2".join([every[:40]] * 4),
    ]


TARGET = Target("jobs", run, seeds, rounds=300)
