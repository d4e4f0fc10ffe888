"""The places that the supervisor keeps filled, one per shard and per front. The process in a slot changes, its number does not."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from topics.control_channel import Peer
from topics.engine.layout import Layout
from workers.child import Child
from workers.liveness import Backoff


class Slot(ABC):
    """What is common: the process, if there is one now, and when the next is due, if there is none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.backoff = Backoff()
        self.child: Child | None = None
        self.restart: asyncio.TimerHandle | None = None
        self.up = False  # it has said that it does its work

    @abstractmethod
    def next_command(self) -> list[str]:
        """The command of the next process."""

    def inherited_fds(self) -> list[int]:
        return []

    def vacate(self) -> None:
        """The process has ended and is reaped."""
        self.child = None
        self.up = False


class WorkerSlot(Slot):
    """One shard. `peer` is the address of the present process, `listening` says whether it answers there yet."""

    def __init__(self, shard: int, layout: Layout, run_dir: Path, command: Sequence[str]) -> None:
        super().__init__(f"shard {shard}")
        self._shard = shard
        self._layout = layout
        self._run_dir = run_dir
        self._command = command
        self.peer = Peer(shard, 0, "")
        self.listening = False
        self.owes = False  # copies to other workers, while the server stops

    def next_command(self) -> list[str]:
        # By the clock, so that it also grows over restarts of the supervisor; never less, if the clock is set back.
        incarnation = max(self.peer.incarnation + 1, time.time_ns())
        path = self._run_dir / f"shard-{self._shard:02}-{incarnation}.sock"
        self.peer = Peer(self._shard, incarnation, str(path))
        return [
            *self._command,
            *("--shard", str(self._shard), "--shards", str(self._layout.shards)),
            *("--generation", str(self._layout.generation)),
            *("--incarnation", str(incarnation), "--socket", str(path)),
            *("--parent", str(os.getpid())),
        ]

    def vacate(self) -> None:
        super().vacate()
        self.listening = self.owes = False
        Path(self.peer.path).unlink(missing_ok=True)


class FrontSlot(Slot):
    """One front. Its listening socket outlives its processes."""

    def __init__(
        self, front: int, shards: int, listeners: Sequence[socket.socket], command: Sequence[str]
    ) -> None:
        super().__init__(f"front {front}")
        self._front = front
        self._fronts = len(listeners)
        self._shards = shards
        self._listener = listeners[front]
        self._started_us = time.monotonic_ns() // 1000  # of the server; a front of its own may come later
        self._command = command

    def next_command(self) -> list[str]:
        return [
            *self._command,
            *("--front", str(self._front), "--fronts", str(self._fronts), "--shards", str(self._shards)),
            *("--listen-fd", str(self._listener.fileno()), "--started-us", str(self._started_us)),
            *("--parent", str(os.getpid())),
        ]

    def inherited_fds(self) -> list[int]:
        return [self._listener.fileno()]

    def stop_accepting(self) -> None:
        """Give up this process's hold on the socket; new connections are refused once the front gives up its own."""
        self._listener.close()
