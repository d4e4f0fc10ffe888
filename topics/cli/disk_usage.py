"""What takes the space of a data directory: by kind of file, and by topic.

It only looks, and takes no lock: a server may be writing. So a file may be gone or longer when it comes to it, and
what it tells is true of no single moment. Names and counts of topics are those of each shard's newest snapshot.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from topics.api.errors import Corrupt, TopicsError
from topics.engine.storage.files import HEADER_BYTES, TEMP_SUFFIX, check_digest_file
from topics.engine.storage.layout import COLD_ID_NAME, LAYOUT_NAME, Layout, decode_layout, generation_of
from topics.engine.storage.manifest import is_of_manifests
from topics.engine.storage.segments import parse_segment_name
from topics.engine.storage.snapshot import MAGIC, list_snapshots, rows_in_turn, snapshot_path
from topics.engine.storage.transaction_file import parse_name
from topics.engine.storage.wal import ENVELOPE_BYTES, FILE_HEADER_BYTES, file_number
from topics.engine.upkeep.checkpoint import ShardRow, TopicRow
from topics.system.read_only_disk import ReadOnlyDisk

_SUFFIXES = {"data": "data", "idx": "index", "dict": "dict", "sum": "sums", "del": "deletes"}
KINDS = (
    "log",
    "spare log",
    "snapshots",
    *(f"hot {what}" for what in _SUFFIXES.values()),
    *(f"cold {what}" for what in _SUFFIXES.values()),
    "manifests",
    "lost+found",
    "quarantine",
    "staging",
    "transactions",
    "other",
)
FILES_PER_WORD = 256
SNAPSHOT_TRIES = 3  # a live server replaces snapshots; nobody is that unlucky three times

T = TypeVar("T")

_TOPIC = re.compile(r"[0-9a-f]{16}")
_UNFINISHED = re.compile(r"\..*\.new|cold-id-[0-9a-f]+")


class NotOurs(Exception):
    """This is no data directory, or not one that can be looked at; the text says why."""


class KindUsage(msgspec.Struct):
    kind: str
    files: int = 0
    bytes: int = 0


class TopicUsage(msgspec.Struct):
    id: int
    name: str = ""  # empty: no snapshot knows it, since it is new or since it is gone
    shard: int | None = None
    records: int | None = None  # None, here and below: no snapshot tells
    live_bytes: int | None = None  # of records in segments and in the snapshot, with their frames
    dead_bytes: int | None = None
    hot_bytes: int = 0
    cold_bytes: int = 0
    hot_files: int = 0
    cold_files: int = 0


class Space(msgspec.Struct, frozen=True):
    """A file system."""

    path: str
    total_bytes: int
    free_bytes: int


class DiskUsage(msgspec.Struct):
    """What `topics du --json` prints."""

    data_dir: str
    cold_dir: str | None
    shards: int | None
    kinds: list[KindUsage]
    topics: list[TopicUsage]
    topic_count: int
    hot_bytes: int  # all in the data directory
    cold_bytes: int  # all in the cold one
    data_disk: Space | None
    cold_disk: Space | None
    same_disk: bool  # both directories draw on the same free space
    problems: list[str]  # what could not be looked at, so that the figures lack it


def disk_usage(
    data_dir: str, cold_dir: str | None = None, on_progress: Callable[[str], None] = lambda what: None
) -> DiskUsage:
    """`on_progress` hears every so often what has been looked at."""
    return _Look(data_dir, cold_dir, on_progress).run()


@dataclass
class _Look:
    data_dir: str
    cold_dir: str | None
    on_progress: Callable[[str], None]
    kinds: dict[str, KindUsage] = field(default_factory=lambda: {kind: KindUsage(kind) for kind in KINDS})
    topics: dict[int, TopicUsage] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    disk: ReadOnlyDisk = field(default_factory=ReadOnlyDisk)

    def run(self) -> DiskUsage:
        _check_is_ours(self.data_dir)
        layout = self._layout()
        present = layout.directory if layout is not None else None
        hot_bytes = cold_bytes = 0
        for parts, path, size in self._files(self.data_dir):
            hot_bytes += size
            self._count_hot(parts, path, size, present)
        if self.cold_dir is not None and self._check_cold(self.cold_dir):
            for parts, _, size in self._files(self.cold_dir):
                cold_bytes += size
                self._count_cold(parts, size)
        if layout is not None:
            for shard in range(layout.shards):
                self._name_topics(shard, layout.shard_dir(shard))
        data_disk, data_device = self._space(self.data_dir)
        cold_disk, cold_device = self._space(self.cold_dir) if self.cold_dir is not None else (None, None)
        topics = sorted(
            self.topics.values(), key=lambda topic: (-topic.hot_bytes - topic.cold_bytes, topic.id)
        )
        return DiskUsage(
            data_dir=told(self.data_dir),
            cold_dir=told(self.cold_dir) if self.cold_dir is not None else None,
            shards=layout.shards if layout is not None else None,
            kinds=list(self.kinds.values()),
            topics=topics,
            topic_count=len(topics),
            hot_bytes=hot_bytes,
            cold_bytes=cold_bytes,
            data_disk=data_disk,
            cold_disk=cold_disk,
            same_disk=data_device is not None and data_device == cold_device,
            problems=[told(problem) for problem in self.problems],
        )

    # -- files ---------------------------------------------------------------------------------------------

    def _files(self, root: str) -> Iterator[tuple[tuple[str, ...], str, int]]:
        """Every file below, by its parts, its path and its length. Links are not followed."""
        waiting: list[tuple[str, ...]] = [()]
        count = 0
        while waiting:
            folder = waiting.pop()
            try:
                with os.scandir(os.path.join(root, *folder)) as entries:
                    for entry in entries:
                        parts = (*folder, entry.name)
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(parts)
                            continue
                        try:
                            found = entry.stat(follow_symlinks=False)
                        except FileNotFoundError:
                            continue
                        if count % FILES_PER_WORD == 0:
                            self.on_progress(f"{root}: {count} files")
                        count += 1
                        yield parts, entry.path, found.st_size
            except FileNotFoundError:
                continue  # gone since its parent was listed
            except OSError as error:
                self._problem(os.path.join(root, *folder), error)

    def _add(self, kind: str, size: int) -> None:
        usage = self.kinds[kind]
        usage.files += 1
        usage.bytes += size

    def _count_hot(self, parts: tuple[str, ...], path: str, size: int, present: str | None) -> None:
        name = parts[-1]
        if parts[0] in ("lost+found", "quarantine"):
            self._add(parts[0], size)
        elif parts[0] == "topics":
            self._count_segment("hot", parts, size)
        elif name.endswith(TEMP_SUFFIX) or _UNFINISHED.fullmatch(name):
            self._add("staging", size)
        elif generation_of(parts[0]) is not None and present is not None and parts[0] != present:
            self._add("staging", size)  # of a change of the number of shards
        elif len(parts) == 4 and parts[2] == "wal" and file_number(name) is not None:
            self._add("spare log" if self._is_spare(path) else "log", size)
        elif len(parts) == 4 and parts[2] == "meta" and name.startswith("snap-"):
            self._add("snapshots", size)
        else:
            self._add("other", size)

    def _count_cold(self, parts: tuple[str, ...], size: int) -> None:
        if parts[0] == "staging" or _UNFINISHED.fullmatch(parts[-1]):
            self._add("staging", size)
        elif parts[0] == "topics":
            self._count_segment("cold", parts, size)
        else:
            self._add("other", size)

    def _count_segment(self, tier: str, parts: tuple[str, ...], size: int) -> None:
        if len(parts) != 3 or not _TOPIC.fullmatch(parts[1]):
            self._add("other", size)
            return
        topic_id, name = int(parts[1], 16), parts[2]
        topic = self.topics.setdefault(topic_id, TopicUsage(topic_id))
        if tier == "hot":
            topic.hot_bytes += size
            topic.hot_files += 1
        else:
            topic.cold_bytes += size
            topic.cold_files += 1
        segment = parse_segment_name(name)
        if parse_name(name) is not None:
            self._add("transactions", size)
        elif segment is not None:
            self._add(f"{tier} {_SUFFIXES[segment[2]]}", size)
        elif tier == "cold" and is_of_manifests(name):
            self._add("manifests", size)
        else:
            self._add("staging" if name.endswith(TEMP_SUFFIX) else "other", size)

    def _is_spare(self, path: str) -> bool:
        """Whether nothing was ever written behind its header. Files are used from the front."""
        try:
            handle = self.disk.open(path)
        except OSError:
            return False
        try:
            return not any(self.disk.read(handle, FILE_HEADER_BYTES, ENVELOPE_BYTES))
        except OSError:
            return False
        finally:
            self.disk.close(handle)

    # -- what the files say --------------------------------------------------------------------------------

    def _layout(self) -> Layout | None:
        path = os.path.join(self.data_dir, LAYOUT_NAME)
        try:
            with open(path, "rb") as file:
                return decode_layout(path, file.read(4096))
        except (OSError, TopicsError) as error:
            self._problem(path, error)
            return None

    def _name_topics(self, shard: int, shard_dir: str) -> None:
        """From the newest snapshot that can be read."""
        meta_dir = os.path.join(self.data_dir, shard_dir, "meta")
        self.on_progress(f"{meta_dir}: names of topics")
        problem: Exception | None = None
        for _ in range(SNAPSHOT_TRIES):
            try:
                numbers = list_snapshots(self.disk, meta_dir)
            except OSError as error:
                self._problem(meta_dir, error)
                return
            for number in reversed(numbers):
                try:
                    rows = self._read_snapshot(snapshot_path(meta_dir, number), shard)
                except (OSError, TopicsError) as error:
                    problem = error
                    continue
                for row in rows:
                    _put_into(self.topics.setdefault(row.id, TopicUsage(row.id)), row)
                return
            if not isinstance(problem, FileNotFoundError):
                break
        if problem is not None:
            self._problem(meta_dir, problem)

    def _read_snapshot(self, path: str, shard: int) -> list[TopicUsage]:
        start, end = check_digest_file(self.disk, path, MAGIC)
        found: list[TopicUsage] = []
        pending: tuple[int, bytes] | None = None  # the last row is not of a topic but how many there are
        for number, row in enumerate(rows_in_turn(self.disk, path, start, end)):
            if number == 1:
                _decode(path, pending, ShardRow)
            elif pending is not None:
                found.append(_topic_usage(_decode(path, pending, TopicRow), shard))
            pending = row
        return found

    def _check_cold(self, cold_dir: str) -> bool:
        if not os.path.isdir(cold_dir):
            self.problems.append(f"there is no directory {cold_dir}")
            return False
        ours, theirs = _cold_id(self.data_dir), _cold_id(cold_dir)
        if ours != theirs or ours is None:
            self.problems.append(
                f"{cold_dir} does not have the {COLD_ID_NAME} of {self.data_dir}: is the disk mounted?"
            )
            return False
        return True

    def _space(self, path: str) -> tuple[Space | None, int | None]:
        try:
            found = os.statvfs(path)
            device = os.stat(path).st_dev
        except OSError:
            return None, None  # said already, by whoever listed it
        unit = found.f_frsize
        return Space(told(path), found.f_blocks * unit, found.f_bavail * unit), device

    def _problem(self, path: str, error: Exception) -> None:
        if isinstance(error, OSError):
            self.problems.append(f"{error.filename or path}: {error.strerror or error}")
        else:
            self.problems.append(str(error))


def told(path: str) -> str:
    """As text that can be written: a file's name may be any bytes."""
    return path.encode("utf-8", "backslashreplace").decode()


def _check_is_ours(data_dir: str) -> None:
    """Other people's directories are not walked through."""
    try:
        names = os.listdir(data_dir)
    except FileNotFoundError:
        raise NotOurs(f"there is no directory {told(data_dir)}") from None
    except NotADirectoryError:
        raise NotOurs(f"{told(data_dir)} is not a directory") from None
    except (OSError, ValueError) as error:
        raise NotOurs(f"{told(data_dir)} cannot be read: {told(str(error))}") from error
    if LAYOUT_NAME not in names and not any(generation_of(name) is not None for name in names):
        raise NotOurs(f"{told(data_dir)} is not a data directory of topics: it has no {LAYOUT_NAME}")


def _cold_id(directory: str) -> bytes | None:
    try:
        with open(os.path.join(directory, COLD_ID_NAME), "rb") as file:
            return file.read(256).strip()
    except OSError:
        return None


def _decode(path: str, row: tuple[int, bytes] | None, kind: type[T]) -> T:
    assert row is not None
    try:
        return msgspec.msgpack.decode(row[1], type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(path, row[0], f"a row cannot be decoded: {error}") from error


def _topic_usage(row: TopicRow, shard: int) -> TopicUsage:
    live = len(row.inline[2]) if row.inline is not None else 0
    dead = 0
    for meta in row.segments:
        gone = min(meta.dead_bytes, meta.data_bytes)
        dead += gone
        live += max(0, meta.data_bytes - HEADER_BYTES - gone)
    return TopicUsage(row.id, row.name, shard, row.count, live, dead)


def _put_into(topic: TopicUsage, row: TopicUsage) -> None:
    topic.name, topic.shard, topic.records = row.name, row.shard, row.records
    topic.live_bytes, topic.dead_bytes = row.live_bytes, row.dead_bytes
