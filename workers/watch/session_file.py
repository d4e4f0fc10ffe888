"""Watch sessions, and how far groups of watchers have come, in the file `watch` of a shard (topics/engine/storage/watch_file.py).

A save appends what has changed. The file is written whole by the first save of a process, by the save after one that failed, and
when what was appended has outgrown the rest.

What is in it is a convenience: without it clients are told that their session is not there, and make another.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from topics.api.errors import Corrupt
from topics.engine.core.ports import Disk
from topics.engine.storage.files import WATCH_NAME
from topics.engine.storage.watch_file import WatchEntry, append, read_entries, write_base
from workers.watch.feeds import GroupRow
from workers.watch.sessions import SessionChange, SessionRow, StoredSessions

logger = logging.getLogger("topics.shard")

APPENDED_BYTES_MIN = 1 << 20  # a small file is not written anew for less
_ENTRY_BYTES = 1 << 20  # about as much of a whole file is in memory at a time
_GROUPS_PER_ENTRY = 1000

_encode = msgspec.msgpack.Encoder().encode
_session = msgspec.msgpack.Decoder(SessionRow).decode
_change = msgspec.msgpack.Decoder(SessionChange).decode
_group: msgspec.msgpack.Decoder[GroupRow] = msgspec.msgpack.Decoder(GroupRow)


class WatchRows(msgspec.Struct, frozen=True):
    sessions: list[SessionRow]
    groups: list[GroupRow]


class WatchFile:
    """The file, as one process writes it. `write` and `append` block, so they are for a thread, one at a time."""

    def __init__(self, disk: Disk, shard_dir: str) -> None:
        self._disk = disk
        self._path = f"{shard_dir}/{WATCH_NAME}"
        self._salt = 0
        self._base_end = 0
        self._end = 0  # 0: what is there now is not known

    @property
    def wants_all(self) -> bool:
        """Whether the next save is to write the file whole."""
        return not self._end or self._end - self._base_end > max(self._base_end, APPENDED_BYTES_MIN)

    def write(self, sessions: Iterable[bytes], changes: Iterable[bytes], groups: Sequence[GroupRow]) -> None:
        """All there is: sessions as encoded rows, and changes of them since these rows."""
        self._end = 0
        self._salt = self._disk.random_u64()
        entries = _whole(sessions, changes, groups)
        self._base_end = self._end = write_base(self._disk, self._path, self._salt, entries)

    def append(self, entry: WatchEntry) -> None:
        end, self._end = self._end, 0
        self._end = append(self._disk, self._path, self._salt, end, entry)


def group_rows(groups: Iterable[GroupRow]) -> list[msgspec.Raw]:
    return [msgspec.Raw(_encode(group)) for group in groups]


def _whole(
    sessions: Iterable[bytes], changes: Iterable[bytes], groups: Sequence[GroupRow]
) -> Iterator[WatchEntry]:
    for some in _pieces(sessions):
        yield WatchEntry(sessions=some)
    for some in _pieces(changes):
        yield WatchEntry(changes=some)
    for at in range(0, len(groups), _GROUPS_PER_ENTRY):
        yield WatchEntry(groups=group_rows(groups[at : at + _GROUPS_PER_ENTRY]))


def _pieces(rows: Iterable[bytes]) -> Iterator[list[msgspec.Raw]]:
    some: list[msgspec.Raw] = []
    size = 0
    for row in rows:
        some.append(msgspec.Raw(row))
        size += len(row)
        if size >= _ENTRY_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def write(disk: Disk, shard_dir: str, rows: WatchRows) -> None:
    """A file of these rows, in place of what is there."""
    WatchFile(disk, shard_dir).write(map(_encode, rows.sessions), (), rows.groups)


def read(disk: Disk, shard_dir: str, *, may_fail: bool = True) -> WatchRows | None:
    """What was saved last; None when there is no file. Of a damaged one what comes before the damage: that is what an earlier save left.

    A file of a later version raises UnsupportedFormat, as any other file does: the next write would destroy it.
    `may_fail` False: so does an error of the disk, when what is not read now is not read later either.
    """
    path = f"{shard_dir}/{WATCH_NAME}"
    sessions = StoredSessions()
    groups: dict[tuple[str, str], GroupRow] = {}
    try:
        if not disk.exists(path):
            return None
        for offset, _, entry in read_entries(disk, path):
            try:
                _apply(entry, sessions, groups)
            except (msgspec.DecodeError, UnicodeDecodeError, KeyError) as error:
                raise Corrupt(path, offset, f"the rows cannot be read: {error}") from error
    except (Corrupt, OSError) as error:
        if isinstance(error, OSError) and not may_fail:
            raise
        logger.warning("watch sessions are lost, clients will make new ones: %s", error)
    return WatchRows(sessions.rows(), list(groups.values()))


def _apply(entry: WatchEntry, sessions: StoredSessions, groups: dict[tuple[str, str], GroupRow]) -> None:
    for wid in entry.ended:
        sessions.end(wid)
    for key in entry.ended_groups:
        groups.pop(key, None)
    for raw in entry.sessions:
        sessions.put(_session(raw))
    for raw in entry.changes:
        sessions.change(_change(raw))
    for raw in entry.groups:
        group = _group.decode(raw)
        groups[group[0], group[2]] = group
