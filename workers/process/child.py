"""One process under the supervisor: forked, spoken to over its control channel, and reaped when it ends.

Forked and not started anew: the modules that it needs are there already, so that a worker that died is back in hundredths of a
second, and all processes run the code that the server was started with, whatever was installed since.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection
from functools import partial
from typing import NoReturn, TypeAlias

from topics.link.control_channel import Failed, LoopChannel, Message, encode
from topics.system.process import die_with_parent, set_title
from workers.process import exit_codes
from workers.process.liveness import Heartbeat

# A terminal's Ctrl-C and a service manager's stop reach every process of the group. Only the supervisor
# may act on them: it drains fronts before workers.
_SUPERVISORS_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_STANDARD_FDS = {0, 1, 2}

logger = logging.getLogger("topics.supervisor")

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
        self.exit_code = 0  # after the end, as `reap` tells it
        self.killed = False
        self.reason = ""  # of its end, if it is known
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                kept_fds = [one.fileno() for one in (*inherited, theirs)]
                self.pid, self._pidfd = fork(name, partial(_tell_failure, life, theirs), kept_fds)
        except BaseException:
            ours.close()
            raise
        self._loop.add_reader(self._pidfd, self._end)
        self.channel = LoopChannel(ours, lambda message: on_message(self, message))

    @property
    def end_text(self) -> str:
        if self.reason:
            return self.reason
        code = self.exit_code
        return f"exit status {code}" if code >= 0 else f"killed by {_signal_name(-code)}"

    def kill(self) -> None:
        self.killed = True
        if not self.ended.is_set():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _end(self) -> None:
        self.exit_code = reap(self.pid)
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.channel.read()
        self.channel.close()
        self.ended.set()
        self._on_end(self)


def fork(name: str, life: Callable[[], int], kept_fds: Collection[int]) -> tuple[int, int]:
    """Start a process with the supervisor's signals blocked, from its first instruction on; its pid, and a descriptor that tells of its end."""
    parent = os.getpid()
    _flush()  # or both would have what is in there
    # From the main thread: the kernel's "parent died" signal follows the thread that forked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SUPERVISORS_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _live(name, life, kept_fds, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        return pid, os.pidfd_open(pid)
    except BaseException:
        # Nobody would ever hear of its end.
        os.kill(pid, signal.SIGKILL)
        reap(pid)
        raise


def reap(pid: int) -> int:
    """Wait for a process's end; its exit status, or the negative number of the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _live(name: str, life: Callable[[], int], kept_fds: Collection[int], parent: int) -> NoReturn:
    """The new process, to its end. It never returns: below it lie the supervisor's frames, which must not be left here."""
    code = exit_codes.UNEXPECTED
    try:
        _shed(kept_fds)
        die_with_parent(parent)
        set_title(name)
        code = life()
    except BaseException:
        logger.exception("%s: unexpected error", name)
    finally:
        _flush()
        os._exit(code)


def _tell_failure(life: Life, control: socket.socket) -> int:
    """A life that tells the supervisor of an unexpected error, by its type: the text of most may hold data of clients."""
    try:
        return life(control)
    except Exception as error:
        reason = (
            str(error) if isinstance(error, OSError) else f"unexpected {type(error).__name__}; see the log"
        )
        with contextlib.suppress(OSError):
            control.send(encode(Failed(reason)))
        raise


def _shed(kept_fds: Collection[int]) -> None:
    """Away with what is the supervisor's."""
    # What it holds is never collected here: that would close descriptors that are other files by then.
    gc.freeze()
    signal.set_wakeup_fd(-1)
    for number in _SUPERVISORS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Its locks, listeners and the channels of others: a process that held them too would keep them alive.
    for fd in {int(entry) for entry in os.listdir("/proc/self/fd")} - _STANDARD_FDS - set(kept_fds):
        with contextlib.suppress(OSError):  # the one of the list itself
            os.close(fd)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # Nobody reads it, or its disk is full; it is closed; there is none.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
