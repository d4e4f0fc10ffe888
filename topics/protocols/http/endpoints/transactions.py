"""Sink transactions: begin, stage, commit, abort. Requests go to the topic's shard, which decodes the body."""

from __future__ import annotations

from topics.link import wire
from topics.protocols.http.call import Call, Endpoint, ask_owner
from topics.protocols.http.exchange import Respond


def _to_owner(op: int) -> Endpoint:
    def endpoint(call: Call, respond: Respond) -> None:
        ask_owner(call, op, respond, 0, wire.Args(txn=call.consumer.decode("utf-8", "replace")))

    return endpoint


def begin(call: Call, respond: Respond) -> None:
    ask_owner(call, wire.TXN_BEGIN, respond)


stage = _to_owner(wire.TXN_STAGE)
commit = _to_owner(wire.TXN_COMMIT)
abort = _to_owner(wire.TXN_ABORT)
