"""Frames: the encoding of one record or control change, the same in the WAL and in segments.

    length u32 · type u8 · flags u8 · topic_id u64 · seq u64 · ts u64 · node_len u16 · tag_len u16 · data_len u32
    node · tag · payload · extensions · XXH3-64 of all before

A frame is valid if its length fits and its digest matches. The extension area is between the payload and the digest:
`id u8, length u16, value`, repeated. docs/decisions/0001 has the tables.

Encoding appends to a list of pieces for one large join, and decoding makes columns from a whole buffer: there is no object
per record in either direction.
"""

from __future__ import annotations

import struct
from collections.abc import Container
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest

from topics.engine.commands.records import Records

FORMAT_VERSION = 1

HEADER = struct.Struct("<IBBQQQHHI")
HEADER_BYTES = HEADER.size  # 38
FLAGS_AT = 5
DIGEST_BYTES = 8
OVERHEAD_BYTES = HEADER_BYTES + DIGEST_BYTES
_LENGTH = struct.Struct("<I")
_IDENTITY = struct.Struct("<QQ")  # topic and seq, in the header
_IDENTITY_AT = 6

# Kinds of frames; control.py says what they are. 8 and 11 were never written.
APPEND, TOPIC_CREATE, TOPIC_DELETE, FORWARD_PUT, FORWARD_DELETE = 1, 2, 3, 4, 5
DELETE, EVICT, CONFIG, LEASE = 6, 7, 9, 10
SEQ_CEILING, TIME_CEILING, SEGMENT_SWAP, SKIP, LOSS, WAL_START, ERASE_DONE = 12, 13, 14, 15, 16, 17, 18
CONSUMER_PUT, CONSUMER_DELETE, LETTERS_TAKEN = 19, 20, 21
OUTFLOW_OPEN, OUTFLOW_CLOSE, INFLOW_OPEN, INFLOW_CLOSE, COPIED, EPOCH = 22, 23, 24, 25, 26, 27
SEGMENT_MERGE = 32

TXN_OPENED, TXN_DECIDED, TXN_ADVANCED, TXN_ENDED = 40, 41, 42, 43

HAS_TAG, HAS_NODE, RAW, HAS_EXT, ERASED = 1, 2, 8, 16, 32
# Row flags in memory only; on disk a delete is in the .del file.
STAGED_DELETE, DELETED = 64, 128
DEAD = STAGED_DELETE | DELETED

EXT_KEY, EXT_BATCH, EXT_META, EXT_HEADERS, EXT_EXPIRES, EXT_SIZE, EXT_HOPS, EXT_DELIVER_AT = (
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
)
_EXT_HEAD = struct.Struct("<BH")
_EXT_U8 = struct.Struct("<BHB")
_EXT_U32 = struct.Struct("<BHI")
_EXT_U64 = struct.Struct("<BHQ")
_HOPS = [_EXT_U8.pack(EXT_HOPS, 1, hops) for hops in range(256)]

RUN_MIN = 8  # after this many equal lengths in a row, the rest of the run is found with numpy

HEADER_DTYPE = np.dtype(
    [
        ("length", "<u4"),
        ("type", "u1"),
        ("flags", "u1"),
        ("topic", "<u8"),
        ("seq", "<u8"),
        ("ts", "<u8"),
        ("node_len", "<u2"),
        ("tag_len", "<u2"),
        ("data_len", "<u4"),
    ]
)
assert HEADER_DTYPE.itemsize == HEADER_BYTES


def encode_appends(
    pieces: list[bytes],
    records: Records,
    *,
    topic_id: int,
    first_seq: int,
    ts: int,
    key: bytes | None = None,
    plain: bool = False,
) -> tuple[list[int], list[int] | None]:
    """Append the frames of one write to `pieces`; return their lengths, and their flags unless all are 0."""
    if plain or (key is None and is_plain(records)):
        return _encode_plain(pieces, records.payloads, topic_id, first_seq, ts), None
    return _encode_full(pieces, records, topic_id, first_seq, ts, key)


def is_plain(records: Records) -> bool:
    """Whether the records have nothing but payloads."""
    return (
        records.tags is None
        and records.nodes is None
        and records.meta_lens is None
        and not records.raw
        and records.ttls_ms is None
        and records.sizes is None
        and records.header_lens is None
        and records.hops is None
    )


def _encode_plain(pieces: list[bytes], payloads: list[bytes], topic_id: int, seq: int, ts: int) -> list[int]:
    pack, digest, add = HEADER.pack, xxh3_64_digest, pieces.append
    lengths: list[int] = []
    for payload in payloads:
        size = len(payload)
        body = pack(size + 42, APPEND, 0, topic_id, seq, ts, 0, 0, size) + payload
        add(body)
        add(digest(body))
        lengths.append(size + OVERHEAD_BYTES)
        seq += 1
    return lengths


def _encode_full(
    pieces: list[bytes], records: Records, topic_id: int, seq: int, ts: int, key: bytes | None
) -> tuple[list[int], list[int]]:
    pack, digest, add = HEADER.pack, xxh3_64_digest, pieces.append
    payloads = records.payloads
    count = len(payloads)
    tags, nodes = records.tags, records.nodes
    exts = _extensions(records, ts, key)
    base_flags = RAW if records.raw else 0
    lengths: list[int] = []
    all_flags: list[int] = []
    if tags is None and nodes is None and exts is not None:  # copies of plain records
        for payload, ext in zip(payloads, exts):
            size, ext_size = len(payload), len(ext)
            flags = base_flags | HAS_EXT if ext_size else base_flags
            length = size + ext_size
            body = pack(length + 42, APPEND, flags, topic_id, seq, ts, 0, 0, size) + payload + ext
            add(body)
            add(digest(body))
            lengths.append(length + OVERHEAD_BYTES)
            all_flags.append(flags)
            seq += 1
        return lengths, all_flags
    for i in range(count):
        payload = payloads[i]
        tag = tags[i] if tags is not None else None
        node = nodes[i] if nodes is not None else None
        ext = exts[i] if exts is not None else b""
        flags = base_flags
        if tag is not None:
            flags |= HAS_TAG
        else:
            tag = b""
        if node is not None:
            flags |= HAS_NODE
        else:
            node = b""
        if ext:
            flags |= HAS_EXT
        tail = node + tag + payload + ext
        body = (
            pack(len(tail) + 42, APPEND, flags, topic_id, seq + i, ts, len(node), len(tag), len(payload))
            + tail
        )
        add(body)
        add(digest(body))
        lengths.append(len(tail) + OVERHEAD_BYTES)
        all_flags.append(flags)
    return lengths, all_flags


def _extensions(records: Records, ts: int, key: bytes | None) -> list[bytes] | None:
    """The encoded extension areas of a write, or None if no record has one.

    The length of the meta comes first: rendering reads no further.
    """
    columns: list[tuple[int, list[int]]] = []
    if records.meta_lens is not None:
        columns.append((EXT_META, records.meta_lens))
    if records.header_lens is not None:
        columns.append((EXT_HEADERS, records.header_lens))
    exts: list[bytes] | None = None
    for ext_id, values in columns:
        encoded = [_EXT_U32.pack(ext_id, 4, value) if value else b"" for value in values]
        exts = encoded if exts is None else [a + b for a, b in zip(exts, encoded, strict=True)]
    if records.ttls_ms is not None:
        encoded = [_EXT_U64.pack(EXT_EXPIRES, 8, ts + ttl) if ttl else b"" for ttl in records.ttls_ms]
        exts = encoded if exts is None else [a + b for a, b in zip(exts, encoded, strict=True)]
    if records.sizes is not None:
        encoded = [
            _EXT_U32.pack(EXT_SIZE, 4, size) if size != len(payload) else b""
            for size, payload in zip(records.sizes, records.payloads, strict=True)
        ]
        exts = encoded if exts is None else [a + b for a, b in zip(exts, encoded, strict=True)]
    if records.hops is not None:
        encoded = [_HOPS[hops] for hops in records.hops]
        exts = encoded if exts is None else [a + b for a, b in zip(exts, encoded, strict=True)]
    if key is not None:
        if exts is None:
            exts = [b""] * len(records.payloads)
        exts[0] += _EXT_HEAD.pack(EXT_KEY, len(key)) + key + _EXT_U32.pack(EXT_BATCH, 4, len(exts))
    return exts


def encode_control(frame_type: int, topic_id: int, ts: int, payload: object, *, seq: int = 0) -> bytes:
    """A control frame with a MessagePack payload."""
    data = msgspec.msgpack.encode(payload)
    body = HEADER.pack(len(data) + 42, frame_type, 0, topic_id, seq, ts, 0, 0, len(data)) + data
    return body + xxh3_64_digest(body)


def read_extensions(frame: bytes, start: int = 0) -> dict[int, bytes]:
    """The extensions of the frame at `start`, by id."""
    length, _, _, _, _, _, node_len, tag_len, data_len = HEADER.unpack_from(frame, start)
    at = start + HEADER_BYTES + node_len + tag_len + data_len
    end = start + 4 + length - DIGEST_BYTES
    found: dict[int, bytes] = {}
    while at < end:
        ext_id, size = _EXT_HEAD.unpack_from(frame, at)
        at += _EXT_HEAD.size
        found[ext_id] = frame[at : at + size]
        at += size
    return found


def frame_is_valid(frame: bytes) -> bool:
    """Whether these bytes are exactly one frame with a matching digest."""
    if len(frame) < OVERHEAD_BYTES:
        return False
    (length,) = _LENGTH.unpack_from(frame)
    return bool(length + 4 == len(frame) and xxh3_64_digest(frame[:-DIGEST_BYTES]) == frame[-DIGEST_BYTES:])


def is_record(frame: bytes, topic_id: int, seq: int) -> bool:
    """Whether these bytes are a valid frame of this record; a valid frame of another record counts as damage, too."""
    return frame_is_valid(frame) and _IDENTITY.unpack_from(frame, _IDENTITY_AT) == (topic_id, seq)


def frame_starts(buffer: bytes, start: int, end: int, starts: list[int]) -> None:
    """Append the offsets of the frames in [start, end) to `starts`, following their length fields."""
    unpack, add = _LENGTH.unpack_from, starts.append
    last = alike = 0
    while start < end:
        add(start)
        length = unpack(buffer, start)[0]
        start += length + 4
        if length != last:
            last, alike = length, 0
            continue
        alike += 1
        if alike == RUN_MIN:  # records of one size are common
            more = _equal_lengths(buffer, start, end, length)
            starts += range(start, start + more * (length + 4), length + 4)
            start += more * (length + 4)
            alike = 0
    if start != end:
        raise ValueError("frames do not end at the end of their envelope")


def _equal_lengths(buffer: bytes, start: int, end: int, length: int) -> int:
    """The number of consecutive frames of this length from `start` on."""
    stride = length + 4
    count = (end - start) // stride
    if not count:
        return 0
    fields = np.ndarray(shape=(count,), dtype="<u4", buffer=buffer, offset=start, strides=(stride,))
    other = np.flatnonzero(fields != length)
    return int(other[0]) if len(other) else count


@dataclass(slots=True)
class Columns:
    """The headers of frames in one buffer."""

    buffer: bytes
    starts: npt.NDArray[np.int64]
    headers: npt.NDArray[np.void]

    def slice(self, first: int, stop: int) -> Columns:
        return Columns(self.buffer, self.starts[first:stop], self.headers[first:stop])

    def take(self, picked: npt.NDArray[np.intp]) -> Columns:
        return Columns(self.buffer, self.starts[picked], self.headers[picked])

    def first_not_in(self, kinds: Container[int]) -> int | None:
        """Index of the first frame that is of none of these kinds."""
        found = np.flatnonzero(np.bincount(self.headers["type"], minlength=1))
        others = [kind for kind in found.tolist() if kind not in kinds]
        return int(np.argmax(np.isin(self.headers["type"], others))) if others else None

    def payload(self, i: int) -> bytes:
        """The payload of a control frame, which has neither node nor tag."""
        at = int(self.starts[i]) + HEADER_BYTES
        return self.buffer[at : at + int(self.headers["data_len"][i])]


def decode_columns(buffer: bytes, starts: list[int]) -> Columns:
    """Decode all headers by one gather: a view of the buffer with a header at *every* byte, indexed by the starts."""
    where = np.array(starts, dtype=np.int64)
    if not starts:
        return Columns(buffer, where, np.empty(0, dtype=HEADER_DTYPE))
    every = np.ndarray(
        shape=(len(buffer) - HEADER_BYTES + 1,), dtype=HEADER_DTYPE, buffer=buffer, strides=(1,)
    )
    return Columns(buffer, where, every[where])
