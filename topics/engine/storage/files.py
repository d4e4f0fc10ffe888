"""Common parts of data files: the 16-byte header (the log has its own), digests, and atomic writes.

Digests are XXH3-64 in the canonical 8 bytes of the xxhash library.
"""

from __future__ import annotations

import errno
from struct import Struct

import xxhash

from topics.api.errors import Corrupt, UnsupportedFormat
from topics.engine.core.ports import Disk

HEADER = Struct("<8sII")  # magic, version, reserved
HEADER_BYTES = HEADER.size
VERSION = 1
DIGEST_BYTES = 8
_PIECE_BYTES = 1 << 20
TEMP_SUFFIX = ".tmp"
# The watch sessions of a shard, written by the worker next to log and snapshots. The engine only verifies the file.
WATCH_NAME = "watch"
WATCH_MAGIC = b"TPCSWCH\0"

Hasher = xxhash.xxh3_64

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def is_full(error: BaseException) -> bool:
    """Whether the disk is full or a quota is used up."""
    return isinstance(error, OSError) and error.errno in _FULL


def is_out_of_resources(error: BaseException) -> bool:
    """Whether space, file handles or memory ran out: the disk is fine, and a retry may succeed."""
    return is_full(error) or (isinstance(error, OSError) and error.errno in _SCARCE)


def header(magic: bytes, version: int = VERSION) -> bytes:
    return HEADER.pack(magic, version, 0)


def check_header(path: str, data: bytes, magic: bytes, latest: int = VERSION) -> int:
    """The version of the file. Raises Corrupt for other files, and UnsupportedFormat for a newer version."""
    if len(data) < HEADER_BYTES:
        raise Corrupt(path, 0, f"has {len(data)} bytes, which is less than a header")
    found, version, _ = HEADER.unpack_from(data)
    if found != magic:
        raise Corrupt(path, 0, f"starts with {found!r} instead of {magic!r}")
    if not 1 <= version <= latest:
        raise UnsupportedFormat(path, version)
    return int(version)


def xxh(data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(data)


def parent(path: str) -> str:
    return path.rpartition("/")[0]


def read_exact(disk: Disk, handle: int, path: str, offset: int, length: int) -> bytes:
    data = disk.read(handle, offset, length)
    if len(data) != length:
        raise Corrupt(path, offset + len(data), f"ends {length - len(data)} bytes early")
    return data


def read_range(disk: Disk, path: str, offset: int, length: int) -> bytes:
    """Exactly these bytes; Corrupt if the file ends before them."""
    handle = disk.open(path)
    try:
        return read_exact(disk, handle, path, offset, length)
    finally:
        disk.close(handle)


def read_file(disk: Disk, path: str, bytes_max: int | None = None) -> bytes:
    """The whole file, or its first `bytes_max` bytes."""
    handle = disk.open(path)
    try:
        return disk.read(handle, 0, disk.size(handle) if bytes_max is None else bytes_max)
    finally:
        disk.close(handle)


def write_whole(disk: Disk, path: str, data: bytes) -> None:
    """Make the file hold exactly `data` and sync it; not atomic, and its directory entry is not synced."""
    handle = disk.open(path, create=True)
    try:
        # Truncate first: the tail of a longer file left by a crash must not remain.
        disk.truncate(handle, 0)
        disk.write(handle, 0, data)
        disk.sync(handle)
    finally:
        disk.close(handle)


def ensure_dir(disk: Disk, path: str) -> None:
    """Create a directory durably."""
    disk.make_dir(path)
    sync_parents(disk, path)


def sync_parents(disk: Disk, path: str) -> None:
    """Sync the parent directories of `path`, up to the data directory, but not `path` itself.

    A directory survives a power cut only if its entry in each parent is synced. Existing levels are synced, too: the process
    that created them may have been killed before it could.
    """
    while path:
        path = parent(path)
        disk.sync_dir(path)


def sync_file(disk: Disk, path: str) -> None:
    """Sync the contents and the directory entry of a file that was written through another handle."""
    handle = disk.open(path)
    try:
        disk.sync(handle)
    finally:
        disk.close(handle)
    disk.sync_dir(parent(path))


def publish(disk: Disk, temp: str, path: str) -> None:
    """Rename a synced file to its final name. Without the sync a power cut could leave an empty file under that name."""
    disk.rename(temp, path)
    disk.sync_dir(parent(path))


def write_sealed_file(disk: Disk, path: str, magic: bytes, payload: bytes) -> None:
    """Write header and payload atomically; durable once this returns."""
    temp = path + TEMP_SUFFIX
    write_whole(disk, temp, header(magic) + payload)
    publish(disk, temp, path)


def with_digest(magic: bytes, payload: bytes) -> bytes:
    """Header, payload and the digest of both."""
    body = header(magic) + payload
    return body + xxh(body)


def without_digest(path: str, data: bytes, magic: bytes) -> bytes:
    """The payload of data made by `with_digest`, verified."""
    end = len(data) - DIGEST_BYTES
    try:  # the version first: a later one may have its digest elsewhere
        check_header(path, data, magic)
    except UnsupportedFormat:
        if xxh(header(magic) + data[HEADER_BYTES:end]) == data[end:]:
            raise Corrupt(path, 0, "the header is damaged") from None  # the version was changed
        raise
    if end < HEADER_BYTES:
        raise Corrupt(path, len(data), "ends before its digest")
    if xxh(data[:end]) != data[end:]:
        raise Corrupt(path, end, "digest does not match")
    return data[HEADER_BYTES:end]


def check_digest_file(disk: Disk, path: str, magic: bytes) -> tuple[int, int]:
    """Verify a file made by `write_digest_file` piece by piece; return the start and end of its payload."""
    handle = disk.open(path)
    try:
        size = disk.size(handle)
        end = size - DIGEST_BYTES
        head = disk.read(handle, 0, HEADER_BYTES)
        try:
            check_header(path, head, magic)
        except UnsupportedFormat:
            if _digest_matches(disk, handle, header(magic), end):
                raise Corrupt(path, 0, "the header is damaged") from None
            raise
        if end < HEADER_BYTES:
            raise Corrupt(path, size, "ends before its digest")
        if not _digest_matches(disk, handle, head, end):
            raise Corrupt(path, end, "digest does not match")
        return HEADER_BYTES, end
    finally:
        disk.close(handle)


def _digest_matches(disk: Disk, handle: int, head: bytes, end: int) -> bool:
    hasher = Hasher(head)
    for at in range(HEADER_BYTES, end, _PIECE_BYTES):
        hasher.update(disk.read(handle, at, min(_PIECE_BYTES, end - at)))
    return end >= HEADER_BYTES and hasher.digest() == disk.read(handle, end, DIGEST_BYTES)


def write_digest_file(disk: Disk, path: str, magic: bytes, payload: bytes) -> None:
    """`write_sealed_file` with the digest of header and payload at the end."""
    write_sealed_file(disk, path, magic, with_digest(magic, payload)[HEADER_BYTES:])


def read_digest_file(disk: Disk, path: str, magic: bytes) -> bytes:
    """The payload of a file, verified before it is read into memory."""
    first, end = check_digest_file(disk, path, magic)
    return read_range(disk, path, first, end - first)
