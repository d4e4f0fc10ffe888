"""One process under the supervisor: forked, spoken to over its control channel, and reaped when it ends.

Forked and not started anew: the modules that it needs are there already, so that a worker that died is back in hundredths of a
second, and all processes run the code that the server was started with, whatever was installed since.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection
from functools import partial
from multiprocessing.context import ForkProcess
from typing import TypeAlias

from topics.control_channel import LoopChannel, Message
from topics.process import become, die_with_parent
from workers.liveness import Heartbeat

# A terminal's Ctrl-C and a service manager's stop reach every process of the group. Only the supervisor
# may act on them: it drains fronts before workers.
_SUPERVISORS_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_STANDARD_FDS = {0, 1, 2}

# What a child does until its end, with its side of the control channel; its exit status.
Life: TypeAlias = Callable[[socket.socket], int]


class Child:
    """A running process. `ended` is set after it was reaped and all its messages were delivered."""

    def __init__(
        self,
        name: str,
        life: Life,
        *,
        inherited: Collection[socket.socket] = (),
        heartbeat: Heartbeat,
        on_message: Callable[[Child, Message], None],
        on_end: Callable[[Child], None],
    ) -> None:
        self.name = name
        self.heartbeat = heartbeat
        self.ended = asyncio.Event()
        self.exit_code = (
            0  # after the end: its exit status, or the negative number of the signal that killed it
        )
        self.killed = False
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self.started_s = self._loop.time()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                kept_fds = [one.fileno() for one in (*inherited, theirs)]
                self._process = fork(name, partial(life, theirs), kept_fds)
        except BaseException:
            ours.close()
            raise
        self.channel = LoopChannel(ours, lambda message: on_message(self, message))
        self.pid = pid_of(self._process)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._end)

    @property
    def end_text(self) -> str:
        code = self.exit_code
        return f"exit status {code}" if code >= 0 else f"killed by {_signal_name(-code)}"

    def lived_s(self) -> float:
        return self._loop.time() - self.started_s

    def kill(self) -> None:
        self.killed = True
        if not self.ended.is_set():  # or its pid may be that of another
            self._process.kill()

    def _end(self) -> None:
        self.exit_code = reap(self._process)
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.channel.read()
        self.channel.close()
        self.ended.set()
        self._on_end(self)


def fork(name: str, life: Callable[[], int], kept_fds: Collection[int]) -> ForkProcess:
    """Start a process with the supervisor's signals blocked, from its first instruction on."""
    begin = partial(_begin, name, life, kept_fds, parent=os.getpid())
    process = multiprocessing.get_context("fork").Process(target=begin, name=name)
    # From the main thread: the kernel's "parent died" signal follows the thread that forked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SUPERVISORS_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def pid_of(process: ForkProcess) -> int:
    assert process.pid is not None, "it was started"
    return process.pid


def reap(process: ForkProcess) -> int:
    """Wait for its end; the exit code. Nothing is left of it."""
    process.join()
    code = process.exitcode
    assert code is not None, "it was joined"
    process.close()
    return code


def _begin(name: str, life: Callable[[], int], kept_fds: Collection[int], *, parent: int) -> None:
    """In the new process: away with what is the supervisor's, then its own life."""
    # What the supervisor holds is never collected here: it would close descriptors that are other files by then.
    gc.freeze()
    die_with_parent(parent)
    become(name)
    signal.set_wakeup_fd(-1)
    for number in _SUPERVISORS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Its locks, listeners and the channels of others: a process that held them too would keep them alive.
    for fd in {int(entry) for entry in os.listdir("/proc/self/fd")} - _STANDARD_FDS - set(kept_fds):
        with contextlib.suppress(OSError):  # the one of the list itself
            os.close(fd)
    sys.exit(life())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
