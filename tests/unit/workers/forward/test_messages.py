"""Goal: messages between workers about forwards are decoded as they were encoded, and invalid ones are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from topics.api.errors import InvalidRequest
from topics.engine.commands import forwards as fwd
from workers.forward import messages

RULE = fwd.Forward(7, "a->b", "a", "b", filter=(("Eq", "x"), ("Subject", "a.>")), filter_is_list=True)


@pytest.mark.parametrize(
    "step",
    [
        fwd.OpenInflow("b", 7, "a->b", False),
        fwd.CloseInflow("b", 7, True),
        fwd.OpenOutflow(RULE),
        fwd.CloseOutflow(7, "a", True),
    ],
    ids=lambda step: type(step).__name__,
)
def test_steps(step: messages.Step) -> None:
    body = messages.encode_step(step)
    assert messages.read_step(body) == step
    assert messages.read_step(memoryview(body)) == step


@pytest.mark.parametrize(
    "done",
    [fwd.InflowOpened(7, True), fwd.InflowClosed(7), fwd.OutflowOpened(7, True), fwd.OutflowClosed(7)],
    ids=lambda done: type(done).__name__,
)
def test_answers_to_steps(done: messages.StepDone) -> None:
    assert messages.read_step_done(messages.encode_step_done(done)) == done


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (messages.read_copies, fwd.Copies(RULE, "a", 1025, [(1, 5)], (1, 3), 5, 9, b"frames", (6, 7))),
        (messages.read_taken, fwd.CopiesTaken(7, 1025, 9, True, 4)),
        (messages.read_catch_up, messages.CatchUp([7, 8])),
        (messages.read_caught_up, messages.CaughtUp([8])),
        (messages.read_gone, messages.ForwardsGone([(7, "a->b")])),
        (messages.read_check, messages.ForwardsCheck([("b", 7)], [(7, 2**64 - 1)])),
        (messages.read_missed, messages.ForwardsMissed([7], [8], [9], [("b", 10)], [11])),
        (messages.read_want_totals, messages.WantTotals([("b", 7)])),
        (messages.read_totals, messages.ForwardTotals({7: 2**63}, True)),
    ],
)
def test_messages(read: Callable[[bytes], object], message: object) -> None:
    assert read(messages.encode(message)) == message
    with pytest.raises(InvalidRequest):
        read(b"\xc1")


@pytest.mark.parametrize("read", [messages.read_step, messages.read_step_done])
@pytest.mark.parametrize(
    "body", [b"", b"\xc1", messages.encode([9, {}]), messages.encode([-1, {}]), messages.encode([0, 5])]
)
def test_steps_that_are_none(read: Callable[[bytes], object], body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read(body)
