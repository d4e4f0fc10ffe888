"""How hard a front has it, from 0 to 1: how late its loop comes to what is due, and how full its buffers are.

Sampled every SAMPLE_MS and told to every shard when it changes, and again while it lasts: what could relieve a front, larger
and fewer pages and slower writers, is in the shards' hands.
"""

from __future__ import annotations

from collections.abc import Callable

from router.pending import CREDIT_BYTES, PENDING_MAX, PendingRequests
from topics.engine.shard.pressure import DELAY_MS, NEGLIGIBLE, SAMPLE_MS, SMOOTHING, overload
from topics.link import wire

TELL_FROM = 0.05  # so much is a change
TELL_AGAIN_US = 1_000_000


class FrontPressure:
    def __init__(
        self,
        core: PendingRequests,
        *,
        now_us: Callable[[], int],
        later: Callable[[int, Callable[[], None]], object],
        buffered_share: Callable[[], float],
    ) -> None:
        """`buffered_share`: how full the buffers for answers are, from 0 to 1."""
        self._core = core
        self._now_us = now_us
        self._later = later
        self._buffered_share = buffered_share
        self.value = 0.0
        self._told = 0.0
        self._told_us = 0
        self._due_us = 0

    def start(self) -> None:
        self._due_us = self._now_us() + SAMPLE_MS * 1000
        self._later(SAMPLE_MS * 1000, self._tick)

    def _tick(self) -> None:
        self.sample((self._now_us() - self._due_us) / 1000)
        self.start()

    def sample(self, late_ms: float) -> None:
        links = self._core.links
        shares = [self._buffered_share()]
        shares += [max(link.cost / CREDIT_BYTES, len(link.pending) / PENDING_MAX) for link in links]
        found = max(overload(late_ms, DELAY_MS), min(max(shares), 1.0))
        self.value += (found - self.value) * SMOOTHING
        if self.value < NEGLIGIBLE:
            self.value = 0.0
        self._tell()

    def _tell(self) -> None:
        now_us = self._now_us()
        has_changed = abs(self.value - self._told) >= TELL_FROM or bool(self.value) != bool(self._told)
        if not has_changed and not (self.value and now_us - self._told_us >= TELL_AGAIN_US):
            return
        self._told, self._told_us = self.value, now_us
        for shard in range(len(self._core.links)):
            self._core.tell(shard, wire.PRESSURE, round(self.value * 1000))
