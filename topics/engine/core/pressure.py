"""Overload control: a pressure value from 0 to 1, and the measures it triggers. No I/O: figures in, measures out.

    delay      how long requests and deliveries wait for their turn, against 5 ms
    backlog    topics that wait for delivery, against 256
    sync       how long the current sync has taken so far, against 50 ms
    log        log written since the last checkpoint: 0 up to half of its maximum, 1 at the maximum, where writes are refused

Each of the first three counts as 1 - bound/figure: 0 up to its bound, 0.5 at twice, 0.8 at five times, 0.95 at twenty times.
The pressure is the maximum of these, smoothed over samples of SAMPLE_MS, and of the pressure that fronts report.

    measure   on               off      effect
    coalesce  > 0.2            < 0.1    deliveries wait up to 20 ms for more, except in the top band
    widen     > 0.4            < 0.3    a sync waits for more writes: 0.5 to 10 ms, linear in the pressure
    defer     > 0.8 for 0.5 s  < 0.6    forwarding one band lower; no pushes of B0
    refuse    > 0.95           < 0.8    writes that have waited too long before they arrive are refused

The on and off thresholds differ, so that no measure flaps.
"""

from __future__ import annotations

from dataclasses import dataclass

SAMPLE_MS = 100
DELAY_MS = 5.0
BACKLOG = 256
SYNC_MS = 50.0
SMOOTHING = 0.4  # weight of the newest sample
NEGLIGIBLE = 0.005  # less counts as 0

COALESCE, WIDEN, DEFER, REFUSE = range(4)
THRESHOLDS = ((0.2, 0.1), (0.4, 0.3), (0.8, 0.6), (0.95, 0.8))  # on above the first, off below the second
SUSTAINED = 5  # consecutive samples above the threshold before DEFER is on

COALESCE_MS_MAX = 20
WINDOW_MS = (0.5, 10.0)
FULL_WAIT_MS = 500  # under REFUSE, writes that have waited this long are refused
RETRY_AFTER_MS = 1_000


@dataclass(slots=True)
class Measures:
    """The measures in force."""

    coalesce_ms: int = 0
    window_ms: int = 0
    defers: bool = False
    refuses: bool = False


def overload(figure: float, bound: float) -> float:
    return 1.0 - bound / figure if figure > bound else 0.0


class Pressure:
    def __init__(self) -> None:
        self.value = 0.0
        self.measures = Measures()
        self._own = 0.0
        self._is_active = [False] * len(THRESHOLDS)
        self._high = 0  # consecutive samples above the threshold of DEFER
        self._sampled_ms: int | None = None
        self._delay_us = 0
        self._delays = 0

    def delayed(self, delay_us: int) -> None:
        """Record how long a request or delivery has waited for its turn."""
        self._delay_us += max(delay_us, 0)
        self._delays += 1

    @property
    def wake_at_ms(self) -> int | None:
        """When the next sample is due even if nothing happens; None without pressure."""
        if not self.value or self._sampled_ms is None:
            return None
        return self._sampled_ms + SAMPLE_MS

    def sample(
        self,
        now_ms: int,
        *,
        backlog: int,
        wait_ms: float,
        sync_ms: float,
        reported: float,
        log_share: float = 0.0,
    ) -> None:
        """Take a sample and update the measures.

        `wait_ms`: how long deliveries have waited for their turn; `reported`: the highest pressure reported by fronts;
        `log_share`: log size relative to its maximum.
        """
        passed = 1 if self._sampled_ms is None else max(1, (now_ms - self._sampled_ms) // SAMPLE_MS)
        self._sampled_ms = now_ms
        delay_ms = self._delay_us / self._delays / 1000 if self._delays else 0.0
        self._delay_us = self._delays = 0
        delay_ms = max(delay_ms, wait_ms)
        found = max(overload(delay_ms, DELAY_MS), overload(backlog, BACKLOG), overload(sync_ms, SYNC_MS))
        found = max(found, min(2 * log_share - 1, 1.0))
        for _ in range(min(passed - 1, 20)):  # nothing happened in between
            self._own *= 1 - SMOOTHING
        self._own += (found - self._own) * SMOOTHING
        if self._own < NEGLIGIBLE:
            self._own = 0.0
        self.value = max(self._own, reported)
        self._update_measures()

    def _update_measures(self) -> None:
        value = self.value
        self._high = self._high + 1 if value > THRESHOLDS[DEFER][0] else 0
        for measure, (begins, ends) in enumerate(THRESHOLDS):
            if self._is_active[measure]:
                self._is_active[measure] = value >= ends
            else:
                self._is_active[measure] = value > begins and (measure != DEFER or self._high >= SUSTAINED)
        measures = self.measures
        share = (value - THRESHOLDS[COALESCE][0]) / (1 - THRESHOLDS[COALESCE][0])
        measures.coalesce_ms = round(COALESCE_MS_MAX * max(share, 0.0)) if self._is_active[COALESCE] else 0
        least, most = WINDOW_MS
        measures.window_ms = round(least + (most - least) * value) if self._is_active[WIDEN] else 0
        measures.defers, measures.refuses = self._is_active[DEFER], self._is_active[REFUSE]
