"""Disk usage of segments by tier: live, dead and reclaimable bytes as of each topic's last checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from topics.engine.storage.segments import COLD, HOT, SegmentMeta


@dataclass(slots=True)
class Usage:
    live: int = 0
    dead: int = 0
    # Dead bytes of sealed segments, which compaction or, in the cold tier, consolidation frees.
    reclaimable: int = 0

    def add(self, other: Usage, sign: int = 1) -> None:
        self.live += sign * other.live
        self.dead += sign * other.dead
        self.reclaimable += sign * other.reclaimable


class TierUsage:
    """Running totals over all topics, updated topic by topic."""

    def __init__(self) -> None:
        self.totals = {HOT: Usage(), COLD: Usage()}
        self._by_topic: dict[int, tuple[Usage, Usage]] = {}

    def set(self, topic_id: int, metas: Sequence[SegmentMeta]) -> None:
        self.forget(topic_id)
        if not metas:
            return  # the case for a hundred thousand small topics
        hot, cold = Usage(), Usage()
        for meta in metas:
            usage = cold if meta.tier == COLD else hot
            dead = min(meta.dead_bytes, meta.data_bytes)
            usage.live += meta.data_bytes - dead
            usage.dead += dead
            usage.reclaimable += dead if meta.sealed else 0
        self._by_topic[topic_id] = hot, cold
        self.totals[HOT].add(hot)
        self.totals[COLD].add(cold)

    def forget(self, topic_id: int) -> None:
        known = self._by_topic.pop(topic_id, None)
        if known is not None:
            self.totals[HOT].add(known[0], -1)
            self.totals[COLD].add(known[1], -1)
