"""Backpressure of a shard: samples of its own load and of the fronts' load, and refusal of writes.

At full pressure, a write that has waited for FULL_WAIT_MS on its way to the shard is refused with 429 before it is
decoded, unless it sets `disable_backpressure`. So an overloaded shard spends its time on writes whose clients still wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from topics.api.errors import Throttled
from topics.engine.core.pressure import (
    COALESCE,
    FULL_WAIT_MS,
    RETRY_AFTER_MS,
    SAMPLE_MS,
    THRESHOLDS,
    Measures,
    Pressure,
)
from topics.engine.runtime.boundary import Job, ShardEngine
from topics.link import wire

REPORT_TTL_US = 2_000_000  # validity of a front's report; fronts repeat them under load
WRITES = frozenset((wire.WRITE, wire.TXN_STAGE))

# Searched before the body is decoded, so the same text inside a record counts, too.
_DISABLED = re.compile(rb'"disable_backpressure"\s*:\s*true')


class ShardPressure:
    def __init__(self, engine: ShardEngine, now_us: Callable[[], int]) -> None:
        self._stats = engine.stats
        self._now_us = now_us
        self._pressure = Pressure()
        self._fronts: dict[bytes, tuple[float, int]] = {}  # pressure, time of the report
        self._sync_began_us: int | None = None
        self.sample_at_us = 0  # when `tick` takes the next sample
        self._picks = self._waited_ms = 0  # of the scheduler, at the last sample
        self.text = b""  # for `performance`
        self.refused = 0

    @property
    def measures(self) -> Measures:
        return self._pressure.measures

    @property
    def value(self) -> float:
        return self._pressure.value

    # -- inputs --------------------------------------------------------------------------------------------

    def record_delay(self, delay_us: int) -> None:
        """How long the first request of a message took to arrive."""
        self._pressure.delayed(delay_us)

    def jobs_started(self, jobs: list[Job], now_us: int) -> None:
        if any(job.kind == "sync" for job in jobs):
            self._sync_began_us = now_us

    def synced(self) -> None:
        self._sync_began_us = None

    def front_reported(self, front: bytes, permille: int) -> None:
        if permille:
            self._fronts[front] = min(permille, 1000) / 1000, self._now_us()
        else:
            self._fronts.pop(front, None)

    def front_gone(self, front: bytes) -> None:
        self._fronts.pop(front, None)

    # -- outputs -------------------------------------------------------------------------------------------

    @property
    def wake_at_us(self) -> int | None:
        at_ms = self._pressure.wake_at_ms
        if at_ms is None and (self._fronts or self._sync_began_us is not None or self._stats.backlog):
            return self._now_us() + 100_000
        return at_ms * 1000 if at_ms is not None else None

    def tick(self, now_us: int) -> None:
        if now_us < self.sample_at_us:
            return
        pressure = self._pressure
        self.sample_at_us = (now_us // 1000 + SAMPLE_MS) * 1000
        now_picks, now_waited_ms = self._stats.picks
        picks, waited_ms = now_picks - self._picks, now_waited_ms - self._waited_ms
        self._picks, self._waited_ms = now_picks, now_waited_ms
        began_us = self._sync_began_us
        if self._fronts:
            oldest_us = now_us - REPORT_TTL_US
            self._fronts = {front: report for front, report in self._fronts.items() if report[1] > oldest_us}
        pressure.sample(
            now_us // 1000,
            backlog=self._stats.backlog,
            wait_ms=waited_ms / picks if picks else 0.0,
            sync_ms=(now_us - began_us) / 1000 if began_us is not None else 0.0,
            log_share=self._stats.log_share,
            reported=max((value for value, _ in self._fronts.values()), default=0.0),
        )
        self.text = b',"pressure":%.2f' % pressure.value if pressure.value > THRESHOLDS[COALESCE][0] else b""

    def check(self, request: wire.Request, now_us: int) -> None:
        """Refuse a write that has waited too long for an overloaded shard."""
        if not self._pressure.measures.refuses or request.op not in WRITES:
            return
        if now_us - request.received_us <= FULL_WAIT_MS * 1000 or _DISABLED.search(request.body):
            return
        self.refused += 1
        raise Throttled(
            "this shard is overloaded with writes; retry later", limit="pressure",
            retry_after_ms=RETRY_AFTER_MS,
        )  # fmt: skip
