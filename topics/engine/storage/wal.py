"""The write-ahead log of one shard: envelopes in zero-filled files.

    file:      64-byte header, which includes the file's length · envelopes, 8-byte aligned
    envelope:  magic u32 · length u32 · salt u64 · lsn u64 · prev_lsn u64 · synced_lsn u64 · digest · frames

An envelope is valid if its salt is that of the file and its digest (of the body, seeded with the digest of the header) matches.
`lsn` increases by one per envelope. What an invalid envelope means depends on what follows:

- a later file starts with the very next lsn: recovery copied the tail there, and the rest of this file is void;
- a later valid envelope was written when the missing ones were known to be synced: **damage**;
- the file is shorter than the length in its header: **damage**, whatever is missing;
- otherwise **torn**: never acked as synced, and cut off.

Never append to a recovered file: a page read back from the page cache may not be on disk. Recovery opens a new file, copies
what is not known to be synced, syncs it, and only then is the shard ready.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from topics.api.errors import Corrupt, UnsupportedFormat
from topics.engine.core.ports import Disk
from topics.engine.storage import frames
from topics.engine.storage.control import WalStart

MAGIC = b"TPCSWAL\0"
FILE_HEADER = struct.Struct("<8sIIQQQ16x")  # magic, version, shard, number, salt, length of the file
FILE_HEADER_BYTES = 64
ENVELOPE_MAGIC = b"ENV1"
ENVELOPE = struct.Struct("<4sIQQQQ")
ENVELOPE_BYTES = 48
ITER_ENVELOPE_BYTES_MAX = 256 << 20  # read at once by tools; no envelope is that long
VERSION_MAX = 0xFFFF  # a larger version number is damage
_SEARCH_BYTES = 1 << 20
SALT_SEARCH_PASSES = 8  # bytes hashed in search of envelopes, as a multiple of the file size; about 10 GB/s


@dataclass(slots=True)
class WalFile:
    number: int
    path: str
    salt: int
    handle: int
    capacity: int
    position: int = FILE_HEADER_BYTES
    first_lsn: int = 0  # 0: no envelope yet
    last_lsn: int = 0

    @property
    def remaining(self) -> int:
        return self.capacity - self.position


@dataclass(slots=True)
class Envelope:
    """A valid envelope found by a scan; its frames are at [start, end) of the file."""

    lsn: int
    prev_lsn: int
    synced_lsn: int
    start: int
    end: int
    digest: bytes


@dataclass(slots=True)
class ScannedFile:
    number: int
    path: str
    data: bytes
    salt: int
    envelopes: list[Envelope] = field(default_factory=list)
    bad_at: list[int] = field(default_factory=list)  # offsets where an envelope is invalid or missing
    capacity: int = 0  # 0: written by a version that did not store it

    @property
    def is_short(self) -> bool:
        """Whether the file was truncated. It has its full length before its header is written."""
        return len(self.data) < self.capacity


def file_name(number: int) -> str:
    return f"wal-{number:016d}.log"


def file_number(name: str) -> int | None:
    digits = name.removeprefix("wal-").removesuffix(".log")
    return int(digits) if name == f"wal-{digits}.log" and digits.isascii() and digits.isdigit() else None


def file_header(*, shard: int, number: int, salt: int, capacity: int = 0) -> bytes:
    head = FILE_HEADER.pack(MAGIC, frames.FORMAT_VERSION, shard, number, salt, capacity)
    return head + xxh3_64_digest(head)


def encode_envelope(salt: int, lsn: int, prev_lsn: int, synced_lsn: int, body: bytes) -> bytes:
    head = ENVELOPE.pack(ENVELOPE_MAGIC, len(body), salt, lsn, prev_lsn, synced_lsn)
    return head + xxh3_64_digest(body, xxh3_64_intdigest(head)) + body


def scan(path: str, number: int, data: bytes) -> ScannedFile | None:
    """Find all valid envelopes of a file; None if its header was never completed, and the file never used."""
    head = data[:FILE_HEADER_BYTES]
    if len(head) < FILE_HEADER_BYTES:
        return None
    magic, version, _, stored_number, salt, capacity = FILE_HEADER.unpack(head[:56])
    is_damaged = version > VERSION_MAX and not is_blank(data)
    is_other = version not in (0, frames.FORMAT_VERSION)  # 0: an unfinished header
    if magic == MAGIC and is_other and not is_damaged and not _holds_envelope(data):
        raise UnsupportedFormat(path, version)
    if xxh3_64_digest(head[:56]) != head[56:]:
        if _holds_envelope(data) or (magic == MAGIC and is_damaged):
            raise Corrupt(path, 0, "digest of the file header does not match")
        return None
    if magic != MAGIC:
        raise Corrupt(path, 0, "not a log file")
    if version != frames.FORMAT_VERSION:
        raise UnsupportedFormat(path, version)
    if stored_number != number:
        raise Corrupt(path, 16, f"the header has file number {stored_number}")
    found = ScannedFile(number, path, data, salt, capacity=capacity)
    at = FILE_HEADER_BYTES
    while at + ENVELOPE_BYTES <= len(data):
        envelope = envelope_at(data, at, salt)
        if envelope is not None:
            found.envelopes.append(envelope)
            at = _aligned(envelope.end)
            continue
        if not np.frombuffer(data, np.uint8, offset=at).any():
            break  # the rest is zeros
        found.bad_at.append(at)
        following = _find_envelope(data, at + 8, salt)
        if following is None:
            break
        at = following
    else:
        # Less than an envelope, but not the zeros at the end of a full file: truncated inside an envelope.
        if any(data[at:]):
            found.bad_at.append(at)
    return found


def is_blank(data: bytes) -> bool:
    """Whether there are only zeros after the header: an unused spare file."""
    return data.count(0, FILE_HEADER_BYTES) == max(
        0, len(data) - FILE_HEADER_BYTES
    )  # any() takes ten times as long


def is_truncated(found: ScannedFile | None, data: bytes) -> bool:
    """Whether a file without valid envelopes lost them by truncation, rather than never having had any."""
    if found is None:
        return len(data) < FILE_HEADER_BYTES and data.startswith(MAGIC)
    at_start = len(data) == FILE_HEADER_BYTES or not is_blank(data)
    return not found.envelopes and found.is_short and at_start


def _aligned(position: int) -> int:
    return (position + 7) & ~7


def envelope_at(data: bytes, at: int, salt: int) -> Envelope | None:
    if data[at : at + 4] != ENVELOPE_MAGIC or at + ENVELOPE_BYTES > len(data):
        return None
    _, length, envelope_salt, lsn, prev_lsn, synced_lsn = ENVELOPE.unpack_from(data, at)
    start = at + ENVELOPE_BYTES
    if envelope_salt != salt or start + length > len(data):
        return None
    digest = data[at + 40 : start]
    seed = xxh3_64_intdigest(data[at : at + 40])
    if xxh3_64_digest(memoryview(data)[start : start + length], seed) != digest:
        return None
    return Envelope(lsn, prev_lsn, synced_lsn, start, start + length, digest)


def iter_envelopes(
    disk: Disk, handle: int, size: int, salt: int
) -> Iterator[tuple[Envelope, bytes] | tuple[None, int]]:
    """`scan` for tools, with one envelope in memory at a time: yields valid envelopes with their frames, and (None, offset) where
    one is invalid or missing."""
    at = FILE_HEADER_BYTES
    while at < size:
        found = _read_envelope(disk, handle, size, at, salt)
        if found is not None:
            yield found
            at = _aligned(found[0].end)
            continue
        if _is_zero_from(disk, handle, at, size):
            return
        yield None, at
        following = _next_envelope(disk, handle, size, at + 8, salt)
        if following is None:
            return
        at = following


def _read_envelope(disk: Disk, handle: int, size: int, at: int, salt: int) -> tuple[Envelope, bytes] | None:
    head = disk.read(handle, at, ENVELOPE_BYTES)
    if len(head) < ENVELOPE_BYTES or head[:4] != ENVELOPE_MAGIC:
        return None
    _, length, found_salt, *_ = ENVELOPE.unpack_from(head)
    if found_salt != salt or at + ENVELOPE_BYTES + length > size or length > ITER_ENVELOPE_BYTES_MAX:
        return None
    data = disk.read(handle, at, ENVELOPE_BYTES + length)
    envelope = envelope_at(data, 0, salt)
    if envelope is None:
        return None
    envelope.start, envelope.end = at + envelope.start, at + envelope.end
    return envelope, data[ENVELOPE_BYTES:]


def _is_zero_from(disk: Disk, handle: int, at: int, size: int) -> bool:
    return not any(
        np.frombuffer(disk.read(handle, piece, _SEARCH_BYTES), np.uint8).any()
        for piece in range(at, size, _SEARCH_BYTES)
    )


def _next_envelope(disk: Disk, handle: int, size: int, at: int, salt: int) -> int | None:
    """The next aligned offset from `at` on with a valid envelope; `at` is aligned, and so is each piece."""
    for piece in range(at, size, _SEARCH_BYTES):
        data = disk.read(handle, piece, _SEARCH_BYTES)  # an aligned magic never crosses a piece boundary
        within = data.find(ENVELOPE_MAGIC)
        while within >= 0:
            offset = piece + within
            if within % 8 == 0 and _read_envelope(disk, handle, size, offset, salt) is not None:
                return offset
            within = data.find(ENVELOPE_MAGIC, within + 1)
    return None


def salts_in(data: bytes) -> Iterator[int | None]:
    """The salts of envelopes that are valid with their own salt, for a file with a damaged header.

    Payloads may imitate envelopes, so the number of hashed bytes is limited; None if that limit is reached.
    """
    left = SALT_SEARCH_PASSES * len(data)
    at = data.find(ENVELOPE_MAGIC, FILE_HEADER_BYTES)
    while 0 <= at <= len(data) - ENVELOPE_BYTES:
        if at % 8 == 0:
            _, length, salt, *_ = ENVELOPE.unpack_from(data, at)
            left -= length if at + ENVELOPE_BYTES + length <= len(data) else 0
            if left < 0:
                yield None
                return
            if envelope_at(data, at, salt) is not None:
                yield salt
        at = data.find(ENVELOPE_MAGIC, at + 1)


def _holds_envelope(data: bytes) -> bool:
    """Whether there may be an envelope that is valid with its own salt: then the header is damaged, not unfinished."""
    return any(True for _ in salts_in(data))


def _find_envelope(data: bytes, at: int, salt: int) -> int | None:
    """The next aligned offset from `at` on with a valid envelope."""
    while True:
        at = data.find(ENVELOPE_MAGIC, at)
        if at < 0:
            return None
        if at % 8 == 0 and envelope_at(data, at, salt) is not None:
            return at
        at += 1


def last_valid_lsns(starts: list[WalStart | None]) -> list[int]:
    """The last valid lsn of each file: entries after the previous_lsn of a later file's start are void."""
    bound = 1 << 64
    bounds: list[int] = []
    for start in reversed(starts):
        bounds.append(bound)
        if start is not None:
            bound = min(bound, start.previous_lsn)
    return bounds[::-1]


def start_of(file: ScannedFile) -> WalStart | None:
    """The WalStart in the first frame of the file; None if it has another frame there."""
    envelope = file.envelopes[0]
    starts: list[int] = []
    frames.frame_starts(file.data, envelope.start, envelope.end, starts)
    columns = frames.decode_columns(file.data, starts[:1])
    if not starts or int(columns.headers["type"][0]) != frames.WAL_START:
        return None
    return msgspec.msgpack.decode(columns.payload(0), type=WalStart)


def stale_ranges(file: ScannedFile, bound: int, reached: int) -> tuple[list[tuple[int, int]], int]:
    """Byte ranges of a file that no start uses: those after `bound`, the last valid lsn, that are torn or follow a gap. Valid
    entries after it without a gap were copied to the next file when this one was cut off there.

    `reached`: the lsn up to which the log has no gap before this file. Returned as it is after the file.
    """
    ranges: list[tuple[int, int]] = []
    at = FILE_HEADER_BYTES
    for envelope in file.envelopes:
        begin = envelope.start - ENVELOPE_BYTES
        if reached >= bound:
            ranges.append((at, begin))
        if envelope.lsn > max(bound, reached + 1):
            ranges.append((begin, envelope.end))
        else:
            reached = envelope.lsn
        at = envelope.end
    if reached >= bound:
        ranges.append((at, len(file.data)))
    ends = [start + len(file.data[start:end].rstrip(b"\0")) for start, end in ranges]
    return [(start, end) for (start, _), end in zip(ranges, ends) if end > start], reached


class Wal:
    """The log files of one shard and the write position. Syncing is done by the caller, off the loop."""

    def __init__(self, disk: Disk, directory: str, *, shard: int, file_bytes: int) -> None:
        self._disk = disk
        self.directory = directory
        self._shard = shard
        self.file_bytes = file_bytes
        self.files: list[WalFile] = []  # ascending; the last one is active
        self.spare: WalFile | None = None
        self.next_number = 1
        self.last_lsn = 0
        self.synced_lsn = 0
        self.last_digest = bytes(8)
        self.last_file_number = 0
        self.unsynced_files: list[WalFile] = []
        self.bytes_written = 0

    # -- files ---------------------------------------------------------------------------------------------

    def make_file(self, number: int, capacity: int) -> WalFile:
        """Create a zero-filled file with a synced header and name, ready for envelopes.

        The zeros are synced before the header is written, so a file with a complete header once had its full length.
        """
        path = f"{self.directory}/{file_name(number)}"
        salt = self._disk.random_u64()
        handle = self._disk.open(path, create=True)
        try:
            self._disk.truncate(handle, 0)
            self._disk.allocate(handle, capacity)
            self._disk.sync(handle)
            head = file_header(shard=self._shard, number=number, salt=salt, capacity=capacity)
            self._disk.write(handle, 0, head)
            self._disk.sync(handle)
            self._disk.sync_dir(self.directory)
        except OSError:
            # An incomplete file would only take up space on a full disk.
            self._disk.close(handle)
            self._disk.remove(path)
            raise
        return WalFile(number, path, salt, handle, capacity)

    def take_number(self) -> int:
        self.next_number += 1
        return self.next_number - 1

    def begin_file(self, file: WalFile, ts: int) -> None:
        """Make `file` the active one; its first envelope chains it to the preceding file."""
        self.files.append(file)
        self.append(self.start_frame(file.number, ts))

    def start_frame(self, number: int, ts: int) -> bytes:
        start = WalStart(number, self.last_file_number, self.last_lsn, self.last_digest, self._disk.boot_id())
        return frames.encode_control(frames.WAL_START, 0, ts, start)

    @property
    def active(self) -> WalFile:
        return self.files[-1]

    @property
    def next_frame_offset(self) -> int:
        """The offset of the first frame of the next envelope in the active file."""
        return self.files[-1].position + ENVELOPE_BYTES

    # -- writing -------------------------------------------------------------------------------------------

    def append(self, body: bytes) -> int:
        """Write one envelope to the active file, which must have room; return its lsn."""
        file = self.files[-1]
        lsn = self.last_lsn + 1
        data = encode_envelope(file.salt, lsn, self.last_lsn, self.synced_lsn, body)
        assert file.position + len(data) <= file.capacity, "an envelope must fit into its file"
        self._disk.write(file.handle, file.position, data)
        file.position = _aligned(file.position + len(data))
        if not file.first_lsn:
            file.first_lsn = lsn
        file.last_lsn = self.last_lsn = lsn
        self.last_digest = data[40:48]
        self.last_file_number = file.number
        self.bytes_written += len(data)
        if not self.unsynced_files or self.unsynced_files[-1] is not file:
            self.unsynced_files.append(file)
        return lsn

    def begin_sync(self) -> tuple[list[WalFile], int]:
        """The files to sync, oldest first, and the lsn that is synced once all of them are."""
        files, self.unsynced_files = self.unsynced_files, []
        return files, self.last_lsn

    # -- removal -------------------------------------------------------------------------------------------

    def take_obsolete(self, lsn: int) -> list[WalFile]:
        """Take out the files whose envelopes are all at or below `lsn`; the active file stays."""
        gone = [file for file in self.files[:-1] if file.last_lsn <= lsn and file not in self.unsynced_files]
        if gone:
            self.files = [file for file in self.files if file not in gone]
        return gone
