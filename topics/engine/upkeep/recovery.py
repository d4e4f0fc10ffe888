"""Recovery of a shard at startup: load the newest snapshot, then replay the log.

1. Apply pending erase intents.
2. Load the newest valid snapshot.
3. Scan the log files and classify invalid entries as torn, void or corrupt.
4. Copy the tail that is not known to be synced into a new file, as one envelope, and sync it. Reading it back proves
   nothing, since the data may be only in the page cache. On a nearly full disk the tail is rewritten in place instead.
5. Replay the log.
6. Record what a power failure took as lost.

A crash during recovery is harmless. The new file is valid only once its single envelope is complete, and from then on it
makes the tails of older files void.
"""

from __future__ import annotations

from collections.abc import Generator

import msgspec
import numpy as np

from topics.api import limits
from topics.api.config import EngineConfig, TopicConfig
from topics.api.errors import Corrupt, LogGap
from topics.engine.core.ports import Disk, SegmentStore
from topics.engine.core.topic_ids import OwnedIds
from topics.engine.reading.reader import Reader
from topics.engine.shard.shard import Shard
from topics.engine.storage import frames
from topics.engine.storage.control import TimeCeiling, WalStart
from topics.engine.storage.files import ensure_dir, is_full, read_file
from topics.engine.storage.frames import Columns
from topics.engine.storage.intents import apply_patches, finish_intent, pending_intents
from topics.engine.storage.reserve import Reserve
from topics.engine.storage.snapshot import list_snapshots, read_snapshot, remove_unfinished, snapshot_path
from topics.engine.storage.wal import (
    ENVELOPE_BYTES,
    FILE_HEADER_BYTES,
    Envelope,
    ScannedFile,
    Wal,
    WalFile,
    file_number,
    is_blank,
    is_truncated,
    last_valid_lsns,
    scan,
    start_of,
)
from topics.engine.topic.log import TopicLog
from topics.engine.topic.snapshot_row import ShardRow, TopicRow, TopicSegments
from topics.engine.upkeep.checkpoint import LATCH_FILE, Checkpointer, remove_tree
from topics.engine.upkeep.loading import Loader
from topics.engine.upkeep.recovery_report import RecoveryReport
from topics.engine.upkeep.replay import Lsns, Replay, decode
from topics.engine.upkeep.segment_swaps import SegmentSwaps

SMALL_FILE_ROOM = 64 * limits.KIB  # free space in a log file on a full disk: enough for hundreds of deletes
FILE_OVERHEAD_BYTES = 16 * limits.KIB  # file system blocks of a file in addition to its contents


class Recovery:
    """Recovers one shard; `steps` yields the progress as a fraction."""

    def __init__(
        self,
        disk: Disk,
        shard: Shard,
        wal: Wal,
        reader: Reader,
        checkpointer: Checkpointer,
        config: EngineConfig,
        cold: SegmentStore | None = None,
        reserve: Reserve | None = None,
    ) -> None:
        self._disk = disk
        self._shard = shard
        self._wal = wal
        self._reader = reader
        self._checkpointer = checkpointer
        self._config = config
        self._reserve = reserve or Reserve(disk, "", 0)
        self.report = RecoveryReport()
        self._meta_dir = checkpointer.meta_dir
        self._snapshot_path = ""
        self._base_lsn = 0
        self._applied_lsn = 0  # highest LSN that any snapshot row contains
        self._clean_lsn = 0
        self._known_synced = 0
        self._configs: dict[TopicConfig, TopicConfig] = {}
        self._ephemeral: list[tuple[TopicLog, TopicRow]] = []
        self._unused: list[
            tuple[str, bool]
        ] = []  # log files without entries, and whether they are really ours
        self._missing_start: str | None = None  # file and offset of a damaged first entry that was synced
        self._emptied: list[str] = []  # log files that have lost all of their entries
        self.loader = self._loader = Loader(disk, shard, reader, checkpointer, config, self.report, cold)
        self._replayer = Replay(shard.state, checkpointer, self._loader, self.report)
        self.swaps = SegmentSwaps(disk, shard.state, reader, checkpointer, self._loader, self.report)
        shard.state.loader = self._loader.load

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
        good, boot_id = self._select_envelopes(scanned)
        decoded = [self._decode(*kept) for kept in good]
        if self._shard.state.read_only is None:
            self._clear_unused()  # before anything is written: the disk may be full
        yield 0.5
        yield from self._replay(good, decoded, boot_id)
        self._replayer.resume_erases()
        yield from (0.95 for _ in self._clear_orphans())
        if self._shard.state.read_only is None and self._disk.exists(f"{self._meta_dir}/{LATCH_FILE}"):
            self._disk.remove(f"{self._meta_dir}/{LATCH_FILE}")
            self._disk.sync_dir(self._meta_dir)
        yield 1.0

    # -- snapshot ------------------------------------------------------------------------------------------

    def _load_snapshot(self) -> None:
        decode_shard = msgspec.msgpack.Decoder(ShardRow).decode
        decode_topic = msgspec.msgpack.Decoder(TopicRow).decode
        found: list[tuple[int, int]] = []
        chosen: tuple[ShardRow, list[bytes]] | None = None
        older: tuple[int, list[bytes]] | None = None
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
            elif older is None:
                older = number, rows
        self._checkpointer.snapshots = found[-2:]
        if chosen is None:
            return
        shard_row, rows = chosen
        self.report.snapshot = shard_row.number
        self._base_lsn = self._applied_lsn = shard_row.base_lsn
        self._clean_lsn = shard_row.clean_lsn
        self._shard.state.next_id = max(self._shard.state.next_id, shard_row.next_id)
        self._replayer.time = TimeCeiling(
            shard_row.time_ceiling_ms, shard_row.now_ms, shard_row.mono_ms, shard_row.boot_id
        )
        self._shard.state.owned_ids = OwnedIds(
            self._config.shard, shard_row.first_id, shard_row.adopted, shard_row.others
        )
        self._snapshot_path = snapshot_path(self._meta_dir, shard_row.number)
        shard_row.restore_parts(self._shard.state.row_parts, self._snapshot_path)
        if older is not None:
            self._reference_older(*older)
        for raw in rows:
            row = decode_topic(raw)
            self._checkpointer.rows[row.id] = bytes(raw)
            self._loader.add_references(shard_row.number, row.id, row.segments)
            self._restore_topic(row)

    def _reference_older(self, number: int, rows: list[bytes]) -> None:
        """Keep the segments of the older snapshot: the next start may need it. The rest of it is not used now."""
        decode = msgspec.msgpack.Decoder(TopicSegments).decode
        for raw in rows:
            row = decode(raw)
            if row.segments:
                self._loader.add_references(number, row.id, row.segments)

    def _restore_topic(self, row: TopicRow) -> None:
        # Most topics share a few configs, so equal ones share one object.
        config = self._configs.setdefault(row.config, row.config)
        log = self._shard.state.new_log(row.id, row.name, config)
        row.restore(log, self._shard.state.row_parts, self._snapshot_path)
        self._applied_lsn = max(self._applied_lsn, row.applied_lsn)
        self._replayer.register_topic(log)
        if log.trim_from is not None:
            self._shard.appends.trimming[log.id] = log
        if log.is_over_cap:
            self._shard.state.upkeep.enqueue(log)
        if row.ram_ranges:
            self._ephemeral.append((log, row))

    def _record_ephemeral_losses(self) -> None:
        """Record the records of ephemeral topics as lost, as they are after every restart."""
        for log, row in self._ephemeral:
            if log.dropped:
                continue
            self._loader.load(log)
            for first, last in row.ram_ranges:
                if last >= row.first_seq:
                    self._loader.record_loss(log, max(first, row.first_seq), last, "crash")

    # -- the log -------------------------------------------------------------------------------------------

    def _scan_files(self) -> list[ScannedFile]:
        found: list[ScannedFile] = []
        for name in self._disk.list(self._wal.directory):
            number = file_number(name)
            if number is None:
                continue
            path = f"{self._wal.directory}/{name}"
            self._wal.next_number = max(self._wal.next_number, number + 1)
            data = read_file(self._disk, path)
            scanned = scan(path, number, data)
            if scanned is not None and scanned.envelopes:
                found.append(scanned)
                continue
            if is_truncated(scanned, data):
                self._emptied.append(path)
            elif scanned is not None and scanned.bad_at:
                self.report.torn.append(f"{path} at byte {scanned.bad_at[0]}")
            # A spare file, or one whose first envelope was never complete: it never had a valid entry.
            self._unused.append((path, scanned is not None or is_blank(data)))
        found.sort(key=lambda file: file.number)
        return found

    def _clear_unused(self) -> None:
        """Remove log files without entries. Files that are not ours are moved to lost+found."""
        for path, ours in self._unused:
            if ours:
                self._disk.remove(path)
            else:
                name = path.rpartition("/")[2]
                self._move_to_lost_found(path, f"shard-{self._config.shard:02d}-{name}")

    def _select_envelopes(
        self, files: list[ScannedFile]
    ) -> tuple[list[tuple[ScannedFile, list[Envelope]]], str]:
        """Select the valid envelopes, in order. Sets the shard read-only if synced ones are missing."""
        if self.report.snapshot and not files:
            # Checkpoints never remove the active file: it existed, and may have contained acked writes.
            raise LogGap(self._base_lsn, self._base_lsn + 2)
        starts = [start_of(file) for file in files]
        boot_id = next((start.boot_id for start in reversed(starts) if start is not None), "")
        good, gap = self._follow_lsns(files, starts)
        last_lsn = max([self._base_lsn, *(envelope.lsn for _, kept in good for envelope in kept)])
        claimed = max((envelope.synced_lsn for file in files for envelope in file.envelopes), default=0)
        short = self._truncated_file(files, gap, last_lsn)
        if short is not None:
            self._set_corrupt(
                f"{short.path}: the file is {len(short.data)} bytes long instead of {short.capacity}: "
                f"log entries after {last_lsn} are missing"
            )
        elif self._missing_start is not None:
            self._set_corrupt(f"{self._missing_start}: the first entry of the file was synced and is damaged")
        elif not files and len(self._unused) > 1:
            # A second file is created only after the first has an entry.
            self._set_corrupt(f"{self._unused[0][0]}: all log entries are missing")
        elif self._emptied:
            self._set_corrupt(
                f"{self._emptied[0]}: the file was truncated: log entries after {last_lsn} are missing"
            )
        elif gap is not None and self._disk_was_sound(boot_id, good):
            # Only a power failure or a failed sync can lose an entry and keep a later one.
            self._set_corrupt(f"{gap}: log entries after {last_lsn} are damaged, but later ones are intact")
        elif gap is not None and max(claimed, self._applied_lsn) <= last_lsn:
            self.report.torn.append(gap)
        elif max(claimed, self._applied_lsn) > last_lsn:
            if not files or (claimed <= last_lsn and gap is None):
                raise LogGap(last_lsn, self._applied_lsn + 1)
            self._set_corrupt(
                f"{gap or files[-1].path}: log entries after {last_lsn} were synced and are damaged"
            )
        self._wal.last_lsn = last_lsn
        self._known_synced = min(max(claimed, self._applied_lsn), last_lsn)
        return good, boot_id

    def _truncated_file(self, files: list[ScannedFile], gap: str | None, last_lsn: int) -> ScannedFile | None:
        """A file that is shorter than its capacity, unless it is known that it had no valid entry beyond its end."""
        if gap is not None:
            return next((file for file in files if file.is_short), None)
        # Without a gap only the last file can lack entries: every other one is continued by the file after it. After a
        # clean shutdown the last one has no further entries either.
        ended = bool(self._clean_lsn) and self._clean_lsn == last_lsn
        return files[-1] if files and files[-1].is_short and not ended else None

    def _follow_lsns(
        self, files: list[ScannedFile], starts: list[WalStart | None]
    ) -> tuple[list[tuple[ScannedFile, list[Envelope]]], str | None]:
        """Follow the LSNs from the snapshot on through all files; the second value is the position of a gap, if any."""
        void_after = last_valid_lsns(starts)
        good: list[tuple[ScannedFile, list[Envelope]]] = []
        digests: dict[tuple[int, int], bytes] = {}
        last_lsn, gap = self._base_lsn, None
        for i, file in enumerate(files):
            self._check_chain(file, starts[i], digests)
            if gap is None and self._is_start_missing(file, starts[i], void_after[i]):
                gap = f"{file.path} at byte {FILE_HEADER_BYTES}"
            kept: list[Envelope] = []
            for envelope in file.envelopes:
                if envelope.lsn > void_after[i] or gap is not None:
                    continue
                if envelope.lsn > last_lsn + 1:
                    if not digests:  # nothing links it to the snapshot: files are missing
                        raise LogGap(last_lsn, envelope.lsn)
                    gap = f"{file.path} at byte {envelope.start}"
                    continue
                kept.append(envelope)
                last_lsn = max(last_lsn, envelope.lsn)
                digests[file.number, envelope.lsn] = envelope.digest
                self._wal.last_digest, self._wal.last_file_number = envelope.digest, file.number
            good.append((file, kept))
            torn = [at for at in file.bad_at if not kept or at >= kept[-1].end]
            if torn and void_after[i] > last_lsn:
                self.report.torn.append(f"{file.path} at byte {torn[0]}")
        return good, gap

    def _is_start_missing(self, file: ScannedFile, start: WalStart | None, void_after: int) -> bool:
        """Whether a file's first entry is needed and damaged.

        The entry may be the copy of an older file's tail. The older file has the same LSNs, but not what recovery added
        to the copy: the recorded losses and the seqs skipped for them.
        """
        lsn = file.envelopes[0].lsn - 1
        if start is not None or not self._base_lsn < lsn <= void_after:
            return False
        if any(envelope.synced_lsn >= lsn for envelope in file.envelopes):
            self._missing_start = f"{file.path} at byte {FILE_HEADER_BYTES}"
        return True

    def _check_chain(
        self, file: ScannedFile, start: WalStart | None, digests: dict[tuple[int, int], bytes]
    ) -> None:
        """A file holds the digest of the previous file's last entry; if that file exists, they must match."""
        if start is not None:
            found = digests.get((start.previous_file, start.previous_lsn), start.previous_digest)
            if found != start.previous_digest:
                self._set_corrupt(f"{file.path}: the previous file was replaced or changed")

    def _set_corrupt(self, problem: str) -> None:
        self.report.corrupt.append(problem)
        self._shard.state.cut_off = True
        self._shard.state.read_only = (
            f"{problem}; run `topics verify --repair` to turn the damage into announced losses"
        )

    # -- replay --------------------------------------------------------------------------------------------

    def _decode(self, file: ScannedFile, envelopes: list[Envelope]) -> tuple[Columns, Lsns]:
        """Decode the entries after the snapshot."""
        columns, lsns = decode(file.data, [e for e in envelopes if e.lsn > self._base_lsn])
        self._replayer.check_kinds(file.path, columns)
        return columns, lsns

    def _replay(
        self,
        good: list[tuple[ScannedFile, list[Envelope]]],
        decoded: list[tuple[Columns, Lsns]],
        boot_id: str,
    ) -> Generator[float, None, None]:
        """Apply synced entries from their files, and the rest from its copy in a new file."""
        shard, wal = self._shard, self._wal
        if shard.state.read_only is None and self._lacks_room_for_copy(good):
            self._rewrite_tail(good)
        tail: list[bytes] = []
        old_last = wal.last_lsn
        synced_parts: list[tuple[int, Columns, Lsns]] = []
        for (file, envelopes), (columns, lsns) in zip(good, decoded, strict=True):
            synced = [
                e for e in envelopes if e.lsn <= self._known_synced or shard.state.read_only is not None
            ]
            self._keep_file(file, envelopes)
            # Unsynced entries are written again, and counted then.
            self._checkpointer.covered_bytes -= sum(
                ENVELOPE_BYTES + e.end - e.start for e in synced if e.lsn > self._base_lsn
            )
            self._replayer.drop_deleted_topics(columns)
            count = int(np.searchsorted(lsns, synced[-1].lsn, side="right")) if synced else 0
            synced_parts.append((file.number, columns.slice(0, count), lsns[:count]))
            tail += [file.data[e.start : e.end] for e in envelopes[len(synced) :]]
        self._record_ephemeral_losses()  # only now is it known which topics the log deletes
        for done, (number, columns, lsns) in enumerate(synced_parts):
            self._replayer.apply(columns, lsns, number, 0)
            yield 0.5 + 0.4 * done / len(synced_parts)
        self._set_time()
        if shard.state.read_only is not None:
            return
        clean = self._clean_lsn and self._clean_lsn == old_last
        self.report.power_cut = bool(good) and not clean and not self._disk_was_sound(boot_id, good)
        # If only the process died, the log has the heads of memory topics. It never has those of ephemeral ones.
        lowered = ("memory", "ephemeral") if self.report.power_cut else () if clean else ("ephemeral",)
        self._start_new_file(tail, good, lowered)
        wal.synced_lsn = wal.last_lsn
        shard.state.written_lsn = shard.state.synced_lsn = wal.synced_lsn
        wal.unsynced_files = []
        for log in shard.state.by_id.values():
            log.ceiling_synced = log.ceiling
        shard.state.time_ceiling_synced_ms = shard.state.time_ceiling_ms
        self.report.replayed_lsn = wal.last_lsn
        self._loader.finish_recovery()

    def _lacks_room_for_copy(self, good: list[tuple[ScannedFile, list[Envelope]]]) -> bool:
        size = sum(e.end - e.start for _, kept in good for e in kept if e.lsn > self._known_synced)
        return (
            bool(self._config.reserve_bytes and size)
            and self._disk.free_bytes() < size + self._wal.file_bytes
        )

    def _rewrite_tail(self, good: list[tuple[ScannedFile, list[Envelope]]]) -> None:
        """Rewrite the tail that is not known to be synced in place, and sync it.

        The bytes are written again because pages that look clean may not be on disk. Identical bytes do no harm.
        """
        try:
            for file, envelopes in good:
                tail = [envelope for envelope in envelopes if envelope.lsn > self._known_synced]
                if not tail:
                    continue
                handle = self._disk.open(file.path)
                try:
                    for envelope in tail:
                        start = envelope.start - ENVELOPE_BYTES
                        self._disk.write(handle, start, file.data[start : envelope.end])
                    self._disk.sync(handle)
                finally:
                    self._disk.close(handle)
        except OSError as error:
            if not is_full(error):
                raise
            return  # a copy-on-write file system: use the reserve
        self._known_synced = self._wal.last_lsn

    def _disk_was_sound(self, boot_id: str, good: list[tuple[ScannedFile, list[Envelope]]]) -> bool:
        """Whether the machine has not rebooted since the log was written, and no write or sync of the log failed."""
        number = good[-1][0].number if good else 0
        return boot_id == self._disk.boot_id() and not has_latch(self._disk, self._meta_dir, number)

    def _keep_file(self, file: ScannedFile, envelopes: list[Envelope]) -> None:
        """Keep an older log file open for reads and erases until checkpoints have made it obsolete."""
        handle = self._disk.open(file.path)
        kept = WalFile(file.number, file.path, file.salt, handle, len(file.data), len(file.data))
        kept.first_lsn = envelopes[0].lsn if envelopes else 1
        kept.last_lsn = envelopes[-1].lsn if envelopes else 0
        self._wal.files.append(kept)
        self._reader.wal_handles[file.number] = handle

    def _start_new_file(
        self, tail: list[bytes], good: list[tuple[ScannedFile, list[Envelope]]], lowered: tuple[str, ...]
    ) -> None:
        wal = self._wal
        wal.last_lsn = self._known_synced if good else wal.last_lsn
        for file, envelopes in good:
            for envelope in envelopes:
                if envelope.lsn == wal.last_lsn:
                    wal.last_digest, wal.last_file_number = envelope.digest, file.number
        number = wal.take_number()
        # A single envelope including the losses, so that a crash cannot leave only some of them.
        body = b"".join([wal.start_frame(number, self._shard.state.now_ms), *tail])
        columns, lsns = decode(body, [Envelope(wal.last_lsn + 1, 0, 0, 0, len(body), b"")])
        self._replayer.apply(columns, lsns, number, FILE_HEADER_BYTES + ENVELOPE_BYTES)
        self._set_time()
        if self.report.power_cut:
            self._record_power_cut_losses()
        body += self._closing_frames(lowered)
        fresh = self._create_new_file(number, len(body) + FILE_HEADER_BYTES + ENVELOPE_BYTES + 1024)
        wal.files.append(fresh)
        wal.append(body)
        self._disk.sync(fresh.handle)
        self._reader.wal_handles[number] = fresh.handle

    def _create_new_file(self, number: int, needed: int) -> WalFile:
        """Create the new log file. On a full disk a small one is enough: the shard must start to accept deletes."""
        wal, reserve = self._wal, self._reserve
        reserve.load()
        small = needed + SMALL_FILE_ROOM
        for released, capacity in (
            (0, max(needed, wal.file_bytes)),
            (0, small),
            (small + FILE_OVERHEAD_BYTES, small),
            (reserve.held, small),
        ):
            reserve.release(released)
            try:
                return wal.make_file(number, capacity)
            except OSError as error:
                if not is_full(error):
                    raise
        return wal.make_file(number, needed)

    def _record_power_cut_losses(self) -> None:
        """Skip the seqs of `disk` topics up to the ceiling and record them as lost: they may have been acked."""
        for log in list(self._shard.state.by_id.values()):
            if log.config.durability == "disk" and log.ceiling >= log.next_seq:
                self._loader.record_loss(log, log.next_seq, log.ceiling, "crash")

    def _closing_frames(self, lowered: tuple[str, ...]) -> bytes:
        """Frames with the losses and the time, logged before the shard accepts requests.

        `lowered`: durability classes whose topics may have lower heads than before.
        """
        shard = self._shard
        # First, because it loads topics and may find more losses.
        epochs = shard.forwards.start_forwards(lowered, self._replayer.head_of)
        self._loader.check_suspects()
        body = self._loader.loss_frames() + epochs
        shard.state.time_ceiling_ms = max(
            shard.state.time_ceiling_ms, shard.state.now_ms + limits.TIME_CEILING_STEP_MS
        )
        value = TimeCeiling(
            shard.state.time_ceiling_ms, shard.state.now_ms, shard.state.clock.mono_ms, self._disk.boot_id()
        )
        body.append(frames.encode_control(frames.TIME_CEILING, 0, shard.state.now_ms, value))
        return b"".join(body)

    def _set_time(self) -> None:
        """Continue engine time from the last logged time, so that it never goes back."""
        time = self._replayer.time
        if time is None:
            return
        clock = self._shard.state.clock
        same_boot = time.boot_id == self._disk.boot_id()
        clock.resume(time.ceiling_ms, time.now_ms, time.mono_ms if same_boot else None)
        self._shard.state.now_ms = clock.now_ms
        self._shard.state.time_ceiling_ms = max(self._shard.state.time_ceiling_ms, time.ceiling_ms)
        self._replayer.time = None

    # -- leftovers -----------------------------------------------------------------------------------------

    def _clear_orphans(self) -> Generator[None, None, None]:
        """Remove the directories of deleted topics; move those of unknown topics to lost+found."""
        root = self._config.topics_dir
        for name in self._disk.list(root):
            text = name.removesuffix(".deleted")
            try:
                topic_id = int(text, 16)
            except ValueError:
                continue
            if topic_id not in self._shard.state.owned_ids or topic_id in self._shard.state.by_id:
                continue
            if self._shard.state.read_only is not None:
                continue
            if topic_id < self._shard.state.next_id:
                for _ in remove_tree(self._disk, f"{root}/{name}"):
                    yield None
            else:
                self._move_to_lost_found(f"{root}/{name}", name)
            yield None

    def _move_to_lost_found(self, path: str, name: str) -> None:
        """Move a file to lost+found. On a full disk it stays where it is until a later start."""
        try:
            self._disk.make_dir("lost+found")
            self._disk.rename(path, f"lost+found/{name}")
        except OSError as error:
            if not is_full(error):
                raise


def has_latch(disk: Disk, meta_dir: str, number: int) -> bool:
    """Whether a write or sync failed while this log file, the newest, was active. Older failures are settled."""
    path = f"{meta_dir}/{LATCH_FILE}"
    if not disk.exists(path):
        return False
    text = read_file(disk, path, 21)
    return not text.isdigit() or len(text) > 20 or int(text) >= number
