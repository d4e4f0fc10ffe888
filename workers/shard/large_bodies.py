"""Queue of large bodies, which are decoded in steps: decoding one at once would hold up every other request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import cast

from topics.link import wire
from topics.protocols.encoding import Read, Steps

LARGE_BYTES = 1 << 20


class LargeBodies:
    """Queue of large bodies, decoded one at a time. The fronts' credits limit their bytes."""

    def __init__(self) -> None:
        self.queue: deque[tuple[bytes, wire.Request]] = deque()  # peer, request
        self._steps: Steps | None = None  # of the first
        self._read: Read | None = None

    def add(self, peer: bytes, request: wire.Request) -> None:
        self.queue.append((peer, request))

    def step(self, begin: Callable[[wire.Request], Steps]) -> Read | None:
        """Decode a slice of the first body. Returns its command once it is decoded; the caller then pops it. A body that is
        refused is popped here.
        """
        if self._read is not None:
            return self._read
        try:
            if self._steps is None:
                self._steps = begin(self.queue[0][1])
            next(self._steps)
        except StopIteration as end:
            self._read = cast(Read, end.value)
        except BaseException:
            self.pop()
            raise
        return self._read

    def pop(self) -> None:
        self.queue.popleft()
        self._steps = self._read = None
