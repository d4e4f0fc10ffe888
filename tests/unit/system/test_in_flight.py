"""Requests in flight by key: every process sees the sum of all, and nothing is left of one that has died."""

from __future__ import annotations

from topics.system.in_flight import InFlight, InFlightTable, alone

KEYS = [b"one", b"two"]


def test_all_processes_are_counted() -> None:
    table = InFlightTable(3, len(KEYS))
    first, last = InFlight(table, 0, KEYS), InFlight(table, 2, KEYS)
    first.begin(b"one")
    last.begin(b"one")
    last.begin(b"two")
    assert [one.total(key) for one in (first, last) for key in KEYS] == [2, 1, 2, 1]
    last.end(b"one")
    assert [first.total(key) for key in KEYS] == [1, 1]


def test_nothing_is_left_of_a_process_that_has_died() -> None:
    table = InFlightTable(2, len(KEYS))
    ours, theirs = InFlight(table, 0, KEYS), InFlight(table, 1, KEYS)
    ours.begin(b"two")
    for key in KEYS:
        theirs.begin(key)
    table.clear(1)
    assert [ours.total(key) for key in KEYS] == [0, 1]


def test_a_process_alone() -> None:
    counts = alone(KEYS)
    counts.begin(b"one")
    assert [counts.total(key) for key in KEYS] == [1, 0]
    assert alone([]) is not None
