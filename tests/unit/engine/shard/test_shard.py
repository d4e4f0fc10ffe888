"""Commands that create, fill and drop topics, and all their errors.

Goal: one promise per test: creation, limits, conditions, skips, dropping and listing, bounds of the server. Method: a
fresh engine on a SimDisk for each test; what matters after a restart is read twice.
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
    fsync,
    rows_of,
    with_records,
    with_tags,
    with_topic,
)
from topics.api import limits
from topics.api.config import TopicConfig
from topics.api.errors import (
    BatchTooLarge,
    InvalidRequest,
    RecordTooLarge,
    Throttled,
    TopicExistsIncompatible,
    TopicNotEmpty,
    TopicNotFound,
    WrongLastSeq,
)
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagMatch

ANY = TagMatch("Glob", b"*")


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
    assert h.state("t").last_read_ts is None, "reads without touch leave no trace"
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
    assert h.engine.shard.state.ram_bytes <= 300_000


def test_fsync_record_limit_leaves_the_group_as_it_was() -> None:
    """A refused command in the middle of a turn does not affect the others."""
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
