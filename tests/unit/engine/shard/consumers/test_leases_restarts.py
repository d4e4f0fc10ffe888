"""Goal: effects of a restart, a crash or a power cut: none on acks; on leases as `leases_durable` says.

Method: an engine on a SimDisk; each case ends the engine in one of the ways, with and without a checkpoint before.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.lease_harness import LEASE_MS, LeaseHarness, queue
from topics.api.config import TopicConfig
from topics.engine.commands import consumers as k
from topics.engine.commands import topics as c


def power_cut(h: LeaseHarness) -> None:
    h.sync()  # a lease is written at once and synced soon: those that a power cut loses are delivered again
    h.power_cut()
    h.open()


def after_a_checkpoint(h: LeaseHarness) -> None:
    h.checkpoint()
    h.kill_and_open()


def again_and_again(h: LeaseHarness) -> None:
    h.kill_and_open()
    h.restart()
    h.kill_and_open()


End = Callable[[LeaseHarness], None]
ENDS: list[End] = [
    LeaseHarness.restart,
    LeaseHarness.kill_and_open,
    power_cut,
    after_a_checkpoint,
    again_and_again,
]
every_end = pytest.mark.parametrize("end", ENDS)


def durable(**fields: object) -> TopicConfig:
    return queue(leases_durable=True, **fields)


@every_end
@pytest.mark.parametrize("leases_durable", [False, True])
def test_acked_jobs_stay_gone(end: End, leases_durable: bool) -> None:
    h = LeaseHarness(queue(leases_durable=leases_durable), jobs=6)
    h.claim(4)
    h.ack(1, 3)
    end(h)
    assert h.seqs("q") == [2, 4, 5, 6]
    h.pass_time(LEASE_MS + 5)
    assert h.got(9) == [2, 4, 5, 6]
    assert h.ack(1, 3).skipped == [1, 3]


@every_end
def test_leases_that_are_not_durable_vanish_with_their_counts(end: End) -> None:
    h = LeaseHarness(jobs=4)
    h.claim()
    h.nack(1)
    leases = h.claim(3).lease_ids
    h.nack(2, delay_ms=60_000)
    end(h)
    assert h.counts() == (4, 0, 0)
    assert h.ack(1, lease_ids=leases[:1]).skipped == [1]
    claimed = h.claim(9)
    assert (claimed.page.seqs, claimed.deliveries) == ([1, 2, 3, 4], [1, 1, 1, 1])
    assert not set(claimed.lease_ids) & set(leases), "an old lease id must not match a new lease"


@every_end
def test_durable_leases_hold(end: End) -> None:
    h = LeaseHarness(durable(), jobs=4)
    h.claim()
    h.nack(1)
    claimed = h.claim(3, lease_ms=600_000, node=b"a")
    end(h)
    assert h.counts() == (1, 3, 0)
    assert h.got(9, node=b"b") == [4]
    assert h.ack(1, 2, 3, node=b"b").skipped == [1, 2, 3]
    assert h.ack(1, node=b"a", lease_ids=[claimed.lease_ids[0]]).count == 1
    h.nack(2, 3, node=b"a")
    assert h.claim(9).deliveries == [2, 2]


@every_end
def test_durable_counts_and_delays_hold(end: End) -> None:
    h = LeaseHarness(durable(), jobs=3)
    h.claim(3)
    h.nack(1)
    h.nack(2, delay_ms=60_000)
    h.nack(3, nack="release")
    end(h)
    assert h.counts() == (2, 0, 0)
    claimed = h.claim(9, lease_ms=600_000)
    assert (claimed.page.seqs, claimed.deliveries) == ([1, 3], [2, 1])
    h.pass_time(60_000)
    claimed = h.claim(9)
    assert (claimed.page.seqs, claimed.deliveries) == ([2], [2])


@every_end
def test_durable_deadlines_are_kept(end: End) -> None:
    h = LeaseHarness(durable(), jobs=2)
    (first,) = h.claim(lease_ms=20_000).deadlines  # longer than a new boot may be ahead of the old one
    h.claim(lease_ms=20_000)
    extended = h.extend(2, lease_ms=40_000).deadlines[2]
    end(h)
    h.pass_until(first)
    assert h.counts() == (0, 2, 0)
    h.pass_until(first + 1)
    assert h.counts() == (1, 1, 0)
    h.pass_until(extended)
    assert h.counts() == (1, 1, 0)
    h.pass_until(extended + 1)
    assert h.counts() == (2, 0, 0)


@every_end
def test_a_lease_that_expired_meanwhile_is_not_taken_back(end: End) -> None:
    h = LeaseHarness(durable(), jobs=1)
    h.claim(node=b"a")
    h.pass_time(LEASE_MS + 1)
    (lease,) = h.claim(node=b"b", lease_ms=600_000).lease_ids
    end(h)
    assert h.ack(1, node=b"a").skipped == [1], "a stale event must not override the newer lease"
    assert h.ack(1, node=b"b", lease_ids=[lease]).count == 1


@every_end
def test_a_job_that_came_back_before_the_end_comes_once(end: End) -> None:
    h = LeaseHarness(durable(), jobs=2)
    h.claim()
    h.nack(1)
    h.claim()
    end(h)
    h.pass_time(LEASE_MS + 5)
    claimed = h.claim(9)
    assert (claimed.page.seqs, claimed.deliveries) == ([1, 2], [3, 1])


@every_end
def test_new_leases_after_an_end_have_new_ids(end: End) -> None:
    h = LeaseHarness(durable(), jobs=2)
    seen = []
    for _ in range(3):
        seen += h.claim(2).lease_ids
        end(h)
        h.pass_time(LEASE_MS + 5)
    assert len(set(seen)) == 6


@every_end
def test_durable_leases_of_deleted_jobs_do_not_count(end: End) -> None:
    h = LeaseHarness(durable(), jobs=3)
    h.claim(2, lease_ms=600_000)
    h.do(c.Delete("q", seqs=[1]))
    end(h)
    assert h.counts() == (1, 1, 0)


@every_end
def test_durable_leases_of_evicted_jobs_do_not_count(end: End) -> None:
    h = LeaseHarness(durable(cap_records=3), jobs=3)
    h.claim(2, lease_ms=600_000)
    h.produce(1)
    end(h)
    assert h.counts() == (2, 1, 0)


@every_end
def test_a_topic_of_the_same_name_has_none_of_the_old_leases(end: End) -> None:
    h = LeaseHarness(durable(), jobs=2)
    h.claim(2, lease_ms=600_000)
    h.do(c.DropTopic("q"))
    h.put("q", queue(leases_durable=True))
    h.produce(2)
    end(h)
    assert h.counts() == (2, 0, 0)
    assert h.claim(9).deliveries == [1, 1]


def test_an_ephemeral_queue_keeps_no_leases() -> None:
    h = LeaseHarness(durable(durability="ephemeral"), jobs=2)
    h.claim(lease_ms=600_000)
    h.restart()
    assert h.counts() == (0, 0, 0)
    h.produce(1)
    assert h.claim(9).deliveries == [1]


@pytest.mark.parametrize("durability", ["disk", "memory"])
def test_durable_leases_of_lesser_classes_hold_over_a_clean_stop(durability: str) -> None:
    h = LeaseHarness(durable(durability=durability), jobs=3)
    h.claim(2, lease_ms=600_000)
    h.ack(1)
    h.restart()
    assert h.counts() == (1, 1, 0)


def test_leases_can_become_durable() -> None:
    h = LeaseHarness(jobs=3)
    h.claim(1, lease_ms=600_000)
    h.put("q", queue(leases_durable=True))
    h.claim(2, lease_ms=600_000)
    h.nack(3)
    h.kill_and_open()
    ready, in_flight, _ = h.counts()
    assert ready + in_flight == 3
    assert in_flight >= 1, "what was leased since then"
    h.pass_time(600_005)
    assert h.got(9) == [1, 2, 3]


def test_leases_can_cease_to_be_durable() -> None:
    h = LeaseHarness(durable(), jobs=2)
    h.claim(1, lease_ms=600_000)
    h.put("q", queue())
    h.kill_and_open()
    assert h.counts() == (2, 0, 0)
    assert h.claim(9).deliveries == [1, 1]


def test_an_ack_that_was_not_synced_is_all_or_nothing() -> None:
    outcomes = set()
    for seed in range(12):
        h = LeaseHarness(jobs=4)
        h.disk._rng.seed(seed)
        h.claim(4)
        h.rest()
        h.ask(k.Settle("q", "ack", b"w", [1, 2, 3]))
        h.power_cut()
        h.open()
        outcomes.add(tuple(h.seqs("q")))
    assert outcomes <= {(1, 2, 3, 4), (4,)}, outcomes


def test_a_failed_sync_of_an_ack_is_told_and_refuses_what_follows() -> None:
    h = LeaseHarness(jobs=2)
    h.claim(2)
    h.rest()
    h.disk.fail_at(1, 5, of="sync")
    reply = h.send(k.Settle("q", "ack", b"w", [1]))
    assert reply.code == "internal"
    assert reply.detail["outcome"] == "unknown"
    for command in (
        k.Claim("q", node=b"w"),
        k.Settle("q", "ack", b"w", [2]),
        k.Settle("q", "nack", b"w", [2]),
    ):
        assert h.send(command).code == "internal", "the shard is read-only"
    assert h.diff("q").seqs, "reads go on"
    h.kill_and_open()
    assert h.seqs("q") in ([1, 2], [2])
    assert h.got(9) == h.seqs("q")
