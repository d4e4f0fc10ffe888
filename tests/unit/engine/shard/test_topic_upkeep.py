"""Goal: loading a topic and removing expired records delay only the requests to that topic.

Method: an engine whose topic takes many turns to load, or to remove expired records; each turn also has a request to
another topic. The answers must be those of a topic that was in memory all the time.
"""

from __future__ import annotations

import errno
import itertools

import msgspec
import pytest

from tests.support.engine_harness import SMALL, Harness, append
from topics.api import limits
from topics.api.config import TopicConfig
from topics.api.errors import Stopping, TopicsError
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagMatch
from topics.engine.shard.topic_upkeep import UpkeepPending

SEGMENTS = 40  # of four records each: a turn loads about four of them
ROOMY = msgspec.structs.replace(SMALL, wal_file_bytes=1 << 22, cache_bytes=1 << 22, segment_max_events=1000)


def stored(h: Harness) -> None:
    h.put("other")
    h.put("t")
    numbers = range(SEGMENTS * 4)
    h.append("t", *[b"%d" % (i // 4) for i in numbers], tags=[b"tag %d" % (i // 4 % 7) for i in numbers])
    h.do(c.Delete("t", seqs=[1, 2, 9]))


def turns_until(h: Harness, token: int) -> int:
    """Turns until this is answered; in each of them the other topic gets a request, and answers it."""
    for turns in range(1, 1000):
        (other,) = h.ask(c.State("other"))
        assert isinstance(h.replies[other], c.TopicState), "a request to another topic waits"
        if token in h.replies:
            return turns
        if h.jobs:
            h.run_job()
    raise AssertionError("never answered")


def test_a_topic_of_many_segments_is_loaded_over_many_turns_and_is_the_same_then() -> None:
    h = Harness()
    stored(h)
    rows, state = h.rows("t"), h.state("t")
    h.restart()
    (token,) = h.ask(c.Diff("t", limit=1000))
    assert token not in h.replies
    assert turns_until(h, token) > 5
    assert h.rows("t") == rows
    assert msgspec.structs.asdict(h.state("t").config) == msgspec.structs.asdict(state.config)
    assert h.state("t").bytes == state.bytes
    counts = h.do(c.CountByTag("t", TagMatch("Glob", b"*"), limit=100)).counts
    assert sum(count for _, count in counts) == len(rows)
    h.engine.check_invariants()


def test_commands_wait_for_a_topic_in_the_order_in_which_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UPKEEP_RESUMED_MAX", 2)
    h = Harness()
    stored(h)
    h.restart()
    tokens = [h.ask(append("t", b"%d" % i))[0] for i in range(8)]
    tokens += h.ask(c.State("t"))
    turns_until(h, tokens[-1])
    h.rest()
    seqs = [h.replies[token].first_seq for token in tokens[:-1]]
    assert seqs == list(range(SEGMENTS * 4 + 1, SEGMENTS * 4 + 9))
    assert h.replies[tokens[-1]].head_seq == seqs[-1]


def test_a_list_waits_for_topics_whose_state_time_decides() -> None:
    h = Harness()
    for name in ("a", "b"):
        h.put(name, TopicConfig(ttl_ms=10_000))
        h.append(name, *[b"1"] * (4 * SEGMENTS))
    h.pass_time(5_000)
    h.append("b", b"2")
    h.close()
    h.clock.advance(6_000)
    h.open()
    rows = h.do(c.ListTopics()).topics
    assert [(row.topic, row.count) for row in rows] == [("a", 0), ("b", 1)]


def test_a_topic_that_cannot_be_read_is_an_error_for_all_who_wait_and_is_tried_again() -> None:
    h = Harness()
    stored(h)
    rows = h.rows("t")
    h.restart()
    tokens = h.ask(c.State("t"), c.Diff("t"))

    def fail() -> None:
        raise OSError(errno.EIO, "the disk is away")

    h.line.each_call = fail
    while h.engine.shard.state.upkeep.queue:
        h.ask()
    assert [isinstance(h.replies[token], TopicsError) for token in tokens] == [True, True]
    h.line.each_call = lambda: None
    assert h.rows("t") == rows


def test_readers_that_left_are_not_served() -> None:
    h = Harness()
    stored(h)
    h.restart()
    gone, stays = h.ask(c.State("t"), c.State("t"))
    assert h.engine.shard.state.upkeep.withdraw(lambda token: token == gone)
    h.rest()
    assert gone not in h.replies
    assert stays in h.replies


def test_a_stop_answers_those_who_wait() -> None:
    h = Harness()
    stored(h)
    h.restart()
    tokens = h.ask(c.State("t"), append("t", b"last"))
    h.close()
    assert all(token in h.replies for token in tokens)
    h.open()
    assert h.rows("t")[-1][1] == b"last"


def test_a_stop_answers_those_who_go_on_as_long_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness()
    stored(h)
    h.restart()
    tokens = h.ask(*[c.CountByTag("t", TagMatch("Glob", b"*"))] * 4)
    monkeypatch.setattr(limits, "LONG_TURN_UNITS", 0)  # none of them completes
    while h.jobs:
        h.run_job()
    replies = dict(h.engine.close().replies)
    assert [type(replies.get(token)) for token in tokens] == [Stopping] * 4


def test_a_load_that_another_one_overtakes_changes_nothing() -> None:
    h = Harness()
    stored(h)
    rows = h.rows("t")
    h.restart()
    (token,) = h.ask(c.Diff("t", limit=1000))
    log = h.engine.shard.state.published["t"]
    assert log.is_unloaded
    h.engine.shard.state.upkeep_now(log)
    assert not log.is_unloaded
    turns_until(h, token)
    assert h.rows("t") == rows
    h.engine.check_invariants()


def test_a_topic_dropped_while_it_waits_is_gone_for_those_behind() -> None:
    h = Harness()
    stored(h)
    h.restart()
    dropped, appended = h.ask(c.DropTopic("t"), append("t", b"of another one"))
    h.rest()
    assert h.replies[dropped].deleted
    assert h.replies[appended].created
    h.restart()
    assert h.rows("t") == [(1, b"of another one")]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("tagged", [True, False])
def test_many_records_that_end_at_once_go_over_many_turns(own: bool, tagged: bool) -> None:
    h = Harness(ROOMY)
    h.put("other")
    count = 16 * limits.EXPIRE_RECORDS
    h.put("t", TopicConfig(durability="memory", ttl_ms=0 if own else 1000))
    for first in range(0, count, limits.EXPIRE_RECORDS):
        seqs = range(first, first + limits.EXPIRE_RECORDS)
        records = c.Records(
            [b"%d" % seq for seq in seqs],
            tags=[b"tag %d" % seq for seq in seqs] if tagged else None,
            ttls_ms=[1000] * len(seqs) if own else None,
        )
        h.do(c.Append("t", records))
    h.pass_time(900)
    h.append("t", b"young", tag=b"young")
    h.clock.advance(200)
    (token,) = h.ask(c.Diff("t", limit=1000))
    assert turns_until(h, token) > (5 if own or tagged else 0)
    assert h.rows("t") == [(count + 1, b"young")]
    assert h.state("t").count == 1
    assert h.do(c.CountByTag("t", TagMatch("Glob", b"*"), limit=10)).counts == [(b"young", 1)]
    h.engine.check_invariants()
    h.kill_and_open()
    assert h.rows("t") == [(count + 1, b"young")]


def test_a_standing_task_is_not_held_up_by_a_topic_in_line() -> None:
    """A request that cannot wait does all the work at once."""
    h = Harness()
    stored(h)
    h.restart()
    log = h.engine.shard.state.published["t"]
    with pytest.raises(UpkeepPending):
        h.engine.shard.state.touch(log)
    h.engine.shard.state.upkeep_now(log)
    assert not log.is_unloaded
    h.rest()
    assert not h.engine.shard.state.upkeep.queue


STEPS = 12


def filled(h: Harness, config: TopicConfig) -> int:
    """A topic of records with a tag each; returns how many."""
    h.put("other")
    h.put("t", config)
    count = STEPS * limits.EXPIRE_RECORDS
    for first in range(0, count, limits.EXPIRE_RECORDS):
        seqs = range(first + 1, first + limits.EXPIRE_RECORDS + 1)
        h.do(
            c.Append("t", c.Records([b"%05d" % seq for seq in seqs], tags=[b"tag %d" % seq for seq in seqs]))
        )
    return count


def change(h: Harness, command: c.Command) -> tuple[int, int]:
    """Request a change that evicts, and the topic right after; returns the turns until both were answered, and the
    most records removed in one of these turns.
    """
    log = h.engine.shard.state.published["t"]
    counts = [log.count]
    changed, asked = h.ask(command, c.State("t"))
    counts.append(log.count)
    while not (changed in h.replies and asked in h.replies):
        (other,) = h.ask(c.State("other"))
        assert isinstance(h.replies[other], c.TopicState), "a request to another topic waits"
        counts.append(log.count)
        if h.jobs:
            h.run_job()
    assert not isinstance(h.replies[changed], TopicsError)
    assert h.replies[asked].count == log.count == 1
    h.engine.check_invariants()
    return len(counts), max(before - after for before, after in itertools.pairwise(counts))


CHANGES = {
    "cap_records": (TopicConfig(), c.PutTopic("t", TopicConfig(cap_records=1)), "cap"),
    "cap_bytes": (TopicConfig(), c.PutTopic("t", TopicConfig(cap_bytes=5)), "cap"),
    "discard": (
        TopicConfig(discard="reject"),
        c.PutTopic("t", TopicConfig(cap_records=1, discard="old")),
        "cap",
    ),
    "one large record": (TopicConfig(cap_bytes=60_000), append("t", b"x" * 60_000, tag=b"x"), "cap"),
    "ephemeral": (
        TopicConfig(durability="ephemeral", cap_bytes=60_000),
        append("t", b"x" * 60_000, tag=b"x"),
        "cap",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_cap_that_takes_many_records_takes_them_over_many_turns(case: str) -> None:
    config, command, reason = CHANGES[case]
    h = Harness(ROOMY)
    count = filled(h, config)
    turns, most = change(h, command)
    assert turns > 3
    assert most <= 5 * limits.EXPIRE_RECORDS
    last = h.state("t").head_seq
    assert last == count + isinstance(command, c.Append)
    assert h.seqs("t") == [last]
    assert h.gaps("t") == [(1, last - 1, reason)]
    assert len(h.do(c.CountByTag("t", TagMatch("Glob", b"*"), limit=10)).counts) == 1
    assert h.engine.shard.state.records_live == 1
    h.kill_and_open()
    if case != "ephemeral":
        assert h.seqs("t") == [last]
        assert h.gaps("t") == [(1, last - 1, reason)]


def test_a_shorter_ttl_takes_many_records_over_many_turns() -> None:
    h = Harness(ROOMY)
    count = filled(h, TopicConfig(ttl_ms=100_000))
    h.pass_time(1000)
    h.append("t", b"young", tag=b"young")
    turns, most = change(h, c.PutTopic("t", TopicConfig(ttl_ms=500)))
    assert turns > 3
    assert most <= 5 * limits.EXPIRE_RECORDS
    for _ in range(2):
        h.put("t", TopicConfig(ttl_ms=100_000))  # brings nothing back
        assert h.seqs("t") == [count + 1]
        assert h.gaps("t") == [(1, count, "ttl")]
        h.kill_and_open()


@pytest.mark.parametrize("turns", [0, 3])
def test_a_snapshot_of_a_topic_that_is_evicting_brings_nothing_back(turns: int) -> None:
    h = Harness(ROOMY)
    count = filled(h, TopicConfig())
    h.rest()
    h.ask(c.PutTopic("t", TopicConfig(cap_records=1)))
    for _ in range(turns):
        h.ask()
    log = h.engine.shard.state.published["t"]
    assert log.is_over_cap
    h.engine.checkpoint()
    h.kill_and_open()
    assert [row.count for row in h.do(c.ListTopics()).topics] == [0, 1]
    assert h.seqs("t") == [count]
    assert h.gaps("t") == [(1, count - 1, "cap")]
    h.rest()
    assert h.engine.shard.state.records_live == 1
    h.engine.check_invariants()


def test_a_failed_commit_evicts_nothing() -> None:
    h = Harness(ROOMY)
    count = filled(h, TopicConfig())
    h.rest()
    h.line.each_call = lambda: (_ for _ in ()).throw(OSError(errno.EIO, "the disk is away"))
    (token,) = h.ask(c.PutTopic("t", TopicConfig(cap_records=1)))
    while h.engine.shard.state.read_only is None or h.engine.shard.state.upkeep.queue:
        h.ask()
        if h.jobs:
            h.run_job()
    assert isinstance(h.replies[token], TopicsError)
    h.line.each_call = lambda: None
    assert not h.engine.shard.state.published["t"].is_over_cap
    assert h.state("t").count == count
    h.engine.check_invariants()


@pytest.mark.parametrize("selector", ["before_seq", "keep"])
def test_a_delete_from_the_front_goes_over_many_turns(selector: str) -> None:
    h = Harness(ROOMY)
    count = filled(h, TopicConfig())
    command = c.Delete("t", before_seq=count) if selector == "before_seq" else c.Delete("t", keep=1)
    log = h.engine.shard.state.published["t"]
    counts = [log.count]
    (token,) = h.ask(command)
    while token not in h.replies:
        counts.append(log.count)
        (other,) = h.ask(c.State("other"))
        assert isinstance(h.replies[other], c.TopicState), "a request to another topic waits"
        if h.jobs:
            h.run_job()
    most = max(before - after for before, after in itertools.pairwise(counts))
    assert most <= 3 * limits.EXPIRE_RECORDS
    assert (h.replies[token].deleted, h.seqs("t"), h.gaps("t")) == (count - 1, [count], [])
