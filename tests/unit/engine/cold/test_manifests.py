"""Manifests of the cold tier and pinned snapshots: listed segments stay, through merges, relocations and erases.

Method: an engine on a SimDisk with a store of whole objects, and a small job (tests/support/merger.py) that merges.
"""

from __future__ import annotations

import msgspec
import numpy as np

from tests.support.engine_harness import FSYNC, Harness, append
from tests.support.merge_rig import (
    CONFIG,
    GRACE_MS,
    begun,
    check_tidy,
    current,
    keys,
    merged,
    segments,
)
from tests.support.stores import ObjectStore
from topics.api.errors import (
    SnapshotNotFound,
)
from topics.engine.commands import merges as mrg
from topics.engine.commands import topics as c
from topics.engine.storage.manifest import Manifest, decode_manifest
from topics.engine.storage.segment_store import COLD_IO_KIND


def listed(manifest: Manifest) -> list[str]:
    return [one.name for one in manifest.segments]


def test_a_segment_that_leaves_while_its_manifest_is_written_is_pinned_all_the_same() -> None:
    """The store is slow. Before the manifest is written, a segment that it lists has died, and no snapshot of the
    server names it.
    """
    h = begun(config=msgspec.structs.replace(CONFIG, rewrite_dead_share=0.5))
    (token,) = h.ask(mrg.PinSnapshot("t"))
    while not any(job.kind == COLD_IO_KIND for job in h.jobs):
        h.run_job()
    h.ask(c.Delete("t", seqs=[5, 6, 7, 8]))
    for i in range(200):
        if i % 40 == 0:
            h.ask(append("t", b'"on"'))
            h.engine.checkpoint()
        h.go_on_without(COLD_IO_KIND)
    h.rest()
    assert (5, 0) not in [one[:2] for one in segments(h)]
    manifest = decode_manifest("m", h.cold.objects[h.replies[token].body["path"]])
    for one in manifest.segments:
        assert f"{h.topic_dir('t')}/{one.name}.data" in keys(h), one.name
    h.do(mrg.ReleaseSnapshot("t", h.replies[token].body["snapshot_id"]))
    check_tidy(h)


def test_a_move_that_comes_to_nothing_leaves_the_copy_of_an_earlier_one_that_is_pinned() -> None:
    """The server dies before a snapshot says that a segment was relocated, so it is relocated again, and its records
    die meanwhile.
    """
    h = begun(moved=False)
    h.checkpoint()
    pinned = h.do(mrg.PinSnapshot("t", 500_000)).body
    h.kill_and_open()
    for _ in range(100):
        if h.engine.checkpointer.cold_job_chunk is not None:
            break
        if h.jobs:
            h.run_job()
        else:
            h.ask()
    assert (
        h.engine.checkpointer.cold_job_chunk is not None
        and h.engine.checkpointer.cold_job_chunk.first_seq == 1
    )
    h.ask(c.Delete("t", before_seq=5))
    h.engine.checkpoint()
    for _ in range(40):
        h.go_on_without(COLD_IO_KIND)
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
