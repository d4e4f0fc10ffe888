"""Goal: rows are found by their seqs, whatever holes are between them; and so are live, expired and excess rows.

Method: small logs for known cases, random ones whose answers are compared with brute force.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.log_rig import append, delete, evict, new_log, readable, skip, staged
from topics.api.config import TopicConfig
from topics.engine.storage.frames import DEAD
from topics.engine.storage.index import Chunk
from topics.engine.topic.log import TopicLog

# -- holes -------------------------------------------------------------------------------------------------


def test_a_skip_takes_seqs_and_leaves_a_hole() -> None:
    log = new_log()
    append(log, [1] * 2)
    op = skip(log, 1 << 32)
    assert (log.view.head, log.next_seq) == (2, (1 << 32) + 3)
    log.publish(op)
    assert log.view.head == (1 << 32) + 2
    append(log, [1])
    assert readable(log) == [1, 2, (1 << 32) + 3]
    assert [chunk.count for chunk in log.chunks] == [2, 1]
    assert log.chunks[0].closed
    log.check()


def test_find_answers_for_rows_and_not_for_holes() -> None:
    log = new_log(4)
    append(log, [1] * 6)
    log.publish(skip(log, 10))
    append(log, [1] * 3)
    log.publish(evict(log, 4))
    for seq in range(25):
        found = log.find(seq)
        if 5 <= seq <= 6 or 17 <= seq <= 19:
            assert found is not None
            assert found[0].first_seq + found[1] == seq
        else:
            assert found is None, seq


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=6), st.data())
def test_spans_cover_exactly_the_rows_of_the_seqs_asked_for(
    steps: list[tuple[int, int]], data: st.DataObject
) -> None:
    log = new_log(4)
    rows: list[int] = []
    for count, hole in steps:
        rows += range(log.next_seq, log.next_seq + count)
        append(log, [1] * count)
        log.publish(skip(log, hole))
    first = data.draw(st.integers(0, log.next_seq + 3))
    stop = data.draw(st.integers(0, log.next_seq + 3))
    spans = list(log.spans(first, stop))
    assert all(0 <= low < high <= chunk.count for chunk, low, high in spans)
    covered = [chunk.first_seq + row for chunk, low, high in spans for row in range(low, high)]
    assert covered == [seq for seq in rows if first <= seq < stop]
    assert [seq for seq in range(log.next_seq + 3) if log.find(seq) is not None] == rows


def test_a_chunk_ends_at_its_rows_and_at_its_bytes() -> None:
    log = new_log(4)
    append(log, [1] * 9)
    assert [chunk.count for chunk in log.chunks] == [4, 4, 1]
    log = new_log(100, segment_bytes=200)
    append(log, [54] * 5)  # frames of 100 bytes
    assert [chunk.count for chunk in log.chunks] == [2, 2, 1]
    assert [chunk.closed for chunk in log.chunks] == [True, True, False]


def test_adopted_chunks_stand_before_the_others() -> None:
    log = new_log(4)
    log.next_seq = log.first_seq = 9
    append(log, [1] * 2)
    front = [Chunk(1, 4, 0), Chunk(5, 4, 0)]
    for chunk in front:
        for _ in range(4):
            chunk.add(0, 47, 1, 0, 0, 0, 1)
    log.prepend_chunks(front)
    assert [chunk.first_seq for chunk, _, _ in log.spans(1, 11)] == [1, 5, 9]
    log.remove_chunk(front[1])
    assert log.find(6) is None
    assert log.find(9) == (log.chunks[-1], 0)


# -- searches against brute force --------------------------------------------------------------------------


@st.composite
def worn_logs(draw: st.DrawFn) -> TopicLog:
    """A log with holes, deletes and a moved front, over small or large chunks."""
    log = new_log(draw(st.sampled_from([1, 4, 50, 400])))
    ts = 100
    for count, hole in draw(
        st.lists(st.tuples(st.integers(0, 30) | st.just(150), st.sampled_from([0, 0, 3])), max_size=5)
    ):
        ts += draw(st.integers(0, 3))
        append(log, [draw(st.integers(0, 9))] * count, ts=ts)
        if hole:
            log.publish(skip(log, hole))
    head = log.next_seq - 1
    if head:
        for first, length in draw(st.lists(st.tuples(st.integers(1, head), st.integers(0, 80)), max_size=5)):
            log.publish(delete(log, (first, min(head, first + length))))
        log.publish(evict(log, draw(st.integers(0, head // 2))))
    return log


@settings(deadline=None)
@given(worn_logs(), st.integers(0, 260), st.integers(0, 900))
def test_front_beyond_is_the_least_front_with_enough_records_and_bytes(
    log: TopicLog, records: int, size: int
) -> None:
    expected = count = total = 0
    for chunk, first, stop in log.spans(log.first_seq, log.next_seq):
        for row in range(first, stop):
            if count >= records and total >= size:
                break
            if chunk.flags_at(row) & DEAD:
                continue
            count += 1
            total += chunk.get(row)[6]
            expected = chunk.first_seq + row
    assert log.eviction_end(records, size) == expected


def test_front_beyond_of_nothing_is_nothing() -> None:
    log = new_log()
    assert log.eviction_end(5, 5) == 0
    append(log, [1] * 10)
    assert log.eviction_end(0, 0) == 0
    assert (log.eviction_end(1, 0), log.eviction_end(0, 1), log.eviction_end(3, 7)) == (1, 1, 7)
    assert log.eviction_end(100, 0) == log.eviction_end(0, 100) == 10


@settings(deadline=None)
@given(worn_logs(), st.integers(1, 20), st.integers(0, 40))
def test_expired_is_what_is_strictly_older_than_the_ttl(log: TopicLog, ttl_ms: int, past_ms: int) -> None:
    log.config = TopicConfig(ttl_ms=ttl_ms)
    now_ms = 95 + past_ms
    expected = 0
    for chunk, first, stop in log.spans(log.first_seq, log.next_seq):
        for row in range(first, stop):
            if now_ms - chunk.ts_at(row) > ttl_ms:
                expected = chunk.first_seq + row
    assert log.expired_last(now_ms) == expected


def test_a_record_lives_for_its_whole_ttl_and_not_a_moment_longer() -> None:
    log = new_log(config=TopicConfig(ttl_ms=50))
    append(log, [1] * 3, ts=1000)
    append(log, [1] * 3, ts=1001)
    assert log.expired_last(1050) == 0
    assert log.expired_last(1051) == 3
    assert log.expired_last(1052) == 6
    log.config = TopicConfig()
    assert log.expired_last(10**12) == 0


def test_a_ttl_longer_than_time_itself_expires_nothing() -> None:
    log = new_log(config=TopicConfig(ttl_ms=2**62))
    append(log, [1] * 3, ts=0)
    assert log.expired_last(1000) == 0


def test_records_with_a_ttl_of_their_own_are_due_strictly_after_it_and_once() -> None:
    log = new_log()
    append(log, [1] * 4)
    log.expiries = [(100, 4), (100, 2), (101, 1)]
    log.publish(delete(log, (4, 4)))
    assert log.expired_records(100, 9) == ([], False)
    assert log.expired_records(101, 9) == ([2], False)
    assert log.expired_records(101, 9) == ([], False)
    assert log.expired_records(200, 9) == ([1], False)
    assert log.expiries == []


@settings(deadline=None)
@given(worn_logs(), st.data())
def test_are_live_agrees_with_is_live(log: TopicLog, data: st.DataObject) -> None:
    seqs = sorted(data.draw(st.sets(st.integers(0, log.next_seq + 5), max_size=40)))
    alive = set(staged(log))
    assert log.are_live(np.array(seqs, dtype=np.uint64)).tolist() == [seq in alive for seq in seqs]
    assert [log.is_live(seq) for seq in seqs] == [seq in alive for seq in seqs]


# -- insertion ---------------------------------------------------------------------------------------------


@given(
    writes=st.lists(
        st.tuples(st.integers(1, 150), st.booleans(), st.booleans(), st.integers(0, 9)),
        min_size=1,
        max_size=5,
    ),
    rows_max=st.integers(1, 200),
)
@settings(max_examples=60, deadline=None)
def test_a_live_write_and_its_replay_add_the_same_rows(
    writes: list[tuple[int, bool, bool, int]], rows_max: int
) -> None:
    live, replayed = new_log(rows_max), new_log(rows_max)
    offset = 112
    for count, tagged, flagged, ts in writes:
        lengths = [50 + i % 7 for i in range(count)]
        tags = [1 + i % 3 for i in range(count)] if tagged else None
        flags = [1 + i % 2 for i in range(count)] if flagged else None
        live.add_rows(offset, lengths, ts, flags, tags, None, lengths)
        each = np.array(lengths, dtype=np.int64)
        replayed.add_columns(
            np.cumsum(each) - each + offset,
            each,
            np.full(count, ts, dtype=np.uint64),
            np.array(flags, dtype=np.uint8) if flags is not None else None,
            tags,
            None,
            each,
        )
        offset += sum(lengths)
    assert live.next_seq == replayed.next_seq == 1 + sum(write[0] for write in writes)
    assert [(c.first_seq, c.count, c.frame_bytes, c.opened_ms) for c in live.chunks] == [
        (c.first_seq, c.count, c.frame_bytes, c.opened_ms) for c in replayed.chunks
    ]
    assert [list(c.iter_rows()) for c in live.chunks] == [list(c.iter_rows()) for c in replayed.chunks]
