"""Idempotency keys of one topic: key → the seqs its first write was given.

Entries are ordered by time, which never decreases, so the oldest comes first. The key and the number of records are stored
in the write's own frames; recovery rebuilds this table from them and from the snapshot.

A key must not outlive its records: a retry would get seqs that cannot be read. So keys of records in RAM are left out of
snapshots and lost with a restart, unless the topic's class changes and a checkpoint has stored the records.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from topics.api.limits import DEDUPE_FORGOTTEN_MAX, DEDUPE_KEYS_MAX

Entry = tuple[int, int, int]  # first seq, number of records, time


class DedupeWindow:
    __slots__ = ("entries", "in_ram")

    def __init__(self) -> None:
        # An OrderedDict once there are keys: to find its oldest key, a plain dict skips the slots of all removed ones.
        self.entries: dict[bytes, Entry] = {}
        self.in_ram: set[bytes] = set()  # keys of records that a restart loses

    def find(self, key: bytes, *, now_ms: int, window_ms: int) -> Entry | None:
        entry = self.entries.get(key)
        return entry if entry is not None and now_ms - entry[2] <= window_ms else None

    def add(self, key: bytes, entry: Entry, *, window_ms: int, in_ram: bool = False) -> None:
        """Remember a write. Each call drops a few keys past their window; a full table drops its oldest key."""
        entries = self.entries
        if not entries:
            entries = self.entries = OrderedDict()
        entries.pop(key, None)  # an expired entry must not keep its position
        entries[key] = entry
        if in_ram:
            self.in_ram.add(key)
        else:
            self.in_ram.discard(key)
        for _ in range(DEDUPE_FORGOTTEN_MAX):
            oldest = next(iter(entries))
            if len(entries) <= DEDUPE_KEYS_MAX and entry[2] - entries[oldest][2] <= window_ms:
                return
            del entries[oldest]
            self.in_ram.discard(oldest)

    def restore(self, entries: Iterable[tuple[bytes, Entry]]) -> None:
        """Load the entries of a snapshot."""
        self.entries = OrderedDict(entries) or {}

    def live(self, *, now_ms: int, window_ms: int, stores_ram: bool) -> list[tuple[bytes, Entry]]:
        """The entries to store in a snapshot. `stores_ram`: the snapshot also stores the records that were in RAM."""
        gone: set[bytes] = set() if stores_ram else self.in_ram
        return [
            (key, entry)
            for key, entry in self.entries.items()
            if now_ms - entry[2] <= window_ms and key not in gone
        ]

    def stored_up_to(self, head: int) -> None:
        """A snapshot now has the records up to `head`, and their keys."""
        self.in_ram = {key for key in self.in_ram if self.entries[key][0] > head}

    def discard_after(self, head: int) -> None:
        """Drop keys of writes that were never published."""
        self.restore((key, entry) for key, entry in self.entries.items() if entry[0] <= head)
        self.in_ram &= self.entries.keys()
