"""Encoding of replies: results to JSON. Replies to writes and reads are built from bytes, as that is faster."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from typing import TypeAlias

import msgspec

from topics.api.config import TopicConfig
from topics.api.requests import DiffBody
from topics.engine.commands import topics as cmd
from topics.engine.core.priority import effective_priority
from topics.engine.reading.render import render_records
from topics.link import wire
from topics.link.watch import FeedOptions, FeedPage, WatchRead, page_head
from topics.protocols.json.unknown_fields import add_ignored, ignored_header

Rendered: TypeAlias = tuple[int, int, bytes, wire.Buffer]  # status, kind, header lines, body

_encode = msgspec.json.encode
OK, CREATED = 200, 201


def appended(
    result: cmd.Appended,
    *,
    with_seqs: bool,
    total_ms: float,
    append_ms: float,
    sync_ms: float,
    more: bytes = b"",
) -> Rendered:
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
    return CREATED if result.created else OK, wire.JSON, b"", body


def page(result: cmd.Page, options: DiffBody, total_ms: float) -> Rendered:
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
    return OK, wire.JSON, b"", body


def watch_page(result: cmd.Page, read: WatchRead) -> Rendered:
    page = feed_page(result, read.from_seq)
    page.epoch = result.epoch
    return OK, wire.FEED, page_head(page), feed_records(result, read.options)


def feed_page(page: cmd.Page, from_seq: int) -> FeedPage:
    to_seq = page.next_from_seq
    return FeedPage(
        from_seq,
        to_seq,
        page.head_seq,
        page.earliest_seq,
        len(page.seqs),
        to_seq >= page.head_seq,
        page.tombstone,
    )


def feed_records(page: cmd.Page, options: FeedOptions) -> bytes:
    return render_records(
        page,
        include_tags=options.include_tags,
        include_meta=options.include_meta,
        include_data=options.include_data,
    )


def tombstone(found: cmd.Tombstone | None) -> bytes:
    return b"null" if found is None else _encode(found)


def frame_page(result: cmd.FramePage) -> Rendered:
    head = (
        b"Topics-Next-From-Seq: %d\r\nTopics-Head-Seq: %d\r\nTopics-Earliest-Seq: %d\r\n"
        b"Topics-Count: %d\r\nTopics-Caught-Up: %b\r\n"
        % (
            result.next_from_seq,
            result.head_seq,
            result.earliest_seq,
            result.count,
            b"true" if result.next_from_seq == result.head_seq else b"false",
        )
    )
    if result.epoch:
        head += b"Topics-Epoch: %b\r\n" % result.epoch.encode()
    if result.tombstone is not None:
        head += b"Topics-Tombstone: %b\r\n" % tombstone(result.tombstone)
    chunks = result.chunks
    return OK, wire.FRAMES, head, chunks[0] if len(chunks) == 1 else b"".join(chunks)


def deleted(result: cmd.Deleted, total_ms: float) -> Rendered:
    return json_reply(
        {
            "topic": result.topic,
            "deleted": result.deleted,
            "earliest_seq": result.earliest_seq,
            "head_seq": result.head_seq,
            "count": result.count,
            "bytes": result.bytes,
        },
        total_ms,
    )


def deleted_ranges(result: cmd.DeletedRanges, total_ms: float) -> Rendered:
    return json_reply(
        {
            "topic": result.topic,
            "ranges": [{"first_seq": first, "last_seq": last} for first, last in result.ranges],
            "next_from_seq": result.next_from_seq,
            "head_seq": result.head_seq,
            "earliest_seq": result.earliest_seq,
            "caught_up": result.next_from_seq == result.head_seq,
        },
        total_ms,
    )


def topic_put(result: cmd.TopicPut, total_ms: float) -> Rendered:
    status = CREATED if result.created else OK
    body = {"topic": result.topic, "created": result.created, "config": config_body(result.config)}
    return json_reply(body, total_ms, status)


def topic_dropped(result: cmd.TopicDropped, total_ms: float) -> Rendered:
    removed = sorted(name for _, name in result.forwards)
    return json_reply(
        {"topic": result.topic, "deleted": result.deleted, "routers_removed": removed}, total_ms
    )


def topic_state(result: cmd.TopicState, now_ms: int, total_ms: float) -> Rendered:
    body: dict[str, object] = {
        "topic": result.topic,
        "type": result.config.type,
        "head_seq": result.head_seq,
        "earliest_seq": result.earliest_seq,
        "next_seq": result.head_seq + 1,
        "count": result.count,
        "bytes": result.bytes,
        "config": config_body(result.config),
        "effective_priority": effective_priority(result.config, result.last_read_ts, now_ms),
        "last_write_ts": result.last_write_ts,
        "last_read_ts": result.last_read_ts,
        "epoch": result.epoch,
    }
    if result.queue is not None:
        body["queue"] = result.queue
    return json_reply(body, total_ms)


def config_body(config: TopicConfig) -> dict[str, object]:
    body: dict[str, object] = {
        "type": config.type,
        "ttl_ms": config.ttl_ms,
        "cap_records": config.cap_records,
        "cap_bytes": config.cap_bytes,
        "discard": config.discard,
        "durable": config.durability == "fsync",
        "durability": config.durability,
        "priority": config.priority,
        "auto_priority": config.auto_priority,
        "auto_create": config.auto_create,
        "idempotency_window_ms": config.idempotency_window_ms,
        "dedupe_node": config.dedupe_node,
        "lease_ms": config.lease_ms,
        "claim_jitter_ms": config.claim_jitter_ms,
        "max_deliveries": config.max_deliveries,
        "dead_letter": config.dead_letter,
        "leases_durable": config.leases_durable,
    }
    if config.cap_per_tag:
        body["cap_per_tag"] = config.cap_per_tag
    if config.max_record_bytes:
        body["max_record_bytes"] = config.max_record_bytes
    if config.retention != "limits":
        body["retention"] = config.retention
    return body


def topic_list(result: cmd.TopicList, now_ms: int) -> Rendered:
    """Rows as (name, JSON), which the front merges with those of other shards."""
    rows = [(state.topic, _encode(_topic_row(state, now_ms))) for state in result.topics]
    return OK, wire.INTERNAL, b"", msgspec.msgpack.encode(rows)


def _topic_row(state: cmd.TopicState, now_ms: int) -> dict[str, object]:
    row: dict[str, object] = {
        "topic": state.topic,
        "head_seq": state.head_seq,
        "earliest_seq": state.earliest_seq,
        "count": state.count,
        "bytes": state.bytes,
        "durable": state.config.durability == "fsync",
        "effective_priority": effective_priority(state.config, state.last_read_ts, now_ms),
        "type": state.config.type,
        "durability": state.config.durability,
    }
    if state.queue is not None:
        row["ready"] = state.queue.ready
    return row


def last_by_tag(result: cmd.Page, next_cursor: str | None, total_ms: float) -> Rendered:
    records = b"[" + render_records(result, include_tags=True) + b"]"
    body: dict[str, object] = {
        "topic": result.topic,
        "records": msgspec.Raw(records),
        "head_seq": result.head_seq,
    }
    return json_reply(with_cursor(body, next_cursor), total_ms)


def tag_counts(result: cmd.TagCounts, next_cursor: str | None, total_ms: float) -> Rendered:
    rows = [{"tag": tag.decode("utf-8", "replace"), "count": count} for tag, count in result.counts]
    body: dict[str, object] = {"topic": result.topic, "tags": rows}
    return json_reply(with_cursor(body, next_cursor), total_ms)


def cursor_text(last: bytes | None) -> str | None:
    """A URL-safe cursor to the rows after `last`; None: there are no more."""
    return urlsafe_b64encode(last).decode().rstrip("=") if last is not None else None


def with_cursor(body: dict[str, object], next_cursor: str | None) -> dict[str, object]:
    if next_cursor is not None:
        body["next_cursor"] = next_cursor
    return body


def with_ignored(kind: int, head: bytes, body: wire.Buffer, paths: list[str]) -> tuple[bytes, wire.Buffer]:
    """Add the ignored fields of a request to the header lines or the body of its reply."""
    if kind != wire.JSON:
        return head + ignored_header(paths), body
    return head, add_ignored(bytes(body), paths)


def json_reply(body: dict[str, object], total_ms: float, status: int = OK) -> Rendered:
    body["performance"] = {"server_total_ms": round(total_ms, 3)}
    return status, wire.JSON, b"", _encode(body)
