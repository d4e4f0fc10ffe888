"""Following topics: where a watch stands, and what it asks of a server that knows nothing of it.

The cursors are kept here as well, beside those of the session: the server may have forgotten it, and what comes
twice must not be handed on twice.
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
    own,
)
from topics.client.calls import When, as_ms, read, topics
from topics.client.errors import ClientError, NotFound, RecordsLost, Throttled, TopicNotFound
from topics.client.event_stream import Event
from topics.client.flows import Core, Flow, Request, json_request
from topics.client.patterns import is_pattern, matches
from topics.client.sources import OnLost, Source
from topics.client.streams import Streaming

NAMES_MAX = 256  # in one request, patterns included

WatchEvent: TypeAlias = Records | Tombstone | CaughtUp | TopicEnded | Interrupted | Resumed | Notice
Start: TypeAlias = Literal["now", "earliest"] | int


@dataclass(frozen=True, slots=True)
class Wanted:
    names: tuple[str, ...]  # of topics, and patterns
    start: Start = "now"
    since_ms: int | None = None
    cursors: Mapping[str, int] = field(default_factory=dict)
    epochs: Mapping[str, str] = field(default_factory=dict)  # of the cursors
    options: Mapping[str, Any] = field(default_factory=dict)  # of the session


class Watching(Streaming[WatchEvent]):
    """All events of a watch."""

    def __init__(self, core: Core, wanted: Wanted, heartbeat_ms: int) -> None:
        super().__init__(core)
        self._wanted = wanted
        self._patterns = [name for name in wanted.names if is_pattern(name)]
        self._cursors: dict[str, int] = dict(wanted.cursors)  # those that moved last are last
        self._taken = dict(wanted.cursors)  # where whoever takes the events is; the others are ahead of it
        self._epochs = dict(wanted.epochs)
        self._taken_epochs = dict(wanted.epochs)
        self._begins_anywhere: set[str] = set()  # their first gap is no loss
        self._has_session = False
        self._path: str | None = None  # of the session's stream
        self._is_new = False  # the session was made for the opening that is under way
        self._is_used = False  # the server may have sent events of it
        self.idle_s = 2 * heartbeat_ms / 1000 + 5

    def take(self) -> WatchEvent | None:
        event = super().take()
        match event:
            case Records():
                self._take_up(event.topic, event.to_seq, event.epoch)
            case Tombstone():
                self._take_up(event.topic, event.cursor_after(self._taken.get(event.topic, 0)), event.epoch)
            case TopicEnded():
                self._taken.pop(event.topic, None)
                self._taken_epochs.pop(event.topic, None)
            case _:
                pass
        return event

    def _take_up(self, topic: str, cursor: int, epoch: str) -> None:
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
        nothing_left = self._has_session and not self._patterns and not self._cursors
        return self._is_closed or nothing_left

    # -- sessions ------------------------------------------------------------------------------------------

    def _prepare(self) -> Flow[Request]:
        if self._is_used and not self._reader.last_id:
            # Events of it may have been lost on the way, and with them all that could tell the server how far we are: it
            # would go on behind them. Another session begins where we say.
            self._path = None
        self._is_new = self._path is None
        if self._path is None:
            yield from (self._begin_again() if self._has_session else self._begin())
        assert self._path is not None
        headers = {"Accept": "text/event-stream"}
        if self._reader.last_id:
            headers["Last-Event-ID"] = self._reader.last_id
        self._is_used = True
        return Request("GET", self._path, None, headers)

    def _begin(self) -> Flow[None]:
        wanted = self._wanted
        since: dict[str, int] = {}
        if wanted.since_ms is not None:
            since = yield from self._seqs_since(wanted.since_ms)
        starts = since | dict(wanted.cursors)
        named = dict(list(starts.items())[: self._names_max])
        if wanted.start == "now" and wanted.since_ms is None and not wanted.cursors:
            first: dict[str, Any] = {"tail": True}
        else:
            # Who goes on from cursors wants all of what is new since.
            first = {"from_seq": wanted.start if isinstance(wanted.start, int) else 0}
        entries = dict.fromkeys(wanted.names, first) | {
            name: self._entry(name, seq) for name, seq in named.items()
        }
        made = yield from self._make(entries, is_lenient=bool(starts))
        for name in wanted.names:
            if not is_pattern(name) and name not in made:
                raise TopicNotFound(404, "topic_not_found", f"topic {name!r} does not exist", {"topic": name})
        if wanted.start == "earliest" and wanted.since_ms is None:
            self._begins_anywhere = set(made) - set(starts)
        self._cursors = {name: max(topic.from_seq, starts.get(name, 0)) for name, topic in made.items()}
        self._taken = dict(self._cursors)
        self._epochs = {name: self._epochs.get(name) or topic.epoch for name, topic in made.items()}
        self._taken_epochs = {name: epoch for name, epoch in self._epochs.items() if epoch}
        self._has_session = True

    def _begin_again(self) -> Flow[None]:
        """The session is forgotten. What matches and is not known yet is new: all of it is wanted."""
        # More topics than a request can name come from their beginning, and what is known of them is passed over.
        named = dict(list(self._cursors.items())[-self._names_max :])
        entries: dict[str, Any] = {name: {"from_seq": 0} for name in self._patterns}
        entries |= {name: self._entry(name, seq) for name, seq in named.items()}
        made = yield from self._make(entries, is_lenient=True)
        for name in [name for name in self._cursors if name not in made]:
            del self._cursors[name]
            self._epochs.pop(name, None)
            self._items.append(TopicEnded(topic=name))
        for name, topic in made.items():
            if name not in named and name in self._cursors:
                # The server does not know where we were, so it cannot tell that this is another topic.
                is_other = topic.epoch != (self._epochs.get(name) or topic.epoch)
                if is_other or topic.head_seq < self._cursors[name]:
                    self._cursors[name] = 0
                if is_other:
                    gone = Tombstone(topic=name, reason="recreated", gap_from=1, gap_to=topic.head_seq)
                    gone.earliest_seq, gone.head_seq, gone.epoch = (
                        topic.earliest_seq,
                        topic.head_seq,
                        topic.epoch,
                    )
                    self._epochs[name] = topic.epoch
                    self._items.append(gone)
            self._epochs.setdefault(name, topic.epoch)
            self._cursors.setdefault(name, topic.from_seq)
            self._taken.setdefault(name, topic.from_seq)

    def _entry(self, name: str, seq: int) -> dict[str, Any]:
        epoch = self._epochs.get(name)
        return {"from_seq": seq, "epoch": epoch} if epoch else {"from_seq": seq}

    def _make(self, entries: Mapping[str, Any], *, is_lenient: bool) -> Flow[dict[str, WatchedTopic]]:
        path = "/v0/watch?lenient=true" if is_lenient else "/v0/watch"
        body = {"topics": entries, **self._wanted.options}
        made = yield from self._core.call(json_request("POST", path, body), WatchMade)
        self._path = made.stream_url
        self._reader.last_id = ""  # ids are those of the session
        return made.topics

    @property
    def _names_max(self) -> int:
        return max(1, NAMES_MAX - len(self._wanted.names))

    def _seqs_since(self, since_ms: int) -> Flow[dict[str, int]]:
        """By topic: the seq after which that time begins."""
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

    def _unanswered(self) -> None:
        # Whatever holds the session up, another one may not be held up by it.
        self._path = None

    def _refused(self, error: ClientError) -> bool:
        self._is_used = False
        if not isinstance(error, NotFound) or not self._has_session:
            return False
        self._path = None
        if self._is_new:  # a server that forgets at once is not asked without a pause
            self._interrupt(str(error))
        return True

    # -- events --------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        decoded = self._core.decoded
        match event.name:
            case "record":
                self._records(decoded(event.data, Records))
            case "tombstone":
                self._gap(decoded(event.data, Tombstone))
            case "caught-up":
                mark = decoded(event.data, CaughtUp)
                self._begins_anywhere.discard(mark.topic)
                self._items.append(mark)
            case "topic-deleted":
                ended = decoded(event.data, TopicEnded)
                self._cursors.pop(ended.topic, None)
                self._epochs.pop(ended.topic, None)
                self._items.append(ended)
            case _:  # of a later version
                pass

    def _gap(self, gap: Tombstone) -> None:
        seen = self._cursors.get(gap.topic, 0)
        known = self._epochs.get(gap.topic)
        if gap.is_new_topic or (known and gap.epoch and gap.epoch != known):
            # Records come that lie below the end of that gap.
            self._moved(gap.topic, gap.cursor_after(seen))
            self._epochs[gap.topic] = gap.epoch
        elif gap.gap_to <= seen:
            return  # a topic that had to begin anew; we have been past this
        else:
            self._moved(gap.topic, gap.gap_to)
        if gap.topic not in self._begins_anywhere:
            self._items.append(gap)
        self._begins_anywhere.discard(gap.topic)

    def _records(self, page: Records) -> None:
        self._begins_anywhere.discard(page.topic)
        seen = self._cursors.get(page.topic, 0)
        if page.from_seq < seen:  # the server had not noticed how far we were
            page.records = [record for record in page.records if record.seq > seen]
        since_ms = self._wanted.since_ms
        if since_ms is not None and page.records and page.records[0].ts < since_ms:
            page.records = [record for record in page.records if record.ts >= since_ms]
        self._moved(page.topic, max(seen, page.to_seq))
        if page.epoch:
            self._epochs[page.topic] = page.epoch
        if page.records:
            own(page.topic, page.records)
            self._items.append(page)

    def _moved(self, topic: str, cursor: int) -> None:
        self._cursors.pop(topic, None)
        self._cursors[topic] = cursor

    def _ends(self, code: int | str, message: str, topic: str) -> None:
        if code == 429:  # advice: the stream goes on
            self._items.append(Notice(code=code, message=message))
            return
        if code in (410, "taken_over"):
            # Nobody else knows this session: what took it over is a request of ours that was late, and its connection
            # is gone. To ask for the same one again would be to fight with it; another session is nobody's.
            self._path = None
        super()._ends(code, message, topic)

    def _note(self, item: Interrupted | Resumed) -> None:
        self._items.append(item)


class Tail(Source[Record]):
    """The records of a watch, one by one."""

    def __init__(self, watching: Watching, on_lost: OnLost | None) -> None:
        self._watching, self._on_lost = watching, on_lost
        self._page: deque[Record] = deque()
        self._cursor: tuple[str, int] | None = None  # of the page in hand

    def take(self) -> Record | None:
        while not self._page:
            self._cursor = None
            event = self._watching.take()
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
        return self._watching.begin()

    def more(self) -> Flow[bool]:
        return self._watching.more()

    def close(self) -> Flow[None]:
        return self._watching.close()

    @property
    def cursors(self) -> dict[str, int]:
        found = self._watching.cursors
        if self._cursor is not None:
            found[self._cursor[0]] = self._cursor[1]
        return found

    @property
    def epochs(self) -> dict[str, str]:
        return self._watching.epochs


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
    """Everything that happens to these topics, as events; patterns (`orders.>`) include topics that are made later.

    It begins now, with the oldest record, after a seq, at a time (`since`), or where an earlier one stopped
    (`cursors`, with what is new since, and their `epochs`). "now" is when a `with` block is entered, or the first event is asked for. It comes back by itself when the connection breaks or the server restarts.
    """
    return _watching(
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
    """The records of a `watch`, one by one, without an end unless every topic is deleted.

    Records that are gone although nobody deleted them raise RecordsLost, or are told to `on_lost`; either way the
    next record is the one behind the gap.
    """
    watching = _watching(
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
    return Tail(watching, on_lost)


def _watching(
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
) -> Watching:
    if not names:
        raise ValueError("name a topic or a pattern to follow; '>' is every topic")
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
    return Watching(core, Wanted(names, start, since_ms, known, known_epochs, options), heartbeat_ms)
