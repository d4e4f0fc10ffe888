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

import msgspec

from topics.engine.storage.layout import Layout
from topics.link.control_channel import Outage, Peer
from topics.system.process import FrontSpec, WorkerSpec
from workers.process.child import Child, Life
from workers.process.liveness import FAILING_FROM, Backoff

WorkerMain: TypeAlias = Callable[[WorkerSpec, socket.socket], int]
FrontMain: TypeAlias = Callable[[FrontSpec, socket.socket], int]


class Slot(ABC):
    """What is common: the process, if there is one now, and when the next is due, if there is none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.backoff = Backoff()
        self.child: Child | None = None
        self.restart: asyncio.TimerHandle | None = None
        self.up_since_s: float | None = None  # when it has said that it does its work
        self.last_end = ""  # why the process before has ended

    @property
    def up(self) -> bool:
        return self.up_since_s is not None

    @property
    def is_failing(self) -> bool:
        return not self.up and self.backoff.failures >= FAILING_FROM

    @property
    def outage(self) -> Outage | None:
        """Why it does not work, when it is not just starting."""
        return Outage(self.name, None, self.backoff.failures, self.last_end) if self.is_failing else None

    @abstractmethod
    def next_life(self) -> Life:
        """What the next process does."""

    def inherited(self) -> list[socket.socket]:
        return []

    def vacate(self) -> None:
        """The process has ended and is reaped."""
        self.child = None
        self.up_since_s = None


class WorkerSlot(Slot):
    """One shard. `peer` is the address of the present process, `listening` says whether it answers there yet, `locked` whether it
    waits for another process to let go of the shard's directory.
    """

    def __init__(self, shard: int, layout: Layout, run_dir: Path, main: WorkerMain) -> None:
        super().__init__(f"shard {shard}")
        self._shard = shard
        self._layout = layout
        self._run_dir = run_dir
        self._main = main
        self.peer = Peer(shard, 0, "")
        self.listening = False
        self.locked = False
        self.owes = False  # copies to other workers, while the server stops

    def next_life(self) -> Life:
        # By the clock, so that it also grows over restarts of the supervisor; never less, if the clock is set back.
        incarnation = max(self.peer.incarnation + 1, time.time_ns())
        path = self._run_dir / f"shard-{self._shard:02}-{incarnation}.sock"
        self.peer = Peer(self._shard, incarnation, str(path))
        layout = self._layout
        spec = WorkerSpec(self._shard, layout.shards, layout.generation, incarnation, str(path))
        return partial(self._main, spec)

    @property
    def outage(self) -> Outage | None:
        if self.locked:
            return Outage(self.name, self._shard, 0, "")
        found = super().outage
        return None if found is None else msgspec.structs.replace(found, shard=self._shard)

    def vacate(self) -> None:
        super().vacate()
        self.listening = self.locked = self.owes = False
        Path(self.peer.path).unlink(missing_ok=True)


class FrontSlot(Slot):
    """One front. Its listening socket outlives its processes."""

    def __init__(self, front: int, shards: int, listener: socket.socket, main: FrontMain) -> None:
        super().__init__(f"front {front}")
        self._spec = FrontSpec(front, shards, time.monotonic_ns() // 1000, listener)
        self._main = main

    def next_life(self) -> Life:
        return partial(self._main, self._spec)

    def inherited(self) -> list[socket.socket]:
        return [self._spec.listener]

    def stop_accepting(self) -> None:
        """Give up this process's hold on the socket; new connections are refused once the front gives up its own."""
        self._spec.listener.close()
