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
    topic_published: list[Callable[[str], None]] = field(default_factory=list)  # a name that readers now see
    topic_removed: list[Callable[[TopicLog], None]] = field(default_factory=list)  # readers no longer see it
    # After the change: the config before it, and the op that will publish it, to which more can be added.
    config_changed: list[Callable[[TopicLog, TopicConfig, Op], None]] = field(default_factory=list)
    state_requested: list[Callable[[TopicLog, cmd.TopicState], None]] = field(
        default_factory=list
    )  # to be filled in
    copies_readable: list[Callable[[TopicLog, int], None]] = field(
        default_factory=list
    )  # for a forward, by its uid
    checked: list[Callable[[], None]] = field(default_factory=list)  # asserts a feature's own invariants
    staged_discarded: list[Callable[[], None]] = field(default_factory=list)  # after a failed commit
