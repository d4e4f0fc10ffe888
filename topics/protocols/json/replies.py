"""Encoding of replies: results to JSON. Replies to writes and reads are built from bytes, as that is faster.

Their form is that of `Written` and `Page`, to which a test compares them.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from typing import Any

import msgspec

from topics.api.config import topic_settings
from topics.api.fields import Answer
from topics.api.requests import DiffBody
from topics.api.responses import records
from topics.engine.commands import topics as cmd
from topics.engine.core.priority import effective_priority
from topics.engine.reading.render import render_records
from topics.link import wire
from topics.link.watch import FeedOptions, WatchRead, page_fields, page_of
from topics.protocols.json.unknown_fields import add_ignored

_encode = msgspec.json.encode
_PERFORMANCE = b'"performance":{'
_TIMED_OUT = b'"performance":{"catch_up_timed_out":true,'


def appended(
    result: cmd.Appended,
    *,
    with_seqs: bool,
    total_ms: float,
    append_ms: float,
    sync_ms: float,
    more: bytes = b"",
) -> wire.Result:
    """`more`: further members of `performance`, each with a leading comma."""
    first, count = result.first_seq, result.count
    last = first + count - 1
    if not with_seqs:
        seqs = b""
    elif count == 1:
        seqs = b'"seqs":[%d],' % first
    else:
        seqs = b'"seqs":[' + ",".join(map(str, range(first, last + 1))).encode() + b"],"
    body = (
        b'{"topic":"%b","first_seq":%d,"last_seq":%d,%b"head_seq":%d,"count":%d,"created":%b,"deduped":%b,'
        b'%b"performance":{"server_total_ms":%.3f,"wal_append_ms":%.3f,"fsync_ms":%.3f%b}}'
        % (
            result.topic.encode(),  # valid names need no escaping
            first,
            last,
            seqs,
            result.head_seq,
            count,
            b"true" if result.created else b"false",
            b"true" if result.deduped else b"false",
            b'"epoch":"%b",' % result.epoch.encode() if result.epoch else b"",
            total_ms,
            append_ms,
            sync_ms,
            more,
        )
    )
    return wire.CREATED if result.created else wire.OK, wire.JSON, b"", body


def page(result: cmd.Page, options: DiffBody, total_ms: float) -> wire.Result:
    caught_up = result.next_from_seq == result.head_seq
    body = b"".join(
        (
            b'{"topic":"',
            result.topic.encode(),
            b'","records":[',
            render_records(
                result,
                include_tags=options.include_tags,
                include_meta=options.include_meta,
                include_data=options.include_data,
            ),
            b'],"next_from_seq":%d,"head_seq":%d,"earliest_seq":%d,"caught_up":%b,"tombstone":%b,"lag":%d,'
            b'%b"performance":{"server_total_ms":%.3f,"records_scanned":%d%b}}'
            % (
                result.next_from_seq,
                result.head_seq,
                result.earliest_seq,
                b"true" if caught_up else b"false",
                tombstone(result.tombstone),
                result.head_seq - result.next_from_seq,
                b'"epoch":"%b",' % result.epoch.encode() if result.epoch else b"",
                total_ms,
                result.scanned,
                b',"cold_segments_read":%d' % result.cold_segments if result.cold_segments else b"",
            ),
        )
    )
    return wire.OK, wire.JSON, b"", body


def watch_page(result: cmd.Page, read: WatchRead) -> wire.Result:
    page = page_of(result, read.from_seq)
    page.epoch = result.epoch
    return wire.OK, wire.FEED, page_fields(page), feed_records(result, read.options)


def feed_records(page: cmd.Page, options: FeedOptions) -> bytes:
    return render_records(
        page,
        include_tags=options.include_tags,
        include_meta=options.include_meta,
        include_data=options.include_data,
    )


def tombstone(found: cmd.Tombstone | None) -> bytes:
    return b"null" if found is None else _encode(found)


def deleted(result: cmd.Deleted, total_ms: float) -> wire.Result:
    return json_reply(
        records.Deleted(
            topic=result.topic,
            deleted=result.deleted,
            earliest_seq=result.earliest_seq,
            head_seq=result.head_seq,
            count=result.count,
            bytes=result.bytes,
            performance=spent(total_ms),
        )
    )


def deleted_ranges(result: cmd.DeletedRanges, total_ms: float) -> wire.Result:
    return json_reply(
        records.DeletedRanges(
            topic=result.topic,
            ranges=[records.DeletedRange(first_seq=first, last_seq=last) for first, last in result.ranges],
            next_from_seq=result.next_from_seq,
            head_seq=result.head_seq,
            earliest_seq=result.earliest_seq,
            caught_up=result.next_from_seq == result.head_seq,
            performance=spent(total_ms),
        )
    )


def topic_put(result: cmd.TopicPut, total_ms: float) -> wire.Result:
    body = records.TopicPut(
        topic=result.topic,
        created=result.created,
        config=topic_settings(result.config),
        performance=spent(total_ms),
    )
    return json_reply(body, wire.CREATED if result.created else wire.OK)


def topic_dropped(result: cmd.TopicDropped, total_ms: float) -> wire.Result:
    removed = sorted(name for _, name in result.forwards)
    return json_reply(
        records.TopicDeleted(
            topic=result.topic, deleted=result.deleted, routers_removed=removed, performance=spent(total_ms)
        )
    )


def topic_state(result: cmd.TopicState, now_ms: int, total_ms: float) -> wire.Result:
    queue = result.queue
    return json_reply(
        records.Topic(
            topic=result.topic,
            type=result.config.type,
            head_seq=result.head_seq,
            earliest_seq=result.earliest_seq,
            next_seq=result.head_seq + 1,
            count=result.count,
            bytes=result.bytes,
            config=topic_settings(result.config),
            effective_priority=effective_priority(result.config, result.last_read_ts, now_ms),
            last_write_ts=result.last_write_ts,
            last_read_ts=result.last_read_ts,
            epoch=result.epoch,
            queue=None
            if queue is None
            else records.QueueState(
                ready=queue.ready, in_flight=queue.in_flight, dead_lettered=queue.dead_lettered
            ),
            performance=spent(total_ms),
        )
    )


def topic_list(result: cmd.TopicList, now_ms: int) -> wire.Result:
    """Rows as (name, JSON), which the front merges with those of other shards."""
    rows = [(state.topic, _encode(_topic_row(state, now_ms))) for state in result.topics]
    return wire.OK, wire.MSGPACK, b"", msgspec.msgpack.encode(rows)


def _topic_row(state: cmd.TopicState, now_ms: int) -> records.TopicRow:
    return records.TopicRow(
        topic=state.topic,
        head_seq=state.head_seq,
        earliest_seq=state.earliest_seq,
        count=state.count,
        bytes=state.bytes,
        durable=state.config.durability == "fsync",
        effective_priority=effective_priority(state.config, state.last_read_ts, now_ms),
        type=state.config.type,
        durability=state.config.durability,
        ready=None if state.queue is None else state.queue.ready,
    )


def last_by_tag(result: cmd.Page, next_cursor: str | None, total_ms: float) -> wire.Result:
    rendered: Any = msgspec.Raw(b"[" + render_records(result, include_tags=True) + b"]")
    return json_reply(
        records.LastRecords(
            topic=result.topic,
            records=rendered,
            head_seq=result.head_seq,
            next_cursor=next_cursor,
            performance=spent(total_ms),
        )
    )


def tag_counts(result: cmd.TagCounts, next_cursor: str | None, total_ms: float) -> wire.Result:
    rows = [records.TagCount(tag=tag.decode("utf-8", "replace"), count=count) for tag, count in result.counts]
    return json_reply(
        records.TagList(topic=result.topic, tags=rows, next_cursor=next_cursor, performance=spent(total_ms))
    )


def cursor_text(last: bytes | None) -> str | None:
    """A URL-safe cursor to the rows after `last`; None: there are no more."""
    return urlsafe_b64encode(last).decode().rstrip("=") if last is not None else None


def with_ignored(result: wire.Result, paths: list[str]) -> wire.Result:
    """Add the ignored fields of a request to the body of its reply."""
    code, kind, fields, body = result
    return (code, kind, fields, add_ignored(bytes(body), paths)) if kind == wire.JSON else result


def mark_late(result: wire.Result) -> wire.Result:
    """Mark the reply of a read that was served before its topic had caught up."""
    code, kind, fields, body = result
    if kind != wire.JSON:
        return result
    # `performance` is the last member of every reply and contains only numbers, so no record data follows it.
    before, found, after = bytes(body).rpartition(_PERFORMANCE)
    return (code, kind, fields, before + _TIMED_OUT + after) if found else result


def spent(total_ms: float) -> records.Performance:
    return {"server_total_ms": round(total_ms, 3)}


def json_reply(body: Answer, code: int = wire.OK) -> wire.Result:
    return code, wire.JSON, b"", _encode(body)
