"""Rounds of copies: topics with many dests are copied at intervals, so that batches have more records.

A batch of copies costs about as much for one record as for fifty. So rounds of a topic begin at least ROUND_US_PER_DEST
times its number of dests apart. A topic that was idle for that long does not wait, nor does a flow with GATHERED_MIN
records.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

ROUND_US_PER_DEST = 200  # a batch takes 50 µs on both ends, so small batches use a quarter of a core at most
DESTS_MIN = 32  # with fewer, the interval would be too short to matter
GATHERED_MIN = 64


@dataclass(slots=True, eq=False)
class CopyState:
    """The rounds of one source topic."""

    next_round_us: int = 0  # earliest start of the next round
    is_delayed: bool = False  # flows wait for it


T = TypeVar("T", bound=CopyState)


class CopyRounds(Generic[T]):
    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self._delayed: list[tuple[int, int, T]] = []  # heap: start of the round, tie-breaker, topic
        self._delays = 0

    def begin(self, copied: T, dests: int) -> None:
        """Copies of a topic are sent now; begins a new round if it is time."""
        if dests >= DESTS_MIN:
            now_us = self._now_us()
            if now_us >= copied.next_round_us:
                copied.next_round_us = now_us + dests * ROUND_US_PER_DEST

    def may_delay(self, copied: T, gathered: int) -> bool:
        """Whether a flow with `gathered` records waits for the next round."""
        if not copied.next_round_us or gathered >= GATHERED_MIN:
            return False
        return self._now_us() < copied.next_round_us

    def delay(self, copied: T) -> None:
        if not copied.is_delayed:
            copied.is_delayed = True
            self._delays += 1
            heapq.heappush(self._delayed, (copied.next_round_us, self._delays, copied))

    @property
    def wake_at_us(self) -> int | None:
        return self._delayed[0][0] if self._delayed else None

    def take_due(self) -> list[T]:
        """Remove and return the topics whose next round may begin."""
        now_us = self._now_us()
        found: list[T] = []
        while self._delayed and self._delayed[0][0] <= now_us:
            copied = heapq.heappop(self._delayed)[2]
            copied.is_delayed = False
            found.append(copied)
        return found
