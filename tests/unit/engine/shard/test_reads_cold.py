"""Reads from the cold tier, and a store that is slow, unavailable or damaged: only the reads that need it are
affected.
"""

from __future__ import annotations

import pytest

from tests.support.engine_harness import (
    FSYNC,
    Harness,
    numbered,
    rows_of,
)
from tests.support.faults import fault
from tests.support.stores import ObjectStore
from tests.support.tiered_engine import (
    SECRET,
    TIERED,
    filled,
    moved,
    records,
    relocated,
    tiers,
)
from topics.api import limits
from topics.api.config import TopicConfig
from topics.api.errors import ColdStoreFailed, Throttled
from topics.engine.commands import consumers as con
from topics.engine.commands import merges as mrg
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagMatch


def test_a_slow_read_holds_up_nobody_else() -> None:
    h = relocated()
    (slow,) = h.ask(c.Diff("t", 0))
    slow_jobs = [job for job in h.jobs if job.kind == "cold_read"]
    h.jobs = [job for job in h.jobs if job.kind != "cold_read"]  # the store is slow
    assert len(slow_jobs) == 2
    (poll,) = h.ask(c.Diff("t", 14, wait_ms=30_000))
    h.append("t", numbered(15, 1)[0])
    assert rows_of(h.replies[poll]) == records(15)
    assert rows_of(h.diff("t", 8)) == records(*range(9, 16))
    h.checkpoint()
    assert slow not in h.replies
    h.jobs += slow_jobs
    h.rest()
    assert rows_of(h.replies[slow]) == records(*range(1, 15 + 1))


def test_a_slow_move_holds_up_no_checkpoint_and_no_erase_of_others() -> None:
    h = filled(secret=13)
    h.engine.checkpoint()
    h.ask()
    while not any(job.kind == "cold_move" for job in h.jobs):
        h.run_job() if h.jobs else h.ask()
    (job,) = [job for job in h.jobs if job.kind == "cold_move"]
    h.jobs.remove(job)
    before = h.engine.counters["checkpoints"]
    h.append("t", b'"x"')
    h.checkpoint()
    h.append("u", SECRET, config=FSYNC)
    h.checkpoint()
    assert h.engine.counters["checkpoints"] == before + 2
    assert h.engine.relocator.has_work or tiers(h)[0] == "hot"
    h.jobs.append(job)
    h.rest()
    assert tiers(h)[:2] == ["cold", "cold"]


@pytest.mark.parametrize("asked", ["erase", "snapshot"])
def test_waiting_readers_are_served_between_two_relocations(asked: str) -> None:
    """A topic with a long backlog, as after a start with a new cold tier, and something else to do in another one."""
    h = moved(ObjectStore())
    h.put("long", FSYNC)
    h.append("long", *numbered(1, 160))
    h.engine.checkpoint()
    while h.engine.counters["relocations"] < 6:
        h.run_job() if h.jobs else h.ask()
    before = h.engine.counters["relocations"]
    h.do(c.Delete("t", seqs=[3], erase=True) if asked == "erase" else mrg.PinSnapshot("t"))
    assert h.engine.counters["relocations"] - before <= 10, "of forty"
    h.rest()
    assert set(tiers(h, "long")[:-2]) == {"cold"}, "and the rest continues"
    cold = h.engine.checkpointer.usage.totals["cold"]
    assert cold.live > 150 * len(numbered(1, 1)[0])


def test_readers_of_one_block_share_a_fetch() -> None:
    h = relocated()
    reads = h.cold.count("read_range")  # type: ignore[union-attr]
    tokens = h.ask(*[c.Diff("t", 0, limit=4) for _ in range(20)])
    assert [job.kind for job in h.jobs].count("cold_read") == 1
    h.rest()
    assert all(rows_of(h.replies[token]) == records(1, 2, 3, 4) for token in tokens)
    assert h.cold.count("read_range") == reads + 1  # type: ignore[union-attr]


def test_only_so_many_wait() -> None:
    h = relocated()
    tokens = h.ask(*[c.Diff("t", 0) for _ in range(limits.COLD_READERS_MAX + 1)])
    refused = h.replies[tokens[-1]]
    assert isinstance(refused, Throttled)
    assert refused.detail["limit"] == "cold_reads"
    h.rest()
    assert all(rows_of(h.replies[token]) == records(*range(1, 15)) for token in tokens[:-1])


@fault(
    "disk",
    "the cold tier is out of reach, or a segment is missing there",
    "reads that need it are 503 with the reason and change nothing; writes and other reads go on; it heals by itself",
)
@pytest.mark.parametrize("how", ["down", "missing", "short"])
def test_a_store_that_fails(how: str) -> None:
    store = ObjectStore()
    h = relocated(store)
    objects = dict(store.objects)
    key = next(key for key in objects if key.endswith("1-0.data"))
    if how == "down":
        store.is_down = True
    elif how == "missing":
        del store.objects[key]
    else:
        store.objects[key] = store.objects[key][:-3]
    error = h.refused(c.Diff("t", 0), ColdStoreFailed)
    assert error.code == "not_ready"
    assert error.detail["path"] == key
    h.append("t", numbered(15, 1)[0])
    assert rows_of(h.diff("t", 8)) == records(*range(9, 16))
    assert h.state("t").count == 15
    store.is_down, store.objects = False, objects
    assert h.rows("t") == records(*range(1, 16))


def test_without_the_cold_directory_its_records_are_refused_and_not_lost() -> None:
    store = ObjectStore()
    h = relocated(store)
    h.cold = None
    h.restart()
    h.refused(c.Diff("t", 0), ColdStoreFailed)
    assert rows_of(h.diff("t", 8)) == records(*range(9, 15))
    h.cold = store
    h.restart()
    assert h.rows("t") == records(*range(1, 15))


def test_a_corrupt_record_of_the_cold_tier_is_an_announced_loss() -> None:
    store = ObjectStore()
    h = relocated(store)
    key = next(key for key in store.objects if key.endswith("1-0.data"))
    store.rot(key, store.objects[key].index(b"record 2"))
    assert h.read("t") == (records(1, *range(3, 15)), [(2, 2, "corrupt")])
    h.kill_and_open()
    assert h.gaps("t") == [(2, 2, "corrupt")]


def test_a_damaged_index_on_the_hot_side_is_made_again_from_cold_records() -> None:
    h = relocated()
    h.kill()
    h.disk.flip_bit(f"topics/{1024:016x}/seg-0000000000000001-0.idx", 40)
    h.open()
    assert h.rows("t") == records(*range(1, 15))


@fault(
    "index",
    "one is damaged, and the records that it could be made from are not in the cold tier",
    "the shard starts, and these records are an announced loss",
)
@pytest.mark.parametrize("suffix", ["idx", "sum"])
def test_a_damaged_index_of_records_that_are_gone(suffix: str) -> None:
    """As after a crash that interrupts an erase: the snapshot names a segment whose records are not there any more."""
    store = ObjectStore()
    h = relocated(store)
    h.kill()
    h.disk.flip_bit(f"topics/{1024:016x}/seg-0000000000000001-0.{suffix}", 40)
    del store.objects[next(key for key in store.objects if key.endswith("1-0.data"))]
    h.open()
    found, gaps = h.read("t")
    (gap,) = gaps
    assert gap[0] == 1 and gap[2] == "corrupt"
    assert found == records(*range(gap[1] + 1, 15))


def test_a_long_poll_and_answers_by_tag_reach_cold_records() -> None:
    h = relocated()
    h.do(c.Delete("t", seqs=[10, 12, 14]))
    page = h.do(c.LastByTag("t", TagMatch("Eq", b"b")))
    assert rows_of(page) == records(8)
    page = h.do(c.NextByTag("t", TagMatch("Eq", b"a"), 2))
    assert rows_of(page) == records(3)
    (token,) = h.ask(c.Diff("t", 2, limit=1, wait_ms=1000))
    h.rest()
    assert rows_of(h.replies[token]) == records(3)


def cold_queue() -> Harness:
    h = Harness(TIERED, cold=ObjectStore())
    h.put("t", TopicConfig(type="queue", durability="fsync"))
    for seq in range(1, 15):
        h.append("t", numbered(seq, 1)[0])
    for _ in range(3):
        h.checkpoint()
    return h


def test_claims_wait_for_cold_jobs() -> None:
    h = cold_queue()
    (token,) = h.ask(con.Claim("t", "", b"w", 3))
    assert token not in h.replies
    h.rest()
    assert rows_of(h.replies[token].page) == records(1, 2, 3)
    (token,) = h.ask(con.Claim("t", "", b"w", 2, wait_ms=1000))
    h.rest()
    assert rows_of(h.replies[token].page) == records(4, 5)


def test_a_withdrawn_claim_takes_nothing_when_its_blocks_come() -> None:
    h = cold_queue()
    (token,) = h.ask(con.Claim("t", "", b"w", 3))
    assert h.engine.shard.claims.withdraw_claim("t", "", lambda found: found == token)
    h.rest()
    assert token not in h.replies
    assert rows_of(h.do(con.Claim("t", "", b"w", 3)).page) == records(1, 2, 3)


def test_a_stop_does_not_wait_for_the_store() -> None:
    h = relocated()
    (token,) = h.ask(c.Diff("t", 0))
    h.jobs = [job for job in h.jobs if job.kind != "cold_read"]  # it never answers
    h._take(h.engine.close())
    assert isinstance(h.replies[token], ColdStoreFailed)
