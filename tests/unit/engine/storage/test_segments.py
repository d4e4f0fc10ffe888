from __future__ import annotations

import errno
from collections.abc import Callable, Generator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.faults import fault
from tests.support.sim_disk import SimDisk
from topics.api.errors import Corrupt, TopicsError, UnsupportedFormat
from topics.engine.storage import segments
from topics.engine.storage.delete_marks import mark_deleted, read_deleted
from topics.engine.storage.files import HEADER_BYTES, read_file, xxh
from topics.engine.storage.frames import DEAD
from topics.engine.storage.sealing import (
    drain,
    meta_from_sum,
    read_sum,
    rewrite_steps,
    seal,
    seal_steps,
    verify,
    verify_steps,
)
from topics.engine.storage.segments import (
    BLOCK_BYTES,
    ROW,
    ROW_STRUCT,
    Mask,
    Rows,
    SegmentMeta,
    SegmentWriter,
    parse_segment_name,
    read_dict,
    read_rows,
    remove_segment,
    segment_name,
    segment_path,
    truncate_to_meta,
)

DIR = "shards/0/t/7"


def rows_for(frames: list[bytes], base: int, ts: int = 1000) -> Rows:
    rows = np.zeros(len(frames), dtype=ROW)
    at = base
    for i, frame in enumerate(frames):
        if frame:
            rows[i] = (at, len(frame), ts + i, 3, (0, 0, 0), i % 3, i % 2, len(frame) // 2)
        else:
            rows["ts"][i] = ts + i
        at += len(frame)
    return rows


def append(
    writer: SegmentWriter,
    frames: list[bytes],
    tags: list[bytes] | None = None,
    nodes: list[bytes] | None = None,
    expiries: list[tuple[int, int]] | None = None,
) -> Rows:
    rows = rows_for(frames, writer.data_bytes)
    writer.append(b"".join(frames), rows, tags or [], nodes or [], expiries or [])
    return rows


def build(disk: SimDisk, frames: list[bytes], *, dictionary: bool = True, first_seq: int = 1) -> SegmentMeta:
    meta = SegmentMeta(first_seq)
    writer = SegmentWriter(disk, DIR, meta)
    if dictionary:
        append(writer, frames, [b"red", b"blue"], [b"n1"], [(0, 99)])
    else:
        append(writer, frames)
    writer.sync()
    writer.close()
    return meta


def frames_of(disk: SimDisk, meta: SegmentMeta, rows: Rows) -> list[bytes]:
    data = read_file(disk, segment_path(DIR, meta, "data"))
    return [data[row["offset"] : int(row["offset"]) + int(row["length"])] for row in rows]


def write_at(disk: SimDisk, path: str, offset: int, data: bytes) -> None:
    handle = disk.open(path, create=True)
    disk.write(handle, offset, data)
    disk.sync(handle)
    disk.close(handle)


def size_of(disk: SimDisk, path: str) -> int:
    return len(read_file(disk, path))


def open_handles(disk: SimDisk) -> int:
    return len(disk._handles)


frame_lists = st.lists(st.binary(max_size=60), min_size=1, max_size=12)
name_lists = st.lists(st.binary(max_size=20), max_size=4)
batches = st.lists(
    st.tuples(
        frame_lists,
        name_lists,
        name_lists,
        st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)), max_size=3),
    ),
    min_size=1,
    max_size=5,
)


def test_row_layout_is_that_of_the_document() -> None:
    assert ROW.itemsize == ROW_STRUCT.size == 32
    packed = ROW_STRUCT.pack(16, 50, 1 << 40, 9, 1, 2, 3)
    row = np.frombuffer(packed, dtype=ROW)[0]
    names = ("offset", "length", "ts", "flags", "tag", "node", "size")
    assert [int(row[n]) for n in names] == [16, 50, 1 << 40, 9, 1, 2, 3]


@given(
    st.integers(0, 2**64 - 1), st.integers(0, 2**32), st.sampled_from(["data", "idx", "dict", "sum", "del"])
)
def test_names_round_trip(first_seq: int, generation: int, suffix: str) -> None:
    name = segment_name(first_seq, generation)
    assert parse_segment_name(f"{name}.{suffix}") == (first_seq, generation, suffix)


@pytest.mark.parametrize("name", ["seg-1-0.data", "seg-0000000000000001-0", "snap-0000000000000001", "x", ""])
def test_other_names_are_not_segments(name: str) -> None:
    assert parse_segment_name(name) is None


@given(batches, st.booleans(), st.integers(0, 99))
def test_synced_rows_are_read_back_after_a_power_cut(
    batches: list[tuple[list[bytes], list[bytes], list[bytes], list[tuple[int, int]]]],
    reopen: bool,
    seed: int,
) -> None:
    disk = SimDisk(seed)
    meta = SegmentMeta(1)
    writer = SegmentWriter(disk, DIR, meta)
    expected: list[Rows] = []
    for frames, tags, nodes, expiries in batches:
        expected.append(append(writer, frames, tags, nodes, expiries))
        if reopen:
            writer.sync()
            writer.close()
            writer = SegmentWriter(disk, DIR, meta)
    writer.sync()
    disk.crash()
    meta = msgspec.msgpack.decode(msgspec.msgpack.encode(meta), type=SegmentMeta)
    truncate_to_meta(disk, DIR, meta)
    rows = read_rows(disk, DIR, meta)
    assert rows.flags.writeable
    assert rows.tobytes() == np.concatenate(expected).tobytes()
    assert frames_of(disk, meta, rows) == [frame for batch in batches for frame in batch[0]]
    tags, nodes, expiries_read = read_dict(disk, DIR, meta)
    assert tags == [tag for batch in batches for tag in batch[1]]
    assert nodes == [node for batch in batches for node in batch[2]]
    assert expiries_read.tolist() == [entry for batch in batches for entry in batch[3]]
    assert meta.live == sum(1 for batch in batches for frame in batch[0] if frame)
    assert verify(disk, DIR, meta, None) == []


def test_no_dict_before_there_is_something_for_it() -> None:
    disk = SimDisk(1)
    meta = build(disk, [b"abc"], dictionary=False)
    assert not disk.exists(segment_path(DIR, meta, "dict"))
    assert meta.dict_bytes == 0
    writer = SegmentWriter(disk, DIR, meta)
    append(writer, [b"d"], nodes=[b"n"])
    assert [path.rpartition(".")[2] for path in writer.paths()] == ["data", "idx", "dict"]
    assert len(writer.handles()) == 3
    assert read_dict(disk, DIR, meta)[1] == [b"n"]


@fault(
    "segment",
    "a crashed checkpoint left more in a segment than the snapshot names",
    "it is cut; the log holds it and writes it again",
)
def test_leftovers_of_a_crashed_checkpoint_are_overwritten_and_cut() -> None:
    disk = SimDisk(1)
    meta = build(disk, [b"one", b"two"])
    before = msgspec.structs.replace(meta)
    writer = SegmentWriter(disk, DIR, meta)
    append(writer, [b"x" * 500] * 20, [b"lost"] * 9)
    disk.kill()
    writer = SegmentWriter(disk, DIR, before)
    append(writer, [b"three"], [b"green"])
    for suffix, length in (
        ("data", before.data_bytes),
        ("idx", before.idx_bytes),
        ("dict", before.dict_bytes),
    ):
        assert size_of(disk, segment_path(DIR, before, suffix)) == length
    assert frames_of(disk, before, read_rows(disk, DIR, before)) == [b"one", b"two", b"three"]
    assert read_dict(disk, DIR, before)[0] == [b"red", b"blue", b"green"]


@pytest.mark.parametrize("call", range(1, 12))
def test_a_failed_append_can_be_repeated(call: int) -> None:
    disk = SimDisk(call)
    meta = SegmentMeta(1)
    writer = SegmentWriter(disk, DIR, meta)
    disk.fail_at(call, errno.ENOSPC)
    try:
        append(writer, [b"one", b"two"], [b"t"])
    except OSError:
        assert meta == SegmentMeta(1)
        append(writer, [b"one", b"two"], [b"t"])
    writer.sync()
    writer.close()
    assert open_handles(disk) == 0
    assert frames_of(disk, meta, read_rows(disk, DIR, meta)) == [b"one", b"two"]
    assert read_dict(disk, DIR, meta)[0] == [b"t"]


def test_a_file_that_lost_its_end_is_not_written_on() -> None:
    disk = SimDisk(1)
    meta = build(disk, [b"one"])
    handle = disk.open(segment_path(DIR, meta, "data"))
    disk.truncate(handle, meta.data_bytes - 1)
    with pytest.raises(Corrupt, match=r"seg-0000000000000001-0\.data"):
        append(SegmentWriter(disk, DIR, meta), [b"two"])


def test_misuse_is_refused() -> None:
    disk = SimDisk(1)
    writer = SegmentWriter(disk, DIR, SegmentMeta(1))
    with pytest.raises(ValueError, match="rows refer to"):
        writer.append(b"abc", rows_for([b"abc"], 17), [], [], [])
    with pytest.raises(ValueError, match="without rows"):
        writer.append(b"", np.zeros(0, dtype=ROW), [b"t"], [], [])
    writer.append(b"", np.zeros(0, dtype=ROW), [], [], [])
    assert disk.paths() == []
    meta = build(disk, [b"one"])
    with pytest.raises(ValueError, match="rows 0 to 1"):
        mark_deleted(disk, DIR, meta, [0, 1])
    seal(disk, DIR, meta, b"")
    with pytest.raises(ValueError, match="sealed"):
        SegmentWriter(disk, DIR, meta)


def test_cut_drops_what_the_snapshot_does_not_name() -> None:
    disk = SimDisk(1)
    meta = build(disk, [b"one", b"two"])
    mark_deleted(disk, DIR, meta, [1])
    named = msgspec.structs.replace(meta)
    writer = SegmentWriter(disk, DIR, meta)
    append(writer, [b"more"] * 5, [b"t"])
    mark_deleted(disk, DIR, meta, [3, 4])
    writer.sync()
    writer.close()
    seal(disk, DIR, meta, b"")
    truncate_to_meta(disk, DIR, named)
    assert [size_of(disk, segment_path(DIR, named, s)) for s in ("data", "idx", "dict", "del")] == [
        named.data_bytes,
        named.idx_bytes,
        named.dict_bytes,
        named.del_bytes,
    ]
    assert not disk.exists(segment_path(DIR, named, "sum"))
    truncate_to_meta(disk, DIR, msgspec.structs.replace(named, rows=0, dict_bytes=0, has_del=False))
    assert disk.paths() == []
    truncate_to_meta(disk, DIR, SegmentMeta(1))


@pytest.mark.parametrize("suffix", ["data", "idx", "dict"])
def test_cut_refuses_a_short_or_missing_file(suffix: str) -> None:
    disk = SimDisk(1)
    meta = build(disk, [b"one", b"two"])
    path = segment_path(DIR, meta, suffix)
    handle = disk.open(path)
    disk.truncate(handle, disk.size(handle) - 1)
    with pytest.raises(Corrupt, match=suffix):
        raise truncate_to_meta(disk, DIR, meta) or AssertionError("it is called whole")
    disk.remove(path)
    with pytest.raises(Corrupt, match="missing"):
        raise truncate_to_meta(disk, DIR, meta) or AssertionError("it is called whole")


@pytest.mark.parametrize("suffix", ["idx", "dict", "sum", "del", "data"])
def test_another_version_is_refused_by_name(suffix: str) -> None:
    disk = SimDisk(1)
    meta = build(disk, [b"one", b"two"])
    seal(disk, DIR, meta, b"")
    mark_deleted(disk, DIR, meta, [0])
    meta.del_bytes = 0  # of marks that no snapshot covers
    path = segment_path(DIR, meta, suffix)
    write_at(disk, path, 8, b"\x03")
    if suffix == "sum":  # it ends in a digest of its own, which a later version would have made valid
        content = read_file(disk, path)
        write_at(disk, path, len(content) - 8, xxh(content[:-8]))
    readers: dict[str, Callable[[], object]] = {
        "idx": lambda: read_rows(disk, DIR, meta),
        "dict": lambda: read_dict(disk, DIR, meta),
        "del": lambda: read_deleted(disk, DIR, meta),
        "sum": lambda: read_sum(disk, DIR, 1, 0),
        "data": lambda: drain(rewrite_steps(disk, DIR, meta, read_rows(disk, DIR, meta), None, 1, b"")),
    }
    with pytest.raises(UnsupportedFormat, match=f"{path} has format version 3"):
        readers[suffix]()
    assert path in {problem.path for problem in verify(disk, DIR, meta, None)}


@fault(
    "index",
    "a dictionary is damaged anywhere",
    "it is refused as corrupt or gives other names; the process goes on",
)
@given(st.data())
def test_a_damaged_dict_is_corrupt_or_other_names_but_never_a_crash(data: st.DataObject) -> None:
    disk = SimDisk(1)
    meta = build(disk, [b"one"])
    path = segment_path(DIR, meta, "dict")
    disk.flip_bit(path, data.draw(st.integers(0, meta.dict_bytes - 1)), data.draw(st.integers(0, 7)))
    try:
        read_dict(disk, DIR, meta)
    except TopicsError:
        pass


def test_seal_and_verify() -> None:
    disk = SimDisk(3)
    frames = [b"a" * 400_000, b"", b"b" * 700_000, b"c" * 10]
    meta = build(disk, frames)
    mark_deleted(disk, DIR, meta, [3])
    digest = seal(disk, DIR, meta, b"previous")
    disk.remove(segment_path(DIR, meta, "del"))
    meta.has_del, meta.del_bytes, meta.del_digest = False, 0, b""
    disk.crash()
    assert meta.sealed and meta.link == digest
    summary, found = read_sum(disk, DIR, 1, 0)
    assert found == digest == read_file(disk, segment_path(DIR, meta, "sum"))[-8:]
    assert (summary.rows, summary.live, summary.chain, len(summary.blocks)) == (4, 2, b"previous", 2)
    assert (summary.ts_min, summary.ts_max) == (1000, 1003)
    assert meta_from_sum(disk, DIR, 1, 0) == msgspec.structs.replace(meta, live=2)
    assert verify(disk, DIR, meta, b"previous") == verify(disk, DIR, meta, None) == []
    assert [problem.path[-3:] for problem in verify(disk, DIR, meta, b"other")] == ["sum"]
    assert len(verify(disk, DIR, msgspec.structs.replace(meta, rows=3), None)) == 1
    assert open_handles(disk) == 0


@fault("segment", "any byte of a .sum flips", "it is noticed")
def test_every_flipped_byte_of_a_sum_is_detected() -> None:
    disk = SimDisk(1)
    meta = build(disk, [b"one", b"two"])
    seal(disk, DIR, meta, b"12345678")
    path = segment_path(DIR, meta, "sum")
    for offset in range(size_of(disk, path)):
        for bit in range(8):
            disk.flip_bit(path, offset, bit)
            with pytest.raises(TopicsError):
                read_sum(disk, DIR, 1, 0)
            assert [problem.path for problem in verify(disk, DIR, meta, None)] == [path]
            disk.flip_bit(path, offset, bit)
    for length in range(size_of(disk, path)):
        handle = disk.open("cut", create=True)
        disk.truncate(handle, 0)
        disk.write(handle, 0, read_file(disk, path)[:length])
        disk.make_dir("short")
        disk.rename("cut", f"short/{segment_name(1, 0)}.sum")
        with pytest.raises(Corrupt):
            read_sum(disk, "short", 1, 0)


def test_a_sum_under_another_name_is_refused() -> None:
    disk = SimDisk(1)
    meta = build(disk, [b"one"])
    seal(disk, DIR, meta, b"")
    disk.rename(segment_path(DIR, meta, "sum"), f"{DIR}/{segment_name(1, 4)}.sum")
    with pytest.raises(Corrupt, match="belongs to seg-0000000000000001-0"):
        read_sum(disk, DIR, 1, 4)


@fault("segment", "any byte of a sealed segment flips", "a check of the segment finds and locates it")
@pytest.mark.parametrize("suffix", ["data", "idx", "dict"])
def test_every_flipped_byte_of_a_sealed_file_is_detected(suffix: str) -> None:
    disk = SimDisk(1)
    meta = build(disk, [b"one", b"two"])
    seal(disk, DIR, meta, b"")
    path = segment_path(DIR, meta, suffix)
    for offset in range(size_of(disk, path)):
        disk.flip_bit(path, offset, offset % 8)
        assert [(p.path, p.offset, p.length) for p in verify(disk, DIR, meta, None)] == [
            (path, 0, size_of(disk, path))
        ]
        disk.flip_bit(path, offset, offset % 8)
    disk.remove(path)
    assert [problem.path for problem in verify(disk, DIR, meta, None)] == [path]


def test_damage_is_located_by_block() -> None:
    disk = SimDisk(1)
    meta = build(disk, [bytes([i]) * 300_000 for i in range(20)])
    seal(disk, DIR, meta, b"")
    path = segment_path(DIR, meta, "data")
    disk.flip_bit(path, 5)
    disk.flip_bit(path, 2 * BLOCK_BYTES)
    disk.flip_bit(path, 2 * BLOCK_BYTES - 1)
    handle = disk.open(path)
    disk.truncate(handle, meta.data_bytes - 1)
    last = meta.data_bytes // BLOCK_BYTES * BLOCK_BYTES
    assert [(p.path, p.offset, p.length) for p in verify(disk, DIR, meta, None)] == [
        (path, 0, BLOCK_BYTES),
        (path, BLOCK_BYTES, BLOCK_BYTES),
        (path, 2 * BLOCK_BYTES, BLOCK_BYTES),
        (path, last, meta.data_bytes - last),
    ]


def test_an_unreadable_block_is_a_problem_of_its_own() -> None:
    disk = SimDisk(1)
    meta = build(disk, [bytes([i]) * 300_000 for i in range(20)], dictionary=False)
    seal(disk, DIR, meta, b"")
    disk.trace = []
    assert verify(disk, DIR, meta, None) == []
    reads = sum(line.startswith("read ") for line in disk.trace)
    disk.fail_at(reads - 1, errno.EIO, of="read")
    problems = verify(disk, DIR, meta, None)
    assert [(p.path[-4:], p.offset, p.length) for p in problems] == [("data", 4 * BLOCK_BYTES, BLOCK_BYTES)]


def rewrite(
    disk: SimDisk, meta: SegmentMeta, rows: Rows, deleted: Mask | None, chain: bytes = b""
) -> tuple[SegmentMeta, Rows]:
    return drain(rewrite_steps(disk, DIR, meta, rows, deleted, meta.generation + 1, chain))


@given(
    st.lists(st.tuples(st.binary(max_size=300), st.booleans()), min_size=1, max_size=60),
    st.sampled_from([64, 200, BLOCK_BYTES]),
    st.booleans(),
    st.integers(0, 99),
)
def test_a_rewrite_keeps_live_frames(
    records: list[tuple[bytes, bool]], block: int, dictionary: bool, seed: int
) -> None:
    disk = SimDisk(seed)
    meta = build(disk, [frame for frame, _ in records], dictionary=dictionary)
    digest = seal(disk, DIR, meta, b"before")
    rows = read_rows(disk, DIR, meta)
    flags = rows["flags"].copy()
    rows["flags"] |= DEAD
    old = rows.copy()
    deleted = np.array([dead for _, dead in records], dtype=np.bool_)
    # Left by a crashed attempt.
    stale = SegmentMeta(1, 1)
    for suffix in ("data", "idx", "dict", "sum", "del"):
        write_at(disk, segment_path(DIR, stale, suffix), 0, b"junk" * 9999)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "BLOCK_BYTES", block)
        new_meta, new_rows = rewrite(disk, meta, rows, deleted, b"before")
        disk.crash()
        assert rows.tobytes() == old.tobytes()
        assert read_rows(disk, DIR, new_meta).tobytes() == new_rows.tobytes()
        expected = [b"" if dead else frame for frame, dead in records]
        assert frames_of(disk, new_meta, new_rows) == expected
        assert new_meta.data_bytes == HEADER_BYTES + sum(map(len, expected))
        assert new_meta.live == sum(map(bool, expected))
        assert verify(disk, DIR, new_meta, b"before") == []
        for i, frame in enumerate(expected):
            if frame:
                assert new_rows[i]["flags"] == flags[i]
                for name in ("length", "ts", "tag", "node", "size"):
                    assert new_rows[i][name] == rows[i][name]
            else:
                assert new_rows[i].tobytes() == ROW_STRUCT.pack(0, 0, int(rows[i]["ts"]), 0, 0, 0, 0)
        assert [list(part) for part in read_dict(disk, DIR, new_meta)] == [
            list(part) for part in read_dict(disk, DIR, meta)
        ]
        assert (new_meta.first_seq, new_meta.generation, new_meta.sealed, new_meta.has_del) == (
            1,
            1,
            True,
            False,
        )
        # The next segment's chain still names the digest that it was sealed after.
        assert new_meta.link == digest
        assert meta_from_sum(disk, DIR, 1, 1) == new_meta
        third, _ = rewrite(disk, new_meta, new_rows, None)
        assert third.link == digest
    assert open_handles(disk) == 0


def test_rows_that_overlap_are_not_rewritten() -> None:
    disk = SimDisk(1)
    meta = build(disk, [b"one", b"two"])
    rows = read_rows(disk, DIR, meta)
    rows["length"][0] += 1
    with pytest.raises(Corrupt, match="overlap"):
        rewrite(disk, meta, rows, None)


def test_long_work_comes_in_steps_and_can_be_given_up() -> None:
    disk = SimDisk(1)
    meta = build(disk, [b"x" * 500_000] * 40)
    rows = read_rows(disk, DIR, meta)

    def steps(work: Generator[None, None, object]) -> int:
        return sum(1 for _ in work)

    assert steps(seal_steps(disk, DIR, meta, b"")) >= 5
    assert steps(verify_steps(disk, DIR, meta, None)) >= 5
    work = rewrite_steps(disk, DIR, meta, rows, None, 1, b"")
    for _ in range(5):
        next(work)
    work.close()
    assert open_handles(disk) == 0
    assert steps(rewrite_steps(disk, DIR, meta, rows, None, 1, b"")) >= 20
    remove_segment(disk, DIR, 1, 0)
    assert {path.rpartition("/")[2].partition(".")[0] for path in disk.paths()} == {segment_name(1, 1)}
    remove_segment(disk, DIR, 1, 1)
    assert disk.paths() == []
