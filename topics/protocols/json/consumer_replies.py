"""Encoding of replies about queues and consumers: results to JSON. Claims and acks are built from bytes.

The text of a job is built from its frame: claims have few records, for which columns cost more than they save.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from topics.api.config import consumer_settings
from topics.api.responses import consumers
from topics.engine.commands import consumers as con
from topics.engine.commands.page import Column, Page, Tombstone
from topics.engine.storage.frames import (
    EXT_HEADERS,
    EXT_META,
    EXT_SIZE,
    HAS_EXT,
    HAS_TAG,
    HEADER,
    HEADER_BYTES,
    RAW,
    read_extensions,
)
from topics.link import wire
from topics.protocols.json.replies import (
    cursor_text,
    json_reply,
    spent,
    tombstone,
)

JobEvent: TypeAlias = tuple[bytes, int, bytes]  # name, seq, JSON text

_encode = msgspec.json.encode
_COUNTED = {"ack": b"acked", "nack": b"nacked", "extend": b"extended", "term": b"termed"}


# -- claims ------------------------------------------------------------------------------------------------


def claimed(result: con.Claimed, total_ms: float, *, headers_only: bool = False) -> wire.Result:
    jobs = render_jobs(result, headers_only=headers_only)
    named = result.consumer
    body = b"".join(
        (
            b'{"topic":"%b",' % result.topic.encode(),  # valid names need no escaping
            b'"consumer":"%b",' % named.encode() if named else b"",
            b'"claimed":[',
            b",".join(jobs),
            b'],"count":%d,"ready":%d,' % (len(jobs), result.ready),
            b'"tombstone":%b,' % tombstone(result.tombstone) if named else b"",
            b'"performance":{"server_total_ms":%.3f}}' % total_ms,
        )
    )
    return wire.OK, wire.JSON, b"", body


def render_jobs(result: con.Claimed, *, headers_only: bool = False, members: bytes = b"") -> list[bytes]:
    """One JSON object per record. Each begins with `members`, such as `"topic":"t",`."""
    jobs: list[bytes] = []
    leases = zip(result.lease_ids, result.deadlines, result.deliveries)
    for (buffer, start), (lease_id, deadline, deliveries) in zip(_frames(result.page), leases):
        _, _, flags, _, seq, ts, node_len, tag_len, data_len = HEADER.unpack_from(buffer, start)
        tag_at = start + HEADER_BYTES + node_len
        # Without acks there is no lease.
        lease = b'"lease_id":"lease_%x","deadline":%d,' % (lease_id, deadline) if lease_id else b""
        tag = _tag(buffer[tag_at : tag_at + tag_len]) if flags & HAS_TAG else b""
        data_at = tag_at + tag_len
        data_end = data_at + data_len
        if headers_only or flags & RAW:
            extensions = read_extensions(buffer, start) if flags & HAS_EXT else {}
            content = _other_content(
                buffer[data_at:data_end], extensions, raw=bool(flags & RAW), headers_only=headers_only
            )
        elif flags & HAS_EXT and buffer[data_end] == EXT_META:  # if present, it is the first extension
            split = data_end - int.from_bytes(buffer[data_end + 3 : data_end + 7], "little")
            content = b'"data":%b,"meta":%b' % (buffer[data_at:split], buffer[split:data_end])
        else:
            content = b'"data":' + buffer[data_at:data_end]
        jobs.append(
            b'{%b"$seq":%d,%b"$ts":%d,%b"deliveries":%d,%b}'
            % (members, seq, lease, ts, tag, deliveries, content)
        )
    return jobs


def job_events(result: con.Claimed, *, headers_only: bool = False) -> list[JobEvent]:
    """The events of a push to a job stream: one per job, after one for a tombstone."""
    topic = result.topic.encode()  # valid names need no escaping
    if result.consumer == con.QUEUE:
        name, owner = b"job", b'"topic":"%b",' % topic
    else:
        name, owner = b"record", b'"topic":"%b","consumer":"%b",' % (topic, result.consumer.encode())
    jobs = render_jobs(result, headers_only=headers_only, members=owner)
    events = [(name, seq, text) for seq, text in zip(result.page.seqs, jobs)]
    # Not for queues, whose clients see only jobs: a record removed by a cap or its age is no longer a job.
    if result.tombstone is not None and result.consumer != con.QUEUE:
        events.insert(0, _tombstone_event(owner, result.tombstone))
    return events


def job_lines(result: con.Claimed, *, headers_only: bool = False) -> bytes:
    """A push to a job stream: its events, one per line."""
    return b"\n".join([text for _, _, text in job_events(result, headers_only=headers_only)])


def _tombstone_event(owner: bytes, found: Tombstone) -> JobEvent:
    members = _encode(
        {
            "reason": found.reason,
            "gap_from": found.gap_from,
            "gap_to": found.gap_to,
            "earliest_seq": found.earliest_seq,
            "head_seq": found.head_seq,
        }
    )
    return b"tombstone", found.gap_to, b"{" + owner + members[1:]


def _frames(page: Page) -> Iterable[tuple[bytes, int]]:
    """The buffer and offset of each record's frame."""
    starts = _plain(page.starts)
    if page.which is None:
        frames = page.frames[0] if page.frames else b""
        return [(frames, start) for start in starts]
    return [(page.frames[which], start) for which, start in zip(_plain(page.which), starts)]


def _plain(column: Column) -> Sequence[int]:
    """A list of Python ints: numpy's are slower, one by one."""
    return column.tolist() if isinstance(column, np.ndarray) else column


def _tag(tag: bytes) -> bytes:
    return b'"$tag":%b,' % _encode(tag.decode("utf-8", "replace"))


def _other_content(payload: bytes, extensions: dict[int, bytes], *, raw: bool, headers_only: bool) -> bytes:
    """The content of a raw record, or of one without its data."""
    if headers_only:
        size = _length(extensions, EXT_SIZE) or len(payload)
        meta_len = 0 if raw else _length(extensions, EXT_META)
        return b'"bytes":%d' % size + (b',"meta":' + payload[-meta_len:] if meta_len else b"")
    header_len = _length(extensions, EXT_HEADERS)
    headers = b',"headers":"%b"' % b64encode(payload[:header_len]) if header_len else b""
    return b'"$encoding":"base64","data":"%b"%b' % (b64encode(payload[header_len:]), headers)


def _length(extensions: dict[int, bytes], which: int) -> int:
    return int.from_bytes(extensions.get(which, b""), "little")


# -- acks --------------------------------------------------------------------------------------------------


def settled(result: con.Settled, total_ms: float, sync_ms: float) -> wire.Result:
    if result.kind == "extend":
        pairs = b",".join([b'"%d":%d' % pair for pair in result.deadlines.items()])
        rest = b'"deadlines":{%b}' % pairs
    else:
        rest = b'"ready":%d,"in_flight":%d' % (result.ready, result.in_flight)
    body = b'{"topic":"%b",%b"%b":%d,"skipped":%b,%b,"performance":{"server_total_ms":%.3f%b}}' % (
        result.topic.encode(),
        b'"consumer":"%b",' % result.consumer.encode() if result.consumer else b"",
        _COUNTED[result.kind],
        result.count,
        _encode(result.skipped) if result.skipped else b"[]",
        rest,
        total_ms,
        b',"fsync_ms":%.3f' % sync_ms if sync_ms > 0 else b"",
    )
    return wire.OK, wire.JSON, b"", body


# -- named consumers ---------------------------------------------------------------------------------------


def render_consumer(result: object, op: int, page_size: int, total_ms: float) -> wire.Result:
    match result:
        case con.ConsumerState() if op == wire.PUT_CONSUMER:
            return consumer_put(result, total_ms)
        case con.ConsumerState():
            return json_reply(
                consumers.ConsumerState(**_consumer_fields(result), performance=spent(total_ms))
            )
        case con.ConsumerList():
            return consumer_list(result, page_size, total_ms)
        case con.ConsumerDropped():
            return consumer_dropped(result, total_ms)
        case con.ConsumerReset():
            return consumer_reset(result, total_ms)
    raise AssertionError(f"no reply format for {type(result)}")


def consumer_put(state: con.ConsumerState, total_ms: float) -> wire.Result:
    body = consumers.ConsumerPut(
        **_consumer_fields(state), created=state.created, performance=spent(total_ms)
    )
    return json_reply(body, wire.CREATED if state.created else wire.OK)


def consumer_list(result: con.ConsumerList, page_size: int, total_ms: float) -> wire.Result:
    rows = result.consumers[:page_size]
    last = rows[-1].consumer.encode() if len(result.consumers) > page_size else None
    return json_reply(
        consumers.ConsumerList(
            topic=result.topic,
            consumers=[consumers.Consumer(**_consumer_fields(row)) for row in rows],
            next_cursor=cursor_text(last),
            performance=spent(total_ms),
        )
    )


def consumer_dropped(result: con.ConsumerDropped, total_ms: float) -> wire.Result:
    return json_reply(
        consumers.ConsumerDeleted(
            topic=result.topic,
            consumer=result.consumer,
            deleted=result.deleted,
            performance=spent(total_ms),
        )
    )


def consumer_reset(result: con.ConsumerReset, total_ms: float) -> wire.Result:
    return json_reply(
        consumers.ConsumerReset(
            topic=result.state.topic,
            consumer=result.state.consumer,
            dry_run=result.dry_run,
            from_seq=result.from_seq,
            to_seq=result.to_seq,
            redelivers=result.redelivers,
            skips=result.skips,
            performance=spent(total_ms),
        )
    )


# Fields of a response that the engine knows under other names, or in another form.
_OWN_FORM = {"config", "next_seq", "paused_until_ts", "created", "performance"}
_SAME = [name for name in consumers.Consumer.__struct_fields__ if name not in _OWN_FORM]


def _consumer_fields(state: con.ConsumerState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in _SAME} | {
        "config": consumer_settings(state.config),
        "next_seq": state.cursor,
        "paused_until_ts": state.paused_until_ts or None if state.paused else None,
    }
