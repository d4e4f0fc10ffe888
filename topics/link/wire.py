"""Messages between fronts and shards, and between shards and the catalog.

One ZeroMQ message carries all that one side has for the other in a tick:

    message   version u16 · incarnation u64 · items
    request   id u64 · received_us u64 · budget_ms u32 · op u8 · flags u8 · topic_len u16 · args_len u32 · body_len u32
              topic · args · body
    reply     id u64 · status u16 · kind u8 · 0 u8 · head_len u32 · body_len u32
              head · body

Little-endian. `received_us` is the machine's monotonic clock, the same in every process, so that a reply can say how
long the whole took. A request that a shard has not begun within `budget_ms` of it is refused, not executed. `args` is
msgpack of `Args` and absent when all is default. `head` is ready-made HTTP header lines. A body of BODY_APART bytes or
more is not joined but follows as a message part of its own (body_len is then FOLLOWS, and the item is the last).

A front tells with TAKEN how many bytes of messages it has taken since it last did (u64, the body), and with PRESSURE how hard
it has it (per mille, as the id); neither has a reply.

A message names the incarnation of the worker it is for, or from: a restarted worker must never execute what was sent
to the one before it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from secrets import token_hex
from typing import TypeAlias

import msgspec

VERSION = 1

WRITE, WRITE_LINES, DIFF, DIFF_FRAMES, DELETE = 1, 2, 3, 4, 5
PUT_TOPIC, GET_TOPIC, DROP_TOPIC, LIST_TOPICS = 6, 7, 8, 9
LAST_BY_TAG, COUNT_BY_TAG, WATCH_READ = 10, 11, 12
CLAIM, ACK, NACK, EXTEND, TERM = 13, 14, 15, 16, 17
PUT_CONSUMER, GET_CONSUMER, LIST_CONSUMERS, DROP_CONSUMER, PAUSE_CONSUMER, RESET_CONSUMER = (
    18,
    19,
    20,
    21,
    22,
    23,
)
LIST_DELETED, WRITE_RAW = 24, 25
CONSOLIDATE = 27  # which call it is stands in the arguments
TXN_BEGIN, TXN_STAGE, TXN_COMMIT, TXN_ABORT = 28, 29, 30, 31
# About the shard itself, or about who follows what: no command of the engine.
READY, METRICS, CATALOG, TAKEN = 32, 33, 34, 35
FIND, FOLLOW, LOOK_OUT, FED, UNFOLLOW, SESSION, STREAMS = 36, 37, 38, 39, 40, 41, 42
WORK, WORKED, UNWORK, LETTERS, UNCLAIM = 43, 44, 45, 46, 47
# Forwards. The first four are a client's, and go to the catalog; the others are said between workers.
PUT_FORWARD, GET_FORWARD, LIST_FORWARDS, DROP_FORWARD = 48, 49, 50, 51
COPIES, CATCH_UP, FORWARD_STEP, FORWARDS_GONE, FORWARDS_CHECK, FORWARD_TOTALS = 52, 53, 54, 55, 56, 57
PRESSURE = 58

# An outcome may be unknown when the worker dies while one of these is on its way.
CHANGES = frozenset(
    (
        WRITE, WRITE_LINES, WRITE_RAW, DELETE, PUT_TOPIC, DROP_TOPIC, CLAIM, ACK, NACK, EXTEND, TERM,
        PUT_CONSUMER, DROP_CONSUMER, PAUSE_CONSUMER, RESET_CONSUMER, PUT_FORWARD, DROP_FORWARD,
        TXN_BEGIN, TXN_STAGE, TXN_COMMIT, TXN_ABORT,
    )
)  # fmt: skip

NO_SEQS, NO_ADMIN, NO_TOUCH, IF_EMPTY = 1, 2, 4, 8
RESUME = 16  # a PAUSE_CONSUMER that ends a pause
MUST_PARSE = 32  # a WRITE_RAW whose body is said to be JSON
PUBLISH = 32  # a WRITE whose body is the command of a WebSocket
WITH_EPOCH = 64  # the answer to a write names the topic's epoch
STRICT = 128  # unknown fields of the body are an error
# Beyond what is sent: a body was read that has unknown fields, see `Request.ignored`.
IGNORED = 256

JSON, FRAMES, INTERNAL, PUSH = 0, 1, 2, 3
FEED, NEW_TOPIC, END = 4, 5, 6  # under the number of a FOLLOW, of a LOOK_OUT, of a stream
JOBS = 7  # under the number of a WORK

# A front's name to a shard, and what is added to it for a socket that has large bodies only.
PEER_BYTES = 16
BULK = b"+"

BODY_APART = 64 * 1024  # from here on one copy more costs more than one message part more
FOLLOWS = 0xFFFF_FFFF
SOCKET_BYTES = 4 << 20  # what the kernel may hold of a large body, so that both sides wake less often for it

_MESSAGE = struct.Struct("<HQ")
_REQUEST = struct.Struct("<QQIBBHII")
_REPLY = struct.Struct("<QHBBII")
_TAKEN = struct.Struct("<Q")
MESSAGE_BYTES = _MESSAGE.size
REQUEST_BYTES = _REQUEST.size
REPLY_BYTES = _REPLY.size

Buffer: TypeAlias = bytes | memoryview


class Args(msgspec.Struct, array_like=True, omit_defaults=True):
    """What a request says outside of its body."""

    idempotency_key: str | None = None
    prefixes: list[str] | None = None  # of the key: names outside of them are not its business
    prefix: str = ""
    after: str = ""
    page_size: int = 0
    tag: str | None = None
    subject: str | None = None
    each: bool = False
    node: str | None = None
    create: bool | None = None
    include_tags: bool = False
    touch: bool = False
    consumer: str = ""
    forward: str = ""  # name of a rule
    source: str | None = None
    dest: str | None = None
    call: str = ""  # of CONSOLIDATE
    named: str = ""  # the plan or snapshot that the path names
    txn: str = ""
    traceparent: str = ""  # of a write; valid
    from_seq: int = 0


encode_args = msgspec.msgpack.Encoder().encode
decode_args = msgspec.msgpack.Decoder(Args).decode
NO_ARGS = Args()


class BadMessage(Exception):
    """The other side speaks another version, or not this protocol at all."""


@dataclass(slots=True)
class Request:
    id: int
    received_us: int
    budget_ms: int
    op: int
    flags: int
    topic: bytes
    args: bytes
    body: Buffer
    ignored: list[str] = field(init=False, repr=False, compare=False)  # set with IGNORED


@dataclass(slots=True)
class Reply:
    """What a shard answers: an HTTP status, header lines, a body."""

    id: int
    status: int
    kind: int
    head: bytes
    body: Buffer


def new_peer() -> bytes:
    return token_hex(PEER_BYTES // 2).encode()


def front_of(peer: bytes) -> bytes:
    """The name of the front that sent something, whichever of its sockets it came by."""
    return peer.removesuffix(BULK)


def message_head(incarnation: int) -> bytes:
    return _MESSAGE.pack(VERSION, incarnation)


def read_message_head(message: Buffer) -> int:
    """The incarnation that the message names."""
    if len(message) < MESSAGE_BYTES:
        raise BadMessage(f"a message of {len(message)} bytes")
    version, incarnation = _MESSAGE.unpack_from(message)
    if version != VERSION:
        raise BadMessage(f"protocol version {version}, expected {VERSION}")
    return int(incarnation)


def request_head(
    request_id: int,
    received_us: int,
    budget_ms: int,
    op: int,
    flags: int,
    topic: bytes,
    args: bytes,
    body_len: int,
) -> bytes:
    return (
        _REQUEST.pack(request_id, received_us, budget_ms, op, flags, len(topic), len(args), body_len)
        + topic
        + args
    )


def taken_item(size: int) -> bytes:
    """A request that tells how many bytes were taken."""
    return request_head(0, 0, 0, TAKEN, 0, b"", b"", _TAKEN.size) + _TAKEN.pack(size)


def read_taken(body: Buffer) -> int:
    if len(body) != _TAKEN.size:
        raise BadMessage(f"a count of {len(body)} bytes")
    return int(_TAKEN.unpack(body)[0])


def reply_head(request_id: int, status: int, kind: int, head: bytes, body_len: int) -> bytes:
    return _REPLY.pack(request_id, status, kind, 0, len(head), body_len) + head


def _apart(body: Buffer | None) -> Buffer:
    if body is None:
        raise BadMessage("a body that should follow is missing")
    return body


def read_requests(message: bytes, apart: Buffer | None = None) -> Iterator[Request]:
    """The requests of a message; `apart` is the part that followed it, if one did."""
    at, end = MESSAGE_BYTES, len(message)
    unpack = _REQUEST.unpack_from
    try:
        while at < end:
            number, received_us, budget_ms, op, flags, topic_len, args_len, body_len = unpack(message, at)
            topic_at = at + REQUEST_BYTES
            args_at = topic_at + topic_len
            body_at = args_at + args_len
            if body_len == FOLLOWS:
                at, body = body_at, _apart(apart)
            else:
                at = body_at + body_len
                body = message[body_at:at]
            if at > end:
                raise BadMessage("an item goes beyond its message")
            yield Request(
                number,
                received_us,
                budget_ms,
                op,
                flags,
                message[topic_at:args_at],
                message[args_at:body_at],
                body,
            )
    except struct.error as error:
        raise BadMessage(f"a cut request: {error}") from None


def read_replies(message: bytes, apart: Buffer | None = None) -> Iterator[Reply]:
    at, end = MESSAGE_BYTES, len(message)
    unpack = _REPLY.unpack_from
    try:
        while at < end:
            number, status, kind, _, head_len, body_len = unpack(message, at)
            head_at = at + REPLY_BYTES
            body_at = head_at + head_len
            if body_len == FOLLOWS:
                at, body = body_at, _apart(apart)
            else:
                at = body_at + body_len
                body = message[body_at:at]
            if at > end:
                raise BadMessage("an item goes beyond its message")
            yield Reply(number, status, kind, message[head_at:body_at], body)
    except struct.error as error:
        raise BadMessage(f"a cut reply: {error}") from None
