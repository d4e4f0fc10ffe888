"""Recovery: starts on torn, damaged, missing and foreign files, and on a full disk.

Goal: a torn tail is cut, damage is never cut silently, a bad segment becomes an announced loss, and a second start
changes nothing. Method: an engine is stopped, single bits or files of its SimDisk are changed, and it is opened
again.
"""

from __future__ import annotations

import itertools

import msgspec
import pytest
from xxhash import xxh3_64_digest

from tests.support import length
from tests.support.damaged_shard import Damaged
from tests.support.engine_harness import (
    DISK,
    EPHEMERAL,
    FSYNC,
    MEMORY,
    META_DIR,
    SMALL,
    Harness,
    append,
    file_bytes,
    lose,
    numbered,
    overwrite,
)
from tests.support.faults import fault
from tests.support.sim_disk import SimulatedCrash
from topics.api.config import TopicConfig
from topics.api.errors import (
    Corrupt,
    LogGap,
    ShardReadOnly,
    Throttled,
    TopicsError,
    UnknownFrame,
    UnsupportedFormat,
)
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagMatch
from topics.engine.storage import frames
from topics.engine.storage.wal import ENVELOPE_BYTES, Envelope, scan
from topics.engine.tools.inspect.files import inspect


def filled(count: int, topic: TopicConfig = FSYNC, *, pad: int = 0) -> Harness:
    """Topic `t` with one write per record, so each has its own envelope."""
    h = Harness()
    h.put("t", topic)
    for i in range(1, count + 1):
        h.append("t", *numbered(i, 1, pad))
    return h


def sealed(count: int) -> Harness:
    """Topic `t`, stored in segments of four, closed cleanly."""
    h = filled(count)
    h.close()
    return h


def segment(h: Harness, first_seq: int, suffix: str) -> str:
    return f"{h.topic_dir('t')}/seg-{first_seq:016x}-0.{suffix}"


def expected(*seqs: int) -> list[tuple[int, bytes]]:
    return [(seq, numbered(seq, 1)[0]) for seq in seqs]


def envelopes(h: Harness, path: str) -> list[Envelope]:
    found = scan(path, int(path[-20:-4]), file_bytes(h.disk, path))
    return found.envelopes if found is not None else []


def flip_in_envelope_of(h: Harness, payload: bytes) -> None:
    """Flip a bit in the log, inside the entry with this payload."""
    for path in h.wal_files():
        at = file_bytes(h.disk, path).find(payload)
        if at >= 0:
            h.disk.flip_bit(path, at)
            return
    raise AssertionError(f"no log file contains {payload!r}")


# ---- the end of the log


@fault(
    "log file",
    "the end of the log is torn: the last write is only partly there",
    "it is cut and reported; everything acknowledged as synced is served",
)
def test_torn_tail_is_cut() -> None:
    h = filled(3, DISK)
    h.kill()
    flip_in_envelope_of(h, numbered(3, 1)[0])
    h.open()
    assert h.engine.report.torn
    assert h.engine.report.corrupt == []
    assert h.engine.shard.state.read_only is None
    assert h.rows("t") == expected(1, 2)
    h.append("t", b"next")
    h.kill_and_open()
    assert [payload for _, payload in h.rows("t")] == [numbered(1, 1)[0], numbered(2, 1)[0], b"next"]


@fault(
    "log file",
    "the end of the log is torn: the last write is only partly there",
    "it is cut and reported; everything acknowledged as synced is served",
)
@pytest.mark.parametrize("kept", range(0, 160, 13))
def test_tail_torn_at_any_byte_is_cut(kept: int) -> None:
    h = filled(2, DISK)
    h.sync()
    h.append("t", *numbered(3, 1, pad=100))
    h.kill()
    (path,) = (path for path in h.wal_files() if numbered(3, 1, pad=100)[0] in file_bytes(h.disk, path))
    content = bytearray(file_bytes(h.disk, path))
    last = envelopes(h, path)[-1]
    start = last.start - ENVELOPE_BYTES
    content[start + kept :] = bytes(len(content) - start - kept)
    overwrite(h.disk, path, bytes(content))
    h.open()
    assert h.engine.shard.state.read_only is None
    assert h.rows("t") == expected(1, 2)


def test_unused_spare_file_is_no_damage() -> None:
    h = filled(2)
    h.rest()
    assert len(h.wal_files()) == 2, "expected the active log file and a spare one"
    h.kill_and_open()
    assert h.engine.report.torn == []
    assert h.rows("t") == expected(1, 2)


def test_half_made_log_file_is_removed() -> None:
    h = filled(2)
    h.kill()
    path = "layout-1/shard-00/wal/wal-0000000000000099.log"
    overwrite(h.disk, path, bytes(30))
    h.open()
    assert path not in h.disk.paths()
    assert h.rows("t") == expected(1, 2)


# ---- bit rot


@fault(
    "log file",
    "a payload is corrupted in the log, with synced entries after it",
    "the shard starts read-only and names the place; what lies before it is served",
)
def test_corruption_in_front_of_synced_data_starts_read_only_and_says_why() -> None:
    h = filled(5)
    h.kill()
    flip_in_envelope_of(h, numbered(2, 1)[0])
    h.open()
    reason = h.engine.shard.state.read_only
    assert reason is not None
    assert "wal-" in reason
    assert h.engine.report.corrupt
    assert h.rows("t") == expected(1), "records before the damage must be served"
    assert h.do(c.ListTopics()).topics[0].count == 1
    error = h.refused(append("t", b"x"), ShardReadOnly)
    assert error.detail["read_only"] is True


@fault(
    "log file",
    "a shard with a corrupt log is started again and again",
    "it stays read-only, and its log files are left as they are",
)
def test_corrupt_log_is_left_as_it_is() -> None:
    h = filled(5)
    h.kill()
    flip_in_envelope_of(h, numbered(2, 1)[0])
    before = {path: file_bytes(h.disk, path) for path in h.wal_files() if envelopes(h, path)}
    for _ in range(2):
        h.open()
        h.rest()
        assert h.engine.shard.state.read_only is not None
        h.kill()
    assert {path: file_bytes(h.disk, path) for path in before} == before


def test_corrupt_header_of_a_used_log_file_is_refused() -> None:
    h = filled(3)
    h.kill()
    h.disk.flip_bit(h.wal_files()[0], 30)
    with pytest.raises(Corrupt):
        h.open()


@fault("log file", "any byte of an entry that two snapshots contain is corrupted", "everything is served")
def test_corrupt_entry_that_a_snapshot_contains_does_no_harm() -> None:
    h = filled(5)
    h.checkpoint()
    h.append("t", *numbered(6, 1))
    h.kill()
    flip_in_envelope_of(h, numbered(2, 1)[0])
    h.open()
    assert h.rows("t") == expected(1, 2, 3, 4, 5, 6)


@fault(
    "log file",
    "a log file that a newer version wrote",
    "refused by name as a file of another version; nothing is changed",
)
def test_unknown_log_version_is_refused_by_name() -> None:
    h = filled(3)
    h.kill()
    path = h.wal_files()[0]
    content = bytearray(file_bytes(h.disk, path))
    content[8] = 9
    content[56:64] = xxh3_64_digest(bytes(content[:56]))
    overwrite(h.disk, path, bytes(content))
    with pytest.raises(UnsupportedFormat) as caught:
        h.open()
    assert caught.value.detail == {"path": path, "version": 9}
    assert path in str(caught.value)
    assert file_bytes(h.disk, path) == bytes(content), "the file must not be changed"


@fault(
    "log file",
    "a frame of a kind that a newer version added",
    "refused with its file, place and kind; nothing is changed, and verify and inspect report it",
)
def test_unknown_kind_of_frame_is_refused_by_name() -> None:
    h = filled(3)
    h.engine.shard.state.add_frame(frames.encode_control(99, 0, 1, None))
    h.append("t", *numbered(4, 1))
    h.kill()
    path = h.wal_files()[0]
    before = {name: file_bytes(h.disk, name) for name in h.disk.paths()}
    with pytest.raises(UnknownFrame, match=f"{path} at byte .* of kind 99, .* upgrade topics") as caught:
        h.open()
    assert before[path][caught.value.offset + 4] == 99
    assert {name: file_bytes(h.disk, name) for name in h.disk.paths()} == before
    found = Damaged(h.disk, {}, h.clock.wall_ms()).verify()
    assert [(one.kind, one.path, one.offset) for one in found.findings if one.kind != "pending"] == [
        ("unsupported", path, caught.value.offset)
    ]
    (problem,) = inspect(h.disk, path).problems
    assert (problem.offset, problem.what.partition(",")[0]) == (caught.value.offset, "has a frame of kind 99")


# ---- the chain of log files


@fault(
    "log file",
    "a log file in the middle of the log is missing",
    "the shard starts read-only and names the place; what lies before it is served",
)
def test_lost_log_file_in_the_middle_is_found() -> None:
    h = filled(150)
    h.kill()
    files = [path for path in h.wal_files() if envelopes(h, path)]
    assert len(files) >= 3
    lose(h.disk, files[1])
    h.open()
    assert h.engine.shard.state.read_only is not None
    assert h.rows("t") == expected(*range(1, len(h.rows("t")) + 1))
    h.refused(append("t", b"x"), ShardReadOnly)


@fault(
    "log file",
    "the first log file is missing and no snapshot replaces it",
    "the start is refused: entries of the log are missing; nothing is changed",
)
def test_lost_first_log_file_is_a_gap() -> None:
    h = filled(60)
    h.kill()
    lose(h.disk, h.wal_files()[0])
    with pytest.raises(LogGap):
        h.open()


@fault(
    "log file",
    "two log files have each other's names",
    "the start is refused and names the file; nothing is changed",
)
def test_log_file_under_another_files_name_is_refused() -> None:
    h = filled(60)
    h.kill()
    first, second = h.wal_files()[:2]
    one, two = file_bytes(h.disk, first), file_bytes(h.disk, second)
    overwrite(h.disk, first, two)
    overwrite(h.disk, second, one)
    with pytest.raises(Corrupt):
        h.open()


@fault(
    "log file",
    "a log file of another shard stands in place of one",
    "the chain of files shows it: the shard starts read-only and says why",
)
def test_log_file_of_another_shard_with_the_same_numbers_is_found() -> None:
    """An intact file with the right number and the right entries: only the chain can tell."""
    h, other = filled(60), Harness(seed=2)
    other.put("t", FSYNC)
    for i in range(1, 61):
        other.append("t", b'"another %d"' % i)
    h.kill()
    other.kill()
    path = h.wal_files()[0]
    assert envelopes(h, path)[-1].lsn >= envelopes(other, path)[-1].lsn
    foreign = file_bytes(other.disk, path)
    assert foreign != file_bytes(h.disk, path)
    overwrite(h.disk, path, foreign)
    h.open()
    assert h.engine.shard.state.read_only is not None
    h.refused(append("t", b"x"), ShardReadOnly)


# ---- segments


def test_flipped_bit_in_a_sealed_segment_is_an_announced_loss() -> None:
    h = sealed(9)
    path = segment(h, 1, "data")
    h.disk.flip_bit(path, file_bytes(h.disk, path).find(numbered(2, 1)[0]))
    h.open()
    rows, gaps = h.read("t")
    assert rows == expected(1, 3, 4, 5, 6, 7, 8, 9), "the other records must be served"
    assert gaps == [(2, 2, "corrupt")]
    assert h.state("t").count == 8
    assert h.engine.counters["corrupt"] == 1
    assert h.engine.shard.state.read_only is None


@fault(
    "segment",
    "a damaged record is met again after restarts",
    "the same announced range each time; it is counted once",
)
def test_corrupt_range_is_found_once_and_kept_over_restarts() -> None:
    h = sealed(9)
    path = segment(h, 1, "data")
    h.disk.flip_bit(path, file_bytes(h.disk, path).find(numbered(2, 1)[0]))
    h.open()
    first = h.read("t")
    assert h.read("t") == first
    assert h.engine.counters["corrupt"] == 1
    for how in ("kill_and_open", "restart", "restart"):
        getattr(h, how)()
        assert h.read("t") == first
        assert h.engine.counters.get("corrupt", 0) == 0, "the loss is known already"
    assert h.diff("t", 2).tombstone is None
    h.append("t", b"x")
    h.checkpoint()
    h.restart()
    assert h.read("t") == ([*first[0], (10, b"x")], first[1])


def test_neighbouring_damaged_records_are_one_range() -> None:
    h = sealed(9)
    path = segment(h, 1, "data")
    for seq in (2, 3):
        h.disk.flip_bit(path, file_bytes(h.disk, path).find(numbered(seq, 1)[0]))
    h.open()
    assert h.gaps("t") == [(2, 3, "corrupt")]


def test_damage_in_the_open_segment_is_announced_as_well() -> None:
    h = sealed(6)
    path = segment(h, 5, "data")
    h.disk.flip_bit(path, file_bytes(h.disk, path).find(numbered(6, 1)[0]))
    h.open()
    assert h.read("t")[0] == expected(1, 2, 3, 4, 5)
    assert h.gaps("t") == [(6, 6, "corrupt")]
    assert h.append("t", b"x").first_seq == 7


@fault(
    "segment",
    "a read by tag meets a damaged record",
    "the newest whole record of the tag is served, and the loss is announced",
)
def test_damage_met_by_a_tag_read() -> None:
    h = Harness()
    h.put("t", FSYNC)
    h.append("t", *numbered(1, 4), tag=b"a")
    h.close()
    path = segment(h, 1, "data")
    h.disk.flip_bit(path, file_bytes(h.disk, path).find(numbered(4, 1)[0]))
    h.open()
    h.send(c.LastByTag("t", TagMatch("Eq", b"a")))
    assert h.do(c.LastByTag("t", TagMatch("Eq", b"a"))).seqs == [3]
    assert h.do(c.CountByTag("t", TagMatch("Eq", b"a"))).counts == [(b"a", 3)]
    assert h.gaps("t") == [(4, 4, "corrupt")]


@fault(
    "segment",
    "all files of a segment are missing",
    "the segment's records are announced as lost (corrupt); all others are served",
)
@pytest.mark.parametrize("suffixes", [["data", "idx", "sum"], ["data"]], ids=["all", "data"])
def test_missing_segment_is_an_announced_loss(suffixes: list[str]) -> None:
    h = sealed(9)
    for suffix in suffixes:
        lose(h.disk, segment(h, 5, suffix))
    h.open()
    rows, gaps = h.read("t")
    assert rows == expected(1, 2, 3, 4, 9)
    assert gaps == [(5, 8, "corrupt")]
    assert h.engine.report.corrupt
    assert (h.state("t").count, h.state("t").head_seq) == (5, 9)
    for how in ("kill_and_open", "restart"):
        getattr(h, how)()
        assert h.read("t") == (rows, gaps)


def test_lost_or_damaged_index_costs_no_record() -> None:
    """No record is lost without a tombstone."""
    for damage in ("lose", "flip"):
        h = sealed(9)
        path = segment(h, 5, "idx")
        if damage == "lose":
            lose(h.disk, path)
        else:
            h.disk.flip_bit(path, 16 + 32 + 2)
        h.open()
        rows, gaps = h.read("t")
        lost = [seq for seq in range(1, 10) if seq not in dict(rows)]
        assert all(any(first <= seq <= last for first, last, _ in gaps) for seq in lost), (damage, rows, gaps)
        assert dict(rows).items() <= dict(expected(*range(1, 10))).items()


def test_damaged_sum_does_not_take_readable_records_away() -> None:
    """The records have digests of their own."""
    for damage in ("lose", "flip"):
        h = sealed(9)
        path = segment(h, 1, "sum")
        if damage == "lose":
            lose(h.disk, path)
        else:
            h.disk.flip_bit(path, 40)
        h.open()
        reply = h.send(c.Diff("t"))
        assert not isinstance(reply, TopicsError), (damage, reply)
        rows, gaps = h.read("t")
        lost = [seq for seq in range(1, 10) if seq not in dict(rows)]
        assert all(any(first <= seq <= last for first, last, _ in gaps) for seq in lost), (damage, rows, gaps)


@fault(
    "segment",
    "the .data of a segment vanishes while the shard serves",
    "the read fails or announces the loss; never fewer records in silence",
)
def test_data_file_that_vanishes_while_the_shard_serves() -> None:
    h = sealed(9)
    h.open()
    assert h.state("t").count == 9
    lose(h.disk, segment(h, 1, "data"))
    reply = h.send(c.Diff("t"))
    assert isinstance(reply, TopicsError) or reply.tombstone is not None, (
        "no record may be lost without a tombstone"
    )


# ---- repeated crashes


def workload(h: Harness) -> None:
    h.put("t", TopicConfig(durability="fsync", cap_records=12))
    h.put("d", DISK)
    h.append("t", *numbered(1, 9), tags=[b"a", None, b"b"] * 3, key=b"k")
    h.append("d", *numbered(1, 3))
    h.checkpoint()
    h.do(c.Delete("t", match=TagMatch("Eq", b"a")))
    h.append("t", *numbered(10, 9))
    h.append("d", *numbered(4, 3))
    h.do(c.Skip("t", 3))
    h.put("gone", FSYNC)
    h.append("gone", b"1")
    h.do(c.DropTopic("gone"))


def picture(h: Harness) -> object:
    listing = [(row.topic, row.head_seq, row.count) for row in h.do(c.ListTopics()).topics]
    return listing, h.read("t"), h.read("d"), h.do(c.CountByTag("t", TagMatch("Glob", b"*"))).counts


@fault("disk", "the process is killed again right after each start", "every start gives the same state")
@pytest.mark.parametrize("how", ["kill", "power_cut"])
def test_recovery_is_idempotent(how: str) -> None:
    h = Harness()
    workload(h)
    getattr(h, how)()
    h.open()
    once = picture(h)
    for again in ("kill", "kill", "kill"):
        getattr(h, again)()
        h.open()
        assert picture(h) == once


@fault(
    "disk",
    "the process is killed at any disk call of a start",
    "the next start gives the state that the first one would have given",
)
def test_recovery_that_crashes_anywhere_gives_the_same_in_the_end() -> None:
    first = Harness()
    workload(first)
    first.sync()
    first.kill_and_open()
    wanted = picture(first)
    for turn in itertools.count():
        number = 1 + turn * length.pick(short=6, long=1)
        h = Harness()
        workload(h)
        h.sync()
        h.kill()
        h.disk.crash_at(number, midway=bool(turn % 2))
        try:
            h.open()
        except SimulatedCrash:
            h.kill()
            h.open()
            assert picture(h) == wanted, f"crash at call {number} of recovery"
            continue
        break
    assert number > 20


@fault(
    "disk", "the power fails at any disk call of a start", "the next start serves all that was acknowledged"
)
@pytest.mark.parametrize("seed", range(3))
def test_power_cut_inside_recovery_loses_nothing_acked(seed: int) -> None:
    number = 0
    while True:
        number += 3
        h = Harness(seed=seed)
        h.put("t", FSYNC)
        h.append("t", *numbered(1, 6))
        h.checkpoint()
        h.append("t", *numbered(7, 2))
        h.do(c.Delete("t", seqs=[2]))
        h.power_cut()
        h.disk.crash_at(number, midway=bool(number % 2))
        try:
            h.open()
        except SimulatedCrash:
            h.power_cut()
            h.open()
            assert h.read("t") == (expected(1, 3, 4, 5, 6, 7, 8), []), f"power cut at call {number}"
            continue
        break
    assert number > 10


# ---- durability classes


def test_memory_topics_are_replayed_at_first_touch() -> None:
    h = Harness()
    h.put("m", MEMORY)
    h.put("t", FSYNC)
    h.append("m", *numbered(1, 3))
    h.append("t", *numbered(1, 3))
    h.kill_and_open()
    log = h.engine.shard.state.published["m"]
    assert log.deferred, "it must not delay readiness"
    assert not log.chunks
    assert not h.engine.shard.state.published["t"].deferred
    assert h.rows("m") == expected(1, 2, 3)
    assert not log.deferred


def test_memory_topic_that_nobody_touched_survives_the_next_restart() -> None:
    h = Harness()
    h.put("m", MEMORY)
    h.append("m", *numbered(1, 3))
    for how in ("kill_and_open", "restart", "restart"):
        getattr(h, how)()
    assert h.rows("m") == expected(1, 2, 3)


def test_listing_shows_memory_topics_as_they_are() -> None:
    h = Harness()
    h.put("m", MEMORY)
    h.append("m", *numbered(1, 3))
    h.kill_and_open()
    (row,) = h.do(c.ListTopics()).topics
    assert (row.head_seq, row.count) == (3, 3)


@fault(
    "disk",
    "the process dies with records of an ephemeral topic",
    "they are gone, as the class says; the seqs of the last checkpoint are not used again",
)
def test_ephemeral_records_are_gone_and_the_head_is_as_of_the_last_checkpoint() -> None:
    h = Harness()
    h.put("e", EPHEMERAL)
    h.append("e", b"1", b"2")
    h.checkpoint()
    h.append("e", b"3")
    h.kill_and_open()
    assert h.rows("e") == []
    assert h.append("e", b"x").first_seq == 3


# ---- a full disk


def fill_the_disk(h: Harness, topic: str = "t") -> Throttled:
    """Append until the log has no room left."""
    h.disk.full = True
    for _ in range(200):
        reply = h.send(append(topic, b"x" * 200))
        if isinstance(reply, TopicsError):
            assert isinstance(reply, Throttled), reply
            return reply
    raise AssertionError("the disk did not become full")


@fault(
    "disk",
    "the disk is full",
    "appends are refused with 429 and limit disk_full; nothing that was acknowledged is lost",
)
def test_full_disk_refuses_appends_and_says_so() -> None:
    h = filled(2)
    head = None
    error = fill_the_disk(h)
    assert error.detail["limit"] == "disk_full"
    head = h.state("t").head_seq
    h.refused(append("t", b"x"), Throttled)
    h.refused(append("new", b"x"), Throttled)
    assert h.state("t").head_seq == head
    assert h.engine.shard.state.read_only is None


RESERVED = msgspec.structs.replace(SMALL, reserve_bytes=250_000)


def full_with_reserve() -> Harness:
    """A disk without a free byte: the reserve is there, and the log has an unsynced tail that is larger than the
    reserve.
    """
    h = Harness(RESERVED)
    h.put("t", DISK)
    h.rest()
    for _ in range(6):
        h.ask(append("t", b"x" * 50_000))
    h.kill()
    h.disk.capacity_bytes = sum(len(file_bytes(h.disk, path)) for path in h.disk.paths())
    return h


@fault(
    "disk",
    "a start on a disk without a free byte, again and again",
    "the shard starts from its reserve and refuses appends; when there is space the reserve is filled again",
)
def test_starts_without_a_free_byte() -> None:
    h = full_with_reserve()
    for _ in range(4):
        h.open()
        assert h.seqs("t") == [1, 2, 3, 4, 5, 6]
        h.rest()
        h.refused(append("t", b"x"), Throttled)
        h.kill()
    h.open()
    assert h.engine.reserve.held < RESERVED.reserve_bytes
    assert h.do(c.Delete("t", seqs=[1])).deleted == 1
    h.disk.capacity_bytes = None
    for _ in range(3):
        h.pass_time(1000)
    assert h.append("t", b"x").count == 1
    assert h.engine.reserve.is_complete
    h.kill_and_open()
    assert h.seqs("t") == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("midway", [False, True])
def test_power_cut_at_any_call_of_a_start_on_a_full_disk(midway: bool) -> None:
    """What a power cut may take of a tail that was never synced, it takes from the end, and it is reported."""
    for call in itertools.count(1, length.pick(short=4, long=1)):
        h = full_with_reserve()
        h.disk.crash_at(call, midway=midway)
        try:
            h.open()
        except SimulatedCrash:
            h.power_cut()
            h.open()
            rows, gaps = h.read("t")
            assert [seq for seq, _ in rows] == list(range(1, len(rows) + 1))
            assert [gap[:2] for gap in gaps] == ([(len(rows) + 1, gaps[-1][1])] if gaps else [])
            assert h.engine.shard.state.read_only is None
        else:
            break
    assert call > 20


@fault("disk", "the reserve cannot be used: a directory has its name", "the shard goes without it")
def test_a_directory_in_place_of_the_reserve() -> None:
    h = Harness(RESERVED)
    h.put("t")
    h.kill()
    h.disk.remove(f"{h.config.shard_dir}/reserve")
    h.disk.make_dir(f"{h.config.shard_dir}/reserve")
    h.open()
    h.rest()
    assert h.append("t", b"x").count == 1
    assert h.engine.reserve.is_complete


@fault("disk", "deletes and reads while the disk is full", "they go on: deletes have room of their own")
def test_deletes_and_reads_go_on_while_the_disk_is_full() -> None:
    h = filled(5)
    fill_the_disk(h)
    for seq in range(1, 6):
        assert h.do(c.Delete("t", seqs=[seq])).deleted == 1
    assert h.seqs("t")[0] == 6
    assert h.do(c.DropTopic("t")).deleted


@fault("disk", "a full disk whose records are all deleted", "the log is given back, and appends go on")
def test_deleting_everything_ends_it_on_a_young_shard() -> None:
    """The first snapshot keeps the whole log; only a second one, without new records, releases it."""
    h = filled(2)
    h.disk.capacity_bytes = (
        6 * h.config.wal_file_bytes + 3000
    )  # no room for another log file, but for a snapshot
    error = None
    for _ in range(2000):
        reply = h.send(append("t", b"x" * 200))
        if isinstance(reply, TopicsError):
            error = reply
            break
    assert error is not None
    assert error.detail["limit"] == "disk_full"
    h.do(c.Delete("t", keep=0))
    for _ in range(6):
        h.pass_time(1000)
    assert h.append("t", b"x").count == 1


@fault("disk", "the shard starts on a full disk", "it starts; deletes work, and appends once there is space")
def test_a_shard_starts_on_a_full_disk_and_lets_space_be_made() -> None:
    h = filled(5)
    h.kill_and_open()
    h.disk.capacity_bytes = 1 << 30
    h.disk.capacity_bytes -= h.disk._room_bytes() - 2600  # less than a log file is left
    h.kill_and_open()
    assert h.seqs("t") == [1, 2, 3, 4, 5]
    h.refused(append("t", b"x"), Throttled)
    assert h.do(c.Delete("t", seqs=[1])).deleted == 1
    h.disk.capacity_bytes = None
    for _ in range(3):
        h.pass_time(1000)
    assert h.append("t", b"x").first_seq == 6


@fault("disk", "space comes back after the disk was full", "appends go on by themselves within a second")
def test_service_resumes_by_itself_when_there_is_space() -> None:
    h = filled(2)
    fill_the_disk(h)
    h.pass_time(1000)
    h.refused(append("t", b"x"), Throttled)
    h.disk.full = False
    head = h.state("t").head_seq
    for _ in range(3):
        h.pass_time(1000)
    assert h.append("t", b"x").first_seq == head + 1
    rows = h.rows("t")
    h.kill_and_open()
    assert h.rows("t") == rows


def test_wake_up_is_asked_for_while_the_disk_is_full() -> None:
    """Otherwise nothing would check again without a request."""
    h = filled(2)
    fill_the_disk(h)
    h.rest()
    assert h._wake_at is not None
    assert h._wake_at <= h.clock.monotonic_ms() + 1000


@fault("disk", "the disk is full during a checkpoint", "no client notices: it is tried again")
def test_checkpoint_on_a_full_disk_fails_without_harm() -> None:
    h = filled(6)
    h.rest()
    h.disk.full = True
    h.checkpoint()
    assert h.engine.shard.state.read_only is None
    assert h.rows("t") == expected(1, 2, 3, 4, 5, 6)
    h.disk.full = False
    for _ in range(3):
        h.pass_time(1000)
    h.checkpoint()
    assert h.engine.counters["checkpoints"] >= 1
    h.restart()
    assert h.rows("t") == expected(1, 2, 3, 4, 5, 6)


@fault(
    "disk", "the process is killed while the disk is full", "the next start serves all that was acknowledged"
)
def test_restart_of_a_full_shard_keeps_everything() -> None:
    h = filled(5)
    fill_the_disk(h)
    rows = h.rows("t")
    h.disk.full = False
    h.kill_and_open()
    assert h.rows("t") == rows
    h.append("t", b"x")


# ---- the recovery report


def test_first_start_reports_nothing() -> None:
    h = Harness()
    report = h.engine.report
    assert (report.torn, report.corrupt, report.losses, report.power_cut) == ([], [], [], False)


def test_report_names_the_losses() -> None:
    h = filled(2, DISK)
    h.sync()
    h.power_cut()
    h.open()
    assert h.engine.report.losses == [("t", 3, 1024, "crash")]


def test_progress_goes_from_nothing_to_all() -> None:
    from topics.engine.runtime.engine import Engine

    h = filled(60)
    h.kill()
    engine = Engine(h.disk, h.clock, SMALL)
    progress = list(engine.recover_steps())
    assert progress == sorted(progress)
    assert (progress[0], progress[-1]) == (0.0, 1.0)


@fault(
    "data directory",
    "a pending erase intent is not what was written",
    "the start is refused and names the file; nothing is changed",
)
def test_damaged_intent_is_refused_by_name() -> None:
    h = filled(2)
    h.kill()
    overwrite(h.disk, f"{META_DIR}/intent-0000000000000001", b"no intent at all, this is")
    with pytest.raises(Corrupt):
        h.open()
