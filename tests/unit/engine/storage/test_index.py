"""Goal: a chunk's rows are the ones that were inserted, whichever way, and however often its buffer grew.

Method: the two ways to insert, row by row and by columns, get the same rows and are compared byte by byte; masks and
cuts are compared with plain Python over a list of tuples.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topics.engine.storage.frames import DEAD, DELETED, HAS_TAG, STAGED_DELETE
from topics.engine.storage.index import ROW_BYTES, Chunk
from topics.engine.storage.segments import HEADER_BYTES, ROW, SegmentMeta

Row = tuple[int, int, int, int, int, int, int]  # offset, length, ts, flags, tag, node, size

U32 = st.integers(0, 2**32 - 1)
row_lists = st.lists(
    st.tuples(
        U32,
        st.integers(0, 2**32 - 1) | st.just(0),
        st.integers(0, 2**64 - 1),
        st.integers(0, 255),
        U32,
        U32,
        U32,
    ),
    max_size=80,
)


def add_rows(chunk: Chunk, rows: list[Row]) -> None:
    for row in rows:
        chunk.add(*row)


def add_columns(chunk: Chunk, rows: list[Row]) -> None:
    offsets, lengths, ts, flags, tags, nodes, sizes = (
        [list(column) for column in zip(*rows)] if rows else [[] for _ in range(7)]
    )
    chunk.add_batch(offsets, lengths, np.array(ts, dtype=np.uint64), flags, tags, nodes, sizes)


def shown(chunk: Chunk) -> list[Row]:
    return [chunk.get(i) for i in range(chunk.count)]


def new_chunk(rows_max: int = 1000, first_seq: int = 1) -> Chunk:
    return Chunk(first_seq, rows_max, 77)


@settings(deadline=None)
@given(row_lists)
def test_rows_come_back_as_they_went_in(rows: list[Row]) -> None:
    chunk = new_chunk()
    add_rows(chunk, rows)
    assert shown(chunk) == rows
    assert chunk.frame_bytes == sum(row[1] for row in rows)
    for i, row in enumerate(rows):
        assert (chunk.length_at(i), chunk.ts_at(i), chunk.flags_at(i)) == row[1:4]


@settings(deadline=None)
@given(st.lists(row_lists, max_size=4))
def test_both_ways_in_make_the_same_chunk(batches: list[list[Row]]) -> None:
    single, batch = new_chunk(), new_chunk()
    for rows in batches:
        add_rows(single, rows)
        add_columns(batch, rows)
    assert single.rows.tobytes() == batch.rows.tobytes()
    assert (single.count, single.frame_bytes) == (batch.count, batch.frame_bytes)
    assert single.next_seq == batch.next_seq == 1 + sum(map(len, batches))


def test_a_batch_may_share_its_time_and_flags_and_have_neither_tags_nor_nodes() -> None:
    chunk = new_chunk()
    chunk.add_batch([0, 10], [10, 20], 5, None, None, None, [1, 2])
    assert shown(chunk) == [(0, 10, 5, 0, 0, 0, 1), (10, 20, 5, 0, 0, 0, 2)]


def test_a_batch_clears_what_a_cut_left_in_the_buffer() -> None:
    chunk = new_chunk()
    add_rows(chunk, [(1, 1, 1, 255, 9, 9, 9)] * 5)
    chunk.cut(1)
    chunk.add_batch([0, 10], [10, 20], 5, None, None, None, [1, 2])
    assert shown(chunk)[1:] == [(0, 10, 5, 0, 0, 0, 1), (10, 20, 5, 0, 0, 0, 2)]


@pytest.mark.parametrize("rows_max", [1, 15, 16, 17, 100])
def test_a_chunk_grows_up_to_its_bound_and_keeps_its_rows(rows_max: int) -> None:
    chunk = new_chunk(rows_max)
    for i in range(rows_max):
        assert chunk.room == rows_max - i
        chunk.add(i, i + 1, i, 0, i, i, i)
        assert chunk.capacity <= rows_max
        assert len(chunk.rows) == i + 1
    assert chunk.room == 0
    assert shown(chunk) == [(i, i + 1, i, 0, i, i, i) for i in range(rows_max)]
    assert len(chunk._buffer) == rows_max * ROW_BYTES


def test_growing_doubles_so_that_rows_are_copied_a_bounded_number_of_times() -> None:
    chunk = new_chunk(10_000)
    capacities = {chunk.capacity}
    for i in range(10_000):
        chunk.add(i, 1, i, 0, 0, 0, 0)
        capacities.add(chunk.capacity)
    assert len(capacities) <= 12


def test_a_batch_larger_than_twice_the_capacity_fits_at_once() -> None:
    chunk = new_chunk(1000)
    add_columns(chunk, [(i, 1, 0, 0, 0, 0, 0) for i in range(999)])
    assert chunk.count == 999
    assert chunk.capacity == 999


def test_a_view_taken_before_growth_still_holds_the_old_rows() -> None:
    """A page under construction may hold such a view while rows are appended."""
    chunk = new_chunk()
    add_rows(chunk, [(i, 1, 0, 0, 0, 0, 0) for i in range(16)])
    view = chunk.rows
    add_rows(chunk, [(99, 1, 0, 0, 0, 0, 0)])
    assert view["offset"].tolist() == list(range(16))


@settings(deadline=None)
@given(row_lists, st.sampled_from([DELETED, STAGED_DELETE, DEAD]), st.data())
def test_live_means_a_frame_and_none_of_the_flags(rows: list[Row], dead: int, data: st.DataObject) -> None:
    chunk = new_chunk()
    add_rows(chunk, rows)
    first = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(first, len(rows)))
    assert chunk.live(first, stop, dead).tolist() == [
        row[1] > 0 and not row[3] & dead for row in rows[first:stop]
    ]


def test_readers_see_a_staged_delete_as_live_unless_they_say_otherwise() -> None:
    chunk = new_chunk()
    add_rows(chunk, [(0, 5, 0, flag, 0, 0, 0) for flag in (0, HAS_TAG, STAGED_DELETE, DELETED, DEAD)])
    assert chunk.live(0, 5).tolist() == [True, True, True, False, False]
    assert chunk.live(0, 5, DEAD).tolist() == [True, True, False, False, False]


def test_a_flag_is_set_beside_the_others() -> None:
    chunk = new_chunk()
    add_rows(chunk, [(1, 2, 3, HAS_TAG, 5, 6, 7)] * 3)
    chunk.set_flag(1, STAGED_DELETE)
    chunk.set_flag(1, DELETED)
    assert [chunk.flags_at(i) for i in range(3)] == [HAS_TAG, HAS_TAG | DEAD, HAS_TAG]
    assert chunk.rows["flags"].tolist() == [HAS_TAG, HAS_TAG | DEAD, HAS_TAG]
    assert chunk.get(1) == (1, 2, 3, HAS_TAG | DEAD, 5, 6, 7)


@settings(deadline=None)
@given(row_lists, row_lists, st.data())
def test_a_cut_forgets_rows_and_their_bytes_and_others_take_their_place(
    rows: list[Row], others: list[Row], data: st.DataObject
) -> None:
    chunk = new_chunk()
    add_rows(chunk, rows)
    keep = data.draw(st.integers(0, len(rows)))
    chunk.cut(keep)
    assert shown(chunk) == rows[:keep]
    assert len(chunk.rows) == keep
    assert chunk.frame_bytes == sum(row[1] for row in rows[:keep])
    assert chunk.next_seq == 1 + keep
    add_columns(chunk, others)
    assert shown(chunk) == rows[:keep] + others


@settings(deadline=None)
@given(row_lists.filter(bool), st.booleans(), st.integers(1, 100))
def test_a_loaded_chunk_holds_the_rows_of_the_file(rows: list[Row], sealed: bool, rows_max: int) -> None:
    source = new_chunk(first_seq=50)
    add_rows(source, rows)
    stored = np.frombuffer(source.rows.tobytes(), dtype=ROW)
    meta = SegmentMeta(50, rows=len(rows), data_bytes=1234, sealed=sealed)
    chunk = Chunk.from_rows(meta, stored, rows_max, 88)
    assert shown(chunk) == rows
    assert (chunk.first_seq, chunk.next_seq, chunk.opened_ms) == (50, 50 + len(rows), 88)
    assert chunk.stored == chunk.count == len(rows)
    assert chunk.closed == sealed
    assert chunk.meta is meta
    assert chunk.frame_bytes == 1234
    assert chunk.rows_max == max(rows_max, len(rows))
    assert chunk.room == max(rows_max - len(rows), 0)


def test_a_loaded_open_chunk_grows_on_and_does_not_write_through() -> None:
    stored = np.zeros(3, dtype=ROW)
    stored["length"] = 7
    chunk = Chunk.from_rows(SegmentMeta(1, rows=3, data_bytes=HEADER_BYTES + 21), stored, 10, 0)
    chunk.set_flag(0, DELETED)
    add_rows(chunk, [(i, 1, 0, 0, 0, 0, 0) for i in range(7)])
    assert (chunk.count, chunk.stored, chunk.room) == (10, 3, 0)
    assert stored["flags"].tolist() == [0, 0, 0]
    assert chunk.flags_at(0) == DELETED
    assert chunk.frame_bytes == HEADER_BYTES + 21 + 7
