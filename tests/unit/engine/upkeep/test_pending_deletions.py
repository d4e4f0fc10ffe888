"""Segments that have left: each goes with the last snapshot that names it, and not before."""

from __future__ import annotations

from topics.engine.storage.segments import SegmentMeta
from topics.engine.upkeep.pending_deletions import PendingDeletions


def test_what_an_older_snapshot_alone_names_goes_and_the_rest_stays() -> None:
    left = PendingDeletions()
    first, second, other = SegmentMeta(1, 0), SegmentMeta(1, 1), SegmentMeta(7, 0)
    left.add(3, first, last_snapshot=4)
    left.add(3, second, last_snapshot=5)
    left.add(8, other, last_snapshot=4)
    assert left.of(3) == [first, second] and left.of(8) == [other] and left.of(9) == []
    assert left.take_before(4) == []
    assert left.take_before(5) == [(3, first), (8, other)]
    assert left.of(3) == [second] and left.of(8) == []
    assert left.take_before(5) == [] and left
    assert left.take_before(6) == [(3, second)] and not left


def test_those_of_a_topic_that_is_gone_are_nobodys() -> None:
    left = PendingDeletions()
    left.add(3, SegmentMeta(1, 0), last_snapshot=4)
    left.add(8, SegmentMeta(1, 0), last_snapshot=4)
    left.forget(3)
    left.forget(3)
    assert [topic for topic, _ in left.take_before(9)] == [8]
