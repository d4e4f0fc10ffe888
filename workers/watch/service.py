"""The watch service of a shard: feeds of its topics, watches for new names, and watch sessions.

Sessions and group cursors are saved to a file: at once when a session is created (the reply waits for the save), else
within SAVE_MS of a change. A failed save is retried; watching continues without it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from topics.api.errors import InvalidRequest, TopicsError
from topics.engine.commands import topics as cmd
from topics.engine.core.ports import Disk
from topics.engine.core.subject_trie import SubjectTrie
from topics.engine.runtime.boundary import Job, ShardEngine
from topics.engine.storage.watch_file import WatchEntry
from topics.link import wire
from topics.link.watch import (
    STREAM_TOPICS_MAX,
    CreateSession,
    Find,
    Follow,
    FoundTopic,
    NameWatch,
    OpenSession,
    SessionRequest,
    encode,
)
from topics.protocols.encoding import Encoding
from workers.peers.links import Send
from workers.watch import session_file
from workers.watch.feeds import GROUPS_MAX, Feed, FeedGroup, Feeds
from workers.watch.name_search import NameSearch
from workers.watch.sessions import Sessions, StreamOwner

if TYPE_CHECKING:
    from workers.shard.core import Token

logger = logging.getLogger("topics.shard")

SAVE_MS = 1000
SAVE_ROWS_MAX = 500  # changed sessions, and groups, per save: limits the time on the event loop
TAKE_OVER_MS = 1000  # how long a front may take to end a stream whose session another stream opens
TOPICS_PER_STEP = 16  # some may have to be loaded
NAME_WATCHES_PER_FRONT_MAX = 100_000
JOB_KIND = "watch"

_find = msgspec.msgpack.Decoder(Find).decode
_follow = msgspec.msgpack.Decoder(Follow).decode
_name_watch = msgspec.msgpack.Decoder(NameWatch).decode
_session: Callable[[wire.Buffer], SessionRequest] = msgspec.msgpack.Decoder(SessionRequest).decode


@dataclass(slots=True, eq=False)
class TopicSearch:
    """A FIND in progress."""

    peer: bytes
    number: int
    left: int  # parts that are not done
    found: list[FoundTopic] = field(default_factory=list)
    patterns: dict[str, list[int]] = field(default_factory=dict)  # matched by the topics that are being read


@dataclass(slots=True, eq=False)
class WaitingStream:
    """A stream that waits for another one to release its session."""

    peer: bytes
    number: int
    request: OpenSession
    until_ms: int


class WatchService:
    def __init__(
        self,
        engine: ShardEngine,
        disk: Disk,
        *,
        max_sessions: int,
        max_sessions_per_key: int,
        send: Send,
        ask: Callable[[bytes, int, Any, cmd.Command | None], Token],
        now_us: Callable[[], int],
        encodings: Mapping[int, Encoding],
    ) -> None:
        self._engine = engine
        self._encodings = encodings
        self._disk = disk
        self._send = send
        self._ask = ask
        self._now_ms: Callable[[], int] = lambda: now_us() // 1000
        self.sessions = Sessions(max_sessions, max_sessions_per_key)
        self.feeds = Feeds(engine, send, self._ask_for_feed, self._now_ms)
        self._name_watches: dict[tuple[bytes, int], NameWatch] = {}
        self._per_front: dict[bytes, int] = {}
        self._trie: SubjectTrie[tuple[bytes, int]] = SubjectTrie()
        self._streams: dict[bytes, int] = {}  # open streams by front
        # Topics created while the initial search of their name watch runs: they are part of its reply.
        self._created_meanwhile: dict[tuple[bytes, int], list[str]] = {}
        self._searches: deque[Callable[[], bool]] = deque()  # run round-robin, one step at a time
        self._waiting_streams: list[WaitingStream] = []
        self._unsaved: list[tuple[bytes, int]] = []  # replies that wait for the next save
        self._being_saved: list[tuple[bytes, int]] = []  # replies that wait for the running save
        self._file = session_file.WatchFile(disk, engine.stats.config.shard_dir)
        self._saving = False
        self._saved_ms = 0
        self._has_failed = False  # the last save
        self._has_more = False  # changes that did not fit into the last save
        self._ops: dict[int, Callable[[bytes, wire.Request], None]] = {
            wire.FIND: self._on_find,
            wire.FOLLOW: self._on_follow,
            wire.WATCH_NAMES: self._on_watch_names,
            wire.FEED_ACK: lambda peer, request: self.feeds.on_ack(peer, request.id),
            wire.UNFOLLOW: self._on_unfollow,
            wire.SESSION: self._on_session,
            wire.STREAM_COUNT: self._on_streams,
        }

    # -- in ------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load saved sessions and groups, once the shard has recovered."""
        saved = session_file.read(self._disk, self._engine.stats.config.shard_dir)
        if saved is not None:
            self.sessions.load(saved.sessions, self._wall_ms())
            self.feeds.load_groups(saved.groups)

    def _wall_ms(self) -> int:
        """A clock that continues over restarts, for state that outlives the process. Need not be a turn's time."""
        return self._engine.stats.present_ms()

    def receive(self, peer: bytes, request: wire.Request) -> bool:
        """Handle a request about watching; False: it is not one. A TopicsError is sent as the reply."""
        handler = self._ops.get(request.op)
        if handler is None:
            return False
        try:
            handler(peer, request)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidRequest(f"a message about watching cannot be decoded: {error}") from None
        return True

    def front_gone(self, peer: bytes) -> None:
        self._streams.pop(peer, None)
        self.feeds.front_gone(peer)
        self._waiting_streams = [waiting for waiting in self._waiting_streams if waiting.peer != peer]
        self.sessions.front_gone(peer, self._wall_ms())
        for key in [key for key in self._name_watches if key[0] == peer]:
            self._end_name_watch(key)
        # They may have waited for streams of this front. A dict keeps the order; that of a set differs by process.
        for wid in dict.fromkeys(waiting.request.wid for waiting in self._waiting_streams):
            self._retry_open(wid)

    def _on_streams(self, peer: bytes, request: wire.Request) -> None:
        if request.id:  # the number of streams
            self._streams[peer] = request.id
        else:
            self._streams.pop(peer, None)

    def fronts(self) -> list[bytes]:
        """Fronts with open streams: their sessions and groups are in use."""
        return list(self._streams)

    def streams_elsewhere(self, peer: bytes) -> int:
        """Open streams of all other fronts."""
        return sum(count for front, count in self._streams.items() if front != peer)

    # -- topics --------------------------------------------------------------------------------------------

    def _ask_for_feed(self, peer: bytes, requester: Feed | FeedGroup, command: cmd.Diff | None) -> Token:
        return self._ask(peer, 0, requester, command)

    def _on_find(self, peer: bytes, request: wire.Request) -> None:
        find = _find(request.body)
        search = TopicSearch(peer, request.id, len(find.names))
        for name in find.names:
            self._ask(peer, 0, search, cmd.State(name, touch=False))
        if find.patterns:
            search.left += 1
            named = set(find.names)

            def found(matches: dict[str, list[int]]) -> None:
                rows = deque((name, patterns) for name, patterns in matches.items() if name not in named)
                self._searches.append(lambda: self._add_found(search, rows))

            self._search(find.patterns, find.prefixes, found)
        elif not find.names:
            self._reply(peer, request.id, encode([]))

    def _search(
        self, patterns: list[str], prefixes: list[str] | None, done: Callable[[dict[str, list[int]]], None]
    ) -> None:
        search = NameSearch(patterns, prefixes, STREAM_TOPICS_MAX, done)
        self._searches.append(lambda: search.step(self._engine.stats))

    def _add_found(self, search: TopicSearch, rows: deque[tuple[str, list[int]]]) -> bool:
        """Add the state of some of the topics found. True: these were the last."""
        for _ in range(min(TOPICS_PER_STEP, len(rows))):
            name, patterns = rows.popleft()
            if self._engine.stats.is_published(name):  # else it was dropped meanwhile
                log = self._engine.standing_reads.follow(name)
                if self._engine.stats.inflows(name):  # it may have to catch up first
                    search.left += 1
                    search.patterns[name] = patterns
                    self._ask(search.peer, 0, search, cmd.State(name, touch=False))
                    continue
                head = log.view.head
                earliest = min(log.view.first_seq, head + 1)
                search.found.append(FoundTopic(name, head, earliest, patterns, log.epoch))
        if rows:
            return False
        self._part_done(search)
        return True

    def _part_done(self, search: TopicSearch) -> None:
        search.left -= 1
        if not search.left:
            self._reply(search.peer, search.number, encode(search.found))

    def on_result(self, requester: object, token: Any, result: object) -> None:
        """The result of a command of this service."""
        if isinstance(requester, TopicSearch):
            if isinstance(result, cmd.TopicState):
                patterns = requester.patterns.get(result.topic, [])
                requester.found.append(
                    FoundTopic(result.topic, result.head_seq, result.earliest_seq, patterns, result.epoch)
                )
            self._part_done(requester)
        else:
            assert isinstance(requester, Feed | FeedGroup)
            self.feeds.on_result(requester, token, result)

    def _on_follow(self, peer: bytes, request: wire.Request) -> None:
        encoding = self._encodings[request.encoding]
        self.feeds.follow(peer, request.id, request.topic.decode(), _follow(request.body), encoding)

    def _on_watch_names(self, peer: bytes, request: wire.Request) -> None:
        watch = _name_watch(request.body)
        if self._per_front.get(peer, 0) >= NAME_WATCHES_PER_FRONT_MAX:
            raise InvalidRequest("too many patterns are watched through one front")
        key = peer, request.id
        self._trie.insert(watch.pattern.encode(), key)
        self._name_watches[key] = watch
        self._per_front[peer] = self._per_front.get(peer, 0) + 1
        created: list[str] = []
        self._created_meanwhile[key] = created

        def found(matches: dict[str, list[int]]) -> None:
            if self._created_meanwhile.pop(key, None) is created:
                self._reply(peer, request.id, encode([*matches, *created]))

        self._search([watch.pattern], watch.prefixes, found)

    def topic_created(self, name: str) -> None:
        """Readers see a new topic: tell the watchers of its name."""
        if not self._name_watches:
            return
        for key in self._trie.match(name.encode()).plain:
            prefixes = self._name_watches[key].prefixes
            if prefixes is not None and not name.startswith(tuple(prefixes)):
                continue
            if key in self._created_meanwhile:
                self._created_meanwhile[key].append(name)
            else:
                self._send(key[0], key[1], wire.OK, wire.NEW_TOPIC, b"", name.encode())

    def _on_unfollow(self, peer: bytes, request: wire.Request) -> None:
        key = peer, request.id
        if key in self._name_watches:
            self._end_name_watch(key)
        else:
            self.feeds.unfollow(*key)

    def _end_name_watch(self, key: tuple[bytes, int]) -> None:
        self._trie.remove(self._name_watches.pop(key).pattern.encode(), key)
        self._created_meanwhile.pop(key, None)
        left = self._per_front[key[0]] - 1
        if left:
            self._per_front[key[0]] = left
        else:
            del self._per_front[key[0]]

    # -- sessions ------------------------------------------------------------------------------------------

    def _on_session(self, peer: bytes, request: wire.Request) -> None:
        body = _session(request.body)
        if isinstance(body, CreateSession):
            self.sessions.create(body, self._wall_ms())
            self._unsaved.append((peer, request.id))
        elif isinstance(body, OpenSession):
            self._open(WaitingStream(peer, request.id, body, self._now_ms() + TAKE_OVER_MS))
        else:
            taken = self.sessions.save(peer, body, self._wall_ms())
            self._reply(peer, request.id, encode(taken))
            if body.closes:
                self._retry_open(body.wid)

    def _open(self, waiting: WaitingStream, *, force: bool = False) -> None:
        try:
            opened = self.sessions.open(waiting.peer, waiting.request, self._wall_ms())
            if isinstance(opened, StreamOwner):
                # Sent again when forced: the first one may have arrived before the front knew that stream.
                self._send(opened.peer, opened.stream, wire.OK, wire.END_STREAM, b"", b"")
                if not force:
                    self._waiting_streams.append(waiting)
                    return
                opened = self.sessions.open(waiting.peer, waiting.request, self._wall_ms(), force=True)
        except TopicsError as error:
            self._refuse(waiting, error)
        else:
            self._reply(waiting.peer, waiting.number, encode(opened))

    def _retry_open(self, wid: str) -> None:
        streams = [waiting for waiting in self._waiting_streams if waiting.request.wid == wid]
        self._waiting_streams = [waiting for waiting in self._waiting_streams if waiting.request.wid != wid]
        for waiting in streams:
            self._open(waiting)

    def _refuse(self, waiting: WaitingStream, error: TopicsError) -> None:
        self._send(waiting.peer, waiting.number, *wire.refused(error))

    def _reply(self, peer: bytes, number: int, body: bytes) -> None:
        self._send(peer, number, wire.OK, wire.MSGPACK, b"", body)

    # -- time and the file ---------------------------------------------------------------------------------

    @property
    def _is_dirty(self) -> bool:
        return self.sessions.is_dirty or self.feeds.groups_changed or self._has_failed

    def wake_at_ms(self, at_ms: int | None) -> int | None:
        """The earlier of `at_ms` and the next timer of this service."""
        due = [at_ms, self.feeds.wake_at_ms]
        due += [waiting.until_ms for waiting in self._waiting_streams]
        if self._searches:
            due.append(self._now_ms())
        if self._is_dirty and not self._saving:
            due.append(self._save_at_ms)
        return min((at for at in due if at is not None), default=None)

    def tick(self) -> list[Job]:
        """Run expired timers and a search step; returns the save to run, if any."""
        now_ms = self._now_ms()
        self.feeds.turn_ended()
        if self._searches:
            step = self._searches.popleft()
            if not step():
                self._searches.append(step)
        if self.feeds.wake_at_ms is not None:
            self.feeds.tick()
        late = [waiting for waiting in self._waiting_streams if waiting.until_ms <= now_ms]
        if late:
            self._waiting_streams = [
                waiting for waiting in self._waiting_streams if waiting.until_ms > now_ms
            ]
            for waiting in late:
                self._open(waiting, force=True)
        if self._saving or not self._is_dirty:
            return []
        return [self._save()] if self._save_at_ms <= now_ms else []

    @property
    def _save_at_ms(self) -> int:
        return self._now_ms() if self._unsaved or self._has_more else self._saved_ms + SAVE_MS

    def _save(self) -> Job:
        self._saving = True
        self._saved_ms = self._now_ms()
        self._being_saved, self._unsaved = self._unsaved, []
        write = self._take(SAVE_ROWS_MAX)
        self._has_more = self.sessions.is_dirty or self.feeds.groups_changed
        return Job(JOB_KIND, write, lambda value, error: None)

    def _take(self, limit: int) -> Callable[[], None]:
        """Take the changes to save; returns a function for a thread that writes them."""
        taken = self.sessions.take(limit)
        gone, groups = self.feeds.take_groups(limit)
        if self._file.wants_all:
            rows, changes, all_groups = self.sessions.rows(), self.sessions.changes(), self.feeds.group_rows()
            return lambda: self._file.write(rows, changes, all_groups)
        return lambda: self._file.append(
            WatchEntry(
                [msgspec.Raw(row) for row in taken.rows],
                session_file.group_rows(groups),
                [msgspec.Raw(change) for change in taken.changes],
                taken.ended,
                gone,
            )
        )

    def on_saved(self, error: BaseException | None) -> None:
        self._saving = False
        self._has_failed = error is not None
        if error is not None:
            logger.warning("watch sessions could not be saved: %s", error)
        for peer, number in self._being_saved:
            self._reply(peer, number, b"")
        self._being_saved = []

    def close(self) -> None:
        """The last save, at shutdown, when no other runs."""
        try:
            while self._is_dirty:
                self._take(self.sessions.count + GROUPS_MAX)()
                self._has_failed = False
        except OSError as error:
            logger.warning("watch sessions could not be saved: %s", error)
