"""Batching of records for a producer, and delivery of a batch, in order and exactly once.

    send ──► open batch ── full, `linger_ms` old, or flushed ──► queued ──► in flight, one at a time ──► settled

A producer has one batch in flight at a time, so records are in the topic in the order of `send`, even after retries.
All attempts of a batch use the same idempotency key. While a batch is in flight the next one grows: the slower the
server, the larger the batches.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from topics.client.answers import Written
from topics.client.calls import topic_path
from topics.client.errors import (
    BatchTooLarge,
    ClientError,
    InvalidRequest,
    PayloadTooLarge,
    ProducerFailed,
    RecordTooLarge,
)
from topics.client.flows import JSON, Core, Flow, Repeat, Request
from topics.client.record_encoding import NewRecord, body_of, encode, is_bytes
from topics.client.tracing import traced_meta

BATCH_RECORDS_MAX = 10_000  # per write
FAILURES_KEPT = 10
_CAUSED_BY_A_RECORD = (InvalidRequest, RecordTooLarge, BatchTooLarge, PayloadTooLarge)

S = TypeVar("S")  # the event type that callers wait on
Result = int | Exception


@dataclass(frozen=True, slots=True)
class Batching:
    """Options of a producer.

    `deliver_for_s`, the time from `send` until it gives up, must be less than the topic's `idempotency_window_ms`: a
    retry after that would be written twice.
    """

    linger_ms: float = 5.0
    max_batch_bytes: int = 1 << 20
    max_buffer_bytes: int = 32 << 20
    deliver_for_s: float = 60.0
    send_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.max_batch_bytes < 1 or self.max_buffer_bytes < self.max_batch_bytes:
            raise ValueError("max_batch_bytes must be at least 1 and at most max_buffer_bytes")


@dataclass(slots=True, eq=False)
class Batch(Generic[S]):
    """Records that are written together. `settled` is set when the results are known."""

    settled: S
    is_bytes: bool
    created_at: float
    due_at: float
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    results: list[Result] | None = None

    def seq_of(self, index: int) -> int:
        assert self.results is not None
        result = self.results[index]
        if isinstance(result, Exception):
            raise result
        return result


class Batcher(Generic[S]):
    """The unsent batches of a producer. Not thread-safe, and never blocks: the producers do both."""

    def __init__(self, topic: str, options: Batching) -> None:
        self.topic, self.options = topic, options
        self._batches: deque[Batch[S]] = deque()
        self._buffered = 0  # bytes, including the batch in flight
        self.added = 0
        self.settled = 0  # in the order in which they were added
        self._failed = 0
        self._failures: list[Exception] = []

    def has_room(self, size: int) -> bool:
        """A record larger than the whole buffer is accepted when the buffer is empty."""
        return not self._buffered or self._buffered + size <= self.options.max_buffer_bytes

    def needs_batch(self, part: bytes, *, is_bytes: bool) -> bool:
        """Whether the next record cannot join the last batch."""
        if not self._batches:
            return True
        last = self._batches[-1]
        return (
            last.is_bytes != is_bytes
            or last.size + len(part) > self.options.max_batch_bytes
            or len(last.parts) >= BATCH_RECORDS_MAX
        )

    def begin(self, settled: S, now: float, *, is_bytes: bool) -> None:
        if self._batches:
            self._batches[-1].due_at = now  # nothing can be added to it any more
        self._batches.append(Batch(settled, is_bytes, now, now + self.options.linger_ms / 1000))

    def add(self, part: bytes) -> tuple[Batch[S], int]:
        """Add to the last batch; return it and the index in it."""
        batch = self._batches[-1]
        batch.parts.append(part)
        batch.size += len(part)
        self._buffered += len(part)
        self.added += 1
        if batch.size >= self.options.max_batch_bytes or len(batch.parts) >= BATCH_RECORDS_MAX:
            batch.due_at = 0.0
        return batch, len(batch.parts) - 1

    def flush(self) -> None:
        """Make all batches due now."""
        for batch in self._batches:
            batch.due_at = 0.0

    def due_at(self) -> float | None:
        """When the next batch is due. None: there is none."""
        return self._batches[0].due_at if self._batches else None

    def take(self) -> Batch[S]:
        return self._batches.popleft()

    def settle(self, batch: Batch[S], results: list[Result]) -> None:
        batch.results = results
        self.settled += len(results)
        self._buffered -= batch.size
        for result in results:
            if isinstance(result, Exception):
                self._failed += 1
                if len(self._failures) < FAILURES_KEPT:
                    self._failures.append(result)
        batch.parts = []

    def failure(self) -> ProducerFailed | None:
        """The failures since the last call."""
        if not self._failed:
            return None
        error = ProducerFailed(self.topic, self._failed, self._failures)
        self._failed, self._failures = 0, []
        return error


def part_of(data: Any, tag: str | None, node: str | None, meta: Any, ttl_ms: int) -> tuple[bytes, bool]:
    """Encode a record, and whether it is of bytes. Done in `send`, so that its caller gets the errors."""
    record = NewRecord(data, tag=tag, node=node, meta=meta, ttl_ms=ttl_ms)
    if is_bytes(record):
        return encode(record), True
    record.meta = traced_meta(meta)
    return encode(record), False


def deliver(core: Core, topic: str, options: Batching, batch: Batch[S]) -> Flow[list[Result]]:
    """Write a batch; return each record's seq or error."""
    # Time spent in the queue counts: while the server is down, all batches fail at about the same time.
    left_s = batch.created_at + options.deliver_for_s - core.now()
    retries = dataclasses.replace(core.retries, for_s=max(0.0, left_s))
    # Records carry the trace context of `send`; the span that is current here is unrelated.
    return _deliver(dataclasses.replace(core, retries=retries, traceparent=str), topic, batch.parts)


def _deliver(core: Core, topic: str, parts: list[bytes]) -> Flow[list[Result]]:
    headers = {**JSON, "Idempotency-Key": core.new_key()}
    request = Request("POST", topic_path(topic) + "?return_seqs=false", body_of(parts), headers)
    try:
        written = yield from core.call(request, Written, Repeat.SAFE)
    except ClientError as error:
        if len(parts) == 1 or not isinstance(error, _CAUSED_BY_A_RECORD) or error.outcome == "unknown":
            return [error] * len(parts)
    else:
        return list(range(written.first_seq, written.first_seq + len(parts)))
    # A single record may have failed the whole batch. Retry each half, so that the other records are written.
    half = len(parts) // 2
    first = yield from _deliver(core, topic, parts[:half])
    second = yield from _deliver(core, topic, parts[half:])
    return first + second
