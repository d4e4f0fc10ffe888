"""Who watches what through this front, and how news reach them. Pure: no socket, no clock, no disk.

A feed's page is a hint. A sub that stands where the page begins takes it, as the same bytes that all others get; one that
stands elsewhere reads for itself from its own cursor, and joins the feed where the two meet. So nothing is missed or
repeated, whatever is lost or late: a page that never came just makes a sub read. A watcher that does not take what was
written to it stops taking pages; it holds no more memory than its connection's buffer, and reads on when that is empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from router.pending import PendingRequests
from router.watch.watchers import (
    BEHIND,
    ENDED,
    LIVE,
    READING,
    RETRY_US,
    WAITING,
    NameWatchShare,
    SharedPage,
    Subscription,
    TopicFeed,
    Watcher,
)
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
    read_page_head,
)

READS_PER_WATCHER = 4
READING_BYTES_MAX = 64 << 20  # of pages that were asked for and have not come
# When clients leave so much where it is, pages are small, whatever was asked for: a client that takes nothing keeps the
# page that it was sent.
BUFFERED_BYTES_MAX = 64 << 20
SMALL_PAGE_BYTES = 64 * 1024
RETRY_MAX_US = 1_000_000

Later: TypeAlias = Callable[[int, Callable[[], None]], object]  # after so many microseconds
_names = msgspec.msgpack.Decoder(list[str]).decode


class Fanout:
    def __init__(self, core: PendingRequests, now_us: Callable[[], int], later: Later) -> None:
        self.core = core
        self.now_us = now_us
        self.later = later
        self.buffered_bytes: Callable[[], int] = lambda: 0  # that clients have not taken
        self.stalled: dict[Watcher, int] = {}  # that take nothing, and since when
        self.on_up: Callable[[int], None] = lambda shard: None
        self.on_down: Callable[[int], None] = lambda shard: None
        self.on_jobs: Callable[[int, wire.Reply], None] = lambda shard, reply: None
        self._feeds: dict[tuple[str, FeedOptions], TopicFeed] = {}
        self._by_number: dict[tuple[int, int], TopicFeed] = {}
        self._by_shard: list[dict[TopicFeed, None]] = [{} for _ in core.links]
        self._shares: dict[tuple[str, tuple[str, ...] | None], NameWatchShare] = {}
        self._shares_by_number: dict[tuple[int, int], NameWatchShare] = {}
        self._reading_bytes = 0
        self._starved: deque[Watcher] = deque()
        self.on_end: Callable[[int], None] = lambda stream: None
        core.on_push = self._on_push
        core.on_up = self._on_up
        core.on_down = self._on_down

    def shard_of(self, topic: str) -> int:
        return shard_of(topic, len(self.core.links))

    # -- what watchers do ----------------------------------------------------------------------------------

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
        """Follow a topic from a cursor; what was followed of it before is replaced."""
        self.start(self.add(watcher, topic, cursor, epoch, by_pattern=by_pattern), options, group)

    def add(
        self, watcher: Watcher, topic: str, cursor: int, epoch: str | None = None, *, by_pattern: bool
    ) -> Subscription:
        """A topic that will be followed. A watcher that names all of its topics in each event adds them all before it starts any."""
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

    def look_out(
        self, watcher: Watcher, pattern: str, options: FeedOptions, group: str | None = None
    ) -> None:
        """Follow all topics that match the pattern, now and later."""
        prefixes = watcher.prefixes
        key = pattern, tuple(prefixes) if prefixes is not None else None
        share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = NameWatchShare(pattern, prefixes)
            for shard, link in enumerate(self.core.links):
                if link.incarnation is not None:
                    self._send_look_out(share, shard)
        share.watchers[watcher] = options, group
        if share not in watcher.look_outs:
            watcher.look_outs.append(share)
        for name in list(share.names):
            self._found(watcher, name, options, group)

    def stop_looking_out(self, watcher: Watcher, pattern: str) -> None:
        """Nothing more by this pattern; what another one finds as well stays."""
        share = next((share for share in watcher.look_outs if share.pattern == pattern), None)
        if share is None:
            return
        watcher.look_outs.remove(share)
        for name in share.names:
            sub = watcher.subs.get(name)
            if sub is not None and sub.by_pattern and all(name not in s.names for s in watcher.look_outs):
                self.unsubscribe(watcher, name)
        self._leave_share(watcher, share)

    def close(self, watcher: Watcher) -> None:
        """The watcher is gone."""
        watcher.is_closed = True
        self.stalled.pop(watcher, None)
        for sub in watcher.subs.values():
            self._end(sub)
        watcher.behind.clear()
        for share in watcher.look_outs:
            self._leave_share(watcher, share)
        watcher.look_outs = []

    def drained(self, watcher: Watcher) -> None:
        """Its connection has taken what was written."""
        self.stalled.pop(watcher, None)
        for sub in list(watcher.holding):
            if sub.feed is not None:
                self._hand_on_held(sub, sub.feed)
        self._pump(watcher)

    # -- feeds ---------------------------------------------------------------------------------------------

    def _follow(self, feed: TopicFeed) -> None:
        if self.core.links[feed.shard].incarnation is None:
            return  # when it is up
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
        return self.core.send(shard, op, 0, topic, b"", body, self.now_us(), on_reply)

    def _followed(self, feed: TopicFeed, reply: wire.Reply) -> None:
        if not feed.waiting and not feed.live:
            return  # nobody wants it any more
        if reply.status == 404:
            self._topic_gone(feed)
            return
        if reply.status != 200:
            self._follow_later(feed)
            return
        page = read_page_head(reply.head)
        feed.position, feed.is_at_head, feed.epoch = page.to_seq, page.caught_up, page.epoch
        feed.retry_us = RETRY_US
        waiting, feed.waiting = feed.waiting, {}
        for sub in waiting:
            if feed.group is not None:
                sub.state = LIVE
                feed.live[sub] = None
                sub.fresh = False
                _set_epoch(sub, page.epoch)
                if page.caught_up and sub.owes_caught_up:
                    sub.owes_caught_up = False
                    sub.watcher.tell_caught_up(sub, page.head_seq)
            else:
                self._catch_up(sub, feed)

    def _follow_later(self, feed: TopicFeed) -> None:
        delay_us, number = feed.retry_us, feed.number
        feed.retry_us = min(2 * delay_us, RETRY_MAX_US)

        def again() -> None:
            # With another number it was followed since, by a restart of its shard.
            is_due = feed.position is None and feed.number == number
            if is_due and feed in self._by_shard[feed.shard]:
                self._follow(feed)

        self.later(delay_us, again)

    def _drop_feed(self, feed: TopicFeed) -> None:
        """Nobody follows it any more."""
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
                self._news(feed, reply)
            elif reply.status == 404:
                self._topic_gone(feed)
            else:  # the shard cannot feed it now
                self._feed_lost(feed)
                self._follow_later(feed)
        elif reply.kind == wire.NEW_TOPIC:
            share = self._shares_by_number.get((shard, reply.id))
            if share is not None:
                self._share_found(share, bytes(reply.body).decode(), is_new=True)
        elif reply.kind == wire.JOBS:
            self.on_jobs(shard, reply)
        elif reply.kind == wire.END_STREAM:
            self.on_end(reply.id)

    def _news(self, feed: TopicFeed, reply: wire.Reply) -> None:
        page = read_page_head(reply.head)
        news = SharedPage(feed.topic.encode(), page, bytes(reply.body))
        if feed.group is not None:
            self._dealt(feed, news)
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
                self._take(sub, news)
            elif sub.cursor != page.to_seq:  # else it has read that already
                self._fall_behind(sub)
                self._pump(watcher)
        self.core.tell(feed.shard, wire.FEED_ACK, feed.number)

    @staticmethod
    def _take(sub: Subscription, news: SharedPage) -> None:
        """Pass a page on; after one without records that reaches the head there is still that to be said."""
        sub.watcher.take(sub, news)
        if news.caught_up and sub.owes_caught_up:
            sub.owes_caught_up = False
            sub.watcher.tell_caught_up(sub, news.head_seq)

    def _dealt(self, feed: TopicFeed, news: SharedPage) -> None:
        """A page for one member of a group. One that cannot take it leaves it here, to go back should it leave."""
        for sub in list(feed.live):
            if sub.held or sub.watcher.is_full:
                sub.held.append(news)
                sub.watcher.holding[sub] = None
                self.stalled.setdefault(sub.watcher, self.now_us())
            else:
                self._hand_on(sub, feed, news)

    def _hand_on(self, sub: Subscription, feed: TopicFeed, news: SharedPage) -> None:
        """From here on nobody else gets it."""
        sub.seen = news.to_seq
        self._take(sub, news)
        if feed.number:
            self.core.tell(feed.shard, wire.FEED_ACK, feed.number)

    def _hand_on_held(self, sub: Subscription, feed: TopicFeed) -> None:
        while sub.held and not sub.watcher.is_full:
            self._hand_on(sub, feed, sub.held.popleft())
        if not sub.held:
            sub.watcher.holding.pop(sub, None)
        else:
            self.stalled.setdefault(sub.watcher, self.now_us())

    def _topic_gone(self, feed: TopicFeed) -> None:
        feed.position = None
        gone = [*feed.live, *feed.waiting]
        for sub in gone:
            self._sub_gone(sub)
        if feed in self._by_shard[feed.shard]:
            self._drop_feed(feed)
        for sub in gone:
            if sub.renewed is not None and sub.watcher in sub.renewed.watchers:
                sub.renewed.names[sub.topic] = None
                self._found(sub.watcher, sub.topic, *sub.renewed.watchers[sub.watcher])

    def _sub_gone(self, sub: Subscription) -> None:
        watcher = sub.watcher
        for share in watcher.look_outs:
            share.names.pop(sub.topic, None)
        if watcher.is_closed or watcher.subs.get(sub.topic) is not sub or sub.state is ENDED:
            return
        untouched = sub.by_pattern and sub.fresh and sub.state is WAITING
        self._end(sub)
        if untouched:
            del watcher.subs[sub.topic]  # it was gone before anybody saw it
        else:
            watcher.tell_gone(sub)

    def _end(self, sub: Subscription) -> None:
        """Nothing more of this topic for this watcher."""
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
            self.core.forget(feed.shard, sub.read)
        if not feed.live and not feed.waiting:
            self._drop_feed(feed)

    # -- catching up ---------------------------------------------------------------------------------------

    def _catch_up(self, sub: Subscription, feed: TopicFeed) -> None:
        """Let it join the feed if it stands there; else it has to be read for."""
        feed.live.setdefault(sub)  # also while it is read for: it keeps the feed
        if sub.epoch is None:
            _set_epoch(sub, feed.epoch)
        if _stands_at(sub, feed):
            sub.state = LIVE
            sub.fresh = False
            if sub.owes_caught_up and feed.is_at_head:  # else its next pages say so
                sub.owes_caught_up = False
                sub.watcher.tell_caught_up(sub, sub.cursor)
        else:
            self._fall_behind(sub)
            self._pump(sub.watcher)

    @staticmethod
    def _fall_behind(sub: Subscription) -> None:
        if sub.state is not READING:
            sub.state = BEHIND
            sub.watcher.behind[sub] = None

    def _pump(self, watcher: Watcher) -> None:
        """Begin what reads the watcher has room for."""
        while watcher.behind and watcher.reads < READS_PER_WATCHER:
            if watcher.is_full:
                self.stalled.setdefault(watcher, self.now_us())
                return
            if self._reading_bytes > READING_BYTES_MAX:
                if not watcher.is_starved:
                    watcher.is_starved = True
                    self._starved.append(watcher)
                return
            sub = next(iter(watcher.behind))
            del watcher.behind[sub]
            self._read(sub)

    def _read(self, sub: Subscription) -> None:
        feed, watcher = sub.feed, sub.watcher
        assert feed is not None
        if _stands_at(sub, feed):
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
            feed.shard, wire.WATCH_READ, feed.topic.encode(), body, partial(self._was_read, sub, feed, cost)
        )
        if sub.read:  # else it is answered already
            sub.read = number

    def _was_read(self, sub: Subscription, feed: TopicFeed, cost: int, reply: wire.Reply) -> None:
        watcher = sub.watcher
        watcher.reads -= 1
        self._reading_bytes -= cost
        refused_at_once, sub.read = sub.read == -1, 0
        if not watcher.is_closed:
            if sub.feed is feed:
                self._read_ended(sub, feed, reply)
            if not refused_at_once:  # else `_pump` has called, and goes on by itself
                self._pump(watcher)
        if not refused_at_once:
            self._serve_starved()

    def _read_ended(self, sub: Subscription, feed: TopicFeed, reply: wire.Reply) -> None:
        if reply.status == 404:
            self._sub_gone(sub)
            return
        if reply.status != 200:
            sub.state = WAITING
            feed.live.pop(sub, None)
            feed.waiting[sub] = None
            if feed.position is not None:  # else it is taken up again when the feed is there
                self.later(RETRY_US, partial(self._try_again, sub, feed))
            return
        page = read_page_head(reply.head)
        sub.state = LIVE
        watcher = sub.watcher
        _set_epoch(sub, page.epoch, page.tombstone)
        watcher.take(sub, SharedPage(feed.topic.encode(), page, bytes(reply.body)))
        sub.fresh = False
        if sub.feed is not feed:
            return  # it was ended by what it took
        if page.caught_up and sub.owes_caught_up:
            sub.owes_caught_up = False
            watcher.tell_caught_up(sub, page.head_seq)
        if feed.position is None:
            sub.state = WAITING
            feed.live.pop(sub, None)
            feed.waiting[sub] = None
        elif not page.caught_up or sub.cursor < feed.position:
            self._fall_behind(sub)
        # Else it stands at the feed, or ahead of it, and the page that it has read already will find it there.

    def _try_again(self, sub: Subscription, feed: TopicFeed) -> None:
        if sub.feed is feed and sub in feed.waiting and feed.position is not None:
            del feed.waiting[sub]
            self._catch_up(sub, feed)

    def _serve_starved(self) -> None:
        while self._starved and self._reading_bytes <= READING_BYTES_MAX:
            watcher = self._starved.popleft()
            watcher.is_starved = False
            if not watcher.is_closed:
                self._pump(watcher)

    # -- patterns ------------------------------------------------------------------------------------------

    def _send_look_out(self, share: NameWatchShare, shard: int) -> None:
        number = self._ask(
            shard,
            wire.WATCH_NAMES,
            b"",
            encode(NameWatch(share.pattern, share.prefixes)),
            partial(self._looked_out, share, shard),
        )
        if number:
            share.numbers[shard] = number
            self._shares_by_number[shard, number] = share

    def _looked_out(self, share: NameWatchShare, shard: int, reply: wire.Reply) -> None:
        if not share.watchers:
            return
        if reply.status == 200:
            for name in _names(reply.body):
                if name not in share.names:  # else watchers have it, or do not want it any more
                    self._share_found(share, name)
        elif self.core.links[shard].incarnation is not None:
            self.later(RETRY_US, partial(self._look_out_again, share, shard, share.numbers.get(shard)))

    def _look_out_again(self, share: NameWatchShare, shard: int, number: int | None) -> None:
        if share.watchers and share.numbers.get(shard) == number and self.core.links[shard].incarnation:
            self._send_look_out(share, shard)

    def _share_found(self, share: NameWatchShare, name: str, *, is_new: bool = False) -> None:
        share.names[name] = None
        for watcher, (options, group) in list(share.watchers.items()):
            known = watcher.subs.get(name)
            if is_new and known is not None and known.state is not ENDED:
                known.renewed = share  # that the old one is gone is still to come
            self._found(watcher, name, options, group)

    def _found(self, watcher: Watcher, name: str, options: FeedOptions, group: str | None) -> None:
        known = watcher.subs.get(name)
        if watcher.is_closed or (known is not None and known.state is not ENDED):
            return
        if len(watcher.subs) >= STREAM_TOPICS_MAX:
            watcher.tell_too_many(name)
            return
        # One that ended here and was made again is another topic: all of it is new.
        cursor, epoch = (watcher.start_of(name), watcher.epoch_of(name)) if known is None else (0, None)
        self.subscribe(watcher, name, cursor, options, epoch=epoch, group=group, by_pattern=True)

    def _leave_share(self, watcher: Watcher, share: NameWatchShare) -> None:
        share.watchers.pop(watcher, None)
        if share.watchers:
            return
        prefixes = share.prefixes
        self._shares.pop((share.pattern, tuple(prefixes) if prefixes is not None else None), None)
        for shard, number in share.numbers.items():
            self._shares_by_number.pop((shard, number), None)
            self.core.tell(shard, wire.UNFOLLOW, number)

    # -- shards come and go --------------------------------------------------------------------------------

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
                while sub.held:  # nobody is left to whom they could go back
                    self._hand_on(sub, feed, sub.held.popleft())
                sub.watcher.holding.pop(sub, None)
                feed.waiting[sub] = None

    def _on_down(self, shard: int) -> None:
        for feed in list(self._by_shard[shard]):
            self._feed_lost(feed)
        for share in self._shares.values():
            number = share.numbers.pop(shard, None)
            if number is not None:
                self._shares_by_number.pop((shard, number), None)
        self.on_down(shard)

    def _on_up(self, shard: int) -> None:
        for feed in list(self._by_shard[shard]):
            feed.retry_us = RETRY_US
            self._follow(feed)
        for share in self._shares.values():
            self._send_look_out(share, shard)
        self.on_up(shard)


def _stands_at(sub: Subscription, feed: TopicFeed) -> bool:
    """Whether the feed's next page is the sub's too."""
    return sub.cursor == feed.position and sub.epoch == feed.epoch


def _set_epoch(sub: Subscription, epoch: str, gone: Tombstone | None = None) -> None:
    if sub.epoch != epoch:
        before, sub.epoch = sub.epoch, epoch
        sub.watcher.has_epoch(sub, before, gone)
