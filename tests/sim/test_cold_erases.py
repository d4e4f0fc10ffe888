"""Erases in the cold tier: once an erase is answered the bytes are in neither tier, whatever crashes or fails."""

from __future__ import annotations

import msgspec
import pytest

from tests.support import length
from tests.support.engine_harness import (
    Harness,
    holders,
    numbered,
    overwrite,
)
from tests.support.faults import fault
from tests.support.sim_disk import SimulatedCrash
from tests.support.stores import ObjectStore
from tests.support.tiered_engine import (
    NEEDLE,
    check_kept,
    cold_files,
    data_files,
    filled,
    moved,
    records,
    relocated,
    tiers,
)
from topics.api import limits
from topics.api.errors import EraseDeferred
from topics.engine.commands import merges as mrg
from topics.engine.commands import topics as c
from topics.engine.storage.manifest import decode_manifest


def anywhere(h: Harness) -> list[str]:
    assert isinstance(h.cold, ObjectStore)
    return holders(h.disk, NEEDLE) + [key for key, data in h.cold.objects.items() if NEEDLE in data]


def test_an_erased_record_is_in_neither_tier() -> None:
    h = relocated(secret=3)
    assert anywhere(h)
    deleted = h.do(c.Delete("t", seqs=[3], erase=True))
    assert deleted.deleted == 1
    assert anywhere(h) == []
    assert {name for name in cold_files(h) if name.endswith(".data")} == {
        "seg-0000000000000001-1.data",
        "seg-0000000000000005-0.data",
    }
    assert "seg-0000000000000001-1.data" not in data_files(h)
    for _ in range(2):
        assert h.rows("t") == records(1, 2, *range(4, 15))
        h.kill_and_open()
        h.checkpoint()


def test_an_erase_while_the_segment_is_on_its_way() -> None:
    h = filled(secret=3)
    h.engine.checkpoint()
    h.ask()
    while not any(job.kind == "cold_move" for job in h.jobs):
        h.run_job() if h.jobs else h.ask()
    moves = [job for job in h.jobs if job.kind == "cold_move"]
    for job in moves:
        h.jobs.remove(job)
    (token,) = h.ask(c.Delete("t", seqs=[3], erase=True))
    h.rest()
    assert token not in h.replies, "a copy to the store may be in progress"
    h.jobs += moves
    h.rest()
    assert h.replies[token].deleted == 1
    assert anywhere(h) == []
    check_kept(h, "erase")
    assert anywhere(h) == []


def erased_and_killed() -> Harness:
    """The old generation is gone, and only the log names the new one."""
    h = relocated(secret=3)
    assert h.do(c.Delete("t", seqs=[3], erase=True)).deleted == 1
    h.kill()
    return h


@fault(
    "segment",
    "the index of a cold segment that an erase has just made anew is corrupted before the next checkpoint",
    "it is fetched from its copy in the cold tier, and nothing is lost",
)
@pytest.mark.parametrize("suffix", ["sum", "idx"])
@pytest.mark.parametrize("how", ["is corrupted", "goes"])
def test_an_index_that_is_damaged_is_fetched_from_the_cold_tier(suffix: str, how: str) -> None:
    h = erased_and_killed()
    (path,) = [path for path in h.disk.paths() if path.endswith(f"seg-0000000000000001-1.{suffix}")]
    if how == "is corrupted":
        h.disk.flip_bit(path, 20, 1)
    else:
        h.disk.remove(path)
    h.open()
    for _ in range(3):
        assert h.rows("t") == records(1, 2, *range(4, 15))
        assert anywhere(h) == []
        h.checkpoint()
        h.kill_and_open()


@fault(
    "segment",
    "the index of a cold segment is corrupted whose records an erase has just replaced, before the next checkpoint",
    "the new generation, which only the log names, is read at once, and nothing is lost",
)
@pytest.mark.parametrize("suffix", ["sum", "idx"])
def test_an_index_that_is_damaged_after_an_erase_has_taken_its_records(suffix: str) -> None:
    h = erased_and_killed()
    (path,) = [path for path in h.disk.paths() if path.endswith(f"seg-0000000000000001-0.{suffix}")]
    h.disk.flip_bit(path, 20, 1)
    h.open()
    for _ in range(3):
        assert h.rows("t") == records(1, 2, *range(4, 15))
        assert anywhere(h) == []
        assert h.do(c.State("t")).count == 13
        h.checkpoint()
        h.kill_and_open()


@fault(
    "segment",
    "a cold segment that an erase has just made anew is damaged in both tiers before the next checkpoint",
    "its records are announced as lost, and the rest of the topic is served",
)
def test_a_new_generation_that_is_damaged_in_both_tiers_is_an_announced_loss() -> None:
    h = erased_and_killed()
    store = h.cold
    assert isinstance(store, ObjectStore)
    (path,) = [path for path in h.disk.paths() if path.endswith("seg-0000000000000001-1.sum")]
    h.disk.flip_bit(path, 20, 1)
    (key,) = [key for key in store.objects if key.endswith("seg-0000000000000001-1.sum")]
    store.objects[key] = store.objects[key][:20]
    h.open()
    for _ in range(3):
        page = h.do(c.Diff("t", 0, 100))
        assert (page.tombstone.reason, page.tombstone.gap_from, page.tombstone.gap_to) == ("corrupt", 1, 4)
        assert h.rows("t") == records(*range(5, 15))
        assert anywhere(h) == []
        h.checkpoint()
        h.kill_and_open()


def test_a_snapshot_lists_no_dead_segment_whose_files_an_erase_has_taken() -> None:
    """Memory does not have it any more, so the erase removes its files; a start from the last checkpoint finds it
    again, with no live record.
    """
    store = ObjectStore()
    h = moved(store)
    h.config = msgspec.structs.replace(h.config, rewrite_dead_share=1)
    h.restart()
    h.do(c.Delete("t", seqs=[5, 6, 7, 8]))
    h.checkpoint()
    h.do(c.Delete("t", seqs=[9], erase=True))
    assert not [key for key in store.objects if "seg-0000000000000005" in key]
    h.kill_and_open()
    pinned = h.do(mrg.PinSnapshot("t")).body
    manifest = decode_manifest(pinned["path"], store.objects[pinned["path"]])
    listed = [segment.first_seq for segment in manifest.segments]
    assert listed[:2] == [1, 9] and manifest.cold_next_seq == pinned["cold_next_seq"] == 17
    directory = pinned["path"].rpartition("/")[0]
    assert all(f"{directory}/{segment.name}.data" in store.objects for segment in manifest.segments)
    assert h.seqs("t") == [1, 2, 3, 4, *range(10, 23)]


def erasing(h: Harness) -> None:
    h.checkpoint()
    h.checkpoint()
    h.send(c.Delete("t", seqs=[3], erase=True))
    h.append("t", numbered(15, 1)[0])
    h.checkpoint()


@fault(
    "disk",
    "a crash at any call to the cold tier while a record there is erased",
    "after the restart its bytes are in no file of either tier, and every other record is there",
)
@pytest.mark.parametrize("how", ["power", "kill"])
def test_an_erase_that_crashes_at_any_call_to_the_store_is_finished(how: str) -> None:
    h = filled(secret=3)
    before = len(h.cold.calls)  # type: ignore[union-attr]
    erasing(h)
    count = len(h.cold.calls) - before  # type: ignore[union-attr]
    for number in length.calls(count, each=6, shifted=how == "power"):
        store = ObjectStore()
        h = filled(store, secret=3)
        store.crash_at(number)
        with pytest.raises(SimulatedCrash):
            erasing(h)
        h.power_cut() if how == "power" else h.kill()
        h.open()
        h.send(c.Delete("t", seqs=[3], erase=True))
        h.rest()
        assert anywhere(h) == [], number
        assert h.rows("t")[:13] == records(1, 2, *range(4, 15)), number


@fault(
    "disk",
    "the cold tier is out of reach while a record there is erased",
    "429 with limit cold_tier: it is deleted, and its bytes go as soon as the tier is back, also after a restart",
)
@pytest.mark.parametrize("restart", [False, True])
def test_an_erase_without_the_store_is_put_off(restart: bool) -> None:
    store = ObjectStore()
    h = relocated(store, secret=3)
    store.is_down = True
    put_off = h.refused(c.Delete("t", seqs=[3], erase=True), EraseDeferred)
    assert put_off.detail["limit"] == "cold_tier"
    assert anywhere(h)
    assert h.engine.shard.state.read_only is None
    if restart:
        h.kill_and_open()
    store.is_down = False
    h.rest()
    h.pass_time(limits.COLD_PAUSE_MS_MAX)
    assert anywhere(h) == []
    assert h.rows("t") == records(1, 2, *range(4, 15))


@fault(
    "disk",
    "a start without the cold directory while a copy of a move that was not finished lies there",
    "an erase is 429 with limit cold_tier, and done by a start with it",
)
def test_an_erase_without_the_cold_directory_waits_for_copies_that_may_be_there() -> None:
    """The relocation was stopped between copy and flip: according to the hot tier the segment is hot."""
    store = ObjectStore()
    h = filled(store, secret=3)
    overwrite(h.disk, "cold-id", b"the same in both\n")
    h.engine.checkpoint()
    while not any(NEEDLE in data for data in store.objects.values()):
        h.run_job() if h.jobs else h.ask()
    h.kill()
    h.cold = None
    h.open()
    assert tiers(h)[0] == "hot"
    put_off = h.refused(c.Delete("t", seqs=[3], erase=True), EraseDeferred)
    assert put_off.detail["limit"] == "cold_tier"
    h.restart()
    h.rest()
    assert h.engine.shard.state.published["t"].erasing, "the erase is not finished"
    h.close()
    h.cold = store
    h.open()
    h.rest()
    h.pass_time(limits.COLD_PAUSE_MS_MAX)
    assert anywhere(h) == []
    assert h.rows("t") == records(1, 2, *range(4, 15))


def test_an_erase_in_a_directory_that_never_had_a_cold_tier_is_done_at_once() -> None:
    h = filled(secret=3)
    h.close()
    h.cold = None
    h.open()
    h.checkpoint()
    h.do(c.Delete("t", seqs=[3], erase=True))
    assert holders(h.disk, NEEDLE) == []


def test_an_erase_is_answered_at_once_while_the_store_is_given_time() -> None:
    store = ObjectStore()
    h = relocated(store, secret=3)
    store.is_down = True
    for seq in (3, 2):
        h.refused(c.Delete("t", seqs=[seq], erase=True), EraseDeferred)  # no time passes
    h.rest()
    assert len(h.engine.relocator._erases) == 2
    store.is_down = False
    h.do(c.Delete("t", seqs=[4], erase=True))
    h.pass_time(limits.COLD_PAUSE_MS_MAX)
    assert anywhere(h) == []
