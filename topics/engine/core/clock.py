"""Engine time: a clock that never runs backwards.

It starts at the wall clock, advances with the monotonic clock, and is slewed towards the wall clock, never stepped.
`now_ms` does not decrease even across a restart: a *time ceiling* is logged ahead of use. After a restart on the same
boot the monotonic clock, which kept running, bounds how far the previous process got; after a reboot time starts at
the ceiling or at the wall clock, whichever is later.
"""

from __future__ import annotations

from topics.api.limits import SLEW_MS_PER_S
from topics.engine.core.ports import Clock


class EngineClock:
    __slots__ = ("_clock", "_residue", "mono_ms", "now_ms")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.mono_ms = clock.monotonic_ms()  # as last read
        self._residue = 0
        self.now_ms = clock.wall_ms()

    def resume(self, ceiling_ms: int, at_ms: int, at_mono_ms: int | None) -> None:
        """Continue after a restart: at the wall clock, but not before any time that was used.

        On the same boot the previous process can be bounded: its time was `at_ms` when the monotonic clock was
        `at_mono_ms`, advanced no faster than slewing allows, and never passed the ceiling.
        """
        if at_mono_ms is not None:
            elapsed_ms = max(0, self.mono_ms - at_mono_ms)
            ceiling_ms = min(ceiling_ms, at_ms + elapsed_ms + elapsed_ms * SLEW_MS_PER_S // 1000 + 1)
        self.now_ms = max(self.now_ms, ceiling_ms)

    def read(self) -> int:
        """Advance to the present and return it."""
        mono_ms = self._clock.monotonic_ms()
        elapsed_ms = mono_ms - self.mono_ms
        if elapsed_ms <= 0:
            return self.now_ms
        self.mono_ms = mono_ms
        now_ms = self.now_ms + elapsed_ms
        off_ms = self._clock.wall_ms() - now_ms
        if off_ms:
            # Correct by whole milliseconds; the fraction is carried over to the next reading.
            budget, self._residue = divmod(elapsed_ms * SLEW_MS_PER_S + self._residue, 1000)
            budget = min(budget, elapsed_ms)
            now_ms += max(-budget, min(budget, off_ms))
        self.now_ms = now_ms
        return now_ms

    def present_ms(self) -> int:
        """Roughly what `read` would return, for callers that must not advance the clock."""
        return self.now_ms + max(0, self._clock.monotonic_ms() - self.mono_ms)
