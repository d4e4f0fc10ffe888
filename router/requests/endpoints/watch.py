"""Sessions and streams: what somebody wants to follow is checked and stored, and a stream is opened on it."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Callable
from functools import partial

import msgspec

from router.requests.call import Call, error_response, from_reply, key_prefixes
from router.watch.event_stream import EventStream
from topics.api import limits
from topics.api.errors import Forbidden, InvalidRequest, TopicNotFound, TopicsError
from topics.api.http_errors import error_head, error_parts
from topics.api.requests import StartBody, WatchBody
from topics.engine.core.subjects import parse_pattern
from topics.link import wire
from topics.link.watch import (
    SESSION_TTL_MS,
    STREAM_TOPICS_MAX,
    WATCH_TOPICS_MAX,
    CreateSession,
    FeedOptions,
    Find,
    FoundTopic,
    OpenedSession,
    OpenSession,
    SaveSession,
    SessionSpec,
    encode,
)
from topics.protocols.http import sse
from topics.protocols.http.bodies import BodyType, check_u64, node_names
from topics.protocols.http.count_bound import CountBound
from topics.protocols.http.exchange import Body, Respond, Response, Sink
from topics.protocols.http.query import flag, parse_query

HEARTBEAT_MS_MAX = 60_000
GROUP_BYTES_MAX = 128
OPEN_RETRY_US = 50_000
OPEN_WAIT_US = 25_000_000  # a browser gives up for good on any answer but 200, so a restart is waited for

_body = BodyType(WatchBody)
_names = CountBound("topics", WATCH_TOPICS_MAX, dict)
_found = msgspec.msgpack.Decoder(list[FoundTopic]).decode
_opened = msgspec.msgpack.Decoder(OpenedSession).decode

OnResolved = Callable[["Resolved"], None]


class Resolved(msgspec.Struct):
    """Topics that were asked for, as they are."""

    topics: dict[
        str, tuple[int, FoundTopic]
    ]  # name → where to begin, what was found; in the order of the request
    patterns: list[str]
    epochs: dict[str, str]  # of where to begin


# -- what is wanted ----------------------------------------------------------------------------------------


def is_pattern(name: str) -> bool:
    """Only a whole token is a wildcard."""
    tokens = name.split(".")
    return "*" in tokens or ">" in tokens


def bound_names(body: Body) -> None:
    """Refuse a body with too many names before it is decoded."""
    if _names.is_exceeded(body):
        raise _names_refused("more")


def _names_refused(count: object) -> InvalidRequest:
    return InvalidRequest(f"topics has 1 to {WATCH_TOPICS_MAX} names or patterns, not {count}")


def check_names(call: Call, wanted: dict[str, StartBody]) -> None:
    """What can be said of the names without asking a shard."""
    if not 0 < len(wanted) <= WATCH_TOPICS_MAX:
        raise _names_refused(len(wanted))
    for name, start in wanted.items():
        check_u64(from_seq=start.from_seq)
        if is_pattern(name) and start.epoch is not None:
            raise InvalidRequest("an epoch goes with the name of a topic, not with a pattern")
        if not is_pattern(name):
            if "*" in name or ">" in name:
                raise InvalidRequest(
                    f"in {name!r} a wildcard is only a part of a token; write it alone: a.*, a.>"
                )
            continue
        try:
            parse_pattern(name.encode())
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
    key = call.key
    if key is not None:
        for name in wanted:
            if not is_pattern(name) and not key.covers(name):
                raise Forbidden("this key may not use that name", topic=name)


def resolve(
    call: Call,
    wanted: dict[str, StartBody],
    lenient: bool,
    refuse: Callable[[Response], None],
    done: OnResolved,
) -> None:
    """Ask the shards for all of it; `refuse` gets the answer when it cannot be had."""
    core, fanout = call.services.core, call.services.desk.fanout
    patterns = [name for name in wanted if is_pattern(name)]
    names: dict[int, list[str]] = {}
    for name in wanted:
        if not is_pattern(name):
            names.setdefault(fanout.shard_of(name), []).append(name)
    asked = range(len(core.links)) if patterns else sorted(names)
    replies: dict[int, wire.Reply] = {}

    def gather(shard: int, reply: wire.Reply) -> None:
        replies[shard] = reply
        if len(replies) < len(asked):
            return
        failed = next((reply for reply in replies.values() if reply.status != 200), None)
        if failed is not None:
            refuse(from_reply(failed))
            return
        try:
            found = [row for shard in asked for row in _found(replies[shard].body)]
            done(_resolved(wanted, patterns, found, lenient))
        except TopicsError as error:
            refuse(refusal(error))

    for shard in asked:
        body = encode(Find(names.get(shard, []), patterns, key_prefixes(call)))
        core.send(shard, wire.FIND, 0, b"", b"", body, call.request.received_us, partial(gather, shard))


def _resolved(
    wanted: dict[str, StartBody], patterns: list[str], rows: list[FoundTopic], lenient: bool
) -> Resolved:
    found = {row.name: row for row in rows}
    if len(found) > STREAM_TOPICS_MAX:
        raise InvalidRequest(f"the patterns match more than {STREAM_TOPICS_MAX} topics; narrow them")
    topics: dict[str, tuple[int, FoundTopic]] = {}
    epochs: dict[str, str] = {}
    for name, start in wanted.items():
        if is_pattern(name):
            continue
        row = found.get(name)
        if row is not None:
            topics[name] = _start(start, row), row
            if start.epoch is not None and not start.tail:
                epochs[name] = start.epoch
        elif not lenient:
            raise TopicNotFound(name)
    for row in rows:
        if row.name not in topics and row.patterns:
            topics[row.name] = _start(wanted[patterns[row.patterns[0]]], row), row
    return Resolved(topics, patterns, {name: row.epoch for name, (_, row) in topics.items()} | epochs)


def _start(start: StartBody, row: FoundTopic) -> int:
    return row.head_seq if start.tail else start.from_seq


def starts(resolved: Resolved, *, include_epoch: bool) -> dict[str, dict[str, int | str]]:
    """The topics of an answer."""
    return {
        name: {"from_seq": start, "head_seq": row.head_seq, "earliest_seq": row.earliest_seq}
        | ({"epoch": row.epoch} if include_epoch else {})
        for name, (start, row) in resolved.topics.items()
    }


def wants_epoch(body: WatchBody) -> bool:
    """A client that sends an epoch has to learn the next one."""
    return body.include_epoch or any(start.epoch is not None for start in body.topics.values())


def feed_options(body: WatchBody) -> FeedOptions:
    check_u64(max_batch_bytes=body.max_batch_bytes, heartbeat_ms=body.heartbeat_ms)
    return FeedOptions(
        tuple(sorted(node_names(body.node))),
        min(body.limit or limits.DIFF_LIMIT_DEFAULT, limits.DIFF_LIMIT_MAX),
        min(body.max_batch_bytes or limits.DIFF_BYTES_DEFAULT, limits.DIFF_BYTES_MAX),
        body.include_data,
        body.include_meta,
        body.include_tags,
        body.consistency == "strong",
    )


# -- POST /v0/watch ------------------------------------------------------------------------------------------


def create(call: Call, respond: Respond) -> None:
    bound_names(call.request.body)
    body, ignored = _body.read(call.request.body, is_strict=call.is_strict)
    options = feed_options(body)
    check_group(body)
    check_names(call, body.topics)
    lenient = flag(parse_query(call.request.query), "lenient", False)
    floor_ms = call.services.settings.test_min_heartbeat_ms
    heartbeat_ms = min(max(body.heartbeat_ms, floor_ms), HEARTBEAT_MS_MAX)

    def resolved(found: Resolved) -> None:
        names = [name for name in body.topics if name in found.topics]
        spec = SessionSpec(options, heartbeat_ms, names, found.patterns, body.group, wants_epoch(body))
        _store(call, spec, found, ignored, respond)

    resolve(call, body.topics, lenient, respond, resolved)


def check_group(body: WatchBody) -> None:
    if body.group is None:
        return
    if not 0 < len(body.group.encode()) <= GROUP_BYTES_MAX:
        raise InvalidRequest(f"the name of a group has 1 to {GROUP_BYTES_MAX} bytes")
    if body.node is not None:
        raise InvalidRequest(
            "group and node cannot be combined: what a member leaves out nobody else would get"
        )


def _store(call: Call, spec: SessionSpec, found: Resolved, ignored: list[str], respond: Respond) -> None:
    services = call.services
    wid = _new_wid(services.desk.fanout.shard_of, services.random_bytes)
    cursors = {name: start for name, (start, _) in found.topics.items()}
    key = call.key.digest if call.key is not None else b""
    wish = CreateSession(wid, key, spec, cursors, found.epochs)

    def stored(reply: wire.Reply) -> None:
        if reply.status != 200:
            respond(from_reply(reply))
            return
        body: dict[str, object] = {
            "wid": wid,
            "stream_url": f"/v0/watch/{wid}",
            "session_ttl_ms": SESSION_TTL_MS,
            "topics": starts(found, include_epoch=spec.include_epoch),
            "performance": {"server_total_ms": round(call.total_ms, 3)},
        }
        if ignored:
            body["ignored"] = ignored
        respond(Response(200, msgspec.json.encode(body)))

    shard = services.desk.fanout.shard_of(wid)
    services.core.send(shard, wire.SESSION, 0, b"", b"", encode(wish), call.request.received_us, stored)


def _new_wid(shard_of: Callable[[str], int], random_bytes: Callable[[int], bytes]) -> str:
    """128 random bits. Such as lie on the first shard: all sessions are counted in one place, so their cap is exact."""
    while True:
        wid = "wid_" + urlsafe_b64encode(random_bytes(16)).decode().rstrip("=")
        if shard_of(wid) == 0:
            return wid


# -- GET /v0/watch/:wid --------------------------------------------------------------------------------------


def open_stream(call: Call, respond: Respond) -> None:
    if not accepts_stream(call.request.accept):
        raise_not_acceptable(respond)
        return
    desk = call.services.desk
    only_looks = call.request.method == b"HEAD"
    wid = call.topic.decode("utf-8", "replace")
    leave = None if only_looks else desk.take_place(call.key, in_place_of=wid)
    opening = StreamOpening(call, respond, leave)
    if leave is not None:
        before = call.request.release
        call.request.release = lambda: (before(), opening.client_left())  # type: ignore[assignment, func-returns-value]
    opening.ask()


def accepts_stream(accept: bytes) -> bool:
    return not accept or sse.CONTENT_TYPE in accept.lower() or b"*/*" in accept


def raise_not_acceptable(respond: Respond) -> None:
    respond(error_response("not_acceptable", "a stream is text/event-stream; accept that"))


class StreamOpening:
    """A stream that is about to be opened: its session is asked for, until its shard can answer."""

    def __init__(self, call: Call, respond: Respond, leave: Callable[[], None] | None) -> None:
        self._call = call
        self._respond = respond
        self._leave = leave  # gives its place under the caps back; None: it has none
        self._wid = call.topic.decode("utf-8", "replace")
        self._number = call.services.desk.next_number() if leave is not None else 0
        self._gone = False
        self._give_up_us = call.services.now_us() + OPEN_WAIT_US

    def ask(self) -> None:
        call = self._call
        if self._gone:
            return
        key = call.key.digest if call.key is not None else b""
        header = call.request.last_event_id.decode("ascii", "replace")
        # A page that makes an EventSource of its own again cannot set the header.
        last_id = header or parse_query(call.request.query).get("last_event_id", "")
        wish = OpenSession(self._wid, key, self._number, last_id)
        shard = call.services.desk.fanout.shard_of(self._wid)
        call.services.core.send(
            shard, wire.SESSION, 0, b"", b"", encode(wish), call.services.now_us(), self._answered
        )

    def _answered(self, reply: wire.Reply) -> None:
        services = self._call.services
        if reply.status == 503 and services.now_us() < self._give_up_us and not services.draining:
            if not self._gone:
                services.later(OPEN_RETRY_US, self.ask)
        elif reply.status == 503:
            self._finish(
                Response(200, b"", sse.CONTENT_TYPE, sse.HEAD, stream=RefusedStream(services.draining))
            )
        elif reply.status != 200:
            self._finish(from_reply(reply))
        elif self._gone:
            self._release(_opened(reply.body))
        elif self._call.request.method == b"HEAD":
            # A stream, so that it is not said to be empty; nothing of it is sent.
            self._finish(
                Response(200, b"", sse.CONTENT_TYPE, sse.HEAD, stream=RefusedStream(services.draining))
            )
        elif self._leave is None:
            self._finish(no_place(self._call))
        else:
            self._open(_opened(reply.body))

    def _open(self, opened: OpenedSession) -> None:
        assert self._leave is not None
        desk = self._call.services.desk
        stream = EventStream(
            desk.fanout, desk, self._wid, self._number, opened, key_prefixes(self._call), self._leave
        )
        self._leave = None
        desk.expect(stream)
        self._respond(Response(200, b"", sse.CONTENT_TYPE, sse.HEAD, stream=stream))

    def _finish(self, response: Response) -> None:
        if self._leave is not None:
            self._leave()
        self._respond(response)

    def client_left(self) -> None:
        if self._leave is not None:
            self._gone = True
            self._leave()

    def _release(self, opened: OpenedSession) -> None:
        """It was opened for a client that has gone."""
        wish = SaveSession(self._wid, self._number, opened.save + 1, {}, closes=True)
        self._call.services.desk.release(wish)


class RefusedStream:
    """A stream that cannot begin now. A browser comes back to it, as it would not to any answer but 200."""

    def __init__(self, stopping: bool) -> None:
        self._text = (
            sse.error("server_shutting_down", "the server is stopping; reconnect to go on")
            if stopping
            else sse.error("not_ready", "the session's shard is not ready; reconnect to go on")
        )

    def opened(self, sink: Sink) -> None:
        sink.write(sse.RETRY + self._text)
        sink.close()

    def drained(self) -> None: ...

    def closed(self) -> None: ...


def no_place(call: Call) -> Response:
    limit, most = call.services.desk.full(call.key) or ("max_sse_connections", 0)
    return error_response("throttled", "too many streams are open", {"limit": limit, "max": most})


def refusal(error: TopicsError) -> Response:
    status, body = error_parts(error)
    return Response(status, body, head=error_head(status))
