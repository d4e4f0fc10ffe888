"""Goal: deciders see what is staged, readers see what is published, and both are what the same list of changes makes.

Method: a model of a topic in a dict runs beside `TopicLog` under random changes, publications and a failed commit;
after every step both states are compared row by row. What is subtle (floors, holes, held strings, the bound of the
loss list) also has a small test of its own, and the two searches are compared with brute force.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topics.engine import topic_log
from topics.engine.config import TopicConfig
from topics.engine.frames import DEAD, DELETED, STAGED_DELETE
from topics.engine.index import Chunk
from topics.engine.limits import LOSS_RANGES_MAX
from topics.engine.segments import SegmentMeta
from topics.engine.topic_log import Loss, Op, TopicLog, add_loss

Names = list[bytes | None]


def new_log(
    rows_max: int = 4, *, config: TopicConfig | None = None, segment_bytes: int = 1 << 30
) -> TopicLog:
    return TopicLog(
        7, "t", config or TopicConfig(), segment_max_events=rows_max, segment_max_bytes=segment_bytes
    )


def stage(
    log: TopicLog, sizes: list[int], *, tags: Names | None = None, nodes: Names | None = None, ts: int = 1
) -> Op:
    """Stage a write as the shard does it."""
    for i, size in enumerate(sizes):
        chunk = log.chunk_for_append(ts)
        tag = log.tags.add(log.next_seq, tags[i]) if tags is not None else 0
        node = log.nodes.add(nodes[i]) if nodes is not None else 0
        chunk.add(0, 46 + size, ts, 0, tag, node, size)
        log.next_seq += 1
    log.count += len(sizes)
    log.bytes += sum(sizes)
    return Op(log, head=log.next_seq - 1, count=len(sizes), bytes=sum(sizes), write_ts=ts)


def append(
    log: TopicLog, sizes: list[int], *, tags: Names | None = None, nodes: Names | None = None, ts: int = 1
) -> None:
    log.publish(stage(log, sizes, tags=tags, nodes=nodes, ts=ts))


def delete(log: TopicLog, *ranges: tuple[int, int]) -> Op:
    op = Op(log)
    log.stage_delete(list(ranges), op)
    return op


def evict(log: TopicLog, last_seq: int, *, ttl: bool = False) -> Op:
    op = Op(log)
    log.stage_evict(last_seq, op, ttl=ttl)
    return op


def skip(log: TopicLog, count: int) -> Op:
    op = Op(log)
    log.stage_skip(count, op)
    return op


def lose(log: TopicLog, first: int, last: int, reason: str = "corrupt") -> Op:
    op = Op(log)
    log.stage_loss((first, last, reason), op)
    return op


def live_seqs(log: TopicLog, first: int, stop: int, dead: int) -> list[int]:
    return [
        chunk.first_seq + low + int(i)
        for chunk, low, high in log.spans(first, stop)
        for i in np.nonzero(chunk.live(low, high, dead))[0]
    ]


def readable(log: TopicLog) -> list[int]:
    """What a reader finds, looking as `Reader` looks."""
    return live_seqs(log, log.view.first_seq, log.view.head + 1, DELETED)


def staged(log: TopicLog) -> list[int]:
    return live_seqs(log, log.first_seq, log.next_seq, DEAD)


# -- staged and published ----------------------------------------------------------------------------------


def test_a_write_is_invisible_until_it_is_published() -> None:
    log = new_log()
    op = stage(log, [5, 6], ts=9)
    assert staged(log) == [1, 2]
    assert (log.count, log.bytes, log.next_seq) == (2, 11, 3)
    assert readable(log) == []
    assert (log.view.head, log.view.count, log.view.bytes) == (0, 0, 0)
    log.publish(op)
    assert readable(log) == [1, 2]
    assert (log.view.head, log.view.count, log.view.bytes, log.view.last_write_ts) == (2, 2, 11, 9)


def test_a_delete_is_invisible_until_it_is_published() -> None:
    log = new_log()
    append(log, [1] * 10)
    op = delete(log, (3, 5), (9, 9))
    assert staged(log) == [1, 2, 6, 7, 8, 10]
    assert [log.is_live(seq) for seq in (2, 3, 5, 6, 9)] == [True, False, False, True, False]
    assert readable(log) == list(range(1, 11))
    assert log.view.count == 10
    log.publish(op)
    assert readable(log) == [1, 2, 6, 7, 8, 10]
    assert (log.view.count, log.view.bytes) == (log.count, log.bytes) == (6, 6)
    log.check()


def test_a_long_delete_is_as_invisible_as_a_short_one() -> None:
    log = new_log(1000)
    append(log, [1] * 500)
    op = delete(log, (100, 400))
    assert len(staged(log)) == 199
    assert len(readable(log)) == 500
    log.publish(op)
    assert readable(log) == staged(log) == [*range(1, 100), *range(401, 501)]
    log.check()


def test_publishing_one_delete_does_not_publish_the_next() -> None:
    for count in (10, 500):
        log = new_log(1000)
        append(log, [1] * count)
        first, second = delete(log, (2, 3)), delete(log, (5, count))
        log.publish(first)
        assert readable(log) == [1, *range(4, count + 1)]
        log.publish(second)
        assert readable(log) == [1, 4]


def test_a_delete_of_what_is_dead_counts_nothing() -> None:
    log = new_log()
    append(log, [7] * 6)
    log.publish(delete(log, (2, 4)))
    op = delete(log, (1, 5))
    assert (op.count, op.bytes) == (-2, -14)
    assert (log.count, log.bytes) == (1, 7)


def test_deleting_the_front_moves_the_first_seq_past_holes_and_dead_rows() -> None:
    log = new_log()
    append(log, [1] * 6)
    log.publish(delete(log, (3, 4)))
    log.publish(skip(log, 100))
    append(log, [1] * 2)
    op = delete(log, (1, 2), (5, 6))
    assert (log.first_seq, log.view.first_seq) == (107, 1)
    log.publish(op)
    assert (log.first_seq, log.view.first_seq) == (107, 107)
    log.publish(delete(log, (107, 108)))
    assert log.first_seq == log.view.first_seq == log.next_seq == 109


def test_a_config_and_a_drop_are_published_like_the_rest() -> None:
    log = new_log()
    log.publish(Op(log))
    assert (log.view.config, log.view.dropped) == (TopicConfig(), False)
    log.publish(Op(log, config=TopicConfig(cap_records=3), dropped=True))
    assert (log.view.config, log.view.dropped) == (TopicConfig(cap_records=3), True)


def test_stored_rows_that_die_are_noted_for_the_del_file() -> None:
    log = new_log(100)
    append(log, [1] * 10)
    log.chunks[0].stored = 6
    delete(log, (2, 3), (5, 8), (9, 9))
    assert log.chunks[0].unmarked == [(1, 3), (4, 6)]
    evict(log, 4)
    assert log.chunks[0].unmarked == [(1, 3), (4, 6)]


# -- floors ------------------------------------------------------------------------------------------------


def test_an_evicted_front_is_readable_until_published_and_then_leaves_a_floor() -> None:
    log = new_log()
    append(log, [2] * 10)
    op = evict(log, 4)
    assert staged(log) == list(range(5, 11))
    assert readable(log) == list(range(1, 11))
    assert log.view.evict_floor == 1
    log.publish(op)
    assert readable(log) == list(range(5, 11))
    assert (log.view.cap_lost, log.view.ttl_lost, log.view.evict_floor) == (4, 0, 5)
    assert (log.view.count, log.view.bytes) == (6, 12)
    log.check()


def test_caps_and_ttl_leave_floors_of_their_own() -> None:
    log = new_log()
    append(log, [1] * 10)
    log.publish(evict(log, 3, ttl=True))
    assert (log.view.cap_lost, log.view.ttl_lost, log.view.evict_floor) == (0, 3, 4)
    log.publish(evict(log, 5, ttl=False))
    assert (log.view.cap_lost, log.view.ttl_lost, log.view.evict_floor) == (5, 3, 6)
    log.publish(evict(log, 8, ttl=True))
    assert (log.view.cap_lost, log.view.ttl_lost, log.view.evict_floor) == (5, 8, 9)


def test_a_floor_stands_at_the_last_live_record_that_was_lost() -> None:
    """What the caller deleted is not lost: a reader behind it hears of no gap."""
    for size in (1, 100):
        log = new_log(1000)
        append(log, [1] * 10 * size)
        log.publish(delete(log, (3 * size + 1, 6 * size)))
        log.publish(evict(log, 6 * size))
        assert (log.view.cap_lost, log.view.first_seq) == (3 * size, 6 * size + 1)


def test_evicting_only_dead_rows_moves_no_floor() -> None:
    log = new_log()
    append(log, [1] * 10)
    log.publish(delete(log, (1, 5)))
    log.publish(evict(log, 5))
    assert (log.view.cap_lost, log.view.evict_floor, log.view.first_seq) == (0, 1, 6)


def test_a_floor_never_goes_back() -> None:
    log = new_log()
    append(log, [1] * 10)
    log.publish(evict(log, 8))
    op = evict(log, 3)
    assert (op.count, op.cap_lost, op.first_seq) == (0, 8, 9)
    log.publish(op)
    assert (log.view.cap_lost, log.view.first_seq) == (8, 9)


def test_replayed_floors_take_what_is_below_and_stand_where_they_stood() -> None:
    for cap_lost, ttl_lost in ((5, 0), (0, 5), (3, 5), (5, 3)):
        log = new_log()
        append(log, [1] * 8)
        op = Op(log)
        log.stage_floors(cap_lost, ttl_lost, op)
        log.publish(op)
        assert (log.view.cap_lost, log.view.ttl_lost) == (log.cap_lost, log.ttl_lost) == (cap_lost, ttl_lost)
        assert readable(log) == [6, 7, 8]
        log.check()


def test_replaying_floors_twice_changes_nothing() -> None:
    log = new_log()
    append(log, [1] * 8)
    for _ in range(2):
        op = Op(log)
        log.stage_floors(5, 2, op)
        log.publish(op)
    assert (log.view.count, log.view.cap_lost, log.view.ttl_lost, log.view.first_seq) == (3, 5, 2, 6)


def test_chunks_below_everything_live_go_and_their_segments_are_doomed() -> None:
    log = new_log(4)
    append(log, [1] * 12)
    metas = [SegmentMeta(chunk.first_seq) for chunk in log.chunks]
    for chunk, meta in zip(log.chunks, metas, strict=True):
        chunk.meta = meta
    op = evict(log, 9)
    assert len(log.chunks) == 3
    log.publish(op)
    assert [chunk.first_seq for chunk in log.chunks] == [9]
    assert log.doomed == metas[:2]
    assert readable(log) == [10, 11, 12]
    log.check()


def test_a_chunk_that_can_still_take_rows_stays() -> None:
    log = new_log(4)
    append(log, [1] * 3)
    log.publish(evict(log, 3))
    assert len(log.chunks) == 1
    append(log, [1])
    assert readable(log) == [4]
    log.publish(evict(log, 4))
    assert log.chunks == []
    append(log, [1])
    assert readable(log) == [5]
    log.check()


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
    log.adopt(front)
    assert [chunk.first_seq for chunk, _, _ in log.spans(1, 11)] == [1, 5, 9]
    log.remove_chunk(front[1])
    assert log.find(6) is None
    assert log.find(9) == (log.chunks[-1], 0)


# -- losses ------------------------------------------------------------------------------------------------


def test_a_loss_takes_what_lived_in_it_and_is_announced_when_published() -> None:
    log = new_log()
    append(log, [1] * 10)
    op = lose(log, 4, 6)
    assert readable(log) == list(range(1, 11))
    assert log.view.losses == []
    log.publish(op)
    assert readable(log) == [1, 2, 3, 7, 8, 9, 10]
    assert log.view.losses == [(4, 6, "corrupt")]
    assert (log.view.count, log.count) == (7, 7)
    log.check()


def test_a_loss_past_the_head_moves_the_head() -> None:
    log = new_log()
    append(log, [1] * 3)
    log.publish(lose(log, 3, 9))
    assert (log.view.head, log.next_seq) == (9, 10)
    assert readable(log) == [1, 2]
    append(log, [1])
    assert readable(log) == [1, 2, 10]
    log.check()


def test_losses_that_touch_are_joined_when_their_reason_is_the_same() -> None:
    losses: list[Loss] = []
    add_loss(losses, (5, 6, "a"))
    add_loss(losses, (10, 12, "a"))
    add_loss(losses, (1, 2, "a"))
    assert losses == [(1, 2, "a"), (5, 6, "a"), (10, 12, "a")]
    add_loss(losses, (3, 4, "a"))
    assert losses == [(1, 6, "a"), (10, 12, "a")]
    add_loss(losses, (7, 9, "b"))
    assert losses == [(1, 6, "a"), (7, 9, "b"), (10, 12, "a")]
    add_loss(losses, (2, 3, "a"))
    assert losses == [(1, 6, "a"), (7, 9, "b"), (10, 12, "a")]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 10), st.sampled_from("ab")).map(
            lambda entry: (entry[0], entry[0] + entry[1], entry[2])
        ),
        max_size=20,
    )
)
def test_losses_stay_ascending_and_apart_and_cover_exactly_what_was_lost(added: list[Loss]) -> None:
    losses: list[Loss] = []
    for loss in added:
        add_loss(losses, loss)
        assert all(
            before[1] < after[0] and (before[1] + 1 < after[0] or before[2] != after[2])
            for before, after in pairwise(losses)
        )
    assert seqs_of(losses) == seqs_of(added)


def seqs_of(losses: Iterable[Loss]) -> set[int]:
    return {seq for first, last, _ in losses for seq in range(first, last + 1)}


def test_a_full_list_of_losses_joins_the_nearest_two_and_drops_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_log, "LOSS_RANGES_MAX", 3)
    losses: list[Loss] = [(1, 1, "a"), (10, 10, "b"), (15, 15, "a")]
    add_loss(losses, (30, 31, "a"))
    assert losses == [(1, 1, "a"), (10, 15, "b"), (30, 31, "a")]


def test_the_list_of_losses_is_bounded() -> None:
    losses: list[Loss] = []
    for i in range(LOSS_RANGES_MAX + 20):
        add_loss(losses, (10 * i + 1, 10 * i + 2, "a"))
    assert len(losses) == LOSS_RANGES_MAX
    lost = {seq for i in range(LOSS_RANGES_MAX + 20) for seq in (10 * i + 1, 10 * i + 2)}
    assert seqs_of(losses) >= lost


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
    assert log.front_beyond(records, size) == expected


def test_front_beyond_of_nothing_is_nothing() -> None:
    log = new_log()
    assert log.front_beyond(5, 5) == 0
    append(log, [1] * 10)
    assert log.front_beyond(0, 0) == 0
    assert (log.front_beyond(1, 0), log.front_beyond(0, 1), log.front_beyond(3, 7)) == (1, 1, 7)
    assert log.front_beyond(100, 0) == log.front_beyond(0, 100) == 10


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
    assert log.due_records(100) == []
    assert log.due_records(101) == [2]
    assert log.due_records(101) == []
    assert log.due_records(200) == [1]
    assert log.expiries == []


@settings(deadline=None)
@given(worn_logs(), st.data())
def test_are_live_agrees_with_is_live(log: TopicLog, data: st.DataObject) -> None:
    seqs = sorted(data.draw(st.sets(st.integers(0, log.next_seq + 5), max_size=40)))
    alive = set(staged(log))
    assert log.are_live(np.array(seqs, dtype=np.uint64)).tolist() == [seq in alive for seq in seqs]
    assert [log.is_live(seq) for seq in seqs] == [seq in alive for seq in seqs]


# -- strings -----------------------------------------------------------------------------------------------


def ids_of(log: TopicLog, seq: int) -> tuple[int, int]:
    found = log.find(seq)
    assert found is not None
    return found[0].get(found[1])[4:6]


@pytest.mark.parametrize("how", ["delete", "evict", "loss"])
@pytest.mark.parametrize("count", [1, 200])
def test_a_string_is_held_until_the_last_record_with_it_is_gone_for_readers(how: str, count: int) -> None:
    log = new_log(1000)
    append(log, [1] * count, tags=[b"red"] * count, nodes=[b"n1"] * count)
    tag, node = ids_of(log, 1)
    op = {"delete": lambda: delete(log, (1, count)), "evict": lambda: evict(log, count)}.get(
        how, lambda: lose(log, 1, count)
    )()
    assert log.tags.count(b"red") == 0
    assert (op.tags_held, op.nodes_held) == (1, 1)
    # A reader that looks at a row now must still learn what its ids mean.
    assert (log.tags.strings.name(tag), log.nodes.name(node)) == (b"red", b"n1")
    log.publish(op)
    assert (log.tags.strings.name(tag), log.nodes.name(node)) == (None, None)


def test_a_string_that_comes_back_meanwhile_gets_an_id_of_its_own() -> None:
    log = new_log()
    append(log, [1], tags=[b"red"], nodes=[b"n1"])
    old_tag, old_node = ids_of(log, 1)
    gone = delete(log, (1, 1))
    back = stage(log, [1, 1], tags=[b"blue", b"red"], nodes=[b"n2", b"n1"])
    new_tag, new_node = ids_of(log, 3)
    assert len({old_tag, ids_of(log, 2)[0], new_tag}) == 3
    assert sorted(log.nodes.every_id_of(b"n1")) == sorted([old_node, new_node])
    log.publish(gone)
    assert log.tags.strings.name(old_tag) is None
    assert log.tags.strings.name(new_tag) == b"red"
    log.publish(back)
    assert log.nodes.every_id_of(b"n1") == [new_node]


def test_ops_let_go_of_their_own_strings_and_not_of_the_next_ones() -> None:
    log = new_log()
    append(log, [1] * 3, tags=[b"a", b"b", b"c"])
    ids = [ids_of(log, seq)[0] for seq in (1, 2, 3)]
    first, second = delete(log, (2, 2)), delete(log, (1, 1), (3, 3))
    log.publish(first)
    assert [log.tags.strings.name(i) for i in ids] == [b"a", None, b"c"]
    log.publish(second)
    assert [log.tags.strings.name(i) for i in ids] == [None, None, None]


# -- a failed commit ---------------------------------------------------------------------------------------


def test_discarding_restores_what_is_published() -> None:
    log = new_log(4)
    append(log, [3] * 6, tags=[b"a", b"b"] * 3, nodes=[b"n"] * 6)
    log.publish(delete(log, (2, 2)))
    before = (log.next_seq, log.first_seq, log.count, log.bytes, log.cap_lost, log.ttl_lost, log.config)
    delete(log, (1, 1), (4, 4))
    evict(log, 5)
    log.config = TopicConfig(cap_records=9)
    log.dropped = True
    stage(log, [1] * 9, tags=[b"z"] * 9, nodes=[b"m"] * 9)
    skip(log, 7)
    log.pending = 5
    log.discard_staged()
    assert before == (
        log.next_seq,
        log.first_seq,
        log.count,
        log.bytes,
        log.cap_lost,
        log.ttl_lost,
        log.config,
    )
    assert not log.dropped
    assert staged(log) == readable(log) == [1, 3, 4, 5, 6]
    assert [log.tags.count(tag) for tag in (b"a", b"b", b"z")] == [3, 2, 0]
    assert log.nodes.count(log.nodes.id_of(b"n")) == 5
    assert log.nodes.id_of(b"m") == 0
    assert log.tags.seqs(b"a", log.are_live).tolist() == [1, 3, 5]
    found = log.find(2)
    assert found is not None
    assert found[0].flags_at(found[1]) & DELETED
    assert all(
        not (chunk.rows["flags"] & STAGED_DELETE)[chunk.live(0, chunk.count)].any() for chunk in log.chunks
    )
    log.check()


def test_discarding_a_first_write_leaves_an_empty_log() -> None:
    log = new_log()
    stage(log, [1] * 9, tags=[b"z"] * 9)
    log.pending = 1
    log.discard_staged()
    assert (log.chunks, log.next_seq, log.first_seq, log.count, log.bytes) == ([], 1, 1, 0, 0)
    assert len(log.tags) == 0
    log.check()


# -- everything together -----------------------------------------------------------------------------------

Live = dict[int, tuple[int, bytes | None]]  # seq: size, tag


class Model:
    """One state of a topic: what a list of changes makes of it."""

    def __init__(self) -> None:
        self.live: Live = {}
        self.head = 0
        self.cap_lost = 0
        self.ttl_lost = 0
        self.lost: set[int] = set()

    def copy(self) -> Model:
        other = Model()
        other.live, other.head = dict(self.live), self.head
        other.cap_lost, other.ttl_lost, other.lost = self.cap_lost, self.ttl_lost, set(self.lost)
        return other

    def kill(self, first: int, last: int) -> int:
        gone = [seq for seq in self.live if first <= seq <= last]
        for seq in gone:
            del self.live[seq]
        return max(gone, default=0)

    @property
    def summary(self) -> tuple[int, int, int, int, int]:
        return len(self.live), sum(s for s, _ in self.live.values()), self.head, self.cap_lost, self.ttl_lost


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[str, int, int, bytes | None]]:
    kinds = ["append", "append", "delete", "delete", "evict", "expire", "skip", "lose", "publish", "publish"]
    return draw(
        st.lists(
            st.tuples(
                st.sampled_from(kinds),
                st.integers(0, 100),
                st.integers(1, 30) | st.sampled_from([70, 140]),
                st.sampled_from([None, b"a", b"b", b"c"]),
            ),
            max_size=25,
        )
    )


def change(log: TopicLog, model: Model, kind: str, place: int, length: int, tag: bytes | None) -> Op:
    """Make one change to both."""
    first = 1 + place * model.head // 101
    last = min(model.head, first + length - 1)
    if kind == "append":
        for i in range(length):
            model.live[model.head + 1 + i] = (place, tag)
        model.head += length
        return stage(log, [place] * length, tags=[tag] * length, nodes=[tag] * length)
    if kind == "delete":
        model.kill(first, last)
        return delete(log, (first, last)) if last >= first else delete(log)
    if kind == "skip":
        model.head += length
        return skip(log, length)
    if kind == "lose":
        last = first + length - 1
        model.kill(first, last)
        model.head = max(model.head, last)
        model.lost |= set(range(first, last + 1))
        return lose(log, first, last)
    gone = model.kill(0, first)
    if kind == "expire":
        model.ttl_lost = max(model.ttl_lost, gone)
    else:
        model.cap_lost = max(model.cap_lost, gone)
    return evict(log, min(first, model.head), ttl=kind == "expire")


def compare(log: TopicLog, decided: Model, seen: Model) -> None:
    log.check()
    assert staged(log) == sorted(decided.live)
    assert decided.summary == (log.count, log.bytes, log.next_seq - 1, log.cap_lost, log.ttl_lost)
    assert log.first_seq == min(decided.live, default=log.next_seq)
    log.tags.check([(seq, decided.live[seq][1]) for seq in sorted(decided.live)])
    view = log.view
    assert readable(log) == sorted(seen.live)
    assert seen.summary == (view.count, view.bytes, view.head, view.cap_lost, view.ttl_lost)
    assert seqs_of(view.losses) == seen.lost
    for seq, (_, tag) in seen.live.items():
        tag_id, node_id = ids_of(log, seq)
        assert (log.tags.strings.name(tag_id), log.nodes.name(node_id)) == (tag, tag)


@settings(deadline=None, max_examples=150)
@given(changes(), st.sampled_from([1, 5, 16, 1000]), st.booleans())
def test_both_states_are_what_the_changes_make_of_them(
    steps: list[tuple[str, int, int, bytes | None]], rows_max: int, fails: bool
) -> None:
    log = new_log(rows_max)
    decided, seen = Model(), Model()
    waiting: deque[tuple[Op, Model]] = deque()

    def publish() -> None:
        nonlocal seen
        op, seen = waiting.popleft()
        log.publish(op)
        log.pending -= 1

    for kind, place, length, tag in steps:
        if kind == "publish":
            if waiting:
                publish()
        else:
            waiting.append((change(log, decided, kind, place, length, tag), decided.copy()))
            log.pending += 1
        compare(log, decided, seen)
    if fails:
        log.discard_staged()
        compare(log, seen, seen)
        return
    while waiting:
        publish()
        compare(log, decided, seen)
