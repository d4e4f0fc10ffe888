"""A shard's reply as a client of HTTP gets it, which is what most tests of workers compare: status, header lines, body."""

from __future__ import annotations

from dataclasses import dataclass

from topics.link import wire
from topics.protocols.http.call import error_response, from_reply


@dataclass(slots=True)
class ShardAnswer:
    id: int
    status: int
    kind: int
    head: bytes  # the fields of an event
    body: wire.Buffer


def as_answer(reply: wire.Reply) -> ShardAnswer:
    """Events, and replies between processes, keep their fields and body."""
    if reply.code == wire.ERROR:
        failure = reply.failure
        response = error_response(failure.code, failure.message, failure.detail)
        kind = wire.JSON if reply.kind == wire.MSGPACK else reply.kind
        return ShardAnswer(reply.id, response.status, kind, response.head, response.body)
    if reply.kind in (wire.JSON, wire.FRAMES):
        response = from_reply(reply)
        return ShardAnswer(reply.id, response.status, reply.kind, response.head, response.body)
    assert reply.code == wire.OK
    return ShardAnswer(reply.id, 200, reply.kind, reply.fields, reply.body)
