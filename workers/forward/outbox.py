"""Dead letters on their way: from a topic of this shard to the topic that takes them, here or at another worker.

    moving ──▶ TakeLetters at the target's shard ──▶ SettleDeadLetters here
      ▲            │ refused: SettleDeadLetters gives them back, and they become ready again
      └── a pause ─┘ nobody knows: the same once more

The engine says which letters there are, and has logged each with a number before it does; the target remembers the last
number of each source. So a letter may be sent as often as need be and is there once. What this holds is not stored: after
a restart the engine has the same letters again.

One batch of a source is on its way at a time, in the order of numbers. A batch that is refused may begin with letters that
an earlier try, of unknown outcome, has brought there. To give those back would double them. So the first of it is sent alone:
if it is refused, too, then it is not there, and neither is any later one.

A call that sends letters is answered when their topics have them, or have refused them, or after WAIT_US: a client that
reads the dead letter topic next finds them.

Bounds: BATCH_LETTERS and BATCH_BYTES in one batch, BATCHES_MAX and BYTES_MAX on their way. Sources wait in line. HELD_MAX
answers wait, with HELD_BYTES_MAX of records; beyond that they leave at once.
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
from topics.api.http_errors import STATUS
from topics.api.limits import KIB, MIB
from topics.engine.commands import consumers as cmd
from topics.engine.commands.topics import Command
from topics.engine.core.placement import shard_of
from topics.engine.runtime.engine import Engine
from topics.engine.topic.log import TopicLog
from topics.link import wire
from workers.peers.links import PeerLinks

logger = logging.getLogger("topics.shard")

BATCH_LETTERS = 64
BATCH_BYTES = 1 * MIB
BATCHES_MAX = 64
BYTES_MAX = 16 * MIB
LETTER_BYTES = 1 * KIB  # what a letter takes beside data and meta, at most: names, tag, node

PAUSE_MS_MIN, PAUSE_MS_MAX = 100, 5_000

WAIT_US = 1_000_000
HELD_MAX = 1_000
HELD_BYTES_MAX = 16 * MIB

FAULT_OF_A_LETTER = 400  # such a refusal says nothing about the letters behind it

encode_letters = msgspec.msgpack.Encoder().encode
_decode_letters = msgspec.msgpack.Decoder(list[cmd.DeadLetter]).decode
_decode_taken = msgspec.msgpack.Decoder(cmd.DeadLettersTaken).decode


def read_dead_letters(topic: str, body: wire.Buffer) -> cmd.TakeDeadLetters:
    """What another worker sends."""
    try:
        letters = _decode_letters(body)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"letters cannot be read: {error}") from None
    if not letters or any(
        (letter.target, letter.source_id) != (topic, letters[0].source_id) for letter in letters
    ):
        raise InvalidRequest("a batch has letters of one source for one target")
    return cmd.TakeDeadLetters(topic, letters[0].source_id, letters)


@dataclass(slots=True, eq=False)
class OutboxTopic:
    """A topic that has letters to send."""

    topic_id: int
    count: int  # in the next batch, at most
    pause_ms: int = 0  # after the last try
    refused: int = 0  # the last number of the batch that was refused and whose first letter is sent alone


@dataclass(slots=True, eq=False)
class OutboxBatch:
    """Letters on their way. `done` is there as soon as the target has answered."""

    source: OutboxTopic
    topic: str
    source_id: int
    last: int
    count: int
    bytes: int
    done: bool | None = None


@dataclass(slots=True, eq=False)
class HeldAnswer:
    """An answer that waits for letters of a topic, up to a number."""

    log: TopicLog
    number: int
    until_us: int
    bytes: int
    send: Callable[[], None]


Submit = Callable[[OutboxBatch, Command], None]


class Outbox:
    def __init__(
        self,
        engine: Engine,
        links: PeerLinks,
        *,
        shards: int,
        submit: Submit,
        now_us: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._links = links
        self._shards = shards
        self._submit = submit  # a command to the own engine, whose answer comes to `on_result`
        self._now_us = now_us
        self._sources: dict[int, OutboxTopic] = {}  # each of them in line, pausing or with a batch on its way
        self._line: deque[OutboxTopic] = deque()
        self._pausing: list[tuple[int, int]] = []  # until when, topic id
        self._batches = 0
        self._bytes = 0
        self._held: list[HeldAnswer] = []
        self._held_bytes = 0
        self._is_closed = False

    # -- time ----------------------------------------------------------------------------------------------

    @property
    def _may_send(self) -> bool:
        """A shard that cannot log the end of a move need not begin one."""
        return not self._is_closed and self._engine.shard.read_only is None

    @property
    def wake_at_us(self) -> int | None:
        times = [held.until_us for held in self._held]
        if self._pausing and self._may_send:
            times.append(self._pausing[0][0])
        return min(times, default=None)

    def tick(self) -> None:
        """Send what may be sent by now."""
        if self._held:
            self._look_at_held()
        moving = self._engine.shard.dead_letters_due
        if not self._may_send or not (moving or self._sources):
            return
        for topic_id in sorted(moving.keys() - self._sources.keys()):
            self._sources[topic_id] = source = OutboxTopic(topic_id, BATCH_LETTERS)
            self._line.append(source)
        now_us = self._now_us()
        while self._pausing and self._pausing[0][0] <= now_us:
            self._line.append(self._sources[heapq.heappop(self._pausing)[1]])
        while self._line and self._batches < BATCHES_MAX and self._bytes + BATCH_BYTES <= BYTES_MAX:
            self._send_from(self._line.popleft())

    def close(self) -> None:
        """Nothing is waited for: what is on its way is sent again after the next start."""
        self._is_closed = True
        self._look_at_held()

    # -- answers that wait ---------------------------------------------------------------------------------

    def hold(self, command: cmd.MovesDeadLetters, size: int, send: Callable[[], None]) -> bool:
        """Whether the answer to a command that sent letters has to wait for them. If so, `send` is called later."""
        log = self._engine.shard.published.get(command.topic)
        if log is None or len(self._held) >= HELD_MAX or self._held_bytes + size > HELD_BYTES_MAX:
            return False
        held = HeldAnswer(log, command.last_dead_letter, command.dead_letters_ms * 1000 + WAIT_US, size, send)
        if not self._is_waiting(held):
            return False
        self._held.append(held)
        self._held_bytes += size
        return True

    def _is_waiting(self, held: HeldAnswer) -> bool:
        if self._is_closed or held.log.dropped or held.log.consumers is None:
            return False
        oldest = next(iter(held.log.consumers.dead_letters), held.number + 1)
        return oldest <= held.number and held.until_us > self._now_us()

    def _look_at_held(self) -> None:
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
            letters = self._letters_of(source)
        except (TopicsError, OSError) as error:  # one topic that cannot be read must not take the shard down
            logger.error("letters cannot be read", extra={"fields": {"error": str(error)}})
            self._pause(source)
            return
        if not letters:
            del self._sources[source.topic_id]
            return
        first = letters[0]
        size = sum(len(letter.data) + len(letter.meta) + LETTER_BYTES for letter in letters)
        batch = OutboxBatch(source, first.source, first.source_id, letters[-1].number, len(letters), size)
        self._batches += 1
        self._bytes += size
        shard = shard_of(first.target, self._shards)
        if shard == self._engine.config.shard:
            self._submit(batch, cmd.TakeDeadLetters(first.target, first.source_id, letters))
        elif not self._links.ask(
            shard,
            wire.DEAD_LETTERS,
            first.target.encode(),
            encode_letters(letters),
            partial(self._heard, batch),
        ):
            self._later(batch)

    def _letters_of(self, source: OutboxTopic) -> list[cmd.DeadLetter]:
        shard = self._engine.shard
        log = shard.dead_letters_due.get(source.topic_id)
        return shard.dead_letters_to_send(log, source.count, BATCH_BYTES) if log is not None else []

    # -- answers -------------------------------------------------------------------------------------------

    def _heard(self, batch: OutboxBatch, reply: wire.Reply | None) -> None:
        """Of another worker; None: nobody knows."""
        if reply is None:
            self._later(batch)
        elif reply.status == 200:
            try:
                self._taken(batch, _decode_taken(reply.body))
            except msgspec.MsgspecError as error:
                logger.error("an answer to letters cannot be read", extra={"fields": {"error": str(error)}})
                self._later(batch)
        else:
            self._not_taken(batch, reply.status)

    def on_result(self, batch: OutboxBatch, result: object) -> None:
        """Of the own engine: to letters for a topic of this shard, or to the end of a move."""
        if batch.done is not None:
            self._ended(batch, result)
        elif isinstance(result, cmd.DeadLettersTaken):
            self._taken(batch, result)
        else:
            assert isinstance(result, TopicsError)
            self._not_taken(batch, STATUS[result.code])

    def _taken(self, batch: OutboxBatch, taken: cmd.DeadLettersTaken) -> None:
        self._end(batch, min(batch.last, taken.last_number), done=True)

    def _not_taken(self, batch: OutboxBatch, status: int) -> None:
        if status >= 500:  # that shard starts, or may not write, or may have taken them all the same
            self._later(batch)
        elif batch.count > 1:
            batch.source.count = 1
            batch.source.refused = batch.last
            self._next(batch)
        else:
            alone = status == FAULT_OF_A_LETTER
            self._end(batch, batch.last if alone else max(batch.last, batch.source.refused), done=False)

    def _end(self, batch: OutboxBatch, number: int, *, done: bool) -> None:
        batch.done = done
        self._submit(batch, cmd.SettleDeadLetters(batch.topic, batch.source_id, number, done))

    def _ended(self, batch: OutboxBatch, result: object) -> None:
        if not isinstance(result, cmd.DeadLettersSettled):  # the topic is gone, or the shard may not write
            self._later(batch)
            return
        source = batch.source
        source.pause_ms = source.refused = 0
        if batch.done:
            source.count = min(2 * source.count, BATCH_LETTERS)
        self._next(batch)

    def _next(self, batch: OutboxBatch) -> None:
        self._leave(batch)
        self._line.append(batch.source)

    def _later(self, batch: OutboxBatch) -> None:
        """The same once more, after a while."""
        self._leave(batch)
        self._pause(batch.source)

    def _pause(self, source: OutboxTopic) -> None:
        source.pause_ms = min(max(2 * source.pause_ms, PAUSE_MS_MIN), PAUSE_MS_MAX)
        heapq.heappush(self._pausing, (self._now_us() + source.pause_ms * 1000, source.topic_id))

    def _leave(self, batch: OutboxBatch) -> None:
        self._batches -= 1
        self._bytes -= batch.bytes
