"""The supervisor's side of a change of the number of shards: a process of its own does it, before any other is started.

It holds the data directory's lock together with the supervisor, so that no other server can begin while it is in a disk call,
even if the supervisor is killed. It is stopped by killing it: whatever it has done by then is gone on with, or thrown away, by the
next start.
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
    """Bring the data directory to so many shards; None when it is there, else the exit code of the server."""
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
        if not ended.is_set():  # on the way out of an error
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            ended.set()
        os.close(pidfd)
        code = reap(pid)
    if stopped.is_set():  # perhaps when it was done already
        text = "stopped" if code == 0 else "stopped; the number of shards is changed by the next start"
        log(logger, logging.INFO, text)
        return exit_codes.CLEAN
    if code == 0:
        return None
    if code > 0:  # it has said why
        return code
    log(logger, logging.ERROR, "the change of the number of shards was killed", signal=-code)
    return exit_codes.UNEXPECTED
