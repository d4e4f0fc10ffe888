"""Fan-out of new records to the watchers of a front. No sockets, no clock, no disk.

A page of a feed is a hint. A subscription whose cursor is at the start of the page gets it, as the same bytes as all
others; any other one reads from its own cursor until it reaches the feed. So nothing is missed or repeated, whatever is
lost or late: after a lost page, subscriptions just read. A watcher whose client does not read gets no more pages. It uses
no more memory than its connection's buffer, and continues with reads when that is empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec
from msgspec.structs import replace

from router.pending import PendingRequests
from topics.api.errors import TopicNotFound
from topics.engine.commands.topics import Tombstone
from topics.engine.core.placement import shard_of
from topics.link import wire
from topics.link.watch import (
    STREAM_TOPICS_MAX,
    FeedOptions,
    Follow,
    NameWatch,
    WatchRead,
    encode,
    read_page_fields,
)
from topics.protocols.http.ports import Later
from topics.protocols.watchers import (
    BEHIND,
    ENDED,
    LIVE,
    READING,
    RETRY_US,
    WAITING,
    SharedNameWatch,
    SharedPage,
    Subscription,
    TopicFeed,
    Watcher,
)

READS_PER_WATCHER = 4
READING_BYTES_MAX = 64 << 20  # maximum size of the pages of all reads in progress
# When clients have this many unread bytes, pages are small whatever they have requested: a client that does not read keeps
# the last page in memory.
BUFFERED_BYTES_MAX = 64 << 20
SMALL_PAGE_BYTES = 64 * 1024
RETRY_MAX_US = 1_000_000

_names = msgspec.msgpack.Decoder(list[str]).decode


class Fanout:
    def __init__(self, core: PendingRequests, now_us: Callable[[], int], later: Later) -> None:
        self.core = core
        self.now_us = now_us
        self.later = later
        self.buffered_bytes: Callable[[], int] = lambda: 0  # unread by clients
        self.stalled: dict[Watcher, int] = {}  # watchers whose clients do not read, and since when
        self.on_up: Callable[[int], None] = lambda shard: None
        self.on_down: Callable[[int], None] = lambda shard: None
        self.on_jobs: Callable[[int, wire.Reply], None] = lambda shard, reply: None
        self._feeds: dict[tuple[str, FeedOptions], TopicFeed] = {}
        self._by_number: dict[tuple[int, int], TopicFeed] = {}
        self._by_shard: list[dict[TopicFeed, None]] = [{} for _ in core.links]
        self._name_watches: dict[tuple[str, tuple[str, ...] | None], SharedNameWatch] = {}
        self._name_watches_by_number: dict[tuple[int, int], SharedNameWatch] = {}
        self._reading_bytes = 0
        self._read_queue: deque[Watcher] = deque()
        self.on_end: Callable[[int], None] = lambda stream: None
        core.on_push = self._on_push
        core.on_up = self._on_up
        core.on_down = self._on_down

    def shard_of(self, topic: str) -> int:
        return shard_of(topic, len(self.core.links))

    # -- called by watchers --------------------------------------------------------------------------------

    def subscribe(
        self,
        watcher: Watcher,
        topic: str,
        cursor: int,
        options: FeedOptions,
        *,
        epoch: str | None = None,
        group: str | None = None,
        by_pattern: bool = False,
    ) -> None:
        """Follow a topic from a cursor. Replaces an existing subscription to it."""
        self.start(self.add(watcher, topic, cursor, epoch, by_pattern=by_pattern), options, group)

    def add(
        self, watcher: Watcher, topic: str, cursor: int, epoch: str | None = None, *, by_pattern: bool
    ) -> Subscription:
        """Add a subscription without starting it. A stream whose event ids list all topics adds all before it starts any."""
        if topic in watcher.subs:
            self.unsubscribe(watcher, topic)
        sub = watcher.subs[topic] = Subscription(watcher, topic, cursor, epoch, by_pattern=by_pattern)
        return sub

    def start(self, sub: Subscription, options: FeedOptions, group: str | None) -> None:
        topic = sub.topic
        feed = None if group is not None else self._feeds.get((topic, options))
        if feed is None:
            feed = TopicFeed(topic, options, self.shard_of(topic), group)
            if group is None:
                self._feeds[topic, options] = feed
            self._by_shard[feed.shard][feed] = None
            sub.feed = feed
            feed.waiting[sub] = None
            self._follow(feed)
        else:
            sub.feed = feed
            if feed.position is None:
                feed.waiting[sub] = None
            else:
                self._catch_up(sub, feed)

    def unsubscribe(self, watcher: Watcher, topic: str) -> None:
        sub = watcher.subs.pop(topic, None)
        if sub is not None:
            self._end(sub)

    def watch_names(
        self, watcher: Watcher, pattern: str, options: FeedOptions, group: str | None = None
    ) -> None:
        """Follow all existing and future topics that match the pattern."""
        prefixes = watcher.prefixes
        key = pattern, tuple(prefixes) if prefixes is not None else None
        name_watch = self._name_watches.get(key)
        if name_watch is None:
            name_watch = self._name_watches[key] = SharedNameWatch(pattern, prefixes)
            for shard, link in enumerate(self.core.links):
                if link.incarnation is not None:
                    self._send_watch_names(name_watch, shard)
        name_watch.watchers[watcher] = options, group
        if name_watch not in watcher.name_watches:
            watcher.name_watches.append(name_watch)
        for name in list(name_watch.names):
            self._subscribe_match(watcher, name, options, group)

    def unwatch_names(self, watcher: Watcher, pattern: str) -> None:
        """Remove a pattern, and the topics that no other pattern of the watcher matches."""
        name_watch = next(
            (name_watch for name_watch in watcher.name_watches if name_watch.pattern == pattern), None
        )
        if name_watch is None:
            return
        watcher.name_watches.remove(name_watch)
        for name in name_watch.names:
            sub = watcher.subs.get(name)
            if sub is not None and sub.by_pattern and all(name not in s.names for s in watcher.name_watches):
                self.unsubscribe(watcher, name)
        self._leave_name_watch(watcher, name_watch)

    def close(self, watcher: Watcher) -> None:
        """Remove a watcher."""
        watcher.is_closed = True
        self.stalled.pop(watcher, None)
        for sub in watcher.subs.values():
            self._end(sub)
        watcher.behind.clear()
        for name_watch in watcher.name_watches:
            self._leave_name_watch(watcher, name_watch)
        watcher.name_watches = []

    def drained(self, watcher: Watcher) -> None:
        """The watcher's connection has room again."""
        self.stalled.pop(watcher, None)
        for sub in list(watcher.holding):
            if sub.feed is not None:
                self._deliver_held(sub, sub.feed)
        self._pump(watcher)

    # -- feeds ---------------------------------------------------------------------------------------------

    def _follow(self, feed: TopicFeed) -> None:
        if self.core.links[feed.shard].incarnation is None:
            return  # done when the worker is up
        sub = next(iter(feed.waiting), None)
        if sub is not None and feed.group is not None:
            body = encode(Follow(feed.options, feed.group, sub.cursor, sub.seen, sub.epoch))
        else:
            body = encode(Follow(feed.options))
        if feed.number:
            self._by_number.pop((feed.shard, feed.number), None)
            feed.number = 0
        feed.number = self._ask(
            feed.shard, wire.FOLLOW, feed.topic.encode(), body, lambda reply: self._followed(feed, reply)
        )
        if feed.number:
            self._by_number[feed.shard, feed.number] = feed

    def _ask(
        self, shard: int, op: int, topic: bytes, body: bytes, on_reply: Callable[[wire.Reply], None]
    ) -> int:
        return self.core.ask(shard, op, 0, topic, b"", body, self.now_us(), on_reply)

    def _followed(self, feed: TopicFeed, reply: wire.Reply) -> None:
        if not feed.waiting and not feed.live:
            return  # no subscription is left
        if reply.error_code == TopicNotFound.code:
            self._topic_deleted(feed)
            return
        if reply.code != wire.OK:
            self._follow_later(feed)
            return
        page = read_page_fields(reply.fields)
        feed.position, feed.is_at_head, feed.epoch = page.to_seq, page.caught_up, page.epoch
        feed.retry_us = RETRY_US
        waiting, feed.waiting = feed.waiting, {}
        for sub in waiting:
            if feed.group is not None:
                sub.state = LIVE
                feed.live[sub] = None
                sub.is_new = False
                _set_epoch(sub, page.epoch)
                if page.caught_up and sub.caught_up_due:
                    sub.caught_up_due = False
                    sub.watcher.write_caught_up(sub, page.head_seq)
            else:
                self._catch_up(sub, feed)

    def _follow_later(self, feed: TopicFeed) -> None:
        delay_us, number = feed.retry_us, feed.number
        feed.retry_us = min(2 * delay_us, RETRY_MAX_US)

        def again() -> None:
            # Another number: the feed was requested again since, after a restart of its shard.
            is_due = feed.position is None and feed.number == number
            if is_due and feed in self._by_shard[feed.shard]:
                self._follow(feed)

        self.later(delay_us, again)

    def _drop_feed(self, feed: TopicFeed) -> None:
        """Drop a feed without subscriptions."""
        self._by_shard[feed.shard].pop(feed, None)
        if self._feeds.get((feed.topic, feed.options)) is feed:
            del self._feeds[feed.topic, feed.options]
        if feed.number:
            self._by_number.pop((feed.shard, feed.number), None)
            self.core.tell(feed.shard, wire.UNFOLLOW, feed.number)
            feed.number = 0

    def _on_push(self, shard: int, reply: wire.Reply) -> None:
        feed = self._by_number.get((shard, reply.id))
        if feed is not None:
            if reply.kind == wire.FEED:
                self._on_page(feed, reply)
            elif reply.error_code == TopicNotFound.code:
                self._topic_deleted(feed)
            else:  # the shard cannot serve the feed now
                self._feed_lost(feed)
                self._follow_later(feed)
        elif reply.kind == wire.NEW_TOPIC:
            name_watch = self._name_watches_by_number.get((shard, reply.id))
            if name_watch is not None:
                self._name_found(name_watch, bytes(reply.body).decode(), is_created=True)
        elif reply.kind == wire.JOBS:
            self.on_jobs(shard, reply)
        elif reply.kind == wire.END_STREAM:
            self.on_end(reply.id)

    def _on_page(self, feed: TopicFeed, reply: wire.Reply) -> None:
        page = read_page_fields(reply.fields)
        shared = SharedPage(feed.topic.encode(), page, bytes(reply.body))
        if feed.group is not None:
            self._on_group_page(feed, shared)
            return
        from_seq = page.from_seq
        feed.position, feed.is_at_head = page.to_seq, page.caught_up
        for sub in list(feed.live):
            if sub.state is not LIVE:
                continue
            watcher = sub.watcher
            if watcher.is_full:
                self._fall_behind(sub)
                self.stalled.setdefault(watcher, self.now_us())
            elif sub.cursor == from_seq:
                self._deliver(sub, shared)
            elif sub.cursor != page.to_seq:  # otherwise it has read these records already
                self._fall_behind(sub)
                self._pump(watcher)
        self.core.tell(feed.shard, wire.FEED_ACK, feed.number)

    @staticmethod
    def _deliver(sub: Subscription, shared: SharedPage) -> None:
        """Write a page, and `caught_up` after a page without records that reaches the head."""
        sub.watcher.write_page(sub, shared)
        if shared.caught_up and sub.caught_up_due:
            sub.caught_up_due = False
            sub.watcher.write_caught_up(sub, shared.head_seq)

    def _on_group_page(self, feed: TopicFeed, shared: SharedPage) -> None:
        """A page for a member of a group. It is held if the member has no room, and returned to the group if the member leaves."""
        for sub in list(feed.live):
            if sub.held or sub.watcher.is_full:
                sub.held.append(shared)
                sub.watcher.holding[sub] = None
                self.stalled.setdefault(sub.watcher, self.now_us())
            else:
                self._deliver_to_member(sub, feed, shared)

    def _deliver_to_member(self, sub: Subscription, feed: TopicFeed, shared: SharedPage) -> None:
        """Write a page to a member of a group, and acknowledge it: no other member gets it from now on."""
        sub.seen = shared.to_seq
        self._deliver(sub, shared)
        if feed.number:
            self.core.tell(feed.shard, wire.FEED_ACK, feed.number)

    def _deliver_held(self, sub: Subscription, feed: TopicFeed) -> None:
        while sub.held and not sub.watcher.is_full:
            self._deliver_to_member(sub, feed, sub.held.popleft())
        if not sub.held:
            sub.watcher.holding.pop(sub, None)
        else:
            self.stalled.setdefault(sub.watcher, self.now_us())

    def _topic_deleted(self, feed: TopicFeed) -> None:
        feed.position = None
        gone = [*feed.live, *feed.waiting]
        for sub in gone:
            self._end_deleted(sub)
        if feed in self._by_shard[feed.shard]:
            self._drop_feed(feed)
        for sub in gone:
            if sub.recreated_by is not None and sub.watcher in sub.recreated_by.watchers:
                sub.recreated_by.names[sub.topic] = None
                self._subscribe_match(sub.watcher, sub.topic, *sub.recreated_by.watchers[sub.watcher])

    def _end_deleted(self, sub: Subscription) -> None:
        watcher = sub.watcher
        for name_watch in watcher.name_watches:
            name_watch.names.pop(sub.topic, None)
        if watcher.is_closed or watcher.subs.get(sub.topic) is not sub or sub.state is ENDED:
            return
        untouched = sub.by_pattern and sub.is_new and sub.state is WAITING
        self._end(sub)
        if untouched:
            del watcher.subs[sub.topic]  # the client has never seen it
        else:
            watcher.write_topic_deleted(sub)

    def _end(self, sub: Subscription) -> None:
        """End a subscription, and release its feed."""
        feed, sub.state = sub.feed, ENDED
        sub.watcher.behind.pop(sub, None)
        sub.watcher.holding.pop(sub, None)
        sub.held.clear()
        if feed is None:
            return
        sub.feed = None
        feed.live.pop(sub, None)
        feed.waiting.pop(sub, None)
        if sub.read:
            self.core.cancel(feed.shard, sub.read)
        if not feed.live and not feed.waiting:
            self._drop_feed(feed)

    # -- catching up ---------------------------------------------------------------------------------------

    def _catch_up(self, sub: Subscription, feed: TopicFeed) -> None:
        """Make a subscription live if its cursor is at the feed's position; otherwise read until it is."""
        feed.live.setdefault(sub)  # also while it reads, to keep the feed
        if sub.epoch is None:
            _set_epoch(sub, feed.epoch)
        if _is_at(sub, feed):
            sub.state = LIVE
            sub.is_new = False
            if sub.caught_up_due and feed.is_at_head:  # otherwise with one of the next pages
                sub.caught_up_due = False
                sub.watcher.write_caught_up(sub, sub.cursor)
        else:
            self._fall_behind(sub)
            self._pump(sub.watcher)

    @staticmethod
    def _fall_behind(sub: Subscription) -> None:
        if sub.state is not READING:
            sub.state = BEHIND
            sub.watcher.behind[sub] = None

    def _pump(self, watcher: Watcher) -> None:
        """Start as many reads as the watcher has room for."""
        while watcher.behind and watcher.reads < READS_PER_WATCHER:
            if watcher.is_full:
                self.stalled.setdefault(watcher, self.now_us())
                return
            if self._reading_bytes > READING_BYTES_MAX:
                if not watcher.is_queued:
                    watcher.is_queued = True
                    self._read_queue.append(watcher)
                return
            sub = next(iter(watcher.behind))
            del watcher.behind[sub]
            self._read(sub)

    def _read(self, sub: Subscription) -> None:
        feed, watcher = sub.feed, sub.watcher
        assert feed is not None
        if _is_at(sub, feed):
            self._catch_up(sub, feed)
            return
        sub.state = READING
        watcher.reads += 1
        options = feed.options
        if self.buffered_bytes() > BUFFERED_BYTES_MAX and options.max_bytes > SMALL_PAGE_BYTES:
            options = replace(options, max_bytes=SMALL_PAGE_BYTES)
        cost = options.max_bytes
        self._reading_bytes += cost
        body = encode(WatchRead(options, sub.cursor, sub.epoch))
        sub.read = -1
        number = self._ask(
            feed.shard,
            wire.WATCH_READ,
            feed.topic.encode(),
            body,
            partial(self._read_replied, sub, feed, cost),
        )
        if sub.read:  # otherwise it was refused at once
            sub.read = number

    def _read_replied(self, sub: Subscription, feed: TopicFeed, cost: int, reply: wire.Reply) -> None:
        watcher = sub.watcher
        watcher.reads -= 1
        self._reading_bytes -= cost
        refused_at_once, sub.read = sub.read == -1, 0
        if not watcher.is_closed:
            if sub.feed is feed:
                self._read_finished(sub, feed, reply)
            if not refused_at_once:  # otherwise `_pump` is the caller, and continues by itself
                self._pump(watcher)
        if not refused_at_once:
            self._start_queued_reads()

    def _read_finished(self, sub: Subscription, feed: TopicFeed, reply: wire.Reply) -> None:
        if reply.error_code == TopicNotFound.code:
            self._end_deleted(sub)
            return
        if reply.code != wire.OK:
            sub.state = WAITING
            feed.live.pop(sub, None)
            feed.waiting[sub] = None
            if feed.position is not None:  # otherwise it continues when the feed is established
                self.later(RETRY_US, partial(self._try_again, sub, feed))
            return
        page = read_page_fields(reply.fields)
        sub.state = LIVE
        watcher = sub.watcher
        _set_epoch(sub, page.epoch, page.tombstone)
        watcher.write_page(sub, SharedPage(feed.topic.encode(), page, bytes(reply.body)))
        sub.is_new = False
        if sub.feed is not feed:
            return  # the page has ended the subscription
        if page.caught_up and sub.caught_up_due:
            sub.caught_up_due = False
            watcher.write_caught_up(sub, page.head_seq)
        if feed.position is None:
            sub.state = WAITING
            feed.live.pop(sub, None)
            feed.waiting[sub] = None
        elif not page.caught_up or sub.cursor < feed.position:
            self._fall_behind(sub)
        # Otherwise it is at the feed's position or ahead of it; a page that it has already read is skipped.

    def _try_again(self, sub: Subscription, feed: TopicFeed) -> None:
        if sub.feed is feed and sub in feed.waiting and feed.position is not None:
            del feed.waiting[sub]
            self._catch_up(sub, feed)

    def _start_queued_reads(self) -> None:
        while self._read_queue and self._reading_bytes <= READING_BYTES_MAX:
            watcher = self._read_queue.popleft()
            watcher.is_queued = False
            if not watcher.is_closed:
                self._pump(watcher)

    # -- patterns ------------------------------------------------------------------------------------------

    def _send_watch_names(self, name_watch: SharedNameWatch, shard: int) -> None:
        number = self._ask(
            shard,
            wire.WATCH_NAMES,
            b"",
            encode(NameWatch(name_watch.pattern, name_watch.prefixes)),
            partial(self._names_replied, name_watch, shard),
        )
        if number:
            name_watch.numbers[shard] = number
            self._name_watches_by_number[shard, number] = name_watch

    def _names_replied(self, name_watch: SharedNameWatch, shard: int, reply: wire.Reply) -> None:
        if not name_watch.watchers:
            return
        if reply.code == wire.OK:
            for name in _names(reply.body):
                if name not in name_watch.names:  # otherwise watchers already follow it, or have unsubscribed
                    self._name_found(name_watch, name)
        elif self.core.links[shard].incarnation is not None:
            self.later(
                RETRY_US, partial(self._watch_names_again, name_watch, shard, name_watch.numbers.get(shard))
            )

    def _watch_names_again(self, name_watch: SharedNameWatch, shard: int, number: int | None) -> None:
        if (
            name_watch.watchers
            and name_watch.numbers.get(shard) == number
            and self.core.links[shard].incarnation
        ):
            self._send_watch_names(name_watch, shard)

    def _name_found(self, name_watch: SharedNameWatch, name: str, *, is_created: bool = False) -> None:
        name_watch.names[name] = None
        for watcher, (options, group) in list(name_watch.watchers.items()):
            known = watcher.subs.get(name)
            if is_created and known is not None and known.state is not ENDED:
                known.recreated_by = name_watch  # the deletion of the old topic is not reported yet
            self._subscribe_match(watcher, name, options, group)

    def _subscribe_match(self, watcher: Watcher, name: str, options: FeedOptions, group: str | None) -> None:
        known = watcher.subs.get(name)
        if watcher.is_closed or (known is not None and known.state is not ENDED):
            return
        if len(watcher.subs) >= STREAM_TOPICS_MAX:
            watcher.write_too_many_topics(name)
            return
        # A topic that ended here and was recreated is another topic: it starts at the beginning.
        cursor, epoch = (watcher.start_of(name), watcher.epoch_of(name)) if known is None else (0, None)
        self.subscribe(watcher, name, cursor, options, epoch=epoch, group=group, by_pattern=True)

    def _leave_name_watch(self, watcher: Watcher, name_watch: SharedNameWatch) -> None:
        name_watch.watchers.pop(watcher, None)
        if name_watch.watchers:
            return
        prefixes = name_watch.prefixes
        self._name_watches.pop((name_watch.pattern, tuple(prefixes) if prefixes is not None else None), None)
        for shard, number in name_watch.numbers.items():
            self._name_watches_by_number.pop((shard, number), None)
            self.core.tell(shard, wire.UNFOLLOW, number)

    # -- workers start and die -----------------------------------------------------------------------------

    def _feed_lost(self, feed: TopicFeed) -> None:
        feed.position = None
        if feed.number:
            self._by_number.pop((feed.shard, feed.number), None)
            feed.number = 0
        for sub in list(feed.live):
            if sub.state is not READING:
                del feed.live[sub]
                sub.watcher.behind.pop(sub, None)
                sub.state = WAITING
                while sub.held:  # the group at the shard is gone, so they cannot be returned
                    self._deliver_to_member(sub, feed, sub.held.popleft())
                sub.watcher.holding.pop(sub, None)
                feed.waiting[sub] = None

    def _on_down(self, shard: int) -> None:
        for feed in list(self._by_shard[shard]):
            self._feed_lost(feed)
        for name_watch in self._name_watches.values():
            number = name_watch.numbers.pop(shard, None)
            if number is not None:
                self._name_watches_by_number.pop((shard, number), None)
        self.on_down(shard)

    def _on_up(self, shard: int) -> None:
        for feed in list(self._by_shard[shard]):
            feed.retry_us = RETRY_US
            self._follow(feed)
        for name_watch in self._name_watches.values():
            self._send_watch_names(name_watch, shard)
        self.on_up(shard)


def _is_at(sub: Subscription, feed: TopicFeed) -> bool:
    """Whether the subscription's cursor is at the feed's position."""
    return sub.cursor == feed.position and sub.epoch == feed.epoch


def _set_epoch(sub: Subscription, epoch: str, gone: Tombstone | None = None) -> None:
    if sub.epoch != epoch:
        before, sub.epoch = sub.epoch, epoch
        sub.watcher.epoch_changed(sub, before, gone)
