"""Types of the client: responses as `topics.api.responses` declares them, events of watches, and undecoded forms.

Unknown fields are ignored.
"""

from __future__ import annotations

import binascii
from typing import Any

from msgspec import Raw, Struct, field

from topics.api.config import ConsumerOptions, TopicOptions
from topics.api.config import ConsumerSettings as ConsumerConfig
from topics.api.config import TopicSettings as TopicConfig
from topics.api.responses.consumers import (
    Claimed,
    Consumer,
    ConsumerDeleted,
    ConsumerList,
    ConsumerReset,
    Job,
    SettledPart,
)
from topics.api.responses.forwards import (
    Router,
    RouterDeleted,
    RouterList,
    RouterRow,
)
from topics.api.responses.records import (
    Deleted,
    DeletedRange,
    DeletedRanges,
    Health,
    LastRecords,
    Page,
    QueueState,
    Readiness,
    Record,
    TagCount,
    TagList,
    Tombstone,
    Topic,
    TopicDeleted,
    TopicList,
    TopicPut,
    TopicRow,
    WatchedTopic,
    WatchMade,
    Written,
)
from topics.api.responses.transactions import (
    ChunkStaged,
    Transaction,
    TransactionAborted,
)

__all__ = [
    "CaughtUp",
    "ChunkStaged",
    "Claimed",
    "Consumer",
    "ConsumerConfig",
    "ConsumerDeleted",
    "ConsumerList",
    "ConsumerOptions",
    "ConsumerReset",
    "Deleted",
    "DeletedRange",
    "DeletedRanges",
    "Health",
    "Interrupted",
    "Job",
    "LastRecords",
    "Notice",
    "Page",
    "QueueState",
    "Readiness",
    "Record",
    "Records",
    "Resumed",
    "Router",
    "RouterDeleted",
    "RouterList",
    "RouterRow",
    "Settled",
    "SettledPart",
    "TagCount",
    "TagList",
    "Tombstone",
    "Topic",
    "TopicConfig",
    "TopicDeleted",
    "TopicEnded",
    "TopicList",
    "TopicOptions",
    "TopicPut",
    "TopicRow",
    "Transaction",
    "TransactionAborted",
    "WatchMade",
    "WatchedTopic",
    "Written",
]


class Settled(Struct, kw_only=True):
    """The result of ack, nack, extend or term."""

    done: int = 0  # number of jobs
    skipped: list[int] = []  # seqs already settled, or no longer leased to this node
    deadlines: dict[int, int] = {}  # extend only, by seq
    ready: int = 0
    in_flight: int = 0


# -- events of watches -------------------------------------------------------------------------------------


class Records(Struct, kw_only=True):
    """Event of a watch: records of one topic. They move the cursor from `from_seq` to `to_seq`."""

    topic: str
    records: list[Record]
    from_seq: int
    to_seq: int
    head_seq: int
    epoch: str = ""


class CaughtUp(Struct, kw_only=True):
    """Event of a watch: all records of this topic so far have been delivered."""

    topic: str
    head_seq: int


class TopicEnded(Struct, kw_only=True):
    """Event of a watch: the topic was deleted."""

    topic: str


class Interrupted(Struct, kw_only=True):
    """Event of a watch: the connection was lost; the client tries to reconnect."""

    reason: str


class Resumed(Struct, kw_only=True):
    """Event of a watch: reconnected, and continuing where it stopped."""


class Notice(Struct, kw_only=True):
    """Event of a watch: a warning of the server, for example that it cannot follow any more topics."""

    code: int | str
    message: str = ""


def fill_in(topic: str, records: list[Any]) -> None:
    """Fill in the topic of decoded records, and decode binary data."""
    for record in records:
        record.topic = topic
        if record.encoding == "base64" and isinstance(record.data, str):
            record.data = binascii.a2b_base64(record.data)


# -- undecoded data ----------------------------------------------------------------------------------------

# With `Client(raw=True)` the data of records stays the JSON text that the server sent. Binary data stays base64 text,
# as `encoding` says.

NO_DATA = Raw(b"null")


class RawRecord(Record, kw_only=True):
    data: Raw = NO_DATA


class RawJob(Job, kw_only=True):
    data: Raw = NO_DATA


# Lists are invariant, but these are only filled by the decoder and read.
class RawPage(Page, kw_only=True):
    records: list[RawRecord]  # type: ignore[assignment]


class RawLastRecords(LastRecords, kw_only=True):
    records: list[RawRecord]  # type: ignore[assignment]


class RawRecords(Records, kw_only=True):
    records: list[RawRecord]  # type: ignore[assignment]


class RawClaimed(Claimed, kw_only=True):
    jobs: list[RawJob] = field(name="claimed")  # type: ignore[assignment]


RAW_TYPES: dict[Any, Any] = {
    Job: RawJob,
    Page: RawPage,
    LastRecords: RawLastRecords,
    Records: RawRecords,
    Claimed: RawClaimed,
}
