"""Sink transactions: begun, filled, committed or given up. All passed to the topic's shard, which reads the body."""

from __future__ import annotations

from router.requests.call import Call, Endpoint, ask_owner
from topics.link import wire
from topics.protocols.http.exchange import Respond


def _passed(op: int) -> Endpoint:
    """A request about the transaction that the path names."""

    def pass_on(call: Call, respond: Respond) -> None:
        ask_owner(call, op, respond, 0, wire.Args(txn=call.consumer.decode("utf-8", "replace")))

    return pass_on


def begin(call: Call, respond: Respond) -> None:
    ask_owner(call, wire.TXN_BEGIN, respond)


stage = _passed(wire.TXN_STAGE)
commit = _passed(wire.TXN_COMMIT)
abort = _passed(wire.TXN_ABORT)
