"""Snapshots: the state of a shard in one file, written under a temporary name and renamed."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from struct import Struct

import msgspec

from topics.api.errors import Corrupt
from topics.api.limits import KIB, MIB
from topics.engine.core.ports import Disk
from topics.engine.storage.files import (
    TEMP_SUFFIX,
    Hasher,
    ensure_dir,
    header,
    parent,
    read_digest_file,
    read_exact,
)

MAGIC = b"TPCSSNP\0"
ITER_ROW_BYTES_MAX = 256 * MIB  # no row is that long; a damaged length field must not exhaust memory
PIECE_BYTES = 256 * KIB  # per write call; with smaller pieces the calls dominate

_NAME = re.compile(r"snap-([0-9a-f]{16})")
_LENGTH = Struct("<I")


def snapshot_path(meta_dir: str, number: int) -> str:
    return f"{meta_dir}/snap-{number:016x}"


class SnapshotWriter:
    """Takes the shard row, then one row per topic; then `finish` and `publish`.

    The last two are separate so that the caller can run them off the loop: both sync.
    """

    def __init__(self, disk: Disk, meta_dir: str, number: int) -> None:
        self._disk = disk
        self._path = snapshot_path(meta_dir, number)
        self._temp = self._path + TEMP_SUFFIX
        self._encoder = msgspec.msgpack.Encoder()
        self._hasher = Hasher()
        self._rows = 0
        self._offset = 0
        self._buffer = bytearray(header(MAGIC))
        ensure_dir(disk, meta_dir)
        self._handle: int | None = disk.open(self._temp, create=True)
        # A crashed attempt with the same number may have been longer.
        disk.truncate(self._handle, 0)

    def add(self, row: object) -> None:
        self._put(row)
        self._rows += 1
        if len(self._buffer) >= PIECE_BYTES:
            self._flush()

    def finish(self) -> None:
        """Write the closing row and the digest, and sync."""
        self._put(self._rows)
        self._flush()
        self._write(self._hasher.digest())
        self._disk.sync(self._open_handle())
        self._close()

    def publish(self) -> None:
        """Rename to the final name: recovery starts from this snapshot from now on."""
        if self._handle is not None:
            raise RuntimeError("publish before finish: the file is incomplete")
        self._disk.rename(self._temp, self._path)
        try:
            self._disk.sync_dir(parent(self._path))
        except OSError as error:
            # It is unknown which snapshot a restart would use, so a retry must not overwrite the segments of this one.
            raise OSError(errno.EIO, f"unknown whether the snapshot was published: {error}") from error

    def abandon(self) -> None:
        """Give up before `publish`."""
        self._close()
        self._disk.remove(self._temp)

    def _put(self, row: object) -> None:
        encoded = self._encoder.encode(row)
        self._buffer += _LENGTH.pack(len(encoded))
        self._buffer += encoded

    def _flush(self) -> None:
        piece = bytes(self._buffer)
        self._write(piece)
        self._hasher.update(piece)
        self._buffer.clear()

    def _write(self, data: bytes) -> None:
        self._disk.write(self._open_handle(), self._offset, data)
        self._offset += len(data)

    def _open_handle(self) -> int:
        if self._handle is None:
            raise RuntimeError("the snapshot is finished")
        return self._handle

    def _close(self) -> None:
        if self._handle is not None:
            self._disk.close(self._handle)
            self._handle = None


def read_snapshot(disk: Disk, meta_dir: str, number: int) -> tuple[bytes, list[bytes]]:
    """The encoded shard row and topic rows of a verified snapshot."""
    path = snapshot_path(meta_dir, number)
    rows = list(split_rows(path, read_digest_file(disk, path, MAGIC)))
    if len(rows) < 2:
        raise Corrupt(path, 0, "has no shard row or no closing row")
    closing = rows.pop()
    if closing != msgspec.msgpack.encode(len(rows)):
        raise Corrupt(path, 0, f"has {len(rows)} rows, unlike its closing row")
    return rows[0], rows[1:]


def split_rows(path: str, payload: bytes) -> Iterator[bytes]:
    at, end = 0, len(payload)
    while at < end:
        if end - at < _LENGTH.size:
            raise Corrupt(path, at, "ends inside a row length")
        (length,) = _LENGTH.unpack_from(payload, at)
        at += _LENGTH.size
        if length > end - at:
            raise Corrupt(path, at, "a row extends past the end of the file")
        yield payload[at : at + length]
        at += length


def iter_rows(disk: Disk, path: str, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The rows between two offsets, including the closing row, each with its offset; one at a time, for tools. Verify the file
    before, with `files.check_digest_file`."""
    handle = disk.open(path)
    try:
        at = start
        while at < end:
            if end - at < _LENGTH.size:
                raise Corrupt(path, at, "ends inside a row length")
            (length,) = _LENGTH.unpack(read_exact(disk, handle, path, at, _LENGTH.size))
            if length > end - at - _LENGTH.size:
                raise Corrupt(path, at, "a row extends past the end of the file")
            if length > ITER_ROW_BYTES_MAX:
                raise Corrupt(
                    path, at, f"a row of {length} bytes, more than the limit of {ITER_ROW_BYTES_MAX}"
                )
            yield at, read_exact(disk, handle, path, at + _LENGTH.size, length)
            at += _LENGTH.size + length
    finally:
        disk.close(handle)


def list_snapshots(disk: Disk, meta_dir: str) -> list[int]:
    """Numbers of the published snapshots, ascending."""
    return sorted(int(match[1], 16) for name in disk.list(meta_dir) if (match := _NAME.fullmatch(name)))


def remove_snapshot(disk: Disk, meta_dir: str, number: int) -> None:
    """Remove a snapshot. Not synced: if it comes back after a power cut, it is removed again."""
    disk.remove(snapshot_path(meta_dir, number))


def remove_unfinished(disk: Disk, meta_dir: str) -> None:
    """Remove temporary files of writers that never got to `publish`. Numbers increase, so no later writer replaces them."""
    for name in disk.list(meta_dir):
        if name.endswith(TEMP_SUFFIX) and _NAME.fullmatch(name.removesuffix(TEMP_SUFFIX)):
            disk.remove(f"{meta_dir}/{name}")
