"""next_gap: which gap a page announces, with which reason, and where the page has to end.

Method: a View with floors and losses, and the result for every kind of cursor: in the evicted range, at a loss,
between losses, after all of them, and with a tombstone that was found before.
"""

from __future__ import annotations

import pytest

from topics.engine.commands.page import Tombstone
from topics.engine.reading.tombstones import next_gap
from topics.engine.topic.log import View

HEAD = 100


@pytest.mark.parametrize(
    ("cap_lost", "ttl_lost", "seq", "reason"),
    [(10, 0, 1, "cap"), (0, 10, 1, "ttl"), (10, 4, 1, "mixed"), (10, 4, 5, "cap"), (4, 10, 5, "ttl"), (4, 10, 4, "mixed")],
)  # fmt: skip
def test_evicted_records_are_one_gap_with_its_reason(
    cap_lost: int, ttl_lost: int, seq: int, reason: str
) -> None:
    view = View(head=HEAD, cap_lost=cap_lost, ttl_lost=ttl_lost)
    gone = Tombstone(seq, 10, reason, 11 - seq, 11, HEAD)
    assert next_gap(view, seq, HEAD) == (gone, 11, HEAD + 1, HEAD)


@pytest.mark.parametrize("seq", [11, 50, HEAD + 1])
def test_nothing_is_lost_above_the_floor(seq: int) -> None:
    assert next_gap(View(head=HEAD, cap_lost=10), seq, HEAD) == (None, seq, HEAD + 1, HEAD)


def test_a_loss_at_the_cursor_is_announced_and_the_next_one_ends_the_page() -> None:
    view = View(head=HEAD, losses=[(20, 29, "corrupt"), (40, 49, "crash")])
    assert next_gap(view, 10, HEAD) == (None, 10, 20, HEAD)
    assert next_gap(view, 20, HEAD) == (Tombstone(20, 29, "corrupt", 10, 30, HEAD), 30, 40, HEAD)
    assert next_gap(view, 25, HEAD) == (Tombstone(25, 29, "corrupt", 5, 30, HEAD), 30, 40, HEAD)
    assert next_gap(view, 49, HEAD) == (Tombstone(49, 49, "crash", 1, 50, HEAD), 50, HEAD + 1, HEAD)
    assert next_gap(view, 50, HEAD) == (None, 50, HEAD + 1, HEAD)


def test_one_page_announces_one_gap() -> None:
    view = View(head=HEAD, cap_lost=10, losses=[(5, 8, "corrupt"), (11, 19, "corrupt")])
    gone, seq, stop, _ = next_gap(view, 1, HEAD)
    assert gone == Tombstone(1, 10, "cap", 10, 11, HEAD)
    assert (seq, stop) == (11, 11), "an adjacent loss belongs to the next page"


def test_a_page_with_a_tombstone_ends_before_the_next_gap() -> None:
    view = View(head=HEAD, cap_lost=10, losses=[(20, 29, "corrupt")])
    known = Tombstone(1, 3, "crash", 3, 4, HEAD)
    assert next_gap(view, 4, HEAD, known) == (known, 4, 4, HEAD)
    assert next_gap(view, 11, HEAD, known) == (known, 11, 20, HEAD)
    assert next_gap(view, 20, HEAD, known) == (known, 20, 20, HEAD)


def test_a_gap_is_announced_beyond_the_synced_head() -> None:
    gone, seq, _, head = next_gap(View(head=HEAD, cap_lost=10), 1, 4)
    assert (gone, seq, head) == (Tombstone(1, 10, "cap", 10, 11, 10), 11, 10)
    gone, seq, _, head = next_gap(View(head=HEAD, losses=[(5, 30, "corrupt")]), 5, 4)
    assert (gone, seq, head) == (Tombstone(5, 30, "corrupt", 26, 31, 30), 31, 30)
