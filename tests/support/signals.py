"""Signals that find the main thread where it does not hear them."""

import ctypes
import os
import signal
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def signal_another_thread(pid: int, number: signal.Signals) -> None:
    """As the kernel may do. Python's handler runs in the main thread all the same, which nothing interrupts:
    for its wait this is as if the signal had come just before it."""
    for thread in sorted(int(name) for name in os.listdir(f"/proc/{pid}/task")):
        if thread != pid and not _is_blocked(Path(f"/proc/{pid}/task/{thread}/status").read_text(), number):
            if _libc.tgkill(pid, thread, number):
                raise OSError(ctypes.get_errno(), f"tgkill of thread {thread}")
            return
    raise AssertionError(f"process {pid} has no other thread that takes signal {number}")


def _is_blocked(status: str, number: signal.Signals) -> bool:
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:")]
    return bool(int(mask, 16) >> (number - 1) & 1)
