"""Restart backoff and heartbeat of a child process. Pure: no clock, no process."""

from __future__ import annotations

import math

RESTART_DELAY_MIN_S = 0.1
RESTART_DELAY_MAX_S = 10.0
HEALTHY_S = 30.0  # a child that worked for this long resets the count of failures
FAILING_FROM = 2  # failures in a row: one may be an accident
PING_INTERVAL_S = 1.0
START_S = 30.0  # timeout of the first answer: the child may still be starting


class Backoff:
    """Exponential backoff of restarts. `failures` counts exits in a row."""

    def __init__(self) -> None:
        self.failures = 0
        self._next_s = RESTART_DELAY_MIN_S

    def delay_after(self, worked_s: float) -> float:
        """The delay before the next restart. `worked_s`: how long the child was ready; 0 if it never was."""
        if worked_s >= HEALTHY_S:
            self.failures = 0
            self._next_s = RESTART_DELAY_MIN_S
        self.failures += 1
        delay_s = self._next_s
        self._next_s = min(delay_s * 2, RESTART_DELAY_MAX_S)
        return delay_s


class Heartbeat:
    """Counts ticks without an answer, one tick per ping interval.

    Ticks, not seconds: if the supervisor itself is suspended for a minute, that is one tick, and no child is killed.
    """

    def __init__(self, timeout_s: float) -> None:
        interval_s = ping_interval_s(timeout_s)
        self._ticks_max = math.ceil(timeout_s / interval_s)
        self._ticks_allowed = math.ceil(max(timeout_s, START_S) / interval_s)
        self._ticks_silent = 0
        self._waiting = False

    def answered(self) -> None:
        self._waiting = False
        self._ticks_silent = 0
        self._ticks_allowed = self._ticks_max

    def tick(self) -> bool:
        """Count one tick. True: the last ping was answered, send the next."""
        if self._waiting:
            self._ticks_silent += 1
            return False
        self._waiting = True
        return True

    @property
    def hung(self) -> bool:
        return self._ticks_silent >= self._ticks_allowed


def ping_interval_s(timeout_s: float) -> float:
    """Short enough that even a short timeout spans several ticks."""
    return min(PING_INTERVAL_S, timeout_s / 4)
