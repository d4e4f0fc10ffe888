"""Goal: leases of a queue as specified (semantics, section 10), promise by promise: who gets what, for how long, how
often.

Method: one engine on a SimDisk, whose clock moves only when a test says so. Settles, restarts, dead letters and
waiting claims have files of their own.
"""

from __future__ import annotations

import pytest

from tests.support.engine_harness import append, rows_of
from tests.support.lease_harness import LEASE_MS, LeaseHarness, log, queue
from topics.api.errors import InvalidRequest, NotAQueue, TopicNotFound
from topics.engine.commands import consumers as k
from topics.engine.commands import topics as c

CLASSES = ["fsync", "disk", "memory", "ephemeral"]
A, B = b"a", b"b"


def refused_on(h: LeaseHarness, topic: str, error: type[Exception], node: bytes = A) -> None:
    h.refused(k.Claim(topic, node=node), error)
    for kind in ("ack", "nack", "extend"):
        h.refused(k.Settle(topic, kind, A, [1], lease_ms=100), error)


# ---- allowed requests


def test_absent_topics_are_not_made() -> None:
    h = LeaseHarness()
    refused_on(h, "absent", TopicNotFound)
    h.refused(c.State("absent"), TopicNotFound)


def test_a_log_is_not_a_queue() -> None:
    h = LeaseHarness(log(), jobs=1)
    refused_on(h, "q", NotAQueue)
    assert h.state("q").queue is None


@pytest.mark.parametrize("node", [b"", b"n" * 129])
def test_a_claim_looks_at_the_node_after_existence_and_type(node: bytes) -> None:
    h = LeaseHarness(jobs=1)
    h.put("log", log())
    h.refused(k.Claim("absent", node=node), TopicNotFound)
    h.refused(k.Claim("log", node=node), NotAQueue)
    h.refused(k.Claim("q", node=node), InvalidRequest)
    assert h.counts() == (1, 0, 0)


def test_a_node_of_128_bytes_is_fine() -> None:
    assert LeaseHarness(jobs=1).got(node=b"n" * 128) == [1]


# ---- claim


@pytest.mark.parametrize("durability", CLASSES)
def test_a_claim_leases_the_first_jobs(durability: str) -> None:
    h = LeaseHarness(queue(durability=durability), jobs=3)
    claimed = h.claim(2, node=A)
    assert (claimed.topic, claimed.consumer, claimed.ready) == ("q", "", 1)
    assert rows_of(claimed.page) == [(1, b'"record 1"'), (2, b'"record 2"')]
    assert claimed.deliveries == [1, 1]
    assert claimed.deadlines == [h.now() + LEASE_MS] * 2
    assert len(set(claimed.lease_ids)) == 2 and all(claimed.lease_ids)
    assert claimed.tombstone is None
    assert h.counts() == (1, 2, 0)


def test_an_empty_queue_answers_with_nothing() -> None:
    h = LeaseHarness()
    claimed = h.claim(10)
    assert (claimed.page.seqs, claimed.ready) == ([], 0)


def test_fewer_than_asked_for() -> None:
    h = LeaseHarness(jobs=2)
    assert h.got(10) == [1, 2]
    assert h.got(10) == []


def test_nobody_gets_what_somebody_has() -> None:
    h = LeaseHarness(jobs=4)
    assert h.got(2, node=A) == [1, 2]
    assert h.got(1, node=A) == [3], "a node may have several"
    assert h.got(9, node=B) == [4]


def test_the_lease_is_as_long_as_the_claim_says() -> None:
    h = LeaseHarness(jobs=2)
    assert h.claim(lease_ms=5000).deadlines == [h.now() + 5000]
    assert h.claim().deadlines == [h.now() + LEASE_MS]


def test_max_bytes_ends_a_claim_but_never_before_one_job() -> None:
    h = LeaseHarness(jobs=5)
    assert h.got(5, max_bytes=1) == [1]
    size = len(b'"record 1"')
    assert h.got(5, max_bytes=2 * size) == [2, 3]
    assert h.counts() == (2, 3, 0)


def test_max_bytes_counts_the_same_for_what_comes_again() -> None:
    h = LeaseHarness(jobs=5)
    h.claim(5)
    h.nack(1, 2, 3, 4, 5)
    size = len(b'"record 1"')
    assert h.got(5, max_bytes=2 * size) == [1, 2]
    assert h.got(5, max_bytes=3 * size - 1) == [3, 4]


def test_claims_are_not_stopped_by_the_nodes_of_jobs() -> None:
    h = LeaseHarness()
    h.produce(2, nodes=[A, None])
    assert h.got(2, node=A) == [1, 2]


def test_reads_neither_lease_nor_ack() -> None:
    h = LeaseHarness(jobs=2)
    h.claim()
    assert h.seqs("q") == [1, 2]
    assert h.counts() == (1, 1, 0)
    assert h.got(5) == [2]


def test_jobs_in_sealed_segments() -> None:
    h = LeaseHarness(jobs=30)
    h.checkpoint()
    assert h.got(9) == list(range(1, 10))
    h.ack(*range(1, 10))
    h.checkpoint()
    assert h.got(30) == list(range(10, 31))
    assert h.seqs("q") == list(range(10, 31))


# ---- order of deliveries


def test_reclaimed_jobs_come_first_and_the_lowest_of_them_before_others() -> None:
    h = LeaseHarness(jobs=6)
    h.claim(4)
    h.nack(3)
    h.nack(1)
    assert h.got() == [1]
    assert h.got() == [3]
    assert h.got() == [5]


def test_expired_nacked_and_due_jobs_are_one_line() -> None:
    h = LeaseHarness(jobs=5)
    h.claim(1, lease_ms=300)  # 1
    h.claim(1, lease_ms=200)  # 2
    h.claim(2)  # 3, 4
    h.nack(4, delay_ms=150)
    h.nack(3)
    h.pass_time(301)
    assert [h.got()[0] for _ in range(5)] == [1, 2, 3, 4, 5]


def test_an_answer_ascends_though_reclaimed_jobs_were_chosen_first() -> None:
    h = LeaseHarness(jobs=4)
    h.claim(3)
    h.nack(2)
    claimed = h.claim(2)
    assert (claimed.page.seqs, claimed.deliveries) == ([2, 4], [2, 1])


# ---- expiry


def test_expiry_is_strict() -> None:
    h = LeaseHarness(jobs=1)
    h.claim()
    h.pass_time(LEASE_MS)
    assert h.counts() == (0, 1, 0)
    assert h.got() == []
    h.pass_time(1)
    assert h.counts() == (1, 0, 0)
    assert h.got() == [1]


def test_a_lease_can_be_acked_in_its_last_millisecond_and_not_later() -> None:
    h = LeaseHarness(jobs=2)
    h.claim(2)
    h.pass_time(LEASE_MS)
    assert h.ack(1).count == 1
    h.pass_time(1)
    assert (h.ack(2).count, h.ack(2).skipped) == (0, [2])


@pytest.mark.parametrize("kind", ["ack", "nack", "extend"])
def test_an_expired_lease_is_nobodys(kind: k.SettleKind) -> None:
    h = LeaseHarness(jobs=1)
    (lease,) = h.claim().lease_ids
    h.pass_time(LEASE_MS + 1)
    settled = h.settle(kind, 1, lease_ids=[lease], lease_ms=5000)
    assert (settled.count, settled.skipped, settled.ready, settled.in_flight) == (0, [1], 1, 0)
    assert h.claim().deliveries == [2]


def test_expiry_of_one_lease_leaves_the_others() -> None:
    h = LeaseHarness(jobs=3)
    for lease_ms in (3000, 1000, 2000):
        h.claim(lease_ms=lease_ms)
    for expired in (2, 3, 1):
        h.pass_time(1001)
        assert h.got(9, lease_ms=60_000) == [expired]


def test_a_leap_of_the_wall_clock_expires_nothing() -> None:
    h = LeaseHarness(jobs=1)
    h.claim(lease_ms=60_000)
    h.clock.jump_wall(3_600_000)
    h.pass_time(1)
    assert h.counts() == (0, 1, 0)
    h.clock.jump_wall(-7_200_000)
    h.pass_time(10)
    assert h.counts() == (0, 1, 0)


# ---- deliveries


def test_deliveries_count_what_was_handed_out() -> None:
    h = LeaseHarness(jobs=1)
    counts = []
    for _ in range(3):
        counts += h.claim().deliveries
        h.nack(1)
    for _ in range(2):
        counts += h.claim().deliveries
        h.pass_time(LEASE_MS + 1)
    assert counts == [1, 2, 3, 4, 5]


def test_without_a_target_redelivery_never_ends() -> None:
    h = LeaseHarness(queue(max_deliveries=2), jobs=1)
    for delivery in range(1, 8):
        assert h.claim().deliveries == [delivery]
        h.nack(1)


def test_each_lease_has_an_id_of_its_own() -> None:
    h = LeaseHarness(jobs=3)
    seen = []
    for _ in range(4):
        seen += h.claim(3).lease_ids
        h.nack(1, 2, 3)
    assert len(set(seen)) == 12


# ---- connections


def test_a_connection_gives_back_what_it_has() -> None:
    h = LeaseHarness(jobs=4)
    h.claim(2, connection=7)
    h.claim(1, connection=8)
    h.claim(1)
    h.ack(1)
    released = h.do(k.Release("q", "", 7))
    assert released == k.Released("q", 1)
    assert h.counts() == (1, 2, 0)
    claimed = h.claim(9)
    assert (claimed.page.seqs, claimed.deliveries) == ([2], [2])


def test_a_connection_does_not_give_back_what_is_anothers_by_now() -> None:
    h = LeaseHarness(jobs=1)
    h.claim(connection=7)
    h.pass_time(LEASE_MS + 1)
    h.claim(node=B, connection=8)
    assert h.do(k.Release("q", "", 7)).count == 0
    assert h.counts() == (0, 1, 0)
    assert h.ack(1, node=B).count == 1


# ---- other ends of jobs


@pytest.mark.parametrize("when", ["ready", "leased", "delayed"])
def test_deleted_jobs_leave_all_counts_and_lines(when: str) -> None:
    h = LeaseHarness(jobs=3)
    if when != "ready":
        h.claim()
    if when == "delayed":
        h.nack(1, delay_ms=100)
    h.do(c.Delete("q", seqs=[1]))
    assert h.counts() == (2, 0, 0)
    assert h.ack(1).skipped == [1]
    h.pass_time(LEASE_MS + 1)
    assert h.counts() == (2, 0, 0)
    assert h.got(9) == [2, 3]


def test_evicted_jobs_leave_all_counts_and_lines() -> None:
    h = LeaseHarness(queue(cap_records=3), jobs=3)
    h.claim(2)
    h.produce(2)
    assert h.counts() == (3, 0, 0)
    assert h.ack(1, 2).skipped == [1, 2]
    assert h.got(9) == [3, 4, 5]
    h.pass_time(LEASE_MS + 1)
    assert h.counts() == (3, 0, 0)


def test_expired_jobs_leave_all_counts_and_lines() -> None:
    h = LeaseHarness(queue(ttl_ms=500), jobs=2)
    h.claim()
    h.pass_time(300)
    h.produce(1)
    h.pass_time(201)
    assert h.counts() == (1, 0, 0)
    assert h.ack(1).skipped == [1]
    assert h.got(9) == [3]


def test_records_with_a_life_of_their_own() -> None:
    h = LeaseHarness()
    h.do(append("q", b"1", b"2", ttls_ms=[500, 0]))
    h.claim(2)
    h.pass_time(501)
    assert h.counts() == (0, 1, 0)
    h.pass_time(LEASE_MS)
    assert h.got(9) == [2]


def test_a_queue_that_refuses_has_room_after_an_ack() -> None:
    h = LeaseHarness(queue(cap_records=2, discard="reject"), jobs=2)
    h.claim()
    h.ack(1)
    assert h.produce(1).first_seq == 3


def test_a_topic_of_the_same_name_begins_anew() -> None:
    h = LeaseHarness(jobs=2)
    leases = h.claim(2).lease_ids
    h.do(c.DropTopic("q"))
    h.put("q", queue())
    assert h.counts() == (0, 0, 0)
    h.produce(2)
    assert h.ack(1, 2, lease_ids=leases).skipped == [1, 2]
    assert h.claim(2).deliveries == [1, 1]


def test_a_changed_lease_time_is_for_new_leases() -> None:
    h = LeaseHarness(jobs=2)
    h.claim()
    h.put("q", queue(lease_ms=5000))
    h.claim()
    h.pass_time(LEASE_MS + 1)
    assert h.got(9) == [1]
