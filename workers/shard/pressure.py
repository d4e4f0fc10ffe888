"""The pressure on one shard: what it sees of itself, what fronts tell of themselves, and writes that are refused for it.

A write that has waited for FULL_WAIT_MS before the shard came to it, while the pressure is full, found the way to the shard
full: it is refused with 429 before it is read, unless it says `disable_backpressure`. So a shard that gets more than it can do
spends its time on writes that somebody still waits for.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from topics.api.errors import Throttled
from topics.engine.runtime.engine import Engine, Job
from topics.engine.shard.pressure import COALESCE, FULL_WAIT_MS, RETRY_AFTER_MS, THRESHOLDS, Pressure
from topics.link import wire

HEARD_US = 2_000_000  # what a front said is believed for so long; it says it again while it lasts
WRITES = frozenset((wire.WRITE, wire.WRITE_LINES, wire.WRITE_RAW, wire.TXN_STAGE))

# Read before the body is decoded: the same text inside of a record counts, too.
_DISABLED = re.compile(rb'"disable_backpressure"\s*:\s*true')


class ShardPressure:
    def __init__(self, engine: Engine, now_us: Callable[[], int]) -> None:
        self._shard = engine.shard
        self._checkpointer = engine.checkpointer
        self._now_us = now_us
        self._pressure = Pressure()
        engine.shard.measures = self._pressure.measures
        self._fronts: dict[bytes, tuple[float, int]] = {}  # how it is, when it said so
        self._sync_began_us: int | None = None
        self._picks = self._waited_ms = 0  # of the scheduler, at the last sample
        self.text = b""  # for `performance`
        self.refused = 0

    @property
    def value(self) -> float:
        return self._pressure.value

    # -- what is seen --------------------------------------------------------------------------------------

    def arrived(self, delay_us: int) -> None:
        """How long the first request of a message was on its way."""
        self._pressure.delayed(delay_us)

    def began(self, jobs: list[Job]) -> None:
        if any(job.kind == "sync" for job in jobs):
            self._sync_began_us = self._now_us()

    def synced(self) -> None:
        self._sync_began_us = None

    def heard(self, front: bytes, permille: int) -> None:
        if permille:
            self._fronts[front] = min(permille, 1000) / 1000, self._now_us()
        else:
            self._fronts.pop(front, None)

    def front_gone(self, front: bytes) -> None:
        self._fronts.pop(front, None)

    # -- what follows --------------------------------------------------------------------------------------

    @property
    def wake_at_us(self) -> int | None:
        at_ms = self._pressure.wake_at_ms
        if at_ms is None and (self._fronts or self._sync_began_us is not None or self._shard.backlog):
            return self._now_us() + 100_000
        return at_ms * 1000 if at_ms is not None else None

    def tend(self, now_us: int) -> None:
        pressure = self._pressure
        if not pressure.is_due(now_us // 1000):
            return
        scheduler = self._shard.scheduler
        picks, waited_ms = scheduler.picks - self._picks, scheduler.waited_ms - self._waited_ms
        self._picks, self._waited_ms = scheduler.picks, scheduler.waited_ms
        began_us = self._sync_began_us
        if self._fronts:
            late_us = now_us - HEARD_US
            self._fronts = {front: told for front, told in self._fronts.items() if told[1] > late_us}
        pressure.sample(
            now_us // 1000,
            backlog=self._shard.backlog,
            wait_ms=waited_ms / picks if picks else 0.0,
            sync_ms=(now_us - began_us) / 1000 if began_us is not None else 0.0,
            log_share=self._checkpointer.log_share,
            reported=max((value for value, _ in self._fronts.values()), default=0.0),
        )
        self.text = b',"pressure":%.2f' % pressure.value if pressure.value > THRESHOLDS[COALESCE][0] else b""

    def check(self, request: wire.Request, now_us: int) -> None:
        """Refuse a write that found the shard full."""
        if not self._pressure.measures.refuses or request.op not in WRITES:
            return
        if now_us - request.received_us <= FULL_WAIT_MS * 1000 or _DISABLED.search(request.body):
            return
        self.refused += 1
        raise Throttled(
            "more is written than this shard can take; come back later", limit="pressure",
            retry_after_ms=RETRY_AFTER_MS,
        )  # fmt: skip
