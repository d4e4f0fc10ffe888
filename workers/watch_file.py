"""The file `watch` of a shard: its watch sessions, and how far groups of watchers have come.

16-byte header (magic `TPCSWCH\\0`, version), a MessagePack array of sessions and groups, XXH3-64 of both. It is written
whole each time: aside, synced, renamed, directory synced. So it is what it was or what it should be, whatever happens.

What is in it is a convenience: without it clients are told that their session is not there, and make another.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from topics.engine.errors import Corrupt
from topics.engine.files import (
    HEADER_BYTES,
    TEMP_SUFFIX,
    WATCH_MAGIC,
    WATCH_NAME,
    publish,
    read_file,
    with_digest,
    without_digest,
    write_whole,
)
from topics.engine.ports import Disk
from workers.sessions import SessionRow

logger = logging.getLogger("topics.shard")

GroupRow: TypeAlias = tuple[str, int, str, int]  # topic, topic id, group, cursor


class WatchRows(msgspec.Struct, frozen=True, array_like=True):
    sessions: list[SessionRow]
    groups: list[GroupRow]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WatchRows)


def encode(sessions: Sequence[SessionRow | msgspec.Raw], groups: Sequence[GroupRow]) -> bytes:
    """Sessions may be encoded already, as `Sessions.rows` gives them."""
    return with_digest(WATCH_MAGIC, _encoder.encode((sessions, groups)))


def decode(data: bytes, path: str = WATCH_NAME) -> WatchRows:
    """Raises Corrupt, or UnsupportedFormat for what a later version wrote."""
    payload = without_digest(path, data, WATCH_MAGIC)
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(path, HEADER_BYTES, f"the rows cannot be read: {error}") from error


def write(disk: Disk, shard_dir: str, data: bytes) -> None:
    """Replace the file by what `encode` made; it lasts once this returns. Blocks, so it is for a thread."""
    path = f"{shard_dir}/{WATCH_NAME}"
    write_whole(disk, path + TEMP_SUFFIX, data)
    publish(disk, path + TEMP_SUFFIX, path)


def read(disk: Disk, shard_dir: str, *, may_fail: bool = True) -> WatchRows | None:
    """What was written last; None when there is nothing, or nothing that can be read.

    A file of a later version raises UnsupportedFormat, as any other file does: the next write would destroy it.
    `may_fail` False: so does an error of the disk, when what is not read now is not read later either.
    """
    path = f"{shard_dir}/{WATCH_NAME}"
    try:
        if not disk.exists(path):
            return None
        return decode(read_file(disk, path), path)
    except (Corrupt, OSError) as error:
        if isinstance(error, OSError) and not may_fail:
            raise
        logger.warning("watch sessions are lost, clients will make new ones: %s", error)
        return None
