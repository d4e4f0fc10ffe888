"""Events by which the features of a shard notify each other without importing each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from topics.api.config import TopicConfig
from topics.engine.commands import topics as cmd
from topics.engine.topic.log import Op, TopicLog


@dataclass(slots=True)
class ShardEvents:
    """Callbacks by event, called in the order in which they were added."""

    topic_created: list[Callable[[TopicLog], None]] = field(default_factory=list)  # in the staged state
    # The engine has recovered. The number is different at every start.
    recovered: list[Callable[[int], None]] = field(default_factory=list)
    # A topic is completely replayed: at the start, or later if its replay was deferred.
    topic_recovered: list[Callable[[TopicLog], None]] = field(default_factory=list)
    # An op was applied to the view of a topic with `is_followed`. Before the reply.
    published: list[Callable[[TopicLog, Op], None]] = field(default_factory=list)
    synced: list[Callable[[int], None]] = field(default_factory=list)  # the log, up to this lsn
    # In the staged state, with the op that will publish it, to which more can be added.
    topic_dropped: list[Callable[[TopicLog, Op], None]] = field(default_factory=list)
    topic_removed: list[Callable[[TopicLog], object]] = field(
        default_factory=list
    )  # readers no longer see it
    # After the change: the config before it, and the op that will publish it, to which more can be added.
    config_changed: list[Callable[[TopicLog, TopicConfig, Op], None]] = field(default_factory=list)
    state_requested: list[Callable[[TopicLog, cmd.TopicState], None]] = field(
        default_factory=list
    )  # to be filled in
    copies_readable: list[Callable[[TopicLog, int], None]] = field(
        default_factory=list
    )  # for a forward, by its uid
    # Replay: records of these seqs, first and last, were never logged.
    records_missing: list[Callable[[TopicLog, int, int], None]] = field(default_factory=list)
    copies_awaited: list[Callable[[TopicLog], None]] = field(default_factory=list)  # by a reader of a dest
    checked: list[Callable[[], None]] = field(default_factory=list)  # asserts a feature's own invariants
    # A commit failed: the shard is read-only for this reason, and the staged state is that of the readers.
    failed: list[Callable[[str], None]] = field(default_factory=list)
