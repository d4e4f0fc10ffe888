"""Merges of cold segments: leases of plans, and that no reader ever sees a difference.

Method: an engine on a SimDisk with a store of whole objects, and a small job (tests/support/merger.py) that is
correct, late, duplicated or dead.
"""

from __future__ import annotations

import errno
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import length
from tests.support.engine_harness import FSYNC, Harness, append, rows_of
from tests.support.merge_rig import (
    CONFIG,
    GRACE_MS,
    begun,
    check_tidy,
    commit,
    keys,
    merged,
    plan,
    seen,
    segments,
    work,
)
from tests.support.stores import ObjectStore
from topics.api import limits
from topics.api.errors import (
    ColdStoreFailed,
    LeaseLost,
    NoColdTier,
    OutputInvalid,
    PlanLeased,
    PlanNotFound,
    ShardReadOnly,
    Throttled,
    TopicNotFound,
)
from topics.engine.commands import merges as mrg
from topics.engine.commands import topics as c
from topics.engine.commands.merges import MergeParameters
from topics.engine.storage.control import Merged, MergedGroup
from topics.engine.storage.files import header
from topics.engine.storage.segments import DEL_MAGIC
from topics.engine.topic.merges import NO_MERGES

# ---- plans and leases


def test_a_plan_lists_what_it_wants_and_a_commit_makes_one_of_several() -> None:
    h = begun()
    h.do(c.Delete("t", seqs=[2]))
    body = plan(h)
    (group,) = body["groups"]
    assert [one["name"] for one in group["inputs"]] == [f"seg-{n:016x}-0" for n in (1, 5, 9, 13)]
    assert (group["first_seq"], group["next_seq"], group["generation"]) == (1, 17, 1)
    assert group["inputs"][0]["dead"] == f"{body['staging']}/seg-{1:016x}-0.del"
    assert group["inputs"][0]["live"] == 3
    assert group["inputs"][1]["dead"] is None
    assert h.cold.objects[group["inputs"][0]["dead"]].startswith(header(DEL_MAGIC, 2))  # type: ignore[union-attr]
    before = seen(h)
    work(h, body)
    done = commit(h, body).body
    assert done["groups"] == [
        {"group": 0, "name": f"seg-{1:016x}-1", "first_seq": 1, "next_seq": 17, "rows": 16, "live": 15,
         "bytes_in": sum(one["data_bytes"] for one in group["inputs"]), "bytes_out": done["groups"][0]["bytes_out"]}
    ]  # fmt: skip
    assert done["groups"][0]["bytes_out"] < done["groups"][0]["bytes_in"]
    assert segments(h) == [(1, 1, 16, "cold"), (17, 0, 4, "hot"), (21, 0, 2, "hot")]
    assert seen(h) == before
    assert plan(h) == {"topic": "t", "plan_id": None, "groups": []}
    check_tidy(h)


def test_asking_again_gives_the_same_plan_also_after_a_restart() -> None:
    h = begun()
    body = plan(h)
    assert plan(h, lease=body["lease"]) == body
    h.pass_time(60_001)
    other = plan(h)
    assert other["lease"] != body["lease"]
    assert other | {"lease": ""} == body | {"lease": ""}
    h.kill_and_open()
    h.rest()
    after = plan(h)
    assert after | {"lease": ""} == body | {"lease": ""}
    work(h, after)
    h.restart()
    assert isinstance(h.send(mrg.CommitPlan("t", body["plan_id"], after["lease"])), LeaseLost)
    again = plan(h)
    calls = len(h.cold.calls)  # type: ignore[union-attr]
    work(h, again)
    assert len(h.cold.calls) == calls + 1, "finished work must not be repeated"  # type: ignore[union-attr]
    assert commit(h, again).body["state"] == "committed"


def test_other_parameters_make_another_plan_once_the_lease_has_ended() -> None:
    h = begun()
    body = plan(h)
    small = MergeParameters(target_bytes=600)
    assert h.refused(mrg.PlanMerge("t", small), PlanLeased).detail["retry_after_ms"] == 60_000
    h.pass_time(60_001)
    other = plan(h, parameters=small)
    assert other["plan_id"] != body["plan_id"]
    assert [len(group["inputs"]) for group in other["groups"]] == [2, 2]
    h.rest()
    assert not [key for key in keys(h) if body["plan_id"] in key]
    work(h, other)
    assert len(commit(h, other).body["groups"]) == 2
    assert segments(h)[:2] == [(1, 1, 8, "cold"), (9, 1, 8, "cold")]


def test_a_lease_is_renewed_ends_and_is_taken_over() -> None:
    h = begun()
    body = plan(h, lease_ms=5000)
    h.pass_time(4000)
    assert h.do(mrg.RenewPlan("t", body["plan_id"], body["lease"])).body == {"lease_ms": 5000}
    h.pass_time(4000)
    h.refused(mrg.PlanMerge("t"), PlanLeased)
    h.refused(mrg.RenewPlan("t", body["plan_id"], "wrong"), LeaseLost)
    h.refused(mrg.RenewPlan("t", "0" * 16, body["lease"]), PlanNotFound)
    h.pass_time(1001)
    h.refused(mrg.RenewPlan("t", body["plan_id"], body["lease"]), LeaseLost)
    work(h, body)
    assert isinstance(commit(h, body), LeaseLost)
    state = h.do(mrg.GetMerges("t")).body
    assert state["plan"]["leased_until_ms"] is None
    assert commit(h, plan(h)).body["state"] == "committed"


def test_a_zombie_with_an_old_lease_changes_nothing() -> None:
    """Two jobs have done the same work; the second one to commit finds the plan done, or gone."""
    h = begun()
    first = plan(h, lease_ms=1000)
    work(h, first)
    h.pass_time(1001)
    second = plan(h)
    before = seen(h)
    assert isinstance(commit(h, first), LeaseLost)
    done = commit(h, second).body
    h.rest()
    assert commit(h, first).body == done, "the same plan, now committed"
    assert seen(h) == before
    check_tidy(h)


def test_files_a_zombie_job_writes_after_the_end_are_collected() -> None:
    h = begun()
    body = plan(h)
    work(h, body)
    commit(h, body)
    h.rest()
    h.cold.objects[f"{body['staging']}/group-0.late.data"] = b"late"  # type: ignore[union-attr]
    h.kill_and_open()
    h.rest()
    assert not [key for key in keys(h) if key.startswith("staging/")]


def test_an_abandoned_plan_leaves_nothing() -> None:
    h = begun()
    body = plan(h)
    work(h, body)
    h.refused(mrg.AbandonPlan("t", body["plan_id"], "wrong"), LeaseLost)
    assert h.do(mrg.AbandonPlan("t", body["plan_id"], body["lease"])).body["state"] == "abandoned"
    assert not [key for key in keys(h) if key.startswith("staging/")]
    assert isinstance(commit(h, body), PlanNotFound)
    check_tidy(h)


def test_a_plan_that_nobody_has_is_forgotten_in_the_end() -> None:
    h = begun(config=msgspec.structs.replace(CONFIG, plan_ttl_ms=1_000_000))
    body = plan(h)
    h.pass_time(1_050_000)
    assert [key for key in keys(h) if key.startswith("staging/")]
    h.pass_time(20_000)
    assert not [key for key in keys(h) if key.startswith("staging/")]
    assert isinstance(commit(h, body), PlanNotFound)


def test_without_a_cold_tier_or_a_topic() -> None:
    h = Harness(CONFIG)
    h.put("t", FSYNC)
    for command in (mrg.PlanMerge("t"), mrg.GetMerges("t"), mrg.PinSnapshot("t")):
        h.refused(command, NoColdTier)
    h = begun()
    h.refused(mrg.PlanMerge("none"), TopicNotFound)
    h.refused(mrg.CommitPlan("none", "x", "y"), TopicNotFound)
    h.put("small", FSYNC)
    assert h.do(mrg.PlanMerge("small")).body["plan_id"] is None


def test_only_so_many_calls_wait() -> None:
    store = ObjectStore()
    h = begun(store)
    h.restart()
    tokens = h.ask(*[mrg.PinSnapshot("t") for _ in range(limits.MERGE_REQUESTS_MAX + 1)])
    assert isinstance(h.replies[tokens[-1]], Throttled)
    assert h.replies[tokens[-1]].detail["limit"] == "consolidation"
    h.rest()
    refused = [h.replies[token] for token in tokens[limits.SNAPSHOTS_MAX : -1]]
    assert {reply.detail["limit"] for reply in refused} == {"snapshots"}


def test_a_store_that_is_down_is_a_503_and_nothing_more() -> None:
    store = ObjectStore()
    h = begun(store)
    body = plan(h)
    work(h, body)
    store.is_down = True
    assert isinstance(commit(h, body), ColdStoreFailed)
    h.refused(mrg.PinSnapshot("t"), ColdStoreFailed)
    h.restart()
    h.refused(mrg.PlanMerge("t"), ColdStoreFailed)
    store.is_down = False
    h.pass_time(limits.COLD_PAUSE_MS_MAX)
    assert commit(h, plan(h)).body["state"] == "committed"


def test_a_commit_that_takes_longer_says_how_far_it_is() -> None:
    h = begun()
    body = plan(h)
    work(h, body)
    (token,) = h.ask(mrg.CommitPlan("t", body["plan_id"], body["lease"], wait_ms=500))
    while not any(job.kind == "cold_move" for job in h.jobs):
        h.run_job() if h.jobs else h.ask()
    moves = [job for job in h.jobs if job.kind == "cold_move"]
    for job in moves:
        h.jobs.remove(job)
    h.clock.advance(500)
    h.ask()
    answer = h.replies[token]
    assert (answer.is_final, answer.body["state"], answer.body["progress"]) == (False, "committing", 0.0)
    assert h.do(mrg.GetMerges("t")).body["plan"]["state"] == "committing"
    h.pass_time(100_000)
    (other,) = h.ask(mrg.PlanMerge("t"))
    h.jobs += moves
    assert commit(h, body).body["state"] == "committed", "the lease must not end during the commit"
    assert isinstance(h.replies[other], PlanLeased)


def test_a_commit_whose_log_entry_fails_is_not_reported_as_done_when_it_is_repeated() -> None:
    in_memory = 0
    for call in range(1, 8):
        h = begun()
        body = plan(h)
        work(h, body)
        h.disk.fail_at(call, errno.EIO, of="sync")
        if not isinstance(commit(h, body), ShardReadOnly):
            continue
        in_memory += h.engine.shard.state.published["t"].merges.find(body["plan_id"]) is not None
        again = commit(h, body)
        assert isinstance(again, ShardReadOnly), again
        assert body["plan_id"] not in h.do(mrg.GetMerges("t")).body["committed"]
    assert in_memory, "no sync failed while the merged segment was already in use"


@pytest.mark.parametrize("jobs", range(10))
def test_a_topic_that_is_dropped_takes_its_plan_along(jobs: int) -> None:
    """Its files on the hot tier are removed first, while the outputs are still being checked."""
    h = begun()
    body = plan(h)
    work(h, body)
    h.do(mrg.PinSnapshot("t"))
    (token,) = h.ask(mrg.CommitPlan("t", body["plan_id"], body["lease"], wait_ms=10_000))
    for _ in range(jobs):
        h.run_job() if h.jobs else h.ask()
    h.ask(c.DropTopic("t"))
    while others := [job.kind for job in h.jobs if job.kind != "cold_move"]:
        h.run_job(others[0])
        h.ask()
    h.rest()
    answer = h.replies[token]
    assert isinstance(answer, TopicNotFound) or (jobs and answer.body["state"] == "committed"), answer
    assert keys(h) == []


def test_committed_plans_are_remembered_up_to_a_bound() -> None:
    merges = NO_MERGES
    for i in range(100):
        group = MergedGroup(0, 1, 5, i, 10, 5, 4)
        merges = merges.with_plan(Merged(f"{i:016x}", i, 0, 0, [group], [[]]), 5)
    assert len(merges.committed) == limits.COMMITTED_KEPT
    assert [bool(one.groups) for one in merges.committed[-5:]] == [False, True, True, True, True]
    assert merges.find(f"{99:016x}") is merges.committed[-1]
    assert merges.find(f"{0:016x}") is None


# ---- plan files of unknown origin


TAMPERED: dict[str, Any] = {
    "generation": lambda plan: plan["groups"][0].update(generation=0),
    "chain": lambda plan: plan["groups"][0].update(chain="no hex at all!!!"),
    "origin": lambda plan: plan["groups"][0].update(origin=""),
    "next_seq": lambda plan: plan["groups"][0].update(next_seq=1 << 70),
    "number": lambda plan: plan["groups"][0].update(group=5),
    "no inputs": lambda plan: plan["groups"][0].update(inputs=[]),
    "an input's rows": lambda plan: plan["groups"][0]["inputs"][0].update(rows=-4),
    "an input's name": lambda plan: plan["groups"][0]["inputs"][0].update(name="../../x"),
    "marks": lambda plan: plan["groups"][0]["inputs"][0].update(dead="../../../etc/passwd"),
    "topic": lambda plan: plan.update(topic_id="-1"),
    "staging": lambda plan: plan.update(staging="topics"),
    "epoch": lambda plan: plan.update(delete_epoch=7),
    "words": lambda plan: plan.update(groups="many"),
    "nested": None,
}


def test_a_plan_that_is_not_the_servers_own_is_thrown_away() -> None:
    """Jobs can write to staging, and a start reads plans there: no such file may put an output over a segment, or
    stop the worker.
    """
    store = ObjectStore()
    h = begun(store)
    before = seen(h)
    for what, tamper in TAMPERED.items():
        body = plan(h)
        work(h, body)
        key = f"{body['staging']}/plan.json"
        if tamper is None:
            store.objects[key] = b'{"topic": ' + b"[" * 100_000
        else:
            made = msgspec.json.decode(store.objects[key])
            tamper(made)
            store.objects[key] = msgspec.json.encode(made)
        files = {
            name: data
            for name, data in store.objects.items()
            if "/seg-" in name and name.startswith("topics/")
        }
        h.kill_and_open()
        h.rest()
        h.refused(mrg.CommitPlan("t", body["plan_id"], body["lease"]), PlanNotFound)
        assert not [name for name in keys(h) if name.startswith("staging/")], what
        assert {name: store.objects.get(name) for name in files} == files, what
    merged(h)
    assert seen(h) == before
    check_tidy(h)


# ---- what readers see


STEP = st.sampled_from(
    ["delete", "plan", "work", "commit", "checkpoint", "restart", "kill", "append", "grace"]
)


@settings(max_examples=length.pick(short=4, long=200), deadline=None)
@given(st.lists(st.tuples(STEP, st.integers(1, 22)), max_size=14), st.sampled_from([300, 600, 1 << 20]))
def test_a_switch_never_changes_what_a_reader_sees(steps: list[tuple[str, int]], target: int) -> None:
    """Everything is read before and after each step except deletes and appends, which change the result, and nothing
    else may.
    """
    h = begun()
    body: dict[str, Any] | None = None
    expected = seen(h)
    parameters = MergeParameters(target_bytes=target)
    for step, number in [*steps, ("plan", 0), ("work", 0), ("commit", 0), ("kill", 0)]:
        if step == "delete":
            h.do(c.Delete("t", seqs=[number, number + 7]))
            expected = [[row for row in expected[0] if row[0] not in (number, number + 7)], *seen(h)[1:]]
        elif step == "append":
            h.append("t", b'"more"')
            expected = [[*expected[0], [h.state("t").head_seq, b'"more"']], *seen(h)[1:]]
        elif step == "plan":
            lease = body["lease"] if body else ""
            answer = h.send(mrg.PlanMerge("t", parameters, lease=lease))
            if isinstance(answer, mrg.MergeReply):
                body = msgspec.to_builtins(answer.body) if answer.body["plan_id"] else None
            else:
                h.pass_time(60_001)
        elif step == "work" and body is not None:
            if h.cold.list(f"{body['staging']}/"):  # type: ignore[union-attr]
                work(h, body)
        elif step == "commit" and body is not None:
            answer = commit(h, body)
            assert isinstance(answer, mrg.MergeReply | LeaseLost | PlanNotFound | OutputInvalid), answer
        elif step == "checkpoint":
            h.checkpoint()
        elif step == "restart":
            h.restart()
        elif step == "kill":
            h.kill_and_open()
        elif step == "grace":
            h.pass_time(GRACE_MS + 1)
        assert seen(h) == expected, step
    h.rest()
    check_tidy(h)


def test_a_read_that_waits_for_blocks_of_the_old_segment_gets_its_records() -> None:
    h = begun(config=msgspec.structs.replace(CONFIG, cold_cache_bytes=0))
    rows = h.rows("t")
    body = plan(h)
    work(h, body)
    (token,) = h.ask(c.Diff("t", 0, limit=8))
    reads = [job for job in h.jobs if job.kind == "cold_read"]
    assert reads
    for job in reads:
        h.jobs.remove(job)
    assert commit(h, body).body["state"] == "committed"
    h.jobs += reads
    h.rest()
    assert rows_of(h.replies[token]) == rows[:8]


def test_records_that_expire_during_a_job_are_no_error() -> None:
    """By the topic's TTL, by a record's own, and by a cap; the dead records of the plan and of the commit differ."""
    h = Harness(CONFIG, cold=ObjectStore())
    h.put("t", msgspec.structs.replace(FSYNC, ttl_ms=10_000))
    for seq in range(1, 23):
        h.do(append("t", b'"%d"' % seq, ttls_ms=[5000 if seq % 5 == 0 else 0]))
        h.clock.advance(100)
    for _ in range(3):
        h.checkpoint()
    body = plan(h)
    work(h, body)
    h.pass_time(6000)
    before = seen(h)
    assert 5 not in h.seqs("t")
    assert commit(h, body).body["state"] == "committed"
    assert seen(h) == before
    h.kill_and_open()
    assert seen(h) == before
    h.pass_time(2500)
    assert h.seqs("t")[0] > 3
    body = plan(h)
    work(h, body)
    assert commit(h, body).body["state"] == "committed"
    rows = h.rows("t")
    h.kill_and_open()
    left = h.rows("t")
    assert left == rows[-len(left) :], "time may have passed"
    assert len(left) > 5


def test_expiries_of_records_are_kept_by_a_merge() -> None:
    h = Harness(CONFIG, cold=ObjectStore())
    h.put("t", FSYNC)
    for seq in range(1, 23):
        h.do(append("t", b'"%d"' % seq, ttls_ms=[50_000 if seq % 3 == 0 else 0]))
    for _ in range(3):
        h.checkpoint()
    merged(h)
    h.restart()
    assert len(h.seqs("t")) == 22
    h.pass_time(60_000)
    assert h.seqs("t") == [seq for seq in range(1, 23) if seq % 3]
