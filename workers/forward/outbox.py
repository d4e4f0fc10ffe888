"""Sending of dead letters: from a topic of this shard to its dead letter topic, on this shard or another.

    due ──▶ TakeDeadLetters at the target's shard ──▶ SettleDeadLetters here
      ▲            │ refused: SettleDeadLetters returns them, and they become ready again
      └── a pause ─┘ outcome unknown: retry

The engine numbers and logs each dead letter before it is sent; the target stores the last number of each source. So a dead
letter may be sent any number of times and is stored once. Nothing here is stored: after a restart the engine has the same
dead letters again.

One batch per source is in flight at a time, in the order of numbers. A refused batch may begin with dead letters that an
earlier attempt of unknown outcome has stored; returning those would duplicate them. So its first one is sent alone: if that
is refused, too, it is not stored, and neither are later ones.

A request that sends dead letters is answered when their topics have stored or refused them, or after WAIT_US: so a client
that reads the dead letter topic next finds them.

Limits: BATCH_RECORDS and BATCH_BYTES per batch, BATCHES_MAX and BYTES_MAX in flight; further sources are queued. HELD_MAX
replies wait, with HELD_BYTES_MAX of records; further ones are sent at once.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from topics.api.errors import InvalidRequest, TopicsError
from topics.api.limits import KIB, MIB
from topics.engine.commands import consumers as cmd
from topics.engine.commands.topics import Command
from topics.engine.core.placement import shard_of
from topics.engine.runtime.boundary import ShardEngine
from topics.link import wire
from workers.peers.links import PeerLinks

logger = logging.getLogger("topics.shard")

BATCH_RECORDS = 64
BATCH_BYTES = 1 * MIB
BATCHES_MAX = 64
BYTES_MAX = 16 * MIB
RECORD_OVERHEAD = 1 * KIB  # of a dead letter besides data and meta, at most: names, tag, node

PAUSE_MS_MIN, PAUSE_MS_MAX = 100, 5_000

WAIT_US = 1_000_000
HELD_MAX = 1_000
HELD_BYTES_MAX = 16 * MIB

# Errors that do not apply to later dead letters; and those of a shard that is starting or read-only, or may have stored
# them all the same.
BAD_RECORD = frozenset(("invalid_request", "batch_too_large", "record_too_large"))
PASSING = wire.UNAVAILABLE | {"internal"}

encode_dead_letters = msgspec.msgpack.Encoder().encode
_decode_dead_letters = msgspec.msgpack.Decoder(list[cmd.DeadLetter]).decode
_decode_taken = msgspec.msgpack.Decoder(cmd.DeadLettersTaken).decode


def read_dead_letters(topic: str, body: wire.Buffer) -> cmd.TakeDeadLetters:
    """Decode dead letters sent by another worker."""
    try:
        letters = _decode_dead_letters(body)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"dead letters cannot be decoded: {error}") from None
    if not letters or any(
        (letter.target, letter.source_id) != (topic, letters[0].source_id) for letter in letters
    ):
        raise InvalidRequest("a batch must have dead letters of one source for one target")
    return cmd.TakeDeadLetters(topic, letters[0].source_id, letters)


@dataclass(slots=True, eq=False)
class OutboxTopic:
    """A topic with dead letters to send."""

    topic_id: int
    count: int  # maximum of the next batch
    pause_ms: int = 0  # after the last attempt
    refused: int = 0  # last number of a refused batch whose first dead letter is sent alone


@dataclass(slots=True, eq=False)
class OutboxBatch:
    """A batch in flight. `done` is set by the target's reply: whether it was stored."""

    source: OutboxTopic
    topic: str
    source_id: int
    last: int
    count: int
    bytes: int
    done: bool | None = None


@dataclass(slots=True, eq=False)
class HeldReply:
    """A reply that waits for the dead letters of a topic up to a number."""

    topic_id: int
    number: int
    until_us: int
    bytes: int
    send: Callable[[], None]


Submit = Callable[[OutboxBatch, Command], None]


class Outbox:
    def __init__(
        self,
        engine: ShardEngine,
        links: PeerLinks,
        *,
        shards: int,
        submit: Submit,
        now_us: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._links = links
        self._shards = shards
        self._submit = submit  # queues a command for this shard's engine; the result goes to `on_result`
        self._now_us = now_us
        self._sources: dict[int, OutboxTopic] = {}  # each queued, pausing or with a batch in flight
        self._queue: deque[OutboxTopic] = deque()
        self._pausing: list[tuple[int, int]] = []  # heap: end of the pause, topic id
        self._batches = 0
        self._bytes = 0
        self._held: list[HeldReply] = []
        self._held_bytes = 0
        self._is_closed = False

    # -- time ----------------------------------------------------------------------------------------------

    @property
    def _may_send(self) -> bool:
        """A shard that cannot log the outcome need not begin."""
        return not self._is_closed and self._engine.stats.read_only is None

    @property
    def wake_at_us(self) -> int | None:
        times = [held.until_us for held in self._held]
        if self._pausing and self._may_send:
            times.append(self._pausing[0][0])
        return min(times, default=None)

    @property
    def is_busy(self) -> bool:
        """Whether replies are held, or dead letters are being sent."""
        return bool(self._held or self._sources)

    def tick(self) -> None:
        """Send held replies and dead letters that are due."""
        if self._held:
            self._send_due()
        due = self._engine.dead_letters.due
        if not (due or self._sources) or not self._may_send:
            return
        for topic_id in sorted(due.keys() - self._sources.keys()):
            self._sources[topic_id] = source = OutboxTopic(topic_id, BATCH_RECORDS)
            self._queue.append(source)
        now_us = self._now_us()
        while self._pausing and self._pausing[0][0] <= now_us:
            self._queue.append(self._sources[heapq.heappop(self._pausing)[1]])
        while self._queue and self._batches < BATCHES_MAX and self._bytes + BATCH_BYTES <= BYTES_MAX:
            self._send_from(self._queue.popleft())

    def close(self) -> None:
        """Stop sending. Batches in flight are sent again after the next start."""
        self._is_closed = True
        self._send_due()

    # -- held replies --------------------------------------------------------------------------------------

    def hold(self, command: cmd.MovesDeadLetters, size: int, send: Callable[[], None]) -> bool:
        """Whether the reply to a command that sent dead letters must wait for them; if so, `send` is called later."""
        topic_id = self._engine.stats.topic_id(command.topic)
        if topic_id is None or len(self._held) >= HELD_MAX or self._held_bytes + size > HELD_BYTES_MAX:
            return False
        held = HeldReply(
            topic_id, command.last_dead_letter, command.dead_letters_ms * 1000 + WAIT_US, size, send
        )
        if not self._is_waiting(held):
            return False
        self._held.append(held)
        self._held_bytes += size
        return True

    def _is_waiting(self, held: HeldReply) -> bool:
        oldest = self._engine.stats.oldest_dead_letter(held.topic_id) if not self._is_closed else None
        return oldest is not None and oldest <= held.number and held.until_us > self._now_us()

    def _send_due(self) -> None:
        looked_at, self._held = self._held, []
        for held in looked_at:
            if self._is_waiting(held):
                self._held.append(held)
            else:
                self._held_bytes -= held.bytes
                held.send()

    # -- out -----------------------------------------------------------------------------------------------

    def _send_from(self, source: OutboxTopic) -> None:
        try:
            letters = self._next_letters(source)
        except (TopicsError, OSError) as error:  # one unreadable topic must not take the shard down
            logger.error("dead letters cannot be read", extra={"fields": {"error": str(error)}})
            self._pause(source)
            return
        if not letters:
            del self._sources[source.topic_id]
            return
        first = letters[0]
        size = sum(len(letter.data) + len(letter.meta) + RECORD_OVERHEAD for letter in letters)
        batch = OutboxBatch(source, first.source, first.source_id, letters[-1].number, len(letters), size)
        self._batches += 1
        self._bytes += size
        shard = shard_of(first.target, self._shards)
        if shard == self._engine.stats.shard:
            self._submit(batch, cmd.TakeDeadLetters(first.target, first.source_id, letters))
        elif not self._links.ask(
            shard,
            wire.DEAD_LETTERS,
            first.target.encode(),
            encode_dead_letters(letters),
            partial(self._on_reply, batch),
        ):
            self._retry_later(batch)

    def _next_letters(self, source: OutboxTopic) -> list[cmd.DeadLetter]:
        return self._engine.dead_letters.next_dead_letters(source.topic_id, source.count, BATCH_BYTES)

    # -- replies -------------------------------------------------------------------------------------------

    def _on_reply(self, batch: OutboxBatch, reply: wire.Reply | None) -> None:
        """Reply of another worker; None: the outcome is unknown."""
        if reply is None:
            self._retry_later(batch)
        elif reply.code == wire.OK:
            try:
                self._accepted(batch, _decode_taken(reply.body))
            except msgspec.MsgspecError as error:
                logger.error(
                    "a reply to dead letters cannot be decoded", extra={"fields": {"error": str(error)}}
                )
                self._retry_later(batch)
        else:
            self._rejected(batch, reply.error_code)

    def on_result(self, batch: OutboxBatch, result: object) -> None:
        """Result of this shard's engine, for dead letters to a topic of this shard, or for SettleDeadLetters."""
        if batch.done is not None:
            self._settled(batch, result)
        elif isinstance(result, cmd.DeadLettersTaken):
            self._accepted(batch, result)
        else:
            assert isinstance(result, TopicsError)
            self._rejected(batch, result.code)

    def _accepted(self, batch: OutboxBatch, taken: cmd.DeadLettersTaken) -> None:
        self._settle(batch, min(batch.last, taken.last_number), done=True)

    def _rejected(self, batch: OutboxBatch, error_code: str) -> None:
        if error_code in PASSING:
            self._retry_later(batch)
        elif batch.count > 1:
            batch.source.count = 1
            batch.source.refused = batch.last
            self._continue(batch)
        else:
            alone = error_code in BAD_RECORD
            self._settle(batch, batch.last if alone else max(batch.last, batch.source.refused), done=False)

    def _settle(self, batch: OutboxBatch, number: int, *, done: bool) -> None:
        batch.done = done
        self._submit(batch, cmd.SettleDeadLetters(batch.topic, batch.source_id, number, done))

    def _settled(self, batch: OutboxBatch, result: object) -> None:
        if not isinstance(result, cmd.DeadLettersSettled):  # the topic is gone, or the shard may not write
            self._retry_later(batch)
            return
        source = batch.source
        source.pause_ms = source.refused = 0
        if batch.done:
            source.count = min(2 * source.count, BATCH_RECORDS)
        self._continue(batch)

    def _continue(self, batch: OutboxBatch) -> None:
        self._release(batch)
        self._queue.append(batch.source)

    def _retry_later(self, batch: OutboxBatch) -> None:
        """Retry the batch after a pause."""
        self._release(batch)
        self._pause(batch.source)

    def _pause(self, source: OutboxTopic) -> None:
        source.pause_ms = min(max(2 * source.pause_ms, PAUSE_MS_MIN), PAUSE_MS_MAX)
        heapq.heappush(self._pausing, (self._now_us() + source.pause_ms * 1000, source.topic_id))

    def _release(self, batch: OutboxBatch) -> None:
        self._batches -= 1
        self._bytes -= batch.bytes
