"""Reads of a topic: by tag, in pages, and long polls.

Goal: one promise per test. Method: a fresh engine on a SimDisk for each test; what matters after a restart is read
twice.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.support.engine_harness import (
    MEMORY,
    SMALL,
    append,
    fsync,
    numbered,
    rows_of,
    with_records,
    with_tags,
    with_topic,
)
from topics.api import limits
from topics.api.errors import (
    TopicNotFound,
)
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagMatch
from topics.engine.shard import delivery

ANY = TagMatch("Glob", b"*")


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
    """Otherwise their answers would all be in memory at once."""
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


def test_long_poll_that_comes_while_a_write_waits_for_its_sync() -> None:
    h = with_records(1)
    h.ask(append("t", b"2"))
    (poll,) = h.ask(c.Diff("t", 1, wait_ms=1000))
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
    """An empty page with a new cursor is useful: otherwise the client would scan its own records again and again."""
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
