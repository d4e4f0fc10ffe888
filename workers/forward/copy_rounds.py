"""When topics with many dests are copied: in rounds, between whose beginnings their records gather.

A batch of copies costs about as much for one record as for fifty. So between the beginnings of two rounds of a topic lies
REST_US for each of its dests. Whoever was idle for so long does not wait, nor does a flow for which GATHERED_MIN records
are there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

REST_US = (
    200  # a batch takes about 50, both its ends together: small ones so take a quarter of a core at the most
)
DESTS_MANY = 32  # the rest of fewer would be over before it was noticed
GATHERED_MIN = 64


@dataclass(slots=True, eq=False)
class CopyState:
    """A topic that is copied, as far as its rounds are concerned."""

    rests_until_us: int = 0  # its next round begins no earlier
    is_resting: bool = False  # some of its flows wait for that


T = TypeVar("T", bound=CopyState)


class CopyRounds(Generic[T]):
    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self._resting: list[tuple[int, int, T]] = []  # until when, a number, who
        self._rests = 0

    def begin(self, copied: T, dests: int) -> None:
        """Copies of it are sent now: of a new round, if its rest is over."""
        if dests >= DESTS_MANY:
            now_us = self._now_us()
            if now_us >= copied.rests_until_us:
                copied.rests_until_us = now_us + dests * REST_US

    def may_rest(self, copied: T, gathered: int) -> bool:
        """Whether so many records of it may wait for the next round."""
        if not copied.rests_until_us or gathered >= GATHERED_MIN:
            return False
        return self._now_us() < copied.rests_until_us

    def rest(self, copied: T) -> None:
        if not copied.is_resting:
            copied.is_resting = True
            self._rests += 1
            heapq.heappush(self._resting, (copied.rests_until_us, self._rests, copied))

    @property
    def wake_at_us(self) -> int | None:
        return self._resting[0][0] if self._resting else None

    def rested(self) -> list[T]:
        """Those whose rest is over."""
        now_us = self._now_us()
        found: list[T] = []
        while self._resting and self._resting[0][0] <= now_us:
            copied = heapq.heappop(self._resting)[2]
            copied.is_resting = False
            found.append(copied)
        return found
