"""Records: write, read, delete. Requests go to the topic's shard, which decodes the body."""

from __future__ import annotations

from msgspec.json import encode

from topics.api.errors import InvalidRequest
from topics.api.fields import U32_MAX, U64_MAX
from topics.api.traces import read_traceparent
from topics.link import wire
from topics.protocols.http.call import FRAMES_TYPE, JSON_TYPE, LINES_TYPE, Call, ask_owner
from topics.protocols.http.exchange import Respond
from topics.protocols.http.query import (
    decode_cursor,
    flag,
    number,
    optional_flag,
    optional_number,
    parse_query,
)


def write(call: Call, respond: Respond, encoding: int = wire.JSON) -> None:
    request, key = call.request, call.key
    pairs = parse_query(request.query) if request.query else {}
    flags = 0
    if pairs:
        flags = 0 if flag(pairs, "return_seqs", True) else wire.NO_SEQS
        if flag(pairs, "include_epoch", False):
            flags |= wire.WITH_EPOCH
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
    if encoding == wire.JSON:
        if request.content_type[: len(LINES_TYPE)].lower() != LINES_TYPE:
            ask_owner(call, wire.WRITE, respond, flags, args)
            return
        encoding = wire.LINES
    args = args or wire.Args()
    args.node = _name(pairs, "node")
    args.create = optional_flag(pairs, "create")
    if encoding == wire.RAW:
        args.tag = _name(pairs, "tag")
        if request.content_type[: len(JSON_TYPE)].lower() == JSON_TYPE:
            flags |= wire.MUST_PARSE
    ask_owner(call, wire.WRITE, respond, flags, args, encoding)


def write_raw(call: Call, respond: Respond) -> None:
    """Write the body as one record."""
    write(call, respond, wire.RAW)


def _name(pairs: dict[str, str], field: str) -> str | None:
    """A query parameter that is stored. Invalid UTF-8 is rejected, because it would be stored as something else."""
    name = pairs.get(field)
    if name is not None and "\ufffd" in name:
        raise InvalidRequest(f"{field} in the query is not valid UTF-8")
    return name


def _text(value: bytes, name: str) -> str:
    """Decode UTF-8 strictly: replacement characters could make two different keys equal."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name} is not valid UTF-8") from None


def diff(call: Call, respond: Respond) -> None:
    encoding = wire.FRAMES if FRAMES_TYPE in call.request.accept else wire.JSON
    ask_owner(call, wire.DIFF, respond, encoding=encoding)


# Query parameters for the fields of DiffBody; maximum values of the numbers.
_NUMBERS = {
    "from_seq": U64_MAX,
    "from_ts": U64_MAX,
    "max_batch_bytes": U64_MAX,
    "limit": U32_MAX,
    "wait_ms": U32_MAX,
}
_FLAGS = ("include_data", "include_meta", "include_tags", "include_epoch")
_NAMES = ("node", "tag", "epoch")


def read(call: Call, respond: Respond) -> None:
    """Like `diff`, with the fields in the query."""
    pairs = parse_query(call.request.query)
    fields: dict[str, object] = {name: pairs.get(name) for name in _NAMES}
    if "subject" in pairs:
        fields["tag"] = ("tag", "Subject", pairs["subject"])
    fields |= {name: optional_number(pairs, name, maximum) for name, maximum in _NUMBERS.items()}
    fields |= {name: optional_flag(pairs, name) for name in _FLAGS}
    call.request.body = encode({name: value for name, value in fields.items() if value is not None})
    diff(call, respond)


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
