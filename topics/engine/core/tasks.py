"""What background work may ask of the engine between two slices, and the lane in which one task runs at a time.

A task is a generator. It yields None to let a turn pass, a `Blocking` call to have it run off the loop (and receives
its result), `WaitSynced` to go on once the log is synced up to there, or `WaitUntil` something holds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Blocking:
    kind: str
    work: Callable[[], object]


@dataclass(slots=True)
class WaitSynced:
    lsn: int  # 0: everything that is staged or written by now


@dataclass(slots=True)
class WaitUntil:
    """Looked at once a turn: what it waits for must come about in one."""

    holds: Callable[[], bool]


Step: TypeAlias = Blocking | WaitSynced | WaitUntil | None
Steps: TypeAlias = Generator[Step, Any, None]
Work: TypeAlias = Generator[int, None, None]  # yields how much was done, in units of about a microsecond


@dataclass(slots=True, eq=False)
class Lane:
    """One task at a time, and what it waits for."""

    task: Steps | None = None
    blocked: bool = False  # a job of it is out
    wait_lsn: int = 0
    until: Callable[[], bool] | None = None

    @property
    def is_runnable(self) -> bool:
        if self.task is None or self.blocked or self.wait_lsn:
            return False
        return self.until is None or self.until()

    def close(self) -> None:
        task, self.task = self.task, None
        self.wait_lsn, self.until = 0, None
        if task is not None:
            task.close()


def drain(steps: Generator[Any, None, T]) -> T:
    """Run stepwise work in one go."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
