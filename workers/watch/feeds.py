"""Feeds: new records of a topic, read once and sent to each front that has watchers of it.

A feed is a read that is repeated as soon as it is answered, as long as its front keeps up: at most PAGES_AHEAD of its
pages are without a FEED_ACK, and records that arrive meanwhile make the next page larger. It waits in the engine like a
long poll, so a write wakes it in the same turn; nothing is read for a front whose reply window is closed.

A group is read once for all members, and each page is split among those that have room. This shard keeps its cursor: each
record goes to one member, in order. When a member leaves, its pages without a FEED_ACK are read again, unless later pages
were sent to other members; acknowledged pages are never sent to another member.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, TypeAlias

from topics.api import limits
from topics.api.errors import Throttled, TopicNotFound, TopicsError
from topics.engine.commands import topics as cmd
from topics.engine.commands.standing_reads import FollowedTopic
from topics.engine.runtime.boundary import ShardEngine
from topics.link import wire
from topics.link.watch import PAGES_AHEAD, SESSION_TTL_MS, FeedOptions, FeedPage, Follow, page_fields, page_of
from topics.protocols.encoding import Encoding
from workers.peers.links import Send

FEEDS_PER_FRONT_MAX = 200_000
GROUPS_MAX = 100_000
REJOIN_MS = 100  # after a restart: time for fronts to report the positions of groups known to them
RENDERED_MAX = 64  # rendered pages of a turn, kept for other fronts with the same feed

GroupRow: TypeAlias = tuple[str, int, str, int]  # topic, topic id, group, cursor
Ask: TypeAlias = Callable[[bytes, Any, cmd.Diff], Any]  # peer, requester, command; returns the token


@dataclass(slots=True, eq=False)
class Feed:
    """The feed of a topic to one front, or one member of a group."""

    peer: bytes
    number: int
    topic: str
    topic_id: int  # the name may later belong to another topic
    options: FeedOptions
    position: int  # where its next page begins
    encoding: Encoding
    unacked: deque[tuple[int, int]] = field(default_factory=deque)  # pages without a FEED_ACK
    group: FeedGroup | None = None
    token: Any = None  # of the read that waits in the engine
    unseen: cmd.Diff | None = None  # that read, until the engine has seen it
    is_early: bool = False  # it began before the synced head was known

    @property
    def has_room(self) -> bool:
        return len(self.unacked) < PAGES_AHEAD


@dataclass(slots=True, eq=False)
class FeedGroup:
    topic: str
    topic_id: int
    name: str
    cursor: int
    members: list[Feed] = field(default_factory=list)
    next_member: int = 0  # in round-robin order
    token: Any = None
    unseen: cmd.Diff | None = None
    ready_ms: int = 0  # nothing is sent before
    restored: bool = False  # its cursor may be too low
    empty_since_ms: int = 0

    @property
    def options(self) -> FeedOptions:
        """Options that suit every member, with a limit that is enough for all members with room."""
        ready = [member.options for member in self.members if member.has_room]
        return FeedOptions(
            limit=min(min(options.limit for options in ready) * len(ready), limits.DIFF_LIMIT_MAX),
            max_bytes=min(options.max_bytes for options in ready),
            strong=any(member.options.strong for member in self.members),
        )


class Feeds:
    def __init__(self, engine: ShardEngine, send: Send, ask: Ask, now_ms: Callable[[], int]) -> None:
        self._reads = engine.standing_reads
        self._send = send
        self._ask_engine = ask
        self._now_ms = now_ms
        self._feeds: dict[tuple[bytes, int], Feed] = {}
        self._per_front: dict[bytes, int] = {}
        self._groups: dict[tuple[str, str], FeedGroup] = {}
        self._rejoining: list[FeedGroup] = []  # restored groups that wait for REJOIN_MS
        self._rendered: OrderedDict[tuple[int, int, int, FeedOptions, Encoding], bytes] = OrderedDict()
        # For the file: the groups that it has, and those to write.
        self._stored_groups: dict[tuple[str, str], GroupRow] = {}
        self._changed_groups: dict[tuple[str, str], None] = {}

    def __len__(self) -> int:
        return len(self._feeds)

    # -- followers -----------------------------------------------------------------------------------------

    def follow(self, peer: bytes, number: int, topic: str, follow: Follow, encoding: Encoding) -> None:
        log = self._reads.follow(topic)
        if self._per_front.get(peer, 0) >= FEEDS_PER_FRONT_MAX:
            raise Throttled(
                "too many topics are watched through one front", limit="feeds", max=FEEDS_PER_FRONT_MAX
            )
        is_known = log.is_head_tracked
        if follow.options.strong:
            self._reads.track_synced_head(log)
        head = self._head(log, follow.options)
        feed = Feed(peer, number, topic, log.id, follow.options, head, encoding)
        feed.is_early = not is_known and head < log.view.head
        self._feeds[peer, number] = feed
        self._per_front[peer] = self._per_front.get(peer, 0) + 1
        if follow.group is not None:
            feed.group = self._join(feed, log, follow)
            feed.position = feed.group.cursor
            head = max(head, feed.position)  # records already sent count, synced or not
        at_head = feed.position >= head
        first = FeedPage(feed.position, feed.position, head, _earliest(log), 0, at_head, epoch=log.epoch)
        self._push(feed, first, b"")
        if feed.group is not None:
            self._read_on(feed.group)
        else:
            self._ask(feed)

    def on_ack(self, peer: bytes, number: int) -> None:
        feed = self._feeds.get((peer, number))
        if feed is None or not feed.unacked:
            return
        feed.unacked.popleft()
        if feed.group is not None:
            self._read_on(feed.group)
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
                # Pages sent to a dead front may have arrived, so no other member gets them.
                self._leave(feed, feed.group, hand_back=False)
            else:
                self._withdraw(feed)
        self._per_front.pop(peer, None)

    # -- reading -------------------------------------------------------------------------------------------

    @staticmethod
    def _head(log: FollowedTopic, options: FeedOptions) -> int:
        return min(log.synced_head, log.view.head) if options.strong else log.view.head

    def _ask(self, requester: Feed | FeedGroup) -> None:
        """Let a read wait in the engine; if there are no new records, it is not even executed."""
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
        log = self._reads.followed(requester.topic)
        if log is None:
            requester.token, requester.unseen = self._ask_engine(peer, requester, command), command
            return
        requester.token = self._ask_engine(peer, requester, None)  # type: ignore[arg-type]
        self._reads.park_standing(requester.token, command, log)

    def _withdraw(self, requester: Feed | FeedGroup) -> None:
        if requester.unseen is not None:
            requester.unseen.standing = False  # or it would wait forever, should the engine see it only now
            requester.unseen = None
        if requester.token is not None:
            self._reads.withdraw_standing(requester.token, requester.topic)
        requester.token = None

    def on_result(self, requester: Feed | FeedGroup, token: Any, result: object) -> None:
        """The waiting read has found records."""
        if requester.token is not token:
            return  # withdrawn meanwhile
        requester.token = requester.unseen = None
        if isinstance(result, TopicsError):
            self._fail(requester, result)
            return
        assert isinstance(result, cmd.Page)
        log = self._reads.followed(requester.topic)
        if log is None or log.id != requester.topic_id:
            self._fail(requester, TopicNotFound(requester.topic))
            return
        if result.seqs:
            self._reads.note_read(requester.topic)
        if isinstance(requester, FeedGroup):
            self._distribute(requester, result)
            return
        if requester.is_early:
            # Now the synced head is known. Watchers do their own reads up to there, as with any other feed.
            requester.is_early = False
            head = result.head_seq
            page, text = FeedPage(head, head, head, result.earliest_seq, 0, True), b""
        else:
            page, text = page_of(result, requester.position), self._render(result, requester)
        requester.position = page.to_seq
        self._push(requester, page, text)
        requester.unacked.append((page.from_seq, page.to_seq))
        if requester.has_room:
            self._ask(requester)

    def _fail(self, requester: Feed | FeedGroup, error: TopicsError) -> None:
        """The topic is gone or cannot be read: report it to the fronts, which may follow again."""
        refused = wire.refused(error)
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
            self._send(feed.peer, feed.number, *refused)
            self._remove(feed)

    def _push(self, feed: Feed, page: FeedPage, body: bytes) -> None:
        self._send(feed.peer, feed.number, wire.OK, wire.FEED, page_fields(page), body)

    def _render(self, page: cmd.Page, feed: Feed) -> bytes:
        """Render a page once for all fronts with the same feed."""
        if not page.seqs:
            return b""
        log = self._reads.followed(page.topic)
        key = (log.id if log is not None else 0, page.seqs[0], page.seqs[-1], feed.options, feed.encoding)
        text = self._rendered.get(key)
        if text is None:
            text = feed.encoding.feed_records(page, feed.options)
            self._rendered[key] = text
            if len(self._rendered) > RENDERED_MAX:
                self._rendered.popitem(last=False)
        return text

    def turn_ended(self) -> None:
        """Drop the rendered pages: the next turn may delete records in them."""
        self._rendered.clear()

    # -- groups --------------------------------------------------------------------------------------------

    def _join(self, feed: Feed, log: FollowedTopic, follow: Follow) -> FeedGroup:
        assert follow.group is not None
        group = self._groups.get((feed.topic, follow.group))
        if group is not None and group.topic_id != log.id:
            self._fail(group, TopicNotFound(group.topic))
            group = None
        if group is None:
            self._sweep_groups()
            if len(self._groups) >= GROUPS_MAX:
                self._remove(feed)
                raise Throttled("too many watch groups", limit="groups", max=GROUPS_MAX)
            group = FeedGroup(
                feed.topic, log.id, follow.group, _current_cursor(log, follow.epoch, follow.from_seq)
            )
            self._groups[feed.topic, follow.group] = group
            self._group_changed(group)
        if group.restored:
            group.cursor = max(group.cursor, _current_cursor(log, follow.epoch, follow.seen))
            if not group.ready_ms:
                group.ready_ms = self._now_ms() + REJOIN_MS
                self._rejoining.append(group)
        elif group.token is not None:
            self._withdraw(group)  # read again, for one more member
        group.members.append(feed)
        return group

    def _leave(self, feed: Feed, group: FeedGroup, *, hand_back: bool) -> None:
        index = group.members.index(feed)
        group.members.remove(feed)
        if index < group.next_member:
            group.next_member -= 1
        if hand_back and feed.unacked and _ends_at(feed.unacked, group.cursor):
            group.cursor = feed.unacked[0][0]
            self._group_changed(group)
            self._withdraw(group)
        if not group.members:
            self._withdraw(group)
            group.empty_since_ms = self._now_ms()
        else:
            self._read_on(group)

    def _read_on(self, group: FeedGroup) -> None:
        """Begin the next read of a group if a member has room."""
        log = self._reads.followed(group.topic)
        if log is not None and log.id != group.topic_id:
            self._fail(group, TopicNotFound(group.topic))  # recreated while no member had room
        elif group.token is None and not self._is_rejoining(group) and any(m.has_room for m in group.members):
            self._ask(group)

    def _is_rejoining(self, group: FeedGroup) -> bool:
        return group.restored and group.ready_ms > self._now_ms()

    def _distribute(self, group: FeedGroup, page: cmd.Page) -> None:
        receivers = [member for member in group.members if member.has_room]
        if not receivers:
            return  # the cursor stays
        first = group.next_member % len(receivers)
        receivers = receivers[first:] + receivers[:first]
        # There may be fewer members with room than when the read began.
        page = truncate(page, len(receivers) * min(receiver.options.limit for receiver in receivers))
        parts = split(page, min(len(receivers), len(page.seqs)) or 1)
        caught_up = page.next_from_seq >= page.head_seq
        from_seq = group.cursor
        for receiver, part in zip(receivers, parts):
            sent = page_of(part, from_seq)
            sent.caught_up = caught_up
            from_seq = sent.to_seq
            if sent.count or sent.tombstone is not None:
                self._push(receiver, sent, receiver.encoding.feed_records(part, receiver.options))
                receiver.unacked.append((sent.from_seq, sent.to_seq))
        group.next_member = (first + len(parts)) % max(len(group.members), 1)
        group.cursor = page.next_from_seq
        group.restored = False
        self._group_changed(group)
        self._read_on(group)

    def _group_changed(self, group: FeedGroup) -> None:
        self._changed_groups[group.topic, group.name] = None

    @property
    def groups_changed(self) -> bool:
        """Whether there are group changes to write to the file."""
        return bool(self._changed_groups)

    def take_groups(self, limit: int) -> tuple[list[tuple[str, str]], list[GroupRow]]:
        """Changes of up to `limit` groups for the file: removed groups, and rows of the others."""
        removed: list[tuple[str, str]] = []
        rows: list[GroupRow] = []
        for key in list(islice(self._changed_groups, limit)):
            del self._changed_groups[key]
            group = self._groups.get(key)
            if group is None:
                self._stored_groups.pop(key, None)
                removed.append(key)
            else:
                row = self._stored_groups[key] = (group.topic, group.topic_id, group.name, group.cursor)
                rows.append(row)
        return removed, rows

    def group_rows(self) -> list[GroupRow]:
        """All groups, as of the last `take_groups`."""
        return list(self._stored_groups.values())

    def load_groups(self, rows: list[GroupRow]) -> None:
        for row in rows:
            topic, topic_id, name, cursor = row
            log = self._reads.followed(topic)
            if log is not None and log.id == topic_id and len(self._groups) < GROUPS_MAX:
                group = FeedGroup(topic, topic_id, name, min(cursor, log.view.head), restored=True)
                group.empty_since_ms = self._now_ms()
                self._groups[topic, name] = group
                self._stored_groups[topic, name] = row

    def _sweep_groups(self) -> None:
        late_ms = self._now_ms() - SESSION_TTL_MS
        removed = [
            group for group in self._groups.values() if not group.members and group.empty_since_ms < late_ms
        ]
        for group in removed:
            del self._groups[group.topic, group.name]
            self._group_changed(group)

    # -- time ----------------------------------------------------------------------------------------------

    @property
    def wake_at_ms(self) -> int | None:
        return min((group.ready_ms for group in self._rejoining), default=None)

    def tick(self) -> None:
        """Begin reads of restored groups after REJOIN_MS."""
        waiting, self._rejoining = self._rejoining, []
        for group in waiting:
            if self._is_rejoining(group):
                self._rejoining.append(group)
            else:
                group.restored = False
                self._read_on(group)


def _current_cursor(log: FollowedTopic, epoch: str | None, cursor: int) -> int:
    """A cursor of `epoch` as a cursor of the current epoch."""
    now = cursor if epoch is None else log.cursor_of(epoch, cursor)
    return 0 if now is None else min(now, log.view.head)


def _earliest(log: FollowedTopic) -> int:
    return min(log.view.first_seq, log.view.head + 1)


def _ends_at(unacked: deque[tuple[int, int]], cursor: int) -> bool:
    """Whether these pages are the last ones sent by the group, without gaps."""
    end = cursor
    for from_seq, to_seq in reversed(unacked):
        if to_seq != end:
            return False
        end = from_seq
    return True


def split(page: cmd.Page, parts: int) -> list[cmd.Page]:
    """Split a page into consecutive pages. The first has the tombstone, the last has the page's `next_from_seq`."""
    if parts <= 1:
        return [page]
    count = len(page.seqs)
    bounds = [count * i // parts for i in range(parts + 1)]
    return [page.slice(start, stop) for start, stop in pairwise(bounds)]


def truncate(page: cmd.Page, limit: int) -> cmd.Page:
    return page if len(page.seqs) <= limit else page.slice(0, limit)
