"""Wire format of requests and replies between fronts and shards, and between shards.

One ZeroMQ message carries everything that one side has for the other in a tick:

    message   version u16 · incarnation u64 · items
    request   id u64 · received_us u64 · budget_ms u32 · op u8 · flags u8 · encoding u8 · topic_len u16 · args_len u32 ·
              body_len u32 · topic · args · body
    reply     id u64 · code u8 · kind u8 · fields_len u32 · body_len u32
              fields · body

Little-endian. `received_us` is the machine's monotonic clock, the same in every process, so that a reply can report the
total time. A request that a shard has not begun within `budget_ms` of it is refused, not executed. `args` is msgpack of
`Args`, absent when all fields have their defaults. `encoding` is that of the body and of the wanted reply: JSON, FRAMES,
LINES, RAW, EVENTS or MSGPACK (`topics/protocols/encodings.py`). `code` is the result. `kind` names the encoding of the body or, if the
shard was not asked, the event; `fields` are what the receiver needs without decoding the body. The body of an error is a
`Failure`. No protocol of clients is known here: statuses and headers are made of codes and fields by `topics/protocols/`.

A body of SEPARATE_BODY_BYTES or more is not copied into the message but sent as a separate message part; its body_len is
SEPARATE, and its item is the last.

Flow control: with WINDOW_UPDATE a front reports the bytes of messages it has received since the last one (u64, the
body), and with PRESSURE its load (per mille, as the id). Neither has a reply.

A message names the incarnation of the worker that it is for, or from: a restarted worker must never execute requests
that were sent to its predecessor.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, TypeAlias

import msgspec

from topics.api.errors import TopicsError
from topics.api.operations import OPERATIONS

VERSION = 2

WRITE, DIFF, DELETE = 1, 3, 5
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
LIST_DELETED = 24
CONSOLIDATE = 27  # `Args.call` names the operation
TXN_BEGIN, TXN_STAGE, TXN_COMMIT, TXN_ABORT = 28, 29, 30, 31
# Handled by the worker itself, not by its engine (except DEAD_LETTERS).
READY, METRICS, CATALOG, WINDOW_UPDATE = 32, 33, 34, 35
FIND, FOLLOW, WATCH_NAMES, FEED_ACK, UNFOLLOW, SESSION, STREAM_COUNT = 36, 37, 38, 39, 40, 41, 42
OPEN_JOBS, JOBS_ACK, CLOSE_JOBS, DEAD_LETTERS, CANCEL_CLAIM = 43, 44, 45, 46, 47
# Forwards. The first four come from clients and go to the catalog; the others are sent between workers.
PUT_FORWARD, GET_FORWARD, LIST_FORWARDS, DROP_FORWARD = 48, 49, 50, 51
COPIES, CATCH_UP, FORWARD_STEP, FORWARDS_GONE, FORWARDS_CHECK, FORWARD_TOTALS = 52, 53, 54, 55, 56, 57
PRESSURE = 58

# The outcome of these may be unknown when the worker dies before it replies.
CHANGES = frozenset(globals()[name] for one in OPERATIONS if one.changes for name in one.commands)
# By label of their latency in metrics.
LABELLED = {
    label: frozenset(globals()[name] for one in OPERATIONS if one.label == label for name in one.commands)
    for label in dict.fromkeys(one.label for one in OPERATIONS if one.label)
}

READS = frozenset((DIFF, WATCH_READ))
# Operations that may wait at the shard. A claim is not a read: it may lease a job after its client has disconnected,
# which only the end of the lease can undo. So it stays pending until it is answered.
POLLS = READS | {CLAIM}

NO_SEQS, NO_ADMIN, NO_TOUCH, IF_EMPTY = 1, 2, 4, 8
RESUME = 16  # a PAUSE_CONSUMER that ends a pause
MUST_PARSE = 32  # a RAW body with a JSON content type
PUBLISH = 32  # a WRITE whose body is a WebSocket command
WITH_EPOCH = 64  # the reply to a write contains the topic's epoch
STRICT = 128  # unknown fields of the body are an error
# Never sent: the body has unknown fields, listed in `Request.ignored`; the read is served before its topic has caught up.
IGNORED, LATE = 256, 512

# Result codes. UNFINISHED: the command goes on; the client repeats it to learn the result.
OK, CREATED, UNFINISHED, ERROR = 0, 1, 2, 3

JSON, FRAMES, MSGPACK = 0, 1, 2
LINES, RAW = 8, 9  # of the records of a WRITE: a JSON object per line; one record, which is the whole body
EVENTS = 10  # of a job stream: server-sent events, ready to be written
GRANT = 3  # of the catalog, to a worker
FEED, NEW_TOPIC, END_STREAM = 4, 5, 6  # their ids: those of the FOLLOW, the WATCH_NAMES, the stream
JOBS = 7  # its id: that of the OPEN_JOBS

# Length of a front's ZeroMQ identity, and the suffix for its second socket, which carries only large bodies.
PEER_BYTES = 16
BULK = b"+"

SEPARATE_BODY_BYTES = 64 * 1024  # from here on a copy costs more than another message part
SEPARATE = 0xFFFF_FFFF
SOCKET_BYTES = 4 << 20  # kernel buffer: large enough for most large bodies, so both sides wake less often

_MESSAGE = struct.Struct("<HQ")
_REQUEST = struct.Struct("<QQIBBBHII")
_REPLY = struct.Struct("<QBBII")
_WINDOW_UPDATE = struct.Struct("<Q")
MESSAGE_BYTES = _MESSAGE.size
REQUEST_BYTES = _REQUEST.size
REPLY_BYTES = _REPLY.size

Buffer: TypeAlias = bytes | memoryview
Result: TypeAlias = tuple[int, int, bytes, Buffer]  # code, kind, fields, body


class Args(msgspec.Struct, array_like=True, omit_defaults=True):
    """Parameters of a request from its path, query and headers."""

    idempotency_key: str | None = None
    prefixes: list[str] | None = None  # allowed by the API key
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
    call: str = ""  # operation of a CONSOLIDATE
    named: str = ""  # the plan or snapshot in the path
    txn: str = ""
    traceparent: str = ""  # of a write; validated by the front
    from_seq: int = 0


encode_args = msgspec.msgpack.Encoder().encode
decode_args = msgspec.msgpack.Decoder(Args).decode
NO_ARGS = Args()


def prefixes_of(args: Args) -> tuple[str, ...] | None:
    return tuple(args.prefixes) if args.prefixes is not None else None


class Failure(msgspec.Struct, array_like=True):
    """Body of a reply with the code ERROR: a TopicsError."""

    code: str
    message: str
    detail: dict[str, Any] = {}


_encode_failure = msgspec.msgpack.Encoder().encode
_decode_failure = msgspec.msgpack.Decoder(Failure).decode
# Codes of errors after which the request can be repeated: the shard is starting, or stopping.
UNAVAILABLE = frozenset(("not_ready", "shutting_down"))


class BadMessage(Exception):
    """A message of another protocol version, or one that is malformed."""


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
    encoding: int = JSON
    ignored: list[str] = field(init=False, repr=False, compare=False)  # set with IGNORED


@dataclass(slots=True)
class Reply:
    """A shard's reply, or an event."""

    id: int
    code: int
    kind: int
    fields: bytes
    body: Buffer

    @property
    def failure(self) -> Failure:
        """The error, if the code is ERROR."""
        try:
            return _decode_failure(self.body)
        except msgspec.MsgspecError as error:  # one bad message must not take a process down
            return Failure("internal", f"an error of a shard cannot be decoded: {error}")

    @property
    def error_code(self) -> str:
        """The code of the error; empty if it is none."""
        return self.failure.code if self.code == ERROR else ""


def failed(code: str, message: str, detail: dict[str, object] | None = None) -> Result:
    return ERROR, MSGPACK, b"", _encode_failure(Failure(code, message, detail or {}))


def refused(error: TopicsError) -> Result:
    return failed(error.code, str(error), error.detail)


def new_peer() -> bytes:
    return token_hex(PEER_BYTES // 2).encode()


def front_of(peer: bytes) -> bytes:
    """The name of a front, given the identity of either of its sockets."""
    return peer.removesuffix(BULK)


def message_head(incarnation: int) -> bytes:
    return _MESSAGE.pack(VERSION, incarnation)


def read_message_head(message: Buffer) -> int:
    """The incarnation named in the message."""
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
    encoding: int = JSON,
) -> bytes:
    return (
        _REQUEST.pack(
            request_id, received_us, budget_ms, op, flags, encoding, len(topic), len(args), body_len
        )
        + topic
        + args
    )


def window_update(size: int) -> bytes:
    """A request that reports received bytes."""
    head = request_head(0, 0, 0, WINDOW_UPDATE, 0, b"", b"", _WINDOW_UPDATE.size)
    return head + _WINDOW_UPDATE.pack(size)


def read_window_update(body: Buffer) -> int:
    if len(body) != _WINDOW_UPDATE.size:
        raise BadMessage(f"a window update of {len(body)} bytes")
    return int(_WINDOW_UPDATE.unpack(body)[0])


def reply_head(request_id: int, code: int, kind: int, fields: bytes, body_len: int) -> bytes:
    return _REPLY.pack(request_id, code, kind, len(fields), body_len) + fields


def _separate(body: Buffer | None) -> Buffer:
    if body is None:
        raise BadMessage("the message part with the body is missing")
    return body


def read_requests(message: bytes, separate: Buffer | None = None) -> Iterator[Request]:
    """The requests of a message; `separate` is its second part, if it has one."""
    at, end = MESSAGE_BYTES, len(message)
    unpack = _REQUEST.unpack_from
    try:
        while at < end:
            number, received_us, budget_ms, op, flags, encoding, topic_len, args_len, body_len = unpack(
                message, at
            )
            topic_at = at + REQUEST_BYTES
            args_at = topic_at + topic_len
            body_at = args_at + args_len
            if body_len == SEPARATE:
                at, body = body_at, _separate(separate)
            else:
                at = body_at + body_len
                body = message[body_at:at]
            if at > end:
                raise BadMessage("an item extends beyond its message")
            yield Request(
                number,
                received_us,
                budget_ms,
                op,
                flags,
                message[topic_at:args_at],
                message[args_at:body_at],
                body,
                encoding,
            )
    except struct.error as error:
        raise BadMessage(f"a truncated request: {error}") from None


def read_replies(message: bytes, separate: Buffer | None = None) -> Iterator[Reply]:
    at, end = MESSAGE_BYTES, len(message)
    unpack = _REPLY.unpack_from
    try:
        while at < end:
            number, code, kind, fields_len, body_len = unpack(message, at)
            fields_at = at + REPLY_BYTES
            body_at = fields_at + fields_len
            if body_len == SEPARATE:
                at, body = body_at, _separate(separate)
            else:
                at = body_at + body_len
                body = message[body_at:at]
            if at > end:
                raise BadMessage("an item extends beyond its message")
            yield Reply(number, code, kind, message[fields_at:body_at], body)
    except struct.error as error:
        raise BadMessage(f"a truncated reply: {error}") from None
