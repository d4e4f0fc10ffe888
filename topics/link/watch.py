"""Messages between fronts and shards about watching: feeds of topics, name patterns, watch sessions.

    front → shard   FIND          which of these topics exist, and which names match these patterns
                    FOLLOW        open a feed of new records of a topic; the request id becomes its number
                    WATCH_NAMES   report topics that match this pattern, now and when they are created
                    FEED_ACK      one page of the feed was delivered; send the next
                    UNFOLLOW      close the feed, or the name watch
                    WATCH_READ    records after a cursor, for a watcher that is not at the feed's position
                    SESSION       create, open or save a watch session
                    STREAM_COUNT  number of streams open at this front
    shard → front   FEED          a page of a feed, or the reply to a WATCH_READ
                    NEW_TOPIC     a topic was created that matches a name watch
                    END_STREAM    the session was opened by another stream: close this one

A feed page is a hint: a watcher uses it if it begins at its own cursor, and does its own read if not.
A feed has at most PAGES_AHEAD pages without a FEED_ACK; records that arrive meanwhile make the next page larger.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec

from topics.engine.commands.topics import Page, Tombstone

PAGES_AHEAD = 2
STREAM_TOPICS_MAX = 10_000  # topics that one stream follows, patterns included
SESSION_TTL_MS = 300_000
# An event id names the cursors of all topics up to this many; beyond it, only those changed since the last save.
ID_TOPICS_MAX = 64

_PAGE = struct.Struct("<QQQQIB")  # from_seq, to_seq, head_seq, earliest_seq, records, caught up
PAGE_BYTES = _PAGE.size


class FeedOptions(msgspec.Struct, frozen=True, array_like=True):
    """What a watcher reads of a topic. Watchers with the same options share a feed."""

    nodes: tuple[str, ...] = ()
    limit: int = 256
    max_bytes: int = 262_144
    include_data: bool = True
    include_meta: bool = True
    include_tags: bool = False
    strong: bool = False  # only synced records


class Follow(msgspec.Struct, frozen=True, array_like=True):
    """With a `group`, the topic's shard sends each record to one member; a new group begins at `from_seq`.

    `seen` is the latest position of the group known to the member: a restarted shard may know an older one. Both
    are positions in `epoch`, if it is set.
    """

    options: FeedOptions
    group: str | None = None
    from_seq: int = 0
    seen: int = 0
    epoch: str | None = None


class Find(msgspec.Struct, frozen=True, array_like=True):
    names: list[str] = []
    patterns: list[str] = []
    prefixes: list[str] | None = None  # allowed by the API key; restricts the patterns


class FoundTopic(msgspec.Struct, frozen=True, array_like=True):
    """A topic that exists."""

    name: str
    head_seq: int
    earliest_seq: int
    patterns: list[int] = []  # indexes of the patterns that it matches
    epoch: str = ""


class NameWatch(msgspec.Struct, frozen=True, array_like=True):
    pattern: str
    prefixes: list[str] | None = None


class WatchRead(msgspec.Struct, frozen=True, array_like=True):
    options: FeedOptions
    from_seq: int
    epoch: str | None = None  # of the cursor


class FeedPage(msgspec.Struct, array_like=True):
    """The fields of a FEED, whose body is the records as JSON objects separated by commas.

    `epoch` is set in replies to FOLLOW and WATCH_READ. It does not change during the life of a feed.
    """

    from_seq: int
    to_seq: int
    head_seq: int
    earliest_seq: int
    count: int
    caught_up: bool
    tombstone: Tombstone | None = None
    epoch: str = ""


def page_of(page: Page, from_seq: int) -> FeedPage:
    """The fields for a page of records that begins at this cursor."""
    to_seq = page.next_from_seq
    return FeedPage(
        from_seq,
        to_seq,
        page.head_seq,
        page.earliest_seq,
        len(page.seqs),
        to_seq >= page.head_seq,
        page.tombstone,
    )


# -- sessions ------------------------------------------------------------------------------------------------


class SessionSpec(msgspec.Struct, frozen=True, array_like=True):
    """The parameters of a session, fixed at its creation."""

    options: FeedOptions
    heartbeat_ms: int
    names: list[str] = []
    patterns: list[str] = []
    group: str | None = None
    include_epoch: bool = False  # in events


class EpochChange(msgspec.Struct, frozen=True, array_like=True):
    """A stream has reached another epoch of a topic and sent an event about it. A client that has missed the event
    reconnects with a cursor of the epoch `before`, between `low` and `high`.
    """

    epoch: str
    before: str = ""  # empty: no event was needed
    low: int = 0
    high: int = 0

    def following(self, earlier: EpochChange | None) -> EpochChange:
        """Both changes merged into one that covers the cursors of both."""
        if earlier is None or not earlier.before:
            return self
        if not self.before:
            return msgspec.structs.replace(earlier, epoch=self.epoch)
        low, high = min(self.low, earlier.low), max(self.high, earlier.high)
        return EpochChange(self.epoch, earlier.before, low, high)


class CreateSession(msgspec.Struct, frozen=True, array_like=True, tag="create"):
    wid: str
    key: bytes  # digest of the API key that created it; empty: authentication was off
    spec: SessionSpec
    cursors: dict[str, int]
    epochs: dict[str, str] = {}


class OpenSession(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """`stream` is the front's number for the new stream; 0: only check whether it could be opened."""

    wid: str
    key: bytes
    stream: int
    last_event_id: str = ""


class SaveSession(msgspec.Struct, frozen=True, array_like=True, tag="save"):
    """Cursors that have moved since the last save; `closes`: the stream has ended."""

    wid: str
    stream: int
    number: int  # of the save, one more than the last
    cursors: dict[str, int]
    closes: bool = False
    epochs: dict[str, EpochChange] = {}  # for some of these topics


SessionRequest: TypeAlias = CreateSession | OpenSession | SaveSession


class OpenedSession(msgspec.Struct, frozen=True, array_like=True):
    spec: SessionSpec
    cursors: dict[str, int]
    save: int  # number of the last save: event ids that name only changed cursors refer to it
    epochs: dict[str, str] = {}  # of topics whose epoch is known
    told: dict[str, EpochChange] = {}  # changes that were sent to the client; event ids repeat them


encode = msgspec.msgpack.encode


def page_fields(page: FeedPage) -> bytes:
    fields = _PAGE.pack(
        page.from_seq, page.to_seq, page.head_seq, page.earliest_seq, page.count, page.caught_up
    )
    if page.tombstone is None and not page.epoch:
        return fields
    return fields + encode((_tombstone(page.tombstone), page.epoch))


def _tombstone(gone: Tombstone | None) -> tuple[int, int, str, int, int, int] | None:
    if gone is None:
        return None
    return (gone.gap_from, gone.gap_to, gone.reason, gone.missed_estimate, gone.earliest_seq, gone.head_seq)


def read_page_fields(fields: bytes) -> FeedPage:
    from_seq, to_seq, head_seq, earliest_seq, count, caught_up = _PAGE.unpack_from(fields)
    page = FeedPage(from_seq, to_seq, head_seq, earliest_seq, count, bool(caught_up))
    if len(fields) > PAGE_BYTES:
        gone, page.epoch = msgspec.msgpack.decode(fields[PAGE_BYTES:])
        page.tombstone = Tombstone(*gone) if gone is not None else None
    return page
