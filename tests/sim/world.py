"""Time, random numbers and links of a simulated server; the seed determines the order of events.

Nothing runs by itself: `World.step` takes the next event from the heap and sets the time to its time, so an hour of
waiting costs nothing. All random numbers come from one generator.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from tests.support.sim_disk import SimDisk

MS = 1000  # microseconds
S = 1000 * MS


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_us = 1 * S
        self.events_run = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = 0

    def after(self, delay_us: int, action: Callable[[], None]) -> None:
        self.at(self.now_us + delay_us, action)

    def at(self, time_us: int, action: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (max(time_us, self.now_us), self._serial, action))

    def step(self) -> None:
        self.now_us, _, action = heapq.heappop(self._heap)
        self.events_run += 1
        action()

    def run_until(self, is_done: Callable[[], bool], *, within_us: int, what: str) -> None:
        """Run events until the condition holds; AssertionError when it does not."""
        end_us = self.now_us + within_us
        while not is_done():
            assert self._heap and self.now_us <= end_us, f"never: {what}"
            self.step()

    def run_for(self, time_us: int) -> None:
        end_us = self.now_us + time_us
        while self._heap and self._heap[0][0] <= end_us:
            self.step()
        self.now_us = end_us


class MachineClock:
    """The clocks of one machine. The monotonic one starts again with each boot; the wall clock may be set."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._boot_us = 0
        self.wall_offset_ms = 1_700_000_000_000

    def wall_ms(self) -> int:
        return self.wall_offset_ms + self._world.now_us // MS

    def monotonic_ms(self) -> int:
        return self.monotonic_us() // MS

    def monotonic_us(self) -> int:
        return self._world.now_us - self._boot_us

    def time_of(self, monotonic_ms: int) -> int:
        """The world's time at which the monotonic clock will show this."""
        return self._boot_us + monotonic_ms * MS

    def boot(self) -> None:
        self._boot_us = self._world.now_us - 100 * MS


class Links:
    """Ordered links: messages of one sender to one receiver arrive in order, messages of different senders in any
    order.

    Messages are neither duplicated nor changed. The receiver's end decides what is lost: `deliver` is called at the
    time of arrival, and checks which process runs then.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._last_us: dict[tuple[bytes, bytes], int] = {}

    def send(self, sender: bytes, receiver: bytes, deliver: Callable[[], None]) -> None:
        rng = self._world.rng
        delay_us = rng.choice((20, 50, 50, 100, 400, 2 * MS)) if rng.random() < 0.98 else 60 * MS
        pair = (sender, receiver)
        due_us = max(self._last_us.get(pair, 0), self._world.now_us + delay_us)
        self._last_us[pair] = due_us
        self._world.at(due_us, deliver)


class DetachableDisk:
    """A process's disk, detached when the process dies: calls made while its remains are garbage collected have no
    effect.
    """

    def __init__(self, disk: SimDisk) -> None:
        self._disk: SimDisk | None = disk
        for name in (
            "open",
            "close",
            "size",
            "read",
            "write",
            "sync",
            "exists",
        ):  # attributes, because they are hot
            setattr(self, name, getattr(disk, name))

    def __getattr__(self, name: str) -> Any:
        disk = self.__dict__["_disk"]
        return getattr(disk, name) if disk is not None else lambda *_, **__: None

    def cut(self) -> None:
        self.__dict__.clear()
        self._disk = None
