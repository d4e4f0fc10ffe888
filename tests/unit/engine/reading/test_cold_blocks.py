"""Goal: the cache of cold blocks is bounded, and a request that waited for a block still finds it in its turn.

Method: the cache alone, with blocks of ten bytes.
"""

from __future__ import annotations

import pytest

from topics.engine.reading import cold_blocks
from topics.engine.reading.cold_blocks import BlockCache, BlockKey, ColdMiss, ColdReads, SegmentWant


def key(number: int) -> BlockKey:
    return (1, 1, 0, number)


def filled(count: int, bytes_max: int) -> BlockCache:
    cache = BlockCache(bytes_max)
    for number in range(count):
        cache.put(key(number), (b"0123456789", True))
    return cache


def held(cache: BlockCache, count: int) -> list[int]:
    return [number for number in range(count) if key(number) in cache]


def test_the_oldest_leave() -> None:
    cache = filled(5, 20)
    cache.get(key(0))
    cache.trim()
    assert held(cache, 5) == [0, 4]


def test_blocks_that_a_reader_still_needs_stay() -> None:
    """A claim read its blocks one turn after they had arrived. They were evicted by then, it fetched them again, and
    so on.
    """
    cache = filled(5, 10)
    cache.hold([key(1), key(2)])
    for _ in range(3):
        cache.trim()
        assert held(cache, 5) == [1, 2]
    cache.put(key(3), (b"0123456789", True))
    cache.trim()
    assert held(cache, 5) == [1, 2]
    assert cache.get(key(1)) is not None
    assert cache.get(key(2)) is not None
    cache.trim()
    assert held(cache, 5) == [2]


def test_others_that_want_it_do_not_let_it_go() -> None:
    cache = filled(2, 0)
    cache.hold([key(1)])
    assert cache.peek(key(1)) is not None
    cache.trim()
    assert held(cache, 2) == [1]


def test_cached_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_blocks, "COLD_HELD_BYTES_MAX", 25)
    cache = filled(5, 0)
    for number in range(5):
        cache.hold([key(number)])
    cache.trim()
    assert held(cache, 5) == [3, 4]


def test_a_topic_that_goes_takes_its_blocks_along() -> None:
    cache = filled(3, 0)
    cache.hold([key(0)])
    cache.forget_topic(1)
    cache.put(key(0), (b"0123456789", True))
    cache.trim()
    assert held(cache, 3) == []


def test_named_waiters_find_their_blocks() -> None:
    """Two fetches for one claim: the first block must stay until the second has arrived and been read."""
    jobs: list[tuple[object, object]] = []
    cache = BlockCache(0)
    reads = ColdReads(_Store(), cache, lambda kind, work, done: jobs.append((work, done)))
    woken: list[object] = []
    wants = [SegmentWant((1, first, 0), f"seg-{first}", 10, None, [0]) for first in (1, 2)]
    reads.wait(ColdMiss(wants), woken.append, name="claims")
    for work, done in jobs:
        done(work(), None)  # type: ignore[operator]
        cache.trim()
    assert woken == [None]
    assert (1, 1, 0, 0) in cache
    assert (1, 2, 0, 0) in cache


class _Store:
    def read_range(self, key: str, offset: int, length: int) -> bytes:
        return b"0" * length
