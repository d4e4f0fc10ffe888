"""First touch: a topic's index rows, tags and nodes from its segments, and what cannot be read announced as lost."""

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
from topics.engine.shard.staging import as_ranges
from topics.engine.shard.state_machine import Shard
from topics.engine.storage import frames
from topics.engine.storage.cold_files import INDEX_SUFFIXES
from topics.engine.storage.files import HEADER_BYTES, header, read_file, read_range, write_whole, xxh
from topics.engine.storage.index import Chunk
from topics.engine.storage.marks import read_deleted
from topics.engine.storage.sealing import Sum, meta_from_sum, read_sum
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
    cut_to_meta,
    parse_segment_name,
    read_dict,
    read_rows,
    segment_name,
    segment_path,
)
from topics.engine.storage.strings import StringTable
from topics.engine.storage.transaction_file import parse_name
from topics.engine.topic.log import Op, TopicLog
from topics.engine.topic.merges import covered
from topics.engine.topic.tags import LOAD_STEP, LoadPart, TagIndex
from topics.engine.upkeep.checkpoint import Checkpointer
from topics.engine.upkeep.recovery_report import RecoveryReport

SEGMENT_UNITS = 500  # of reading a segment's index, in about microseconds
ROWS_PER_UNIT = 10
DEFERRED_UNITS = 500  # of replaying one entry of the log


@dataclass(slots=True)
class SegmentIndex:
    """The index of one segment, with ids as in its files."""

    rows: Rows
    tags: list[bytes]
    nodes: list[bytes]
    expiries: Rows
    deleted: Mask | None
    lost: list[int] = field(default_factory=list)  # rows that a rebuild could not find again
    hashed: IndexHash | None = None  # of a segment that goes on growing
    mended: IndexFiles | None = None  # to be written before it grows on: its own index is damaged


@dataclass(slots=True)
class LoadProgress:
    """What was read of a topic so far."""

    chunks: list[Chunk] = field(default_factory=list)
    tags: TagIndex = field(default_factory=lambda: TagIndex(hold=True))
    nodes: StringTable = field(default_factory=lambda: StringTable(hold=True))
    expiries: list[tuple[int, int]] = field(default_factory=list)
    count: int = 0
    bytes: int = 0
    lost: list[tuple[SegmentMeta, str]] = field(default_factory=list)  # that cannot be read, and why
    gone: list[int] = field(default_factory=list)  # seqs of the others that cannot


class Loader:
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
        self._loaded: dict[int, TopicLog] = {}  # touched before recovery was over
        self._sorted: dict[int, None] = {}  # topics whose leftover files were looked at
        self._named: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._recovered_from = 0  # the newest snapshot that there was
        self._announcements: list[tuple[int, int, int, str]] = []
        self._recovered = False
        self._doubts: dict[int, tuple[TopicLog, list[SegmentMeta]]] = {}

    def load(self, log: TopicLog) -> None:
        """Read a topic's index rows, and do what replay put off. An error leaves everything as it was."""
        drain(self.steps(log))

    def steps(self, log: TopicLog) -> Work:
        """The same in slices. Until the last of them the topic is as it was, and what another load has done meanwhile is not done
        again.
        """
        if log.stored is not None:
            yield from self._read_all(log, log.stored)
        was_deferred = bool(log.deferred)
        while log.deferred:
            log.deferred[0]()
            log.deferred.pop(0)
            yield DEFERRED_UNITS
        if was_deferred and self._recovered:
            self.settle_doubts()
            self._shard.consumers_recovered(log)
        # Only now is it known which generations count: replay may have swapped some. Once is enough: what a topic
        # leaves behind while the engine runs is in the checkpointer's hands.
        if log.id in self._sorted:
            return
        if self._recovered:
            self._sorted[log.id] = None
            self._sort_out_files(log)
        else:
            self._loaded[log.id] = log

    def _read_all(self, log: TopicLog, metas: list[SegmentMeta]) -> Work:
        """Make chunks, tags and nodes of the segments that can be read; announce those that cannot."""
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
        self._adopt(log, found)

    def _read_newest(self, log: TopicLog, meta: SegmentMeta) -> tuple[SegmentMeta, SegmentIndex]:
        """The index of a segment. An erase takes the records of a generation away as soon as the log names the next one: where the
        index of the old one is damaged as well, the next one is taken at once.
        """
        try:
            return meta, self._read_segment(log, meta)
        except (Corrupt, FileNotFoundError):
            directory = self._reader.topic_dir(log.id)
            if not self.is_gone(directory, meta):
                raise
            for generation in self._later_generations(directory, meta):
                try:
                    newer = meta_from_sum(self._disk, directory, meta.first_seq, generation, tier=COLD)
                    if newer.rows == meta.rows and not self.is_gone(directory, newer):
                        return newer, self._read_segment(log, newer)
                except (Corrupt, FileNotFoundError) as error:
                    self._report.rotten.append(str(error))
            raise

    def _later_generations(self, directory: str, meta: SegmentMeta) -> list[int]:
        """Those that have an index on the hot tier, the newest first."""
        names = [parse_segment_name(name) for name in self._disk.list(directory)]
        found = {name[1] for name in names if name is not None and name[0] == meta.first_seq}
        return sorted((generation for generation in found if generation > meta.generation), reverse=True)

    def _add(self, log: TopicLog, found: LoadProgress, meta: SegmentMeta, content: SegmentIndex) -> Work:
        """One segment more. From here on its chunk holds the only copy of the rows."""
        chunk, live = self._make_chunk(log, meta, content)
        if log.inline is not None:
            # No files yet: the rows lie in the snapshot's row, which is in memory.
            chunk.meta, chunk.stored = None, 0
            chunk.tag_ids, chunk.node_ids, chunk.unmarked = {}, {}, []
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
        found.gone += [meta.first_seq + row for row in content.lost]

    def _adopt(self, log: TopicLog, found: LoadProgress) -> None:
        """The topic is in memory from here on; what could not be read is announced."""
        if log.inline is not None:
            log.runs = [(log.inline[0], log.inline[2])]
        log.inline, log.stored, log.may_expire = None, None, False
        log.adopt(found.chunks)
        log.tags, log.nodes, log.expiries = found.tags, found.nodes, found.expiries
        if any(chunk.mended is not None for chunk in found.chunks):
            self._shard.touched[log.id] = log
        first_seq = log.first_seq
        # The rows are the truth when a segment could not be read.
        self._shard.bytes_live += found.bytes - log.bytes
        self._shard.records_live += found.count - log.count
        log.count = log.view.count = found.count
        log.bytes = log.view.bytes = found.bytes
        log.settle_first()
        log.view.first_seq = log.first_seq
        for meta, problem in found.lost:
            self.lose_segment(log, meta, first_seq, problem)
        for first, last in as_ranges(sorted(seq for seq in found.gone if seq >= first_seq)):
            self.announce(log, first, last, "corrupt")

    def _make_chunk(self, log: TopicLog, meta: SegmentMeta, content: SegmentIndex) -> tuple[Chunk, Mask]:
        live: Mask = content.rows["length"] != 0
        if content.deleted is not None:
            content.rows["flags"][content.deleted] |= frames.DEAD
            live &= ~content.deleted
        # An index made from records shows which of them were erased, and so deleted.
        erased = live & ((content.rows["flags"] & frames.ERASED) != 0)
        content.rows["flags"][erased] |= frames.DEAD
        live &= ~erased
        live[: max(0, log.first_seq - meta.first_seq)] = False
        chunk = Chunk.loaded(meta, content.rows, self._config.segment_max_events, self._shard.now_ms)
        chunk.marked = content.deleted
        chunk.unmarked = [(row, row + 1) for row in np.flatnonzero(erased).tolist()]
        if not meta.sealed:
            chunk.tag_ids = {name: i + 1 for i, name in enumerate(content.tags)}
            chunk.node_ids = {name: i + 1 for i, name in enumerate(content.nodes)}
            chunk.hashed, chunk.mended = content.hashed, content.mended
        return chunk, live

    def _read_segment(self, log: TopicLog, meta: SegmentMeta) -> SegmentIndex:
        """The index of one segment; rebuilt from its records when it is damaged and they are not."""
        disk, directory = self._disk, self._reader.topic_dir(log.id)
        broken = cut_to_meta(disk, directory, meta)
        deleted = read_deleted(disk, directory, meta)  # nothing can make these again
        summary: Sum | None = None
        if meta.sealed:
            try:
                summary, digest = read_sum(disk, directory, meta.first_seq, meta.generation)
            except (Corrupt, OSError) as error:
                if not _is_unreadable(error):
                    raise
                # The records have digests of their own.
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
            # A digest of this version vouches for the rest: another version there is rot.
            self._report.rebuilt.append(str(error))
            return self._rebuild(log, meta, deleted)

    @staticmethod
    def _check_seal(directory: str, meta: SegmentMeta, summary: Sum, digest: bytes) -> None:
        """A sealed segment must be the one that the snapshot knows: `link` ends its first seal."""
        path = segment_path(directory, meta, "sum")
        link = summary.origin if any(summary.origin) else digest
        if (summary.rows, summary.data_bytes) != (meta.rows, meta.data_bytes) or link != meta.link:
            raise Corrupt(path, 0, "this is another segment than the one that was sealed")

    def _check_index(
        self, directory: str, meta: SegmentMeta, content: SegmentIndex, summary: Sum | None
    ) -> None:
        """Digests, from .sum or from the snapshot; and that nothing points outside."""
        path, rows = segment_path(directory, meta, "idx"), content.rows
        wanted = (meta.idx_digest, meta.dict_digest)
        if summary is not None:
            wanted = (summary.idx_digest, summary.dict_digest)
        if wanted[0]:
            # The header was checked when it was read; the digest is of both.
            if xxh(header(IDX_MAGIC) + rows.tobytes()) != wanted[0]:
                raise Corrupt(path, 0, "the index does not agree with its digest")
            if meta.dict_bytes:
                dict_path = segment_path(directory, meta, "dict")
                if xxh(read_range(self._disk, dict_path, 0, meta.dict_bytes)) != wanted[1]:
                    raise Corrupt(dict_path, 0, "the dictionary does not agree with its digest")
        if summary is None and not wanted[0] and not _grew_in_order(rows, meta):
            raise Corrupt(path, 0, "the index is not that of records added one after the other")
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
            content.hashed = IndexHash.of_files(self._disk, directory, meta)

    def _rebuild(self, log: TopicLog, meta: SegmentMeta, deleted: Mask | None) -> SegmentIndex:
        """Rows, names and expiries again from the records themselves."""
        path = segment_path(self._reader.topic_dir(log.id), meta, "data")
        if meta.tier == COLD and not self._disk.exists(path):
            data = self._read_cold(path, meta)
        else:
            data = read_range(self._disk, path, 0, meta.data_bytes)
        content = index_of_records(path, data, HEADER_BYTES, meta, deleted, log.id)
        if not meta.sealed:
            # What is added next goes by these names and rows, so they must be in the files before it.
            content.mended = IndexFiles.of(content.rows, content.tags, content.nodes, content.expiries)
            content.hashed = content.mended.hash()
        return content

    def _read_cold(self, path: str, meta: SegmentMeta) -> bytes:
        """The one read of the cold tier that the loop waits for: an index on the hot tier is damaged."""
        if self._cold is None:
            raise ColdStoreFailed("records are in the cold tier; set TOPICS_COLD_DIR to read them", path=path)
        try:
            data = self._cold.read_range(path, 0, meta.data_bytes)
        except FileNotFoundError:
            # The tier is there and the file is not: gone as on the hot tier, and by an erase if a crash stopped that halfway.
            raise
        except OSError as error:
            raise ColdStoreFailed(f"{path} of the cold tier cannot be read: {error}", path=path) from error
        if len(data) != meta.data_bytes:
            raise ColdStoreFailed(f"{path} of the cold tier ends early", path=path)
        return data

    def fetch_index(self, directory: str, first_seq: int, generation: int) -> bool:
        """Put what a segment in the cold tier has there beside its records in the place of what is here. False: it is the same."""
        if self._cold is None:
            return False
        is_other = False
        for suffix in INDEX_SUFFIXES:
            path = f"{directory}/{segment_name(first_seq, generation)}.{suffix}"
            try:
                kept = self._cold.read_range(path, 0, self._cold.length(path))
            except OSError:
                continue
            if not self._disk.exists(path) or read_file(self._disk, path) != kept:
                write_whole(self._disk, path, kept)
                is_other = True
        if is_other:
            self._disk.sync_dir(directory)
        return is_other

    def is_gone(self, directory: str, meta: SegmentMeta) -> bool:
        """Whether the cold tier can be asked, and does not have the records of a segment that is there."""
        if meta.tier != COLD or self._cold is None:
            return False
        try:
            return not self._cold.exists(segment_path(directory, meta, "data"))
        except OSError:
            return False

    def lose_segment(self, log: TopicLog, meta: SegmentMeta, first_seq: int, problem: str) -> None:
        first, last = max(meta.first_seq, first_seq), meta.first_seq + meta.rows - 1
        if last >= first and meta.rows:
            self.announce(log, first, last, "corrupt")
            self._report.rotten.append(problem)
            self._shard.counters["corrupt"] = self._shard.counters.get("corrupt", 0) + 1

    # -- losses --------------------------------------------------------------------------------------------

    def doubt(self, log: TopicLog, metas: Sequence[SegmentMeta]) -> None:
        """Segments that stay because their next generation cannot be read. Mostly because a later one has replaced that too, which
        the log tells in the end; else they are whole, unless an erase, which waits for no snapshot, took their records away.
        """
        self._doubts.setdefault(log.id, (log, []))[1].extend(metas)

    def settle_doubts(self) -> None:
        """All of the log was replayed: what nothing has replaced and is not there is lost."""
        doubts, self._doubts = self._doubts, {}
        for log, metas in doubts.values():
            directory = self._reader.topic_dir(log.id)
            kept = [meta for meta in metas if any(chunk.meta is meta for chunk in log.chunks)]
            for meta in kept if not log.dropped else ():
                if self.is_gone(directory, meta):
                    problem = f"{segment_path(directory, meta, 'data')} is gone"
                    self.lose_segment(log, meta, log.first_seq, problem)

    def announce(self, log: TopicLog, first: int, last: int, reason: str) -> None:
        """A range is gone and readers must hear of it; logged at the end of recovery."""
        if log.stored is not None and first < log.next_seq:
            self.load(log)
        op = Op(log)
        log.stage_loss((first, last, reason), op)
        self._shard.count_live(op)
        log.publish_found(op)
        self._shard.touched[log.id] = log
        self._report.losses.append((log.name, first, last, reason))
        if self._recovered:
            frame = frames.encode_control(frames.LOSS, log.id, self._shard.now_ms, [first, last, reason])
            if self._shard.read_only is None and self._shard.has_room(len(frame)):
                self._shard.add_frame(frame)
        else:
            self._announcements.append((log.id, first, last, reason))

    def announcements(self) -> list[bytes]:
        """The frames that log what was lost so far."""
        shard = self._shard
        return [
            frames.encode_control(frames.LOSS, topic_id, shard.now_ms, [first, last, reason])
            for topic_id, first, last, reason in self._announcements
            if topic_id in shard.by_id
        ]

    # -- leftovers -----------------------------------------------------------------------------------------

    def recovered(self) -> None:
        """Replay is over: which generations count is known, and losses found from now on are logged at once."""
        self._recovered = True
        self._recovered_from = max((number for number, _ in self._checkpointer.snapshots), default=0)
        for log in self._loaded.values():
            self._sorted[log.id] = None
            if not log.dropped:
                self._sort_out_files(log)
        self._loaded = {}

    def _sort_out_files(self, log: TopicLog) -> None:
        """Remove files that are explained (older generations, crashed checkpoints, dead fronts); keep the rest aside."""
        # A checkpoint may know of a delete that was not yet synced, and name what that one emptied: no replay lets go of it then.
        if log.reclaim():
            self._shard.touched[log.id] = log
        directory = self._reader.topic_dir(log.id)
        metas = [chunk.meta for chunk in log.chunks if chunk.meta is not None] + log.doomed
        named = {(meta.first_seq, meta.generation) for meta in metas}
        cold = {(meta.first_seq, meta.generation) for meta in metas if meta.tier == COLD}
        staged = set() if log.transactions is None else {txn.name for txn in log.transactions.open.values()}
        # What the log replaced again goes with a checkpoint: until then every start replays how it came to that.
        doomed = {
            (meta.first_seq, meta.generation) for meta in self._checkpointer.pending_deletions_of(log.id)
        } - named
        for name in self._disk.list(directory):
            if name in staged:
                continue
            parsed = parse_segment_name(name)
            if parsed is not None and (parsed[0], parsed[1]) in doomed:
                continue
            if parsed is not None and (parsed[0], parsed[1]) in named:
                if self._cold is not None and parsed[2] == "data" and (parsed[0], parsed[1]) in cold:
                    # Left by a stop between the flip and the end: it was not to be removed yet.
                    meta = SegmentMeta(parsed[0], parsed[1], tier=COLD)
                    last = self.last_naming(log.id, parsed[0], parsed[1])[1]
                    self._checkpointer.delete_hot_copy_later(log.id, meta, last_snapshot=last)
                continue
            snapshot = self.last_naming(log.id, parsed[0], parsed[1])[0] if parsed is not None else 0
            if snapshot and parsed is not None:
                self._checkpointer.delete_later(
                    log.id, SegmentMeta(parsed[0], parsed[1]), last_snapshot=snapshot
                )
                continue
            explained = parsed is None and (name.endswith(".tmp") or parse_name(name) is not None)
            if parsed is not None:
                explained = is_explained(log, parsed[0], metas)
            if explained:
                self._disk.remove(f"{directory}/{name}")
            else:
                self._disk.make_dir("lost+found")
                self._disk.rename(f"{directory}/{name}", f"lost+found/{log.id:016x}-{name}")

    def note_named(self, number: int, topic_id: int, metas: Sequence[SegmentMeta]) -> None:
        """A kept snapshot names these segments. The older one first."""
        for meta in metas:
            key = (topic_id, meta.first_seq, meta.generation)
            hot = self._named.get(key, (0, 0))[1] if meta.tier == COLD else number
            self._named[key] = number, hot

    def last_naming(self, topic_id: int, first_seq: int, generation: int) -> tuple[int, int]:
        """The newest snapshot of before this start that names this segment, and the newest that calls it hot: the next
        recovery may start from it. 0: none does."""
        snapshots = self._checkpointer.snapshots
        if snapshots and snapshots[0][0] > self._recovered_from:
            self._named = {}  # those are gone
        return self._named.get((topic_id, first_seq, generation), (0, 0))


def is_explained(log: TopicLog, first_seq: int, metas: list[SegmentMeta]) -> bool:
    """Whether it is known why a file that begins at this seq is left, though no snapshot names it: of another generation, merged
    into another one, dead at the front, beyond the end, or dead in the middle, where it left a hole. What was lost there may be
    wanted yet.
    """
    covering = max((meta for meta in metas if meta.first_seq <= first_seq), key=_first_of, default=None)
    end = max((meta.first_seq + meta.rows for meta in metas), default=0)
    if first_seq < log.first_seq or first_seq >= end:
        return True
    if covering is not None and first_seq < covering.first_seq + covering.rows:
        return covered([covering], first_seq)
    return not any(first <= first_seq <= last for first, last, _ in log.view.losses)


def _first_of(meta: SegmentMeta) -> int:
    return meta.first_seq


def _grew_in_order(rows: Rows, meta: SegmentMeta) -> bool:
    """Whether frames lie back to back and times never decrease: all that shows rot where there is no digest."""
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
    """Whether a file is damaged or gone, and not just out of reach for now."""
    return isinstance(error, Corrupt | FileNotFoundError)


def index_of_records(
    path: str, data: bytes, start_at: int, meta: SegmentMeta, deleted: Mask | None, topic_id: int
) -> SegmentIndex:
    """An index made from frames that lie back to back from `start_at` on. One of another topic is no record here."""
    starts: list[int] = []
    try:
        frames.frame_starts(data, start_at, len(data), starts)
        columns = frames.decode_columns(data, starts)
    except (ValueError, IndexError, struct.error):  # lengths that lead nowhere, or to a head that is cut off
        raise Corrupt(path, 0, "neither the index nor the records can be read") from None
    tags = StringTable()
    nodes = StringTable()
    rows = np.zeros(meta.rows, dtype=ROW)
    expiries: list[tuple[int, int]] = []
    whole = True
    for i, start in enumerate(starts):
        length, kind, flags, topic, seq, ts, node_len, tag_len, data_len = frames.HEADER.unpack_from(
            data, start
        )
        row = seq - meta.first_seq
        ours = (kind, topic) == (frames.APPEND, topic_id) and 0 <= row < meta.rows
        if not ours or not frames.frame_is_valid(data[start : start + length + 4]):
            whole = False
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
    rows["ts"] = np.maximum.accumulate(rows["ts"])  # time never decreases, also over the dead
    # With a bad record among them nobody knows which absent rows were dead before: all are announced.
    absent = rows["length"] == 0 if deleted is None else (rows["length"] == 0) & ~deleted
    return SegmentIndex(
        rows,
        [name or b"" for name in tags.names[1:]],
        [name or b"" for name in nodes.names[1:]],
        np.array(expiries, dtype=EXPIRY),
        deleted,
        [] if whole else np.nonzero(absent)[0].tolist(),
    )
