"""Idempotency memory of one topic: key → what the first write with it was given.

Entries are in the order of their time, which never decreases, so the oldest is always in front. The key and the
number of records ride in the write's own frames; recovery rebuilds this table from them.
"""

from __future__ import annotations

from topics.engine.limits import DEDUPE_KEYS_MAX

Entry = tuple[int, int, int]  # first seq, number of records, time


class DedupeWindow:
    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}

    def find(self, key: bytes, *, now_ms: int, window_ms: int) -> Entry | None:
        entry = self.entries.get(key)
        return entry if entry is not None and now_ms - entry[2] <= window_ms else None

    def add(self, key: bytes, entry: Entry, *, window_ms: int) -> None:
        """Remember a write. A full table forgets its oldest key, as the limits page says."""
        entries = self.entries
        entries.pop(key, None)  # an expired entry must not keep its old place in the order
        entries[key] = entry
        while entries:
            oldest = next(iter(entries))
            if len(entries) <= DEDUPE_KEYS_MAX and entry[2] - entries[oldest][2] <= window_ms:
                return
            del entries[oldest]

    def live(self, *, now_ms: int, window_ms: int) -> list[tuple[bytes, Entry]]:
        """What a snapshot must keep."""
        return [(key, entry) for key, entry in self.entries.items() if now_ms - entry[2] <= window_ms]

    def discard_after(self, head: int) -> None:
        """Forget keys of writes that were never published."""
        self.entries = {key: entry for key, entry in self.entries.items() if entry[0] <= head}
