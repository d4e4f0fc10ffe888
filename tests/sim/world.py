"""Time, chance and wires of a simulated server: one seed, one order of events.

Nothing here runs by itself: `World.step` takes the next event from the heap and moves the time to it, so that an hour of
waiting costs nothing. All chance comes from one generator.
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
        """Let things happen until it is so; AssertionError when it does not come to pass."""
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
    """The clocks of one machine. The monotonic one begins anew with each boot; the wall clock may be set."""

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
    """Ordered wires: what one sender has for one receiver arrives in its order, what others have comes when it comes.

    A message is neither doubled nor changed. Whether it is lost is for the receiver's end to say: `deliver` is called
    when the time has come, and looks who is there.
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


class DiskLine:
    """A process's line to the disk, cut when it dies: what its remains do while they are collected reaches nothing."""

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
        ):  # as attributes: they are hot
            setattr(self, name, getattr(disk, name))

    def __getattr__(self, name: str) -> Any:
        disk = self.__dict__["_disk"]
        return getattr(disk, name) if disk is not None else lambda *_, **__: None

    def cut(self) -> None:
        self.__dict__.clear()
        self._disk = None
