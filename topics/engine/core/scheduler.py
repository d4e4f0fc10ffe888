"""Topic scheduler: priority bands with weighted shares, first come first served within a band.

    P = priority + age           age: 0.1 per millisecond of waiting, at most 1000
    band     B4 ≥ 750    B3 ≥ 500    B2 ≥ 250    B1 ≥ 0    B0 below
    weight   8           4           2           1         1

Bands take turns, starting with the top one. In its turn a band may spend QUANTUM times its weight; overspending is deducted
from its next turn. So while two bands both have waiting entries, what they spend is in proportion to their weights. An empty
band forfeits its turn, so the scheduler never idles.

A waiting entry ages and rises from band to band, keeping the time it has waited; after WAIT_MAX_MS it is in the top band,
however low it began. Only being served ends the wait. So no entry starves: the top band has a turn in every round, and serves
the entry that has waited longest first.

A picked entry stays the first of its band until it is `done`: it is served to the end in slices, and other bands may have
turns between two slices.

The time is passed in. Ages are checked when a promotion may be due, at most every AGE_EVERY_MS.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

WEIGHTS = (1, 1, 2, 4, 8)  # of B0 to B4
FLOORS = (0, 250, 500, 750)  # minimum P of B1 to B4
TOP = len(WEIGHTS) - 1
AGE_PER_MS = 0.1
WAIT_MAX_MS = 10_000
AGE_EVERY_MS = 50
QUANTUM = (
    8 * 1024
)  # about the cost of a topic with one small page; costs are bytes plus an equivalent for work
STALE_MAX = 64  # stale heap entries always tolerated

T = TypeVar("T")


def band_of(priority: float) -> int:
    return sum(priority >= floor for floor in FLOORS)


@dataclass(slots=True, eq=False)
class ScheduledEntry(Generic[T]):
    """A scheduled item. It is listed until it is done or discarded, and never reused."""

    item: T
    since_ms: int
    number: int
    band: int
    is_lowered: bool  # one band below its priority's band
    is_listed: bool = True


@dataclass(slots=True)
class Band(Generic[T]):
    number: int
    credit: int = 0
    size: int = 0
    used: int = 0  # total cost since the start
    current: ScheduledEntry[T] | None = None  # picked and not done
    waiting: list[tuple[int, int, ScheduledEntry[T]]] = field(default_factory=list)  # (since, number, entry)

    def add(self, entry: ScheduledEntry[T]) -> None:
        if len(self.waiting) > 2 * self.size + STALE_MAX:
            self.waiting = [row for row in self.waiting if self._has(row[2])]
            heapq.heapify(self.waiting)
        self.size += 1
        heapq.heappush(self.waiting, (entry.since_ms, entry.number, entry))

    def take(self) -> ScheduledEntry[T] | None:
        """The next entry. Stale ones, which have left the band, are dropped."""
        while self.current is None and self.waiting:
            entry = heapq.heappop(self.waiting)[2]
            if self._has(entry):
                self.current = entry
        return self.current

    def _has(self, entry: ScheduledEntry[T]) -> bool:
        return entry.is_listed and entry.band == self.number


class Scheduler(Generic[T]):
    def __init__(self, priority_of: Callable[[T], float]) -> None:
        self._priority_of = priority_of  # current priority, without the age
        self.bands: list[Band[T]] = [Band(number) for number in range(len(WEIGHTS))]
        self._turn = 0  # band whose turn it is; the first pick moves on to the top one
        self.size = 0  # entries
        self._last_number = 0
        self._new_entries: list[ScheduledEntry[T]] = []  # added since promotions were last checked
        self._promotions: list[tuple[int, int, ScheduledEntry[T]]] = []  # (when it may rise, number, entry)
        self._promote_at_ms = 0
        self.picks = 0
        self.waited_ms = 0  # total over all picks

    # -- adding and removing -------------------------------------------------------------------------------

    def add(
        self, item: T, now_ms: int, *, lowered: bool = False, since_ms: int | None = None
    ) -> ScheduledEntry[T]:
        """Schedule an item. `since_ms`: since when it has been waiting, if longer than now."""
        since_ms = now_ms if since_ms is None else since_ms
        self._last_number += 1
        entry = ScheduledEntry(item, since_ms, self._last_number, 0, lowered)
        entry.band = self._band_of(entry, now_ms)
        self.bands[entry.band].add(entry)
        self.size += 1
        self._new_entries.append(entry)
        return entry

    def discard(self, entry: ScheduledEntry[T]) -> None:
        """Remove an entry. No effect if it is not listed."""
        if not entry.is_listed:
            return
        entry.is_listed = False
        band = self.bands[entry.band]
        band.size -= 1
        self.size -= 1
        if band.current is entry:
            band.current = None

    # -- picking -------------------------------------------------------------------------------------------

    def pick(self, now_ms: int) -> ScheduledEntry[T] | None:
        """The next entry; the caller must pass it to `done`, `slice_done` or `discard` before the next pick."""
        if not self.size:
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
        """The entry is completely served."""
        self._charge(entry, cost)
        self.discard(entry)

    def slice_done(self, entry: ScheduledEntry[T], cost: int, now_ms: int) -> None:
        """A slice of the entry was served; the rest follows while its band has credit or in its next turn."""
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
        """Set when to check whether it has reached the next band. Its priority may fall until then, but never rises."""
        waits_ms = WAIT_MAX_MS
        if entry.band + entry.is_lowered < TOP:
            missing = FLOORS[entry.band + entry.is_lowered] - self._priority_of(entry.item)
            waits_ms = min(math.ceil(missing / AGE_PER_MS), WAIT_MAX_MS)
        rises_ms = entry.since_ms + waits_ms
        heapq.heappush(self._promotions, (max(rises_ms, now_ms + 1), entry.number, entry))
