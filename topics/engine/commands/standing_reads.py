"""Standing reads: reads that a shell leaves in the engine until there is something new.

A feed re-registers one after each of its pages. It is no command, because nothing is executed while there is nothing new.
"""

from __future__ import annotations

from typing import Protocol

from topics.engine.commands.topics import Diff


class FollowedView(Protocol):
    @property
    def head(self) -> int: ...

    @property
    def first_seq(self) -> int: ...


class FollowedTopic(Protocol):
    """A topic as its readers see it."""

    @property
    def id(self) -> int: ...

    @property
    def epoch(self) -> str: ...

    @property
    def view(self) -> FollowedView: ...

    @property
    def synced_head(self) -> int:
        """The head that no crash can undo, if it is tracked."""

    @property
    def is_head_tracked(self) -> bool: ...

    def cursor_of(self, epoch: str, cursor: int) -> int | None:
        """A cursor of some epoch as one of the current epoch; None: it belongs to another topic."""


class StandingReads(Protocol):
    def follow(self, name: str) -> FollowedTopic:
        """A published topic, with its deferred replay applied. Raises if there is none."""

    def track_synced_head(self, topic: FollowedTopic) -> None:
        """From now on `synced_head` is known."""

    def followed(self, name: str) -> FollowedTopic | None:
        """A published topic; None: there is none."""

    def park_standing(self, token: object, command: Diff, topic: FollowedTopic) -> None:
        """Leave a read: it is answered with the token once there is something after its `from_seq`."""

    def withdraw_standing(self, token: object, name: str) -> None:
        """Take it back, without a reply."""

    def note_read(self, name: str) -> None:
        """Records of the topic were sent to a reader."""
