"""Merges of cold segments: the server's checks of outputs, and what happens to refused ones.

Method: an engine on a SimDisk with a store of whole objects, and a small job (tests/support/merger.py) that makes one
field wrong at a time, or tries again.
"""

from __future__ import annotations

import errno
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.engine_harness import Harness
from tests.support.faults import fault
from tests.support.merge_rig import (
    CONFIG,
    NEEDLE,
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
    InputsChanged,
    OutputInvalid,
    PlanNotFound,
)
from topics.engine.cold.merge.verify import OutputVerifier
from topics.engine.commands import merges as mrg
from topics.engine.commands import topics as c
from topics.engine.commands.merges import MergeParameters
from topics.engine.storage.files import HEADER_BYTES, with_digest, xxh
from topics.engine.storage.sealing import Sum
from topics.engine.storage.segments import ROW, SUM_MAGIC, IndexFiles, parse_dict


def spoil(h: Harness, body: dict[str, Any], what: str, attempt: str = "1") -> None:
    """Make one thing wrong in the output, and everything else consistent with it."""
    store = h.cold
    assert isinstance(store, ObjectStore)
    stem = f"{body['staging']}/group-0.{attempt}"
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
    index = IndexFiles.build(rows, tags, nodes, expiries)
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
def test_an_output_that_is_wrong_is_refused() -> None:
    """One after the other: a refused job gets a plan again, makes another mistake, and finally a correct output."""
    h = begun()
    h.do(c.Delete("t", seqs=[2]))
    body = plan(h)
    before = seen(h)
    for number, what in enumerate(WRONG):
        work(h, body, f"{number}")
        spoil(h, body, what, f"{number}")
        refused = commit(h, body)
        assert isinstance(refused, OutputInvalid), (what, refused)
        assert refused.detail["group"] == 0, what
        assert refused.detail["reason"], what
        assert segments(h)[0] == (1, 0, 4, "cold"), what
        h.rest()
        assert not [key for key in keys(h) if "-1." in key], f"{what}: parts of it are left in place"
        body = plan(h, lease=body["lease"])
    work(h, body)
    assert commit(h, body).body["state"] == "committed"
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
    "a segment of the cold tier is corrupt when it is to be merged, whether the job notices or not",
    "its group is listed as failed and stays as it is; the others are published",
)
@pytest.mark.parametrize("noticed", [True, False])
def test_a_damaged_input_stays_and_is_told_of(noticed: bool) -> None:
    store = ObjectStore()
    h = begun(store)
    body = plan(h, parameters=MergeParameters(target_bytes=600))
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
    assert plan(h, parameters=MergeParameters(target_bytes=600))["plan_id"] is None, (
        "it must be left alone from now on"
    )
    assert {seq for seq in range(1, 23)} - set(h.seqs("t")) <= {5, 6, 7, 8}


def test_inputs_that_are_gone_leave_the_rest() -> None:
    """All records of a segment have died while the job worked."""
    h = begun(config=msgspec.structs.replace(CONFIG, rewrite_dead_share=0.5))
    body = plan(h, parameters=MergeParameters(target_bytes=600))
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
    """An output was refused, and the store failed when the parts in place should have been removed."""
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
    assert failed and h.engine.merge_service._committer.unpublished
    return h, body


def test_files_of_a_refused_attempt_are_removed_before_the_next_is_published() -> None:
    """Both have the same name."""
    h, body = refused_and_not_tidied_up()
    before = seen(h)
    work(h, body, "2")
    assert commit(h, body).body["state"] == "committed"
    h.pass_time(60_000)
    assert seen(h) == before
    check_tidy(h)


def test_files_rewritten_by_an_erase_are_not_taken_for_a_refused_attempt() -> None:
    """The new generation of a segment has the name that the merge would have had."""
    h, _ = refused_and_not_tidied_up(secret=2)
    h.do(c.Delete("t", seqs=[2], erase=True))
    h.pass_time(60_000)
    assert h.seqs("t") == [1, *range(3, 23)]
    check_tidy(h)


def test_inputs_that_are_gone_go_with_a_plan_of_which_nothing_is_published() -> None:
    """One group has lost a segment, the other has a damaged one: nothing is retired, but nothing may stay for ever."""
    h = begun(config=msgspec.structs.replace(CONFIG, rewrite_dead_share=0.5))
    body = plan(h, parameters=MergeParameters(target_bytes=600))
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


# ---- names that are used twice


def test_an_erase_of_what_a_commit_has_put_into_place_keeps_its_segment() -> None:
    """The erase writes files with the name of the output: they are not leftovers of the commit."""
    store = ObjectStore()
    h = begun(store, secret=3)
    merged(h)
    h.do(c.Delete("t", seqs=[6]))
    body = plan(h, parameters=MergeParameters(min_garbage=0.01))
    work(h, body)
    rows = seen(h)[0]
    (token,) = h.ask(mrg.CommitPlan("t", body["plan_id"], body["lease"]))
    while not any(isinstance(getattr(job.work, "__self__", None), OutputVerifier) for job in h.jobs):
        h.run_job() if h.jobs else h.ask()
    (comparing,) = (job for job in h.jobs if isinstance(getattr(job.work, "__self__", None), OutputVerifier))
    comparing.run()  # on its thread, which finishes when the erase comes
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
    """The first attempt meets a store that fails, the second succeeds, and the next group is refused; then everything
    is done.
    """
    store = ObjectStore()
    h = begun(store)
    before = seen(h)
    body = plan(h, parameters=MergeParameters(target_bytes=700))
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
    again = plan(h, parameters=MergeParameters(target_bytes=700), lease=body["lease"])
    work(h, again)
    store.objects[output] = good
    assert len(commit(h, again).body["groups"]) == 2
    assert seen(h) == before
    h.kill_and_open()
    assert seen(h) == before
    check_tidy(h)
