"""Failpoints: named points around a worker's disk calls at which a test makes it die, fail or stop.

Installed only if TOPICS_FAILPOINTS names a folder (docs/crashes.md); otherwise none of this code runs. The folder belongs
to the test. The worker reads these files, also while it runs:

    points     one per line: <name> <action> [nth=N] [times=N] [shard=N] [ms=N]; or the word `record`
    boot_id    optional: replaces the machine's boot id, to simulate a power cut
    free_bytes optional: replaces the free space of the disk
    sync_all   optional: a file to sync after each syncfs, which does not reach a file system in user space

and writes these:

    hits       every name that was reached, one per line, with `record`
    fired      `<shard> <line of points>` for each action, written before it is executed

A point that has fired `times` times stays used up, also for the shard's next worker, until `fired` is removed. `slow`, which
delays a call by `ms`, fires every time and is not written to `fired`.
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

from workers.shard.posix import PosixDisk

VARIABLE = "TOPICS_FAILPOINTS"
COLD_VARIABLE = "TOPICS_COLD_FAILPOINTS"  # the same for the cold tier

# File kinds by name; a temporary file has the kind of the file that it becomes.
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
KINDS = (*(kind for kind, _ in _KINDS), _OTHER)
CALLS = (
    *("open", "write", "allocate", "truncate", "sync"),
    *("make_dir", "rename", "remove", "remove_dir", "sync_dir", "sync_all"),
)
_ACTIONS = ("kill", "torn", "pause", "slow")
_TEARABLE = ("write", "allocate")


class BadFailpoint(ValueError):
    """An invalid line of `points`, or a missing folder."""


@dataclass(slots=True)
class Point:
    """`action` is executed `times` times, from the `nth` time on that the point is reached."""

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


def kind_of(path: str) -> str:
    name = path.rpartition("/")[2].removesuffix(".tmp")
    return next((kind for kind, pattern in _KINDS if pattern.fullmatch(name)), _OTHER)


def parse_point(line: str) -> Point:
    words = line.split()
    if len(words) < 2:
        raise BadFailpoint(f"a failpoint is a name and an action, not {line!r}")
    point = Point(line, words[0], words[1])
    kind, _, rest = point.name.partition(".")
    call, _, when = rest.partition(".")
    if kind not in KINDS or call not in CALLS or when not in ("before", "after"):
        raise BadFailpoint(f"no such failpoint: {point.name!r}")
    if point.action not in _ACTIONS and point.action not in errno.errorcode.values():
        raise BadFailpoint(f"no such action: {point.action!r}")
    if point.action == "torn" and (call not in _TEARABLE or when != "before"):
        raise BadFailpoint(f"torn is only possible before a write or an allocation: {line!r}")
    for word in words[2:]:
        option, _, number = word.partition("=")
        if option not in ("nth", "times", "shard", "ms") or not number.isdecimal():
            raise BadFailpoint(f"no such option: {word!r}")
        setattr(point, option, int(number))
    if (point.action == "slow") != bool(point.ms):
        raise BadFailpoint(f"slow needs ms=N, and no other action takes it: {line!r}")
    return point


class FailpointDisk:
    """A PosixDisk with failpoints before and after each call that modifies the disk."""

    def __init__(self, disk: PosixDisk, folder: str, shard: int) -> None:
        self._disk = disk
        self._folder = folder
        self._shard = shard
        self._handles: dict[int, str] = {}  # → kind of the file
        self._lock = threading.Lock()  # jobs run on several threads
        self._points: builtins.list[Point] = []
        self._hits: set[str] | None = None  # None: recording is off
        self._version: tuple[int, int] | None = None
        if not os.path.isdir(folder):
            raise BadFailpoint(f"{VARIABLE} does not name a folder: {folder!r}")
        self._read_points()

    @property
    def write_ns(self) -> int:
        return self._disk.write_ns

    # -- the port: files -----------------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False) -> int:
        kind = kind_of(path)
        with self._around(kind, "open"):
            handle = self._disk.open(path, create=create)
            self._handles[handle] = kind
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
        with self._around(kind_of(path), "make_dir"):
            self._disk.make_dir(path)

    def rename(self, old: str, new: str) -> None:
        with self._around(kind_of(new), "rename"):
            self._disk.rename(old, new)

    def remove(self, path: str) -> None:
        with self._around(kind_of(path), "remove"):
            self._disk.remove(path)

    def remove_dir(self, path: str) -> None:
        with self._around(kind_of(path), "remove_dir"):
            self._disk.remove_dir(path)

    def sync_dir(self, path: str) -> None:
        with self._around(kind_of(path), "sync_dir"):
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
        """The content of the file `free_bytes` if it exists, so that a test need not fill a disk."""
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
    def _around(self, kind: str, call: str, half: Callable[[], None] | None = None) -> Iterator[None]:
        """`half` executes the call halfway, for `torn`."""
        self._reach(f"{kind}.{call}.before", half)
        yield
        self._reach(f"{kind}.{call}.after", None)

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
                # Until it gets SIGCONT; otherwise the supervisor kills it.
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                time.sleep(point.ms / 1000)
            case _:
                number = int(getattr(errno, point.action))
                raise OSError(number, f"failpoint: {os.strerror(number)}")

    def _read_points(self) -> None:
        """Read `points` if the file has changed; the counters then start again."""
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
        fired = self._lines("fired")
        points = [parse_point(line) for line in lines if line != "record"]
        self._points = [point for point in points if point.shard in (None, self._shard)]
        for point in self._points:
            point.fired = fired.count(f"{self._shard} {point.line}")

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
    raise AssertionError("unreachable after SIGKILL")
