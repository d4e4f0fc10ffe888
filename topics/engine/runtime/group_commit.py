"""Group commit: writes the staged group as one log envelope, syncs if required, then publishes its ops and sends replies.

An op that needs no sync is published as soon as its group is written. Any other is parked until the log is synced up to its
group, and so are later ops of the same topic. A failed write or sync is final: `_fail_shard`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import get_args

from topics.api import limits
from topics.api.config import EngineConfig
from topics.api.errors import Conflict, ShardReadOnly
from topics.engine.cold.merge.service import MergeService
from topics.engine.commands.merges import MergeCommand
from topics.engine.commands.topics import Append, Change
from topics.engine.core.clock import EngineClock
from topics.engine.core.ports import Clock, Disk, SegmentStore
from topics.engine.core.tasks import Lane
from topics.engine.reading.reader import Reader
from topics.engine.shard.appends import frame_bytes_at_most
from topics.engine.shard.shard import Shard
from topics.engine.storage.files import is_full, is_out_of_resources
from topics.engine.storage.reserve import RESERVE_NAME, Reserve
from topics.engine.storage.wal import ENVELOPE_BYTES, FILE_HEADER_BYTES, Wal, WalFile
from topics.engine.topic.log import Op
from topics.engine.upkeep.checkpoint import Checkpointer

START_ENVELOPE_BYTES = 512  # a file's first envelope and the alignment after it
FULL_RETRY_MS = 1000
SPACE_CHECK_MS = 1000

COUNTERS = (
    "seals", "rotations", "torn", "swaps", "checkpoints", "erases", "recoveries", "syncs",
    "batches", "frames", "bytes_written", "txn_committed", "txn_expired", "txn_left",
)  # fmt: skip


class GroupCommit(ABC):
    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        config: EngineConfig,
        cold: SegmentStore | None,
        absent: frozenset[str],
    ) -> None:
        self._disk = disk
        self._cold_store = cold
        self.config = config
        self.clock = EngineClock(clock)
        self.wal = Wal(disk, f"{config.shard_dir}/wal", shard=config.shard, file_bytes=config.wal_file_bytes)
        self.reserve = Reserve(disk, f"{config.shard_dir}/{RESERVE_NAME}", config.reserve_bytes)
        self.reader = Reader(disk, config.topics_dir, config.cache_bytes, config.cold_cache_bytes)
        self.shard = Shard(config, self.clock, self.reader, disk, absent)
        self.shard.state.make_room = self._make_room
        self.shard.state.events.failed.append(self._close_lanes)
        self.counters = self.shard.state.counters
        for name in COUNTERS:
            self.counters.setdefault(name, 0)
        self.checkpointer = Checkpointer(disk, self.shard, self.wal, self.reader, config)
        self.merge_service = MergeService(disk, cold, self.shard, self.reader, self.checkpointer, config)
        self._has_merges = "merges" not in absent
        if self._has_merges:
            self.shard.state.handlers |= dict.fromkeys(get_args(MergeCommand), self.merge_service.handle)
        self._parked: dict[int, list[Op]] = {}  # lsn → ops to publish once the log is synced up to it
        self._parked_since_ms = 0  # since when the oldest of them waits for a sync to start
        self._sync_running = False
        self._spare_running = False
        self._unsynced_since_ms: int | None = None
        self._awaited_lsn = 0  # the highest that a task waits for
        self._full_retry_ms: int | None = None
        self._space_check_ms = 0
        self.free_bytes = -1  # free disk space at the last check; -1: not checked
        # Background tasks: they wait for syncs, and end when the log fails.
        self._main_lane = Lane("a checkpoint")
        self._cold_lane = Lane("the cold tier")
        self._compaction_lane = Lane("a segment")

    @abstractmethod
    def _submit(
        self,
        kind: str,
        work: Callable[[], object],
        done: Callable[[object, BaseException | None], None],
        held_ms: int = 0,
    ) -> None:
        """Run `work` off the loop; `done` is called with its result in a later turn."""

    @property
    def _lanes(self) -> list[Lane]:
        own = [self._main_lane, self._cold_lane, self._compaction_lane]
        return own + [lane for owner in self.shard.state.task_owners for lane in owner.lanes]

    # -- commit --------------------------------------------------------------------------------------------

    def _begin_group(self) -> None:
        wal = self.wal
        if not wal.files or self.shard.state.read_only is not None:
            return
        self.shard.state.log_full = self.checkpointer.log_share >= 1
        active = wal.files[-1]
        room = active.capacity - active.position
        if wal.spare is not None:
            room = max(room, wal.spare.capacity - FILE_HEADER_BYTES - START_ENVELOPE_BYTES)
        self.shard.state.begin_group(
            active.number, active.position + ENVELOPE_BYTES, room - ENVELOPE_BYTES - 8
        )

    def prepare_room(self, command: Append) -> bool:
        """Whether a large write may be handled now: it fits an existing log file, or waiting would not help.

        If not, a large enough file is created off the loop; call again when a job has ended.
        """
        shard, records = self.shard, command.records
        size = frame_bytes_at_most(
            records, command.idempotency_key, sum(map(len, records.payloads)), per_tag=True
        )
        is_stuck = shard.state.disk_full or shard.state.low_space or shard.state.read_only is not None
        if shard.state.frame_bytes + size <= shard.state.room_bytes or is_stuck:
            return True
        self._request_spare(_file_bytes(size) + limits.MIB)  # some extra: other writes may come first
        return False

    def _make_room(self, size: int) -> bool:
        """Create a spare log file that fits a group of `size` bytes; the commit then moves the group there."""
        if self.shard.state.read_only is not None:
            return False
        try:
            file = self.wal.make_file(self.wal.take_number(), max(_file_bytes(size), self.wal.file_bytes))
        except OSError as error:
            if is_out_of_resources(error):
                self._note_full(error)
                return False
            self._fail_shard(f"a log file could not be created: {error}")
            raise ShardReadOnly(str(error)) from error
        unused, self.wal.spare = self.wal.spare, file
        self.shard.state.room_bytes = (
            file.capacity - FILE_HEADER_BYTES - START_ENVELOPE_BYTES - ENVELOPE_BYTES - 8
        )
        if unused is not None:
            with suppress(OSError):  # it is empty; the next start removes it
                self.checkpointer.remove_log_file(unused)
        return True

    def _commit(self) -> None:
        """Write the staged group as one envelope; publish ops that need no sync, park the others."""
        shard = self.shard
        if not shard.state.frames and not shard.state.ops:
            return
        ops = shard.state.ops
        lsn = 0
        if shard.state.frames:
            may_survive = False
            try:
                if shard.state.frame_bytes + ENVELOPE_BYTES > self.wal.active.remaining:
                    self._rotate()
                may_survive = True
                lsn = self._write_group()
            except OSError as error:
                reason = f"the log could not be written: {error}"
                self._fail_shard(reason, log_failed=True, group_may_survive=may_survive)
                return
        shard.state.committed(lsn)
        shard.state.written_lsn, shard.state.publishing_lsn = self.wal.last_lsn, lsn
        for op in ops:
            log = op.log
            if op.unordered:
                self.shard.state.publish(op)
                continue
            if op.sync and self.wal.last_lsn > self.wal.synced_lsn:
                gate = lsn or self.wal.last_lsn
                log.gate_lsn = max(log.gate_lsn, gate)
            elif log.gate_lsn > self.wal.synced_lsn and log.pending > 1:
                pass  # waits for the topic's earlier ops
            else:
                self.shard.state.publish(op)
                continue
            if not self._parked and not self._sync_running:
                self._parked_since_ms = self.clock.mono_ms
            self._parked.setdefault(log.gate_lsn, []).append(op)
        self._begin_group()

    def _write_group(self) -> int:
        shard = self.shard
        body = b"".join(shard.state.frames)
        lsn = self.wal.append(body)
        self.reader.tail_cache.add(shard.state.file_number, shard.state.frame_offset, body)
        counters = self.counters
        counters["batches"] += 1
        counters["frames"] += shard.state.frame_count
        counters["bytes_written"] += len(body) + ENVELOPE_BYTES
        if self._unsynced_since_ms is None:
            self._unsynced_since_ms = self.clock.mono_ms
        return lsn

    def _rotate(self) -> None:
        wal = self.wal
        file = wal.spare
        assert file is not None, "log space was reserved"
        wal.spare = None
        wal.begin_file(file, self.clock.now_ms)
        self.reader.wal_handles[file.number] = file.handle
        self.shard.state.move_group(file.number, wal.next_frame_offset)
        self.counters["rotations"] += 1
        self._request_spare()

    # -- spare files and a full disk -----------------------------------------------------------------------

    def _request_spare(self, capacity: int = 0) -> None:
        """Create and zero-fill the next log file ahead of time, off the loop; refill the disk reserve first.

        `capacity`: its minimum size in bytes; a smaller spare is replaced.
        """
        has_spare = self.wal.spare is not None and self.wal.spare.capacity >= capacity
        has_all = has_spare and self.reserve.is_complete
        if self._spare_running or has_all or self.shard.state.read_only is not None:
            return
        self._spare_running = True
        number = None if has_spare else self.wal.take_number()
        capacity = max(capacity, self.wal.file_bytes)

        def make() -> WalFile | None:
            self.reserve.fill()
            return None if number is None else self.wal.make_file(number, capacity)

        self._submit("spare", make, self._spare_made)

    def _spare_made(self, file: object, error: BaseException | None) -> None:
        self._spare_running = False
        if error is None:
            if not isinstance(file, WalFile):
                self._request_spare()  # only the reserve was filled; the spare may have been used since
            elif file.number > self.wal.active.number and (
                self.wal.spare is None or self.wal.spare.capacity < file.capacity
            ):
                unused, self.wal.spare = self.wal.spare, file
                if unused is not None:
                    self.checkpointer.remove_log_file(unused)
            else:  # a newer file was created synchronously since, and log files must have ascending numbers
                self.checkpointer.remove_log_file(file)
                self._request_spare()
            self.shard.state.disk_full = False
            self._begin_group()
        elif is_out_of_resources(error):
            self._note_full(error)
        else:
            self._fail_shard(f"a log file could not be created: {error}")

    def _note_full(self, error: BaseException) -> None:
        """The disk is full: without a spare log file appends are refused, deletes still use the active file.

        Retried every FULL_RETRY_MS.
        """
        self.shard.state.disk_full = self.wal.spare is None
        counter = "disk_full" if is_full(error) else "out_of_resources"
        self.counters[counter] = self.counters.get(counter, 0) + 1
        self._full_retry_ms = self.clock.mono_ms + FULL_RETRY_MS

    def _check_free_space(self) -> None:
        """Refuse appends when free space is below min_free_bytes, which leaves space for deletes and checkpoints."""
        self._space_check_ms = self.clock.mono_ms + SPACE_CHECK_MS
        try:
            free = self._disk.free_bytes()
        except OSError:
            return  # the next write will report it
        self.free_bytes = free
        low = free < self.config.min_free_bytes
        if low and not self.shard.state.low_space:
            self.counters["low_space"] = self.counters.get("low_space", 0) + 1
        self.shard.state.low_space = low

    # -- sync ----------------------------------------------------------------------------------------------

    def _schedule_sync(self) -> None:
        """Start a sync if replies wait for one; writes that arrive while it runs are covered by the next."""
        if (
            self._sync_running
            or self.shard.state.read_only is not None
            or self.wal.last_lsn == self.wal.synced_lsn
        ):
            return
        since, now_ms = self._unsynced_since_ms, self.clock.mono_ms
        due = since is not None and now_ms - since >= limits.BACKGROUND_SYNC_MS
        due = due or self._awaited_lsn > self.wal.synced_lsn
        held_ms = (
            now_ms - self._parked_since_ms if self._parked and self.shard.delivery.measures.window_ms else 0
        )
        if not due and not (self._parked and held_ms >= self.shard.delivery.measures.window_ms):
            return
        files, lsn = self.wal.begin_sync()
        self._sync_running = True
        self._unsynced_since_ms = None
        disk = self._disk

        def sync() -> int:
            for file in files:
                disk.sync(file.handle)
            return lsn

        self._parked_since_ms = now_ms  # for ops parked from now on
        self._submit("sync", sync, self._synced, held_ms)

    def _synced(self, lsn: object, error: BaseException | None) -> None:
        self._sync_running = False
        if error is not None:
            self._fail_shard(f"the log could not be synced: {error}", log_failed=True)
            return
        if self.shard.state.read_only is not None:
            return
        assert isinstance(lsn, int)
        self.counters["syncs"] += 1
        self.wal.synced_lsn = max(self.wal.synced_lsn, lsn)
        self.shard.state.synced(lsn)
        while self._parked:
            gate = next(iter(self._parked))
            if gate > lsn:
                break
            self.shard.state.publishing_lsn = gate
            for op in self._parked.pop(gate):
                self.shard.state.publish(op)
        if self.wal.last_lsn > lsn and self._unsynced_since_ms is None:
            self._unsynced_since_ms = self.clock.mono_ms
        for lane in self._lanes:
            if lane.wait_lsn <= lsn:
                lane.wait_lsn = 0

    # -- failure -------------------------------------------------------------------------------------------

    def _fail_shard(self, reason: str, *, log_failed: bool = False, group_may_survive: bool = False) -> None:
        """Make the shard read-only after a failed write or sync: discard staged state and answer waiting requests.

        Changes that were written to the log, or perhaps were (`group_may_survive`), may reappear after a restart: their
        outcome is unknown. Changes that were only staged are refused; they have no effect.
        """
        shard = self.shard
        if shard.state.read_only is not None:
            return
        logged = [op for ops in self._parked.values() for op in ops]
        staged = shard.state.ops
        if group_may_survive:
            logged, staged = logged + staged, []
        self._parked = {}
        self._reject_ops(logged, ShardReadOnly(reason, unknown=True))
        self._reject_ops(staged, ShardReadOnly(reason))
        shard.state.fail(reason)
        if log_failed:
            self.checkpointer.write_latch_file()
        for op in logged + staged:
            if op.command is not None and not isinstance(op.command, Change):
                shard.state.handle(op.token, op.command)  # a read: answered from published state
        for long in shard.state.long.end():
            if isinstance(long.command, Change):
                shard.state.ready.append((long.token, ShardReadOnly(reason, unknown=True)))
            else:
                shard.state.handle(long.token, long.command)

    def _close_lanes(self, reason: str) -> None:
        for lane in self._lanes:
            if not lane.blocked:  # else when its job ends, which is running on another thread
                lane.close()

    def _reject_ops(self, ops: list[Op], error: ShardReadOnly) -> None:
        for op in ops:
            if op.erase is not None:
                self.shard.state.ready.append((op.erase.token, error))
            elif isinstance(op.result, Conflict):
                self.shard.state.ready.append((op.token, ShardReadOnly(error.reason)))  # refused in any case
            elif isinstance(op.command, Change):
                # It has changed nothing, but its reply depends on a change with an unknown outcome.
                self.shard.state.ready.append((op.token, ShardReadOnly(error.reason, unknown=True)))
            elif op.token is not None and op.command is None:
                self.shard.state.ready.append((op.token, error))


def _file_bytes(size: int) -> int:
    """The capacity of a log file that fits a group of this size."""
    return size + FILE_HEADER_BYTES + START_ENVELOPE_BYTES + ENVELOPE_BYTES + 8
