"""Merges and snapshots of a topic's cold segments. All passed to the topic's shard, which reads the body."""

from __future__ import annotations

from router.requests.call import Call, Endpoint, ask_owner
from topics.link import wire
from topics.protocols.http.exchange import Respond


def _passed(call_name: str) -> Endpoint:
    def pass_on(call: Call, respond: Respond) -> None:
        named = call.consumer.decode("utf-8", "replace")
        ask_owner(call, wire.CONSOLIDATE, respond, 0, wire.Args(call=call_name, named=named))

    return pass_on


plan = _passed("plan")
state = _passed("state")
renew = _passed("renew")
commit = _passed("commit")
abandon = _passed("abandon")
pin = _passed("pin")
renew_pin = _passed("renew_pin")
release = _passed("release")
