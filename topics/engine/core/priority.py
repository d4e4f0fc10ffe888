"""Effective priority of a topic: configured, or derived from how recently it was read.

P = manual + auto        manual = priority, clamped to ±1000; auto = 500 · 2^(-idle / 30 s), only without a priority
"""

from __future__ import annotations

import math

from topics.api.config import TopicConfig

MANUAL_MAX = 1000
AUTO_MAX = 500
HALF_LIFE_MS = 30_000
IDLE_MAX_MS = 300_000  # ten half-lives: the rest rounds to 0


def effective_priority(config: TopicConfig, last_read_ms: int | None, now_ms: int) -> int:
    """The priority of a topic that was last read at `last_read_ms`; None: never."""
    if config.priority is not None:
        return max(-MANUAL_MAX, min(MANUAL_MAX, config.priority))
    if not config.auto_priority or last_read_ms is None:
        return 0
    idle_ms = max(0, now_ms - last_read_ms)
    if idle_ms >= IDLE_MAX_MS:
        return 0
    return round(AUTO_MAX * math.pow(2.0, -idle_ms / HALF_LIFE_MS))
