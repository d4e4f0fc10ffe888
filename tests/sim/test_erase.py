"""Erase: after the answer no byte of the payload is left in any file, and nothing else has changed.

Goal: every copy goes (log, open and sealed segments, generations that wait for removal), the chain and all digests
stay valid, and after a crash at any moment the payload is gone or the request was not answered. Method: a unique
payload is searched in every file of a SimDisk, in the page cache and on the platter.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable

import msgspec
import pytest

from tests.support import length
from tests.support.damaged_shard import ended
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
    holders,
    numbered,
)
from tests.support.faults import fault
from tests.support.sim_clock import SimClock
from tests.support.sim_disk import SimulatedCrash
from topics.api.config import TopicConfig
from topics.api.errors import EraseDeferred, ShardReadOnly, TopicsError
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagMatch
from topics.engine.storage import frames
from topics.engine.storage.sealing import drain, verify_steps
from topics.engine.storage.wal import scan
from topics.engine.tools.repair import repair_shard

SECRET = b'"the secret that nobody may find again: 4711-0815"'
NEEDLE = b"nobody may find again"
REWRITING = msgspec.structs.replace(SMALL, rewrite_dead_share=0.5)


def expected(*seqs: int) -> list[tuple[int, bytes]]:
    return [(seq, numbered(seq, 1)[0]) for seq in seqs]


def write(h: Harness, first: int, last: int, *, secret: tuple[int, ...] = ()) -> None:
    for seq in range(first, last + 1):
        h.append("t", SECRET if seq in secret else numbered(seq, 1)[0], tag=b"a" if seq % 2 else b"b")


def in_the_log() -> Harness:
    h = Harness()
    h.put("t", FSYNC)
    write(h, 1, 6, secret=(3,))
    return h


def in_an_open_segment() -> Harness:
    h = Harness()
    h.put("t", FSYNC)
    write(h, 1, 3, secret=(3,))
    h.checkpoint()
    write(h, 4, 6)
    return h


def in_a_sealed_segment() -> Harness:
    h = in_the_log()
    h.checkpoint()
    return h


def in_a_sealed_segment_alone() -> Harness:
    """After two checkpoints the log does not have it any more."""
    h = in_a_sealed_segment()
    for i in range(100):
        h.append("u", b'"%d"' % i, config=FSYNC)
    h.checkpoint()
    h.append("u", b'"x"')
    h.checkpoint()
    assert [path for path in holders(h.disk, NEEDLE) if "wal" in path] == []
    return h


def in_two_generations() -> Harness:
    h = Harness(REWRITING)
    h.put("t", FSYNC)
    write(h, 1, 6, secret=(3,))
    h.checkpoint()
    h.do(c.Delete("t", seqs=[1, 2, 4]))
    h.checkpoint()
    assert h.engine.counters["swaps"] == 1
    assert len([path for path in holders(h.disk, NEEDLE) if path.endswith(".data")]) == 2
    return h


def in_a_snapshot_row() -> Harness:
    """A small topic has no files of its own."""
    h = Harness(msgspec.structs.replace(SMALL, inline_bytes=1024))
    h.put("t", FSYNC)
    write(h, 1, 3, secret=(3,))
    h.checkpoint()
    h.append("t", b'"x"')
    h.checkpoint()
    assert len([path for path in holders(h.disk, NEEDLE) if "snap-" in path]) == 2
    return h


def over_several_log_files() -> Harness:
    h = Harness()
    h.put("t", FSYNC)
    write(h, 1, 6, secret=(3,))
    for i in range(100):
        h.append("u", b'"%d"' % i, config=FSYNC)
    assert len(h.wal_files()) > 3
    return h


def after_a_restart() -> Harness:
    h = in_the_log()
    h.kill_and_open()
    return h


def after_a_checkpoint_and_a_restart() -> Harness:
    h = in_a_sealed_segment()
    h.restart()
    return h


PLACES: list[Callable[[], Harness]] = [
    in_the_log,
    in_an_open_segment,
    in_a_sealed_segment,
    in_a_sealed_segment_alone,
    in_two_generations,
    in_a_snapshot_row,
    over_several_log_files,
    after_a_restart,
    after_a_checkpoint_and_a_restart,
]
each_place = pytest.mark.parametrize("place", PLACES, ids=[place.__name__ for place in PLACES])
ERASE = c.Delete("t", seqs=[3], erase=True)


def others(h: Harness) -> list[tuple[int, bytes]]:
    return [(seq, payload) for seq, payload in h.rows("t") if payload != SECRET]


def check_digests(h: Harness) -> None:
    """Every sealed segment matches its .sum, and each .sum names the previous one."""
    chain = bytes(8)
    for chunk in h.engine.shard.state.published["t"].chunks:
        if chunk.meta is not None and chunk.meta.sealed:
            assert drain(verify_steps(h.disk, h.topic_dir("t"), chunk.meta, chain)) == []
            chain = chunk.meta.link


# ---- erased payloads


@each_place
def test_no_byte_is_left_anywhere_once_it_is_answered(place: Callable[[], Harness]) -> None:
    h = place()
    assert holders(h.disk, NEEDLE), "the search must find it before the erase"
    rest = others(h)
    (token,) = h.ask(ERASE)
    assert token not in h.replies
    while token not in h.replies:
        h.run_job() if h.jobs else h.ask()
    assert h.replies[token].deleted == 1
    assert holders(h.disk, NEEDLE) == []
    assert h.rows("t") == rest
    assert h.gaps("t") == []


@each_place
@pytest.mark.parametrize("how", ["kill", "power_cut", "clean"])
def test_log_and_segments_are_valid_after_an_erase_and_a_restart(
    place: Callable[[], Harness], how: str
) -> None:
    h = place()
    rest = others(h)
    h.do(ERASE)
    if how == "clean":
        h.close()
    else:
        getattr(h, how)()
    h.open()
    assert h.engine.report.corrupt == []
    assert h.engine.shard.state.read_only is None
    assert h.read("t") == (rest, [])
    check_digests(h)
    h.append("t", b'"more"')
    h.checkpoint()
    h.restart()
    assert h.rows("t")[:-1] == rest
    assert holders(h.disk, NEEDLE) == []


@fault("disk", "the power fails after an erase was answered", "no byte of the erased records comes back")
@each_place
@pytest.mark.parametrize("seed", range(3))
def test_power_cut_after_the_answer_brings_nothing_back(place: Callable[[], Harness], seed: int) -> None:
    h = place()
    h.disk._rng.seed(seed)
    h.do(ERASE)
    h.power_cut()
    assert holders(h.disk, NEEDLE) == []


def dropped_log_file() -> Harness:
    """A checkpoint has unlinked the log file with the payload; the directory has not been synced since."""
    h = in_a_sealed_segment()
    while len(h.wal_files()) < 3 or h.engine.wal.active.remaining < 3000:
        h.append("u", b'"x"', config=FSYNC)
    h.checkpoint()
    h.append("u", b'"x"')
    h.checkpoint()
    assert [path for path in holders(h.disk, NEEDLE) if "wal" in path] == []
    return h


def dropped_generation() -> Harness:
    """The same with a generation of a segment that was replaced."""
    h = in_two_generations()
    for _ in range(3):
        h.append("u", b'"x"', config=FSYNC)
        h.checkpoint()
    assert len([path for path in holders(h.disk, NEEDLE) if path.endswith(".data")]) == 1
    return h


@fault("disk", "a removed file comes back after a power cut", "it does not bring erased bytes with it")
@pytest.mark.parametrize("place", [dropped_log_file, dropped_generation], ids=lambda place: place.__name__)
def test_dropped_file_does_not_come_back_with_the_payload(place: Callable[[], Harness]) -> None:
    for seed in range(8):
        h = place()
        h.do(ERASE)
        h.disk._rng.seed(seed)
        h.power_cut()
        assert holders(h.disk, NEEDLE) == []


@pytest.mark.parametrize("durability", [DISK, MEMORY], ids=["disk", "memory"])
def test_erase_in_other_classes_waits_for_the_bytes_all_the_same(durability: TopicConfig) -> None:
    h = Harness()
    h.put("t", durability)
    write(h, 1, 4, secret=(3,))
    (token,) = h.ask(ERASE)
    assert token not in h.replies
    h.rest()
    assert h.replies[token].deleted == 1
    assert holders(h.disk, NEEDLE) == []
    assert h.seqs("t") == [1, 2, 4]


def test_erase_of_ephemeral_records_never_had_a_byte_on_disk() -> None:
    h = Harness()
    h.put("t", EPHEMERAL)
    write(h, 1, 4, secret=(3,))
    assert h.do(ERASE).deleted == 1
    assert holders(h.disk, NEEDLE) == []
    assert h.seqs("t") == [1, 2, 4]


def test_plain_delete_leaves_the_bytes() -> None:
    """Shows that the search above works."""
    h = in_a_sealed_segment()
    h.do(c.Delete("t", seqs=[3]))
    assert holders(h.disk, NEEDLE)


@pytest.mark.parametrize(
    "command",
    [
        c.Delete("t", before_seq=4, erase=True),
        c.Delete("t", match=TagMatch("Eq", b"a"), erase=True),
        c.Delete("t", keep=2, erase=True),
    ],
    ids=["before_seq", "match", "keep"],
)
def test_every_selector_erases(command: c.Delete) -> None:
    h = Harness()
    h.put("t", FSYNC)
    for seq in range(1, 7):
        h.append("t", b'"unique payload %d"' % seq, tag=b"a" if seq % 2 else b"b")
    h.checkpoint()
    h.do(command)
    left = h.seqs("t")
    assert 0 < len(left) < 6
    for seq in range(1, 7):
        assert bool(holders(h.disk, b"unique payload %d" % seq)) == (seq in left)


def test_same_payload_of_another_record_stays() -> None:
    h = Harness()
    h.put("t", FSYNC)
    h.put("u", FSYNC)
    write(h, 1, 4, secret=(3,))
    h.append("u", SECRET)
    h.do(ERASE)
    assert h.rows("u") == [(1, SECRET)]
    h.restart()
    assert h.rows("u") == [(1, SECRET)]


def test_erase_that_selects_nothing_is_answered() -> None:
    h = in_the_log()
    assert h.do(c.Delete("t", seqs=[99], erase=True)).deleted == 0
    assert holders(h.disk, NEEDLE)


def test_two_erases_at_once() -> None:
    h = Harness()
    h.put("t", FSYNC)
    h.put("u", FSYNC)
    write(h, 1, 4, secret=(1, 3))
    h.append("u", SECRET)
    tokens = h.ask(
        c.Delete("t", seqs=[1], erase=True),
        c.Delete("t", seqs=[3], erase=True),
        c.Delete("u", keep=0, erase=True),
    )
    h.rest()
    assert [h.replies[token].deleted for token in tokens] == [1, 1, 1]
    assert holders(h.disk, NEEDLE) == []
    assert h.rows("t") == expected(2, 4)
    h.restart()
    assert h.rows("t") == expected(2, 4)


def test_erase_of_a_topic_that_is_dropped_meanwhile_is_answered() -> None:
    h = in_a_sealed_segment()
    erase, drop = h.ask(ERASE, c.DropTopic("t"))
    h.rest()
    assert drop in h.replies
    assert erase in h.replies
    h.restart()
    assert h.do(c.ListTopics()).topics == []


def test_records_appended_during_an_erase_are_whole() -> None:
    h = in_a_sealed_segment()
    (token,) = h.ask(ERASE)
    seq = 6
    while token not in h.replies:
        if any(job.kind == "erase" for job in h.jobs):
            seq += 1
            h.ask(c.Append("t", c.Records(numbered(seq, 1))))
        if h.jobs:
            h.run_job()
        else:
            h.ask()
        assert seq < 60
    assert seq > 6
    h.rest()
    wanted = expected(1, 2, *range(4, seq + 1))
    assert h.rows("t") == wanted
    h.kill_and_open()
    assert h.engine.report.corrupt == []
    assert h.rows("t") == wanted
    assert holders(h.disk, NEEDLE) == []


def test_erase_is_not_starved_by_a_busy_topic() -> None:
    """With a write always in flight, as on any busy fsync topic, it still completes."""
    h = in_a_sealed_segment()
    (token,) = h.ask(ERASE)
    for seq in range(7, 107):
        h.ask(c.Append("t", c.Records(numbered(seq, 1))))
        if h.jobs:
            h.run_job()
        if token in h.replies:
            break
    assert token in h.replies


def test_checkpoint_during_an_erase_makes_no_new_copy() -> None:
    h = in_the_log()
    (token,) = h.ask(ERASE)
    h.engine.checkpoint()
    h.rest()
    assert token in h.replies
    assert holders(h.disk, NEEDLE) == []
    h.restart()
    assert h.rows("t") == expected(1, 2, 4, 5, 6)


def test_erase_during_a_checkpoint_finds_the_copy_that_is_being_made() -> None:
    runs = 0
    while True:
        h = in_the_log()
        h.engine.checkpoint()
        h.ask()
        for _ in range(runs):
            if h.jobs:
                h.run_job()
        done = not h.jobs
        assert h.do(ERASE).deleted == 1
        assert holders(h.disk, NEEDLE) == [], f"after {runs} jobs of the checkpoint"
        h.rest()
        assert holders(h.disk, NEEDLE) == []
        h.restart()
        assert h.rows("t") == expected(1, 2, 4, 5, 6)
        if done:
            break
        runs += 1
    assert runs >= 3


def test_earlier_plain_delete_can_not_be_erased_by_its_seq_any_more() -> None:
    """Selectors match live records. What was deleted before does not match any more; its bytes go with the segment."""
    h = in_the_log()
    h.do(c.Delete("t", seqs=[3]))
    assert h.do(ERASE).deleted == 0


# ---- crashes


def crash_everywhere(place: Callable[[], Harness], how: str) -> int:
    """Crash at call 1, 2, 3 … of an erase, or at some of them; returns how many calls it took."""
    some = length.some()
    # Different calls for kills and power cuts.
    first = 1 + (length.turn(some) + (how == "kill") * (some // 2)) % some
    for turn in itertools.count():
        number = first + turn * some
        h = place()
        rest = others(h)
        h.disk.crash_at(number, midway=bool(turn % 2))
        acked = False
        try:
            h.do(ERASE)
            acked = True
            h.rest()
        except SimulatedCrash:
            getattr(h, how)()
        else:
            return number
        where = f"{how} at call {number}"
        if acked:
            assert holders(h.disk, NEEDLE) == [], f"{where}: answered, but the payload is still there"
        h.open()
        assert h.engine.report.corrupt == [], where
        assert h.engine.shard.state.read_only is None, where
        h.rest()
        live = h.state("t").count == len(rest) + 1
        if not live:
            assert holders(h.disk, NEEDLE) == [], f"{where}: deleted, but never erased"
        else:
            assert not acked, where
        assert others(h) == rest, where
        assert h.gaps("t") == [], where
        check_digests(h)
        assert not [path for path in h.disk.paths() if "intent" in path], where
        h.restart()
        assert others(h) == rest, where


@fault(
    "disk",
    "the power fails or the process dies at any disk call of an erase",
    "it is finished after the next start, or was never acknowledged; log and segments are whole",
)
@pytest.mark.parametrize("how", ["kill", "power_cut"])
@pytest.mark.parametrize(
    "place",
    [in_the_log, in_a_sealed_segment, in_two_generations, in_a_snapshot_row, over_several_log_files],
    ids=lambda place: place.__name__,
)
def test_crash_at_every_call_of_an_erase(place: Callable[[], Harness], how: str) -> None:
    assert crash_everywhere(place, how) > 20


@fault(
    "disk",
    "any disk call of an erase fails",
    "it is answered, and finished after a restart; log and segments are whole",
)
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_failure_of_every_call_of_an_erase(error: int) -> None:
    some = length.pick(short=6, long=1)
    number = 1 - some + length.turn(some)
    while True:
        number += some
        h = in_a_sealed_segment()
        rest = others(h)
        h.rest()
        before = h.disk.calls
        h.disk.fail_at(number, error)
        reply = h.send(ERASE)
        reached = h.disk.calls - before >= number
        where = f"call {number}"
        if not isinstance(reply, TopicsError):
            assert holders(h.disk, NEEDLE) == [], f"{where}: answered, but the payload is still there"
        else:
            assert isinstance(reply, ShardReadOnly | EraseDeferred), (where, reply)
        h.disk._plans.clear()
        h.disk._armed = False
        assert others(h) == rest, where
        h.kill_and_open()
        h.rest()
        assert h.engine.report.corrupt == [], where
        if h.state("t").count == len(rest):
            assert holders(h.disk, NEEDLE) == [], f"{where}: deleted, but never erased"
        assert others(h) == rest, where
        check_digests(h)
        if not reached:
            break
    assert number > 20


@fault(
    "disk",
    "an erase on a full disk",
    "the records are deleted at once, and overwritten as soon as there is space",
)
def test_erase_on_a_full_disk_is_put_off_and_done_when_there_is_space() -> None:
    h = in_a_sealed_segment()
    h.rest()
    h.disk.full = True
    error = h.refused(ERASE, EraseDeferred)
    assert error.detail["limit"] == "disk_full"
    assert h.rows("t") == expected(1, 2, 4, 5, 6), "it must be deleted anyway"
    assert holders(h.disk, NEEDLE)
    h.disk.full = False
    for _ in range(4):
        h.pass_time(1000)
    assert holders(h.disk, NEEDLE) == []


@fault("worker", "the process dies in the middle of an erase", "the next start finishes it")
def test_unfinished_erase_is_finished_after_a_restart() -> None:
    h = in_a_sealed_segment()
    h.ask(ERASE)
    h.run_job("sync")
    h.kill_and_open()
    assert h.rows("t") == expected(1, 2, 4, 5, 6)
    h.rest()
    assert holders(h.disk, NEEDLE) == []
    assert [path for path in h.disk.paths() if path.startswith(f"{META_DIR}/intent")] == []


def test_unfinished_erase_is_finished_after_a_checkpoint_and_two_restarts() -> None:
    """The snapshot keeps the request once its log entry is gone."""
    h = in_a_sealed_segment()
    h.rest()
    h.disk.full = True
    h.refused(ERASE, EraseDeferred)
    h.disk.full = False
    h.kill_and_open()
    h.kill_and_open()
    h.checkpoint()
    h.rest()
    assert holders(h.disk, NEEDLE) == []
    h.restart()
    assert h.rows("t") == expected(1, 2, 4, 5, 6)


# ---- when the delete is lost


def rot_of_the_delete(h: Harness) -> None:
    """The entry with the delete is damaged; later entries show that it was synced."""
    for path in h.disk.paths():
        found = scan(path, int(path[-20:-4]), file_bytes(h.disk, path)) if "/wal-" in path else None
        for envelope in found.envelopes if found is not None else []:
            starts: list[int] = []
            frames.frame_starts(found.data, envelope.start, envelope.end, starts)
            if any(found.data[at + 4] == frames.DELETE for at in starts):
                h.disk.flip_bit(path, envelope.start + 20)
                return
    raise AssertionError("no delete in the log")


# With two generations an earlier delete is damaged as well, which brings back whole records.
@pytest.mark.parametrize("place", [place for place in PLACES if place is not in_two_generations])
@fault(
    "log file",
    "the delete of an erased record is corrupted",
    "the record does not come back as zeros, neither in the read-only shard nor after a repair",
)
def test_erased_record_stays_away_though_its_delete_is_lost(place: Callable[[], Harness]) -> None:
    h = place()
    before = others(h)
    h.do(ERASE)
    for _ in range(3):
        h.append("u", b"1", config=FSYNC)
    h.rest()
    h.kill()
    rot_of_the_delete(h)
    h.open()
    assert h.engine.shard.state.read_only is not None
    assert h.rows("t") == before
    h.kill()
    ended(repair_shard(h.disk, SimClock(h.clock.wall_ms()), h.engine.config, 1, 1))
    for _ in range(2):
        h.open()
        assert h.engine.shard.state.read_only is None
        assert h.rows("t") == before
        h.engine.check_invariants()
        h.append("t", b"1")
        h.checkpoint()
        before = h.rows("t")
        h.kill()


# ---- copies that no start uses


def torn_and_written_again(how: str, midway_seed: int) -> Harness:
    """A crash in the middle of the write, then the same write again with its key."""
    h = Harness(seed=midway_seed)
    h.put("t", FSYNC)
    write(h, 1, 2)
    twice = append("t", SECRET, b'"' + b"." * 400 + b'"', key=b"key")
    h.disk.crash_at(1, of="write", midway=True)
    with pytest.raises(SimulatedCrash):
        h.do(twice)
    getattr(h, how)()
    h.open()
    assert h.do(twice).first_seq == 3
    return h


@fault(
    "log file",
    "a crash in the middle of a write, which is then repeated, and the record erased",
    "no byte of the half-written copy is left",
)
@pytest.mark.parametrize("how", ["kill", "power_cut"])
def test_erase_reaches_what_a_crash_left_half_written(how: str) -> None:
    torn = 0
    for seed in range(12):
        h = torn_and_written_again(how, seed)
        torn += len(holders(h.disk, NEEDLE)) == 2
        h.do(ERASE)
        assert holders(h.disk, NEEDLE) == []
        h.kill_and_open()
        assert h.engine.report.corrupt == []
        assert h.seqs("t") == [1, 2, 4]
    assert torn, "none of the seeds left the payload in the torn entry"


@fault(
    "log file",
    "a power cut takes an entry and leaves a later one, whose write is then repeated, and the record erased",
    "no byte of the entry that was cut off is left",
)
def test_erase_reaches_an_entry_behind_a_gap() -> None:
    """The entry was cut off with the gap; its record was written again with another seq."""
    cut_off = 0
    for seed in range(60):
        h = Harness(seed=seed)
        h.put("t", DISK)
        write(h, 1, 2)
        h.sync()
        for payload in (b'"' + b"." * 600 + b'"', SECRET):
            h.ask(append("t", payload))
        h.power_cut()
        h.open()
        if h.seqs("t") != [1, 2]:
            continue
        cut_off += bool(holders(h.disk, NEEDLE))
        seq = h.append("t", SECRET).first_seq
        assert h.do(c.Delete("t", seqs=[seq], erase=True)).deleted == 1
        assert holders(h.disk, NEEDLE) == []
        h.kill_and_open()
        assert h.engine.report.corrupt == []
        assert h.seqs("t") == [1, 2]
    assert cut_off, "none of the seeds left the payload behind a gap"


@fault(
    "snapshot",
    "one or both are corrupted, and then a record that rides in them is erased",
    "it is answered when the corrupt ones are gone and another one has taken their place",
)
@pytest.mark.parametrize(
    ("rotten", "restart"),
    [((0,), False), ((0,), True), ((1,), False), ((1,), True), ((0, 1), False)],
    ids=["older", "older, then a start", "newest", "newest, then a start", "both"],
)
def test_erase_reaches_a_corrupt_snapshot(rotten: tuple[int, ...], restart: bool) -> None:
    h = in_a_snapshot_row()
    rest = others(h)
    for i in rotten:
        h.disk.flip_bit(h.snapshots()[i], 40, 1)
    if restart:
        h.kill_and_open()
    assert h.do(ERASE).deleted == 1
    assert holders(h.disk, NEEDLE) == []
    h.kill_and_open()
    assert h.engine.report.skipped_snapshots == []
    assert h.read("t") == (rest, [])
    h.append("t", b'"more"')
    h.checkpoint()
    h.restart()
    assert len(h.rows("t")) == len(rest) + 1


def corrupt_snapshot() -> Harness:
    h = in_a_snapshot_row()
    h.disk.flip_bit(h.snapshots()[1], 40, 1)
    return h


@pytest.mark.parametrize("how", ["kill", "power_cut"])
def test_crash_at_every_call_of_an_erase_that_meets_a_corrupt_snapshot(how: str) -> None:
    assert crash_everywhere(corrupt_snapshot, how) > 20


@fault(
    "log file",
    "the header of a file is corrupted, and then a record is erased",
    "the outcome is called unknown; the shard is read-only",
)
def test_erase_that_meets_a_corrupt_log_header_is_answered() -> None:
    h = in_the_log()
    h.disk.flip_bit(h.wal_files()[0], 8, 0)
    assert h.refused(ERASE, ShardReadOnly).detail["outcome"] == "unknown"
    assert others(h) == expected(1, 2, 4, 5, 6)
