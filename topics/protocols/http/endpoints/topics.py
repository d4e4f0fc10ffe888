"""Topics: create, get, list, delete."""

from __future__ import annotations

import heapq
from typing import Any

import msgspec

from topics.api.responses.records import TopicList
from topics.link import wire
from topics.protocols.http.call import Call, ask_all, ask_owner, from_reply, key_prefixes
from topics.protocols.http.endpoints.records import page_size
from topics.protocols.http.exchange import Respond, Response
from topics.protocols.http.query import decode_cursor, encode_cursor, flag, parse_query
from topics.protocols.json.replies import spent

_rows = msgspec.msgpack.Decoder(list[tuple[str, bytes]])


def put(call: Call, respond: Respond) -> None:
    ask_owner(call, wire.PUT_TOPIC, respond, 0, _key_args(call))


def get(call: Call, respond: Respond) -> None:
    touch = flag(parse_query(call.request.query), "touch", True)
    ask_owner(call, wire.GET_TOPIC, respond, 0 if touch else wire.NO_TOUCH)


def drop(call: Call, respond: Respond) -> None:
    if_empty = flag(parse_query(call.request.query), "if_empty", False)
    ask_owner(call, wire.DROP_TOPIC, respond, wire.IF_EMPTY if if_empty else 0, _key_args(call))


def _key_args(call: Call) -> wire.Args | None:
    prefixes = key_prefixes(call)
    return wire.Args(prefixes=prefixes) if prefixes is not None else None


def list_all(call: Call, respond: Respond) -> None:
    """Merge the first rows of every shard. If a shard fails the request fails: a partial list would look complete."""
    pairs = parse_query(call.request.query)
    size = page_size(pairs)
    args = wire.Args(
        prefixes=key_prefixes(call),
        prefix=pairs.get("prefix", ""),
        after=decode_cursor(pairs.get("cursor", "")),
        page_size=size,
        touch=flag(pairs, "touch", False),
    )

    def done(replies: list[wire.Reply]) -> None:
        failed = next((reply for reply in replies if reply.code != wire.OK), None)
        if failed is not None:
            respond(from_reply(failed))
            return
        rows = list(heapq.merge(*(_rows.decode(reply.body) for reply in replies)))
        encoded: list[Any] = [msgspec.Raw(row) for _, row in rows[:size]]
        more = encode_cursor(rows[size - 1][0]) if len(rows) > size else None
        body = TopicList(topics=encoded, next_cursor=more, performance=spent(call.total_ms))
        respond(Response(200, msgspec.json.encode(body)))

    ask_all(call, wire.LIST_TOPICS, done, args)
