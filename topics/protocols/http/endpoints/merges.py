"""Merges (`/consolidation`) and snapshots of cold segments. Requests go to the topic's shard, which decodes the body."""

from __future__ import annotations

from topics.link import wire
from topics.protocols.http.call import Call, Endpoint, ask_owner
from topics.protocols.http.exchange import Respond


def _to_owner(call_name: str) -> Endpoint:
    def endpoint(call: Call, respond: Respond) -> None:
        named = call.consumer.decode("utf-8", "replace")
        ask_owner(call, wire.CONSOLIDATE, respond, 0, wire.Args(call=call_name, named=named))

    return endpoint


plan = _to_owner("plan")
state = _to_owner("state")
renew = _to_owner("renew")
commit = _to_owner("commit")
abandon = _to_owner("abandon")
pin = _to_owner("pin")
renew_pin = _to_owner("renew_pin")
release = _to_owner("release")
