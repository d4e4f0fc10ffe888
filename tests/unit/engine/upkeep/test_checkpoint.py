"""Checkpoints: what is written in which order and when, and how it is read back.

Goal: at every moment the files on disk are sufficient for recovery. Method: small segments and log files on a SimDisk
that records every call with its path; then restarts.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.support.checkpoint_rig import INLINE, expected, filled, with_suffix
from tests.support.engine_harness import (
    DISK,
    FSYNC,
    META_DIR,
    SMALL,
    WAL_DIR,
    Harness,
    append,
    holders,
    numbered,
)
from tests.support.faults import fault
from topics.api.config import EngineConfig, TopicConfig
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagMatch
from topics.engine.runtime import background
from topics.engine.storage.frames import DEAD
from topics.engine.storage.sealing import drain, read_sum, verify_steps
from topics.engine.storage.segments import SegmentMeta

# ---- order


def test_files_appear_in_the_order_that_makes_every_crash_harmless() -> None:
    """Log synced → .data, .idx, .dict written, synced → .sum → snapshot written, synced, renamed, its name synced."""
    h = filled(3, topic=DISK)
    h.append("t", b"4", tag=b"a")
    calls = h.line.calls
    calls.clear()
    h.checkpoint()

    def at(name: str, ending: str, *, last: bool = False) -> int:
        found = [i for i, (call, path) in enumerate(calls) if call == name and path.endswith(ending)]
        assert found, f"no {name} of {ending}"
        return found[-1] if last else found[0]

    log_synced = at("sync", ".log")
    for ending in (".data", ".idx", ".dict"):
        assert log_synced < at("write", ending), f"{ending} has more than the synced log"
        assert at("write", ending, last=True) < at("sync", ending) < at("write", ".sum")
    topic_dir = h.topic_dir("t")
    assert at("sync", ".data") < at("sync_dir", topic_dir)
    snap = "snap-0000000000000001"
    assert at("write", ".sum", last=True) < at("rename", snap)
    assert at("sync_dir", topic_dir) < at("rename", snap)
    assert at("write", f"{snap}.tmp", last=True) < at("sync", f"{snap}.tmp") < at("rename", snap)
    assert at("rename", snap) < at("sync_dir", META_DIR, last=True)


def test_log_files_and_old_snapshots_go_after_the_new_snapshot_has_its_name() -> None:
    h = filled(60)
    h.checkpoint()
    h.append("t", b"x")
    h.checkpoint()
    h.append("t", b"y")
    calls = h.line.calls
    calls.clear()
    h.checkpoint()
    renamed = next(i for i, (call, path) in enumerate(calls) if call == "rename" and "/snap-" in path)
    removed = [i for i, (call, path) in enumerate(calls) if call == "remove" and path.startswith("layout")]
    assert removed
    assert min(removed) > renamed


def test_deletes_are_marked_and_synced_before_the_snapshot() -> None:
    h = filled(4)
    h.checkpoint()
    h.do(c.Delete("t", seqs=[2]))
    calls = h.line.calls
    calls.clear()
    h.checkpoint()
    marked = max(i for i, (call, path) in enumerate(calls) if ".del" in path and call in ("write", "rename"))
    renamed = next(i for i, (call, path) in enumerate(calls) if call == "rename" and "/snap-" in path)
    synced = [i for i, (call, path) in enumerate(calls) if call == "sync" and ".del" in path]
    assert synced
    assert max(marked, *synced) < renamed


# ---- log files


def test_log_files_are_dropped_only_after_two_snapshots() -> None:
    h = filled(120)
    before = h.wal_files()
    assert len(before) > 3
    h.checkpoint()
    assert set(before) <= set(h.wal_files()), "one snapshot may turn out to be damaged"
    h.append("t", b"x")
    h.checkpoint()
    left = h.wal_files()
    assert before[0] not in left
    assert len(left) <= 3
    assert len(h.rows("t")) == 121


def test_two_snapshots_are_kept() -> None:
    h = filled(1)
    for i in range(5):
        h.append("t", b"%d" % i)
        h.checkpoint()
    assert h.snapshots() == [f"{META_DIR}/snap-{number:016x}" for number in (4, 5)]


def test_checkpoint_starts_by_itself_after_enough_log() -> None:
    h = filled(1, msgspec.structs.replace(SMALL, snapshot_wal_bytes=2000))
    h.pass_time(6000)
    assert h.engine.counters["checkpoints"] == 0
    for i in range(20):
        h.append("t", b"%d" % i)
    h.pass_time(6000)
    assert h.engine.counters["checkpoints"] == 1


def test_checkpoint_starts_by_itself_after_the_interval() -> None:
    h = filled(1, msgspec.structs.replace(SMALL, snapshot_interval_ms=60_000))
    h.pass_time(59_000)
    assert h.engine.counters["checkpoints"] == 0
    h.pass_time(6_000)
    assert h.engine.counters["checkpoints"] == 1
    h.pass_time(70_000)
    assert h.engine.counters["checkpoints"] == 1, "nothing has changed since"


# ---- sealing


def test_segment_is_sealed_by_count() -> None:
    h = filled(5)
    h.checkpoint()
    assert with_suffix(h.segment_files("t"), ".sum") == ["seg-0000000000000001-0.sum"]
    assert "seg-0000000000000005-0.data" in h.segment_files("t")
    assert h.engine.counters["seals"] == 1


def test_segment_is_sealed_by_bytes() -> None:
    h = filled(0, msgspec.structs.replace(SMALL, segment_max_events=1000, segment_max_bytes=300))
    for _ in range(4):
        h.append("t", b"x" * 100)
    h.checkpoint()
    assert with_suffix(h.segment_files("t"), ".sum") == ["seg-0000000000000001-0.sum"]
    assert "seg-0000000000000004-0.data" in h.segment_files("t")


def test_segment_is_sealed_by_age() -> None:
    h = filled(1, msgspec.structs.replace(SMALL, segment_max_age_ms=10_000))
    h.checkpoint()
    assert with_suffix(h.segment_files("t"), ".sum") == []
    h.pass_time(10_000)
    h.append("t", *numbered(2, 1))
    h.checkpoint()
    assert with_suffix(h.segment_files("t"), ".sum") == ["seg-0000000000000001-0.sum"]
    h.append("t", *numbered(3, 1))
    h.checkpoint()
    assert "seg-0000000000000003-0.data" in h.segment_files("t")
    h.restart()
    assert h.rows("t") == expected(1, 2, 3)


def test_open_segment_grows_over_checkpoints() -> None:
    h = filled(1)
    for i in (2, 3):
        h.checkpoint()
        h.append("t", *numbered(i, 1))
    h.checkpoint()
    assert with_suffix(h.segment_files("t"), ".data") == ["seg-0000000000000001-0.data"]
    h.restart()
    assert h.rows("t") == expected(1, 2, 3)


def test_sealed_segments_verify_and_are_chained() -> None:
    h = filled(13)
    h.checkpoint()
    chain = bytes(8)
    for chunk in h.engine.shard.state.published["t"].chunks[:3]:
        assert isinstance(chunk.meta, SegmentMeta)
        assert drain(verify_steps(h.disk, h.topic_dir("t"), chunk.meta, chain)) == []
        assert read_sum(h.disk, h.topic_dir("t"), chunk.meta.first_seq, 0)[0].chain == chain
        chain = chunk.meta.link
    assert any(chain)


@fault("segment", "a sealed segment was replaced by another whole one", "the chain of segments shows it")
def test_chain_of_segments_finds_a_swapped_one() -> None:
    h = filled(13)
    h.checkpoint()
    metas = [chunk.meta for chunk in h.engine.shard.state.published["t"].chunks]
    assert metas[1] is not None
    problems = drain(verify_steps(h.disk, h.topic_dir("t"), metas[1], b"another!"))
    assert [problem.path.rpartition(".")[2] for problem in problems] == ["sum"]


# ---- recovery


def test_index_is_loaded_at_first_touch_and_without_reading_data() -> None:
    h = filled(13)
    h.append("t", b"x", tag=b"a")
    h.put("other")
    h.append("other", b"1")
    h.close()
    h.open()
    assert h.line.reads(".idx") == []
    assert h.line.reads(".data") == []
    assert h.state("t").count == 14
    assert h.do(c.CountByTag("t", TagMatch("Eq", b"a"))).counts == [(b"a", 1)]
    indexes = {f"{h.topic_dir('t')}/seg-{first:016x}-0.idx" for first in (1, 5, 9, 13)}
    assert set(h.line.reads(".idx")) == indexes, "and none of the other topic"
    assert h.line.reads(".data") == []
    assert len(h.rows("t")) == 14
    assert h.line.reads(".data")


def test_listing_loads_nothing() -> None:
    h = filled(13)
    h.close()
    h.open()
    assert [(row.topic, row.head_seq, row.count) for row in h.do(c.ListTopics()).topics] == [("t", 13, 13)]
    assert h.line.reads(".idx") == []


def test_everything_survives_a_clean_restart() -> None:
    h = Harness()
    h.put("t", TopicConfig(durability="fsync", cap_records=6))
    h.append("t", *numbered(1, 9), tags=[b"a", None, b"b"] * 3, nodes=[None, b"n", None] * 3, key=b"k")
    h.do(c.Delete("t", seqs=[5]))
    h.do(c.Skip("t", 2))
    before = h.read("t"), h.state("t")
    h.restart()
    assert (h.read("t"), h.state("t")) == before
    assert h.append("t", *numbered(1, 9), key=b"k").deduped
    assert h.append("t", b"x").first_seq == 12


@fault(
    "segment",
    "the process dies or the power fails after a delete in a stored segment",
    "what was deleted stays deleted",
)
@pytest.mark.parametrize("checkpoints", range(3))
@pytest.mark.parametrize("how", ["kill", "power_cut", "clean"])
def test_delete_after_a_checkpoint_survives(checkpoints: int, how: str) -> None:
    """The mark of a stored record is only in the log, then in .del, then only in .del."""
    h = filled(6)
    h.checkpoint()
    h.do(c.Delete("t", seqs=[2, 6]))
    for i in range(checkpoints):
        h.append("t", *numbered(7 + i, 1))
        h.checkpoint()
    if how == "clean":
        h.close()
    else:
        getattr(h, how)()
    h.open()
    assert h.rows("t") == expected(1, 3, 4, 5, *range(7, 7 + checkpoints))
    assert h.gaps("t") == []


def test_delete_between_capture_and_snapshot_is_not_lost() -> None:
    h = filled(6)
    h.engine.checkpoint()
    h.ask()
    deleted = False
    while h.jobs:
        if h.jobs[0].kind == "snapshot" and not deleted:
            deleted = True
            h.ask(c.Delete("t", seqs=[3]))
        h.run_job()
    assert deleted
    h.rest()
    h.restart()
    assert h.seqs("t") == [1, 2, 4, 5, 6]


def test_append_between_capture_and_snapshot_is_not_lost() -> None:
    h = filled(6)
    h.engine.checkpoint()
    h.ask()
    written = 6
    while h.jobs:
        written += 1
        h.ask(append("t", *numbered(written, 1)))
        h.run_job()
        if written > 40:
            break
    h.rest()
    h.kill_and_open()
    assert h.rows("t") == expected(*range(1, written + 1))


# ---- many topics


def many_topics(count: int, *, inline_bytes: int = 0) -> Harness:
    h = Harness(EngineConfig(wal_file_bytes=1 << 20, snapshot_interval_ms=1 << 40, inline_bytes=inline_bytes))
    h.ask(*[append(f"t{i}", b"1", config=FSYNC) for i in range(count)])
    h.rest()
    return h


def most_calls_in_a_turn(h: Harness, *, calls_per_ms: int) -> int:
    """Run a checkpoint on a clock that moves with the disk calls; the largest number of calls in one turn."""
    most = 0
    calls = h.line.calls

    def tick() -> None:
        if len(calls) % calls_per_ms == 0:
            h.clock.advance(1)

    h.engine.checkpoint()
    h.line.each_call = tick
    while True:
        before = len(calls)
        h.ask()
        most = max(most, len(calls) - before)
        while h.jobs:
            job = h.jobs.pop(0)
            job.run()
            before = len(calls)
            h._take(h.engine.finish(job, None))
            most = max(most, len(calls) - before)
        if not h.engine._has_background_work():
            break
    h.line.each_call = lambda: None
    assert h.engine.counters["checkpoints"] == 1
    return most


def test_checkpoint_of_many_topics_runs_in_slices() -> None:
    h = many_topics(300)
    assert most_calls_in_a_turn(h, calls_per_ms=20) <= 100


def test_checkpoint_of_hundreds_of_topics_writes_in_slices() -> None:
    """The same except for closes: no turn opens, writes or removes more than a slice."""
    h = many_topics(400)
    calls = h.line.calls
    most = 0
    h.engine.checkpoint()
    while True:
        before = len(calls)
        h.ask()
        most = max(most, sum(name != "close" for name, _ in calls[before:]))
        while h.jobs:
            job = h.jobs.pop(0)
            job.run()
            before = len(calls)
            h._take(h.engine.finish(job, None))
            most = max(most, sum(name != "close" for name, _ in calls[before:]))
        if not h.engine._has_background_work():
            break
    assert most <= 64 * 16, "64 slices of one topic each, when the clock stands still"
    h.restart()
    assert h.rows("t0") == h.rows("t399") == [(1, b"1")]


def test_checkpoint_of_many_topics_holds_few_files_open() -> None:
    """A process may open 1024 files by default, and running out of them (EMFILE) makes the shard read-only."""
    h = many_topics(600)
    most = 0

    def count() -> None:
        nonlocal most
        most = max(most, len(h.disk._handles))

    h.line.each_call = count
    h.checkpoint()
    assert most <= 512


def test_many_small_topics_cost_no_files() -> None:
    """Their records are stored in the snapshot: one file instead of thousands."""
    h = many_topics(300, inline_bytes=1024)
    assert most_calls_in_a_turn(h, calls_per_ms=20) <= 100
    assert [path for path in h.disk.paths() if path.startswith("topics/")] == []
    h.restart()
    assert h.rows("t0") == h.rows("t299") == [(1, b"1")]


@pytest.mark.parametrize("how", ["kill", "power_cut", "clean"])
def test_small_topic_grows_out_of_the_snapshot(how: str) -> None:
    h = filled(2, INLINE)
    h.append("t", *numbered(3, 1), tag=b"a", nodes=[b"n"], key=b"k")
    for last in range(4, 10):
        h.checkpoint()
        if last == 5:
            h.do(c.Delete("t", seqs=[2]))
        h.append("t", *numbered(last, 1))
        if how == "clean":
            h.close()
        else:
            getattr(h, how)()
        h.open()
        wanted = [seq for seq in range(1, last + 1) if seq != 2 or last < 5]
        assert h.read("t") == (expected(*wanted), [])
        assert h.do(c.CountByTag("t", TagMatch("Eq", b"a"))).counts == [(b"a", 1)]
        assert 3 not in h.diff("t", nodes=(b"n",)).seqs
    assert h.append("t", b"x", key=b"k").deduped
    assert "seg-0000000000000001-0.data" in h.segment_files("t")


def test_requests_are_served_in_the_middle_of_a_checkpoint() -> None:
    h = many_topics(300)
    h.engine.checkpoint()
    h.ask()
    assert h.engine._has_background_work()
    (write,) = h.ask(append("t5", b"2"))
    for _ in range(50):
        if write in h.replies:
            break
        h.run_job("sync") if any(job.kind == "sync" for job in h.jobs) else h.run_job()
    assert write in h.replies
    h.rest()
    assert h.rows("t5") == [(1, b"1"), (2, b"2")]


@pytest.mark.parametrize("inline_bytes", [0, 1024])
def test_many_dropped_topics_are_removed_in_slices(inline_bytes: int) -> None:
    """With files of their own, and without: looking for their directories takes calls as well."""
    h = many_topics(200, inline_bytes=inline_bytes)
    h.checkpoint()
    h.ask(*[c.DropTopic(f"t{i}") for i in range(200)])
    most = 0
    calls = h.line.calls

    def tick() -> None:
        if len(calls) % 20 == 0:
            h.clock.advance(1)

    h.line.each_call = tick
    for _ in range(2000):
        before = len(calls)
        if h.jobs:
            job = h.jobs.pop(0)
            job.run()
            before = len(calls)
            h._take(h.engine.finish(job, None))
        else:
            h.ask()
        most = max(most, len(calls) - before)
        if not h.jobs and not h.engine._has_background_work():
            break
    assert h.disk.list("topics") == []
    assert most <= 100


def test_wal_directory_holds_only_log_files() -> None:
    h = filled(60)
    h.checkpoint()
    assert all(path.startswith(f"{WAL_DIR}/wal-") and path.endswith(".log") for path in h.wal_files())


# ---- small topics


@pytest.mark.parametrize("cache_bytes", [1 << 20, 0], ids=["remembered", "read again"])
def test_frames_of_a_small_topic_are_those_of_the_long_way(cache_bytes: int) -> None:
    """Over several log files, a block of an earlier checkpoint, deletes and a floor; row by row and all together."""
    config = msgspec.structs.replace(INLINE, cache_bytes=cache_bytes, wal_file_bytes=4096)
    h = Harness(msgspec.structs.replace(config, segment_max_events=64, inline_bytes=4096))
    h.put("t", FSYNC)
    h.put("other", DISK)
    looked_at = 0
    for round_ in range(1, 13):
        h.append("t", *numbered(round_ * 10, 1 + round_ % 3))
        if round_ % 2:
            h.append("other", b"1" * 1500)  # another log file, after a while
        if round_ == 5:
            h.do(c.Delete("t", seqs=[2, 3, 7]))
        if round_ == 8:
            h.do(c.Delete("t", before_seq=2))
            h.checkpoint()  # earlier records are in a block from now on
        log = h.engine.shard.state.published["t"]
        (chunk,) = log.chunks
        live = chunk.live(0, chunk.count, DEAD)
        live[: log.first_seq - chunk.first_seq] = False
        lengths = np.where(live, chunk.rows["length"], 0).astype(np.int64)
        offsets = np.where(live, np.cumsum(lengths) - lengths, 0)
        data, found_offsets, found_lengths = h.engine.reader.frames_of_few(log, chunk)
        assert data == h.engine.reader.frames_of(log, chunk, log.runs, np.flatnonzero(live))
        assert (found_offsets, found_lengths) == (offsets.tolist(), lengths.tolist())
        looked_at = max(looked_at, len(log.runs))
    assert looked_at > 2
    before = h.rows("t")
    h.restart()
    assert h.rows("t") == before


def test_a_small_topic_whose_log_is_corrupt_is_not_taken_for_good() -> None:
    h = Harness(msgspec.structs.replace(INLINE, cache_bytes=0))
    h.put("t", FSYNC)
    h.append("t", *numbered(1, 3))
    (path,) = holders(h.disk, numbered(2, 1)[0])
    content = bytes(h.disk._find(path).live)  # type: ignore[union-attr]
    h.disk.flip_bit(path, content.index(numbered(2, 1)[0]) + 2)
    h.checkpoint()
    assert h.engine.shard.state.read_only is not None and "damage" in h.engine.shard.state.read_only
    assert h.snapshots() == []


@pytest.mark.parametrize("turns", [1, 3, 6, 12])
@pytest.mark.parametrize("end", ["kill_and_open", "power_cut"])
def test_a_topic_of_many_chunks_is_captured_in_slices_beside_writes_and_deletes(
    turns: int, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "SLICES_PER_TURN", 1)
    h = Harness(SMALL)
    h.put("t")
    h.append(
        "t",
        *numbered(1, 40),
        tags=[b"tag %d" % i for i in range(40)],
        ttls_ms=[100_000 * i for i in range(10, 50)],
    )
    model = dict(expected(*range(1, 41)))
    h.engine.checkpoint()
    for turn in range(turns):
        h.append("t", *numbered(41 + turn, 1), tag=b"late")
        model |= dict(expected(41 + turn))
        for seq in (2 + 3 * turn, 40 - 2 * turn):
            h.do(c.Delete("t", seqs=[seq]))
            model.pop(seq, None)
    if turns == 12:
        h.rest()
        assert h.engine.counters["checkpoints"] == 1
    if end == "power_cut":
        h.power_cut()
        h.open()
    else:
        h.kill_and_open()
    assert dict(h.rows("t")) == model
    tags = h.do(c.CountByTag("t", TagMatch("Glob", b"*"), limit=100)).counts
    assert dict(tags) == {b"tag %d" % (seq - 1): 1 for seq in model if seq <= 40} | {b"late": turns}
    h.engine.check_invariants()
    h.pass_time(2_950_000)
    assert h.seqs("t") == [seq for seq in model if seq > 20], "each record has kept its own TTL"


def test_a_checkpoint_looks_at_the_ttls_of_new_records_only() -> None:
    h = Harness(SMALL)
    h.put("t")
    h.append("t", *numbered(1, 40), ttls_ms=[1000] * 40)
    (log,) = (log for log in h.engine.shard.state.staged.values() if log.name == "t")
    assert sum(len(chunk.expiries) for chunk in log.chunks) == 40
    h.checkpoint()
    assert sum(len(chunk.expiries) for chunk in log.chunks) == 0
    h.append("t", *numbered(41, 1), ttls_ms=[1000])
    assert sum(len(chunk.expiries) for chunk in log.chunks) == 1
