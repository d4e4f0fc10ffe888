"""Segments of the cold tier as Arrow batches.

Goal: every kind of record is read as it was written, dead ones are not, and damage is reported or skipped as requested. Method: segments of the engine's own
writer, read in whole and in parts, with changed bytes where a test says so.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from spark_pipeline.tasks.manifest import FilesGone, NoManifest, find_topics, read_current
from spark_pipeline.tasks.reading import Range, Slice, Wanted, pack, read_slice, slices_of
from spark_pipeline.tasks.segments import Damage
from tests.support.cold_tier import TS, ColdTier, Record, some_records
from topics.api.errors import Corrupt
from topics.engine.storage.frames import DELETED, RAW

ALL = Wanted()


@pytest.fixture
def tier(tmp_path: Path) -> ColdTier:
    found = ColdTier(tmp_path / "cold")
    for count in (50, 1, 300):
        found.add(some_records(count, found.next_seq))
    found.dead = {3, 51, 52, 200}
    found.publish()
    return found


def rows_of(tier: ColdTier, wanted: Wanted = ALL, damage: list[Damage] | None = None) -> list[dict[str, Any]]:
    [topic] = find_topics(str(tier.root), tier.topic)
    found: list[dict[str, Any]] = []
    for part in slices_of(topic, wanted.range):
        for batch in read_slice(part, wanted, damage):
            assert batch.schema == wanted.schema()
            found += batch.to_pylist()
    return found


def expected(tier: ColdTier, seqs: list[int]) -> list[tuple[Any, ...]]:
    found = []
    for seq in seqs:
        record = tier.records[seq]
        found.append((seq, record.ts, record.tag, record.node, record.data, record.meta.decode() or None))
    return found


def shown(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (row["seq"], round(row["ts"].timestamp() * 1000), row["tag"], row["node"], row["data"], row["meta"])
        for row in rows
    ]


def test_every_kind_of_record_comes_out_as_it_was_written(tier: ColdTier) -> None:
    rows = rows_of(tier)
    assert shown(rows) == expected(tier, sorted(tier.live))
    assert {row["topic"] for row in rows} == {"orders"}
    assert all(bool(row["flags"] & RAW) == tier.records[row["seq"]].raw for row in rows)


@pytest.mark.parametrize("verify", ["none", "block", "record"])
def test_all_levels_of_verification(tier: ColdTier, verify: Any) -> None:
    assert shown(rows_of(tier, Wanted(verify=verify))) == expected(tier, sorted(tier.live))


def test_dead_records_are_shown_when_asked_for_and_marked(tier: ColdTier) -> None:
    rows = rows_of(tier, Wanted(include_deleted=True))
    assert [row["seq"] for row in rows] == sorted(tier.records)
    assert {row["seq"] for row in rows if row["flags"] & DELETED} == tier.dead


def test_as_text_bytes_are_base64(tier: ColdTier) -> None:
    for row in rows_of(tier, Wanted(as_text=True)):
        record = tier.records[row["seq"]]
        text = f'"{base64.b64encode(record.data).decode()}"' if record.raw else record.data.decode()
        assert row["data"] == text


def test_columns_of_the_index_need_no_records(tier: ColdTier) -> None:
    for path in tier.folder.glob("*.data"):
        path.unlink()
    rows = rows_of(tier, Wanted(columns=("tag", "seq")))
    assert [(row["seq"], row["tag"]) for row in rows] == [
        (seq, tier.live[seq].tag) for seq in sorted(tier.live)
    ]


@pytest.mark.parametrize(
    "span",
    [
        Range(start_seq=40, end_seq=60),
        Range(start_seq=0, end_seq=1),
        Range(start_ts=TS + 45, end_ts=TS + 300),
        Range(start_seq=10, end_ts=TS + 20),
        Range(start_seq=10_000),
    ],
)
def test_ranges_are_half_open(tier: ColdTier, span: Range) -> None:
    seqs = [
        seq
        for seq, record in sorted(tier.live.items())
        if span.start_seq <= seq < span.end_seq and span.start_ts <= record.ts < span.end_ts
    ]
    assert [row["seq"] for row in rows_of(tier, Wanted(range=span))] == seqs


def test_segments_outside_of_the_range_are_not_touched(tier: ColdTier) -> None:
    for path in tier.folder.glob("seg-0000000000000034-0.*"):
        path.unlink()
    [topic] = find_topics(str(tier.root), "orders")
    assert [part.segment.first_seq for part in slices_of(topic, Range(end_seq=40))] == [1]


def test_missing_files_are_reported(tier: ColdTier) -> None:
    (tier.folder / f"{tier.segments[2].name}.data").unlink()
    with pytest.raises(FilesGone, match="Run the query again"):
        rows_of(tier)
    # And it is not damage that may be skipped: the records are most likely in another segment by now.
    [topic] = find_topics(str(tier.root), "orders")
    with pytest.raises(FilesGone):
        [list(read_slice(part, Wanted(), [])) for part in slices_of(topic, Range())]


# ── Parts ─────────────────────────────────────────────────────────────────────────────


def test_small_segments_go_together_and_large_ones_are_split(tier: ColdTier) -> None:
    [topic] = find_topics(str(tier.root), "orders")
    slices = slices_of(topic, Range())
    total = sum(part.data_bytes for part in slices)
    for bytes_max, parts_min in ((1 << 30, 1), (1 << 30, 2), (total // 5, 1), (1, 1)):
        parts = pack(slices, bytes_max=bytes_max, parts_min=parts_min)
        assert len(parts) >= parts_min
        seqs = [row["seq"] for part in parts for one in part for row in _read(one)]
        assert seqs == sorted(tier.live)
        if bytes_max > 1:
            assert all(sum(one.data_bytes for one in part) <= bytes_max * 5 // 4 for part in parts)
    assert len(pack(slices, bytes_max=1 << 30, parts_min=1)) == 1


def _read(part: Slice) -> list[dict[str, Any]]:
    return [row for batch in read_slice(part, Wanted(columns=("seq", "data"))) for row in batch.to_pylist()]


def test_nothing_to_read_gives_no_parts(tmp_path: Path) -> None:
    tier = ColdTier(tmp_path / "cold")
    tier.publish()
    [topic] = find_topics(str(tier.root), "orders")
    assert pack(slices_of(topic, Range()), bytes_max=1, parts_min=4) == []


# ── Damage ────────────────────────────────────────────────────────────────────────────


def damage_at(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)


@pytest.fixture
def large(tmp_path: Path) -> ColdTier:
    """One segment of three blocks and a part of a fourth."""
    found = ColdTier(tmp_path / "cold")
    found.add([Record(b'"%b"' % (b"%06d" % i * 200), tag=f"t{i % 3}") for i in range(2600)])
    found.publish()
    assert found.segments[0].data_bytes > 3 << 20
    return found


@pytest.mark.parametrize("verify", ["block", "record"])
def test_damage_is_an_error_that_names_the_place(large: ColdTier, verify: Any) -> None:
    path = large.folder / f"{large.segments[0].name}.data"
    damage_at(path, 2_000_000)
    with pytest.raises(Corrupt, match=path.name):
        rows_of(large, Wanted(verify=verify))


@pytest.mark.parametrize("verify", ["block", "record"])
def test_damaged_records_are_skipped_and_reported(large: ColdTier, verify: Any) -> None:
    path = large.folder / f"{large.segments[0].name}.data"
    damage_at(path, 2_000_000)
    told: list[Damage] = []
    rows = rows_of(large, Wanted(verify=verify), told)
    [one] = told
    assert one.first_seq == one.last_seq
    assert one.path == str(path)
    assert [row["seq"] for row in rows] == [seq for seq in sorted(large.live) if seq != one.first_seq]
    assert shown(rows) == expected(large, [row["seq"] for row in rows])


def test_a_part_of_a_segment_reads_only_its_blocks(large: ColdTier) -> None:
    damage_at(large.folder / f"{large.segments[0].name}.data", 2_000_000)
    assert [row["seq"] for row in rows_of(large, Wanted(range=Range(end_seq=100)))] == list(range(1, 100))


@pytest.mark.parametrize("suffix", ["idx", "dict", "sum"])
def test_damage_of_the_other_files_is_found(large: ColdTier, suffix: str) -> None:
    path = large.folder / f"{large.segments[0].name}.{suffix}"
    damage_at(path, path.stat().st_size - 20)
    with pytest.raises(Corrupt):
        rows_of(large)
    told: list[Damage] = []
    assert rows_of(large, damage=told) == []
    assert [(one.first_seq, one.last_seq) for one in told] == [(1, 2600)]


def test_a_file_that_ends_early_loses_its_end(large: ColdTier) -> None:
    path = large.folder / f"{large.segments[0].name}.data"
    path.write_bytes(path.read_bytes()[:1_500_000])
    with pytest.raises(Corrupt, match="early"):
        rows_of(large)
    told: list[Damage] = []
    seqs = [row["seq"] for row in rows_of(large, damage=told)]
    assert seqs == list(range(1, told[0].first_seq))
    assert told[-1].last_seq == 2600


# ── Manifests ─────────────────────────────────────────────────────────────────────────


def test_topics_are_found_by_list_and_pattern(tmp_path: Path) -> None:
    for number, name in enumerate(("orders.eu", "orders.us", "bills")):
        tier = ColdTier(tmp_path, topic=name, topic_id=number + 1)
        tier.add(some_records(3))
        tier.publish()
    assert [topic.name for topic in find_topics(str(tmp_path), "orders.*, bills")] == [
        "orders.eu",
        "orders.us",
        "bills",
    ]
    with pytest.raises(NoManifest, match=r"no topic 'nobody'.*it has bills"):
        find_topics(str(tmp_path), "bills,nobody")
    with pytest.raises(NoManifest, match="TOPICS_COLD_DIR"):
        find_topics(str(tmp_path / "elsewhere"), "bills")


def test_a_corrupt_manifest_is_reported(tier: ColdTier) -> None:
    damage_at(tier.folder / "MANIFEST-1", 30)
    with pytest.raises(Corrupt, match="MANIFEST-1"):
        read_current(str(tier.folder))
    damage_at(tier.folder / "DEAD-1", 30)
    damage_at(tier.folder / "MANIFEST-1", 30)
    with pytest.raises(Corrupt, match="DEAD-1"):
        rows_of(tier)
