"""The engine's clock on the machine's own time."""

from __future__ import annotations

import time


class SystemClock:
    """Clock over the kernel's wall and monotonic clocks, read in whole nanoseconds to keep floats out."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000
