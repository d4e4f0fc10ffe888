"""Persistence of watch sessions and group cursors in the file `watch` of a shard (topics/engine/storage/watch_file.py).

A save appends changes. The whole file is written by the first save of a process, by the save after a failed one, and when
the appended part has outgrown the rest.

The file is not essential: without it, clients get the error that their session does not exist, and create another.
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

APPENDED_BYTES_MIN = 1 << 20  # a small file is not rewritten before this much was appended
_ENTRY_BYTES = 1 << 20  # approximate memory used while the whole file is written
_GROUPS_PER_ENTRY = 1000

_encode = msgspec.msgpack.Encoder().encode
_session = msgspec.msgpack.Decoder(SessionRow).decode
_change = msgspec.msgpack.Decoder(SessionChange).decode
_group: msgspec.msgpack.Decoder[GroupRow] = msgspec.msgpack.Decoder(GroupRow)


class WatchRows(msgspec.Struct, frozen=True):
    sessions: list[SessionRow]
    groups: list[GroupRow]


class WatchFile:
    """Writer of the file. `write` and `append` block: call them on a thread, one at a time."""

    def __init__(self, disk: Disk, shard_dir: str) -> None:
        self._disk = disk
        self._path = f"{shard_dir}/{WATCH_NAME}"
        self._salt = 0
        self._base_end = 0
        self._end = 0  # 0: the content of the file is unknown

    @property
    def wants_all(self) -> bool:
        """Whether the next save must write the whole file."""
        return not self._end or self._end - self._base_end > max(self._base_end, APPENDED_BYTES_MIN)

    def write(self, sessions: Iterable[bytes], changes: Iterable[bytes], groups: Sequence[GroupRow]) -> None:
        """Write the whole file: sessions as encoded rows, and changes since these rows."""
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
    """Replace the file with one of these rows."""
    WatchFile(disk, shard_dir).write(map(_encode, rows.sessions), (), rows.groups)


def read(disk: Disk, shard_dir: str, *, may_fail: bool = True) -> WatchRows | None:
    """The saved rows; None if there is no file. Of a damaged file, the rows before the damage, which are an older state.

    A file of a later version raises UnsupportedFormat, because the next write would destroy it. With `may_fail` False,
    disk errors are raised, too: for callers that do not keep the file for later.
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
        logger.warning("watch sessions are lost; clients will create new ones: %s", error)
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
