"""Commands on topics and records, their results, and the unions of all commands and results.

A request is a `(token, command)` pair; the reply repeats the token with a result or a TopicsError. There is one object per
request, with columns for its records, and none per record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from topics.api.config import TopicConfig
from topics.api.errors import TopicsError
from topics.engine.commands import consumers as consumer_commands
from topics.engine.commands import forwards as forward_commands
from topics.engine.commands import merges as merge_commands
from topics.engine.commands import transactions as transaction_commands
from topics.engine.commands.page import FramePage as FramePage
from topics.engine.commands.page import Page as Page
from topics.engine.commands.page import Tombstone as Tombstone
from topics.engine.commands.records import Records as Records
from topics.engine.core.subjects import TagFilter, TagMatch


@dataclass(slots=True)
class Append:
    topic: str
    records: Records
    idempotency_key: bytes | None = None
    create: bool | None = None
    config: TopicConfig | None = None
    if_last_seq: int | None = None
    if_tag_last_seq: tuple[bytes, int] | None = None
    may_configure: bool = True  # whether it may create a topic with its own config
    include_epoch: bool = False


@dataclass(slots=True)
class Appended:
    topic: str
    first_seq: int
    count: int
    head_seq: int
    created: bool = False
    deduped: bool = False
    synced: bool = False  # the ack waited for a sync
    epoch: str = ""  # of the topic, if requested


@dataclass(slots=True)
class Skip:
    """Use up `count` seqs without records."""

    topic: str
    count: int


@dataclass(slots=True)
class Diff:
    """Read the records after `from_seq` that are not older than `from_ts`. With `frames` the result is a FramePage."""

    topic: str
    from_seq: int = 0
    limit: int = 256
    nodes: tuple[bytes, ...] = ()
    max_bytes: int = 0
    wait_ms: int = 0
    touch: bool = True
    match: TagMatch | TagFilter | None = None
    from_ts: int = 0
    frames: bool = False
    standing: bool = False  # waits without limit
    synced: bool = False  # only records that no crash can undo; see Reads.track_synced_head
    epoch: str | None = None  # in which `from_seq` was read; None: the cursor is not checked
    include_epoch: bool = False


@dataclass(slots=True)
class Delete:
    """Delete the records that meet all of the conditions. `keep` spares the newest N (per tag with `match` or `subject`)."""

    topic: str
    before_seq: int | None = None
    match: TagMatch | None = None
    seqs: list[int] | None = None
    keep: int | None = None
    erase: bool = False
    subject: TagMatch | None = None


@dataclass(slots=True)
class Deleted:
    topic: str
    deleted: int
    earliest_seq: int
    head_seq: int
    count: int
    bytes: int


@dataclass(slots=True)
class PutTopic:
    topic: str
    config: TopicConfig


@dataclass(slots=True)
class TopicPut:
    topic: str
    created: bool
    config: TopicConfig


@dataclass(slots=True)
class DropTopic:
    """Drop a topic and the forwards that end with it. Refused if one of them is hidden from a key with these `prefixes`."""

    topic: str
    if_empty: bool = False
    prefixes: tuple[str, ...] | None = None


@dataclass(slots=True)
class TopicDropped:
    topic: str
    deleted: bool
    forwards: list[tuple[int, str]] = field(default_factory=list)  # uid and name of the dropped rules


@dataclass(slots=True)
class State:
    topic: str
    touch: bool = True


@dataclass(slots=True)
class QueueCounts:
    ready: int
    in_flight: int
    dead_lettered: int


@dataclass(slots=True)
class TopicState:
    topic: str
    head_seq: int
    earliest_seq: int
    count: int
    bytes: int
    config: TopicConfig
    last_write_ts: int | None
    last_read_ts: int | None
    epoch: str
    queue: QueueCounts | None = None


@dataclass(slots=True)
class ListTopics:
    """List topics by name. `prefixes` restricts the result further to names that start with one of them; None: all names."""

    prefix: str = ""
    after: str = ""
    limit: int = 100
    prefixes: tuple[str, ...] | None = None
    touch: bool = False


@dataclass(slots=True)
class TopicList:
    """Up to `limit` + 1 rows; the extra row means that there are more."""

    topics: list[TopicState]


@dataclass(slots=True)
class LastByTag:
    """The newest live record of each matching tag (`each`), or the newest of all of them.

    With `each` a page covers up to `limit` tags greater than `after`, and tells whether more follow.
    """

    topic: str
    match: TagMatch
    each: bool = False
    after: bytes = b""
    limit: int = 0
    max_bytes: int = 0


@dataclass(slots=True)
class NextByTag:
    """The first live record at or after `from_seq` whose tag matches."""

    topic: str
    match: TagMatch
    from_seq: int = 0


@dataclass(slots=True)
class RecordsAt:
    """Read the records at these seqs: the second step of LastByTag and NextByTag, which the shard sends to itself.

    It may have to wait, and records may be deleted meanwhile. `command` and the fields after it allow choosing again
    without scanning all tags once more.
    """

    topic: str
    topic_id: int
    seqs: list[int]
    command: LastByTag | NextByTag
    more: bool = False
    tags: list[bytes] = field(default_factory=list)  # of the page, if it has one record per tag
    since: int = 0  # the next seq at the time the tags were scanned


@dataclass(slots=True)
class CountByTag:
    """Live records per matching tag, for up to `limit` tags greater than `after`."""

    topic: str
    match: TagMatch
    after: bytes = b""
    limit: int = 0


@dataclass(slots=True)
class TagCounts:
    topic: str
    counts: list[tuple[bytes, int]] = field(default_factory=list)
    more: bool = False


@dataclass(slots=True)
class ListDeleted:
    """Ranges of deleted seqs after `from_seq`: seqs that are neither live nor announced as lost."""

    topic: str
    from_seq: int = 0
    limit: int = 0


@dataclass(slots=True)
class DeletedRanges:
    """First and last seq of each range. A range that extends beyond `next_from_seq` continues on the next page."""

    topic: str
    ranges: list[tuple[int, int]]
    next_from_seq: int
    head_seq: int
    earliest_seq: int


Change: TypeAlias = (
    Append
    | Skip
    | Delete
    | PutTopic
    | DropTopic
    | consumer_commands.ConsumerChange
    | forward_commands.ForwardChange
    | transaction_commands.TransactionChange
)
Command: TypeAlias = (
    Change
    | Diff
    | State
    | ListTopics
    | LastByTag
    | NextByTag
    | RecordsAt
    | CountByTag
    | ListDeleted
    | consumer_commands.ConsumerQuery
    | merge_commands.MergeCommand
)
Result: TypeAlias = (
    Appended
    | Page
    | FramePage
    | Deleted
    | TopicPut
    | TopicDropped
    | TopicState
    | TopicList
    | TagCounts
    | DeletedRanges
    | consumer_commands.ConsumerResult
    | forward_commands.ForwardResult
    | merge_commands.MergeReply
    | transaction_commands.TransactionResult
    | TopicsError
)
Token: TypeAlias = object
