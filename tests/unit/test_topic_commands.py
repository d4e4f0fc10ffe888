"""Every command of a shard, and every error it can answer with.

Goal: the semantics of sections 1 to 8, one promise a test: creation, limits, conditions, retention, deletes, reads by
tag, long polls, bounds. Method: a fresh engine on a SimDisk for each test; what matters over a restart is asked twice.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.support.engine_harness import (
    DISK,
    EPHEMERAL,
    FSYNC,
    MEMORY,
    SMALL,
    Harness,
    append,
    numbered,
    rows_of,
)
from topics.engine import commands as c
from topics.engine import delivery, limits
from topics.engine.config import EngineConfig, TopicConfig
from topics.engine.errors import (
    BatchTooLarge,
    InvalidRequest,
    RecordTooLarge,
    Throttled,
    TopicExistsIncompatible,
    TopicFull,
    TopicNotEmpty,
    TopicNotFound,
    WrongLastSeq,
)
from topics.engine.subjects import TagMatch

ANY = TagMatch("Glob", b"*")


def fsync(**fields: object) -> TopicConfig:
    return TopicConfig(durability="fsync", **fields)  # type: ignore[arg-type]


def with_topic(config: TopicConfig = FSYNC, engine: EngineConfig = SMALL) -> Harness:
    h = Harness(engine)
    h.put("t", config)
    return h


def with_records(count: int, config: TopicConfig = FSYNC) -> Harness:
    h = with_topic(config)
    h.append("t", *numbered(1, count))
    return h


def with_tags(tags: str, config: TopicConfig = FSYNC) -> Harness:
    """One record for each letter, which is its tag; `-` has none."""
    h = with_topic(config)
    h.append(
        "t", *numbered(1, len(tags)), tags=[None if letter == "-" else letter.encode() for letter in tags]
    )
    return h


# ---- creation


def test_first_write_creates_the_topic_with_the_given_config() -> None:
    h = Harness()
    config = fsync(cap_records=7)
    assert h.append("t", b"1", config=config).created
    assert h.state("t").config == config


def test_first_write_without_a_config_takes_the_defaults() -> None:
    h = Harness()
    h.append("t", b"1")
    assert h.state("t").config == TopicConfig()


def test_later_write_does_not_change_the_config() -> None:
    h = with_topic(fsync(cap_records=7))
    assert not h.append("t", b"1", config=DISK).created
    assert h.state("t").config == fsync(cap_records=7)


@pytest.mark.parametrize(
    "options",
    [{"create": False}, {"config": TopicConfig(auto_create=False)}, {"create": False, "config": DISK}],
)
def test_write_that_may_not_create_is_refused(options: dict[str, object]) -> None:
    h = Harness()
    h.refused(append("t", b"1", **options), TopicNotFound)
    h.refused(c.State("t"), TopicNotFound)


def test_create_true_overrides_auto_create_false() -> None:
    h = Harness()
    assert h.append("t", b"1", create=True, config=TopicConfig(auto_create=False)).created


@pytest.mark.parametrize("name", ["a", "7", "A.b_c:d-9", "x" * 255])
def test_good_names(name: str) -> None:
    h = Harness()
    assert h.put(name).created
    h.append(name, b"1")
    h.restart()
    assert h.rows(name) == [(1, b"1")]


@pytest.mark.parametrize("name", ["", "-a", ".a", "_a", "a b", "a/b", "é", "x" * 256, "a\n", "a\0"])
def test_bad_names(name: str) -> None:
    h = Harness()
    h.refused(c.PutTopic(name, DISK), InvalidRequest)
    h.refused(append(name, b"1"), InvalidRequest)


def test_put_is_a_no_op_when_nothing_differs() -> None:
    h = with_topic()
    written = h.engine.wal.last_lsn
    assert h.put("t") == c.TopicPut("t", False, FSYNC)
    assert h.engine.wal.last_lsn == written


def test_put_changes_the_config_and_it_lasts() -> None:
    h = with_topic()
    assert not h.put("t", DISK).created
    h.kill_and_open()
    assert h.state("t").config == DISK


def test_put_cannot_change_the_type() -> None:
    h = with_topic()
    error = h.refused(c.PutTopic("t", TopicConfig(type="queue")), TopicExistsIncompatible)
    assert (error.detail["existing_type"], error.detail["requested_type"]) == ("log", "queue")


@pytest.mark.parametrize(
    "config", [TopicConfig(dead_letter="a b"), TopicConfig(type="queue", dead_letter="t")]
)
def test_put_refuses_a_bad_dead_letter(config: TopicConfig) -> None:
    Harness().refused(c.PutTopic("t", config), InvalidRequest)


def test_topics_that_do_not_exist() -> None:
    h = Harness()
    for command in (
        c.Diff("t"),
        c.Diff("t", wait_ms=1000),
        c.State("t"),
        c.Skip("t", 1),
        c.Delete("t", before_seq=1),
        c.LastByTag("t", ANY),
        c.NextByTag("t", ANY),
        c.CountByTag("t", ANY),
    ):
        assert h.refused(command, TopicNotFound).detail["topic"] == "t"
    assert h.do(c.DropTopic("t")) == c.TopicDropped("t", False)


# ---- limits of a write


def test_empty_write_is_refused() -> None:
    with_topic().refused(append("t"), InvalidRequest)


def test_batch_limit() -> None:
    h = with_topic(engine=msgspec.structs.replace(SMALL, segment_max_events=10_000))
    assert h.append("t", *[b"1"] * limits.BATCH_RECORDS_MAX).count == limits.BATCH_RECORDS_MAX
    error = h.refused(append("t", *[b"1"] * (limits.BATCH_RECORDS_MAX + 1)), BatchTooLarge)
    assert error.detail == {"records": 10_001, "max": 10_000}
    assert h.state("t").head_seq == 10_000


def test_record_limit() -> None:
    h = with_topic()
    h.append("t", b"x" * limits.RECORD_BYTES_MAX)
    h.refused(append("t", b"1", b"x" * (limits.RECORD_BYTES_MAX + 1)), RecordTooLarge)
    assert h.state("t").head_seq == 1


def test_topics_own_record_limit() -> None:
    h = with_topic(fsync(max_record_bytes=10))
    h.append("t", b"x" * 10)
    h.refused(append("t", b"x" * 11), RecordTooLarge)


def test_accounted_sizes_count_where_they_differ_from_the_payload() -> None:
    h = with_topic(fsync(max_record_bytes=10))
    h.append("t", b"x" * 20, sizes=[3])
    h.refused(append("t", b"x", sizes=[11]), RecordTooLarge)
    assert h.state("t").bytes == 3
    h.restart()
    assert h.state("t").bytes == 3


@pytest.mark.parametrize(
    "options",
    [
        {"tags": [b"x" * (limits.TAG_BYTES_MAX + 1)]},
        {"nodes": [b"x" * (limits.NODE_BYTES_MAX + 1)]},
        {"key": b""},
        {"key": b"x" * (limits.KEY_BYTES_MAX + 1)},
    ],
    ids=["tag", "node", "no key", "key"],
)
def test_too_long_names_are_refused(options: dict[str, object]) -> None:
    h = with_topic()
    h.refused(append("t", b"1", **options), InvalidRequest)
    assert h.state("t").head_seq == 0


def test_longest_tag_node_and_key_are_kept() -> None:
    h = with_topic()
    tag, node, key = b"t" * limits.TAG_BYTES_MAX, b"n" * limits.NODE_BYTES_MAX, b"k" * limits.KEY_BYTES_MAX
    h.append("t", b"1", tag=tag, nodes=[node], key=key)
    h.restart()
    page = h.diff("t")
    assert (page.tags, page.nodes) == ([tag], [node])
    assert h.append("t", b"1", key=key).deduped


def test_raw_payload_and_headers_are_kept_verbatim() -> None:
    h = with_topic()
    content = bytes(range(256))
    h.append("t", b"header\r\n" + content, raw=True, header_lens=[8])
    h.restart()
    assert h.rows("t") == [(1, b"header\r\n" + content)]


# ---- conditions


def test_append_if_last_seq() -> None:
    h = with_records(2)
    error = h.refused(append("t", b"x", if_last_seq=1), WrongLastSeq)
    assert error.detail == {"topic": "t", "expected": 1, "actual": 2}
    assert h.append("t", b"3", if_last_seq=2).first_seq == 3


def test_append_if_last_seq_decides_on_what_is_staged() -> None:
    h = with_topic()
    first, second = h.ask(append("t", b"1", if_last_seq=0), append("t", b"2", if_last_seq=0))
    h.rest()
    assert h.replies[first].first_seq == 1
    assert isinstance(h.replies[second], WrongLastSeq)
    assert h.seqs("t") == [1]


def test_condition_on_a_topic_that_does_not_exist() -> None:
    h = Harness()
    assert h.refused(append("t", b"1", if_last_seq=3), WrongLastSeq).detail["actual"] == 0
    h.refused(c.State("t"), TopicNotFound)
    assert h.append("t", b"1", if_last_seq=0, if_tag_last_seq=(b"a", 0)).created


def test_append_if_tag_last_seq() -> None:
    h = with_tags("ab")
    assert h.refused(append("t", b"x", if_tag_last_seq=(b"a", 0)), WrongLastSeq).detail["actual"] == 1
    assert h.append("t", b"3", tag=b"a", if_tag_last_seq=(b"a", 1)).first_seq == 3
    assert h.append("t", b"4", if_tag_last_seq=(b"unknown", 0)).first_seq == 4


def test_last_seq_of_a_tag_is_that_of_its_newest_live_record() -> None:
    h = with_tags("aab")
    h.do(c.Delete("t", seqs=[2]))
    assert h.append("t", b"x", if_tag_last_seq=(b"a", 1)).first_seq == 4


def test_retry_with_a_key_is_deduped_before_its_condition_is_looked_at() -> None:
    h = with_topic()
    h.append("t", b"1", key=b"k", if_last_seq=0)
    assert h.append("t", b"1", key=b"k", if_last_seq=0).deduped


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


# ---- skip


def test_skip_takes_seqs_without_records_and_without_a_tombstone() -> None:
    h = with_records(2)
    assert h.do(c.Skip("t", 5)) == c.Appended("t", 3, 5, 7, synced=True)
    assert h.append("t", b"8").first_seq == 8
    assert h.seqs("t") == [1, 2, 8]
    assert h.gaps("t") == []
    assert h.state("t").count == 3


@pytest.mark.parametrize("how", ["kill_and_open", "restart"])
def test_skipped_seqs_are_counted_by_recovery(how: str) -> None:
    h = with_topic()
    h.do(c.Skip("t", 5))
    getattr(h, how)()
    assert h.state("t").head_seq == 5
    assert h.append("t", b"6").first_seq == 6


@pytest.mark.parametrize("count", [0, -1, limits.SKIP_MAX + 1])
def test_skip_of_nothing_or_too_much_is_refused(count: int) -> None:
    with_topic().refused(c.Skip("t", count), InvalidRequest)


def test_page_after_a_skip_reaches_the_head() -> None:
    h = with_records(1)
    h.do(c.Skip("t", 5))
    page = h.diff("t", 1)
    assert (page.seqs, page.next_from_seq, page.tombstone) == ([], 6, None)


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


# ---- topics as a whole


def test_drop_removes_the_topic() -> None:
    h = with_records(2)
    assert h.do(c.DropTopic("t")) == c.TopicDropped("t", True)
    h.refused(c.State("t"), TopicNotFound)
    assert h.do(c.DropTopic("t")) == c.TopicDropped("t", False)
    h.kill_and_open()
    h.refused(c.State("t"), TopicNotFound)


def test_drop_if_empty() -> None:
    h = with_records(2)
    assert h.refused(c.DropTopic("t", if_empty=True), TopicNotEmpty).detail["count"] == 2
    h.do(c.Delete("t", keep=0))
    assert h.do(c.DropTopic("t", if_empty=True)).deleted


def test_drop_and_write_in_one_turn_make_a_new_instance() -> None:
    h = with_records(3)
    _, write = h.ask(c.DropTopic("t"), append("t", b"new", config=FSYNC))
    h.rest()
    assert h.replies[write].created
    assert h.rows("t") == [(1, b"new")]
    h.kill_and_open()
    assert h.rows("t") == [(1, b"new")]


def test_cursor_of_an_earlier_instance_gets_recreated() -> None:
    h = with_records(5)
    h.do(c.DropTopic("t"))
    h.put("t")
    h.append("t", b"new")
    page = h.diff("t", 5)
    assert page.tombstone is not None
    assert (page.tombstone.reason, page.tombstone.gap_from, page.tombstone.gap_to) == ("recreated", 1, 1)
    assert rows_of(page) == [(1, b"new")]
    assert page.next_from_seq == 1


def test_new_instance_knows_no_keys_tags_or_floors_of_the_old() -> None:
    h = with_topic(fsync(cap_records=1))
    h.append("t", b"1", b"2", tag=b"a", key=b"k")
    h.do(c.DropTopic("t"))
    h.put("t")
    assert h.do(c.CountByTag("t", ANY)).counts == []
    assert not h.append("t", b"1", key=b"k").deduped
    assert h.gaps("t") == []


def test_state_clocks() -> None:
    h = with_topic()
    assert (h.state("t").last_write_ts, h.state("t").last_read_ts) == (None, None)
    h.append("t", b"1")
    written = h.state("t").last_write_ts
    assert written == h.diff("t", touch=False).timestamps[0]
    assert h.state("t").last_read_ts is None, "untouching reads leave no trace"
    h.pass_time(10)
    h.diff("t")
    assert h.state("t").last_read_ts == h.engine.clock.now_ms


def test_list_pages_with_one_row_more_when_there_is_more() -> None:
    h = Harness()
    for name in ("a1", "a2", "a3", "b1", "B0"):
        h.put(name, MEMORY)

    def names(**options: object) -> list[str]:
        return [row.topic for row in h.do(c.ListTopics(**options)).topics]  # type: ignore[arg-type]

    assert names() == ["B0", "a1", "a2", "a3", "b1"]
    assert names(limit=2) == ["B0", "a1", "a2"]
    assert names(limit=2, after="a1") == ["a2", "a3", "b1"]
    assert names(limit=3, after="a1") == ["a2", "a3", "b1"]
    assert names(prefix="a") == ["a1", "a2", "a3"]
    assert names(prefix="a", limit=2) == ["a1", "a2", "a3"]
    assert names(prefix="a", after="a2") == ["a3"]
    assert names(prefix="a", after="a3") == []
    assert names(prefix="a", after="A") == ["a1", "a2", "a3"]
    assert names(prefix="a", after="b") == []
    assert names(after="zz") == []
    assert names(prefix="nothing") == []


def test_list_shows_only_published_topics_and_their_state() -> None:
    h = with_records(2)
    h.ask(c.PutTopic("new", FSYNC), append("t", b"3"))
    (listing,) = h.ask(c.ListTopics())
    assert [(row.topic, row.head_seq, row.count) for row in h.replies[listing].topics] == [("t", 2, 2)]


# ---- by tag


def test_last_by_tag() -> None:
    h = with_topic()
    h.append("t", *numbered(1, 5), tags=[b"a.x", b"a.y", b"b.x", b"a.x", None])
    ask = h.do
    assert ask(c.LastByTag("t", TagMatch("Eq", b"a.x"))).seqs == [4]
    assert ask(c.LastByTag("t", TagMatch("Eq", b"a"))).seqs == []
    assert ask(c.LastByTag("t", TagMatch("Glob", b"a.*"))).seqs == [4]
    assert ask(c.LastByTag("t", TagMatch("Glob", b"a.*"), each=True)).seqs == [2, 4]
    assert ask(c.LastByTag("t", TagMatch("Subject", b"*.x"), each=True)).seqs == [3, 4]
    assert ask(c.LastByTag("t", TagMatch("Subject", b"a.>"))).seqs == [4]
    assert ask(c.LastByTag("t", ANY, each=True)).seqs == [2, 3, 4]
    page = ask(c.LastByTag("t", TagMatch("Eq", b"b.x")))
    assert (rows_of(page), page.tags) == ([(3, numbered(3, 1)[0])], [b"b.x"])


def test_next_by_tag() -> None:
    h = with_topic()
    h.append("t", *numbered(1, 5), tags=[b"a.x", b"a.y", b"b.x", b"a.x", None])

    def next_of(match: TagMatch, from_seq: int) -> list[int]:
        seqs: list[int] = h.do(c.NextByTag("t", match, from_seq)).seqs
        return seqs

    assert next_of(TagMatch("Eq", b"a.x"), 0) == [1]
    assert next_of(TagMatch("Eq", b"a.x"), 1) == [1]
    assert next_of(TagMatch("Eq", b"a.x"), 2) == [4]
    assert next_of(TagMatch("Eq", b"a.x"), 5) == []
    assert next_of(TagMatch("Glob", b"a.*"), 2) == [2]
    assert next_of(TagMatch("Subject", b"*.x"), 2) == [3]


def test_count_by_tag() -> None:
    h = with_tags("aba-")
    assert h.do(c.CountByTag("t", ANY)).counts == [(b"a", 2), (b"b", 1)]
    assert h.do(c.CountByTag("t", TagMatch("Eq", b"a"))).counts == [(b"a", 2)]
    assert h.do(c.CountByTag("t", TagMatch("Eq", b"z"))).counts == []
    assert h.do(c.CountByTag("t", TagMatch("Subject", b">"))).counts == [(b"a", 2), (b"b", 1)]


def test_by_tag_reads_do_not_see_deleted_evicted_or_expired_records() -> None:
    h = with_topic(fsync(cap_records=4))
    h.append("t", *numbered(1, 5), tags=[b"a", b"b", b"b", b"c", b"a"], ttls_ms=[0, 0, 0, 1000, 0])
    h.do(c.Delete("t", seqs=[3]))
    h.pass_time(1001)
    assert h.do(c.CountByTag("t", ANY)).counts == [(b"a", 1), (b"b", 1)]
    assert h.do(c.LastByTag("t", ANY, each=True)).seqs == [2, 5]
    assert h.do(c.NextByTag("t", TagMatch("Eq", b"a"))).seqs == [5]


@pytest.mark.parametrize("how", ["kill_and_open", "restart"])
def test_tags_after_a_restart(how: str) -> None:
    h = with_tags("abaab-ab")
    h.do(c.Delete("t", seqs=[7]))
    getattr(h, how)()
    assert h.do(c.CountByTag("t", ANY)).counts == [(b"a", 3), (b"b", 3)]
    assert h.do(c.LastByTag("t", ANY, each=True)).seqs == [4, 8]


def test_by_tag_answer_that_rests_on_an_unsynced_write_waits_for_it() -> None:
    h = with_tags("a")
    h.ask(append("t", b"2", tag=b"a"))
    tokens = h.ask(c.LastByTag("t", TagMatch("Eq", b"a")), c.CountByTag("t", ANY))
    assert not set(tokens) & set(h.replies)
    h.rest()
    assert h.replies[tokens[0]].seqs == [2]
    assert h.replies[tokens[1]].counts == [(b"a", 2)]


# ---- pages


def test_page_limit_and_cursor() -> None:
    h = with_records(7)
    page = h.diff("t", 2, limit=3)
    assert (page.seqs, page.next_from_seq, page.head_seq) == ([3, 4, 5], 5, 7)
    assert h.diff("t", 5).seqs == [6, 7]
    assert h.diff("t", 7).seqs == []


def test_page_passes_silently_over_deleted_records() -> None:
    h = with_records(6)
    h.do(c.Delete("t", seqs=[4, 5, 6]))
    page = h.diff("t", 3)
    assert (page.seqs, page.next_from_seq, page.tombstone) == ([], 6, None)


def test_byte_budget_stops_a_page_and_never_before_one_record() -> None:
    h = with_topic()
    h.append("t", *[b"x" * 10] * 6)
    assert h.diff("t", max_bytes=25).seqs == [1, 2]
    assert h.diff("t", 2, max_bytes=30).seqs == [3, 4, 5]
    page = h.diff("t", 5, max_bytes=1)
    assert page.seqs == [6]
    first = h.diff("t", max_bytes=25)
    assert h.diff("t", first.next_from_seq, max_bytes=25).seqs == [3, 4]


def test_byte_budget_has_a_default_and_a_maximum() -> None:
    h = with_topic()
    for _ in range(10):
        h.append("t", b"x" * (limits.MIB - 100))
    assert h.diff("t").seqs == [1]
    assert h.diff("t", max_bytes=100 * limits.MIB).seqs == list(range(1, 9))


def test_page_limit_has_a_maximum() -> None:
    h = with_topic(engine=msgspec.structs.replace(SMALL, segment_max_events=10_000))
    h.append("t", *[b"1"] * 1500)
    assert len(h.diff("t", limit=5000).seqs) == limits.DIFF_LIMIT_MAX
    assert len(h.diff("t", limit=0).seqs) == limits.DIFF_LIMIT_DEFAULT


def test_own_records_are_filtered_and_the_cursor_moves_on() -> None:
    h = with_topic()
    h.append("t", *numbered(1, 5), nodes=[b"n1", b"n2", None, b"n1", b"n11"])
    page = h.diff("t", nodes=(b"n1",))
    assert (page.seqs, page.nodes) == ([2, 3, 5], [b"n2", None, b"n11"])
    assert h.diff("t", nodes=(b"n1", b"n2")).seqs == [3, 5]
    assert h.diff("t", nodes=(b"unknown",)).seqs == [1, 2, 3, 4, 5]
    empty = h.diff("t", 3, nodes=(b"n1", b"n11"))
    assert (empty.seqs, empty.next_from_seq, empty.tombstone) == ([], 5, None)
    h.restart()
    assert h.diff("t", nodes=(b"n1",)).seqs == [2, 3, 5]


def test_dedupe_node_false_turns_the_filter_off() -> None:
    h = with_topic(fsync(dedupe_node=False))
    h.append("t", b"1", nodes=[b"n1"])
    assert h.diff("t", nodes=(b"n1",)).seqs == [1]


# ---- long polls


def test_long_poll_is_answered_by_an_append() -> None:
    h = with_records(1, MEMORY)
    (poll,) = h.ask(c.Diff("t", 1, wait_ms=1000))
    assert poll not in h.replies
    h.ask(append("t", b"2"))
    assert rows_of(h.replies[poll]) == [(2, b"2")]


def test_many_long_polls_are_woken_a_turn_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answers would otherwise all be in memory at once."""
    monkeypatch.setattr(delivery, "TURN_ROOM", 10_000)
    monkeypatch.setattr(delivery, "ANSWER_ROOM", 10_000)
    h = with_records(1, MEMORY)
    polls = h.ask(*(c.Diff("t", 1, wait_ms=1000) for _ in range(6)))
    outcome = h.engine.turn([("write", append("t", b"x" * 2000))])
    answered = [token for token, _ in outcome.replies]
    assert "write" in answered
    assert 0 < len(answered) - 1 < 6
    assert outcome.wake_at_ms == h.engine.clock.mono_ms
    while len(answered) < 7:
        outcome = h.engine.turn([])
        assert outcome.replies
        answered += [token for token, _ in outcome.replies]
    assert len(polls) == 6


def test_long_poll_of_an_fsync_topic_is_answered_after_the_sync() -> None:
    h = with_records(1)
    (poll,) = h.ask(c.Diff("t", 1, wait_ms=1000))
    h.ask(append("t", b"2"))
    assert poll not in h.replies
    h.run_job("sync")
    assert rows_of(h.replies[poll]) == [(2, b"2")]


def test_long_poll_with_something_to_read_is_answered_at_once() -> None:
    h = with_records(2)
    (poll,) = h.ask(c.Diff("t", 1, wait_ms=1000))
    assert h.replies[poll].seqs == [2]


def test_long_poll_in_the_turn_of_its_append() -> None:
    h = with_records(1, MEMORY)
    poll, _ = h.ask(c.Diff("t", 1, wait_ms=1000), append("t", b"2"))
    assert h.replies[poll].seqs == [2]


def test_long_poll_ends_empty_at_its_deadline() -> None:
    h = with_records(1)
    h.rest()
    (poll,) = h.ask(c.Diff("t", 1, wait_ms=1000))
    assert h._wake_at is not None
    assert h._wake_at <= h.clock.monotonic_ms() + 1000
    h.clock.advance(999)
    h.ask()
    assert poll not in h.replies
    h.clock.advance(1)
    h.ask()
    page = h.replies[poll]
    assert (page.seqs, page.next_from_seq, page.tombstone) == ([], 1, None)


def test_long_poll_waits_no_longer_than_the_maximum() -> None:
    h = with_records(1)
    h.rest()
    (poll,) = h.ask(c.Diff("t", 1, wait_ms=1 << 40))
    h.clock.advance(limits.DIFF_WAIT_MS_MAX)
    h.ask()
    assert poll in h.replies


def test_long_poll_ends_when_its_topic_is_dropped() -> None:
    h = with_records(1)
    (poll,) = h.ask(c.Diff("t", 1, wait_ms=1000))
    h.do(c.DropTopic("t"))
    assert isinstance(h.replies[poll], TopicNotFound)


def test_long_poll_is_ended_by_own_records_with_an_advanced_cursor() -> None:
    """An empty page that moved on is news: else the client would scan its own records again and again."""
    h = with_records(1, MEMORY)
    (poll,) = h.ask(c.Diff("t", 1, wait_ms=1000, nodes=(b"me",)))
    h.ask(append("t", b"2", nodes=[b"me"]))
    assert (h.replies[poll].seqs, h.replies[poll].next_from_seq) == ([], 2)


def test_many_long_polls_of_one_topic_are_all_answered() -> None:
    h = with_records(1, MEMORY)
    polls = h.ask(*[c.Diff("t", 1, wait_ms=1000)] * 50)
    h.ask(append("t", b"2"))
    h.rest()
    assert set(polls) <= set(h.replies)


def test_long_polls_past_the_bound_are_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAITERS_PER_TOPIC_MAX", 2)
    h = with_records(1)
    first, second, third = h.ask(*[c.Diff("t", 1, wait_ms=1000)] * 3)
    assert third in h.replies
    assert not {first, second} & set(h.replies)


# ---- bounds of the server


def test_max_topics() -> None:
    h = Harness(msgspec.structs.replace(SMALL, max_topics=2))
    h.put("a")
    h.put("b")
    for command in (c.PutTopic("c", FSYNC), append("c", b"1")):
        assert h.refused(command, Throttled).detail == {"limit": "max_topics", "max": 2}
    h.do(c.DropTopic("a"))
    assert h.put("c").created


def test_max_topics_in_one_turn_is_exact() -> None:
    h = Harness(msgspec.structs.replace(SMALL, max_topics=2))
    tokens = h.ask(*[c.PutTopic(name, FSYNC) for name in "abc"])
    h.rest()
    assert [isinstance(h.replies[token], Throttled) for token in tokens] == [False, False, True]


def test_max_total_bytes() -> None:
    h = with_topic(engine=msgspec.structs.replace(SMALL, max_total_bytes=100))
    h.append("t", b"x" * 60)
    h.append("u", b"x" * 40)
    assert h.refused(append("t", b"x"), Throttled).detail == {"limit": "max_total_bytes", "max": 100}
    h.do(c.Delete("t", keep=0))
    h.append("u", b"x" * 60)
    h.refused(append("t", b"x"), Throttled)
    h.do(c.DropTopic("u"))
    h.append("t", b"x" * 100)
    h.restart()
    h.refused(append("t", b"x"), Throttled)


def test_ephemeral_records_are_bounded_and_others_are_not() -> None:
    h = Harness(msgspec.structs.replace(SMALL, memory_bytes_max=100_000))
    h.put("e", EPHEMERAL)
    h.put("t", FSYNC)
    for _ in range(3):
        h.append("e", b"x" * 30_000)
    error = h.refused(append("e", b"x" * 30_000), Throttled)
    assert error.detail == {"limit": "max_memory_bytes", "max": 100_000}
    h.append("t", b"x" * 30_000)
    h.do(c.DropTopic("e"))
    h.append("e", b"x" * 30_000, config=EPHEMERAL)


def test_capped_ephemeral_topic_goes_on_for_ever_within_the_bound() -> None:
    h = Harness(msgspec.structs.replace(SMALL, memory_bytes_max=300_000))
    h.put("e", TopicConfig(durability="ephemeral", cap_records=3))
    for i in range(100):
        h.append("e", b"%03d" % i + b"x" * 30_000)
    assert h.seqs("e") == [98, 99, 100]
    assert h.engine.shard.ram_bytes <= 300_000


def test_fsync_record_limit_leaves_the_group_as_it_was() -> None:
    """A refused command in the middle of a turn changes nothing for its neighbours."""
    h = with_topic(fsync(max_record_bytes=10))
    first, bad, second = h.ask(append("t", b"1"), append("t", b"x" * 11), append("t", b"2"))
    h.rest()
    assert isinstance(h.replies[bad], RecordTooLarge)
    assert (h.replies[first].first_seq, h.replies[second].first_seq) == (1, 2)
    h.kill_and_open()
    assert h.rows("t") == [(1, b"1"), (2, b"2")]


def test_write_larger_than_a_log_file_is_taken() -> None:
    h = with_topic()
    h.append("t", b"x" * 20_000, b"y" * 20_000)
    h.append("t", b"z")
    h.kill_and_open()
    assert [payload[:1] for _, payload in h.rows("t")] == [b"x", b"y", b"z"]
