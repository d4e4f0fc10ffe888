"""One process under the supervisor: started, spoken to over its control channel, and reaped when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence

from topics.control_channel import LoopChannel, Message
from workers.liveness import Heartbeat

# A terminal's Ctrl-C and a service manager's stop reach every process of the group. Only the supervisor
# may act on them: it drains fronts before workers.
_SUPERVISORS_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


class Child:
    """A running process. `ended` is set after it was reaped and all its messages were delivered."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        inherited_fds: Sequence[int] = (),
        heartbeat: Heartbeat,
        on_message: Callable[[Child, Message], None],
        on_end: Callable[[Child], None],
    ) -> None:
        self.name = name
        self.heartbeat = heartbeat
        self.ended = asyncio.Event()
        self.killed = False
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self.started_s = self._loop.time()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                self._process = spawn(
                    [*command, "--control-fd", str(theirs.fileno())], [*inherited_fds, theirs.fileno()]
                )
        except BaseException:
            ours.close()
            raise
        self.channel = LoopChannel(ours, lambda message: on_message(self, message))
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._end)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int:
        """After the end: its exit status, or the negative number of the signal that killed it."""
        return self._process.returncode

    @property
    def end_text(self) -> str:
        code = self.exit_code
        return f"exit status {code}" if code >= 0 else f"killed by {_signal_name(-code)}"

    def lived_s(self) -> float:
        return self._loop.time() - self.started_s

    def kill(self) -> None:
        # Popen does not signal a process that it has reaped, so a reused pid is safe.
        self.killed = True
        self._process.kill()

    def _end(self) -> None:
        self._process.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.channel.read()
        self.channel.close()
        self.ended.set()
        self._on_end(self)


def spawn(command: Sequence[str], inherited_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a process with the supervisor's signals blocked, from its first instruction on."""
    # From the main thread: the kernel's "parent died" signal follows the thread that forked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SUPERVISORS_SIGNALS)
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited_fds)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
