"""Goal: a repeated key is recognised during exactly its window, and its memory is bounded.

Method: direct calls at the edges of the window and of the table, and a Hypothesis comparison with a table that keeps
everything.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topics.api.limits import DEDUPE_FORGOTTEN_MAX, DEDUPE_KEYS_MAX
from topics.engine.topic import dedupe
from topics.engine.topic.dedupe import DedupeWindow, Entry


def test_a_key_is_known_up_to_the_last_moment_of_its_window() -> None:
    window = DedupeWindow()
    window.add(b"k", (5, 3, 1000), window_ms=100)
    assert window.find(b"k", now_ms=1000, window_ms=100) == (5, 3, 1000)
    assert window.find(b"k", now_ms=1100, window_ms=100) == (5, 3, 1000)
    assert window.find(b"k", now_ms=1101, window_ms=100) is None
    assert window.find(b"other", now_ms=1000, window_ms=100) is None


def test_the_window_of_the_moment_counts_and_not_that_of_the_write() -> None:
    window = DedupeWindow()
    window.add(b"k", (1, 1, 1000), window_ms=100)
    assert window.find(b"k", now_ms=1050, window_ms=10) is None
    assert window.find(b"k", now_ms=5000, window_ms=10_000) == (1, 1, 1000)


def test_adding_forgets_what_has_left_its_window() -> None:
    window = DedupeWindow()
    window.add(b"a", (1, 1, 1000), window_ms=100)
    window.add(b"b", (2, 1, 1001), window_ms=100)
    window.add(b"c", (3, 1, 1100), window_ms=100)
    assert list(window.entries) == [b"a", b"b", b"c"]
    window.add(b"d", (4, 1, 1101), window_ms=100)
    assert list(window.entries) == [b"b", b"c", b"d"]
    window.add(b"e", (5, 1, 9999), window_ms=100)
    assert list(window.entries) == [b"e"]


def test_a_key_used_again_after_its_window_moves_to_the_end() -> None:
    """Otherwise it would stay the first entry with a new time, and no later entry would ever be removed."""
    window = DedupeWindow()
    window.add(b"a", (1, 1, 1000), window_ms=100)
    window.add(b"b", (2, 1, 1090), window_ms=100)
    window.add(b"a", (3, 1, 1150), window_ms=100)
    assert list(window.entries.items()) == [(b"b", (2, 1, 1090)), (b"a", (3, 1, 1150))]
    window.add(b"c", (4, 1, 1200), window_ms=100)
    assert list(window.entries) == [b"a", b"c"]


def test_a_window_of_zero_knows_a_key_only_within_its_own_moment() -> None:
    window = DedupeWindow()
    window.add(b"a", (1, 1, 1000), window_ms=0)
    assert window.find(b"a", now_ms=1000, window_ms=0) == (1, 1, 1000)
    assert window.find(b"a", now_ms=1001, window_ms=0) is None
    window.add(b"b", (2, 1, 1001), window_ms=0)
    assert list(window.entries) == [b"b"]


def test_a_full_table_forgets_its_oldest_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedupe, "DEDUPE_KEYS_MAX", 3)
    window = DedupeWindow()
    for i, key in enumerate((b"a", b"b", b"c", b"d", b"e")):
        window.add(key, (i + 1, 1, 1000), window_ms=100)
    assert list(window.entries) == [b"c", b"d", b"e"]
    assert window.find(b"b", now_ms=1000, window_ms=100) is None


def test_the_bound_is_the_one_of_the_limits_page() -> None:
    window = DedupeWindow()
    for i in range(DEDUPE_KEYS_MAX + 5):
        window.add(b"%d" % i, (i + 1, 1, 1000), window_ms=100)
    assert len(window.entries) == DEDUPE_KEYS_MAX
    assert next(iter(window.entries)) == b"5"


def test_a_write_forgets_a_few_of_many_keys_past_their_window_in_little_time() -> None:
    """Removing all entries of a full table at once would keep the shard busy for seconds."""
    window = DedupeWindow()
    for i in range(DEDUPE_KEYS_MAX):
        window.add(b"%d" % i, (i + 1, 1, 1000), window_ms=100)
    for i in range(2 * DEDUPE_KEYS_MAX // DEDUPE_FORGOTTEN_MAX):
        before = len(window.entries)
        window.add(b"new %d" % i, (DEDUPE_KEYS_MAX + i, 1, 9000), window_ms=100)
        assert before - len(window.entries) < DEDUPE_FORGOTTEN_MAX
        assert window.find(b"%d" % (DEDUPE_KEYS_MAX - 1), now_ms=9000, window_ms=100) is None
    assert list(window.entries) == [b"new %d" % i for i in range(2 * DEDUPE_KEYS_MAX // DEDUPE_FORGOTTEN_MAX)]


def test_a_snapshot_keeps_what_is_in_its_window_in_order() -> None:
    window = DedupeWindow()
    entries: list[tuple[bytes, Entry]] = [(b"b", (1, 2, 1000)), (b"a", (3, 1, 1050)), (b"c", (4, 1, 1100))]
    for key, entry in entries:
        window.add(key, entry, window_ms=1000)
    assert window.live(now_ms=1100, window_ms=100, stores_ram=True) == entries
    assert window.live(now_ms=1101, window_ms=100, stores_ram=True) == entries[1:]
    assert window.live(now_ms=9999, window_ms=100, stores_ram=True) == []
    restored = DedupeWindow()
    for key, entry in window.live(now_ms=1100, window_ms=1000, stores_ram=True):
        restored.add(key, entry, window_ms=1000)
    assert list(restored.entries.items()) == entries


def test_a_snapshot_keeps_keys_of_records_in_ram_only_when_it_has_those() -> None:
    window = DedupeWindow()
    for seq, (key, in_ram) in enumerate([(b"a", False), (b"b", True), (b"c", True)], start=1):
        window.add(key, (seq, 1, 1000), window_ms=100, in_ram=in_ram)

    def kept(*, stores_ram: bool) -> list[bytes]:
        return [key for key, _ in window.live(now_ms=1000, window_ms=100, stores_ram=stores_ram)]

    assert kept(stores_ram=False) == [b"a"]
    assert kept(stores_ram=True) == [b"a", b"b", b"c"]
    window.stored_up_to(2)
    assert kept(stores_ram=False) == [b"a", b"b"]
    window.add(b"b", (4, 1, 1000), window_ms=100, in_ram=True)
    assert kept(stores_ram=False) == [b"a"]
    window.add(b"b", (5, 1, 1000), window_ms=100)
    assert kept(stores_ram=False) == [b"a", b"b"]


def test_forgotten_keys_are_not_kept_in_ram() -> None:
    window = DedupeWindow()
    window.add(b"a", (1, 1, 1000), window_ms=100, in_ram=True)
    window.add(b"b", (2, 1, 1101), window_ms=100, in_ram=True)
    assert window.in_ram == {b"b"}
    window.discard_after(1)
    assert window.in_ram == set()


def test_keys_of_writes_that_never_happened_are_forgotten() -> None:
    window = DedupeWindow()
    for i in range(1, 6):
        window.add(b"%d" % i, (i * 10, 10, 1000), window_ms=100)
    window.discard_after(30)
    assert list(window.entries) == [b"1", b"2", b"3"]
    window.discard_after(0)
    assert window.entries == {}


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c", b"d", b"e"]), st.integers(0, 30)), max_size=40),
    st.integers(0, 60),
)
def test_within_the_bound_it_knows_what_a_table_that_keeps_everything_knows(
    writes: list[tuple[bytes, int]], window_ms: int
) -> None:
    window = DedupeWindow()
    everything: dict[bytes, Entry] = {}
    now_ms = 0
    for seq, (key, passed_ms) in enumerate(writes, start=1):
        now_ms += passed_ms
        for known, entry in everything.items():
            assert window.find(known, now_ms=now_ms, window_ms=window_ms) == (
                entry if now_ms - entry[2] <= window_ms else None
            )
        if window.find(key, now_ms=now_ms, window_ms=window_ms) is None:
            everything[key] = (seq, 1, now_ms)
            window.add(key, everything[key], window_ms=window_ms)
        times = [entry[2] for entry in window.entries.values()]
        assert times == sorted(times)
        # No entry past its window stays after the newest entry.
        assert all(times[-1] - time <= window_ms for time in times)
