"""Named consumers. Requests go to the topic's shard, which decodes the body."""

from __future__ import annotations

from topics.link import wire
from topics.protocols.http.call import Call, Endpoint, ask_owner, key_prefixes
from topics.protocols.http.endpoints.records import page_size
from topics.protocols.http.exchange import Respond
from topics.protocols.http.query import decode_cursor, parse_query


def _to_owner(op: int, flags: int = 0) -> Endpoint:
    def endpoint(call: Call, respond: Respond) -> None:
        ask_owner(call, op, respond, flags, wire.Args(consumer=consumer_name(call)))

    return endpoint


def consumer_name(call: Call) -> str:
    return call.consumer.decode("utf-8", "replace")


get = _to_owner(wire.GET_CONSUMER)
drop = _to_owner(wire.DROP_CONSUMER)
fetch = _to_owner(wire.CLAIM)
ack = _to_owner(wire.ACK)
nack = _to_owner(wire.NACK)
extend = _to_owner(wire.EXTEND)
term = _to_owner(wire.TERM)
pause = _to_owner(wire.PAUSE_CONSUMER)
resume = _to_owner(wire.PAUSE_CONSUMER, wire.RESUME)
reset = _to_owner(wire.RESET_CONSUMER)


def put(call: Call, respond: Respond) -> None:
    args = wire.Args(consumer=consumer_name(call), prefixes=key_prefixes(call))
    ask_owner(call, wire.PUT_CONSUMER, respond, 0, args)


def list_all(call: Call, respond: Respond) -> None:
    pairs = parse_query(call.request.query)
    args = wire.Args(after=decode_cursor(pairs.get("cursor", "")), page_size=page_size(pairs))
    ask_owner(call, wire.LIST_CONSUMERS, respond, 0, args)
