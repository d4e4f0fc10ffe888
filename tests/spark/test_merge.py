"""Merging the segments of a group.

Goal: the output is a valid segment with exactly the live records; whatever is killed or fails, a sidecar only names complete files, and a rerun
resumes; damage in an input is reported and never copied. Method: real files, the engine's own checks of the output, and
failing system calls.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spark_pipeline.tasks import merge
from spark_pipeline.tasks.manifest import find_topics, meta_of
from spark_pipeline.tasks.merge import MergeTask, merge_group
from spark_pipeline.tasks.reading import Range, Wanted, read_slice, slices_of
from spark_pipeline.tasks.scrub import ScrubTask, scrub_segment
from spark_pipeline.tasks.segments import SegmentReader
from tests.support.cold_tier import ColdTier, Record, some_records
from topics.engine.storage.manifest import Segment
from topics.engine.storage.merge_plan_file import Sidecar, decode_sidecar
from topics.engine.storage.sealing import read_sum, verify
from topics.engine.storage.segments import segment_name
from topics.system.read_only_disk import ReadOnlyDisk


@pytest.fixture
def tier(tmp_path: Path) -> ColdTier:
    found = ColdTier(tmp_path / "cold")
    for count in (50, 1, 300, 2):
        found.add(some_records(count, found.next_seq), generation=len(found.segments))
    found.dead = {3, 51, 52, 53, 200, 353}
    found.publish()
    return found


def task_of(tier: ColdTier, **options: Any) -> MergeTask:
    staging = tier.root / "staging" / "plans" / "00aa"
    group = tier.group(staging, **options)
    return MergeTask(str(tier.root), str(staging.relative_to(tier.root)), f"{tier.topic_id:016x}", group)


def sidecar_of(task: MergeTask) -> Sidecar:
    found = decode_sidecar("", task.sidecar.read_bytes(), task.group.group)
    assert isinstance(found, Sidecar)
    return found


def taken_over(tier: ColdTier, task: MergeTask) -> Segment:
    """Link the files in and name them in the manifest, like a server, but without its checks."""
    said = sidecar_of(task)
    name = segment_name(task.group.first_seq, task.group.generation)
    for suffix in ("data", "idx", "dict", "sum"):
        source = task.staging_dir / f"group-{said.group}.{said.attempt}.{suffix}"
        if source.exists():
            os.link(source, tier.folder / f"{name}.{suffix}")
    fields = msgspec.structs.asdict(said) | {"name": name, "dead_bytes": 0}
    fields |= {"first_seq": task.group.first_seq, "generation": task.group.generation}
    segment = msgspec.convert(fields, Segment)
    names = {one.name for one in task.group.inputs}
    kept = [one for one in tier.segments if one.name not in names]
    tier.segments = sorted([*kept, segment], key=lambda one: one.first_seq)
    return segment


def records_of(tier: ColdTier) -> list[dict[str, Any]]:
    [topic] = find_topics(str(tier.root), tier.topic)
    wanted = Wanted(verify="record")
    return [
        row
        for part in slices_of(topic, Range())
        for batch in read_slice(part, wanted)
        for row in batch.to_pylist()
    ]


def test_the_output_has_exactly_the_live_records(tier: ColdTier) -> None:
    before = records_of(tier)
    task = task_of(tier)
    result = merge_group(task)
    assert (result.rows, result.live, result.failed) == (353, 347, "")
    assert result.bytes_out < result.bytes_in
    segment = taken_over(tier, task)
    tier.publish()
    assert records_of(tier) == before
    assert len(tier.segments) == 1
    # The engine's check and a scrub find no problem.
    assert verify(ReadOnlyDisk(), str(tier.folder), meta_of(segment), bytes.fromhex("11" * 8)) == []
    assert scrub_segment(ScrubTask("orders", task.topic_id, str(tier.folder), segment)).damage == []
    summary, _ = read_sum(ReadOnlyDisk(), str(tier.folder), segment.first_seq, segment.generation)
    assert (summary.origin.hex(), summary.live) == ("22" * 8, 347)
    ends = SegmentReader(str(tier.folder), segment, tier.topic_id).names()[2]
    assert {int(row) + 1: int(time) for row, time in ends.tolist()} == {
        seq: record.ts + record.ttl_ms for seq, record in tier.live.items() if record.ttl_ms
    }


def test_dead_rows_keep_their_time_and_nothing_else(tier: ColdTier) -> None:
    task = task_of(tier)
    merge_group(task)
    segment = taken_over(tier, task)
    rows = SegmentReader(str(tier.folder), segment, tier.topic_id).index()
    for seq in tier.dead:
        row = rows[seq - 1]
        assert int(row["ts"]) == tier.records[seq].ts
        assert not any(int(row[name]) for name in ("offset", "length", "flags", "tag", "node", "size"))


def test_nothing_alive_makes_a_segment_without_records(tier: ColdTier) -> None:
    tier.dead = set(tier.records)
    task = task_of(tier)
    assert merge_group(task).live == 0
    segment = taken_over(tier, task)
    assert verify(ReadOnlyDisk(), str(tier.folder), meta_of(segment), None) == []
    assert segment.dict_bytes == 0


def test_large_segments_keep_their_blocks(tmp_path: Path) -> None:
    tier = ColdTier(tmp_path / "cold")
    for _ in range(3):
        tier.add([Record(b'"%b"' % (b"%06d" % i * 200)) for i in range(1200)])
    tier.dead = set(range(1, 3600, 7)) | set(range(1500, 1900))
    tier.publish()
    before = records_of(tier)
    task = task_of(tier)
    merge_group(task)
    segment = taken_over(tier, task)
    tier.publish()
    assert segment.data_bytes > 3 << 20
    assert verify(ReadOnlyDisk(), str(tier.folder), meta_of(segment), None) == []
    assert records_of(tier) == before


# ── Reruns ────────────────────────────────────────────────────────────────────────────


def test_a_rerun_reuses_finished_outputs(tier: ColdTier) -> None:
    task = task_of(tier)
    merge_group(task)
    files = sorted(os.listdir(task.staging_dir))
    again = merge_group(task)
    assert again.resumed
    assert again.live == 347
    assert sorted(os.listdir(task.staging_dir)) == files


@pytest.mark.parametrize(
    ("suffix", "how"),
    [(suffix, how) for suffix in ("data", "idx", "dict", "sum") for how in ("gone", "short")]
    + [("sum", "other")],
)
def test_a_sidecar_without_its_files_is_no_result(tier: ColdTier, suffix: str, how: str) -> None:
    task = task_of(tier)
    merge_group(task)
    path = task.staging_dir / f"group-0.{sidecar_of(task).attempt}.{suffix}"
    if how == "gone":
        path.unlink()
    elif how == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:  # the contents of the other files are compared only by the server
        path.write_bytes(path.read_bytes()[:-9] + b"x" + path.read_bytes()[-8:])
    again = merge_group(task)
    assert not again.resumed
    taken_over(tier, task)
    tier.publish()
    assert len(records_of(tier)) == 347


@pytest.mark.parametrize("call", range(1, 9))
def test_a_call_that_fails_leaves_no_sidecar_and_a_rerun_is_whole(
    tier: ColdTier, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Syncs in order: .data, .idx, .dict, .sum, the folder, the sidecar, the folder. There is no eighth."""
    task = task_of(tier)
    calls = 0
    real = os.fsync

    def fsync(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(5, "Input/output error")
        real(fd)

    monkeypatch.setattr(merge.os, "fsync", fsync)
    if call <= 7:
        with pytest.raises(OSError, match="Input/output"):
            merge_group(task)
        assert call == 7 or not task.sidecar.exists()
        assert not list(task.staging_dir.glob("*.data"))
    else:
        merge_group(task)
        assert calls == 7
    monkeypatch.undo()
    assert merge_group(task).resumed == (call == 8)
    taken_over(tier, task)
    tier.publish()
    assert len(records_of(tier)) == 347


def test_two_at_once_leave_one_result(tier: ColdTier) -> None:
    """The later one writes its own files, and does not touch those that the sidecar names."""
    task = task_of(tier)
    late = merge._Merge(task)
    first = merge_group(task)
    assert not first.resumed
    late.run()
    taken_over(tier, task)
    tier.publish()
    assert len(records_of(tier)) == 347


# ── Damage ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("suffix", ["data", "idx", "dict", "sum"])
def test_damage_in_an_input_is_reported_and_not_copied(tier: ColdTier, suffix: str) -> None:
    task = task_of(tier)
    path = tier.folder / f"{tier.segments[2].name}.{suffix}"
    whole = path.read_bytes()
    path.write_bytes(whole[:-30] + bytes([whole[-30] ^ 1]) + whole[-29:])
    result = merge_group(task)
    assert result.segment == tier.segments[2].name
    assert f".{suffix}" in result.failed
    told = json.loads(task.sidecar.read_bytes())
    assert told == {"group": 0, "failed": result.failed, "segment": result.segment}
    assert not list(task.staging_dir.glob("*.data"))
    # Restored from a backup: the same plan succeeds.
    path.write_bytes(whole)
    assert not merge_group(task).failed


def test_a_missing_input_is_damage_and_a_missing_tier_is_not(tier: ColdTier) -> None:
    task = task_of(tier)
    (tier.folder / f"{tier.segments[2].name}.data").unlink()
    assert "No such file" in merge_group(task).failed
    os.rename(tier.folder, tier.folder.with_name("away"))
    with pytest.raises(FileNotFoundError):
        merge_group(task)


def test_corrupt_marks_are_not_treated_as_absent(tier: ColdTier) -> None:
    task = task_of(tier)
    path = task.staging_dir / f"{tier.segments[0].name}.del"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "marks" in merge_group(task).failed
