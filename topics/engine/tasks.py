"""What background work may ask of the engine between two slices.

A task is a generator. It yields None to let a turn pass, a `Blocking` call to have it run off the loop (and receives
its result), `WaitSynced` to go on once the log is synced up to there, or `WaitUntil` something holds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias


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
