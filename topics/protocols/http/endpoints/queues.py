"""Queues: claim, ack, nack, extend. Requests go to the topic's shard, which decodes the body."""

from __future__ import annotations

from topics.link import wire
from topics.protocols.http.call import Call, ask_owner
from topics.protocols.http.exchange import Respond


def claim(call: Call, respond: Respond) -> None:
    ask_owner(call, wire.CLAIM, respond)


def ack(call: Call, respond: Respond) -> None:
    ask_owner(call, wire.ACK, respond)


def nack(call: Call, respond: Respond) -> None:
    ask_owner(call, wire.NACK, respond)


def extend(call: Call, respond: Respond) -> None:
    ask_owner(call, wire.EXTEND, respond)
