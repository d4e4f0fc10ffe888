"""Goal: losses are announced, and their list stays short, in order, and never covers less than was lost.

Method: small logs, and random ranges compared with a set of seqs.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.log_rig import append, lose, new_log, readable, seqs_of
from topics.api.limits import LOSS_RANGES_MAX
from topics.engine.topic import log as topic_log
from topics.engine.topic.log import Loss, add_loss


def test_a_loss_takes_what_lived_in_it_and_is_announced_when_published() -> None:
    log = new_log()
    append(log, [1] * 10)
    op = lose(log, 4, 6)
    assert readable(log) == list(range(1, 11))
    assert log.view.losses == []
    log.publish(op)
    assert readable(log) == [1, 2, 3, 7, 8, 9, 10]
    assert log.view.losses == [(4, 6, "corrupt")]
    assert (log.view.count, log.count) == (7, 7)
    log.check()


def test_a_loss_past_the_head_moves_the_head() -> None:
    log = new_log()
    append(log, [1] * 3)
    log.publish(lose(log, 3, 9))
    assert (log.view.head, log.next_seq) == (9, 10)
    assert readable(log) == [1, 2]
    append(log, [1])
    assert readable(log) == [1, 2, 10]
    log.check()


def test_losses_that_touch_are_joined_when_their_reason_is_the_same() -> None:
    losses: list[Loss] = []
    add_loss(losses, (5, 6, "a"))
    add_loss(losses, (10, 12, "a"))
    add_loss(losses, (1, 2, "a"))
    assert losses == [(1, 2, "a"), (5, 6, "a"), (10, 12, "a")]
    add_loss(losses, (3, 4, "a"))
    assert losses == [(1, 6, "a"), (10, 12, "a")]
    add_loss(losses, (7, 9, "b"))
    assert losses == [(1, 6, "a"), (7, 9, "b"), (10, 12, "a")]
    add_loss(losses, (2, 3, "a"))
    assert losses == [(1, 6, "a"), (7, 9, "b"), (10, 12, "a")]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 10), st.sampled_from("ab")).map(
            lambda entry: (entry[0], entry[0] + entry[1], entry[2])
        ),
        max_size=20,
    )
)
def test_losses_stay_ascending_and_apart_and_cover_exactly_what_was_lost(added: list[Loss]) -> None:
    losses: list[Loss] = []
    for loss in added:
        add_loss(losses, loss)
        assert all(
            before[1] < after[0] and (before[1] + 1 < after[0] or before[2] != after[2])
            for before, after in pairwise(losses)
        )
    assert seqs_of(losses) == seqs_of(added)


def test_a_full_list_of_losses_joins_the_nearest_two_and_drops_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_log, "LOSS_RANGES_MAX", 3)
    losses: list[Loss] = [(1, 1, "a"), (10, 10, "b"), (15, 15, "a")]
    add_loss(losses, (30, 31, "a"))
    assert losses == [(1, 1, "a"), (10, 15, "b"), (30, 31, "a")]


def test_the_list_of_losses_is_bounded() -> None:
    losses: list[Loss] = []
    for i in range(LOSS_RANGES_MAX + 20):
        add_loss(losses, (10 * i + 1, 10 * i + 2, "a"))
    assert len(losses) == LOSS_RANGES_MAX
    lost = {seq for i in range(LOSS_RANGES_MAX + 20) for seq in (10 * i + 1, 10 * i + 2)}
    assert seqs_of(losses) >= lost
