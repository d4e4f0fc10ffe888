"""Scrubbing and statistics of segments: the results for files of known content."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from spark_pipeline.tasks.manifest import find_topics
from spark_pipeline.tasks.reading import Range, Slice, slices_of
from spark_pipeline.tasks.scrub import ScrubTask, scrub_segment
from spark_pipeline.tasks.statistics import SKETCH, Statistics, size_of_class, statistics_of
from tests.support.cold_tier import TS, ColdTier, Record, some_records


@pytest.fixture
def tier(tmp_path: Path) -> ColdTier:
    found = ColdTier(tmp_path / "cold")
    for count in (50, 300):
        found.add(some_records(count, found.next_seq))
    found.dead = {3, 51, 52, 200}
    found.publish()
    return found


def slices(tier: ColdTier) -> list[Slice]:
    [topic] = find_topics(str(tier.root), tier.topic)
    return slices_of(topic, Range())


def task_of(tier: ColdTier, number: int) -> ScrubTask:
    return ScrubTask("orders", f"{tier.topic_id:016x}", str(tier.folder), tier.segments[number])


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_a_sound_segment(tier: ColdTier) -> None:
    result = scrub_segment(task_of(tier, 1))
    assert (result.records, result.damage) == (300, [])
    assert result.bytes > tier.segments[1].data_bytes


def test_every_byte_of_every_file_counts(tmp_path: Path) -> None:
    tier = ColdTier(tmp_path / "cold")
    tier.add([Record(b'"a"', tag="t", node="n"), Record(b'"b"', ttl_ms=5)])
    for path in sorted(tier.folder.iterdir()):
        whole = path.read_bytes()
        for offset in range(len(whole)):
            flip(path, offset)
            result = scrub_segment(task_of(tier, 0))
            assert result.damage, f"{path.name} byte {offset}"
            path.write_bytes(whole)
    assert scrub_segment(task_of(tier, 0)).damage == []


def test_each_damaged_record_is_named(tier: ColdTier) -> None:
    path = tier.folder / f"{tier.segments[1].name}.data"
    for offset in (2000, 20_000):
        flip(path, offset)
    result = scrub_segment(task_of(tier, 1))
    assert len(result.damage) == 2
    assert result.records == 298
    assert all(one.first_seq == one.last_seq for one in result.damage)


def test_statistics_add_up(tier: ColdTier) -> None:
    total = Statistics()
    for part in slices(tier):
        total.add(statistics_of(part))
    live = tier.live
    assert (total.segments, total.rows, total.live, total.dead) == (2, 350, len(live), 4)
    assert total.tags == Counter(record.tag for record in live.values() if record.tag is not None)
    assert total.untagged == sum(record.tag is None for record in live.values())
    assert total.tag_count() == len(total.tags)
    assert sum(records for records, _ in total.hours.values()) == len(live)
    assert total.payload_bytes == sum(size for _, size in total.hours.values())
    assert (total.ts_min, total.ts_max) == (TS + 1, TS + 350)
    assert total.out_of_order == 0
    assert total.live_bytes + total.dead_bytes + 32 == total.data_bytes


def test_sizes_are_known_to_a_tenth(tmp_path: Path) -> None:
    tier = ColdTier(tmp_path / "cold")
    sizes = [0, 1, 2, 3, 100, 1000, 1024, 5000]
    tier.add([Record(b"x" * size, raw=True) for size in sizes])
    tier.publish()
    [part] = slices(tier)
    found = statistics_of(part)
    for rank, size in enumerate(sizes):
        told = found.size_percentile((rank + 1) / len(sizes))
        assert size <= told <= size * 1.1 + 1
    assert size_of_class(0) == 0


def test_many_tags_are_estimated(tmp_path: Path) -> None:
    tier = ColdTier(tmp_path / "cold")
    count = 3 * SKETCH
    tier.add([Record(b"1", tag=f"tag-{i}") for i in range(count)])
    tier.publish()
    [part] = slices(tier)
    found = statistics_of(part)
    found.add(statistics_of(part))
    assert abs(found.tag_count() - count) < 0.1 * count
