"""Processes of the server: start parameters, title, and exit with the parent."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from dataclasses import dataclass

import setproctitle

from topics.system.in_flight import InFlightTable

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class WorkerSpec:
    """Start parameters of a worker."""

    shard: int
    shards: int
    generation: int  # of the layout
    incarnation: int  # increases with each process of a shard
    path: str  # socket that the worker listens on
    in_flight: tuple[InFlightTable, int]  # requests by key, and the number of this process


@dataclass(frozen=True)
class FrontSpec:
    """Start parameters of a front."""

    front: int
    shards: int
    started_us: int  # start of the server, which may be earlier than that of this front
    listener: socket.socket
    in_flight: tuple[InFlightTable, int]  # as of workers


def set_title(name: str) -> None:
    """Show this process as `topics: <name>` in process lists."""
    setproctitle.setproctitle(f"topics: {name}")


def die_with_parent(expected_parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; exit if it has ended already.

    The order matters: a parent that dies between prctl and getppid is seen by one of the two.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != expected_parent_pid:
        raise SystemExit(f"the supervisor (pid {expected_parent_pid}) is gone")
