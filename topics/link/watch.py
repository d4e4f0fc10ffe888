"""What fronts and shards say to each other about watching: who follows which topic, and what is new there.

    front → shard   FIND       which of these topics are there, and which names match these patterns
                    FOLLOW     tell me what is new in this topic; its number is that of the feed
                    LOOK_OUT   tell me of topics that match this pattern, now and later
                    FED        I have passed on a page of that feed; send the next
                    UNFOLLOW   no more of that feed, or of that look-out
                    WATCH_READ what comes after a cursor, for somebody who is not where the feed is
                    SESSION    about the stored cursors of a stream
                    STREAMS    so many streams are open here
    shard → front   FEED       a page of a feed, or the answer to a WATCH_READ
                    NEW_TOPIC  a topic was made that matches a look-out
                    END        that stream is continued elsewhere: close it

A page of a feed is a hint: a watcher takes it if it begins at its own cursor, and reads for itself if not.
A feed has at most PAGES_AHEAD pages that are not FED; what comes meanwhile makes the next one larger.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec

from topics.engine.commands.topics import Tombstone

PAGES_AHEAD = 2
WATCH_TOPICS_MAX = 256  # names and patterns in one request
STREAM_TOPICS_MAX = 10_000  # topics that one stream follows, patterns included
SESSION_TTL_MS = 300_000
ID_TOPICS_MAX = (
    64  # an event id names all topics up to so many; beyond that, what changed since the last save
)

_PAGE = struct.Struct("<QQQQIB")  # from_seq, to_seq, head_seq, earliest_seq, records, caught up
PAGE_BYTES = _PAGE.size


class FeedOptions(msgspec.Struct, frozen=True, array_like=True):
    """What of a topic somebody wants, and how. Watchers with the same options share a feed."""

    nodes: tuple[str, ...] = ()
    limit: int = 256
    max_bytes: int = 262_144
    include_data: bool = True
    include_meta: bool = True
    include_tags: bool = False
    strong: bool = False  # only what is synced


class Follow(msgspec.Struct, frozen=True, array_like=True):
    """With a `group` the topic's shard deals each record to one member; `from_seq` is where a new group begins.

    `seen` is where the member knows the group to have been: a shard that has restarted may not know it so well. Both are of
    this epoch, if it is known.
    """

    options: FeedOptions
    group: str | None = None
    from_seq: int = 0
    seen: int = 0
    epoch: str | None = None


class Find(msgspec.Struct, frozen=True, array_like=True):
    names: list[str] = []
    patterns: list[str] = []
    prefixes: list[str] | None = None  # of the key, for the patterns


class FoundTopic(msgspec.Struct, frozen=True, array_like=True):
    """A topic that is there."""

    name: str
    head_seq: int
    earliest_seq: int
    patterns: list[int] = []  # which of the patterns it matches, by their places
    epoch: str = ""


class NameWatch(msgspec.Struct, frozen=True, array_like=True):
    pattern: str
    prefixes: list[str] | None = None


class WatchRead(msgspec.Struct, frozen=True, array_like=True):
    options: FeedOptions
    from_seq: int
    epoch: str | None = None  # of the cursor


class FeedPage(msgspec.Struct, array_like=True):
    """The head of a FEED: its records are the body, as JSON objects with commas between.

    The answers to a FOLLOW and to a WATCH_READ name the topic's epoch. It lasts as long as the feed.
    """

    from_seq: int
    to_seq: int
    head_seq: int
    earliest_seq: int
    count: int
    caught_up: bool
    tombstone: Tombstone | None = None
    epoch: str = ""


# -- sessions ------------------------------------------------------------------------------------------------


class SessionSpec(msgspec.Struct, frozen=True, array_like=True):
    """What a session is about, as long as it lives."""

    options: FeedOptions
    heartbeat_ms: int
    names: list[str] = []
    patterns: list[str] = []
    group: str | None = None
    include_epoch: bool = False  # events name it


class EpochChange(msgspec.Struct, frozen=True, array_like=True):
    """A stream has come to another epoch of a topic, and told of it. A client may not have heard that: then it comes back with a cursor of
    the epoch `before`, from `low` to `high`.
    """

    epoch: str
    before: str = ""  # empty: nothing had to be told
    low: int = 0
    high: int = 0

    def following(self, earlier: EpochChange | None) -> EpochChange:
        """Both changes as one, which tells no less."""
        if earlier is None or not earlier.before:
            return self
        if not self.before:
            return msgspec.structs.replace(earlier, epoch=self.epoch)
        low, high = min(self.low, earlier.low), max(self.high, earlier.high)
        return EpochChange(self.epoch, earlier.before, low, high)


class CreateSession(msgspec.Struct, frozen=True, array_like=True, tag="create"):
    wid: str
    key: bytes  # digest of the key that made it; empty: authentication was off
    spec: SessionSpec
    cursors: dict[str, int]
    epochs: dict[str, str] = {}


class OpenSession(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """`stream` is the front's number for the stream to be; 0: only look whether it could be opened."""

    wid: str
    key: bytes
    stream: int
    last_event_id: str = ""


class SaveSession(msgspec.Struct, frozen=True, array_like=True, tag="save"):
    """Cursors that have moved since the last save; `closes` when the stream has ended."""

    wid: str
    stream: int
    number: int  # goes on from that of the opened session
    cursors: dict[str, int]
    closes: bool = False
    epochs: dict[str, EpochChange] = {}  # of some of these topics


SessionRequest: TypeAlias = CreateSession | OpenSession | SaveSession


class OpenedSession(msgspec.Struct, frozen=True, array_like=True):
    spec: SessionSpec
    cursors: dict[str, int]
    save: int  # number of the last save: an id that names only changes builds on it
    epochs: dict[str, str] = {}  # of the topics whose epoch is known
    told: dict[str, EpochChange] = {}  # the changes that were told: event ids go on to say so


encode = msgspec.msgpack.encode


def page_head(page: FeedPage) -> bytes:
    head = _PAGE.pack(
        page.from_seq, page.to_seq, page.head_seq, page.earliest_seq, page.count, page.caught_up
    )
    if page.tombstone is None and not page.epoch:
        return head
    return head + encode((_tombstone(page.tombstone), page.epoch))


def _tombstone(gone: Tombstone | None) -> tuple[int, int, str, int, int, int] | None:
    if gone is None:
        return None
    return (gone.gap_from, gone.gap_to, gone.reason, gone.missed_estimate, gone.earliest_seq, gone.head_seq)


def read_page_head(head: bytes) -> FeedPage:
    from_seq, to_seq, head_seq, earliest_seq, count, caught_up = _PAGE.unpack_from(head)
    page = FeedPage(from_seq, to_seq, head_seq, earliest_seq, count, bool(caught_up))
    if len(head) > PAGE_BYTES:
        gone, page.epoch = msgspec.msgpack.decode(head[PAGE_BYTES:])
        page.tombstone = Tombstone(*gone) if gone is not None else None
    return page
