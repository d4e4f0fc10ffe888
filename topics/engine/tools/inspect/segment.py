"""`topics inspect` for segments, whichever of its files is given.

A sealed segment has a `.sum` with the lengths and digests of the other files. An open segment has none: then the lengths
of the files are used, and only the records' own digests can be checked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec
import numpy as np

from topics.api.errors import Corrupt, TopicsError
from topics.api.limits import MIB
from topics.engine.core.ports import Disk
from topics.engine.storage import frames
from topics.engine.storage.delete_marks import mark_blocks
from topics.engine.storage.files import HEADER, HEADER_BYTES, VERSION, check_header, read_exact
from topics.engine.storage.sealing import drain, meta_from_sum, read_sum, verify_blocks, verify_steps
from topics.engine.storage.segments import (
    BLOCK_BYTES,
    COLD,
    DATA_BYTES_MAX,
    DATA_MAGIC,
    DEL_MAGIC,
    DEL_VERSION,
    DICT_MAGIC,
    HOT,
    IDX_MAGIC,
    ROW,
    ROW_BYTES,
    SUM_MAGIC,
    Rows,
    SegmentMeta,
    parse_dict,
    runs_of,
    segment_name,
)
from topics.engine.tools.inspect.report import (
    Digest,
    FileLine,
    FirstAndLast,
    Inspection,
    Record,
    flag_names,
    record_of,
    text_of,
)

MAGICS = {"data": DATA_MAGIC, "idx": IDX_MAGIC, "dict": DICT_MAGIC, "sum": SUM_MAGIC, "del": DEL_MAGIC}
# Largest file that is read at once. The index of ten thousand records needs a hundredth of it.
WHOLE_BYTES_MAX = 64 * MIB
_STEP_ROWS = BLOCK_BYTES // ROW_BYTES
_TOPIC = re.compile(r"[0-9a-f]{16}")


def inspect_segment(
    disk: Disk,
    found: Inspection,
    first_seq: int,
    generation: int,
    count: int,
    from_seq: int | None,
    cold_dir: str | None = None,
) -> None:
    """Describe a segment. `cold_dir`: directory of the topic's segments in the cold tier, if known."""
    folder = found.path.rpartition("/")[0] or "."
    _Segment(disk, found, folder, SegmentMeta(first_seq, generation), cold_dir).run(count, from_seq)


@dataclass
class _Segment:
    disk: Disk
    found: Inspection
    folder: str
    meta: SegmentMeta
    cold_dir: str | None
    sizes: dict[str, int] = field(default_factory=dict)  # of the existing files, by suffix
    bad: set[str] = field(default_factory=set)  # suffixes of damaged files
    tags: list[bytes] = field(default_factory=list)
    nodes: list[bytes] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)  # deleted rows, half-open
    data_path: str = ""
    topic_id: int | None = None  # None: the directory does not have a topic's name

    def run(self, count: int, from_seq: int | None) -> None:
        meta, found = self.meta, self.found
        topic = self.folder.rpartition("/")[2]
        self.topic_id = int(topic, 16) if _TOPIC.fullmatch(topic) else None
        self.data_path = self._path("data")
        found.facts["segment"] = segment_name(meta.first_seq, meta.generation)
        found.facts["topic_id"] = topic if self.topic_id is not None else None
        found.facts["first_seq"] = meta.first_seq
        found.facts["generation"] = meta.generation
        self._check_files()
        if "sum" in self.sizes:
            self._check_sealed()
        else:
            found.facts["sealed"] = False
            found.notes.append("no .sum: the segment is open, and its digests are in the snapshot")
        self._read_names()
        self._read_marks()
        if "idx" in self.sizes and "idx" not in self.bad:
            self._show_rows(count, from_seq)
        else:
            if "idx" not in self.sizes:
                found.add_problem(self._path("idx"), 0, "is missing")
            if "data" in self.sizes and "data" not in self.bad:
                self._scan_data(count, from_seq)

    def _path(self, suffix: str) -> str:
        name = segment_name(self.meta.first_seq, self.meta.generation)
        return f"{self.folder}/{name}.{suffix}"

    # -- files ---------------------------------------------------------------------------------------------

    def _check_files(self) -> None:
        # The index first: records are written before it, so that every row seen here has its record.
        for suffix in ("idx", "dict", "data", "sum", "del"):
            path = self._path(suffix)
            try:
                self._check_file(suffix, path)
            except FileNotFoundError:
                if suffix == "data":
                    self._check_cold()
            except (TopicsError, OSError) as error:
                self.found.add_error(error, path)
                self.bad.add(suffix)

    def _check_file(self, suffix: str, path: str) -> None:
        handle = self.disk.open(path)
        try:
            size = self.disk.size(handle)
            head = self.disk.read(handle, 0, HEADER_BYTES)
        finally:
            self.disk.close(handle)
        self.sizes[suffix] = size
        version = int(HEADER.unpack(head)[1]) if len(head) == HEADER_BYTES else None
        self.found.files.append(FileLine(path.rpartition("/")[2], size, version))
        check_header(path, head, MAGICS[suffix], DEL_VERSION if suffix == "del" else VERSION)

    def _check_cold(self) -> None:
        if self.cold_dir is not None:
            self.data_path = f"{self.cold_dir}/{self._path('data').rpartition('/')[2]}"
            try:
                self._check_file("data", self.data_path)
                self.found.facts["tier"] = COLD
                return
            except FileNotFoundError:
                pass
            except (TopicsError, OSError) as error:
                self.found.add_error(error, self.data_path)
                self.bad.add("data")
                return
        self.found.notes.append("no .data here: that of a cold segment is only in the cold tier")

    def _check_sealed(self) -> None:
        meta, found = self.meta, self.found
        found.facts["sealed"] = True
        path = self._path("sum")
        try:
            if self.sizes["sum"] > WHOLE_BYTES_MAX:
                raise Corrupt(path, 0, f"has {self.sizes['sum']} bytes, which is too long for a .sum")
            summary, _ = read_sum(self.disk, self.folder, meta.first_seq, meta.generation)
            self.meta = meta_from_sum(self.disk, self.folder, meta.first_seq, meta.generation)
        except (TopicsError, OSError) as error:
            if "sum" not in self.bad:
                found.add_error(error, path)
            found.digests.append(Digest(".sum", False))
            self.bad.add("sum")
            return
        found.digests.append(Digest(".sum", True))
        found.facts |= {
            "rows_sealed": summary.rows,
            "live_sealed": summary.live,
            "data_bytes": summary.data_bytes,
            "dict_bytes": summary.dict_bytes,
            "blocks": len(summary.blocks),
            "chain": summary.chain.hex(),
            "origin": summary.origin.hex() if any(summary.origin) else None,
        }
        if "dict" not in self.sizes and summary.dict_bytes:
            found.add_problem(self._path("dict"), 0, "is missing")
        self._check_digests(summary.blocks)

    def _check_digests(self, blocks: list[bytes]) -> None:
        """Check the digests as the engine does. Missing files and bad headers were reported already."""
        found = self.found
        here = self.data_path == self._path("data")
        meta = msgspec.structs.replace(self.meta, tier=HOT if here else COLD)
        problems = drain(verify_steps(self.disk, self.folder, meta, None))
        if "data" in self.sizes and not here:
            problems += drain(verify_blocks(self.disk, self.data_path, meta.data_bytes, blocks))
        for suffix in ("data", "idx", "dict"):
            path = self.data_path if suffix == "data" else self._path(suffix)
            own = [problem for problem in problems if problem.path == path]
            if suffix not in self.sizes:
                continue
            if suffix not in self.bad:
                for problem in own:
                    found.add_problem(path, problem.offset, f"{problem.what}, in {problem.length} bytes")
            found.digests.append(Digest(f".{suffix}", not own and suffix not in self.bad))

    def _read_names(self) -> None:
        if "dict" not in self.sizes or "dict" in self.bad:
            return
        path = self._path("dict")
        try:
            self.tags, self.nodes, expiries = parse_dict(path, self._whole("dict"))
        except (TopicsError, OSError) as error:
            self.found.add_error(error, path)
            return
        self.found.facts |= {"tags": len(self.tags), "nodes": len(self.nodes), "expiries": len(expiries)}

    def _read_marks(self) -> None:
        if "del" not in self.sizes or "del" in self.bad:
            return
        found, path = self.found, self._path("del")
        try:
            data = self._whole("del")
        except (TopicsError, OSError) as error:
            found.add_error(error, path)
            return
        if int(HEADER.unpack_from(data)[1]) != DEL_VERSION:
            rows = np.flatnonzero(np.frombuffer(data, dtype=np.uint8, offset=HEADER_BYTES) == 1).astype(
                np.int64
            )
            self.marks = runs_of(rows, rows + 1)
            found.facts["deleted"] = len(rows)
            found.notes.append(".del has version 1, which has no digests")
            return
        end, deleted, number = HEADER_BYTES, 0, 0
        for ranges, whole, _, block_end in mark_blocks(data):
            number += 1
            if not whole:
                found.add_problem(path, end, "the marks of deleted records do not match their digest")
                break
            self.marks += ranges.tolist()
            deleted += int((ranges["stop"].astype(np.int64) - ranges["first"]).sum())
            end = block_end
        else:
            if end < len(data):
                found.notes.append(
                    f"{len(data) - end} bytes after the last complete block of .del are ignored"
                )
        found.digests.append(
            Digest(f"{number} blocks of .del", end >= HEADER_BYTES and not self._has_problem(path))
        )
        found.facts["deleted"] = deleted

    def _has_problem(self, path: str) -> bool:
        return any(problem.path == path for problem in self.found.problems)

    def _whole(self, suffix: str) -> bytes:
        """Read a file that is small unless it is damaged."""
        path = self._path(suffix)
        if self.sizes[suffix] > WHOLE_BYTES_MAX:
            raise Corrupt(path, 0, f"has {self.sizes[suffix]} bytes, which is too long to inspect")
        handle = self.disk.open(path)
        try:
            return read_exact(self.disk, handle, path, 0, self.sizes[suffix])
        finally:
            self.disk.close(handle)

    # -- records -------------------------------------------------------------------------------------------

    def _show_rows(self, count: int, from_seq: int | None) -> None:
        found, path = self.found, self._path("idx")
        rows, rest = divmod(self.sizes["idx"] - HEADER_BYTES, ROW_BYTES)
        if self.meta.sealed:
            rows = max(0, min(rows, self.meta.rows))
        elif rest:
            found.notes.append(
                "the last row is incomplete: it is being written, or a server died while writing it"
            )
        try:
            handle = self.disk.open(path)
        except OSError as error:
            found.add_error(error, path)
            return
        try:
            self._add_totals(handle, rows)
            picked = _rows_to_show(rows, self.meta.first_seq, count, from_seq)
            shown = [(row, self._row(handle, row)) for row in picked]
        except (TopicsError, OSError) as error:
            found.add_error(error, path)
            return
        finally:
            self.disk.close(handle)
        found.left_out["records"] = rows - len(shown)
        self._read_records(shown)

    def _row(self, handle: int, row: int) -> Rows:
        piece = read_exact(self.disk, handle, self._path("idx"), HEADER_BYTES + ROW_BYTES * row, ROW_BYTES)
        return np.frombuffer(piece, dtype=ROW)

    def _add_totals(self, handle: int, rows: int) -> None:
        """Totals over all rows, read in pieces."""
        path, with_frame, payload, low, high = self._path("idx"), 0, 0, 0, 0
        limit = self.sizes.get("data")
        for first in range(0, rows, _STEP_ROWS):
            number = min(_STEP_ROWS, rows - first)
            at = HEADER_BYTES + ROW_BYTES * first
            piece = np.frombuffer(read_exact(self.disk, handle, path, at, ROW_BYTES * number), dtype=ROW)
            present = piece["length"] > 0
            with_frame += int(np.count_nonzero(present))
            payload += int(piece["size"][present].astype(np.int64).sum())
            times = piece["ts"][piece["ts"] > 0]
            if len(times):
                low = min(low or int(times.min()), int(times.min()))
                high = max(high, int(times.max()))
            ends = piece["offset"].astype(np.int64) + piece["length"]
            past = np.flatnonzero(present & (ends > (DATA_BYTES_MAX * 2 if limit is None else limit)))
            if len(past) and not self._has_problem(path):
                row = int(past[0])
                what = f"row {first + row} points beyond the end of .data, to byte {int(ends[row])}"
                self.found.add_problem(path, at + ROW_BYTES * row, what)
        self.found.facts |= {
            "rows": rows,
            "last_seq": self.meta.first_seq + rows - 1 if rows else None,
            "rows_with_a_record": with_frame,
            "payload_bytes": payload,
            "ts_min": low or None,
            "ts_max": high or None,
        }

    def _read_records(self, shown: list[tuple[int, Rows]]) -> None:
        handle = None
        if "data" in self.sizes:
            try:
                handle = self.disk.open(self.data_path)
            except OSError as error:
                self.found.add_error(error, self.data_path)
        try:
            for row, values in shown:
                self.found.records.append(self._record(handle, row, values))
        finally:
            if handle is not None:
                self.disk.close(handle)

    def _record(self, handle: int | None, row: int, values: Rows) -> Record:
        found = self.found
        offset, length, ts, flags, _, tag, node, size = values[0].tolist()
        seq = self.meta.first_seq + row
        whole: bool | None = None
        topic_id = self.topic_id
        if handle is not None and length and length <= WHOLE_BYTES_MAX:
            try:
                frame = self.disk.read(handle, offset, length)
            except OSError as error:
                found.add_error(error, self.data_path)
            else:
                whole = self._is_record(frame, seq)
                if whole and topic_id is None:
                    topic_id = int(frames.HEADER.unpack_from(frame)[3])
                if not whole:
                    what = f"the record of seq {seq} is damaged"
                    found.add_problem(self.data_path, offset, what)
        names = flag_names(flags)
        if any(first <= row < stop for first, stop in self.marks):
            names.append("deleted")
        return Record(
            type="append",
            topic_id=topic_id or 0,
            seq=seq,
            ts=ts,
            offset=offset,
            bytes=length,
            size=size,
            flags=names,
            tag=_name(self.tags, tag),
            node=_name(self.nodes, node),
            whole=whole,
        )

    def _is_record(self, frame: bytes, seq: int) -> bool:
        if not frames.frame_is_valid(frame):
            return False
        topic_id = self.topic_id if self.topic_id is not None else frames.HEADER.unpack_from(frame)[3]
        return frames.is_record(frame, topic_id, seq)

    def _scan_data(self, count: int, from_seq: int | None) -> None:
        """Read the records without an index, from one to the next by their lengths."""
        found, path, size = self.found, self.data_path, self.sizes["data"]
        records: FirstAndLast[Record] = FirstAndLast(count)
        selected: list[Record] = []
        at = HEADER_BYTES
        handle = self.disk.open(path)
        try:
            while at < size:
                head = self.disk.read(handle, at, frames.HEADER_BYTES)
                length = 4 + int.from_bytes(head[:4], "little")
                if len(head) < frames.HEADER_BYTES or length < frames.OVERHEAD_BYTES or at + length > size:
                    found.add_problem(path, at, "no record starts here")
                    break
                if length > WHOLE_BYTES_MAX:
                    found.add_problem(path, at, f"a record has {length} bytes, which is too long to inspect")
                    break
                record = record_of(self.disk.read(handle, at, length), at)
                if not record.whole:
                    found.add_problem(path, at, "the record does not match its digest")
                    break
                records.add(record)
                if from_seq is not None and record.seq >= from_seq and len(selected) < count:
                    selected.append(record)
                at += length
        except OSError as error:
            found.add_error(error, path)
        finally:
            self.disk.close(handle)
        found.records = selected if from_seq is not None else records.shown
        found.facts["records_found"] = records.count
        found.left_out["records"] = records.count - len(found.records)


def _rows_to_show(rows: int, first_seq: int, count: int, from_seq: int | None) -> list[int]:
    """Rows to show: those from a seq on, or the first and last ones."""
    if from_seq is not None:
        first = min(max(0, from_seq - first_seq), rows)
        return list(range(first, min(first + count, rows)))
    if rows <= 2 * count:
        return list(range(rows))
    return [*range(count), *range(rows - count, rows)]


def _name(names: list[bytes], number: int) -> str | None:
    """The name with this id; ids start with 1, and 0 is none."""
    if not number:
        return None
    return text_of(names[number - 1]) if number <= len(names) else f"#{number}"
