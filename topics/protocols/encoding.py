"""What an encoding of requests and replies implements. A shard uses the one that a request names, next to its engine.

`Codec` is what each request needs that the engine executes, `Encoding` what clients need besides. `topics/protocols/encodings.py`
lists those of clients; between workers there is another codec (`workers/shard/encodings.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol, TypeAlias

from topics.engine.commands import consumers as con
from topics.engine.commands import topics as cmd
from topics.link import wire
from topics.link.rules import RuleSpec
from topics.link.watch import FeedOptions

Read: TypeAlias = tuple[cmd.Command, Any]  # the command, and options of its reply
Steps: TypeAlias = Generator[None, None, Read]


class Shard(Protocol):
    """What an encoding may ask of the shard."""

    @property
    def now_ms(self) -> int: ...

    def has_topic(self, topic: str, /) -> bool:
        """Whether a topic exists, including those that this turn has created."""

    def track_synced_head(self, topic: str) -> None:
        """A read of this topic will want only synced records."""

    def is_headers_only(self, result: con.Claimed) -> bool:
        """Whether the consumer gets no data."""

    def is_synced_class(self, topic: str) -> bool:
        """Whether writes wait for a sync by their class."""


class Codec(Protocol):
    @property
    def read(self) -> Mapping[int, Callable[[str, wire.Request, wire.Args], Read]]:
        """By operation: body to command."""

    @property
    def read_large(self) -> Mapping[int, Callable[[str, wire.Request, wire.Args], Steps]]:
        """By operation: a large body to a command, in steps. Large bodies of other operations are read at once."""

    def render(
        self, request: wire.Request, result: object, options: Any, total_ms: float, sync_ms: float
    ) -> wire.Result: ...


class Encoding(Codec, Protocol):
    def read_rule(self, request: wire.Request, args: wire.Args) -> RuleSpec:
        """The rule of a PUT_FORWARD."""

    def appended(
        self,
        result: cmd.Appended,
        *,
        with_seqs: bool,
        total_ms: float,
        append_ms: float,
        sync_ms: float,
        more: bytes = b"",
    ) -> wire.Result:
        """The reply to a write, without a call of `render`: this is the hot path."""

    def marked(self, request: wire.Request, result: wire.Result) -> wire.Result:
        """The reply, with the marks of its request (`wire.LATE`, `wire.IGNORED`)."""

    def feed_records(self, page: cmd.Page, options: FeedOptions) -> bytes:
        """The records of a feed's page."""

    def job_events(self, result: con.Claimed, *, headers_only: bool = False) -> bytes:
        """A push to a job stream: jobs, and a tombstone; empty if there is nothing to send."""
