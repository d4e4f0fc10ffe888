"""A fork server: starts test servers by forking a process that has already imported the code, which saves a second
each time. Each pytest process has one.

A forked server is like `python -m workers`: it has its own pid, environment, working directory, standard streams and
signals. Tests of the start itself, or of memory, run the program (server.PROGRAM).

Requests and answers are JSON messages on a socket: `["start", module, environment]`, with the descriptor of a log
file, returns the pid of a process that runs the `main` of that module; `["reap", pid]` returns its exit code. The
fork server ends when the socket is closed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

ROOT = Path(__file__).resolve().parents[2]
MESSAGE_MAX = 1 << 17
REFUSED_S = 120.0
SERVER = "workers.__main__"


class ForkedProcess:
    """A process of the fork server, with the interface of subprocess.Popen."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._fork_server = fork_server
        self._pidfd = os.pidfd_open(pid)  # no other process reaps it, so the pid cannot have been reused
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(None if timeout is None else int(timeout * 1000))
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"server {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        with self._reaping:
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout_ms: int | None) -> int | None:
        """Its exit code, if it ends within that time."""
        if self.returncode is None:
            end = select.poll()
            end.register(self._pidfd, select.POLLIN)
            ended = end.poll(timeout_ms)
            with self._reaping:
                if ended and self.returncode is None:
                    self.returncode = self._fork_server.ask(["reap", self.pid])
                    os.close(self._pidfd)
        return self.returncode


class ForkServer:
    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def start(self, environment: Mapping[str, str], log: BinaryIO, module: str = SERVER) -> ForkedProcess:
        return ForkedProcess(self, self.ask(["start", module, dict(environment)], [log.fileno()]))

    def ask(self, question: list[Any], fds: list[int] | None = None) -> Any:
        with self._asking:
            socket.send_fds(self._socket, [json.dumps(question).encode()], fds or [])
            answer = self._socket.recv(MESSAGE_MAX)
        assert answer, "the fork server has ended"
        return json.loads(answer)


def refused(environment: Mapping[str, str]) -> tuple[int, str]:
    """A start that is expected to fail: the exit code, and the output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
    with tempfile.TemporaryFile() as log:
        born = fork_server().start({**clean, "TOPICS_PORT": "0", **environment}, log)
        try:
            code = born.wait(REFUSED_S)
        finally:
            born.kill()
            born.wait()
        log.seek(0)
        return code, log.read().decode()


@functools.cache
def fork_server() -> ForkServer:
    """The fork server of this process, with which it ends."""
    return ForkServer()


# ---- in the fork server


def main(fd: int) -> int:
    import setproctitle

    import workers.__main__  # noqa: F401  # all that a server imports, for its children

    setproctitle.getproctitle()  # locates the memory of the process title, while arguments and environment are still in place
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # SIGINT of a terminal is meant for pytest
    with socket.socket(fileno=fd) as asked:
        while True:
            message, fds, _, _ = socket.recv_fds(asked, MESSAGE_MAX, 1)
            if not message:
                return 0
            answer: int | None = None
            match json.loads(message):
                case ["start", module, environment]:
                    answer = os.fork() or _be_server(asked, module, environment, fds[0])
                    os.close(fds[0])
                case ["reap", pid]:
                    answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            asked.send(json.dumps(answer).encode())


def _be_server(asked: socket.socket, module: str, environment: dict[str, str], log: int) -> NoReturn:
    code = 1
    try:
        asked.close()
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        code = importlib.import_module(module).main([])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
