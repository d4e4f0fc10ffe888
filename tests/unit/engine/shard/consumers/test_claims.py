"""Goal: claims that are answered later: shared evenly within a window, waiting until there is work, or standing.

Method: an engine whose clock moves only when a test says so; a claim that must wait has no answer yet.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.lease_harness import LEASE_MS, LeaseHarness, consumer, log, queue
from topics.api.errors import ConsumerNotFound, Throttled, TopicNotFound
from topics.engine.commands import consumers as k
from topics.engine.commands import topics as c

JITTER_MS = 50
LATE_MS = 1  # how much later a waiting claim may notice that time has passed


def coalescing(jobs: int, **fields: object) -> LeaseHarness:
    return LeaseHarness(queue(claim_jitter_ms=JITTER_MS, **fields), jobs=jobs)


def dealt(h: LeaseHarness, *maxima: int) -> list[list[int]]:
    """What claims with these `max` get in one window."""
    tokens = [h.parked(max, node=b"w%d" % i) for i, max in enumerate(maxima)]
    h.pass_time(JITTER_MS)
    answers = [h.answer(token) for token in tokens]
    assert all(answer is not None for answer in answers)
    return [answer.page.seqs for answer in answers if answer is not None]


# ---- coalesced claims


def test_ten_claimers_of_ten_on_fifty_jobs_get_five_each() -> None:
    shares = dealt(coalescing(50), *[10] * 10)
    assert [len(share) for share in shares] == [5] * 10
    assert sorted(seq for share in shares for seq in share) == list(range(1, 51))


def test_two_and_a_hundred_on_nine_jobs_get_two_and_seven() -> None:
    shares = dealt(coalescing(9), 2, 100)
    assert [len(share) for share in shares] == [2, 7]


@pytest.mark.parametrize(
    ("jobs", "maxima", "sizes"),
    [
        (0, [1, 5], [0, 0]),
        (1, [5, 5, 5], [1, 0, 0]),
        (4, [5, 5, 5], [2, 1, 1]),
        (10, [1, 2, 9], [1, 2, 7]),
        (100, [1, 2, 3], [1, 2, 3]),
        (7, [1000], [7]),
    ],
)
def test_jobs_are_dealt_one_by_one(jobs: int, maxima: list[int], sizes: list[int]) -> None:
    h = coalescing(jobs)
    shares = dealt(h, *maxima)
    assert [len(share) for share in shares] == sizes
    assert h.counts() == (jobs - sum(sizes), sum(sizes), 0)
    hands = [iter(share) for share in shares]
    dealt_in_turns = [
        seq for _ in range(max(sizes)) for hand in hands if (seq := next(hand, None)) is not None
    ]
    assert dealt_in_turns == sorted(dealt_in_turns), "one per claim per turn, in the order of delivery"


def test_the_window_begins_with_its_first_claim() -> None:
    h = coalescing(9)
    first = h.parked(9)
    h.pass_time(JITTER_MS - 1)
    second = h.parked(9)
    assert h.answer(first) is None
    h.pass_time(1)
    assert [len(h.answer(token).page.seqs) for token in (first, second)] == [5, 4]
    third = h.parked(1)
    h.pass_time(JITTER_MS - 1)
    assert h.answer(third) is None
    h.pass_time(1)
    assert h.answer(third) is not None


def test_a_window_closes_though_there_is_nothing() -> None:
    h = coalescing(0)
    assert dealt(h, 5) == [[]]


def test_records_written_within_the_jitter_window_are_distributed() -> None:
    h = coalescing(0)
    token = h.parked(5)
    h.produce(2)
    h.pass_time(JITTER_MS)
    assert h.answer(token).page.seqs == [1, 2]


def test_each_claimer_has_a_lease_as_long_as_it_asked_for() -> None:
    h = coalescing(2)
    short, long = h.parked(1, lease_ms=200), h.parked(1, lease_ms=7000)
    h.pass_time(JITTER_MS)
    now = h.now()
    assert h.answer(short).deadlines == [now + 200]
    assert h.answer(long).deadlines == [now + 7000]


def test_a_coalesced_claim_may_wait_longer_for_work() -> None:
    h = coalescing(1)
    greedy, patient = h.parked(1), h.parked(1, wait_ms=1000)
    h.pass_time(JITTER_MS)
    assert h.answer(greedy).page.seqs == [1]
    assert h.answer(patient) is None
    h.produce(1)
    h.pass_time(JITTER_MS)
    assert h.answer(patient).page.seqs == [2]


def test_coalesced_claims_keep_to_the_bytes_of_each() -> None:
    h = coalescing(6)
    size = len(b'"record 1"')
    small, large = h.parked(9, max_bytes=2 * size), h.parked(9)
    h.pass_time(JITTER_MS)
    assert [len(h.answer(token).page.seqs) for token in (small, large)] == [2, 4]


def test_without_jitter_the_first_takes_what_it_can() -> None:
    h = LeaseHarness(jobs=5)
    tokens = h.ask(h.claim_of(4, node=b"a"), h.claim_of(4, node=b"b"))
    h.rest()
    assert [h.replies[token].page.seqs for token in tokens] == [[1, 2, 3, 4], [5]]


# ---- long polls


def test_a_claim_waits_for_work() -> None:
    h = LeaseHarness()
    token = h.parked(5, wait_ms=10_000)
    h.pass_time(400)
    assert h.answer(token) is None
    h.produce(2)
    answer = h.answer(token)
    assert answer is not None
    assert answer.page.seqs == [1, 2]
    assert answer.deadlines == [h.now() + LEASE_MS] * 2, "from when it was delivered"
    assert h.counts() == (0, 2, 0)


def test_a_claim_does_not_wait_when_there_is_work() -> None:
    h = LeaseHarness(jobs=1)
    assert h.got(5, wait_ms=10_000) == [1]


def test_a_claim_that_waited_in_vain_is_empty() -> None:
    h = LeaseHarness()
    token = h.parked(wait_ms=500)
    h.pass_time(499)
    assert h.answer(token) is None
    h.pass_time(1)
    answer = h.answer(token)
    assert answer is not None
    assert (answer.page.seqs, answer.ready) == ([], 0)


@pytest.mark.parametrize(
    "event",
    [
        lambda h: h.nack(1, node=b"a"),
        lambda h: h.nack(1, node=b"a", nack="release"),
        lambda h: h.pass_time(LEASE_MS + 1 + LATE_MS),
        lambda h: h.do(k.Release("q", "", 7)),
        lambda h: (h.nack(1, node=b"a", delay_ms=300), h.pass_time(300 + LATE_MS)),
        lambda h: (h.extend(1, node=b"a", lease_ms=200), h.pass_time(201 + LATE_MS)),
        lambda h: h.produce(1),
    ],
)
def test_events_that_wake_a_claim(event: Callable[[LeaseHarness], object]) -> None:
    h = LeaseHarness(jobs=1)
    h.claim(node=b"a", connection=7)
    token = h.parked(wait_ms=10_000)
    event(h)
    answer = h.answer(token)
    assert answer is not None
    assert len(answer.page.seqs) == 1


def test_expiry_wakes_a_claim_at_its_time_without_any_request() -> None:
    h = LeaseHarness(jobs=1)
    h.claim(node=b"a")
    token = h.parked(wait_ms=10_000)
    outcome = h.engine.turn([])
    assert outcome.wake_at_ms is not None
    assert outcome.wake_at_ms <= h.clock.monotonic_ms() + LEASE_MS + 1 + LATE_MS
    h.pass_time(LEASE_MS)
    assert h.answer(token) is None
    h.pass_time(1 + LATE_MS)
    assert h.answer(token).deliveries == [2]


def test_waiting_claims_are_served_in_their_order() -> None:
    h = LeaseHarness()
    tokens = [h.parked(1, node=b"w%d" % i, wait_ms=10_000) for i in range(3)]
    h.produce(2)
    answers = [h.answer(token) for token in tokens]
    assert [answer and answer.page.seqs for answer in answers] == [[1], [2], None]
    h.produce(1)
    assert h.answer(tokens[2]).page.seqs == [3]


@pytest.mark.parametrize("durability", ["fsync", "disk"])
def test_a_later_claim_does_not_overtake_one_that_waits(durability: str) -> None:
    h = LeaseHarness(queue(durability=durability))
    first = h.parked(1, node=b"a", wait_ms=10_000)
    h.ask(c.Append("q", c.Records([b"1"])), h.claim_of(1, node=b"b"))
    h.rest()
    assert h.answer(first) is not None, "first come, first served"


def test_a_job_that_dies_before_the_wake_is_not_handed_out() -> None:
    h = LeaseHarness()
    token = h.parked(wait_ms=10_000)
    h.ask(c.Append("q", c.Records([b"1"])), c.Delete("q", before_seq=99))
    h.rest()
    assert h.answer(token) is None
    h.produce(1)
    assert h.answer(token).page.seqs == [2]


@pytest.mark.parametrize("how", [{"wait_ms": 10_000}, {"standing": True}])
def test_a_topic_that_goes_ends_the_wait(how: dict[str, object]) -> None:
    h = LeaseHarness()
    token = h.parked(**how)
    h.do(c.DropTopic("q"))
    h.rest()
    assert isinstance(h.replies[token], TopicNotFound)


@pytest.mark.parametrize("how", [{"wait_ms": 10_000}, {"standing": True}])
def test_a_consumer_that_goes_ends_the_wait(how: dict[str, object]) -> None:
    h = LeaseHarness(log())
    h.make()
    token = h.parked(consumer="c", **how)
    h.do(k.DropConsumer("q", "c"))
    h.rest()
    assert isinstance(h.replies[token], ConsumerNotFound)


def test_no_claim_sees_what_is_not_synced() -> None:
    h = LeaseHarness()
    token = h.parked(wait_ms=10_000)
    h.ask(c.Append("q", c.Records([b"1"])))
    assert token not in h.replies
    h.run_jobs()
    assert h.answer(token) is not None


# ---- standing claims


def test_a_standing_claim_waits_for_as_long_as_it_takes() -> None:
    h = LeaseHarness()
    token = h.parked(3, standing=True, connection=1)
    h.pass_time(3_600_000)
    assert h.answer(token) is None
    h.produce(5)
    assert h.answer(token).page.seqs == [1, 2, 3]
    h.produce(1)
    assert h.counts() == (3, 3, 0), "it is answered once"


def test_a_connection_that_goes_takes_its_standing_claim_along() -> None:
    h = LeaseHarness()
    token = h.parked(standing=True, connection=1)
    other = h.parked(standing=True, connection=2)
    h.do(k.Release("q", "", 1))
    h.produce(1)
    assert h.answer(token) is None
    assert h.answer(other) is not None


def test_standing_claims_take_part_in_a_window() -> None:
    h = coalescing(0)
    tokens = [h.parked(10, node=b"w%d" % i, standing=True, connection=i) for i in (1, 2)]
    h.pass_time(JITTER_MS)
    h.produce(6)
    h.pass_time(JITTER_MS)
    assert [len(h.answer(token).page.seqs) for token in tokens] == [3, 3]


# ---- how many may wait


def test_a_consumer_parks_so_many_claims_and_no_more() -> None:
    h = LeaseHarness(log())
    h.make(max_waiting=2)
    for _ in range(2):
        h.parked(consumer="c", wait_ms=10_000)
    assert h.look().waiting == 2
    (token,) = h.ask(h.claim_of(consumer="c", wait_ms=10_000))
    h.rest()
    assert isinstance(h.replies[token], Throttled)
    assert h.got(consumer="c") == [], "a claim that does not wait is answered"
    h.produce(1)
    assert h.look().waiting == 1
    h.pass_time(10_000)
    assert h.look().waiting == 0


@pytest.mark.parametrize(
    ("topic", "event"),
    [
        ({}, lambda h: h.do(c.Delete("q", seqs=[1]))),
        ({"cap_records": 2}, lambda h: h.produce(1)),
    ],
)
def test_a_record_in_hand_that_goes_makes_room(
    topic: dict[str, object], event: Callable[[LeaseHarness], object]
) -> None:
    h = LeaseHarness(log(**topic), jobs=1)
    h.make(max_ack_pending=1)
    h.claim(consumer="c", lease_ms=60_000)
    h.pass_time(300)
    h.produce(1)
    token = h.parked(consumer="c", wait_ms=20_000)
    event(h)
    assert h.answer(token).page.seqs == [2]


def test_a_changed_consumer_keeps_its_waiters() -> None:
    h = LeaseHarness(log())
    h.make()
    token = h.parked(consumer="c", wait_ms=10_000)
    h.do(k.PutConsumer("q", "c", consumer(max_ack_pending=5)))
    h.produce(1)
    assert h.answer(token) is not None
