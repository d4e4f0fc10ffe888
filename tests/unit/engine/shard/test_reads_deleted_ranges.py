"""Deleted ranges: seqs that readers pass without a record and without a tombstone.

Goal: every seq up to the head is either live, announced as lost, or listed as deleted, whatever was done, over
restarts, and however small the pages are. Method: random runs of an engine with tiny segments, compared with `diff`.
"""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from tests.support import length
from tests.support.engine_harness import SMALL, Harness, fsync, numbered, with_records, with_topic
from topics.api import limits
from topics.api.config import TopicConfig
from topics.api.errors import InvalidRequest, TopicNotFound
from topics.engine.commands import topics as c
from topics.engine.shard.state import as_ranges


def listed(h: Harness, topic: str = "t", limit: int = 0) -> list[tuple[int, int]]:
    """All pages, with split ranges merged again."""
    found: list[tuple[int, int]] = []
    at = -1
    while True:
        page = h.do(c.ListDeleted(topic, max(at, 0), limit))
        assert at < page.next_from_seq or page.next_from_seq == page.head_seq
        assert len(page.ranges) <= (limit or limits.DIFF_LIMIT_DEFAULT)
        for first, last in page.ranges:
            assert max(at, 0) < first <= last <= page.next_from_seq
            if found and found[-1][1] + 1 == first:
                found[-1] = (found[-1][0], last)
            else:
                found.append((first, last))
        at = page.next_from_seq
        if at == page.head_seq:
            return found


def expected(h: Harness, topic: str = "t") -> list[tuple[int, int]]:
    records, gaps = h.read(topic)
    seen = {seq for seq, _ in records}
    for first, last, _ in gaps:
        seen.update(range(first, last + 1))
    gone = [seq for seq in range(1, h.state(topic).head_seq + 1) if seq not in seen]
    return as_ranges(gone)


@pytest.mark.parametrize("seed", length.seeds(short=3, long=40))
def test_every_seq_is_live_lost_or_deleted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(limits, "FILTER_ROWS_MAX", rng.choice([1, 5, 200, 1 << 17]))
    h = with_topic(TopicConfig(durability=rng.choice(["fsync", "disk", "memory", "ephemeral"])))
    for _ in range(40):
        head = h.state("t").head_seq
        what = rng.choice(
            ["append", "append", "append", "seqs", "seqs", "before", "cap", "checkpoint", "open"]
        )
        if what == "append":
            h.append("t", *numbered(head + 1, rng.randint(1, 9)))
        elif what == "seqs":
            first = rng.randint(1, head + 2)
            h.do(c.Delete("t", seqs=list(range(first, first + rng.choice([1, 2, 9])))))
        elif what == "before" and rng.random() < 0.3:
            h.do(c.Delete("t", before_seq=rng.randint(0, head)))
        elif what == "cap" and rng.random() < 0.3:
            config = h.state("t").config
            h.put("t", TopicConfig(durability=config.durability, cap_records=rng.choice([0, 5, 30])))
        elif what == "checkpoint":
            h.checkpoint()
        elif what == "open" and rng.random() < 0.5:
            rng.choice([h.restart, h.kill_and_open])()
        assert listed(h, limit=rng.choice([0, 1, 2])) == expected(h)


def test_one_call_looks_at_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FILTER_ROWS_MAX", 128)
    h = with_topic(engine=structs.replace(SMALL, segment_max_events=1000))
    h.append("t", *numbered(1, 1000))
    h.do(c.Delete("t", before_seq=601))
    h.do(c.Delete("t", seqs=list(range(650, 900))))
    # Nothing is read below the first record; then 128 rows per call.
    pages = [h.do(c.ListDeleted("t"))]
    while pages[-1].next_from_seq < 1000:
        pages.append(h.do(c.ListDeleted("t", pages[-1].next_from_seq)))
    assert [page.next_from_seq for page in pages] == [728, 856, 984, 1000]
    assert [page.ranges for page in pages] == [[(1, 600), (650, 728)], [(729, 856)], [(857, 899)], []]
    assert listed(h) == [(1, 600), (650, 899)]


def test_small_chunks_count_for_more_than_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FILTER_ROWS_MAX", 256)
    h = with_records(40)  # four rows a segment
    assert h.do(c.ListDeleted("t")).next_from_seq == 16


def test_losses_are_not_listed() -> None:
    h = with_topic(TopicConfig(durability="ephemeral"))
    h.append("t", *numbered(1, 6))
    h.do(c.Delete("t", seqs=[2]))
    h.restart()
    h.append("t", *numbered(7, 3))
    h.do(c.Delete("t", seqs=[8]))
    assert (h.gaps("t"), listed(h)) == ([(1, 6, "crash")], [(8, 8)])


def test_a_delete_is_listed_once_it_is_published() -> None:
    h = with_records(5)
    h.ask(c.Delete("t", seqs=[3]))
    (token,) = h.ask(c.ListDeleted("t"))
    assert h.replies[token].ranges == []
    h.rest()
    assert listed(h) == [(3, 3)]


def test_of_a_topic_that_is_not_loaded() -> None:
    h = with_records(10, fsync())
    h.do(c.Delete("t", seqs=[2, 3, 7]))
    h.restart()
    assert listed(h) == [(2, 3), (7, 7)]


def test_invalid_requests_are_refused() -> None:
    h = with_topic()
    h.refused(c.ListDeleted("absent"), TopicNotFound)
    for command in (c.ListDeleted("t", -1), c.ListDeleted("t", 0, -1)):
        h.refused(command, InvalidRequest)
    assert h.do(c.ListDeleted("t")) == c.DeletedRanges("t", [], 0, 0, 1)
