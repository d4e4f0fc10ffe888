"""Checkpoints: move records from the log into segments, write a snapshot of the state, then trim the log.

The order matters:

1. Capture each changed topic in its staged state, which includes everything written to the log.
2. Wait until the log is synced up to the capture: files must never be ahead of the log.
3. Write and sync `.data`, `.idx`, `.dict` and `.del`, then the `.sum` of closed segments.
4. Write, sync and rename the snapshot.
5. Point the in-memory rows at the segments.
6. Remove log files and segments that neither of the two kept snapshots needs.

A crash before the rename leaves files longer than the previous snapshot says, and recovery truncates them. An error
at any step leaves memory pointing at the log.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from topics.api import limits
from topics.api.config import EngineConfig
from topics.api.errors import Corrupt
from topics.engine.core.ports import Disk
from topics.engine.core.tasks import Blocking, Steps, WaitSynced
from topics.engine.reading.reader import Reader
from topics.engine.shard.shard import Shard
from topics.engine.storage import frames
from topics.engine.storage.delete_marks import mark_deleted
from topics.engine.storage.files import HEADER_BYTES, is_full, sync_file, write_whole
from topics.engine.storage.index import Chunk, Rows
from topics.engine.storage.sealing import damaged_blocks, drain, seal_steps
from topics.engine.storage.segments import (
    IndexFiles,
    IndexHash,
    Mask,
    SegmentMeta,
    SegmentWriter,
    remove_files,
    remove_segment,
)
from topics.engine.storage.snapshot import SnapshotWriter, list_snapshots, read_snapshot, remove_snapshot
from topics.engine.storage.wal import Wal, WalFile
from topics.engine.topic.log import Range, Run, TopicLog
from topics.engine.topic.snapshot_row import ShardRow, TopicRow
from topics.engine.upkeep.pending_deletions import PendingDeletions
from topics.engine.upkeep.usage import TierUsage

SYNCFS_FROM = 64  # above this number of files, one syncfs is faster than an fdatasync for each
LATCH_FILE = "latched"
SEGMENT_OVERHEAD_BYTES = 16 * limits.KIB  # estimate: a few file system blocks in addition to the records
TOPIC_ROW_BYTES = 256  # estimate: one topic in a snapshot


@dataclass(slots=True)
class _NewRows:
    """A copy of the rows [first, stop) of a chunk, with the tag and node ids of its segment's dictionary."""

    first: int
    stop: int
    rows: Rows
    tag_ids: dict[bytes, int]
    node_ids: dict[bytes, int]
    tags: list[bytes] = field(default_factory=list)  # strings that are new to the dictionary
    nodes: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _SegmentCapture:
    """Rows and deletes of one chunk that this checkpoint writes to its segment."""

    chunk: Chunk
    meta: SegmentMeta
    first: int  # rows [first, stop) are appended to the segment
    stop: int
    new: _NewRows
    expiries: list[tuple[int, int]] = field(default_factory=list)
    deleted: list[int] = field(default_factory=list)
    # Where the rows were at capture time: a record that is deleted during the checkpoint is still copied.
    runs: list[Run] = field(default_factory=list)
    marks: int = 0  # number of entries of the chunk's `unmarked` that `deleted` includes
    seal: bool = False
    index_hash: IndexHash = field(default_factory=IndexHash)
    marked: Mask | None = None
    rebuilt_index: IndexFiles | None = None
    live_bytes: int = 0


@dataclass(slots=True)
class _InlineCapture:
    """A small topic, captured whole: its live frames concatenated, with the offset and length of each row's frame."""

    chunk: Chunk
    rows: int
    data: bytes
    offsets: list[int]
    lengths: list[int]


@dataclass(slots=True)
class _TopicCapture:
    """A topic as of its capture."""

    log: TopicLog
    row: TopicRow | None  # None: already encoded, because writing the segments does not change it
    parts: list[_SegmentCapture]
    inline: _InlineCapture | None
    stored_head: (
        int  # the checkpoint stores all records up to this seq, including those held in RAM; 0: not those
    )


class Checkpointer:
    """Writes checkpoints of one shard and removes the files they make obsolete."""

    def __init__(self, disk: Disk, shard: Shard, wal: Wal, reader: Reader, config: EngineConfig) -> None:
        self._disk = disk
        self._shard = shard
        self._wal = wal
        self._reader = reader
        self._config = config
        self.meta_dir = f"{config.shard_dir}/meta"
        self.snapshots: list[tuple[int, int]] = []  # number and base_lsn, newest last; two are kept
        self.rows: dict[int, bytes] = {}  # encoded row of every topic as of its last capture
        self._obsolete = PendingDeletions()  # replaced or empty segments
        self._hot_copies = PendingDeletions()  # segments now in the cold tier: only their .data is deleted
        self.usage = TierUsage()
        self.capturing = False  # from the first copy of rows until memory points at the segments
        # Compaction is reading the files of this chunk, and this topic must stay in memory.
        self.compacting_chunk: Chunk | None = None
        self.compacting_topic: TopicLog | None = None
        self.erase_running = False  # a topic's files are being searched and patched
        # A cold tier job needs the files of this chunk unchanged, and this topic must stay in memory.
        self.cold_job_chunk: Chunk | None = None
        self.cold_job_topic: TopicLog | None = None
        # For compaction: topics whose dead bytes were counted.
        self.on_captured: Callable[[list[TopicLog]], None] = lambda logs: None
        # For the cold tier: changed topics, removed segments and removed topics.
        self.on_checkpointed: Callable[[list[TopicLog]], None] = lambda logs: None
        self.on_segment_removed: Callable[[int, SegmentMeta], None] = lambda topic_id, meta: None
        self.on_topic_removed: Callable[[int], None] = lambda topic_id: None
        self._inline_bytes: dict[int, int] = {}  # topics whose records are stored in the snapshot
        self._inline_total = 0
        self.closing = False
        self.last_ms = 0
        # Bytes of wal.bytes_written that the last checkpoint covers. Negative after a start that replayed older bytes.
        self.covered_bytes = 0

    @property
    def log_bytes(self) -> int:
        """Log bytes that a restart would replay."""
        return self._wal.bytes_written - self.covered_bytes

    @property
    def log_share(self) -> float:
        """Log bytes to replay as a fraction of the configured maximum."""
        bound = self._config.log_bytes_max
        return self.log_bytes / bound if bound else 0.0

    def is_due(self, mono_ms: int) -> bool:
        if self.log_bytes >= self._config.snapshot_wal_bytes:
            return True
        has_changed = bool(self._shard.state.touched or self._hot_copies)
        return has_changed and mono_ms - self.last_ms >= self._config.snapshot_interval_ms

    @property
    def has_hot_copies(self) -> bool:
        """Whether the next checkpoints will remove hot copies of segments that are in the cold tier."""
        return bool(self._hot_copies)

    def would_free_space(self) -> bool:
        """Whether a checkpoint would free space even if nothing has changed, by dropping the older snapshot's files."""
        if not self.snapshots:
            return False
        lsn = self.snapshots[-1][1]
        return bool(self._obsolete or self._hot_copies) or any(
            file.last_lsn <= lsn for file in self._wal.files[:-1]
        )

    def fits_in(self, size: int) -> bool:
        """Whether a checkpoint would write at most about `size` bytes."""
        left = size - sum(map(len, self.rows.values()))
        for log in self._shard.state.touched.values():
            for chunk in log.chunks:
                if chunk.count > chunk.stored or chunk.unmarked:
                    unstored = chunk.live(chunk.stored, chunk.count, frames.DEAD)
                    unstored[: max(0, log.first_seq - chunk.first_seq - chunk.stored)] = False
                    left -= SEGMENT_OVERHEAD_BYTES + int(
                        chunk.rows["length"][chunk.stored : chunk.count][unstored].sum(dtype=np.int64)
                    )
            left -= TOPIC_ROW_BYTES
            if left < 0:
                break  # runs every second on a full disk, so it must not visit all of ten thousand topics
        return left >= 0

    def topic_dir(self, topic_id: int) -> str:
        return self._reader.topic_dir(topic_id)

    # -- the checkpoint ------------------------------------------------------------------------------------

    def steps(self) -> Steps:
        shard = self._shard
        yield from self._load_touched()
        # No yield between this and reading the base LSN: a change below it in a topic that is not captured is lost.
        touched, shard.state.touched = shard.state.touched, {}
        try:
            yield from self._checkpoint(touched)
        except BaseException:
            # The next checkpoint has to capture these topics.
            shard.state.touched = touched | shard.state.touched
            raise
        finally:
            self.capturing = False
        self.last_ms = shard.state.clock.mono_ms
        shard.state.counters["checkpoints"] += 1
        logs = list(touched.values())
        for first in range(0, len(logs), limits.SLICE_TOPICS):
            self.on_captured(logs[first : first + limits.SLICE_TOPICS])
            self.on_checkpointed(logs[first : first + limits.SLICE_TOPICS])
            yield None
        yield from self._unload_idle()

    def _load_touched(self) -> Steps:
        """Load changed topics before the capture: loading may log losses, and a capture must not stage anything."""
        while True:
            away = [log for log in self._shard.state.touched.values() if log.is_unloaded and not log.dropped]
            if not away:
                return
            for log in away:
                for _ in self._shard.state.load_slices(log):
                    yield None
                yield WaitSynced(0)

    def _checkpoint(self, touched: dict[int, TopicLog]) -> Steps:
        shard, wal = self._shard, self._wal
        number = self.snapshots[-1][0] + 1 if self.snapshots else 1
        captures: list[_TopicCapture] = []
        self.capturing = True
        covered_bytes = wal.bytes_written
        head = ShardRow(number, wal.last_lsn, shard.state.next_id, 0, 0, 0, "", 0)
        own = shard.state.owned_ids
        head.first_id, head.adopted, head.others = own.first_id, own.packed, own.others
        for part in shard.state.row_parts.values():
            part.capture_shard(head)
        for i, log in enumerate(list(touched.values())):
            if log.dropped:
                continue
            prepared = yield from self._prepare(log)
            if log.dropped:
                continue
            assert not shard.state.frames, "a capture must not contain changes that are not in the log"
            captures.append(self._capture(log, prepared))
            if i % limits.SLICE_TOPICS == 0:
                yield None
        yield WaitSynced(wal.last_lsn)
        try:
            yield from self._write_parts(captures)
            writer = yield Blocking("snapshot", lambda: SnapshotWriter(self._disk, self.meta_dir, number))
            try:
                yield from self._write_snapshot(writer, head, captures)
                yield Blocking("snapshot", lambda: _finish(writer))
            except BaseException:
                writer.abandon()
                raise
        except OSError as error:
            if is_full(error):
                yield Blocking("unlink", lambda: self._remove_new_segments(captures))
            raise
        self.snapshots.append((number, head.base_lsn))
        self.covered_bytes = covered_bytes
        while captures:  # popped one by one: freeing thousands of captures at once would be a long pause
            self._install(captures.pop())
            if len(captures) % limits.SLICE_TOPICS == 0:
                yield None
        self.capturing = False
        yield from self._remove_obsolete()

    def _remove_new_segments(self, captures: list[_TopicCapture]) -> None:
        """After a checkpoint failed on a full disk, remove the segments it created to give their space back."""
        for capture in captures:
            for part in capture.parts:
                if part.chunk.meta is None:
                    directory, meta = self.topic_dir(capture.log.id), part.meta
                    remove_segment(self._disk, directory, meta.first_seq, meta.generation)

    def _prepare(self, log: TopicLog) -> Generator[None, None, dict[Chunk, _NewRows]]:
        """Copy the new rows of a topic's full chunks, one chunk per slice.

        This is most of a capture's work and can run ahead of it: until the capture a full chunk gains no rows, and nothing
        about its rows changes but that some are deleted.
        """
        prepared: dict[Chunk, _NewRows] = {}
        is_ephemeral = log.config.durability == "ephemeral"
        for chunk in log.chunks[:-1]:
            if chunk.count > chunk.stored and not (is_ephemeral and log.is_in_ram(chunk)):
                prepared[chunk] = _copy_new_rows(log, chunk)
                yield None
        return prepared

    def _capture(self, log: TopicLog, prepared: dict[Chunk, _NewRows]) -> _TopicCapture:
        """Copy the topic's state as of the last log entry. The copy is written once the log is synced up to there."""
        assert not log.is_unloaded, "a captured topic must be in memory"
        self._close_old_segment(log)
        log.tags.sweep(log.are_live, limits.SLICE_ROWS)
        parts: list[_SegmentCapture] = []
        ram_ranges: list[Range] = []
        segments: list[SegmentMeta] = []
        inline = self._capture_inline(log)
        stores_ram = log.config.durability != "ephemeral"
        for chunk in log.chunks if inline is None else ():
            if not stores_ram and log.is_in_ram(chunk):
                ram_ranges.append((chunk.first_seq, chunk.next_seq - 1))
                continue
            part = self._capture_chunk(log, chunk, prepared.get(chunk))
            if part is not None:
                parts.append(part)
                segments.append(part.meta)
            elif chunk.meta is not None:
                if chunk.first_seq < log.first_seq:  # the topic may have been trimmed into this chunk
                    _count_dead(chunk.meta, _live_bytes(log, chunk))
                segments.append(chunk.meta)
        inlined = (log.chunks[0].first_seq, inline.rows, inline.data) if inline is not None else None
        row = TopicRow.capture(
            log,
            self._shard.state.row_parts.values(),
            applied_lsn=self._wal.last_lsn,
            now_ms=self._shard.state.now_ms,
            segments=segments,
            ram_ranges=ram_ranges,
            inline=inlined,
        )
        stored_head = row.head if stores_ram else 0
        if not parts:
            # Encoded right away: keeping ten thousand rows as objects would mean a long garbage collection pause.
            self.rows[log.id] = msgspec.msgpack.encode(row)
            return _TopicCapture(log, None, parts, inline, stored_head)
        return _TopicCapture(log, row, parts, inline, stored_head)

    def _capture_inline(self, log: TopicLog) -> _InlineCapture | None:
        """Capture a topic with a few small records for storage in its snapshot row instead of segment files.

        Ten thousand such topics then take one file instead of thirty thousand.
        """
        held = self._inline_bytes.pop(log.id, 0)
        self._inline_total -= held
        if len(log.chunks) != 1 or log.config.durability == "ephemeral":
            return None
        chunk = log.chunks[0]
        size = chunk.frame_bytes
        small = 0 < size <= self._config.inline_bytes and chunk.count <= limits.INLINE_ROWS
        if (
            not small
            or chunk.meta is not None
            or chunk.closed
            or self._inline_total + size > limits.INLINE_TOTAL_BYTES
        ):
            return None
        self._inline_bytes[log.id] = size
        self._inline_total += size
        return _InlineCapture(chunk, chunk.count, *self._reader.frames_of_few(log, chunk))

    def _close_old_segment(self, log: TopicLog) -> None:
        age_max = self._config.segment_max_age_ms
        if log.chunks and age_max and log.chunks[-1].count:
            last = log.chunks[-1]
            if not last.closed and self._shard.state.now_ms - last.opened_ms >= age_max:
                last.closed = True

    def _capture_chunk(self, log: TopicLog, chunk: Chunk, new: _NewRows | None) -> _SegmentCapture | None:
        stop = chunk.count
        full = chunk.closed or stop >= chunk.rows_max
        seal = full and not (chunk.meta is not None and chunk.meta.sealed)
        idle = stop == chunk.stored and not chunk.unmarked and not seal and chunk.rebuilt_index is None
        if not stop or idle:
            return None
        meta = msgspec.structs.replace(chunk.meta) if chunk.meta is not None else SegmentMeta(chunk.first_seq)
        if new is None or (new.first, new.stop) != (chunk.stored, stop):
            new = _copy_new_rows(log, chunk)
        part = _SegmentCapture(chunk, meta, chunk.stored, stop, new, runs=list(log.runs), seal=seal)
        part.marked, part.rebuilt_index = chunk.marked, chunk.rebuilt_index
        part.live_bytes = _live_bytes(log, chunk)
        if chunk.index_hash is not None:
            part.index_hash = chunk.index_hash.copy()
        part.expiries = list(chunk.expiries)
        dead = _dead_rows(log, chunk)
        if dead.any():
            for name in ("length", "offset", "flags", "tag", "node", "size"):
                new.rows[name][dead] = 0
            if part.expiries:
                is_dead = dead.tolist()
                part.expiries = [entry for entry in part.expiries if not is_dead[entry[0] - chunk.stored]]
        part.marks = len(chunk.unmarked)
        if chunk.unmarked:
            part.deleted = _dead_within(chunk, chunk.unmarked)
        return part

    def _write_parts(self, captures: list[_TopicCapture]) -> Steps:
        """Write and sync the segment files, then seal closed segments. All file access runs off the event loop."""
        parts = [(capture, part) for capture in captures for part in capture.parts]
        many = len(parts) > SYNCFS_FROM
        batch: list[tuple[str, _SegmentCapture, bytes]] = []
        size = 0
        for capture, part in parts:
            if part.stop > part.first or part.rebuilt_index is not None:
                data = self._copy_frames(capture.log, part) if part.stop > part.first else b""
                batch.append((self.topic_dir(capture.log.id), part, data))
                size += len(data)
            if size >= limits.MIB or len(batch) >= SYNCFS_FROM:
                yield Blocking("segments", self._write_segments_job(batch, sync=not many))
                batch, size = [], 0
            yield None
        if parts:
            yield Blocking("segments", self._write_segments_job(batch, sync=not many))
            yield Blocking("segments", lambda: self._mark_parts(parts, sync=not many))
        for capture, part in parts:
            _count_dead(part.meta, part.live_bytes)
            if part.seal:
                yield Blocking("seal", self._seal_job(capture, part))
                self._shard.state.counters["seals"] += 1

    def _copy_frames(self, log: TopicLog, part: _SegmentCapture) -> bytes:
        """Read the frames of the captured rows from the log and set the rows' offsets in the segment."""
        rows = part.new.rows
        data = self._reader.frames_of(log, part.chunk, part.runs, np.flatnonzero(rows["length"]) + part.first)
        lengths = rows["length"].astype(np.int64)
        offsets = np.cumsum(lengths) - lengths + part.meta.data_bytes
        offsets[lengths == 0] = 0
        rows["offset"] = offsets
        return data

    def _write_segments_job(
        self, batch: list[tuple[str, _SegmentCapture, bytes]], *, sync: bool
    ) -> Callable[[], None]:
        def write() -> None:
            for directory, part, data in batch:
                if part.rebuilt_index is not None:
                    part.rebuilt_index.write(self._disk, directory, part.meta)
                writer = SegmentWriter(self._disk, directory, part.meta, part.index_hash)
                try:
                    writer.append(data, part.new.rows, part.new.tags, part.new.nodes, part.expiries)
                    if sync:
                        writer.sync()
                finally:
                    writer.close()

        return write

    def _mark_parts(self, parts: list[tuple[_TopicCapture, _SegmentCapture]], *, sync: bool) -> None:
        """Write the .del files. Without `sync`, one syncfs covers them and the segments written before."""
        for capture, part in parts:
            if part.deleted:
                directory, marked = self.topic_dir(capture.log.id), part.marked
                path = mark_deleted(self._disk, directory, part.meta, part.deleted, marked)
                part.marked = np.zeros(part.meta.rows, dtype=np.bool_)
                part.marked[part.deleted] = True
                if marked is not None:
                    part.marked[: len(marked)] |= marked
                if sync:
                    sync_file(self._disk, path)
        if not sync:
            self._disk.sync_all()

    def _seal_job(self, capture: _TopicCapture, part: _SegmentCapture) -> Callable[[], None]:
        log = capture.log

        def seal() -> None:
            assert capture.row is not None
            directory, chain = self.topic_dir(log.id), capture.row.sum_chain
            # A block digest must not cover a record that was corrupted on disk since it was written. Records of this
            # checkpoint were verified while they were copied.
            damaged = damaged_blocks(self._disk, directory, part.meta, part.first, log.id)
            drain(seal_steps(self._disk, directory, part.meta, chain, damaged=damaged))
            capture.row.sum_chain = part.meta.link

        return seal

    def _write_snapshot(
        self,
        writer: SnapshotWriter,
        head: ShardRow,
        captures: list[_TopicCapture],
    ) -> Steps:
        shard, wal = self._shard, self._wal
        is_last = (
            self.closing and not shard.state.frames and not shard.state.ops and head.base_lsn == wal.last_lsn
        )
        head.time_ceiling_ms, head.now_ms = shard.state.time_ceiling_ms, shard.state.now_ms
        head.mono_ms, head.boot_id = shard.state.clock.mono_ms, self._disk.boot_id()
        head.clean_lsn = wal.last_lsn if is_last else 0
        writer.add(head)
        for i, capture in enumerate(captures):
            if capture.row is not None:
                self.rows[capture.log.id] = msgspec.msgpack.encode(capture.row)
            if i % limits.SLICE_TOPICS == 0:
                yield None
        for i, log in enumerate(list(shard.state.by_id.values())):
            if log.id in self.rows and not log.dropped:
                writer.add(msgspec.Raw(self.rows[log.id]))
            if i % (limits.SLICE_TOPICS * 8) == 0:
                yield None

    def _install(self, capture: _TopicCapture) -> None:
        """Point the in-memory rows at the segments, now that a snapshot refers to them."""
        log = capture.log
        if capture.row is not None:
            log.sum_chain = capture.row.sum_chain
        inline = capture.inline
        if inline is not None and inline.chunk in log.chunks:
            target = inline.chunk.rows[: inline.rows]
            target["offset"], target["length"] = inline.offsets, inline.lengths
            log.move_to_block(inline.chunk.first_seq, inline.chunk.first_seq + inline.rows, inline.data)
        for part in capture.parts:
            chunk = part.chunk
            if part.stop > part.first:
                target = chunk.rows[part.first : part.stop]
                target["offset"] = part.new.rows["offset"]
                target["length"] = part.new.rows["length"]
                chunk.stored = part.stop
                grown = chunk.count > part.stop
                chunk.expiries = [entry for entry in chunk.expiries if entry[0] >= part.stop] if grown else ()
            # Records deleted since the capture still have to be marked in the segment's .del file.
            flags = chunk.rows["flags"][part.first : part.stop]
            late = np.nonzero(((flags & frames.DEAD) != 0) & (part.new.rows["length"] > 0))[0]
            chunk.unmarked = chunk.unmarked[part.marks :] + [
                (int(i) + part.first, int(i) + part.first + 1) for i in late
            ]
            chunk.meta, chunk.marked = part.meta, part.marked
            chunk.index_hash, chunk.rebuilt_index = part.index_hash, None
            chunk.tag_ids, chunk.node_ids = part.new.tag_ids, part.new.node_ids
            if part.seal:
                chunk.closed = True
                chunk.tag_ids, chunk.node_ids, chunk.index_hash = {}, {}, None
                self._reader.close_segment(log.id, part.meta.first_seq, part.meta.generation)
        log.trim_stored_runs()
        if capture.stored_head:
            log.dedupe.stored_up_to(capture.stored_head)
        self._shard.state.ram_bytes += log.release_ram()

    # -- removal of obsolete files -------------------------------------------------------------------------

    def _remove_obsolete(self) -> Steps:
        """Keep two snapshots and the log since the older one; remove files that neither refers to."""
        newest = self.snapshots[-1][0]
        for i, log in enumerate(list(self._shard.state.by_id.values())):
            if log.dead_segments:
                for meta in log.dead_segments:
                    self._obsolete.add(log.id, meta, newest)
                log.dead_segments = []
            if i % limits.SLICE_NAMES == 0:
                yield None
        while len(self.snapshots) > 2:
            number = self.snapshots.pop(0)[0]
            yield Blocking("unlink", self._remove_snapshot_job(number))
        oldest, lsn = self.snapshots[0]
        if len(self.snapshots) == 2:
            for file in self._wal.take_obsolete(lsn):
                yield Blocking("unlink", self._remove_log_file_job(file))
        for topic, meta in self._obsolete.take_before(oldest):
            self._reader.close_segment(topic, meta.first_seq, meta.generation)
            remove_segment(self._disk, self.topic_dir(topic), meta.first_seq, meta.generation)
            self.on_segment_removed(topic, meta)
            yield None
        for topic, meta in self._hot_copies.take_before(oldest):
            self._reader.close_segment(topic, meta.first_seq, meta.generation)
            remove_files(self._disk, self.topic_dir(topic), meta, "data")
            yield None

    def delete_hot_copy_later(
        self, topic_id: int, meta: SegmentMeta, *, last_snapshot: int | None = None
    ) -> None:
        """Schedule deletion of the .data of a segment that is now in the cold tier.

        A start from a snapshot that still lists the segment as hot needs the file.
        """
        self._hot_copies.add(topic_id, meta, self._newest if last_snapshot is None else last_snapshot)

    def replace_corrupt_snapshots(self, numbers: list[int]) -> Steps:
        """Write a new snapshot, then remove the corrupt ones. Not the other way round: repair can still use parts of them."""
        yield from self.steps()
        removed = yield Blocking("unlink", lambda: self._remove_corrupt(numbers))
        self.snapshots = [entry for entry in self.snapshots if entry[0] not in removed]

    def _remove_corrupt(self, numbers: list[int]) -> list[int]:
        removed: list[int] = []
        for number in set(numbers) & set(list_snapshots(self._disk, self.meta_dir)):
            try:
                read_snapshot(
                    self._disk, self.meta_dir, number
                )  # the new snapshot may have reused the number
            except Corrupt:
                remove_snapshot(self._disk, self.meta_dir, number)
                removed.append(number)
        return removed

    def delete_later(self, topic_id: int, meta: SegmentMeta, *, last_snapshot: int | None = None) -> None:
        """Schedule deletion of a replaced segment for when no kept snapshot refers to it."""
        self._obsolete.add(topic_id, meta, self._newest if last_snapshot is None else last_snapshot)

    def pending_deletions_of(self, topic_id: int) -> list[SegmentMeta]:
        return self._obsolete.of(topic_id)

    @property
    def _newest(self) -> int:
        return self.snapshots[-1][0] if self.snapshots else 0

    def _remove_snapshot_job(self, number: int) -> Callable[[], None]:
        return lambda: remove_snapshot(self._disk, self.meta_dir, number)

    def _remove_log_file_job(self, file: WalFile) -> Callable[[], None]:
        return lambda: self.remove_log_file(file)

    def remove_log_file(self, file: WalFile) -> None:
        self._reader.wal_handles.pop(file.number, None)
        self._reader.tail_cache.forget_file(file.number)
        self._disk.close(file.handle)
        self._disk.remove(file.path)

    def remove_topics(self, logs: list[TopicLog]) -> Steps:
        """Remove the files of dropped topics: rename the directory, then unlink in slices."""
        for log in logs:
            self.rows.pop(log.id, None)
            self._inline_total -= self._inline_bytes.pop(log.id, 0)
            self._reader.close_topic(log.id)
            self._obsolete.forget(log.id)
            self._hot_copies.forget(log.id)
            self.usage.forget(log.id)
            self.on_topic_removed(log.id)
            directory = self.topic_dir(log.id)
            if self._disk.exists(directory):
                self._disk.rename(directory, f"{directory}.deleted")
                yield from remove_tree(self._disk, f"{directory}.deleted")
            yield None

    def write_latch_file(self) -> None:
        """Record a failed write or sync for the next start: the page cache may hold data that is not on disk."""
        try:
            number = str(self._wal.active.number).encode()
            write_whole(self._disk, f"{self.meta_dir}/{LATCH_FILE}", number)
            self._disk.sync_dir(self.meta_dir)
        except OSError:
            pass  # the disk is failing; recovery then has only the boot id to go by

    def _unload_idle(self) -> Steps:
        """Keep the in-memory index within its limit by unloading the least recently used topics."""
        resident = 0
        logs = list(self._shard.state.by_id.values())
        for i, log in enumerate(logs):
            resident += sum(chunk.count for chunk in log.chunks)
            if i % limits.SLICE_NAMES == 0:
                yield None
        if resident <= self._config.index_rows_max:
            return
        for log in sorted(logs, key=lambda log: (log.last_touch, log.id)):
            if resident <= self._config.index_rows_max:
                return
            is_busy = log is self.cold_job_topic or log is self.compacting_topic
            if log.chunks and log.id not in self._shard.state.touched and log.can_unload() and not is_busy:
                resident -= sum(chunk.count for chunk in log.chunks)
                log.unload()

    def replace_segment(self, log: TopicLog, chunk: Chunk, meta: SegmentMeta, rows: Rows) -> None:
        """Switch a chunk to a new generation of its segment, with the new offsets of its rows."""
        self._reader.close_segment(log.id, meta.first_seq, meta.generation - 1)
        chunk.rows["offset"] = rows["offset"]
        chunk.rows["length"] = rows["length"]
        chunk.meta, chunk.marked = meta, None
        # Records deleted since the copy are only flagged in memory; the next checkpoint marks them in the new .del.
        late = np.nonzero(((chunk.rows["flags"] & frames.DEAD) != 0) & (rows["length"] > 0))[0]
        meta.dead_bytes = int(rows["length"][late].sum(dtype=np.int64))
        chunk.unmarked = [(int(i), int(i) + 1) for i in late]


def _dead_rows(log: TopicLog, chunk: Chunk) -> Mask:
    """Which of a chunk's new rows are deleted, in the staged state."""
    dead = ~chunk.live(chunk.stored, chunk.count, frames.DEAD)
    dead[: max(0, log.first_seq - chunk.first_seq - chunk.stored)] = True
    return dead


def _copy_new_rows(log: TopicLog, chunk: Chunk) -> _NewRows:
    rows = chunk.rows[chunk.stored :].copy()
    dead = _dead_rows(log, chunk)
    new = _NewRows(chunk.stored, chunk.count, rows, dict(chunk.tag_ids), dict(chunk.node_ids))
    for column, known, fresh, names in (
        ("tag", new.tag_ids, new.tags, log.tags.strings.names),
        ("node", new.node_ids, new.nodes, log.nodes.names),
    ):
        used, where = np.unique(np.where(dead, 0, rows[column]), return_inverse=True)
        if not used.any():
            continue
        is_none = int(used[0] == 0)
        texts = [names[string_id] or b"" for string_id in used[is_none:].tolist()]
        fresh += [text for text in texts if text not in known]
        known.update(zip(fresh, range(len(known) + 1, len(known) + 1 + len(fresh))))
        ids = np.zeros(len(used), dtype=np.uint32)
        ids[is_none:] = [known[text] for text in texts]
        rows[column] = ids[where]
    return new


def _dead_within(chunk: Chunk, spans: list[Range]) -> list[int]:
    """Positions of the deleted rows within `spans` among the stored rows. There may be as many spans as rows."""
    edges = np.array(spans, dtype=np.int64)
    depth = np.zeros(chunk.stored + 1, dtype=np.int32)
    np.add.at(depth, edges[:, 0], 1)
    np.add.at(depth, np.minimum(edges[:, 1], chunk.stored), -1)
    dead = (chunk.rows["flags"][: chunk.stored] & frames.DEAD) != 0
    found: list[int] = np.flatnonzero(dead & (np.cumsum(depth[:-1]) > 0)).tolist()
    return found


def _live_bytes(log: TopicLog, chunk: Chunk) -> int:
    """Bytes of a chunk's frames that are live in the staged state."""
    alive = chunk.live(0, chunk.count, frames.DEAD)
    alive[: max(0, log.first_seq - chunk.first_seq)] = False
    return int(chunk.rows["length"][alive].sum(dtype=np.int64))


def _count_dead(meta: SegmentMeta, live_bytes: int) -> None:
    meta.dead_bytes = meta.data_bytes - HEADER_BYTES - live_bytes


def _finish(writer: SnapshotWriter) -> None:
    writer.finish()
    writer.publish()


def remove_tree(disk: Disk, path: str) -> Steps:
    """Remove a directory and its files, a few at a time."""
    for i, name in enumerate(disk.list(path)):
        disk.remove(f"{path}/{name}")
        if i % limits.SLICE_TOPICS == 0:
            yield None
    disk.remove_dir(path)
