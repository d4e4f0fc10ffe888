"""The process that changes the number of shards of a data directory; started by the supervisor.

topics/engine/tools/reshard.py does the work. This module adds the shard locks, progress output, watch sessions and
error messages.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from topics.api.api_keys import secrets_of
from topics.api.errors import TopicsError
from topics.engine.core.placement import shard_of
from topics.engine.core.ports import Disk
from topics.engine.storage.files import is_full
from topics.engine.storage.layout import LAYOUT_NAME, Layout
from topics.engine.tools.reshard import Progress, Reshard, clear_stale
from topics.system import logs
from topics.system.logs import log
from topics.system.settings import Settings
from workers.process.data_directory import read_layout
from workers.process.exit_codes import BAD_CONFIGURATION, CLEAN, UNEXPECTED, Refusal
from workers.shard.failpoints import BadFailpoint
from workers.shard.posix import SystemClock
from workers.shard.program import engine_config, open_cold, open_disk
from workers.watch import session_file
from workers.watch.feeds import GroupRow
from workers.watch.sessions import SessionRow

FAILPOINT_SHARD = 1000  # this process in failpoints; no shard has that number
LOCK_RETRY_S = 0.02
LOG_EVERY_S = 1.0

logger = logging.getLogger("topics.reshard")


def main(shards: int) -> int:
    gc.disable()  # as in a shard's recovery: everything built here lives until the process exits
    settings = Settings.from_env(os.environ)
    logs.configure("reshard", settings.log_format, secrets_of(settings.api_keys))
    try:
        return change_shards(settings, shards)
    except (Refusal, BadFailpoint) as error:
        logger.error("not started: %s", error)
        return BAD_CONFIGURATION


def change_shards(settings: Settings, shards: int) -> int:
    """Returns the exit code: 0 when the data directory has `shards` shards and no other layout."""
    path = Path(settings.data_dir).absolute()
    layout = read_layout(path / LAYOUT_NAME)
    disk = open_disk(str(path), FAILPOINT_SHARD)
    with ExitStack() as held:
        for shard in range(layout.shards):
            _lock(held, path / layout.shard_dir(shard))
        if shards == layout.shards:
            return _clear(disk, layout)
        change = f"{layout.shards} to {shards} shards"
        back = f"TOPICS_WAL_SHARDS={layout.shards} starts without a change"
        try:
            _reshard(disk, settings, layout, shards)
        except TopicsError as error:
            logger.error("not started: cannot go from %s: %s; %s", change, error, back)
            return BAD_CONFIGURATION
        except OSError as error:
            problem = "the disk is full" if is_full(error) else str(error)
            logger.error("not started: cannot go from %s: %s; %s", change, problem, back)
            return BAD_CONFIGURATION if is_full(error) else UNEXPECTED
    return CLEAN


def _clear(disk: Disk, layout: Layout) -> int:
    """Remove the files of an interrupted change. They are harmless, so a failure only costs disk space."""
    try:
        if clear_stale(disk, layout):
            logger.info("removed the files of an interrupted change of the number of shards")
    except OSError as error:
        logger.warning("cannot remove the files of an interrupted change of the number of shards: %s", error)
    except TopicsError as error:
        logger.error("not started: %s", error)
        return BAD_CONFIGURATION
    return CLEAN


def _reshard(disk: Disk, settings: Settings, layout: Layout, shards: int) -> None:
    began = time.monotonic()
    log(logger, logging.INFO, "changing the number of shards", before=layout.shards, after=shards)
    config = engine_config(settings, 0, layout.generation)

    def carry(old_dirs: list[str], new_dirs: list[str]) -> None:
        carry_watches(disk, old_dirs, new_dirs)

    cold = open_cold(settings, FAILPOINT_SHARD)
    work = Reshard(disk, SystemClock(), config, layout, shards, carry, cold)
    shown = _ProgressBar(f"{layout.shards} → {shards} shards")
    try:
        for progress in work.steps():
            shown.update(progress)
    finally:
        shown.end()
    if work.left:
        logger.warning("cannot remove the old layout; the next start removes it: %s", work.left)
    took_ms = int((time.monotonic() - began) * 1000)
    log(
        logger, logging.INFO, f"the data directory has {shards} shards",
        topics=work.topics, records=work.records, took_ms=took_ms,
    )  # fmt: skip


def carry_watches(disk: Disk, old_dirs: list[str], new_dirs: list[str]) -> None:
    """Move watch sessions to the shards of their ids, and cursors of groups to the shards of their topics."""
    sessions: list[list[SessionRow]] = [[] for _ in new_dirs]
    groups: list[list[GroupRow]] = [[] for _ in new_dirs]
    for directory in old_dirs:
        rows = session_file.read(disk, directory, may_fail=False)
        if rows is None:
            continue
        for session in rows.sessions:
            sessions[shard_of(session.wid, len(new_dirs))].append(session)
        for group in rows.groups:
            groups[shard_of(group[0], len(new_dirs))].append(group)
    for directory, some, others in zip(new_dirs, sessions, groups, strict=True):
        if some or others:
            session_file.write(disk, directory, session_file.WatchRows(some, others))


def _lock(held: ExitStack, path: Path) -> None:
    """Take the lock that a worker holds: an orphaned one may still be in a sync. Waits until the supervisor exits."""
    path.mkdir(parents=True, exist_ok=True)
    fd = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    held.callback(os.close, fd)
    is_logged = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not is_logged:
                log(logger, logging.WARNING, "waiting for a worker to release its shard", path=path)
                is_logged = True
        time.sleep(LOCK_RETRY_S)


class _ProgressBar:
    """A progress bar on a terminal; elsewhere one log line per second."""

    WIDTH = 24

    def __init__(self, title: str) -> None:
        self._title = title
        self._terminal = sys.stderr.isatty()
        self._logged_s = time.monotonic()
        self._drawn_s = 0.0

    def update(self, progress: Progress) -> None:
        what, share = progress
        now_s = time.monotonic()
        if self._terminal:
            if now_s - self._drawn_s >= 0.05:
                self._drawn_s = now_s
                bar = ("=" * int(share * self.WIDTH)).ljust(self.WIDTH)
                print(
                    f"\r\x1b[K{self._title} [{bar}] {share:4.0%} {what}", end="", file=sys.stderr, flush=True
                )
        elif now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            log(logger, logging.INFO, what, percent=round(share * 100))

    def end(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
