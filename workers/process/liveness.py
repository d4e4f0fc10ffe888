"""Decisions about a child's life, without a clock or a process: when to restart it, and when it counts as hung."""

from __future__ import annotations

import math

RESTART_DELAY_MIN_S = 0.1
RESTART_DELAY_MAX_S = 10.0
CALM_S = 30.0  # a child that did its work for this long was fine, and its next death is a first one
FAILING_FROM = 2  # deaths in a row: one may be an accident
PING_INTERVAL_S = 1.0
START_S = 30.0  # a child that has never answered may still be loading its modules


class Backoff:
    """How long to wait before the next restart. `failures` counts the deaths in a row."""

    def __init__(self) -> None:
        self.failures = 0
        self._next_s = RESTART_DELAY_MIN_S

    def delay_after(self, worked_s: float) -> float:
        """After the death of a child that did its work for so long; 0 for one that never came to it, however long it tried."""
        if worked_s >= CALM_S:
            self.failures = 0
            self._next_s = RESTART_DELAY_MIN_S
        self.failures += 1
        delay_s = self._next_s
        self._next_s = min(delay_s * 2, RESTART_DELAY_MAX_S)
        return delay_s


class Heartbeat:
    """Counts ticks without an answer, one tick per ping interval.

    Ticks, not seconds: when the supervisor itself was stopped for a minute, that is one tick,
    and no child is killed for it.
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
        """Count one tick; True when a ping is to be sent, which is when the last one was answered."""
        if self._waiting:
            self._ticks_silent += 1
            return False
        self._waiting = True
        return True

    @property
    def hung(self) -> bool:
        return self._ticks_silent >= self._ticks_allowed


def ping_interval_s(timeout_s: float) -> float:
    """Often enough that a short timeout still takes several missed ticks."""
    return min(PING_INTERVAL_S, timeout_s / 4)
