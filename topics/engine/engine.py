"""One shard as a whole: state machine, log, checkpoints, behind one call a turn.

    outcome = engine.turn(requests)      stage → write one envelope → publish and answer what may be
    job.run()                            the shell, on another thread: what blocks (syncs, zero-filling, sealing, cold reads)
    outcome = engine.finish(job, error)  its result, good or bad, is just another event

A reply that promises durability stays inside until the job that backs it is reported done: the shell cannot ack
early. The clock is read once a turn, so a batch agrees on "now". Background work runs in slices between turns: one task at
a time for checkpoints and erases, one for the cold tier, and one for segments that are written again without their dead, so that
none ever waits for the other's disk.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from topics.engine import limits
from topics.engine.checkpoint import Checkpointer
from topics.engine.cold import READ_KIND, ColdReads
from topics.engine.cold_files import MOVE_KIND
from topics.engine.commands import Change, Command
from topics.engine.config import EngineConfig
from topics.engine.consolidation import Consolidator
from topics.engine.engine_clock import EngineClock
from topics.engine.erase import erase_steps
from topics.engine.errors import Conflict, ShardReadOnly, TopicsError
from topics.engine.files import is_full, is_out_of_resources
from topics.engine.ports import Clock, Disk, SegmentStore
from topics.engine.reader import Reader
from topics.engine.reclaim import Reclaimer
from topics.engine.recovery import Recovery
from topics.engine.recovery_report import RecoveryReport
from topics.engine.relocation import Relocator
from topics.engine.shard import Shard
from topics.engine.staging import EraseRequest
from topics.engine.tasks import Blocking, Steps, WaitSynced, WaitUntil
from topics.engine.topic_log import Op, TopicLog
from topics.engine.transactions import Transaction
from topics.engine.wal import ENVELOPE_BYTES, FILE_HEADER_BYTES, Wal, WalFile

START_ENVELOPE_BYTES = 512  # a file's first envelope and the alignment behind it
SLICES_PER_TURN = 64
SLICE_MS = 1  # by a clock of whole milliseconds: a slice takes between one and two
FULL_RETRY_MS = 1000
CHECKPOINT_LOOK_MS = 5000
SPACE_LOOK_MS = 1000
COLD_KINDS = frozenset(
    (READ_KIND, MOVE_KIND)
)  # jobs that may take as long as they like, and are not waited for at the end
TRUST_MS = 60_000  # what was read and proved right is believed for so long: disks rot while they run

COUNTERS = (
    "seals", "rotations", "torn", "swaps", "checkpoints", "erases", "recoveries", "syncs",
    "batches", "frames", "bytes_written", "txn_committed", "txn_expired", "txn_left",
)  # fmt: skip

Request: TypeAlias = tuple[object, Command]


@dataclass(slots=True, eq=False)
class Job:
    """Blocking disk work. Run it off the loop, then report it to `finish`."""

    kind: str
    work: Callable[[], object]
    done: Callable[[object, BaseException | None], None]
    value: object = None
    held_ms: int = 0  # how long a sync was put off for more to come

    def run(self) -> None:
        self.value = self.work()


@dataclass(slots=True)
class Outcome:
    """What the shell does after a turn."""

    replies: list[tuple[object, object]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    wake_at_ms: int | None = None  # on the monotonic clock: the next turn comes no later than this


@dataclass(slots=True, eq=False)
class _Lane:
    """One task at a time, and what it waits for."""

    task: Steps | None = None
    blocked: bool = False  # a job of it is out
    wait_lsn: int = 0
    until: Callable[[], bool] | None = None

    @property
    def is_runnable(self) -> bool:
        if self.task is None or self.blocked or self.wait_lsn:
            return False
        return self.until is None or self.until()


class Engine:
    def __init__(
        self, disk: Disk, clock: Clock, config: EngineConfig, cold: SegmentStore | None = None
    ) -> None:
        """`cold`: where old segments go; without it they stay."""
        self._disk = disk
        self._cold_store = cold
        self.config = config
        self.clock = EngineClock(clock)
        self.wal = Wal(disk, f"{config.shard_dir}/wal", shard=config.shard, file_bytes=config.wal_file_bytes)
        self.reader = Reader(disk, config.topics_dir, config.cache_bytes, config.cold_cache_bytes)
        self.shard = Shard(config, self.clock, self.reader, disk.boot_id())
        self.shard.make_room = self._make_room
        self.shard.disk = disk
        self.counters = self.shard.counters
        for name in COUNTERS:
            self.counters.setdefault(name, 0)
        self.checkpointer = Checkpointer(disk, self.shard, self.wal, self.reader, config)
        self.consolidator = Consolidator(disk, cold, self.shard, self.reader, self.checkpointer, config)
        self.shard.merge = self.consolidator.handle
        self.relocator = Relocator(
            disk, cold, self.shard, self.reader, self.checkpointer, config, self.consolidator
        )
        self.reclaimer = Reclaimer(disk, self.shard, self.reader, self.checkpointer, config)
        self.shard.cold = self.cold = ColdReads(cold, self.reader.cold, self._submit)
        self.report = RecoveryReport()
        self._parked: dict[int, list[Op]] = {}  # lsn → ops that become visible when it is synced
        self._parked_since_ms = 0  # the oldest of them that no sync has begun for
        self._jobs: list[Job] = []
        self._outstanding = 0  # jobs that the shell has and has not reported
        self._sync_running = False
        self._spare_running = False
        self._unsynced_since_ms: int | None = None
        self._full_retry_ms: int | None = None
        self._main = _Lane()
        self._aside = _Lane()  # for the cold tier
        self._sinks: dict[Transaction, _Lane] = {}  # transactions that are worked on
        self._sinks_stopped = False
        self._rewrites = _Lane()  # for the reclaimer
        self._cold_stopped = False
        self._space_look_ms = 0
        self.free_bytes = -1  # on the disk, at the last look; -1: there was none
        self._task_kind = ""  # of the task at hand, or of the last one while others wait
        self._checkpoint_wanted = False
        self._look_at_ms = 0
        self._trust_until_ms = 0
        self.closed = False

    @classmethod
    def open(cls, disk: Disk, clock: Clock, config: EngineConfig, cold: SegmentStore | None = None) -> Engine:
        """Recover a shard, or begin a new one."""
        engine = cls(disk, clock, config, cold)
        for _ in engine.recover_steps():
            pass
        return engine

    def recover_steps(self) -> Generator[float, None, None]:
        """Recover in slices, yielding the progress from 0 to 1."""
        recovery = Recovery(
            self._disk, self.shard, self.wal, self.reader, self.checkpointer, self.config, self._cold_store
        )
        self.report = recovery.report
        yield from recovery.steps()
        self.counters["recoveries"] += 1
        self.counters["torn"] += len(self.report.torn)
        self._look_at_ms = self.clock.mono_ms + CHECKPOINT_LOOK_MS
        self.shard.start_claims(self.wal.active.salt if self.wal.files else 0)
        self.relocator.start(recovery.loader)
        self.shard.start_transactions()
        self.reclaimer.start()
        if self.shard.read_only is None:
            self._ask_for_spare()

    # -- the turn ------------------------------------------------------------------------------------------

    def turn(self, requests: Sequence[Request]) -> Outcome:
        if self.closed:
            raise RuntimeError("the engine is closed")
        shard = self.shard
        self.reader.cold.trim()  # whoever waited for blocks has looked at them by now, also after the last turn
        self._begin_group()
        shard.begin_turn(self.clock.read(), busy=bool(requests))
        if self.clock.mono_ms >= self._trust_until_ms:
            self._trust_until_ms = self.clock.mono_ms + TRUST_MS
            self.reader.distrust()
        if self.config.min_free_bytes and self.clock.mono_ms >= self._space_look_ms:
            self._look_at_space()
        handle = shard.handle
        for token, command in requests:
            if shard.frame_bytes > limits.GROUP_BYTES_MAX or shard.frame_count > limits.GROUP_FRAMES_MAX:
                self._commit()
            handle(token, command)
        self._commit()
        return self._finish_turn()

    @property
    def has_jobs(self) -> bool:
        """Whether something was begun since the last turn, from outside: only a turn hands it out."""
        return bool(self._jobs)

    def finish(self, job: Job, error: BaseException | None = None) -> Outcome:
        """A job has ended."""
        if job.kind not in COLD_KINDS:
            self._outstanding -= 1
        elif self._cold_stopped:
            return Outcome([], [], self._wake_at_ms())
        self.reader.cold.trim()
        self._begin_group()
        self.shard.begin_turn(self.clock.read(), busy=False)
        job.done(job.value, error)
        self._commit()
        return self._finish_turn()

    def _finish_turn(self) -> Outcome:
        shard = self.shard
        self._look_at_log()
        if self._has_background_work():
            self._run_background()
        if self._cold_store is not None:
            self._tend_cold()
        if shard.transactions:
            self._tend_transactions()
        if self.reclaimer.has_work or self._rewrites.task is not None:
            self._tend_reclaim()
        if shard.is_due(self.clock.mono_ms):
            shard.deliver()
        if shard.ops or shard.frames:
            self._commit()
        self._schedule_sync()
        if self._full_retry_ms is not None and self.clock.mono_ms >= self._full_retry_ms:
            self._full_retry_ms = None
            self._ask_for_spare()
            # It may free log files.
            self._checkpoint_wanted = bool(shard.touched) or self.checkpointer.would_release()
        if self.config.verify:
            self.check_invariants()
        replies, shard.ready = shard.ready, []
        jobs, self._jobs = self._jobs, []
        self._outstanding += sum(job.kind not in COLD_KINDS for job in jobs)
        return Outcome(replies, jobs, self._wake_at_ms())

    def _look_at_log(self) -> None:
        """Whether a checkpoint is due: now and then, but at once when much was written. One that failed for want of space waits
        for its retry."""
        is_running = self._main.task is not None and self._task_kind == "checkpoint"
        is_long = (
            self.checkpointer.log_share * limits.LOG_CHECKPOINT_PARTS >= 1 and self._full_retry_ms is None
        )
        if self.clock.mono_ms >= self._look_at_ms:
            self._look_at_ms = self.clock.mono_ms + CHECKPOINT_LOOK_MS
            is_long = is_long or self.checkpointer.is_due(self.clock.mono_ms)
        if is_long and not is_running:
            self._checkpoint_wanted = True

    def _wake_at_ms(self) -> int | None:
        """The earliest moment at which something is due without a request."""
        times: list[int] = []
        if self.shard.waiter_heap:
            times.append(self.shard.waiter_heap[0][0])
        deliver_at_ms = self.shard.deliver_at_ms
        if deliver_at_ms is not None:
            times.append(deliver_at_ms)
        if self.shard.read_only is not None:
            return min(times, default=None)  # nothing is handed out, synced, written or tried again any more
        claims_due_ms = self.shard.claims_due_ms
        if claims_due_ms is not None:
            times.append(claims_due_ms)
        if self._unsynced_since_ms is not None and not self._sync_running:
            times.append(self._unsynced_since_ms + limits.BACKGROUND_SYNC_MS)
            if self._parked:
                times.append(self._parked_since_ms + self.shard.measures.window_ms)
        if self._full_retry_ms is not None:
            times.append(self._full_retry_ms)
        if self._main.is_runnable or (self._main.task is None and self._has_background_work()):
            times.append(self.clock.mono_ms)
        if self.shard.touched or self.checkpointer.holds_back:
            times.append(self._look_at_ms)
        if self.shard.transactions and not self._sinks_stopped:
            times += self._transaction_times()
        if self._cold_store is not None and not self._cold_stopped:
            times += self._cold_times()
        times += self._reclaim_times()
        return min(times, default=None)

    def _cold_times(self) -> list[int]:
        times = [self.cold.due_ms] if self.cold.due_ms is not None else []
        if self._aside.task is None:
            if self.relocator.has_work:
                times.append(max(self.relocator.retry_ms, self.clock.mono_ms))
        elif self._aside.is_runnable:
            times.append(self.clock.mono_ms)
        elif self.relocator.pace.wake_ms is not None:
            times.append(self.relocator.pace.wake_ms)
        times += self._merge_times()
        return times

    def _merge_times(self) -> list[int]:
        """When a commit's client must hear that it goes on, and when time ends what is kept for jobs and readers."""
        consolidator, clock = self.consolidator, self.clock
        times = [consolidator.wait_until_ms] if consolidator.wait_until_ms is not None else []
        due_ms = consolidator.next_due_ms()
        if due_ms is not None and self._aside.task is None and due_ms > clock.now_ms:
            times.append(clock.mono_ms + due_ms - clock.now_ms)
        return times

    def _transaction_times(self) -> list[int]:
        due_ms = self.shard.transactions_due_ms
        times = [due_ms] if due_ms is not None else []
        if (
            any(lane.is_runnable for lane in self._sinks.values())
            or self.shard.busy.keys() - self._sinks.keys()
        ):
            times.append(self.clock.mono_ms)
        return times

    def _reclaim_times(self) -> list[int]:
        lane, now_ms = self._rewrites, self.clock.mono_ms
        if lane.task is None:
            return [max(self.reclaimer.retry_ms, now_ms)] if self.reclaimer.has_work else []
        if lane.is_runnable:
            return [now_ms]
        wake_ms = self.reclaimer.pace.wake_ms
        return [wake_ms] if wake_ms is not None else []

    # -- commit --------------------------------------------------------------------------------------------

    def _begin_group(self) -> None:
        wal = self.wal
        if not wal.files or self.shard.read_only is not None:
            return
        self.shard.log_full = self.checkpointer.log_share >= 1
        active = wal.files[-1]
        room = active.capacity - active.position
        if wal.spare is not None:
            room = max(room, wal.spare.capacity - FILE_HEADER_BYTES - START_ENVELOPE_BYTES)
        self.shard.begin_group(active.number, active.position + ENVELOPE_BYTES, room - ENVELOPE_BYTES - 8)

    def _make_room(self, size: int) -> bool:
        """A group of `size` bytes must fit one file. Make a spare for it; the commit then moves the group there."""
        if self.shard.read_only is not None:
            return False
        needed = size + FILE_HEADER_BYTES + START_ENVELOPE_BYTES + ENVELOPE_BYTES + 8
        try:
            file = self.wal.make_file(self.wal.take_number(), max(needed, self.wal.file_bytes))
        except OSError as error:
            if is_out_of_resources(error):
                self._note_full(error)
                return False
            self._latch(f"a log file could not be made: {error}")
            raise ShardReadOnly(str(error)) from error
        unused, self.wal.spare = self.wal.spare, file
        self.shard.room_bytes = file.capacity - FILE_HEADER_BYTES - START_ENVELOPE_BYTES - ENVELOPE_BYTES - 8
        if unused is not None:
            with suppress(OSError):  # nothing is in it; the next start removes it
                self.checkpointer.discard_file(unused)
        return True

    def _commit(self) -> None:
        """Write what is staged as one envelope; publish what needs no sync, park the rest."""
        shard = self.shard
        if not shard.frames and not shard.ops:
            return
        ops = shard.ops
        lsn = 0
        if shard.frames:
            in_reach = False
            try:
                if shard.frame_bytes + ENVELOPE_BYTES > self.wal.active.remaining:
                    self._rotate()
                in_reach = True
                lsn = self._write_group()
            except OSError as error:
                reason = f"the log could not be written: {error}"
                self._latch(reason, log_failed=True, group_in_reach=in_reach)
                return
        shard.committed(lsn)
        shard.written_lsn, shard.publishing_lsn = self.wal.last_lsn, lsn
        for op in ops:
            log = op.log
            if op.free:
                self.shard.publish(op)
                continue
            if op.sync and self.wal.last_lsn > self.wal.synced_lsn:
                gate = lsn or self.wal.last_lsn
                log.gate_lsn = max(log.gate_lsn, gate)
            elif log.gate_lsn > self.wal.synced_lsn and log.pending > 1:
                pass  # not safe before the topic's earlier changes are
            else:
                self.shard.publish(op)
                continue
            if not self._parked and not self._sync_running:
                self._parked_since_ms = self.clock.mono_ms
            self._parked.setdefault(log.gate_lsn, []).append(op)
        self._begin_group()

    def _write_group(self) -> int:
        shard = self.shard
        body = b"".join(shard.frames)
        lsn = self.wal.append(body)
        self.reader.cache.add(shard.file_number, shard.frame_offset, body)
        counters = self.counters
        counters["batches"] += 1
        counters["frames"] += shard.frame_count
        counters["bytes_written"] += len(body) + ENVELOPE_BYTES
        if self._unsynced_since_ms is None:
            self._unsynced_since_ms = self.clock.mono_ms
        return lsn

    def _rotate(self) -> None:
        wal = self.wal
        file = wal.spare
        assert file is not None, "room was promised"
        wal.spare = None
        wal.begin_file(file, self.clock.now_ms)
        self.reader.wal_handles[file.number] = file.handle
        self.shard.move_group(file.number, wal.next_frame_offset)
        self.counters["rotations"] += 1
        self._ask_for_spare()

    # -- spare files and a full disk -----------------------------------------------------------------------

    def _ask_for_spare(self) -> None:
        """Zero-fill the next log file ahead of need, off the loop."""
        if self._spare_running or self.wal.spare is not None or self.shard.read_only is not None:
            return
        self._spare_running = True
        number, capacity = self.wal.take_number(), self.wal.file_bytes
        self._jobs.append(Job("spare", lambda: self.wal.make_file(number, capacity), self._spare_made))

    def _spare_made(self, file: object, error: BaseException | None) -> None:
        self._spare_running = False
        if error is None:
            assert isinstance(file, WalFile)
            if self.wal.spare is None and file.number > self.wal.active.number:
                self.wal.spare = file
            else:  # one was made on the spot meanwhile, and the log goes by ascending numbers
                self.checkpointer.discard_file(file)
                self._ask_for_spare()
            self.shard.disk_full = False
            self._begin_group()
        elif is_out_of_resources(error):
            self._note_full(error)
        else:
            self._latch(f"a log file could not be made: {error}")

    def _note_full(self, error: BaseException) -> None:
        """Without a spare appends wait; deletes go on in the file that is open. A look each second ends it."""
        self.shard.disk_full = self.wal.spare is None
        counter = "disk_full" if is_full(error) else "out_of_resources"
        self.counters[counter] = self.counters.get(counter, 0) + 1
        self._full_retry_ms = self.clock.mono_ms + FULL_RETRY_MS

    def _look_at_space(self) -> None:
        """Appends are refused before there is no space at all: then nothing would be left for deletes and checkpoints."""
        self._space_look_ms = self.clock.mono_ms + SPACE_LOOK_MS
        try:
            free = self._disk.free_bytes()
        except OSError:
            return  # whoever writes will hear of it
        self.free_bytes = free
        low = free < self.config.min_free_bytes
        if low and not self.shard.low_space:
            self.counters["low_space"] = self.counters.get("low_space", 0) + 1
        self.shard.low_space = low

    # -- sync ----------------------------------------------------------------------------------------------

    def _schedule_sync(self) -> None:
        """A durable reply syncs at once; the batch that gathers meanwhile is the next group."""
        if self._sync_running or self.shard.read_only is not None or self.wal.last_lsn == self.wal.synced_lsn:
            return
        since, now_ms = self._unsynced_since_ms, self.clock.mono_ms
        due = since is not None and now_ms - since >= limits.BACKGROUND_SYNC_MS
        due = due or max(lane.wait_lsn for lane in self._lanes) > self.wal.synced_lsn
        held_ms = now_ms - self._parked_since_ms if self._parked and self.shard.measures.window_ms else 0
        if not due and not (self._parked and held_ms >= self.shard.measures.window_ms):
            return
        files, lsn = self.wal.begin_sync()
        self._sync_running = True
        self._unsynced_since_ms = None
        disk = self._disk

        def sync() -> int:
            for file in files:
                disk.sync(file.handle)
            return lsn

        self._parked_since_ms = now_ms  # for what is parked from here on
        self._jobs.append(Job("sync", sync, self._synced, held_ms=held_ms))

    def _synced(self, lsn: object, error: BaseException | None) -> None:
        self._sync_running = False
        if error is not None:
            self._latch(f"the log could not be synced: {error}", log_failed=True)
            return
        if self.shard.read_only is not None:
            return
        assert isinstance(lsn, int)
        self.counters["syncs"] += 1
        self.wal.synced_lsn = max(self.wal.synced_lsn, lsn)
        self.shard.synced(lsn)
        while self._parked:
            gate = next(iter(self._parked))
            if gate > lsn:
                break
            self.shard.publishing_lsn = gate
            for op in self._parked.pop(gate):
                self.shard.publish(op)
        if self.wal.last_lsn > lsn and self._unsynced_since_ms is None:
            self._unsynced_since_ms = self.clock.mono_ms
        for lane in self._lanes:
            if lane.wait_lsn <= lsn:
                lane.wait_lsn = 0

    # -- failure -------------------------------------------------------------------------------------------

    def _latch(self, reason: str, *, log_failed: bool = False, group_in_reach: bool = False) -> None:
        """A failed write or sync is final: discard what was staged, answer those who waited, serve reads.

        What is in the log, or was on its way there (`group_in_reach`), may be back after a restart: its outcome is
        unknown. What was only staged is refused, and certainly not there.
        """
        shard = self.shard
        if shard.read_only is not None:
            return
        shard.read_only = reason
        logged = [op for ops in self._parked.values() for op in ops]
        staged = shard.ops
        if group_in_reach:
            logged, staged = logged + staged, []
        self._parked = {}
        self._give_up(logged, ShardReadOnly(reason, unknown=True))
        self._give_up(staged, ShardReadOnly(reason))
        for request in shard.erase_requests:
            if request.token is not None:
                shard.ready.append((request.token, ShardReadOnly(reason, unknown=True)))
        shard.erase_requests = []
        shard.fail_transactions(reason)
        for lane in self._lanes:
            if not lane.blocked:
                self._close_task(
                    lane
                )  # else when its job has come back: another thread is in the middle of it
        self.consolidator.refuse(ShardReadOnly(reason, unknown=True))
        topics, size = len(shard.staged), shard.bytes_live
        shard.discard_staged()
        shard.topics_unknown = max(0, topics - len(shard.staged))
        shard.bytes_unknown = max(0, size - shard.bytes_live)
        if log_failed:
            self.checkpointer.note_latch()
        for op in logged + staged:
            if op.command is not None and not isinstance(op.command, Change):
                shard.handle(op.token, op.command)  # a read: answered from what is published

    def _give_up(self, ops: list[Op], error: ShardReadOnly) -> None:
        for op in ops:
            if op.erase is not None:
                self.shard.ready.append((op.erase.token, error))
            elif isinstance(op.result, Conflict):
                self.shard.ready.append((op.token, ShardReadOnly(error.reason)))  # refused in any case
            elif isinstance(op.command, Change):
                # It has changed nothing, but its answer rested on a change that may or may not be there later.
                self.shard.ready.append((op.token, ShardReadOnly(error.reason, unknown=True)))
            elif op.token is not None and op.command is None:
                self.shard.ready.append((op.token, error))

    # -- background ----------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Begin a checkpoint with the next turn."""
        self._checkpoint_wanted = True

    def _next_task(self) -> Steps | None:
        shard = self.shard
        if shard.read_only is not None:
            return None
        gone = self._removable()
        if gone:
            self._task_kind = "removal"
            shard.gone = [log for log in shard.gone if log not in gone]
            return self.checkpointer.remove_topics(gone)
        ready = self._ready_erases()
        # A checkpoint waits for one erase at most, or clients that erase all the time would let the log grow for ever.
        # The last one of all comes after every erase.
        if ready and not (
            self._checkpoint_wanted and self._task_kind == "erase" and not self.checkpointer.closing
        ):
            self._task_kind = "erase"
            shard.erase_requests.remove(ready[0])
            return erase_steps(
                self._disk,
                shard,
                self.wal,
                self.reader,
                self.checkpointer,
                ready[0],
                self.relocator.takes_over,
            )
        if self._checkpoint_wanted:
            self._task_kind = "checkpoint"
            self._checkpoint_wanted = False
            return self.checkpointer.steps()
        self._task_kind = ""
        return None

    def _removable(self) -> list[TopicLog]:
        """Dropped topics, but for those that somebody is writing a file for."""
        at_work = {txn.log.id for txn, lane in self._sinks.items() if lane.blocked}
        return [log for log in self.shard.gone if log.id not in at_work]

    def _ready_erases(self) -> list[EraseRequest]:
        """One that somebody waits for is tried at once, to be answered; one that was put off waits for space."""
        full = self._full_retry_ms is not None
        return [
            request
            for request in self.shard.erase_requests
            if (request.token is not None or not full)
            and request.log not in (self.relocator.erasing, self.reclaimer.working_on)
        ]

    def _run_background(self) -> None:
        """Run slices of the task at hand until a slice of time is used up, it blocks, or it ends."""
        began_ms = self.clock.mono_ms
        for _ in range(SLICES_PER_TURN):
            if self._main.task is None:
                self._main.task = self._next_task()
                if self._main.task is None:
                    return
            if not self._main.is_runnable:
                return
            self._step(self._main, None, None)
            if self.shard.frames and self.shard.frame_bytes > limits.GROUP_BYTES_MAX:
                self._commit()
            self.clock.read()
            if self.clock.mono_ms - began_ms >= SLICE_MS:
                return

    def _tend_cold(self) -> None:
        """The same for the cold tier, whose work is in the store: a few steps a turn."""
        self.cold.pass_time(self.clock.mono_ms)
        self.consolidator.pass_time()
        lane = self._aside
        for _ in range(SLICES_PER_TURN):
            if lane.task is None:
                waits = self._cold_stopped or self.clock.mono_ms < self.relocator.retry_ms
                if waits or not self.relocator.has_work:
                    return
                lane.task = self.relocator.next_task()
            if not lane.is_runnable:
                return
            self._step(lane, None, None)

    @property
    def _lanes(self) -> list[_Lane]:
        return [self._main, self._aside, self._rewrites, *self._sinks.values()]

    def _tend_transactions(self) -> None:
        """One step a turn for each transaction with work to do: requests come in between."""
        shard = self.shard
        if self._sinks_stopped or shard.read_only is not None:
            return
        for txn in list(shard.busy):
            if txn not in self._sinks:
                del shard.busy[txn]
                self._sinks[txn] = _Lane(shard.transaction_steps(txn))
        for txn, lane in list(self._sinks.items()):
            if lane.is_runnable:
                self._step(lane, None, None)
                if shard.frame_bytes > limits.GROUP_BYTES_MAX:
                    self._commit()
            if lane.task is None and not lane.blocked:
                del self._sinks[txn]
        shard.pass_time_to_transactions()  # last: what is known at once is answered, also to those who do not wait

    def _tend_reclaim(self) -> None:
        """The same for segments that are written again."""
        lane, reclaimer, began_ms = self._rewrites, self.reclaimer, self.clock.mono_ms
        for _ in range(SLICES_PER_TURN):
            if lane.task is None:
                if not reclaimer.has_work or self.clock.mono_ms < reclaimer.retry_ms:
                    return
                lane.task = reclaimer.next_task()
            if not lane.is_runnable:
                return
            self._step(lane, None, None)
            if self.shard.frames:
                self._commit()
            self.clock.read()
            if self.clock.mono_ms - began_ms >= SLICE_MS:
                return

    def _submit(
        self, kind: str, work: Callable[[], object], done: Callable[[object, BaseException | None], None]
    ) -> None:
        self._jobs.append(Job(kind, work, done))

    def _step(self, lane: _Lane, value: object, error: BaseException | None) -> None:
        task, lane.task, lane.until = lane.task, None, None  # while it runs nobody can close it
        assert task is not None
        try:
            wanted = task.throw(error) if error is not None else task.send(value)
        except StopIteration:
            return
        except (OSError, TopicsError) as failure:
            self._failed(lane, failure)
            return
        lane.task = task
        if self.shard.read_only is not None:  # since it ran
            self._close_task(lane)
            return
        if isinstance(wanted, Blocking):
            lane.blocked = True
            self._submit(wanted.kind, wanted.work, lambda value, error: self._unblocked(lane, value, error))
        elif isinstance(wanted, WaitSynced):
            self._commit()
            lsn = wanted.lsn or self.wal.last_lsn
            lane.wait_lsn = lsn if lsn > self.wal.synced_lsn else 0
        elif isinstance(wanted, WaitUntil):
            lane.until = wanted.holds

    def _failed(self, lane: _Lane, failure: OSError | TopicsError) -> None:
        what = "a segment" if lane is self._rewrites else "a checkpoint"
        if lane is self._aside:
            self.relocator.failed(failure, self.clock.mono_ms)
        elif lane is not self._main and lane is not self._rewrites:
            self._latch(f"a transaction met an error that it does not know: {failure}")
        elif isinstance(failure, TopicsError):
            self._latch(f"{what} met damage: {failure}")
        elif is_out_of_resources(failure):
            self._note_full(failure)
        else:
            self._latch(f"{what} could not be written: {failure}")

    def _unblocked(self, lane: _Lane, value: object, error: BaseException | None) -> None:
        lane.blocked = False
        if self.shard.read_only is not None:
            self._close_task(lane)
            return
        if error is not None and not isinstance(error, OSError | TopicsError):
            raise error
        self._step(lane, value, error)

    @staticmethod
    def _close_task(lane: _Lane) -> None:
        task, lane.task = lane.task, None
        lane.wait_lsn, lane.until = 0, None
        if task is not None:
            task.close()

    # -- end -----------------------------------------------------------------------------------------------

    def close(self) -> Outcome:
        """Clean shutdown: commit, sync, checkpoint, snapshot. Runs its own jobs; those handed out come first."""
        if self.closed:
            return Outcome()
        self.stop_cold()
        if self._outstanding:
            raise RuntimeError(
                f"{self._outstanding} jobs are still out; finish them before closing the engine"
            )
        self.stop_transactions()
        total = Outcome()
        self._drain(self.turn([]), total)
        self._close_task(self._rewrites)
        self.checkpointer.closing = True
        self.checkpoint()
        self._drain(self.turn([]), total)
        self.closed = True
        self.reader.close()
        for file in [*self.wal.files, *([self.wal.spare] if self.wal.spare else [])]:
            self._disk.close(file.handle)
        return total

    def stop_cold(self) -> None:
        """Give up what is at work in the cold tier: its jobs are not waited for, and what they find is not looked at.
        What is being written again is given up as well, and what transactions append put off, with the next piece of it."""
        if self._cold_stopped:
            return
        self._cold_stopped = self.reclaimer.stopped = True
        self.cold.stop()
        self.consolidator.stop()
        self.shard.put_off_decided()
        self._close_task(self._aside)

    def stop_transactions(self) -> None:
        """What is decided goes on after the next start."""
        self._sinks_stopped = True
        for lane in self._sinks.values():
            self._close_task(lane)
        self._sinks = {}

    def _drain(self, outcome: Outcome, total: Outcome) -> None:
        """Run jobs and turns until nothing is left to do."""
        queue = [outcome]
        while queue:
            outcome = queue.pop()
            total.replies += outcome.replies
            for job in outcome.jobs:
                error: BaseException | None = None
                try:
                    job.run()
                except OSError as failure:
                    error = failure
                queue.append(self.finish(job, error))
            if not queue and self.shard.read_only is None and self._has_background_work():
                queue.append(self.turn([]))

    def _has_background_work(self) -> bool:
        shard = self.shard
        return bool(
            self._main.task is not None
            or self._checkpoint_wanted
            or (shard.gone and self._removable())
            or self._ready_erases()
        )

    def check_invariants(self) -> None:
        self.shard.check_invariants()
