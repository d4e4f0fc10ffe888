"""Which topic is served next: bands by priority, shares by weight, first come first served inside a band.

    P = priority + age           age: 0.1 for each millisecond of waiting, 1000 at the most
    band     B4 ≥ 750    B3 ≥ 500    B2 ≥ 250    B1 ≥ 0    B0 below
    weight   8           4           2           1         1

Bands take turns, the top one first. When it is a band's turn it may use QUANTUM times its weight; what it uses too much is
taken off its next turn. So over any stretch in which two bands always have somebody who waits, what they used is in the
proportion of their weights. A band in which nobody waits loses its turn: nothing is ever idle.

Whoever waits grows older and rises from band to band, with all the time it has waited so far; after WAIT_MAX_MS it is in
the top band, however low it began. Only being served ends the wait. So nobody is overtaken for ever: the top band has its
turn in every round, and there the one that has waited longest comes first.

Who was picked stays the first of its band until it is `done`: what it has is taken to its end in slices, and between two
slices other bands may have their turns.

Time is passed in. Ages are looked at when they are due to matter, at the most every AGE_EVERY_MS.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

WEIGHTS = (1, 1, 2, 4, 8)  # of B0 to B4
FLOORS = (0, 250, 500, 750)  # the least P of B1 to B4
TOP = len(WEIGHTS) - 1
AGE_PER_MS = 0.1
WAIT_MAX_MS = 10_000
AGE_EVERY_MS = 50
QUANTUM = (
    8 * 1024
)  # about what a topic with one small page costs, in the unit of costs: bytes, and what stands for work
STALE_MAX = 64  # so many entries of those who have left may stay, however few are there

T = TypeVar("T")


def band_of(priority: float) -> int:
    return sum(priority >= floor for floor in FLOORS)


@dataclass(slots=True, eq=False)
class ScheduledEntry(Generic[T]):
    """Somebody who waits. It is listed until it is done or discarded, and not used again."""

    item: T
    since_ms: int
    number: int
    band: int
    is_lowered: bool  # it is one band below that of its priority
    is_listed: bool = True


@dataclass(slots=True)
class Band(Generic[T]):
    number: int
    credit: int = 0
    size: int = 0
    used: int = 0  # costs since the start
    current: ScheduledEntry[T] | None = None  # who was picked and is not done
    waiting: list[tuple[int, int, ScheduledEntry[T]]] = field(default_factory=list)  # since when, number, who

    def add(self, entry: ScheduledEntry[T]) -> None:
        if len(self.waiting) > 2 * self.size + STALE_MAX:
            self.waiting = [row for row in self.waiting if self._has(row[2])]
            heapq.heapify(self.waiting)
        self.size += 1
        heapq.heappush(self.waiting, (entry.since_ms, entry.number, entry))

    def take(self) -> ScheduledEntry[T] | None:
        """Who is next. Those who have left the band meanwhile are dropped on the way."""
        while self.current is None and self.waiting:
            entry = heapq.heappop(self.waiting)[2]
            if self._has(entry):
                self.current = entry
        return self.current

    def _has(self, entry: ScheduledEntry[T]) -> bool:
        return entry.is_listed and entry.band == self.number


class Scheduler(Generic[T]):
    def __init__(self, priority_of: Callable[[T], float]) -> None:
        self._priority_of = priority_of  # as it is at that moment, without the age
        self.bands: list[Band[T]] = [Band(number) for number in range(len(WEIGHTS))]
        self._turn = 0  # of which band; the top one comes after it
        self._size = 0
        self._last_number = 0
        self._new_entries: list[ScheduledEntry[T]] = []  # not looked at since they were listed
        self._promotions: list[tuple[int, int, ScheduledEntry[T]]] = []  # when it may rise, number, who
        self._promote_at_ms = 0
        self.picks = 0
        self.waited_ms = 0  # all that were picked together

    def __len__(self) -> int:
        return self._size

    # -- who waits -----------------------------------------------------------------------------------------

    def add(
        self, item: T, now_ms: int, *, lowered: bool = False, since_ms: int | None = None
    ) -> ScheduledEntry[T]:
        """`since_ms`: it has waited before, elsewhere."""
        since_ms = now_ms if since_ms is None else since_ms
        self._last_number += 1
        entry = ScheduledEntry(item, since_ms, self._last_number, 0, lowered)
        entry.band = self._band_of(entry, now_ms)
        self.bands[entry.band].add(entry)
        self._size += 1
        self._new_entries.append(entry)
        return entry

    def discard(self, entry: ScheduledEntry[T]) -> None:
        """It does not wait any more. Without effect when it is not listed."""
        if not entry.is_listed:
            return
        entry.is_listed = False
        band = self.bands[entry.band]
        band.size -= 1
        self._size -= 1
        if band.current is entry:
            band.current = None

    # -- who is next ---------------------------------------------------------------------------------------

    def pick(self, now_ms: int) -> ScheduledEntry[T] | None:
        """The next one; it is to be reported by `done`, `sliced` or `discard` before the next pick."""
        if not self._size:
            self._new_entries.clear()
            return None
        if now_ms >= self._promote_at_ms:
            self._promote_at_ms = now_ms + AGE_EVERY_MS
            self._promote(now_ms)
        while True:
            band = self.bands[self._turn]
            entry = band.take() if band.credit > 0 else None
            if entry is not None:
                self.picks += 1
                self.waited_ms += max(now_ms - entry.since_ms, 0)
                return entry
            band.credit = min(band.credit, 0)
            self._turn = (self._turn or len(self.bands)) - 1
            band = self.bands[self._turn]
            if band.size:
                band.credit += WEIGHTS[band.number] * QUANTUM

    def done(self, entry: ScheduledEntry[T], cost: int) -> None:
        """It has nothing left."""
        self._charge(entry, cost)
        self.discard(entry)

    def slice_done(self, entry: ScheduledEntry[T], cost: int, now_ms: int) -> None:
        """Some of what it has was served, and the rest comes when its band has the next turn."""
        self._charge(entry, cost)
        entry.since_ms = now_ms

    def _charge(self, entry: ScheduledEntry[T], cost: int) -> None:
        band = self.bands[entry.band]
        band.credit -= cost
        band.used += cost

    # -- age -----------------------------------------------------------------------------------------------

    def _band_of(self, entry: ScheduledEntry[T], now_ms: int) -> int:
        waited_ms = now_ms - entry.since_ms
        if waited_ms >= WAIT_MAX_MS:
            return TOP
        band = band_of(self._priority_of(entry.item) + AGE_PER_MS * max(waited_ms, 0))
        return max(band - 1, 0) if entry.is_lowered else band

    def _promote(self, now_ms: int) -> None:
        new_entries, self._new_entries = self._new_entries, []
        for entry in new_entries:
            if entry.is_listed and entry.band < TOP:
                self._schedule_promotion(entry, now_ms)
        while self._promotions and self._promotions[0][0] <= now_ms:
            entry = heapq.heappop(self._promotions)[2]
            if not entry.is_listed or self.bands[entry.band].current is entry:
                continue
            band = self._band_of(entry, now_ms)
            if band > entry.band:
                self.bands[entry.band].size -= 1
                entry.band = band
                self.bands[band].add(entry)
            if entry.band < TOP:
                self._schedule_promotion(entry, now_ms)

    def _schedule_promotion(self, entry: ScheduledEntry[T], now_ms: int) -> None:
        """Look again when it may have reached the next band: its priority may fall meanwhile, and never rises by itself."""
        waits_ms = WAIT_MAX_MS
        if entry.band + entry.is_lowered < TOP:
            missing = FLOORS[entry.band + entry.is_lowered] - self._priority_of(entry.item)
            waits_ms = min(math.ceil(missing / AGE_PER_MS), WAIT_MAX_MS)
        rises_ms = entry.since_ms + waits_ms
        heapq.heappush(self._promotions, (max(rises_ms, now_ms + 1), entry.number, entry))
