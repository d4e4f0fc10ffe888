"""Rate limiting of background I/O, and the measurement that the rate is derived from.

A small synced write waits for everything queued at the same disk before it. So bulk writes that no client waits for are
done in small pieces, with a pause after each.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, TypeVar

from topics.api import limits
from topics.engine.core.clock import EngineClock
from topics.engine.core.tasks import Blocking, WaitUntil

Result = TypeVar("Result")
PacedWork = Generator[None, None, Result]


class RateLimit:
    """Paces work in bytes. `rate` returns the bytes per second allowed at the moment; 0: no limit."""

    def __init__(self, clock: EngineClock, rate: Callable[[], int]) -> None:
        self._clock = clock
        self._rate = rate
        self._free_at_us = 0  # when the work done so far is within the rate
        self._is_waiting = False

    @property
    def wake_ms(self) -> int | None:
        """When the next piece may be done; None: no work is waiting."""
        return self._allowed_at_ms if self._is_waiting else None

    @property
    def _allowed_at_ms(self) -> int:
        return -(-self._free_at_us // 1000) - limits.PACE_BURST_MS

    def _is_allowed(self) -> bool:
        return self._clock.mono_ms >= self._allowed_at_ms or not self._rate()

    def _charge(self, size: int) -> None:
        rate = self._rate()
        if rate:
            self._free_at_us = max(self._free_at_us, self._clock.mono_ms * 1000) + size * 1_000_000 // rate

    def steps(
        self,
        work: PacedWork[Result],
        *,
        kind: str,
        steps: int,
        step_bytes: int,
        total: int,
        is_cancelled: Callable[[], bool],
    ) -> Generator[Any, Any, Result | None]:
        """Run `work` off the loop, `steps` steps at a time; None when cancelled. `total` is its cost in bytes."""
        try:
            while True:
                self._is_waiting = True
                yield WaitUntil(lambda: self._is_allowed() or is_cancelled())
                self._is_waiting = False
                if is_cancelled():
                    return None
                ended = yield Blocking(kind, _advance(work, steps))
                cost = total if ended else min(steps * step_bytes, total)
                total -= cost
                self._charge(cost)
                if ended:
                    result: Result = ended[0]
                    return result
        finally:
            self._is_waiting = False
            # ValueError: another thread is running a step, which a shutdown does not wait for.
            with suppress(ValueError):
                work.close()


def _advance(work: PacedWork[Result], steps: int) -> Callable[[], list[Result]]:
    """A job that runs up to `steps` steps; it returns a list with the result at the end, an empty one before."""

    def advance() -> list[Result]:
        try:
            for _ in range(steps):
                next(work)
        except StopIteration as end:
            return [end.value]
        return []

    return advance


class GrowthRate:
    """Growth of a counter per second, averaged over the last one to two spans of PACE_SPAN_MS."""

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
