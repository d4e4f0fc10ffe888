"""Watches: streams of the events or records of topics.

The client keeps its own cursors besides those of the server's session: the server may have dropped the session, and
records that arrive twice must not be returned twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from topics.client.answers import (
    CaughtUp,
    Interrupted,
    Notice,
    Record,
    Records,
    Resumed,
    Tombstone,
    TopicEnded,
    WatchedTopic,
    WatchMade,
    fill_in,
)
from topics.client.calls import When, as_ms, read, topics
from topics.client.errors import ClientError, NotFound, RecordsLost, Throttled, TopicNotFound
from topics.client.flows import Core, Flow, Request, json_request
from topics.client.patterns import is_pattern, matches
from topics.client.sources import OnLost, Source
from topics.client.sse import Event
from topics.client.streams import ReconnectingStream

NAMES_MAX = 256  # per request, including patterns

WatchEvent: TypeAlias = Records | Tombstone | CaughtUp | TopicEnded | Interrupted | Resumed | Notice
Start: TypeAlias = Literal["now", "earliest"] | int


@dataclass(frozen=True, slots=True)
class WatchRequest:
    names: tuple[str, ...]  # of topics and patterns
    start: Start = "now"
    since_ms: int | None = None
    cursors: Mapping[str, int] = field(default_factory=dict)
    epochs: Mapping[str, str] = field(default_factory=dict)  # of the cursors
    options: Mapping[str, Any] = field(default_factory=dict)  # of the session


class EventStream(ReconnectingStream[WatchEvent]):
    """All events of a watch."""

    def __init__(self, core: Core, wanted: WatchRequest, heartbeat_ms: int) -> None:
        super().__init__(core)
        self._wanted = wanted
        self._patterns = [name for name in wanted.names if is_pattern(name)]
        self._cursors: dict[str, int] = dict(wanted.cursors)  # of received events; most recently moved last
        self._taken = dict(wanted.cursors)  # of events that the caller has taken
        self._epochs = dict(wanted.epochs)
        self._taken_epochs = dict(wanted.epochs)
        self._from_oldest: set[str] = set()  # their first gap is not a loss
        self._had_session = False
        self._path: str | None = None  # of the session's stream
        self._is_new = False  # the session was created for the current connection attempt
        self._is_used = False  # the server may have sent events of the session
        self.idle_s = 2 * heartbeat_ms / 1000 + 5

    def take(self) -> WatchEvent | None:
        event = super().take()
        match event:
            case Records():
                self._move_taken(event.topic, event.to_seq, event.epoch)
            case Tombstone():
                cursor = event.cursor_after(self._taken.get(event.topic, 0))
                self._move_taken(event.topic, cursor, event.epoch)
            case TopicEnded():
                self._taken.pop(event.topic, None)
                self._taken_epochs.pop(event.topic, None)
            case _:
                pass
        return event

    def _move_taken(self, topic: str, cursor: int, epoch: str) -> None:
        self._taken[topic] = cursor
        if epoch:
            self._taken_epochs[topic] = epoch

    @property
    def cursors(self) -> dict[str, int]:
        return dict(self._taken)

    @property
    def epochs(self) -> dict[str, str]:
        return dict(self._taken_epochs)

    @property
    def _is_over(self) -> bool:
        nothing_left = self._had_session and not self._patterns and not self._cursors
        return self._is_closed or nothing_left

    # -- sessions ------------------------------------------------------------------------------------------

    def _prepare(self) -> Flow[Request]:
        if self._is_used and not self._parser.last_id:
            # Events of the session may have been lost in transit. Without an event id we cannot tell the server where
            # to resume, and it would skip them. A new session starts at our cursors.
            self._path = None
        self._is_new = self._path is None
        if self._path is None:
            yield from (self._replace_session() if self._had_session else self._create_session())
        assert self._path is not None
        headers = {"Accept": "text/event-stream"}
        if self._parser.last_id:
            headers["Last-Event-ID"] = self._parser.last_id
        self._is_used = True
        return Request("GET", self._path, None, headers)

    def _create_session(self) -> Flow[None]:
        wanted = self._wanted
        since: dict[str, int] = {}
        if wanted.since_ms is not None:
            since = yield from self._seqs_since(wanted.since_ms)
        starts = since | dict(wanted.cursors)
        named = dict(list(starts.items())[: self._names_max])
        if wanted.start == "now" and wanted.since_ms is None and not wanted.cursors:
            first: dict[str, Any] = {"tail": True}
        else:
            # Resuming from cursors: topics created since then are read from their beginning.
            first = {"from_seq": wanted.start if isinstance(wanted.start, int) else 0}
        entries = dict.fromkeys(wanted.names, first) | {
            name: self._entry(name, seq) for name, seq in named.items()
        }
        made = yield from self._post_watch(entries, is_lenient=bool(starts))
        for name in wanted.names:
            if not is_pattern(name) and name not in made:
                raise TopicNotFound(404, "topic_not_found", f"topic {name!r} does not exist", {"topic": name})
        if wanted.start == "earliest" and wanted.since_ms is None:
            self._from_oldest = set(made) - set(starts)
        self._cursors = {name: max(topic.from_seq, starts.get(name, 0)) for name, topic in made.items()}
        self._taken = dict(self._cursors)
        self._epochs = {name: self._epochs.get(name) or topic.epoch for name, topic in made.items()}
        self._taken_epochs = {name: epoch for name, epoch in self._epochs.items() if epoch}
        self._had_session = True

    def _replace_session(self) -> Flow[None]:
        """Create a session after the server has dropped one. Unknown topics that match are new: read all of them."""
        # Topics that do not fit into the request start at their beginning; what we have seen of them is skipped.
        named = dict(list(self._cursors.items())[-self._names_max :])
        entries: dict[str, Any] = {name: {"from_seq": 0} for name in self._patterns}
        entries |= {name: self._entry(name, seq) for name, seq in named.items()}
        made = yield from self._post_watch(entries, is_lenient=True)
        for name in [name for name in self._cursors if name not in made]:
            del self._cursors[name]
            self._epochs.pop(name, None)
            self._items.append(TopicEnded(topic=name))
        for name, topic in made.items():
            if name not in named and name in self._cursors:
                # The request did not include our cursor, so the server cannot detect that the topic was recreated.
                is_recreated = topic.epoch != (self._epochs.get(name) or topic.epoch)
                if is_recreated or topic.head_seq < self._cursors[name]:
                    self._cursors[name] = 0
                if is_recreated:
                    tombstone = Tombstone(topic=name, reason="recreated", gap_from=1, gap_to=topic.head_seq)
                    tombstone.earliest_seq, tombstone.head_seq, tombstone.epoch = (
                        topic.earliest_seq,
                        topic.head_seq,
                        topic.epoch,
                    )
                    self._epochs[name] = topic.epoch
                    self._items.append(tombstone)
            self._epochs.setdefault(name, topic.epoch)
            self._cursors.setdefault(name, topic.from_seq)
            self._taken.setdefault(name, topic.from_seq)

    def _entry(self, name: str, seq: int) -> dict[str, Any]:
        epoch = self._epochs.get(name)
        return {"from_seq": seq, "epoch": epoch} if epoch else {"from_seq": seq}

    def _post_watch(self, entries: Mapping[str, Any], *, is_lenient: bool) -> Flow[dict[str, WatchedTopic]]:
        path = "/v0/watch?lenient=true" if is_lenient else "/v0/watch"
        body = {"topics": entries, **self._wanted.options}
        made = yield from self._core.call(json_request("POST", path, body), WatchMade)
        self._path = made.stream_url
        self._parser.last_id = ""  # event ids belong to a session
        return made.topics

    @property
    def _names_max(self) -> int:
        return max(1, NAMES_MAX - len(self._wanted.names))

    def _seqs_since(self, since_ms: int) -> Flow[dict[str, int]]:
        """By topic: the last seq before that time."""
        found: dict[str, int] = {}
        for name in self._wanted.names:
            names = [name]
            if is_pattern(name):
                source = topics(self._core, pattern=name)
                has_more = True
                names = []
                while has_more:
                    has_more = yield from source.more()
                    while (row := source.take()) is not None:
                        names.append(row.topic)
            for topic in names:
                if topic not in self._wanted.cursors:
                    found[topic] = yield from self._seq_since(topic, since_ms)
        return found

    def _seq_since(self, topic: str, since_ms: int) -> Flow[int]:
        at = 0
        while True:
            page = yield from read(
                self._core, topic, at, limit=1, since=since_ms, include_data=False, include_meta=False
            )
            if page.records:
                return page.records[0].seq - 1
            at = page.next_from_seq
            if page.caught_up:
                return at

    def _connect_timed_out(self) -> None:
        # The session may be stuck; a new one may not be.
        self._path = None

    def _retry_refused(self, error: ClientError) -> bool:
        self._is_used = False
        if not isinstance(error, NotFound) or not self._had_session:
            return False
        self._path = None
        if self._is_new:  # the server drops sessions at once: pause, to avoid a busy loop
            self._interrupt(str(error))
        return True

    # -- events --------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        decoded = self._core.decoded
        match event.name:
            case "record":
                self._handle_records(decoded(event.data, Records))
            case "tombstone":
                self._handle_tombstone(decoded(event.data, Tombstone))
            case "caught-up":
                mark = decoded(event.data, CaughtUp)
                self._from_oldest.discard(mark.topic)
                self._items.append(mark)
            case "topic-deleted":
                ended = decoded(event.data, TopicEnded)
                self._cursors.pop(ended.topic, None)
                self._epochs.pop(ended.topic, None)
                self._items.append(ended)
            case _:  # of a newer server
                pass

    def _handle_tombstone(self, gap: Tombstone) -> None:
        seen = self._cursors.get(gap.topic, 0)
        known = self._epochs.get(gap.topic)
        if gap.is_new_topic or (known and gap.epoch and gap.epoch != known):
            # The next records have seqs below the end of the gap.
            self._move_cursor(gap.topic, gap.cursor_after(seen))
            self._epochs[gap.topic] = gap.epoch
        elif gap.gap_to <= seen:
            return  # the topic was read again from its beginning, and we are past this gap
        else:
            self._move_cursor(gap.topic, gap.gap_to)
        if gap.topic not in self._from_oldest:
            self._items.append(gap)
        self._from_oldest.discard(gap.topic)

    def _handle_records(self, page: Records) -> None:
        self._from_oldest.discard(page.topic)
        seen = self._cursors.get(page.topic, 0)
        if page.from_seq < seen:  # the server resumed before our cursor
            page.records = [record for record in page.records if record.seq > seen]
        since_ms = self._wanted.since_ms
        if since_ms is not None and page.records and page.records[0].ts < since_ms:
            page.records = [record for record in page.records if record.ts >= since_ms]
        self._move_cursor(page.topic, max(seen, page.to_seq))
        if page.epoch:
            self._epochs[page.topic] = page.epoch
        if page.records:
            fill_in(page.topic, page.records)
            self._items.append(page)

    def _move_cursor(self, topic: str, cursor: int) -> None:
        self._cursors.pop(topic, None)
        self._cursors[topic] = cursor

    def _handle_error(self, code: int | str, message: str, topic: str) -> None:
        if code == 429:  # a warning: the stream continues
            self._items.append(Notice(code=code, message=message))
            return
        if code in (410, "taken_over"):
            # Only we know this session, so a delayed request of ours, whose connection is gone, has taken it over.
            # Reconnecting to it would compete with that request; a new session does not.
            self._path = None
        super()._handle_error(code, message, topic)

    def _notify(self, item: Interrupted | Resumed) -> None:
        self._items.append(item)


class Tail(Source[Record]):
    """The records of a watch, one by one."""

    def __init__(self, events: EventStream, on_lost: OnLost | None) -> None:
        self._events, self._on_lost = events, on_lost
        self._page: deque[Record] = deque()
        self._cursor: tuple[str, int] | None = None  # within the page

    def take(self) -> Record | None:
        while not self._page:
            self._cursor = None
            event = self._events.take()
            if event is None:
                return None
            match event:
                case Records():
                    self._page.extend(event.records)
                    self._cursor = (event.topic, event.from_seq)
                case Tombstone():
                    if self._on_lost is None:
                        raise RecordsLost(event)
                    self._on_lost(event)
                case Notice():
                    raise Throttled(429, "throttled", event.message, {})
                case _:
                    pass
        record = self._page.popleft()
        self._cursor = (record.topic, record.seq) if self._page else None
        return record

    def begin(self) -> Flow[None]:
        return self._events.begin()

    def more(self) -> Flow[bool]:
        return self._events.more()

    def close(self) -> Flow[None]:
        return self._events.close()

    @property
    def cursors(self) -> dict[str, int]:
        cursors = self._events.cursors
        if self._cursor is not None:
            cursors[self._cursor[0]] = self._cursor[1]
        return cursors

    @property
    def epochs(self) -> dict[str, str]:
        return self._events.epochs


# -- calls -------------------------------------------------------------------------------------------------


def watch(
    core: Core,
    *names: str,
    start: Start = "now",
    since: When | None = None,
    cursors: Mapping[str, int] | None = None,
    epochs: Mapping[str, str] | None = None,
    not_from: str | Sequence[str] | None = None,
    group: str | None = None,
    consistency: Literal["eventual", "strong"] = "eventual",
    limit: int = 0,
    max_batch_bytes: int | None = None,
    heartbeat_ms: int = 15_000,
    include_tags: bool = True,
    include_meta: bool = True,
    include_data: bool = True,
) -> Source[WatchEvent]:
    """Follow the events of topics. Patterns (`orders.>`) include topics created later.

    It starts now, at the oldest record, after a seq, at a time (`since`), or where an earlier watch stopped (`cursors`
    and `epochs`; includes topics created since). "now" is when the `with` block is entered, or when the first event is
    requested. It reconnects automatically when the connection breaks or the server restarts.
    """
    return _event_stream(
        core,
        names,
        start,
        since,
        cursors,
        epochs,
        heartbeat_ms,
        not_from,
        group,
        consistency,
        limit,
        max_batch_bytes,
        include_tags,
        include_meta,
        include_data,
    )


def tail(
    core: Core,
    *names: str,
    start: Start = "now",
    since: When | None = None,
    cursors: Mapping[str, int] | None = None,
    epochs: Mapping[str, str] | None = None,
    on_lost: OnLost | None = None,
    not_from: str | Sequence[str] | None = None,
    group: str | None = None,
    consistency: Literal["eventual", "strong"] = "eventual",
    limit: int = 0,
    max_batch_bytes: int | None = None,
    heartbeat_ms: int = 15_000,
    include_tags: bool = True,
    include_meta: bool = True,
    include_data: bool = True,
) -> Source[Record]:
    """Follow the records of topics, one by one; ends only when all topics are deleted. Arguments as for `watch`.

    Lost records raise RecordsLost, or call `on_lost`; either way iteration continues after the gap.
    """
    events = _event_stream(
        core,
        names,
        start,
        since,
        cursors,
        epochs,
        heartbeat_ms,
        not_from,
        group,
        consistency,
        limit,
        max_batch_bytes,
        include_tags,
        include_meta,
        include_data,
    )
    return Tail(events, on_lost)


def _event_stream(
    core: Core,
    names: tuple[str, ...],
    start: Start,
    since: When | None,
    cursors: Mapping[str, int] | None,
    epochs: Mapping[str, str] | None,
    heartbeat_ms: int,
    not_from: str | Sequence[str] | None,
    group: str | None,
    consistency: str,
    limit: int,
    max_batch_bytes: int | None,
    include_tags: bool,
    include_meta: bool,
    include_data: bool,
) -> EventStream:
    if not names:
        raise ValueError("give a topic or a pattern to follow; '>' matches every topic")
    options = {
        "node": not_from,
        "group": group,
        "consistency": consistency,
        "limit": limit,
        "max_batch_bytes": max_batch_bytes,
        "heartbeat_ms": heartbeat_ms,
        "include_tags": include_tags,
        "include_meta": include_meta,
        "include_data": include_data,
        "include_epoch": True,
    }
    known = {
        topic: seq
        for topic, seq in (cursors or {}).items()
        if any(topic == name or (is_pattern(name) and matches(name, topic)) for name in names)
    }
    since_ms = None if since is None else as_ms(core, since)
    known_epochs = {topic: epoch for topic, epoch in (epochs or {}).items() if topic in known}
    wanted = WatchRequest(names, start, since_ms, known, known_epochs, options)
    return EventStream(core, wanted, heartbeat_ms)
