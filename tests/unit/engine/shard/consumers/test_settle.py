"""Goal: ack, nack and extend of a queue as specified (semantics, section 10), including lease ids and duplicates.

Method: one engine on a SimDisk, whose clock moves only when a test says so.
"""

from __future__ import annotations

import pytest

from tests.support.lease_harness import LEASE_MS, LeaseHarness, queue
from topics.engine.commands import consumers as k

CLASSES = ["fsync", "disk", "memory", "ephemeral"]
A, B = b"a", b"b"


# ---- ack


@pytest.mark.parametrize("durability", CLASSES)
def test_an_acked_job_is_gone(durability: str) -> None:
    h = LeaseHarness(queue(durability=durability), jobs=3)
    h.claim(2)
    settled = h.ack(1)
    assert (settled.count, settled.skipped, settled.ready, settled.in_flight) == (1, [], 1, 1)
    assert h.seqs("q") == [2, 3]
    assert (h.state("q").earliest_seq, h.state("q").count) == (2, 2)
    assert h.gaps("q") == [], "completed jobs leave no tombstone"
    h.pass_time(LEASE_MS + 1)
    assert h.got(9) == [2, 3]


def test_an_ack_waits_for_the_sync_of_its_class() -> None:
    for durability, waits in (("fsync", True), ("disk", False)):
        h = LeaseHarness(queue(durability=durability), jobs=1)
        h.claim()
        h.rest()
        (token,) = h.ask(k.Settle("q", "ack", b"w", [1]))
        assert (token not in h.replies) == waits
        h.rest()
        assert h.replies[token].synced == waits


def test_an_ack_is_not_repeated() -> None:
    h = LeaseHarness(jobs=1)
    h.claim()
    assert h.ack(1).count == 1
    again = h.ack(1)
    assert (again.count, again.skipped) == (0, [1])


def test_duplicates_count_once() -> None:
    h = LeaseHarness(jobs=3)
    leases = h.claim(3).lease_ids
    extended = h.extend(1, 1, 2, lease_ids=[leases[0], leases[0], 0])
    assert (extended.count, extended.skipped, sorted(extended.deadlines)) == (2, [1], [1, 2])
    nacked = h.nack(3, 3)
    assert (nacked.count, nacked.skipped) == (1, [3])
    acked = h.ack(2, 1, 2, 2)
    assert (acked.count, acked.skipped) == (2, [2, 2])


def test_skipped_are_those_without_a_lease_of_the_node_in_their_order() -> None:
    h = LeaseHarness(jobs=5)
    h.claim(2, node=A)
    h.claim(1, node=B)
    settled = h.ack(99, 3, 2, 4, 0, 1, node=A)
    assert (settled.count, settled.skipped) == (2, [99, 3, 4, 0])
    assert h.seqs("q") == [3, 4, 5]


@pytest.mark.parametrize("kind", ["ack", "nack", "extend"])
def test_empty_seqs_do_nothing(kind: k.SettleKind) -> None:
    h = LeaseHarness(jobs=2)
    h.claim()
    settled = h.settle(kind, lease_ms=5000)
    assert (settled.count, settled.skipped, settled.deadlines) == (0, [], {})
    assert (settled.ready, settled.in_flight) == (1, 1)


# ---- lease ids


@pytest.mark.parametrize("kind", ["ack", "nack", "extend"])
def test_an_old_lease_id_does_not_settle_the_new_lease(kind: k.SettleKind) -> None:
    h = LeaseHarness(jobs=1)
    (old,) = h.claim(node=A).lease_ids
    h.pass_time(LEASE_MS + 1)
    (new,) = h.claim(node=A).lease_ids
    assert old != new
    stale = h.settle(kind, 1, node=A, lease_ids=[old], lease_ms=5000)
    assert (stale.count, stale.skipped, stale.in_flight) == (0, [1], 1)
    assert h.settle(kind, 1, node=A, lease_ids=[new], lease_ms=5000).count == 1


def test_without_a_fence_the_node_is_enough() -> None:
    h = LeaseHarness(jobs=2)
    h.claim(node=A)
    h.pass_time(LEASE_MS + 1)
    h.claim(2, node=A)
    assert h.ack(1, 2, node=A, lease_ids=[0, 0]).count == 2


def test_a_lease_id_does_not_replace_the_node() -> None:
    h = LeaseHarness(jobs=1)
    leases = h.claim(node=A).lease_ids
    assert h.ack(1, node=B, lease_ids=leases).skipped == [1]


def test_lease_ids_belong_to_their_seqs() -> None:
    h = LeaseHarness(jobs=2)
    one, two = h.claim(2).lease_ids
    assert h.ack(1, 2, lease_ids=[two, one]).skipped == [1, 2]
    assert h.ack(2, 1, lease_ids=[two, one]).count == 2


def test_one_nodes_late_ack_does_not_touch_anothers_lease() -> None:
    h = LeaseHarness(jobs=1)
    h.claim(node=A)
    h.pass_time(LEASE_MS + 1)
    h.claim(node=B)
    assert h.ack(1, node=A).skipped == [1]
    assert h.ack(1, node=B).count == 1


# ---- nack


def test_a_nacked_job_is_ready_at_once() -> None:
    h = LeaseHarness(jobs=2)
    h.claim()
    nacked = h.nack(1)
    assert (nacked.count, nacked.ready, nacked.in_flight) == (1, 2, 0)
    claimed = h.claim()
    assert (claimed.page.seqs, claimed.deliveries) == ([1], [2])


def test_a_delayed_job_counts_nowhere_until_it_is_due() -> None:
    h = LeaseHarness(jobs=2)
    h.claim()
    nacked = h.nack(1, delay_ms=500)
    assert (nacked.ready, nacked.in_flight) == (1, 0)
    assert h.got(9) == [2]
    h.pass_time(499)
    assert h.got(9) == []
    assert h.counts() == (0, 1, 0)
    h.pass_time(1)
    assert h.counts() == (1, 1, 0)
    claimed = h.claim(9)
    assert (claimed.page.seqs, claimed.deliveries) == ([1], [2])


def test_a_delayed_job_is_nobodys() -> None:
    h = LeaseHarness(jobs=1)
    h.claim()
    h.nack(1, delay_ms=500)
    for kind in ("ack", "nack", "extend"):
        assert h.settle(kind, 1, lease_ms=100).skipped == [1]


def test_a_release_is_not_a_delivery() -> None:
    h = LeaseHarness(jobs=1)
    for _ in range(3):
        assert h.claim().deliveries == [1]
        h.nack(1, nack="release")
    h.claim()
    h.nack(1)
    assert h.claim().deliveries == [2]
    h.nack(1, nack="release", delay_ms=100)
    assert h.got() == []
    h.pass_time(100)
    assert h.claim().deliveries == [2]


# ---- extend


def test_extend_sets_the_deadline_and_leaves_the_rest() -> None:
    h = LeaseHarness(jobs=1)
    (lease,) = h.claim().lease_ids
    h.pass_time(600)
    extended = h.extend(1, lease_ms=500)
    assert (extended.count, extended.skipped) == (1, [])
    assert extended.deadlines == {1: h.now() + 500}, "set, not added"
    h.pass_time(500)
    assert h.counts() == (0, 1, 0)
    assert h.extend(1, lease_ids=[lease], lease_ms=100).count == 1
    h.pass_time(101)
    assert h.claim().deliveries == [2]


def test_extend_may_shorten() -> None:
    h = LeaseHarness(jobs=1)
    h.claim(lease_ms=60_000)
    h.extend(1, lease_ms=100)
    h.pass_time(101)
    assert h.got() == [1]


def test_a_deadline_that_was_moved_back_does_not_come_due_earlier() -> None:
    h = LeaseHarness(jobs=1)
    h.claim(lease_ms=100)
    for _ in range(5):
        h.pass_time(90)
        h.extend(1, lease_ms=100)
    h.pass_time(100)
    assert h.got() == []
    h.pass_time(1)
    assert h.got() == [1]
