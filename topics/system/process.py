"""What every process of the server does about itself: its name, and its end when the parent ends."""

from __future__ import annotations

import ctypes
import os
import signal

import setproctitle

_PR_SET_PDEATHSIG = 1


def become(name: str) -> None:
    """Show this process as `topics: <name>` in lists of processes."""
    setproctitle.setproctitle(f"topics: {name}")


def open_standard_streams() -> None:
    """Whoever starts it may have closed some: the next file that is opened would take their place, and be handed to every child."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free


def die_with_parent(expected_parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; exit if that has happened already.

    Ask first and look second: a parent that dies between the two is then seen by one of them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != expected_parent_pid:
        raise SystemExit(f"the supervisor (pid {expected_parent_pid}) is gone")
