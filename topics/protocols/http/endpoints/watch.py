"""Watch sessions: creation, and opening of their event streams."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Callable
from functools import partial

import msgspec

from topics.api import limits
from topics.api.errors import Forbidden, InvalidRequest, TopicNotFound, TopicsError
from topics.api.requests import GROUP_BYTES_MAX, WATCH_TOPICS_MAX, StartBody, WatchBody
from topics.engine.core.subjects import parse_pattern
from topics.link import wire
from topics.link.watch import (
    SESSION_TTL_MS,
    STREAM_TOPICS_MAX,
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
from topics.protocols.http.call import Call, error_response, from_reply, key_prefixes, refusal
from topics.protocols.http.event_stream import EventStream
from topics.protocols.http.exchange import Body, Respond, Response, Sink
from topics.protocols.http.query import flag, parse_query
from topics.protocols.json.bodies import BodyType, check_u64, node_names
from topics.protocols.json.count_bound import CountBound

HEARTBEAT_MS_MAX = 60_000
OPEN_RETRY_US = 50_000
OPEN_WAIT_US = 25_000_000  # waits for a restart: a browser does not reconnect after any response but 200

_body = BodyType(WatchBody)
_names = CountBound("topics", WATCH_TOPICS_MAX, dict)
_found = msgspec.msgpack.Decoder(list[FoundTopic]).decode
_opened = msgspec.msgpack.Decoder(OpenedSession).decode

OnResolved = Callable[["Resolved"], None]


class Resolved(msgspec.Struct):
    """The requested topics that exist."""

    topics: dict[str, tuple[int, FoundTopic]]  # by name: start cursor and state; in the order of the request
    patterns: list[str]
    epochs: dict[str, str]  # of the start cursors


# -- validation --------------------------------------------------------------------------------------------


def is_pattern(name: str) -> bool:
    """Whether a token of the name is a wildcard."""
    tokens = name.split(".")
    return "*" in tokens or ">" in tokens


def bound_names(body: Body) -> None:
    """Reject a body with too many names before it is decoded."""
    if _names.is_exceeded(body):
        raise _names_refused("more")


def _names_refused(count: object) -> InvalidRequest:
    return InvalidRequest(f"topics must have 1 to {WATCH_TOPICS_MAX} names or patterns, not {count}")


def check_names(call: Call, wanted: dict[str, StartBody]) -> None:
    """Check the names as far as possible without asking a shard."""
    if not 0 < len(wanted) <= WATCH_TOPICS_MAX:
        raise _names_refused(len(wanted))
    for name, start in wanted.items():
        check_u64(from_seq=start.from_seq)
        if is_pattern(name) and start.epoch is not None:
            raise InvalidRequest("an epoch is only allowed with the name of a topic, not with a pattern")
        if not is_pattern(name):
            if "*" in name or ">" in name:
                raise InvalidRequest(
                    f"in {name!r} a wildcard is part of a token; it must be a token of its own: a.*, a.>"
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
                raise Forbidden("this key may not access this name", topic=name)


def resolve(
    call: Call,
    wanted: dict[str, StartBody],
    lenient: bool,
    refuse: Callable[[Response], None],
    done: OnResolved,
) -> None:
    """Look up the topics at their shards. `refuse` gets the error response if that fails."""
    services = call.services
    patterns = [name for name in wanted if is_pattern(name)]
    names: dict[int, list[str]] = {}
    for name in wanted:
        if not is_pattern(name):
            names.setdefault(services.shard_of(name), []).append(name)
    asked = range(services.shards.count) if patterns else sorted(names)
    replies: dict[int, wire.Reply] = {}

    def gather(shard: int, reply: wire.Reply) -> None:
        replies[shard] = reply
        if len(replies) < len(asked):
            return
        failed = next((reply for reply in replies.values() if reply.code != wire.OK), None)
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
        services.shards.ask(
            shard, wire.FIND, 0, b"", b"", body, call.request.received_us, partial(gather, shard)
        )


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
    """The `topics` member of a response."""
    return {
        name: {"from_seq": start, "head_seq": row.head_seq, "earliest_seq": row.earliest_seq}
        | ({"epoch": row.epoch} if include_epoch else {})
        for name, (start, row) in resolved.topics.items()
    }


def wants_epoch(body: WatchBody) -> bool:
    """Whether responses include epochs: a client that sends an epoch needs the next one."""
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
        raise InvalidRequest(f"the name of a group must have 1 to {GROUP_BYTES_MAX} bytes")
    if body.node is not None:
        raise InvalidRequest(
            "group and node cannot be combined: no other member would get the records that one excludes"
        )


def _store(call: Call, spec: SessionSpec, found: Resolved, ignored: list[str], respond: Respond) -> None:
    services = call.services
    wid = _new_wid(services.shard_of, services.random_bytes)
    cursors = {name: start for name, (start, _) in found.topics.items()}
    key = call.key.digest if call.key is not None else b""
    session = CreateSession(wid, key, spec, cursors, found.epochs)

    def stored(reply: wire.Reply) -> None:
        if reply.code != wire.OK:
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

    shard = services.shard_of(wid)
    services.shards.ask(shard, wire.SESSION, 0, b"", b"", encode(session), call.request.received_us, stored)


def _new_wid(shard_of: Callable[[str], int], random_bytes: Callable[[int], bytes]) -> str:
    """A random id of 128 bits that maps to shard 0: it counts all sessions, so their cap is exact."""
    while True:
        wid = "wid_" + urlsafe_b64encode(random_bytes(16)).decode().rstrip("=")
        if shard_of(wid) == 0:
            return wid


# -- GET /v0/watch/:wid --------------------------------------------------------------------------------------


def open_stream(call: Call, respond: Respond) -> None:
    if not accepts_stream(call.request.accept):
        respond_not_acceptable(respond)
        return
    streams = call.services.streams
    is_head = call.request.method == b"HEAD"
    wid = call.topic.decode("utf-8", "replace")
    release_slot = None if is_head else streams.reserve(call.key, replacing=wid)
    opening = StreamOpening(call, respond, release_slot)
    if release_slot is not None:
        before = call.request.release
        call.request.release = lambda: (before(), opening.client_disconnected())  # type: ignore[assignment, func-returns-value]
    opening.ask()


def accepts_stream(accept: bytes) -> bool:
    return not accept or sse.CONTENT_TYPE in accept.lower() or b"*/*" in accept


def respond_not_acceptable(respond: Respond) -> None:
    respond(error_response("not_acceptable", "streams are text/event-stream; send Accept: text/event-stream"))


class StreamOpening:
    """Opens a stream: requests its session from the shard, and retries until the shard is ready."""

    def __init__(self, call: Call, respond: Respond, release_slot: Callable[[], None] | None) -> None:
        self._call = call
        self._respond = respond
        self._release_slot = release_slot  # None: no slot is reserved
        self._wid = call.topic.decode("utf-8", "replace")
        self._number = call.services.streams.next_number() if release_slot is not None else 0
        self._gone = False
        self._give_up_us = call.services.now_us() + OPEN_WAIT_US

    def ask(self) -> None:
        call = self._call
        if self._gone:
            return
        key = call.key.digest if call.key is not None else b""
        header = call.request.last_event_id.decode("ascii", "replace")
        # A page that creates a new EventSource cannot set the header.
        last_id = header or parse_query(call.request.query).get("last_event_id", "")
        request = OpenSession(self._wid, key, self._number, last_id)
        shard = call.services.shard_of(self._wid)
        call.services.shards.ask(
            shard, wire.SESSION, 0, b"", b"", encode(request), call.services.now_us(), self._replied
        )

    def _replied(self, reply: wire.Reply) -> None:
        services, is_unavailable = self._call.services, reply.error_code in wire.UNAVAILABLE
        if is_unavailable and services.now_us() < self._give_up_us and not services.draining:
            if not self._gone:
                services.later(OPEN_RETRY_US, self.ask)
        elif is_unavailable:
            self._finish(
                Response(200, b"", sse.CONTENT_TYPE, sse.HEAD, stream=RefusedStream(services.draining))
            )
        elif reply.code != wire.OK:
            self._finish(from_reply(reply))
        elif self._gone:
            self._close_session(_opened(reply.body))
        elif self._call.request.method == b"HEAD":
            # With a stream, so that there is no Content-Length; its body is not sent.
            self._finish(
                Response(200, b"", sse.CONTENT_TYPE, sse.HEAD, stream=RefusedStream(services.draining))
            )
        elif self._release_slot is None:
            self._finish(no_capacity(self._call))
        else:
            self._open(_opened(reply.body))

    def _open(self, opened: OpenedSession) -> None:
        assert self._release_slot is not None
        streams = self._call.services.streams
        stream = EventStream(
            streams.fanout,
            streams,
            self._wid,
            self._number,
            opened,
            key_prefixes(self._call),
            self._release_slot,
        )
        self._release_slot = None
        streams.add(stream)
        self._respond(Response(200, b"", sse.CONTENT_TYPE, sse.HEAD, stream=stream))

    def _finish(self, response: Response) -> None:
        if self._release_slot is not None:
            self._release_slot()
        self._respond(response)

    def client_disconnected(self) -> None:
        if self._release_slot is not None:
            self._gone = True
            self._release_slot()

    def _close_session(self, opened: OpenedSession) -> None:
        """Close the session again, because the client has disconnected."""
        save = SaveSession(self._wid, self._number, opened.save + 1, {}, closes=True)
        self._call.services.streams.close_session(save)


class RefusedStream:
    """A stream that sends an error and ends. Browsers reconnect after that, but not after any response but 200."""

    def __init__(self, stopping: bool) -> None:
        self._text = (
            sse.error("server_shutting_down", "the server is stopping; reconnect to continue")
            if stopping
            else sse.error("not_ready", "the session's shard is not ready; reconnect to continue")
        )

    def opened(self, sink: Sink) -> None:
        sink.write(sse.RETRY + self._text)
        sink.close()

    def drained(self) -> None: ...

    def closed(self) -> None: ...


def no_capacity(call: Call) -> Response:
    limit, maximum = call.services.streams.reached_cap(call.key) or ("max_sse_connections", 0)
    return error_response("throttled", "too many streams are open", {"limit": limit, "max": maximum})
