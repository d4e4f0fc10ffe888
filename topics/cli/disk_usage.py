"""`topics du`: disk usage of a data directory, by kind of file and by topic.

It only reads and takes no lock, so a server may be running. Files may grow or disappear during the scan: the figures
are not a consistent snapshot. Names and record counts of topics come from each shard's newest snapshot.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import click
import msgspec

from topics.api.errors import Corrupt, TopicsError
from topics.cli.errors import CommandError
from topics.cli.formatting import format_size, printable, table
from topics.cli.options import cold_dir_option, complete_directory, non_empty
from topics.engine.storage.files import HEADER_BYTES, TEMP_SUFFIX, check_digest_file
from topics.engine.storage.layout import COLD_ID_NAME, LAYOUT_NAME, Layout, decode_layout, generation_of
from topics.engine.storage.manifest import is_manifest_file
from topics.engine.storage.segments import parse_segment_name
from topics.engine.storage.snapshot import MAGIC, iter_rows, list_snapshots, snapshot_path
from topics.engine.storage.transaction_file import parse_name
from topics.engine.storage.wal import ENVELOPE_BYTES, FILE_HEADER_BYTES, file_number
from topics.engine.topic.snapshot_row import ShardRow, TopicRow
from topics.system.read_only_disk import ReadOnlyDisk
from topics.system.settings import Settings
from topics.system.stdio import ignore_broken_pipe

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
FILES_PER_PROGRESS = 256
SNAPSHOT_TRIES = 3  # a running server replaces snapshots

OK, INCOMPLETE, CANNOT = 0, 1, 3
TOP = 20
PROGRESS_S = 0.1
LINE_MAX = 78

EPILOG = """\b
Nothing is changed and no lock is taken, so the server may be running. Names, records and live bytes come from
each shard's newest snapshot, which is about a minute old at most.
\b
Exit codes: 0 everything was read; 1 something could not be read, the rest is shown; 2 wrong arguments;
3 the directory does not exist, is not readable, or is not a data directory of topics.
"""

T = TypeVar("T")

_TOPIC = re.compile(r"[0-9a-f]{16}")
_UNFINISHED = re.compile(r"\..*\.new|cold-id-[0-9a-f]+")


class NotADataDirectory(Exception):
    """The path is not a data directory, or it cannot be read."""


class KindUsage(msgspec.Struct):
    kind: str
    files: int = 0
    bytes: int = 0


class TopicUsage(msgspec.Struct):
    id: int
    name: str = ""  # empty: in no snapshot, because it is new or deleted
    shard: int | None = None
    records: int | None = None  # None, here and below: in no snapshot
    live_bytes: int | None = None  # records in segments and in the snapshot, with their frames
    dead_bytes: int | None = None
    hot_bytes: int = 0
    cold_bytes: int = 0
    hot_files: int = 0
    cold_files: int = 0


class FileSystem(msgspec.Struct, frozen=True):
    path: str
    total_bytes: int
    free_bytes: int


class DiskUsage(msgspec.Struct):
    """The output of `topics du --json`."""

    data_dir: str
    cold_dir: str | None
    shards: int | None
    kinds: list[KindUsage]
    topics: list[TopicUsage]
    topic_count: int
    hot_bytes: int  # everything in the data directory
    cold_bytes: int  # everything in the cold directory
    data_disk: FileSystem | None
    cold_disk: FileSystem | None
    same_disk: bool  # both directories are on the same file system
    problems: list[str]  # what could not be read and is missing from the figures


def disk_usage(
    data_dir: str, cold_dir: str | None = None, on_progress: Callable[[str], None] = lambda text: None
) -> DiskUsage:
    """`on_progress` is called now and then with a line about the scan."""
    return _Scan(data_dir, cold_dir, on_progress).run()


@dataclass
class _Scan:
    data_dir: str
    cold_dir: str | None
    on_progress: Callable[[str], None]
    kinds: dict[str, KindUsage] = field(default_factory=lambda: {kind: KindUsage(kind) for kind in KINDS})
    topics: dict[int, TopicUsage] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    disk: ReadOnlyDisk = field(default_factory=ReadOnlyDisk)

    def run(self) -> DiskUsage:
        _check_data_dir(self.data_dir)
        layout = self._layout()
        generation = layout.directory if layout is not None else None
        hot_bytes = cold_bytes = 0
        for parts, path, size in self._files(self.data_dir):
            hot_bytes += size
            self._count_hot(parts, path, size, generation)
        if self.cold_dir is not None and self._check_cold(self.cold_dir):
            for parts, _, size in self._files(self.cold_dir):
                cold_bytes += size
                self._count_cold(parts, size)
        if layout is not None:
            for shard in range(layout.shards):
                self._read_topics(shard, layout.shard_dir(shard))
        data_disk, data_device = self._file_system(self.data_dir)
        cold_disk, cold_device = (
            self._file_system(self.cold_dir) if self.cold_dir is not None else (None, None)
        )
        topics = sorted(
            self.topics.values(), key=lambda topic: (-topic.hot_bytes - topic.cold_bytes, topic.id)
        )
        return DiskUsage(
            data_dir=as_utf8(self.data_dir),
            cold_dir=as_utf8(self.cold_dir) if self.cold_dir is not None else None,
            shards=layout.shards if layout is not None else None,
            kinds=list(self.kinds.values()),
            topics=topics,
            topic_count=len(topics),
            hot_bytes=hot_bytes,
            cold_bytes=cold_bytes,
            data_disk=data_disk,
            cold_disk=cold_disk,
            same_disk=data_device is not None and data_device == cold_device,
            problems=[as_utf8(problem) for problem in self.problems],
        )

    # -- files ---------------------------------------------------------------------------------------------

    def _files(self, root: str) -> Iterator[tuple[tuple[str, ...], str, int]]:
        """All files in the tree: path components, path, length. Symbolic links are not followed."""
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
                        if count % FILES_PER_PROGRESS == 0:
                            self.on_progress(f"{root}: {count} files")
                        count += 1
                        yield parts, entry.path, found.st_size
            except FileNotFoundError:
                continue  # deleted since its parent was listed
            except OSError as error:
                self._problem(os.path.join(root, *folder), error)

    def _add(self, kind: str, size: int) -> None:
        usage = self.kinds[kind]
        usage.files += 1
        usage.bytes += size

    def _count_hot(self, parts: tuple[str, ...], path: str, size: int, generation: str | None) -> None:
        name = parts[-1]
        if parts[0] in ("lost+found", "quarantine"):
            self._add(parts[0], size)
        elif parts[0] == "topics":
            self._count_segment("hot", parts, size)
        elif name.endswith(TEMP_SUFFIX) or _UNFINISHED.fullmatch(name):
            self._add("staging", size)
        elif generation_of(parts[0]) is not None and generation is not None and parts[0] != generation:
            self._add("staging", size)  # a resharding in progress
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
        elif tier == "cold" and is_manifest_file(name):
            self._add("manifests", size)
        else:
            self._add("staging" if name.endswith(TEMP_SUFFIX) else "other", size)

    def _is_spare(self, path: str) -> bool:
        """Whether nothing was ever written after the file header. Log files are written from the front."""
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

    # -- contents ------------------------------------------------------------------------------------------

    def _layout(self) -> Layout | None:
        path = os.path.join(self.data_dir, LAYOUT_NAME)
        try:
            with open(path, "rb") as file:
                return decode_layout(path, file.read(4096))
        except (OSError, TopicsError) as error:
            self._problem(path, error)
            return None

    def _read_topics(self, shard: int, shard_dir: str) -> None:
        """Take names and counts of topics from the newest readable snapshot of a shard."""
        meta_dir = os.path.join(self.data_dir, shard_dir, "meta")
        self.on_progress(f"{meta_dir}: reading topics")
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
                    _copy_counts(self.topics.setdefault(row.id, TopicUsage(row.id)), row)
                return
            if not isinstance(problem, FileNotFoundError):
                break
        if problem is not None:
            self._problem(meta_dir, problem)

    def _read_snapshot(self, path: str, shard: int) -> list[TopicUsage]:
        start, end = check_digest_file(self.disk, path, MAGIC)
        found: list[TopicUsage] = []
        pending: tuple[int, bytes] | None = None  # one row behind: the last row is the count of topics
        for number, row in enumerate(iter_rows(self.disk, path, start, end)):
            if number == 1:
                _decode(path, pending, ShardRow)
            elif pending is not None:
                found.append(_topic_usage(_decode(path, pending, TopicRow), shard))
            pending = row
        return found

    def _check_cold(self, cold_dir: str) -> bool:
        if not os.path.isdir(cold_dir):
            self.problems.append(f"{cold_dir} does not exist or is not a directory")
            return False
        ours, theirs = _cold_id(self.data_dir), _cold_id(cold_dir)
        if ours != theirs or ours is None:
            self.problems.append(
                f"{COLD_ID_NAME} in {cold_dir} does not match {self.data_dir}: is the disk mounted?"
            )
            return False
        return True

    def _file_system(self, path: str) -> tuple[FileSystem | None, int | None]:
        try:
            found = os.statvfs(path)
            device = os.stat(path).st_dev
        except OSError:
            return None, None  # reported when it was listed
        unit = found.f_frsize
        return FileSystem(as_utf8(path), found.f_blocks * unit, found.f_bavail * unit), device

    def _problem(self, path: str, error: Exception) -> None:
        if isinstance(error, OSError):
            self.problems.append(f"{error.filename or path}: {error.strerror or error}")
        else:
            self.problems.append(str(error))


def as_utf8(path: str) -> str:
    """Escape surrogates: a file name may be any bytes."""
    return path.encode("utf-8", "backslashreplace").decode()


def _check_data_dir(data_dir: str) -> None:
    """Refuse unrelated directories before scanning them."""
    try:
        names = os.listdir(data_dir)
    except FileNotFoundError:
        raise NotADataDirectory(f"{as_utf8(data_dir)} does not exist") from None
    except NotADirectoryError:
        raise NotADataDirectory(f"{as_utf8(data_dir)} is not a directory") from None
    except (OSError, ValueError) as error:
        raise NotADataDirectory(f"{as_utf8(data_dir)} cannot be read: {as_utf8(str(error))}") from error
    if LAYOUT_NAME not in names and not any(generation_of(name) is not None for name in names):
        raise NotADataDirectory(
            f"{as_utf8(data_dir)} is not a data directory of topics: it has no {LAYOUT_NAME}"
        )


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
        raise Corrupt(path, row[0], f"cannot decode a row: {error}") from error


def _topic_usage(row: TopicRow, shard: int) -> TopicUsage:
    live = len(row.inline[2]) if row.inline is not None else 0
    dead = 0
    for meta in row.segments:
        dead_bytes = min(meta.dead_bytes, meta.data_bytes)
        dead += dead_bytes
        live += max(0, meta.data_bytes - HEADER_BYTES - dead_bytes)
    return TopicUsage(row.id, row.name, shard, row.count, live, dead)


def _copy_counts(topic: TopicUsage, row: TopicUsage) -> None:
    topic.name, topic.shard, topic.records = row.name, row.shard, row.records
    topic.live_bytes, topic.dead_bytes = row.live_bytes, row.dead_bytes


# -- the command -------------------------------------------------------------------------------------------


@click.command(epilog=EPILOG)
@click.argument(
    "data_dir",
    type=non_empty,
    envvar="TOPICS_DATA_DIR",
    default=Settings().data_dir,
    metavar="[DATA_DIR]",
    shell_complete=complete_directory,
)
@cold_dir_option
@click.option("--top", type=click.IntRange(0), metavar="N", help=f"Number of topics to show, largest first. [{TOP}; with --json all]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def du(data_dir: str, cold_dir: str | None, top: int | None, as_json: bool) -> int:
    """Show the disk usage of a data directory, by kind of file and by topic.

    DATA_DIR is $TOPICS_DATA_DIR, or ./topics-data.
    """
    progress = _Progress()
    try:
        usage = disk_usage(data_dir, cold_dir, progress.show)
    except NotADataDirectory as error:
        raise CommandError(str(error), CANNOT) from error
    finally:
        progress.end()
    usage.topics = usage.topics[: TOP if top is None and not as_json else top]
    with ignore_broken_pipe():
        if as_json:
            print(msgspec.json.format(msgspec.json.encode(usage)).decode())
        else:
            print("\n".join(lines(usage)))
    for problem in usage.problems:
        print(f"topics du: {printable(problem)}", file=sys.stderr)
    return INCOMPLETE if usage.problems else OK


class _Progress:
    """Progress line on a terminal."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._next = 0.0

    def show(self, text: str) -> None:
        if self._is_shown and time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_S
            print(f"\r\x1b[K{printable(text)[-LINE_MAX:]}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def lines(usage: DiskUsage) -> list[str]:
    kinds = [[kind.kind, str(kind.files), format_size(kind.bytes)] for kind in usage.kinds if kind.files]
    total = [
        "total",
        str(sum(kind.files for kind in usage.kinds)),
        format_size(usage.hot_bytes + usage.cold_bytes),
    ]
    text = table(["kind", "files", "bytes"], [*kinds, total], left=1)
    if usage.topics:
        heads = ["topic", "id", "shard", "records", "live", "dead", "hot", "cold"]
        text += ["", *table(heads, [_cells(topic) for topic in usage.topics], left=2)]
    more = usage.topic_count - len(usage.topics)
    if more > 0:
        text.append(f"and {more} smaller topics; --top shows more")
    text += ["", _directory_line("data", usage.data_dir, usage.hot_bytes, usage.data_disk)]
    if usage.cold_dir is not None:
        same = ", on the same disk" if usage.same_disk else ""
        text.append(_directory_line("cold", usage.cold_dir, usage.cold_bytes, usage.cold_disk) + same)
    return text


def _cells(topic: TopicUsage) -> list[str]:
    return [
        printable(topic.name) if topic.name else "(in no snapshot)",
        f"{topic.id:016x}",
        "-" if topic.shard is None else str(topic.shard),
        "-" if topic.records is None else str(topic.records),
        *("-" if size is None else format_size(size) for size in (topic.live_bytes, topic.dead_bytes)),
        format_size(topic.hot_bytes),
        format_size(topic.cold_bytes),
    ]


def _directory_line(kind: str, path: str, used: int, disk: FileSystem | None) -> str:
    line = f"{kind}: {printable(path)}: {format_size(used)}"
    if disk is None:
        return line
    return f"{line}; {format_size(disk.free_bytes)} of {format_size(disk.total_bytes)} free"
