"""Goal: effects of power cuts, damaged segments, full disks and unloaded topics on queues and consumers.

Method: an engine on a SimDisk; losses are announced to a consumer as to any reader, and all other records are
delivered.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.support.engine_harness import SMALL, file_bytes
from tests.support.lease_harness import LEASE_MS, LeaseHarness, log, queue
from topics.api import limits
from topics.api.config import TopicConfig
from topics.api.errors import Throttled
from topics.engine.commands import consumers as k
from topics.engine.commands import topics as c

CEILING = (
    limits.SEQ_CEILING_STEP_MIN
)  # seqs that a disk topic may have used before its first sync of a ceiling


def fetched(h: LeaseHarness, max: int = 100, **options: object) -> list[int]:
    return h.got(max, consumer="c", **options)


# ---- power cuts


def test_a_consumer_hears_of_what_a_power_cut_took() -> None:
    h = LeaseHarness(log(durability="disk"), jobs=3)
    h.make()
    assert fetched(h, 2) == [1, 2]
    h.ack(1, 2, consumer="c")
    h.sync()
    h.power_cut()
    h.open()
    assert fetched(h, 1) == [3]
    claimed = h.claim(9, consumer="c")
    assert claimed.tombstone is not None
    assert (claimed.tombstone.gap_from, claimed.tombstone.gap_to, claimed.tombstone.reason) == (
        4,
        CEILING,
        "crash",
    )
    h.produce(1)
    claimed = h.claim(9, consumer="c")
    assert (claimed.tombstone, claimed.page.seqs) == (None, [CEILING + 1])
    h.ack(3, CEILING + 1, consumer="c")
    state = h.look()
    assert (state.ack_floor, state.ack_pending, state.lag_records) == (CEILING + 1, 0, 0)


def test_a_queue_goes_on_behind_what_a_power_cut_took() -> None:
    h = LeaseHarness(queue(durability="disk"), jobs=3)
    h.claim()
    h.ack(1)
    h.sync()
    h.power_cut()
    h.open()
    h.produce(1)
    assert h.counts() == (3, 0, 0)
    assert h.got(9) == [2, 3, CEILING + 1]


@pytest.mark.parametrize("seed", range(8))
def test_unsynced_acks_of_a_disk_topic_come_back_or_not_but_nothing_is_lost(seed: int) -> None:
    h = LeaseHarness(log(durability="disk"), jobs=4)
    h.disk._rng.seed(seed)
    h.make()
    fetched(h)
    h.sync()
    h.ack(1, 2, consumer="c")
    h.ack(3, consumer="c")
    h.power_cut()
    h.open()
    h.pass_time(LEASE_MS + 6000)
    again = fetched(h)
    assert again in ([1, 2, 3, 4], [3, 4], [4]), "acks are lost from the end"
    state = h.look()
    assert state.ack_pending == len(again)


@pytest.mark.parametrize("durability", ["memory", "ephemeral"])
@pytest.mark.parametrize("type", ["log", "queue"])
def test_classes_that_promise_less_lose_records_and_no_place(durability: str, type: str) -> None:
    """The head may go back before a consumer's position: records written after that are new, and it gets them."""
    h = LeaseHarness(TopicConfig(type=type, durability=durability), jobs=3)
    h.make()
    h.ack(*fetched(h), consumer="c")
    h.power_cut()
    h.open()
    before = h.state("q").head_seq
    h.produce(2)
    found: list[int] = []
    for _ in range(3):
        found += fetched(h)
    assert set(found) >= {before + 1, before + 2}
    if type == "queue":
        assert set(h.got(9)) >= {before + 1, before + 2}


# ---- damaged segments


def rot(h: LeaseHarness, payload: bytes) -> None:
    """Flip one bit of this record in its sealed segment."""
    h.kill()
    (path,) = [path for path in h.segment_files("q") if path.endswith(".data") and payload in sealed(h, path)]
    h.disk.flip_bit(f"{h.topic_dir('q')}/{path}", sealed(h, path).index(payload))
    h.open()


def sealed(h: LeaseHarness, path: str) -> bytes:
    return file_bytes(h.disk, f"{h.topic_dir('q')}/{path}")


def test_a_corrupt_record_is_not_handed_out_and_is_told_of() -> None:
    h = LeaseHarness(log(), jobs=8)
    h.make()
    h.checkpoint()
    rot(h, b'"record 2"')
    found: list[int] = []
    stones: list[tuple[int, int, str]] = []
    for _ in range(6):
        claimed = h.claim(9, consumer="c", lease_ms=60_000)
        found += claimed.page.seqs
        if claimed.tombstone is not None:
            stones.append((claimed.tombstone.gap_from, claimed.tombstone.gap_to, claimed.tombstone.reason))
    assert found == [1, 3, 4, 5, 6, 7, 8]
    assert stones == [(2, 2, "corrupt")]
    assert h.look().lag_records == 0


def test_a_corrupt_job_does_not_stop_a_queue() -> None:
    h = LeaseHarness(jobs=8)
    h.checkpoint()
    rot(h, b'"record 2"')
    found: list[int] = []
    for _ in range(3):
        found += h.got(9, lease_ms=60_000)
    assert found == [1, 3, 4, 5, 6, 7, 8]
    assert h.counts() == (0, 7, 0)


def test_a_corrupt_job_that_was_in_hand() -> None:
    h = LeaseHarness(queue(leases_durable=True), jobs=8)
    h.claim(3)
    h.checkpoint()
    rot(h, b'"record 2"')
    h.pass_time(LEASE_MS + 5)
    found: list[int] = []
    for _ in range(3):
        found += h.got(9, lease_ms=60_000)
    assert sorted(found) == [1, 3, 4, 5, 6, 7, 8]
    assert h.counts() == (0, 7, 0)


# ---- a full disk


def test_acks_go_on_while_the_disk_is_full() -> None:
    h = LeaseHarness(jobs=40)
    h.disk.full = True
    for _ in range(200):
        if isinstance(h.send(c.Append("q", c.Records([b"1" * 200]))), Throttled):
            break
    assert isinstance(h.send(c.Append("q", c.Records([b"1" * 200]))), Throttled)
    done = 0
    for _ in range(8):
        claimed = h.claim(2, lease_ms=60_000)
        done += h.ack(*claimed.page.seqs).count
    assert done == 16
    h.disk.full = False
    h.pass_time(2000)
    h.produce(1)


def test_a_full_disk_loses_no_job_that_could_not_be_handed_out() -> None:
    """Durable leases need room in the log; a claim without room is refused, and its jobs are there for the next one."""
    h = LeaseHarness(queue(leases_durable=True), jobs=5)
    h.claim(2)
    h.nack(1, 2)
    h.disk.full = True
    refused = 0
    for _ in range(400):
        reply = h.send(h.claim_of(5, lease_ms=100))
        refused += isinstance(reply, Throttled)
        h.pass_time(101)
        if refused == 5:
            break
    assert refused, "the log did not become full"
    h.disk.full = False
    h.pass_time(5000)
    assert h.got(9) == [1, 2, 3, 4, 5]


# ---- unloaded topics


@pytest.mark.parametrize("type", ["log", "queue"])
def test_topics_that_are_put_away_keep_their_consumers(type: str) -> None:
    config = TopicConfig(type=type, durability="fsync", lease_ms=60_000, leases_durable=True)
    h = LeaseHarness(config, jobs=12, engine=msgspec.structs.replace(SMALL, index_rows_max=0))
    name = "" if type == "queue" else "c"
    if name:
        h.make(ack_wait_ms=60_000)
    assert h.got(4, consumer=name) == [1, 2, 3, 4]
    h.nack(2, consumer=name)
    for _ in range(2):
        h.checkpoint()
    assert h.engine.shard.state.published["q"].is_unloaded
    assert h.ack(1, 3, consumer=name).count == 2
    claimed = h.claim(9, consumer=name)
    assert (claimed.page.seqs[0], claimed.deliveries[0]) == (2, 2)
    for _ in range(2):
        h.checkpoint()
    h.kill_and_open()
    assert h.ack(2, 4, 5, consumer=name).count == 3
    assert h.got(9, consumer=name) == []


def test_a_claim_that_waits_on_a_topic_that_is_put_away() -> None:
    h = LeaseHarness(jobs=8, engine=msgspec.structs.replace(SMALL, index_rows_max=0))
    h.claim(8, node=b"a")
    token = h.parked(3, wait_ms=20_000)
    for _ in range(2):
        h.checkpoint()
    h.pass_time(LEASE_MS + 3)
    assert h.answer(token).page.seqs == [1, 2, 3]


def test_letters_of_a_topic_that_is_put_away() -> None:
    h = LeaseHarness(
        queue(max_deliveries=1, dead_letter="dead"),
        jobs=4,
        engine=msgspec.structs.replace(SMALL, index_rows_max=0),
    )
    h.claim(4)
    h.nack(1, 2)
    assert h.got(2) == []
    h.rest()
    for _ in range(2):
        h.checkpoint()
    assert h.ship() == 2
    assert h.seqs("q") == [3, 4]
    h.do(k.Settle("q", "ack", b"w", [3, 4]))
    assert h.counts() == (0, 0, 2)
