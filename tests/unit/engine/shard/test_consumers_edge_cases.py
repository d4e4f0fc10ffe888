"""Goal: consumers keep their promises when configurations change, clients come and go and backlogs are large.

Method: one engine on a SimDisk, whose clock moves only when a test says so. Costs are counted as calls and entries,
never as time.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine_harness import SMALL, Harness, numbered
from topics.api.config import ConsumerConfig, EngineConfig, TopicConfig
from topics.engine.commands import consumers as k
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagFilter
from topics.engine.storage import frames
from topics.engine.topic.log import TopicLog
from topics.engine.topic.tags import TagIndex

LEASE_MS = 1000
DAY_MS = 86_400_000
A, B = b"a", b"b"
ROOMY = EngineConfig(wal_file_bytes=1 << 22)  # not 64 MiB of zeros for each test


class Rig(Harness):
    def __init__(self, jobs: int = 0, engine: EngineConfig = SMALL, **fields: Any) -> None:
        super().__init__(engine)
        self.configure(**fields)
        if jobs:
            self.append("q", *numbered(1, jobs))

    def configure(self, **fields: Any) -> None:
        self.put("q", TopicConfig(**{"durability": "fsync", "lease_ms": LEASE_MS, **fields}))

    def make(self, name: str = "c", **fields: Any) -> None:
        self.do(k.PutConsumer("q", name, ConsumerConfig(**{"ack_wait_ms": LEASE_MS, **fields})))

    def look(self, name: str = "c") -> k.ConsumerState:
        found = self.do(k.GetConsumer("q", name))
        assert isinstance(found, k.ConsumerState)
        return found

    def claim(self, max: int = 1, consumer: str = "c", node: bytes = A, **options: Any) -> k.Claimed:
        found = self.do(k.Claim("q", consumer, node, max, **options))
        assert isinstance(found, k.Claimed)
        return found

    def got(self, max: int = 1, consumer: str = "c", node: bytes = A, **options: Any) -> list[int]:
        return self.claim(max, consumer, node, **options).page.seqs

    def settle(
        self, kind: k.SettleKind, *seqs: int, consumer: str = "c", node: bytes = A, **o: Any
    ) -> k.Settled:
        found = self.do(k.Settle("q", kind, node, list(seqs), consumer=consumer, **o))
        assert isinstance(found, k.Settled)
        return found

    def ship(self) -> None:
        """Deliver dead letters as a server does, all to topics of this shard."""
        self.rest()
        for source in list(self.engine.shard.dead_letters.due.values()):
            while letters := self.engine.shard.dead_letters.dead_letters_to_send(source, 64, 1 << 20):
                last = letters[-1]
                self.do(k.TakeDeadLetters(last.target, last.source_id, letters))
                self.do(k.SettleDeadLetters(source.name, last.source_id, last.number, True))
                self.rest()


# ---- changes of the configuration with leases


def test_redelivered_records_are_settled_after_acks_were_given_up() -> None:
    h = Rig(3)
    h.make(max_ack_pending=1)
    assert h.got() == [1]
    h.make(ack="none", max_ack_pending=1)
    h.pass_time(LEASE_MS + 1)
    assert [h.got(), h.got(), h.got()] == [[1], [2], [3]]
    assert h.look().ack_pending == 0
    h.restart()
    assert h.got() == []


def test_ready_is_right_after_a_filter_came_and_went() -> None:
    h = Rig()
    for tag in (A, B, A, B, A):
        h.append("q", b"1", tag=tag)
    h.make()
    assert h.got() == [1]
    h.make(filter=(("Eq", "b"),))
    assert h.got(2) == [2, 4]
    h.make()
    assert h.claim().ready == 0
    assert h.look().lag_records == 0


def test_the_lag_is_never_negative() -> None:
    h = Rig()
    h.append("q", b"1", tag=A)
    h.make(filter=(("Eq", "a"),), dead_letter="d")
    assert h.got() == [1]
    assert h.settle("term", 1).count == 1
    h.make(filter=(("Eq", "b"),), dead_letter="d")
    h.do(k.ResetConsumer("q", "c", "start", 0, False))
    assert h.look().lag_records == 0


def test_a_new_filter_is_for_chosen_records_too() -> None:
    h = Rig()
    h.append("q", b"1", tag=A)
    h.append("q", b"1", tag=B)
    h.make(deliver="last_per_tag")
    h.make(deliver="last_per_tag", filter=(("Eq", "a"),))
    assert h.got(9) == [1]


def test_a_seq_still_to_come_is_waited_for_over_a_restart() -> None:
    h = Rig(3)
    h.make(deliver="from_seq", deliver_value=1000)
    h.make()  # its start position is not evaluated again
    assert h.look().cursor == 1000
    h.restart()
    assert h.look().cursor == 1000


def test_a_lease_that_was_given_back_does_not_return_when_leases_are_durable_again() -> None:
    queue: dict[str, Any] = {"type": "queue", "lease_ms": DAY_MS}
    h = Rig(1, leases_durable=True, **queue)
    assert h.got(consumer="", node=A) == [1]
    h.configure(leases_durable=False, **queue)
    h.settle("nack", 1, consumer="", node=A)
    assert h.got(consumer="", node=B) == [1]
    h.configure(leases_durable=True, **queue)
    h.kill_and_open()
    assert h.settle("ack", 1, consumer="", node=A).skipped == [1], "its job is available again"


# ---- waiting requests


@pytest.mark.parametrize("jobs", [0, 1])
def test_a_gathered_claim_is_answered_when_the_window_goes(jobs: int) -> None:
    h = Rig(jobs, type="queue", claim_jitter_ms=500)
    first, second = h.ask(k.Claim("q", "", A), k.Claim("q", "", B))
    h.configure(type="queue", claim_jitter_ms=0)
    h.pass_time(1000)
    assert first in h.replies and second in h.replies
    assert h.engine.shard.state.published["q"].consumers.waiting == 0  # type: ignore[union-attr]


def test_a_stream_keeps_its_place_among_those_who_wait() -> None:
    h = Rig()
    h.make(max_waiting=1)
    (stream,) = h.ask(k.Claim("q", "c", A, standing=True, connection=1))
    h.append("q", b"1")
    h.rest()
    assert h.replies[stream].page.seqs == [1]
    (fetch,) = h.ask(k.Claim("q", "c", B, wait_ms=30_000))
    (again,) = h.ask(k.Claim("q", "c", A, standing=True, connection=1))
    h.rest()
    assert not isinstance(h.replies.get(again), Exception), "a fetch must not end an open stream"
    assert fetch not in h.replies or isinstance(h.replies[fetch], Exception)


def test_answers_to_those_who_wait_are_bounded_by_bytes_in_one_turn() -> None:
    h = Rig(engine=ROOMY, durability="disk")
    for _ in range(48):
        h.append("q", b'"' + b"x" * 1_000_000 + b'"')
    h.make(max_ack_pending=1000)
    h.do(k.PauseConsumer("q", "c", True, 0))
    tokens = h.ask(*(k.Claim("q", "c", A, max_bytes=1 << 20, wait_ms=30_000) for _ in range(48)))
    h.ask(k.PauseConsumer("q", "c", False, 0))
    assert sum(token in h.replies for token in tokens) <= 40, "32 MiB of answers in one turn"


def test_a_stream_goes_on_behind_many_last_deliveries() -> None:
    h = Rig(1500, ROOMY)
    h.make(max_deliver=1, max_ack_pending=10_000)
    assert len(h.got(1000) + h.got(1000)) == 1500
    h.settle("nack", 1500, nack="release")
    h.clock.advance(LEASE_MS + 1)
    (stream,) = h.ask(k.Claim("q", "c", B, standing=True, connection=1))
    h.pass_time(120_000)
    assert stream in h.replies and h.replies[stream].page.seqs == [1500]
    assert h.look().given_up == 1499


def test_max_bytes_bounds_chosen_records_too() -> None:
    h = Rig(engine=ROOMY)
    for i in range(3):
        h.append("q", b'"' + b"x" * 1000 + b'"', tag=b"t%d" % i)
    h.make(deliver="last_per_tag")
    assert h.got(9, max_bytes=1) == [1]
    assert h.got(9, max_bytes=2500) == [2, 3]


# ---- retention by interest


def test_a_job_is_not_done_before_the_queue_is_done_with_it() -> None:
    h = Rig(3, type="queue", retention="interest")
    h.make()
    assert h.got(1, consumer="", node=B) == [1]
    assert h.got(3) == [1, 2, 3]
    h.settle("ack", 1, 2, 3)
    assert h.settle("ack", 1, consumer="", node=B).skipped == []
    assert h.got(9, consumer="", node=B) == [2, 3]


def test_records_that_a_reset_skips_are_removed() -> None:
    h = Rig(10, retention="interest")
    h.make()
    assert h.got(2) == [1, 2]
    h.do(k.ResetConsumer("q", "c", "end", 0, False))
    h.rest()
    assert h.seqs("q") == []


# ---- dead letters


def test_the_headers_of_a_raw_record_stay_headers_in_its_dead_letter() -> None:
    h = Rig(type="queue", dead_letter="d", max_deliveries=1)
    h.append("q", b"HEADdata", raw=True, header_lens=[4])
    assert h.got(consumer="") == [1]
    h.settle("nack", 1, consumer="", nack="dead")
    h.ship()
    page = h.diff("d")
    found = frames.read_extensions(page.frames[0], int(page.starts[0]))
    assert int.from_bytes(found.get(frames.EXT_HEADERS, b""), "little") >= 4


def test_letters_under_way_outlive_an_idle_consumer() -> None:
    h = Rig(2)
    h.make(inactive_ttl_ms=1000, dead_letter="d")
    assert h.got(2) == [1, 2]
    assert h.settle("term", 1, 2).count == 2
    h.pass_time(5000)  # the target cannot be reached meanwhile
    h.ship()
    assert len(h.seqs("d")) == 2


def test_letters_of_a_consumer_are_counted_beside_those_of_the_queue() -> None:
    h = Rig(1, type="queue", dead_letter="d", max_deliveries=1)
    h.make(dead_letter="d")
    assert h.got(consumer="") == h.got() == [1]
    h.settle("nack", 1, consumer="", nack="dead")
    h.settle("term", 1)
    h.ship()
    assert len(h.seqs("d")) == 2
    assert h.look().dead_lettered == 1


# ---- memory


def test_consumers_that_are_made_and_dropped_leave_nothing() -> None:
    h = Rig(engine=ROOMY)
    for _ in range(200):
        h.make(inactive_ttl_ms=30 * DAY_MS)
        h.do(k.DropConsumer("q", "c"))
    for i in range(200):
        h.make(inactive_ttl_ms=30 * DAY_MS - i)
    h.rest()
    assert len(h.engine.shard.consumers.idle_timers) <= 64


def test_dropped_topics_are_not_kept_by_the_timers_of_their_consumers() -> None:
    h = Rig(engine=ROOMY)
    for i in range(100):
        h.put(f"t{i}")
        h.do(k.PutConsumer(f"t{i}", "c", ConsumerConfig(inactive_ttl_ms=30 * DAY_MS)))
        h.do(c.DropTopic(f"t{i}"))
    h.pass_time(120_000)
    assert len(h.engine.shard.consumers.idle_timers) <= 64
    assert not any(log.dropped for log, _ in h.engine.shard.consumers.idle.values())


# ---- costs


def looks_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how many records are examined one by one."""
    looked = [0]
    is_live = TopicLog.is_live

    def counted(log: TopicLog, seq: int) -> bool:
        looked[0] += 1
        return is_live(log, seq)

    monkeypatch.setattr(TopicLog, "is_live", counted)
    return looked


def test_a_consumer_leaves_without_a_look_at_every_record(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Rig(5000, ROOMY, retention="interest")
    h.make("x")
    h.make("y", deliver="new")
    looked = looks_at(monkeypatch)
    h.do(k.DropConsumer("q", "x"))
    assert looked[0] < 2500


def test_the_newest_record_is_found_behind_many_deleted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Rig(5000, ROOMY)
    h.do(c.Delete("q", seqs=list(range(2, 5001))))
    looked = looks_at(monkeypatch)
    h.make(deliver="last")
    assert h.look().cursor == 1
    assert looked[0] < 2500


def test_a_claim_after_a_restart_passes_by_what_is_in_hand_in_few_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h = Rig(3000, ROOMY, type="queue", leases_durable=True)
    for _ in range(2):
        h.claim(1000, consumer="", lease_ms=DAY_MS)
    h.restart()
    reads = [0]
    reader = h.engine.shard.state.reader
    undelivered = reader.undelivered

    def counted(*args: Any) -> Any:
        reads[0] += 1
        return undelivered(*args)

    monkeypatch.setattr(reader, "undelivered", counted)
    assert h.got(consumer="") == [2001]
    assert reads[0] < 100


def test_the_lag_of_many_tags_is_not_counted_tag_by_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Rig(engine=ROOMY)
    h.append("q", *[b"1"] * 2000, tags=[b"a.%d" % i for i in range(2000)])
    h.make(filter=(("Subject", "a.*"),))
    counted = [0]
    seqs = TagIndex.seqs

    def count(*args: Any) -> Any:
        counted[0] += 1
        return seqs(*args)

    monkeypatch.setattr(TagIndex, "seqs", count)
    assert h.look().lag_records == 2000
    assert counted[0] < 500


def test_a_write_is_not_compared_with_every_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Rig(engine=ROOMY)
    for i in range(50):
        h.make(f"c{i}", filter=(("Subject", f"a.{i}.*"),))
        h.look(f"c{i}")
    compared = [0]
    matches = TagFilter.matches

    def count(match: TagFilter, tag: bytes) -> bool:
        compared[0] += 1
        return matches(match, tag)

    monkeypatch.setattr(TagFilter, "matches", count)
    h.append("q", *[b"1"] * 100, tags=[b"a.x.%d" % i for i in range(100)])
    assert compared[0] < 1000, "tags times consumers"
