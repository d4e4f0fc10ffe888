"""Slots of the supervisor, one per shard and per front. The process in a slot changes, the slot's number does not."""

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
from topics.link.handover import socket_path
from topics.system.in_flight import InFlightTable
from topics.system.process import FrontSpec, WorkerSpec
from workers.process.child import Child, Entry
from workers.process.liveness import FAILING_FROM, Backoff

WorkerMain: TypeAlias = Callable[[WorkerSpec, socket.socket], int]
FrontMain: TypeAlias = Callable[[FrontSpec, socket.socket], int]


class Slot(ABC):
    """The running process, if any; otherwise the timer of the next restart."""

    def __init__(self, name: str, table: InFlightTable, number: int) -> None:
        """`number`: of this slot, among those of all processes."""
        self.name = name
        self._in_flight = table, number
        self.backoff = Backoff()
        self.child: Child | None = None
        self.restart: asyncio.TimerHandle | None = None
        self.up_since_s: float | None = None  # when it reported ready or serving
        self.last_end = ""  # why the last process exited

    @property
    def up(self) -> bool:
        return self.up_since_s is not None

    @property
    def is_failing(self) -> bool:
        return not self.up and self.backoff.failures >= FAILING_FROM

    @property
    def outage(self) -> Outage | None:
        """Why there is no working process, unless one is just starting."""
        return Outage(self.name, None, self.backoff.failures, self.last_end) if self.is_failing else None

    @abstractmethod
    def next_entry(self) -> Entry:
        """The main function of the next process."""

    def inherited(self) -> list[socket.socket]:
        return []

    def vacate(self) -> None:
        """The process has exited and was reaped."""
        self.child = None
        self.up_since_s = None
        table, number = self._in_flight
        table.clear(number)


class WorkerSlot(Slot):
    """The slot of a shard. `peer` is the address of the current process, `listening` whether it listens there yet,
    `locked` whether it waits for another process to release the shard's directory.
    """

    def __init__(
        self, shard: int, layout: Layout, run_dir: Path, main: WorkerMain, table: InFlightTable
    ) -> None:
        super().__init__(f"shard {shard}", table, shard)
        self._shard = shard
        self._layout = layout
        self._run_dir = run_dir
        self._main = main
        self.peer = Peer(shard, 0, "")
        self.listening = False
        self.locked = False
        self.copies_pending = False  # to other workers, during shutdown

    def next_entry(self) -> Entry:
        # From the clock, so that it increases over restarts of the supervisor too; monotonic even if the clock is set back.
        incarnation = max(self.peer.incarnation + 1, time.time_ns())
        path = self._run_dir / f"shard-{self._shard:02}-{incarnation}.sock"
        self.peer = Peer(self._shard, incarnation, str(path))
        layout = self._layout
        spec = WorkerSpec(
            self._shard, layout.shards, layout.generation, incarnation, str(path), self._in_flight
        )
        return partial(self._main, spec)

    @property
    def outage(self) -> Outage | None:
        if self.locked:
            return Outage(self.name, self._shard, 0, "")
        found = super().outage
        return None if found is None else msgspec.structs.replace(found, shard=self._shard)

    def vacate(self) -> None:
        super().vacate()
        self.listening = self.locked = self.copies_pending = False
        Path(self.peer.path).unlink(missing_ok=True)
        Path(socket_path(self.peer.path)).unlink(missing_ok=True)


class FrontSlot(Slot):
    """The slot of a front. Its listening socket outlives its processes."""

    def __init__(
        self, front: int, shards: int, listener: socket.socket, main: FrontMain, table: InFlightTable
    ) -> None:
        super().__init__(f"front {front}", table, shards + front)
        self._spec = FrontSpec(front, shards, time.monotonic_ns() // 1000, listener, self._in_flight)
        self._main = main

    def next_entry(self) -> Entry:
        return partial(self._main, self._spec)

    def inherited(self) -> list[socket.socket]:
        return [self._spec.listener]

    def stop_accepting(self) -> None:
        """Close the supervisor's copy of the socket; connections are refused once the front has closed its own."""
        self._spec.listener.close()
