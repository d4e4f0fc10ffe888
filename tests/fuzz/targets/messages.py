"""Messages between processes: after an invalid message the receiver continues to serve.

The first byte of an input selects the receiver: a shard (a message from its front, another shard, or the catalog),
a front, or the control channel. Afterwards a valid request must still work.
"""

from __future__ import annotations

import msgspec

from router.pending import PendingRequests
from tests.fuzz.runner import Target, logged_errors
from tests.support.engine_harness import SMALL
from tests.support.shard_answers import as_answer
from tests.support.shard_rig import FRONT, WORKER, Rig
from topics.engine.core.quotas import QuotaGrant, QuotaRecall, QuotaReport
from topics.link import wire
from topics.link.control_channel import LineBuffer, Peer, Peers, Ping, encode
from topics.protocols.http.errors import STATUS

_GOOD = {"records": [{"data": 1}]}
_STATUSES = {200, 201, 204} | set(STATUS.values())


def run(data: bytes) -> None:
    who, data = (data[0], data[1:]) if data else (0, b"")
    with logged_errors():  # an invalid message means that the sender has a bug: it is logged
        _RUNS[who % len(_RUNS)](data)


def _codec(data: bytes) -> None:
    """Both decoders parse the message or refuse it."""
    for read in (wire.read_requests, wire.read_replies):
        try:
            wire.read_message_head(data)
            items = list(read(data))  # type: ignore[operator]
        except wire.BadMessage:
            continue
        again = b"".join(map(_encoded, items))
        assert wire.message_head(wire.read_message_head(data)) + again == data


def _encoded(item: wire.Request | wire.Reply) -> bytes:
    body = bytes(item.body)
    if isinstance(item, wire.Reply):
        return wire.reply_head(item.id, item.code, item.kind, item.fields, len(body)) + body
    head = wire.request_head(
        item.id,
        item.received_us,
        item.budget_ms,
        item.op,
        item.flags,
        item.topic,
        item.args,
        len(body),
        item.encoding,
    )
    return head + body


def _to_shard(data: bytes) -> None:
    rig = _rig()
    try:
        rig.core.receive(FRONT, wire.message_head(rig.incarnation) + data)
    except wire.BadMessage:
        pass
    _still_serves(rig)


def _to_catalog(data: bytes) -> None:
    """A report of another shard with a valid head."""
    rig = _rig(shards=3)
    head = wire.request_head(0, 0, 0, wire.CATALOG, 0, b"", b"", len(data))
    rig.core.receive(WORKER + b"1", wire.message_head(rig.incarnation) + head + data)
    for shard in (1, 2):
        rig.caps.receive_report(
            WORKER + b"%d" % shard, msgspec.msgpack.encode(QuotaReport(shard, 1 << 62, 0, 0, begins=True))
        )
    _still_serves(rig)


def _to_other_shard(data: bytes) -> None:
    """A message that should come from the catalog, at a shard that does not host it."""
    rig = _rig(shard=1, shards=2)
    rig.core.set_peers({0: 1})
    try:
        rig.core.receive_reply(
            0, wire.message_head(1) + wire.reply_head(0, wire.OK, wire.GRANT, b"", len(data)) + data
        )
    except wire.BadMessage:
        pass
    try:
        rig.core.receive_reply(0, data)
    except wire.BadMessage:
        pass
    rig.rest()
    assert rig.ask(wire.READY) is not None
    # A report that reaches the wrong shard must not stop it either.
    head = wire.request_head(0, 0, 0, wire.CATALOG, 0, b"", b"", len(data))
    rig.core.receive(WORKER + b"1", wire.message_head(rig.incarnation) + head + data)
    assert rig.ask(wire.READY) is not None


def _to_front(data: bytes) -> None:
    core = PendingRequests(2)
    core.worker_up(0, 1)
    answers: dict[int, list[wire.Reply]] = {}
    for number in range(1, 5):
        op = wire.DIFF if number % 2 else wire.WRITE
        core.ask(0, op, 0, b"t", b"", b"{}", 0, answers.setdefault(number, []).append)
    core.take_messages()
    try:
        core.receive(0, wire.message_head(1) + data)
        core.receive(0, data)
    except wire.BadMessage:
        pass
    core.worker_down(0)
    assert all(len(found) == 1 for found in answers.values()), "each request is answered once"
    assert not core.in_flight and not core.links[0].cost


def _to_control(data: bytes) -> None:
    whole, bytewise = LineBuffer(), LineBuffer()
    try:
        expected = whole.feed(data)
    except ValueError:
        return
    found = [message for i in range(len(data)) for message in bytewise.feed(data[i : i + 1])]
    assert found == expected


class LenientRig(Rig):
    """A shard whose replies are only inspected: an input may use one number for two requests."""

    def _keep(self, peer: bytes, parts: list[wire.Buffer]) -> None:
        for reply in map(as_answer, wire.read_replies(bytes(parts[0]), *parts[1:])):
            assert reply.status in _STATUSES, reply
            self.replies[peer, reply.id] = reply


def _rig(shard: int = 0, shards: int = 1) -> Rig:
    config = msgspec.structs.replace(SMALL, shard=shard, max_topics=100, max_total_bytes=1 << 20)
    return LenientRig(config, shards=shards)


def _still_serves(rig: Rig) -> None:
    rig.rest()
    reply = rig.ask(wire.WRITE, "good", _GOOD)
    assert reply is not None and reply.status == 201, reply
    rig.clock.advance(60_000)
    rig.rest()


_RUNS = (_codec, _to_shard, _to_catalog, _to_other_shard, _to_front, _to_control)


def _request(op: int, body: bytes = b"", args: wire.Args | None = None, encoding: int = wire.JSON) -> bytes:
    encoded = wire.encode_args(args) if args is not None else b""
    return wire.request_head(1, 0, 30_000, op, 0, b"t", encoded, len(body), encoding) + body


def seeds() -> list[bytes]:
    ops = [_request(op, b'{"records":[{"data":1}]}') for op in range(1, 16)]
    args = wire.Args("key", ["a"], "p", "a", 10, "tag", "a.*", True, "n", True, True, True)
    ops += [
        _request(op, b"{}", args)
        for op in (wire.LIST_TOPICS, wire.LAST_BY_TAG, wire.COUNT_BY_TAG, wire.LIST_DELETED)
    ]
    ops += [_request(wire.WRITE, b"{}", args, encoding) for encoding in (wire.LINES, wire.RAW)]
    replies = [wire.reply_head(number, wire.OK, wire.JSON, b"fields", 2) + b"{}" for number in range(1, 5)]
    reports = [
        QuotaReport(1, 5, 3, 100, begins=True),
        QuotaReport(2, 1, 0, 0, 5, 500, 2, 1),
        QuotaReport(0, 9, 0, 0, begins=True),
    ]
    words = [QuotaGrant(5, 100, True, 1, 1), QuotaRecall(1, 1), QuotaGrant(1 << 62, 0, False)]
    lines = encode(Ping()) + encode(Peers([Peer(0, 1, "/x"), Peer(1, 2, "/y")]))
    head = wire.message_head(1)
    return (
        [b"\0" + head + op for op in ops[:3]]
        + [b"\0" + head + b"".join(replies)]
        + [b"\x01" + op for op in ops]
        + [b"\x01" + b"".join(ops[:6])]
        + [b"\x02" + msgspec.msgpack.encode(report) for report in reports]
        + [b"\x03" + msgspec.msgpack.encode(word) for word in words]
        + [b"\x04" + b"".join(replies), b"\x04" + head + replies[0], b"\x05" + lines]
    )


TOKENS = (
    b"\xff\xff\xff\xff",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xd3\x80\0\0\0\0\0\0\0",
    b"\xc0",
    b"\xc3",
    b"\x99",
    b"\xa6report",
    b'{"op":"peers","workers":[]}\n',
    b"[" * 2000,
    b"\n",
)
TARGET = Target("messages", run, seeds, TOKENS, rounds=2000)
