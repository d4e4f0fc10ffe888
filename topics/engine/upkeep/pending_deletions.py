"""Pending deletions: segments that are no longer in use but that a kept snapshot, and so a recovery from it, still needs."""

from __future__ import annotations

from topics.engine.storage.segments import SegmentMeta


class PendingDeletions:
    def __init__(self) -> None:
        self._by_topic: dict[
            int, list[tuple[int, SegmentMeta]]
        ] = {}  # (last snapshot that refers to it, segment)

    def __bool__(self) -> bool:
        return bool(self._by_topic)

    def add(self, topic_id: int, meta: SegmentMeta, last_snapshot: int) -> None:
        self._by_topic.setdefault(topic_id, []).append((last_snapshot, meta))

    def of(self, topic_id: int) -> list[SegmentMeta]:
        return [meta for _, meta in self._by_topic.get(topic_id, ())]

    def forget(self, topic_id: int) -> None:
        self._by_topic.pop(topic_id, None)

    def take_before(self, oldest: int) -> list[tuple[int, SegmentMeta]]:
        """Remove and return the segments, with their topics, that only snapshots older than `oldest` refer to."""
        taken: list[tuple[int, SegmentMeta]] = []
        kept: dict[int, list[tuple[int, SegmentMeta]]] = {}
        for topic_id, entries in self._by_topic.items():
            for last, meta in entries:
                if last < oldest:
                    taken.append((topic_id, meta))
                else:
                    kept.setdefault(topic_id, []).append((last, meta))
        self._by_topic = kept
        return taken
