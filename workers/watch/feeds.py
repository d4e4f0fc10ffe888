"""Feeds: what is new in a topic, read once and sent to each front that has watchers of it.

A feed is a read that is asked again as soon as it is answered, as long as its front keeps up: at most PAGES_AHEAD of its
pages are not FED, and what comes meanwhile makes the next page larger. It stands in the engine as a long poll does, so a
publication wakes it in the same turn, and a front that takes nothing of what it was sent is not read for.

A group is read once for all of its members, and a page is dealt to those that have room. Its cursor is this shard's:
records are given to one member each, in order. A page that its member has not passed on when it leaves goes back, unless
later ones were dealt already; what had been passed on is not given to anybody else.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, TypeAlias

from topics.api import limits
from topics.api.errors import Throttled, TopicNotFound, TopicsError
from topics.api.http_errors import error_parts
from topics.engine.commands import topics as cmd
from topics.engine.runtime.engine import Engine
from topics.engine.topic.log import TopicLog
from topics.link import wire
from topics.link.watch import PAGES_AHEAD, SESSION_TTL_MS, FeedOptions, FeedPage, Follow, page_head
from workers.codec.replies import feed_page, feed_records
from workers.peers.links import Send

FEEDS_PER_FRONT_MAX = 200_000
GROUPS_MAX = 100_000
REJOIN_MS = 100  # after a restart: until every front has said where it knows a group to have been
RENDERED_MAX = 64  # texts of a turn that another front may want as well

GroupRow: TypeAlias = tuple[str, int, str, int]  # topic, topic id, group, cursor
Ask: TypeAlias = Callable[[bytes, Any, cmd.Diff], Any]  # peer, who asks, what; returns the token


@dataclass(slots=True, eq=False)
class Feed:
    """One front's feed of one topic, or one member of a group."""

    peer: bytes
    number: int
    topic: str
    topic_id: int  # another topic may have that name one day
    options: FeedOptions
    position: int  # where its next page begins
    unfed: deque[tuple[int, int]] = field(default_factory=deque)  # pages that were sent and not passed on
    group: FeedGroup | None = None
    token: Any = None  # of the read that stands in the engine
    asked: cmd.Diff | None = None  # and the read, while the engine has not seen it
    is_early: bool = False  # it began before it was known how much is synced

    @property
    def has_room(self) -> bool:
        return len(self.unfed) < PAGES_AHEAD


@dataclass(slots=True, eq=False)
class FeedGroup:
    topic: str
    topic_id: int
    name: str
    cursor: int
    members: list[Feed] = field(default_factory=list)
    turn: int = 0  # which member is next
    token: Any = None
    asked: cmd.Diff | None = None
    ready_ms: int = 0  # nothing is dealt before
    restored: bool = False  # its cursor may be behind
    empty_since_ms: int = 0

    @property
    def options(self) -> FeedOptions:
        """What any of its members may be given, and enough of it for all that have room."""
        ready = [member.options for member in self.members if member.has_room]
        return FeedOptions(
            limit=min(min(options.limit for options in ready) * len(ready), limits.DIFF_LIMIT_MAX),
            max_bytes=min(options.max_bytes for options in ready),
            strong=any(member.options.strong for member in self.members),
        )


class Feeds:
    def __init__(self, engine: Engine, send: Send, ask: Ask, now_ms: Callable[[], int]) -> None:
        self._shard = engine.shard
        self._clock = engine.clock
        self._send = send
        self._ask_engine = ask
        self._now_ms = now_ms
        self._feeds: dict[tuple[bytes, int], Feed] = {}
        self._per_front: dict[bytes, int] = {}
        self._groups: dict[tuple[str, str], FeedGroup] = {}
        self._waiting: list[FeedGroup] = []  # that are not ready to be dealt
        self._rendered: OrderedDict[tuple[int, int, int, FeedOptions], bytes] = OrderedDict()
        # For the file: what it has, and which groups it is to hear of.
        self._stored_groups: dict[tuple[str, str], GroupRow] = {}
        self._changed_groups: dict[tuple[str, str], None] = {}

    def __len__(self) -> int:
        return len(self._feeds)

    # -- followers -----------------------------------------------------------------------------------------

    def follow(self, peer: bytes, number: int, topic: str, wish: Follow) -> None:
        log = self._shard.loaded_topic(topic)
        if self._per_front.get(peer, 0) >= FEEDS_PER_FRONT_MAX:
            raise Throttled("too many feeds of one front", limit="feeds", max=FEEDS_PER_FRONT_MAX)
        is_known = log.unsynced_heads is not None
        if wish.options.strong:
            self._shard.track_synced_head(log)
        head = self._head(log, wish.options)
        feed = Feed(peer, number, topic, log.id, wish.options, head)
        feed.is_early = not is_known and head < log.view.head
        self._feeds[peer, number] = feed
        self._per_front[peer] = self._per_front.get(peer, 0) + 1
        if wish.group is not None:
            feed.group = self._join(feed, log, wish)
            feed.position = feed.group.cursor
            head = max(head, feed.position)  # what was dealt is known, whatever else is not synced yet
        at_head = feed.position >= head
        first = FeedPage(feed.position, feed.position, head, _earliest(log), 0, at_head, epoch=log.epoch)
        self._push(feed, first, b"")
        if feed.group is not None:
            self._deal_on(feed.group)
        else:
            self._ask(feed)

    def fed(self, peer: bytes, number: int) -> None:
        feed = self._feeds.get((peer, number))
        if feed is None or not feed.unfed:
            return
        feed.unfed.popleft()
        if feed.group is not None:
            self._deal_on(feed.group)
        elif feed.token is None:
            self._ask(feed)

    def unfollow(self, peer: bytes, number: int) -> None:
        feed = self._feeds.get((peer, number))
        if feed is None:
            return
        self._remove(feed)
        if feed.group is not None:
            self._leave(feed, feed.group, hand_back=True)
        else:
            self._withdraw(feed)

    def _remove(self, feed: Feed) -> None:
        del self._feeds[feed.peer, feed.number]
        left = self._per_front[feed.peer] - 1
        if left:
            self._per_front[feed.peer] = left
        else:
            del self._per_front[feed.peer]

    def front_gone(self, peer: bytes) -> None:
        for feed in [feed for feed in self._feeds.values() if feed.peer == peer]:
            del self._feeds[peer, feed.number]
            if feed.group is not None:
                # What was on its way to a dead front may have arrived: nobody else gets it.
                self._leave(feed, feed.group, hand_back=False)
            else:
                self._withdraw(feed)
        self._per_front.pop(peer, None)

    # -- reading -------------------------------------------------------------------------------------------

    @staticmethod
    def _head(log: TopicLog, options: FeedOptions) -> int:
        return min(log.synced_head, log.view.head) if options.strong else log.view.head

    def _ask(self, requester: Feed | FeedGroup) -> None:
        """Let a read stand in the engine; where there is nothing new it need not even look."""
        if isinstance(requester, FeedGroup):
            options, position, peer = requester.options, requester.cursor, b""
        else:
            options, position, peer = requester.options, requester.position, requester.peer
        command = cmd.Diff(
            requester.topic,
            position,
            options.limit,
            tuple(node.encode() for node in options.nodes),
            options.max_bytes,
            touch=False,
            standing=True,
            synced=options.strong,
        )
        log = self._shard.published.get(requester.topic)
        if log is None:
            requester.token, requester.asked = self._ask_engine(peer, requester, command), command
            return
        requester.token = self._ask_engine(peer, requester, None)  # type: ignore[arg-type]
        self._shard.park(requester.token, command, log, position)
        at_head = position == self._head(log, options) == log.view.head
        if not at_head or log.expiring:
            self._shard.waiters_due[log.id] = log  # it is read when it is its topic's turn

    def _withdraw(self, requester: Feed | FeedGroup) -> None:
        if requester.asked is not None:
            requester.asked.standing = (
                False  # should the engine see it only now: nobody would take it out again
            )
            requester.asked = None
        log = self._shard.published.get(requester.topic)
        if requester.token is not None and log is not None:
            self._shard.unpark(requester.token, log)
        requester.token = None

    def on_result(self, requester: Feed | FeedGroup, token: Any, result: object) -> None:
        """The read that stood for it has found something."""
        if requester.token is not token:
            return  # it was withdrawn meanwhile
        requester.token = requester.asked = None
        if isinstance(result, TopicsError):
            self._fail(requester, result)
            return
        assert isinstance(result, cmd.Page)
        log = self._shard.published.get(requester.topic)
        if log is None or log.id != requester.topic_id:
            self._fail(requester, TopicNotFound(requester.topic))
            return
        if result.seqs:
            log.last_read_ts = self._clock.now_ms
        if isinstance(requester, FeedGroup):
            self._deal(requester, result)
            return
        if requester.is_early:
            # It is known now how much is synced. Watchers read up to there, as they do with any other feed.
            requester.is_early = False
            head = result.head_seq
            page, text = FeedPage(head, head, head, result.earliest_seq, 0, True), b""
        else:
            page, text = feed_page(result, requester.position), self._render(result, requester.options)
        requester.position = page.to_seq
        self._push(requester, page, text)
        requester.unfed.append((page.from_seq, page.to_seq))
        if requester.has_room:
            self._ask(requester)

    def _fail(self, requester: Feed | FeedGroup, error: TopicsError) -> None:
        """The topic is gone, or cannot be read: the fronts hear of it, and follow again if they want to."""
        status, body = error_parts(error)
        if isinstance(requester, FeedGroup):
            self._withdraw(requester)
            feeds, requester.members = requester.members, []
            requester.empty_since_ms = self._now_ms()
            if isinstance(error, TopicNotFound):
                self._groups.pop((requester.topic, requester.name), None)
                self._group_changed(requester)
        else:
            feeds = [requester]
        for feed in feeds:
            self._send(feed.peer, feed.number, status, wire.JSON, b"", body)
            self._remove(feed)

    def _push(self, feed: Feed, page: FeedPage, body: bytes) -> None:
        self._send(feed.peer, feed.number, 200, wire.FEED, page_head(page), body)

    def _render(self, page: cmd.Page, options: FeedOptions) -> bytes:
        """Once, though several fronts want the same."""
        if not page.seqs:
            return b""
        log = self._shard.published.get(page.topic)
        key = (log.id if log is not None else 0, page.seqs[0], page.seqs[-1], options)
        text = self._rendered.get(key)
        if text is None:
            text = feed_records(page, options)
            self._rendered[key] = text
            if len(self._rendered) > RENDERED_MAX:
                self._rendered.popitem(last=False)
        return text

    def turn_ended(self) -> None:
        """What was rendered is sent; records may be deleted by the next turn."""
        self._rendered.clear()

    # -- groups --------------------------------------------------------------------------------------------

    def _join(self, feed: Feed, log: TopicLog, wish: Follow) -> FeedGroup:
        assert wish.group is not None
        group = self._groups.get((feed.topic, wish.group))
        if group is not None and group.topic_id != log.id:
            self._fail(group, TopicNotFound(group.topic))
            group = None
        if group is None:
            self._sweep_groups()
            if len(self._groups) >= GROUPS_MAX:
                self._remove(feed)
                raise Throttled("too many groups", limit="groups", max=GROUPS_MAX)
            group = FeedGroup(feed.topic, log.id, wish.group, _now(log, wish.epoch, wish.from_seq))
            self._groups[feed.topic, wish.group] = group
            self._group_changed(group)
        if group.restored:
            group.cursor = max(group.cursor, _now(log, wish.epoch, wish.seen))
            if not group.ready_ms:
                group.ready_ms = self._now_ms() + REJOIN_MS
                self._waiting.append(group)
        elif group.token is not None:
            self._withdraw(group)  # it asks again with one more to read for
        group.members.append(feed)
        return group

    def _leave(self, feed: Feed, group: FeedGroup, *, hand_back: bool) -> None:
        place = group.members.index(feed)
        group.members.remove(feed)
        if place < group.turn:
            group.turn -= 1
        if hand_back and feed.unfed and _ends_at(feed.unfed, group.cursor):
            group.cursor = feed.unfed[0][0]
            self._group_changed(group)
            self._withdraw(group)
        if not group.members:
            self._withdraw(group)
            group.empty_since_ms = self._now_ms()
        else:
            self._deal_on(group)

    def _deal_on(self, group: FeedGroup) -> None:
        """Read on for a group if somebody has room."""
        log = self._shard.published.get(group.topic)
        if log is not None and log.id != group.topic_id:
            self._fail(group, TopicNotFound(group.topic))  # it was made again while nobody had room
        elif group.token is None and not self._is_waiting(group) and any(m.has_room for m in group.members):
            self._ask(group)

    def _is_waiting(self, group: FeedGroup) -> bool:
        return group.restored and group.ready_ms > self._now_ms()

    def _deal(self, group: FeedGroup, page: cmd.Page) -> None:
        takers = [member for member in group.members if member.has_room]
        if not takers:
            return  # nobody has it, and the cursor stays
        first = group.turn % len(takers)
        takers = takers[first:] + takers[:first]
        # Somebody may have left, or be full, since it was asked for.
        page = cut(page, len(takers) * min(taker.options.limit for taker in takers))
        parts = split(page, min(len(takers), len(page.seqs)) or 1)
        caught_up = page.next_from_seq >= page.head_seq
        from_seq = group.cursor
        for taker, part in zip(takers, parts):
            fed = feed_page(part, from_seq)
            fed.caught_up = caught_up
            from_seq = fed.to_seq
            if fed.count or fed.tombstone is not None:
                self._push(taker, fed, feed_records(part, taker.options))
                taker.unfed.append((fed.from_seq, fed.to_seq))
        group.turn = (first + len(parts)) % max(len(group.members), 1)
        group.cursor = page.next_from_seq
        group.restored = False
        self._group_changed(group)
        self._deal_on(group)

    def _group_changed(self, group: FeedGroup) -> None:
        self._changed_groups[group.topic, group.name] = None

    @property
    def groups_changed(self) -> bool:
        """Whether the file is to hear of groups."""
        return bool(self._changed_groups)

    def take_groups(self, limit: int) -> tuple[list[tuple[str, str]], list[GroupRow]]:
        """What the file has not heard of, of up to so many groups: those that are gone, and where the others are."""
        gone: list[tuple[str, str]] = []
        rows: list[GroupRow] = []
        for key in list(islice(self._changed_groups, limit)):
            del self._changed_groups[key]
            group = self._groups.get(key)
            if group is None:
                self._stored_groups.pop(key, None)
                gone.append(key)
            else:
                row = self._stored_groups[key] = (group.topic, group.topic_id, group.name, group.cursor)
                rows.append(row)
        return gone, rows

    def group_rows(self) -> list[GroupRow]:
        """Of all groups, as of the last `take_groups`."""
        return list(self._stored_groups.values())

    def load_groups(self, rows: list[GroupRow]) -> None:
        for row in rows:
            topic, topic_id, name, cursor = row
            log = self._shard.published.get(topic)
            if log is not None and log.id == topic_id and len(self._groups) < GROUPS_MAX:
                group = FeedGroup(topic, topic_id, name, min(cursor, log.view.head), restored=True)
                group.empty_since_ms = self._now_ms()
                self._groups[topic, name] = group
                self._stored_groups[topic, name] = row

    def _sweep_groups(self) -> None:
        late_ms = self._now_ms() - SESSION_TTL_MS
        gone = [
            group for group in self._groups.values() if not group.members and group.empty_since_ms < late_ms
        ]
        for group in gone:
            del self._groups[group.topic, group.name]
            self._group_changed(group)

    # -- time ----------------------------------------------------------------------------------------------

    @property
    def wake_at_ms(self) -> int | None:
        return min((group.ready_ms for group in self._waiting), default=None)

    def tick(self) -> None:
        """Groups whose fronts have had the time to speak."""
        waiting, self._waiting = self._waiting, []
        for group in waiting:
            if self._is_waiting(group):
                self._waiting.append(group)
            else:
                group.restored = False
                self._deal_on(group)


def _now(log: TopicLog, epoch: str | None, cursor: int) -> int:
    """Where a cursor of that epoch stands now."""
    now = cursor if epoch is None else log.cursor_of(epoch, cursor)
    return 0 if now is None else min(now, log.view.head)


def _earliest(log: TopicLog) -> int:
    return min(log.view.first_seq, log.view.head + 1)


def _ends_at(unfed: deque[tuple[int, int]], cursor: int) -> bool:
    """Whether these pages are the last that were dealt, one behind the other."""
    end = cursor
    for from_seq, to_seq in reversed(unfed):
        if to_seq != end:
            return False
        end = from_seq
    return True


def split(page: cmd.Page, parts: int) -> list[cmd.Page]:
    """A page as several that follow each other; the tombstone goes with the first, the rest of the way with the last."""
    if parts <= 1:
        return [page]
    count = len(page.seqs)
    bounds = [count * i // parts for i in range(parts + 1)]
    return [page.slice(start, stop) for start, stop in pairwise(bounds)]


def cut(page: cmd.Page, most: int) -> cmd.Page:
    """No more of it than so many records."""
    return page if len(page.seqs) <= most else page.slice(0, most)
