"""Goal: administration of named consumers: pauses, resets, the end of idle ones, replays; and what acks do to
records.

Method: an engine on a SimDisk whose clock moves only when a test says so; lasting state is read again after a crash.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.engine_harness import append, numbered
from tests.support.lease_harness import LEASE_MS, LeaseHarness, consumer, log, queue
from topics.api.errors import ConsumerNotFound, ConsumerOverlap
from topics.engine.commands import consumers as k
from topics.engine.commands import topics as c
from topics.engine.shard.consumers.admin import Consumers
from topics.engine.topic.consumer import Consumer, TopicConsumers, filter_of

End = Callable[[LeaseHarness], None]


def power_cut(h: LeaseHarness) -> None:
    h.sync()  # deliveries are written at once and synced soon
    h.power_cut()
    h.open()


def after_a_checkpoint(h: LeaseHarness) -> None:
    h.checkpoint()
    h.kill_and_open()


ENDS: list[End] = [LeaseHarness.restart, LeaseHarness.kill_and_open, power_cut, after_a_checkpoint]
every_end = pytest.mark.parametrize("end", ENDS)


def with_consumer(records: int = 0, topic: dict[str, Any] | None = None, **fields: Any) -> LeaseHarness:
    h = LeaseHarness(log(**(topic or {})), jobs=records)
    h.make(**fields)
    return h


def fetched(h: LeaseHarness, max: int = 100, **options: Any) -> list[int]:
    return h.got(max, consumer="c", **options)


# ---- pause


def test_a_paused_consumer_hands_out_nothing() -> None:
    h = with_consumer(3)
    fetched(h, 1)
    state = h.consumer_state(h.do(k.PauseConsumer("q", "c", True)))
    assert state.paused
    assert fetched(h) == []
    assert h.ack(1, consumer="c").count == 1, "delivered records can be settled"
    h.pass_time(3_600_000)
    assert fetched(h) == []
    state = h.consumer_state(h.do(k.PauseConsumer("q", "c", False)))
    assert not state.paused
    assert fetched(h) == [2, 3]


def test_a_pause_may_end_by_itself() -> None:
    h = with_consumer(1)
    until_ms = h.now() + 500
    state = h.consumer_state(h.do(k.PauseConsumer("q", "c", True, until_ms)))
    assert (state.paused, state.paused_until_ts) == (True, until_ms)
    token = h.parked(consumer="c", wait_ms=10_000)
    h.pass_time(499)
    assert h.answer(token) is None
    h.pass_time(2)
    assert h.answer(token).page.seqs == [1]
    assert not h.look().paused


def test_a_pause_that_is_over_already_is_none() -> None:
    h = with_consumer(1)
    h.pass_time(1000)
    state = h.consumer_state(h.do(k.PauseConsumer("q", "c", True, h.now() - 1)))
    assert not state.paused
    assert fetched(h) == [1]


def test_resuming_wakes_who_waits() -> None:
    h = with_consumer(1)
    h.do(k.PauseConsumer("q", "c", True))
    token = h.parked(consumer="c", wait_ms=10_000)
    h.do(k.PauseConsumer("q", "c", False))
    assert h.answer(token) is not None


@every_end
def test_a_pause_lasts(end: End) -> None:
    h = with_consumer(1)
    h.do(k.PauseConsumer("q", "c", True))
    end(h)
    assert h.look().paused
    assert fetched(h) == []


# ---- reset


@pytest.mark.parametrize(
    ("to", "value", "to_seq", "redelivers", "skips", "then"),
    [
        ("start", 0, 1, 4, 0, [1, 2, 3, 4, 5, 6]),
        ("end", 0, 7, 0, 4, []),
        ("seq", 3, 3, 2, 1, [3, 4, 5, 6]),
        ("seq", 6, 6, 0, 3, [6]),
        ("seq", 5, 5, 0, 2, [5, 6]),
    ],
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_reset(
    to: Any, value: int, to_seq: int, redelivers: int, skips: int, then: list[int], dry_run: bool
) -> None:
    h = with_consumer(6)
    fetched(h, 4)
    h.ack(1, 3, consumer="c")
    before = h.look()
    reset = h.do(k.ResetConsumer("q", "c", to, value, dry_run))
    assert isinstance(reset, k.ConsumerReset)
    assert (reset.dry_run, reset.from_seq, reset.to_seq) == (dry_run, 5, to_seq)
    assert (reset.redelivers, reset.skips) == (redelivers, skips)
    if dry_run:
        assert h.look() == before
        assert h.ack(2, consumer="c").count == 1
        return
    assert h.ack(2, consumer="c").skipped == [2], "deliveries are forgotten"
    claimed = h.claim(9, consumer="c")
    assert claimed.page.seqs == then
    assert set(claimed.deliveries) <= {1}


def test_reset_to_a_time() -> None:
    h = with_consumer(2)
    h.pass_time(1000)
    at = h.now()
    h.produce(2)
    fetched(h)
    assert h.do(k.ResetConsumer("q", "c", "ts", at)).to_seq == 3
    assert fetched(h) == [3, 4]


def test_a_reset_wakes_who_waits() -> None:
    h = with_consumer(2)
    h.ack(*fetched(h), consumer="c")
    token = h.parked(5, consumer="c", wait_ms=10_000)
    h.do(k.ResetConsumer("q", "c", "start"))
    assert h.answer(token).page.seqs == [1, 2]


def test_a_reset_does_not_double_what_had_come_back() -> None:
    h = with_consumer(1)
    fetched(h)
    h.nack(1, consumer="c")
    h.do(k.ResetConsumer("q", "c", "start"))
    fetched(h)
    h.nack(1, consumer="c")
    assert fetched(h) == [1]


def test_a_reset_leaves_what_is_on_its_way_to_the_dead_letters() -> None:
    h = with_consumer(3, dead_letter="dead")
    fetched(h)
    h.settle("term", 2, consumer="c")
    h.do(k.ResetConsumer("q", "c", "start"))
    assert (h.look().lag_records, h.look().ack_pending) == (2, 1)
    assert fetched(h) == [1, 3]
    assert h.ship() == 1
    assert h.ack(1, 3, consumer="c").count == 2
    assert (h.look().dead_lettered, h.look().ack_floor) == (1, 3)


@every_end
def test_a_reset_lasts(end: End) -> None:
    h = with_consumer(5)
    h.ack(*fetched(h), consumer="c")
    h.do(k.ResetConsumer("q", "c", "seq", 4))
    end(h)
    assert fetched(h) == [4, 5]


# ---- the end of idle consumers


def test_an_idle_consumer_goes() -> None:
    h = with_consumer(1, inactive_ttl_ms=5000)
    h.pass_time(4000)
    fetched(h)
    h.pass_time(4999)
    h.look()
    h.pass_time(5000)
    h.refused(k.GetConsumer("q", "c"), ConsumerNotFound)
    assert h.do(k.ListConsumers("q")).consumers == []


def test_a_consumer_with_waiting_claims_is_not_idle() -> None:
    h = with_consumer(0, inactive_ttl_ms=5000)
    token = h.parked(consumer="c", standing=True, connection=1)
    h.pass_time(60_000)
    h.produce(1)
    assert h.answer(token).page.seqs == [1]


def test_an_idle_consumer_that_goes_is_gone_for_good_and_frees_what_it_kept() -> None:
    h = with_consumer(3, {"retention": "interest"}, inactive_ttl_ms=5000)
    h.make("d")
    h.ack(*h.got(9, consumer="d"), consumer="d")
    assert h.seqs("q") == [1, 2, 3]
    h.pass_time(5001)
    assert h.seqs("q") == []
    h.kill_and_open()
    assert [row.consumer for row in h.do(k.ListConsumers("q")).consumers] == ["d"]


def test_a_restart_is_no_idleness() -> None:
    h = with_consumer(1, inactive_ttl_ms=5000)
    h.pass_time(4000)
    h.restart()
    h.pass_time(4000)
    assert fetched(h) == [1]


def test_a_consumer_without_that_limit_stays() -> None:
    h = with_consumer(1)
    h.pass_time(86_400_000)
    assert fetched(h) == [1]


# ---- replay


def test_original_replay_keeps_the_distances() -> None:
    h = LeaseHarness(log(), jobs=1)
    h.pass_time(1000)
    h.produce(1)
    h.pass_time(3000)
    h.produce(1)
    h.make(replay="original", ack="none")
    assert fetched(h) == [1]
    h.pass_time(999)
    assert fetched(h) == []
    h.pass_time(1)
    assert fetched(h) == [2]
    token = h.parked(9, consumer="c", wait_ms=20_000)
    h.pass_time(2999)
    assert h.answer(token) is None
    h.pass_time(2)
    assert h.answer(token).page.seqs == [3]


# ---- tombstones


def test_records_evicted_before_the_cursor_are_announced_once() -> None:
    h = with_consumer(0, {"cap_records": 3})
    h.produce(2)
    fetched(h, 1)
    h.produce(6)
    state = h.look()
    assert state.tombstone is not None
    claimed = h.claim(9, consumer="c")
    stone = claimed.tombstone
    assert stone is not None
    assert (stone.gap_to, stone.reason, stone.earliest_seq, stone.head_seq) == (5, "cap", 6, 8)
    assert stone.gap_from == 2
    assert claimed.page.seqs == [6, 7, 8]
    assert h.claim(9, consumer="c").tombstone is None
    state = h.look()
    assert (state.tombstone, state.ack_pending, state.ack_floor) == (None, 3, 5)


def test_a_tombstone_ends_where_the_loss_ends_though_more_was_deleted() -> None:
    h = with_consumer(0, {"cap_records": 3})
    h.produce(6)
    h.do(c.Delete("q", seqs=[4]))
    stone = h.claim(9, consumer="c").tombstone
    assert stone == h.diff("q").tombstone
    assert stone is not None
    assert (stone.gap_from, stone.gap_to, stone.earliest_seq) == (1, 3, 4)


def test_deletes_make_no_tombstone() -> None:
    h = with_consumer(5)
    h.do(c.Delete("q", before_seq=4))
    claimed = h.claim(9, consumer="c")
    assert (claimed.tombstone, claimed.page.seqs) == (None, [4, 5])


def test_expiry_makes_a_tombstone() -> None:
    h = with_consumer(2, {"ttl_ms": 1000})
    h.pass_time(1001)
    h.produce(1)
    claimed = h.claim(9, consumer="c")
    assert claimed.tombstone is not None
    assert (claimed.tombstone.gap_from, claimed.tombstone.gap_to, claimed.tombstone.reason) == (1, 2, "ttl")
    assert claimed.page.seqs == [3]


def test_a_tombstone_wakes_a_waiting_fetch_and_survives_a_crash_before_it_was_told() -> None:
    h = with_consumer(0, {"cap_records": 2})
    h.produce(5)
    h.kill_and_open()
    claimed = h.claim(9, consumer="c")
    assert claimed.tombstone is not None
    assert (claimed.tombstone.gap_from, claimed.tombstone.gap_to) == (1, 3)


# ---- lasting state


@every_end
def test_places_acks_and_counts_last(end: End) -> None:
    h = with_consumer(8, max_deliver=9)
    fetched(h, 5)
    h.ack(1, 2, 4, consumer="c")
    h.nack(3, consumer="c")
    claimed = h.claim(1, consumer="c", lease_ms=600_000)
    assert (claimed.page.seqs, claimed.deliveries) == ([3], [2])
    before = h.look()
    end(h)
    after = h.look()
    for name in ("cursor", "ack_floor", "ack_pending", "acked", "lag_records", "created_ts", "config"):
        assert getattr(after, name) == getattr(before, name), name
    assert h.ack(3, consumer="c", lease_ids=claimed.lease_ids).count == 1
    h.pass_time(LEASE_MS + 5)
    claimed = h.claim(9, consumer="c")
    assert (claimed.page.seqs, claimed.deliveries) == ([5, 6, 7, 8], [2, 1, 1, 1])


@every_end
def test_a_dropped_consumer_stays_gone(end: End) -> None:
    h = with_consumer(2)
    h.make("d")
    fetched(h)
    h.do(k.DropConsumer("q", "c"))
    end(h)
    h.refused(k.GetConsumer("q", "c"), ConsumerNotFound)
    assert h.look("d").lag_records == 2


@every_end
def test_a_change_of_its_config_lasts(end: End) -> None:
    h = with_consumer(2)
    h.make(ack="all", filter=(("Subject", "a.>"),), backoff_ms=(200, 300))
    config = h.look().config
    end(h)
    assert h.look().config == config


@every_end
def test_consumers_of_a_topic_that_was_dropped_are_gone(end: End) -> None:
    h = with_consumer(2)
    h.do(c.DropTopic("q"))
    h.put("q", log())
    end(h)
    assert h.do(k.ListConsumers("q")).consumers == []


# ---- what acks do to records


def test_limits_keep_what_is_acked() -> None:
    h = with_consumer(3)
    h.ack(*fetched(h), consumer="c")
    assert h.seqs("q") == [1, 2, 3]


def test_interest_drops_what_every_consumer_has_acked() -> None:
    h = with_consumer(4, {"retention": "interest"})
    h.make("d")
    fetched(h)
    h.got(9, consumer="d")
    h.ack(1, 2, 3, consumer="c")
    assert h.seqs("q") == [1, 2, 3, 4]
    h.ack(2, 3, consumer="d")
    assert h.seqs("q") == [1, 4]
    h.ack(1, consumer="d")
    assert h.seqs("q") == [4]
    assert h.gaps("q") == [], "on purpose, so there is no tombstone"
    assert (h.look("c").ack_floor, h.look("d").ack_floor) == (3, 3)


def test_interest_of_a_consumer_that_goes_ends() -> None:
    h = with_consumer(3, {"retention": "interest"})
    h.make("d")
    h.ack(*fetched(h), consumer="c")
    assert h.seqs("q") == [1, 2, 3]
    h.do(k.DropConsumer("q", "d"))
    h.rest()
    assert h.seqs("q") == []


def test_interest_in_some_tags_only() -> None:
    h = LeaseHarness(log(retention="interest"))
    h.make(filter=(("Eq", "a"),))
    h.make("d")
    h.do(append("q", *numbered(1, 2), tags=[b"a", b"b"]))
    assert fetched(h) == [1]
    h.ack(1, consumer="c")
    assert h.got(9, consumer="d") == [1, 2]
    h.ack(1, 2, consumer="d")
    assert h.seqs("q") == []


def test_work_queue_drops_with_the_first_ack() -> None:
    h = with_consumer(3, {"retention": "work_queue"})
    fetched(h)
    h.ack(2, consumer="c")
    assert h.seqs("q") == [1, 3]


EU, US, TEA = (("Subject", "eu.>"),), (("Glob", "us.*"),), (("Subject", "*.tea"), ("Eq", "jam"))


def overlap_in(h: LeaseHarness, command: c.Command) -> str:
    """The consumer with which the requested one would overlap."""
    return str(h.refused(command, ConsumerOverlap).detail["consumer"])


def test_consumers_of_a_work_queue_do_not_overlap() -> None:
    h = LeaseHarness(log(retention="work_queue"))
    h.make("eu", filter=EU)
    h.make("us", filter=US)
    error = h.refused(k.PutConsumer("q", "tea", consumer(filter=TEA)), ConsumerOverlap)
    assert error.detail == {"topic": "q", "consumer": "eu"}
    assert "'eu' and 'tea'" in str(error)
    assert overlap_in(h, k.PutConsumer("q", "all", consumer())) == "eu"
    h.refused(k.GetConsumer("q", "tea"), ConsumerNotFound)
    assert not h.make("us", filter=US, max_deliver=2).created, "its own records are not an overlap"
    assert overlap_in(h, k.PutConsumer("q", "us", consumer(filter=EU))) == "eu"
    assert h.look("us").config == consumer(filter=US, max_deliver=2), "a refused change must have no effect"
    h.do(k.PauseConsumer("q", "eu", True))
    assert overlap_in(h, k.PutConsumer("q", "tea", consumer(filter=TEA))) == "eu", "it will continue"
    h.do(k.DropConsumer("q", "eu"))
    assert overlap_in(h, k.PutConsumer("q", "tea", consumer(filter=TEA))) == "us"
    h.do(k.DropConsumer("q", "us"))
    assert h.make("tea", filter=TEA).created


def test_overlaps_are_found_in_what_is_staged() -> None:
    """Two requests of one turn, and a refusal that is not sent before the state that it depends on is synced."""
    h = LeaseHarness(log(retention="work_queue"))
    first, second = h.ask(*(k.PutConsumer("q", name, consumer()) for name in ("a", "b")))
    assert first not in h.replies and second not in h.replies
    h.run_jobs()
    assert h.replies[first].created
    assert isinstance(h.replies[second], ConsumerOverlap)


def test_a_topic_with_overlapping_consumers_does_not_become_a_work_queue() -> None:
    h = LeaseHarness(log())
    for name, filter in (("eu", EU), ("us", US), ("tea", TEA)):
        h.make(name, filter=filter)
    on = c.PutTopic("q", log(retention="work_queue"))
    assert overlap_in(h, on) == "eu"
    assert h.state("q").config == log()
    h.make("tea", filter=(("Eq", "jam"), ("Eq", "tea")))
    h.do(on)
    assert h.state("q").config.retention == "work_queue"
    h.do(c.PutTopic("q", log(retention="interest")))
    h.make("all")
    assert overlap_in(h, on) == "eu"


def test_a_queue_with_retention_work_queue_has_its_own_consumer_only() -> None:
    h = LeaseHarness(queue(retention="work_queue"))
    error = h.refused(k.PutConsumer("q", "c", consumer(filter=EU)), ConsumerOverlap)
    assert error.detail["consumer"] == "" and "the queue's own consumer" in str(error)
    h.do(c.PutTopic("q", queue()))
    h.make(filter=EU)
    assert overlap_in(h, c.PutTopic("q", queue(retention="work_queue"))) == "c"


@every_end
def test_overlaps_of_before_load_and_go_on(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    h = LeaseHarness(log(retention="work_queue"), jobs=2)
    assert h.engine.report.overlaps == []
    with monkeypatch.context() as before:
        before.setattr(Consumers, "_check_overlap", lambda *_: iter(()))  # as in files of an earlier version
        h.make("a")
        h.make("b")
    end(h)
    assert h.engine.report.overlaps == [("q", "a", "b")]
    assert h.got(9, consumer="a") == h.got(9, consumer="b") == [1, 2]
    h.ack(1, consumer="a")
    assert h.ack(1, 2, consumer="b").skipped == [1]
    assert not h.make("a", max_deliver=3).created, "only another filter is compared"
    assert overlap_in(h, k.PutConsumer("q", "a", consumer(filter=EU))) == "b"
    h.do(c.PutTopic("q", log(retention="work_queue", cap_records=5)))
    h.do(k.DropConsumer("q", "b"))
    h.make("a", filter=EU)
    h.restart()
    assert h.engine.report.overlaps == []


def with_filters(*patterns: list[str]) -> TopicConsumers:
    made = TopicConsumers()
    for i, texts in enumerate(patterns):
        config = consumer(filter=tuple(("Subject", text) for text in texts))
        made.named[str(i)] = Consumer(str(i), config, lambda _: None)
    return made


@pytest.mark.parametrize("first", ["shop", "*"])
def test_comparing_many_filters_costs_little_for_each_pair(first: str) -> None:
    many = range(200)
    consumers = with_filters(*[[f"{first}.{i}.{j}" for j in range(32)] for i in many])
    new = filter_of(consumer(filter=tuple(("Subject", f"*.*.x{j}") for j in range(32))))
    assert sum(consumers.overlapping("new", new)) <= 40 * len(many), "units of about a microsecond"
    one = filter_of(consumer(filter=(("Subject", "*.199.*"),)))
    steps = consumers.overlapping("new", one)
    with pytest.raises(StopIteration) as found:
        for _ in range(len(many) + 1):
            next(steps)
    assert found.value.value == "199"


@every_end
@pytest.mark.parametrize("retention", ["interest", "work_queue"])
def test_records_dropped_by_acks_stay_gone(end: End, retention: str) -> None:
    h = with_consumer(6, {"retention": retention})
    fetched(h, 4)
    h.ack(1, 3, consumer="c")
    assert h.seqs("q") == [2, 4, 5, 6]
    end(h)
    assert h.seqs("q") == [2, 4, 5, 6]
    h.pass_time(LEASE_MS + 5)
    assert fetched(h) == [2, 4, 5, 6]


def test_a_queue_is_a_work_queue_whatever_its_retention_says() -> None:
    h = LeaseHarness(queue(retention="limits"), jobs=2)
    h.claim()
    h.ack(1)
    assert h.seqs("q") == [2]
