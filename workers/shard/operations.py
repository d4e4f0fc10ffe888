"""Dispatch of the codec: the decoder of each operation, and the encoder of each result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from topics.api.errors import InvalidRequest
from topics.api.requests import DiffBody
from topics.engine.commands import consumers as con
from topics.engine.commands import forwards as fwd
from topics.engine.commands import merges as mrg
from topics.engine.commands import topics as cmd
from topics.engine.runtime.engine import Engine
from topics.link import wire
from topics.protocols.json import consumer_replies, consumer_requests, replies, requests
from topics.protocols.json import merges as consolidation_requests
from topics.protocols.json import transactions as transaction_requests
from topics.protocols.json.forwards import prefixes_of
from workers.forward.messages import encode_step_done, read_copies, read_step
from workers.forward.outbox import read_dead_letters

Read = tuple[cmd.Command, Any]  # the command, and options of its reply


class OperationCodec:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.read: dict[int, Callable[[str, wire.Request, wire.Args], Read]] = {
            wire.WRITE: self._read_write,
            wire.WRITE_LINES: lambda t, r, a: (requests.read_lines(t, r, a), None),
            wire.WRITE_RAW: lambda t, r, a: (requests.read_raw(t, r, a), None),
            wire.DIFF: lambda t, r, a: requests.read_diff(t, r),
            wire.DIFF_FRAMES: lambda t, r, a: requests.read_diff(t, r),
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
            wire.CONSOLIDATE: consolidation_requests.read,
            **transaction_requests.READERS,
            wire.DEAD_LETTERS: lambda t, r, a: (read_dead_letters(t, r.body), None),
            wire.COPIES: lambda t, r, a: (fwd.TakeCopies(t, read_copies(r.body)), None),
            wire.FORWARD_STEP: lambda t, r, a: (read_step(r.body), None),
        }

    # -- requests ------------------------------------------------------------------------------------------

    def _read_write(self, topic: str, request: wire.Request, args: wire.Args) -> Read:
        return requests.read_write(topic, request, args, self._engine.shard.state.staged.__contains__), None

    def _read_watch(self, topic: str, request: wire.Request, args: wire.Args) -> Read:
        read = requests.read_watch(request)
        if read.options.strong:
            self._engine.shard.reads.track_synced_head(self._engine.shard.state.loaded_topic(topic))
        return requests.watch_command(topic, read), read

    # -- replies -------------------------------------------------------------------------------------------

    def render(
        self, request: wire.Request, result: object, options: Any, total_ms: float, sync_ms: float
    ) -> wire.Result:
        if request.op in consumer_requests.READERS:
            return self._render_consumers(request, result, options, total_ms, sync_ms)
        if request.op in transaction_requests.READERS:
            return transaction_requests.render(request.op, result, total_ms)
        now_ms = self._engine.clock.now_ms
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
            case cmd.FramePage():
                ignored = request.ignored if request.flags & wire.IGNORED else []
                return replies.frame_page(result, ignored, is_late=bool(request.flags & wire.LATE))
            case cmd.Deleted():
                return replies.deleted(result, total_ms)
            case cmd.TopicPut():
                return replies.topic_put(result, total_ms)
            case cmd.TopicDropped():
                return replies.topic_dropped(result, total_ms)
            case cmd.TopicState():
                return replies.topic_state(result, now_ms, total_ms)
            case cmd.TopicList():
                return replies.topic_list(result, now_ms)
            case cmd.TagCounts():
                last = result.counts[-1][0] if result.more else None
                return replies.tag_counts(result, replies.cursor_text(last), total_ms)
            case cmd.DeletedRanges():
                return replies.deleted_ranges(result, total_ms)
            case mrg.MergeReply():
                return consolidation_requests.rendered(result, total_ms)
            case con.DeadLettersTaken() | fwd.CopiesTaken():
                return wire.OK, wire.MSGPACK, b"", msgspec.msgpack.encode(result)
            case fwd.InflowOpened() | fwd.InflowClosed() | fwd.OutflowOpened() | fwd.OutflowClosed():
                return wire.OK, wire.MSGPACK, b"", encode_step_done(result)
        raise AssertionError(f"no reply format for {type(result)}")

    def _render_consumers(
        self, request: wire.Request, result: object, options: Any, total_ms: float, sync_ms: float
    ) -> wire.Result:
        match result:
            case con.Claimed():
                headers_only = is_headers_only(self._engine, result)
                return consumer_replies.claimed(result, total_ms, headers_only=headers_only)
            case con.Settled():
                is_synced = result.synced and self.is_synced_class(result.topic)
                return consumer_replies.settled(result, total_ms, sync_ms if is_synced else 0.0)
        return consumer_replies.render_consumer(result, request.op, options, total_ms)

    def is_synced_class(self, topic: str) -> bool:
        """Whether writes wait for a sync by their class. Others do so only now and then, such as when a topic is created."""
        log = self._engine.shard.state.published.get(topic)
        return log is not None and log.config.durability == "fsync"


def is_headers_only(engine: Engine, result: con.Claimed) -> bool:
    log = engine.shard.state.published.get(result.topic) if result.consumer else None
    if log is None or log.consumers is None:
        return False
    consumer = log.consumers.find(result.consumer)
    return consumer is not None and consumer.config.headers_only


def _read_list(topic: str, request: wire.Request, args: wire.Args) -> Read:
    return cmd.ListTopics(args.prefix, args.after, args.page_size, prefixes_of(args), args.touch), None


def _read_drop(topic: str, request: wire.Request, args: wire.Args) -> Read:
    return cmd.DropTopic(topic, bool(request.flags & wire.IF_EMPTY), prefixes_of(args)), None


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
