"""Reads cold records as Arrow batches: selects and packs slices of segments, and reads a slice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_pipeline.tasks.columns import (
    COLUMNS,
    FROM_FRAMES,
    Frames,
    constant,
    flags_column,
    names_column,
    schema_of,
    texts_of,
    ts_column,
)
from spark_pipeline.tasks.manifest import ColdTopic, FilesGone
from spark_pipeline.tasks.segments import Damage, SegmentReader, Verify
from topics.api.errors import Corrupt, TopicsError
from topics.api.limits import MIB
from topics.engine.storage.manifest import Segment
from topics.engine.storage.segments import Mask, Rows

BATCH_ROWS = 10_000
BATCH_BYTES = 16 * MIB
SEQ_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """Half-open ranges of seqs and of times in ms."""

    start_seq: int = 0
    end_seq: int = SEQ_MAX
    start_ts: int = 0
    end_ts: int = SEQ_MAX

    def touches(self, segment: Segment) -> bool:
        if segment.next_seq <= self.start_seq or segment.first_seq >= self.end_seq:
            return False
        return segment.ts_max >= self.start_ts and segment.ts_min < self.end_ts


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records and columns to read, and how to verify them."""

    columns: tuple[str, ...] = COLUMNS
    as_text: bool = False
    verify: Verify = "block"
    include_deleted: bool = False
    range: Range = Range()
    tags: tuple[str, ...] | None = None  # best-effort filter: the caller must filter again

    def schema(self) -> Any:
        return schema_of(self.columns, as_text=self.as_text)


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of rows of a segment. `dead` has a bit for each row; None: all are live."""

    topic: str
    topic_id: int
    folder: str
    segment: Segment
    first_row: int
    stop_row: int
    dead: bytes | None = None

    @property
    def rows(self) -> int:
        return self.stop_row - self.first_row

    @property
    def data_bytes(self) -> int:
        """Estimated number of bytes to read."""
        return self.segment.data_bytes * self.rows // max(self.segment.rows, 1)


# ── Slices ────────────────────────────────────────────────────────────────────────────


def slices_of(topic: ColdTopic, span: Range) -> list[Slice]:
    """One slice per segment that overlaps the range."""
    dead = topic.dead()
    found = []
    for segment in topic.manifest.segments:
        if not span.touches(segment):
            continue
        first = max(span.start_seq - segment.first_seq, 0)
        stop = min(span.end_seq - segment.first_seq, segment.rows)
        bits = _pack(dead.get(segment.first_seq), first, stop)
        found.append(
            Slice(topic.name, int(topic.manifest.topic_id, 16), topic.folder, segment, first, stop, bits)
        )
    return found


def _pack(mask: Mask | None, first: int, stop: int) -> bytes | None:
    if mask is None or not mask[first:stop].any():
        return None
    return np.packbits(mask[first:stop], bitorder="little").tobytes()


def _unpack(bits: bytes, count: int) -> Mask:
    found = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=count, bitorder="little")
    return found.astype(np.bool_)


def pack(slices: Iterable[Slice], *, bytes_max: int, parts_min: int) -> list[list[Slice]]:
    """Pack slices into parts of about equal size: small segments share a part, large ones are split.

    A task has the overhead of reading some MiB, while too large parts leave CPUs idle. Keeps the order of topics and seqs.
    """
    slices = list(slices)
    total = sum(part.data_bytes for part in slices)
    target = max(min(bytes_max, -(-total // max(parts_min, 1))), 1)
    parts: list[list[Slice]] = []
    room = 0
    for whole in slices:
        for piece in _split(whole, target):
            if not parts or piece.data_bytes > room:
                parts.append([])
                room = target
            parts[-1].append(piece)
            room -= piece.data_bytes
    return parts


def _split(whole: Slice, target: int) -> Iterator[Slice]:
    count = max(min(-(-whole.data_bytes // target), whole.rows), 1)
    # Slightly above the target is better than two halves.
    if whole.data_bytes <= target * 5 // 4:
        count = 1
    dead = None if whole.dead is None else _unpack(whole.dead, whole.rows)
    edges = [whole.rows * i // count for i in range(count + 1)]
    for first, stop in pairwise(edges):
        bits = _pack(dead, first, stop)
        yield replace(whole, first_row=whole.first_row + first, stop_row=whole.first_row + stop, dead=bits)


# ── Reading ───────────────────────────────────────────────────────────────────────────


def read_slice(part: Slice, wanted: Wanted, damage: list[Damage] | None = None) -> Iterator[Any]:
    """Yield record batches. With a list for `damage`, unreadable records are added there and skipped."""
    reader = SegmentReader(part.folder, part.segment, part.topic_id, wanted.verify, damage)
    try:
        rows = reader.index()
        needs_names = {"tag", "node"} & set(wanted.columns) or wanted.tags is not None
        names = reader.names() if needs_names else ([], [], None)
        picked, dead = _pick(part, rows, wanted, names[0])
        texts = texts_of(names[0]), texts_of(names[1])
        if not FROM_FRAMES & set(wanted.columns):
            # The index is enough: .data is not read.
            for first in range(0, len(picked), BATCH_ROWS):
                some = picked[first : first + BATCH_ROWS]
                yield _batch(part, wanted, rows, some, dead, texts, None)
            return
        for piece in reader.pieces(rows, picked, rows_max=BATCH_ROWS, bytes_max=BATCH_BYTES):
            frames = Frames.at(reader.path("data"), piece.data, piece.starts, piece.ends)
            yield _batch(part, wanted, rows, piece.rows, dead, texts, frames)
    except FileNotFoundError as error:
        # Not skipped as damage: most likely the records are in another segment now.
        raise FilesGone(
            f"{error.filename} no longer exists: it was merged or erased since this read was planned. Run the query again. If that does "
            "not help, the file is lost: restore it from a backup, or run `topics verify --repair` to mark its records as lost"
        ) from error
    except TopicsError as error:
        if damage is None:
            raise
        first = part.segment.first_seq
        path = error.path if isinstance(error, Corrupt) else reader.path("data")
        offset = error.offset if isinstance(error, Corrupt) else 0
        damage.append(Damage(path, offset, first + part.first_row, first + part.stop_row - 1, str(error)))


def _pick(
    part: Slice, rows: Rows, wanted: Wanted, tags: list[bytes]
) -> tuple[npt.NDArray[np.int64], Mask | None]:
    """The rows to read, and with `include_deleted` a mask of the dead ones."""
    picked = np.zeros(len(rows), dtype=np.bool_)
    picked[part.first_row : part.stop_row] = True
    picked &= rows["length"] > 0
    span = wanted.range
    if span.start_ts > part.segment.ts_min or span.end_ts <= part.segment.ts_max:
        picked &= (rows["ts"] >= span.start_ts) & (rows["ts"] < span.end_ts)
    if wanted.tags is not None:
        names = {tag.encode() for tag in wanted.tags}
        picked &= np.array([False, *(tag in names for tag in tags)])[rows["tag"]]
    dead: Mask | None = None
    if part.dead is not None:
        dead = np.zeros(len(rows), dtype=np.bool_)
        dead[part.first_row : part.stop_row] = _unpack(part.dead, part.rows)
        if not wanted.include_deleted:
            picked &= ~dead
    return np.flatnonzero(picked), dead if wanted.include_deleted else None


def _batch(
    part: Slice,
    wanted: Wanted,
    rows: Rows,
    picked: npt.NDArray[np.int64],
    dead: Mask | None,
    texts: tuple[Any, Any],
    frames: Frames | None,
) -> Any:
    found: dict[str, Any] = {}
    if frames is not None:
        found["data"], found["meta"] = frames.data_and_meta(as_text=wanted.as_text)
    for column in wanted.columns:
        match column:
            case "topic":
                found[column] = constant(part.topic, len(picked))
            case "seq":
                found[column] = pa.array(picked + part.segment.first_seq)
            case "ts":
                found[column] = ts_column(rows["ts"][picked])
            case "tag":
                found[column] = names_column(texts[0], rows["tag"][picked])
            case "node":
                found[column] = names_column(texts[1], rows["node"][picked])
            case "flags":
                found[column] = flags_column(rows["flags"][picked], None if dead is None else dead[picked])
    return pa.RecordBatch.from_arrays([found[name] for name in wanted.columns], schema=wanted.schema())
