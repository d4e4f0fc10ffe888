"""Pending deletions: a segment is deleted with the last snapshot that refers to it, and not before."""

from __future__ import annotations

from topics.engine.storage.segments import SegmentMeta
from topics.engine.upkeep.pending_deletions import PendingDeletions


def test_only_segments_of_older_snapshots_are_taken() -> None:
    pending = PendingDeletions()
    first, second, other = SegmentMeta(1, 0), SegmentMeta(1, 1), SegmentMeta(7, 0)
    pending.add(3, first, last_snapshot=4)
    pending.add(3, second, last_snapshot=5)
    pending.add(8, other, last_snapshot=4)
    assert pending.of(3) == [first, second] and pending.of(8) == [other] and pending.of(9) == []
    assert pending.take_before(4) == []
    assert pending.take_before(5) == [(3, first), (8, other)]
    assert pending.of(3) == [second] and pending.of(8) == []
    assert pending.take_before(5) == [] and pending
    assert pending.take_before(6) == [(3, second)] and not pending


def test_a_removed_topic_has_no_pending_deletions() -> None:
    pending = PendingDeletions()
    pending.add(3, SegmentMeta(1, 0), last_snapshot=4)
    pending.add(8, SegmentMeta(1, 0), last_snapshot=4)
    pending.forget(3)
    pending.forget(3)
    assert [topic for topic, _ in pending.take_before(9)] == [8]
