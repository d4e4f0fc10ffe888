"""Failpoints: named places at the worker's disk calls where a test makes it die, fail or stand still.

Installed only when TOPICS_FAILPOINTS names a folder (docs/crashes.md); a worker without it has no code of this in its
way. The folder belongs to the test. The worker reads from it, also while it runs:

    points     one per line: <name> <action> [nth=N] [times=N] [shard=N] [ms=N]; or the word `record`
    boot_id    optional: stands for the machine's boot id, so that a power cut can be simulated
    free_bytes optional: stands for the space that is left on the disk
    sync_all   optional: a file that is synced after each syncfs, which a file system in user space does not hear of

and writes to it:

    hits       every name that was reached, one per line, while `record` is asked for
    fired      `<shard> <line of points>` for each action taken, noted before it is taken

A point that has fired as often as it may is spent, also for the next worker of the shard, until `fired` is removed. `slow`,
which makes a call take so many ms longer, does so each time, and is not noted.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from workers.shard.posix_disk import PosixDisk

VARIABLE = "TOPICS_FAILPOINTS"
COLD_VARIABLE = "TOPICS_COLD_FAILPOINTS"  # the same for the directory of the cold tier

# What a path is, by its last name; what a temporary file will become counts.
_KINDS = [
    ("wal", re.compile(r"wal(-\d+\.log)?")),
    ("snapshot", re.compile(r"snap-[0-9a-f]+")),
    ("intent", re.compile(r"intent-[0-9a-f]+")),
    ("latch", re.compile(r"latched")),
    ("segment", re.compile(r"seg-.*\.data")),
    ("index", re.compile(r"seg-.*\.(idx|dict|sum)")),
    ("deletes", re.compile(r"seg-.*\.del")),
    ("meta", re.compile(r"meta")),
    ("topics", re.compile(r"topics")),
    ("topic", re.compile(r"[0-9a-f]{16}(\.deleted)?")),
    ("layout", re.compile(r"(layout-\d+|shard-\d+|layout\.json)?")),
]
_OTHER = "other"
WHATS = (*(kind for kind, _ in _KINDS), _OTHER)
CALLS = (
    *("open", "write", "allocate", "truncate", "sync"),
    *("make_dir", "rename", "remove", "remove_dir", "sync_dir", "sync_all"),
)
_ACTIONS = ("kill", "torn", "pause", "slow")
_TEARABLE = ("write", "allocate")


class BadFailpoint(ValueError):
    """A line of `points` that means nothing, or no folder to read it from."""


@dataclass(slots=True)
class Point:
    """`action` is taken from the `nth` time on that the place is reached, `times` times."""

    line: str
    name: str
    action: str
    nth: int = 1
    times: int = 1
    shard: int | None = None
    ms: int = 0
    reached: int = 0
    fired: int = 0

    @property
    def is_due(self) -> bool:
        return self.reached >= self.nth and self.fired < self.times


def what_is(path: str) -> str:
    name = path.rpartition("/")[2].removesuffix(".tmp")
    return next((kind for kind, pattern in _KINDS if pattern.fullmatch(name)), _OTHER)


def parse_point(line: str) -> Point:
    words = line.split()
    if len(words) < 2:
        raise BadFailpoint(f"a failpoint is a name and an action, not {line!r}")
    point = Point(line, words[0], words[1])
    what, _, rest = point.name.partition(".")
    call, _, when = rest.partition(".")
    if what not in WHATS or call not in CALLS or when not in ("before", "after"):
        raise BadFailpoint(f"no such failpoint: {point.name!r}")
    if point.action not in _ACTIONS and point.action not in errno.errorcode.values():
        raise BadFailpoint(f"no such action: {point.action!r}")
    if point.action == "torn" and (call not in _TEARABLE or when != "before"):
        raise BadFailpoint(f"only before a write or an allocation can it be torn: {line!r}")
    for word in words[2:]:
        option, _, number = word.partition("=")
        if option not in ("nth", "times", "shard", "ms") or not number.isdecimal():
            raise BadFailpoint(f"no such option: {word!r}")
        setattr(point, option, int(number))
    if (point.action == "slow") != bool(point.ms):
        raise BadFailpoint(f"ms=N goes with slow, and slow with it: {line!r}")
    return point


class FailpointDisk:
    """A PosixDisk with failpoints before and after each call that changes something."""

    def __init__(self, disk: PosixDisk, folder: str, shard: int) -> None:
        self._disk = disk
        self._folder = folder
        self._shard = shard
        self._handles: dict[int, str] = {}  # → what the file is
        self._lock = threading.Lock()  # jobs run on threads of their own
        self._points: builtins.list[Point] = []
        self._hits: set[str] | None = None  # None: not recorded
        self._version: tuple[int, int] | None = None
        if not os.path.isdir(folder):
            raise BadFailpoint(f"{VARIABLE} names no folder: {folder!r}")
        self._read_points()

    @property
    def write_ns(self) -> int:
        return self._disk.write_ns

    # -- the port: files -----------------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False) -> int:
        what = what_is(path)
        with self._around(what, "open"):
            handle = self._disk.open(path, create=create)
            self._handles[handle] = what
        return handle

    def close(self, handle: int) -> None:
        self._handles.pop(handle, None)
        self._disk.close(handle)

    def size(self, handle: int) -> int:
        return self._disk.size(handle)

    def read(self, handle: int, offset: int, length: int) -> bytes:
        return self._disk.read(handle, offset, length)

    def write(self, handle: int, offset: int, data: bytes) -> None:
        half = data[: len(data) // 2]
        with self._around(self._handles[handle], "write", lambda: self._disk.write(handle, offset, half)):
            self._disk.write(handle, offset, data)

    def truncate(self, handle: int, length: int) -> None:
        with self._around(self._handles[handle], "truncate"):
            self._disk.truncate(handle, length)

    def allocate(self, handle: int, length: int) -> None:
        with self._around(
            self._handles[handle], "allocate", lambda: self._disk.allocate(handle, length // 2)
        ):
            self._disk.allocate(handle, length)

    def sync(self, handle: int) -> None:
        with self._around(self._handles[handle], "sync"):
            self._disk.sync(handle)

    # -- the port: names -----------------------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        return self._disk.exists(path)

    def list(self, path: str) -> builtins.list[str]:
        return self._disk.list(path)

    def make_dir(self, path: str) -> None:
        with self._around(what_is(path), "make_dir"):
            self._disk.make_dir(path)

    def rename(self, old: str, new: str) -> None:
        with self._around(what_is(new), "rename"):
            self._disk.rename(old, new)

    def remove(self, path: str) -> None:
        with self._around(what_is(path), "remove"):
            self._disk.remove(path)

    def remove_dir(self, path: str) -> None:
        with self._around(what_is(path), "remove_dir"):
            self._disk.remove_dir(path)

    def sync_dir(self, path: str) -> None:
        with self._around(what_is(path), "sync_dir"):
            self._disk.sync_dir(path)

    def sync_all(self) -> None:
        with self._around("topics", "sync_all"):
            self._disk.sync_all()
            try:
                fd = os.open(f"{self._folder}/sync_all", os.O_RDWR)
            except FileNotFoundError:
                return
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    # -- the port: the machine -----------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """What a file of the folder says, so that a test need not fill a disk."""
        try:
            with open(f"{self._folder}/free_bytes", encoding="ascii") as file:
                return int(file.read())
        except FileNotFoundError:
            return self._disk.free_bytes()

    def boot_id(self) -> str:
        try:
            with open(f"{self._folder}/boot_id", encoding="ascii") as file:
                return file.read().strip()
        except FileNotFoundError:
            return self._disk.boot_id()

    def random_u64(self) -> int:
        return self._disk.random_u64()

    # -- points --------------------------------------------------------------------------------------------

    @contextmanager
    def _around(self, what: str, call: str, half: Callable[[], None] | None = None) -> Iterator[None]:
        self._reach(f"{what}.{call}.before", half)
        yield
        self._reach(f"{what}.{call}.after", None)

    def _reach(self, name: str, half: Callable[[], None] | None) -> None:
        with self._lock:
            self._read_points()
            if self._hits is not None and name not in self._hits:
                self._hits.add(name)
                self._note("hits", name)
            due = [point for point in self._points if point.name == name and self._count(point)]
            for point in due:
                if point.action == "slow":
                    continue
                point.fired += 1
                self._note("fired", f"{self._shard} {point.line}")
        for point in due:
            self._act(point, half)

    @staticmethod
    def _count(point: Point) -> bool:
        point.reached += 1
        return point.is_due

    def _act(self, point: Point, half: Callable[[], None] | None) -> None:
        match point.action:
            case "kill":
                _die()
            case "torn":
                assert half is not None
                half()
                _die()
            case "pause":
                # Until somebody continues it. The supervisor ends it if nobody does.
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                time.sleep(point.ms / 1000)
            case _:
                number = int(getattr(errno, point.action))
                raise OSError(number, f"failpoint: {os.strerror(number)}")

    def _read_points(self) -> None:
        """Take `points` as they are now; counting begins anew whenever the file is another one."""
        try:
            stat = os.stat(f"{self._folder}/points")
            version = (stat.st_ino, stat.st_mtime_ns)
        except FileNotFoundError:
            version = None
        if version == self._version:
            return
        self._version = version
        lines = self._lines("points")
        self._hits = set() if "record" in lines else None
        spent = self._lines("fired")
        points = [parse_point(line) for line in lines if line != "record"]
        self._points = [point for point in points if point.shard in (None, self._shard)]
        for point in self._points:
            point.fired = spent.count(f"{self._shard} {point.line}")

    def _lines(self, name: str) -> builtins.list[str]:
        try:
            with open(f"{self._folder}/{name}", encoding="ascii") as file:
                return [line.strip() for line in file if line.strip()]
        except FileNotFoundError:
            return []

    def _note(self, name: str, line: str) -> None:
        with open(f"{self._folder}/{name}", "a", encoding="ascii") as file:
            file.write(f"{line}\n")


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process does not come here")
