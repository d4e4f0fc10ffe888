"""The places that the supervisor keeps filled, one per shard and per front. The process in a slot changes, its number does not."""

from __future__ import annotations

import asyncio
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from topics.control_channel import Peer
from topics.engine.layout import Layout
from topics.places import FrontPlace, WorkerPlace
from workers.child import Child, Life
from workers.liveness import Backoff

WorkerMain: TypeAlias = Callable[[WorkerPlace, socket.socket], int]
FrontMain: TypeAlias = Callable[[FrontPlace, socket.socket], int]


class Slot(ABC):
    """What is common: the process, if there is one now, and when the next is due, if there is none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.backoff = Backoff()
        self.child: Child | None = None
        self.restart: asyncio.TimerHandle | None = None
        self.up = False  # it has said that it does its work

    @abstractmethod
    def next_life(self) -> Life:
        """What the next process does."""

    def inherited(self) -> list[socket.socket]:
        return []

    def vacate(self) -> None:
        """The process has ended and is reaped."""
        self.child = None
        self.up = False


class WorkerSlot(Slot):
    """One shard. `peer` is the address of the present process, `listening` says whether it answers there yet."""

    def __init__(self, shard: int, layout: Layout, run_dir: Path, main: WorkerMain) -> None:
        super().__init__(f"shard {shard}")
        self._shard = shard
        self._layout = layout
        self._run_dir = run_dir
        self._main = main
        self.peer = Peer(shard, 0, "")
        self.listening = False
        self.owes = False  # copies to other workers, while the server stops

    def next_life(self) -> Life:
        # By the clock, so that it also grows over restarts of the supervisor; never less, if the clock is set back.
        incarnation = max(self.peer.incarnation + 1, time.time_ns())
        path = self._run_dir / f"shard-{self._shard:02}-{incarnation}.sock"
        self.peer = Peer(self._shard, incarnation, str(path))
        layout = self._layout
        place = WorkerPlace(self._shard, layout.shards, layout.generation, incarnation, str(path))
        return partial(self._main, place)

    def vacate(self) -> None:
        super().vacate()
        self.listening = self.owes = False
        Path(self.peer.path).unlink(missing_ok=True)


class FrontSlot(Slot):
    """One front. Its listening socket outlives its processes."""

    def __init__(self, front: int, shards: int, listener: socket.socket, main: FrontMain) -> None:
        super().__init__(f"front {front}")
        self._place = FrontPlace(front, shards, time.monotonic_ns() // 1000, listener)
        self._main = main

    def next_life(self) -> Life:
        return partial(self._main, self._place)

    def inherited(self) -> list[socket.socket]:
        return [self._place.listener]

    def stop_accepting(self) -> None:
        """Give up this process's hold on the socket; new connections are refused once the front gives up its own."""
        self._place.listener.close()
