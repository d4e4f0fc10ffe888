"""Encoding of server-sent events."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from topics.engine.commands.topics import Tombstone
from topics.protocols.json.consumer_replies import JobEvent

RETRY = b"retry: 2000\n\n"
CONTENT_TYPE = b"text/event-stream"
HEAD = b"Cache-Control: no-store\r\nX-Accel-Buffering: no\r\n"


def event(name: bytes, event_id: bytes, data: bytes) -> bytes:
    return b"event: %b\nid: %b\ndata: %b\n\n" % (name, event_id, data)


def record(
    topic: bytes,
    event_id: bytes,
    records: bytes,
    from_seq: int,
    to_seq: int,
    head_seq: int,
    more: bytes = b"",
) -> bytes:
    """A `record` event. `more`: further members, each with a leading comma."""
    return (
        b'event: record\nid: %b\ndata: {"topic":"%b","records":[%b],"from_seq":%d,"to_seq":%d,"head_seq":%d%b}\n\n'
        % (event_id, topic, records, from_seq, to_seq, head_seq, more)
    )


def epoch_member(epoch: str | None) -> bytes:
    return b',"epoch":"%b"' % (epoch or "").encode()


def caught_up(topic: bytes, event_id: bytes, head_seq: int) -> bytes:
    return event(b"caught-up", event_id, b'{"topic":"%b","head_seq":%d}' % (topic, head_seq))


def tombstone(topic: bytes, event_id: bytes, gone: Tombstone, reason: str, more: bytes = b"") -> bytes:
    return event(b"tombstone", event_id, b"{%b%b}" % (tombstone_members(topic, gone, reason), more))


def tombstone_members(topic: bytes, gone: Tombstone, reason: str) -> bytes:
    return b'"topic":"%b","reason":"%b","gap_from":%d,"gap_to":%d,"earliest_seq":%d,"head_seq":%d' % (
        topic,
        reason.encode(),
        gone.gap_from,
        gone.gap_to,
        gone.earliest_seq,
        gone.head_seq,
    )


def job_events(events: Iterable[JobEvent]) -> bytes:
    return b"".join([b"event: %b\nid: %d\ndata: %b\n\n" % one for one in events])


def topic_deleted(topic: bytes, event_id: bytes) -> bytes:
    return event(b"topic-deleted", event_id, b'{"topic":"%b","head_seq":0,"reason":"deleted"}' % topic)


def error(code: str | int, message: str, **fields: object) -> bytes:
    data = msgspec.json.encode({"code": code, "error": message, "message": message, **fields})
    return b"event: error\ndata: %b\n\n" % data


def heartbeat(now_ms: int) -> bytes:
    return b": hb %d\n\n" % now_ms
