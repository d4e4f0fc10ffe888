"""Removal of records: by caps, by time, by deletes.

Goal: one promise per test. Method: a fresh engine on a SimDisk for each test; what matters after a restart is read
twice.
"""

from __future__ import annotations

import pytest

from tests.support.engine_harness import (
    FSYNC,
    Harness,
    append,
    fsync,
    numbered,
    with_records,
    with_tags,
    with_topic,
)
from topics.api.errors import (
    InvalidRequest,
    RecordTooLarge,
    TopicFull,
    TopicNotFound,
)
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagMatch

# ---- caps


def test_cap_records_evicts_from_the_front_and_says_so() -> None:
    h = with_records(5, fsync(cap_records=3))
    assert h.read("t") == (list(enumerate(numbered(1, 5), 1))[2:], [(1, 2, "cap")])
    assert (h.state("t").earliest_seq, h.state("t").count) == (3, 3)
    stone = h.diff("t").tombstone
    assert stone == c.Tombstone(1, 2, "cap", 2, 3, 5)


def test_cap_bytes_evicts_until_the_rest_fits() -> None:
    h = with_topic(fsync(cap_bytes=10))
    h.append("t", b"4444", b"4444")
    h.append("t", b"333")
    assert h.read("t") == ([(2, b"4444"), (3, b"333")], [(1, 1, "cap")])
    assert h.state("t").bytes == 7


def test_record_larger_than_the_byte_cap_does_not_stay() -> None:
    h = with_topic(fsync(cap_bytes=10))
    h.append("t", b"x" * 11)
    assert h.read("t") == ([], [(1, 1, "cap")])
    assert h.state("t").count == 0


def test_deleted_records_do_not_count_against_a_cap() -> None:
    h = with_records(3, fsync(cap_records=3))
    h.do(c.Delete("t", seqs=[2]))
    h.append("t", b"4")
    assert h.seqs("t") == [1, 3, 4]
    assert h.gaps("t") == []


def test_eviction_past_deleted_records_announces_up_to_the_last_live_one() -> None:
    h = with_records(4, fsync(cap_records=4))
    h.do(c.Delete("t", seqs=[2]))
    h.append("t", b"5", b"6")
    assert h.gaps("t") == [(1, 1, "cap")]
    assert h.state("t").earliest_seq == 3


@pytest.mark.parametrize("how", ["kill_and_open", "restart"])
def test_cap_floor_survives_a_restart_and_a_looser_cap(how: str) -> None:
    h = with_records(5, fsync(cap_records=3))
    h.put("t", FSYNC)
    getattr(h, how)()
    assert h.seqs("t") == [3, 4, 5]
    assert h.gaps("t") == [(1, 2, "cap")]


def test_tighter_cap_acts_at_once() -> None:
    h = with_records(6)
    h.put("t", fsync(cap_records=2))
    assert h.seqs("t") == [5, 6]
    assert h.gaps("t") == [(1, 4, "cap")]


def test_reject_refuses_what_does_not_fit_before_a_seq_is_given() -> None:
    h = with_records(3, fsync(cap_records=3, cap_bytes=1000, discard="reject"))
    error = h.refused(append("t", b"4"), TopicFull)
    assert error.detail == {
        "topic": "t",
        "cap_records": 3,
        "cap_bytes": 1000,
        "head_seq": 3,
        "earliest_seq": 1,
    }
    h.do(c.Delete("t", seqs=[1]))
    assert h.append("t", b"4").first_seq == 4


def test_reject_counts_what_still_waits_for_its_sync() -> None:
    h = with_topic(fsync(cap_records=3, discard="reject"))
    first, second = h.ask(append("t", b"1", b"2"), append("t", b"3", b"4"))
    h.rest()
    assert h.replies[first].first_seq == 1
    assert isinstance(h.replies[second], TopicFull)


def test_reject_counts_bytes_as_well() -> None:
    h = with_topic(fsync(cap_bytes=10, discard="reject"))
    h.append("t", b"x" * 8)
    h.refused(append("t", b"xxx"), TopicFull)
    assert h.append("t", b"xx").first_seq == 2


@pytest.mark.parametrize("payloads", [[b"1"] * 4, [b"x" * 11]])
def test_write_that_can_never_fit_a_rejecting_topic(payloads: list[bytes]) -> None:
    h = with_topic(fsync(cap_records=3, cap_bytes=10, discard="reject"))
    h.refused(append("t", *payloads), RecordTooLarge)
    fresh = Harness()
    fresh.refused(
        append("new", *payloads, config=fsync(cap_records=3, cap_bytes=10, discard="reject")), RecordTooLarge
    )
    fresh.refused(c.State("new"), TopicNotFound)


def test_rejecting_topic_is_never_cap_evicted_by_a_config_change() -> None:
    h = with_records(5)
    h.put("t", fsync(cap_records=2, discard="reject"))
    assert h.seqs("t") == [1, 2, 3, 4, 5]
    h.refused(append("t", b"6"), TopicFull)


def test_cap_per_tag_takes_the_oldest_of_that_tag_in_silence() -> None:
    h = with_tags("aab-", fsync(cap_per_tag=2))
    h.append("t", b"5", tag=b"a")
    assert h.seqs("t") == [2, 3, 4, 5]
    assert h.gaps("t") == []


def test_cap_per_tag_leaves_untagged_records_alone() -> None:
    h = with_tags("---", fsync(cap_per_tag=1))
    assert h.seqs("t") == [1, 2, 3]


def test_cap_per_tag_within_one_batch_and_after_a_restart() -> None:
    h = with_tags("abaaab", fsync(cap_per_tag=1))
    assert h.seqs("t") == [5, 6]
    h.kill_and_open()
    assert h.seqs("t") == [5, 6]


def test_new_cap_per_tag_acts_at_once() -> None:
    h = with_tags("aabab-")
    h.put("t", fsync(cap_per_tag=1))
    assert h.seqs("t") == [4, 5, 6]
    assert h.gaps("t") == []


# ---- time


def test_topic_ttl_is_strict_and_announced() -> None:
    h = with_records(2, fsync(ttl_ms=1000))
    h.pass_time(500)
    h.append("t", b"3")
    h.pass_time(500)
    assert h.seqs("t") == [1, 2, 3], "not yet older than its TTL"
    h.pass_time(1)
    assert h.seqs("t") == [3]
    assert h.gaps("t") == [(1, 2, "ttl")]
    assert (h.state("t").count, h.state("t").earliest_seq) == (1, 3)


def test_longer_ttl_brings_nothing_back() -> None:
    h = with_records(2, fsync(ttl_ms=1000))
    h.pass_time(1001)
    h.put("t", fsync(ttl_ms=100_000))
    assert h.seqs("t") == []
    h.kill_and_open()
    assert h.read("t") == ([], [(1, 2, "ttl")])


def test_shorter_ttl_acts_at_once() -> None:
    h = with_records(2)
    h.pass_time(1000)
    h.append("t", b"3")
    h.put("t", fsync(ttl_ms=500))
    assert h.read("t") == ([(3, b"3")], [(1, 2, "ttl")])


def test_cap_and_ttl_in_one_gap_are_mixed() -> None:
    h = with_records(4, fsync(ttl_ms=1000, cap_records=3))
    h.pass_time(1001)
    h.append("t", b"5")
    assert h.diff("t").tombstone.reason == "mixed"
    assert h.diff("t", 1).tombstone.reason == "ttl", "the cap did not reach past seq 1"


def test_records_own_ttl_ends_it_in_silence_anywhere() -> None:
    h = with_topic()
    h.append("t", b"1", b"2", b"3", ttls_ms=[0, 1000, 0])
    h.pass_time(1000)
    assert h.seqs("t") == [1, 2, 3]
    h.pass_time(1)
    assert h.read("t") == ([(1, b"1"), (3, b"3")], [])
    assert h.state("t").count == 2


@pytest.mark.parametrize("how", ["kill_and_open", "restart"])
def test_records_own_ttl_survives_a_restart(how: str) -> None:
    h = with_topic()
    h.append("t", b"1", b"2", ttls_ms=[1000, 0])
    getattr(h, how)()
    assert h.seqs("t") == [1, 2]
    h.pass_time(1001)
    assert h.seqs("t") == [2]
    getattr(h, how)()
    assert h.read("t") == ([(2, b"2")], [])


def test_expired_records_make_room_in_a_rejecting_topic() -> None:
    h = with_records(2, fsync(ttl_ms=1000, cap_records=2, discard="reject"))
    h.refused(append("t", b"3"), TopicFull)
    h.pass_time(1001)
    assert h.append("t", b"3").first_seq == 3


# ---- delete


DELETES = [
    (c.Delete("t", before_seq=4), [4, 5, 6, 7, 8]),
    (c.Delete("t", before_seq=1), [1, 2, 3, 4, 5, 6, 7, 8]),
    (c.Delete("t", before_seq=100), []),
    (c.Delete("t", match=TagMatch("Eq", b"a")), [2, 4, 6, 8]),
    (c.Delete("t", match=TagMatch("Eq", b"none")), [1, 2, 3, 4, 5, 6, 7, 8]),
    (c.Delete("t", match=TagMatch("Glob", b"*")), [4, 8]),
    (c.Delete("t", match=TagMatch("Subject", b"*")), [4, 8]),
    (c.Delete("t", seqs=[2, 3, 3, 99, 0]), [1, 4, 5, 6, 7, 8]),
    (c.Delete("t", seqs=[]), [1, 2, 3, 4, 5, 6, 7, 8]),
    (c.Delete("t", keep=3), [6, 7, 8]),
    (c.Delete("t", keep=0), []),
    (c.Delete("t", keep=8), [1, 2, 3, 4, 5, 6, 7, 8]),
    (c.Delete("t", before_seq=4, match=TagMatch("Eq", b"a")), [2, 4, 5, 6, 7, 8]),
    (c.Delete("t", before_seq=3, seqs=[1, 2, 3, 4]), [3, 4, 5, 6, 7, 8]),
    (c.Delete("t", match=TagMatch("Eq", b"a"), seqs=[1, 2, 5]), [2, 3, 4, 6, 7, 8]),
    (c.Delete("t", match=TagMatch("Eq", b"a"), keep=1), [2, 4, 6, 7, 8]),
    (c.Delete("t", match=TagMatch("Glob", b"*"), keep=1), [4, 6, 7, 8]),
    (c.Delete("t", match=TagMatch("Eq", b"a"), keep=1, before_seq=4), [2, 4, 5, 6, 7, 8]),
    (c.Delete("t", match=TagMatch("Eq", b"a"), keep=2, seqs=[1, 5, 7]), [2, 3, 4, 5, 6, 7, 8]),
    (c.Delete("t", before_seq=3, keep=2), [3, 4, 5, 6, 7, 8]),
    (c.Delete("t", before_seq=8, keep=4), [5, 6, 7, 8]),
    (c.Delete("t", seqs=[1, 2, 7, 8], keep=2), [3, 4, 5, 6, 7, 8]),
]


@pytest.mark.parametrize(("command", "left"), DELETES, ids=[str(i) for i in range(len(DELETES))])
def test_delete_selectors(command: c.Delete, left: list[int]) -> None:
    """Tags: 1 a, 2 b, 3 a, 4 none, 5 a, 6 b, 7 a, 8 none."""
    h = with_tags("aba-aba-")
    reply = h.do(command)
    assert h.seqs("t") == left
    assert (reply.deleted, reply.count, reply.head_seq) == (8 - len(left), len(left), 8)
    assert reply.earliest_seq == (left[0] if left else 9)
    assert h.gaps("t") == []
    h.kill_and_open()
    assert h.read("t") == ([(seq, numbered(seq, 1)[0]) for seq in left], [])


def test_delete_must_say_what() -> None:
    with_records(1).refused(c.Delete("t"), InvalidRequest)


def test_delete_is_no_standing_rule() -> None:
    h = with_tags("a")
    h.do(c.Delete("t", match=TagMatch("Eq", b"a")))
    h.append("t", b"2", tag=b"a")
    assert h.seqs("t") == [2]


def test_delete_is_pinned_to_its_place_in_the_order() -> None:
    h = with_records(1)
    h.ask(append("t", b"2"), c.Delete("t", before_seq=100), append("t", b"3"))
    h.rest()
    assert h.seqs("t") == [3]
    h.kill_and_open()
    assert h.seqs("t") == [3]


def test_second_delete_of_the_same_finds_nothing() -> None:
    h = with_records(3)
    assert h.do(c.Delete("t", seqs=[2])).deleted == 1
    assert h.do(c.Delete("t", seqs=[2])).deleted == 0


def test_delete_of_an_fsync_topic_is_visible_after_its_sync() -> None:
    h = with_records(2)
    (token,) = h.ask(c.Delete("t", seqs=[1]))
    assert token not in h.replies
    (diff,) = h.ask(c.Diff("t"))
    assert h.replies[diff].seqs == [1, 2]
    h.rest()
    assert h.seqs("t") == [2]


def test_deleting_everything_leaves_the_head() -> None:
    h = with_records(3)
    h.do(c.Delete("t", before_seq=9))
    assert (h.state("t").head_seq, h.state("t").earliest_seq, h.state("t").bytes) == (3, 4, 0)
    assert h.append("t", b"4").first_seq == 4
