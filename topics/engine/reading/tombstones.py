"""Tombstones: the next gap of lost records that a reader crosses, and why they were lost."""

from __future__ import annotations

from topics.engine.commands.page import Tombstone
from topics.engine.topic.log import View


def next_gap(
    view: View, seq: int, head: int, tombstone: Tombstone | None = None
) -> tuple[Tombstone | None, int, int, int]:
    """The gap at `seq`, the next seq of a reader that may see records up to `head`.

    Returns the tombstone, the first seq after its gap, the end of the range that can be read before another gap, and
    the head. A page announces one gap: if it has a `tombstone` already, its range ends before the next one.
    """
    floor = view.evict_floor
    if seq < floor and tombstone is None:
        head = max(head, floor - 1)  # a gap is announced even if the seqs in it are not synced
        reason = _eviction_reason(view, seq)
        tombstone = Tombstone(seq, floor - 1, reason, floor - seq, floor, head)
        seq = floor
    stop = head + 1
    if seq < floor:
        stop = seq
    for first, last, reason in view.losses:
        if last < seq or last < floor:
            continue
        if first <= seq and tombstone is None:
            head = max(head, last)
            tombstone = Tombstone(seq, last, reason, last - seq + 1, last + 1, head)
            seq = last + 1
            continue
        stop = min(stop, first)
        break
    return tombstone, seq, stop, head


def _eviction_reason(view: View, seq: int) -> str:
    by_cap, by_ttl = view.cap_lost >= seq, view.ttl_lost >= seq
    return "mixed" if by_cap and by_ttl else "cap" if by_cap else "ttl"
