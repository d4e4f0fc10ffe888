"""Load of a front, from 0 to 1: the delay of its event loop and the fill level of its buffers.

It is sampled every SAMPLE_MS, and sent to every shard when it changes and periodically while it is above 0. The shards
relieve the front with fewer, larger pages and by slowing down writers.
"""

from __future__ import annotations

from collections.abc import Callable

from router.pending import CREDIT_BYTES, PENDING_MAX, PendingRequests
from topics.engine.core.pressure import DELAY_MS, NEGLIGIBLE, SAMPLE_MS, SMOOTHING, overload
from topics.link import wire

CHANGE_MIN = 0.05  # smaller changes are not sent
RESEND_US = 1_000_000


class FrontPressure:
    def __init__(
        self,
        core: PendingRequests,
        *,
        now_us: Callable[[], int],
        later: Callable[[int, Callable[[], None]], object],
        buffered_share: Callable[[], float],
    ) -> None:
        """`buffered_share`: fill level of the response buffers, from 0 to 1."""
        self._core = core
        self._now_us = now_us
        self._later = later
        self._buffered_share = buffered_share
        self.value = 0.0
        self._sent = 0.0
        self._sent_us = 0
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
        self._send()

    def _send(self) -> None:
        now_us = self._now_us()
        has_changed = abs(self.value - self._sent) >= CHANGE_MIN or bool(self.value) != bool(self._sent)
        if not has_changed and not (self.value and now_us - self._sent_us >= RESEND_US):
            return
        self._sent, self._sent_us = self.value, now_us
        for shard in range(len(self._core.links)):
            self._core.tell(shard, wire.PRESSURE, round(self.value * 1000))
