"""Writing, reading and deleting records: all passed to the topic's shard, which reads the body."""

from __future__ import annotations

from router.call import (
    FRAMES_TYPE,
    LINES_TYPE,
    Call,
    ask_owner,
)
from router.exchange import Respond
from router.query import decode_cursor, flag, number, optional_flag, parse_query
from topics import wire
from topics.engine.errors import InvalidRequest
from topics.traces import read_traceparent


def write(call: Call, respond: Respond) -> None:
    request, key = call.request, call.key
    pairs = parse_query(request.query) if request.query else {}
    flags = 0 if flag(pairs, "return_seqs", True) else wire.NO_SEQS
    args = None
    if key is not None:
        if "admin" not in key.scopes:
            flags |= wire.NO_ADMIN
        if key.prefixes:
            args = wire.Args(prefixes=list(key.prefixes))
    if request.idempotency_key:
        args = args or wire.Args()
        args.idempotency_key = _text(request.idempotency_key, "the header Idempotency-Key")
    if request.traceparent:
        args = args or wire.Args()
        args.traceparent = read_traceparent(request.traceparent)
    if request.content_type[: len(LINES_TYPE)].lower() != LINES_TYPE:
        ask_owner(call, wire.WRITE, respond, flags, args)
        return
    args = args or wire.Args()
    args.node = pairs.get("node")
    if args.node is not None and "\ufffd" in args.node:
        raise InvalidRequest("node in the query is not UTF-8")
    args.create = optional_flag(pairs, "create")
    ask_owner(call, wire.WRITE_LINES, respond, flags, args)


def _text(value: bytes, name: str) -> str:
    """As UTF-8 or not at all: two keys that only look alike would make one write of two."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name} is not UTF-8") from None


def diff(call: Call, respond: Respond) -> None:
    ask_owner(call, wire.DIFF_FRAMES if FRAMES_TYPE in call.request.accept else wire.DIFF, respond)


def delete(call: Call, respond: Respond) -> None:
    ask_owner(call, wire.DELETE, respond)


def last(call: Call, respond: Respond) -> None:
    pairs = parse_query(call.request.query)
    args = wire.Args(
        tag=pairs.get("tag"),
        subject=pairs.get("subject"),
        each=flag(pairs, "each", False),
        after=decode_cursor(pairs.get("cursor", "")),
        page_size=page_size(pairs),
    )
    ask_owner(call, wire.LAST_BY_TAG, respond, 0, args)


def tags(call: Call, respond: Respond) -> None:
    pairs = parse_query(call.request.query)
    args = wire.Args(
        prefix=pairs.get("prefix", ""),
        after=decode_cursor(pairs.get("cursor", "")),
        page_size=page_size(pairs),
    )
    ask_owner(call, wire.COUNT_BY_TAG, respond, 0, args)


def deleted(call: Call, respond: Respond) -> None:
    pairs = parse_query(call.request.query)
    args = wire.Args(from_seq=number(pairs, "from_seq", 0), page_size=number(pairs, "limit", 0))
    ask_owner(call, wire.LIST_DELETED, respond, 0, args)


def page_size(pairs: dict[str, str]) -> int:
    return min(max(number(pairs, "page_size", 100), 1), 1000)
