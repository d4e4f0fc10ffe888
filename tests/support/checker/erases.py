"""Erases: the payloads that an acknowledged erase must have overwritten. Tests that have the files search them.

An erase is about live records: nothing is promised for a record that was deleted or lost before.
"""

from __future__ import annotations

import json
from typing import Any

from tests.support.checker.batches import with_batches
from tests.support.checker.shapes import match_of
from tests.support.checker.timeline import Timeline, make_timeline
from tests.support.history import History, Op


def erased(history: History, erases: list[Op]) -> list[bytes]:
    """Payloads, without their last byte, of records that were certainly alive when one of these erases was executed.

    For topics whose records are removed by deletes only, and have no TTL but their own.
    """
    found: list[bytes] = []
    history, batches = with_batches(history, {erase.topic for erase in erases})
    for topic in dict.fromkeys(erase.topic for erase in erases):
        if any(_copies(op, topic) for op in history.ops):
            continue  # there may be copies of it, and it may be one
        ops = [op for op in history.ops if op.topic == topic]
        line = make_timeline(history, topic, ops)
        if topic in batches:
            ops += batches[topic].told(line)
        for erase in (erase for erase in erases if erase.topic == topic and _is_plain(erase, ops)):
            for write in (op for op in ops if _is_there_for(history, line, op, erase)):
                found += _payloads(write, erase)
    return found


def _copies(op: Op, topic: str) -> bool:
    """Whether it is about a router that may involve this topic; of a pattern only the first token is used."""
    if op.kind != "put_router":
        return False
    first = op.request["source"].split(".")[0]
    return topic == op.request["dest"] or first in ("*", ">", topic.split(".", maxsplit=1)[0])


def _payloads(write: Op, erase: Op) -> list[bytes]:
    return [
        json.dumps(record["data"])[:-1].encode()
        for seq, record in enumerate(write.request["records"], write.answer["first_seq"])
        if "data" in record and "ttl_ms" not in record and _names(erase.request, seq, record.get("tag"))
    ]


def _is_plain(erase: Op, ops: list[Op]) -> bool:
    """Whether it was acknowledged, and nothing else can have removed records before it."""
    if erase.kind != "delete" or not erase.ok or not erase.request.get("erase"):
        return False
    assert erase.answered_at is not None
    for other in ops:
        if other is erase or other.sent_at > erase.answered_at:
            continue
        if other.kind == "put" and any(name.startswith("cap") for name in other.request):
            return False
        if other.kind == "put_consumer" and "dead_letter" in other.request:
            return False  # a copy of it may be in another topic
        if other.kind == "delete" and not other.refused:
            done = other.ok and other.answered_at is not None and other.answered_at < erase.sent_at
            if not (done and other.request.get("erase")):
                return False
    return True


def _is_there_for(history: History, line: Timeline, write: Op, erase: Op) -> bool:
    """Whether it was acknowledged before, and nothing has happened since that may have lost it."""
    if write.kind != "write" or not write.ok:
        return False
    assert write.answered_at is not None and erase.answered_at is not None
    if write.answered_at > erase.sent_at:
        return False
    # Which crashes lose records depends on the topic's real class: a first write without a config makes it a `disk`
    # topic, whatever class later requests name.
    first, last = line.span(write.sent_at, erase.answered_at)
    rots = (event.at for event in history.events if event.kind == "rot")
    return first == last and not any(write.sent_at < at < erase.answered_at for at in rots)


def _names(request: dict[str, Any], seq: int, tag: str | None) -> bool:
    """Whether the selectors of a delete certainly match this record."""
    if (
        "keep" in request
        or seq >= request.get("before_seq", seq + 1)
        or seq not in request.get("seqs", (seq,))
    ):
        return False
    match = match_of(request.get("match"))
    return match is None or match(tag)
