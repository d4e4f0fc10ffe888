"""How a producer gathers batches, without threads: which records go together, when, and how results are reported."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tests.unit.client.test_flows import ScriptedServer, refusal
from topics.client import errors
from topics.client.answers import Written
from topics.client.batching import BATCH_RECORDS_MAX, Batcher, Batching, deliver
from topics.client.flows import Response

LONG = Batching(linger_ms=1000, max_batch_bytes=10, max_buffer_bytes=30)


def send(batcher: Batcher[str], part: bytes, now: float = 0.0, *, is_bytes: bool = False) -> tuple[Any, int]:
    if batcher.needs_batch(part, is_bytes=is_bytes):
        batcher.begin("", now, is_bytes=is_bytes)
    return batcher.add(part)


def test_a_batch_is_due_when_its_first_record_has_waited() -> None:
    batcher: Batcher[str] = Batcher("t", LONG)
    assert batcher.due_at() is None
    send(batcher, b"a", 5.0)
    send(batcher, b"b", 5.5)
    assert batcher.due_at() == 6.0
    assert batcher.take().parts == [b"a", b"b"]
    assert batcher.due_at() is None


def test_a_full_batch_is_due_at_once_and_the_next_one_begins() -> None:
    batcher: Batcher[str] = Batcher("t", LONG)
    send(batcher, b"aaaa", 5.0)
    send(batcher, b"bbbbbb", 5.0)
    assert batcher.due_at() == 0.0
    send(batcher, b"c", 5.0)
    assert [batcher.take().parts, batcher.take().parts] == [[b"aaaa", b"bbbbbb"], [b"c"]]


def test_a_record_that_does_not_fit_begins_another_batch() -> None:
    batcher: Batcher[str] = Batcher("t", LONG)
    send(batcher, b"aaaa", 5.0)
    send(batcher, b"bbbbbbb", 5.2)
    assert batcher.due_at() == 5.2  # no record can join it any more
    send(batcher, b"c", 5.3, is_bytes=True)
    assert [len(batcher.take().parts) for _ in range(3)] == [1, 1, 1]


def test_a_batch_has_no_more_records_than_a_write_takes() -> None:
    batcher: Batcher[str] = Batcher("t", Batching(linger_ms=1000))
    for _ in range(BATCH_RECORDS_MAX + 1):
        send(batcher, b"1", 1.0)
    assert [len(batcher.take().parts), len(batcher.take().parts)] == [BATCH_RECORDS_MAX, 1]


def test_the_buffer_counts_what_is_on_its_way() -> None:
    batcher: Batcher[str] = Batcher("t", LONG)
    assert batcher.has_room(1000)  # nothing else is pending
    send(batcher, b"x" * 25)
    batch = batcher.take()
    assert (batcher.has_room(5), batcher.has_room(6)) == (True, False)
    batcher.settle(batch, [1])
    assert batcher.has_room(31)


def test_failures_are_told_once() -> None:
    batcher: Batcher[str] = Batcher("t", LONG)
    batch, index = send(batcher, b"x")
    send(batcher, b"y")
    batcher.flush()
    assert batcher.due_at() == 0.0
    error = errors.Disconnected("u", "gone", "unknown")
    batcher.settle(batcher.take(), [error, 7])
    with pytest.raises(errors.Disconnected):
        batch.seq_of(index)
    assert batch.seq_of(1) == 7
    failure = batcher.failure()
    assert failure is not None
    assert (failure.records, failure.outcome, failure.failures) == (1, "unknown", [error])
    assert (batcher.failure(), batcher.added, batcher.settled) == (None, 2, 2)


class Topic:
    """Accepts batches without a bad record, and loses some answers."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self.records: list[int] = []
        self._keys: dict[str, int] = {}

    def answer(self, request: Any) -> Response | Exception:
        said = msgspec.json.decode(request.body)
        values = [record["data"] for record in said["records"]]
        key = request.headers["Idempotency-Key"]
        if self._dice.random() < 0.2:
            return refusal(503, "not_ready", "1")
        if key not in self._keys:
            if "bad" in values:
                return refusal(400, "record_too_large")
            self._keys[key] = len(self.records) + 1
            self.records += values
        if self._dice.random() < 0.2:
            return errors.Disconnected("u", "gone", "unknown")
        first = self._keys[key]
        written = Written(
            topic="t",
            first_seq=first,
            last_seq=first + len(values) - 1,
            head_seq=0,
            count=0,
            created=False,
            deduped=False,
            performance={"server_total_ms": 0.0, "wal_append_ms": 0.0, "fsync_ms": 0.0},
        )
        return Response(200, msgspec.json.encode(written))


@pytest.mark.parametrize("seed", range(20))
def test_batches_are_written_once_in_order_and_without_the_bad_ones(seed: int) -> None:
    topic, world = Topic(seed), ScriptedServer()
    batcher: Batcher[str] = Batcher("t", Batching(max_batch_bytes=400))
    dice = random.Random(seed)
    values: list[Any] = ["bad" if dice.random() < 0.03 else i for i in range(200)]
    places = [send(batcher, msgspec.json.encode({"data": value})) for value in values]

    class Script(list[Any]):
        def pop(self, _index: Any = 0) -> Any:
            return topic.answer(world.sent[-1])

    world.script = Script()
    while batcher.due_at() is not None:
        batch = batcher.take()
        batch.created_at = world.now
        batcher.settle(batch, world.run(deliver(world.core, "t", Batching(deliver_for_s=1e6), batch)))
    good = [value for value in values if value != "bad"]
    assert topic.records == good
    for value, (batch, index) in zip(values, places, strict=True):
        if value == "bad":
            with pytest.raises(errors.RecordTooLarge):
                batch.seq_of(index)
        else:
            assert topic.records[batch.seq_of(index) - 1] == value


def test_a_batch_that_may_be_written_is_not_taken_apart() -> None:
    """Its halves have other keys: what was written with the first key would be written again."""
    world = ScriptedServer(errors.Disconnected("u", "gone", "unknown"), refusal(400, "record_too_large"))
    batcher: Batcher[str] = Batcher("t", LONG)
    for _ in range(2):
        send(batcher, b"1")
    results = world.run(deliver(world.core, "t", Batching(deliver_for_s=1e6), batcher.take()))
    assert [error.outcome for error in results] == ["unknown"] * 2
    assert len(world.sent) == 2


def test_a_batch_that_waited_long_is_retried_for_less_time() -> None:
    world = ScriptedServer(*[errors.Disconnected("u", "gone", "none")] * 100)
    batcher: Batcher[str] = Batcher("t", LONG)
    send(batcher, b'{"data":1}', world.now - 50)
    (error,) = world.run(deliver(world.core, "t", Batching(deliver_for_s=60), batcher.take()))
    assert isinstance(error, errors.Disconnected)
    assert world.now <= 110
