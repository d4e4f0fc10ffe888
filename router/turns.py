"""A line for what is costly to begin: a few in each round of the loop, so that a crowd does not hold up all other connections."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

PER_ROUND = 8


class Turns:
    """Without a crowd everything begins at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._line: deque[Callable[[], None]] = deque()  # one for each connection at most
        self._left = PER_ROUND

    def begin(self, work: Callable[[], None]) -> None:
        """Now, or in order when it is its turn."""
        if not self._left:
            self._line.append(work)
            return
        if self._left == PER_ROUND:
            self._loop.call_soon(self._next_round)
        self._left -= 1
        work()

    def _next_round(self) -> None:
        self._left = PER_ROUND
        for _ in range(min(PER_ROUND, len(self._line))):
            self.begin(self._line.popleft())
