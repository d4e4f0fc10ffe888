"""What an ack means in each durability class, and in which order changes become visible.

Goal: no reply leaves and no record is visible before the condition of its class holds; publication is in seq order
whatever classes a topic goes through; a failed write or sync publishes nothing; seqs and times are never used twice.
Method: single turns on a SimDisk, with the jobs run (or not) by the test.
"""

from __future__ import annotations

import errno

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
from tests.support.faults import fault
from topics.api import limits
from topics.api.config import TopicConfig
from topics.api.errors import ShardReadOnly, TopicNotFound
from topics.engine.commands import topics as c

SOON = {"disk": DISK, "memory": MEMORY, "ephemeral": EPHEMERAL}


ROOMY = msgspec.structs.replace(SMALL, segment_max_events=1000)  # for tests with thousands of records


def with_topics(**configs: TopicConfig) -> Harness:
    h = Harness()
    for name, config in configs.items():
        h.put(name, config)
    h.rest()
    return h


# ---- when a reply leaves


def test_fsync_reply_leaves_when_its_sync_is_finished_and_not_before() -> None:
    h = with_topics(t=FSYNC)
    (token,) = h.ask(append("t", b"1"))
    assert token not in h.replies
    h.ask()
    assert token not in h.replies, "turns alone must not make it durable"
    h.run_job("sync")
    assert h.replies[token].synced
    assert h.replies[token].head_seq == 1


def test_fsync_reply_waits_for_the_report_not_for_the_sync_itself() -> None:
    h = with_topics(t=FSYNC)
    (token,) = h.ask(append("t", b"1"))
    job = next(job for job in h.jobs if job.kind == "sync")
    job.run()
    h.ask()
    assert token not in h.replies
    h._take(h.engine.finish(job, None))
    assert token in h.replies


def test_fsync_record_is_invisible_until_its_sync_is_finished() -> None:
    h = with_topics(t=FSYNC)
    h.append("t", b"1")
    h.ask(append("t", b"2"))
    diff, state = h.ask(c.Diff("t"), c.State("t"))
    assert rows_of(h.replies[diff]) == [(1, b"1")]
    assert (h.replies[diff].head_seq, h.replies[state].head_seq, h.replies[state].count) == (1, 1, 1)
    h.run_job("sync")
    assert h.rows("t") == [(1, b"1"), (2, b"2")]


@pytest.mark.parametrize("name", SOON)
def test_other_classes_reply_in_the_same_turn(name: str) -> None:
    h = with_topics(t=SOON[name])
    write, diff = h.ask(append("t", b"1"), c.Diff("t"))
    assert h.replies[write].head_seq == 1
    assert not h.replies[write].synced
    assert diff in h.replies
    assert h.rows("t") == [(1, b"1")]


@pytest.mark.parametrize("name", [*SOON, "fsync"])
def test_creating_write_waits_for_a_sync_whatever_the_class(name: str) -> None:
    h = Harness()
    (token,) = h.ask(append("t", b"1", config=TopicConfig(durability=name)))
    (state,) = h.ask(c.State("t"))
    assert token not in h.replies
    assert isinstance(h.replies[state], TopicNotFound), "the topic must not be visible before it is durable"
    h.run_job("sync")
    assert h.replies[token].created
    assert h.replies[token].synced
    assert h.rows("t") == [(1, b"1")]


@fault(
    "clock",
    "set back, and the power cut after a write of class disk that nothing had gone before for long",
    "the write had waited for the sync of a later time ceiling, and `$ts` does not go back",
)
def test_a_time_is_given_away_only_below_a_synced_ceiling() -> None:
    """A lost record may have been read: records after it must not be older."""
    h = with_topics(t=SOON["disk"])
    h.append("t", b"1")
    h.sync()
    h.clock.advance(60_000)
    (token,) = h.ask(append("t", b"2"))
    assert token not in h.replies
    h.run_job("sync")
    seen = h.diff("t").timestamps[-1]
    h.power_cut(wall_ms=h.clock.wall_ms() - 120_000)
    h.open()
    h.append("t", b"3")
    assert h.diff("t").timestamps[-1] >= seen


@pytest.mark.parametrize("name", SOON)
def test_write_behind_a_creating_write_waits_as_well(name: str) -> None:
    h = Harness()
    first, second = h.ask(append("t", b"1", config=SOON[name]), append("t", b"2"))
    (third,) = h.ask(append("t", b"3"))
    assert not {first, second, third} & set(h.replies)
    h.rest()
    assert h.order == [first, second, third]
    assert h.seqs("t") == [1, 2, 3]


@pytest.mark.parametrize("command", [c.PutTopic("t", TopicConfig(cap_records=9)), c.DropTopic("t")])
def test_config_change_and_drop_of_a_memory_topic_wait_for_a_sync(command: c.Command) -> None:
    h = with_topics(t=MEMORY)
    (token,) = h.ask(command)
    assert token not in h.replies
    h.run_job("sync")
    assert token in h.replies


def test_one_sync_serves_all_that_was_written_before_it() -> None:
    h = with_topics(t=FSYNC, u=FSYNC)
    tokens = h.ask(append("t", b"1"), append("u", b"1"), append("t", b"2"))
    syncs = h.engine.counters["syncs"]
    h.run_job("sync")
    assert set(tokens) <= set(h.replies)
    assert h.engine.counters["syncs"] == syncs + 1


def test_write_after_a_sync_began_waits_for_the_next_sync() -> None:
    h = with_topics(t=FSYNC)
    (first,) = h.ask(append("t", b"1"))
    (second,) = h.ask(append("t", b"2"))
    h.run_job("sync")
    assert first in h.replies
    assert second not in h.replies
    assert h.seqs("t") == [1]
    h.rest()
    assert second in h.replies


# ---- order


def test_disk_write_behind_a_parked_fsync_write_keeps_its_place() -> None:
    h = with_topics(t=FSYNC)
    first, change, second = h.ask(append("t", b"1"), c.PutTopic("t", DISK), append("t", b"2"))
    (third,) = h.ask(append("t", b"3"))
    assert not h.rows("t")
    assert not {first, change, second, third} & set(h.replies)
    h.rest()
    assert [token for token in h.order if token in (first, change, second, third)] == [
        first,
        change,
        second,
        third,
    ]
    assert h.rows("t") == [(1, b"1"), (2, b"2"), (3, b"3")]


def test_head_never_passes_an_unpublished_lower_seq() -> None:
    h = with_topics(t=FSYNC)
    h.ask(append("t", b"1"))
    h.ask(c.PutTopic("t", MEMORY))
    h.ask(append("t", b"2"))
    heads = []
    while h.jobs:
        (state,) = h.ask(c.State("t"))
        heads.append(h.replies[state].head_seq)
        h.run_job()
    heads.append(h.state("t").head_seq)
    assert heads == sorted(heads)
    assert heads[0] == 0
    assert heads[-1] == 2
    assert h.seqs("t") == [1, 2]


def test_fsync_write_behind_a_disk_write_does_not_hide_it() -> None:
    h = with_topics(t=DISK)
    first, _, third = h.ask(append("t", b"1"), c.PutTopic("t", FSYNC), append("t", b"2"))
    assert h.replies[first].head_seq == 1
    assert third not in h.replies
    assert h.seqs("t") == [1]
    h.rest()
    assert h.seqs("t") == [1, 2]


def test_one_turn_with_all_classes_answers_each_by_its_own() -> None:
    h = with_topics(f=FSYNC, d=DISK, m=MEMORY, e=EPHEMERAL)
    f, d, m, e = h.ask(*[append(name, b"1") for name in "fdme"])
    assert {d, m, e} <= set(h.replies)
    assert f not in h.replies
    assert h.rows("d") == h.rows("m") == h.rows("e") == [(1, b"1")]
    assert h.rows("f") == []
    h.run_job("sync")
    assert f in h.replies


def test_a_batch_appears_whole() -> None:
    h = with_topics(t=FSYNC)
    h.ask(append("t", *numbered(1, 9)))  # over three segments
    assert h.rows("t") == []
    h.run_job("sync")
    assert len(h.rows("t")) == 9


# ---- idempotency


def test_second_write_with_the_same_key_waits_for_the_first() -> None:
    h = with_topics(t=FSYNC)
    (first,) = h.ask(append("t", b"1", b"2", key=b"k"))
    (second,) = h.ask(append("t", b"1", b"2", key=b"k"))
    assert second not in h.replies, "its answer depends on a write that may still fail"
    h.rest()
    assert h.order[-2:] == [first, second]
    assert h.replies[second] == c.Appended("t", 1, 2, 2, deduped=True)
    assert h.seqs("t") == [1, 2]


def test_both_writes_of_one_key_in_one_turn_append_once() -> None:
    h = with_topics(t=FSYNC)
    first, second = h.ask(append("t", b"1", key=b"k"), append("t", b"1", key=b"k"))
    h.rest()
    assert (h.replies[first].deduped, h.replies[second].deduped) == (False, True)
    assert h.seqs("t") == [1]


@pytest.mark.parametrize("how", ["kill", "power_cut", "clean"])
def test_key_is_remembered_over_a_restart(how: str) -> None:
    h = with_topics(t=FSYNC)
    h.append("t", b"1", b"2", key=b"k")
    h.append("t", b"3")
    if how == "clean":
        h.restart()
    else:
        getattr(h, how)()
        h.open()
    assert h.append("t", b"1", b"2", key=b"k") == c.Appended("t", 1, 2, 2, deduped=True)


def test_key_is_forgotten_after_its_window_and_not_before() -> None:
    h = with_topics(t=TopicConfig(durability="fsync", idempotency_window_ms=1000))
    h.append("t", b"1", key=b"k")
    h.pass_time(1000)
    assert h.append("t", b"1", key=b"k").deduped
    h.pass_time(1)
    assert h.append("t", b"1", key=b"k").first_seq == 2


def test_key_of_a_failed_write_is_not_remembered() -> None:
    h = with_topics(t=FSYNC)
    h.ask(append("t", b"1", key=b"k"))
    h.disk.fail_at(1, errno.EIO, of="sync")
    h.run_job("sync")
    h.refused(append("t", b"1", key=b"k"), ShardReadOnly)


# ---- failure


@fault(
    "disk",
    "fsync of the log fails while several writes wait for it",
    "all of them hear of it, none becomes visible, and the shard is read-only",
)
def test_failed_sync_answers_all_who_waited_and_publishes_nothing() -> None:
    h = with_topics(t=FSYNC, u=FSYNC)
    h.append("t", b"1", tag=b"a")
    tokens = h.ask(append("t", b"2", tag=b"a"), append("u", b"1"), c.PutTopic("new", DISK))
    (deduped,) = h.ask(append("t", b"3", tag=b"b"))
    h.disk.fail_at(1, errno.EIO, of="sync")
    h.run_job("sync")
    for token in (*tokens, deduped):
        error = h.replies[token]
        assert isinstance(error, ShardReadOnly)
        assert error.detail["read_only"] is True
        assert "sync" in str(error.detail["reason"])
    assert h.rows("t") == [(1, b"1")]
    assert h.rows("u") == []
    h.refused(c.State("new"), TopicNotFound)


@fault("disk", "reads after a failed fsync", "they go on, and show only what was acknowledged")
def test_reads_go_on_after_a_latch_and_show_only_what_was_published() -> None:
    h = with_topics(t=FSYNC)
    h.append("t", *numbered(1, 3), tag=b"a")
    h.ask(append("t", b"4", tag=b"a"), c.Delete("t", seqs=[1]), append("t", b"5", tag=b"c"))
    h.disk.fail_at(1, errno.EIO, of="sync")
    h.run_job("sync")
    assert h.rows("t") == list(enumerate(numbered(1, 3), 1))
    assert h.do(c.CountByTag("t", c.TagMatch("Glob", b"*"))).counts == [(b"a", 3)]
    assert h.do(c.LastByTag("t", c.TagMatch("Eq", b"a"))).seqs == [3]
    assert (h.state("t").head_seq, h.state("t").count) == (3, 3)
    assert [row.topic for row in h.do(c.ListTopics()).topics] == ["t"]


@fault(
    "disk", "any kind of write after a failed fsync", "refused with the reason until the shard is restarted"
)
@pytest.mark.parametrize(
    "command",
    [
        append("t", b"9"),
        c.Skip("t", 1),
        c.Delete("t", before_seq=9),
        c.PutTopic("x", DISK),
        c.DropTopic("t"),
    ],
    ids=["append", "skip", "delete", "put", "drop"],
)
def test_every_write_is_refused_after_a_latch(command: c.Command) -> None:
    h = with_topics(t=FSYNC)
    h.ask(append("t", b"1"))
    h.disk.fail_at(1, errno.EIO, of="sync")
    h.run_job("sync")
    h.refused(command, ShardReadOnly)


@fault(
    "disk", "a write to the log fails half-way", "that request fails, and the shard is read-only from then on"
)
def test_failed_write_latches_in_its_own_turn() -> None:
    h = with_topics(t=DISK, f=FSYNC)
    h.append("t", b"1")
    h.disk.fail_at(1, errno.EIO, of="write")
    d, f = h.ask(append("t", b"2"), append("f", b"1"))
    assert isinstance(h.replies[d], ShardReadOnly), "a disk write whose log entry failed is not acked"
    assert isinstance(h.replies[f], ShardReadOnly)
    assert h.rows("t") == [(1, b"1")]
    assert h.rows("f") == []


@fault(
    "disk",
    "a write to the log fails while others wait for their sync",
    "those are answered too, and none of them becomes visible",
)
def test_failed_write_takes_parked_ones_along() -> None:
    """A write that waits for a sync of a log that can no longer be written is refused as well: nothing overtakes a
    failure.
    """
    h = with_topics(t=FSYNC)
    (parked,) = h.ask(append("t", b"1"))
    h.disk.fail_at(1, errno.EIO, of="write")
    (failed,) = h.ask(append("t", b"2"))
    assert isinstance(h.replies[parked], ShardReadOnly)
    assert isinstance(h.replies[failed], ShardReadOnly)
    h.run_job("sync")
    assert h.rows("t") == []


@fault(
    "disk",
    "a restart after a failed write or fsync",
    "what was acknowledged is served; the failed write is there whole or not at all",
)
@pytest.mark.parametrize("call", ["write", "sync"])
@pytest.mark.parametrize("how", ["kill", "power_cut"])
@pytest.mark.parametrize("seed", range(6))
def test_reopen_after_a_failure_shows_the_acked_and_at_most_the_failed_batch(
    call: str, how: str, seed: int
) -> None:
    """The failed write was answered with an error: it may have reached the disk, as a whole, or not at all."""
    h = Harness(seed=seed)
    h.put("t", FSYNC)
    h.append("t", b"1", b"2")
    h.disk.fail_at(1, errno.EIO, of=call)
    h.refused(append("t", b"3", b"4"), ShardReadOnly)
    getattr(h, how)()
    h.open()
    rows = h.rows("t")
    assert rows in ([(1, b"1"), (2, b"2")], [(1, b"1"), (2, b"2"), (3, b"3"), (4, b"4")])
    assert h.gaps("t") == []
    assert h.append("t", b"5").first_seq == len(rows) + 1, "a restart ends the latch"


@fault(
    "disk",
    "fsync fails under acknowledged writes of a `disk` topic",
    "their seqs are never given to other records",
)
@pytest.mark.parametrize("seed", range(4))
def test_disk_topic_never_reuses_an_acked_seq_after_a_failed_sync(seed: int) -> None:
    """After a failed sync the page cache may differ from the disk; the next start must treat it as a power cut."""
    h = Harness(seed=seed)
    h.put("t", DISK)
    h.append("t", b"1", b"2")
    h.clock.advance(200)
    h.disk.fail_at(1, errno.EIO, of="sync")
    h.rest()
    assert h.engine.shard.state.read_only is not None
    h.kill_and_open()
    assert h.append("t", b"n").first_seq == limits.SEQ_CEILING_STEP_MIN + 1


# ---- numbers


@fault(
    "disk",
    "the power fails with unsynced records of a `disk` topic",
    "the range that may be lost is announced (crash), and its seqs are not used again",
)
def test_disk_topic_announces_head_to_ceiling_after_a_power_cut() -> None:
    h = with_topics(t=DISK)
    h.append("t", b"1", b"2", b"3")
    h.sync()
    h.power_cut()
    h.open()
    assert h.rows("t") == [(1, b"1"), (2, b"2"), (3, b"3")]
    assert h.gaps("t") == [(4, limits.SEQ_CEILING_STEP_MIN, "crash")]
    assert h.append("t", b"n").first_seq == limits.SEQ_CEILING_STEP_MIN + 1
    assert h.engine.report.power_cut


@fault(
    "disk",
    "a reader goes over the range that a power cut took",
    "it meets the announcement once, in its place",
)
def test_reader_meets_the_power_cut_gap_once_and_in_its_place() -> None:
    h = with_topics(t=DISK)
    h.append("t", b"1")
    h.sync()
    h.power_cut()
    h.open()
    h.append("t", b"n")
    ceiling = limits.SEQ_CEILING_STEP_MIN
    before = h.diff("t")
    assert (rows_of(before), before.tombstone, before.next_from_seq) == ([(1, b"1")], None, 1)
    across = h.diff("t", 1)
    assert across.tombstone is not None
    assert (across.tombstone.gap_from, across.tombstone.gap_to) == (2, ceiling)
    assert rows_of(across) == [(ceiling + 1, b"n")]
    assert h.diff("t", across.next_from_seq).tombstone is None
    assert h.diff("t", ceiling).tombstone is None


@fault(
    "disk",
    "power cuts at many moments of a `disk` topic",
    "no acknowledged seq is ever given to another record",
)
@pytest.mark.parametrize("seed", range(12))
def test_no_acked_seq_of_a_disk_topic_is_given_twice(seed: int) -> None:
    h = Harness(seed=seed)
    h.put("t", DISK)
    acked: dict[int, bytes] = {}
    for round_number in range(3):
        for i in range(5):
            payload = b"%d.%d" % (round_number, i)
            reply = h.append("t", payload)
            assert reply.first_seq not in acked
            acked[reply.first_seq] = payload
        h.power_cut()
        h.open()
        rows, gaps = h.read("t")
        assert all(acked.get(seq) == payload for seq, payload in rows), "unknown records"
        lost = set(acked) - {seq for seq, _ in rows}
        assert all(any(first <= seq <= last for first, last, _ in gaps) for seq in lost), "loss is announced"


@fault(
    "worker",
    "the process is killed, and the machine goes on",
    "nothing acknowledged is lost, in any class but ephemeral, and nothing is announced",
)
def test_kill_on_the_same_boot_is_exact() -> None:
    h = with_topics(t=DISK, m=MEMORY)
    h.append("t", b"1", b"2")
    h.append("m", b"1", b"2")
    h.kill_and_open()
    assert not h.engine.report.power_cut
    assert h.read("t") == ([(1, b"1"), (2, b"2")], [])
    assert h.read("m") == ([(1, b"1"), (2, b"2")], [])
    assert h.append("t", b"3").first_seq == 3


@fault(
    "disk",
    "the power fails after the process was killed and before a start",
    "it is treated as a power cut: what may be lost is announced",
)
def test_power_cut_after_a_kill_is_still_a_power_cut() -> None:
    """Recovery after the kill syncs what it read, so the records stay; seqs that it may have assigned are skipped."""
    h = with_topics(t=DISK)
    h.append("t", b"1", b"2")
    h.kill_and_open()
    h.append("t", b"3")
    h.power_cut()
    h.open()
    assert h.rows("t")[:2] == [(1, b"1"), (2, b"2")]
    assert h.append("t", b"n").first_seq == limits.SEQ_CEILING_STEP_MIN + 1


def test_clean_close_and_reboot_announce_nothing() -> None:
    h = with_topics(t=DISK, m=MEMORY)
    h.append("t", b"1", b"2")
    h.append("m", b"1")
    h.close()
    h.reboot()
    h.open()
    assert not h.engine.report.power_cut
    assert h.read("t") == ([(1, b"1"), (2, b"2")], [])
    assert h.read("m") == ([(1, b"1")], [])
    assert h.append("t", b"3").first_seq == 3


def test_ephemeral_seqs_of_a_clean_close_are_not_reused() -> None:
    h = with_topics(t=EPHEMERAL)
    h.append("t", b"1", b"2")
    h.restart()
    assert h.rows("t") == []
    assert h.append("t", b"3").first_seq == 3


@fault(
    "disk",
    "the power fails or the process is killed with acknowledged fsync writes",
    "all of them are served, and nothing is announced",
)
@pytest.mark.parametrize("how", ["kill", "power_cut"])
def test_fsync_topic_announces_nothing_after_a_crash(how: str) -> None:
    h = with_topics(t=FSYNC)
    h.append("t", b"1", b"2")
    getattr(h, how)()
    h.open()
    assert h.read("t") == ([(1, b"1"), (2, b"2")], [])
    assert h.append("t", b"3").first_seq == 3


def test_disk_write_past_the_synced_ceiling_waits_for_the_new_one() -> None:
    h = Harness(ROOMY)
    h.put("t", DISK)
    h.rest()
    h.append("t", *numbered(1, limits.SEQ_CEILING_STEP_MIN))
    (token,) = h.ask(append("t", *numbered(1, limits.SEQ_CEILING_STEP_MIN * 4)))
    assert token not in h.replies, "its numbers are not covered by a synced ceiling"
    h.rest()
    assert h.replies[token].synced


def test_ceiling_is_synced_ahead_of_use() -> None:
    """Semantics 6: a `disk` ack needs no sync, because the ceiling is raised before it is reached."""
    h = Harness(ROOMY)
    h.put("t", DISK)
    h.rest()
    waited = []
    for i in range(40):
        (token,) = h.ask(append("t", *numbered(1, 64)))
        if token not in h.replies:
            waited.append(i)
        h.sync()
    assert waited == []


def test_old_ceiling_does_not_count_after_a_change_of_class_and_back() -> None:
    """A ceiling was being written when the topic became fsync; back on disk it starts again, at a lower number."""
    for seed in range(2):
        h = Harness(ROOMY, seed=seed)
        h.put("t", DISK)
        h.ask(append("t", *[b"1"] * 3000), c.PutTopic("t", FSYNC))
        h.rest()
        h.put("t", DISK)
        h.rest()
        acked = h.append("t", *[b"2"] * 2000).head_seq
        h.power_cut()
        h.open()
        assert h.append("t", b"3").first_seq > acked, f"seed {seed}: an acked seq was used again"


# ---- time


@fault("clock", "the wall clock is set back while the shard serves", "times of records never run back")
def test_timestamps_do_not_run_back_with_the_wall_clock() -> None:
    h = with_topics(t=FSYNC)
    h.append("t", b"1")
    h.clock.jump_wall(-3_600_000)
    h.append("t", b"2")
    h.pass_time(1000)
    h.append("t", b"3")
    times = list(h.diff("t").timestamps)
    assert times == sorted(times)


@fault(
    "clock",
    "the wall clock is behind after a restart or power cut",
    "times of records go on from where they were",
)
@pytest.mark.parametrize("how", ["kill", "power_cut", "clean"])
def test_time_does_not_run_back_over_a_restart(how: str) -> None:
    h = with_topics(t=FSYNC)
    h.append("t", b"1")
    h.pass_time(1_000)
    h.append("t", b"2")
    last = h.diff("t").timestamps[-1]
    h.clock.jump_wall(-3_600_000)
    if how == "clean":
        h.close()
    elif how == "kill":
        h.kill()
    else:
        h.power_cut()
    h.open()
    h.append("t", b"3")
    assert h.diff("t").timestamps[-1] >= last


@fault(
    "clock",
    "the wall clock is set forward while the shard serves",
    "time follows at one part in twenty: records do not expire at once",
)
def test_wall_clock_set_forward_is_followed_slowly() -> None:
    """A jump must not expire everything at once."""
    h = with_topics(t=TopicConfig(durability="fsync", ttl_ms=60_000))
    h.append("t", b"1")
    h.clock.jump_wall(3_600_000)
    h.pass_time(1_000)
    assert h.seqs("t") == [1]


@fault(
    "clock", "the machine comes back from a power cut with an early clock", "what had expired stays expired"
)
def test_expired_records_stay_expired_after_a_power_cut_with_an_early_clock() -> None:
    h = with_topics(t=TopicConfig(durability="fsync", ttl_ms=1_000))
    h.append("t", b"1")
    h.pass_time(1_001)
    assert h.rows("t") == []
    h.power_cut(wall_ms=h.clock.wall_ms() - 10_000)
    h.open()
    assert h.rows("t") == []
    assert h.gaps("t") == [(1, 1, "ttl")]


@pytest.mark.parametrize("command", [c.Diff("t"), c.State("t"), c.CountByTag("t", c.TagMatch("Eq", b"a"))])
def test_read_of_a_ttl_topic_after_a_long_idle_waits_for_the_time_ceiling(command: c.Command) -> None:
    h = with_topics(t=TopicConfig(durability="memory", ttl_ms=60_000), plain=MEMORY)
    h.append("t", b"1", tag=b"a")
    h.rest()
    h.clock.advance(2 * limits.TIME_CEILING_STEP_MS)
    held, other = h.ask(command, c.Diff("plain"))
    assert other in h.replies, "only replies that depend on time wait"
    assert held not in h.replies, "a power cut now could undo what the reply shows"
    h.run_job("sync")
    assert held in h.replies
    (again,) = h.ask(command)
    assert again in h.replies, "and only once"


@fault("clock", "a record expires, and the power fails before that is logged", "it does not come back")
def test_records_listed_as_expired_do_not_come_back() -> None:
    h = with_topics(t=TopicConfig(durability="fsync", ttl_ms=6_000))
    h.append("t", b"1")
    h.rest()
    early_ms = h.clock.wall_ms()
    h.clock.advance(2 * limits.TIME_CEILING_STEP_MS)
    (listing,) = h.ask(c.ListTopics())
    shown = [row.count for row in h.replies[listing].topics] if listing in h.replies else None
    h.power_cut(wall_ms=early_ms)
    h.open()
    assert shown is None or shown == [h.state("t").count]
