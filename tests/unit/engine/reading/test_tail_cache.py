"""Goal: the tail cache serves the newest log entries as written, within its bound in bytes, and no evicted ones.

Method: a model that keeps the entries in a list runs next to it under random histories. The cost of eviction is not
measured as time but counted: entry bodies count how often they are accessed.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from topics.engine.reading.tail_cache import TailCache


def test_an_entry_is_found_from_any_offset_inside_it() -> None:
    cache = TailCache(100)
    cache.add(1, 64, b"abcdefghij")
    assert cache.find(1, 64, 10) == (b"abcdefghij", 0)
    assert cache.find(1, 67, 3) == (b"abcdefghij", 3)
    assert cache.find(1, 73, 1) == (b"abcdefghij", 9)


def test_a_range_across_entries_is_not_found() -> None:
    cache = TailCache(100)
    cache.add(1, 64, b"abcdefghij")
    cache.add(1, 120, b"klm")
    assert cache.find(1, 63, 1) is None
    assert cache.find(1, 64, 11) is None
    assert cache.find(1, 73, 2) is None
    assert cache.find(1, 80, 1) is None
    assert cache.find(1, 64, 59) is None
    assert cache.find(1, 123, 1) is None
    assert cache.find(2, 64, 1) is None


def test_the_oldest_go_when_the_bound_is_passed_and_not_before() -> None:
    cache = TailCache(30)
    for i in range(3):
        cache.add(1, 100 * i, bytes([65 + i]) * 10)
    assert all(cache.find(1, 100 * i, 10) for i in range(3))
    cache.add(1, 300, b"D")
    assert cache.find(1, 0, 1) is None
    assert cache.find(1, 100, 10) == (b"B" * 10, 0)
    cache.add(2, 0, b"E" * 29)
    assert cache.find(1, 100, 1) is cache.find(1, 200, 1) is None
    assert cache.find(1, 300, 1) == (b"D", 0)
    assert cache.find(2, 0, 29) == (b"E" * 29, 0)


def test_an_entry_larger_than_the_bound_is_not_kept_and_pushes_out_all_others() -> None:
    cache = TailCache(30)
    cache.add(1, 0, b"a" * 10)
    cache.add(1, 100, b"b" * 31)
    assert cache.find(1, 0, 1) is cache.find(1, 100, 1) is None
    cache.add(1, 200, b"c" * 30)
    assert cache.find(1, 200, 30) == (b"c" * 30, 0)


def test_a_cache_of_no_bytes_keeps_nothing() -> None:
    cache = TailCache(0)
    cache.add(1, 0, b"a")
    assert cache.find(1, 0, 1) is None


def test_a_forgotten_file_is_not_served_and_gives_its_room_back() -> None:
    cache = TailCache(30)
    cache.add(1, 0, b"a" * 10)
    cache.add(2, 0, b"b" * 10)
    cache.add(2, 100, b"c" * 10)
    cache.forget_file(2)
    cache.forget_file(9)
    assert cache.find(2, 0, 1) is cache.find(2, 100, 1) is None
    cache.add(2, 200, b"d" * 20)
    assert cache.find(1, 0, 10) == (b"a" * 10, 0)
    assert cache.find(2, 200, 20) == (b"d" * 20, 0)
    cache.add(3, 0, b"e")
    assert cache.find(1, 0, 10) is None
    assert cache.find(2, 200, 20) == (b"d" * 20, 0)
    assert cache.find(2, 0, 1) is None


def test_neighbouring_files_are_not_mixed_up() -> None:
    cache = TailCache(100)
    cache.add(1, 2**32 - 8, b"a" * 8)
    cache.add(2, 0, b"b" * 8)
    assert cache.find(1, 2**32 - 8, 8) == (b"a" * 8, 0)
    assert cache.find(2, 0, 8) == (b"b" * 8, 0)
    cache.forget_file(1)
    assert cache.find(1, 2**32 - 8, 8) is None
    assert cache.find(2, 0, 8) == (b"b" * 8, 0)


def places_after(bytes_max: int, *, forget: bool) -> int:
    """How many places are stored after a thousand files of ten entries, one file in use at a time."""
    cache = TailCache(bytes_max)
    for number in range(1000):
        for i in range(10):
            cache.add(number, 8 * i, b"x" * 8)
        if forget:
            cache.forget_file(number)
    return len(cache._positions)


def test_entries_that_were_pushed_out_leave_nothing_behind() -> None:
    assert places_after(80, forget=False) < 200


def test_entries_that_were_forgotten_leave_nothing_behind() -> None:
    """With an erase now and then the cache may never fill up: its list of places must not grow without bound."""
    assert places_after(1 << 20, forget=True) < 200


@settings(deadline=None)
@given(
    st.integers(0, 120),
    st.lists(
        st.tuples(
            st.sampled_from(["add"] * 8 + ["rotate", "forget"]), st.integers(1, 40), st.integers(0, 20)
        ),
        max_size=60,
    ),
)
def test_it_serves_what_a_list_of_the_newest_entries_would(
    bytes_max: int, steps: list[tuple[str, int, int]]
) -> None:
    cache = TailCache(bytes_max)
    kept: list[tuple[int, int, bytes]] = []
    seen: list[tuple[int, int, bytes]] = []
    number, at = 1, 64
    for step, (kind, length, gap) in enumerate(steps):
        if kind == "rotate":
            number, at = number + 1, 64
        elif kind == "forget":
            gone = max(1, number - gap % 3)
            cache.forget_file(gone)
            kept = [entry for entry in kept if entry[0] != gone]
        else:
            body = bytes([step % 255 + 1]) * length
            cache.add(number, at, body)
            kept.append((number, at, body))
            seen.append((number, at, body))
            at += length + gap
            while sum(len(entry[2]) for entry in kept) > bytes_max:
                kept.pop(0)
        for entry in seen:
            expected = (entry[2], 0) if entry in kept else None
            assert cache.find(entry[0], entry[1], len(entry[2])) == expected
        assert cache._bytes == sum(len(entry[2]) for entry in kept) <= bytes_max


class CountedBytes(bytes):
    """Bytes that count accesses to their length or truth value, as a search through entries makes them."""

    asked = 0

    def __len__(self) -> int:
        CountedBytes.asked += 1
        return super().__len__()

    def __bool__(self) -> bool:
        CountedBytes.asked += 1
        return True


def cost_of_turnover(entries: int) -> float:
    """Accesses per entry while a full cache of this many entries is replaced twice."""
    cache = TailCache(entries * 8)
    bodies = [CountedBytes(b"%08d" % i) for i in range(3 * entries)]
    for i in range(entries):
        cache.add(1, 8 * i, bodies[i])
    CountedBytes.asked = 0
    for i in range(entries, 3 * entries):
        cache.add(1, 8 * i, bodies[i])
    asked = CountedBytes.asked
    newest = 3 * entries - 1
    assert cache.find(1, 8 * newest, 8) == (bodies[newest], 0)
    assert cache.find(1, 8 * (2 * entries - 1), 8) is None
    return asked / (2 * entries)


def test_dropping_the_oldest_does_not_search_through_the_others() -> None:
    """A cache of 32 MiB may hold hundreds of thousands of small entries, and every write then evicts one."""
    assert cost_of_turnover(200) < 20
    assert cost_of_turnover(2000) < 20
