"""Copies of forwards, as the engine and the service that sends them see each other.

The service runs between turns and is called in them, for each topic that is due. It works on the topics themselves, because a
command for each batch would cost more than the batch: a source with a thousand dests is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from topics.api.config import TopicConfig
from topics.engine.commands.forwards import Copies, Forward


class SourceView(Protocol):
    """The published state of a source topic."""

    @property
    def head(self) -> int: ...

    @property
    def config(self) -> TopicConfig: ...


class SourceTopic(Protocol):
    @property
    def id(self) -> int: ...

    @property
    def dropped(self) -> bool: ...

    @property
    def outflows(self) -> tuple[int, ...]:
        """The uids of its forwards; another object after each change."""

    @property
    def view(self) -> SourceView: ...

    @property
    def last_read_ts(self) -> int: ...

    @property
    def last_touch(self) -> int: ...


class CopySource(Protocol):
    """What the service asks of the engine."""

    def due_topics(self) -> Sequence[SourceTopic]:
        """Topics with new records to copy."""

    @property
    def has_due(self) -> bool: ...

    def set_due(self, topic: SourceTopic) -> None:
        """There is more to copy of this topic: call the copier again."""

    def expedite(self, topic: SourceTopic) -> None:
        """A read waits for copies of this topic: deliver them first."""

    def forward(self, uid: int) -> Forward | None:
        """A forward with sources on this shard."""

    def empty_copies(self, topic: SourceTopic, forward: Forward, after: int) -> Copies:
        """A batch without records, which asks the dest for its mark."""

    def copies_after(
        self, topic: SourceTopic, forward: Forward, after: int, count: int, max_bytes: int
    ) -> Copies | None:
        """The records that a forward copies after a seq; None: there are none yet."""


class Copier(Protocol):
    """What the engine asks of the service, in a turn."""

    def has_new_copies(self, topic: SourceTopic) -> bool:
        """Whether a topic with new records has copies to send."""

    def send_copies(self, topic: SourceTopic, room: int) -> int:
        """Send copies of a topic; returns the delivery cost in bytes. If there is more, it calls `set_due`."""

    def resume_copies(self, topic: SourceTopic, uid: int) -> None:
        """Records that a forward had to wait for can be read now: the topic is due again."""
