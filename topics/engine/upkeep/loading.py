"""Lazy loading of topics: index rows, tags and nodes are read from the segments; unreadable records are reported lost."""

from __future__ import annotations

import heapq
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from topics.api.config import EngineConfig
from topics.api.errors import ColdStoreFailed, Corrupt, UnsupportedFormat
from topics.engine.core.ports import Disk, SegmentStore
from topics.engine.core.tasks import Work, drain
from topics.engine.reading.reader import Reader
from topics.engine.shard.shard import Shard
from topics.engine.shard.state import as_ranges
from topics.engine.storage import frames
from topics.engine.storage.control import Lost
from topics.engine.storage.delete_marks import read_deleted
from topics.engine.storage.files import HEADER_BYTES, header, read_file, read_range, write_whole, xxh
from topics.engine.storage.index import Chunk
from topics.engine.storage.sealing import Sum, meta_from_sum, read_sum
from topics.engine.storage.segment_store import INDEX_SUFFIXES
from topics.engine.storage.segments import (
    COLD,
    EXPIRY,
    IDX_MAGIC,
    ROW,
    IndexFiles,
    IndexHash,
    Mask,
    Rows,
    SegmentMeta,
    parse_segment_name,
    read_dict,
    read_rows,
    segment_name,
    segment_path,
    truncate_to_meta,
)
from topics.engine.storage.strings import StringTable
from topics.engine.storage.transaction_file import parse_name
from topics.engine.topic.log import Op, TopicLog
from topics.engine.topic.merges import is_covered
from topics.engine.topic.tags import LOAD_STEP, LoadPart, TagIndex
from topics.engine.upkeep.checkpoint import Checkpointer
from topics.engine.upkeep.recovery_report import RecoveryReport

SEGMENT_UNITS = 500  # cost of reading a segment's index, in roughly microseconds
ROWS_PER_UNIT = 10
DEFERRED_UNITS = 500  # cost of replaying one log entry


@dataclass(slots=True)
class SegmentIndex:
    """The index of one segment, with tag and node ids as stored in its files."""

    rows: Rows
    tags: list[bytes]
    nodes: list[bytes]
    expiries: Rows
    deleted: Mask | None
    lost: list[int] = field(default_factory=list)  # rows that a rebuild could not restore
    index_hash: IndexHash | None = None  # only for an open segment
    rebuilt_index: IndexFiles | None = (
        None  # replacement for a damaged index, to be written before the segment grows
    )


@dataclass(slots=True)
class LoadProgress:
    """The part of a topic that has been read so far."""

    chunks: list[Chunk] = field(default_factory=list)
    tags: TagIndex = field(default_factory=lambda: TagIndex(hold=True))
    nodes: StringTable = field(default_factory=lambda: StringTable(hold=True))
    expiries: list[tuple[int, int]] = field(default_factory=list)
    count: int = 0
    bytes: int = 0
    lost: list[tuple[SegmentMeta, str]] = field(default_factory=list)  # unreadable segments, and why
    lost_seqs: list[int] = field(default_factory=list)  # unreadable records of the other segments


class Loader:
    """Loads topics on demand, cleans up their leftover files and records losses."""

    def __init__(
        self,
        disk: Disk,
        shard: Shard,
        reader: Reader,
        checkpointer: Checkpointer,
        config: EngineConfig,
        report: RecoveryReport,
        cold: SegmentStore | None = None,
    ) -> None:
        self._disk = disk
        self._cold = cold
        self._shard = shard
        self._reader = reader
        self._checkpointer = checkpointer
        self._config = config
        self._report = report
        self._loaded: dict[int, TopicLog] = {}  # topics loaded during recovery
        self._cleaned_up: dict[int, None] = {}  # topics whose leftover files were removed
        # By topic, first seq and generation of a segment: see add_references.
        self._references: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._recovered_from = 0  # newest snapshot at the start
        self._losses: list[tuple[int, int, int, str]] = []  # found during recovery, not logged yet
        self._recovered = False
        self._suspects: dict[int, tuple[TopicLog, list[SegmentMeta]]] = {}

    def load(self, log: TopicLog) -> None:
        """Read a topic's index rows and apply its deferred log entries. An error leaves the topic unchanged."""
        drain(self.steps(log))

    def steps(self, log: TopicLog) -> Work:
        """Load in slices. The topic changes only with the last one, and work that a concurrent load has done is skipped."""
        if log.stored is not None:
            yield from self._read_all(log, log.stored)
        was_deferred = bool(log.deferred)
        while log.deferred:
            log.deferred[0]()
            log.deferred.pop(0)
            yield DEFERRED_UNITS
        if was_deferred and self._recovered:
            self.check_suspects()
            self._shard.state.topic_recovered(log)
        # Only after replay, which may have swapped generations, and only once: files that become obsolete while the
        # engine runs are removed by the checkpointer.
        if log.id in self._cleaned_up:
            return
        if self._recovered:
            self._cleaned_up[log.id] = None
            self._clean_up_files(log)
        else:
            self._loaded[log.id] = log

    def _read_all(self, log: TopicLog, metas: list[SegmentMeta]) -> Work:
        """Build chunks, tags and nodes from the readable segments; record the others as lost."""
        found = LoadProgress()
        if log.inline is not None:
            first_seq, count, data = log.inline
            meta = SegmentMeta(first_seq, rows=count, data_bytes=len(data))
            content = index_of_records("a snapshot row", data, 0, meta, None, log.id)
            yield from self._add(log, found, meta, content)
        for meta in metas if log.inline is None else ():
            try:
                newest, content = self._read_newest(log, meta)
            except (Corrupt, FileNotFoundError) as error:
                found.lost.append((meta, str(error)))
            else:
                yield SEGMENT_UNITS + len(content.rows) // ROWS_PER_UNIT
                yield from self._add(log, found, newest, content)
            if log.stored is not metas or log.dropped:
                return
        self._install(log, found)

    def _read_newest(self, log: TopicLog, meta: SegmentMeta) -> tuple[SegmentMeta, SegmentIndex]:
        """Read the index of a segment, or of a newer generation of it.

        An erase removes the records of a generation as soon as the log names the next one. If the index of the old one is
        damaged as well, only the newer generation can be read.
        """
        try:
            return meta, self._read_segment(log, meta)
        except (Corrupt, FileNotFoundError):
            directory = self._reader.topic_dir(log.id)
            if not self.is_missing(directory, meta):
                raise
            for generation in self._later_generations(directory, meta):
                try:
                    newer = meta_from_sum(self._disk, directory, meta.first_seq, generation, tier=COLD)
                    if newer.rows == meta.rows and not self.is_missing(directory, newer):
                        return newer, self._read_segment(log, newer)
                except (Corrupt, FileNotFoundError) as error:
                    self._report.corrupt.append(str(error))
            raise

    def _later_generations(self, directory: str, meta: SegmentMeta) -> list[int]:
        """Newer generations that have files on the hot tier, newest first."""
        names = [parse_segment_name(name) for name in self._disk.list(directory)]
        found = {name[1] for name in names if name is not None and name[0] == meta.first_seq}
        return sorted((generation for generation in found if generation > meta.generation), reverse=True)

    def _add(self, log: TopicLog, found: LoadProgress, meta: SegmentMeta, content: SegmentIndex) -> Work:
        """Add one segment. Its chunk then holds the only copy of the rows."""
        chunk, live = self._make_chunk(log, meta, content)
        if log.inline is not None:
            # No segment files yet: the frames are in the snapshot row, which is in memory.
            chunk.meta, chunk.stored = None, 0
            chunk.tag_ids, chunk.node_ids, chunk.unmarked = {}, {}, []
            chunk.expiries = list(
                zip(content.expiries["row"].tolist(), content.expiries["time"].tolist(), strict=True)
            )
        found.chunks.append(chunk)
        part = LoadPart(meta.first_seq, chunk.rows["tag"].astype(np.uint32), content.tags, live)
        chunk.rows["tag"] = yield from found.tags.load_steps(part)
        if content.nodes:
            column = chunk.rows["node"]
            counts = np.bincount(column[live], minlength=len(content.nodes) + 1)[1:]
            ids = np.zeros(len(content.nodes) + 1, np.uint32)
            for first in range(0, len(content.nodes), LOAD_STEP):
                names = content.nodes[first : first + LOAD_STEP]
                ids[first + 1 : first + 1 + len(names)] = found.nodes.add_counted(
                    names, counts[first : first + len(names)]
                )
                yield len(names)
            chunk.rows["node"] = np.where(live, ids[column], 0)
        rows, times = content.expiries["row"], content.expiries["time"]
        for first in range(0, len(rows), LOAD_STEP):
            some = slice(first, first + LOAD_STEP)
            for row, time in zip(rows[some].tolist(), times[some].tolist(), strict=True):
                if live[row]:
                    heapq.heappush(found.expiries, (time, meta.first_seq + row))
            yield LOAD_STEP
        found.count += int(live.sum())
        found.bytes += int(chunk.rows["size"][live].sum(dtype=np.int64))
        found.lost_seqs += [meta.first_seq + row for row in content.lost]

    def _install(self, log: TopicLog, found: LoadProgress) -> None:
        """Put the loaded rows into the topic and record unreadable records as lost."""
        if log.inline is not None:
            log.runs = [(log.inline[0], log.inline[2])]
        log.inline, log.stored, log.may_expire = None, None, False
        log.prepend_chunks(found.chunks)
        log.tags, log.nodes, log.expiries = found.tags, found.nodes, found.expiries
        if any(chunk.rebuilt_index is not None for chunk in found.chunks):
            self._shard.state.touched[log.id] = log
        first_seq = log.first_seq
        # If a segment could not be read, the counts of the snapshot are wrong and those of the rows are right.
        self._shard.state.bytes_live += found.bytes - log.bytes
        self._shard.state.records_live += found.count - log.count
        log.count = log.view.count = found.count
        log.bytes = log.view.bytes = found.bytes
        log.advance_first_seq()
        log.view.first_seq = log.first_seq
        for meta, problem in found.lost:
            self.record_lost_segment(log, meta, first_seq, problem)
        for first, last in as_ranges(sorted(seq for seq in found.lost_seqs if seq >= first_seq)):
            self.record_loss(log, first, last, "corrupt")

    def _make_chunk(self, log: TopicLog, meta: SegmentMeta, content: SegmentIndex) -> tuple[Chunk, Mask]:
        live: Mask = content.rows["length"] != 0
        if content.deleted is not None:
            content.rows["flags"][content.deleted] |= frames.DEAD
            live &= ~content.deleted
        # An index rebuilt from records also contains erased ones. They are deleted.
        erased = live & ((content.rows["flags"] & frames.ERASED) != 0)
        content.rows["flags"][erased] |= frames.DEAD
        live &= ~erased
        live[: max(0, log.first_seq - meta.first_seq)] = False
        chunk = Chunk.from_rows(meta, content.rows, self._config.segment_max_events, self._shard.state.now_ms)
        chunk.marked = content.deleted
        chunk.unmarked = [(row, row + 1) for row in np.flatnonzero(erased).tolist()]
        if not meta.sealed:
            chunk.tag_ids = {name: i + 1 for i, name in enumerate(content.tags)}
            chunk.node_ids = {name: i + 1 for i, name in enumerate(content.nodes)}
            chunk.index_hash, chunk.rebuilt_index = content.index_hash, content.rebuilt_index
        return chunk, live

    def _read_segment(self, log: TopicLog, meta: SegmentMeta) -> SegmentIndex:
        """Read the index of one segment; rebuild it from the records if it is damaged."""
        disk, directory = self._disk, self._reader.topic_dir(log.id)
        broken = truncate_to_meta(disk, directory, meta)
        deleted = read_deleted(disk, directory, meta)  # cannot be rebuilt
        summary: Sum | None = None
        if meta.sealed:
            try:
                summary, digest = read_sum(disk, directory, meta.first_seq, meta.generation)
            except (Corrupt, OSError) as error:
                if not _is_unreadable(error):
                    raise
                # Each record has its own digest, so the segment can be read without .sum.
                self._report.rebuilt.append(str(error))
                return self._rebuild(log, meta, deleted)
            self._check_seal(directory, meta, summary, digest)
        try:
            if broken is not None:
                raise broken
            rows = read_rows(disk, directory, meta)
            tags, nodes, expiries = read_dict(disk, directory, meta)
            content = SegmentIndex(rows, tags, nodes, expiries, deleted)
            self._check_index(directory, meta, content, summary)
            return content
        except (Corrupt, UnsupportedFormat, OSError) as error:
            if isinstance(error, OSError) and not _is_unreadable(error):
                raise
            if summary is None and not meta.idx_digest and isinstance(error, UnsupportedFormat):
                raise
            # A digest shows that this version wrote the file, so an unknown format version means corruption.
            self._report.rebuilt.append(str(error))
            return self._rebuild(log, meta, deleted)

    @staticmethod
    def _check_seal(directory: str, meta: SegmentMeta, summary: Sum, digest: bytes) -> None:
        """Check that a sealed segment is the one the snapshot refers to: `link` is the digest of its first seal."""
        path = segment_path(directory, meta, "sum")
        link = summary.origin if any(summary.origin) else digest
        if (summary.rows, summary.data_bytes) != (meta.rows, meta.data_bytes) or link != meta.link:
            raise Corrupt(path, 0, "the segment is not the one that was sealed")

    def _check_index(
        self, directory: str, meta: SegmentMeta, content: SegmentIndex, summary: Sum | None
    ) -> None:
        """Check the digests, from .sum or the snapshot, and that no row points outside the segment."""
        path, rows = segment_path(directory, meta, "idx"), content.rows
        expected = (meta.idx_digest, meta.dict_digest)
        if summary is not None:
            expected = (summary.idx_digest, summary.dict_digest)
        if expected[0]:
            # The digest covers the header too, which was checked when it was read.
            if xxh(header(IDX_MAGIC) + rows.tobytes()) != expected[0]:
                raise Corrupt(path, 0, "the index does not match its digest")
            if meta.dict_bytes:
                dict_path = segment_path(directory, meta, "dict")
                if xxh(read_range(self._disk, dict_path, 0, meta.dict_bytes)) != expected[1]:
                    raise Corrupt(dict_path, 0, "the dictionary does not match its digest")
        if summary is None and not expected[0] and not _is_contiguous(rows, meta):
            raise Corrupt(path, 0, "the index rows are not contiguous and in time order")
        ends = rows["offset"].astype(np.int64) + rows["length"]
        if len(rows) and (
            int(ends.max()) > meta.data_bytes
            or int(rows["tag"].max()) > len(content.tags)
            or int(rows["node"].max()) > len(content.nodes)
            or (rows["flags"] & frames.DEAD).any()
            or (len(content.expiries) and int(content.expiries["row"].max()) >= meta.rows)
        ):
            raise Corrupt(path, 0, "the index points outside its segment")
        if not meta.sealed:
            content.index_hash = IndexHash.from_files(self._disk, directory, meta)

    def _rebuild(self, log: TopicLog, meta: SegmentMeta, deleted: Mask | None) -> SegmentIndex:
        """Rebuild the index (rows, names, expiries) from the records."""
        path = segment_path(self._reader.topic_dir(log.id), meta, "data")
        if meta.tier == COLD and not self._disk.exists(path):
            data = self._read_cold(path, meta)
        else:
            data = read_range(self._disk, path, 0, meta.data_bytes)
        content = index_of_records(path, data, HEADER_BYTES, meta, deleted, log.id)
        if not meta.sealed:
            # The next append extends these names and rows, so they must be written to the files first.
            content.rebuilt_index = IndexFiles.build(
                content.rows, content.tags, content.nodes, content.expiries
            )
            content.index_hash = content.rebuilt_index.hash()
        return content

    def _read_cold(self, path: str, meta: SegmentMeta) -> bytes:
        """Read all records of a segment in the cold tier to rebuild its index. The only cold read that blocks the loop."""
        if self._cold is None:
            raise ColdStoreFailed("records are in the cold tier; set TOPICS_COLD_DIR to read them", path=path)
        try:
            data = self._cold.read_range(path, 0, meta.data_bytes)
        except FileNotFoundError:
            # The tier is reachable and the file is gone, perhaps by an erase that a crash interrupted.
            raise
        except OSError as error:
            raise ColdStoreFailed(f"cannot read {path} from the cold tier: {error}", path=path) from error
        if len(data) != meta.data_bytes:
            raise ColdStoreFailed(f"{path} in the cold tier is truncated", path=path)
        return data

    def restore_index(self, directory: str, first_seq: int, generation: int) -> bool:
        """Restore the index files of a segment from their copies in the cold tier. False if they are identical."""
        if self._cold is None:
            return False
        has_changed = False
        for suffix in INDEX_SUFFIXES:
            path = f"{directory}/{segment_name(first_seq, generation)}.{suffix}"
            try:
                kept = self._cold.read_range(path, 0, self._cold.length(path))
            except OSError:
                continue
            if not self._disk.exists(path) or read_file(self._disk, path) != kept:
                write_whole(self._disk, path, kept)
                has_changed = True
        if has_changed:
            self._disk.sync_dir(directory)
        return has_changed

    def is_missing(self, directory: str, meta: SegmentMeta) -> bool:
        """Whether the cold tier is reachable but does not have the records of this cold segment."""
        if meta.tier != COLD or self._cold is None:
            return False
        try:
            return not self._cold.exists(segment_path(directory, meta, "data"))
        except OSError:
            return False

    def record_lost_segment(self, log: TopicLog, meta: SegmentMeta, first_seq: int, problem: str) -> None:
        first, last = max(meta.first_seq, first_seq), meta.first_seq + meta.rows - 1
        if last >= first and meta.rows:
            self.record_loss(log, first, last, "corrupt")
            self._report.corrupt.append(problem)
            self._shard.state.counters["corrupt"] = self._shard.state.counters.get("corrupt", 0) + 1

    # -- losses --------------------------------------------------------------------------------------------

    def add_suspects(self, log: TopicLog, metas: Sequence[SegmentMeta]) -> None:
        """Note segments that stay in use because their next generation cannot be read, for check_suspects.

        Usually a later log entry replaces them again. If not, they are intact unless an erase, which does not wait for
        snapshots, has removed their records.
        """
        self._suspects.setdefault(log.id, (log, []))[1].extend(metas)

    def check_suspects(self) -> None:
        """After replay, record a loss for suspects that were not replaced and whose records are gone."""
        suspects, self._suspects = self._suspects, {}
        for log, metas in suspects.values():
            directory = self._reader.topic_dir(log.id)
            kept = [meta for meta in metas if any(chunk.meta is meta for chunk in log.chunks)]
            for meta in kept if not log.dropped else ():
                if self.is_missing(directory, meta):
                    problem = f"{segment_path(directory, meta, 'data')} is missing"
                    self.record_lost_segment(log, meta, log.first_seq, problem)

    def record_loss(self, log: TopicLog, first: int, last: int, reason: str) -> None:
        """Record a range of seqs as lost, for readers to see. During recovery it is logged at the end."""
        if log.stored is not None and first < log.next_seq:
            self.load(log)
        op, state = Op(log), self._shard.state
        if self._recovered:
            state.log_if_room(frames.LOSS, log, Lost(first, last, reason), op)
        else:
            log.stage_loss((first, last, reason), op)
            self._losses.append((log.id, first, last, reason))
        state.count_live(op)
        log.publish_now(op)
        state.touched[log.id] = log
        self._report.losses.append((log.name, first, last, reason))

    def loss_frames(self) -> list[bytes]:
        """Log frames for the losses found during recovery."""
        shard = self._shard
        return [
            frames.encode_control(frames.LOSS, topic_id, shard.state.now_ms, [first, last, reason])
            for topic_id, first, last, reason in self._losses
            if topic_id in shard.state.by_id
        ]

    # -- leftovers -----------------------------------------------------------------------------------------

    def finish_recovery(self) -> None:
        """Replay is over: clean up the files of loaded topics, and log losses immediately from now on."""
        self._recovered = True
        self._recovered_from = max((number for number, _ in self._checkpointer.snapshots), default=0)
        for log in self._loaded.values():
            self._cleaned_up[log.id] = None
            if not log.dropped:
                self._clean_up_files(log)
        self._loaded = {}

    def _clean_up_files(self, log: TopicLog) -> None:
        """Remove known leftovers (older generations, unfinished checkpoints, trimmed segments); move others to lost+found."""
        # The snapshot may already contain the delete that emptied a segment, so that replay does not drop the segment.
        if log.drop_dead_chunks():
            self._shard.state.touched[log.id] = log
        directory = self._reader.topic_dir(log.id)
        metas = [chunk.meta for chunk in log.chunks if chunk.meta is not None] + log.dead_segments
        in_use = {(meta.first_seq, meta.generation) for meta in metas}
        cold = {(meta.first_seq, meta.generation) for meta in metas if meta.tier == COLD}
        staged = set() if log.transactions is None else {txn.name for txn in log.transactions.open.values()}
        # Segments that the log replaced: until the next checkpoint, every start replays that and needs them.
        pending = {
            (meta.first_seq, meta.generation) for meta in self._checkpointer.pending_deletions_of(log.id)
        } - in_use
        for name in self._disk.list(directory):
            if name in staged:
                continue
            parsed = parse_segment_name(name)
            if parsed is not None and (parsed[0], parsed[1]) in pending:
                continue
            if parsed is not None and (parsed[0], parsed[1]) in in_use:
                if self._cold is not None and parsed[2] == "data" and (parsed[0], parsed[1]) in cold:
                    # The process stopped after the segment became cold and before its hot copy could be removed.
                    meta = SegmentMeta(parsed[0], parsed[1], tier=COLD)
                    last = self.last_references(log.id, parsed[0], parsed[1])[1]
                    self._checkpointer.delete_hot_copy_later(log.id, meta, last_snapshot=last)
                continue
            snapshot = self.last_references(log.id, parsed[0], parsed[1])[0] if parsed is not None else 0
            if snapshot and parsed is not None:
                self._checkpointer.delete_later(
                    log.id, SegmentMeta(parsed[0], parsed[1]), last_snapshot=snapshot
                )
                continue
            is_leftover = parsed is None and (name.endswith(".tmp") or parse_name(name) is not None)
            if parsed is not None:
                is_leftover = is_known_leftover(log, parsed[0], metas)
            if is_leftover:
                self._disk.remove(f"{directory}/{name}")
            else:
                self._disk.make_dir("lost+found")
                self._disk.rename(f"{directory}/{name}", f"lost+found/{log.id:016x}-{name}")

    def add_references(self, number: int, topic_id: int, metas: Sequence[SegmentMeta]) -> None:
        """Note that a kept snapshot refers to these segments. To be called for the older snapshot first."""
        for meta in metas:
            key = (topic_id, meta.first_seq, meta.generation)
            hot = self._references.get(key, (0, 0))[1] if meta.tier == COLD else number
            self._references[key] = number, hot

    def last_references(self, topic_id: int, first_seq: int, generation: int) -> tuple[int, int]:
        """The newest snapshot from before this start that refers to the segment, and the newest that lists it as hot.

        The next recovery may start from either. 0: there is none.
        """
        snapshots = self._checkpointer.snapshots
        if snapshots and snapshots[0][0] > self._recovered_from:
            self._references = {}  # those snapshots are gone
        return self._references.get((topic_id, first_seq, generation), (0, 0))


def is_known_leftover(log: TopicLog, first_seq: int, metas: list[SegmentMeta]) -> bool:
    """Whether a segment file that no snapshot refers to can be removed: it is known why it was left behind.

    It is another generation, was merged into another segment, lies before the first or after the last segment, or had no
    live records and left a hole. In a lost range it is kept, because it may still be needed.
    """
    covering = max((meta for meta in metas if meta.first_seq <= first_seq), key=_first_of, default=None)
    end = max((meta.first_seq + meta.rows for meta in metas), default=0)
    if first_seq < log.first_seq or first_seq >= end:
        return True
    if covering is not None and first_seq < covering.first_seq + covering.rows:
        return is_covered([covering], first_seq)
    return not any(first <= first_seq <= last for first, last, _ in log.view.losses)


def _first_of(meta: SegmentMeta) -> int:
    return meta.first_seq


def _is_contiguous(rows: Rows, meta: SegmentMeta) -> bool:
    """Whether the frames are contiguous and times never decrease: the only integrity check without a digest."""
    lengths = rows["length"].astype(np.int64)
    starts = HEADER_BYTES + np.cumsum(lengths) - lengths
    times = rows["ts"][rows["ts"] > 0].astype(np.int64)
    return bool(
        HEADER_BYTES + int(lengths.sum()) == meta.data_bytes
        and (rows["offset"][lengths > 0] == starts[lengths > 0]).all()
        and (np.diff(times) >= 0).all()
        and (not len(times) or (int(times[0]), int(times[-1])) == (meta.ts_min, meta.ts_max))
    )


def _is_unreadable(error: Exception) -> bool:
    """Whether a file is damaged or missing, as opposed to temporarily unavailable."""
    return isinstance(error, Corrupt | FileNotFoundError)


def index_of_records(
    path: str, data: bytes, start_at: int, meta: SegmentMeta, deleted: Mask | None, topic_id: int
) -> SegmentIndex:
    """Build an index from contiguous frames that start at `start_at`. Frames of other topics count as damage."""
    starts: list[int] = []
    try:
        frames.frame_starts(data, start_at, len(data), starts)
        columns = frames.decode_columns(data, starts)
    except (ValueError, IndexError, struct.error):  # an invalid length, or a truncated frame header
        raise Corrupt(path, 0, "neither the index nor the records can be read") from None
    tags = StringTable()
    nodes = StringTable()
    rows = np.zeros(meta.rows, dtype=ROW)
    expiries: list[tuple[int, int]] = []
    is_intact = True
    for i, start in enumerate(starts):
        length, kind, flags, topic, seq, ts, node_len, tag_len, data_len = frames.HEADER.unpack_from(
            data, start
        )
        row = seq - meta.first_seq
        ours = (kind, topic) == (frames.APPEND, topic_id) and 0 <= row < meta.rows
        if not ours or not frames.frame_is_valid(data[start : start + length + 4]):
            is_intact = False
            continue
        at = start + frames.HEADER_BYTES
        node, tag = data[at : at + node_len], data[at + node_len : at + node_len + tag_len]
        found = frames.read_extensions(data, start) if flags & frames.HAS_EXT else {}
        size = int.from_bytes(found[frames.EXT_SIZE], "little") if frames.EXT_SIZE in found else data_len
        if frames.EXT_EXPIRES in found:
            expiries.append((row, int.from_bytes(found[frames.EXT_EXPIRES], "little")))
        rows[row] = (
            int(columns.starts[i]), length + 4, ts, flags, (0, 0, 0),
            tags.add(tag) if flags & frames.HAS_TAG else 0,
            nodes.add(node) if flags & frames.HAS_NODE else 0,
            size,
        )  # fmt: skip
    rows["ts"] = np.maximum.accumulate(rows["ts"])  # times never decrease; missing rows get the one before
    # With an invalid record, missing rows cannot be told from deleted ones, so all of them are reported lost.
    absent = rows["length"] == 0 if deleted is None else (rows["length"] == 0) & ~deleted
    return SegmentIndex(
        rows,
        [name or b"" for name in tags.names[1:]],
        [name or b"" for name in nodes.names[1:]],
        np.array(expiries, dtype=EXPIRY),
        deleted,
        [] if is_intact else np.nonzero(absent)[0].tolist(),
    )
