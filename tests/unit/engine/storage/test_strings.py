"""Interned strings and their reference counts."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topics.engine.storage.strings import StringTable


def u4(*ids: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(ids, np.uint32)


def test_add_and_release() -> None:
    table = StringTable()
    assert table.add(None) == 0
    a, b = table.add(b"a"), table.add(b"b")
    assert (a, b) == (1, 2)
    assert table.add(b"a") == a
    assert (table.count(a), table.count(b), table.count(0)) == (2, 1, 0)
    assert table.release(a) is None
    assert table.release(a) == b"a"
    assert table.release(0) is None
    assert (table.id_of(b"a"), table.name(a), len(table)) == (0, None, 1)
    assert table.add(b"c") == a, "a released id is used again"
    assert (table.name(a), table.id_of(b"c"), table.id_of(None)) == (b"c", a, 0)


def test_the_empty_string_is_a_string() -> None:
    table = StringTable()
    assert table.add(b"") == 1
    assert table.name(1) == b""


@pytest.mark.parametrize("size", [1, 100])
def test_releasing_too_often_is_an_error_that_changes_nothing_else(size: int) -> None:
    table = StringTable()
    table.add_all([b"a"] * (size - 1) + [b"b"])
    a = table.add(b"a")
    with pytest.raises(ValueError, match="more often") as caught:
        table.release_many(u4(*[a] * (size + 1)))
    table.add(b"c")  # the table can still grow while the error is referenced
    assert caught.value is not None
    with pytest.raises(ValueError, match="more often"):
        table.release(table.release_many(u4(table.id_of(b"b")))[0][0])


def test_release_many_ignores_zeros_at_every_size() -> None:
    for size in (4, 4000):
        table = StringTable()
        table.add_all([f"{i}".encode() for i in range(1000)])  # so that both ways of counting are used
        table.add_all([b"x"] * size)
        x = table.id_of(b"x")
        ids = np.zeros(size * 2, np.uint32)
        ids[::2] = x
        assert table.release_many(ids) == [(x, b"x")]
        assert table.release_many(np.zeros(size, np.uint32)) == []
        assert len(table) == 1000


def test_release_of_a_few_ids_of_a_large_table() -> None:
    table = StringTable()
    ids = table.add_all([f"{i}".encode() for i in range(1000)])
    table.add(b"500")
    assert [name for _, name in table.release_many(u4(*ids[450:550]))] == [
        f"{i}".encode() for i in range(450, 550) if i != 500
    ]
    assert table.count(table.id_of(b"500")) == 1


def test_add_counted() -> None:
    table = StringTable()
    table.add(b"b")
    ids = table.add_counted([b"a", b"b", b"c", b"a"], np.array([2, 3, 0, 1]))
    assert ids.dtype == np.uint32
    assert ids.tolist() == [2, 1, 0, 2]
    assert (table.count(2), table.count(1), table.id_of(b"c")) == (3, 4, 0)
    assert table.add_counted([], np.zeros(0, np.int64)).tolist() == []
    with pytest.raises(ValueError, match="1 names with 2 counts"):
        table.add_counted([b"a"], np.array([1, 2]))


NAME = st.sampled_from([b"", b"a", b"b", b"c", b"d", b"e"])
OPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.none() | NAME, max_size=6)),
        st.tuples(st.just("counted"), st.lists(st.tuples(NAME, st.integers(0, 40)), max_size=4)),
        st.tuples(st.just("release"), st.lists(st.tuples(NAME, st.integers(1, 90)), max_size=4)),
    ),
    max_size=30,
)


@given(OPS)
@settings(deadline=None)
def test_against_a_counter(ops: list[tuple[str, list[object]]]) -> None:
    table, model = StringTable(), Counter[bytes]()
    for kind, given_items in ops:
        items: list[object] = given_items
        if kind == "add":
            names = [x for x in items if x is None or isinstance(x, bytes)]
            ids = table.add_all(names)
            assert [table.name(i) for i in ids] == names
            model.update(x for x in names if x is not None)
        else:
            pairs = [x for x in items if isinstance(x, tuple)]
            if kind == "counted":
                counts = np.array([n for _, n in pairs], np.int64)
                got = table.add_counted([name for name, _ in pairs], counts)
                for (name, n), string_id in zip(pairs, got.tolist()):
                    assert table.name(string_id) == (name if n else None)
                    model[name] += n
            else:
                dead = [0]
                before = dict(model)
                for name, n in pairs:
                    n = min(n, model[name])
                    model[name] -= n
                    dead += [table.id_of(name)] * n
                forgotten = table.release_many(u4(*dead))
                gone = [name for name in before if before[name] and not model[name]]
                assert sorted(name for _, name in forgotten) == sorted(gone)
        model = +model
        assert len(table) == len(model)
        assert {name: table.count(i) for name, i in table.ids.items()} == dict(model)
        assert all(table.name(i) == name for name, i in table.ids.items())
        assert len(table.names) == len(table.counts)


def test_memory_is_bounded_when_every_record_has_its_own_string() -> None:
    table = StringTable()
    live = table.add_all([b"%012d" % i for i in range(1000)])
    tracemalloc.start()
    for i in range(1000, 20_000):
        table.release(live[i % 1000])
        live[i % 1000] = table.add(b"%012d" % i)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(table.names) == 1001
    assert used < 400_000, "a thousand live strings, however many there were before"
