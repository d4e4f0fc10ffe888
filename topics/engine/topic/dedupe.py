"""Idempotency memory of one topic: key → what the first write with it was given.

Entries are in the order of their time, which never decreases, so the oldest is always in front. The key and the
number of records ride in the write's own frames; recovery rebuilds this table from them and from the snapshot.

A key is no use without its records: a retry would be told of what nobody can read. Those of records in RAM therefore stay
out of snapshots, and a restart forgets them, until a checkpoint of another class has stored the records.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from topics.api.limits import DEDUPE_FORGOTTEN_MAX, DEDUPE_KEYS_MAX

Entry = tuple[int, int, int]  # first seq, number of records, time


class DedupeWindow:
    __slots__ = ("entries", "in_ram")

    def __init__(self) -> None:
        # With keys an OrderedDict: a plain one finds its oldest key behind the places of all that were removed before it.
        self.entries: dict[bytes, Entry] = {}
        self.in_ram: set[bytes] = set()  # keys of records that a restart takes

    def find(self, key: bytes, *, now_ms: int, window_ms: int) -> Entry | None:
        entry = self.entries.get(key)
        return entry if entry is not None and now_ms - entry[2] <= window_ms else None

    def add(self, key: bytes, entry: Entry, *, window_ms: int, in_ram: bool = False) -> None:
        """Remember a write. A full table forgets its oldest key, as the limits page says; of keys past their window a few go each
        time.
        """
        entries = self.entries
        if not entries:
            entries = self.entries = OrderedDict()
        entries.pop(key, None)  # an expired entry must not keep its old place in the order
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
        """What a snapshot has kept."""
        self.entries = OrderedDict(entries) or {}

    def live(self, *, now_ms: int, window_ms: int, stores_ram: bool) -> list[tuple[bytes, Entry]]:
        """What a snapshot must keep. `stores_ram`: it comes with the records that were in RAM until now."""
        gone: set[bytes] = set() if stores_ram else self.in_ram
        return [
            (key, entry)
            for key, entry in self.entries.items()
            if now_ms - entry[2] <= window_ms and key not in gone
        ]

    def stored_up_to(self, head: int) -> None:
        """A snapshot has the records up to `head`, and their keys."""
        self.in_ram = {key for key in self.in_ram if self.entries[key][0] > head}

    def discard_after(self, head: int) -> None:
        """Forget keys of writes that were never published."""
        self.restore((key, entry) for key, entry in self.entries.items() if entry[0] <= head)
        self.in_ram &= self.entries.keys()
