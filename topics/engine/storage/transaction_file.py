"""Transaction files: the staged chunks of an open transaction, and the commit decision.

    txn-<id of the transaction, 16 hex>-<number>       in the topic's directory, on the hot tier

    header of all files · entries
    entry    kind u8 · 0 u24 · head_len u32 · body_len u64 · digest of the body · digest of all before and of head · head · body

    kind 1   a chunk: head is msgpack of ChunkHead, body msgpack of the columns of its records
    kind 2   a decision: body is msgpack of the chunks to append, in order, each with the position of its entry, records and size

A file is read up to the first entry whose digests do not match: the rest of an unsynced entry after a power cut. Nothing refers
to it or to bytes after it, so the next entry overwrites it. A valid entry counts as staged, even if its request was never
answered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from struct import Struct
from typing import TypeAlias

import msgspec

from topics.api.errors import Corrupt
from topics.api.limits import MIB
from topics.engine.commands.records import Records
from topics.engine.core.ports import Disk
from topics.engine.storage.files import (
    DIGEST_BYTES,
    HEADER_BYTES,
    Hasher,
    check_header,
    ensure_dir,
    header,
    parent,
    read_exact,
    xxh,
)

MAGIC = b"TPCSTXN\0"
CHUNK, DECISION = 1, 2
HEAD_BYTES_MAX = 4096  # a longer head means damage

_NAME = re.compile(r"txn-([0-9a-f]{16})-([0-9]+)")
_FIELDS = Struct("<BxxxIQ8s")
ENTRY_BYTES = _FIELDS.size + DIGEST_BYTES

# Offset and length of the entry, number of records, their accounted bytes.
ChunkPosition: TypeAlias = tuple[int, int, int, int]


class ChunkHead(msgspec.Struct, frozen=True, array_like=True):
    part: str
    chunk: int
    records: int
    size: int  # accounted bytes
    largest: int  # accounted bytes of the largest record


class TransactionEntry(msgspec.Struct, frozen=True):
    """An entry of a file. `chunk` is None for a decision."""

    offset: int
    bytes: int
    chunk: ChunkHead | None


_decode_head = msgspec.msgpack.Decoder(ChunkHead).decode
_decode_records = msgspec.msgpack.Decoder(Records).decode
_decode_order = msgspec.msgpack.Decoder(list[tuple[int, int, int, int]]).decode
_encode = msgspec.msgpack.encode


def file_name(txn: int, number: int) -> str:
    return f"txn-{txn:016x}-{number}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Transaction id and file number; None for other names."""
    match = _NAME.fullmatch(name)
    return (int(match[1], 16), int(match[2])) if match else None


# -- entries -----------------------------------------------------------------------------------------------


def encode_chunk(head: ChunkHead, records: Records) -> bytes:
    return _entry(CHUNK, _encode(head), _encode(records))


def encode_decision(order: list[ChunkPosition]) -> bytes:
    return _entry(DECISION, b"", _encode(order))


def _entry(kind: int, head: bytes, body: bytes) -> bytes:
    fields = _FIELDS.pack(kind, len(head), len(body), xxh(body))
    return b"".join((fields, xxh(fields + head), head, body))


def _read_entry(disk: Disk, handle: int, path: str, offset: int) -> tuple[int, bytes, int, bytes]:
    """Kind, head, length of the body and its digest."""
    start = read_exact(disk, handle, path, offset, ENTRY_BYTES)
    kind, head_len, body_len, digest = _FIELDS.unpack_from(start)
    if head_len > HEAD_BYTES_MAX:
        raise Corrupt(path, offset, "no entry starts here")
    head = read_exact(disk, handle, path, offset + ENTRY_BYTES, head_len)
    if xxh(start[: _FIELDS.size] + head) != start[_FIELDS.size :]:
        raise Corrupt(path, offset, "digest of the entry does not match")
    return kind, head, body_len, digest


def _read_body(disk: Disk, handle: int, path: str, offset: int, kind: int) -> bytes:
    found, head, body_len, digest = _read_entry(disk, handle, path, offset)
    body = read_exact(disk, handle, path, offset + ENTRY_BYTES + len(head), body_len)
    if found != kind or xxh(body) != digest:
        raise Corrupt(path, offset, "digest of the entry does not match")
    return body


def _body_matches(disk: Disk, handle: int, at: int, length: int, digest: bytes) -> bool:
    hasher = Hasher()
    end = at + length
    while at < end:
        piece = disk.read(handle, at, min(MIB, end - at))
        if not piece:
            return False
        hasher.update(piece)
        at += len(piece)
    return hasher.digest() == digest


# -- files -------------------------------------------------------------------------------------------------


def entries(disk: Disk, path: str) -> Iterator[TransactionEntry]:
    """All entries up to the first invalid one. Raises Corrupt if the header is invalid."""
    handle = disk.open(path)
    try:
        check_header(path, disk.read(handle, 0, HEADER_BYTES), MAGIC)
        offset, end = HEADER_BYTES, disk.size(handle)
        while offset < end:
            try:
                kind, head, body_len, digest = _read_entry(disk, handle, path, offset)
                chunk = _decode_head(head) if kind == CHUNK else None
            except (Corrupt, msgspec.MsgspecError, UnicodeDecodeError):
                return
            body_at = offset + ENTRY_BYTES + len(head)
            if not _body_matches(disk, handle, body_at, body_len, digest):
                return
            yield TransactionEntry(offset, body_at + body_len - offset, chunk)
            offset = body_at + body_len
    finally:
        disk.close(handle)


def read_staged(disk: Disk, path: str) -> list[TransactionEntry]:
    """The entries found at a start; empty if the file does not exist or has no valid header."""
    try:
        return list(entries(disk, path))
    except (FileNotFoundError, Corrupt):
        return []


def write_entries(disk: Disk, path: str, offset: int, encoded: list[bytes], *, sync: bool) -> None:
    """Write entries at `offset`, the end of the valid ones, and sync them if asked to."""
    directory = parent(path)
    if sync:
        ensure_dir(disk, directory)
    else:
        disk.make_dir(directory)
    handle = disk.open(path, create=True)
    try:
        if disk.size(handle) != offset:
            # Truncate first: valid entries of a failed attempt must not follow the new ones.
            disk.truncate(handle, min(offset, disk.size(handle)))
        if offset == HEADER_BYTES:
            disk.write(handle, 0, header(MAGIC))
        for entry in encoded:
            disk.write(handle, offset, entry)
            offset += len(entry)
        if sync:
            disk.sync(handle)
    finally:
        disk.close(handle)
    if sync:
        disk.sync_dir(directory)


def read_chunks(disk: Disk, path: str, positions: list[ChunkPosition]) -> list[Records | None]:
    """The records of chunks; None for a chunk that is damaged."""
    try:
        handle = disk.open(path)
    except FileNotFoundError:
        return [None] * len(positions)
    try:
        return [_read_chunk(disk, handle, path, offset, count) for offset, _, count, _ in positions]
    finally:
        disk.close(handle)


def _read_chunk(disk: Disk, handle: int, path: str, offset: int, count: int) -> Records | None:
    try:
        records = _decode_records(_read_body(disk, handle, path, offset, CHUNK))
    except (Corrupt, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return records if len(records.payloads) == count else None


def read_decision(disk: Disk, path: str, offset: int) -> list[ChunkPosition] | None:
    """The chunks to append, from a decision; None if it cannot be read."""
    try:
        handle = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        return _decode_order(_read_body(disk, handle, path, offset, DECISION))
    except (Corrupt, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    finally:
        disk.close(handle)


def blank_chunks(disk: Disk, path: str, positions: list[ChunkPosition]) -> None:
    """Overwrite chunks whose records are in the log with zeros."""
    if not positions:
        return
    try:
        handle = disk.open(path)
    except FileNotFoundError:
        return
    try:
        for offset, length, _, _ in positions:
            for at in range(offset, offset + length, MIB):
                disk.write(handle, at, bytes(min(MIB, offset + length - at)))
        disk.sync(handle)
    finally:
        disk.close(handle)
