"""Those who watch through a front, and what is known of each. What happens to them is `router.watch.fanout`'s.

    Watcher   one client's stream: an event stream or a WebSocket
    Sub       one topic of one watcher, and how far that watcher has come in it
    Feed      one topic as the shard feeds it to this front, shared by all subs with the same options

A sub is in one of these states.

    WAITING   the feed is not there yet (its shard is starting)
    BEHIND    to be read for, as soon as the watcher has room
    READING   a read is under way
    LIVE      takes the feed's pages
    ENDED     nothing more comes of this topic
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from topics.engine.commands.topics import Tombstone
from topics.link.watch import FeedOptions, FeedPage

if TYPE_CHECKING:
    from router.watch.fanout import Fanout

RETRY_US = 50_000  # until a shard that could not answer is asked again

WAITING, BEHIND, READING, LIVE, ENDED = "waiting", "behind", "reading", "live", "ended"


class SharedPage:
    """A page as watchers take it. Texts that several of them get are made once."""

    __slots__ = (
        "after_gap",  # where the records begin: from the page's own beginning, or behind the gap
        "caught_up",
        "count",
        "head_seq",
        "records",
        "texts",
        "to_seq",
        "tombstone",
        "topic",
    )

    def __init__(self, topic: bytes, page: FeedPage, records: bytes) -> None:
        self.topic = topic
        gone: Tombstone | None = page.tombstone
        if gone is not None:
            # Of a topic that was made again, or whose head went back, records come that lie below the end of the gap.
            self.after_gap = gone.earliest_seq - 1
        else:
            self.after_gap = page.from_seq
        self.to_seq, self.head_seq = page.to_seq, page.head_seq
        self.count = page.count
        self.caught_up = page.caught_up
        self.tombstone = gone
        self.records = records
        self.texts: dict[bytes, bytes] = {}


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
        self.epoch = ""  # of the topic, once it is followed
        self.position: int | None = None  # where the next page begins; None: it is not followed yet
        self.is_at_head = False  # there was nothing more when its last page was read
        self.live: dict[Subscription, None] = {}
        self.waiting: dict[Subscription, None] = {}
        self.retry_us = RETRY_US


class Subscription:
    __slots__ = (
        "by_pattern",
        "cursor",
        "epoch",
        "feed",
        "fresh",
        "held",
        "owes_caught_up",
        "piece",
        "read",
        "renewed",
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
        self.epoch = epoch  # that the cursor is of; None: it is not known, and that of the topic is taken
        self.by_pattern = by_pattern
        self.state = WAITING
        self.feed: TopicFeed | None = None
        self.fresh = True  # nothing was read since the stream opened
        self.owes_caught_up = True
        self.piece: bytes | None = None  # of the event id, while the cursor stays
        self.read = 0  # number of the read that is under way
        self.held: deque[SharedPage] = deque()  # pages of a group for which there was no room
        self.seen = 0  # where it knows its group to have been: what it was dealt last
        self.renewed: NameWatchShare | None = (
            None  # has found a new topic of this name before this one was gone
        )


class Watcher(ABC):
    """One client's stream. Subclasses say how news are written."""

    def __init__(self, fanout: Fanout, prefixes: list[str] | None) -> None:
        self.fanout = fanout
        self.prefixes = prefixes
        self.subs: dict[str, Subscription] = {}
        self.behind: dict[Subscription, None] = {}
        self.holding: dict[Subscription, None] = {}  # members of groups with pages that wait for room
        self.reads = 0
        self.look_outs: list[NameWatchShare] = []
        self.is_closed = False
        self.is_starved = False

    @property
    @abstractmethod
    def is_full(self) -> bool: ...

    @abstractmethod
    def take(self, sub: Subscription, news: SharedPage) -> None:
        """Write a page. The cursor moves with it."""

    @abstractmethod
    def tell_caught_up(self, sub: Subscription, head_seq: int) -> None: ...

    @abstractmethod
    def tell_gone(self, sub: Subscription) -> None:
        """The topic was deleted."""

    @abstractmethod
    def tell_too_many(self, topic: str) -> None:
        """A topic that matches a pattern cannot be followed: there are too many."""

    @abstractmethod
    def start_of(self, topic: str) -> int:
        """Where to begin in a topic that a pattern has found."""

    def epoch_of(self, topic: str) -> str | None:
        """Of the cursor that `start_of` gives."""
        return None

    def has_epoch(self, sub: Subscription, before: str | None, gone: Tombstone | None) -> None:  # noqa: B027 - not all keep it
        """The sub has come to another epoch; the page that tells of it, if it has to be told, follows."""

    def ping(self) -> None:  # noqa: B027 - not every protocol has one
        """A sign of life, where the protocol has one of its own."""

    @abstractmethod
    def end_with(self, code: str, message: str) -> None:
        """Close it, and say why."""


class NameWatchShare:
    """A pattern that watchers of this front share, and the names it has found."""

    __slots__ = ("names", "numbers", "pattern", "prefixes", "watchers")

    def __init__(self, pattern: str, prefixes: list[str] | None) -> None:
        self.pattern = pattern
        self.prefixes = prefixes
        self.names: dict[str, None] = {}
        self.watchers: dict[Watcher, tuple[FeedOptions, str | None]] = {}
        self.numbers: dict[int, int] = {}  # by shard
