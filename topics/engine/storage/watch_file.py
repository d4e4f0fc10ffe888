"""The `watch` file of a shard, with its watch sessions: a log of entries, each with digests.

    start    header of all files, version 2 · salt u64 · end of the base u64 · digest of all before
    entry    mark 4 bytes · length u32 · digest of the payload · digest of salt, offset and all before · payload
    payload  msgpack of WatchEntry

The base is written under a temporary name, synced and renamed. Entries after it are appended one by one, each synced before the
next. So an invalid entry after the base is the rest of the last one after a crash, and the file ends before it, unless a valid
head follows: then it is damaged. Any invalid entry in the base is damage. Salt and offset tie an entry to its file and position.

Version 1 was rewritten each time: header, one WatchEntry, digest of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct

import msgspec

from topics.api.errors import Corrupt, UnsupportedFormat
from topics.api.limits import MIB
from topics.engine.core.ports import Disk
from topics.engine.storage.files import (
    DIGEST_BYTES,
    HEADER_BYTES,
    TEMP_SUFFIX,
    WATCH_MAGIC,
    check_digest_file,
    check_header,
    header,
    publish,
    read_range,
    xxh,
)

VERSION = 2
_POSITION = Struct("<QQ")
_HEAD = Struct("<4sI8s")
START_BYTES = HEADER_BYTES + _POSITION.size + DIGEST_BYTES
ENTRY_BYTES = _HEAD.size + DIGEST_BYTES
MARK = b"\xc1wch"  # 0xc1 occurs neither in UTF-8 nor as a msgpack type


class WatchEntry(msgspec.Struct, frozen=True, array_like=True):
    """Changes of sessions and groups. `ended` is applied first: the name may have been used again since. The worker defines the rows."""

    sessions: list[msgspec.Raw] = []
    groups: list[msgspec.Raw] = []
    changes: list[msgspec.Raw] = []  # of existing sessions
    ended: list[str] = []
    ended_groups: list[tuple[str, str]] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(WatchEntry).decode


def _start(salt: int, base_end: int) -> bytes:
    start = header(WATCH_MAGIC, VERSION) + _POSITION.pack(salt, base_end)
    return start + xxh(start)


def encode_entry(salt: int, offset: int, entry: WatchEntry) -> bytes:
    payload = _encode(entry)
    fields = _HEAD.pack(MARK, len(payload), xxh(payload))
    return b"".join((fields, xxh(_POSITION.pack(salt, offset) + fields), payload))


def write_base(disk: Disk, path: str, salt: int, entries: Iterable[WatchEntry]) -> int:
    """Replace the file by these entries, with one in memory at a time. Durable once this returns; returns the length."""
    temp = path + TEMP_SUFFIX
    handle = disk.open(temp, create=True)
    try:
        disk.truncate(handle, 0)
        end = START_BYTES
        for entry in entries:
            data = encode_entry(salt, end, entry)
            disk.write(handle, end, data)
            end += len(data)
        disk.write(handle, 0, _start(salt, end))
        disk.sync(handle)
    finally:
        disk.close(handle)
    publish(disk, temp, path)
    return end


def append(disk: Disk, path: str, salt: int, end: int, entry: WatchEntry) -> int:
    """Append an entry; durable once this returns. Returns the new length."""
    data = encode_entry(salt, end, entry)
    handle = disk.open(path)
    try:
        disk.write(handle, end, data)
        disk.sync(handle)
    finally:
        disk.close(handle)
    return end + len(data)


def read_entries(disk: Disk, path: str) -> Iterator[tuple[int, int, WatchEntry]]:
    """All entries, each with its start and end. Raises Corrupt at a damaged entry, and UnsupportedFormat for a later version."""
    handle = disk.open(path)
    try:
        start = disk.read(handle, 0, START_BYTES)
        if _version(disk, path, start) == VERSION:
            yield from _read_appended(disk, handle, path, start)
            return
    finally:
        disk.close(handle)
    first, end = check_digest_file(disk, path, WATCH_MAGIC)
    yield first, end + DIGEST_BYTES, _entry(path, first, read_range(disk, path, first, end - first))


def _version(disk: Disk, path: str, start: bytes) -> int:
    try:
        version = check_header(path, start, WATCH_MAGIC, VERSION)
    except UnsupportedFormat:
        if xxh(header(WATCH_MAGIC, VERSION) + start[HEADER_BYTES:-DIGEST_BYTES]) == start[-DIGEST_BYTES:]:
            raise Corrupt(path, 0, "the header is damaged") from None
        check_digest_file(disk, path, WATCH_MAGIC)  # it may have been of version 1
        raise
    if version == VERSION and xxh(start[:-DIGEST_BYTES]) != start[-DIGEST_BYTES:]:
        raise Corrupt(path, 0, "digest of the header does not match")
    return version


def _read_appended(disk: Disk, handle: int, path: str, start: bytes) -> Iterator[tuple[int, int, WatchEntry]]:
    salt, base_end = _POSITION.unpack_from(start, HEADER_BYTES)
    at, size = START_BYTES, disk.size(handle)
    while at < size:
        length, digest = _head(disk.read(handle, at, ENTRY_BYTES), salt, at)
        payload = disk.read(handle, at + ENTRY_BYTES, length)
        if not digest or xxh(payload) != digest:
            if at < base_end or _is_followed(disk, handle, salt, at, size):
                raise Corrupt(path, at, "digest of the entry does not match")
            return
        end = at + ENTRY_BYTES + length
        yield at, end, _entry(path, at, payload)
        at = end
    if at < base_end:
        raise Corrupt(path, at, f"ends {base_end - at} bytes early")


def _head(head: bytes, salt: int, offset: int) -> tuple[int, bytes]:
    """Length and digest of the payload; an empty digest if this is not a valid head."""
    if len(head) == ENTRY_BYTES:
        fields = head[: _HEAD.size]
        if xxh(_POSITION.pack(salt, offset) + fields) == head[_HEAD.size :]:
            _, length, digest = _HEAD.unpack(fields)
            return length, digest
    return 0, b""


def _is_followed(disk: Disk, handle: int, salt: int, at: int, size: int) -> bool:
    """Whether a valid head follows after `at`."""
    at += 1
    while at < size:
        piece = disk.read(
            handle, at, MIB + ENTRY_BYTES
        )  # so that a head that starts within the MiB is complete
        found = piece.find(MARK, 0, MIB + len(MARK) - 1)
        while found >= 0:
            if _head(piece[found : found + ENTRY_BYTES], salt, at + found)[1]:
                return True
            found = piece.find(MARK, found + 1, MIB + len(MARK) - 1)
        at += MIB
    return False


def _entry(path: str, offset: int, payload: bytes) -> WatchEntry:
    try:
        return _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(path, offset, f"the rows cannot be read: {error}") from error
