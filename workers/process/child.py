"""A child process of the supervisor: forked, connected by a control channel, reaped when it exits.

Forked rather than executed: the modules are already loaded, so a worker restarts within hundredths of a second, and all
processes run the code that the server was started with, even after an upgrade on disk.
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

# A terminal's Ctrl-C and a service manager's stop signal the whole process group. Only the supervisor may act on them:
# it drains fronts before workers.
_SUPERVISORS_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_STANDARD_FDS = {0, 1, 2}

logger = logging.getLogger("topics.supervisor")

# The main function of a child: gets its end of the control channel, returns the exit status.
Entry: TypeAlias = Callable[[socket.socket], int]


class Child:
    """A running process. `ended` is set after it was reaped and all of its messages were delivered."""

    def __init__(
        self,
        name: str,
        entry: Entry,
        *,
        inherited: Collection[socket.socket] = (),
        heartbeat: Heartbeat,
        on_message: Callable[[Child, Message], None],
        on_end: Callable[[Child], None],
    ) -> None:
        self.name = name
        self.heartbeat = heartbeat
        self.ended = asyncio.Event()
        self.exit_code = 0  # once it has exited, as returned by `reap`
        self.killed = False
        self.reason = ""  # of its exit, if known
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                kept_fds = [one.fileno() for one in (*inherited, theirs)]
                self.pid, self._pidfd = fork(name, partial(_report_failure, entry, theirs), kept_fds)
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


def fork(name: str, entry: Callable[[], int], kept_fds: Collection[int]) -> tuple[int, int]:
    """Start a process with the supervisor's signals blocked from its first instruction; returns its pid and a pidfd."""
    parent = os.getpid()
    _flush()  # or both processes would write the buffered output
    # From the main thread: the kernel sends the parent-death signal when the forking thread exits.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SUPERVISORS_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _run_child(name, entry, kept_fds, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        return pid, os.pidfd_open(pid)
    except BaseException:
        # Without a pidfd its exit would go unnoticed.
        os.kill(pid, signal.SIGKILL)
        reap(pid)
        raise


def reap(pid: int) -> int:
    """Wait for a process; returns its exit status, or the negated number of the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _run_child(name: str, entry: Callable[[], int], kept_fds: Collection[int], parent: int) -> NoReturn:
    """The new process. Never returns: the frames below are the supervisor's, and must not be unwound here."""
    code = exit_codes.UNEXPECTED
    try:
        _drop_inherited(kept_fds)
        die_with_parent(parent)
        set_title(name)
        code = entry()
    except BaseException:
        logger.exception("%s: unexpected error", name)
    finally:
        _flush()
        os._exit(code)


def _report_failure(entry: Entry, control: socket.socket) -> int:
    """Run `entry`; report an unexpected error to the supervisor by its type only, as its text may contain client data."""
    try:
        return entry(control)
    except Exception as error:
        reason = (
            str(error) if isinstance(error, OSError) else f"unexpected {type(error).__name__}; see the log"
        )
        with contextlib.suppress(OSError):
            control.send(encode(Failed(reason)))
        raise


def _drop_inherited(kept_fds: Collection[int]) -> None:
    """Drop the supervisor's signal handlers and descriptors."""
    # Its objects are never collected here: their finalizers would close descriptors that are reused by then.
    gc.freeze()
    signal.set_wakeup_fd(-1)
    for number in _SUPERVISORS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Locks, listeners and other children's channels: an inherited copy would keep them open.
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - _STANDARD_FDS - set(kept_fds):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            os.close(fd)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A closed pipe or a full disk; a closed stream; no stream at all.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
