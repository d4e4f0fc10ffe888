"""Changing the number of shards, as seen by the supervisor: a child process does it before any other is started.

The child shares the supervisor's lock on the data directory, so no other server can start while it is in a disk call,
even if the supervisor is killed. It is stopped by killing it; the next start resumes or discards its work.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from functools import partial

from topics.system.logs import log
from workers.process import exit_codes, reshard_program
from workers.process.child import fork, reap
from workers.process.data_directory import DataDirectory

logger = logging.getLogger("topics.supervisor")


def run(directory: DataDirectory, shards: int) -> int | None:
    """Change the number of shards. None: done; otherwise the server exits with this code."""
    return asyncio.run(_run(directory, shards))


async def _run(directory: DataDirectory, shards: int) -> int | None:
    loop = asyncio.get_running_loop()
    ended, stopped = asyncio.Event(), asyncio.Event()
    pid, pidfd = fork("reshard", partial(reshard_program.main, shards), [directory.lock_fd])

    def stop() -> None:
        stopped.set()
        if not ended.is_set():
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        if not ended.is_set():  # an exception is propagating
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            ended.set()
        os.close(pidfd)
        code = reap(pid)
    if stopped.is_set():  # the child may have finished all the same
        text = "stopped" if code == 0 else "stopped; the next start changes the number of shards"
        log(logger, logging.INFO, text)
        return exit_codes.CLEAN
    if code == 0:
        return None
    if code > 0:  # it has logged why
        return code
    log(logger, logging.ERROR, "the process that changes the number of shards was killed", signal=-code)
    return exit_codes.UNEXPECTED
