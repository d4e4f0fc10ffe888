"""Watchers, subscriptions and feeds: what a protocol implements to follow topics. The fan-out of a front is `router/watch/fanout.py`.

    Watcher        the stream of one client: an event stream or a WebSocket
    Subscription   one topic of one watcher, with its cursor
    TopicFeed      the feed of one topic from its shard, shared by all subscriptions with the same options

States of a subscription:

    WAITING   the feed is not available yet (its shard is starting)
    BEHIND    needs a read as soon as the watcher has room
    READING   a read is in progress
    LIVE      receives the pages of the feed
    ENDED     the topic was deleted or unsubscribed
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Protocol

from topics.engine.commands.topics import Tombstone
from topics.link.watch import FeedOptions, FeedPage

RETRY_US = 50_000  # delay before a failed request to a shard is repeated

WAITING, BEHIND, READING, LIVE, ENDED = "waiting", "behind", "reading", "live", "ended"


class SharedPage:
    """A page for several watchers. Encodings shared by several watchers are cached in it."""

    __slots__ = (
        "caught_up",
        "count",
        "encoded",  # by format
        "from_seq",  # start of the records: after the gap, if there is one
        "head_seq",
        "records",
        "to_seq",
        "tombstone",
        "topic",
    )

    def __init__(self, topic: bytes, page: FeedPage, records: bytes) -> None:
        self.topic = topic
        gone: Tombstone | None = page.tombstone
        if gone is not None:
            # Not the end of the gap: of a recreated topic, or one whose head went back, records below it follow.
            self.from_seq = gone.earliest_seq - 1
        else:
            self.from_seq = page.from_seq
        self.to_seq, self.head_seq = page.to_seq, page.head_seq
        self.count = page.count
        self.caught_up = page.caught_up
        self.tombstone = gone
        self.records = records
        self.encoded: dict[bytes, bytes] = {}


class TopicFeed:
    __slots__ = (
        "epoch",
        "group",
        "is_at_head",
        "live",
        "number",
        "options",
        "position",
        "retry_us",
        "shard",
        "topic",
        "waiting",
    )

    def __init__(self, topic: str, options: FeedOptions, shard: int, group: str | None) -> None:
        self.topic = topic
        self.options = options
        self.shard = shard
        self.group = group
        self.number = 0
        self.epoch = ""  # of the topic, once the feed is established
        self.position: int | None = None  # start of the next page; None: the feed is not established
        self.is_at_head = False  # the last page reached the head
        self.live: dict[Subscription, None] = {}
        self.waiting: dict[Subscription, None] = {}
        self.retry_us = RETRY_US


class Subscription:
    __slots__ = (
        "by_pattern",
        "caught_up_due",
        "cursor",
        "epoch",
        "feed",
        "held",
        "is_new",
        "piece",
        "read",
        "recreated_by",
        "seen",
        "state",
        "topic",
        "watcher",
    )

    def __init__(
        self, watcher: Watcher, topic: str, cursor: int, epoch: str | None, *, by_pattern: bool
    ) -> None:
        self.watcher = watcher
        self.topic = topic
        self.cursor = cursor
        self.epoch = epoch  # of the cursor; None: unknown, the topic's epoch is assumed
        self.by_pattern = by_pattern
        self.state = WAITING
        self.feed: TopicFeed | None = None
        self.is_new = True  # nothing was read since the stream opened
        self.caught_up_due = True  # `caught_up` must be sent when the head is reached
        self.piece: bytes | None = None  # of the event id, cached until the cursor moves
        self.read = 0  # number of the read in progress
        self.held: deque[SharedPage] = deque()  # pages of a group that wait for room
        self.seen = 0  # last position of the group that is known here
        # The name watch that reported a new topic of this name before the deletion of this one was reported.
        self.recreated_by: SharedNameWatch | None = None


class Subscriptions(Protocol):
    """What watchers ask of the fan-out of their process."""

    now_us: Callable[[], int]

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

    def add(
        self, watcher: Watcher, topic: str, cursor: int, epoch: str | None = None, *, by_pattern: bool
    ) -> Subscription:
        """Add a subscription without starting it."""

    def start(self, sub: Subscription, options: FeedOptions, group: str | None) -> None: ...

    def unsubscribe(self, watcher: Watcher, topic: str) -> None: ...

    def watch_names(
        self, watcher: Watcher, pattern: str, options: FeedOptions, group: str | None = None
    ) -> None:
        """Follow all existing and future topics that match the pattern."""

    def unwatch_names(self, watcher: Watcher, pattern: str) -> None: ...

    def drained(self, watcher: Watcher) -> None:
        """The watcher's connection has room again."""

    def close(self, watcher: Watcher) -> None:
        """Remove a watcher."""


class Watcher(ABC):
    """The stream of one client. Subclasses encode pages and events."""

    def __init__(self, fanout: Subscriptions, prefixes: list[str] | None) -> None:
        self.fanout = fanout
        self.prefixes = prefixes
        self.subs: dict[str, Subscription] = {}
        self.behind: dict[Subscription, None] = {}
        self.holding: dict[Subscription, None] = {}  # group members with held pages
        self.reads = 0
        self.name_watches: list[SharedNameWatch] = []
        self.is_closed = False
        self.is_queued = False

    @property
    @abstractmethod
    def is_full(self) -> bool: ...

    @abstractmethod
    def write_page(self, sub: Subscription, page: SharedPage) -> None:
        """Write a page, and move the cursor."""

    @abstractmethod
    def write_caught_up(self, sub: Subscription, head_seq: int) -> None: ...

    @abstractmethod
    def write_topic_deleted(self, sub: Subscription) -> None:
        """The topic was deleted."""

    @abstractmethod
    def write_too_many_topics(self, topic: str) -> None:
        """A topic that matches a pattern is not followed, because the watcher has too many topics."""

    @abstractmethod
    def start_of(self, topic: str) -> int:
        """The cursor at which a topic found by a pattern starts."""

    def epoch_of(self, topic: str) -> str | None:
        """The epoch of the cursor returned by `start_of`."""
        return None

    def epoch_changed(self, sub: Subscription, before: str | None, gone: Tombstone | None) -> None:  # noqa: B027 - not all keep it
        """The subscription has moved to another epoch. If the client must be told, a page with a tombstone follows."""

    def ping(self) -> None:  # noqa: B027 - not every protocol has one
        """Send a ping, if the protocol has one."""

    @abstractmethod
    def end_with(self, code: str, message: str) -> None:
        """Send an error and close."""


class SharedNameWatch:
    """A name pattern shared by watchers of this front, and the topic names that match."""

    __slots__ = ("names", "numbers", "pattern", "prefixes", "watchers")

    def __init__(self, pattern: str, prefixes: list[str] | None) -> None:
        self.pattern = pattern
        self.prefixes = prefixes
        self.names: dict[str, None] = {}
        self.watchers: dict[Watcher, tuple[FeedOptions, str | None]] = {}
        self.numbers: dict[int, int] = {}  # of the WATCH_NAMES requests, by shard
