"""Erasure on the hot tier: overwrite the payload bytes of deleted records in every file that has a copy.

There are copies in log files, in snapshots (small topics) and in every generation of the topic's segments, including
those pending deletion. All patches are computed first: the zeroed frame with its new digest, the envelope's digest, the
next file's chain, the segment's block digests, and zeros for parts of the log that recovery discarded. They are written
and synced as an intent, then applied and synced, then the intent is removed. After a crash, recovery applies the intent
again before it reads anything.

Files in the cold tier cannot be overwritten. Relocation rewrites them afterwards, and only then is the request done.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from errno import EIO, ENOSPC

import msgspec
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from topics.api.errors import Corrupt, EraseDeferred, ShardReadOnly, TopicsError
from topics.engine.core.ports import Disk
from topics.engine.core.tasks import Blocking, Steps, WaitSynced
from topics.engine.reading.reader import Reader
from topics.engine.shard.appends import RANGE_BYTES
from topics.engine.shard.shard import Shard
from topics.engine.shard.state import CONTROL_BYTES, EraseRequest
from topics.engine.storage import frames
from topics.engine.storage.control import WalStart
from topics.engine.storage.files import HEADER_BYTES, is_out_of_resources, read_file, with_digest, xxh
from topics.engine.storage.intents import Patch, apply_patches, finish_intent, intent_path, write_intent
from topics.engine.storage.sealing import read_sum
from topics.engine.storage.segments import BLOCK_BYTES, SUM_MAGIC, parse_segment_name, segment_name
from topics.engine.storage.snapshot import list_snapshots, read_snapshot, snapshot_path
from topics.engine.storage.wal import (
    Envelope,
    ScannedFile,
    Wal,
    last_valid_lsns,
    scan,
    stale_ranges,
    start_of,
)
from topics.engine.topic.log import Range, TopicLog
from topics.engine.topic.snapshot_row import TopicRow
from topics.engine.upkeep.checkpoint import Checkpointer


def erase_steps(
    disk: Disk,
    shard: Shard,
    wal: Wal,
    reader: Reader,
    checkpointer: Checkpointer,
    request: EraseRequest,
    hand_over: Callable[[EraseRequest], bool] = lambda request: False,
) -> Steps:
    """Execute one erase request and reply once the bytes are overwritten.

    `hand_over` returns True if it takes over the rest of the request, for segments in the cold tier.
    """
    checkpointer.erase_running = True
    try:
        yield from _erase(disk, shard, wal, reader, checkpointer, request)
        checkpointer.erase_running = False
        if not hand_over(request):
            yield from finish_erase(shard, request)
    except OSError as error:
        # The records are deleted already. The erase is retried once there is space.
        shard.state.erase_requests.append(EraseRequest(request.log, request.ranges, None, None))
        if request.token is not None:
            deleted = request.result.deleted if request.result is not None else 0
            answer = (
                EraseDeferred(deleted)
                if is_out_of_resources(error)
                else ShardReadOnly(str(error), unknown=True)
            )
            shard.state.ready.append((request.token, answer))
        raise
    except (GeneratorExit, TopicsError) as error:
        # The records are deleted; whether their bytes were overwritten is unknown.
        if request.token is not None:
            reason = shard.state.read_only or str(error) or "the engine was closed"
            shard.state.ready.append((request.token, ShardReadOnly(reason, unknown=True)))
        raise
    finally:
        checkpointer.erase_running = False


def _erase(
    disk: Disk, shard: Shard, wal: Wal, reader: Reader, checkpointer: Checkpointer, request: EraseRequest
) -> Steps:
    log, meta_dir = request.log, checkpointer.meta_dir
    # Append one entry after everything that may be patched: the next log file's chain refers to the digest of the
    # last entry, which therefore must not change.
    if not shard.state.has_room(CONTROL_BYTES):
        raise OSError(ENOSPC, "no room in the log")
    shard.state.stage_time_ceiling(max(shard.state.time_ceiling_ms, shard.state.now_ms))
    yield WaitSynced(0)
    eraser = Eraser(disk, wal, reader, meta_dir, log, request.ranges)
    yield Blocking("erase", eraser.plan)
    if eraser.corrupt_snapshots:
        # The payload cannot be located in a corrupt snapshot, so it is replaced by a new one.
        yield from checkpointer.replace_corrupt_snapshots(eraser.corrupt_snapshots)
        eraser = Eraser(disk, wal, reader, meta_dir, log, request.ranges)
        yield Blocking("erase", eraser.plan)
        if eraser.corrupt_snapshots:
            raise OSError(EIO, "a new snapshot is corrupt again")
    number = shard.state.counters.get("erase_number", 0) + 1
    shard.state.counters["erase_number"] = number

    def apply_intent() -> None:
        begun = False
        try:
            write_intent(disk, meta_dir, number, eraser.patches)
            begun = True
            apply_patches(disk, eraser.patches)
            finish_intent(disk, meta_dir, number)
        except OSError as error:
            if not begun and not disk.exists(intent_path(meta_dir, number)):
                raise
            # The intent is on disk and may be partly applied: only a restart, which applies all of it, can continue.
            raise OSError(EIO, f"an erase failed half-way: {error}") from error

    own_files = [eraser(log) for eraser in shard.state.erasers]

    def sync_removals() -> None:
        for erase in own_files:
            erase()
        # Without this, an unlinked file could reappear after a power failure, with the payload.
        disk.sync_dir(wal.directory)
        disk.sync_dir(meta_dir)
        if disk.exists(reader.topic_dir(log.id)):
            disk.sync_dir(reader.topic_dir(log.id))

    yield Blocking("erase", sync_removals)
    if eraser.patches:
        yield Blocking("erase", apply_intent)
    for file in wal.files:
        reader.tail_cache.forget_file(file.number)
    reader.close_topic(log.id)


def finish_erase(shard: Shard, request: EraseRequest) -> Steps:
    """Log that no copy is left, then reply."""
    log = request.log
    if not shard.state.has_room(len(request.ranges) * RANGE_BYTES + CONTROL_BYTES):
        raise OSError(ENOSPC, "no room in the log")
    shard.state.log(frames.ERASE_DONE, log, request.ranges)
    yield WaitSynced(0)
    shard.state.counters["erases"] += 1
    if request.token is not None:
        shard.state.ready.append((request.token, request.result))


class Eraser:
    """Computes the patches that erase some records of a topic."""

    def __init__(
        self, disk: Disk, wal: Wal, reader: Reader, meta_dir: str, log: TopicLog, ranges: list[Range]
    ) -> None:
        self._meta_dir = meta_dir
        self._disk = disk
        self._wal = wal
        self._reader = reader
        self._log = log
        self._topic = log.id.to_bytes(8, "little")
        self._firsts = [first for first, _ in ranges]
        self._lasts = [last for _, last in ranges]
        # Log files up to their current ends: anything appended later is newer than the delete.
        self._files = [(file.path, file.number, file.handle, file.position) for file in wal.files]
        self.patches: list[Patch] = []
        self.corrupt_snapshots: list[int] = []

    def _is_erased(self, topic_id: int, first_seq: int, last_seq: int) -> bool:
        """Whether any of these seqs is to be erased."""
        if topic_id != self._log.id:
            return False
        i = bisect_right(self._firsts, last_seq) - 1
        return i >= 0 and first_seq <= self._lasts[i]

    def plan(self) -> None:
        self._plan_segments()
        self._plan_snapshots()
        self._plan_log()

    # -- frames --------------------------------------------------------------------------------------------

    def _blank_frames(self, data: bytearray, start: int, end: int) -> list[tuple[int, int]]:
        """Blank the frames to erase in data[start:end], which is known to be valid; returns their byte ranges."""
        starts: list[int] = []
        frames.frame_starts(bytes(data[start:end]), 0, end - start, starts)
        spans = [self._blank(data, start + at) for at in starts]
        return [span for span in spans if span is not None]

    def _blank(self, data: bytearray, at: int) -> tuple[int, int] | None:
        length, kind, flags, topic, seq, ts, node_len, tag_len, data_len = frames.HEADER.unpack_from(data, at)
        if kind != frames.APPEND or not self._is_erased(topic, seq, seq) or flags & frames.ERASED:
            return None
        frames.HEADER.pack_into(
            data, at, length, kind, flags | frames.ERASED, topic, seq, ts, node_len, tag_len, data_len
        )
        payload = at + frames.HEADER_BYTES + node_len + tag_len
        data[payload : payload + data_len] = bytes(data_len)
        digest_at = at + 4 + length - frames.DIGEST_BYTES
        data[digest_at : digest_at + 8] = xxh3_64_digest(bytes(data[at:digest_at]))
        return at, at + 4 + length

    def _blank_stored(self, data: bytearray, first_seq: int) -> list[tuple[int, int]]:
        """Blank the frames to erase in a .data file, which may be corrupt; returns the changed byte ranges.

        Bytes between two valid records are zeroed if a record to erase may be among them.
        """
        changed: list[tuple[int, int]] = []
        at, next_seq = HEADER_BYTES, first_seq
        while at < len(data):
            end = self._valid_frame_end(data, at)
            if not end:
                end = self._next_valid_frame(data, at + 1)
                last_seq = _seq_at(data, end) - 1 if end < len(data) else self._lasts[-1]
                if self._is_erased(self._log.id, next_seq, last_seq):
                    data[at:end] = bytes(end - at)
                    changed.append((at, end))
            else:
                next_seq = _seq_at(data, at) + 1
                span = self._blank(data, at)
                if span is not None:
                    changed.append(span)
            at = end
        return changed

    def _valid_frame_end(self, data: bytearray, at: int) -> int:
        """End of the valid record of this topic that starts at `at`; 0 if there is none."""
        if at + frames.OVERHEAD_BYTES > len(data) or data[at + 6 : at + 14] != self._topic:
            return 0
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        return end if end <= len(data) and frames.frame_is_valid(bytes(data[at:end])) else 0

    def _next_valid_frame(self, data: bytearray, at: int) -> int:
        """Start of the next valid record of this topic, else the end of the data. The topic id is at byte 6 of a record."""
        while (found := data.find(self._topic, at + 6)) >= 0:
            at = found - 6
            if self._valid_frame_end(data, at):
                return at
            at += 1
        return len(data)

    # -- segments ------------------------------------------------------------------------------------------

    def _plan_segments(self) -> None:
        directory = self._reader.topic_dir(self._log.id)
        names = self._disk.list(directory)
        for name in names:
            parsed = parse_segment_name(name)
            if parsed is None or parsed[2] != "data" or parsed[0] > self._lasts[-1]:
                continue
            path = f"{directory}/{name}"
            handle = self._disk.open(path)
            try:
                data = bytearray(self._disk.read(handle, 0, self._disk.size(handle)))
            finally:
                self._disk.close(handle)
            before = bytes(data)
            changed = self._blank_stored(data, parsed[0])
            self.patches += [(path, start, bytes(data[start:end])) for start, end in changed]
            if changed and f"{segment_name(parsed[0], parsed[1])}.sum" in names:
                self._plan_sum(directory, parsed[0], parsed[1], before, data)

    def _plan_sum(
        self, directory: str, first_seq: int, generation: int, before: bytes, after: bytearray
    ) -> None:
        """Patch the block digests. The chain still refers to the digest that the segment was first sealed with.

        A corrupt block keeps its old digest, because a new one would make it look valid.
        """
        try:
            summary, digest = read_sum(self._disk, directory, first_seq, generation)
        except Corrupt:
            return  # left by an unfinished checkpoint; nothing uses it
        blocks = list(summary.blocks)
        for i, digest_before in enumerate(summary.blocks):
            block = slice(i * BLOCK_BYTES, min((i + 1) * BLOCK_BYTES, summary.data_bytes))
            if xxh(before[block]) == digest_before:
                blocks[i] = xxh(bytes(after[block]))
        origin = summary.origin if any(summary.origin) else digest
        summary = msgspec.structs.replace(summary, blocks=blocks, origin=origin)
        path = f"{directory}/{segment_name(first_seq, generation)}.sum"
        self.patches.append((path, 0, with_digest(SUM_MAGIC, msgspec.msgpack.encode(summary))))

    # -- snapshots -----------------------------------------------------------------------------------------

    def _plan_snapshots(self) -> None:
        """The frames of a small topic are in its snapshot row."""
        for number in list_snapshots(self._disk, self._meta_dir):
            path = snapshot_path(self._meta_dir, number)
            try:
                rows = read_snapshot(self._disk, self._meta_dir, number)[1]
            except Corrupt:
                self.corrupt_snapshots.append(number)
                continue
            row = next((row for row in map(_topic_row, rows) if row.id == self._log.id), None)
            if row is None or row.inline is None or not row.inline[2]:
                continue
            data = bytearray(read_file(self._disk, path))
            start = data.find(row.inline[2])
            changed = self._blank_frames(data, start, start + len(row.inline[2]))
            if changed:
                self.patches += [(path, first, bytes(data[first:end])) for first, end in changed]
                self.patches.append((path, len(data) - 8, xxh(bytes(data[:-8]))))

    # -- the log -------------------------------------------------------------------------------------------

    def _scan_log(self) -> Iterator[ScannedFile]:
        for path, number, handle, position in self._files:
            scanned = scan(path, number, self._disk.read(handle, 0, position))
            if scanned is not None and scanned.envelopes:
                yield scanned

    def _plan_log(self) -> None:
        previous: dict[tuple[int, int], bytes] = {}  # file and lsn → new digest of an envelope that changed
        starts: list[WalStart | None] = []
        is_cut, last_lsn = False, 1 << 64
        for scanned in self._scan_log():
            path, number = scanned.path, scanned.number
            start = start_of(scanned)
            is_cut |= bool(scanned.bad_at) or start is None or start.previous_lsn > last_lsn
            last_lsn = scanned.envelopes[-1].lsn
            starts.append(start)
            content = bytearray(scanned.data)
            for i, envelope in enumerate(scanned.envelopes):
                changed = self._blank_frames(content, envelope.start, envelope.end)
                if i == 0:
                    changed += self._update_chain(content, scanned, envelope, previous)
                if not changed:
                    continue
                digest = self._update_digest(content, envelope)
                previous[number, envelope.lsn] = digest
                self.patches += [(path, start, bytes(content[start:end])) for start, end in changed]
                self.patches.append((path, envelope.start - 8, digest))
        if is_cut:
            self._plan_discarded(starts)

    def _plan_discarded(self, starts: list[WalStart | None]) -> None:
        """Zero entries that a crash left half-written: they may hold a record that was written again, maybe with another seq."""
        reached = 1 << 64
        for scanned, start, bound in zip(self._scan_log(), starts, last_valid_lsns(starts), strict=True):
            reached = min(reached, start.previous_lsn) if start is not None else 0
            spans, reached = stale_ranges(scanned, bound, reached)
            self.patches += [(scanned.path, first, bytes(end - first)) for first, end in spans]

    @staticmethod
    def _update_digest(content: bytearray, envelope: Envelope) -> bytes:
        head = bytes(content[envelope.start - 48 : envelope.start - 8])
        digest = xxh3_64_digest(bytes(content[envelope.start : envelope.end]), xxh3_64_intdigest(head))
        content[envelope.start - 8 : envelope.start] = digest
        return digest

    @staticmethod
    def _update_chain(
        content: bytearray, scanned: ScannedFile, envelope: Envelope, previous: dict[tuple[int, int], bytes]
    ) -> list[tuple[int, int]]:
        """Update a file's first frame if the digest of the previous file's last envelope, which it holds, has changed."""
        columns = frames.decode_columns(bytes(content), [envelope.start])
        if int(columns.headers["type"][0]) != frames.WAL_START:
            return []
        start = msgspec.msgpack.decode(columns.payload(0), type=WalStart)
        digest = previous.get((start.previous_file, start.previous_lsn))
        if digest is None:
            return []
        start = msgspec.structs.replace(start, previous_digest=digest)
        frame = frames.encode_control(frames.WAL_START, 0, int(columns.headers["ts"][0]), start)
        content[envelope.start : envelope.start + len(frame)] = frame
        return [(envelope.start, envelope.start + len(frame))]


def _topic_row(raw: bytes) -> TopicRow:
    return msgspec.msgpack.decode(raw, type=TopicRow)


def _seq_at(data: bytearray, at: int) -> int:
    return int.from_bytes(data[at + 14 : at + 22], "little")
