"""Goal: named consumers: where they begin, what they get, how records are settled, and their lag.

Method: an engine on a SimDisk with one topic, whose clock moves only when a test says so. Restarts and the effects of
acks on records have files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from tests.support.engine_harness import SMALL, append, numbered
from tests.support.lease_harness import LEASE_MS, LeaseHarness, consumer, log, queue
from topics.api import limits
from topics.api.errors import ConsumerNotFound, InvalidRequest, Throttled, TopicNotFound
from topics.engine.commands import consumers as k
from topics.engine.commands import topics as c

A, B = b"a", b"b"


def with_consumer(records: int = 0, topic: dict[str, Any] | None = None, **fields: Any) -> LeaseHarness:
    """A log with this many records, and the consumer `c`, which was created after them."""
    h = LeaseHarness(log(**(topic or {})), jobs=records)
    h.make(**fields)
    return h


def fetched(h: LeaseHarness, max: int = 100, **options: Any) -> list[int]:
    return h.got(max, consumer="c", **options)


def everything(h: LeaseHarness) -> list[int]:
    """Everything it delivers until nothing is left."""
    seqs: list[int] = []
    while more := fetched(h):
        seqs += more
    return seqs


def tagged(h: LeaseHarness, tags: Sequence[str | None]) -> None:
    """One record for each tag."""
    first = h.state("q").head_seq + 1
    h.do(
        append("q", *numbered(first, len(tags)), tags=[None if tag is None else tag.encode() for tag in tags])
    )


# ---- create, change, delete


def test_put_makes_and_changes() -> None:
    h = LeaseHarness(log(), jobs=3)
    made = h.make(max_deliver=4)
    assert (made.topic, made.consumer, made.created, made.config) == ("q", "c", True, consumer(max_deliver=4))
    assert (made.cursor, made.delivered, made.ack_pending, made.ack_floor, made.lag_records) == (
        1,
        0,
        0,
        0,
        3,
    )
    assert made.created_ts == h.now()
    same = h.make(max_deliver=4)
    assert (same.created, same.config, same.created_ts) == (False, consumer(max_deliver=4), made.created_ts)
    changed = h.make(max_deliver=5)
    assert (changed.created, changed.config) == (False, consumer(max_deliver=5))
    assert h.look().config == consumer(max_deliver=5)


def test_put_is_a_no_op_when_nothing_differs() -> None:
    h = with_consumer()
    h.rest()
    written = h.engine.wal.last_lsn
    assert not h.make().created
    assert h.engine.wal.last_lsn == written


def test_a_topic_has_so_many_consumers_and_no_more() -> None:
    h = LeaseHarness(log(), engine=msgspec.structs.replace(SMALL, verify=False))
    for i in range(limits.CONSUMERS_PER_TOPIC_MAX):
        h.make(f"c{i}")
    error = h.refused(k.PutConsumer("q", "more", consumer()), Throttled)
    assert error.detail == {"limit": "consumers", "max": limits.CONSUMERS_PER_TOPIC_MAX}
    assert not h.make("c0", max_deliver=3).created, "an existing consumer may be changed"
    h.do(k.DropConsumer("q", "c1"))
    assert h.make("more").created


def test_a_change_keeps_its_place() -> None:
    h = with_consumer(5)
    fetched(h, 3)
    h.ack(1, consumer="c")
    state = h.make(ack_wait_ms=5000)
    assert (state.cursor, state.delivered, state.ack_pending, state.ack_floor) == (4, 3, 2, 1)


@pytest.mark.parametrize("name", ["", "-a", "a b", "é", "x" * 256])
def test_bad_names(name: str) -> None:
    h = LeaseHarness(log())
    h.refused(k.PutConsumer("q", name, consumer()), InvalidRequest)


@pytest.mark.parametrize("name", ["a", "A.b_c:d-9", "x" * 255])
def test_good_names(name: str) -> None:
    h = LeaseHarness(log(), jobs=1)
    h.make(name)
    assert h.got(consumer=name) == [1]


def test_absent_topics_and_consumers() -> None:
    h = LeaseHarness(log())
    for topic, error in (("absent", TopicNotFound), ("q", ConsumerNotFound)):
        for command in (
            k.Claim(topic, "c", b"w"),
            k.Settle(topic, "ack", b"w", [1], consumer="c"),
            k.GetConsumer(topic, "c"),
            k.PauseConsumer(topic, "c", True),
            k.ResetConsumer(topic, "c", "start"),
        ):
            h.refused(command, error)
    h.refused(k.PutConsumer("absent", "c", consumer()), TopicNotFound)
    h.refused(k.ListConsumers("absent"), TopicNotFound)


def test_drop() -> None:
    h = with_consumer(3)
    fetched(h)
    assert h.do(k.DropConsumer("q", "c")) == k.ConsumerDropped("q", "c", True)
    assert h.do(k.DropConsumer("q", "c")) == k.ConsumerDropped("q", "c", False)
    h.refused(k.GetConsumer("q", "c"), ConsumerNotFound)
    assert h.make().delivered == 0, "with its state"
    assert h.claim(9, consumer="c").deliveries == [1, 1, 1]


def test_a_list_is_in_order_and_in_pages() -> None:
    h = LeaseHarness(log())
    for name in ("b", "a", "d", "c"):
        h.make(name)

    def names(**options: Any) -> list[str]:
        return [row.consumer for row in h.do(k.ListConsumers("q", **options)).consumers]

    assert names() == ["a", "b", "c", "d"]
    assert names(limit=2) == ["a", "b", "c"], "one more shows that there is more"
    assert names(after="b", limit=2) == ["c", "d"]
    assert names(after="d") == []


def test_a_queue_does_not_list_its_own() -> None:
    h = LeaseHarness(queue(), jobs=1)
    assert h.do(k.ListConsumers("q")).consumers == []
    h.make()
    assert [row.consumer for row in h.do(k.ListConsumers("q")).consumers] == ["c"]


def test_consumers_do_not_notice_each_other() -> None:
    h = with_consumer(3)
    h.make("d")
    assert fetched(h) == [1, 2, 3]
    h.ack(1, 2, 3, consumer="c")
    assert h.got(9, consumer="d") == [1, 2, 3]
    assert h.seqs("q") == [1, 2, 3], "the log is not changed"


def test_a_queue_may_have_consumers_too() -> None:
    h = LeaseHarness(queue(), jobs=3)
    h.make()
    assert fetched(h) == [1, 2, 3]
    h.ack(1, consumer="c")
    assert h.seqs("q") == [1, 2, 3]
    assert h.got(2) == [1, 2]
    h.ack(2)
    assert h.look().ack_pending == 1, "of 2 and 3, and 2 is gone"


# ---- where it begins


@pytest.mark.parametrize(
    ("deliver", "value", "got"),
    [
        ("all", 0, [1, 2, 3, 4, 5, 6]),
        ("new", 0, [6]),
        ("last", 0, [5, 6]),
        ("from_seq", 0, [1, 2, 3, 4, 5, 6]),
        ("from_seq", 4, [4, 5, 6]),
        ("from_seq", 6, [6]),
        ("last_per_tag", 0, [3, 4, 6]),
    ],
)
def test_deliver_policies(deliver: str, value: int, got: list[int]) -> None:
    h = LeaseHarness(log())
    tagged(h, ["a", "b", "b", "a", None])
    h.make(deliver=deliver, deliver_value=value)
    tagged(h, ["a"])
    assert everything(h) == got


def test_deliver_from_a_seq_that_is_still_to_come() -> None:
    h = LeaseHarness(log(), jobs=2)
    h.make(deliver="from_seq", deliver_value=5)
    assert fetched(h) == []
    h.produce(4)
    assert fetched(h) == [5, 6]


def test_deliver_from_a_time() -> None:
    h = LeaseHarness(log(), jobs=2)
    h.pass_time(1000)
    at = h.now()
    h.produce(2)
    h.pass_time(1000)
    h.produce(1)
    h.make("at", deliver="from_ts", deliver_value=at)
    h.make("after", deliver="from_ts", deliver_value=at + 1)
    h.make("ever", deliver="from_ts", deliver_value=0)
    h.make("future", deliver="from_ts", deliver_value=at + 1_000_000)
    assert [h.got(9, consumer=name) for name in ("at", "after", "ever")] == [[3, 4, 5], [5], [1, 2, 3, 4, 5]]
    assert h.got(9, consumer="future") == []


def test_deliver_last_of_what_matches() -> None:
    h = LeaseHarness(log())
    tagged(h, ["a", "b", "a", "b"])
    h.make(deliver="last", filter=(("Eq", "a"),))
    tagged(h, ["a"])
    assert fetched(h) == [3, 5]


def test_deliver_last_of_nothing() -> None:
    h = LeaseHarness(log())
    h.make(deliver="last")
    h.produce(2)
    assert fetched(h) == [1, 2]


def test_deliver_last_per_tag_of_what_matches() -> None:
    h = LeaseHarness(log())
    tagged(h, ["a.x", "a.y", "b.x", "a.x", "b.x"])
    h.make(deliver="last_per_tag", filter=(("Glob", "a.*"),))
    tagged(h, ["a.y"])
    assert everything(h) == [2, 4, 6]
    assert h.look().lag_records == 0


def test_deliver_last_of_what_is_live() -> None:
    h = LeaseHarness(log())
    tagged(h, ["a", "b", "a", "b"])
    h.do(c.Delete("q", seqs=[3, 4]))
    h.make("last", deliver="last")
    h.make("each", deliver="last_per_tag")
    assert h.got(9, consumer="last") == [2]
    assert h.got(9, consumer="each") == [1, 2]


@pytest.mark.parametrize("end", [LeaseHarness.restart, LeaseHarness.kill_and_open])
def test_records_chosen_at_the_start_are_remembered(end: Callable[[LeaseHarness], None]) -> None:
    h = LeaseHarness(log())
    tagged(h, ["a", "b", "a", "c", None])
    h.make(deliver="last_per_tag")
    state = h.look()
    assert (state.lag_records, state.ack_floor, state.cursor) == (3, 1, 6)
    assert fetched(h, 1) == [2]
    h.do(c.Delete("q", seqs=[3]))
    end(h)
    assert h.look().lag_records == 1
    assert everything(h) == [4]
    tagged(h, ["a"])
    assert everything(h) == [6]


# ---- filters


FILTER_TAGS = ["a", "a.b", "a.b.c", "ab", "b", None, "", "x.b"]


@pytest.mark.parametrize(
    ("filter", "got"),
    [
        ((), [1, 2, 3, 4, 5, 6, 7, 8]),
        ((("Eq", "a"),), [1]),
        ((("Eq", ""),), [7]),
        ((("Glob", "a*"),), [1, 2, 3, 4]),
        ((("Glob", "*"),), [1, 2, 3, 4, 5, 7, 8]),
        ((("Subject", "a.*"),), [2]),
        ((("Subject", "a.>"),), [2, 3]),
        ((("Subject", "*.b"),), [2, 8]),
        ((("Subject", ">"),), [1, 2, 3, 4, 5, 8]),
        ((("Eq", "a"), ("Eq", "b")), [1, 5]),
        ((("Subject", "a.>"), ("Glob", "x*")), [2, 3, 8]),
        ((("Eq", "absent"),), []),
    ],
)
def test_filters(filter: tuple[tuple[str, str], ...], got: list[int]) -> None:
    h = LeaseHarness(log())
    tagged(h, FILTER_TAGS)
    h.make(filter=filter)
    assert h.look().lag_records == len(got)
    assert fetched(h) == got
    state = h.look()
    assert (state.lag_records, state.ack_pending) == (0, len(got))
    h.ack(*got, consumer="c")
    assert h.look().ack_floor == 8, "records that do not match need no ack"


def test_any_number_of_filtered_records_is_skipped() -> None:
    h = LeaseHarness(log())
    h.make(filter=(("Eq", "rare"),))
    for _ in range(3):
        tagged(h, ["common"] * 50)
    tagged(h, ["rare"])
    assert h.look().lag_records == 1
    assert fetched(h) == [151]


def test_a_filter_that_changes_is_for_what_comes() -> None:
    h = LeaseHarness(log())
    tagged(h, ["a", "b", "a", "b"])
    h.make(filter=(("Eq", "a"),))
    assert fetched(h, 1) == [1]
    h.make(filter=(("Eq", "b"),))
    assert fetched(h) in ([4], [2, 4])
    assert h.look().lag_records == 0


# ---- acks


def test_explicit_acks_move_the_floor() -> None:
    h = with_consumer(5)
    fetched(h, 4)
    for seq, floor, pending in ((2, 0, 3), (1, 2, 2), (4, 2, 1), (3, 4, 0)):
        settled = h.ack(seq, consumer="c")
        assert (settled.consumer, settled.count, settled.ready, settled.in_flight) == ("c", 1, 1, pending)
        state = h.look()
        assert (state.ack_floor, state.ack_pending, state.in_flight) == (floor, pending, pending)
    assert h.look().acked == 4


def test_acked_records_are_not_delivered_again() -> None:
    h = with_consumer(3)
    fetched(h)
    h.ack(2, consumer="c")
    h.pass_time(LEASE_MS + 1)
    claimed = h.claim(9, consumer="c")
    assert (claimed.page.seqs, claimed.deliveries) == ([1, 3], [2, 2])
    state = h.look()
    assert (state.delivered, state.redelivered, state.ack_pending) == (5, 2, 2)


def test_ack_all_takes_everything_up_to_the_highest() -> None:
    h = with_consumer(6, ack="all")
    fetched(h, 5)
    settled = h.ack(2, 3, consumer="c")
    assert settled.count >= 1
    state = h.look()
    assert (state.ack_floor, state.ack_pending, state.acked) == (3, 2, 3)
    h.pass_time(LEASE_MS + 1)
    assert fetched(h) == [4, 5, 6]


def test_ack_all_of_what_was_never_handed_out_acks_nothing_beyond() -> None:
    h = with_consumer(6, ack="all")
    fetched(h, 2)
    h.ack(6, consumer="c")
    assert h.look().cursor == 3
    assert h.look().lag_records == 4
    assert fetched(h)[-4:] == [3, 4, 5, 6]


def test_ack_none_hands_out_and_forgets() -> None:
    h = with_consumer(3, ack="none")
    claimed = h.claim(2, consumer="c")
    assert (claimed.page.seqs, claimed.lease_ids) == ([1, 2], [0, 0])
    state = h.look()
    assert (state.delivered, state.ack_pending, state.ack_floor, state.in_flight) == (2, 0, 2, 0)
    h.pass_time(LEASE_MS + 1)
    assert fetched(h) == [3]
    assert fetched(h) == []


def test_nack_and_extend_as_in_a_queue() -> None:
    h = with_consumer(3)
    fetched(h, 2)
    assert h.nack(1, consumer="c").count == 1
    claimed = h.claim(1, consumer="c")
    assert (claimed.page.seqs, claimed.deliveries) == ([1], [2])
    h.nack(1, consumer="c", delay_ms=100)
    assert fetched(h) == [3]
    h.pass_time(100)
    assert fetched(h) == [1]
    extended = h.extend(1, consumer="c", lease_ms=9000)
    assert extended.deadlines == {1: h.now() + 9000}
    h.pass_time(LEASE_MS + 1)
    assert fetched(h) == [2, 3]


def test_term_ends_redelivery() -> None:
    h = with_consumer(2)
    fetched(h)
    settled = h.settle("term", 1, consumer="c", reason="broken")
    assert (settled.count, settled.skipped, settled.in_flight) == (1, [], 1)
    h.pass_time(LEASE_MS + 1)
    assert fetched(h) == [2]
    h.ack(2, consumer="c")
    assert (h.look().ack_floor, h.look().ack_pending) == (2, 0)
    assert h.seqs("q") == [1, 2]


def test_fences_hold_for_consumers() -> None:
    h = with_consumer(1)
    (old,) = h.claim(consumer="c").lease_ids
    h.pass_time(LEASE_MS + 1)
    h.claim(consumer="c")
    assert h.ack(1, consumer="c", lease_ids=[old]).skipped == [1]
    assert h.ack(1, consumer="c", node=B).skipped == [1]
