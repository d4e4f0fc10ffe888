"""Background tasks as generators: what they may yield, and the lane that runs one task at a time.

A task yields None to give up its turn, `Blocking` to run a call off the loop (the yield returns its result), `WaitSynced`
to wait until the log is synced up to an lsn, or `WaitUntil` to wait for a condition.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Blocking:
    kind: str
    work: Callable[[], object]


@dataclass(slots=True)
class WaitSynced:
    lsn: int  # 0: everything staged or written so far


@dataclass(slots=True)
class WaitUntil:
    """The condition is evaluated once per turn, so only a turn may make it true."""

    holds: Callable[[], bool]


Step: TypeAlias = Blocking | WaitSynced | WaitUntil | None
Steps: TypeAlias = Generator[Step, Any, None]
Work: TypeAlias = Generator[int, None, None]  # yields the work done, in units of about a microsecond


@dataclass(slots=True, eq=False)
class Lane:
    """Runs one task at a time; knows what the task waits for."""

    what: str  # what it works on, for messages
    task: Steps | None = None
    blocked: bool = False  # a blocking call is running
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


class TaskOwner(Protocol):
    """A feature with background tasks of its own, which run beside those of the engine, a step per turn each."""

    @property
    def has_tasks(self) -> bool:
        """Whether there are tasks or timers at all."""

    @property
    def lanes(self) -> list[Lane]:
        """The lanes of its tasks."""

    def begin_tasks(self) -> list[Lane]:
        """Begin what is to be begun; returns all lanes."""

    def tasks_stepped(self) -> None:
        """The lanes have had their steps of this turn."""

    @property
    def due_ms(self) -> int | None:
        """When the next step is due, on the monotonic clock; 0: now."""

    def defer_tasks(self) -> None:
        """The server is stopping: begin nothing that can wait for the next start."""

    def stop_tasks(self) -> None:
        """The engine is closing."""


def drain(steps: Generator[Any, None, T]) -> T:
    """Run a generator to its end and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
