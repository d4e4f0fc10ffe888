"""The files of checkpoints: which stay, which are removed, and what happens when some cannot be used.

Goal: dead files are removed, needed ones stay, and missing ones are never ignored. Method: small segments and log
files on a SimDisk; then restarts, with snapshots or log files damaged or removed.
"""

from __future__ import annotations

import pytest

from tests.support.checkpoint_rig import REWRITING, expected, filled
from tests.support.engine_harness import (
    FSYNC,
    META_DIR,
    Harness,
    holders,
    lose,
    numbered,
    overwrite,
)
from tests.support.faults import fault
from topics.api.config import TopicConfig
from topics.api.errors import LogGap
from topics.engine.commands import topics as c

# ---- removal


def test_segment_is_dropped_after_eviction_once_no_snapshot_names_it() -> None:
    h = filled(8, topic=TopicConfig(durability="fsync", cap_records=4))
    h.checkpoint()
    first = "seg-0000000000000001-0.data"
    for i in range(9, 14):
        h.append("t", *numbered(i, 1))
        h.checkpoint()
    assert first not in h.segment_files("t")
    for i in (14, 15):
        h.append("t", *numbered(i, 1))
        h.checkpoint()
    assert all(name >= "seg-0000000000000009" for name in h.segment_files("t"))
    assert h.seqs("t") == [12, 13, 14, 15]
    h.restart()
    assert h.seqs("t") == [12, 13, 14, 15]


def test_files_of_an_evicted_segment_stay_while_a_kept_snapshot_names_it() -> None:
    h = filled(8)
    h.checkpoint()
    h.put("t", TopicConfig(durability="fsync", cap_records=2))
    h.checkpoint()
    assert "seg-0000000000000001-0.data" in h.segment_files("t"), "snapshot 1 may be needed"
    for _ in range(2):
        h.append("t", b"x")
        h.checkpoint()
    assert "seg-0000000000000001-0.data" not in h.segment_files("t")


@pytest.mark.parametrize("how", ["kill", "power_cut"])
def test_segments_emptied_during_a_checkpoint_are_removed_after_a_crash(how: str) -> None:
    """The snapshot includes the delete, but still names the segment: replay has nothing to find."""
    h = filled(10)
    h.checkpoint()
    h.ask(c.Delete("t", before_seq=5))
    h.engine.checkpoint()
    h.go_on_without("sync")  # the capture comes before the delete is synced
    h.rest()
    getattr(h, how)()
    h.open()
    assert h.seqs("t") == [5, 6, 7, 8, 9, 10]
    h.put("other")
    for _ in range(3):
        h.append("other", b'"more"')
        h.checkpoint()
    assert not [name for name in h.segment_files("t") if name.startswith("seg-0000000000000001-")]
    h.kill_and_open()
    assert h.seqs("t") == [5, 6, 7, 8, 9, 10]


def test_rewrite_makes_a_new_generation_without_the_dead() -> None:
    h = filled(8, REWRITING)
    h.checkpoint()
    h.do(c.Delete("t", seqs=[1, 2, 3]))
    h.checkpoint()
    names = h.segment_files("t")
    assert "seg-0000000000000001-1.data" in names
    assert "seg-0000000000000001-0.data" in names, "the kept snapshots name generation 0"
    assert h.engine.counters["swaps"] == 1
    assert numbered(2, 1)[0] not in dict(h.rows("t")).values()
    assert f"{h.topic_dir('t')}/seg-0000000000000001-1.data" not in holders(h.disk, numbered(2, 1)[0])
    assert h.rows("t") == expected(4, 5, 6, 7, 8)


def test_old_generation_goes_once_no_snapshot_names_it() -> None:
    h = filled(8, REWRITING)
    h.checkpoint()
    h.do(c.Delete("t", seqs=[1, 2, 3]))
    for i in range(9, 12):
        h.checkpoint()
        h.append("t", *numbered(i, 1))
    h.checkpoint()
    assert not [name for name in h.segment_files("t") if name.startswith("seg-0000000000000001-0")]
    for how in ("restart", "kill_and_open"):
        getattr(h, how)()
        assert h.rows("t") == expected(*range(4, 12))


@fault(
    "segment",
    "the process dies or the power fails right after a segment was rewritten",
    "the log repeats the swap; everything is served",
)
@pytest.mark.parametrize("how", ["kill", "power_cut"])
def test_swap_that_no_snapshot_knows_yet_is_replayed(how: str) -> None:
    h = filled(8, REWRITING)
    h.checkpoint()
    h.do(c.Delete("t", seqs=[1, 2, 3]))
    h.checkpoint()
    h.do(c.Delete("t", seqs=[4, 6]))
    getattr(h, how)()
    h.open()
    assert h.rows("t") == expected(5, 7, 8)
    h.checkpoint()
    h.restart()
    assert h.rows("t") == expected(5, 7, 8)


def test_sealed_segment_with_nothing_live_goes() -> None:
    h = filled(13, REWRITING)
    h.checkpoint()
    h.do(c.Delete("t", seqs=[5, 6, 7, 8]))
    for i in range(14, 18):
        h.checkpoint()
        h.append("t", *numbered(i, 1))
    assert not [name for name in h.segment_files("t") if name.startswith("seg-0000000000000005")]
    h.restart()
    assert h.rows("t") == expected(1, 2, 3, 4, *range(9, 18))


def test_drop_removes_the_topics_directory() -> None:
    h = filled(8)
    h.checkpoint()
    directory = h.topic_dir("t")
    assert [path for path in h.disk.paths() if path.startswith(directory)]
    h.do(c.DropTopic("t"))
    h.rest()
    assert [path for path in h.disk.paths() if path.startswith("topics/")] == []
    assert h.disk.list("topics") == []


@fault(
    "data directory",
    "the process dies before the files of a deleted topic are removed",
    "they are removed at the next start",
)
@pytest.mark.parametrize("how", ["kill", "power_cut"])
def test_directory_of_a_dropped_topic_goes_at_the_next_start(how: str) -> None:
    h = filled(8)
    h.checkpoint()
    (token,) = h.ask(c.DropTopic("t"))
    h.run_job("sync")
    assert token in h.replies
    getattr(h, how)()
    h.open()
    h.rest()
    assert h.disk.list("topics") == []
    assert h.disk.list("lost+found") == []


def test_ids_never_repeat() -> None:
    h = Harness()
    seen: set[int] = set()
    for round_number in range(6):
        h.put("t", FSYNC)
        topic_id = h.engine.shard.state.published["t"].id
        assert topic_id not in seen
        seen.add(topic_id)
        h.append("t", b"1")
        if round_number % 2:
            h.checkpoint()
        h.do(c.DropTopic("t"))
        h.rest()
        if round_number == 3:
            h.checkpoint()
        if round_number % 3:
            h.restart()
        else:
            h.kill_and_open()


def test_id_of_a_topic_whose_creation_was_lost_is_free_and_leaves_nothing() -> None:
    h = filled(1)
    h.ask(c.PutTopic("u", FSYNC))
    h.power_cut()
    h.open()
    h.put("v")
    h.append("v", b"1")
    ids = [log.id for log in h.engine.shard.state.published.values()]
    assert len(ids) == len(set(ids))
    h.restart()
    assert h.rows("v") == [(1, b"1")]


# ---- unknown files


@fault(
    "data directory",
    "a foreign file among a topic's segments",
    "it is put into lost+found; everything is served",
)
def test_file_that_nothing_explains_goes_to_lost_and_found() -> None:
    h = filled(8)
    h.close()
    stray = f"topics/{h.engine.shard.state.published['t'].id:016x}/seg-0000000000000003-0.data"
    overwrite(h.disk, stray, b"somebody's")
    other = f"{stray.rpartition('/')[0]}/notes.txt"
    overwrite(h.disk, other, b"notes")
    h.open()
    assert h.rows("t") == expected(*range(1, 9))
    assert stray not in h.disk.paths()
    assert len([path for path in h.disk.paths() if path.startswith("lost+found/")]) == 2


def test_explained_leftovers_are_removed() -> None:
    """A crashed checkpoint past the end, an older front, another generation, a temporary file."""
    h = filled(8, topic=TopicConfig(durability="fsync", cap_records=4))
    for i in range(9, 14):
        h.append("t", *numbered(i, 1))
        h.checkpoint()
    h.close()
    directory = f"topics/{h.engine.shard.state.published['t'].id:016x}"
    leftovers = [
        f"{directory}/seg-{first:016x}-{generation}.{suffix}"
        for first, generation, suffix in ((1, 0, "data"), (9, 7, "idx"), (99, 0, "data"))
    ] + [f"{directory}/seg-0000000000000009-1.sum.tmp"]
    for path in leftovers:
        overwrite(h.disk, path, b"rest")
    h.open()
    assert h.seqs("t") == [10, 11, 12, 13]
    assert not set(leftovers) & set(h.disk.paths())
    assert h.disk.list("lost+found") == []


@fault(
    "data directory",
    "a directory of a topic that nobody knows",
    "it is put into lost+found; everything is served",
)
def test_directory_of_an_unknown_topic() -> None:
    """An id that was used before belongs to a dropped topic; one that was never used is foreign."""
    h = filled(1)
    h.do(c.DropTopic("t"))
    h.put("u")
    h.close()
    overwrite(h.disk, f"topics/{1024:016x}/seg-0000000000000001-0.data", b"old")
    overwrite(h.disk, f"topics/{1024 * 500:016x}/seg-0000000000000001-0.data", b"foreign")
    overwrite(h.disk, f"topics/{1024 * 500 + 1:016x}/seg-0000000000000001-0.data", b"another shard's")
    h.open()
    paths = h.disk.paths()
    assert f"topics/{1024:016x}/seg-0000000000000001-0.data" not in paths
    assert f"lost+found/{1024 * 500:016x}/seg-0000000000000001-0.data" in paths
    assert f"topics/{1024 * 500 + 1:016x}/seg-0000000000000001-0.data" in paths


# ---- unusable snapshots


@fault(
    "snapshot",
    "the newest snapshot is damaged",
    "the older snapshot and the log give the same state; everything is served",
)
def test_damaged_newest_snapshot_falls_back_to_the_older() -> None:
    h = filled(6)
    h.checkpoint()
    h.append("t", *numbered(7, 3))
    h.do(c.Delete("t", seqs=[2, 8]))
    h.checkpoint()
    h.append("t", *numbered(10, 1))
    h.kill()
    h.disk.flip_bit(h.snapshots()[-1], 40)
    h.open()
    assert h.engine.report.snapshot == 1
    assert len(h.engine.report.skipped_snapshots) == 1
    assert h.rows("t") == expected(1, 3, 4, 5, 6, 7, 9, 10)
    h.restart()
    assert h.rows("t") == expected(1, 3, 4, 5, 6, 7, 9, 10)


@fault(
    "snapshot", "the only snapshot is damaged", "the log is replayed from its beginning; everything is served"
)
def test_only_snapshot_damaged_means_full_replay() -> None:
    h = filled(6)
    h.checkpoint()
    h.kill()
    h.disk.flip_bit(h.snapshots()[0], 40)
    h.open()
    assert h.engine.report.snapshot == 0
    assert h.rows("t") == expected(1, 2, 3, 4, 5, 6)


@fault(
    "snapshot",
    "the newest snapshot is damaged after records were evicted",
    "the older one still finds its segments; everything is served",
)
def test_fallback_to_the_older_snapshot_after_an_eviction() -> None:
    """Segments that only the older snapshot names are kept as long as it is."""
    h = filled(8, topic=TopicConfig(durability="fsync", cap_records=8))
    h.checkpoint()
    for i in range(9, 14):
        h.append("t", *numbered(i, 1))
    h.checkpoint()
    h.kill()
    h.disk.flip_bit(h.snapshots()[-1], 40)
    h.open()
    assert h.read("t") == (expected(*range(6, 14)), [(1, 5, "cap")])


@fault(
    "snapshot",
    "the newest snapshot is damaged after a segment was rewritten",
    "the older one still finds its segments; everything is served",
)
def test_fallback_to_the_older_snapshot_after_a_rewrite() -> None:
    h = filled(8, REWRITING)
    h.checkpoint()
    h.do(c.Delete("t", seqs=[1, 2, 3]))
    h.checkpoint()
    assert h.engine.counters["swaps"] == 1
    h.append("t", *numbered(9, 1))
    h.checkpoint()
    h.kill()
    h.disk.flip_bit(h.snapshots()[-1], 40)
    h.open()
    assert h.rows("t") == expected(4, 5, 6, 7, 8, 9)


@fault(
    "snapshot",
    "all snapshots are damaged and the log does not reach back far enough",
    "the start is refused: entries of the log are missing; nothing is changed",
)
def test_all_snapshots_damaged_and_the_log_cut_is_a_gap() -> None:
    h = filled(60)
    h.checkpoint()
    h.append("t", b"x")
    h.checkpoint()
    h.kill()
    for path in h.snapshots():
        h.disk.flip_bit(path, 40)
    with pytest.raises(LogGap):
        h.open()


@fault(
    "log file",
    "the log begins later than the snapshot ends",
    "the start is refused: entries of the log are missing; nothing is changed",
)
def test_log_that_begins_after_the_snapshot_is_a_gap() -> None:
    h = filled(2)
    h.checkpoint()
    for i in range(3, 150):
        h.append("t", *numbered(i, 1))
    h.kill()
    for path in h.wal_files()[:2]:
        lose(h.disk, path)
    with pytest.raises(LogGap) as caught:
        h.open()
    assert caught.value.detail["after_lsn"] < caught.value.detail["next_lsn"]


@fault(
    "log file",
    "all log files are missing",
    "the start is refused: entries of the log are missing; nothing is changed",
)
def test_snapshot_without_any_log_is_a_gap() -> None:
    """The active log file always stays, so it must have existed; what was acked after the snapshot is lost with it."""
    h = filled(2)
    h.checkpoint()
    h.append("t", *numbered(3, 1))
    h.kill()
    for path in h.wal_files():
        lose(h.disk, path)
    with pytest.raises(LogGap):
        h.open()


@fault("snapshot", "a half-written snapshot is left behind", "it is removed; everything is served")
def test_unfinished_snapshot_is_removed() -> None:
    h = filled(2)
    h.kill()
    overwrite(h.disk, f"{META_DIR}/snap-0000000000000009.tmp", b"half")
    h.open()
    assert h.snapshots() == []
    assert h.rows("t") == expected(1, 2)
