"""Long random runs over the rules of a Hypothesis state machine: many more steps than Hypothesis takes, without
shrinking.

Hypothesis shrinks failures; long runs reach states that take many steps. Both draw from one table: parameter → its
possible values.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Choices = Mapping[str, Sequence[Any]]


class Machine(Protocol):
    def teardown(self) -> None: ...

    def engine_and_model_agree(self) -> None: ...


def walk(machine: Machine, seed: int, steps: int, choices: Choices, moves: Mapping[str, int]) -> None:
    """`moves`: rules of the machine and their weights. Its `start` comes first."""
    rng = random.Random(seed)

    def call(name: str) -> None:
        method = getattr(machine, name)
        method(**{of: rng.choice(choices[of]) for of in inspect.signature(method).parameters})
        machine.engine_and_model_agree()

    call("start")
    for name in rng.choices(list(moves), list(moves.values()), k=steps):
        call(name)
    machine.teardown()
