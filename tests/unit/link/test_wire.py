"""Goal: decoding returns what was encoded, and incomplete messages are refused as a whole.

Method: round trips over arbitrary items, then every prefix of a valid message.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.faults import fault
from topics.link import wire

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
U8 = st.integers(0, 255)


@given(U64)
def test_window_updates_are_decoded(size: int) -> None:
    (request,) = wire.read_requests(wire.message_head(1) + wire.window_update(size))
    assert (request.op, wire.read_window_update(request.body)) == (wire.WINDOW_UPDATE, size)
    with pytest.raises(wire.BadMessage):
        wire.read_window_update(request.body[1:])


requests = st.builds(
    wire.Request,
    id=U64,
    received_us=U64,
    budget_ms=U32,
    op=U8,
    flags=U8,
    topic=st.binary(max_size=300),
    args=st.binary(max_size=50),
    body=st.binary(max_size=200),
    encoding=U8,
)
replies = st.builds(
    wire.Reply,
    id=U64,
    code=U8,
    kind=U8,
    fields=st.binary(max_size=80),
    body=st.binary(max_size=200),
)


def pack_request(request: wire.Request, body_len: int | None = None) -> bytes:
    size = len(request.body) if body_len is None else body_len
    return wire.request_head(
        request.id,
        request.received_us,
        request.budget_ms,
        request.op,
        request.flags,
        request.topic,
        request.args,
        size,
        request.encoding,
    )


def pack_reply(reply: wire.Reply, body_len: int | None = None) -> bytes:
    size = len(reply.body) if body_len is None else body_len
    return wire.reply_head(reply.id, reply.code, reply.kind, reply.fields, size)


REQUEST = wire.Request(7, 8, 9, wire.WRITE, wire.NO_SEQS, b"orders", b"args", b"body")
REPLY = wire.Reply(7, wire.CREATED, wire.FRAMES, b"fields", b"body")

# Everything below holds for both directions.
BOTH = pytest.mark.parametrize(
    "item, pack, read",
    [(REQUEST, pack_request, wire.read_requests), (REPLY, pack_reply, wire.read_replies)],
    ids=["requests", "replies"],
)


@given(U64, st.lists(requests, max_size=5))
def test_requests_come_back_as_they_were(incarnation: int, items: list[wire.Request]) -> None:
    message = wire.message_head(incarnation) + b"".join(pack_request(r) + r.body for r in items)
    assert wire.read_message_head(message) == incarnation
    assert list(wire.read_requests(message)) == items


@given(U64, st.lists(replies, max_size=5))
def test_replies_come_back_as_they_were(incarnation: int, items: list[wire.Reply]) -> None:
    message = wire.message_head(incarnation) + b"".join(pack_reply(r) + r.body for r in items)
    assert wire.read_message_head(message) == incarnation
    assert list(wire.read_replies(message)) == items


@BOTH
def test_a_body_apart_is_passed_on_without_a_copy(item: Any, pack: Any, read: Any) -> None:
    body = memoryview(b"x" * wire.SEPARATE_BODY_BYTES)
    message = wire.message_head(1) + pack(item) + item.body + pack(item, wire.SEPARATE)
    first, second = read(message, body)
    assert first == item
    assert second.body is body


@fault(
    "link", "a message between processes is shorter than its head", "it is refused, and the process goes on"
)
@pytest.mark.parametrize("size", range(wire.MESSAGE_BYTES))
def test_a_message_shorter_than_its_head_is_refused(size: int) -> None:
    with pytest.raises(wire.BadMessage):
        wire.read_message_head(bytes(size))


@fault("link", "a message between processes of another version", "it is refused, and the process goes on")
def test_another_version_is_refused() -> None:
    head = (wire.VERSION + 1).to_bytes(2, "little") + wire.message_head(1)[2:]
    with pytest.raises(wire.BadMessage, match="version"):
        wire.read_message_head(head)


@fault(
    "link", "a message between processes is cut anywhere", "the cut item is refused; those before it are used"
)
@BOTH
def test_an_item_cut_anywhere_is_refused(item: Any, pack: Any, read: Any) -> None:
    head = wire.message_head(1)
    whole = head + pack(item) + item.body
    for end in range(len(head) + 1, len(whole)):
        with pytest.raises(wire.BadMessage):
            list(read(whole[:end]))


@BOTH
def test_items_before_a_truncated_one_are_usable(item: Any, pack: Any, read: Any) -> None:
    """The sender waits for answers to the complete items, and not for the rest."""
    whole = pack(item) + item.body
    items = read(wire.message_head(1) + whole + whole[:-1])
    assert next(items) == item
    with pytest.raises(wire.BadMessage):
        next(items)


@BOTH
def test_a_body_that_should_follow_and_does_not_is_refused(item: Any, pack: Any, read: Any) -> None:
    with pytest.raises(wire.BadMessage):
        list(read(wire.message_head(1) + pack(item, wire.SEPARATE)))


@fault("link", "noise instead of a message between processes", "it is refused, and the process goes on")
@given(st.binary(max_size=200))
def test_noise_is_refused_or_read_but_never_anything_else(noise: bytes) -> None:
    for read in (wire.read_requests, wire.read_replies):
        try:
            list(read(wire.message_head(1) + noise))
        except wire.BadMessage:
            pass


def test_args_are_left_out_when_all_is_default() -> None:
    assert wire.decode_args(wire.encode_args(wire.Args())) == wire.NO_ARGS
    args = wire.Args(idempotency_key="k", prefixes=["a"], page_size=3, each=True, touch=True)
    assert wire.decode_args(wire.encode_args(args)) == args
