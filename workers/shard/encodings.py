"""The encodings of clients at a shard, and the codec of requests between workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from topics.engine.commands import consumers as con
from topics.engine.commands import forwards as fwd
from topics.engine.runtime.boundary import ShardEngine
from topics.link import wire
from topics.protocols.encoding import Encoding, Read, Steps
from topics.protocols.encodings import ENCODINGS
from workers.forward.messages import encode_step_done, read_copies, read_step
from workers.forward.outbox import read_dead_letters


class ShardFacts:
    """What encodings ask of this shard."""

    def __init__(self, engine: ShardEngine) -> None:
        self._engine = engine
        self.has_topic = engine.stats.has_topic  # asked for every write

    @property
    def now_ms(self) -> int:
        return self._engine.stats.now_ms

    def track_synced_head(self, topic: str) -> None:
        reads = self._engine.standing_reads
        reads.track_synced_head(reads.follow(topic))

    def is_headers_only(self, result: con.Claimed) -> bool:
        return self._engine.stats.is_headers_only(result.topic, result.consumer)

    def is_synced_class(self, topic: str) -> bool:
        """Others wait for a sync only now and then, such as when a topic is created."""
        return self._engine.stats.is_fsync(topic)


def shard_encodings(facts: ShardFacts) -> dict[int, Encoding]:
    return {number: make(facts) for number, make in ENCODINGS.items()}


class BetweenWorkers:
    """Requests of other workers that the engine executes, in msgpack."""

    read: Mapping[int, Callable[[str, wire.Request, wire.Args], Read]] = {
        wire.DEAD_LETTERS: lambda t, r, a: (read_dead_letters(t, r.body), None),
        wire.COPIES: lambda t, r, a: (fwd.TakeCopies(t, read_copies(r.body)), None),
        wire.FORWARD_STEP: lambda t, r, a: (read_step(r.body), None),
    }
    read_large: Mapping[int, Callable[[str, wire.Request, wire.Args], Steps]] = {}

    def render(
        self, request: wire.Request, result: object, options: Any, total_ms: float, sync_ms: float
    ) -> wire.Result:
        match result:
            case con.DeadLettersTaken() | fwd.CopiesTaken():
                return wire.OK, wire.MSGPACK, b"", msgspec.msgpack.encode(result)
            case fwd.InflowOpened() | fwd.InflowClosed() | fwd.OutflowOpened() | fwd.OutflowClosed():
                return wire.OK, wire.MSGPACK, b"", encode_step_done(result)
        raise AssertionError(f"no reply format for {type(result)}")
