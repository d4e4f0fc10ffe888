"""Named consumers: made, looked at, fetched from, steered. All passed to the topic's shard, which reads the body."""

from __future__ import annotations

from router.requests.call import Call, Endpoint, ask_owner, key_prefixes
from router.requests.endpoints.records import page_size
from topics.link import wire
from topics.protocols.http.exchange import Respond
from topics.protocols.http.query import decode_cursor, parse_query


def _passed(op: int, flags: int = 0) -> Endpoint:
    """A request about the consumer that the path names."""

    def pass_on(call: Call, respond: Respond) -> None:
        ask_owner(call, op, respond, flags, wire.Args(consumer=consumer_name(call)))

    return pass_on


def consumer_name(call: Call) -> str:
    return call.consumer.decode("utf-8", "replace")


get = _passed(wire.GET_CONSUMER)
drop = _passed(wire.DROP_CONSUMER)
fetch = _passed(wire.CLAIM)
ack = _passed(wire.ACK)
nack = _passed(wire.NACK)
extend = _passed(wire.EXTEND)
term = _passed(wire.TERM)
pause = _passed(wire.PAUSE_CONSUMER)
resume = _passed(wire.PAUSE_CONSUMER, wire.RESUME)
reset = _passed(wire.RESET_CONSUMER)


def put(call: Call, respond: Respond) -> None:
    args = wire.Args(consumer=consumer_name(call), prefixes=key_prefixes(call))
    ask_owner(call, wire.PUT_CONSUMER, respond, 0, args)


def list_all(call: Call, respond: Respond) -> None:
    pairs = parse_query(call.request.query)
    args = wire.Args(after=decode_cursor(pairs.get("cursor", "")), page_size=page_size(pairs))
    ask_owner(call, wire.LIST_CONSUMERS, respond, 0, args)
