"""A merge that is interrupted anywhere: at each call to either tier, by a crash, a power cut or a failure.

Goal: whatever interrupts a merge, readers see the same as before, the job that asks again finishes it, and nothing is
left over. Method: a plan, a job, a late delete and a commit on an engine with a SimDisk and a store. Each call is
interrupted in turn; then the job asks for the plan again, skips what it has done, and commits.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import length
from tests.support.engine_harness import Harness, lose
from tests.support.engine_harness import holders as hot_holders
from tests.support.faults import fault
from tests.support.merge_rig import NEEDLE, begun, check_tidy, commit, keys, plan, seen, work
from tests.support.sim_disk import SimDisk, SimulatedCrash
from tests.support.stores import ObjectStore
from topics.api.errors import EraseDeferred
from topics.engine.commands import merges as mrg
from topics.engine.commands import topics as c
from topics.engine.storage.segment_store import DiskSegmentStore


def begin(store: Any = None) -> tuple[Harness, dict[str, Any]]:
    """The job has done its work."""
    h = begun(store)
    h.do(c.Delete("t", seqs=[2]))
    body = plan(h)
    work(h, body)
    h.do(c.Delete("t", seqs=[6]))
    return h, body


def life(h: Harness, body: dict[str, Any]) -> None:
    """From the commit to the removal of the old files."""
    commit(h, body)
    h.checkpoint()
    h.pass_time(2000)
    h.checkpoint()
    h.pass_time(2000)


def finish(h: Harness) -> None:
    """The steps of a job whose server has restarted."""
    for _ in range(20):
        answer = h.send(mrg.PlanMerge("t"))
        if not isinstance(answer, mrg.MergeReply):
            h.pass_time(70_000)
            continue
        if answer.body["plan_id"] is None:
            return
        work(h, answer.body)
        commit(h, answer.body)
    raise AssertionError("never done")


def check(h: Harness, before: list[Any], note: object) -> None:
    assert seen(h) == before, note
    finish(h)
    assert seen(h) == before, note
    assert len(h.engine.shard.state.published["t"].chunks) == 3, (note, "merged")
    h.kill_and_open()
    assert seen(h) == before, note
    h.rest()
    check_tidy(h, note)


def cut(h: Harness, how: str) -> None:
    h.power_cut() if how == "power" else h.kill()
    h.open()


def test_without_a_crash() -> None:
    h, body = begin()
    before = seen(h)
    life(h, body)
    check(h, before, "none")


@fault(
    "disk",
    "the power fails or the process is killed at any call to the cold tier while a merge is committed",
    "readers see what they saw; the job asks again and ends it; nothing is left over",
)
@pytest.mark.parametrize("how", ["power", "kill"])
def test_a_crash_at_every_call_to_the_store(how: str) -> None:
    store = ObjectStore()
    h, body = begin(store)
    calls = len(store.calls)
    life(h, body)
    count = len(store.calls) - calls
    assert count > 30
    for number in length.calls(count, each=20, shifted=how == "power"):
        store = ObjectStore()
        h, body = begin(store)
        before = seen(h)
        h.sync()
        calls = len(store.calls)
        store.crash_at(number)
        with pytest.raises(SimulatedCrash):
            life(h, body)
        cut(h, how)
        check(h, before, number)


@fault(
    "disk",
    "the power fails or the process is killed at any call to the disk while a merge is committed",
    "readers see what they saw; the job asks again and ends it; nothing is left over",
)
@pytest.mark.parametrize("how", ["power", "kill"])
def test_a_crash_at_every_call_to_the_disk(how: str) -> None:
    h, body = begin()
    calls = h.disk.calls
    life(h, body)
    count = h.disk.calls - calls
    assert count > 100
    for number in length.calls(count, each=92, shifted=how == "power"):
        h, body = begin()
        before = seen(h)
        h.sync()
        h.disk.crash_at(number, midway=True)
        try:
            life(h, body)
        except SimulatedCrash:
            cut(h, how)
        check(h, before, number)


def test_a_crash_of_both_tiers_at_once() -> None:
    def build() -> tuple[Harness, dict[str, Any], SimDisk]:
        far = SimDisk(5)
        h, body = begin(DiskSegmentStore(far))
        return h, body, far

    h, body, far = build()
    calls = far.calls
    life(h, body)
    for number in length.calls(far.calls - calls, each=164):
        h, body, far = build()
        before = seen(h)
        far.crash_at(number, midway=True)
        with pytest.raises(SimulatedCrash):
            life(h, body)
        far.crash()
        h.cold = DiskSegmentStore(far)
        cut(h, "power")
        check(h, before, number)


@fault(
    "disk",
    "any call to the cold tier fails while a merge is committed",
    "503 and nothing is published, or it is published and the rest is done later; the next try comes to its end",
)
def test_a_failure_of_every_call_to_the_store() -> None:
    store = ObjectStore()
    h, body = begin(store)
    calls = len(store.calls)
    life(h, body)
    for number in length.calls(len(store.calls) - calls, each=20):
        store = ObjectStore()
        h, body = begin(store)
        before = seen(h)
        store.fail_at(number, errno.EIO)
        life(h, body)
        assert h.engine.shard.state.read_only is None, number
        check(h, before, number)


def test_a_failure_of_every_call_to_the_disk() -> None:
    """A full disk and a failing one: the shard may refuse to continue, and a restart recovers."""
    h, body = begin()
    calls = h.disk.calls
    life(h, body)
    for number in length.calls(h.disk.calls - calls, each=164):
        h, body = begin()
        before = seen(h)
        h.sync()
        h.disk.fail_at(number, errno.ENOSPC if number % 2 else errno.EIO)
        life(h, body)
        h.rest()
        assert seen(h) == before, number
        h.kill_and_open()
        check(h, before, number)


@pytest.mark.parametrize("moves", [1, 3])
def test_a_start_from_the_older_snapshot(moves: int) -> None:
    """The newest snapshot is gone: the merge is in the log or in the older snapshot. After one checkpoint the older
    one lists the inputs as hot, and some of their rows are in the log only.
    """
    for checkpoints in range(4):
        h = begun(moved=False)
        for _ in range(moves):
            h.checkpoint()
        body = plan(h)
        work(h, body)
        h.do(c.Delete("t", seqs=[6]))
        assert isinstance(commit(h, body), mrg.MergeReply)
        for _ in range(checkpoints):
            h.append("t", b'"more"')
            h.checkpoint()
        before = seen(h)
        h.kill()
        if len(h.snapshots()) > 1:
            lose(h.disk, h.snapshots()[-1])
        h.open()
        assert seen(h) == before, checkpoints
        assert commit(h, body).body["state"] == "committed", checkpoints
        h.rest()
        check_tidy(h, checkpoints)
        h.kill_and_open()
        assert len(seen(h)[0]) == len(before[0]) + 4


def test_an_erase_that_goes_on_after_a_start_knows_of_staging() -> None:
    """The first access to the store fails, the erase is tried, and there is a copy in the staging folder of a plan."""
    store = ObjectStore()
    h = begun(store, secret=3)
    work(h, plan(h))
    h.kill_and_open()
    store.is_down = True
    answer = h.send(c.Delete("t", seqs=[3], erase=True))
    assert isinstance(answer, EraseDeferred)
    store.is_down = False
    h.pass_time(70_000)
    assert holders(h) == []
    h.kill_and_open()
    h.rest()
    assert holders(h) == []


def test_a_new_generation_that_is_corrupt_leaves_the_old_one() -> None:
    """Between the commit and the next snapshot the index of the output is damaged."""
    h, body = begin()
    before = seen(h)
    assert isinstance(commit(h, body), mrg.MergeReply)
    h.kill()
    path = next(path for path in h.disk.paths() if path.endswith("-1.idx"))
    handle = h.disk.open(path)
    h.disk.write(handle, 40, b"\xff")
    h.disk.sync(handle)
    h.disk.close(handle)
    h.open()
    assert seen(h) == before
    h.rest()
    finish(h)
    assert seen(h) == before
    check_tidy(h)


def erase(h: Harness) -> None:
    h.send(c.Delete("t", seqs=[3], erase=True))
    h.rest()


STAGES: list[Callable[[Harness], Any]] = [
    lambda h: None,
    plan,
    lambda h: work(h, plan(h)),
    lambda h: (body := plan(h), work(h, body), commit(h, body)),
    lambda h: (body := plan(h), work(h, body), commit(h, body), h.checkpoint(), h.checkpoint()),
    lambda h: h.do(mrg.PinSnapshot("t")),
]


def staged(store: ObjectStore, stage: int) -> Harness:
    h = begun(store, secret=3)
    STAGES[stage](h)
    h.rest()
    return h


def holders(h: Harness) -> list[str]:
    assert isinstance(h.cold, ObjectStore)
    return hot_holders(h.disk, NEEDLE) + [key for key, data in h.cold.objects.items() if NEEDLE in data]


@fault(
    "disk",
    "a record is erased while its segment is planned, merged, retired or pinned, and the server crashes at any call to the cold tier",
    "its bytes are in no file of either tier, staging included, and every other record is there",
)
@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_an_erase_reaches_staging_and_what_is_retired(stage: int) -> None:
    store = ObjectStore()
    h = staged(store, stage)
    before = seen(h)[0]
    calls = len(store.calls)
    erase(h)
    count = len(store.calls) - calls
    assert holders(h) == []
    assert seen(h)[0] == [row for row in before if row[0] != 3]
    for number in length.calls(count, each=20):
        store = ObjectStore()
        h = staged(store, stage)
        before = seen(h)[0]
        store.crash_at(number)
        with pytest.raises(SimulatedCrash):
            erase(h)
        h.power_cut()
        h.open()
        erase(h)
        assert holders(h) == [], number
        assert seen(h)[0] == [row for row in before if row[0] != 3], number
        assert not [key for key in keys(h) if key.startswith("staging/")]


@fault(
    "disk",
    "a crash, and another one, before the checkpoint after a merge and an erase in what it made",
    "each start finds what the log tells of, though only the erased generation has all records",
)
@pytest.mark.parametrize("seq", [1, 5])
@pytest.mark.parametrize("are_gone", [False, True], ids=["", "the merged ones are gone"])
def test_an_erase_in_what_was_just_merged_and_crash_after_crash(seq: int, are_gone: bool) -> None:
    h, body = begin()
    commit(h, body)
    h.do(c.Delete("t", seqs=[seq], erase=True))
    before = seen(h)
    h.sync()
    for note in range(4):
        h.kill()
        for path in h.disk.paths():
            if are_gone and "/seg-0000000000000001-1." in path:
                h.disk.remove(path)
        h.open()
        assert seen(h) == before, note
    h.checkpoint()
    h.kill_and_open()
    assert seen(h) == before
    h.rest()


def test_a_commit_that_waits_for_its_sync_is_told_to_nobody() -> None:
    """Neither in a repeated commit nor in the list: a power cut may undo it."""
    h, body = begin()
    again = mrg.CommitPlan("t", body["plan_id"], body["lease"], wait_ms=0)
    (token,) = h.ask(mrg.CommitPlan("t", body["plan_id"], body["lease"]))
    log = h.engine.shard.state.published["t"]
    while log.merges.find(body["plan_id"]) is None:
        h.run_job() if h.jobs else h.ask()
    second, status = h.ask(again, mrg.GetMerges("t"))
    h.ask()
    assert h.replies[status].body["committed"] == []
    assert second not in h.replies or h.replies[second].body["state"] == "committing"
    assert token not in h.replies
    h.rest()
    assert h.replies[token].body["state"] == "committed"
    h.power_cut()
    h.open()
    assert h.do(again).body["state"] == "committed"
    assert h.do(mrg.GetMerges("t")).body["committed"] == [body["plan_id"]]
