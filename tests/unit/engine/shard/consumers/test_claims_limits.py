"""Goal: named consumers deliver no more records, and each no more often, than configured, and report their lag.

Method: an engine on a SimDisk with one topic, whose clock moves only when a test says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.engine_harness import append, numbered
from tests.support.lease_harness import LEASE_MS, LeaseHarness, log
from topics.engine.commands import topics as c

A, B = b"a", b"b"


def with_consumer(records: int = 0, topic: dict[str, Any] | None = None, **fields: Any) -> LeaseHarness:
    """A log with this many records, and the consumer `c`, which was created after them."""
    h = LeaseHarness(log(**(topic or {})), jobs=records)
    h.make(**fields)
    return h


def fetched(h: LeaseHarness, max: int = 100, **options: Any) -> list[int]:
    return h.got(max, consumer="c", **options)


def tagged(h: LeaseHarness, tags: Sequence[str | None]) -> None:
    """One record for each tag."""
    first = h.state("q").head_seq + 1
    h.do(
        append("q", *numbered(first, len(tags)), tags=[None if tag is None else tag.encode() for tag in tags])
    )


# ---- times, deliveries, records in flight


def test_backoff_is_the_lease_of_each_delivery() -> None:
    h = with_consumer(1, backoff_ms=(100, 300, 700))
    for wait_ms in (100, 300, 700, 700, 700):
        (deadline,) = h.claim(consumer="c").deadlines
        assert deadline == h.now() + wait_ms
        h.pass_time(wait_ms)
        assert fetched(h) == []
        h.pass_time(1)


def test_backoff_goes_by_each_records_own_deliveries() -> None:
    h = with_consumer(2, backoff_ms=(100, 5000))
    fetched(h, 1)
    h.nack(1, consumer="c")
    claimed = h.claim(2, consumer="c")
    assert (claimed.page.seqs, claimed.deliveries) == ([1, 2], [2, 1])
    assert claimed.deadlines == [h.now() + 5000, h.now() + 100]


def test_a_fetch_may_choose_its_lease() -> None:
    h = with_consumer(1)
    assert h.claim(consumer="c", lease_ms=200).deadlines == [h.now() + 200]


def test_the_last_delivery_without_a_dead_letter_is_given_up() -> None:
    h = with_consumer(2, max_deliver=2)
    for _ in range(2):
        assert fetched(h, 1) == [1]
        h.pass_time(LEASE_MS + 1)
    assert fetched(h) == [2]
    state = h.look()
    assert (state.given_up, state.dead_lettered, state.ack_pending) == (1, 0, 1)
    h.ack(2, consumer="c")
    assert h.look().ack_floor == 2
    assert h.seqs("q") == [1, 2], "the record stays for others"


def test_the_last_delivery_with_a_dead_letter_is_copied_there() -> None:
    h = with_consumer(2, max_deliver=1, dead_letter="dead")
    assert fetched(h, 1) == [1]
    h.nack(1, consumer="c")
    assert fetched(h) == [2]
    h.rest()
    (letter,) = h.letters()
    assert (letter.consumer, letter.seq, letter.target) == ("c", 1, "dead")
    assert h.ship() == 1
    state = h.look()
    assert (state.given_up, state.dead_lettered, state.ack_pending) == (0, 1, 1)
    assert h.seqs("q") == [1, 2], "a consumer leaves the log alone"
    assert len(h.seqs("dead")) == 1


def test_term_and_nack_dead_go_to_the_dead_letter() -> None:
    h = with_consumer(3, dead_letter="dead")
    fetched(h)
    h.settle("term", 1, consumer="c", reason="one")
    h.nack(2, consumer="c", nack="dead", reason="two")
    h.rest()
    assert [(letter.seq, letter.reason) for letter in h.letters()] == [(1, "one"), (2, "two")]
    h.ship()
    assert h.look().dead_lettered == 2


def test_term_without_a_dead_letter_is_given_up() -> None:
    h = with_consumer(2)
    fetched(h)
    h.settle("term", 1, consumer="c", reason="one")
    state = h.look()
    assert (state.given_up, state.dead_lettered, state.ack_pending, state.acked) == (1, 0, 1, 0)
    h.pass_time(LEASE_MS + 1)
    assert fetched(h) == [2]


def test_max_ack_pending_bounds_what_is_not_settled() -> None:
    h = with_consumer(6, max_ack_pending=3)
    assert fetched(h) == [1, 2, 3]
    assert fetched(h) == []
    state = h.look()
    assert (state.stalled, state.ack_pending) == (True, 3)
    h.ack(2, consumer="c")
    assert not h.look().stalled
    assert fetched(h) == [4]
    h.pass_time(LEASE_MS + 1)
    assert fetched(h) == [1, 3, 4], "redeliveries were counted already"
    assert h.look().stalled


def test_nothing_to_do_is_not_stalled() -> None:
    h = with_consumer(3, max_ack_pending=3)
    fetched(h)
    assert not h.look().stalled


def test_an_ack_wakes_a_fetch_that_waited_for_room() -> None:
    h = with_consumer(3, max_ack_pending=2)
    fetched(h)
    token = h.parked(5, consumer="c", wait_ms=10_000)
    h.ack(1, consumer="c")
    assert h.answer(token).page.seqs == [3]


# ---- lag


def test_lag_is_exact_after_deletes() -> None:
    h = with_consumer(10)
    fetched(h, 3)
    assert h.look().lag_records == 7
    h.do(c.Delete("q", seqs=[1, 5, 6, 10]))
    assert h.look().lag_records == 4
    h.do(c.Delete("q", before_seq=5))
    assert h.look().lag_records == 3
    assert fetched(h) == [7, 8, 9]
    assert h.look().lag_records == 0


def test_lag_is_exact_after_deletes_and_filters() -> None:
    h = LeaseHarness(log())
    h.make(filter=(("Glob", "a*"),))
    tagged(h, ["a", "b", "ab", "a", None, "a"])
    assert h.look().lag_records == 4
    h.do(c.Delete("q", seqs=[4, 2]))
    assert h.look().lag_records == 3
    assert fetched(h, 1) == [1]
    assert h.look().lag_records == 2
    h.checkpoint()
    assert h.look().lag_records == 2


def test_lag_is_exact_after_eviction() -> None:
    h = with_consumer(0, {"cap_records": 4})
    h.produce(10)
    assert h.look().lag_records == 4


def test_lag_ms_is_the_age_of_the_oldest() -> None:
    h = with_consumer(1)
    h.pass_time(500)
    h.produce(1)
    h.pass_time(200)
    assert h.look().lag_ms == 700
    fetched(h, 1)
    assert h.look().lag_ms == 200
    fetched(h, 1)
    assert h.look().lag_ms == 0


def test_deleted_records_leave_what_is_pending() -> None:
    h = with_consumer(4)
    fetched(h, 3)
    h.do(c.Delete("q", seqs=[1, 2]))
    state = h.look()
    assert (state.ack_pending, state.in_flight, state.ack_floor) == (1, 1, 2)
    assert h.ack(1, consumer="c").skipped == [1]
    h.pass_time(LEASE_MS + 1)
    assert fetched(h) == [3, 4]


def test_last_activity() -> None:
    h = with_consumer(1)
    made = h.look().last_activity_ts
    h.pass_time(300)
    assert h.look().last_activity_ts == made, "reading its state is not activity"
    fetched(h)
    assert h.look().last_activity_ts == made + 300
