"""Salvage of a damaged log: find the readable entries and write a new log from them.

Readable entries keep their order and their LSNs, including those after the damage. For each gap, records that are or may be
lost are announced: exactly, if a later record of the topic shows how many are missing; otherwise as many as the missing
bytes could hold. Entries that the snapshot contains are not needed. Other effects of missing entries are unknown: deletes
and config changes in them are undone, and topics that they created lose their names.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from itertools import islice

import msgspec
import numpy as np

from topics.api.config import TopicConfig
from topics.api.errors import Corrupt, UnsupportedFormat
from topics.engine.core.placement import shard_of
from topics.engine.core.ports import Disk
from topics.engine.storage import frames
from topics.engine.storage.control import ConfigChanged, Lost, Skipped, TopicCreated, WalStart
from topics.engine.storage.files import read_file
from topics.engine.storage.wal import (
    ENVELOPE,
    ENVELOPE_BYTES,
    ENVELOPE_MAGIC,
    FILE_HEADER,
    FILE_HEADER_BYTES,
    Envelope,
    ScannedFile,
    encode_envelope,
    file_header,
    file_name,
    file_number,
    is_truncated,
    last_valid_lsns,
    salts_in,
    scan,
    start_of,
)
from topics.engine.topic.snapshot_row import TopicRow
from topics.engine.upkeep.checkpoint import LATCH_FILE
from topics.engine.upkeep.replay import decode

SEQS_UNKNOWN = 1 << 32  # seqs to skip if the number of missing records has no bound; there are 2^63 seqs

# For a file with a damaged header: envelopes whose salt is read, and different salts that are tried.
SALTS_MAX, SALTS_TRIED = 4096, 8


@dataclass(slots=True)
class LogFile:
    """One log file and what could be read of it."""

    number: int
    path: str
    size: int
    scanned: ScannedFile | None  # None: no usable contents
    start: WalStart | None = None
    problem: str = ""
    offset: int = 0
    foreign: bool = False  # belongs to another shard or has a wrong name: its contents are not ours
    cut: bool = False  # truncated: files have their full length before the first entry is written


@dataclass(slots=True)
class SalvagedEntry:
    """A readable log entry."""

    lsn: int
    synced_lsn: int
    body: bytes


@dataclass(slots=True)
class Hole:
    """A gap in the log: entries are missing before the readable entry with index `before`."""

    before: int
    first_lsn: int
    last_lsn: int
    path: str
    offset: int
    seqs_max: int
    what: str
    # It may include the first entry of a file, in which a start announces the losses of a power failure.
    begins_file: bool


@dataclass(slots=True)
class Note:
    """A problem at a position of a log file."""

    path: str
    offset: int
    what: str


@dataclass(slots=True)
class SalvagedLog:
    """The readable entries of a log, the gaps between them, and all problems."""

    files: list[LogFile]
    entries: list[SalvagedEntry] = field(default_factory=list)
    holes: list[Hole] = field(default_factory=list)
    damage: list[Note] = field(default_factory=list)
    torn: list[Note] = field(default_factory=list)
    last_lsn: int = 0


# ── Reading ───────────────────────────────────────────────────────────────────────────


def read_log(disk: Disk, wal_dir: str, shard: int) -> list[LogFile]:
    """Read all log files, in order of their numbers. Raises UnsupportedFormat for a later format version."""
    found: list[LogFile] = []
    for name in disk.list(wal_dir):
        number = file_number(name)
        if number is not None:
            found.append(_read_log_file(disk, f"{wal_dir}/{name}", number, shard))
    return sorted(found, key=lambda file: file.number)


def _read_log_file(disk: Disk, path: str, number: int, shard: int) -> LogFile:
    try:
        data = read_file(disk, path)
    except OSError as error:
        return LogFile(number, path, 0, None, problem=f"cannot be read: {error.strerror}", foreign=True)
    file = LogFile(number, path, len(data), None)
    try:
        file.scanned = scan(path, number, data)
    except UnsupportedFormat:
        fixed = _with_our_version(data)
        if fixed is None:
            raise
        file.problem, file.offset = "the version in the file header is corrupt", 8
        file.scanned = scan(path, number, fixed)
    except Corrupt as error:
        file.problem, file.offset = error.problem, error.offset
        file.foreign = error.offset > 0
        if not file.foreign:
            file.scanned = _scan_by_salt(path, number, data, shard)
    if file.scanned is not None and FILE_HEADER.unpack_from(file.scanned.data)[2] != shard:
        file.problem, file.offset, file.foreign = "the file belongs to another shard", 12, True
    if is_truncated(file.scanned, data):
        file.cut, file.problem, file.offset = True, "the file was truncated", file.size
    if file.foreign or (file.scanned is not None and not file.scanned.envelopes and not file.scanned.bad_at):
        file.scanned = None
    if file.scanned is not None and file.scanned.envelopes:
        file.start = start_of(file.scanned)
        file.cut = _is_cut(file.scanned)
        if file.cut and not file.problem:
            file.problem, file.offset = "the file was truncated", file.size
    return file


def _is_cut(file: ScannedFile) -> bool:
    if file.capacity:
        return file.is_short
    at = (file.envelopes[-1].end + 7) & ~7
    head = file.data[at : at + ENVELOPE_BYTES]
    if len(head) < ENVELOPE_BYTES:
        return head[:4] == ENVELOPE_MAGIC[: len(head)] and bool(head)
    magic, length, salt, *_ = ENVELOPE.unpack_from(head)
    return (magic, salt) == (ENVELOPE_MAGIC, file.salt) and at + ENVELOPE_BYTES + length > len(file.data)


def _with_our_version(data: bytes) -> bytes | None:
    """The file with the current version in its header, if the header's digest shows that this is right."""
    _, _, shard, number, salt, capacity = FILE_HEADER.unpack_from(data)
    ours = file_header(shard=shard, number=number, salt=salt, capacity=capacity)
    return ours + data[FILE_HEADER_BYTES:] if ours[56:] == data[56:FILE_HEADER_BYTES] else None


def _scan_by_salt(path: str, number: int, data: bytes, shard: int) -> ScannedFile | None:
    """Scan a file with a damaged header. Its entries all have the same salt; bytes that only look like entries do not."""
    best: ScannedFile | None = None
    for salt in islice(dict.fromkeys(islice(salts_in(data), SALTS_MAX)), SALTS_TRIED):
        if salt is not None:
            head = file_header(shard=shard, number=number, salt=salt)
            found = scan(path, number, head + data[FILE_HEADER_BYTES:])
            if found is not None and (best is None or len(found.envelopes) > len(best.envelopes)):
                best = found
    return best


# ── Ordering entries ──────────────────────────────────────────────────────────────────


class LogWalk:
    """Collects the readable entries after `base_lsn` in order and finds the gaps between them."""

    def __init__(
        self,
        files: list[LogFile],
        base_lsn: int,
        applied_lsn: int,
        *,
        clean: bool = False,
        sound: bool = False,
    ) -> None:
        """`clean`: the shard was stopped cleanly at `base_lsn` and not started since, which would have created a new file.
        The file that was active at the stop is kept until there is a later snapshot.

        `sound`: no power failure or failed write can have lost an entry and kept a later one.
        """
        self._clean, self._sound = clean, sound
        self.log = SalvagedLog(files, last_lsn=base_lsn)
        self._base_lsn = base_lsn
        self._used = [file for file in files if file.scanned is not None and file.scanned.envelopes]
        claimed = [e.synced_lsn for file in self._used for e in _envelopes(file)]
        # All entries up to this LSN were synced, or are on a sound disk.
        self._known = max([applied_lsn, *claimed])
        self._digests: dict[tuple[int, int], bytes] = {}
        self._ended = False

    def run(self) -> SalvagedLog:
        log = self.log
        for file in log.files:
            if file.problem:
                log.damage.append(Note(file.path, file.offset, file.problem))
        bounds = last_valid_lsns([file.start for file in self._used])
        if self._sound:
            intact = [
                e.lsn for file, bound in zip(self._used, bounds) for e in _envelopes(file) if e.lsn <= bound
            ]
            self._known = max([self._known, *intact])
        for i, file in enumerate(self._used):
            before = self._used[i - 1] if i else None
            self._check_chain(file, before)
            self._take_file(file, bounds[i], before)
        if self._used or not self._base_lsn:
            for file in self._without_entries():
                self._bad(file, FILE_HEADER_BYTES, log.last_lsn + 1)
        if not self._ended:
            self._check_end()
        return log

    def _without_entries(self) -> list[LogFile]:
        """Files that were written to, but have no readable entry."""
        return [
            file
            for file in self.log.files
            if file.scanned is not None and not file.scanned.envelopes and not file.problem
        ]

    def _check_end(self) -> None:
        log = self.log
        last = self._used[-1] if self._used else None
        emptied = next((file for file in log.files if file.cut and file not in self._used), None)
        if self._known > log.last_lsn:
            what = f"log entries {log.last_lsn + 1} to {self._known} are missing at the end of the log"
            seqs = self._seqs_at_end(last, self._known - log.last_lsn)
            begins_file = seqs == SEQS_UNKNOWN or bool(self._without_entries())
            path = last.path if last else ""
            self._hole(log.last_lsn + 1, self._known, path, 0, seqs, what, begins_file=begins_file)
        elif (corrupt := self._corrupt_at_end(last)) is not None:
            what = f"no entry after {log.last_lsn} in this file can be read"
            self._hole(log.last_lsn + 1, log.last_lsn + 1, corrupt.path, 0, _seqs_in(corrupt.size), what)
        elif last is None and self._base_lsn:
            self._check_lone_file()
        elif last is None and len(log.files) > 1 and not any(file.scanned for file in log.files):
            # A second file is created only after the first has an entry.
            what = "all log entries are missing"
            self._hole(1, 1, log.files[0].path, FILE_HEADER_BYTES, SEQS_UNKNOWN, what)
        elif emptied is not None:
            what = f"the log is truncated after entry {log.last_lsn}"
            self._hole(
                log.last_lsn + 1, log.last_lsn + 1, emptied.path, emptied.size, _seqs_cut(emptied), what
            )
        elif last is not None and last.cut and not (self._clean and log.last_lsn == self._base_lsn):
            what = f"the log is truncated after entry {log.last_lsn}"
            self._hole(
                log.last_lsn + 1,
                log.last_lsn + 1,
                last.path,
                last.size,
                _seqs_cut(last),
                what,
                begins_file=False,
            )

    def _corrupt_at_end(self, last: LogFile | None) -> LogFile | None:
        """The newest file, if its header is corrupt and none of its entries can be read."""
        newest = self.log.files[-1] if self.log.files else None
        if newest is None or newest is last or newest.foreign or newest.cut or newest.scanned is not None:
            return None
        return newest if newest.problem else None

    def _check_lone_file(self) -> None:
        """Handle a log without a readable entry. Checkpoints never remove the active file: it existed, and may have
        contained acked writes.
        """
        log = self.log
        unreadable = self._without_entries()
        emptied = [file for file in log.files if file.cut]
        is_complete = len(unreadable) + len(emptied) == 1 and self._clean
        if is_complete or (not emptied and len(unreadable) == 1 and self._is_contained(unreadable[0])):
            what = "no entry can be read; the snapshot contains them"
            if unreadable:  # otherwise the damage was reported already
                log.damage.append(Note(unreadable[0].path, FILE_HEADER_BYTES, what))
            return
        what = f"the log after entry {self._base_lsn} is missing"
        path = unreadable[0].path if unreadable else ""
        seqs = SEQS_UNKNOWN if emptied else self._seqs_at_end(None, 1)
        self._hole(log.last_lsn + 1, log.last_lsn + 1, path, 0, seqs, what)

    def _is_contained(self, file: LogFile) -> bool:
        """Whether the snapshot contains a file's first entry, going by the entry's head, and nothing follows it."""
        head = _head_at(file, FILE_HEADER_BYTES)
        return (
            head is not None
            and head[0] <= self._base_lsn
            and _written_end(file, FILE_HEADER_BYTES) - frames.DIGEST_BYTES <= head[1]
        )

    def _seqs_at_end(self, last: LogFile | None, entries: int) -> int:
        """Upper bound of the records in entries missing at the end of the log: as many as fit in the unreadable bytes. If
        those are too few for the missing entries, whole files are missing.
        """
        size = sum(
            _written_end(file, FILE_HEADER_BYTES) - FILE_HEADER_BYTES for file in self._without_entries()
        )
        if last is not None:
            size += _damaged_tail(last)
        return _seqs_in(size) if size >= entries * ENVELOPE_BYTES else SEQS_UNKNOWN

    def _seqs_in_front(self, before: LogFile | None, file: LogFile, at: int) -> int:
        """Upper bound of the records missing before a file's first readable entry, which starts at `at`."""
        missing = _envelopes(file)[0].lsn - 1 - self.log.last_lsn
        if file.start is None and at > FILE_HEADER_BYTES:
            head = _head_at(file, FILE_HEADER_BYTES)
            if missing == 1 or (head is not None and head[0] <= self.log.last_lsn + 1):
                return _seqs_in(at - FILE_HEADER_BYTES)  # all of them were in this file
        if before is None or before.scanned is None:
            return SEQS_UNKNOWN
        previous = file.number - 1 if file.start is None else file.start.previous_file
        if previous != before.number:
            return SEQS_UNKNOWN
        size = _damaged_tail(before) + at - FILE_HEADER_BYTES
        if size < missing * ENVELOPE_BYTES:
            size = before.size - before.scanned.envelopes[-1].end + at - FILE_HEADER_BYTES
        return _seqs_in(size)

    def _take_file(self, file: LogFile, bound: int, before: LogFile | None) -> None:
        log = self.log
        assert file.scanned is not None
        bad = list(file.scanned.bad_at)
        previous_end, previous_lsn = FILE_HEADER_BYTES, 0
        for envelope in file.scanned.envelopes:
            at = envelope.start - ENVELOPE_BYTES
            damaged = [b for b in bad if b < at]
            bad = bad[len(damaged) :]
            for offset in damaged:
                self._bad(file, offset, previous_lsn + 1 if previous_lsn else envelope.lsn - 1, bound)
            if not previous_lsn and file.start is None and envelope.lsn > 1:
                self._replace_lost_start(file, envelope, at)
            if envelope.lsn <= bound and not self._ended:
                if previous_lsn:
                    self._take(file, envelope, _seqs_in(at - previous_end))
                else:
                    seqs = self._seqs_in_front(before, file, at)
                    self._take(file, envelope, seqs, begins_file=file.start is None or seqs == SEQS_UNKNOWN)
            previous_end, previous_lsn = envelope.end, envelope.lsn
        for offset in bad:
            self._bad(file, offset, previous_lsn + 1, bound)
        log.last_lsn = max(log.last_lsn, self._base_lsn)

    def _take(self, file: LogFile, envelope: Envelope, seqs_max: int, *, begins_file: bool = False) -> None:
        log = self.log
        assert file.scanned is not None
        if envelope.lsn > self._base_lsn:
            if envelope.lsn > log.last_lsn + 1:
                if log.last_lsn + 1 > self._known:
                    self._ended = True  # torn: later entries were never acknowledged
                    return
                what = f"log entries {log.last_lsn + 1} to {envelope.lsn - 1} are missing, but later ones are intact"
                self._hole(
                    log.last_lsn + 1,
                    envelope.lsn - 1,
                    file.path,
                    envelope.start - ENVELOPE_BYTES,
                    seqs_max,
                    what,
                    begins_file=begins_file,
                )
            elif envelope.lsn <= log.last_lsn:
                return
            body = file.scanned.data[envelope.start : envelope.end]
            log.entries.append(SalvagedEntry(envelope.lsn, envelope.synced_lsn, body))
            log.last_lsn = envelope.lsn
        self._digests[file.number, envelope.lsn] = envelope.digest

    def _replace_lost_start(self, file: LogFile, envelope: Envelope, at: int) -> None:
        """Replace a file's unreadable first entry by the tail of the previous log, if it was a copy of that tail.

        Recovery writes such a copy, as a single entry, when it starts a new file.
        """
        log = self.log
        lsn = envelope.lsn - 1
        if lsn <= self._base_lsn or log.last_lsn < lsn:
            return
        tail = [entry for entry in log.entries if entry.lsn >= lsn]
        log.entries = log.entries[: len(log.entries) - len(tail)]
        for hole in log.holes:
            hole.before = min(hole.before, len(log.entries))
        what = f"the first entry, number {lsn}, is damaged; the older copy of its contents is used"
        self._hole(lsn, lsn, file.path, FILE_HEADER_BYTES, _seqs_in(at - FILE_HEADER_BYTES), what)
        log.holes[-1].before += 1
        log.entries.append(SalvagedEntry(lsn, 0, b"".join([entry.body for entry in tail])))
        log.last_lsn = lsn

    def _check_chain(self, file: LogFile, before: LogFile | None) -> None:
        start = file.start
        if start is None or self._ended:
            return
        found = self._digests.get((start.previous_file, start.previous_lsn), start.previous_digest)
        if found != start.previous_digest:
            what = "the previous file was replaced or changed"
            self._hole(
                self.log.last_lsn + 1, self.log.last_lsn, file.path, FILE_HEADER_BYTES, SEQS_UNKNOWN, what
            )

    def _hole(
        self,
        first: int,
        last: int,
        path: str,
        offset: int,
        seqs_max: int,
        what: str,
        *,
        begins_file: bool = True,
    ) -> None:
        log = self.log
        log.holes.append(Hole(len(log.entries), first, last, path, offset, seqs_max, what, begins_file))
        log.damage.append(Note(path, offset, what))

    def _bad(self, file: LogFile, offset: int, lsn: int, bound: int = 1 << 64) -> None:
        """Report an unreadable entry: corrupt if it is known to have been synced, otherwise a torn write."""
        if lsn > bound or lsn > self._known:
            what = "an incomplete entry: if a power failure interrupted the write, it was never acknowledged"
            if lsn <= bound:
                what += f"; if it was complete once, up to {_seqs_in(file.size - offset)} records are lost with it"
            self.log.torn.append(Note(file.path, offset, what))
            return
        what = f"the entry that should be number {lsn} does not match its digest"
        if lsn <= self._base_lsn:
            what += "; the snapshot contains it"
        self.log.damage.append(Note(file.path, offset, what))


def _envelopes(file: LogFile) -> list[Envelope]:
    return file.scanned.envelopes if file.scanned is not None else []


def _seqs_in(size: int) -> int:
    """Upper bound of the records in `size` bytes."""
    return max(1, size // frames.OVERHEAD_BYTES)


def _seqs_cut(file: LogFile) -> int:
    """Upper bound of the records in the missing end of a truncated file."""
    capacity = file.scanned.capacity if file.scanned is not None else 0
    return _seqs_in(capacity - file.size) if capacity else SEQS_UNKNOWN


def _head_at(file: LogFile, at: int) -> tuple[int, int] | None:
    """LSN and end of a damaged entry according to its head, if the head is consistent."""
    assert file.scanned is not None
    data = file.scanned.data
    if at + ENVELOPE_BYTES > len(data):
        return None
    magic, length, salt, lsn, prev_lsn, synced_lsn = ENVELOPE.unpack_from(data, at)
    end = at + ENVELOPE_BYTES + length
    ours = (magic, salt) == (ENVELOPE_MAGIC, file.scanned.salt)
    is_consistent = lsn == prev_lsn + 1 and synced_lsn <= prev_lsn and end <= len(data)
    return (lsn, end) if ours and is_consistent else None


def _written_end(file: LogFile, at: int) -> int:
    """End of the unreadable bytes written at or after `at`: after the last nonzero byte plus a digest, which may end with
    zeros, or the end of the entry at `at` according to its head.
    """
    assert file.scanned is not None
    data = file.scanned.data
    end = len(data.rstrip(b"\0")) + frames.DIGEST_BYTES
    head = _head_at(file, at)
    return max(end, head[1] if head is not None else at)


def _damaged_tail(file: LogFile) -> int:
    """Number of bytes written after the last readable entry of a file."""
    assert file.scanned is not None
    last_end = file.scanned.envelopes[-1].end
    offset = next((at for at in file.scanned.bad_at if at >= last_end), None)
    return _written_end(file, offset) - last_end if offset is not None else 0


# ── Losses in gaps ────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _TopicState:
    """A topic's state at a position of the log."""

    head: int
    durability: str
    ceiling: int  # the highest seq that a power failure can have lost
    takes_copies: bool = False  # records lost in the source of a forward use seqs here, but hardly any bytes


@dataclass(slots=True)
class RewrittenLog:
    """Result of rewriting the log: losses per topic, and topics that got a new name."""

    losses: list[tuple[str, int, int]] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    last_lsn: int = 0


class _GapFiller:
    """Builds the frames that announce the losses in each gap; they are inserted before the entry after it."""

    def __init__(self, log: SalvagedLog, rows: list[TopicRow], *, ts: int, shard: int, shards: int) -> None:
        self._log = log
        self._rows = rows
        self._ts, self._shard, self._shards = ts, shard, shards
        self._names = {row.id: row.name for row in rows}
        self._topics = {
            row.id: _TopicState(row.head, row.config.durability, row.ceiling, bool(row.inflows))
            for row in rows
        }
        self._applied = {row.id: row.applied_lsn for row in rows}
        self._deleted: set[int] = set()
        self._columns = [_columns(entry) for entry in log.entries]
        self._owners = self._last_owners()
        self.result = RewrittenLog()

    def frames_per_hole(self) -> list[bytes]:
        following_seqs = self._following_seqs()
        made: list[bytes] = []
        at = 0
        for hole, later in zip(self._log.holes, following_seqs, strict=True):
            while at < hole.before:
                self._apply(self._log.entries[at].lsn, self._columns[at])
                at += 1
            made.append(self._fill(hole, later))
        return made

    def _last_owners(self) -> dict[str, int]:
        """The last topic of each name. Ids increase, and a name is only reused after a delete."""
        owners = {row.name: row.id for row in self._rows}
        for columns in self._columns:
            for i in np.flatnonzero(columns.headers["type"] == frames.TOPIC_CREATE).tolist():
                name = msgspec.msgpack.decode(columns.payload(i), type=TopicCreated).name
                owners[name] = max(owners.get(name, 0), int(columns.headers["topic"][i]))
        return owners

    def _following_seqs(self) -> list[dict[int, int]]:
        """For each hole, the first seq after it by topic."""
        found: list[dict[int, int]] = []
        later: dict[int, int] = {}
        at = len(self._columns)
        for hole in reversed(self._log.holes):
            while at > hole.before:
                at -= 1
                columns = self._columns[at]
                for i in range(len(columns.starts) - 1, -1, -1):
                    kind, topic = int(columns.headers["type"][i]), int(columns.headers["topic"][i])
                    if kind == frames.APPEND:
                        later[topic] = int(columns.headers["seq"][i])
                    elif kind == frames.SKIP:
                        later[topic] = msgspec.msgpack.decode(columns.payload(i), type=Skipped).first
                    elif kind == frames.TOPIC_CREATE:
                        later.pop(topic, None)  # created after the hole, so it has lost nothing in it
            found.append(dict(later))
        return found[::-1]

    def _apply(self, lsn: int, columns: frames.Columns) -> None:
        """Update the topics' states with an entry."""
        for i in range(len(columns.starts)):
            kind, topic = int(columns.headers["type"][i]), int(columns.headers["topic"][i])
            if kind == frames.TOPIC_CREATE:
                created = msgspec.msgpack.decode(columns.payload(i), type=TopicCreated)
                self._topics.setdefault(topic, _TopicState(0, created.config.durability, created.ceiling))
                self._names.setdefault(topic, created.name)
                continue
            known = self._topics.get(topic)
            if known is None or lsn <= self._applied.get(topic, 0):
                continue
            if kind == frames.APPEND:
                known.head = max(known.head, int(columns.headers["seq"][i]))
            elif kind == frames.SKIP:
                skipped = msgspec.msgpack.decode(columns.payload(i), type=Skipped)
                known.head = max(known.head, skipped.first + skipped.count - 1)
            elif kind == frames.LOSS:
                known.head = max(known.head, msgspec.msgpack.decode(columns.payload(i), type=Lost).last)
            elif kind == frames.CONFIG:
                changed = msgspec.msgpack.decode(columns.payload(i), type=ConfigChanged)
                known.head, known.durability = max(known.head, changed.head), changed.config.durability
                known.ceiling = changed.ceiling
            elif kind == frames.SEQ_CEILING:
                known.ceiling = max(known.ceiling, msgspec.msgpack.decode(columns.payload(i), type=int))
            elif kind == frames.INFLOW_OPEN:
                known.takes_copies = True
            elif kind == frames.TOPIC_DELETE:
                del self._topics[topic]
                self._deleted.add(topic)

    def _fill(self, hole: Hole, later: dict[int, int]) -> bytes:
        pieces: list[bytes] = []
        for topic in later:
            if topic not in self._topics and topic not in self._deleted:
                pieces.append(self._recreate(topic))
        for topic in [topic for topic in self._topics if self._owners.get(self._names[topic], 0) > topic]:
            pieces.append(self._delete(topic))
        for topic, known in self._topics.items():
            if known.durability == "ephemeral" or self._applied.get(topic, 0) >= hole.last_lsn > 0:
                continue  # never in the log, or the snapshot contains the topic's records in the hole
            following = later.get(topic, 0)
            last = following - 1 if following > known.head else _last_unknown(known, hole)
            if last > known.head:
                first, known.head = known.head + 1, last
                pieces.append(
                    frames.encode_control(frames.LOSS, topic, self._ts, Lost(first, last, "corrupt"))
                )
                self.result.losses.append((self._names[topic], first, last))
        return b"".join(pieces)

    def _delete(self, topic: int) -> bytes:
        """Delete a topic whose name a later topic has: its delete was in the hole."""
        del self._topics[topic]
        self._deleted.add(topic)
        return frames.encode_control(frames.TOPIC_DELETE, topic, self._ts, None)

    def _recreate(self, topic: int) -> bytes:
        """Create a topic again under a new name, because the entry that created it is lost."""
        name = new_name(topic, {*self._names.values(), *self._owners}, self._shard, self._shards)
        self._names[topic] = name
        self._topics[topic] = _TopicState(0, "fsync", 0)
        self.result.named.append(name)
        created = TopicCreated(name, TopicConfig(durability="fsync"), 0)
        return frames.encode_control(frames.TOPIC_CREATE, topic, self._ts, created)


def new_name(topic: int, taken: Container[str], shard: int, shards: int) -> str:
    """A new name for a topic that has lost its own. It must belong to this shard."""
    attempt = 0
    name = f"recovered-{topic}"
    while shard_of(name, shards) != shard or name in taken:
        attempt += 1
        name = f"recovered-{topic}-{attempt}"
    return name


def _last_unknown(known: _TopicState, hole: Hole) -> int:
    """Upper bound of a topic's seqs in a hole. Seqs that were announced as lost count too: they must not be reused."""
    if known.takes_copies:
        return known.head + SEQS_UNKNOWN
    last = known.head + hole.seqs_max
    return max(last, known.ceiling) if hole.begins_file and known.durability == "disk" else last


def _columns(entry: SalvagedEntry) -> frames.Columns:
    return decode(entry.body, [Envelope(entry.lsn, 0, 0, 0, len(entry.body), b"")])[0]


# ── Writing ───────────────────────────────────────────────────────────────────────────


def rewrite_log(
    disk: Disk,
    shard_dir: str,
    log: SalvagedLog,
    rows: list[TopicRow],
    *,
    base_lsn: int,
    ts: int,
    shard: int,
    shards: int,
) -> RewrittenLog:
    """Replace all log files by one with the salvaged entries and the announcements of losses."""
    filler = _GapFiller(log, rows, ts=ts, shard=shard, shards=shards)
    extra: dict[int, bytes] = {}
    for hole, piece in zip(log.holes, filler.frames_per_hole(), strict=True):
        extra[hole.before] = extra.get(hole.before, b"") + piece
    entries = list(log.entries)
    ends_at = max([log.last_lsn, base_lsn, *(hole.last_lsn for hole in log.holes)])
    if len(entries) in extra or not entries:
        entries.append(SalvagedEntry(ends_at + 1, 0, b""))
    number = max((file.number for file in log.files), default=0) + 1
    start = WalStart(number, 0, base_lsn, bytes(8), _boot_id(disk, shard_dir, log))
    first = frames.encode_control(frames.WAL_START, 0, ts, start)
    extra[0] = first + extra.get(0, b"")
    _write_file(disk, f"{shard_dir}/wal/{file_name(number)}", number, shard, base_lsn, entries, extra)
    for file in log.files:
        disk.remove(file.path)
    filler.result.last_lsn = entries[-1].lsn
    return filler.result


def _write_file(
    disk: Disk,
    path: str,
    number: int,
    shard: int,
    base_lsn: int,
    entries: list[SalvagedEntry],
    extra: dict[int, bytes],
) -> None:
    salt = disk.random_u64()
    pieces: list[bytes] = []
    lsn = base_lsn
    for i, entry in enumerate(entries):
        while lsn + 1 < entry.lsn:  # LSNs must be contiguous, so a hole is filled with empty entries
            lsn += 1
            pieces.append(_padded(encode_envelope(salt, lsn, lsn - 1, 0, b"")))
        lsn = entry.lsn
        body = extra.pop(i, b"") + entry.body
        pieces.append(_padded(encode_envelope(salt, lsn, lsn - 1, entry.synced_lsn, body)))
    body = b"".join(pieces)
    head = file_header(shard=shard, number=number, salt=salt, capacity=FILE_HEADER_BYTES + len(body))
    handle = disk.open(path, create=True)
    try:
        disk.truncate(handle, 0)
        disk.write(handle, 0, head + body)
        disk.sync(handle)
    finally:
        disk.close(handle)


def _padded(envelope: bytes) -> bytes:
    return envelope + bytes(-len(envelope) % 8)


def _boot_id(disk: Disk, shard_dir: str, log: SalvagedLog) -> str:
    """The boot id of the newest file, so that the next start can still detect a reboot; none after a failed write."""
    if disk.exists(f"{shard_dir}/meta/{LATCH_FILE}"):
        return ""
    return next((file.start.boot_id for file in reversed(log.files) if file.start is not None), "")
