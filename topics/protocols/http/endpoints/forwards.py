"""Forwarding rules, which the HTTP API calls routers. Requests go to the shard that holds the catalog."""

from __future__ import annotations

from topics.link import wire
from topics.protocols.http.call import Call, ask_catalog, key_prefixes
from topics.protocols.http.endpoints.records import page_size
from topics.protocols.http.exchange import Respond
from topics.protocols.http.query import decode_cursor, parse_query


def _named(call: Call) -> wire.Args:
    return wire.Args(forward=call.topic.decode("utf-8", "replace"), prefixes=key_prefixes(call))


def put(call: Call, respond: Respond) -> None:
    ask_catalog(call, wire.PUT_FORWARD, respond, _named(call))


def get(call: Call, respond: Respond) -> None:
    ask_catalog(call, wire.GET_FORWARD, respond, _named(call))


def drop(call: Call, respond: Respond) -> None:
    ask_catalog(call, wire.DROP_FORWARD, respond, _named(call))


def list_all(call: Call, respond: Respond) -> None:
    pairs = parse_query(call.request.query)
    args = wire.Args(
        prefixes=key_prefixes(call),
        prefix=pairs.get("prefix", ""),
        after=decode_cursor(pairs.get("cursor", "")),
        page_size=page_size(pairs),
        source=pairs.get("source") or None,
        dest=pairs.get("dest") or None,
    )
    ask_catalog(call, wire.LIST_FORWARDS, respond, args)
