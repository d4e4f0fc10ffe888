"""Stop and kill single processes of a server, from the moment they exist."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.support.server import Server, until


def children_of(server: Server) -> dict[int, list[str]]:
    """Command lines by pid, also of processes whose name is not set yet."""
    assert server.process is not None
    found: dict[int, list[str]] = {}
    for task in Path(f"/proc/{server.process.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in map(int, task.read_text().split()):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                found[pid] = words
    return found


def new_worker_pid(server: Server, shard: int, *, not_pid: int = 0) -> int:
    """The pid of a shard's worker as soon as its process name is set; `not_pid` is its predecessor."""

    def find() -> int:
        for pid, words in children_of(server).items():
            if pid != not_pid and words[0] == f"topics: shard {shard}":
                return pid
        return 0

    return int(until(find, every_s=0.001))


def is_gone(pid: int) -> bool:
    """It has ended, whether or not its parent has reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):  # the latter when it ends between open and read
        return True


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: is_gone(pid))


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process is stopped (SIGSTOP) inside the block; it may have ended by its end."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
