"""Files of open transactions: what was staged, chunk after chunk, and once it is decided what is to be appended.

    txn-<id of the transaction, 16 hex>-<number>       in the topic's directory, on the hot tier

    header of all files · entries
    entry    kind u8 · 0 u24 · head_len u32 · body_len u64 · digest of the body · digest of all before and of head · head · body

    kind 1   a chunk: head is msgpack of ChunkHead, body msgpack of the columns of its records
    kind 2   a decision: body is msgpack of the chunks to append, in order, each with the place of its entry, records and size

A file is read up to the first entry that does not agree with its digests: what a power cut left of an unsynced one. Nothing
points behind that, so the next entry is written over it. An entry that is whole was staged, whoever heard of it.
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
HEAD_BYTES_MAX = 4096  # a longer one is rot

_NAME = re.compile(r"txn-([0-9a-f]{16})-([0-9]+)")
_FIELDS = Struct("<BxxxIQ8s")
ENTRY_BYTES = _FIELDS.size + DIGEST_BYTES

ChunkPosition: TypeAlias = tuple[
    int, int, int, int
]  # a chunk: offset and length of its entry, records, their accounted bytes


class ChunkHead(msgspec.Struct, frozen=True, array_like=True):
    part: str
    chunk: int
    records: int
    size: int  # accounted bytes
    largest: int  # of one record


class TransactionEntry(msgspec.Struct, frozen=True):
    """One entry as it lies in a file. `chunk` is None for a decision."""

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
    """Id and number of the transaction; None: no such file."""
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
        raise Corrupt(path, offset, "no entry begins here")
    head = read_exact(disk, handle, path, offset + ENTRY_BYTES, head_len)
    if xxh(start[: _FIELDS.size] + head) != start[_FIELDS.size :]:
        raise Corrupt(path, offset, "the entry does not agree with its digest")
    return kind, head, body_len, digest


def _read_body(disk: Disk, handle: int, path: str, offset: int, kind: int) -> bytes:
    found, head, body_len, digest = _read_entry(disk, handle, path, offset)
    body = read_exact(disk, handle, path, offset + ENTRY_BYTES + len(head), body_len)
    if found != kind or xxh(body) != digest:
        raise Corrupt(path, offset, "the entry does not agree with its digest")
    return body


def _body_holds(disk: Disk, handle: int, at: int, length: int, digest: bytes) -> bool:
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
    """Every entry up to the first that is not whole. Raises Corrupt when the file has not even its header."""
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
            if not _body_holds(disk, handle, body_at, body_len, digest):
                return
            yield TransactionEntry(offset, body_at + body_len - offset, chunk)
            offset = body_at + body_len
    finally:
        disk.close(handle)


def read_staged(disk: Disk, path: str) -> list[TransactionEntry]:
    """What is there after a start; nothing when there is no file, or none that came to hold anything."""
    try:
        return list(entries(disk, path))
    except (FileNotFoundError, Corrupt):
        return []


def write_entries(disk: Disk, path: str, offset: int, made: list[bytes], *, sync: bool) -> None:
    """Put entries at the end of what counts, and make them last when asked to."""
    directory = parent(path)
    if sync:
        ensure_dir(disk, directory)
    else:
        disk.make_dir(directory)
    handle = disk.open(path, create=True)
    try:
        if disk.size(handle) != offset:
            # Cut first: whole entries of an attempt that failed must not follow the new ones.
            disk.truncate(handle, min(offset, disk.size(handle)))
        if offset == HEADER_BYTES:
            disk.write(handle, 0, header(MAGIC))
        for entry in made:
            disk.write(handle, offset, entry)
            offset += len(entry)
        if sync:
            disk.sync(handle)
    finally:
        disk.close(handle)
    if sync:
        disk.sync_dir(directory)


def read_chunks(disk: Disk, path: str, placed: list[ChunkPosition]) -> list[Records | None]:
    """The records of chunks; None for one that is not what was staged."""
    try:
        handle = disk.open(path)
    except FileNotFoundError:
        return [None] * len(placed)
    try:
        return [_read_chunk(disk, handle, path, offset, count) for offset, _, count, _ in placed]
    finally:
        disk.close(handle)


def _read_chunk(disk: Disk, handle: int, path: str, offset: int, count: int) -> Records | None:
    try:
        records = _decode_records(_read_body(disk, handle, path, offset, CHUNK))
    except (Corrupt, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return records if len(records.payloads) == count else None


def read_decision(disk: Disk, path: str, offset: int) -> list[ChunkPosition] | None:
    """What was decided to be appended; None when it cannot be read any more."""
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


def blank_chunks(disk: Disk, path: str, placed: list[ChunkPosition]) -> None:
    """Overwrite the records of chunks that are in the log by now, for good."""
    if not placed:
        return
    try:
        handle = disk.open(path)
    except FileNotFoundError:
        return
    try:
        for offset, length, _, _ in placed:
            for at in range(offset, offset + length, MIB):
                disk.write(handle, at, bytes(min(MIB, offset + length - at)))
        disk.sync(handle)
    finally:
        disk.close(handle)
