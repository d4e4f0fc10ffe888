"""Where a tail stands, and what it asks of a server that knows nothing of it.

    begin ── POST /v0/watch ──► stream ── breaks ──► wait ──► stream, from the last event's id
      ▲                                                        │
      └──────────── the session is gone: from the cursors ─────┘

The cursors are kept here as well, beside those of the session: a session may be forgotten while nobody is connected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from topics.watching import WATCH_TOPICS_MAX


@dataclass(frozen=True, slots=True)
class Wanted:
    names: tuple[str, ...]  # of topics, and patterns
    from_seq: int | None = None  # None: only what comes from now on
    group: str | None = None
    limit: int = 0
    include_tags: bool = False


class _Start(msgspec.Struct):
    from_seq: int


class _Made(msgspec.Struct):
    stream_url: str
    topics: dict[str, _Start]


@dataclass(slots=True)
class Beginning:
    """What a new session means: topics that are no more, and how many could not be asked for by name."""

    gone: list[str]
    unnamed: int


class Following:
    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._patterns = [name for name in wanted.names if is_pattern(name)]
        self._cursors: dict[str, int] = {}  # those that moved last are last
        self.has_begun = False
        self.stream_path: str | None = None  # None: there is no session

    @property
    def topics(self) -> int:
        return len(self._cursors)

    @property
    def is_over(self) -> bool:
        """Nothing is left to follow, and nothing can come."""
        return self.has_begun and not self._patterns and not self._cursors

    def body(self) -> dict[str, Any]:
        """A request for a session that goes on from here."""
        wanted = self._wanted
        body: dict[str, Any] = {"topics": self._later() if self.has_begun else self._at_first()}
        if wanted.group is not None:
            body["group"] = wanted.group
        if wanted.limit:
            body["limit"] = wanted.limit
        if wanted.include_tags:
            body["include_tags"] = True
        return body

    def _at_first(self) -> dict[str, Any]:
        start = {"tail": True} if self._wanted.from_seq is None else {"from_seq": self._wanted.from_seq}
        return dict.fromkeys(self._wanted.names, start)

    def _later(self) -> dict[str, Any]:
        # A topic that matches and is not known yet is new: all of it is wanted. Unless there are more known ones
        # than a request can name: then those would be repeated from their first record.
        named = list(self._cursors.items())[-self._names_max :]
        start = {"tail": True} if len(named) < len(self._cursors) else {"from_seq": 0}
        return dict.fromkeys(self._patterns, start) | {topic: {"from_seq": cursor} for topic, cursor in named}

    @property
    def _names_max(self) -> int:
        return max(1, WATCH_TOPICS_MAX - len(self._patterns))

    def begin(self, answer: bytes) -> Beginning:
        """A session was made. msgspec.DecodeError: that was no topics server."""
        made = msgspec.json.decode(answer, type=_Made)
        unnamed = max(0, len(self._cursors) - self._names_max) if self.has_begun else 0
        gone = [topic for topic in self._cursors if topic not in made.topics]
        self._cursors = {topic: start.from_seq for topic, start in made.topics.items()}
        self.has_begun, self.stream_path = True, made.stream_url
        return Beginning(gone, unnamed)

    def moved(self, topic: str, cursor: int) -> None:
        self._cursors.pop(topic, None)
        self._cursors[topic] = cursor

    def ended(self, topic: str) -> None:
        self._cursors.pop(topic, None)


def is_pattern(name: str) -> bool:
    tokens = name.split(".")
    return "*" in tokens or tokens[-1] == ">"
