"""Recovery: snapshot, then the log through the same changes that live operation makes.

1. Replay erase intents. 2. Newest valid snapshot. 3. Scan the log files; decide torn, void or rotten. 4. Copy what is
not known to be synced into a fresh file, as one envelope, and sync it: a page-cache hit proves nothing. 5. Replay.
6. Announce what a power cut took. Crashing anywhere in here and starting again gives the same result: the fresh file
counts only when its one envelope is whole, and then it makes the tails of older files void.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from topics.engine import frames, limits
from topics.engine.checkpoint import LATCH_MARK, Checkpointer, ShardRow, TopicRow, remove_tree
from topics.engine.config import EngineConfig
from topics.engine.errors import Corrupt, LogGap
from topics.engine.files import ensure_dir, read_file
from topics.engine.frames import Columns
from topics.engine.index import SMALL, Chunk
from topics.engine.intents import apply_patches, finish_intent, pending_intents
from topics.engine.ports import Disk
from topics.engine.reader import Reader
from topics.engine.segments import (
    SegmentMeta,
    cut_to_meta,
    meta_from_sum,
    parse_segment_name,
    read_deleted,
    read_dict,
    read_rows,
)
from topics.engine.shard import ID_STEP, ConfigChanged, Deletion, EraseRequest, Shard, TimeCeiling, TopicCreated
from topics.engine.snapshot import list_snapshots, read_snapshot, remove_unfinished
from topics.engine.tags import LoadPart
from topics.engine.topic_log import Op, TopicLog
from topics.engine.wal import (
    ENVELOPE_BYTES,
    FILE_HEADER_BYTES,
    Envelope,
    ScannedFile,
    Wal,
    WalFile,
    WalStart,
    file_number,
    scan,
)

_Lsns = npt.NDArray[np.uint64]


@dataclass(slots=True)
class RecoveryReport:
    """What was found; for logs, readiness and `verify`."""

    snapshot: int = 0
    skipped_snapshots: list[str] = field(default_factory=list)
    replayed_lsn: int = 0
    replayed_frames: int = 0
    torn: list[str] = field(default_factory=list)
    rotten: list[str] = field(default_factory=list)
    losses: list[tuple[str, int, int, str]] = field(default_factory=list)
    power_cut: bool = False


class Recovery:
    def __init__(
        self,
        disk: Disk,
        shard: Shard,
        wal: Wal,
        reader: Reader,
        checkpointer: Checkpointer,
        config: EngineConfig,
    ) -> None:
        self._disk = disk
        self._shard = shard
        self._wal = wal
        self._reader = reader
        self._checkpointer = checkpointer
        self._config = config
        self.report = RecoveryReport()
        self._meta_dir = checkpointer.meta_dir
        self._base_lsn = 0
        self._applied_lsn = 0  # the highest entry that any snapshot row contains
        self._clean_lsn = 0
        self._time: tuple[int, int, int, str] | None = None  # ceiling, now, monotonic, boot id
        self._known_synced = 0
        self._announcements: list[tuple[int, int, int, str]] = []
        self._recovered = False
        self._loaded: dict[int, TopicLog] = {}
        self._deleted: dict[int, None] = {}  # topics that the log deletes
        self._named: dict[tuple[int, int, int], int] | None = None
        shard.loader = self._load

    def steps(self) -> Generator[float, None, None]:
        for directory in (self._wal.directory, self._meta_dir, self._config.topics_dir):
            ensure_dir(self._disk, directory)
        for number, patches in pending_intents(self._disk, self._meta_dir):
            apply_patches(self._disk, patches)
            finish_intent(self._disk, self._meta_dir, number)
        remove_unfinished(self._disk, self._meta_dir)
        yield 0.0
        self._load_snapshot()
        yield 0.1
        scanned = self._scan_files()
        good, boot_id = self._decide(scanned)
        yield 0.5
        yield from self._replay(good, boot_id)
        yield from (0.95 for _ in self._clear_orphans())
        if self._shard.read_only is None and self._disk.exists(f"{self._meta_dir}/{LATCH_MARK}"):
            self._disk.remove(f"{self._meta_dir}/{LATCH_MARK}")
            self._disk.sync_dir(self._meta_dir)
        yield 1.0

    # -- snapshot ------------------------------------------------------------------------------------------

    def _load_snapshot(self) -> None:
        decode_shard = msgspec.msgpack.Decoder(ShardRow).decode
        decode_topic = msgspec.msgpack.Decoder(TopicRow).decode
        found: list[tuple[int, int]] = []
        chosen: tuple[ShardRow, list[bytes]] | None = None
        for number in reversed(list_snapshots(self._disk, self._meta_dir)):
            try:
                head, rows = read_snapshot(self._disk, self._meta_dir, number)
                shard_row = decode_shard(head)
            except (Corrupt, msgspec.ValidationError, msgspec.DecodeError) as error:
                self.report.skipped_snapshots.append(f"snapshot {number}: {error}")
                continue
            found.insert(0, (number, shard_row.base_lsn))
            if chosen is None:
                chosen = shard_row, rows
        self._checkpointer.snapshots = found[-2:]
        if chosen is None:
            return
        shard_row, rows = chosen
        self.report.snapshot = shard_row.number
        self._base_lsn = self._applied_lsn = shard_row.base_lsn
        self._clean_lsn = shard_row.clean_lsn
        self._shard.next_id = max(self._shard.next_id, shard_row.next_id)
        self._time = (shard_row.time_ceiling_ms, shard_row.now_ms, shard_row.mono_ms, shard_row.boot_id)
        for raw in rows:
            row = decode_topic(raw)
            self._checkpointer.rows[row.id] = bytes(raw)
            self._restore_topic(row)

    def _restore_topic(self, row: TopicRow) -> None:
        log = self._shard.new_log(row.id, row.name, row.config)
        view = log.view
        view.head, view.first_seq, view.count, view.bytes = row.head, row.first_seq, row.count, row.live_bytes
        view.cap_lost, view.ttl_lost, view.losses = row.cap_lost, row.ttl_lost, row.losses
        view.last_write_ts, log.applied_lsn = row.last_write_ts, row.applied_lsn
        log.next_seq, log.first_seq, log.count, log.bytes = (
            row.head + 1,
            row.first_seq,
            row.count,
            row.live_bytes,
        )
        log.cap_lost, log.ttl_lost = row.cap_lost, row.ttl_lost
        log.ceiling = log.ceiling_synced = row.ceiling
        log.sum_chain = row.sum_chain
        log.may_expire = row.may_expire
        for key, entry in row.dedupe:
            log.dedupe.entries[key] = entry
        for ranges in row.erasing:
            self._resume_erase(log, ranges)
        self._applied_lsn = max(self._applied_lsn, row.applied_lsn)
        self._enlist(log)
        if row.segments:
            log.stored = row.segments
        if row.ram_ranges:
            # Records of an ephemeral topic: gone by design, and announced.
            log.stored = row.segments
            self._load(log)
            for first, last in row.ram_ranges:
                if last >= row.first_seq:
                    self._announce(log, max(first, row.first_seq), last, "crash")

    def _enlist(self, log: TopicLog) -> None:
        shard = self._shard
        shard.staged[log.name] = shard.published[log.name] = log
        shard.by_id[log.id] = log
        shard.names.add(log.name)
        shard.bytes_live += log.bytes

    def _resume_erase(self, log: TopicLog, ranges: list[tuple[int, int]]) -> None:
        ranges = [(first, last) for first, last in ranges]
        log.erasing.append(ranges)
        self._shard.erase_requests.append(EraseRequest(log, ranges, None, None))

    # -- first touch ---------------------------------------------------------------------------------------

    def _load(self, log: TopicLog) -> None:
        """Read a topic's index rows, and do what replay put off."""
        log.may_expire = False
        if log.stored is not None:
            metas, log.stored = log.stored, None
            self._load_segments(log, metas)
        deferred, log.deferred = log.deferred, []
        for work in deferred:
            work()
        # Only now is it known which generations count: replay may have swapped some.
        if self._recovered:
            self._sort_out_files(log)
        else:
            self._loaded[log.id] = log

    def _load_segments(self, log: TopicLog, metas: list[SegmentMeta]) -> None:
        directory = self._reader.topic_dir(log.id)
        chunks: list[Chunk] = []
        parts: list[LoadPart] = []
        node_parts: list[tuple[Chunk, list[bytes], npt.NDArray[np.bool_]]] = []
        for meta in metas:
            try:
                cut_to_meta(self._disk, directory, meta)
                rows = read_rows(self._disk, directory, meta)
                tags, nodes, expiries = read_dict(self._disk, directory, meta)
                deleted = read_deleted(self._disk, directory, meta)
            except (Corrupt, FileNotFoundError) as error:
                self._lose_segment(log, meta, str(error))
                continue
            live = rows["length"] != 0
            if deleted is not None:
                rows["flags"][deleted] |= frames.DEAD
                live &= ~deleted
            live[: max(0, log.first_seq - meta.first_seq)] = False
            chunk = Chunk.loaded(meta, rows, self._config.segment_max_events, self._shard.now_ms)
            if not meta.sealed:
                chunk.tag_ids = {name: i + 1 for i, name in enumerate(tags)}
                chunk.node_ids = {name: i + 1 for i, name in enumerate(nodes)}
            chunks.append(chunk)
            parts.append(LoadPart(meta.first_seq, chunk.rows["tag"].astype(np.uint32), tags, live))
            node_parts.append((chunk, nodes, live))
            for entry in expiries:
                if live[int(entry["row"])]:
                    heapq.heappush(log.expiries, (int(entry["time"]), meta.first_seq + int(entry["row"])))
        log.adopt(chunks)
        for chunk, ids in zip(chunks, log.tags.load(parts), strict=True):
            chunk.rows["tag"] = ids
        for chunk, names, live in node_parts:
            column = chunk.rows["node"]
            if names:
                counts = np.bincount(column[live], minlength=len(names) + 1)[1:]
                mapping = np.concatenate([np.zeros(1, np.uint32), log.nodes.add_counted(names, counts)])
                chunk.rows["node"] = np.where(live, mapping[column], 0)
        self._shard.bytes_live -= log.bytes
        self._recount(log)
        self._shard.bytes_live += log.bytes

    @staticmethod
    def _recount(log: TopicLog) -> None:
        """Counts from the rows: they are the truth when a segment could not be read."""
        count = size = 0
        for chunk, first, stop in log.spans(log.first_seq, log.next_seq):
            alive = chunk.live(first, stop, frames.DEAD)
            count += int(alive.sum())
            size += int(chunk.rows["size"][first:stop][alive].sum(dtype=np.int64))
        log.count = log.view.count = count
        log.bytes = log.view.bytes = size
        log.settle_first()
        log.view.first_seq = log.first_seq

    def _lose_segment(self, log: TopicLog, meta: SegmentMeta, problem: str) -> None:
        first, last = max(meta.first_seq, log.first_seq), meta.first_seq + meta.rows - 1
        if last >= first and meta.rows:
            self._announce(log, first, last, "corrupt")
            self.report.rotten.append(problem)
            self._shard.counters["corrupt"] = self._shard.counters.get("corrupt", 0) + 1

    def _sort_out_files(self, log: TopicLog) -> None:
        """Remove files that are explained (older generations, crashed checkpoints, dead fronts); keep the rest aside."""
        directory = self._reader.topic_dir(log.id)
        metas = [chunk.meta for chunk in log.chunks if chunk.meta is not None] + log.doomed
        named = {(meta.first_seq, meta.generation) for meta in metas}
        firsts = {meta.first_seq for meta in metas}
        end = max((meta.first_seq + meta.rows for meta in metas), default=0)
        for name in self._disk.list(directory):
            parsed = parse_segment_name(name)
            if parsed is not None and (parsed[0], parsed[1]) in named:
                continue
            snapshot = self._last_naming(log.id, parsed)
            if snapshot is not None and parsed is not None:
                self._checkpointer.doom(log.id, SegmentMeta(parsed[0], parsed[1]), last_snapshot=snapshot)
                continue
            explained = parsed is None and name.endswith(".tmp")
            if parsed is not None:
                explained = parsed[0] in firsts or parsed[0] < log.first_seq or parsed[0] >= end
            if explained:
                self._disk.remove(f"{directory}/{name}")
            else:
                self._disk.make_dir("lost+found")
                self._disk.rename(f"{directory}/{name}", f"lost+found/{log.id:016x}-{name}")

    def _last_naming(self, topic_id: int, parsed: tuple[int, int, str] | None) -> int | None:
        """The newest kept snapshot that names this file: the next recovery may start from it."""
        if self._named is None:
            self._named = {}
            for number, _ in self._checkpointer.snapshots:
                for raw in read_snapshot(self._disk, self._meta_dir, number)[1]:
                    row = msgspec.msgpack.decode(raw, type=TopicRow)
                    for meta in row.segments:
                        self._named[(row.id, meta.first_seq, meta.generation)] = number
        return self._named.get((topic_id, parsed[0], parsed[1])) if parsed is not None else None

    # -- the log -------------------------------------------------------------------------------------------

    def _scan_files(self) -> list[ScannedFile]:
        found: list[ScannedFile] = []
        for name in self._disk.list(self._wal.directory):
            number = file_number(name)
            if number is None:
                continue
            path = f"{self._wal.directory}/{name}"
            self._wal.next_number = max(self._wal.next_number, number + 1)
            scanned = scan(path, number, read_file(self._disk, path))
            if scanned is None or not scanned.envelopes:
                self._disk.remove(path)  # a spare that was never used, or never finished
                if scanned is not None and scanned.bad_at:
                    self.report.torn.append(f"{path} at byte {scanned.bad_at[0]}")
                continue
            found.append(scanned)
        found.sort(key=lambda file: file.number)
        return found

    def _decide(self, files: list[ScannedFile]) -> tuple[list[tuple[ScannedFile, list[Envelope]]], str]:
        """Which envelopes count, in order. Sets the shard read-only when synced ones are missing."""
        boot_id = ""
        starts: list[WalStart | None] = []
        for file in files:
            starts.append(self._start_of(file))
        # A later file's start makes what lies past its previous_lsn in earlier files void.
        void_after = [1 << 64] * len(files)
        bound = 1 << 64
        for i in range(len(files) - 1, -1, -1):
            void_after[i] = bound
            start = starts[i]
            if start is not None:
                bound = min(bound, start.previous_lsn)
                boot_id = boot_id or start.boot_id
        good: list[tuple[ScannedFile, list[Envelope]]] = []
        last_lsn = 0
        gap: tuple[int, str, int] | None = None
        claimed = max((e.synced_lsn for file in files for e in file.envelopes), default=0)
        digests: dict[int, bytes] = {}
        for i, file in enumerate(files):
            start = starts[i]
            if (
                start is not None
                and digests.get(start.previous_lsn, start.previous_digest) != start.previous_digest
            ):
                self._rotten(f"{file.path}: the file before it was swapped or changed")
            kept: list[Envelope] = []
            for envelope in file.envelopes:
                if envelope.lsn > void_after[i] or gap is not None:
                    continue
                if last_lsn and envelope.lsn != last_lsn + 1:
                    gap = (last_lsn, file.path, envelope.start)
                    continue
                if not last_lsn and envelope.lsn > self._base_lsn + 1:
                    raise LogGap(self._base_lsn, envelope.lsn)
                kept.append(envelope)
                last_lsn = envelope.lsn
                digests[envelope.lsn] = envelope.digest
                self._wal.last_digest, self._wal.last_file_number = envelope.digest, file.number
            good.append((file, kept))
            torn = (
                [at for at in file.bad_at if not kept or at >= kept[-1].end]
                if void_after[i] > last_lsn
                else []
            )
            if torn:
                self.report.torn.append(f"{file.path} at byte {torn[0]}")
        known_synced = max(claimed, self._applied_lsn)
        if gap is not None:
            if known_synced > gap[0]:
                self._rotten(f"{gap[1]}: log entries after {gap[0]} are damaged, though they were synced")
            else:
                self.report.torn.append(f"{gap[1]} at byte {gap[2]}")
        elif known_synced > last_lsn and (files or self._applied_lsn):
            if files and claimed > last_lsn:
                self._rotten(f"log entries after {last_lsn} are damaged, though they were synced")
            elif self._applied_lsn > last_lsn:
                raise LogGap(last_lsn, self._applied_lsn + 1)
        self._wal.last_lsn = max(last_lsn, self._base_lsn)
        self._known_synced = min(known_synced, self._wal.last_lsn)
        return good, boot_id

    def _start_of(self, file: ScannedFile) -> WalStart | None:
        envelope = file.envelopes[0]
        starts: list[int] = []
        frames.frame_starts(file.data, envelope.start, envelope.end, starts)
        columns = frames.decode_columns(file.data, starts[:1])
        if int(columns.headers["type"][0]) != frames.WAL_START:
            return None
        return msgspec.msgpack.decode(columns.payload(0), type=WalStart)

    def _rotten(self, problem: str) -> None:
        self.report.rotten.append(problem)
        self._shard.read_only = f"{problem}; run a repair to turn the damage into announced losses"

    # -- replay --------------------------------------------------------------------------------------------

    def _replay(
        self, good: list[tuple[ScannedFile, list[Envelope]]], boot_id: str
    ) -> Generator[float, None, None]:
        """Apply what is synced from where it lies, and the rest from its copy in a fresh file."""
        shard, wal = self._shard, self._wal
        tail: list[bytes] = []
        old_last = wal.last_lsn
        decoded: list[tuple[int, Columns, _Lsns]] = []
        for file, envelopes in good:
            synced = [e for e in envelopes if e.lsn <= self._known_synced or shard.read_only is not None]
            self._keep_file(file, envelopes)
            columns, lsns = self._decode(file.data, [e for e in envelopes if e.lsn > self._base_lsn])
            self._forget_deleted(columns, lsns)
            count = int(np.searchsorted(lsns, synced[-1].lsn, side="right")) if synced else 0
            decoded.append((file.number, columns.slice(0, count), lsns[:count]))
            tail += [file.data[e.start : e.end] for e in envelopes[len(synced) :]]
        for done, (number, columns, lsns) in enumerate(decoded):
            self._apply(columns, lsns, number, 0)
            yield 0.5 + 0.4 * done / len(decoded)
        self._set_time()
        if shard.read_only is not None:
            return
        same_boot = boot_id == self._disk.boot_id()
        latched = self._disk.exists(f"{self._meta_dir}/{LATCH_MARK}")
        clean = self._clean_lsn and self._clean_lsn == old_last
        self.report.power_cut = bool(good) and not clean and not (same_boot and not latched)
        self._begin_fresh_file(tail, good)
        wal.synced_lsn = wal.last_lsn
        wal.unsynced_files = []
        for log in shard.by_id.values():
            log.ceiling_synced = log.ceiling
        shard.time_ceiling_synced_ms = shard.time_ceiling_ms
        self.report.replayed_lsn = wal.last_lsn
        self._recovered = True
        for log in self._loaded.values():
            if not log.dropped:
                self._sort_out_files(log)
        self._loaded = {}

    def _keep_file(self, file: ScannedFile, envelopes: list[Envelope]) -> None:
        """Older files stay for reading and for erasing until a checkpoint has absorbed them."""
        handle = self._disk.open(file.path)
        kept = WalFile(file.number, file.path, file.salt, handle, len(file.data), len(file.data))
        kept.first_lsn = envelopes[0].lsn if envelopes else 1
        kept.last_lsn = envelopes[-1].lsn if envelopes else 0
        self._wal.files.append(kept)
        self._reader.wal_handles[file.number] = handle

    def _begin_fresh_file(self, tail: list[bytes], good: list[tuple[ScannedFile, list[Envelope]]]) -> None:
        wal = self._wal
        wal.last_lsn = self._known_synced if good else wal.last_lsn
        for file, envelopes in good:
            for envelope in envelopes:
                if envelope.lsn == wal.last_lsn:
                    wal.last_digest, wal.last_file_number = envelope.digest, file.number
        number = wal.take_number()
        # One envelope for all of it, the losses included: a crash in between must not leave half an announcement.
        body = b"".join([wal.start_frame(number, self._shard.now_ms), *tail])
        columns, lsns = self._decode(body, [Envelope(wal.last_lsn + 1, 0, 0, 0, len(body), b"")])
        self._apply(columns, lsns, number, FILE_HEADER_BYTES + ENVELOPE_BYTES)
        self._set_time()
        if self.report.power_cut:
            self._announce_power_cut()
        body += self._closing_frames()
        fresh = wal.make_file(
            number, max(len(body) + FILE_HEADER_BYTES + ENVELOPE_BYTES + 1024, wal.file_bytes)
        )
        wal.files.append(fresh)
        wal.append(body)
        self._disk.sync(fresh.handle)
        self._reader.wal_handles[number] = fresh.handle

    def _forget_deleted(self, columns: Columns, lsns: _Lsns) -> None:
        """Topics that the log deletes are not replayed at all: their files may be gone already."""
        for i in np.nonzero(columns.headers["type"] == frames.TOPIC_DELETE)[0].tolist():
            topic_id = int(columns.headers["topic"][i])
            self._deleted[topic_id] = None
            log = self._shard.by_id.get(topic_id)
            if log is not None:
                self._delete_topic(log)

    @staticmethod
    def _decode(data: bytes, envelopes: list[Envelope]) -> tuple[Columns, _Lsns]:
        """The columns of many envelopes at once, and the lsn of each frame."""
        starts: list[int] = []
        counts: list[int] = []
        for envelope in envelopes:
            before = len(starts)
            frames.frame_starts(data, envelope.start, envelope.end, starts)
            counts.append(len(starts) - before)
        lsns = np.array([envelope.lsn for envelope in envelopes], dtype=np.uint64)
        return frames.decode_columns(data, starts), np.repeat(lsns, counts)

    def _apply(self, columns: Columns, lsns: _Lsns, number: int, shift: int) -> None:
        """Apply frames in order, runs of appends by columns. `shift`: file offset of the buffer's first byte."""
        count = len(columns.starts)
        self.report.replayed_frames += count
        at = 0
        for i in [*np.nonzero(columns.headers["type"] != frames.APPEND)[0].tolist(), count]:
            if i > at:
                self._replay_appends(columns, at, i, number, shift, lsns)
            if i < count:
                self._replay_control(columns, i, int(lsns[i]))
            at = i + 1

    def _replay_appends(
        self, columns: Columns, first: int, stop: int, number: int, shift: int, lsns: _Lsns
    ) -> None:
        topics = columns.headers["topic"][first:stop]
        if stop - first == 1 or (topics == topics[0]).all():
            self._append_run(int(topics[0]), columns.slice(first, stop), number, shift, lsns[first:stop])
            return
        order = np.argsort(topics, kind="stable")
        edges = np.nonzero(np.diff(topics[order]))[0] + 1
        for group in np.split(order, edges):
            picked = group + first
            self._append_run(int(topics[group[0]]), columns.take(picked), number, shift, lsns[picked])

    def _append_run(self, topic_id: int, columns: Columns, number: int, shift: int, lsns: _Lsns) -> None:
        log = self._shard.by_id.get(topic_id)
        if log is None or int(lsns[-1]) <= log.applied_lsn:
            return  # deleted later, or in the snapshot
        self._shard.touched[log.id] = log
        if log.config.durability == "memory":
            # Must not delay readiness: done when somebody asks for the topic.
            log.deferred.append(lambda: self._apply_appends(log, columns, number, shift, lsns))
        else:
            self._apply_appends(log, columns, number, shift, lsns)

    def _apply_appends(self, log: TopicLog, columns: Columns, number: int, shift: int, lsns: _Lsns) -> None:
        if log.stored is not None:
            self._load(log)
        seqs = columns.headers["seq"]
        fresh = (lsns > log.applied_lsn) & (seqs >= log.next_seq)
        if not fresh.all():
            picked = np.nonzero(fresh)[0]
            if not len(picked):
                return
            columns, lsns = columns.take(picked), lsns[picked]
            seqs = columns.headers["seq"]
        first = int(seqs[0])
        if first > log.next_seq:
            # Records that were never logged (an ephemeral stretch) lie between.
            self._announce(log, log.next_seq, first - 1, "crash")
        op = Op(log)
        self._add_columns(log, columns, number, shift, op)
        log.count += op.count
        log.bytes += op.bytes
        self._shard.bytes_live += op.bytes
        op.head = log.next_seq - 1
        op.first_seq = log.first_seq
        op.write_ts = int(columns.headers["ts"][-1])
        log.publish(op)

    def _add_columns(self, log: TopicLog, columns: Columns, number: int, shift: int, op: Op) -> None:
        headers, starts = columns.headers, columns.starts
        count = len(starts)
        flags = headers["flags"]
        first = log.next_seq
        combined = int(np.bitwise_or.reduce(flags)) if count else 0
        sizes = headers["data_len"].astype(np.int64)
        tags = self._strings(columns, "tag") if combined & frames.HAS_TAG else None
        nodes = self._strings(columns, "node") if combined & frames.HAS_NODE else None
        tag_ids = log.tags.add_batch(first, tags) if tags is not None else None
        node_ids = log.nodes.add_all(nodes) if nodes is not None else None
        if combined & frames.HAS_EXT:
            self._extensions(log, columns, first, sizes)
        if not log.runs or log.runs[-1][1] != number:
            log.runs.append((first, number))
        offsets = starts + shift
        lengths = headers["length"].astype(np.int64) + 4
        at = 0
        while at < count:
            chunk = log.chunk_for_append(int(headers["ts"][at]))
            stop = at + min(chunk.room, count - at)
            if stop - at < SMALL:
                columns_here = zip(
                    offsets[at:stop].tolist(),
                    lengths[at:stop].tolist(),
                    headers["ts"][at:stop].tolist(),
                    flags[at:stop].tolist(),
                    tag_ids[at:stop] if tag_ids is not None else [0] * (stop - at),
                    node_ids[at:stop] if node_ids is not None else [0] * (stop - at),
                    sizes[at:stop].tolist(),
                    strict=True,
                )
                for row in columns_here:
                    chunk.add(*row)
            else:
                chunk.add_batch(
                    offsets[at:stop], lengths[at:stop], headers["ts"][at:stop], flags[at:stop],
                    tag_ids[at:stop] if tag_ids is not None else None,
                    node_ids[at:stop] if node_ids is not None else None,
                    sizes[at:stop],
                )  # fmt: skip
            log.next_seq += stop - at
            at = stop
        op.count += count
        op.bytes += int(sizes.sum())

    @staticmethod
    def _strings(columns: Columns, kind: str) -> list[bytes | None]:
        buffer = columns.buffer
        begins = columns.starts + frames.HEADER_BYTES
        if kind == "tag":
            begins = begins + columns.headers["node_len"]
        wanted = columns.headers["flags"] & (frames.HAS_TAG if kind == "tag" else frames.HAS_NODE)
        ends = begins + columns.headers[f"{kind}_len"]
        return [
            buffer[begin:end] if present else None
            for begin, end, present in zip(begins.tolist(), ends.tolist(), wanted.tolist(), strict=True)
        ]

    def _extensions(self, log: TopicLog, columns: Columns, first: int, sizes: npt.NDArray[np.int64]) -> None:
        window_ms = log.config.idempotency_window_ms
        for i in np.nonzero(columns.headers["flags"] & frames.HAS_EXT)[0].tolist():
            found = frames.read_extensions(columns.buffer, int(columns.starts[i]))
            if frames.EXT_SIZE in found:
                sizes[i] = int.from_bytes(found[frames.EXT_SIZE], "little")
            if frames.EXT_EXPIRES in found:
                heapq.heappush(log.expiries, (int.from_bytes(found[frames.EXT_EXPIRES], "little"), first + i))
            if frames.EXT_KEY in found and window_ms:
                count = int.from_bytes(found[frames.EXT_BATCH], "little")
                entry = (first + i, count, int(columns.headers["ts"][i]))
                log.dedupe.add(found[frames.EXT_KEY], entry, window_ms=window_ms)

    def _replay_control(self, columns: Columns, i: int, lsn: int) -> None:
        kind, topic_id = int(columns.headers["type"][i]), int(columns.headers["topic"][i])
        payload = columns.payload(i)
        if kind == frames.TIME_CEILING:
            ceiling = msgspec.msgpack.decode(payload, type=TimeCeiling)
            self._time = (ceiling.ceiling_ms, ceiling.now_ms, ceiling.mono_ms, ceiling.boot_id)
            return
        if kind == frames.TOPIC_CREATE:
            self._create_topic(topic_id, msgspec.msgpack.decode(payload, type=TopicCreated))
            return
        log = self._shard.by_id.get(topic_id)
        if log is None or lsn <= log.applied_lsn:
            return
        self._shard.touched[log.id] = log
        if log.deferred:
            log.deferred.append(lambda: self._apply_control(log, kind, payload))
        else:
            self._apply_control(log, kind, payload)

    def _create_topic(self, topic_id: int, created: TopicCreated) -> None:
        self._shard.next_id = max(self._shard.next_id, topic_id + ID_STEP)
        if topic_id in self._shard.by_id or topic_id in self._deleted:
            return
        log = self._shard.new_log(topic_id, created.name, created.config)
        log.ceiling = created.ceiling
        self._shard.touched[topic_id] = log
        self._enlist(log)

    def _delete_topic(self, log: TopicLog) -> None:
        shard = self._shard
        shard.by_id.pop(log.id)
        shard.touched.pop(log.id, None)
        if shard.published.get(log.name) is log:
            del shard.published[log.name], shard.staged[log.name]
            shard.names.discard(log.name)
        shard.bytes_live -= log.bytes
        shard.erase_requests = [request for request in shard.erase_requests if request.log is not log]
        log.dropped = log.view.dropped = True
        self._checkpointer.rows.pop(log.id, None)
        shard.gone.append(log)

    def _apply_control(self, log: TopicLog, kind: int, payload: bytes) -> None:
        if log.stored is not None and kind != frames.SEGMENT_SWAP:
            self._load(log)
        decode = msgspec.msgpack.decode
        op = Op(log)
        if kind == frames.DELETE:
            deletion = decode(payload, type=Deletion)
            log.stage_delete(deletion.ranges, op)
            if deletion.erase:
                self._resume_erase(log, deletion.ranges)
        elif kind == frames.EVICT:
            cap_lost, ttl_lost = decode(payload, type=tuple[int, int])
            head = log.next_seq - 1
            log.stage_floors(min(cap_lost, head), min(ttl_lost, head), op)
        elif kind == frames.SKIP:
            first, count = decode(payload, type=tuple[int, int])
            if first > log.next_seq:  # records that were never logged
                self._announce(log, log.next_seq, first - 1, "crash")
            if first + count > log.next_seq:
                log.stage_skip(first + count - log.next_seq, op)
        elif kind == frames.LOSS:
            log.stage_loss(decode(payload, type=tuple[int, int, str]), op)
        elif kind == frames.CONFIG:
            changed = decode(payload, type=ConfigChanged)
            if changed.head >= log.next_seq:
                self._announce(log, log.next_seq, changed.head, "crash")
            was_ram, is_ram = (c.durability == "ephemeral" for c in (log.config, changed.config))
            if was_ram != is_ram and log.chunks and log.chunks[-1].count:
                log.chunks[-1].closed = True
            log.config = op.config = changed.config
            log.ceiling = changed.ceiling
        elif kind == frames.SEQ_CEILING:
            log.ceiling = max(log.ceiling, decode(payload, type=int))
        elif kind == frames.SEGMENT_SWAP:
            self._apply_swap(log, *decode(payload, type=tuple[int, int]))
        elif kind == frames.ERASE_DONE:
            self._forget_erase(log, decode(payload, type=list[tuple[int, int]]))
        self._shard.bytes_live += op.bytes
        log.publish(op)

    def _forget_erase(self, log: TopicLog, done: list[tuple[int, int]]) -> None:
        log.erasing = [ranges for ranges in log.erasing if ranges != done]
        self._shard.erase_requests = [
            request
            for request in self._shard.erase_requests
            if request.log is not log or request.ranges != done
        ]

    def _apply_swap(self, log: TopicLog, first_seq: int, generation: int) -> None:
        """The segment has a new generation. Deletes replayed so far are flags or .del bytes of the old one."""
        directory = self._reader.topic_dir(log.id)
        if log.stored is not None:
            self._load(log)
        for chunk in log.chunks:
            meta = chunk.meta
            if meta is None or meta.first_seq != first_seq or meta.generation >= generation:
                continue
            try:
                new = meta_from_sum(self._disk, directory, first_seq, generation)
                rows = read_rows(self._disk, directory, new)
            except (Corrupt, FileNotFoundError) as error:
                self.report.rotten.append(str(error))
                continue  # the old generation is whole: it stays
            chunk.rows["offset"], chunk.rows["length"] = rows["offset"], rows["length"]
            self._checkpointer.doom(log.id, meta)
            chunk.meta = new
            late = np.nonzero(((chunk.rows["flags"] & frames.DEAD) != 0) & (rows["length"] > 0))[0]
            chunk.unmarked = [(int(i), int(i) + 1) for i in late]

    # -- what was lost -------------------------------------------------------------------------------------

    def _announce(self, log: TopicLog, first: int, last: int, reason: str) -> None:
        """A range is gone and readers must hear of it; logged at the end of recovery."""
        if log.stored is not None and first < log.next_seq:
            self._load(log)
        op = Op(log)
        log.stage_loss((first, last, reason), op)
        self._shard.bytes_live += op.bytes
        log.publish(op)
        self._shard.touched[log.id] = log
        self.report.losses.append((log.name, first, last, reason))
        if self._recovered:
            frame = frames.encode_control(frames.LOSS, log.id, self._shard.now_ms, [first, last, reason])
            if self._shard.read_only is None:
                self._shard.add_frame(frame)
        else:
            self._announcements.append((log.id, first, last, reason))

    def _announce_power_cut(self) -> None:
        """Seqs of `disk` topics up to the ceiling may have been acked and lost: skip them, and say so."""
        for log in list(self._shard.by_id.values()):
            if log.config.durability == "disk" and log.ceiling >= log.next_seq:
                self._announce(log, log.next_seq, log.ceiling, "crash")

    def _closing_frames(self) -> bytes:
        """What recovery found, and the time, logged before the shard takes requests."""
        shard = self._shard
        body = [
            frames.encode_control(frames.LOSS, topic_id, shard.now_ms, [first, last, reason])
            for topic_id, first, last, reason in self._announcements
            if topic_id in shard.by_id
        ]
        shard.time_ceiling_ms = max(shard.time_ceiling_ms, shard.now_ms + limits.TIME_CEILING_STEP_MS)
        value = TimeCeiling(shard.time_ceiling_ms, shard.now_ms, shard.clock.mono_ms, self._disk.boot_id())
        body.append(frames.encode_control(frames.TIME_CEILING, 0, shard.now_ms, value))
        return b"".join(body)

    def _set_time(self) -> None:
        """Engine time goes on from where it was, never from before."""
        if self._time is None:
            return
        ceiling_ms, now_ms, mono_ms, boot_id = self._time
        clock = self._shard.clock
        clock.resume(ceiling_ms, now_ms, mono_ms if boot_id == self._disk.boot_id() else None)
        self._shard.now_ms = clock.now_ms
        self._shard.time_ceiling_ms = max(self._shard.time_ceiling_ms, ceiling_ms)
        self._time = None

    # -- leftovers -----------------------------------------------------------------------------------------

    def _clear_orphans(self) -> Generator[None, None, None]:
        """Directories of deleted topics go; of topics nobody knows, aside."""
        root = self._config.topics_dir
        for name in self._disk.list(root):
            text = name.removesuffix(".deleted")
            try:
                topic_id = int(text, 16)
            except ValueError:
                continue
            if topic_id % ID_STEP != self._config.shard % ID_STEP or topic_id in self._shard.by_id:
                continue
            if self._shard.read_only is not None:
                continue
            if topic_id < self._shard.next_id:
                for _ in remove_tree(self._disk, f"{root}/{name}"):
                    yield None
            else:
                self._disk.make_dir("lost+found")
                self._disk.rename(f"{root}/{name}", f"lost+found/{name}")
            yield None
