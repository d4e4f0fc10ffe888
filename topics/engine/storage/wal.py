"""The write-ahead log of one shard: envelopes in zero-filled files.

    file:      64-byte header, which knows the file's length · envelopes, 8-byte aligned
    envelope:  magic u32 · length u32 · salt u64 · lsn u64 · prev_lsn u64 · synced_lsn u64 · digest · frames

An envelope is valid when its salt is the file's and its digest (of the body, seeded with the digest of the header)
agrees. `lsn` grows by one an envelope. What a bad envelope means is decided from what follows it:

- a later file begins with the very next number: recovery copied the tail there, and this file's rest is void;
- a later valid envelope was written when the missing ones were known to be synced: **rotten**;
- the file is shorter than it was made: **rotten**, whatever is missing;
- else **torn**: never acked as synced, and cut.

Never append to a recovered file: a page that is read back from the cache may not be on the disk. Recovery opens
a new file, copies what is not known to be synced, syncs it, and only then is the shard ready.
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

MAGIC = b"TPCSWAL\0"
FILE_HEADER = struct.Struct("<8sIIQQQ16x")  # magic, version, shard, number, salt, length of the file
FILE_HEADER_BYTES = 64
ENVELOPE_MAGIC = b"ENV1"
ENVELOPE = struct.Struct("<4sIQQQQ")
ENVELOPE_BYTES = 48
ITER_ENVELOPE_BYTES_MAX = 256 << 20  # what a tool reads at once; no envelope is that long
VERSION_MAX = 0xFFFF  # no version of the format gets that far: a larger number is rot
_SEARCH_BYTES = 1 << 20
SALT_SEARCH_PASSES = 8  # how many times over a file may be hashed in search of envelopes, at some 10 GB/s


class WalStart(msgspec.Struct, frozen=True, array_like=True):
    """First frame of every file: which file came before, how it ended, and on which boot this one was begun."""

    file_number: int
    previous_file: int
    previous_lsn: int  # entries past it in earlier files are void: recovery copied what counts
    previous_digest: bytes
    boot_id: str


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
    """A valid envelope found by a scan; `start` and `end` bound its frames in the file."""

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
    bad_at: list[int] = field(default_factory=list)  # offsets where an envelope should be and is not
    capacity: int = 0  # 0: of a version that did not write it down

    @property
    def is_short(self) -> bool:
        """Whether the file has lost its end. It had its whole length before its header was written."""
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
    """Find every valid envelope of a file; None when its header was never finished, and so it was never used."""
    head = data[:FILE_HEADER_BYTES]
    if len(head) < FILE_HEADER_BYTES:
        return None
    magic, version, _, stored_number, salt, capacity = FILE_HEADER.unpack(head[:56])
    is_rotten = version > VERSION_MAX and not is_blank(data)
    is_other = version not in (0, frames.FORMAT_VERSION)  # 0 is a header that was being written
    if magic == MAGIC and is_other and not is_rotten and not _holds_envelope(data):
        raise UnsupportedFormat(path, version)
    if xxh3_64_digest(head[:56]) != head[56:]:
        if _holds_envelope(data) or (magic == MAGIC and is_rotten):
            raise Corrupt(path, 0, "the file header does not agree with its digest")
        return None
    if magic != MAGIC:
        raise Corrupt(path, 0, "not a log file")
    if version != frames.FORMAT_VERSION:
        raise UnsupportedFormat(path, version)
    if stored_number != number:
        raise Corrupt(path, 16, f"the file says it is number {stored_number}")
    found = ScannedFile(number, path, data, salt, capacity=capacity)
    at = FILE_HEADER_BYTES
    while at + ENVELOPE_BYTES <= len(data):
        envelope = envelope_at(data, at, salt)
        if envelope is not None:
            found.envelopes.append(envelope)
            at = _aligned(envelope.end)
            continue
        if not np.frombuffer(data, np.uint8, offset=at).any():
            break  # the zero-filled rest
        found.bad_at.append(at)
        following = _find_envelope(data, at + 8, salt)
        if following is None:
            break
        at = following
    else:
        # Too little for an envelope, and not the zeros that end a full file: it was cut short inside one.
        if any(data[at:]):
            found.bad_at.append(at)
    return found


def is_blank(data: bytes) -> bool:
    """Whether nothing was ever written behind the header, finished or not: a spare that nobody used."""
    return data.count(0, FILE_HEADER_BYTES) == max(
        0, len(data) - FILE_HEADER_BYTES
    )  # any() takes ten times as long


def is_truncated(found: ScannedFile | None, data: bytes) -> bool:
    """Whether a file without entries was cut off where they were, rather than never having had any."""
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
    """As `scan`, for whoever only looks: valid envelopes with their frames one at a time, and (None, offset) where one
    should be and is not. No more than one of them is in memory."""
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
    """The next aligned place at or after `at` where a valid envelope begins; `at` is aligned, and so is each piece."""
    for piece in range(at, size, _SEARCH_BYTES):
        data = disk.read(handle, piece, _SEARCH_BYTES)  # an aligned magic never lies across two pieces
        within = data.find(ENVELOPE_MAGIC)
        while within >= 0:
            place = piece + within
            if within % 8 == 0 and _read_envelope(disk, handle, size, place, salt) is not None:
                return place
            within = data.find(ENVELOPE_MAGIC, within + 1)
    return None


def salts_in(data: bytes) -> Iterator[int | None]:
    """The salts of envelopes that are valid by their own salt, for a file whose header is gone.

    Payloads may be made to look like envelopes, so how much is hashed is bounded; None when that is not enough.
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
    """Whether there is or may be an envelope that is valid by its own salt: the header is rotten, not unfinished."""
    return any(True for _ in salts_in(data))


def _find_envelope(data: bytes, at: int, salt: int) -> int | None:
    """The next aligned place at or after `at` where a valid envelope begins."""
    while True:
        at = data.find(ENVELOPE_MAGIC, at)
        if at < 0:
            return None
        if at % 8 == 0 and envelope_at(data, at, salt) is not None:
            return at
        at += 1


def last_valid_lsns(starts: list[WalStart | None]) -> list[int]:
    """For each file the last lsn that counts: a later file's start makes what lies past its previous_lsn void."""
    bound = 1 << 64
    bounds: list[int] = []
    for start in reversed(starts):
        bounds.append(bound)
        if start is not None:
            bound = min(bound, start.previous_lsn)
    return bounds[::-1]


def start_of(file: ScannedFile) -> WalStart | None:
    """What the first frame of the file says about the file before, if that frame is there."""
    envelope = file.envelopes[0]
    starts: list[int] = []
    frames.frame_starts(file.data, envelope.start, envelope.end, starts)
    columns = frames.decode_columns(file.data, starts[:1])
    if not starts or int(columns.headers["type"][0]) != frames.WAL_START:
        return None
    return msgspec.msgpack.decode(columns.payload(0), type=WalStart)


def stale_ranges(file: ScannedFile, bound: int, reached: int) -> tuple[list[tuple[int, int]], int]:
    """Places of a file that no start goes by: what lies past `bound`, the last lsn that counts, and is torn or stands
    behind a gap. Whole entries past it that follow without one were copied when the file was cut off there.

    `reached` is how far the log goes without a gap before this file; also returned as it is after it.
    """
    places: list[tuple[int, int]] = []
    at = FILE_HEADER_BYTES
    for envelope in file.envelopes:
        begin = envelope.start - ENVELOPE_BYTES
        if reached >= bound:
            places.append((at, begin))
        if envelope.lsn > max(bound, reached + 1):
            places.append((begin, envelope.end))
        else:
            reached = envelope.lsn
        at = envelope.end
    if reached >= bound:
        places.append((at, len(file.data)))
    ends = [start + len(file.data[start:end].rstrip(b"\0")) for start, end in places]
    return [(start, end) for (start, _), end in zip(places, ends) if end > start], reached


class Wal:
    """The files of one shard's log and its place in them. Writing is here, syncing is a job of the shell."""

    def __init__(self, disk: Disk, directory: str, *, shard: int, file_bytes: int) -> None:
        self._disk = disk
        self.directory = directory
        self._shard = shard
        self.file_bytes = file_bytes
        self.files: list[WalFile] = []  # ascending; the last one takes the envelopes
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
        """Zero-fill a file and sync its header and name, so that it can take a frame at any moment.

        The zeros are synced before the header is written: whoever meets a whole header knows that the file had its length.
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
            # A half-made file would only hold the space that somebody is waiting for.
            self._disk.close(handle)
            self._disk.remove(path)
            raise
        return WalFile(number, path, salt, handle, capacity)

    def take_number(self) -> int:
        self.next_number += 1
        return self.next_number - 1

    def begin_file(self, file: WalFile, ts: int) -> None:
        """Make `file` the active one; its first envelope chains it to the file before."""
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
        """Where the first frame of the next envelope will lie in the active file."""
        return self.files[-1].position + ENVELOPE_BYTES

    # -- writing -------------------------------------------------------------------------------------------

    def append(self, body: bytes) -> int:
        """Write one envelope to the active file, which must have room; return its lsn."""
        file = self.files[-1]
        lsn = self.last_lsn + 1
        data = encode_envelope(file.salt, lsn, self.last_lsn, self.synced_lsn, body)
        assert file.position + len(data) <= file.capacity, "an envelope must not run over its file"
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
        """The files to sync, oldest first, and the lsn that is safe once all of them are."""
        files, self.unsynced_files = self.unsynced_files, []
        return files, self.last_lsn

    # -- dropping ------------------------------------------------------------------------------------------

    def take_obsolete(self, lsn: int) -> list[WalFile]:
        """Take out the files all of whose envelopes are at or below `lsn`; the active one stays."""
        gone = [file for file in self.files[:-1] if file.last_lsn <= lsn and file not in self.unsynced_files]
        if gone:
            self.files = [file for file in self.files if file not in gone]
        return gone
