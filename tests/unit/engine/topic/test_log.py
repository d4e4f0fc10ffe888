"""Goal: decisions see staged state, readers see published state, and both result from the same list of changes.

Method: a model of a topic in a dict runs next to `TopicLog` under random changes, publications and a failed commit;
after every step both states are compared row by row. Subtle parts (floors, string references) also have small tests
of their own.
"""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import length
from tests.support.log_rig import append, delete, evict, lose, new_log, readable, seqs_of, skip, stage, staged
from topics.api.config import TopicConfig
from topics.engine.storage.frames import DELETED, STAGED_DELETE
from topics.engine.storage.segments import SegmentMeta
from topics.engine.topic.log import Op, TopicLog

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
    """Deleted records are not lost: a reader before them gets no gap."""
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
    assert log.dead_segments == metas[:2]
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
    # A reader that has a row must still be able to look up its ids.
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
    assert sorted(log.nodes.all_ids_of(b"n1")) == sorted([old_node, new_node])
    log.publish(gone)
    assert log.tags.strings.name(old_tag) is None
    assert log.tags.strings.name(new_tag) == b"red"
    log.publish(back)
    assert log.nodes.all_ids_of(b"n1") == [new_node]


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
    """One state of a topic, as a list of changes makes it."""

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
    """Apply one change to both."""
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


@settings(max_examples=length.pick(short=30, long=1000))
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

    for kind, place, rows, tag in steps:
        if kind == "publish":
            if waiting:
                publish()
        else:
            waiting.append((change(log, decided, kind, place, rows, tag), decided.copy()))
            log.pending += 1
        compare(log, decided, seen)
    if fails:
        log.discard_staged()
        compare(log, seen, seen)
        return
    while waiting:
        publish()
        compare(log, decided, seen)
