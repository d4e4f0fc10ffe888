"""The pace of relocation to the cold tier: in pieces, no faster than allowed, and never slower than new data arrives.

Goal: writers to the same disk wait behind one MiB and not behind a backlog; the rate limit never makes the hot tier
grow without bound or the disk run full; and a slow relocation can be cancelled, stopped or interrupted by a crash
between any two pieces. Method: an engine on a SimDisk with segments of a few MiB, a clock that the test sets, and a
store that counts.
"""

from __future__ import annotations

import gc
import threading
from itertools import pairwise

import msgspec
import pytest

from tests.support import length
from tests.support.engine_harness import FSYNC, SMALL, Harness, numbered
from tests.support.faults import fault
from tests.support.sim_disk import SimDisk, SimulatedCrash
from tests.support.stores import ObjectStore
from topics.api import limits
from topics.api.config import EngineConfig
from topics.engine.commands import topics as c
from topics.engine.storage.segment_store import COLD_IO_KIND, DiskSegmentStore
from topics.engine.storage.segments import COLD

PAD = 600_000  # a segment of four records has three blocks
RATE = limits.MIB
PACED = msgspec.structs.replace(
    SMALL, hot_retain_segments=0, relocate_bytes_per_s=RATE, wal_file_bytes=16 * limits.MIB, verify=False
)


def filled(config: EngineConfig = PACED, segments: int = 4, cold: DiskSegmentStore | None = None) -> Harness:
    """This many sealed segments, all due for relocation, none relocated yet."""
    h = Harness(config, cold=cold if cold is not None else ObjectStore())
    h.put("t", FSYNC)
    for seq in range(1, 4 * segments + 2):
        h.append("t", numbered(seq, 1, PAD)[0])
    return h


def moves(h: Harness) -> int:
    return h.engine.counters.get("relocations", 0)


def until_between_pieces(h: Harness) -> None:
    """A part of the first segment is in the store, and the rest waits for time to pass."""
    h.checkpoint()
    assert moves(h) == 0
    assert h.engine.relocator.pace.wake_ms is not None


# ---- speed


def test_it_takes_its_time() -> None:
    """Four segments of 2.4 MB at one MiB a second."""
    h = filled()
    h.checkpoint()
    moved = [moves(h)]
    for _ in range(12):
        h.pass_time(1000)
        moved.append(moves(h))
    assert moved[0] == 0, "the burst is too long"
    assert moved[-1] == 4
    assert moved.index(4) >= 8, "faster than one MiB a second"
    assert all(after - before <= 1 for before, after in pairwise(moved)), moved


def test_one_job_is_a_piece() -> None:
    h = filled(segments=1)
    h.engine.checkpoint()
    pieces: list[int] = []
    h.line.calls.clear()
    for _ in range(200):
        if moves(h):
            break
        h.clock.advance(50)
        h.ask()
        while h.jobs:
            kind, before = h.jobs[0].kind, len(h.line.reads(".data"))
            h.run_job()
            if kind == COLD_IO_KIND:
                pieces.append(len(h.line.reads(".data")) - before)
    assert moves(h) == 1
    assert sum(pieces) == 3
    assert max(pieces) <= 2, "the file of three blocks must not be read at once"


def test_without_a_bound_it_is_done_at_once() -> None:
    h = filled(msgspec.structs.replace(PACED, relocate_bytes_per_s=0))
    h.checkpoint()
    assert moves(h) == 4


def test_a_disk_that_runs_full_is_not_kept_waiting() -> None:
    h = filled(msgspec.structs.replace(PACED, relocate_bytes_per_s=1))
    until_between_pieces(h)
    h.engine.shard.state.low_space = True
    h.rest()
    assert moves(h) == 4


def test_relocation_keeps_up_with_fast_writes() -> None:
    """About 200 KB a second are written for three minutes, and the rate limit is a hundredth of that: the backlog
    stays bounded.
    """
    config = msgspec.structs.replace(PACED, relocate_bytes_per_s=2000, snapshot_wal_bytes=limits.MIB)
    h = Harness(config, cold=ObjectStore())
    h.put("t", FSYNC)
    waiting: list[int] = []
    for seq in range(1, 181):
        h.append("t", numbered(seq, 1, 200_000)[0])
        h.pass_time(1000)
        log = h.engine.shard.state.published["t"]
        metas = [chunk.meta for chunk in log.chunks if chunk.meta is not None]
        waiting.append(sum(meta.data_bytes for meta in metas if meta.tier != COLD))
    span_bytes = 2 * limits.PACE_SPAN_MS // 1000 * 200_000
    assert max(waiting) <= 2 * span_bytes, waiting
    assert max(waiting[-60:]) < 1.1 * max(waiting[:60]), "the backlog grows"
    assert moves(h) >= 35, "of 45 segments, most must have moved"


def test_an_erase_does_not_wait_for_a_slow_relocation() -> None:
    h = filled(msgspec.structs.replace(PACED, relocate_bytes_per_s=0), segments=1)
    h.checkpoint()
    h.put("u", FSYNC)
    h.config = msgspec.structs.replace(PACED, relocate_bytes_per_s=1)
    h.restart()
    h.append("u", *numbered(1, 9, PAD))
    h.checkpoint()
    assert h.engine.relocator.pace.wake_ms is not None
    assert h.do(c.Delete("t", seqs=[2], erase=True)).deleted == 1
    assert moves(h) <= 1, "only data that was read already"


# ---- cancelled, stopped, interrupted


@pytest.mark.parametrize("how", ["drop", "erase"])
def test_a_move_that_has_become_pointless_is_given_up(how: str) -> None:
    h = filled(msgspec.structs.replace(PACED, relocate_bytes_per_s=1), segments=1)
    until_between_pieces(h)
    if how == "drop":
        h.do(c.DropTopic("t"))
    else:
        assert h.do(c.Delete("t", seqs=[2], erase=True)).deleted == 1
    h.rest()
    objects = h.cold.objects  # type: ignore[union-attr]
    assert not [key for key in objects if key.endswith(".data")]
    assert not any(b"record 2." in data for data in objects.values())


def test_a_stop_does_not_wait_for_the_pace() -> None:
    h = filled(msgspec.structs.replace(PACED, relocate_bytes_per_s=1), segments=2)
    until_between_pieces(h)
    h.restart()
    assert h.seqs("t") == list(range(1, 10))


def test_a_stop_does_not_wait_for_a_piece_that_is_on_its_way() -> None:
    """Another thread is in the middle of it."""
    h = filled(segments=1)
    h.engine.checkpoint()
    while h.engine.checkpointer.cold_job_chunk is None or not any(job.kind == COLD_IO_KIND for job in h.jobs):
        h.run_job() if h.jobs else h.ask()
    (job,) = [job for job in h.jobs if job.kind == COLD_IO_KIND]
    reached, free = threading.Event(), threading.Event()

    def hang(name: str, key: str) -> None:
        reached.set()
        assert free.wait(60)

    h.cold.on_call = hang  # type: ignore[union-attr]
    thread = threading.Thread(target=job.run)
    thread.start()
    assert reached.wait(60)
    h.jobs.remove(job)
    while h.jobs:
        h.run_job()
    h._take(h.engine.close())
    free.set()
    thread.join(60)
    assert not thread.is_alive()


@fault(
    "disk",
    "the power fails or the process is killed between two pieces of a segment that moves to the cold tier",
    "the next start serves every record, moves the segment again, and removes the unfinished file",
)
@pytest.mark.parametrize("how", ["power", "kill"])
def test_a_crash_at_every_call_of_a_move_in_pieces(how: str) -> None:
    def begin() -> tuple[Harness, SimDisk]:
        far = SimDisk(5)
        return filled(segments=1, cold=DiskSegmentStore(far)), far

    def move(h: Harness) -> None:
        h.checkpoint()
        while not moves(h):
            h.pass_time(500)

    h, far = begin()
    before = far.calls
    move(h)
    calls = far.calls - before
    for number in length.calls(calls, each=68, shifted=how == "power"):
        h, far = begin()
        far.crash_at(number, midway=True)
        with pytest.raises(SimulatedCrash):
            move(h)
        far.crash() if how == "power" else far.kill()
        h.power_cut() if how == "power" else h.kill()
        h.cold = DiskSegmentStore(far)
        h.open()
        gc.collect()  # leftovers of the old process must not interfere
        assert h.seqs("t") == [1, 2, 3, 4, 5], number
        while h.engine.shard.state.published["t"].chunks[0].meta.tier != COLD:  # type: ignore[union-attr]
            h.pass_time(limits.COLD_PAUSE_MS_MAX)
            h.checkpoint()
        assert not [path for path in far.paths() if path.startswith("staging/")], number
        h.kill_and_open()
        assert h.seqs("t") == [1, 2, 3, 4, 5], number
