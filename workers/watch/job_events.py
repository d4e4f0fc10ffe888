"""What was claimed, as the server-sent events that a stream of jobs is made of."""

from __future__ import annotations

import msgspec

from topics.engine.commands.consumers import QUEUE, Claimed
from topics.engine.commands.page import Tombstone
from workers.codec.consumer_replies import render_jobs


def render(claimed: Claimed, *, headers_only: bool = False) -> bytes:
    """Events back to back; nothing when there is nothing to tell."""
    if claimed.consumer == QUEUE:
        name, owner = b"job", b'"topic":"%b",' % claimed.topic.encode()  # a name that exists needs no escapes
    else:
        name = b"record"
        owner = b'"topic":"%b","consumer":"%b",' % (claimed.topic.encode(), claimed.consumer.encode())
    jobs = render_jobs(claimed, headers_only=headers_only, members=owner)
    events = [_event(name, seq, text) for seq, text in zip(claimed.page.seqs, jobs)]
    # A queue's clients know of jobs alone: what a cap or its age has taken is no job any more.
    if claimed.tombstone is not None and claimed.consumer != QUEUE:
        events.insert(0, _tombstone(owner, claimed.tombstone))
    return b"".join(events)


def _event(name: bytes, event_id: int, data: bytes) -> bytes:
    return b"event: %b\nid: %d\ndata: %b\n\n" % (name, event_id, data)


def _tombstone(owner: bytes, gone: Tombstone) -> bytes:
    members = msgspec.json.encode(
        {
            "reason": gone.reason,
            "gap_from": gone.gap_from,
            "gap_to": gone.gap_to,
            "earliest_seq": gone.earliest_seq,
            "head_seq": gone.head_seq,
        }
    )
    return _event(b"tombstone", gone.gap_to, b"{" + owner + members[1:])
