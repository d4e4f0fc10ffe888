"""Everything a shard does for watchers: feeds of its topics, look-outs for new ones, and the sessions that it keeps.

Sessions and the cursors of groups are saved to a file: at once when a session is made (its maker is answered when it
lasts), else within SAVE_MS of a change. A save that fails is tried again; watching goes on without it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from topics.api.errors import InvalidRequest, TopicsError
from topics.api.http_errors import error_head, error_parts
from topics.engine.commands import topics as cmd
from topics.engine.core.ports import Disk
from topics.engine.core.subject_trie import SubjectTrie
from topics.engine.runtime.engine import Engine, Job
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
from workers.peers.links import Send
from workers.watch import session_file
from workers.watch.feeds import GROUPS_MAX, Feed, FeedGroup, Feeds
from workers.watch.name_search import NameSearch
from workers.watch.sessions import Sessions, StreamOwner

if TYPE_CHECKING:
    from workers.shard.core import Token

logger = logging.getLogger("topics.shard")

SAVE_MS = 1000
SAVE_ROWS_MAX = 500  # changed sessions, and groups, of one save: a slice of the loop
TAKE_OVER_MS = 1000  # how long a front may take to end a stream that is continued elsewhere
TOPICS_PER_STEP = 16  # some may have to be loaded
LOOK_OUTS_PER_FRONT_MAX = 100_000
JOB_KIND = "watch"

_find = msgspec.msgpack.Decoder(Find).decode
_follow = msgspec.msgpack.Decoder(Follow).decode
_look_out = msgspec.msgpack.Decoder(NameWatch).decode
_session: Callable[[wire.Buffer], SessionRequest] = msgspec.msgpack.Decoder(SessionRequest).decode


@dataclass(slots=True, eq=False)
class TopicSearch:
    """A FIND whose topics are being asked for one by one."""

    peer: bytes
    number: int
    left: int
    found: list[FoundTopic] = field(default_factory=list)
    places: dict[str, list[int]] = field(default_factory=dict)  # which patterns found what is looked at


@dataclass(slots=True, eq=False)
class WaitingStream:
    """A stream that waits for the one before it to end."""

    peer: bytes
    number: int
    request: OpenSession
    until_ms: int


class WatchService:
    def __init__(
        self,
        engine: Engine,
        disk: Disk,
        *,
        max_sessions: int,
        max_sessions_per_key: int,
        send: Send,
        ask: Callable[[bytes, int, Any, cmd.Command | None], Token],
        now_us: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._disk = disk
        self._send = send
        self._ask = ask
        self._now_ms: Callable[[], int] = lambda: now_us() // 1000
        self.sessions = Sessions(max_sessions, max_sessions_per_key)
        self.feeds = Feeds(engine, send, self._ask_for_feed, self._now_ms)
        self._look_outs: dict[tuple[bytes, int], NameWatch] = {}
        self._per_front: dict[bytes, int] = {}
        self._trie: SubjectTrie[tuple[bytes, int]] = SubjectTrie()
        self._streams: dict[bytes, int] = {}  # how many are open, by front
        # Topics that were made while their look-out was searching: they go with its answer.
        self._made_meanwhile: dict[tuple[bytes, int], list[str]] = {}
        self._work: deque[Callable[[], bool]] = deque()  # searches, a step of one at a time
        self._opening: list[WaitingStream] = []
        self._made: list[tuple[bytes, int]] = []  # answers that wait for the next save
        self._answers: list[tuple[bytes, int]] = []  # that wait for the save that runs
        self._file = session_file.WatchFile(disk, engine.config.shard_dir)
        self._saving = False
        self._saved_ms = 0
        self._has_failed = False  # the last save
        self._has_more = False  # than it took
        engine.shard.on_created = self._created
        self._ops: dict[int, Callable[[bytes, wire.Request], None]] = {
            wire.FIND: self._on_find,
            wire.FOLLOW: self._on_follow,
            wire.WATCH_NAMES: self._on_look_out,
            wire.FEED_ACK: lambda peer, request: self.feeds.fed(peer, request.id),
            wire.UNFOLLOW: self._on_unfollow,
            wire.SESSION: self._on_session,
            wire.STREAM_COUNT: self._on_streams,
        }

    # -- in ------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """The shard has recovered: what was saved is there again."""
        saved = session_file.read(self._disk, self._engine.config.shard_dir)
        if saved is not None:
            self.sessions.load(saved.sessions, self._wall_ms())
            self.feeds.load_groups(saved.groups)

    def _wall_ms(self) -> int:
        """A time that goes on over restarts, for what lasts longer than this process. It need not be a turn's time."""
        return self._engine.clock.read()

    def receive(self, peer: bytes, request: wire.Request) -> bool:
        """Whether it was for the desk; a TopicsError is what the front is to be told."""
        handler = self._ops.get(request.op)
        if handler is None:
            return False
        try:
            handler(peer, request)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidRequest(f"a message about watching cannot be read: {error}") from None
        return True

    def front_gone(self, peer: bytes) -> None:
        self._streams.pop(peer, None)
        self.feeds.front_gone(peer)
        self._opening = [opening for opening in self._opening if opening.peer != peer]
        self.sessions.front_gone(peer, self._wall_ms())
        for key in [key for key in self._look_outs if key[0] == peer]:
            self._end_look_out(key)
        # The streams that they waited for may have been there. In the order in which they came, as of a set it would
        # be another one in each process.
        for wid in dict.fromkeys(opening.request.wid for opening in self._opening):
            self._open_again(wid)

    def _on_streams(self, peer: bytes, request: wire.Request) -> None:
        if request.id:  # in which the front says how many there are
            self._streams[peer] = request.id
        else:
            self._streams.pop(peer, None)

    def fronts(self) -> list[bytes]:
        """Those with open streams: sessions and groups are kept for them."""
        return list(self._streams)

    def streams_elsewhere(self, peer: bytes) -> int:
        """Open streams of all other fronts."""
        return sum(count for front, count in self._streams.items() if front != peer)

    # -- topics --------------------------------------------------------------------------------------------

    def _ask_for_feed(self, peer: bytes, requester: Feed | FeedGroup, command: cmd.Diff | None) -> Token:
        return self._ask(peer, 0, requester, command)

    def _on_find(self, peer: bytes, request: wire.Request) -> None:
        wish = _find(request.body)
        finding = TopicSearch(peer, request.id, len(wish.names))
        for name in wish.names:
            self._ask(peer, 0, finding, cmd.State(name, touch=False))
        if wish.patterns:
            finding.left += 1
            named = set(wish.names)

            def found(matches: dict[str, list[int]]) -> None:
                rows = deque((name, places) for name, places in matches.items() if name not in named)
                self._work.append(lambda: self._look_at(finding, rows))

            self._search(wish.patterns, wish.prefixes, found)
        elif not wish.names:
            self._reply(peer, request.id, encode([]))

    def _search(
        self, patterns: list[str], prefixes: list[str] | None, done: Callable[[dict[str, list[int]]], None]
    ) -> None:
        search = NameSearch(patterns, prefixes, STREAM_TOPICS_MAX, done)
        self._work.append(lambda: search.step(self._engine.shard.names))

    def _look_at(self, finding: TopicSearch, rows: deque[tuple[str, list[int]]]) -> bool:
        """Some of the topics that were found, as they stand; True when that were the last."""
        for _ in range(min(TOPICS_PER_STEP, len(rows))):
            name, places = rows.popleft()
            if name in self._engine.shard.published:  # else it is gone again
                log = self._engine.shard.loaded_topic(name)
                if log.inflows:  # how far it is may have to be waited for
                    finding.left += 1
                    finding.places[name] = places
                    self._ask(finding.peer, 0, finding, cmd.State(name, touch=False))
                    continue
                head = log.view.head
                earliest = min(log.view.first_seq, head + 1)
                finding.found.append(FoundTopic(name, head, earliest, places, log.epoch))
        if rows:
            return False
        self._found_one(finding)
        return True

    def _found_one(self, finding: TopicSearch) -> None:
        finding.left -= 1
        if not finding.left:
            self._reply(finding.peer, finding.number, encode(finding.found))

    def on_result(self, requester: object, token: Any, result: object) -> None:
        """The engine has answered one of the desk's own questions."""
        if isinstance(requester, TopicSearch):
            if isinstance(result, cmd.TopicState):
                places = requester.places.get(result.topic, [])
                requester.found.append(
                    FoundTopic(result.topic, result.head_seq, result.earliest_seq, places, result.epoch)
                )
            self._found_one(requester)
        else:
            assert isinstance(requester, Feed | FeedGroup)
            self.feeds.on_result(requester, token, result)

    def _on_follow(self, peer: bytes, request: wire.Request) -> None:
        self.feeds.follow(peer, request.id, request.topic.decode(), _follow(request.body))

    def _on_look_out(self, peer: bytes, request: wire.Request) -> None:
        wish = _look_out(request.body)
        if self._per_front.get(peer, 0) >= LOOK_OUTS_PER_FRONT_MAX:
            raise InvalidRequest("too many patterns are watched through one front")
        key = peer, request.id
        self._trie.insert(wish.pattern.encode(), key)
        self._look_outs[key] = wish
        self._per_front[peer] = self._per_front.get(peer, 0) + 1
        made: list[str] = []
        self._made_meanwhile[key] = made

        def found(matches: dict[str, list[int]]) -> None:
            if self._made_meanwhile.pop(key, None) is made:
                self._reply(peer, request.id, encode([*matches, *made]))

        self._search([wish.pattern], wish.prefixes, found)

    def _created(self, name: str) -> None:
        if not self._look_outs:
            return
        for key in self._trie.match(name.encode()).plain:
            prefixes = self._look_outs[key].prefixes
            if prefixes is not None and not name.startswith(tuple(prefixes)):
                continue
            if key in self._made_meanwhile:
                self._made_meanwhile[key].append(name)
            else:
                self._send(key[0], key[1], 200, wire.NEW_TOPIC, b"", name.encode())

    def _on_unfollow(self, peer: bytes, request: wire.Request) -> None:
        key = peer, request.id
        if key in self._look_outs:
            self._end_look_out(key)
        else:
            self.feeds.unfollow(*key)

    def _end_look_out(self, key: tuple[bytes, int]) -> None:
        self._trie.remove(self._look_outs.pop(key).pattern.encode(), key)
        self._made_meanwhile.pop(key, None)
        left = self._per_front[key[0]] - 1
        if left:
            self._per_front[key[0]] = left
        else:
            del self._per_front[key[0]]

    # -- sessions ------------------------------------------------------------------------------------------

    def _on_session(self, peer: bytes, request: wire.Request) -> None:
        wish = _session(request.body)
        if isinstance(wish, CreateSession):
            self.sessions.create(wish, self._wall_ms())
            self._made.append((peer, request.id))
        elif isinstance(wish, OpenSession):
            self._open(WaitingStream(peer, request.id, wish, self._now_ms() + TAKE_OVER_MS))
        else:
            taken = self.sessions.save(peer, wish, self._wall_ms())
            self._reply(peer, request.id, encode(taken))
            if wish.closes:
                self._open_again(wish.wid)

    def _open(self, opening: WaitingStream, *, force: bool = False) -> None:
        try:
            opened = self.sessions.open(opening.peer, opening.request, self._wall_ms())
            if isinstance(opened, StreamOwner):
                # Said again when it is forced: the first one may have come before that stream was known to its front.
                self._send(opened.peer, opened.stream, 200, wire.END_STREAM, b"", b"")
                if not force:
                    self._opening.append(opening)
                    return
                opened = self.sessions.open(opening.peer, opening.request, self._wall_ms(), force=True)
        except TopicsError as error:
            self._refuse(opening, error)
        else:
            self._reply(opening.peer, opening.number, encode(opened))

    def _open_again(self, wid: str) -> None:
        waiting = [opening for opening in self._opening if opening.request.wid == wid]
        self._opening = [opening for opening in self._opening if opening.request.wid != wid]
        for opening in waiting:
            self._open(opening)

    def _refuse(self, opening: WaitingStream, error: TopicsError) -> None:
        status, body = error_parts(error)
        self._send(opening.peer, opening.number, status, wire.JSON, error_head(status), body)

    def _reply(self, peer: bytes, number: int, body: bytes) -> None:
        self._send(peer, number, 200, wire.INTERNAL, b"", body)

    # -- time and the file ---------------------------------------------------------------------------------

    @property
    def _is_dirty(self) -> bool:
        return self.sessions.is_dirty or self.feeds.groups_changed or self._has_failed

    def wake_at_ms(self, at_ms: int | None) -> int | None:
        """The earlier of this and what is due here."""
        due = [at_ms, self.feeds.wake_at_ms]
        due += [opening.until_ms for opening in self._opening]
        if self._work:
            due.append(self._now_ms())
        if self._is_dirty and not self._saving:
            due.append(self._save_at_ms)
        return min((at for at in due if at is not None), default=None)

    def tick(self) -> list[Job]:
        """What is due by now; returns the save that is to be run."""
        now_ms = self._now_ms()
        self.feeds.turn_ended()
        if self._work:
            step = self._work.popleft()
            if not step():
                self._work.append(step)
        if self.feeds.wake_at_ms is not None:
            self.feeds.tick()
        late = [opening for opening in self._opening if opening.until_ms <= now_ms]
        if late:
            self._opening = [opening for opening in self._opening if opening.until_ms > now_ms]
            for opening in late:
                self._open(opening, force=True)
        if self._saving or not self._is_dirty:
            return []
        return [self._save()] if self._save_at_ms <= now_ms else []

    @property
    def _save_at_ms(self) -> int:
        return self._now_ms() if self._made or self._has_more else self._saved_ms + SAVE_MS

    def _save(self) -> Job:
        self._saving = True
        self._saved_ms = self._now_ms()
        self._answers, self._made = self._made, []
        write = self._take(SAVE_ROWS_MAX)
        self._has_more = self.sessions.is_dirty or self.feeds.groups_changed
        return Job(JOB_KIND, write, lambda value, error: None)

    def _take(self, limit: int) -> Callable[[], None]:
        """What is to be saved now; the call that is returned does it, and is for a thread."""
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
        for peer, number in self._answers:
            self._reply(peer, number, b"")
        self._answers = []

    def close(self) -> None:
        """The last save, on the way out. No other runs any more."""
        try:
            while self._is_dirty:
                self._take(self.sessions.count + GROUPS_MAX)()
                self._has_failed = False
        except OSError as error:
            logger.warning("watch sessions could not be saved: %s", error)
