"""Merges of cold segments: who may do what, what is believed of a job, and that no reader ever sees a difference.

Method: an engine on a SimDisk with a store that knows whole objects only, and a small job (tests/support/merger.py) that is honest,
late, doubled, dead, or wrong in one field at a time.
"""

from __future__ import annotations

import errno
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import length
from tests.support.engine_harness import FSYNC, Harness, append, rows_of
from tests.support.faults import fault
from tests.support.merge_rig import (
    CONFIG,
    GRACE_MS,
    NEEDLE,
    begun,
    check_tidy,
    commit,
    current,
    keys,
    merged,
    plan,
    seen,
    work,
)
from tests.support.stores import ObjectStore
from topics.engine import commands as c
from topics.engine import limits
from topics.engine import merge_commands as mrg
from topics.engine.cold_files import MOVE_KIND
from topics.engine.errors import (
    ColdStoreFailed,
    InputsChanged,
    LeaseLost,
    NoColdTier,
    OutputInvalid,
    PlanLeased,
    PlanNotFound,
    SnapshotNotFound,
    Throttled,
    TopicNotFound,
)
from topics.engine.files import HEADER_BYTES, header, with_digest, xxh
from topics.engine.manifest import Manifest, decode_manifest
from topics.engine.merge_check import Acceptance
from topics.engine.merges import NO_MERGES, Merged, MergedGroup
from topics.engine.plans import Parameters
from topics.engine.sealing import Sum
from topics.engine.segments import DEL_MAGIC, ROW, SUM_MAGIC, IndexFiles, parse_dict


def segments(h: Harness) -> list[tuple[int, int, int, str]]:
    log = h.engine.shard.published["t"]
    return [
        (chunk.meta.first_seq, chunk.meta.generation, chunk.count, chunk.meta.tier)
        for chunk in log.chunks
        if chunk.meta is not None
    ]


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
    assert len(h.cold.calls) == calls + 1, "what is done is not done again"  # type: ignore[union-attr]
    assert commit(h, again).body["state"] == "committed"


def test_other_parameters_make_another_plan_once_the_lease_has_ended() -> None:
    h = begun()
    body = plan(h)
    small = Parameters(target_bytes=600)
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
    assert commit(h, first).body == done, "it is the same plan, and it is done"
    assert seen(h) == before
    check_tidy(h)


def test_what_a_zombie_writes_after_the_end_is_collected() -> None:
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
    assert commit(h, body).body["state"] == "committed", "the lease does not end while it goes on"
    assert isinstance(h.replies[other], PlanLeased)


# ---- what readers see


STEP = st.sampled_from(
    ["delete", "plan", "work", "commit", "checkpoint", "restart", "kill", "append", "grace"]
)


@settings(max_examples=length.pick(short=12, long=200), deadline=None)
@given(st.lists(st.tuples(STEP, st.integers(1, 22)), max_size=14), st.sampled_from([300, 600, 1 << 20]))
def test_a_switch_never_changes_what_a_reader_sees(steps: list[tuple[str, int]], target: int) -> None:
    """Everything is read before and after each step but deletes and appends, which change what they say and nothing else."""
    h = begun()
    body: dict[str, Any] | None = None
    expected = seen(h)
    parameters = Parameters(target_bytes=target)
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
            if isinstance(answer, mrg.MergeAnswer):
                body = msgspec.to_builtins(answer.body) if answer.body["plan_id"] else None
            else:
                h.pass_time(60_001)
        elif step == "work" and body is not None:
            if h.cold.list(f"{body['staging']}/"):  # type: ignore[union-attr]
                work(h, body)
        elif step == "commit" and body is not None:
            answer = commit(h, body)
            assert isinstance(answer, mrg.MergeAnswer | LeaseLost | PlanNotFound | OutputInvalid), answer
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


def test_what_expires_while_a_job_works_is_no_error() -> None:
    """By the topic's TTL, by a record's own, and by a cap; the dead of the plan and of the commit differ."""
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
    assert left == rows[-len(left) :], "time may have gone on"
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


# ---- what is believed of a job


def spoil(h: Harness, body: dict[str, Any], what: str) -> None:
    """Make one thing wrong in the output, and everything else fit again."""
    store = h.cold
    assert isinstance(store, ObjectStore)
    stem = f"{body['staging']}/group-0.1"
    files = {suffix: store.objects[f"{stem}.{suffix}"] for suffix in ("data", "idx", "dict", "sum")}
    rows = np.frombuffer(files["idx"], dtype=ROW, offset=HEADER_BYTES).copy()
    tags, nodes, expiries = parse_dict("x", files["dict"])
    data = bytearray(files["data"])
    summary = msgspec.to_builtins(
        msgspec.msgpack.decode(files["sum"][HEADER_BYTES:-8], type=Sum), builtin_types=(bytes,)
    )
    sidecar = msgspec.json.decode(store.objects[f"{body['staging']}/group-0.json"])
    match what:
        case "payload":
            data[200] ^= 1
        case "ts":
            rows["ts"][3] += 1
        case "flags":
            rows["flags"][3] ^= 8
        case "size":
            rows["size"][3] += 1
        case "tag":
            rows["tag"][3] = rows["tag"][3] % len(tags) + 1
        case "node":
            rows["node"][3] = rows["node"][3] % len(nodes) + 1
        case "names":
            tags = tags[::-1]
        case "name twice":
            tags = [*tags, tags[0]]
        case "missing":
            length = int(rows["length"][5])
            start = int(rows["offset"][5])
            del data[start : start + length]
            for column in ("offset", "length", "flags", "tag", "node", "size"):
                rows[column][5] = 0
            rows["offset"][6:] -= length
            summary["live"] -= 1
            sidecar["live"] -= 1
        case "offset":
            rows["offset"][3] += 1
        case "expiry":
            expiries = np.array([(3, 99)], dtype=expiries.dtype)
        case "chain" | "origin":
            summary[what] = b"12345678"
        case "generation" | "first_seq" | "rows" | "ts_min" | "tag_names" | "live":
            summary[what] += 1
        case "more data":
            data += b"more"
        case "dead flag":
            rows["flags"][3] |= 128
        case "ghost":
            rows["size"][1] = 5  # of a row that is dead
    index = IndexFiles.of(rows, tags, nodes, expiries)
    files |= {"data": bytes(data), "idx": index.idx, "dict": index.names}
    if what != "digests":
        summary |= {
            "idx_digest": xxh(index.idx),
            "dict_digest": xxh(index.names),
            "blocks": [xxh(files["data"])],
            "dict_bytes": len(index.names),
        }
        summary["data_bytes"] = len(data) - (4 if what == "more data" else 0)
        sidecar |= {"data_bytes": summary["data_bytes"], "dict_bytes": len(index.names)}
    else:
        summary["blocks"] = [b"12345678"]
    if what == "name twice":
        summary["tag_names"] = sidecar["tag_names"] = len(tags)
    files["sum"] = with_digest(SUM_MAGIC, msgspec.msgpack.encode(summary))
    sidecar["sum_digest"] = files["sum"][-8:].hex()
    match what:
        case "torn sum":
            files["sum"] = files["sum"][:-3]
        case "another group":
            sidecar["group"] = 1
        case "a path":
            sidecar["attempt"] = "../../topics/x"
        case "no field":
            del sidecar["rows"]
        case "sum_digest":
            sidecar["sum_digest"] = "0" * 16
    for suffix, content in files.items():
        store.objects[f"{stem}.{suffix}"] = content
    if what in {"no data", "no idx", "no dict", "no sum"}:
        del store.objects[f"{stem}.{what[3:]}"]
    raw = b"{" if what == "no json" else msgspec.json.encode(sidecar)
    store.objects[f"{body['staging']}/group-0.json"] = raw
    if what == "no sidecar":
        del store.objects[f"{body['staging']}/group-0.json"]


WRONG = [
    "payload", "ts", "flags", "size", "tag", "node", "names", "name twice", "missing", "offset", "expiry", "chain", "origin",
    "generation", "first_seq", "rows", "ts_min", "tag_names", "live", "more data", "dead flag", "ghost", "digests", "torn sum",
    "another group", "a path", "no field", "sum_digest", "no data", "no idx", "no dict", "no sum", "no json", "no sidecar",
]  # fmt: skip


@fault(
    "segment",
    "what a job has made of segments is wrong in any one field, file or byte, with digests that fit",
    "422 that says what; nothing is published, and the job that does it again comes to its end",
)
@pytest.mark.parametrize("what", WRONG)
def test_an_output_that_is_wrong_is_refused(what: str) -> None:
    h = begun()
    h.do(c.Delete("t", seqs=[2]))
    body = plan(h)
    work(h, body)
    before = seen(h)
    spoil(h, body, what)
    refused = commit(h, body)
    assert isinstance(refused, OutputInvalid), refused
    assert refused.detail["group"] == 0
    assert refused.detail["reason"]
    assert segments(h)[0] == (1, 0, 4, "cold")
    h.rest()
    assert not [key for key in keys(h) if "-1." in key], "nothing of it is left in place"
    again = plan(h, lease=body["lease"])
    work(h, again, "2")
    assert commit(h, again).body["state"] == "committed"
    assert seen(h) == before
    check_tidy(h)


def test_spoiling_nothing_is_taken() -> None:
    h = begun()
    h.do(c.Delete("t", seqs=[2]))
    body = plan(h)
    work(h, body)
    spoil(h, body, "nothing")
    assert commit(h, body).body["state"] == "committed"


def test_an_output_with_what_the_plan_calls_dead_is_refused() -> None:
    h = begun()
    h.do(c.Delete("t", seqs=[2]))
    body = plan(h)
    honest = msgspec.to_builtins(body)
    for one in honest["groups"][0]["inputs"]:
        one["dead"] = None
    work(h, honest)
    refused = commit(h, body)
    assert isinstance(refused, OutputInvalid)
    assert "dead" in refused.detail["reason"]


@fault(
    "segment",
    "a segment of the cold tier has rotted when it is to be merged, whether the job notices or not",
    "its group is listed as failed and stays as it is; the others are published",
)
@pytest.mark.parametrize("noticed", [True, False])
def test_a_damaged_input_stays_and_is_told_of(noticed: bool) -> None:
    store = ObjectStore()
    h = begun(store)
    body = plan(h, parameters=Parameters(target_bytes=600))
    key = f"{h.topic_dir('t')}/seg-{5:016x}-0.data"
    if noticed:
        store.rot(key, 100)
    work(h, body)
    if not noticed:
        store.rot(key, 100)
        spoiled = bytearray(store.objects[f"{body['staging']}/group-0.1.data"])
        assert spoiled
    done = commit(h, body).body
    assert [group["group"] for group in done["groups"]] == [1]
    assert [(one["group"], one["segment"]) for one in done["failed"]] == [(0, f"seg-{5:016x}-0")]
    assert segments(h)[:3] == [(1, 0, 4, "cold"), (5, 0, 4, "cold"), (9, 1, 8, "cold")]
    assert plan(h, parameters=Parameters(target_bytes=600))["plan_id"] is None, "it is left alone from now on"
    assert {seq for seq in range(1, 23)} - set(h.seqs("t")) <= {5, 6, 7, 8}


def test_inputs_that_are_gone_leave_the_rest() -> None:
    """A segment has died as a whole while the job worked."""
    h = begun(config=msgspec.structs.replace(CONFIG, rewrite_dead_share=0.5))
    body = plan(h, parameters=Parameters(target_bytes=600))
    work(h, body)
    h.do(c.Delete("t", seqs=[5, 6, 7, 8]))
    for _ in range(4):
        h.checkpoint()
        h.rest()
    assert f"{h.topic_dir('t')}/seg-{5:016x}-0.data" in keys(h), "a plan has it as an input"
    before = seen(h)
    done = commit(h, body).body
    assert [one["reason"].partition(":")[0] for one in done["failed"]] == ["inputs_changed"]
    assert [group["group"] for group in done["groups"]] == [1]
    assert seen(h) == before
    check_tidy(h)


def refused_and_not_tidied_up(**options: Any) -> tuple[Harness, dict[str, Any]]:
    """An output was refused, and the store failed when what there was of it should have been removed."""
    store = ObjectStore()
    h = begun(store, **options)
    body = plan(h)
    work(h, body)
    store.rot(f"{body['staging']}/group-0.1.data", 20)
    failed: list[str] = []

    def fail_once(name: str, key: str) -> None:
        if name == "delete" and key.endswith("-1.sum") and not failed:
            failed.append(key)
            raise OSError(errno.EHOSTUNREACH, "the store is down", key)

    store.on_call = fail_once
    assert isinstance(commit(h, body), OutputInvalid)
    h.rest()
    assert failed and h.engine.consolidator._committer.doubtful
    return h, body


def test_what_a_refused_try_has_left_is_gone_before_the_next_one_is_published() -> None:
    """Both have the same name."""
    h, body = refused_and_not_tidied_up()
    before = seen(h)
    work(h, body, "2")
    assert commit(h, body).body["state"] == "committed"
    h.pass_time(60_000)
    assert seen(h) == before
    check_tidy(h)


def test_what_an_erase_writes_again_is_not_taken_for_what_a_refused_try_has_left() -> None:
    """The new generation of a segment has the name that the merge would have had."""
    h, _ = refused_and_not_tidied_up(secret=2)
    h.do(c.Delete("t", seqs=[2], erase=True))
    h.pass_time(60_000)
    assert h.seqs("t") == [1, *range(3, 23)]
    check_tidy(h)


def test_inputs_that_are_gone_go_with_a_plan_of_which_nothing_is_published() -> None:
    """One group has lost a segment, the other has a damaged one: nothing is retired, and still nothing stays for ever."""
    h = begun(config=msgspec.structs.replace(CONFIG, rewrite_dead_share=0.5))
    body = plan(h, parameters=Parameters(target_bytes=600))
    assert h.cold is not None
    for group in body["groups"]:
        failed = {"group": group["group"], "failed": "damaged", "segment": group["inputs"][0]["name"]}
        h.cold.put(f"{body['staging']}/group-{group['group']}.json", [msgspec.json.encode(failed)])
    h.do(c.Delete("t", seqs=[5, 6, 7, 8]))
    for _ in range(4):
        h.append("t", b'"on"')
        h.checkpoint()
    done = commit(h, body).body
    assert done["groups"] == [] and len(done["failed"]) == 2
    check_tidy(h)


def test_a_plan_of_which_nothing_is_left_is_refused() -> None:
    h = begun(config=msgspec.structs.replace(CONFIG, rewrite_dead_share=0.5))
    body = plan(h)
    work(h, body)
    h.do(c.Delete("t", seqs=[5, 6, 7, 8]))
    h.checkpoint()
    assert isinstance(commit(h, body), InputsChanged)
    assert isinstance(commit(h, body), PlanNotFound)
    check_tidy(h)


def test_a_topic_that_is_dropped_takes_its_plan_along() -> None:
    h = begun()
    body = plan(h)
    work(h, body)
    h.do(mrg.PinSnapshot("t"))
    (token,) = h.ask(mrg.CommitPlan("t", body["plan_id"], body["lease"]))
    h.do(c.DropTopic("t"))
    h.rest()
    assert isinstance(h.replies[token], TopicNotFound)
    assert keys(h) == []


# ---- manifests and snapshots


def listed(manifest: Manifest) -> list[str]:
    return [one.name for one in manifest.segments]


def test_a_segment_that_leaves_while_its_manifest_is_written_is_pinned_all_the_same() -> None:
    """The store is slow. Before the manifest is there, a segment that it lists has died, and no snapshot of the server names it."""
    h = begun(config=msgspec.structs.replace(CONFIG, rewrite_dead_share=0.5))
    (token,) = h.ask(mrg.PinSnapshot("t"))
    while not any(job.kind == MOVE_KIND for job in h.jobs):
        h.run_job()
    h.ask(c.Delete("t", seqs=[5, 6, 7, 8]))
    for i in range(200):
        if i % 40 == 0:
            h.ask(append("t", b'"on"'))
            h.engine.checkpoint()
        others = [job.kind for job in h.jobs if job.kind != MOVE_KIND]
        if others:
            h.run_job(others[0])
        else:
            h.ask()
    h.rest()
    assert (5, 0) not in [one[:2] for one in segments(h)]
    manifest = decode_manifest("m", h.cold.objects[h.replies[token].body["path"]])
    for one in manifest.segments:
        assert f"{h.topic_dir('t')}/{one.name}.data" in keys(h), one.name
    h.do(mrg.ReleaseSnapshot("t", h.replies[token].body["snapshot_id"]))
    check_tidy(h)


def test_a_move_that_comes_to_nothing_leaves_the_copy_of_an_earlier_one_that_is_pinned() -> None:
    """The server dies before a snapshot says that a segment has moved, so it moves again, and dies out on the way."""
    h = begun(moved=False)
    h.checkpoint()
    pinned = h.do(mrg.PinSnapshot("t", 500_000)).body
    h.kill_and_open()
    for _ in range(100):
        if h.engine.checkpointer.moving is not None:
            break
        if h.jobs:
            h.run_job()
        else:
            h.ask()
    assert h.engine.checkpointer.moving is not None and h.engine.checkpointer.moving.first_seq == 1
    h.ask(c.Delete("t", before_seq=5))
    h.engine.checkpoint()
    for _ in range(40):
        others = [job.kind for job in h.jobs if job.kind != MOVE_KIND]
        if others:
            h.run_job(others[0])
        else:
            h.ask()
    h.rest()
    for _ in range(3):
        h.append("t", b'"more"')
        h.checkpoint()
    assert (1, 0) not in [one[:2] for one in segments(h)]
    manifest = decode_manifest("m", h.cold.objects[pinned["path"]])
    assert listed(manifest)[0] == f"seg-{1:016x}-0"
    for one in manifest.segments:
        assert f"{h.topic_dir('t')}/{one.name}.data" in keys(h), one.name
    h.do(mrg.ReleaseSnapshot("t", pinned["snapshot_id"]))
    check_tidy(h)


def test_a_manifest_follows_every_change() -> None:
    h = begun(moved=False)
    assert not [key for key in keys(h) if "MANIFEST" in key]
    h.checkpoint()
    manifest, dead = current(h)
    assert listed(manifest) == [f"seg-{n:016x}-0" for n in (1, 5, 9, 13)]
    assert (manifest.number, manifest.cold_next_seq, manifest.head_seq, manifest.earliest_seq) == (
        1,
        17,
        22,
        1,
    )
    assert dead == {}
    h.do(c.Delete("t", seqs=[1, 2, 6]))
    merged(h)
    manifest, dead = current(h)
    assert listed(manifest) == [f"seg-{1:016x}-1"]
    assert (manifest.earliest_seq, [one.live for one in manifest.segments]) == (3, [13])
    assert len(manifest.retired) == 4
    assert len(manifest.plans) == 1
    h.do(c.Delete("t", seqs=[9]))
    h.do(mrg.PinSnapshot("t"))
    manifest, dead = current(h)
    assert {first: np.flatnonzero(mask).tolist() for first, mask in dead.items()} == {1: [8]}
    assert [one.live for one in manifest.segments] == [12]


def test_pinned_files_stay_until_the_pin_ends() -> None:
    h = begun()
    pinned = h.do(mrg.PinSnapshot("t", 500_000)).body
    assert (pinned["manifest"], pinned["cold_next_seq"], pinned["head_seq"]) == (2, 17, 22)
    before = set(keys(h))
    merged(h)
    h.do(c.Delete("t", before_seq=17))
    for _ in range(4):
        h.append("t", b'"more"')
        h.checkpoint()
        h.pass_time(2 * GRACE_MS)
    gone = before - set(keys(h))
    assert {key.rpartition("/")[2] for key in gone} <= {"MANIFEST-1"}
    h.kill_and_open()
    h.rest()
    assert {key.rpartition("/")[2] for key in before - set(keys(h))} <= {"MANIFEST-1"}
    renewed = h.do(mrg.RenewSnapshot("t", pinned["snapshot_id"], 900_000)).body
    assert renewed["expires_at_ms"] > pinned["expires_at_ms"]
    h.pass_time(600_000)
    assert {key.rpartition("/")[2] for key in before - set(keys(h))} <= {"MANIFEST-1"}
    h.pass_time(400_000)
    h.refused(mrg.RenewSnapshot("t", pinned["snapshot_id"]), SnapshotNotFound)
    check_tidy(h)


def test_a_snapshot_that_is_released_lets_go() -> None:
    h = begun()
    pinned = h.do(mrg.PinSnapshot("t")).body
    merged(h)
    for _ in range(3):
        h.append("t", b'"more"')
        h.checkpoint()
    h.pass_time(2 * GRACE_MS)
    old = f"{h.topic_dir('t')}/seg-{5:016x}-0.data"
    assert old in keys(h)
    assert h.do(mrg.ReleaseSnapshot("t", pinned["snapshot_id"])).body["released"]
    h.rest()
    assert old not in keys(h)
    h.refused(mrg.ReleaseSnapshot("t", pinned["snapshot_id"]), SnapshotNotFound)
    h.refused(mrg.ReleaseSnapshot("t", "0" * 16), SnapshotNotFound)


def test_an_empty_topic_can_be_pinned() -> None:
    h = Harness(CONFIG, cold=ObjectStore())
    h.put("t", FSYNC)
    body = h.do(mrg.PinSnapshot("t")).body
    assert (body["manifest"], body["cold_next_seq"], body["earliest_seq"], body["head_seq"]) == (1, 1, 1, 0)
    assert current(h)[0].segments == []


def test_only_the_newest_manifests_and_pinned_ones_are_kept() -> None:
    h = begun()
    first = h.do(mrg.PinSnapshot("t")).body
    for _ in range(5):
        body = h.do(mrg.PinSnapshot("t")).body
        h.do(mrg.ReleaseSnapshot("t", body["snapshot_id"]))
    numbers = sorted(int(key.rpartition("-")[2]) for key in keys(h) if "MANIFEST" in key)
    assert numbers == [first["manifest"], body["manifest"] - 1, body["manifest"]]


def test_committed_plans_are_remembered_up_to_a_bound() -> None:
    merges = NO_MERGES
    for i in range(100):
        group = MergedGroup(0, 1, 5, i, 10, 5, 4)
        merges = merges.with_plan(Merged(f"{i:016x}", i, 0, 0, [group], [[]]), 5)
    assert len(merges.committed) == limits.COMMITTED_KEPT
    assert [bool(one.groups) for one in merges.committed[-5:]] == [False, True, True, True, True]
    assert merges.find(f"{99:016x}") is merges.committed[-1]
    assert merges.find(f"{0:016x}") is None


# ---- names that are given twice


def test_an_erase_of_what_a_commit_has_put_into_place_keeps_its_segment() -> None:
    """What the erase writes has the name that the output would have had: it is not what is left of the commit."""
    store = ObjectStore()
    h = begun(store, secret=3)
    merged(h)
    h.do(c.Delete("t", seqs=[6]))
    body = plan(h, parameters=Parameters(min_garbage=0.01))
    work(h, body)
    rows = seen(h)[0]
    (token,) = h.ask(mrg.CommitPlan("t", body["plan_id"], body["lease"]))
    while not any(isinstance(getattr(job.work, "__self__", None), Acceptance) for job in h.jobs):
        h.run_job() if h.jobs else h.ask()
    (comparing,) = (job for job in h.jobs if isinstance(getattr(job.work, "__self__", None), Acceptance))
    comparing.run()  # on its thread, where it has come to its end when the erase comes
    h.jobs.remove(comparing)
    (erase,) = h.ask(c.Delete("t", seqs=[3], erase=True))
    h.rest()
    h._take(h.engine.finish(comparing))
    h.rest()
    assert isinstance(h.replies[token], InputsChanged)
    assert h.replies[erase].deleted == 1
    assert seen(h)[0] == [row for row in rows if row[0] != 3]
    assert [key for key, data in store.objects.items() if NEEDLE in data] == []
    h.kill_and_open()
    h.rest()
    assert seen(h)[0] == [row for row in rows if row[0] != 3]
    check_tidy(h)


def test_a_group_that_is_tried_again_is_not_taken_for_what_is_left_of_the_first_try() -> None:
    """Its first try meets a store that fails, the second is good, and the group behind it is refused; then all of it is done."""
    store = ObjectStore()
    h = begun(store)
    before = seen(h)
    body = plan(h, parameters=Parameters(target_bytes=700))
    assert len(body["groups"]) == 2
    work(h, body)
    output = f"{body['staging']}/group-1.1.data"
    good = store.objects[output]
    store.objects[output] = good[:-1]
    name = f"{h.topic_dir('t')}/seg-{body['groups'][0]['first_seq']:016x}-1.sum"
    fails = [1]

    def fail_once(call: str, key: str) -> None:
        if (call, key) == ("put", name) and fails:
            fails.pop()
            raise OSError(errno.EIO, "as planned")

    store.on_call = fail_once
    (first,) = h.ask(mrg.CommitPlan("t", body["plan_id"], body["lease"]))
    while first not in h.replies:
        h.run_job() if h.jobs else h.ask()
    assert isinstance(h.replies[first], ColdStoreFailed)
    (second,) = h.ask(mrg.CommitPlan("t", body["plan_id"], body["lease"]))
    while second not in h.replies:
        h.run_job() if h.jobs else h.ask()
    assert isinstance(h.replies[second], OutputInvalid)
    h.pass_time(limits.COLD_PAUSE_MS_MAX + 1)
    store.objects[output] = good
    again = plan(h, parameters=Parameters(target_bytes=700), lease=body["lease"])
    work(h, again)
    store.objects[output] = good
    assert len(commit(h, again).body["groups"]) == 2
    assert seen(h) == before
    h.kill_and_open()
    assert seen(h) == before
    check_tidy(h)


# ---- a plan that somebody else has written


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


@pytest.mark.parametrize("what", TAMPERED)
def test_a_plan_that_is_not_the_servers_own_is_thrown_away(what: str) -> None:
    """Staging is open to jobs, and a start reads plans there: none may lead an output over a segment, or end the worker."""
    store = ObjectStore()
    h = begun(store)
    before = seen(h)
    body = plan(h)
    work(h, body)
    key = f"{body['staging']}/plan.json"
    if TAMPERED[what] is None:
        store.objects[key] = b'{"topic": ' + b"[" * 100_000
    else:
        made = msgspec.json.decode(store.objects[key])
        TAMPERED[what](made)
        store.objects[key] = msgspec.json.encode(made)
    files = {
        name: data for name, data in store.objects.items() if "/seg-" in name and name.startswith("topics/")
    }
    h.kill_and_open()
    h.rest()
    h.refused(mrg.CommitPlan("t", body["plan_id"], body["lease"]), PlanNotFound)
    assert not [name for name in keys(h) if name.startswith("staging/")]
    assert {name: store.objects.get(name) for name in files} == files
    merged(h)
    assert seen(h) == before
    check_tidy(h)
