"""The tag index, compared with a simple model that remembers every record."""

from __future__ import annotations

import tracemalloc
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topics.engine.core.subjects import TagMatch
from topics.engine.topic.tags import LoadPart, Mask, Seqs, TagIndex


class Model:
    """A tag index next to the records that it indexes; every deletion is applied to both."""

    def __init__(self) -> None:
        self.index = TagIndex()
        self.next_seq = 1
        self.live: dict[int, tuple[bytes | None, int]] = {}  # seq → tag, tag id
        self.asked = 0  # how many seqs the index asked about

    def is_live(self, seqs: Seqs) -> Mask:
        self.asked += seqs.size
        return np.array([seq in self.live for seq in seqs.tolist()], np.bool_)

    def add(self, *tags: bytes | None) -> None:
        ids = self.index.add_batch(self.next_seq, tags)
        for tag, tag_id in zip(tags, ids):
            assert self.index.strings.name(tag_id) == tag
            self.live[self.next_seq] = (tag, tag_id)
            self.next_seq += 1

    def kill(self, seqs: list[int]) -> None:
        ids = [self.live.pop(seq)[1] for seq in seqs]
        if len(ids) == 1:
            self.index.remove(ids[0])
        else:
            self.index.remove_many(np.array(ids, np.uint32))

    def seqs(self, tag: bytes) -> list[int]:
        return [seq for seq, (name, _) in self.live.items() if name == tag]

    def check(self) -> None:
        self.index.check([(seq, tag) for seq, (tag, _) in self.live.items()])

    def check_reads(self, tag: bytes, around: int) -> None:
        """Every point read of a tag; those that change the index come in the middle and at the end."""
        index, want = self.index, self.seqs(tag)
        below, above = bisect_right(want, around), bisect_left(want, around)
        assert index.count(tag) == len(want)
        assert index.first_at_or_after(tag, around, self.is_live) == (want[above] if above < len(want) else 0)
        assert index.last_at_or_before(tag, around, self.is_live) == (want[below - 1] if below else 0)
        assert index.first(tag, self.is_live) == (want[0] if want else 0)
        assert index.last(tag, self.is_live) == (want[-1] if want else 0)


def test_add_count_and_forget() -> None:
    model = Model()
    model.add(b"a", None, b"b", b"a")
    assert (model.index.count(b"a"), model.index.count(b"b"), model.index.count(b"c")) == (2, 1, 0)
    assert model.index.seqs(b"a", model.is_live).tolist() == [1, 4]
    assert model.index.seqs(b"b", model.is_live).dtype == np.uint64
    assert model.index.seqs(b"c", model.is_live).tolist() == []
    model.kill([1])
    assert model.index.first(b"a", model.is_live) == 4
    model.kill([3])
    model.kill([2])
    assert (len(model.index), model.index.first(b"b", model.is_live)) == (1, 0)
    model.add(b"b")
    assert model.index.seqs(b"b", model.is_live).tolist() == [5], "a forgotten tag starts again"
    model.check()


def test_add_one_by_one_is_as_in_a_batch() -> None:
    tags = [b"a", None, b"b", b"a", b"b", b"a", b"c"]
    one, batch = TagIndex(), TagIndex()
    assert [one.add(seq, tag) for seq, tag in enumerate(tags, 1)] == batch.add_batch(1, tags)
    for index in (one, batch):
        index.check(list(enumerate(tags, 1)))


def test_no_question_is_asked_while_nothing_listed_is_dead() -> None:
    model = Model()
    model.add(*[b"a", b"b", b"a", b"a"] * 100)
    model.check_reads(b"a", 200)
    model.index.seqs(b"a", model.is_live)
    model.index.surplus(b"a", 10, model.is_live)
    assert model.asked == 0


def test_first_and_last_cost_little_however_many_die() -> None:
    model = Model()
    model.add(*[b"a"] * 20_000)
    for oldest in range(1, 4000):
        model.kill([oldest])
        assert model.index.first(b"a", model.is_live) == oldest + 1
    for newest in range(20_000, 16_000, -1):
        model.kill([newest])
        assert model.index.last(b"a", model.is_live) == newest - 1
    assert model.asked < 8000 * 70, "about one chunk a read"
    model.check()


def test_a_dead_stretch_is_crossed_once() -> None:
    model = Model()
    model.add(*[b"a"] * 10_000)
    model.kill(list(range(3000, 7000)))
    assert model.index.first_at_or_after(b"a", 3500, model.is_live) == 7000
    assert model.index.last_at_or_before(b"a", 3499, model.is_live) == 2999
    model.asked = 0
    assert model.index.first_at_or_after(b"a", 3000, model.is_live) == 7000
    assert model.index.last_at_or_before(b"a", 6999, model.is_live) == 2999
    assert model.asked == 0, "all dead seqs are removed from the list"
    model.check()


def test_a_read_compacts_an_overlong_list() -> None:
    model = Model()
    model.add(*[b"a"] * 100)
    model.kill(list(range(1, 100, 2)) + list(range(2, 80, 2)))
    assert model.index.overdue == 1
    model.index.last(b"a", model.is_live)
    assert model.index.overdue == 0
    model.asked = 0
    assert model.index.seqs(b"a", model.is_live).tolist() == list(range(80, 101, 2))
    assert model.asked == 0
    model.check()


def test_sweep_bounds_tags_that_are_never_read() -> None:
    model = Model()
    for start in range(0, 20_000, 100):
        model.add(*[b"a", b"b"] * 50)
        if start:
            model.kill(list(range(start - 99, start + 1)))
        if start % 1000 == 0:
            while model.index.sweep(model.is_live, 1):
                pass
            model.check()
    listed = sum(len(seqs) for seqs in model.index._lists if seqs is not None)
    assert listed <= 2 * (2 * 50 + 16) + 1000


def test_trim() -> None:
    model = Model()
    model.add(*[b"a", b"b"] * 50)
    assert model.index.surplus(b"a", 48, model.is_live).tolist() == [1, 3]
    assert model.index.surplus(b"a", 50, model.is_live).tolist() == []
    assert model.index.surplus(b"c", 0, model.is_live).tolist() == []
    model.kill([1, 5, 99])
    assert model.index.surplus(b"a", 45, model.is_live).tolist() == [3, 7]
    assert model.index.surplus(b"a", 0, model.is_live).tolist() == model.seqs(b"a")
    model.add(b"c")
    assert model.index.surplus(b"c", 0, model.is_live).tolist() == [101]
    assert model.index.surplus(b"c", 1, model.is_live).tolist() == []


def test_a_cap_per_tag_costs_the_same_at_any_size() -> None:
    model = Model()
    model.add(*[b"a"] * 5000)
    for _ in range(3000):
        model.add(b"a")
        excess = model.index.surplus(b"a", 5000, model.is_live).tolist()
        assert excess == [model.next_seq - 5001]
        model.kill(excess)
    assert model.asked < 3000 * 70
    model.check()


def test_a_read_that_sees_a_death_before_it_is_told_loses_nothing() -> None:
    model = Model()
    model.add(b"a", b"a", b"a")
    model.kill([2])
    ids = [model.live.pop(seq)[1] for seq in (1, 3)]
    assert model.index.surplus(b"a", 0, model.is_live).tolist() == []
    assert model.index.seqs(b"a", model.is_live).tolist() == []
    assert (model.index.first(b"a", model.is_live), model.index.last(b"a", model.is_live)) == (0, 0)
    model.add(b"a")
    model.index.remove_many(np.array(ids, np.uint32))
    model.check()
    model.check_reads(b"a", 4)


def test_names() -> None:
    model = Model()
    model.add(b"a.b", b"a.c", b"a.b.c", b"ab", b"", b"\xff", b"\xff\xff", b"b.b", None, b"a.b", b"a..b")

    def names(op: str, value: bytes) -> list[bytes]:
        return model.index.names(TagMatch(op, value))  # type: ignore[arg-type]

    assert names("Eq", b"a.b") == [b"a.b"]
    assert names("Eq", b"a") == []
    assert names("Glob", b"a.*") == [b"a..b", b"a.b", b"a.b.c", b"a.c"]
    assert names("Glob", b"\xff*") == [b"\xff", b"\xff\xff"]
    assert names("Glob", b"*") == sorted({tag for tag, _ in model.live.values() if tag is not None})
    assert names("Subject", b"a.b") == [b"a.b"]
    assert names("Subject", b"a.*") == [b"a.b", b"a.c"]
    assert names("Subject", b"a.>") == [b"a.b", b"a.b.c", b"a.c"]
    assert names("Subject", b"*.b") == [b"a.b", b"b.b"]
    model.kill([2, 3])
    model.add(b"a.d", b"a.b.c")  # one new, and one that was removed and added between two queries
    assert names("Subject", b"a.*") == [b"a.b", b"a.d"]
    assert names("Subject", b"x.>") == []


def test_names_after_much_coming_and_going() -> None:
    model = Model()
    model.add(*[b"%04d" % i for i in range(2000)])
    everything = TagMatch("Glob", b"*")
    for turn in range(20):
        held = dict.fromkeys(tag for tag, _ in model.live.values() if tag is not None)
        assert model.index.names(everything) == sorted(held)
        model.kill(list(model.live)[: 10 if turn % 2 else 400])
        model.add(*[b"%04d" % ((turn * 37 + i) % 3000) for i in range(5 if turn % 3 else 300)])
        model.kill(list(model.live)[-3:])


def part(first_seq: int, tags: list[bytes | None], live: list[bool], unused: list[bytes]) -> LoadPart:
    """A stored segment: ids of its own, and names that only dead rows, or none, still use."""
    names = unused + [tag for tag in dict.fromkeys(tags) if tag is not None and tag not in unused]
    ids = [0 if tag is None else names.index(tag) + 1 for tag in tags]
    return LoadPart(first_seq, np.array(ids, np.uint32), names, np.array(live, np.bool_))


ROW = st.tuples(st.none() | st.sampled_from([b"a", b"b", b"c.d", b"c.e", b"f"]), st.booleans())


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(ROW, max_size=30)), max_size=6))
@settings(deadline=None)
def test_load(segments: list[tuple[int, list[tuple[bytes | None, bool]]]]) -> None:
    model, parts = Model(), []
    for gap, rows in segments:
        model.next_seq += gap
        tags, live = [tag for tag, _ in rows], [alive for _, alive in rows]
        parts.append(part(model.next_seq, tags, live, [b"b", b"unused"]))
        model.next_seq += len(rows)
    for loaded, ids in zip(parts, model.index.load(parts)):
        assert ids.dtype == np.uint32
        for row, (local, alive, tag_id) in enumerate(zip(loaded.tag_ids.tolist(), loaded.live, ids.tolist())):
            tag = loaded.names[local - 1] if local and alive else None
            assert model.index.strings.name(tag_id) == tag
            if alive:
                model.live[loaded.first_seq + row] = (tag, tag_id)
    model.check()
    model.add(b"a", b"new", b"a")
    model.kill([seq for seq in model.live if seq % 3])
    for tag in (b"a", b"b", b"new"):
        model.check_reads(tag, model.next_seq // 2)
    model.check()


def test_load_refuses_what_cannot_be() -> None:
    rows = part(10, [b"a", b"b"], [True, True], [])
    index = TagIndex()
    with pytest.raises(ValueError, match="begins before seq 12"):
        index.load([rows, part(11, [b"a"], [True], [])])
    with pytest.raises(ValueError, match="empty"):
        index.load([rows])
    with pytest.raises(ValueError, match="without a name"):
        TagIndex().load([LoadPart(1, np.array([2], np.uint32), [b"a"], np.array([True]))])


def test_load_into_an_index_that_became_empty() -> None:
    index = TagIndex()
    index.remove_many(np.array(index.add_batch(1, [b"x", b"y", b"x"]), np.uint32))
    index.load([part(10, [b"a", b"b", b"a"], [True, True, True], [])])
    index.check([(10, b"a"), (11, b"b"), (12, b"a")])


TAGS = [b"a", b"b", b"c.d", b"c.e", b"c.e.f"]
OPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "one",
                "many",
                "mixed",
                "oldest",
                "newest",
                "middle",
                "every",
                "read",
                "seqs",
                "trim",
                "names",
                "sweep",
            ]
        ),
        st.integers(0, len(TAGS) - 1),
        st.integers(1, 400),
    ),
    max_size=25,
)


def change(model: Model, kind: str, tag: bytes, n: int) -> None:
    """One write. The deletes leave dead ranges at the front, at the end, inside and scattered."""
    mine = model.seqs(tag)
    if kind == "one":
        model.add(tag)
    elif kind == "many":
        model.add(*[tag] * (2 * n))
    elif kind == "mixed":
        model.add(*[(*TAGS, None)[i % 6] for i in range(n)])
    elif kind == "oldest":
        model.kill(mine[:n])
    elif kind == "newest":
        model.kill(mine[-n:])
    elif kind == "middle":
        model.kill(mine[len(mine) // 4 : len(mine) // 4 + n])
    elif kind == "every":
        model.kill(mine[:: n % 3 + 1])


def read(model: Model, kind: str, tag: bytes, n: int) -> None:
    """One read, compared with the model."""
    index, want = model.index, model.seqs(tag)
    if kind == "read":
        model.check_reads(tag, model.next_seq * n // 400)
    elif kind == "seqs":
        assert index.seqs(tag, model.is_live).tolist() == want
    elif kind == "trim":
        assert index.surplus(tag, n // 4, model.is_live).tolist() == want[: max(len(want) - n // 4, 0)]
    elif kind == "sweep":
        index.sweep(model.is_live, n % 3)
    elif kind == "names":
        match = [TagMatch("Glob", b"c.*"), TagMatch("Subject", b"c.*"), TagMatch("Glob", b"*")][n % 3]
        held = dict.fromkeys(name for name, _ in model.live.values())
        assert index.names(match) == sorted(x for x in held if x is not None and match.matches(x))


@given(OPS)
def test_against_the_model(ops: list[tuple[str, int, int]]) -> None:
    model = Model()
    for kind, which, n in ops:
        change(model, kind, TAGS[which], n)
        read(model, kind, TAGS[which], n)
        model.check()
    for tag in TAGS:
        model.check_reads(tag, model.next_seq // 2)
        assert model.index.seqs(tag, model.is_live).tolist() == model.seqs(tag)


@contextmanager
def traced() -> Iterator[list[int]]:
    """Bytes allocated inside and still used at the end."""
    used = [0]
    tracemalloc.start()
    try:
        yield used
        used[0] = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def fill(index: TagIndex, records: int, tags: int) -> npt.NDArray[np.uint32]:
    ids = np.zeros(records, np.uint32)
    for start in range(0, records, 1000):
        batch = [b"tag-%08d" % (i % tags) for i in range(start, start + 1000)]
        ids[start : start + 1000] = index.add_batch(start + 1, batch)
    return ids


def test_memory_of_distinct_tags() -> None:
    with traced() as used:
        index = TagIndex()
        fill(index, 10_000, 10_000)
        index.names(TagMatch("Glob", b"*"))
    assert used[0] < 200 * 10_000


def test_memory_at_a_hundred_records_per_tag() -> None:
    with traced() as used:
        index = TagIndex()
        fill(index, 40_000, 400)
    assert used[0] < 12 * 40_000


def test_memory_follows_what_is_live() -> None:
    index = TagIndex()
    with traced() as used:
        for start in range(1, 10_001, 1000):
            ids = index.add_batch(start, [b"tag-%08d" % i for i in range(start, start + 1000)])
            index.names(TagMatch("Glob", b"tag-*"))
            index.remove_many(np.array(ids, np.uint32))
    assert len(index) == 0
    assert used[0] < 500_000, "a thousand live records, however many there were before"
