"""Signals that another thread than the main one takes."""

import ctypes
import os
import signal
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def signal_another_thread(pid: int, number: signal.Signals) -> None:
    """Send the signal to a thread other than the main one, as the kernel may do. Python runs the handler in the main
    thread, but that thread's system call is not interrupted: it is as if the signal had arrived just before its
    wait.
    """
    for thread in sorted(int(name) for name in os.listdir(f"/proc/{pid}/task")):
        if thread != pid and not _is_blocked(Path(f"/proc/{pid}/task/{thread}/status").read_text(), number):
            if _libc.tgkill(pid, thread, number):
                raise OSError(ctypes.get_errno(), f"tgkill of thread {thread}")
            return
    raise AssertionError(f"process {pid} has no other thread that takes signal {number}")


def _is_blocked(status: str, number: signal.Signals) -> bool:
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:")]
    return bool(int(mask, 16) >> (number - 1) & 1)
