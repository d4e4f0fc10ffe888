"""What admission and endpoints need of the process they run in. Its shell passes in the implementations.

`Shards` is the way to the records. A front implements it over the link (`router/pending.py`); a worker that serves clients
itself can pass requests to its own engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from topics.api.api_keys import ApiKey
from topics.link import wire
from topics.link.control_channel import Outage
from topics.link.watch import SaveSession
from topics.protocols.watchers import Subscriptions, Watcher

if TYPE_CHECKING:
    from topics.protocols.http.event_stream import EventStream
    from topics.protocols.http.job_stream import JobEventStream

# Calls a function after a number of microseconds.
Later: TypeAlias = Callable[[int, Callable[[], None]], object]
OnReply: TypeAlias = Callable[[wire.Reply], None]


class Shards(Protocol):
    """Requests to the shards of the server."""

    count: int
    outages: list[Outage]  # failing processes
    refused_full: int  # requests refused because too many were pending

    def ask(
        self,
        shard: int,
        op: int,
        flags: int,
        topic: bytes,
        args: bytes,
        body: wire.Buffer,
        received_us: int,
        on_reply: OnReply,
        encoding: int = wire.JSON,
    ) -> int:
        """Send a request, whose body and reply have this encoding. `on_reply` is called exactly once. Returns the number of the request, 0 if it was refused at once."""

    def tell(self, shard: int, op: int, number: int, topic: bytes = b"", args: bytes = b"") -> None:
        """Send a message without a reply, about the request or stream with that number."""

    def cancel(self, shard: int, number: int) -> None:
        """Drop a pending read whose client has disconnected."""

    def end_polls(self, before_us: int) -> None:
        """End long polls that were received before a time, because the server is stopping."""


class Streams(Protocol):
    """The open streams of this process: connection caps, heartbeats, saving of cursors."""

    count: int
    now_us: Callable[[], int]
    stalled: dict[JobEventStream, int]  # streams whose clients do not read, and since when

    @property
    def fanout(self) -> Subscriptions: ...

    def reserve(self, key: ApiKey | None, *, replacing: str = "") -> Callable[[], None] | None:
        """Reserve a slot for one stream. Returns a function that releases it; None if a cap is reached."""

    def reached_cap(self, key: ApiKey | None) -> tuple[str, int] | None: ...

    def next_number(self) -> int: ...

    def add(self, stream: EventStream) -> None: ...

    def opened(self, stream: EventStream) -> None: ...

    def closed(self, stream: EventStream) -> None: ...

    def mark_unsaved(self, stream: EventStream) -> None: ...

    def save_now(self, stream: EventStream) -> None: ...

    def close_session(self, save: SaveSession) -> None: ...

    def add_job_stream(self, stream: JobEventStream) -> None: ...

    def job_stream_opened(self, stream: JobEventStream) -> None: ...

    def job_stream_closed(self, stream: JobEventStream) -> None: ...

    def ack_jobs(self, stream: JobEventStream) -> None: ...

    def close_job_stream(self, shard: int, number: int) -> None: ...

    def socket_opened(self, socket: Watcher) -> None: ...

    def socket_closed(self, socket: Watcher) -> None: ...


class Offload(Protocol):
    """Runs a function on another thread, because compression would block the event loop. `done` is called on the event loop
    with its result, None if it failed."""

    def __call__(
        self, work: Callable[[], Any], done: Callable[[Any], None], size: int = 0, *, is_large: bool = False
    ) -> bool:
        """`size`: request bytes held meanwhile. Returns False if the queue is full."""
