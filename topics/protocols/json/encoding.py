"""The JSON encoding of requests and replies: the reader of each operation, and the renderer of each result.

The records of a write may have other encodings, `Lines` and `Raw`; the reply is JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from topics.api.errors import InvalidRequest
from topics.api.requests import DiffBody
from topics.engine.commands import consumers as con
from topics.engine.commands import merges as mrg
from topics.engine.commands import topics as cmd
from topics.link import wire
from topics.link.rules import RuleDropped, RuleFound, RuleList, RulePut
from topics.protocols.encoding import Read, Shard, Steps
from topics.protocols.json import (
    consumer_replies,
    consumer_requests,
    forwards,
    merges,
    replies,
    requests,
    transactions,
)
from topics.protocols.json.large_bodies import read_large, read_large_record


class Json:
    appended = staticmethod(replies.appended)
    feed_records = staticmethod(replies.feed_records)
    job_events = staticmethod(consumer_replies.job_lines)
    read_rule = staticmethod(forwards.read_spec)

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.read: dict[int, Callable[[str, wire.Request, wire.Args], Read]] = {
            wire.WRITE: self._read_write,
            wire.DIFF: lambda t, r, a: requests.read_diff(t, r),
            wire.DELETE: lambda t, r, a: (requests.read_delete(t, r), None),
            wire.PUT_TOPIC: lambda t, r, a: (cmd.PutTopic(t, requests.read_config(r, a)), None),
            wire.GET_TOPIC: lambda t, r, a: (cmd.State(t, touch=not r.flags & wire.NO_TOUCH), None),
            wire.DROP_TOPIC: _read_drop,
            wire.LIST_TOPICS: _read_list,
            wire.LAST_BY_TAG: _read_last,
            wire.COUNT_BY_TAG: _read_counts,
            wire.LIST_DELETED: lambda t, r, a: (cmd.ListDeleted(t, a.from_seq, a.page_size), None),
            wire.WATCH_READ: self._read_watch,
            **consumer_requests.READERS,
            wire.CONSOLIDATE: merges.read,
            **transactions.READERS,
        }
        self.read_large = {op: self._read_large for op in (wire.WRITE, wire.TXN_STAGE)}

    # -- requests ------------------------------------------------------------------------------------------

    def _read_write(self, topic: str, request: wire.Request, args: wire.Args) -> Read:
        return requests.read_write(topic, request, args, self._shard.has_topic), None

    def _read_watch(self, topic: str, request: wire.Request, args: wire.Args) -> Read:
        read = requests.read_watch(request)
        if read.options.strong:
            self._shard.track_synced_head(topic)
        return requests.watch_command(topic, read), read

    def _read_large(self, topic: str, request: wire.Request, args: wire.Args) -> Steps:
        return read_large(request, args.traceparent, lambda: self.read[request.op](topic, request, args))

    # -- replies -------------------------------------------------------------------------------------------

    def render(
        self, request: wire.Request, result: object, options: Any, total_ms: float, sync_ms: float
    ) -> wire.Result:
        if request.op in consumer_requests.READERS:
            return self._render_consumers(request, result, options, total_ms, sync_ms)
        if request.op in transactions.READERS:
            return transactions.render(request.op, result, total_ms)
        match result:
            case cmd.Page() if request.op == wire.LAST_BY_TAG:
                # Records are sorted by seq, but the cursor is a tag.
                last = max(filter(None, result.tags), default=None) if result.more and result.tags else None
                return replies.last_by_tag(result, replies.cursor_text(last), total_ms)
            case cmd.Page() if request.op == wire.WATCH_READ:
                return replies.watch_page(result, options)
            case cmd.Page():
                assert isinstance(options, DiffBody)
                return replies.page(result, options, total_ms)
            case cmd.Deleted():
                return replies.deleted(result, total_ms)
            case cmd.TopicPut():
                return replies.topic_put(result, total_ms)
            case cmd.TopicDropped():
                return replies.topic_dropped(result, total_ms)
            case cmd.TopicState():
                return replies.topic_state(result, self._shard.now_ms, total_ms)
            case cmd.TopicList():
                return replies.topic_list(result, self._shard.now_ms)
            case cmd.TagCounts():
                last = result.counts[-1][0] if result.more else None
                return replies.tag_counts(result, replies.cursor_text(last), total_ms)
            case cmd.DeletedRanges():
                return replies.deleted_ranges(result, total_ms)
            case mrg.MergeReply():
                return merges.rendered(result, total_ms)
            case RulePut() | RuleFound() | RuleList() | RuleDropped():
                return forwards.render(result, total_ms)
        raise AssertionError(f"no reply format for {type(result)}")

    def _render_consumers(
        self, request: wire.Request, result: object, options: Any, total_ms: float, sync_ms: float
    ) -> wire.Result:
        match result:
            case con.Claimed():
                headers_only = self._shard.is_headers_only(result)
                return consumer_replies.claimed(result, total_ms, headers_only=headers_only)
            case con.Settled():
                is_synced = result.synced and self._shard.is_synced_class(result.topic)
                return consumer_replies.settled(result, total_ms, sync_ms if is_synced else 0.0)
        return consumer_replies.render_consumer(result, request.op, options, total_ms)

    def marked(self, request: wire.Request, result: wire.Result) -> wire.Result:
        """The reply, with the marks of its request: served late, unknown fields ignored."""
        if request.flags & wire.LATE:
            result = replies.mark_late(result)
        if request.flags & wire.IGNORED:
            result = replies.with_ignored(result, request.ignored)
        return result


class Lines(Json):
    """The records of a write: one JSON object per line."""

    def __init__(self, shard: Shard) -> None:
        super().__init__(shard)
        self.read[wire.WRITE] = lambda t, r, a: (requests.read_lines(t, r, a), None)


class Raw(Json):
    """The record of a write: the whole body."""

    def __init__(self, shard: Shard) -> None:
        super().__init__(shard)
        self.read[wire.WRITE] = lambda t, r, a: (requests.read_raw(t, r, a), None)

    def _read_large(self, topic: str, request: wire.Request, args: wire.Args) -> Steps:
        return read_large_record(request.body, lambda: self.read[request.op](topic, request, args))


def _read_list(topic: str, request: wire.Request, args: wire.Args) -> Read:
    return cmd.ListTopics(args.prefix, args.after, args.page_size, wire.prefixes_of(args), args.touch), None


def _read_drop(topic: str, request: wire.Request, args: wire.Args) -> Read:
    return cmd.DropTopic(topic, bool(request.flags & wire.IF_EMPTY), wire.prefixes_of(args)), None


def _read_last(topic: str, request: wire.Request, args: wire.Args) -> Read:
    if args.subject is not None:
        match = requests.make_match("Subject", args.subject)
    elif args.tag is not None:
        match = requests.tag_match(args.tag, subjects=False)
    else:
        raise InvalidRequest("name a tag with ?tag= or ?subject=")
    return cmd.LastByTag(topic, match, args.each, args.after.encode(), args.page_size), None


def _read_counts(topic: str, request: wire.Request, args: wire.Args) -> Read:
    match = requests.make_match("Glob", args.prefix + "*")
    return cmd.CountByTag(topic, match, args.after.encode(), args.page_size), None
