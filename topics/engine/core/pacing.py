"""No faster than allowed: long work in the background is done a piece at a time, and each piece is paid for with time.

Whoever syncs a small write waits behind all that others have given to the same disk, so what nobody waits for is given to it bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, TypeVar

from topics.api import limits
from topics.engine.core.clock import EngineClock
from topics.engine.core.tasks import Blocking, WaitUntil

Made = TypeVar("Made")
Work = Generator[None, None, Made]


class RateLimit:
    """`rate` tells how many bytes a second are allowed at this moment; 0: as many as can be."""

    def __init__(self, clock: EngineClock, rate: Callable[[], int]) -> None:
        self._clock = clock
        self._rate = rate
        self._free_at_us = 0  # what was done so far is paid for at this time
        self._is_awaited = False

    @property
    def wake_ms(self) -> int | None:
        """When the next piece may be done; None: nobody waits for that."""
        return self._paid_ms if self._is_awaited else None

    @property
    def _paid_ms(self) -> int:
        return -(-self._free_at_us // 1000) - limits.PACE_BURST_MS

    def _may_go_on(self) -> bool:
        return self._clock.mono_ms >= self._paid_ms or not self._rate()

    def _pay(self, size: int) -> None:
        rate = self._rate()
        if rate:
            self._free_at_us = max(self._free_at_us, self._clock.mono_ms * 1000) + size * 1_000_000 // rate

    def steps(
        self,
        work: Work[Made],
        *,
        kind: str,
        steps: int,
        step_bytes: int,
        total: int,
        is_off: Callable[[], bool],
    ) -> Generator[Any, Any, Made | None]:
        """Do `work` off the loop, so many steps at a time; None when it is given up. `total` is what all of it costs."""
        try:
            while True:
                self._is_awaited = True
                yield WaitUntil(lambda: self._may_go_on() or is_off())
                self._is_awaited = False
                if is_off():
                    return None
                ended = yield Blocking(kind, _advancing(work, steps))
                cost = total if ended else min(steps * step_bytes, total)
                total -= cost
                self._pay(cost)
                if ended:
                    made: Made = ended[0]
                    return made
        finally:
            self._is_awaited = False
            with suppress(
                ValueError
            ):  # another thread is in the middle of it, and nobody waits for that at a stop
                work.close()


def _advancing(work: Work[Made], steps: int) -> Callable[[], list[Made]]:
    def advance() -> list[Made]:
        try:
            for _ in range(steps):
                next(work)
        except StopIteration as end:
            return [end.value]
        return []

    return advance


class GrowthRate:
    """How fast a count grows: over the last one to two spans of PACE_SPAN_MS, so that neither a burst nor a pause decides."""

    def __init__(self, clock: EngineClock, count: Callable[[], int]) -> None:
        self._clock = clock
        self._count = count
        self._older = self._newer = (clock.mono_ms, count())

    @property
    def per_s(self) -> int:
        now_ms, count = self._clock.mono_ms, self._count()
        if now_ms - self._newer[0] >= limits.PACE_SPAN_MS:
            self._older, self._newer = self._newer, (now_ms, count)
        since_ms, before = self._older
        return (count - before) * 1000 // max(now_ms - since_ms, limits.PACE_SPAN_MS)
