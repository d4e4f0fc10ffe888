"""Requests of the server beyond the plain commands: reads by tag and time, frames, pages of names and tags, totals,
and shares of caps.

Goal: one promise per test. Method: a fresh engine on a SimDisk for each; pages of frames are compared with plain
pages.
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
    file_bytes,
    numbered,
    overwrite,
    rows_of,
)
from tests.support.faults import fault
from tests.support.model_commands import frame_rows, page_rows
from topics.api import limits
from topics.api.config import EngineConfig, TopicConfig
from topics.api.errors import InvalidRequest, OverGrant, Throttled
from topics.engine.commands import topics as c
from topics.engine.core.priority import effective_priority
from topics.engine.core.subjects import TagMatch
from topics.engine.shard.reads import narrow_prefixes

ANY = TagMatch("Glob", b"*")
LARGE = msgspec.structs.replace(SMALL, wal_file_bytes=8 << 20, segment_max_events=10_000, verify=False)


def eq(tag: bytes) -> TagMatch:
    return TagMatch("Eq", tag)


def with_tags(tags: str, config: TopicConfig = FSYNC, engine: EngineConfig = SMALL) -> Harness:
    """One record for each letter, with the letter as its tag; `-` means no tag."""
    h = Harness(engine)
    h.put("t", config)
    h.append("t", *numbered(1, len(tags)), tags=[None if tag == "-" else tag.encode() for tag in tags])
    return h


def seqs(h: Harness, from_seq: int = 0, **options: object) -> list[int]:
    """The seqs of a plain page, after a check that the page of frames has the same."""
    page = h.do(c.Diff("t", from_seq, **options))  # type: ignore[arg-type]
    framed = h.do(c.Diff("t", from_seq, frames=True, **options))  # type: ignore[arg-type]
    assert frame_rows(framed) == page_rows(page)
    assert framed.count == len(page.seqs)
    for name in ("next_from_seq", "head_seq", "earliest_seq", "tombstone"):
        assert getattr(framed, name) == getattr(page, name), name
    return list(page.seqs)


# ---- reads with a tag match


@pytest.mark.parametrize(
    "match, wanted",
    [
        (eq(b"a"), [1, 4, 9]),
        (eq(b"nowhere"), []),
        (TagMatch("Glob", b"a*"), [1, 2, 4, 5, 9]),
        (ANY, [1, 2, 3, 4, 5, 7, 8, 9]),
        (TagMatch("Subject", b"a.*"), [2, 5]),
        (TagMatch("Subject", b"b"), [3, 8]),
        (TagMatch("Glob", b"x*"), []),
    ],
)
@pytest.mark.parametrize("config", [FSYNC, EPHEMERAL])
def test_only_matching_records_are_delivered(match: TagMatch, wanted: list[int], config: TopicConfig) -> None:
    h = Harness()
    h.put("t", config)
    tags = [b"a", b"a.1", b"b", b"a", b"a.2", None, b"c", b"b", b"a"]
    h.append("t", *numbered(1, 9), tags=tags)
    assert seqs(h, match=match) == wanted
    assert h.diff("t", match=match).next_from_seq == 9
    h.checkpoint()
    assert seqs(h, match=match) == wanted
    if config is FSYNC:
        h.restart()
        assert seqs(h, match=match) == wanted


def test_match_and_nodes_work_together() -> None:
    h = Harness()
    h.put("t")
    h.append("t", *numbered(1, 4), tags=[b"a", b"a", b"b", b"a"], nodes=[b"n1", None, None, b"n2"])
    assert seqs(h, match=eq(b"a"), nodes=(b"n1",)) == [2, 4]
    assert seqs(h, match=ANY, nodes=(b"n1", b"n2")) == [2, 3]


def test_match_pages_go_on_where_they_stopped() -> None:
    h = with_tags("abababab")
    page = h.diff("t", match=eq(b"b"), limit=2)
    assert (page.seqs, page.next_from_seq) == ([2, 4], 4)
    page = h.diff("t", 4, match=eq(b"b"), limit=2)
    assert (page.seqs, page.next_from_seq) == ([6, 8], 8)


def test_match_sees_a_tag_that_leaves_while_its_delete_waits_for_a_sync() -> None:
    """The last record of a tag is deleted, and the tag is used again, before either is synced: two ids, one name."""
    h = with_tags("ab")
    reads = [c.Diff("t", match=match, frames=frames) for match in (eq(b"a"), ANY) for frames in (False, True)]
    tokens = h.ask(c.Delete("t", match=eq(b"a")), append("t", b"3", tag=b"a"))
    reading = h.ask(*reads)
    assert [token in h.replies for token in tokens] == [False, False]
    pages = [h.replies[token] for token in reading]
    assert [page.seqs for page in pages[::2]] == [[1], [1, 2]]
    assert [page.count for page in pages[1::2]] == [1, 2]
    h.rest()
    assert seqs(h, match=eq(b"a")) == [3]
    assert seqs(h, match=ANY) == [2, 3]


def test_match_after_a_failed_commit() -> None:
    """Tags are numbered again then, and dead rows keep invalid numbers."""
    h = with_tags("abcdefgh")
    h.do(c.Delete("t", before_seq=7))
    h.disk.fail_at(1, 5, of="write")
    h.send(append("t", b"9", tag=b"z"))
    assert h.engine.shard.state.read_only is not None
    assert seqs(h, match=ANY) == [7, 8]
    assert seqs(h, match=TagMatch("Glob", b"h*")) == [8]


def test_one_read_looks_at_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FILTER_ROWS_MAX", 10)
    h = with_tags("a" * 25 + "b")
    page = h.diff("t", match=eq(b"b"))
    assert (page.seqs, page.next_from_seq, page.scanned) == ([], 10, 10)
    assert h.diff("t", 10, match=eq(b"b")).next_from_seq == 20
    assert h.diff("t", 20, match=eq(b"b")).seqs == [26]
    assert seqs(h, match=eq(b"b")) == []
    assert len(h.diff("t").seqs) == 26  # a plain read is not bounded by this


def test_one_read_compares_a_bounded_number_of_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FILTER_NAMES_MAX", 4)
    h = Harness()
    h.put("t")
    h.append("t", *numbered(1, 12), tags=[b"t%d" % i for i in range(12)])
    page = h.diff("t", match=TagMatch("Glob", b"t11*"))
    assert (page.seqs, page.next_from_seq) == ([], 4)
    assert seqs(h, 8, match=TagMatch("Glob", b"t11*")) == [12]


def test_a_poll_with_a_match_waits_and_comes_back_with_what_matches() -> None:
    for frames in (False, True):
        h = with_tags("a")
        (poll,) = h.ask(c.Diff("t", 1, wait_ms=1000, match=eq(b"b"), frames=frames))
        assert poll not in h.replies
        h.append("t", b"2", tag=b"b")
        h.rest()
        page = h.replies[poll]
        assert (page.next_from_seq, page.head_seq) == (2, 2)
        assert isinstance(page, c.FramePage if frames else c.Page)


def test_a_poll_for_frames_ends_empty_in_time() -> None:
    h = with_tags("a")
    (poll,) = h.ask(c.Diff("t", 1, wait_ms=1000, frames=True))
    h.pass_time(999)
    assert poll not in h.replies
    h.pass_time(2)
    assert h.replies[poll] == c.FramePage("t", [], 0, 1, 1, 1, None, 0)


# ---- reads by time


def with_times(config: TopicConfig = FSYNC) -> tuple[Harness, list[int]]:
    """Three records at each of four times, over three segments."""
    h = Harness()
    h.put("t", config)
    times = []
    for i in range(4):
        h.clock.advance(100)
        h.append("t", *numbered(3 * i + 1, 3))
        times.append(h.state("t").last_write_ts or 0)
    return h, times


def test_from_ts_begins_with_the_first_record_of_that_time() -> None:
    h, times = with_times()
    for _ in range(2):
        assert seqs(h, from_ts=times[0]) == list(range(1, 13))
        assert seqs(h, from_ts=times[1]) == list(range(4, 13))
        assert seqs(h, from_ts=times[1] + 1) == list(range(7, 13))
        assert seqs(h, from_ts=times[3], limit=2) == [10, 11]
        assert seqs(h, from_ts=times[3] + 1) == []
        assert h.diff("t", from_ts=1 << 70).next_from_seq == 12
        h.checkpoint()
        h.restart()


def test_the_later_of_from_seq_and_from_ts_counts() -> None:
    h, times = with_times()
    assert seqs(h, 8, from_ts=times[1]) == [9, 10, 11, 12]
    assert seqs(h, 2, from_ts=times[1])[0] == 4
    assert h.diff("t", 13, from_ts=times[1]).tombstone is not None


def test_from_ts_skips_over_deleted_records() -> None:
    h, times = with_times()
    h.do(c.Delete("t", seqs=[4, 5, 10, 11, 12]))
    assert seqs(h, from_ts=times[1]) == [6, 7, 8, 9]
    page = h.diff("t", from_ts=times[3])
    assert (page.seqs, page.next_from_seq) == ([], 12)


def test_losses_are_announced_if_all_live_records_are_recent_enough() -> None:
    h, times = with_times(TopicConfig(durability="fsync", cap_records=5))
    for from_ts, told in ((times[1], True), (times[2], True), (times[2] + 1, False), (times[3], False)):
        assert (h.diff("t", from_ts=from_ts).tombstone is not None) is told
    h.do(c.Delete("t", before_seq=13))
    assert h.diff("t", from_ts=times[3]).tombstone is not None


def test_from_ts_cannot_be_negative() -> None:
    with_tags("a").refused(c.Diff("t", from_ts=-1), InvalidRequest)


# ---- frames


@pytest.mark.parametrize("config", [FSYNC, DISK, MEMORY, EPHEMERAL])
def test_frames_are_what_a_plain_page_shows(config: TopicConfig) -> None:
    h = with_tags("abc-abc-abc-abc-", config)
    h.do(c.Delete("t", seqs=[2, 3, 7, 16]))
    h.append("t", b"17", raw=True, header_lens=[0])
    for _ in range(3):
        assert seqs(h, limit=1000) == [1, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 17]
        assert seqs(h, 5, limit=3) == [6, 8, 9]
        assert seqs(h, match=eq(b"c")) == [11, 15]
        h.checkpoint()
        if config is not EPHEMERAL:
            h.restart()


def test_neighbours_are_one_piece() -> None:
    h = Harness(msgspec.structs.replace(LARGE, cache_bytes=1 << 20))
    h.put("t")
    h.append("t", *numbered(1, 5000))
    assert len(h.do(c.Diff("t", frames=True)).chunks) == 1
    h.do(c.Delete("t", seqs=[100, 2000]))
    assert len(h.do(c.Diff("t", limit=0, frames=True)).chunks) == 3


def test_the_limit_of_a_page_of_frames() -> None:
    h = Harness(LARGE)
    h.put("t")
    h.append("t", *numbered(1, 3000))
    page = h.do(c.Diff("t", limit=0, frames=True))
    assert (page.count, page.next_from_seq, page.scanned) == (3000, 3000, 3000)
    assert h.do(c.Diff("t", frames=True)).count == 256  # the command's own limit
    assert h.do(c.Diff("t", 10, limit=2000, frames=True)).next_from_seq == 2010


def test_the_bytes_of_a_page_of_frames() -> None:
    h = Harness(LARGE)
    h.put("t")
    h.append("t", *[b"x" * 54] * 100)
    page = h.do(c.Diff("t", limit=0, max_bytes=1000, frames=True))
    assert (page.count, sum(map(len, page.chunks)), page.next_from_seq) == (10, 1000, 10)
    assert h.do(c.Diff("t", limit=0, max_bytes=1, frames=True)).count == 1
    for _ in range(10):
        h.append("t", b"x" * (1 << 20))
    page = h.do(c.Diff("t", 100, limit=0, max_bytes=1 << 40, frames=True))
    assert page.count == 7  # a MiB and its frame
    assert h.do(c.Diff("t", 107, limit=0, frames=True)).count == 3


@fault(
    "segment",
    "a page of raw frames meets a damaged record",
    "it is announced as lost (corrupt), and the others are served",
)
@pytest.mark.parametrize("sealed", [True, False])
def test_corrupt_frames_become_an_announced_loss(sealed: bool) -> None:
    h = Harness()
    h.put("t")
    h.append("t", *numbered(1, 4 if sealed else 3))
    h.append("t", *numbered(9, 3))
    h.checkpoint()
    h.restart()
    path = next(f"{h.topic_dir('t')}/{name}" for name in h.segment_files("t") if name.endswith(".data"))
    data = bytearray(file_bytes(h.disk, path))
    data[data.index(b"record 2")] ^= 1
    overwrite(h.disk, path, bytes(data))
    page = h.do(c.Diff("t", limit=0, frames=True))
    assert [row[0] for row in frame_rows(page)] == [1]
    page = h.do(c.Diff("t", 1, limit=0, frames=True))
    assert (page.tombstone.gap_from, page.tombstone.gap_to, page.tombstone.reason) == (2, 2, "corrupt")
    assert frame_rows(page)[0][0] == 3
    assert h.engine.counters["corrupt"] == 1
    h.engine.check_invariants()


# ---- lists


def names(h: Harness, **options: object) -> list[str]:
    """All names, page by page."""
    found: list[str] = []
    after, limit = "", int(options.pop("limit", 2))  # type: ignore[call-overload]
    while True:
        rows = h.do(c.ListTopics(after=after, limit=limit, **options)).topics  # type: ignore[arg-type]
        found += [row.topic for row in rows[:limit]]
        if len(rows) <= limit:
            return found
        after = found[-1]


@pytest.fixture(scope="module")
def listing() -> Harness:
    h = Harness()
    for name in ("a", "a.1", "a.2", "ab", "b", "b.1", "ba", "c.x.1", "c.x.2", "c.y", "d"):
        h.put(name)
    return h


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
@pytest.mark.parametrize(
    "prefix, prefixes, wanted",
    [
        ("", None, "a a.1 a.2 ab b b.1 ba c.x.1 c.x.2 c.y d"),
        ("", (), ""),
        ("", ("",), "a a.1 a.2 ab b b.1 ba c.x.1 c.x.2 c.y d"),
        ("", ("c.", "a."), "a.1 a.2 c.x.1 c.x.2 c.y"),
        ("", ("b", "b.", "b", "d"), "b b.1 ba d"),
        ("b", ("b.", "a"), "b.1"),
        ("c.x", ("c.", "zz"), "c.x.1 c.x.2"),
        ("c.", ("c.x.2", "c.y", "a"), "c.x.2 c.y"),
        ("e", ("a",), ""),
    ],
)
def test_prefixes(
    listing: Harness, prefix: str, prefixes: tuple[str, ...] | None, wanted: str, limit: int
) -> None:
    assert names(listing, prefix=prefix, prefixes=prefixes, limit=limit) == wanted.split()


def test_prefixes_inside_others_are_dropped() -> None:
    assert narrow_prefixes("", ("b", "a.b", "a", "b.c", "a.")) == ["a", "b"]
    assert narrow_prefixes("a.b", ("a", "a.", "a.bc", "b")) == ["a.b"]


def test_foreign_names_are_not_looked_at() -> None:
    h = Harness()
    for i in range(40):
        h.put(f"x{i:02}", TopicConfig(durability="fsync", ttl_ms=10))
    h.put("y")
    h.pass_time(5)
    touched = {name: log.last_touch for name, log in h.engine.shard.state.published.items()}
    assert names(h, prefixes=("x39", "y")) == ["x39", "y"]
    now = {name: log.last_touch for name, log in h.engine.shard.state.published.items()}
    assert {name for name in now if now[name] != touched[name]} == {"x39"}


def test_a_list_may_count_as_a_read_of_what_it_returns() -> None:
    h = Harness()
    for name in ("a", "b", "c"):
        h.put(name)
    assert [row.last_read_ts for row in h.do(c.ListTopics()).topics] == [None] * 3
    rows = h.do(c.ListTopics(limit=2, touch=True)).topics
    assert [row.topic for row in rows] == ["a", "b", "c"]
    assert [bool(row.last_read_ts) for row in rows] == [True, True, False]
    assert [bool(h.state(name).last_read_ts) for name in "abc"] == [True, True, False]


# ---- pages of tags


def test_counts_by_tag_come_in_pages() -> None:
    h = with_tags("abcabdeb")
    assert h.do(c.CountByTag("t", ANY, limit=2)) == c.TagCounts("t", [(b"a", 2), (b"b", 3)], True)
    assert h.do(c.CountByTag("t", ANY, after=b"b", limit=2)) == c.TagCounts("t", [(b"c", 1), (b"d", 1)], True)
    assert h.do(c.CountByTag("t", ANY, after=b"d", limit=2)) == c.TagCounts("t", [(b"e", 1)], False)
    assert h.do(c.CountByTag("t", ANY, after=b"e")).counts == []
    assert not h.do(c.CountByTag("t", ANY)).more
    assert h.do(c.CountByTag("t", eq(b"c"), after=b"b")).counts == [(b"c", 1)]
    assert h.do(c.CountByTag("t", eq(b"c"), after=b"c")).counts == []


def test_last_by_tag_comes_in_pages() -> None:
    h = with_tags("abcabdeb")
    page = h.do(c.LastByTag("t", ANY, each=True, limit=2))
    assert (sorted(page.seqs), page.more) == ([4, 8], True)
    page = h.do(c.LastByTag("t", ANY, each=True, after=b"b", limit=10))
    assert (sorted(page.seqs), page.more) == ([3, 6, 7], False)
    page = h.do(c.LastByTag("t", ANY, limit=1))  # the newest of all has no pages
    assert (page.seqs, page.more) == ([8], False)


def test_pages_of_tags_keep_inside_their_match() -> None:
    h = Harness()
    h.put("t")
    h.append("t", *numbered(1, 6), tags=[b"a.1", b"a.1.x", b"a.2", b"a.3", b"b.1", b"a"])
    subject, glob = TagMatch("Subject", b"a.*"), TagMatch("Glob", b"a.*")
    assert h.do(c.CountByTag("t", subject, limit=2)) == c.TagCounts("t", [(b"a.1", 1), (b"a.2", 1)], True)
    assert h.do(c.CountByTag("t", subject, after=b"a.2")).counts == [(b"a.3", 1)]
    assert h.do(c.CountByTag("t", glob, after=b"a", limit=2)).counts == [(b"a.1", 1), (b"a.1.x", 1)]
    assert h.do(c.CountByTag("t", glob, after=b"a.3")).counts == []
    assert h.do(c.CountByTag("t", glob, after=b"z")).counts == []


def test_a_page_of_tags_is_bounded() -> None:
    h = Harness(LARGE)
    h.put("t")
    h.append("t", *numbered(0, 1200), tags=[b"%04d" % i for i in range(1200)])
    for limit in (0, 5000, -1):
        counts = h.do(c.CountByTag("t", ANY, limit=limit))
        assert (len(counts.counts), counts.more) == (1000, True)
        page = h.do(c.LastByTag("t", ANY, each=True, limit=limit))
        assert (len(page.seqs), page.more) == (1000, True)
    assert h.do(c.CountByTag("t", ANY, after=b"0999")).counts[0] == (b"1000", 1)
    assert h.do(c.LastByTag("t", ANY)).seqs == [1200]
    assert len(rows_of(h.do(c.LastByTag("t", ANY, each=True, after=b"1189")))) == 10


# ---- totals


def test_records_are_counted_over_all_topics() -> None:
    h = with_tags("abcdef")
    h.append("u", *numbered(1, 3), config=TopicConfig(cap_records=2))
    h.append("v", b"1", config=EPHEMERAL)
    h.append("w", b"1", config=TopicConfig(durability="fsync", ttl_ms=50))
    shard = h.engine.shard
    assert shard.state.records_live == 6 + 2 + 1 + 1
    h.do(c.Delete("t", before_seq=3))
    assert shard.state.records_live == 8
    h.clock.advance(100)
    assert h.state("w").count == 0
    assert shard.state.records_live == 7
    h.do(c.DropTopic("u"))
    assert shard.state.records_live == 5
    h.kill_and_open()
    assert h.state("w").count == 0  # expiry is applied when a topic is accessed
    assert h.engine.shard.state.records_live == 4  # the ephemeral one is gone
    h.restart()
    assert h.engine.shard.state.records_live == 4


def test_classes_are_counted_by_what_is_published() -> None:
    h = Harness()
    shard = h.engine.shard
    nothing = {"ephemeral": 0, "memory": 0, "disk": 0, "fsync": 0}
    assert shard.state.class_counts() == nothing
    h.ask(c.PutTopic("a", FSYNC))
    assert shard.state.class_counts() == nothing  # not synced yet
    h.rest()
    h.put("b", DISK)
    h.put("c", MEMORY)
    assert shard.state.class_counts() == {**nothing, "fsync": 1, "disk": 1, "memory": 1}
    counted = shard.state._class_counts
    h.append("a", b"1")
    h.diff("a")
    shard.state.class_counts()["disk"] = 7
    assert shard.state._class_counts is counted
    assert shard.state.class_counts()["disk"] == 1
    h.put("d", FSYNC)
    assert shard.state.class_counts() == {**nothing, "fsync": 2, "disk": 1, "memory": 1}
    h.do(c.DropTopic("d"))
    h.ask(c.DropTopic("c"), c.PutTopic("c", MEMORY))
    h.rest()
    assert shard.state.class_counts() == {**nothing, "fsync": 1, "disk": 1, "memory": 1}
    assert shard.state._class_counts is counted, (
        "creating and dropping topics must not count all of them again"
    )
    h.put("b", EPHEMERAL)
    h.do(c.DropTopic("a"))
    assert shard.state.class_counts() == {**nothing, "ephemeral": 1, "memory": 1}
    h.kill_and_open()
    assert h.engine.shard.state.class_counts() == {**nothing, "ephemeral": 1, "memory": 1}


def test_writing_is_counted_by_the_envelope() -> None:
    h = Harness()
    h.put("t")
    counters = h.engine.counters
    before = dict(counters)
    h.append("t", *numbered(1, 20))
    assert counters["batches"] == before["batches"] + 1
    assert counters["frames"] == before["frames"] + 20
    written = h.engine.wal.bytes_written
    counted = counters["bytes_written"]
    h.append("t", b"x" * 100)
    assert counters["bytes_written"] - counted == h.engine.wal.bytes_written - written
    h.append("u", b"1", config=EPHEMERAL)
    before = dict(counters)
    h.append("u", b"2")
    assert counters["batches"] == before["batches"]


# ---- shares of caps


def test_a_share_of_topics_replaces_the_cap() -> None:
    h = Harness(msgspec.structs.replace(SMALL, max_topics=100))
    shard = h.engine.shard
    shard.state.topics_granted = 1
    h.put("a")
    for command in (c.PutTopic("b", DISK), append("b", b"12345")):
        error = h.refused(command, OverGrant)
        assert isinstance(error, Throttled)
        assert error.detail == {"limit": "max_topics", "max": 100}
        assert "100 topics" in str(error)
        assert (error.topics, error.need_topics, error.need_bytes) == (1, 1, 0)
    assert error.bytes == 5
    shard.state.topics_granted = 2
    h.put("b")
    shard.state.topics_granted = 0
    assert h.refused(c.PutTopic("c", DISK), OverGrant).need_topics == 3
    h.append("b", b"1")
    shard.state.topics_granted = None
    h.put("c")


def test_a_share_of_bytes_replaces_the_cap() -> None:
    h = Harness(msgspec.structs.replace(SMALL, max_total_bytes=1000))
    shard = h.engine.shard
    shard.state.bytes_granted = 10
    h.append("t", b"x" * 10)
    error = h.refused(append("t", b"x" * 7), OverGrant)
    assert error.detail == {"limit": "max_total_bytes", "max": 1000}
    assert (error.topics, error.bytes, error.need_topics, error.need_bytes) == (0, 7, 0, 7)
    shard.state.topics_granted = 1
    error = h.refused(append("u", b"x" * 7), OverGrant)
    assert error.detail["limit"] == "max_topics"
    assert (error.topics, error.bytes, error.need_topics, error.need_bytes) == (1, 7, 1, 7)
    shard.state.topics_granted = 2
    error = h.refused(append("u", b"x" * 7), OverGrant)
    assert error.detail["limit"] == "max_total_bytes"
    assert (error.topics, error.bytes, error.need_topics, error.need_bytes) == (1, 7, 0, 7)
    shard.state.bytes_granted = 17
    h.append("u", b"x" * 7)
    shard.state.bytes_granted = 2000  # the share counts, not the cap
    h.append("u", b"x" * 1500)
    shard.state.bytes_granted = None
    error = h.refused(append("u", b"x"), Throttled)
    assert not isinstance(error, OverGrant)


# ---- priority


@pytest.mark.parametrize(
    "idle_s, wanted", [(0, 500), (15, 354), (30, 250), (60, 125), (120, 31), (299, 0), (300, 0), (10**6, 0)]
)
def test_auto_priority_halves_every_half_minute(idle_s: int, wanted: int) -> None:
    assert effective_priority(TopicConfig(), 5_000, 5_000 + idle_s * 1000) == wanted


def test_auto_priority_only_without_a_manual_one() -> None:
    assert effective_priority(TopicConfig(), None, 10) == 0
    assert effective_priority(TopicConfig(auto_priority=False), 10, 10) == 0
    for manual, wanted in ((0, 0), (7, 7), (-5000, -1000), (5000, 1000)):
        assert effective_priority(TopicConfig(priority=manual), 10, 10) == wanted
    assert effective_priority(TopicConfig(), 20, 10) == 500  # read by a clock that is ahead
