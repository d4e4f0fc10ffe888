"""`topics inspect` for log files: header, envelopes, records and damage.

A single file does not always show whether a bad envelope is torn or corrupt; wal.py has the rules. Here it is corrupt if a
later envelope of the same file shows that it had been synced.
"""

from __future__ import annotations

import struct
from collections import Counter

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest

from topics.engine.core.ports import Disk
from topics.engine.storage import frames
from topics.engine.storage.control import KINDS, kind_name
from topics.engine.storage.wal import (
    ENVELOPE,
    ENVELOPE_BYTES,
    ENVELOPE_MAGIC,
    FILE_HEADER,
    FILE_HEADER_BYTES,
    MAGIC,
    Envelope,
    file_number,
    iter_envelopes,
)
from topics.engine.tools.inspect.report import (
    Digest,
    EnvelopeLine,
    FirstAndLast,
    Inspection,
    record_of,
)

_Frame = tuple[bytes, int, int]  # bytes, offset in the file, LSN of the envelope


def inspect_log(disk: Disk, found: Inspection, count: int, from_seq: int | None) -> None:
    path = found.path
    handle = disk.open(path)
    try:
        size = disk.size(handle)
        head = disk.read(handle, 0, FILE_HEADER_BYTES)
        if len(head) < FILE_HEADER_BYTES:
            found.add_problem(path, len(head), f"has {len(head)} bytes, which is shorter than a header")
            return
        salt = _header(disk, handle, found, head, size)
        if salt is not None:
            _Scan(found, count, from_seq).run(disk, handle, size, salt)
    finally:
        disk.close(handle)


def _header(disk: Disk, handle: int, found: Inspection, head: bytes, size: int) -> int | None:
    """Check the file header; returns the salt of the envelopes, None if it is unknown."""
    path = found.path
    if not any(head):
        found.notes.append(
            "the header was never written: the file is being created, or a server died while creating it"
        )
        return None
    magic, version, shard, number, salt, capacity = FILE_HEADER.unpack(head[:56])
    holds = xxh3_64_digest(head[:56]) == head[56:]
    found.digests.append(Digest("header", holds))
    if magic == MAGIC and holds:
        found.version = version
        if version != frames.FORMAT_VERSION:
            what = f"has format version {version}, which this version of topics does not support"
            found.add_problem(path, 8, what)
            return None
    elif magic != MAGIC and holds:
        found.add_problem(path, 0, f"starts with {magic!r} instead of {MAGIC!r}")
        return None
    elif not holds:
        if magic == MAGIC and version not in (0, frames.FORMAT_VERSION):
            found.notes.append(f"the header has format version {version}")
        found.add_problem(path, 0, "the file header does not match its digest")
        # Use the salt of the first envelope.
        first = disk.read(handle, FILE_HEADER_BYTES, ENVELOPE_BYTES)
        if len(first) < ENVELOPE_BYTES or first[:4] != ENVELOPE_MAGIC:
            return None
        return int(ENVELOPE.unpack_from(first)[2])
    found.facts |= {"shard": shard, "number": number, "salt": f"{salt:016x}", "capacity": capacity or None}
    named = file_number(path.rpartition("/")[2])
    if named is not None and named != number:
        found.add_problem(path, 16, f"the file contains the number {number}")
    if size < capacity:
        found.add_problem(path, size, f"is {capacity - size} bytes too short")
    return int(salt)


class _Scan:
    """Reads the envelopes of a log file and collects what the report shows."""

    def __init__(self, found: Inspection, count: int, from_seq: int | None) -> None:
        self._found = found
        self._count, self._from_seq = count, from_seq
        self._envelopes: FirstAndLast[EnvelopeLine] = FirstAndLast(count)
        self._records: FirstAndLast[_Frame] = FirstAndLast(count)
        self._from_seq_records: list[_Frame] = []  # with --from-seq
        self._types: Counter[str] = Counter()
        self._topics: set[int] = set()
        self._first_lsn = self._last_lsn = self._synced_lsn = 0
        self._end = FILE_HEADER_BYTES
        self._bad: list[tuple[int, int]] = []  # offset, and the last LSN before it
        self._corrupt: set[int] = set()  # offsets of bad entries that were synced

    def run(self, disk: Disk, handle: int, size: int, salt: int) -> None:
        for envelope, body in iter_envelopes(disk, handle, size, salt):
            if envelope is None:
                assert isinstance(body, int)
                self._bad.append((body, self._last_lsn))
                continue
            assert isinstance(body, bytes)
            self._take(envelope, body)
        self._report_bad()
        self._fill_report()

    def _take(self, envelope: Envelope, body: bytes) -> None:
        found = self._found
        self._corrupt |= {at for at, before in self._bad if before < envelope.synced_lsn}
        begin = envelope.start - ENVELOPE_BYTES
        if self._last_lsn and envelope.lsn != self._last_lsn + 1 and not self._bad:
            found.add_problem(found.path, begin, f"lsn {envelope.lsn} follows {self._last_lsn}")
        self._first_lsn = self._first_lsn or envelope.lsn
        self._last_lsn, self._synced_lsn, self._end = envelope.lsn, envelope.synced_lsn, envelope.end
        types = self._take_frames(envelope, body)
        self._types.update(types)
        self._envelopes.add(
            EnvelopeLine(
                envelope.lsn, envelope.prev_lsn, envelope.synced_lsn, begin, envelope.end - begin, types
            )
        )

    def _take_frames(self, envelope: Envelope, body: bytes) -> dict[str, int]:
        starts: list[int] = []
        try:
            frames.frame_starts(body, 0, len(body), starts)
            columns = frames.decode_columns(body, starts)
        except (ValueError, TypeError, IndexError, struct.error):
            self._found.add_problem(
                self._found.path, envelope.start, "the frames do not match the length of the envelope"
            )
            return {}
        kinds = columns.headers["type"]
        unknown = columns.first_not_in(KINDS)
        if unknown is not None:
            at = envelope.start + int(columns.starts[unknown])
            what = f"has a frame of kind {kinds[unknown]}, which this version of topics does not support"
            self._found.add_problem(self._found.path, at, what)
        self._topics.update(columns.headers["topic"].tolist())
        appends = np.flatnonzero(kinds == frames.APPEND)
        if self._from_seq is not None:
            room = max(0, self._count - len(self._from_seq_records))
            selected = appends[columns.headers["seq"][appends] >= min(self._from_seq, (1 << 64) - 1)]
            self._from_seq_records += [self._frame(body, columns, int(i), envelope) for i in selected[:room]]
        else:
            self._add_ends(appends, body, columns, envelope)
        counts = Counter(kinds.tolist())
        return {kind_name(kind): counts[kind] for kind in sorted(counts)}

    def _add_ends(
        self, appends: npt.NDArray[np.intp], body: bytes, columns: frames.Columns, envelope: Envelope
    ) -> None:
        """Add the first and last appends of an envelope: only those can be shown."""
        shown = appends
        if len(appends) > 2 * self._count:
            shown = np.concatenate((appends[: self._count], appends[len(appends) - self._count :]))
        for i in shown.tolist():
            self._records.add(self._frame(body, columns, i, envelope))
        self._records.count += len(appends) - len(shown)

    @staticmethod
    def _frame(body: bytes, columns: frames.Columns, i: int, envelope: Envelope) -> _Frame:
        start = int(columns.starts[i])
        frame = body[start : start + 4 + int(columns.headers["length"][i])]
        return frame, envelope.start + start, envelope.lsn

    def _report_bad(self) -> None:
        found = self._found
        for at, before in self._bad:
            if at in self._corrupt:
                found.add_problem(found.path, at, f"the entry after LSN {before} is corrupt: it was synced")
            else:
                found.notes.append(
                    f"at byte {at}, after LSN {before}, an entry is incomplete: it is being written, or a server died "
                    "while writing it. This file does not show that it was ever synced; `topics verify` checks all files"
                )
        if not self._envelopes.count and not self._bad:
            found.notes.append("nothing was ever written after the header: a spare file")

    def _fill_report(self) -> None:
        found = self._found
        found.digests.append(Digest(f"{self._envelopes.count} envelopes", not self._corrupt))
        found.facts |= {
            "envelopes": self._envelopes.count,
            "first_lsn": self._first_lsn,
            "last_lsn": self._last_lsn,
            "synced_lsn": self._synced_lsn,
            "used_bytes": self._end,
            "topics": len(self._topics - {0}),
            **{f"frames {kind}": n for kind, n in sorted(self._types.items())},
        }
        found.envelopes = self._envelopes.shown
        shown = self._records.shown if self._from_seq is None else self._from_seq_records
        found.records = [record_of(*frame) for frame in shown]
        found.left_out |= {"envelopes": self._envelopes.left_out, "records": self._records.left_out}
